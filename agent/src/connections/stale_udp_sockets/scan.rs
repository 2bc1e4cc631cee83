//! Shell: ends stale UDP sockets in the network namespaces of this node's clients.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Mutex,
};

use super::is_stale;
use crate::{
    connections::stale_connections::close::client_namespaces,
    kernel::maps::udp_sockets::UdpSocketEntries,
    lock::lock,
    net::sockdiag::SockDiag,
    pods::namespace::{NamespaceError, NetworkNamespace},
    routes::plan::UdpEndpoints,
};

/// Network namespace of the agent, in which programs of the node itself may run.
const OWN_NAMESPACE: &str = "/proc/thread-self/ns/net";

/// Result of one round over all namespaces.
#[derive(Debug, Default)]
pub(super) struct StaleUdpRound {
    /// Number of sockets that were ended.
    pub(super) ended: u64,
    /// Number of namespaces in which the round failed. A kernel that cannot end sockets fails in all of them.
    pub(super) failed_namespaces: usize,
    /// Error of the first of these namespaces.
    pub(super) first_error: Option<NamespaceError>,
}

/// Ends the stale sockets of all processes in the cgroup `clients`, and of the agent's network namespace. Blocks.
pub(super) fn end_stale_sockets(
    clients: &Path,
    entries: &UdpSocketEntries,
    endpoints: &Mutex<UdpEndpoints>,
) -> StaleUdpRound {
    let mut round = StaleUdpRound::default();
    let entries = &entries.with_other_sizes();
    if entries.is_empty() {
        return round;
    }
    for path in client_namespaces(clients).chain([PathBuf::from(OWN_NAMESPACE)]) {
        // Without a namespace its process has just ended.
        let Ok(namespace) = NetworkNamespace::open(path) else { continue };
        let end = || end_in_namespace(entries, endpoints, &mut round.ended);
        if let Err(error) = namespace.run_inside("end UDP sockets", end) {
            round.failed_namespaces += 1;
            round.first_error.get_or_insert(error);
        }
    }
    round
}

/// Ends the stale sockets of the calling thread's network namespace. `ended` grows by their number, also if a later
/// socket cannot be ended.
fn end_in_namespace(
    entries: &UdpSocketEntries,
    endpoints: &Mutex<UdpEndpoints>,
    ended: &mut u64,
) -> io::Result<()> {
    let diag = SockDiag::open()?;
    for socket in diag.connected_udp_sockets()? {
        let entry = entries.find(socket.cookie()).map_err(io::Error::other)?;
        let Some(entry) = entry else { continue };
        if !is_stale(&lock(endpoints), &entry, socket.canonical_peer()) {
            continue;
        }
        match diag.destroy(&socket) {
            Ok(()) => *ended += 1,
            // It has closed, or has connected to another address since it was listed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
