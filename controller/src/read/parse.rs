//! Pure: parsing of manifests into checked types, or into every broken rule with its field, its value and advice.
//!
//! Rules and texts are those of Knative's webhooks (knative/serving `pkg/apis/serving` at 98e5ef9), so that a manifest
//! refused here is refused there for the same reason. Both platforms use the same functions. [`service_manifest`] reads
//! a file of the local node into a [`ServiceManifest`]. [`admission`] defaults and validates objects for an API server.

use std::{collections::BTreeMap, sync::Arc};

use common::wire::{NamespacedName, is_dns_label};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Map, Value};

use crate::model::{
    cluster_state::{CompactStringMap, PlatformKind, ServiceManifest, TrafficSpec},
    config_maps::{Features, RevisionDefaults},
    knative::{API_VERSION, RevisionTemplate, TrafficTarget},
    problem::{Problem, problems_line},
    scale_policy::{self, ScalePolicyConfig},
};

pub mod admission;
mod apiserver_rules;
mod container;
mod defaults;
mod diff;
pub(crate) mod dns_names;
mod documents;
pub(crate) mod field_mask;
pub(crate) mod known_keys;
mod local_warnings;
mod metadata;
mod pod;
mod probe;
mod revision_template;
mod security;
pub mod settings;
mod standby_warnings;
mod tcp_warnings;
mod traffic;
mod typed;
mod volume;

pub(crate) use defaults::RESPONSE_START_TIMEOUT_S;
pub use settings::RuleSettings;
use settings::TemplateParent;
use typed::{check_known_fields, parse_typed};

/// Maximum length of a name on the local node, so that `-00001` can follow; Knative cuts longer ones and adds a hash.
const MAX_NAME_BYTES: usize = 57;

/// Result of one document of a manifest file.
#[derive(Clone, Debug, PartialEq)]
pub enum ManifestDocument {
    /// A service to run, by its name.
    Service { name: NamespacedName, manifest: ServiceManifest },
    /// A document that cannot be used: its name, as far as it is readable, and the reason.
    Refused { name: Option<NamespacedName>, reason: String },
}

/// Parses every document of a file. A document that cannot be read hides no other one.
pub fn manifest_documents(
    text: &(impl AsRef<[u8]> + ?Sized),
    config: &ScalePolicyConfig,
) -> Vec<ManifestDocument> {
    let values = documents::yaml_documents(text.as_ref());
    let to_document = |value: Result<Value, String>| match value {
        // An empty document, as behind a last `---`.
        Ok(Value::Null) => None,
        Ok(value) => Some(match service_manifest(&value, config) {
            Ok((name, manifest)) => ManifestDocument::Service { name, manifest },
            Err(problems) => ManifestDocument::Refused {
                name: document_name(&value),
                reason: problems_line(&problems),
            },
        }),
        Err(error) => Some(ManifestDocument::Refused {
            name: None,
            reason: format!("not readable as YAML: {error}"),
        }),
    };
    values.into_iter().filter_map(to_document).collect()
}

