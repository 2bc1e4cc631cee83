//! Pure: the serving container among a pod's containers, its port, and the ports of its probes.

use k8s_openapi::{
    api::core::v1::{Container, Probe},
    apimachinery::pkg::util::intstr::IntOrString,
};

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

/// Writes the serving port into every probe of the serving container that has no port number.
///
/// The pod names the port [`USER_PORT_NAME`], so the kubelet would not find it by the user's name.
pub fn resolve_probe_ports(container: &mut Container, port: i32) {
    let probes = [
        &mut container.liveness_probe,
        &mut container.readiness_probe,
        &mut container.startup_probe,
    ];
    let missing = ReplacedPorts::WithoutNumber;
    probes.into_iter().flatten().for_each(|probe| set_probe_port(probe, port, missing));
}

/// Ports of probes that [`set_probe_port`] replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplacedPorts {
    /// Ports that are names or 0.
    WithoutNumber,
    /// All ports.
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
