//! Pure: rules of probes (knative/serving `pkg/apis/serving/k8s_validation.go` at 98e5ef9).

use k8s_openapi::{
    api::core::v1::{Container, Probe},
    apimachinery::pkg::util::intstr::IntOrString,
};

use super::pod::{PodContainerRole, ServingPort};
use crate::model::{
    config_maps::{Features, Flag},
    problem::Problem,
};

/// Checks all probes of a container whose pod serves on `port`.
pub(super) fn check_probes(
    container: &Container,
    role: PodContainerRole,
    port: &ServingPort,
    at: &str,
    features: &Features,
    problems: &mut Vec<Problem>,
) {
    let probes_anywhere = features.multi_container_probing == Flag::Enabled;
    let probes = [
        ("livenessProbe", &container.liveness_probe),
        ("readinessProbe", &container.readiness_probe),
        ("startupProbe", &container.startup_probe),
    ];
    for (name, probe) in probes {
        let Some(probe) = probe else { continue };
        let path = format!("{at}.{name}");
        match role {
            PodContainerRole::Init => {
                problems.push(Problem::new(path, "field not allowed in an init container"));
                continue;
            }
            PodContainerRole::Sidecar if !probes_anywhere => {
                problems.push(Problem::disallowed(path));
                continue;
            }
            // A container without a port has none that a probe could use by default.
            PodContainerRole::Sidecar => {
                check_probe_ports(probe, AllowedProbePort::Explicit, &path, problems)
            }
            PodContainerRole::Serving if probes_anywhere => {}
            PodContainerRole::Serving => {
                check_probe_ports(probe, AllowedProbePort::Serving(port), &path, problems)
            }
        }
        check_handlers(probe, &path, problems);
        if name == "readinessProbe" {
            check_thresholds(probe, &path, problems);
        }
    }
}

/// Warns that an initial delay has no effect: the agent probes a pod as soon as the kernel reports its listener.
pub(super) fn warn_initial_delay(container: &Container, at: &str, warnings: &mut Vec<Problem>) {
    // The kubelet runs `exec` probes, and honours the delay.
    let probe = container.readiness_probe.as_ref().filter(|it| it.exec.is_none());
    if probe.and_then(|it| it.initial_delay_seconds).is_some_and(|it| it > 0) {
        let field = "readinessProbe.initialDelaySeconds";
        let message = format!("{field} has no effect: a pod is probed as soon as it listens");
        warnings.push(Problem::new(format!("{at}.{field}"), message));
    }
}

fn check_handlers(probe: &Probe, path: &str, problems: &mut Vec<Problem>) {
    let all = [
        ("httpGet", probe.http_get.is_some()),
        ("tcpSocket", probe.tcp_socket.is_some()),
        ("exec", probe.exec.is_some()),
        ("grpc", probe.grpc.is_some()),
    ];
    let paths = |only_set: bool| -> Vec<String> {
        let handlers = all.iter().filter(|(_, set)| *set || !only_set);
        let mut paths: Vec<_> = handlers.map(|(name, _)| format!("{path}.{name}")).collect();
        paths.sort();
        paths
    };
    // Knative sorts paths, and so must an equal message.
    match paths(true).len() {
        0 => problems.push(Problem::none_set(paths(false).join(", "))),
        1 => {}
        _ => problems.push(Problem::several_set(paths(true).join(", "))),
    }
}

/// Ports that a probe may use.
#[derive(Clone, Copy)]
enum AllowedProbePort<'a> {
    /// Only the serving port, by number, by name or left out.
    Serving(&'a ServingPort),
    /// Any port, which must be set.
    Explicit,
}

/// Checks the ports of a probe's handlers against the ports that it may name.
fn check_probe_ports(
    probe: &Probe,
    allowed_port: AllowedProbePort<'_>,
    path: &str,
    problems: &mut Vec<Problem>,
) {
    let mut check = |name: &str, port: &IntOrString| {
        let (fits, rule) = match (allowed_port, port) {
            (AllowedProbePort::Serving(serving), IntOrString::Int(port)) => {
                // 0 or an empty name is a port that was left out.
                (*port == 0 || *port == serving.number, "Probe port must match container port")
            }
            (AllowedProbePort::Serving(serving), IntOrString::String(port)) => {
                let fits = port.is_empty() || *port == serving.name;
                (fits, "Probe port must match container port")
            }
            (AllowedProbePort::Explicit, IntOrString::Int(port)) => {
                (*port != 0, "Probe port must be specified")
            }
            (AllowedProbePort::Explicit, IntOrString::String(port)) => {
                (!port.is_empty(), "Probe port must be specified")
            }
        };
        if !fits {
            let value = match port {
                IntOrString::Int(port) => port.to_string(),
                IntOrString::String(port) => port.clone(),
            };
            problems.push(Problem::invalid(format!("{path}.{name}"), value).with_details(rule));
        }
    };
    if let Some(http) = &probe.http_get {
        check("httpGet.port", &http.port);
    }
    if let Some(tcp) = &probe.tcp_socket {
        check("tcpSocket.port", &tcp.port);
    }
    if let Some(grpc) = &probe.grpc {
        check("grpc.port", &IntOrString::Int(grpc.port));
    }
}

/// Checks the numbers of a readiness probe, the only probe that Knative's data plane runs; Kubernetes checks the
/// others.
fn check_thresholds(probe: &Probe, path: &str, problems: &mut Vec<Problem>) {
    let at = |name: &str| format!("{path}.{name}");
    let mut least = |name: &str, value: Option<i32>, least: i32| {
        if let Some(value) = value.filter(|value| *value < least) {
            problems.push(Problem::out_of_bounds(at(name), least, value, i32::MAX));
        }
    };
    least("periodSeconds", probe.period_seconds, 0);
    least("initialDelaySeconds", probe.initial_delay_seconds, 0);
    least("successThreshold", probe.success_threshold, 1);
    // The period 0 asks for Knative's own probing, which has no such settings.
    if probe.period_seconds != Some(0) {
        least("failureThreshold", probe.failure_threshold, 1);
        least("timeoutSeconds", probe.timeout_seconds, 1);
        return;
    }
    let mut never = |name: &str, value: Option<i32>| {
        if value.is_some_and(|value| value != 0) {
            let message = format!("{name} is disallowed when periodSeconds is zero");
            problems.push(Problem::new(at(name), message));
        }
    };
    never("failureThreshold", probe.failure_threshold);
    never("timeoutSeconds", probe.timeout_seconds);
}
