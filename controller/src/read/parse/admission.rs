//! Pure: admission of objects for an API server: requests and validation here, defaults in `mutation.rs`.
//!
//! Sources: knative/serving `pkg/apis/serving/{v1,v1beta1}` and `pkg/apis/autoscaling/v1alpha1` at 98e5ef9,
//! knative/networking `pkg/apis/networking/v1alpha1` at 17b28c6.

use std::collections::BTreeMap;

use k8s_openapi::{api::core::v1::PodSpec, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use serde_json::{Map, Value};

use super::{
    apiserver_rules, diff,
    known_keys::{self, MetadataPlace},
    local_warnings, metadata, probe, revision_template, security,
    settings::{RuleSettings, TemplateParent},
    standby_warnings, tcp_warnings, traffic,
    typed::parse_typed,
};
use crate::model::{
    cluster_state::PlatformKind,
    knative::{RevisionSpec, TrafficTarget, user_container},
    problem::Problem,
};

mod internal_kinds;
mod mutation;

pub use mutation::apply_defaults;

/// Kinds of objects that admission handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmittedKind {
    /// Kind Service of API version `serving.knative.dev/v1`.
    Service,
    /// Kind Configuration of API version `serving.knative.dev/v1`.
    Configuration,
    /// Kind Revision of API version `serving.knative.dev/v1`.
    Revision,
    /// Kind Route of API version `serving.knative.dev/v1`.
    Route,
    /// Kind DomainMapping of API version `serving.knative.dev/v1beta1`.
    DomainMapping,
    /// Kind PodAutoscaler of API version `autoscaling.internal.knative.dev/v1alpha1`.
    PodAutoscaler,
    /// Kind Metric of API version `autoscaling.internal.knative.dev/v1alpha1`.
    Metric,
    /// Kind ServerlessService of API version `networking.internal.knative.dev/v1alpha1`.
    ServerlessService,
    /// Kind ClusterDomainClaim of API version `networking.internal.knative.dev/v1alpha1`.
    ClusterDomainClaim,
}

impl AdmittedKind {
    /// Returns the kind of an API group and a kind's name.
    pub fn from_group_kind(group: &str, kind: &str) -> Option<Self> {
        const AUTOSCALING: &str = "autoscaling.internal.knative.dev";
        const NETWORKING: &str = "networking.internal.knative.dev";
        Some(match (group, kind) {
            ("serving.knative.dev", "Service") => Self::Service,
            ("serving.knative.dev", "Configuration") => Self::Configuration,
            ("serving.knative.dev", "Revision") => Self::Revision,
            ("serving.knative.dev", "Route") => Self::Route,
            ("serving.knative.dev", "DomainMapping") => Self::DomainMapping,
            (AUTOSCALING, "PodAutoscaler") => Self::PodAutoscaler,
            (AUTOSCALING, "Metric") => Self::Metric,
            (NETWORKING, "ServerlessService") => Self::ServerlessService,
            (NETWORKING, "ClusterDomainClaim") => Self::ClusterDomainClaim,
            _ => return None,
        })
    }

    /// Returns the place of the PodSpec in an object of this kind: as JSON pointer and as field path.
    fn pod_spec_location(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Service | Self::Configuration => {
                Some(("/spec/template/spec", "spec.template.spec"))
            }
            Self::Revision => Some(("/spec", "spec")),
            _ => None,
        }
    }
}

/// Request of the API server to admit one object, with everything that the decision depends on.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionRequest<'a> {
    /// Kind of the object.
    pub kind: AdmittedKind,
    /// Object as it is to be stored.
    pub object: &'a Value,
    /// Object as it is stored; `None` if it is being created.
    pub old: Option<&'a Value>,
    /// User of the request; `None` if the controller itself asks.
    pub user: Option<&'a str>,
    /// Platform and settings that the rules depend on.
    pub settings: RuleSettings<'a>,
}

/// Checks an object against all rules, and collects warnings.
pub fn validate(request: &AdmissionRequest<'_>) -> ValidationResult {
    let mut result = ValidationResult::default();
    let problems = &mut result.problems;
    let meta: ObjectMeta = parse_typed(request.object.get("metadata"), "metadata", problems);
    match request.kind {
        AdmittedKind::Service | AdmittedKind::Configuration | AdmittedKind::Route => {
            check_serving_kind(request, &meta, problems)
        }
        AdmittedKind::Revision => check_revision(request, &meta, problems),
        AdmittedKind::DomainMapping => {
            internal_kinds::check_domain_mapping(request, &meta, problems)
        }
        AdmittedKind::PodAutoscaler => {
            internal_kinds::check_pod_autoscaler(request, &meta, problems)
        }
        AdmittedKind::ServerlessService => {
            internal_kinds::check_serverless_service(request, &meta, problems)
        }
        AdmittedKind::Metric => metadata::check_name(&meta, problems),
        AdmittedKind::ClusterDomainClaim => internal_kinds::check_domain_claim(request, problems),
    }
    collect_warnings(request, &meta, &mut result.warnings);
    result
}

