//! Pure: annotations and keys of `config-autoscaler` about standby, checked once into a [`StandbyPolicy`].

use std::{collections::BTreeMap, time::Duration};

use common::wire::StandbyOrder;
use k8s_openapi::api::core::v1::{PodSpec, Probe};

use crate::model::{
    go_values::{GoDuration, parse_duration},
    knative::key,
    problem::Problem,
};

/// Greatest number of pods of a Revision that stand by.
pub const MAX_STANDBY_PODS: u32 = 10;
/// Timeout of a probe that names none, and the smallest one (kubernetes `pkg/apis/core/v1/defaults.go`).
const MIN_PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// Least and greatest `standby-agent-timeout`. A stream that is opened again at once must not count as lost.
const AGENT_TIMEOUT_BOUNDS: (GoDuration, GoDuration) =
    (GoDuration(10_000_000), GoDuration::from_secs(60));

/// Pods of a Revision that stand by, so that the next request need not wait for the start of one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StandbyPolicy {
    /// Number of pods that are kept while the Revision sleeps, from 0 to [`MAX_STANDBY_PODS`]; 0: none.
    pub pods: u32,
    /// True if the memory of a frozen pod is reclaimed.
    pub reclaims_memory: bool,
    /// Longest time of standby: a pod that is frozen ends once it has had its order for so long. `None`: no limit.
    pub ttl: Option<Duration>,
}

/// Settings of standby for all Revisions, from `config-autoscaler`; on a local node from options of `rouse up`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandbyConfig {
    /// Policy of a Revision without annotations.
    pub policy: StandbyPolicy,
    /// Time without a sign of its agent after which a pod on standby is passed over, from 10 ms to 60 s. No other
    /// component would thaw it.
    pub agent_timeout: Duration,
    /// True if frozen pods give back the resources that they request.
    pub resizes_pods: bool,
}

impl Default for StandbyConfig {
    fn default() -> Self {
        Self {
            policy: StandbyPolicy::default(),
            agent_timeout: StandbyOrder::DEFAULT_AGENT_TIMEOUT,
            resizes_pods: true,
        }
    }
}

impl StandbyConfig {
    /// Returns the policy of a Revision with these annotations, or every broken rule.
    ///
    /// `path` is the path of the annotations in the object, for the messages.
    pub fn strict_policy(
        &self,
        annotations: &BTreeMap<String, String>,
        path: &str,
    ) -> Result<StandbyPolicy, Vec<Problem>> {
        let (policy, problems) = self.lenient_policy(annotations, path);
        if problems.is_empty() { Ok(policy) } else { Err(problems) }
    }

    /// Returns the policy and every broken rule; an invalid annotation leaves the default in force.
    pub fn lenient_policy(
        &self,
        annotations: &BTreeMap<String, String>,
        path: &str,
    ) -> (StandbyPolicy, Vec<Problem>) {
        // A value that cannot be read leaves the default in force, and the others still count.
        let (mut policy, mut problems) = (self.policy, Vec::new());
        let text = |name: &str| annotations.get(name).map(|it| it.trim());
        let at = |name: &str| format!("{path}.{name}");
        if let Some(text) = text(key::STANDBY) {
            match parse_pods(text) {
                Ok(pods) => policy.pods = pods,
                Err(error) => problems.push(error.to_problem(at(key::STANDBY), text)),
            }
        }
        if let Some(text) = text(key::STANDBY_MEMORY) {
            match parse_reclaims_memory(text) {
                Some(reclaims_memory) => policy.reclaims_memory = reclaims_memory,
                None => {
                    let problem = Problem::invalid(at(key::STANDBY_MEMORY), text);
                    problems.push(problem.with_details("use keep or reclaim"));
                }
            }
        }
        if let Some(text) = text(key::STANDBY_TTL) {
            match parse_duration(text) {
                Ok(ttl) if ttl > GoDuration(0) => policy.ttl = Some(ttl.to_duration()),
                Ok(_) => {
                    let message = format!("standby-ttl={text} must be positive");
                    problems.push(Problem::new(at(key::STANDBY_TTL), message));
                }
                Err(_) => {
                    let problem = Problem::invalid(at(key::STANDBY_TTL), text);
                    problems.push(problem.with_details("write it as 30m or 24h"));
                }
            }
        }
        (policy, problems)
    }
}