/// Checks one Service for the local node and sets its defaults.
pub fn service_manifest(
    value: &Value,
    config: &ScalePolicyConfig,
) -> Result<(NamespacedName, ServiceManifest), Vec<Problem>> {
    let mut problems = Vec::new();
    let Value::Object(object) = value else {
        return Err(vec![Problem::new("", "must be an object with apiVersion, kind and metadata")]);
    };
    check_kind(object)?;
    check_known_fields(
        object,
        "",
        &["apiVersion", "kind", "metadata", "spec", "status"],
        &mut problems,
    );
    let meta: ObjectMeta = parse_typed(object.get("metadata"), "metadata", &mut problems);
    let name = check_name(&meta, object.get("metadata"), &mut problems);
    let annotations = meta.annotations.clone().unwrap_or_default();
    metadata::refuse_autoscaling_annotations(&annotations, &mut problems);
    metadata::check_route_annotations(&annotations, &mut problems);
    // Without a spec, every further problem would only follow from that.
    let mut spec = match object.get("spec") {
        Some(Value::Object(spec)) => spec.clone(),
        None | Some(Value::Null) => {
            problems.push(Problem::missing("spec.template"));
            return Err(problems);
        }
        Some(_) => {
            problems.push(Problem::new("spec", "must be an object"));
            return Err(problems);
        }
    };
    check_known_fields(&spec, "spec", &["template", "traffic"], &mut problems);
    let (defaults, features) = (RevisionDefaults::default(), Features::default());
    let settings = local_settings(&defaults, &features, config);
    let template = parse_template(&mut spec, &meta, &name.name, &settings, &mut problems);
    let traffic = parse_traffic(&mut spec, &mut problems);
    if !problems.is_empty() {
        return Err(problems);
    }
    build_manifest(name, &meta, &template, traffic)
}

/// Returns warnings about a Service for the local node: settings without effect, and retired names.
pub fn service_warnings(value: &Value, config: &ScalePolicyConfig) -> Vec<Problem> {
    let (defaults, features) = (RevisionDefaults::default(), Features::default());
    let settings = local_settings(&defaults, &features, config);
    let request = admission::AdmissionRequest {
        kind: admission::AdmittedKind::Service,
        object: value,
        old: None,
        user: None,
        settings,
    };
    admission::validate(&request).warnings
}

/// Parses a Service as an API server holds it.
///
/// Admission checked the Service by the settings of its time, and present settings do not invalidate it. Only content
/// that cannot be read or run at all is refused. A Service that never passed admission gets its defaults here.
pub fn observed_service(
    value: &Value,
    settings: RuleSettings<'_>,
) -> Result<(NamespacedName, ServiceManifest), Vec<Problem>> {
    let mut problems = Vec::new();
    // Admission always sets `timeoutSeconds`, so an object without it never passed admission.
    let is_unadmitted =
        value.pointer("/spec/template/spec/timeoutSeconds").is_none_or(Value::is_null);
    let request = admission::AdmissionRequest {
        kind: admission::AdmittedKind::Service,
        object: value,
        old: None,
        user: None,
        settings,
    };
    let mut filled =
        if is_unadmitted { admission::apply_defaults(&request).0 } else { value.clone() };
    let meta: ObjectMeta = parse_typed(filled.get("metadata"), "metadata", &mut problems);
    let (name, namespace) = (meta.name.clone(), meta.namespace.clone());
    let name = NamespacedName::new(namespace.unwrap_or_default(), name.unwrap_or_default());
    let Some(Value::Object(spec)) = filled.get_mut("spec") else {
        return Err(vec![Problem::missing("spec")]);
    };
    let template = observed_template(spec.get("template"), &name.name, &mut problems);
    let traffic = parse_traffic(spec, &mut problems);
    if !problems.is_empty() {
        return Err(problems);
    }
    build_manifest(name, &meta, &template, traffic)
}

/// Parses a template that an API server holds. Only what cannot run at all is a problem.
fn observed_template(
    value: Option<&Value>,
    service: &str,
    problems: &mut Vec<Problem>,
) -> RevisionTemplate {
    const AT: &str = "spec.template";
    let Some(value) = value else {
        problems.push(Problem::missing(AT));
        return RevisionTemplate::default();
    };
    let mut template: RevisionTemplate =
        serde_json::from_value(value.clone()).unwrap_or_else(|error| {
            problems.push(Problem::new(AT, format!("wrong type: {error}")));
            RevisionTemplate::default()
        });
    let parent = TemplateParent { name: service, generate_name: "" };
    metadata::check_revision_name(&template.metadata, parent, problems);
    let images = template.spec.pod.containers.iter().map(|it| it.image.as_deref());
    // A wrong type leaves an empty template, which is not a missing container besides.
    if problems.is_empty() && images.clone().count() == 0 {
        problems.push(Problem::missing(format!("{AT}.spec.containers")));
    }
    for (index, _) in images.enumerate().filter(|(_, it)| it.is_none_or(str::is_empty)) {
        problems.push(Problem::missing(format!("{AT}.spec.containers[{index}].image")));
    }
    template.metadata = template_metadata(std::mem::take(&mut template.metadata));
    template
}

