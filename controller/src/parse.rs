//! Pure: YAML to a checked [`Manifest`], or every broken rule with its field, its value and what to do.
//!
//! Rules and words are those of Knative's webhooks (knative/serving `pkg/apis/serving/v1` at 98e5ef9), so that
//! a manifest refused here is refused there for the same reason.

use std::{collections::BTreeMap, sync::Arc};

use common::wire::{Name, is_label};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize as _;
use serde_json::{Map, Value};

use crate::{
    knative::{API_VERSION, RevisionTemplate, TrafficTarget, key},
    policy::{self, AutoscalerConfig, parse_duration},
    world::{Manifest, Pairs, Traffic},
};

mod defaults;
mod pod;
mod probe;
mod problem;
mod typed;

pub(crate) use defaults::{RESPONSE_START, serving_index};
pub use problem::{Problem, line};
use typed::{keys, typed};

/// Longest name that leaves room for `-00001`; Knative cuts longer ones and adds a hash.
const MAX_NAME: usize = 57;
/// Bound of `timeoutSeconds` (`max-revision-timeout-seconds`).
const MAX_TIMEOUT: i64 = 600;
/// Bound of `containerConcurrency` (`container-concurrency-max-limit`).
const MAX_CONCURRENCY: i64 = 1000;

/// One document of a manifest file.
#[derive(Clone, Debug, PartialEq)]
pub enum Document {
    /// A service to run.
    Service(Name, Manifest),
    /// A document that cannot be used, with the name it bears, and why not.
    Refused(Option<Name>, String),
}

/// Reads every document of a file.
pub fn documents(text: &str, config: &AutoscalerConfig) -> Vec<Document> {
    let mut out = Vec::new();
    for document in serde_norway::Deserializer::from_str(text) {
        match Value::deserialize(document) {
            Ok(Value::Null) => {}
            Ok(value) => out.push(match service(&value, config) {
                Ok((name, manifest)) => Document::Service(name, manifest),
                Err(problems) => Document::Refused(name_of(&value), line(&problems)),
            }),
            Err(error) => {
                out.push(Document::Refused(None, format!("not readable as YAML: {error}")));
                break;
            }
        }
    }
    out
}

/// Checks one Service and fills in defaults.
pub fn service(value: &Value, config: &AutoscalerConfig) -> Result<(Name, Manifest), Vec<Problem>> {
    let mut problems = Vec::new();
    let Value::Object(object) = value else {
        return Err(vec![Problem::new("", "must be an object with apiVersion, kind and metadata")]);
    };
    kind(object)?;
    keys(object, "", &["apiVersion", "kind", "metadata", "spec", "status"], &mut problems);
    let meta: ObjectMeta = typed(object.get("metadata"), "metadata", &mut problems);
    let name = check_name(&meta, object.get("metadata"), &mut problems);
    service_annotations(&meta, &mut problems);
    let spec = match object.get("spec") {
        Some(Value::Object(spec)) => spec,
        None | Some(Value::Null) => {
            problems.push(Problem::missing("spec.template"));
            return Err(problems);
        }
        Some(_) => {
            problems.push(Problem::new("spec", "must be an object"));
            return Err(problems);
        }
    };
    keys(spec, "spec", &["template", "traffic"], &mut problems);
    let template = template(spec.get("template"), &name.name, config, &mut problems);
    let targets: Vec<TrafficTarget> = typed(spec.get("traffic"), "spec.traffic", &mut problems);
    let traffic = traffic(targets, &mut problems);
    if !problems.is_empty() {
        return Err(problems);
    }
    let text = serde_json::to_string(&template)
        .map_err(|error| vec![Problem::new("spec.template", error.to_string())])?;
    let pairs = |map: Option<&BTreeMap<String, String>>| map.map(Pairs::from).unwrap_or_default();
    let manifest = Manifest {
        labels: pairs(meta.labels.as_ref()),
        annotations: pairs(meta.annotations.as_ref()),
        revision: template.metadata.name.as_deref().map(Into::into),
        template: Arc::from(text),
        traffic,
    };
    Ok((name, manifest))
}

/// The name a document bears, as far as it can be read.
fn name_of(value: &Value) -> Option<Name> {
    let field =
        |name| value.get("metadata").and_then(|meta| meta.get(name)).and_then(Value::as_str);
    let namespace = field("namespace").unwrap_or("default");
    field("name")
        .filter(|name| is_label(name) && is_label(namespace))
        .map(|name| Name::new(namespace, name))
}

