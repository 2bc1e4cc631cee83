//! Pure: a ClusterIP and a port at the activators for each name of a route, kept for as long as the name lives.

use common::wire::Name;

use super::names;
use crate::{
    children::tagged,
    world::{Addresses, Allotment, App, Platform, World, names::Claimant},
};

/// Allots what the app's names lack and releases what no name needs any more.
pub(super) fn allot(app: &mut App, name: &Name, world: &mut World) {
    names::ask(app, name, world);
    allot_owned(app, name, world);
    names::ask(app, name, world);
}

fn allot_owned(app: &mut App, name: &Name, world: &mut World) {
    let Some(route) = &mut app.route else { return };
    let mut tags: Vec<Option<Box<str>>> = vec![None];
    tags.extend(route.wanted.iter().filter(|it| it.tag.is_some()).map(|it| it.tag.clone()));
    // What another owner has is not for us.
    tags.retain(|tag| world.app_named(&service(name, tag.as_deref())).as_ref() == Some(name));
    let (kept, left): (Vec<_>, Vec<_>) =
        route.allotted.drain(..).partition(|it| tags.contains(&it.tag));
    give_back(&left, world);
    route.allotted = kept;
    world.short.remove(name);
    for tag in tags {
        let held = route.allotted.iter_mut().find(|it| it.tag == tag);
        let allotted = match (world.settings.platform, held) {
            (Platform::Local, Some(_)) => continue,
            (Platform::Local, None) => ours(name, tag, world),
            (Platform::Kubernetes, Some(held)) => {
                if let Some(seen) = world.placeholders.get(&service(name, held.tag.as_deref())) {
                    held.addresses = Addresses::Given(seen.addresses.clone());
                }
                continue;
            }
            (Platform::Kubernetes, None) => given(name, tag, world),
        };
        if let Some(allotted) = allotted {
            take(&allotted, world);
            // Most routes have one name; `push` alone would make room for four.
            route.allotted.reserve_exact(1);
            route.allotted.push(allotted);
        } else if world.leads {
            world.short.insert(name.clone());
        }
    }
}

fn ours(name: &Name, tag: Option<Box<str>>, world: &World) -> Option<Allotment> {
    let hash = hash(name, tag.as_deref());
    let addresses = Addresses::Host(free_host(hash, world)?);
    Some(Allotment { tag, addresses, port: free_port(hash, world)? })
}

/// What the Service of the name holds. Only who leads allots a port that no Service holds yet, or that two hold.
fn given(name: &Name, tag: Option<Box<str>>, world: &World) -> Option<Allotment> {
    let seen = world.placeholders.get(&service(name, tag.as_deref()));
    let kept = seen.and_then(|it| it.port).filter(|port| !world.ports.contains(port));
    let fresh = || free_port(hash(name, tag.as_deref()), world).filter(|_| world.leads);
    let port = kept.or_else(fresh)?;
    let addresses = seen.map(|it| it.addresses.clone()).unwrap_or_default();
    Some(Allotment { tag, addresses: Addresses::Given(addresses), port })
}

/// The Service that bears a name of a route.
fn service(name: &Name, tag: Option<&str>) -> Name {
    Name::new(name.namespace.clone(), tagged(tag, &name.name))
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

/// Gives back everything the app `name` holds, once: it may stay a while, and another may have it by then.
pub(super) fn release(name: &Name, before: &App, world: &mut World) {
    give_back(before.allotted(), world);
    world.short.remove(name);
    let route = world.apps.get_mut(name).and_then(|app| app.route.as_mut());
    route.into_iter().for_each(|route| route.allotted.clear());
}

pub(super) fn give_back(all: &[Allotment], world: &mut World) {
    if all.is_empty() {
        return;
    }
    for it in all {
        if let Addresses::Host(host) = it.addresses {
            world.hosts.remove(&host);
        }
        world.ports.remove(&it.port);
    }
    for name in std::mem::take(&mut world.short) {
        world.names.touch_claimant(Claimant::Route(name));
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

#[cfg(test)]
mod tests;