/// Returns the part of the metadata that a template keeps; all other fields belong to the API server.
fn template_metadata(meta: ObjectMeta) -> ObjectMeta {
    ObjectMeta {
        name: meta.name.filter(|name| !name.is_empty()),
        labels: meta.labels.filter(|labels| !labels.is_empty()),
        annotations: meta.annotations.filter(|annotations| !annotations.is_empty()),
        ..ObjectMeta::default()
    }
}

fn build_manifest(
    name: NamespacedName,
    meta: &ObjectMeta,
    template: &RevisionTemplate,
    traffic: Arc<[TrafficSpec]>,
) -> Result<(NamespacedName, ServiceManifest), Vec<Problem>> {
    let text = serde_json::to_string(template)
        .map_err(|error| vec![Problem::new("spec.template", error.to_string())])?;
    let pairs = |map: Option<&BTreeMap<String, String>>| {
        map.map(CompactStringMap::from).unwrap_or_default()
    };
    let manifest = ServiceManifest {
        labels: pairs(meta.labels.as_ref()),
        annotations: pairs(meta.annotations.as_ref()),
        revision_name: template.metadata.name.as_deref().map(Into::into),
        template: Arc::from(text),
        traffic,
    };
    Ok((name, manifest))
}

fn local_settings<'a>(
    defaults: &'a RevisionDefaults,
    features: &'a Features,
    autoscaler: &'a ScalePolicyConfig,
) -> RuleSettings<'a> {
    RuleSettings {
        platform: PlatformKind::Local,
        defaults,
        features,
        autoscaler,
        cluster_domain: "cluster.local",
        trusts_ingresses: false,
    }
}

/// Returns the name in a document, as far as it can be read.
fn document_name(value: &Value) -> Option<NamespacedName> {
    let field = |name| value.get("metadata").and_then(|meta| meta.get(name));
    let namespace = match field("namespace") {
        None | Some(Value::Null) => "default",
        Some(namespace) => namespace.as_str()?,
    };
    field("name")
        .and_then(Value::as_str)
        .filter(|name| is_dns_label(name) && is_dns_label(namespace))
        .map(|name| NamespacedName::new(namespace, name))
}

fn check_kind(object: &Map<String, Value>) -> Result<(), Vec<Problem>> {
    let text = |field| object.get(field).and_then(Value::as_str).unwrap_or_default();
    if text("apiVersion") == API_VERSION && text("kind") == "Service" {
        return Ok(());
    }
    let kind = match (text("apiVersion"), text("kind")) {
        ("", "") => "an object without apiVersion and kind".to_owned(),
        (version, kind) => format!("{version}/{kind}"),
    };
    let advice =
        format!("apply a {API_VERSION} Service; Configuration, Revision and Route follow from it");
    Err(vec![Problem::invalid("kind", kind).with_advice(advice)])
}