/// Error of a text that is no number of pods on standby.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StandbyPodsError {
    /// The text is no whole number.
    NoNumber,
    /// The number is below 0 or above [`MAX_STANDBY_PODS`].
    OutOfBounds,
}

impl StandbyPodsError {
    /// Returns the error as a broken rule of the field at `path` with this text.
    pub fn to_problem(self, path: String, text: &str) -> Problem {
        match self {
            Self::NoNumber => Problem::invalid(path, text),
            Self::OutOfBounds => Problem::out_of_bounds(path, 0, text, MAX_STANDBY_PODS),
        }
    }
}

/// Parses the number of pods on standby.
pub fn parse_pods(text: &str) -> Result<u32, StandbyPodsError> {
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|it| it.is_ascii_digit()) {
        return Err(StandbyPodsError::NoNumber);
    }
    // A number that is too large for the type is out of bounds, too.
    let pods = text.parse::<u32>().ok().filter(|it| *it <= MAX_STANDBY_PODS);
    pods.ok_or(StandbyPodsError::OutOfBounds)
}

/// Parses `standby-agent-timeout`, a duration in Go's form.
///
/// # Errors
/// The text is no duration, or the duration is out of bounds.
pub fn parse_agent_timeout(text: &str) -> Result<Duration, String> {
    check_agent_timeout(parse_duration(text)?)
}

/// Checks that `standby-agent-timeout` is from 10 ms to 60 s, and returns it.
///
/// # Errors
/// The duration is out of these bounds.
pub fn check_agent_timeout(timeout: GoDuration) -> Result<Duration, String> {
    let (low, high) = AGENT_TIMEOUT_BOUNDS;
    if timeout < low || timeout > high {
        return Err(format!("standby-agent-timeout = {timeout}, must be in [{low}; {high}] range"));
    }
    Ok(timeout.to_duration())
}

/// Parses the treatment of a frozen pod's memory: true for `reclaim`, false for `keep`, `None` for any other text.
pub fn parse_reclaims_memory(text: &str) -> Option<bool> {
    match text {
        "keep" => Some(false),
        "reclaim" => Some(true),
        _ => None,
    }
}

/// Returns true if a probe of any container runs a command. The kubelet could not run it in a frozen pod, and each run
/// would thaw the pod.
pub fn has_exec_probe(pod: &PodSpec) -> bool {
    probes(pod).any(|it| it.exec.is_some())
}

/// Returns the longest time that a probe of the kubelet may take, and at least a second.
pub fn longest_probe_timeout(pod: &PodSpec) -> Duration {
    let seconds = |it: &Probe| u64::try_from(it.timeout_seconds?).ok();
    let timeouts = probes(pod).filter_map(seconds).map(Duration::from_secs);
    timeouts.max().unwrap_or_default().max(MIN_PROBE_TIMEOUT)
}

