//! Pure: rules of names, labels and annotations (knative/serving `pkg/apis/serving/metadata_validation.go` and
//! `pkg/apis/serving/v1/*_validation.go` at 98e5ef9).

use std::collections::BTreeMap;

use common::decimal::parse_port;
use k8s_openapi::{
    api::core::v1::ResourceRequirements, apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use serde_json::json;

use super::{dns_names, settings::TemplateParent};
use crate::model::{
    cluster_state::HintMode,
    go_values::{parse_bool, parse_duration},
    knative::{key, user_container::parse_protocol},
    problem::Problem,
    scale_policy,
};

type AnnotationMap = BTreeMap<String, String>;

/// Prefix of template annotations for Knative's sidecar. Rouse has no sidecar: they are checked and have no effect.
const SIDECAR: &str = "queue.sidecar.serving.knative.dev/";
/// Sidecar annotations that hold quantities, in both spellings.
const SIDECAR_RESOURCES: [[&str; 2]; 6] = [
    ["cpu-resource-request", "cpuResourceRequest"],
    ["cpu-resource-limit", "cpuResourceLimit"],
    ["memory-resource-request", "memoryResourceRequest"],
    ["memory-resource-limit", "memoryResourceLimit"],
    ["ephemeral-storage-resource-request", "ephemeralStorageResourceRequest"],
    ["ephemeral-storage-resource-limit", "ephemeralStorageResourceLimit"],
];

/// Checks the name of an object whose names are DNS-1035 labels.
pub(super) fn check_name(meta: &ObjectMeta, problems: &mut Vec<Problem>) {
    let name = meta.name.as_deref().unwrap_or_default();
    let generate = meta.generate_name.as_deref().unwrap_or_default();
    let prefix = dns_names::dns1035_prefix_errors(generate);
    if !generate.is_empty() && !prefix.is_empty() {
        let message = format!("not a DNS 1035 label prefix: {}", dns_names::go_list(&prefix));
        problems.push(Problem::new("metadata.generateName", message));
    } else if !name.is_empty() {
        let errors = dns_names::dns1035_errors(name);
        if !errors.is_empty() {
            let message = format!("not a DNS 1035 label: {}", dns_names::go_list(&errors));
            problems.push(Problem::new("metadata.name", message));
        }
    // A generated name is added only after admission.
    } else if generate.is_empty() {
        problems.push(Problem::new("metadata.name", "name or generateName is required"));
    }
}

/// Checks the name that a template sets for its Revision.
pub(super) fn check_revision_name(
    meta: &ObjectMeta,
    parent: TemplateParent<'_>,
    problems: &mut Vec<Problem>,
) {
    let name = meta.name.as_deref().unwrap_or_default();
    let generate = meta.generate_name.as_deref().unwrap_or_default();
    const AT: &str = "spec.template.metadata";
    let prefix = dns_names::dns1035_prefix_errors(generate);
    if !generate.is_empty() && !prefix.is_empty() {
        let value = format!("not a DNS 1035 label prefix: {}", dns_names::go_list(&prefix));
        problems.push(Problem::invalid(format!("{AT}.generateName"), value));
        return;
    }
    // Without a name the controller generates one from the parent's.
    if name.is_empty() {
        return;
    }
    let at = format!("{AT}.name");
    let errors = dns_names::dns1035_errors(name);
    if !errors.is_empty() {
        let value = format!("not a DNS 1035 label: {}", dns_names::go_list(&errors));
        problems.push(Problem::invalid(at, value));
    } else if parent.name.is_empty() && !parent.generate_name.is_empty() {
        // The prefix must be the parent's name, which does not exist yet.
        problems.push(Problem::disallowed(at));
    } else if !name.starts_with(&format!("{}-", parent.name)) {
        let value = format!("{name:?} must have prefix \"{}-\"", parent.name);
        problems.push(Problem::invalid(at, value));
    }
}

/// Refuses annotations on Service, Configuration and Route that are allowed only on a template.
pub(super) fn refuse_autoscaling_annotations(
    annotations: &AnnotationMap,
    problems: &mut Vec<Problem>,
) {
    for name in annotations.keys().filter(|name| name.starts_with(scale_policy::AUTOSCALING_GROUP))
    {
        let rule = "autoscaling annotations must be put under \"spec.template.metadata.annotations\" to work";
        problems.push(Problem::invalid_key("metadata.annotations", name).with_details(rule));
    }
}

/// Checks the annotations of a Service or Route.
pub(super) fn check_route_annotations(annotations: &AnnotationMap, problems: &mut Vec<Problem>) {
    const AT: &str = "metadata.annotations";
    if let Some((name, text)) = first_set(annotations, &key::ROLLOUT_DURATION)
        && !text.is_empty()
    {
        check_duration("rollout-duration", name, text, ZeroDuration::Allowed, AT, problems);
    }
    check_path(annotations, AT, problems);
    check_traffic_distribution(annotations, AT, problems);
    check_http_protocol(annotations, problems);
    check_gateway_port(annotations, AT, problems);
    check_disabled_tls(annotations, problems);
}

/// Checks the annotations of a template, except the autoscaler's.
pub(super) fn check_template_annotations(
    annotations: &AnnotationMap,
    at: &str,
    problems: &mut Vec<Problem>,
) {
    if let Some((name, text)) = first_set(annotations, &key::PROGRESS_DEADLINE)
        && !text.is_empty()
    {
        check_duration("progress-deadline", name, text, ZeroDuration::Refused, at, problems);
    }
    check_path(annotations, at, problems);
    check_traffic_distribution(annotations, at, problems);
    check_protocol(annotations, at, problems);
    check_sidecar(annotations, at, problems);
    for (name, value) in annotations {
        let problem = match name.strip_prefix("features.knative.dev/") {
            // Such an annotation belongs to the Service or Route, and would have no effect here.
            None if name.starts_with("networking.knative.dev/") => Problem::invalid_key(at, name),
            Some("http-full-duplex" | "queueproxy-podinfo")
                if !matches!(value.to_ascii_lowercase().as_str(), "enabled" | "disabled") =>
            {
                Problem::invalid(format!("{at}.{name}"), value)
            }
            _ => continue,
        };
        problems.push(problem);
    }
}

/// Verdict on a duration of zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ZeroDuration {
    Allowed,
    Refused,
}

