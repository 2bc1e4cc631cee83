//! Pure: objects and metrics → the values that `rouse top` shows.

use std::{collections::BTreeMap, time::Instant};

use serde_json::Value;

use crate::view;

/// Column names of the table.
pub(super) const COLUMNS: [&str; 9] =
    ["SERVICE", "READY", "PODS", "STANDBY", "WANTED", "IN FLIGHT", "WAITING", "PATH", "REQ/S"];

/// Values of the whole node at one moment.
#[derive(Clone, Debug)]
pub(super) struct TopSnapshot {
    /// Time of the snapshot, from which rates are computed.
    pub(super) at: Instant,
    /// Rows of all services, sorted by name.
    pub(super) services: Vec<ServiceStats>,
    /// Error that leaves values unknown, if any.
    pub(super) error: Option<String>,
}

/// Row of one service.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ServiceStats {
    name: String,
    ready: String,
    /// Pods of the service that exist, frozen ones included.
    pub(super) pods: usize,
    /// Frozen pods of the service.
    pub(super) standby: usize,
    /// Pods that the autoscaler requests. This and other values of the autoscaler are `None` while it gives none.
    wanted: Option<u64>,
    in_flight: Option<u64>,
    waiting: Option<u64>,
    /// Path of new connections: `direct`, `activator`, `standby`, `asleep`, or `-` if it is unknown.
    pub(super) path: String,
    /// Total of requests that began at pods.
    requests_started: Option<u64>,
    /// Requests per second since the last snapshot.
    pub(super) rate: Option<f64>,
}

impl TopSnapshot {
    /// Combines services, pods and the autoscaler's metrics, or the error for which there are none. Rates are computed
    /// from the snapshot `before`.
    pub(super) fn new(
        taken_at: Instant,
        services: &[Value],
        pods: &[Value],
        metrics: Result<String, String>,
        before: Option<&Self>,
    ) -> Self {
        let figures = metrics.as_ref().ok().map(|text| parse_metrics(text));
        let mut services: Vec<ServiceStats> =
            services.iter().map(|it| ServiceStats::new(it, pods, figures.as_ref())).collect();
        services.sort_by(|one, two| one.name.cmp(&two.name));
        if let Some(before) = before {
            let seconds = taken_at.saturating_duration_since(before.at).as_secs_f64();
            for service in &mut services {
                let old = before.services.iter().find(|it| it.name == service.name);
                service.rate = old.filter(|_| seconds > 0.0).and_then(|old| {
                    // A Revision that was asleep continues its count. One of a restarted autoscaler begins at zero:
                    // its rate is 0 then, never negative.
                    let (now, before) = service.requests_started.zip(old.requests_started)?;
                    Some(now.saturating_sub(before) as f64 / seconds)
                });
            }
        }
        Self { at: taken_at, services, error: metrics.err() }
    }
}

impl ServiceStats {
    fn new(service: &Value, pods: &[Value], figures: Option<&ServiceMetricSums>) -> Self {
        let meta = &service["metadata"];
        let (namespace, name) =
            (view::scalar_text(&meta["namespace"]), view::scalar_text(&meta["name"]));
        let is_of_service = |pod: &&Value| {
            let labels = &pod["metadata"]["labels"];
            pod["metadata"]["namespace"] == namespace.as_str()
                && labels["serving.knative.dev/service"] == name.as_str()
        };
        let key = (namespace.clone(), name.clone());
        let sum = |metric: &str| {
            let value = figures?.get(metric).and_then(|sums| sums.get(&key));
            Some(value.copied().unwrap_or_default())
        };
        let count = |metric: &str| sum(metric).map(to_count);
        let own_pods: Vec<&Value> = pods.iter().filter(is_of_service).collect();
        let standby = own_pods.iter().filter(|pod| view::is_frozen(pod)).count();
        let pods = own_pods.len();
        // Without pods no path is in use, whatever the last decision was. The autoscaler exports no path of a service
        // that is asleep, also if its pods stand by.
        let path = match (pods, sum("rouse_revision_direct").map(|direct| direct > 0.0)) {
            (0, _) => "asleep",
            _ if standby == pods => "standby",
            (_, Some(true)) => "direct",
            (_, Some(false)) => "activator",
            (_, None) => "-",
        };
        Self {
            ready: view::condition_field(service, "Ready", "status"),
            name: format!("{namespace}/{name}"),
            pods,
            standby,
            wanted: count("kn_revision_pods_requested"),
            in_flight: count("rouse_revision_in_flight_requests"),
            waiting: count("rouse_revision_waiting_requests"),
            path: path.to_owned(),
            requests_started: count("rouse_revision_requests_total"),
            rate: None,
        }
    }

    /// Returns true if a pod of the service runs.
    pub(super) fn is_awake(&self) -> bool {
        self.pods > self.standby
    }

    /// Cells of the row, in the order of [`COLUMNS`].
    pub(super) fn cells(&self) -> [String; COLUMNS.len()] {
        let unknown = || "-".to_owned();
        let count = |value: Option<u64>| value.map_or_else(unknown, |value| value.to_string());
        [
            self.name.clone(),
            self.ready.clone(),
            self.pods.to_string(),
            self.standby.to_string(),
            count(self.wanted),
            count(self.in_flight),
            count(self.waiting),
            self.path.clone(),
            self.rate.map_or_else(unknown, |rate| format!("{rate:.0}")),
        ]
    }
}

/// Converts a count that was transmitted as a float.
fn to_count(value: f64) -> u64 {
    value.max(0.0) as u64
}

/// Sums over a service's Revisions, by metric, then by namespace and service.
type ServiceMetricSums = BTreeMap<String, BTreeMap<(String, String), f64>>;

