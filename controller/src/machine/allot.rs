//! Pure: allocation of a ClusterIP and an activator port to each name of a Route, kept for the name's lifetime.

use common::wire::NamespacedName;

use super::names;
use crate::{
    children::tagged,
    world::{
        AppState, ClusterIpSource, ClusterState, PlatformKind, RouteNameAllocation,
        names::NameClaimant,
    },
};

/// Allocates what the app's names lack and releases the allocations of names that it no longer has.
pub(super) fn allot(app: &mut AppState, name: &NamespacedName, world: &mut ClusterState) {
    names::ask(app, name, world);
    allot_owned(app, name, world);
    // On the local platform a held allocation strengthens a claim, so the claims are computed again.
    names::ask(app, name, world);
}

fn allot_owned(app: &mut AppState, name: &NamespacedName, world: &mut ClusterState) {
    let Some(route) = &mut app.route else { return };
    let mut tags: Vec<Option<Box<str>>> = vec![None];
    tags.extend(route.wanted.iter().filter(|it| it.tag.is_some()).map(|it| it.tag.clone()));
    // A name with another owner gets no allocation here.
    tags.retain(|tag| world.app_named(&service(name, tag.as_deref())).as_ref() == Some(name));
    let (kept, left): (Vec<_>, Vec<_>) =
        route.allotted.drain(..).partition(|it| tags.contains(&it.tag));
    give_back(&left, world);
    route.allotted = kept;
    world.short.remove(name);
    for tag in tags {
        let held = route.allotted.iter_mut().find(|it| it.tag == tag);
        let allotted = match (world.settings.platform, held) {
            (PlatformKind::Local, Some(_)) => continue,
            (PlatformKind::Local, None) => ours(name, tag, world),
            // On Kubernetes the placeholder Service is the record: its ClusterIP may have changed.
            (PlatformKind::Kubernetes, Some(held)) => {
                if let Some(seen) = world.placeholders.get(&service(name, held.tag.as_deref())) {
                    held.addresses = ClusterIpSource::Given(seen.addresses.clone());
                }
                continue;
            }
            (PlatformKind::Kubernetes, None) => given(name, tag, world),
        };
        if let Some(allotted) = allotted {
            take(&allotted, world);
            // Most Routes have one name; `push` alone would reserve room for four.
            route.allotted.reserve_exact(1);
            route.allotted.push(allotted);
        } else if world.leads {
            // Only a leader's failure means that no port is free: other replicas wait for the placeholder.
            world.short.insert(name.clone());
        }
    }
}

fn ours(
    name: &NamespacedName,
    tag: Option<Box<str>>,
    world: &ClusterState,
) -> Option<RouteNameAllocation> {
    let hash = hash(name, tag.as_deref());
    let addresses = ClusterIpSource::Host(free_host(hash, world)?);
    Some(RouteNameAllocation { tag, addresses, port: free_port(hash, world)? })
}

/// Returns the allocation that the name's placeholder Service holds. Only the leader allocates a new port, if the
/// Service has none yet or another Service has the same.
fn given(
    name: &NamespacedName,
    tag: Option<Box<str>>,
    world: &ClusterState,
) -> Option<RouteNameAllocation> {
    let seen = world.placeholders.get(&service(name, tag.as_deref()));
    let kept = seen.and_then(|it| it.port).filter(|port| !world.ports.contains(port));
    let fresh = || free_port(hash(name, tag.as_deref()), world).filter(|_| world.leads);
    let port = kept.or_else(fresh)?;
    let addresses = seen.map(|it| it.addresses.clone()).unwrap_or_default();
    Some(RouteNameAllocation { tag, addresses: ClusterIpSource::Given(addresses), port })
}

/// Returns the name of the Service that bears a name of a Route.
fn service(name: &NamespacedName, tag: Option<&str>) -> NamespacedName {
    NamespacedName::new(name.namespace.clone(), tagged(tag, &name.name))
}

/// Reserves the allocations of a restored app.
pub(super) fn claim(app: &AppState, world: &mut ClusterState) {
    app.allotted().iter().for_each(|it| take(it, world));
}

fn take(allotted: &RouteNameAllocation, world: &mut ClusterState) {
    if let ClusterIpSource::Host(host) = allotted.addresses {
        world.hosts.insert(host);
    }
    world.ports.insert(allotted.port);
}

/// Releases all allocations of the app `name`. The app may stay for a while, so they are also removed from it: by then
/// another app may have them.
pub(super) fn release(name: &NamespacedName, before: &AppState, world: &mut ClusterState) {
    give_back(before.allotted(), world);
    world.short.remove(name);
    let route = world.apps.get_mut(name).and_then(|app| app.route.as_mut());
    route.into_iter().for_each(|route| route.allotted.clear());
}

pub(super) fn give_back(all: &[RouteNameAllocation], world: &mut ClusterState) {
    if all.is_empty() {
        return;
    }
    for it in all {
        if let ClusterIpSource::Host(host) = it.addresses {
            world.hosts.remove(&host);
        }
        world.ports.remove(&it.port);
    }
    // Routes that found no port are planned again, since one is free now.
    for name in std::mem::take(&mut world.short) {
        world.names.touch_claimant(NameClaimant::Route(name));
    }
}

/// Hashes a name with FNV-1a: names spread over the range, and a returning name gets its old numbers if they are free.
fn hash(name: &NamespacedName, tag: Option<&str>) -> u32 {
    let bytes = [tag.unwrap_or_default(), "/", &name.namespace, "/", &name.name];
    let bytes = bytes.iter().flat_map(|part| part.bytes());
    bytes.fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Returns true for reserved addresses: network, the API server's `.1`, the DNS server's `.10`, and broadcast.
fn is_reserved(host: u16) -> bool {
    matches!(host, 0 | 1 | 10 | u16::MAX)
}

fn free_host(hash: u32, world: &ClusterState) -> Option<u16> {
    let first = u16::try_from(hash >> 16).unwrap_or_default();
    let mut all = (0..=u16::MAX).map(|step| first.wrapping_add(step));
    all.find(|host| !is_reserved(*host) && !world.hosts.contains(host))
}

fn free_port(hash: u32, world: &ClusterState) -> Option<u16> {
    let (first, last) = world.settings.activator_ports;
    let span = u32::from(last - first) + 1;
    let mut all = (0..span).map(|step| (hash % span + step) % span);
    let port = |step: u32| u16::try_from(u32::from(first) + step).ok();
    all.find_map(|step| port(step).filter(|port| !world.ports.contains(port)))
}

#[cfg(test)]
mod tests;
