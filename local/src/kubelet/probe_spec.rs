//! Pure: probes of a container: their actions, times, and the results in a row that decide.

use std::time::Duration;

use common::wire::ProbeHandler;
use k8s_openapi::api::core::v1::{Container, ContainerPort, HTTPGetAction, Probe};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

/// Action of one probe attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ProbeAction {
    /// Run a command inside the container; it passes when it exits with 0.
    Exec(Vec<String>),
    /// Send a request to the pod's own address, at this port.
    Network { handler: ProbeHandler, port: u16 },
}

/// A probe with Kubernetes' defaults filled in.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ProbeSpec {
    pub(super) action: ProbeAction,
    /// Time from the start of the container to the first attempt.
    pub(super) initial_delay: Duration,
    /// Pause between the end of one attempt and the begin of the next.
    pub(super) period: Duration,
    /// Timeout of one attempt.
    pub(super) timeout: Duration,
    /// Results in a row that make the probe pass.
    pub(super) success_threshold: u32,
    /// Results in a row that make the probe fail.
    pub(super) failure_threshold: u32,
    /// Seconds that the container has to end after this probe has failed; `None` means the pod's own grace period.
    pub(super) grace_period_s: Option<i64>,
}

/// Probes of a container that the node runs itself.
#[derive(Debug, Default, PartialEq)]
pub(super) struct ContainerProbes {
    pub(super) startup: Option<ProbeSpec>,
    pub(super) liveness: Option<ProbeSpec>,
    pub(super) readiness: Option<ProbeSpec>,
}

impl ContainerProbes {
    /// Reads the probes of `container`; its readiness probe only if `runs_readiness_probes`.
    ///
    /// `Err` names the probe that cannot be run: no port of the container has the name it gives, or it has no action.
    pub(super) fn from_container(
        container: &Container,
        runs_readiness_probes: bool,
    ) -> Result<Self, String> {
        let spec = |kind: &str, probe: Option<&Probe>| {
            let spec = probe.map(|probe| ProbeSpec::from_probe(probe, container));
            spec.transpose().map_err(|error| format!("{kind} probe: {error}"))
        };
        let readiness = container.readiness_probe.as_ref().filter(|_| runs_readiness_probes);
        Ok(Self {
            startup: spec("startup", container.startup_probe.as_ref())?,
            liveness: spec("liveness", container.liveness_probe.as_ref())?,
            readiness: spec("readiness", readiness)?,
        })
    }
}

impl ProbeSpec {
    /// Fills in the defaults of Kubernetes' API (`pkg/apis/core/v1/defaults.go`, `SetDefaults_Probe`).
    fn from_probe(probe: &Probe, container: &Container) -> Result<Self, String> {
        let positive = |value: Option<i32>, default: u32| {
            value.and_then(|it| u32::try_from(it).ok()).filter(|it| *it > 0).unwrap_or(default)
        };
        let seconds = |value, default| Duration::from_secs(positive(value, default).into());
        Ok(Self {
            action: parse_action(probe, container)?,
            initial_delay: seconds(probe.initial_delay_seconds, 0),
            period: seconds(probe.period_seconds, 10),
            timeout: seconds(probe.timeout_seconds, 1),
            success_threshold: positive(probe.success_threshold, 1),
            failure_threshold: positive(probe.failure_threshold, 3),
            grace_period_s: probe.termination_grace_period_seconds,
        })
    }
}

/// Number of equal results in a row: successes or failures.
#[derive(Debug, Default)]
pub(super) struct ProbeStreak {
    successes: u32,
    failures: u32,
}

impl ProbeStreak {
    /// Adds a result. Returns `Some` once as many equal results came in a row as the probe requires.
    pub(super) fn record(&mut self, spec: &ProbeSpec, passed: bool) -> Option<bool> {
        if passed {
            *self = Self { successes: self.successes.saturating_add(1), failures: 0 };
            return (self.successes >= spec.success_threshold).then_some(true);
        }
        *self = Self { successes: 0, failures: self.failures.saturating_add(1) };
        (self.failures >= spec.failure_threshold).then_some(false)
    }
}

/// Returns the action of a probe, or the reason that there is none.
fn parse_action(probe: &Probe, container: &Container) -> Result<ProbeAction, String> {
    if let Some(exec) = &probe.exec {
        return Ok(ProbeAction::Exec(exec.command.clone().unwrap_or_default()));
    }
    let (handler, port) = if let Some(http) = &probe.http_get {
        (parse_http(http), resolve_port(&http.port, container)?)
    } else if let Some(tcp) = &probe.tcp_socket {
        (ProbeHandler::Tcp, resolve_port(&tcp.port, container)?)
    } else if let Some(grpc) = &probe.grpc {
        let handler = ProbeHandler::Grpc { service: grpc.service.clone().unwrap_or_default() };
        (handler, resolve_port(&IntOrString::Int(grpc.port), container)?)
    } else {
        return Err("it has no action".to_owned());
    };
    Ok(ProbeAction::Network { handler, port })
}

fn parse_http(http: &HTTPGetAction) -> ProbeHandler {
    let headers = http.http_headers.iter().flatten();
    ProbeHandler::Http {
        path: http.path.clone().unwrap_or_default(),
        headers: headers.map(|header| (header.name.clone(), header.value.clone())).collect(),
        host: http.host.clone().unwrap_or_default(),
        https: http.scheme.as_deref().is_some_and(|it| it.eq_ignore_ascii_case("https")),
    }
}

