//! Shell: ends stale UDP sockets in the network namespaces of this node's clients.

use std::{
    io,
    path::{Path, PathBuf},
};

use common::link::error_chain;
use tracing::warn;

use super::is_stale;
use crate::{
    connections::stale_connections::close::client_namespaces,
    kernel::maps::udp_sockets::UdpSocketEntries, net::sockdiag::SockDiag,
    pods::namespace::NetworkNamespace, routes::plan::UdpEndpoints,
};

/// Network namespace of the agent, in which programs of the node itself may run.
const OWN_NAMESPACE: &str = "/proc/thread-self/ns/net";

/// Ends the stale sockets of all processes in the cgroup `clients`, and of the agent's network namespace. Returns the
/// number of sockets that were ended. Blocks.
pub(super) fn end_stale_sockets(
    clients: &Path,
    entries: &UdpSocketEntries,
    endpoints: &UdpEndpoints,
) -> u64 {
    let entries = &entries.with_other_sizes();
    if entries.is_empty() {
        return 0;
    }
    let mut ended = 0;
    for path in client_namespaces(clients).chain([PathBuf::from(OWN_NAMESPACE)]) {
        // Without a namespace its process has just ended.
        let Ok(namespace) = NetworkNamespace::open(path) else { continue };
        let end = || end_in_namespace(entries, endpoints);
        match namespace.run_inside("end UDP sockets", end) {
            Ok(count) => ended += count,
            Err(error) => warn!(error = %error_chain(&error), "cannot end stale UDP sockets"),
        }
    }
    ended
}

fn end_in_namespace(entries: &UdpSocketEntries, endpoints: &UdpEndpoints) -> io::Result<u64> {
    let diag = SockDiag::open()?;
    let mut ended = 0;
    for socket in diag.connected_udp_sockets()? {
        let entry = entries.find(socket.cookie()).map_err(io::Error::other)?;
        let Some(entry) = entry else { continue };
        if !is_stale(endpoints, &entry, socket.canonical_peer()) {
            continue;
        }
        match diag.destroy(&socket) {
            Ok(()) => ended += 1,
            // It has closed, or has connected to another address since it was listed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(ended)
}
