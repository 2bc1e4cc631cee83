//! Pure: content of the kernel's maps of routes, and the operations that change it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv6Addr, SocketAddr},
};

use datapath::{
    abi::FrontendKey,
    load_balancing::{SvcInfo, SvcState},
};

use crate::map_sizes::MapSizes;

/// One target of connects: an entry of `BACKENDS`, without its gauge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BackendTarget {
    /// Sixteen bytes in network byte order; IPv4 as `::ffff:a.b.c.d`.
    pub address: [u8; 16],
    /// Netns cookie of a registered pod on this node; 0: elsewhere or unknown, or with a listener that the eBPF
    /// programs did not see open.
    pub cookie: u64,
    /// Pod slot of a registered pod on this node; 0: elsewhere or unknown.
    pub slot: u32,
    /// Port, network byte order; 0: the service's own port at the activators.
    pub port_be: u16,
}

impl BackendTarget {
    /// Returns the target for a pod at this address; `local` are its identifiers if it is registered on this node.
    pub(crate) fn of_pod(at: SocketAddr, local: Option<&KernelPodIds>) -> Self {
        let checked = local.filter(|local| !local.unseen_ports.contains(&at.port()));
        Self {
            address: to_v6_octets(at.ip()),
            cookie: checked.map_or(0, |local| local.cookie),
            slot: local.map_or(0, |local| local.slot),
            port_be: at.port().to_be(),
        }
    }

    /// Returns the target for an activator, which listens on the port of each service.
    pub(crate) fn of_activator(address: IpAddr) -> Self {
        Self { address: to_v6_octets(address), cookie: 0, slot: 0, port_be: 0 }
    }

    /// Returns the pod's address and port; `None` for an activator, which has no fixed port.
    pub(crate) fn pod_address(&self) -> Option<SocketAddr> {
        let port = u16::from_be(self.port_be);
        let ip = Ipv6Addr::from(self.address).to_canonical();
        (port > 0).then(|| SocketAddr::new(ip, port))
    }
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
    /// Writes entries of the map `SLOTS`, one store each. Connects may read them at any time.
    ListEntries {
        /// Offset of the first entry.
        offset: u32,
        /// Backend numbers, one for each entry.
        backends: Vec<u32>,
    },
    /// Sets the target of connects to one frontend of a service that no pod takes: in mode `Activator`, and in mode
    /// `PickBackend` when no pick succeeds.
    Info {
        /// Service id of the frontend.
        service_id: u32,
        /// List of activators, and the service's port there.
        info: SvcInfo,
    },
    /// Switches one frontend of a service to another list or length, in one store.
    State {
        /// Service id of the frontend.
        service_id: u32,
        /// New state of the frontend.
        state: SvcState,
    },
    /// Assigns a service id to an address and port.
    Frontend {
        /// Address and port of the frontend.
        key: FrontendKey,
        /// Service id of the frontend.
        service_id: u32,
    },
    /// Removes a frontend: its connects then go on unchanged, for example to kube-proxy's rules.
    RemoveFrontend {
        /// Address and port of the frontend.
        key: FrontendKey,
    },
}

/// Routing state of the kernel, as read back from its maps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelRoutes {
    /// Service id by frontend.
    pub frontends: BTreeMap<FrontendKey, u32>,
    /// State, activators and backend numbers by service id: of each service id that a frontend names, and of the two
    /// activator lists.
    pub services: BTreeMap<u32, (SvcState, SvcInfo, Vec<u32>)>,
    /// Backends that those lists name.
    pub backends: BTreeMap<u32, BackendTarget>,
    /// Bounds above which no entry was ever written.
    pub written: WrittenBounds,
    /// Sizes of the maps.
    pub sizes: MapSizes,
}

impl KernelRoutes {
    /// Gives each list with backends another generation. Returns the map operations that put them in force.
    pub fn raise_generations(&mut self) -> Vec<MapOp> {
        let lists = self.services.iter_mut().filter(|(_, (state, ..))| state.count > 0);
        let raised = lists.map(|(&service_id, (state, ..))| {
            state.generation = state.generation.wrapping_add(1);
            MapOp::State { service_id, state: *state }
        });
        raised.collect()
    }
}

/// Extent to which the maps were ever written: one more than the highest number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrittenBounds {
    /// End of the backend numbers.
    pub backends: u32,
    /// End of the entries of the map `SLOTS`.
    pub list_entries: u32,
    /// End of the service ids.
    pub services: u32,
}

/// A registered pod of this node, by the kernel's identifiers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelPodIds {
    /// Netns cookie of the pod's namespace.
    pub cookie: u64,
    /// Pod slot: row of the pod in the kernel's counters.
    pub slot: u32,
    /// Ports with a listener that the eBPF programs did not see open: connects must not check it.
    pub unseen_ports: BTreeSet<u16>,
}

/// Returns an address in network byte order; IPv4 as a mapped address.
pub(crate) fn to_v6_octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(four) => four.to_ipv6_mapped().octets(),
        IpAddr::V6(six) => six.octets(),
    }
}
