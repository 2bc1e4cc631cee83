//! Pure: a ClusterIP and a port at the activators for each name of a route, kept for as long as the name lives.

use common::wire::Name;

use crate::world::{Addresses, Allotment, App, Platform, World};

/// Allots what the app's names lack and releases what no name needs any more.
pub(super) fn allot(app: &mut App, name: &Name, world: &mut World) {
    let Some(route) = &mut app.route else { return };
    let mut tags: Vec<Option<Box<str>>> = vec![None];
    tags.extend(route.wanted.iter().filter(|it| it.tag.is_some()).map(|it| it.tag.clone()));
    let (kept, left): (Vec<_>, Vec<_>) =
        route.allotted.drain(..).partition(|it| tags.contains(&it.tag));
    give_back(&left, world);
    route.allotted = kept;
    for tag in tags {
        if route.allotted.iter().any(|it| it.tag == tag) {
            continue;
        }
        let hash = hash(name, tag.as_deref());
        let addresses = match world.settings.platform {
            Platform::Local => free_host(hash, world).map(Addresses::Host),
            Platform::Kubernetes => Some(Addresses::Given(Box::new([]))),
        };
        if let (Some(addresses), Some(port)) = (addresses, free_port(hash, world)) {
            let allotted = Allotment { tag, addresses, port };
            take(&allotted, world);
            route.allotted.push(allotted);
        }
    }
}

/// Marks what a restored app holds as taken.
pub(super) fn claim(app: &App, world: &mut World) {
    app.allotted().iter().for_each(|it| take(it, world));
}

fn take(allotted: &Allotment, world: &mut World) {
    if let Addresses::Host(host) = allotted.addresses {
        world.hosts.insert(host);
    }
    world.ports.insert(allotted.port);
}

/// Gives back everything the app holds.
pub(super) fn release(app: &App, world: &mut World) {
    give_back(app.allotted(), world);
}

fn give_back(all: &[Allotment], world: &mut World) {
    for it in all {
        if let Addresses::Host(host) = it.addresses {
            world.hosts.remove(&host);
        }
        world.ports.remove(&it.port);
    }
}

/// FNV-1a: names spread over the range, and a name that comes back gets its numbers back if they are free.
fn hash(name: &Name, tag: Option<&str>) -> u32 {
    let bytes = [tag.unwrap_or_default(), "/", &name.namespace, "/", &name.name];
    let bytes = bytes.iter().flat_map(|part| part.bytes());
    bytes.fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Addresses that are somebody's: the API server's `.1`, the DNS server's `.10`, network and broadcast.
fn is_reserved(host: u16) -> bool {
    matches!(host, 0 | 1 | 10 | u16::MAX)
}

fn free_host(hash: u32, world: &World) -> Option<u16> {
    let first = u16::try_from(hash >> 16).unwrap_or_default();
    let mut all = (0..=u16::MAX).map(|step| first.wrapping_add(step));
    all.find(|host| !is_reserved(*host) && !world.hosts.contains(host))
}

fn free_port(hash: u32, world: &World) -> Option<u16> {
    let (first, last) = world.settings.activator_ports;
    let span = u32::from(last - first) + 1;
    let mut all = (0..span).map(|step| (hash % span + step) % span);
    let port = |step: u32| u16::try_from(u32::from(first) + step).ok();
    all.find_map(|step| port(step).filter(|port| !world.ports.contains(port)))
}
