//! Pure: admission of DomainMapping and of Knative's internal kinds.

use std::collections::BTreeMap;

use common::wire::{HstsPolicy, PathPrefix, is_secret_name};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Map, Value};

use super::{AdmissionRequest, AdmittedKind, check_creator, mutation::annotations_mut};
use crate::{
    model::{cluster_state::DomainSpec, knative::key, problem::Problem, scale_policy},
    read::parse::{defaults, dns_names, metadata},
};

/// Sets the namespace of a DomainMapping's reference to its own, where it is absent.
pub(super) fn set_reference_namespace_default(object: &mut Value, meta: &ObjectMeta) {
    let Some(namespace) = meta.namespace.as_deref() else { return };
    if let Some(Value::Object(reference)) = object.pointer_mut("/spec/ref")
        && defaults::text_field(reference, "namespace").is_empty()
    {
        reference.insert("namespace".into(), namespace.into());
    }
}

/// Sets the annotations for a PodAutoscaler's class and metric, where they are absent.
pub(super) fn set_class_and_metric_defaults(object: &mut Value) {
    let Some(annotations) = annotations_mut(object) else { return };
    let (class, metric) = (
        format!("{}class", scale_policy::AUTOSCALING_PREFIX),
        format!("{}metric", scale_policy::AUTOSCALING_PREFIX),
    );
    // The class comes first, since the default metric depends on it.
    annotations.entry(&class).or_insert_with(|| scale_policy::KPA_CLASS.into());
    let class = defaults::text_field(annotations, &class);
    annotations.entry(&metric).or_insert_with(|| default_metric(&class).into());
}

/// Returns the default metric of an autoscaler class.
fn default_metric(class: &str) -> &'static str {
    if class == scale_policy::KPA_CLASS { "concurrency" } else { "cpu" }
}

/// Checks a DomainMapping: its name or host, its annotations, its certificate and its target.
pub(super) fn check_domain_mapping(
    request: &AdmissionRequest<'_>,
    meta: &ObjectMeta,
    problems: &mut Vec<Problem>,
) {
    let name = meta.name.as_deref().unwrap_or_default();
    // The name is the domain, which a generated suffix would change.
    if meta.generate_name.as_deref().is_some_and(|it| !it.is_empty()) {
        problems.push(Problem::disallowed("metadata.generateName"));
    }
    let annotation = |key: &str| meta.annotations.as_ref()?.get(key).map(String::as_str);
    match annotation(key::HOST) {
        // The name is not the host then, and the API server checks it.
        Some(host) => {
            let at = format!("metadata.annotations.{}", key::HOST);
            let domain = host.strip_prefix("*.").unwrap_or(host);
            check_not_cluster_local(request, domain, &at, problems);
        }
        None => {
            let at = "metadata.name";
            if let Some(error) = qualified_name_error(name) {
                problems.push(Problem::new(at, format!("invalid name {name:?}: {error}")));
            }
            check_not_cluster_local(request, name, at, problems);
        }
    }
    let (prefix, strip) = (annotation(key::PATH_PREFIX), annotation(key::STRIP_PREFIX));
    for fault in DomainSpec::annotation_faults(annotation(key::HOST), prefix, strip) {
        let at = format!("metadata.annotations.{}", fault.key);
        problems.push(Problem::invalid(at, fault.value).with_details(fault.rule));
    }
    if let Some(old) = request.old {
        let annotations = meta.annotations.clone().unwrap_or_default();
        check_creator(old, request.object, &annotations, problems);
    }
    if let Some(annotations) = &meta.annotations {
        check_client_auth(annotations, problems);
        check_hsts(annotations, problems);
        check_tls_passthrough(annotations, problems);
        metadata::check_disabled_tls(annotations, problems);
    }
    if let Some(tls) = request.object.pointer("/spec/tls").filter(|it| !it.is_null()) {
        check_certificate_secret(tls, problems);
    }
    let Some(Value::Object(reference)) = request.object.pointer("/spec/ref") else {
        problems.push(Problem::missing("spec.ref"));
        return;
    };
    check_reference(reference, meta, problems);
}

/// Refuses names below the cluster's domain, which belong to Kubernetes Services.
fn check_not_cluster_local(
    request: &AdmissionRequest<'_>,
    name: &str,
    at: &str,
    problems: &mut Vec<Problem>,
) {
    let domain = request.settings.cluster_domain;
    if name.ends_with(&format!(".{domain}")) || name == domain {
        let message = format!(
            "invalid name {name:?}: must not be a subdomain of cluster local domain {domain:?}"
        );
        problems.push(Problem::new(at, message));
    }
}

/// Checks the Secret of `spec.tls`. In Knative the schema of the CRD requires its name.
fn check_certificate_secret(tls: &Value, problems: &mut Vec<Problem>) {
    const AT: &str = "spec.tls.secretName";
    let name = tls["secretName"].as_str().unwrap_or_default();
    if name.is_empty() {
        problems.push(Problem::missing(AT));
    } else if !is_secret_name(name) {
        problems.push(Problem::invalid(AT, name));
    }
}