/// Result of validation: broken rules, and warnings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ValidationResult {
    /// Broken rules; an empty list admits the object.
    pub problems: Vec<Problem>,
    /// Warnings, which the user gets although the object is admitted.
    pub warnings: Vec<Problem>,
}

/// Checks a Service, Configuration or Route.
fn check_serving_kind(
    request: &AdmissionRequest<'_>,
    meta: &ObjectMeta,
    problems: &mut Vec<Problem>,
) {
    let annotations = meta.annotations.clone().unwrap_or_default();
    metadata::check_name(meta, problems);
    metadata::refuse_autoscaling_annotations(&annotations, problems);
    if request.kind != AdmittedKind::Configuration {
        metadata::check_route_annotations(&annotations, problems);
    }
    if request.kind != AdmittedKind::Service {
        metadata::check_service_owner(meta, problems);
    }
    let spec = request.object.get("spec").filter(|spec| !spec.is_null());
    let Some(Value::Object(spec)) = spec else {
        problems.push(Problem::missing("spec"));
        return;
    };
    if request.kind != AdmittedKind::Route {
        check_template(spec, TemplateParent::from_metadata(meta), &request.settings, problems);
    }
    if request.kind != AdmittedKind::Configuration {
        let problem_count = problems.len();
        let targets: Vec<TrafficTarget> =
            parse_typed(spec.get("traffic"), "spec.traffic", problems);
        // An unreadable list is reported once, without the errors of an empty one.
        if problems.len() == problem_count {
            traffic::check_targets(&targets, request.kind == AdmittedKind::Service, problems);
        }
    }
    let Some(old) = request.old else { return };
    // Child objects do not have the annotations that `record_user` writes, so there is nothing to protect.
    let owned = meta.owner_references.as_ref().is_some_and(|all| !all.is_empty());
    if request.kind == AdmittedKind::Service || !owned {
        check_creator(old, request.object, &annotations, problems);
    }
    if request.kind != AdmittedKind::Route {
        check_name_change(old, request.object, problems);
    }
}

/// Checks the template of a Service or Configuration.
fn check_template(
    spec: &Map<String, Value>,
    parent: TemplateParent<'_>,
    settings: &RuleSettings<'_>,
    problems: &mut Vec<Problem>,
) {
    const AT: &str = "spec.template";
    let empty = |value: &Value| value.as_object().is_some_and(Map::is_empty);
    let Some(template) = spec.get("template").filter(|it| !it.is_null() && !empty(it)) else {
        problems.push(Problem::missing(AT));
        return;
    };
    let at = format!("{AT}.metadata");
    let meta: ObjectMeta = parse_typed(template.get("metadata"), &at, problems);
    // The API server checks only the metadata of the object itself, and would refuse that of the pods much later.
    apiserver_rules::check_template_metadata(&template["metadata"], &at, problems);
    let spec = revision_template::parse_revision_spec(
        template.get("spec"),
        &format!("{AT}.spec"),
        settings,
        problems,
    );
    metadata::check_revision_name(&meta, parent, problems);
    let annotations = meta.annotations.unwrap_or_default();
    revision_template::check_annotations(
        &annotations,
        &spec,
        &format!("{at}.annotations"),
        settings,
        problems,
    );
}

