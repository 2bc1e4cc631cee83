//! Pure: an object → the cells of its row. Columns are those of Knative's CRDs and of kubectl's pods.

use controller::model::{knative::key::FROZEN_CONDITION, object::LocalObjectKind};
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;

/// STATUS of a frozen pod. Its phase is still `Running`, as for Kubernetes.
const STANDBY_STATUS: &str = "Standby";

/// Column names of a kind, with kubectl's additional ones if `is_wide`.
pub(crate) fn column_names(kind: LocalObjectKind, is_wide: bool) -> Vec<&'static str> {
    match kind {
        LocalObjectKind::Service => {
            vec!["NAME", "URL", "LATESTCREATED", "LATESTREADY", "READY", "REASON"]
        }
        LocalObjectKind::Configuration => {
            vec!["NAME", "LATESTCREATED", "LATESTREADY", "READY", "REASON"]
        }
        LocalObjectKind::Revision => vec![
            "NAME",
            "CONFIG NAME",
            "GENERATION",
            "READY",
            "REASON",
            "ACTUAL REPLICAS",
            "DESIRED REPLICAS",
        ],
        LocalObjectKind::Route => vec!["NAME", "URL", "READY", "REASON"],
        LocalObjectKind::PodAutoscaler => {
            vec!["NAME", "DESIREDSCALE", "ACTUALSCALE", "STANDBY", "READY", "REASON"]
        }
        LocalObjectKind::ServerlessService => {
            let services = ["SERVICENAME", "PRIVATESERVICENAME"];
            [&["NAME", "MODE", "ACTIVATORS"], &services[..], &["READY", "REASON"]].concat()
        }
        LocalObjectKind::Pod if is_wide => {
            vec!["NAME", "READY", "STATUS", "RESTARTS", "AGE", "IP", "NODE"]
        }
        LocalObjectKind::Pod => vec!["NAME", "READY", "STATUS", "RESTARTS", "AGE"],
    }
}

/// Cells of one object's row, in the order of [`column_names`].
pub(crate) fn row_cells(
    kind: LocalObjectKind,
    object: &Value,
    is_wide: bool,
    now: Timestamp,
) -> Vec<String> {
    let status = &object["status"];
    let latest = || {
        [
            scalar_text(&status["latestCreatedRevisionName"]),
            scalar_text(&status["latestReadyRevisionName"]),
        ]
    };
    let ready =
        || [condition_field(object, "Ready", "status"), condition_field(object, "Ready", "reason")];
    let name = [scalar_text(&object["metadata"]["name"])];
    let rest = match kind {
        LocalObjectKind::Service => {
            [vec![scalar_text(&status["url"])], latest().into(), ready().into()].concat()
        }
        LocalObjectKind::Configuration => [latest(), ready()].concat(),
        LocalObjectKind::Route => [vec![scalar_text(&status["url"])], ready().into()].concat(),
        LocalObjectKind::Revision => {
            let label = |key: &str| {
                scalar_text(&object["metadata"]["labels"][format!("serving.knative.dev/{key}")])
            };
            let replicas =
                [scalar_text(&status["actualReplicas"]), scalar_text(&status["desiredReplicas"])];
            let origin = vec![label("configuration"), label("configurationGeneration")];
            [origin, ready().into(), replicas.into()].concat()
        }
        LocalObjectKind::Pod => pod_cells(object, is_wide, now),
        LocalObjectKind::PodAutoscaler => {
            let scale = ["desiredScale", "actualScale", "standbyScale"];
            [Vec::from(scale.map(|field| scalar_text(&status[field]))), ready().into()].concat()
        }
        LocalObjectKind::ServerlessService => {
            let mode = [
                scalar_text(&object["spec"]["mode"]),
                scalar_text(&object["spec"]["numActivators"]),
            ];
            let services =
                [scalar_text(&status["serviceName"]), scalar_text(&status["privateServiceName"])];
            [mode, services, ready()].concat()
        }
    };
    name.into_iter().chain(rest).collect()
}

