//! Pure: what a plan consists of, and what the kernel's maps hold.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv6Addr, SocketAddr},
};

use common::{
    abi::FrontendKey,
    flow::{SvcInfo, SvcState},
    wire::Name,
};

use super::TooBig;

/// One target of connects, without its gauge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Backend {
    /// Sixteen bytes as they stand in a packet; IPv4 as `::ffff:a.b.c.d`.
    pub address: [u8; 16],
    /// Netns cookie of a registered pod on this node; 0: elsewhere or unknown.
    pub cookie: u64,
    /// Slot of a registered pod on this node; 0: elsewhere or unknown.
    pub slot: u32,
    /// Port, network byte order; 0: the service's own port at the activators.
    pub port_be: u16,
}

impl Backend {
    pub(super) fn at(at: SocketAddr, local: Option<Local>) -> Self {
        Self {
            address: sixteen(at.ip()),
            cookie: local.map_or(0, |local| local.cookie),
            slot: local.map_or(0, |local| local.slot),
            port_be: at.port().to_be(),
        }
    }

    pub(super) fn activator(address: IpAddr) -> Self {
        Self { address: sixteen(address), cookie: 0, slot: 0, port_be: 0 }
    }

    /// Where it serves; an activator serves at no port in particular.
    pub(crate) fn pod(&self) -> Option<SocketAddr> {
        let port = u16::from_be(self.port_be);
        let ip = Ipv6Addr::from(self.address).to_canonical();
        (port > 0).then(|| SocketAddr::new(ip, port))
    }
}

/// What puts the table in force.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Writes, in the order in which they are safe.
    pub ops: Vec<MapOp>,
    /// Pods that new connections are led straight to from now on.
    pub joined: BTreeSet<SocketAddr>,
    /// Pods that they are not led to any more.
    pub left: BTreeSet<SocketAddr>,
    /// Services that do not fit, and why: their connects go by the activators until they do.
    pub refused: BTreeMap<Name, TooBig>,
    /// Whether lists of the table before are still in force, which this plan leaves to a later one.
    pub waits: bool,
}

/// One write of a kernel map. The order of a plan's writes is part of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapOp {
    /// Fills a backend that no list names.
    Backend {
        /// Its number.
        id: u32,
        /// What it becomes.
        backend: Backend,
    },
    /// Fills an extent that no list refers to.
    Slots {
        /// First slot.
        offset: u32,
        /// Backend numbers, one a slot.
        backends: Vec<u32>,
    },
    /// Says where a service's connects go without a pod.
    Info {
        /// The service.
        service: u32,
        /// The activator list and port.
        info: SvcInfo,
    },
    /// Switches a service, in one store.
    State {
        /// The service.
        service: u32,
        /// What it becomes.
        state: SvcState,
    },
    /// Leads an address to a service.
    Frontend {
        /// The address.
        key: FrontendKey,
        /// The service.
        service: u32,
    },
    /// Gives an address back to whoever else serves it.
    RemoveFrontend {
        /// The address.
        key: FrontendKey,
    },
}

/// What the kernel follows, as read back from its maps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelTable {
    /// Service by address.
    pub frontends: BTreeMap<FrontendKey, u32>,
    /// State, activators and list of each service that a frontend names, and of the two activator lists.
    pub services: BTreeMap<u32, (SvcState, SvcInfo, Vec<u32>)>,
    /// The backends those lists name.
    pub backends: BTreeMap<u32, Backend>,
    /// Nothing was ever written from here on.
    pub written: Written,
}

/// How far the maps were ever written: one more than the highest number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Backend numbers.
    pub backends: u32,
    /// Slots.
    pub slots: u32,
    /// Service numbers.
    pub services: u32,
}

/// A registered pod of this node, by the kernel's names for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    /// Its netns cookie.
    pub cookie: u64,
    /// Its slot.
    pub slot: u32,
}

/// A plan's writes, by the order in which they are safe.
#[derive(Debug, Default)]
pub(super) struct Ops {
    pub(super) backends: Vec<MapOp>,
    pub(super) slots: Vec<MapOp>,
    pub(super) infos: Vec<MapOp>,
    pub(super) states: Vec<MapOp>,
    pub(super) frontends: Vec<MapOp>,
    pub(super) removals: Vec<MapOp>,
    pub(super) joined: BTreeSet<SocketAddr>,
    pub(super) left: BTreeSet<SocketAddr>,
}

impl Ops {
    /// Puts the writes into a plan.
    pub(super) fn complete(self, plan: &mut Plan) {
        let groups =
            [self.backends, self.slots, self.infos, self.states, self.frontends, self.removals];
        // A pod that is known by another name now, as one of this node, has not left.
        plan.left = self.left.difference(&self.joined).copied().collect();
        plan.ops = groups.into_iter().flatten().collect();
        plan.joined = self.joined;
    }
}

/// An address as it stands in a packet; IPv4 as a mapped one.
pub(crate) fn sixteen(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(four) => four.to_ipv6_mapped().octets(),
        IpAddr::V6(six) => six.octets(),
    }
}