/// Parses the lines of a metrics text that have a service's labels.
fn parse_metrics(text: &str) -> ServiceMetricSums {
    let mut out = ServiceMetricSums::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let Some((name, rest)) = line.split_once('{') else { continue };
        // From the right: a label's value may contain a brace.
        let Some((labels, value)) = rest.rsplit_once("} ") else { continue };
        let label = |name: &str| {
            let value =
                labels.split(',').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
            value.map(|value| value.trim_matches('"').to_owned())
        };
        let key = (label("k8s_namespace_name"), label("kn_service_name"));
        // A sample may carry a time stamp after its value.
        let value = value.split(' ').next().and_then(|value| value.parse::<f64>().ok());
        if let ((Some(namespace), Some(service)), Some(value)) = (key, value) {
            *out.entry(name.to_owned()).or_default().entry((namespace, service)).or_default() +=
                value;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use controller::model::knative::key::FROZEN_CONDITION;
    use serde_json::json;

    use super::*;

    fn metrics(requests_started: u32) -> String {
        let labels_of = |revision: &str| {
            format!(
                "k8s_namespace_name=\"default\",kn_service_name=\"hello\",kn_revision_name=\"{revision}\""
            )
        };
        let (one, two) = (labels_of("hello-00001"), labels_of("hello-00002"));
        format!(
            "# TYPE rouse_revision_requests counter\n\
             rouse_revision_requests_total{{{one}}} {requests_started}\n\
             rouse_revision_requests_total{{{two}}} 5\n\
             rouse_revision_in_flight_requests{{{one}}} 3.0\n\
             kn_revision_pods_requested{{{one}}} 2.0\n\
             rouse_revision_direct{{{one}}} 1.0\n# EOF\n"
        )
    }

    #[test]
    fn a_service_shows_its_pods_path_and_rate() {
        let service = json!({
            "metadata": {"namespace": "default", "name": "hello"},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        });
        let labels = json!({"serving.knative.dev/service": "hello"});
        let pod = json!({"metadata": {"namespace": "default", "labels": labels}});
        let take_snapshot = |taken_at, pods: &[Value], requests_started, before| {
            TopSnapshot::new(
                taken_at,
                std::slice::from_ref(&service),
                pods,
                Ok(metrics(requests_started)),
                before,
            )
        };
        let start = Instant::now();
        let first = take_snapshot(start, std::slice::from_ref(&pod), 100, None);
        let cells = first.services[0].cells();
        assert_eq!(cells, ["default/hello", "True", "1", "0", "2", "3", "0", "direct", "-"]);
        let later = take_snapshot(start + Duration::from_secs(2), &[pod], 400, Some(&first));
        assert_eq!(later.services[0].rate, Some(150.0));
        let asleep = take_snapshot(start, &[], 400, None);
        assert_eq!(asleep.services[0].path, "asleep");
    }

    #[test]
    fn a_service_stands_by_while_all_its_pods_are_frozen_and_is_awake_once_one_runs() {
        let service = json!({"metadata": {"namespace": "default", "name": "hello"}});
        let pod = |frozen: &str| {
            json!({
                "metadata": {
                    "namespace": "default",
                    "labels": {"serving.knative.dev/service": "hello"},
                },
                "status": {"conditions": [{"type": FROZEN_CONDITION, "status": frozen}]},
            })
        };
        let row_of = |pods: &[Value], metrics: Result<String, String>| {
            let services = std::slice::from_ref(&service);
            let snapshot = TopSnapshot::new(Instant::now(), services, pods, metrics, None);
            let service = &snapshot.services[0];
            (service.pods, service.standby, service.path.clone(), service.is_awake())
        };
        let frozen = [pod("True"), pod("True")];
        // The autoscaler exports nothing of a service that is asleep.
        let asleep = || Ok("# EOF\n".to_owned());
        assert_eq!(row_of(&frozen, asleep()), (2, 2, "standby".to_owned(), false));
        let unknown = || Err("autoscaler: refused".to_owned());
        assert_eq!(row_of(&frozen, unknown()), (2, 2, "standby".to_owned(), false));
        let thawed = [pod("False"), pod("True")];
        assert_eq!(row_of(&thawed, Ok(metrics(1))), (2, 1, "direct".to_owned(), true));
        assert_eq!(row_of(&[], asleep()), (0, 0, "asleep".to_owned(), false));
    }

    #[test]
    fn values_of_an_autoscaler_that_gives_none_are_unknown_and_not_zero() {
        let service = json!({"metadata": {"namespace": "default", "name": "hello"}});
        let labels = json!({"serving.knative.dev/service": "hello"});
        let pod = json!({"metadata": {"namespace": "default", "labels": labels}});
        let start = Instant::now();
        let take_snapshot = |seconds, metrics, before| {
            let taken_at = start + Duration::from_secs(seconds);
            let (services, pods) = (std::slice::from_ref(&service), std::slice::from_ref(&pod));
            TopSnapshot::new(taken_at, services, pods, metrics, before)
        };
        let silent = take_snapshot(0, Err("autoscaler: refused".to_owned()), None);
        assert_eq!(silent.error.as_deref(), Some("autoscaler: refused"));
        let cells = silent.services[0].cells();
        assert_eq!(cells, ["default/hello", "", "1", "0", "-", "-", "-", "-", "-"]);
        let back = take_snapshot(1, Ok(metrics(1_000)), Some(&silent));
        assert_eq!(back.services[0].rate, None, "the whole count is no rate");
        let later = take_snapshot(2, Ok(metrics(1_010)), Some(&back));
        assert_eq!(later.services[0].rate, Some(10.0));
    }
}