fn pod_cells(pod: &Value, is_wide: bool, now: Timestamp) -> Vec<String> {
    let containers =
        pod["status"]["containerStatuses"].as_array().map(Vec::as_slice).unwrap_or_default();
    let ready = containers.iter().filter(|container| container["ready"] == true).count();
    // From the spec: a pod that waits has no status of its containers yet.
    let total = pod["spec"]["containers"].as_array().map_or(containers.len(), Vec::len);
    let restarts: i64 =
        containers.iter().filter_map(|container| container["restartCount"].as_i64()).sum();
    let mut cells = vec![
        format!("{ready}/{total}"),
        pod_status(pod, containers),
        restarts.to_string(),
        format_age(&pod["metadata"]["creationTimestamp"], now),
    ];
    if is_wide {
        let non_empty = |value: &Value| Some(scalar_text(value)).filter(|text| !text.is_empty());
        let or_none = |value: &Value| non_empty(value).unwrap_or_else(|| "<none>".to_owned());
        cells.push(or_none(&pod["status"]["podIP"]));
        cells.push(or_none(&pod["spec"]["nodeName"]));
    }
    cells
}

/// STATUS of a pod as kubectl shows it.
fn pod_status(pod: &Value, containers: &[Value]) -> String {
    // Deletion is no phase, but kubectl shows it before any other state.
    if pod["metadata"]["deletionTimestamp"].is_string() {
        return "Terminating".to_owned();
    }
    // A container's reason (CrashLoopBackOff) tells more than the phase, which stays Running or Pending.
    let reason = |container: &Value| {
        let state = &container["state"];
        let reason = |name: &str| state[name]["reason"].as_str().map(str::to_owned);
        reason("waiting").or_else(|| reason("terminated"))
    };
    if let Some(reason) = containers.iter().find_map(reason) {
        return reason;
    }
    if is_frozen(pod) { STANDBY_STATUS.to_owned() } else { scalar_text(&pod["status"]["phase"]) }
}

/// Returns true if a pod stands by as users see it: frozen, or thawed for the answer to a probe.
pub(crate) fn is_frozen(pod: &Value) -> bool {
    condition_field(pod, FROZEN_CONDITION, "status") == "True"
}

/// Field of a condition; empty if the object lacks the condition.
pub(crate) fn condition_field(object: &Value, condition: &str, field: &str) -> String {
    let conditions =
        object["status"]["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
    conditions
        .iter()
        .find(|one| one["type"] == condition)
        .map(|condition| scalar_text(&condition[field]))
        .unwrap_or_default()
}

/// Text of a scalar: strings unquoted, numbers in digits; empty for any other value.
pub(crate) fn scalar_text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        Value::Bool(truth) => truth.to_string(),
        Value::Null | Value::Array(_) | Value::Object(_) => String::new(),
    }
}