/// Refuses any change of a template that keeps its name, since the Revision of that name exists already.
fn check_name_change(old: &Value, new: &Value, problems: &mut Vec<Problem>) {
    let template = |object: &Value| object.pointer("/spec/template").cloned().unwrap_or_default();
    let (old, new) = (template(old), template(new));
    let name = |template: &Value| {
        template.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    if name(&new).is_empty() || name(&new) != name(&old) {
        return;
    }
    if let Some(diff) = diff::describe_changes(&old, &new) {
        let message = "Saw the following changes without a name change (-old +new)";
        problems.push(Problem::new("spec.template.metadata.name", message).with_details(diff));
    }
}

fn check_creator(
    old: &Value,
    new: &Value,
    annotations: &BTreeMap<String, String>,
    problems: &mut Vec<Problem>,
) {
    // Problems of the old object do not count: it was admitted.
    let old_meta: ObjectMeta = parse_typed(old.get("metadata"), "", &mut Vec::new());
    let old_annotations = old_meta.annotations.unwrap_or_default();
    let spec = |object: &Value| object.get("spec").cloned().unwrap_or_default();
    metadata::check_creator(
        &old_annotations,
        annotations,
        diff::is_equivalent(&spec(old), &spec(new)),
        problems,
    );
}

/// Checks a Revision: at its creation by all rules, and later for changes of its spec.
fn check_revision(request: &AdmissionRequest<'_>, meta: &ObjectMeta, problems: &mut Vec<Problem>) {
    metadata::check_name(meta, problems);
    metadata::check_revision_owner(meta, problems);
    // The spec was checked at its creation. Another check, by stricter settings, would refuse even a new label.
    if let Some(old) = request.old {
        let spec = |object: &Value| object.get("spec").cloned().unwrap_or_default();
        if let Some(diff) = diff::describe_changes(&spec(old), &spec(request.object)) {
            let message = "Immutable fields changed (-old +new)";
            problems.push(Problem::new("spec", message).with_details(diff));
        }
        return;
    }
    let spec = revision_template::parse_revision_spec(
        request.object.get("spec"),
        "spec",
        &request.settings,
        problems,
    );
    let annotations = meta.annotations.clone().unwrap_or_default();
    // Annotations were checked in the template, but the autoscaler reads the Revision's own, too.
    if let Err(more) = request.settings.autoscaler.strict_policy(
        &annotations,
        concurrency_limit(&spec),
        "metadata.annotations",
    ) {
        problems.extend(more);
    }
    let standby = &request.settings.autoscaler.standby;
    if let Err(more) = standby.strict_policy(&annotations, "metadata.annotations") {
        problems.extend(more);
    }
}

fn concurrency_limit(spec: &RevisionSpec) -> u32 {
    spec.container_concurrency.and_then(|limit| u32::try_from(limit).ok()).unwrap_or(0)
}

/// Collects the warnings for an object: keys and settings that have no effect, or soon another one.
fn collect_warnings(
    request: &AdmissionRequest<'_>,
    meta: &ObjectMeta,
    warnings: &mut Vec<Problem>,
) {
    let place = match request.kind {
        AdmittedKind::Service => MetadataPlace::Service,
        AdmittedKind::Configuration => MetadataPlace::Configuration,
        AdmittedKind::Route => MetadataPlace::Route,
        AdmittedKind::DomainMapping => MetadataPlace::DomainMapping,
        AdmittedKind::Revision => MetadataPlace::Revision,
        AdmittedKind::PodAutoscaler | AdmittedKind::Metric | AdmittedKind::ServerlessService => {
            return internal_kinds::warn_without_effect(request, meta, warnings);
        }
        AdmittedKind::ClusterDomainClaim => return,
    };
    known_keys::warn_unused_keys(meta, place, "metadata", warnings);
    known_keys::warn_ingress_class(meta, place, &request.settings, warnings);
    if request.kind == AdmittedKind::DomainMapping {
        tcp_warnings::warn_passthrough_settings(meta, request.object, warnings);
    }
    if request.kind != AdmittedKind::Service && request.kind != AdmittedKind::Configuration {
        return;
    }
    let (at, inner) = ("spec.template.metadata", request.object.pointer("/spec/template/metadata"));
    known_keys::warn_template_metadata(inner, at, warnings);
    let inner: ObjectMeta = parse_typed(inner, at, &mut Vec::new());
    known_keys::warn_unused_keys(&inner, MetadataPlace::Template, at, warnings);
    let spec = request.object.pointer("/spec/template/spec").unwrap_or(&Value::Null);
    // A Configuration has no hosts, and a warning about its annotations exists already.
    let no_meta = ObjectMeta::default();
    let route_meta = if request.kind == AdmittedKind::Service { meta } else { &no_meta };
    tcp_warnings::warn_http_settings(route_meta, &inner, spec, warnings);
    let pod: PodSpec = serde_json::from_value(spec.clone()).unwrap_or_default();
    let annotations = inner.annotations.unwrap_or_default();
    let (config, at) = (request.settings.autoscaler, "spec.template.metadata.annotations");
    standby_warnings::warn_standby(&annotations, &pod, config, at, warnings);
    match request.settings.platform {
        PlatformKind::Local => local_warnings::warn_ignored_settings(meta, &pod, warnings),
        // Policies that a cluster may enforce later do not concern a single machine.
        PlatformKind::Kubernetes => {
            security::warn_insecure_defaults(&pod, "spec.template.spec", warnings)
        }
    }
    let serving = user_container::serving_index(&pod.containers);
    if let Some(container) = pod.containers.get(serving) {
        probe::warn_initial_delay(
            container,
            &format!("spec.template.spec.containers[{serving}]"),
            warnings,
        );
    }
}

#[cfg(test)]
mod tests;