fn kind(object: &Map<String, Value>) -> Result<(), Vec<Problem>> {
    let text = |field| object.get(field).and_then(Value::as_str).unwrap_or_default();
    if text("apiVersion") == API_VERSION && text("kind") == "Service" {
        return Ok(());
    }
    let found = match (text("apiVersion"), text("kind")) {
        ("", "") => "an object without apiVersion and kind".to_owned(),
        (version, kind) => format!("{version}/{kind}"),
    };
    let advice =
        format!("apply a {API_VERSION} Service; Configuration, Revision and Route follow from it");
    Err(vec![Problem::invalid("kind", found).advise(advice)])
}

fn check_name(meta: &ObjectMeta, raw: Option<&Value>, problems: &mut Vec<Problem>) -> Name {
    // Where some type in the metadata is wrong, which was said, `meta` is empty but the name may be there.
    let written = raw.and_then(|meta| meta.get("name")).filter(|name| !name.is_null());
    let name = written.and_then(Value::as_str).or(meta.name.as_deref()).unwrap_or_default();
    let name = name.to_owned();
    if name.is_empty() {
        let is_object = raw.is_none_or(|meta| meta.is_object() || meta.is_null());
        if is_object && written.is_none_or(Value::is_string) {
            problems.push(Problem::missing("metadata.name"));
        }
    } else if !is_dns1035(&name) || name.len() > MAX_NAME {
        let advice = "use 1 to 57 of a-z, 0-9 and -, beginning with a letter";
        problems.push(Problem::invalid("metadata.name", &name).advise(advice));
    }
    let namespace = meta.namespace.clone().unwrap_or_else(|| "default".into());
    if !is_label(&namespace) {
        problems.push(Problem::invalid("metadata.namespace", &namespace));
    }
    Name::new(namespace, name)
}

/// A DNS-1035 label: begins with a letter.
fn is_dns1035(text: &str) -> bool {
    is_label(text) && text.starts_with(|c: char| c.is_ascii_lowercase())
}

fn service_annotations(meta: &ObjectMeta, problems: &mut Vec<Problem>) {
    let annotations = meta.annotations.clone().unwrap_or_default();
    if let Some(name) = annotations.keys().find(|name| name.starts_with(policy::PREFIX)) {
        let rule = "autoscaling annotations must be put under \"spec.template.metadata.annotations\" to work";
        problems.push(Problem::new(format!("metadata.annotations.{name}"), rule));
    }
    seconds(&annotations, &key::ROLLOUT_DURATION, "metadata.annotations", 0, problems);
    path_annotation(&annotations, "metadata.annotations", problems);
}

fn path_annotation(all: &BTreeMap<String, String>, path: &str, problems: &mut Vec<Problem>) {
    if let Some(value) =
        all.get(key::PATH).filter(|v| !matches!(v.as_str(), "direct" | "activator"))
    {
        let problem = Problem::invalid(format!("{path}.{}", key::PATH), value);
        problems.push(problem.advise("use direct or activator"));
    }
}

/// A duration annotation in whole seconds, at least `least`.
fn seconds(
    all: &BTreeMap<String, String>,
    names: &[&str],
    path: &str,
    least: u64,
    problems: &mut Vec<Problem>,
) {
    let Some((name, text)) = names.iter().find_map(|name| all.get(*name).map(|text| (name, text)))
    else {
        return;
    };
    let at = format!("{path}.{name}");
    problems.push(match parse_duration(text) {
        None => Problem::invalid(at, text).advise("write it as 30s or 1m30s"),
        Some(it) if it.subsec_nanos() != 0 => {
            Problem::new(at, format!("{name}={text} is not at second precision"))
        }
        Some(it) if it.as_secs() < least => {
            Problem::new(at, format!("{name}={text} must be positive"))
        }
        Some(_) => return,
    });
}

fn template(
    value: Option<&Value>,
    service: &str,
    config: &AutoscalerConfig,
    problems: &mut Vec<Problem>,
) -> RevisionTemplate {
    const META: &str = "spec.template.metadata";
    let Some(Value::Object(template)) = value else {
        problems.push(Problem::missing("spec.template"));
        return RevisionTemplate::default();
    };
    keys(template, "spec.template", &["metadata", "spec"], problems);
    let meta: ObjectMeta = typed(template.get("metadata"), META, problems);
    let mut spec = pod::revision_spec(template.get("spec"), problems);
    if let Some(name) = &meta.name {
        revision_name(name, service, problems);
    }
    let annotations = meta.annotations.clone().unwrap_or_default();
    let at = format!("{META}.annotations");
    seconds(&annotations, &key::PROGRESS_DEADLINE, &at, 1, problems);
    path_annotation(&annotations, &at, problems);
    concurrency_and_timeouts(&spec, problems);
    let limit = spec.container_concurrency.and_then(|limit| u32::try_from(limit).ok());
    if let Err(more) = config.policy(&annotations, limit.unwrap_or(0), &at) {
        problems.extend(more);
    }
    defaults::fill(&mut spec);
    // Whatever else the user's metadata held belongs to the API server, not to a template.
    let metadata = ObjectMeta {
        name: meta.name,
        labels: meta.labels.filter(|labels| !labels.is_empty()),
        annotations: Some(annotations).filter(|annotations| !annotations.is_empty()),
        ..ObjectMeta::default()
    };
    RevisionTemplate { metadata, spec }
}