/// Checks Rouse's own annotations for certificates of clients.
fn check_client_auth(annotations: &BTreeMap<String, String>, problems: &mut Vec<Problem>) {
    let at = |key: &str| format!("metadata.annotations.{key}");
    let (ca, mode) = (annotations.get(key::CLIENT_CA), annotations.get(key::CLIENT_AUTH));
    if let Some(name) = ca.filter(|name| !is_secret_name(name)) {
        let problem = Problem::invalid(at(key::CLIENT_CA), name);
        problems.push(problem.with_details("it must be the name of a Secret"));
    }
    if let Some(mode) = mode.filter(|it| !matches!(it.as_str(), "require" | "optional")) {
        let problem = Problem::invalid(at(key::CLIENT_AUTH), mode);
        problems.push(problem.with_details("use require or optional"));
    }
    // Without authorities no certificate is valid.
    if mode.is_some() && ca.is_none() {
        problems.push(Problem::missing(at(key::CLIENT_CA)));
    }
}

/// Checks Rouse's own annotation for `Strict-Transport-Security`.
fn check_hsts(annotations: &BTreeMap<String, String>, problems: &mut Vec<Problem>) {
    let Some(text) = annotations.get(key::HSTS) else { return };
    if let Err(fault) = HstsPolicy::parse(text) {
        let problem = Problem::invalid(format!("metadata.annotations.{}", key::HSTS), text);
        problems.push(problem.with_details(fault.to_string()));
    }
}

/// Checks Rouse's own annotation for TLS that is passed through. The gateway then has no say in it.
fn check_tls_passthrough(annotations: &BTreeMap<String, String>, problems: &mut Vec<Problem>) {
    let at = |key: &str| format!("metadata.annotations.{key}");
    let Some(value) = annotations.get(key::TLS) else { return };
    if value != key::TLS_PASSTHROUGH {
        let problem = Problem::invalid(at(key::TLS), value);
        problems.push(problem.with_details("use passthrough"));
        return;
    }
    if let Some(ca) = annotations.get(key::CLIENT_CA) {
        let problem = Problem::invalid(at(key::CLIENT_CA), ca);
        problems.push(problem.with_details("TLS is passed through, so the server has to ask"));
    }
    // A prefix that is none has a problem already.
    let prefix = annotations.get(key::PATH_PREFIX);
    let has_paths = |it: &&String| PathPrefix::parse(it).is_ok_and(|it| it != PathPrefix::ALL);
    if let Some(prefix) = prefix.filter(has_paths) {
        let problem = Problem::invalid(at(key::PATH_PREFIX), prefix);
        problems.push(problem.with_details("TLS is passed through, so the gateway reads no paths"));
    }
}

/// Returns the reason why `name` is no fully qualified domain name (apimachinery `IsFullyQualifiedDomainName`).
fn qualified_name_error(name: &str) -> Option<String> {
    // A final dot marks a fully qualified name and is allowed.
    let bare = name.strip_suffix('.').unwrap_or(name);
    if bare.is_empty() {
        return Some("name: Required value".into());
    }
    if let Some(error) = dns_names::subdomain_errors(bare).first() {
        return Some(format!("name: Invalid value: {name:?}: {error}"));
    }
    if !bare.contains('.') {
        let error = "should be a domain with at least two segments separated by dots";
        return Some(format!("name: Invalid value: {name:?}: {error}"));
    }
    let long = bare.split('.').find(|label| label.len() > 63)?;
    Some(format!("name: Invalid value: {long:?}: must be no more than 63 characters"))
}

/// Checks the reference of a DomainMapping (knative/pkg `apis/duck/v1/knative_reference.go`).
fn check_reference(reference: &Map<String, Value>, meta: &ObjectMeta, problems: &mut Vec<Problem>) {
    for name in ["apiVersion", "kind", "name", "namespace"] {
        if defaults::text_field(reference, name).is_empty() {
            problems.push(Problem::missing(format!("spec.ref.{name}")));
        }
    }
    let (actual, expected) = (
        defaults::text_field(reference, "namespace"),
        meta.namespace.as_deref().unwrap_or_default(),
    );
    // A mapping must not publish a service of another namespace.
    if !actual.is_empty() && !expected.is_empty() && actual != expected {
        let problem = Problem::new("spec.ref.namespace", "mismatched namespaces");
        let details = format!("parent namespace: {expected:?} does not match ref: {actual:?}");
        problems.push(problem.with_details(details));
    }
}

