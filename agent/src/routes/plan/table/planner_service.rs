//! Pure: a service of the RouteTable, and its frontends.

use std::{net::IpAddr, num::NonZeroU16};

use common::wire::LOCAL_TLS_PORT;
use datapath::abi::FrontendKey;

use super::tcp_frontend;

/// Service of the RouteTable, as far as this node's kernel follows it.
#[derive(Debug)]
pub(super) struct PlannerService {
    pub(super) addresses: Box<[IpAddr]>,
    pub(super) port: NonZeroU16,
    pub(super) activator_port: NonZeroU16,
    /// True for a port of a scaled Service: each pod has its own port for it.
    pub(super) uses_pod_ports: bool,
    /// True if connects to the port of https inside the cluster go to the activators.
    pub(super) serves_local_tls: bool,
    /// Time for which a client keeps its pod after its last connect, in seconds; 0: not at all.
    pub(super) affinity_seconds: u32,
    /// Number of the Revision whose pods new connections go directly to.
    pub(super) direct_revision: Option<u32>,
}

impl PlannerService {
    /// Iterates over the frontends at the service's own port.
    pub(super) fn own_frontends(&self) -> impl Iterator<Item = FrontendKey> {
        self.addresses.iter().map(|&address| tcp_frontend(address, self.port))
    }

    /// Iterates over the addresses that serve https inside the cluster.
    pub(super) fn local_tls_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.addresses.iter().copied().filter(|_| self.serves_local_tls)
    }

    /// Iterates over the frontends of https inside the cluster, whose connects always go to activators.
    pub(super) fn local_tls_frontends(&self) -> impl Iterator<Item = FrontendKey> {
        self.local_tls_addresses().map(|address| tcp_frontend(address, LOCAL_TLS_PORT))
    }

    /// Returns true for a frontend of https inside the cluster, if the service has the frontend.
    pub(super) fn is_local_tls(&self, key: &FrontendKey) -> bool {
        self.serves_local_tls && key.port_be == LOCAL_TLS_PORT.get().to_be()
    }
}