/// Iterates over the probes of all containers.
fn probes(pod: &PodSpec) -> impl Iterator<Item = &Probe> {
    let containers = pod.init_containers.iter().flatten().chain(&pod.containers);
    containers.flat_map(|it| {
        [&it.liveness_probe, &it.readiness_probe, &it.startup_probe].into_iter().flatten()
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::model::problem::problems_line;

    fn annotated(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    fn policy(pairs: &[(&str, &str)]) -> Result<StandbyPolicy, String> {
        let read = StandbyConfig::default().strict_policy(&annotated(pairs), "a");
        read.map_err(|problems| problems_line(&problems))
    }

    #[test]
    fn each_annotation_sets_its_field() {
        assert_eq!(policy(&[]), Ok(StandbyPolicy::default()));
        let all =
            [(key::STANDBY, " 10 "), (key::STANDBY_MEMORY, "reclaim"), (key::STANDBY_TTL, "24h")];
        let ttl = Some(Duration::from_secs(86_400));
        assert_eq!(policy(&all), Ok(StandbyPolicy { pods: 10, reclaims_memory: true, ttl }));
        let keep = policy(&[(key::STANDBY, "0"), (key::STANDBY_MEMORY, "keep")]);
        assert_eq!(keep, Ok(StandbyPolicy::default()));
    }

    #[test]
    fn an_annotation_that_has_no_meaning_is_refused_by_name() {
        for (name, value, message) in [
            (key::STANDBY, "11", "expected 0 <= 11 <= 10: a.rouse.dev/standby"),
            (key::STANDBY, "-1", "expected 0 <= -1 <= 10: a.rouse.dev/standby"),
            (
                key::STANDBY,
                "99999999999999999999",
                "expected 0 <= 99999999999999999999 <= 10: a.rouse.dev/standby",
            ),
            (key::STANDBY, "1.5", "invalid value: 1.5: a.rouse.dev/standby"),
            (key::STANDBY, "", "invalid value: : a.rouse.dev/standby"),
            (key::STANDBY, "one", "invalid value: one: a.rouse.dev/standby"),
            (
                key::STANDBY_MEMORY,
                "swap",
                "invalid value: swap: a.rouse.dev/standby-memory (use keep or reclaim)",
            ),
            (key::STANDBY_TTL, "0s", "standby-ttl=0s must be positive: a.rouse.dev/standby-ttl"),
            (key::STANDBY_TTL, "-1h", "standby-ttl=-1h must be positive: a.rouse.dev/standby-ttl"),
            (
                key::STANDBY_TTL,
                "24",
                "invalid value: 24: a.rouse.dev/standby-ttl (write it as 30m or 24h)",
            ),
        ] {
            assert_eq!(policy(&[(name, value)]), Err(message.to_owned()));
        }
    }

    #[test]
    fn a_timeout_of_agents_is_accepted_up_to_its_bounds() {
        for (text, timeout) in [
            ("10ms", Ok(Duration::from_millis(10))),
            ("1m", Ok(Duration::from_secs(60))),
            ("9.9ms", Err("standby-agent-timeout = 9.9ms, must be in [10ms; 1m0s] range")),
            ("61s", Err("standby-agent-timeout = 1m1s, must be in [10ms; 1m0s] range")),
            ("-1s", Err("standby-agent-timeout = -1s, must be in [10ms; 1m0s] range")),
            ("30", Err("time: missing unit in duration \"30\"")),
        ] {
            assert_eq!(parse_agent_timeout(text), timeout.map_err(str::to_owned), "{text}");
        }
        let default = StandbyConfig::default().agent_timeout;
        assert_eq!(check_agent_timeout(GoDuration::from(default)), Ok(default));
    }

    /// Objects that were admitted before, or without the webhook.
    #[test]
    fn an_invalid_annotation_leaves_the_other_settings_in_force() {
        let policy = StandbyPolicy { pods: 2, reclaims_memory: true, ttl: None };
        let config = StandbyConfig { policy, ..StandbyConfig::default() };
        let annotations = annotated(&[
            (key::STANDBY, "many"),
            (key::STANDBY_MEMORY, "keep"),
            (key::STANDBY_TTL, "soon"),
        ]);
        let (policy, problems) = config.lenient_policy(&annotations, "a");
        assert_eq!(policy, StandbyPolicy { pods: 2, reclaims_memory: false, ttl: None });
        assert_eq!(problems.len(), 2);
    }

    fn pod(value: Value) -> PodSpec {
        serde_json::from_value(value).expect("a pod")
    }

    #[test]
    fn a_command_in_a_probe_of_any_container_is_found() {
        let exec = json!({"exec": {"command": ["true"]}});
        let http = json!({"httpGet": {"port": 8080}});
        for kind in ["livenessProbe", "readinessProbe", "startupProbe"] {
            let main = pod(json!({"containers": [{"name": "a"}, {"name": "b", kind: exec}]}));
            let sidecar = json!([{"name": "i", "restartPolicy": "Always", kind: exec}]);
            let sidecar = pod(json!({"containers": [{"name": "a"}], "initContainers": sidecar}));
            let asked = pod(json!({"containers": [{"name": "a", kind: http}]}));
            let found = [&main, &sidecar, &asked].map(has_exec_probe);
            assert_eq!(found, [true, true, false], "{kind}");
        }
    }

    #[test]
    fn a_probe_may_take_the_longest_timeout_of_all() {
        let timeout = |mut container: Value| {
            container["name"] = "a".into();
            longest_probe_timeout(&pod(json!({"containers": [container]}))).as_secs()
        };
        let probe = |seconds: i32| json!({"tcpSocket": {"port": 1}, "timeoutSeconds": seconds});
        assert_eq!(timeout(json!({})), 1, "none");
        assert_eq!(timeout(json!({"livenessProbe": {"tcpSocket": {"port": 1}}})), 1, "default");
        assert_eq!(timeout(json!({"livenessProbe": probe(0)})), 1);
        assert_eq!(timeout(json!({"livenessProbe": probe(3), "readinessProbe": probe(5)})), 5);
    }
}