/// Resolves a port: a number, the name of a container port, or with 0 the container's first port.
fn resolve_port(written: &IntOrString, container: &Container) -> Result<u16, String> {
    let mut ports = container.ports.iter().flatten();
    let number = |port: &ContainerPort| port.container_port;
    let port = match written {
        IntOrString::Int(0) => ports.next().map(number),
        IntOrString::Int(number) => Some(*number),
        IntOrString::String(name) => {
            let named = ports.find(|port| port.name.as_ref() == Some(name)).map(number);
            // A string that names no port may be a number in quotes.
            named.or_else(|| name.parse().ok())
        }
    };
    let port = port.and_then(|port| u16::try_from(port).ok());
    port.ok_or_else(|| format!("container {} has no port {written:?}", container.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(text: &str) -> Container {
        serde_json::from_str(text).expect("a container")
    }

    fn liveness(probe: &str) -> Result<Option<ProbeSpec>, String> {
        let ports = r#"[{"name": "http1", "containerPort": 8080}]"#;
        let text = format!(r#"{{"name": "web", "ports": {ports}, "livenessProbe": {probe}}}"#);
        ContainerProbes::from_container(&container(&text), true).map(|probes| probes.liveness)
    }

    fn action_of(probe: &str) -> ProbeAction {
        liveness(probe).expect("it can be run").expect("there is one").action
    }

    #[test]
    fn every_kind_of_probe_is_parsed() {
        let command = |it: &str| ProbeAction::Exec(vec![it.to_owned()]);
        assert_eq!(action_of(r#"{"exec": {"command": ["/bin/true"]}}"#), command("/bin/true"));
        let tcp = ProbeAction::Network { handler: ProbeHandler::Tcp, port: 9090 };
        assert_eq!(action_of(r#"{"tcpSocket": {"port": 9090}}"#), tcp);
        let handler = ProbeHandler::Grpc { service: "main".to_owned() };
        let grpc = ProbeAction::Network { handler, port: 8080 };
        assert_eq!(action_of(r#"{"grpc": {"port": 0, "service": "main"}}"#), grpc);
        let ProbeAction::Network {
            handler: ProbeHandler::Http { path, https, headers, host },
            port,
        } = action_of(
            r#"{"httpGet": {"port": 1, "path": "/a", "scheme": "https", "host": "h",
                "httpHeaders": [{"name": "a", "value": "b"}]}}"#,
        )
        else {
            panic!("not a probe by HTTP")
        };
        assert_eq!((path.as_str(), https, host.as_str(), port), ("/a", true, "h", 1));
        assert_eq!(headers, [("a".to_owned(), "b".to_owned())]);
    }

    #[test]
    fn a_port_is_a_number_a_name_or_the_container_s_own() {
        let port = |written: &str| {
            let spec = liveness(&format!(r#"{{"tcpSocket": {{"port": {written}}}}}"#));
            spec.map(|spec| match spec.map(|spec| spec.action) {
                Some(ProbeAction::Network { port, .. }) => port,
                other => panic!("{other:?}"),
            })
        };
        for (written, expected) in
            [("0", 8080), ("9090", 9090), (r#""http1""#, 8080), (r#""9091""#, 9091)]
        {
            assert_eq!(port(written), Ok(expected), "{written}");
        }
        let error = port(r#""no""#).expect_err("there is no such port");
        assert!(error.starts_with("liveness probe: container web has no port"), "{error}");
    }

    #[test]
    fn readiness_is_probed_only_where_the_node_runs_readiness_probes() {
        let text = r#"{"name": "web", "readinessProbe": {"tcpSocket": {"port": 1}}}"#;
        let probes = |runs_readiness_probes| {
            ContainerProbes::from_container(&container(text), runs_readiness_probes)
                .expect("it can be run")
        };
        assert!(probes(true).readiness.is_some());
        assert_eq!(probes(false), ContainerProbes::default());
    }

    #[test]
    fn absent_and_zero_mean_kubernetes_defaults() {
        let expected = ProbeSpec {
            action: ProbeAction::Network { handler: ProbeHandler::Tcp, port: 1 },
            initial_delay: Duration::ZERO,
            period: Duration::from_secs(10),
            timeout: Duration::from_secs(1),
            success_threshold: 1,
            failure_threshold: 3,
            grace_period_s: None,
        };
        let absent = r#"{"tcpSocket": {"port": 1}}"#;
        let zero = r#"{"tcpSocket": {"port": 1}, "periodSeconds": 0, "timeoutSeconds": 0,
            "successThreshold": 0, "failureThreshold": 0, "initialDelaySeconds": 0}"#;
        assert_eq!(liveness(absent), Ok(Some(expected.clone())));
        assert_eq!(liveness(zero), Ok(Some(expected)));
    }

    #[test]
    fn a_probe_passes_or_fails_after_enough_equal_results_in_a_row() {
        let text = r#"{"tcpSocket": {"port": 1}, "successThreshold": 2, "failureThreshold": 2}"#;
        let spec = liveness(text).expect("it can be run").expect("there is one");
        let mut row = ProbeStreak::default();
        let results = [true, false, true, true, true, false, false];
        let outcomes = results.map(|passed| row.record(&spec, passed));
        let (no, yes, failed) = (None, Some(true), Some(false));
        assert_eq!(outcomes, [no, no, no, yes, yes, no, failed]);
    }
}
