//! Pure: stages of one cold start on a real cluster, from the client's record, logs and a watch of pods.

use std::collections::BTreeMap;

use crate::{cold_start::parse_unix_us, load::LoadRecord};

/// State of a pod or Deployment at the moment of one watch event.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct WatchObservation {
    pub(super) at_us: u64,
    pub(super) name: String,
    /// Name of the node; empty while the pod has none.
    pub(super) node: String,
    pub(super) is_ready: bool,
}

/// Stages of a cold start, in order. A cold start reaches each of them at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ColdStartStage {
    /// The autoscaler decided to start a pod.
    Decided,
    /// The API server acknowledged the new scale.
    Patched,
    /// The watch showed the pod for the first time.
    Created,
    /// The watch showed the pod with a node.
    Bound,
    /// The kubelet requested a sandbox: it has seen the pod and mounted its volumes.
    SandboxRequested,
    /// containerd returned the sandbox, with namespaces and network.
    SandboxReady,
    /// containerd returned from starting the container's process.
    Started,
    /// The server's call of `listen` returned.
    Listening,
}

/// One cold start: time of each stage, Unix time in µs. Stages without a trace are missing.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct ClusterColdStart {
    pub(super) requested_us: u64,
    pub(super) first_byte_us: u64,
    pub(super) stage_times: BTreeMap<ColdStartStage, u64>,
    /// Name of the node of the pod that responded.
    pub(super) node: String,
    /// Time at which the watch first showed the pod as ready.
    pub(super) ready_us: Option<u64>,
}

/// Sources of the stages of all cold starts of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct ColdStartTraces<'a> {
    pub(super) pods: &'a [WatchObservation],
    /// Logs of all autoscaler replicas.
    pub(super) autoscaler: &'a str,
    /// Logs of all controller replicas.
    pub(super) controller: &'a str,
    /// Logs of containerd on all nodes.
    pub(super) containerd: &'a str,
}

impl ClusterColdStart {
    /// Finds the stages of the cold start that the request in `record` caused.
    pub(super) fn from_record(record: &LoadRecord, traces: &ColdStartTraces<'_>) -> Self {
        let (requested_us, first_byte_us) = (record.at_us, record.at_us + record.first_byte_us);
        // Logs name the Revision, and a pod is named after it.
        let revision = record.pod.split("-deployment-").next().unwrap_or_default();
        // A log holds the decisions of the whole run: only a line within this request's time is its own.
        let logged = |log: &str, phrase: &str, subject: &str| {
            let mut lines = log.lines().filter(|it| it.contains(phrase) && it.contains(subject));
            lines.find_map(|line| {
                parse_timestamp(line).filter(|at| (requested_us..=first_byte_us).contains(at))
            })
        };
        let observations = || traces.pods.iter().filter(|it| it.name == record.pod);
        let bound = observations().find(|it| !it.node.is_empty());
        let sandbox = SandboxTimes::from_log(&record.pod, traces.containerd);
        let subject = |end: &str| format!("default/{revision}{end}");
        let found = [
            (ColdStartStage::Decided, logged(traces.autoscaler, "scale decided", &subject(" "))),
            (
                ColdStartStage::Patched,
                logged(traces.controller, " scaled ", &subject("-deployment scale")),
            ),
            (ColdStartStage::Created, observations().next().map(|it| it.at_us)),
            (ColdStartStage::Bound, bound.map(|it| it.at_us)),
            (ColdStartStage::SandboxRequested, sandbox.requested),
            (ColdStartStage::SandboxReady, sandbox.ready),
            (ColdStartStage::Started, sandbox.started),
            (ColdStartStage::Listening, Some(record.listening_us)),
        ];
        let reached = found.into_iter().filter_map(|(stage, at)| Some((stage, at?)));
        Self {
            requested_us,
            first_byte_us,
            stage_times: reached.collect(),
            node: bound.map(|it| it.node.clone()).unwrap_or_default(),
            ready_us: observations().find(|it| it.is_ready).map(|it| it.at_us),
        }
    }

    /// Time from the request to `stage`, in ms.
    pub(super) fn ms_until(&self, stage: ColdStartStage) -> Option<f64> {
        self.stage_times.get(&stage).map(|at| elapsed_ms(self.requested_us, *at))
    }

    /// Time from `first` to `second`, in ms; 0 if a late watch event reports `first` after `second`.
    pub(super) fn ms_between(&self, first: ColdStartStage, second: ColdStartStage) -> Option<f64> {
        Some(elapsed_ms(*self.stage_times.get(&first)?, *self.stage_times.get(&second)?))
    }

    /// Time from `listen` to the first byte, in ms.
    pub(super) fn listen_to_first_byte(&self) -> Option<f64> {
        self.stage_times
            .get(&ColdStartStage::Listening)
            .map(|at| elapsed_ms(*at, self.first_byte_us))
    }

    /// Time from the first byte until the API server showed the pod as ready, in ms; negative if ready came first.
    pub(super) fn first_byte_to_ready(&self) -> Option<f64> {
        Some((self.ready_us? as f64 - self.first_byte_us as f64) / 1e3)
    }

    /// Time from the request to the first byte, in ms.
    pub(super) fn total(&self) -> f64 {
        elapsed_ms(self.requested_us, self.first_byte_us)
    }
}

/// Time at which the container of a pod was started, Unix time in µs.
pub(super) fn container_started_at(pod: &str, containerd: &str) -> Option<u64> {
    SandboxTimes::from_log(pod, containerd).started
}

fn elapsed_ms(from_us: u64, to_us: u64) -> f64 {
    to_us.saturating_sub(from_us) as f64 / 1e3
}

