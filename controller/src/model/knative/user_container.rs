//! Pure: the serving container among a pod's containers, its port and protocol, and the ports of its probes.

use std::collections::BTreeMap;

use common::wire::AppProtocol;
use k8s_openapi::{
    api::core::v1::{Container, Probe},
    apimachinery::pkg::util::intstr::IntOrString,
};

use super::key;

/// Returns the index of the serving container: the first one with ports, else the first of all.
pub(crate) fn serving_index(containers: &[Container]) -> usize {
    containers.iter().position(|it| it.ports.as_ref().is_some_and(|p| !p.is_empty())).unwrap_or(0)
}

/// Name of the serving container's port in the pod.
pub const USER_PORT_NAME: &str = "user-port";

/// The port of a container that names none (knative/serving `networking.DefaultUserPort`).
const DEFAULT_PORT: i32 = 8080;

/// Port on which the serving container listens.
pub fn serving_port(container: Option<&Container>) -> i32 {
    let port = container.and_then(|it| it.ports.as_ref()?.first());
    port.map(|it| it.container_port).filter(|it| *it > 0).unwrap_or(DEFAULT_PORT)
}

/// Returns the protocol that the annotation [`key::PROTOCOL`] names; `None`: the value is not known.
pub fn parse_protocol(value: &str) -> Option<AppProtocol> {
    match value {
        "http1" => Some(AppProtocol::Http1),
        "h2c" => Some(AppProtocol::H2c),
        "tcp" => Some(AppProtocol::Tcp),
        _ => None,
    }
}

/// Returns the protocol of the serving container: by the annotation of its template, else by the name of its port.
pub(crate) fn read_protocol(
    annotations: &BTreeMap<String, String>,
    containers: &[Container],
) -> AppProtocol {
    let serving = containers.get(serving_index(containers));
    let port = serving.and_then(|it| it.ports.as_ref()?.first());
    let is_h2c = port.is_some_and(|it| it.name.as_deref() == Some("h2c"));
    let by_name = if is_h2c { AppProtocol::H2c } else { AppProtocol::Http1 };
    annotations.get(key::PROTOCOL).and_then(|it| parse_protocol(it)).unwrap_or(by_name)
}

/// Writes the serving port into every probe of the serving container that has no port number.
///
/// The pod names the port [`USER_PORT_NAME`], so the kubelet would not find it by the user's name.
pub fn resolve_probe_ports(container: &mut Container, port: i32) {
    let probes = [
        &mut container.liveness_probe,
        &mut container.readiness_probe,
        &mut container.startup_probe,
    ];
    // A number stays: it may be a port for health checks alone.
    let missing = ReplacedPorts::WithoutNumber;
    probes.into_iter().flatten().for_each(|probe| set_probe_port(probe, port, missing));
}

/// Ports of probes that [`set_probe_port`] replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplacedPorts {
    /// Ports that are names or 0.
    WithoutNumber,
    /// All ports, also those with a number.
    All,
}

/// Sets the port of a probe if `replaced` includes its present port.
pub(crate) fn set_probe_port(probe: &mut Probe, port: i32, replaced: ReplacedPorts) {
    let always = replaced == ReplacedPorts::All;
    let replace = |present: &mut IntOrString| {
        let lacks_number = match present {
            IntOrString::Int(number) => *number == 0,
            // Only the serving port can be named, since no other container has ports.
            IntOrString::String(name) => name.parse::<u16>().is_err(),
        };
        if lacks_number || always {
            *present = IntOrString::Int(port);
        }
    };
    probe.http_get.iter_mut().for_each(|it| replace(&mut it.port));
    probe.tcp_socket.iter_mut().for_each(|it| replace(&mut it.port));
    for grpc in probe.grpc.iter_mut().filter(|it| always || it.port == 0) {
        grpc.port = port;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_annotation_of_a_protocol_counts_before_the_name_of_the_port() {
        let protocol = |annotation: &str, port: &str| {
            let container = json!({"name": "a", "ports": [{"name": port, "containerPort": 80}]});
            let container: Container = serde_json::from_value(container).unwrap();
            let annotations = BTreeMap::from([(key::PROTOCOL.to_owned(), annotation.to_owned())]);
            read_protocol(&annotations, &[container])
        };
        assert_eq!(protocol("tcp", "h2c"), AppProtocol::Tcp);
        assert_eq!(protocol("http1", "h2c"), AppProtocol::Http1);
        assert_eq!(protocol("h2c", "http1"), AppProtocol::H2c);
        // Admission refuses such a value. A Revision that never passed it follows its port.
        assert_eq!(protocol("udp", "h2c"), AppProtocol::H2c);
        assert_eq!(protocol("TCP", "http1"), AppProtocol::Http1);
    }

    #[test]
    fn only_the_port_of_the_serving_container_names_the_protocol() {
        let containers: Vec<Container> = serde_json::from_value(json!([
            {"name": "sidecar"},
            {"name": "serving", "ports": [{"name": "h2c", "containerPort": 80}]},
        ]))
        .unwrap();
        assert_eq!(read_protocol(&BTreeMap::new(), &containers), AppProtocol::H2c);
        assert_eq!(read_protocol(&BTreeMap::new(), &containers[..1]), AppProtocol::Http1);
        assert_eq!(read_protocol(&BTreeMap::new(), &[]), AppProtocol::Http1);
    }
}
