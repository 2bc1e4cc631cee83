//! Pure: ports at the activators for the ports of a scaled Service. Its PodAutoscaler records them, as the placeholder
//! of a Route's name records the port of that name.

use std::num::NonZeroU16;

use common::wire::NamespacedName;

use crate::{
    decide::machine::allocate,
    model::cluster_state::{ActivatorPort, ClusterState, ScaledServiceState},
};

/// Allocates what the TCP ports of the Service lack, and releases what it has for ports that are gone.
pub(super) fn update_ports(
    name: &NamespacedName,
    scaled: &mut ScaledServiceState,
    cluster: &mut ClusterState,
) {
    let ports = scaled.service.as_ref().map(|it| &*it.ports).unwrap_or_default();
    let numbers: Vec<NonZeroU16> = ports.iter().map(|it| it.port).collect();
    let mut left = std::mem::take(&mut scaled.ports);
    cluster.allocated.unallocated_apps.remove(name);
    // By number, so that a port that was renamed or moved keeps its place at the activators.
    for service_port in numbers {
        let own = left.iter().position(|it| it.service_port == service_port);
        let own = own.map(|at| left.swap_remove(at).activator_port);
        let recorded = recorded_port(scaled, service_port, cluster);
        let allocated = match own {
            Some(own) => Some(follow_record(name, own, recorded, cluster)),
            None => allocate(name, service_port, recorded, cluster),
        };
        match allocated {
            Some(activator_port) => {
                scaled.ports.push(ActivatorPort { service_port, activator_port })
            }
            // As for a name of a Route: other replicas wait for the leader, or for the former holder of the port.
            None => drop(cluster.allocated.unallocated_apps.insert(name.clone())),
        }
    }
    release(&left, cluster);
}

/// Releases all ports of a Service that scales no workload any more.
pub(super) fn release_ports(
    name: &NamespacedName,
    scaled: &mut ScaledServiceState,
    cluster: &mut ClusterState,
) {
    cluster.allocated.unallocated_apps.remove(name);
    release(&std::mem::take(&mut scaled.ports), cluster);
}

fn release(ports: &[ActivatorPort], cluster: &mut ClusterState) {
    if ports.is_empty() {
        return;
    }
    for port in ports {
        cluster.allocated.ports.remove(&port.activator_port.get());
    }
    allocate::plan_unallocated_apps(cluster);
}

/// Returns the port that the PodAutoscaler records. Users of its namespace can write it too: the activators' other
/// ports are no ports of services.
fn recorded_port(
    scaled: &ScaledServiceState,
    service_port: NonZeroU16,
    cluster: &ClusterState,
) -> Option<NonZeroU16> {
    let (first, last) = cluster.settings.activator_port_range;
    let mut recorded = scaled.autoscaler.as_ref()?.ports.iter();
    let port = recorded.find(|it| it.service_port == service_port)?.activator_port;
    Some(port).filter(|it| (first..=last).contains(&it.get()))
}

/// Returns the port to keep: on other replicas than the leader the recorded one, which the leader may have changed.
fn follow_record(
    name: &NamespacedName,
    own: NonZeroU16,
    recorded: Option<NonZeroU16>,
    cluster: &mut ClusterState,
) -> NonZeroU16 {
    let Some(recorded) = recorded.filter(|it| *it != own && !cluster.is_leader) else { return own };
    // Another service may still have the port here, although the leader has released it already.
    if !cluster.allocated.ports.insert(recorded.get()) {
        cluster.allocated.unallocated_apps.insert(name.clone());
        return own;
    }
    cluster.allocated.ports.remove(&own.get());
    allocate::plan_unallocated_apps(cluster);
    recorded
}

/// Allocates the recorded port if it is free. Only the leader allocates another one.
fn allocate(
    name: &NamespacedName,
    service_port: NonZeroU16,
    recorded: Option<NonZeroU16>,
    cluster: &mut ClusterState,
) -> Option<NonZeroU16> {
    let recorded = recorded.filter(|it| !cluster.allocated.ports.contains(&it.get()));
    // Begins at a hash, so that all services spread over the range and a new service finds a free port soon.
    let new_port = || {
        let hash = allocate::hash_route_name(name, Some(&service_port.to_string()));
        let port = allocate::free_port(hash, cluster).filter(|_| cluster.is_leader)?;
        NonZeroU16::new(port)
    };
    let port = recorded.or_else(new_port)?;
    cluster.allocated.ports.insert(port.get());
    Some(port)
}