/// Age of a time stamp, in kubectl's notation.
pub(crate) fn format_age(stamp: &Value, now: Timestamp) -> String {
    let then = stamp.as_str().and_then(|text| text.parse::<Timestamp>().ok());
    let Some(then) = then else { return "<unknown>".to_owned() };
    let seconds = now.as_second().saturating_sub(then.as_second()).max(0);
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    let years = days / 365;
    let with_rest = |big: i64, unit: &str, rest: i64, small: &str| match rest {
        0 => format!("{big}{unit}"),
        rest => format!("{big}{unit}{rest}{small}"),
    };
    match () {
        // The bounds are those of `HumanDuration` in k8s.io/apimachinery `pkg/util/duration`.
        () if seconds < 120 => format!("{seconds}s"),
        () if minutes < 10 => with_rest(minutes, "m", seconds % 60, "s"),
        () if hours < 3 => format!("{minutes}m"),
        () if hours < 8 => with_rest(hours, "h", minutes % 60, "m"),
        () if hours < 48 => format!("{hours}h"),
        () if days < 8 => with_rest(days, "d", hours % 24, "h"),
        () if years < 2 => format!("{days}d"),
        () if years < 8 => with_rest(years, "y", days % 365, "d"),
        () => format!("{years}y"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn timestamp(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    #[test]
    fn ages_read_as_kubectls() {
        let now = timestamp("2026-11-21T12:00:00Z");
        for (then, expected) in [
            ("2026-11-21T11:58:01Z", "119s"),
            ("2026-11-21T11:57:30Z", "2m30s"),
            ("2026-11-21T11:57:00Z", "3m"),
            ("2026-11-21T10:01:00Z", "119m"),
            ("2026-11-21T08:30:00Z", "3h30m"),
            ("2026-11-20T12:00:00Z", "24h"),
            ("2026-11-18T10:00:00Z", "3d2h"),
            ("2026-10-01T12:00:00Z", "51d"),
            ("2024-11-22T12:00:00Z", "729d"),
            ("2024-11-21T12:00:00Z", "2y"),
            ("2023-11-21T12:00:00Z", "3y1d"),
            ("2016-11-21T12:00:00Z", "10y"),
            ("2026-11-21T12:00:09Z", "0s"),
        ] {
            assert_eq!(format_age(&json!(then), now), expected, "{then}");
        }
        assert_eq!(format_age(&Value::Null, now), "<unknown>");
    }

    #[test]
    fn a_service_shows_its_address_and_readiness() {
        let object = json!({
            "metadata": {"name": "hello"},
            "status": {
                "url": "http://hello.default.localhost",
                "latestCreatedRevisionName": "hello-00002",
                "latestReadyRevisionName": "hello-00001",
                "conditions": [
                    {"type": "RoutesReady", "status": "True"},
                    {"type": "Ready", "status": "Unknown", "reason": "Deploying"},
                ],
            },
        });
        let cells = row_cells(LocalObjectKind::Service, &object, false, Timestamp::UNIX_EPOCH);
        let expected = [
            "hello",
            "http://hello.default.localhost",
            "hello-00002",
            "hello-00001",
            "Unknown",
            "Deploying",
        ];
        assert_eq!(cells, expected);
    }

    #[test]
    fn a_pod_shows_why_it_is_not_running() {
        let mut object = json!({
            "metadata": {"name": "p", "creationTimestamp": "2026-11-21T11:59:50Z"},
            "spec": {"containers": [{}, {}], "nodeName": "rouse"},
            "status": {"phase": "Running", "podIP": "10.244.1.2", "containerStatuses": [
                {"ready": true, "restartCount": 1, "state": {"running": {}}},
                {"ready": false, "restartCount": 2, "state": {"waiting": {"reason": "CrashLoopBackOff"}}},
            ]},
        });
        let now = timestamp("2026-11-21T12:00:00Z");
        let row = |object: &Value| row_cells(LocalObjectKind::Pod, object, true, now);
        assert_eq!(
            row(&object),
            ["p", "1/2", "CrashLoopBackOff", "3", "10s", "10.244.1.2", "rouse"]
        );
        object["metadata"]["deletionTimestamp"] = json!("2026-11-21T12:00:00Z");
        assert_eq!(row(&object)[2], "Terminating");
    }

    #[test]
    fn a_frozen_pod_stands_by_unless_it_ends_or_its_container_has_a_reason() {
        let mut object = json!({
            "metadata": {"name": "p", "creationTimestamp": "2026-11-21T11:59:50Z"},
            "status": {
                "phase": "Running",
                "conditions": [{"type": FROZEN_CONDITION, "status": "True"}],
                "containerStatuses": [{"ready": true, "restartCount": 0, "state": {"running": {}}}],
            },
        });
        let status_of = |object: &Value| {
            row_cells(LocalObjectKind::Pod, object, false, Timestamp::UNIX_EPOCH)[2].clone()
        };
        assert_eq!(status_of(&object), "Standby");
        object["status"]["conditions"][0]["status"] = json!("False");
        assert_eq!(status_of(&object), "Running", "it was thawed, or is not frozen yet");
        object["status"]["conditions"][0]["status"] = json!("True");
        object["status"]["containerStatuses"][0]["state"] =
            json!({"waiting": {"reason": "CrashLoopBackOff"}});
        assert_eq!(status_of(&object), "CrashLoopBackOff");
        object["metadata"]["deletionTimestamp"] = json!("2026-11-21T12:00:00Z");
        assert_eq!(status_of(&object), "Terminating");
    }

    #[test]
    fn a_pod_autoscaler_shows_its_frozen_pods_and_nothing_where_none_are_counted() {
        let row = |status: Value| {
            let object = json!({"metadata": {"name": "r"}, "status": status});
            row_cells(LocalObjectKind::PodAutoscaler, &object, false, Timestamp::UNIX_EPOCH)
        };
        let ready = json!([{"type": "Ready", "status": "False", "reason": "NoTraffic"}]);
        let asleep = json!({
            "desiredScale": 1, "actualScale": 1, "standbyScale": 1, "conditions": ready,
        });
        assert_eq!(row(asleep), ["r", "1", "1", "1", "False", "NoTraffic"]);
        let without_standby = json!({"desiredScale": 1, "actualScale": 1});
        assert_eq!(row(without_standby), ["r", "1", "1", "", "", ""]);
    }

    #[test]
    fn every_kind_has_a_cell_for_each_column() {
        for kind in LocalObjectKind::ALL {
            for wide in [false, true] {
                let cells = row_cells(kind, &json!({}), wide, Timestamp::UNIX_EPOCH);
                assert_eq!(cells.len(), column_names(kind, wide).len(), "{kind:?}");
            }
        }
    }
}
