//! Pure: rules of probes (knative/serving `pkg/apis/serving/k8s_validation.go`).

use k8s_openapi::{api::core::v1::Probe, apimachinery::pkg::util::intstr::IntOrString};

use super::Problem;

/// Checks one probe of the container whose serving port is `port`.
pub(super) fn check(probe: &Probe, port: Option<i32>, path: &str, problems: &mut Vec<Problem>) {
    handlers(probe, path, problems);
    ports(probe, port, path, problems);
    let at = |name: &str| format!("{path}.{name}");
    let mut least = |name: &str, value: Option<i32>, least: i32| {
        if let Some(value) = value.filter(|value| *value < least) {
            problems.push(Problem::bounds(at(name), least, value, i32::MAX));
        }
    };
    least("periodSeconds", probe.period_seconds, 0);
    least("initialDelaySeconds", probe.initial_delay_seconds, 0);
    least("successThreshold", probe.success_threshold, 1);
    let aggressive = probe.period_seconds == Some(0);
    if !aggressive {
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

fn handlers(probe: &Probe, path: &str, problems: &mut Vec<Problem>) {
    let set = [
        ("exec", probe.exec.is_some()),
        ("grpc", probe.grpc.is_some()),
        ("httpGet", probe.http_get.is_some()),
        ("tcpSocket", probe.tcp_socket.is_some()),
    ];
    let set: Vec<&str> = set.iter().filter(|(_, set)| *set).map(|(name, _)| *name).collect();
    if set.len() > 1 {
        let paths: Vec<String> = set.iter().map(|name| format!("{path}.{name}")).collect();
        problems.push(Problem::new(paths.join(", "), "expected exactly one, got both"));
    }
}

fn ports(probe: &Probe, port: Option<i32>, path: &str, problems: &mut Vec<Problem>) {
    let serving = port.unwrap_or(8080);
    let mut check = |name: &str, asked: &IntOrString| {
        let fits = match asked {
            IntOrString::Int(asked) => *asked == 0 || *asked == serving,
            IntOrString::String(asked) => asked.is_empty(),
        };
        if !fits {
            let problem =
                Problem::new(format!("{path}.{name}"), "Probe port must match container port");
            problems.push(problem.advise(format!("leave it out or write {serving}")));
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
