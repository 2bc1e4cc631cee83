//! Pure: one wake on a real cluster, split into its steps by the client's record, the parts' logs and a watch of pods.

use std::collections::BTreeMap;

use crate::{coldstart::unix_us_of, load::Record};

/// A pod as the watch showed it at some moment.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sight {
    pub(super) at_us: u64,
    pub(super) pod: String,
    /// Empty while it has none.
    pub(super) node: String,
    pub(super) is_ready: bool,
}

/// What a wake passes, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    /// The autoscaler has decided.
    Decided,
    /// The API server has acknowledged the scale.
    Patched,
    /// There is a pod.
    Created,
    /// It has a node.
    Bound,
    /// The kubelet asks for a sandbox: it has seen the pod and mounted its volumes.
    SandboxAsked,
    /// Namespaces and network are there.
    SandboxReady,
    /// The container's process was started.
    Started,
    /// Its `listen` returned.
    Listening,
}

/// One wake: when each step was reached, Unix time in µs; a step that left no trace is missing.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Wake {
    pub(super) asked_us: u64,
    pub(super) first_byte_us: u64,
    pub(super) reached: BTreeMap<Stage, u64>,
    /// The node of the pod that answered.
    pub(super) node: String,
    /// When the API server showed that the kubelet calls the pod ready.
    pub(super) ready_us: Option<u64>,
}

/// Where the traces of all wakes stand.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traces<'a> {
    pub(super) pods: &'a [Sight],
    /// Of all autoscalers.
    pub(super) autoscaler: &'a str,
    /// Of all controllers.
    pub(super) controller: &'a str,
    /// Of all nodes.
    pub(super) containerd: &'a str,
}

impl Wake {
    /// Splits the wake that `record` is of.
    pub(super) fn of(record: &Record, traces: &Traces<'_>) -> Self {
        let (from, to) = (record.at_us, record.at_us + record.first_byte_us);
        let revision = record.pod.split("-deployment-").next().unwrap_or_default();
        let logged = |log: &str, phrase: &str, subject: &str| {
            let mut lines = log.lines().filter(|it| it.contains(phrase) && it.contains(subject));
            lines.find_map(|it| stamp(it).filter(|at| (from..=to).contains(at)))
        };
        let sights = || traces.pods.iter().filter(|it| it.pod == record.pod);
        let bound = sights().find(|it| !it.node.is_empty());
        let sandbox = Sandbox::of(&record.pod, traces.containerd);
        let revision = |end: &str| format!("default/{revision}{end}");
        let found = [
            (Stage::Decided, logged(traces.autoscaler, "scale decided", &revision(" "))),
            (Stage::Patched, logged(traces.controller, " scaled ", &revision("-deployment scale"))),
            (Stage::Created, sights().next().map(|it| it.at_us)),
            (Stage::Bound, bound.map(|it| it.at_us)),
            (Stage::SandboxAsked, sandbox.asked),
            (Stage::SandboxReady, sandbox.ready),
            (Stage::Started, sandbox.started),
            (Stage::Listening, Some(record.listening_us)),
        ];
        let reached = found.into_iter().filter_map(|(stage, at)| Some((stage, at?)));
        Self {
            asked_us: from,
            first_byte_us: to,
            reached: reached.collect(),
            node: bound.map(|it| it.node.clone()).unwrap_or_default(),
            ready_us: sights().find(|it| it.is_ready).map(|it| it.at_us),
        }
    }

    /// From the request to `stage`, in ms.
    pub(super) fn until(&self, stage: Stage) -> Option<f64> {
        self.reached.get(&stage).map(|at| ms(self.asked_us, *at))
    }

    /// From `first` to `second`, in ms. A watch may bring its word after what followed from it: then 0.
    pub(super) fn between(&self, first: Stage, second: Stage) -> Option<f64> {
        Some(ms(*self.reached.get(&first)?, *self.reached.get(&second)?))
    }

    /// From `listen` to the first byte, in ms.
    pub(super) fn listen_to_first_byte(&self) -> Option<f64> {
        self.reached.get(&Stage::Listening).map(|at| ms(*at, self.first_byte_us))
    }

    /// How much later than the first byte the API server called the pod ready, in ms: below 0 where it was sooner.
    pub(super) fn first_byte_to_ready(&self) -> Option<f64> {
        Some((self.ready_us? as f64 - self.first_byte_us as f64) / 1e3)
    }

