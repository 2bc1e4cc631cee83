//! Pure: what a template gets where it says nothing (knative/serving `pkg/apis/serving/v1/*_defaults.go`).

use k8s_openapi::api::core::v1::{Container, Probe, TCPSocketAction, Volume};

use crate::knative::RevisionSpec;

/// `revision-timeout-seconds` of `config-defaults`.
const TIMEOUT: i64 = 300;
/// `revision-response-start-timeout-seconds` of `config-defaults`.
pub(crate) const RESPONSE_START: i64 = 300;

/// Fills in every default.
pub(super) fn fill(spec: &mut RevisionSpec) {
    let timeout = spec.timeout_seconds.filter(|seconds| *seconds != 0).unwrap_or(TIMEOUT);
    spec.timeout_seconds = Some(timeout);
    spec.container_concurrency.get_or_insert(0);
    // Only where it is strictly less, so that a timeout of 300 s or below stands alone.
    if spec.response_start_timeout_seconds.is_none() && RESPONSE_START < timeout {
        spec.response_start_timeout_seconds = Some(RESPONSE_START);
    }
    spec.pod.enable_service_links.get_or_insert(false);
    let several = spec.pod.containers.len() > 1;
    let serving = serving_index(&spec.pod.containers);
    let volumes = spec.pod.volumes.take().unwrap_or_default();
    for (index, container) in spec.pod.containers.iter_mut().enumerate() {
        fill_container(container, index, several, &volumes);
        if index == serving {
            fill_probe(container.readiness_probe.get_or_insert_default());
        }
    }
    spec.pod.volumes = Some(volumes).filter(|volumes| !volumes.is_empty());
}

/// Which container serves: the one with ports, or the only one.
pub(crate) fn serving_index(containers: &[Container]) -> usize {
    containers.iter().position(|it| it.ports.as_ref().is_some_and(|p| !p.is_empty())).unwrap_or(0)
}

fn fill_container(container: &mut Container, index: usize, several: bool, volumes: &[Volume]) {
    if container.name.is_empty() {
        container.name =
            if several { format!("user-container-{index}") } else { "user-container".into() };
    }
    for mount in container.volume_mounts.iter_mut().flatten() {
        let volume = volumes.iter().find(|volume| volume.name == mount.name);
        if volume.is_some_and(|volume| volume.empty_dir.is_none()) {
            mount.read_only = Some(true);
        }
    }
}

/// A probe that asks nothing is a TCP probe; period 0 means as fast as sensible.
fn fill_probe(probe: &mut Probe) {
    let asks = probe.exec.is_some() || probe.http_get.is_some() || probe.grpc.is_some();
    if !asks && probe.tcp_socket.is_none() {
        probe.tcp_socket = Some(TCPSocketAction::default());
    }
    probe.success_threshold.get_or_insert(1);
    let period = *probe.period_seconds.get_or_insert(0);
    if period != 0 {
        probe.failure_threshold.get_or_insert(3);
        probe.timeout_seconds.get_or_insert(1);
    }
}
