//! Pure: allocation of a ClusterIP and an activator port to each name of a Route, kept for the name's lifetime.

use common::wire::NamespacedName;

use super::name_claims;
use crate::model::{
    cluster_state::{
        AppState, ClusterIpSource, ClusterState, PlaceholderState, PlatformKind,
        RouteNameAllocation, name_registry::NameClaimant,
    },
    object::names::tagged_name,
};

/// Allocates what the app's names lack and releases the allocations of names that it no longer has.
pub(super) fn allocate(app: &mut AppState, name: &NamespacedName, cluster: &mut ClusterState) {
    name_claims::update_route_claims(app, name, cluster);
    allocate_owned_names(app, name, cluster);
    // On the local platform a held allocation strengthens a claim, so the claims are computed again.
    name_claims::update_route_claims(app, name, cluster);
}

/// Gives each name that the Route owns an allocation, and releases those of names that it has lost.
fn allocate_owned_names(app: &mut AppState, name: &NamespacedName, cluster: &mut ClusterState) {
    let Some(route) = &mut app.route else { return };
    // `None` is the Route's own name, as in an allocation.
    let mut tags: Vec<Option<Box<str>>> = vec![None];
    tags.extend(route.traffic_spec.iter().filter(|it| it.tag.is_some()).map(|it| it.tag.clone()));
    // A name with another owner gets no allocation here.
    tags.retain(|tag| {
        cluster.app_of_route_name(&placeholder_name(name, tag.as_deref())).as_ref() == Some(name)
    });
    let (kept, released): (Vec<_>, Vec<_>) =
        route.allocations.drain(..).partition(|it| tags.contains(&it.tag));
    release_allocations(&released, cluster);
    route.allocations = kept;
    cluster.allocated.unallocated_apps.remove(name);
    for tag in tags {
        let allocation = route.allocations.iter_mut().find(|it| it.tag == tag);
        let new_allocation = match (cluster.settings.platform, allocation) {
            (PlatformKind::Local, Some(_)) => continue,
            (PlatformKind::Local, None) => allocate_local(name, tag, cluster),
            // On Kubernetes the placeholder Service is the record: its ClusterIP may have changed.
            (PlatformKind::Kubernetes, Some(allocation)) => {
                follow_placeholder(name, allocation, cluster);
                continue;
            }
            (PlatformKind::Kubernetes, None) => adopt_from_service(name, tag, cluster),
        };
        if let Some(new_allocation) = new_allocation {
            reserve_allocation(&new_allocation, cluster);
            // Most Routes have one name; `push` alone would allocate space for four.
            route.allocations.reserve_exact(1);
            route.allocations.push(new_allocation);
        } else {
            // The leader has found no free port. Other replicas wait for the placeholder, or for its port, which the
            // former holder still has.
            cluster.allocated.unallocated_apps.insert(name.clone());
        }
    }
}

fn allocate_local(
    name: &NamespacedName,
    tag: Option<Box<str>>,
    cluster: &ClusterState,
) -> Option<RouteNameAllocation> {
    let hash = hash_route_name(name, tag.as_deref());
    let addresses = ClusterIpSource::LocalRange(free_suffix(hash, cluster)?);
    Some(RouteNameAllocation {
        tag,
        cluster_ips: addresses,
        activator_port: free_port(hash, cluster)?,
    })
}

/// Copies what the name's placeholder Service holds: its ClusterIPs, and on other replicas than the leader its port,
/// which the leader may have changed. A port that another name still has is taken when that name has released it, or
/// together with it.
fn follow_placeholder(
    name: &NamespacedName,
    allocation: &mut RouteNameAllocation,
    cluster: &mut ClusterState,
) {
    let service = placeholder_name(name, allocation.tag.as_deref());
    let Some(placeholder) = cluster.names.placeholders.get(&service) else { return };
    allocation.cluster_ips = ClusterIpSource::ApiServer(placeholder.cluster_ips.clone());
    // The leader's own port is newer than that of the placeholder, which the leader writes.
    let held = held_port(placeholder, cluster).filter(|_| !cluster.is_leader);
    let Some(port) = held else { return };
    if port == allocation.activator_port {
        return;
    }
    if cluster.allocated.ports.insert(port) {
        cluster.allocated.ports.remove(&allocation.activator_port);
        allocation.activator_port = port;
        // The port that this name has released may be the one that another name waits for.
        plan_unallocated_apps(cluster);
    } else if rotate_ports(allocation.activator_port, port, cluster) {
        allocation.activator_port = port;
    } else {
        cluster.allocated.unallocated_apps.insert(name.clone());
    }
}

/// Gives each name of a cycle the port that its placeholder holds, if each waits for the port of the next one: no port
/// would ever be released. `own` is the port of the name that wants `wanted`, which its caller sets. Returns false
/// without such a cycle.
fn rotate_ports(own: u16, wanted: u16, cluster: &mut ClusterState) -> bool {
    let mut cycle: Vec<(NamespacedName, Option<Box<str>>, u16)> = Vec::new();
    let mut next = wanted;
    while next != own {
        let Some((name, tag, port)) = find_holder(next, cluster) else { return false };
        // The chain ends, or comes to a cycle without this name: some name releases its port without help.
        if port == next || cycle.iter().any(|(_, _, it)| *it == port) {
            return false;
        }
        cycle.push((name, tag, port));
        next = port;
    }
    for (name, tag, port) in cycle {
        let route = cluster.apps.get_mut(&name).and_then(|app| app.route.as_mut());
        let mut allocations = route.into_iter().flat_map(|it| &mut it.allocations);
        if let Some(allocation) = allocations.find(|it| it.tag == tag) {
            allocation.activator_port = port;
        }
        cluster.names.registry.mark_claimant_changed(NameClaimant::Route(name));
    }
    true
}