fn revision_name(name: &str, service: &str, problems: &mut Vec<Problem>) {
    let at = "spec.template.metadata.name";
    if !name.starts_with(&format!("{service}-")) {
        let message = format!("invalid value: {name:?} must have prefix \"{service}-\"");
        problems.push(Problem::new(at, message));
    } else if !is_dns1035(name) {
        problems.push(Problem::invalid(at, format!("{name:?} is not a DNS-1035 label")));
    }
}

fn concurrency_and_timeouts(spec: &crate::knative::RevisionSpec, problems: &mut Vec<Problem>) {
    let mut within = |name: &str, value: Option<i64>, high: i64| {
        if let Some(value) = value.filter(|value| !(0..=high).contains(value)) {
            let at = format!("spec.template.spec.{name}");
            problems.push(Problem::bounds(at, 0, value, high));
        }
    };
    within("containerConcurrency", spec.container_concurrency, MAX_CONCURRENCY);
    within("timeoutSeconds", spec.timeout_seconds, MAX_TIMEOUT);
    // Knative does not look at these two; a negative one would be no bound at all.
    within("responseStartTimeoutSeconds", spec.response_start_timeout_seconds, i64::from(u32::MAX));
    within("idleTimeoutSeconds", spec.idle_timeout_seconds, i64::from(u32::MAX));
}

/// Checks traffic targets. None at all means everything to the latest Revision.
fn traffic(targets: Vec<TrafficTarget>, problems: &mut Vec<Problem>) -> Arc<[Traffic]> {
    if targets.is_empty() {
        return Arc::new([Traffic { percent: 100, ..Traffic::default() }]);
    }
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for (index, target) in targets.iter().enumerate() {
        let at = format!("spec.traffic[{index}]");
        check_target(target, &at, problems);
        if let Some(tag) = &target.tag
            && let Some(first) = seen.insert(tag, index)
        {
            let message = format!("Multiple definitions for {tag:?}");
            let path = format!("spec.traffic[{first}].tag, {at}.tag");
            problems.push(Problem::new(path, message));
        }
    }
    let sum: i64 = targets.iter().filter_map(|target| target.percent).sum();
    if sum != 100 {
        let message = format!("Traffic targets sum to {sum}, want 100");
        problems.push(Problem::new("spec.traffic", message));
    }
    let percent = |target: &TrafficTarget| target.percent.and_then(|it| u8::try_from(it).ok());
    let own = |target: &TrafficTarget| Traffic {
        tag: target.tag.as_deref().filter(|tag| !tag.is_empty()).map(Into::into),
        revision: target.revision_name.as_deref().filter(|name| !name.is_empty()).map(Into::into),
        configuration: None,
        percent: percent(target).unwrap_or(0),
    };
    targets.iter().map(own).collect()
}

fn check_target(target: &TrafficTarget, at: &str, problems: &mut Vec<Problem>) {
    if let Some(percent) = target.percent.filter(|percent| !(0..=100).contains(percent)) {
        problems.push(Problem::bounds(format!("{at}.percent"), 0, percent, 100));
    }
    if let Some(tag) = target.tag.as_deref().filter(|tag| !tag.is_empty() && !is_dns1035(tag)) {
        problems.push(Problem::invalid(format!("{at}.tag"), tag));
    }
    if target.url.is_some() {
        problems.push(Problem::disallowed(format!("{at}.url")));
    }
    if target.configuration_name.is_some() {
        problems.push(Problem::disallowed(format!("{at}.configurationName")));
    }
    let revision = target.revision_name.as_deref().unwrap_or_default();
    match (target.latest_revision, revision) {
        (Some(true), name) if !name.is_empty() => {
            let message = format!("may not set revisionName {name:?} when latestRevision is true");
            problems.push(Problem::new(format!("{at}.latestRevision"), message));
        }
        (Some(false), "") => {
            let message = "may not set revisionName \"\" when latestRevision is false";
            problems.push(Problem::new(format!("{at}.latestRevision"), message));
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests;
