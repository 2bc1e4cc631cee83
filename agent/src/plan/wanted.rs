//! Pure: what each service should lead to on this node.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use common::{
    abi::{self, FrontendKey},
    flow::{Mode, SvcInfo},
    wire::{Name, Path, Pod, PodPhase, RouteKey, RouteTable, Service},
};

use super::{Backend, Local};

const TCP: u8 = 6;

/// What one list should be. Backends are sorted and each stands once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Front {
    pub(super) mode: Mode,
    pub(super) info: SvcInfo,
    pub(super) backends: Vec<Backend>,
}

/// From pods and revisions to the services they concern, so that a change costs no search.
#[derive(Debug, Default)]
pub(super) struct Index {
    services: BTreeMap<Name, BTreeSet<Name>>,
    targets: BTreeMap<Name, Vec<Name>>,
    pods: BTreeMap<Name, BTreeSet<String>>,
    revisions: BTreeMap<String, Name>,
}

impl Index {
    /// The index of a whole table.
    pub(super) fn of(table: &RouteTable) -> Self {
        let mut index = Self::default();
        table.services.values().for_each(|service| index.set_service(&service.name, Some(service)));
        table.pods.values().for_each(|pod| index.set_pod(&pod.uid, Some(pod)));
        index
    }

    /// Takes in a changed subject, and adds the services it concerns to `due`.
    pub(super) fn note(&mut self, key: &RouteKey, table: &RouteTable, due: &mut BTreeSet<Name>) {
        match key {
            RouteKey::Service(name) => {
                self.set_service(name, table.services.get(name));
                due.insert(name.clone());
            }
            RouteKey::Revision(name) => self.concern(name, due),
            RouteKey::Pod(uid) => {
                if let Some(before) = self.revisions.get(uid).cloned() {
                    self.concern(&before, due);
                }
                self.set_pod(uid, table.pods.get(uid));
                if let Some(after) = self.revisions.get(uid) {
                    self.concern(after, due);
                }
            }
            // Activators have lists of their own, which every plan compares.
            RouteKey::Activator(_) => {}
        }
    }

    fn concern(&self, revision: &Name, due: &mut BTreeSet<Name>) {
        due.extend(self.services.get(revision).into_iter().flatten().cloned());
    }

    fn set_service(&mut self, name: &Name, service: Option<&Service>) {
        for revision in self.targets.remove(name).unwrap_or_default() {
            remove(&mut self.services, &revision, name);
        }
        let Some(service) = service else { return };
        let targets: Vec<Name> =
            service.targets.iter().map(|target| target.revision.clone()).collect();
        for revision in &targets {
            self.services.entry(revision.clone()).or_default().insert(name.clone());
        }
        self.targets.insert(name.clone(), targets);
    }

    fn set_pod(&mut self, uid: &str, pod: Option<&Pod>) {
        if let Some(revision) = self.revisions.remove(uid) {
            remove(&mut self.pods, &revision, uid);
        }
        let Some(pod) = pod else { return };
        self.revisions.insert(uid.to_owned(), pod.revision.clone());
        self.pods.entry(pod.revision.clone()).or_default().insert(uid.to_owned());
    }

    fn ready<'a>(
        &'a self,
        revision: &Name,
        table: &'a RouteTable,
    ) -> impl Iterator<Item = (&'a Pod, SocketAddr)> {
        let uids = self.pods.get(revision).into_iter().flatten();
        uids.filter_map(|uid| table.pods.get(uid))
            .filter(|pod| pod.phase == PodPhase::Ready)
            .filter_map(|pod| pod.address.map(|address| (pod, address)))
    }
}

fn remove<T: Ord + ?Sized, O: Ord + std::borrow::Borrow<T>>(
    sets: &mut BTreeMap<Name, BTreeSet<O>>,
    key: &Name,
    value: &T,
) {
    if let Some(set) = sets.get_mut(key) {
        set.remove(value);
        if set.is_empty() {
            sets.remove(key);
        }
    }
}

/// The addresses of a service.
pub(super) fn keys(service: &Service) -> impl Iterator<Item = FrontendKey> {
    let port_be = service.port.get().to_be();
    service.addresses.iter().map(move |&address| FrontendKey {
        address: sixteen(address),
        port_be,
        protocol: TCP,
        reserved: 0,
    })
}

/// What each address of a service should lead to.
///
/// Straight to pods only when one revision holds all traffic, the path is direct and a pod of a fitting family
/// is ready; the kernel cannot split by request. An IPv6 client reaches IPv4 pods by mapped addresses.
pub(super) fn fronts(
    service: &Service,
    table: &RouteTable,
    index: &Index,
    locals: &BTreeMap<String, Local>,
) -> Vec<(FrontendKey, Front)> {
    let direct = match service.targets.as_slice() {
        [only] if service.path == Path::Direct => Some(&only.revision),
        _ => None,
    };
    let mut out = Vec::with_capacity(service.addresses.len());
    for (key, &address) in keys(service).zip(&service.addresses) {
        let ready = direct.into_iter().flat_map(|revision| index.ready(revision, table));
        let fitting = ready.filter(|(_, pod)| pod.is_ipv4() || address.is_ipv6());
        let mut backends: Vec<Backend> =
            fitting.map(|(pod, at)| backend(at, locals.get(&pod.uid))).collect();
        backends.sort_unstable();
        backends.dedup();
        let mode = if backends.is_empty() { Mode::Activator } else { Mode::Serve };
        let activators = activator_list(address, table);
        let info = SvcInfo { activators, port_be: service.activator_port.get().to_be() };
        out.push((key, Front { mode, info, backends }));
    }
    out
}

fn backend(at: SocketAddr, local: Option<&Local>) -> Backend {
    Backend {
        address: sixteen(at.ip()),
        cookie: local.map_or(0, |local| local.cookie),
        slot: local.map_or(0, |local| local.slot),
        port_be: at.port().to_be(),
    }
}

/// IPv4 clients reach IPv4 activators only; IPv6 ones take IPv4 activators where there are no others.
fn activator_list(address: IpAddr, table: &RouteTable) -> u32 {
    if address.is_ipv6() && has_six(table) { abi::ACTIVATORS_V6 } else { abi::ACTIVATORS_V4 }
}

/// Whether any activator has an IPv6 address.
pub(super) fn has_six(table: &RouteTable) -> bool {
    table.activators.values().flat_map(|activator| &activator.addresses).any(IpAddr::is_ipv6)
}

/// The two lists of activators.
pub(super) fn activators(table: &RouteTable) -> [(u32, Front); 2] {
    let list = |six: bool| {
        let all = table.activators.values().flat_map(|activator| &activator.addresses);
        let family = all.filter(|address| address.is_ipv6() == six);
        let mut backends: Vec<Backend> = family
            .map(|&address| Backend { address: sixteen(address), cookie: 0, slot: 0, port_be: 0 })
            .collect();
        backends.sort_unstable();
        backends.dedup();
        let info = SvcInfo { activators: 0, port_be: 0 };
        let mode = if backends.is_empty() { Mode::Pass } else { Mode::Serve };
        Front { mode, info, backends }
    };
    [(abi::ACTIVATORS_V4, list(false)), (abi::ACTIVATORS_V6, list(true))]
}

fn sixteen(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(four) => four.to_ipv6_mapped().octets(),
        IpAddr::V6(six) => six.octets(),
    }
}