/// Returns the name of another app that has a port, as its app and tag, with the port that its placeholder holds.
fn find_holder(
    port: u16,
    cluster: &ClusterState,
) -> Option<(NamespacedName, Option<Box<str>>, u16)> {
    let (name, allocation) = cluster.apps.iter().find_map(|(name, app)| {
        let allocation = app.allocations().iter().find(|it| it.activator_port == port)?;
        Some((name, allocation))
    })?;
    let placeholder =
        cluster.names.placeholders.get(&placeholder_name(name, allocation.tag.as_deref()))?;
    Some((name.clone(), allocation.tag.clone(), held_port(placeholder, cluster)?))
}

/// Returns the port that a placeholder holds. Users of its namespace can write it too: the activators' other ports are
/// no ports of services.
fn held_port(placeholder: &PlaceholderState, cluster: &ClusterState) -> Option<u16> {
    let (first, last) = cluster.settings.activator_port_range;
    placeholder.activator_port.filter(|port| (first..=last).contains(port))
}

/// Returns the allocation that the name's placeholder Service holds. Only the leader allocates a new port, if the
/// Service has none yet or another Service has the same.
fn adopt_from_service(
    name: &NamespacedName,
    tag: Option<Box<str>>,
    cluster: &ClusterState,
) -> Option<RouteNameAllocation> {
    let placeholder = cluster.names.placeholders.get(&placeholder_name(name, tag.as_deref()));
    let adopted = placeholder
        .and_then(|it| held_port(it, cluster))
        // A port of another name may be in the Service after a user has copied it.
        .filter(|port| !cluster.allocated.ports.contains(port));
    let new_port =
        || free_port(hash_route_name(name, tag.as_deref()), cluster).filter(|_| cluster.is_leader);
    let port = adopted.or_else(new_port)?;
    let addresses = placeholder.map(|it| it.cluster_ips.clone()).unwrap_or_default();
    Some(RouteNameAllocation {
        tag,
        cluster_ips: ClusterIpSource::ApiServer(addresses),
        activator_port: port,
    })
}

/// Returns the name of the Service that bears a name of a Route.
fn placeholder_name(name: &NamespacedName, tag: Option<&str>) -> NamespacedName {
    NamespacedName::new(name.namespace.clone(), tagged_name(tag, &name.name))
}

/// Reserves the allocations of a restored app.
pub(super) fn reserve_restored(app: &AppState, cluster: &mut ClusterState) {
    app.allocations().iter().for_each(|it| reserve_allocation(it, cluster));
}

fn reserve_allocation(allocation: &RouteNameAllocation, cluster: &mut ClusterState) {
    if let ClusterIpSource::LocalRange(suffix) = allocation.cluster_ips {
        cluster.allocated.cluster_ip_suffixes.insert(suffix);
    }
    cluster.allocated.ports.insert(allocation.activator_port);
}

/// Releases all allocations of the app `name`. The app may stay for a while, so they are also removed from it: by then
/// another app may have them.
pub(super) fn release_app(name: &NamespacedName, previous: &AppState, cluster: &mut ClusterState) {
    release_allocations(previous.allocations(), cluster);
    cluster.allocated.unallocated_apps.remove(name);
    let route = cluster.apps.get_mut(name).and_then(|app| app.route.as_mut());
    route.into_iter().for_each(|route| route.allocations.clear());
}

pub(super) fn release_allocations(all: &[RouteNameAllocation], cluster: &mut ClusterState) {
    if all.is_empty() {
        return;
    }
    for it in all {
        if let ClusterIpSource::LocalRange(suffix) = it.cluster_ips {
            cluster.allocated.cluster_ip_suffixes.remove(&suffix);
        }
        cluster.allocated.ports.remove(&it.activator_port);
    }
    plan_unallocated_apps(cluster);
}

/// Plans the Routes again that found no port, since one is free now.
pub(super) fn plan_unallocated_apps(cluster: &mut ClusterState) {
    for name in std::mem::take(&mut cluster.allocated.unallocated_apps) {
        cluster.names.registry.mark_claimant_changed(NameClaimant::Route(name));
    }
}

/// Hashes a name with FNV-1a: names spread over the range, and a returning name gets its old numbers if they are free.
pub(super) fn hash_route_name(name: &NamespacedName, tag: Option<&str>) -> u32 {
    let bytes = [tag.unwrap_or_default(), "/", &name.namespace, "/", &name.name];
    let bytes = bytes.iter().flat_map(|part| part.bytes());
    bytes.fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Returns true for suffixes of reserved addresses: network, the API server's `.1`, the DNS server's `.10`, and
/// broadcast.
fn is_reserved(suffix: u16) -> bool {
    matches!(suffix, 0 | 1 | 10 | u16::MAX)
}

fn free_suffix(hash: u32, cluster: &ClusterState) -> Option<u16> {
    let first = u16::try_from(hash >> 16).unwrap_or_default();
    let mut all = (0..=u16::MAX).map(|step| first.wrapping_add(step));
    let taken = &cluster.allocated.cluster_ip_suffixes;
    all.find(|suffix| !is_reserved(*suffix) && !taken.contains(suffix))
}

pub(super) fn free_port(hash: u32, cluster: &ClusterState) -> Option<u16> {
    let (first, last) = cluster.settings.activator_port_range;
    let span = u32::from(last - first) + 1;
    let mut all = (0..span).map(|step| (hash % span + step) % span);
    let port = |step: u32| u16::try_from(u32::from(first) + step).ok();
    all.find_map(|step| port(step).filter(|port| !cluster.allocated.ports.contains(port)))
}

#[cfg(test)]
mod tests;