/// Returns the name of the Service, and collects its faults. Without a namespace it is in `default`.
fn check_name(
    meta: &ObjectMeta,
    raw: Option<&Value>,
    problems: &mut Vec<Problem>,
) -> NamespacedName {
    // A wrong type elsewhere in the metadata, already reported, leaves `meta` empty, but the raw object may hold the
    // name.
    let written = raw.and_then(|meta| meta.get("name")).filter(|name| !name.is_null());
    let name = written.and_then(Value::as_str).or(meta.name.as_deref()).unwrap_or_default();
    let name = name.to_owned();
    if name.is_empty() {
        let is_object = raw.is_none_or(|meta| meta.is_object() || meta.is_null());
        if is_object && written.is_none_or(Value::is_string) {
            problems.push(Problem::missing("metadata.name"));
        }
    } else if !dns_names::dns1035_errors(&name).is_empty() || name.len() > MAX_NAME_BYTES {
        let advice = "use 1 to 57 of a-z, 0-9 and -, beginning with a letter";
        problems.push(Problem::invalid("metadata.name", &name).with_advice(advice));
    }
    let namespace = meta.namespace.clone().unwrap_or_else(|| "default".into());
    if !is_dns_label(&namespace) {
        problems.push(Problem::invalid("metadata.namespace", &namespace));
    }
    NamespacedName::new(namespace, name)
}

/// Sets the defaults of a template, and collects every broken rule.
fn parse_template(
    spec: &mut Map<String, Value>,
    service: &ObjectMeta,
    name: &str,
    settings: &RuleSettings<'_>,
    problems: &mut Vec<Problem>,
) -> RevisionTemplate {
    const META: &str = "spec.template.metadata";
    let Some(value @ Value::Object(_)) = spec.get_mut("template") else {
        problems.push(Problem::missing("spec.template"));
        return RevisionTemplate::default();
    };
    // A file has no former state to compare with, so that each reading counts as a creation.
    let is_creation = true;
    defaults::set_template_defaults(value, service, is_creation, settings);
    let Value::Object(template) = value else { return RevisionTemplate::default() };
    check_known_fields(template, "spec.template", &["metadata", "spec"], problems);
    let meta: ObjectMeta = parse_typed(template.get("metadata"), META, problems);
    let spec = revision_template::parse_revision_spec(
        template.get("spec"),
        "spec.template.spec",
        settings,
        problems,
    );
    metadata::check_revision_name(&meta, TemplateParent { name, generate_name: "" }, problems);
    let annotations = meta.annotations.clone().unwrap_or_default();
    let at = format!("{META}.annotations");
    revision_template::check_annotations(&annotations, &spec, &at, settings, problems);
    // Admission accepts other classes, which need an autoscaler of Kubernetes.
    if let Some(class) = annotations.get(&format!("{}class", scale_policy::AUTOSCALING_PREFIX))
        && class != scale_policy::KPA_CLASS
    {
        let problem =
            Problem::invalid(format!("{at}.{}class", scale_policy::AUTOSCALING_PREFIX), class);
        let advice = format!("only {} scales without Kubernetes", scale_policy::KPA_CLASS);
        problems.push(problem.with_advice(advice));
    }
    let metadata = template_metadata(ObjectMeta { annotations: Some(annotations), ..meta });
    RevisionTemplate { metadata, spec }
}

/// Checks traffic targets. No targets at all mean everything to the latest Revision.
fn parse_traffic(spec: &mut Map<String, Value>, problems: &mut Vec<Problem>) -> Arc<[TrafficSpec]> {
    let is_service = true;
    defaults::set_traffic_defaults(spec, is_service);
    let problem_count = problems.len();
    let targets: Vec<TrafficTarget> = parse_typed(spec.get("traffic"), "spec.traffic", problems);
    // An unreadable list was reported as such, and is not reported as missing besides.
    if problems.len() == problem_count || !targets.is_empty() {
        traffic::check_targets(&targets, is_service, problems);
    }
    let percent = |target: &TrafficTarget| target.percent.and_then(|it| u8::try_from(it).ok());
    let spec_of = |target: &TrafficTarget| TrafficSpec {
        tag: target.tag.as_deref().filter(|tag| !tag.is_empty()).map(Into::into),
        revision_name: target
            .revision_name
            .as_deref()
            .filter(|name| !name.is_empty())
            .map(Into::into),
        configuration_name: None,
        percent: percent(target).unwrap_or(0),
    };
    targets.iter().map(spec_of).collect()
}

#[cfg(test)]
mod tests;