/// Times from containerd's log of a pod's sandbox and its one container, Unix time in µs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct SandboxTimes {
    requested: Option<u64>,
    ready: Option<u64>,
    started: Option<u64>,
}

impl SandboxTimes {
    /// Reads the times of a pod's sandbox and container in the log of containerd.
    fn from_log(pod: &str, log: &str) -> Self {
        // The call's begin and its return are lines of this form; the first one is the begin.
        let is_sandbox_line =
            |it: &&str| it.contains("msg=\"RunPodSandbox for ") && it.contains(pod);
        let requested = log.lines().find(is_sandbox_line).and_then(parse_timestamp);
        let ready_line =
            log.lines().find(|it| is_sandbox_line(it) && it.contains("returns sandbox id"));
        // Lines of sandbox and container share ids only: pod → sandbox id → container id.
        let sandbox = ready_line.and_then(returned_id).unwrap_or("none");
        let created_line = log.lines().find(|line| {
            line.contains("CreateContainer within sandbox")
                && line.contains(sandbox)
                && line.contains("returns container id")
        });
        let container = created_line.and_then(returned_id).unwrap_or("none");
        let started = log.lines().find(|line| {
            line.contains("StartContainer for")
                && line.contains(container)
                && line.contains("returns")
        });
        Self {
            requested,
            ready: ready_line.and_then(parse_timestamp),
            started: started.and_then(parse_timestamp),
        }
    }
}

/// Last quoted 64-digit id of a line: the id that a call returned.
fn returned_id(line: &str) -> Option<&str> {
    line.rsplit('"').map(|word| word.trim_end_matches('\\')).find(|word| word.len() == 64)
}

/// Time of a log line: `2026-11-21T10:00:00.123456Z …`, or `time="2026-11-21T10:00:00.123456789Z" …`.
fn parse_timestamp(line: &str) -> Option<u64> {
    let word = line.split_whitespace().next()?;
    parse_unix_us(word.strip_prefix("time=").unwrap_or(word).trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "wake0-00001-deployment-5d-abcde";

    fn at(second: u64, micros: u64) -> u64 {
        parse_unix_us("2026-01-01T00:00:00Z").unwrap() + second * 1_000_000 + micros
    }

    fn record() -> LoadRecord {
        serde_json::from_value(serde_json::json!({
            "at_us": at(0, 0), "took_us": 900_000, "first_byte_us": 800_000, "status": 200, "fresh": true,
            "pod": POD, "direct": false, "listening_us": at(0, 799_000),
        }))
        .unwrap()
    }

    fn containerd() -> String {
        let (sandbox, container) = ("a".repeat(64), "b".repeat(64));
        format!(
            r#"time="2026-01-01T00:00:00.200000001Z" level=info msg="RunPodSandbox for name:\"{POD}\" namespace:\"default\""
time="2026-01-01T00:00:00.300000001Z" level=info msg="RunPodSandbox for name:\"{POD}\" returns sandbox id \"{sandbox}\""
time="2026-01-01T00:00:00.400000001Z" level=info msg="CreateContainer within sandbox \"{sandbox}\" for name:\"c\" returns container id \"{container}\""
time="2026-01-01T00:00:00.500000001Z" level=info msg="StartContainer for \"{container}\" returns successfully"
"#
        )
    }

    #[test]
    fn the_stages_of_a_cold_start_come_from_the_traces_of_each_component() {
        let autoscaler = "2025-12-31T00:00:00Z  INFO a: scale decided revision=default/wake0-00001 wanted=0\n\
                          2026-01-01T00:00:00.001Z  INFO a: scale decided revision=default/wake0-00001 wanted=1\n";
        let controller = "2026-01-01T00:00:00.006Z  INFO c: scaled object=deployments/default/wake0-00001-deployment scale replicas=1\n";
        let observation = |ms: u64, node: &str, is_ready| WatchObservation {
            at_us: at(0, ms * 1000),
            name: POD.into(),
            node: node.into(),
            is_ready,
        };
        let pods = [
            observation(10, "", false),
            observation(12, "node2", false),
            observation(850, "node2", true),
        ];
        let containerd = containerd();
        let traces =
            ColdStartTraces { pods: &pods, autoscaler, controller, containerd: &containerd };
        let cold_start = ClusterColdStart::from_record(&record(), &traces);
        let until = |stage| cold_start.ms_until(stage).unwrap().round();
        let stages = [
            ColdStartStage::Decided,
            ColdStartStage::Patched,
            ColdStartStage::Created,
            ColdStartStage::Bound,
            ColdStartStage::SandboxRequested,
            ColdStartStage::SandboxReady,
            ColdStartStage::Started,
            ColdStartStage::Listening,
        ];
        assert_eq!(stages.map(until), [1.0, 6.0, 10.0, 12.0, 200.0, 300.0, 500.0, 799.0]);
        assert_eq!(cold_start.listen_to_first_byte(), Some(1.0));
        assert_eq!((cold_start.total(), cold_start.node.as_str()), (800.0, "node2"));
        assert_eq!(
            cold_start.ms_between(ColdStartStage::Patched, ColdStartStage::Created),
            Some(4.0)
        );
        assert_eq!(cold_start.first_byte_to_ready(), Some(50.0));
    }

    #[test]
    fn a_stage_that_left_no_trace_is_missing_and_not_zero() {
        let traces = ColdStartTraces { pods: &[], autoscaler: "", controller: "", containerd: "" };
        let cold_start = ClusterColdStart::from_record(&record(), &traces);
        assert_eq!(cold_start.ms_until(ColdStartStage::Decided), None);
        assert_eq!(cold_start.ms_between(ColdStartStage::Created, ColdStartStage::Bound), None);
    }
}
