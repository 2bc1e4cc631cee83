//! Pure: rules of a Revision's spec and annotations (knative/serving
//! `pkg/apis/serving/v1/revision_validation.go` at 98e5ef9).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::PodSpec;
use serde_json::Value;

use super::{
    metadata, pod,
    settings::RuleSettings,
    typed::{parse_typed, remove_unknown_fields},
};
use crate::model::{knative::RevisionSpec, problem::Problem};

/// Fields of a Revision's spec that Knative adds to a PodSpec.
pub(super) const REVISION_LIMIT_FIELDS: [&str; 4] =
    ["containerConcurrency", "timeoutSeconds", "responseStartTimeoutSeconds", "idleTimeoutSeconds"];

/// Parses a Revision's spec and checks all of it. Broken rules go to `problems`.
pub(super) fn parse_revision_spec(
    value: Option<&Value>,
    at: &str,
    settings: &RuleSettings<'_>,
    problems: &mut Vec<Problem>,
) -> RevisionSpec {
    let Some(Value::Object(object)) = value else {
        problems.push(Problem::missing(format!("{at}.containers")));
        return RevisionSpec::default();
    };
    let (mut revision_fields, mut pod) = (object.clone(), object.clone());
    revision_fields.retain(|key, _| REVISION_LIMIT_FIELDS.contains(&key.as_str()));
    pod.retain(|key, _| !REVISION_LIMIT_FIELDS.contains(&key.as_str()));
    // Knative reports an empty list, not the missing field that typed parsing would report.
    pod.entry("containers").or_insert_with(|| Value::Array(Vec::new()));
    let mut spec: RevisionSpec = parse_typed(Some(&Value::Object(revision_fields)), at, problems);
    let problem_count = problems.len();
    let mut pod = Value::Object(pod);
    spec.pod = parse_typed(Some(&pod), at, problems);
    // Unknown fields were reported above; the mask would report them again as not allowed.
    remove_unknown_fields::<PodSpec>(&mut pod, at);
    // An unreadable spec was reported as such; without this check it would also count as one without containers.
    if problems.len() == problem_count || spec.pod != PodSpec::default() {
        pod::check_pod(&pod, &spec.pod, at, settings, problems);
    }
    check_limits(&spec, at, settings, problems);
    spec
}

fn check_limits(
    spec: &RevisionSpec,
    at: &str,
    settings: &RuleSettings<'_>,
    problems: &mut Vec<Problem>,
) {
    let mut within = |name: &str, value: Option<i64>, low: i64, high: i64| {
        if let Some(value) = value.filter(|value| !(low..=high).contains(value)) {
            problems.push(Problem::out_of_bounds(format!("{at}.{name}"), low, value, high));
        }
    };
    let defaults = settings.defaults;
    let min = i64::from(!defaults.allow_container_concurrency_zero);
    let max = defaults.container_concurrency_max_limit;
    within("containerConcurrency", spec.container_concurrency, min, max);
    within("timeoutSeconds", spec.timeout_seconds, 0, defaults.max_timeout_seconds);
    // Knative does not check these two, but a negative timeout would mean no bound at all.
    let start = spec.response_start_timeout_seconds;
    within("responseStartTimeoutSeconds", start, 0, i64::from(u32::MAX));
    within("idleTimeoutSeconds", spec.idle_timeout_seconds, 0, i64::from(u32::MAX));
}

/// Checks the annotations of a Revision, which come from its template.
pub(super) fn check_annotations(
    annotations: &BTreeMap<String, String>,
    spec: &RevisionSpec,
    at: &str,
    settings: &RuleSettings<'_>,
    problems: &mut Vec<Problem>,
) {
    metadata::check_template_annotations(annotations, at, problems);
    let limit = spec.container_concurrency.and_then(|limit| u32::try_from(limit).ok());
    if let Err(more) = settings.autoscaler.strict_policy(annotations, limit.unwrap_or(0), at) {
        problems.extend(more);
    }
    if let Err(more) = settings.autoscaler.standby.strict_policy(annotations, at) {
        problems.extend(more);
    }
}
