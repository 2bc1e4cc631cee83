//! Pure: from the route table to ordered writes of the kernel's maps.

use std::collections::BTreeMap;

use common::{
    abi,
    flow::{SvcInfo, SvcState},
};

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
        key: abi::FrontendKey,
        /// The service.
        service: u32,
    },
    /// Gives an address back to whoever else serves it.
    RemoveFrontend {
        /// The address.
        key: abi::FrontendKey,
    },
}

/// What the kernel follows, as read back from its maps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelTable {
    /// Service by address.
    pub frontends: BTreeMap<abi::FrontendKey, u32>,
    /// State, activators and list of each service that a frontend names, and of the two activator lists.
    pub services: BTreeMap<u32, (SvcState, SvcInfo, Vec<u32>)>,
    /// The backends those lists name.
    pub backends: BTreeMap<u32, Backend>,
}