/// Checks a duration annotation, which must be in whole seconds. `what` is its name in Knative's messages.
fn check_duration(
    what: &str,
    name: &str,
    text: &str,
    zero: ZeroDuration,
    at: &str,
    problems: &mut Vec<Problem>,
) {
    let path = format!("{at}.{name}");
    problems.push(match parse_duration(text) {
        Err(_) => Problem::invalid(path, text).with_advice("write it as 30s or 1m30s"),
        // Before the sign, as in Knative, which reports one problem only.
        Ok(it) if !it.is_whole_seconds() => {
            Problem::new(path, format!("{what}={text} is not at second precision"))
        }
        Ok(it) if it.0 < 0 || (it.0 == 0 && zero == ZeroDuration::Refused) => {
            Problem::new(path, format!("{what}={text} must be positive"))
        }
        Ok(_) => return,
    });
}

/// Checks Rouse's own annotation that fixes the path of connections.
fn check_path(all: &AnnotationMap, at: &str, problems: &mut Vec<Problem>) {
    if let Some(value) =
        all.get(key::PATH).filter(|it| !matches!(it.as_str(), "direct" | "activator"))
    {
        let problem = Problem::invalid(format!("{at}.{}", key::PATH), value);
        problems.push(problem.with_details("use direct or activator"));
    }
}

/// Checks Rouse's own annotation for near pods. Its values are those of the field of a Service of Kubernetes.
fn check_traffic_distribution(all: &AnnotationMap, at: &str, problems: &mut Vec<Problem>) {
    let is_unknown = |it: &&String| HintMode::from_traffic_distribution(it).is_none();
    if let Some(value) = all.get(key::TRAFFIC_DISTRIBUTION).filter(is_unknown) {
        let problem = Problem::invalid(format!("{at}.{}", key::TRAFFIC_DISTRIBUTION), value);
        problems.push(problem.with_details("use PreferSameZone, PreferSameNode or PreferClose"));
    }
}

/// Checks Rouse's own annotation for the protocol of a Revision's pods.
fn check_protocol(all: &AnnotationMap, at: &str, problems: &mut Vec<Problem>) {
    let is_unknown = |it: &&String| parse_protocol(it).is_none();
    if let Some(value) = all.get(key::PROTOCOL).filter(is_unknown) {
        let problem = Problem::invalid(format!("{at}.{}", key::PROTOCOL), value);
        problems.push(problem.with_details("use http1, h2c or tcp"));
    }
}

/// Checks Rouse's own annotation for the gateway port. Settings and other Routes decide later if the Route gets it.
fn check_gateway_port(all: &AnnotationMap, at: &str, problems: &mut Vec<Problem>) {
    let is_no_port = |it: &&String| parse_port(it).is_none();
    if let Some(value) = all.get(key::GATEWAY_PORT).filter(is_no_port) {
        let problem = Problem::invalid(format!("{at}.{}", key::GATEWAY_PORT), value);
        problems.push(problem.with_details("use a port, 1 to 65535"));
    }
}

fn check_http_protocol(all: &AnnotationMap, problems: &mut Vec<Problem>) {
    if let Some((name, value)) = first_set(all, &key::HTTP_PROTOCOL)
        && !matches!(value.to_ascii_lowercase().as_str(), "" | "enabled" | "redirected")
    {
        problems.push(Problem::invalid(format!("metadata.annotations.{name}"), value));
    }
}

