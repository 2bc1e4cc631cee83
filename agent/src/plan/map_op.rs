//! Pure: map operations of a plan, and the content of the kernel's maps.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv6Addr, SocketAddr},
};

use common::wire::NamespacedName;
use datapath::{
    abi::FrontendKey,
    flow::{SvcInfo, SvcState},
};

use super::MapCapacityError;

/// One target of connects: an entry of `BACKENDS`, without its gauge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BackendTarget {
    /// Sixteen bytes in network byte order; IPv4 as `::ffff:a.b.c.d`.
    pub address: [u8; 16],
    /// Netns cookie of a registered pod on this node; 0: elsewhere or unknown.
    pub cookie: u64,
    /// Row of a registered pod on this node; 0: elsewhere or unknown.
    pub slot: u32,
    /// Port, network byte order; 0: the service's own port at the activators.
    pub port_be: u16,
}

impl BackendTarget {
    pub(super) fn of_pod(at: SocketAddr, local: Option<KernelPodIds>) -> Self {
        Self {
            address: to_v6_octets(at.ip()),
            cookie: local.map_or(0, |local| local.cookie),
            slot: local.map_or(0, |local| local.slot),
            port_be: at.port().to_be(),
        }
    }

    pub(super) fn of_activator(address: IpAddr) -> Self {
        Self { address: to_v6_octets(address), cookie: 0, slot: 0, port_be: 0 }
    }

    /// Returns the pod's address and port; `None` for an activator, which has no fixed port.
    pub(crate) fn pod_address(&self) -> Option<SocketAddr> {
        let port = u16::from_be(self.port_be);
        let ip = Ipv6Addr::from(self.address).to_canonical();
        (port > 0).then(|| SocketAddr::new(ip, port))
    }
}

/// Result of planning: the map operations that put the table in force, and their effects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MapPlan {
    /// Map operations, in the order in which they are safe.
    pub ops: Vec<MapOp>,
    /// Pods that new connections go directly to from now on.
    pub added_pods: BTreeSet<SocketAddr>,
    /// Pods that new connections no longer go to.
    pub removed_pods: BTreeSet<SocketAddr>,
    /// Services that do not fit, each with the reason. Until they fit, their connects go to the activators.
    pub refused: BTreeMap<NamespacedName, MapCapacityError>,
    /// True if lists of the previous table are still in force, which this plan leaves to a later one.
    pub is_partial: bool,
}

/// One write of a kernel map. The order of a plan's operations is part of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapOp {
    /// Fills a backend that no list names.
    Backend {
        /// Number of the backend.
        id: u32,
        /// New content of the backend.
        backend: BackendTarget,
    },
    /// Fills an extent of `SLOTS` that no list refers to.
    Slots {
        /// Offset of the extent's first entry.
        offset: u32,
        /// Backend numbers, one for each entry.
        backends: Vec<u32>,
    },
    /// Sets the target of a service's connects while it has no pod.
    Info {
        /// Number of the service.
        service: u32,
        /// List of activators, and the service's port there.
        info: SvcInfo,
    },
    /// Switches a service to another list, in one store.
    State {
        /// Number of the service.
        service: u32,
        /// New state of the service.
        state: SvcState,
    },
    /// Assigns an address and port to a service.
    Frontend {
        /// Address and port of the frontend.
        key: FrontendKey,
        /// Number of the service.
        service: u32,
    },
    /// Removes a frontend: its connects then pass unchanged to any other implementation.
    RemoveFrontend {
        /// Address and port of the frontend.
        key: FrontendKey,
    },
}

/// Routing state of the kernel, as read back from its maps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelRoutes {
    /// Service number by frontend.
    pub frontends: BTreeMap<FrontendKey, u32>,
    /// State, activators and backend numbers of each service that a frontend names, and of the two activator lists.
    pub services: BTreeMap<u32, (SvcState, SvcInfo, Vec<u32>)>,
    /// Backends that those lists name.
    pub backends: BTreeMap<u32, BackendTarget>,
    /// Bounds above which no entry was ever written.
    pub written: WrittenBounds,
}

/// Extent to which the maps were ever written: one more than the highest number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrittenBounds {
    /// End of the backend numbers.
    pub backends: u32,
    /// End of the entries of `SLOTS`.
    pub slots: u32,
    /// End of the service numbers.
    pub services: u32,
}

/// A registered pod of this node, by the kernel's identifiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelPodIds {
    /// Netns cookie of the pod's namespace.
    pub cookie: u64,
    /// Row of the pod in the kernel's counters.
    pub slot: u32,
}

/// Map operations of a plan by kind, in the order in which they are safe.
#[derive(Debug, Default)]
pub(super) struct OrderedMapOps {
    pub(super) backends: Vec<MapOp>,
    pub(super) slots: Vec<MapOp>,
    pub(super) infos: Vec<MapOp>,
    pub(super) states: Vec<MapOp>,
    pub(super) frontends: Vec<MapOp>,
    pub(super) removals: Vec<MapOp>,
    pub(super) added_pods: BTreeSet<SocketAddr>,
    pub(super) removed_pods: BTreeSet<SocketAddr>,
}

impl OrderedMapOps {
    /// Puts the operations into a plan.
    pub(super) fn finish(self, plan: &mut MapPlan) {
        let groups =
            [self.backends, self.slots, self.infos, self.states, self.frontends, self.removals];
        // A pod in both sets has not left: its backend changed, as when it was registered on this node.
        plan.removed_pods = self.removed_pods.difference(&self.added_pods).copied().collect();
        plan.ops = groups.into_iter().flatten().collect();
        plan.added_pods = self.added_pods;
    }
}

/// Returns an address in network byte order; IPv4 as a mapped address.
pub(crate) fn to_v6_octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(four) => four.to_ipv6_mapped().octets(),
        IpAddr::V6(six) => six.octets(),
    }
}