/// Checks a PodAutoscaler by the rules of the autoscaler's annotations.
pub(super) fn check_pod_autoscaler(
    request: &AdmissionRequest<'_>,
    meta: &ObjectMeta,
    problems: &mut Vec<Problem>,
) {
    metadata::check_name(meta, problems);
    let annotations = meta.annotations.clone().unwrap_or_default();
    let spec = request.object.get("spec").filter(|spec| !is_empty(spec));
    let Some(Value::Object(spec)) = spec else {
        problems.push(Problem::missing("spec"));
        return;
    };
    let limit = spec.get("containerConcurrency").and_then(Value::as_i64).unwrap_or(0);
    // A value out of bounds is reported below; here it counts as no limit.
    let bounded = u32::try_from(limit).unwrap_or(0);
    if let Err(more) =
        request.settings.autoscaler.strict_policy(&annotations, bounded, "metadata.annotations")
    {
        problems.extend(more);
    }
    let max = request.settings.defaults.container_concurrency_max_limit;
    let min = i64::from(!request.settings.defaults.allow_container_concurrency_zero);
    if !(min..=max).contains(&limit) {
        problems.push(Problem::out_of_bounds("spec.containerConcurrency", min, limit, max));
    }
    check_object_reference(spec.get("scaleTargetRef"), "spec.scaleTargetRef", problems);
}

/// Checks the mode, the protocol and the target of a ServerlessService.
pub(super) fn check_serverless_service(
    request: &AdmissionRequest<'_>,
    meta: &ObjectMeta,
    problems: &mut Vec<Problem>,
) {
    metadata::check_name(meta, problems);
    let spec = request.object.get("spec").filter(|spec| !is_empty(spec));
    let Some(Value::Object(spec)) = spec else {
        problems.push(Problem::missing("spec"));
        return;
    };
    let fields: [(&str, &[&str]); 2] =
        [("mode", &["Serve", "Proxy"]), ("protocolType", &["http1", "h2c", "tcp"])];
    for (name, values) in fields {
        let value = defaults::text_field(spec, name);
        if value.is_empty() {
            problems.push(Problem::missing(format!("spec.{name}")));
        } else if !values.contains(&value.as_str()) {
            problems.push(Problem::invalid(format!("spec.{name}"), value));
        }
    }
    check_object_reference(spec.get("objectRef"), "spec.objectRef", problems);
}

/// Warns that kinds which the controller writes ignore the content that others write.
pub(super) fn warn_without_effect(
    request: &AdmissionRequest<'_>,
    meta: &ObjectMeta,
    warnings: &mut Vec<Problem>,
) {
    let has_owner = meta.owner_references.as_ref().is_some_and(|all| !all.is_empty());
    let what = format!("{:?}", request.kind);
    let message = match request.kind {
        AdmittedKind::Metric => {
            format!("a {what} has no effect: the kernel counts, and nothing is scraped")
        }
        _ if !has_owner => {
            let owners = "a Revision or a scaled Service";
            format!("a {what} has no effect unless it is made for {owners}: nothing acts on it")
        }
        // The controller's own writes pass here, too; it ignores warnings.
        _ if request.old.is_some() => {
            format!("what is written into a {what} has no effect: it follows from its owner")
        }
        _ => return,
    };
    warnings.push(Problem::new("spec", message));
}

pub(super) fn check_domain_claim(request: &AdmissionRequest<'_>, problems: &mut Vec<Problem>) {
    let namespace = request.object.pointer("/spec/namespace").and_then(Value::as_str);
    if namespace.unwrap_or_default().is_empty() {
        problems.push(Problem::missing("spec.namespace"));
    }
}

/// Checks a reference to an object of the same namespace (knative/serving `ValidateNamespacedObjectReference`).
fn check_object_reference(value: Option<&Value>, at: &str, problems: &mut Vec<Problem>) {
    let empty = Map::new();
    let fields = value.and_then(Value::as_object).unwrap_or(&empty);
    for (name, value) in fields {
        if !matches!(name.as_str(), "apiVersion" | "kind" | "name") && !value.is_null() {
            problems.push(Problem::disallowed(format!("{at}.{name}")));
        }
    }
    type Rule = fn(&str) -> Vec<String>;
    let rules: [(&str, Rule); 3] = [
        ("apiVersion", dns_names::qualified_name_errors),
        ("kind", c_identifier_errors),
        ("name", dns_names::dns1123_errors),
    ];
    for (name, rule) in rules {
        let (value, path) = (defaults::text_field(fields, name), format!("{at}.{name}"));
        if value.is_empty() {
            problems.push(Problem::missing(path));
            continue;
        }
        // Knative reports all broken rules of a field in one problem.
        let error = rule(&value);
        if !error.is_empty() {
            problems.push(Problem::invalid(path, error.join(", ")));
        }
    }
}

fn c_identifier_errors(text: &str) -> Vec<String> {
    let starts = text.starts_with(|it: char| it.is_ascii_alphabetic() || it == '_');
    let fits = starts && text.chars().all(|it| it.is_ascii_alphanumeric() || it == '_');
    let rule = "a valid C identifier must start with alphabetic character or '_', followed by a string of \
        alphanumeric characters or '_' (e.g. 'my_name',  or 'MY_NAME',  or 'MyName', regex used for validation is \
        '[A-Za-z_][A-Za-z0-9_]*')";
    (!fits).then(|| rule.to_owned()).into_iter().collect()
}

fn is_empty(spec: &Value) -> bool {
    spec.is_null() || spec.as_object().is_some_and(Map::is_empty)
}