/// Checks the annotation that turns certificates off: a boolean in Go's forms.
pub(super) fn check_disabled_tls(all: &AnnotationMap, problems: &mut Vec<Problem>) {
    if let Some((name, value)) = first_set(all, &key::DISABLE_EXTERNAL_DOMAIN_TLS)
        && !value.is_empty()
        && parse_bool(value).is_err()
    {
        problems.push(Problem::invalid(format!("metadata.annotations.{name}"), value));
    }
}

fn check_sidecar(all: &AnnotationMap, at: &str, problems: &mut Vec<Problem>) {
    let mut add = |problem: fn(String, &str) -> Problem, name: &str, value: &str| {
        problems.push(problem(format!("{at}.[{SIDECAR}{name}]"), value));
    };
    for name in ["resource-percentage", "resourcePercentage"] {
        let Some(value) = all.get(&format!("{SIDECAR}{name}")) else { continue };
        match value.parse::<f64>() {
            Ok(percent) if (0.1..=100.0).contains(&percent) => {}
            Ok(_) => add(|at, value| Problem::out_of_bounds(at, 0.1, value, 100), name, value),
            Err(_) => add(|at, value| Problem::invalid(at, value), name, value),
        }
    }
    // Checked although there is no sidecar here: a manifest must be valid for Knative, too.
    for name in SIDECAR_RESOURCES.iter().flatten() {
        if let Some(value) = all.get(&format!("{SIDECAR}{name}"))
            && !is_quantity(value)
        {
            add(|at, value| Problem::invalid(at, value), name, value);
        }
    }
}

/// Returns true if `text` is a quantity as Kubernetes writes them: a number and a unit.
pub(super) fn is_quantity(text: &str) -> bool {
    let text = text.strip_prefix(['+', '-']).unwrap_or(text);
    let digits = text.find(|it: char| !it.is_ascii_digit() && it != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let numeric = number.bytes().any(|it| it.is_ascii_digit())
        && number.bytes().filter(|it| *it == b'.').count() <= 1;
    let exponent = |rest: &str| rest.parse::<i32>().is_ok();
    let suffixes =
        ["", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    numeric
        && (suffixes.contains(&unit) || unit.strip_prefix(['e', 'E']).is_some_and(exponent))
        && serde_json::from_value::<ResourceRequirements>(json!({"limits": {"cpu": text}})).is_ok()
}

/// Checks that an object with a Service's label is owned by that Service.
pub(super) fn check_service_owner(meta: &ObjectMeta, problems: &mut Vec<Problem>) {
    let Some(service) = meta.labels.as_ref().and_then(|all| all.get(key::SERVICE)) else { return };
    check_owned_by(meta, "Service", service, key::SERVICE, problems);
}

/// Checks that a Revision with a Configuration's label is owned by that Configuration.
pub(super) fn check_revision_owner(meta: &ObjectMeta, problems: &mut Vec<Problem>) {
    let labels = meta.labels.as_ref();
    let Some(name) = labels.and_then(|all| all.get(key::CONFIGURATION)) else { return };
    check_owned_by(meta, "Configuration", name, key::CONFIGURATION, problems);
}

fn check_owned_by(
    meta: &ObjectMeta,
    kind: &str,
    name: &str,
    label: &str,
    problems: &mut Vec<Problem>,
) {
    let owners = meta.owner_references.as_deref().unwrap_or_default();
    if !owners.iter().any(|owner| owner.kind == kind && owner.name == name) {
        problems.push(Problem::missing(format!("metadata.labels.{label}")));
    }
}

/// Checks that creator and last modifier were not changed by hand.
pub(super) fn check_creator(
    old: &AnnotationMap,
    new: &AnnotationMap,
    same_spec: bool,
    problems: &mut Vec<Problem>,
) {
    let at = |name: &str| format!("metadata.annotations.{name}");
    if old.get(key::CREATOR) != new.get(key::CREATOR) {
        problems.push(Problem::new(at(key::CREATOR), "annotation value is immutable"));
    }
    // A changed spec comes with a new modifier, which the defaulting webhook has just written.
    if same_spec && old.get(key::LAST_MODIFIER) != new.get(key::LAST_MODIFIER) {
        let value = new.get(key::LAST_MODIFIER).map(String::as_str).unwrap_or_default();
        problems.push(Problem::invalid(at(key::LAST_MODIFIER), value));
    }
}

fn first_set<'a>(
    all: &'a AnnotationMap,
    names: &[&'static str],
) -> Option<(&'static str, &'a str)> {
    // The present spelling comes first in `names`: it counts where several are set.
    names.iter().find_map(|name| all.get(*name).map(|text| (*name, text.as_str())))
}