    /// The whole, in ms.
    pub(super) fn total(&self) -> f64 {
        ms(self.asked_us, self.first_byte_us)
    }
}

/// When the container of a pod was started, Unix time in µs.
pub(super) fn started_of(pod: &str, containerd: &str) -> Option<u64> {
    Sandbox::of(pod, containerd).started
}

fn ms(from_us: u64, to_us: u64) -> f64 {
    to_us.saturating_sub(from_us) as f64 / 1e3
}

/// What containerd says of a pod's sandbox and its one container, Unix time in µs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sandbox {
    asked: Option<u64>,
    ready: Option<u64>,
    started: Option<u64>,
}

impl Sandbox {
    fn of(pod: &str, log: &str) -> Self {
        let asks = |it: &&str| it.contains("msg=\"RunPodSandbox for ") && it.contains(pod);
        let mut lines = log.lines();
        let asked = lines.find(asks).and_then(stamp);
        let done = log.lines().find(|it| asks(it) && it.contains("returns sandbox id"));
        let sandbox = done.and_then(id).unwrap_or("none");
        let made = log.lines().find(|it| {
            it.contains("CreateContainer within sandbox")
                && it.contains(sandbox)
                && it.contains("returns container id")
        });
        let container = made.and_then(id).unwrap_or("none");
        let started = log.lines().find(|it| {
            it.contains("StartContainer for") && it.contains(container) && it.contains("returns")
        });
        Self { asked, ready: done.and_then(stamp), started: started.and_then(stamp) }
    }
}

/// The last quoted word of a line: what a call returned.
fn id(line: &str) -> Option<&str> {
    line.rsplit('"').map(|word| word.trim_end_matches('\\')).find(|word| word.len() == 64)
}

/// When a line was written: `2026-11-21T10:00:00.123456Z …`, or `time="2026-11-21T10:00:00.123456789Z" …`.
fn stamp(line: &str) -> Option<u64> {
    let word = line.split_whitespace().next()?;
    unix_us_of(word.strip_prefix("time=").unwrap_or(word).trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "wake0-00001-deployment-5d-abcde";

    fn at(second: u64, micros: u64) -> u64 {
        unix_us_of("2026-01-01T00:00:00Z").unwrap() + second * 1_000_000 + micros
    }

    fn record() -> Record {
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
    fn a_wake_is_split_by_what_each_part_left_behind() {
        let autoscaler = "2025-12-31T00:00:00Z  INFO a: scale decided revision=default/wake0-00001 wanted=0\n\
                          2026-01-01T00:00:00.001Z  INFO a: scale decided revision=default/wake0-00001 wanted=1\n";
        let controller = "2026-01-01T00:00:00.006Z  INFO c: scaled object=deployments/default/wake0-00001-deployment scale replicas=1\n";
        let sight = |ms: u64, node: &str, is_ready| Sight {
            at_us: at(0, ms * 1000),
            pod: POD.into(),
            node: node.into(),
            is_ready,
        };
        let pods = [sight(10, "", false), sight(12, "node2", false), sight(850, "node2", true)];
        let containerd = containerd();
        let traces = Traces { pods: &pods, autoscaler, controller, containerd: &containerd };
        let wake = Wake::of(&record(), &traces);
        let until = |stage| wake.until(stage).unwrap().round();
        let all = [
            Stage::Decided,
            Stage::Patched,
            Stage::Created,
            Stage::Bound,
            Stage::SandboxAsked,
            Stage::SandboxReady,
            Stage::Started,
            Stage::Listening,
        ];
        assert_eq!(all.map(until), [1.0, 6.0, 10.0, 12.0, 200.0, 300.0, 500.0, 799.0]);
        assert_eq!(wake.listen_to_first_byte(), Some(1.0));
        assert_eq!((wake.total(), wake.node.as_str()), (800.0, "node2"));
        assert_eq!(wake.between(Stage::Patched, Stage::Created), Some(4.0));
        assert_eq!(wake.first_byte_to_ready(), Some(50.0));
    }

    #[test]
    fn a_step_that_left_no_trace_is_missing_and_not_zero() {
        let traces = Traces { pods: &[], autoscaler: "", controller: "", containerd: "" };
        let wake = Wake::of(&record(), &traces);
        assert_eq!(wake.until(Stage::Decided), None);
        assert_eq!(wake.between(Stage::Created, Stage::Bound), None);
    }
}
