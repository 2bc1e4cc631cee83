//! Shell: ends stale sockets in the network namespaces that have some.

use std::{
    collections::{BTreeMap, BTreeSet},
    io, iter,
    net::SocketAddr,
    path::Path,
};

use datapath::abi;
use tracing::warn;

use super::EndpointRounds;
use crate::{
    connections::stale_connections::close::client_namespaces,
    kernel::{
        led_socket::LedSocket,
        maps::{KernelMapError, client_sockets::ClientSocketRecords},
        netns_cookies,
    },
    net::sockdiag::{DiagConnection, SockDiag},
    pods::{
        namespace::{NamespaceError, NetworkNamespace},
        processes::{ProcessesByNamespace, open_namespace_of},
    },
};

/// Network namespace of the agent, in which programs of the node itself may run.
const OWN_NAMESPACE: &str = "/proc/thread-self/ns/net";

/// Result of one round.
#[derive(Debug, Default)]
pub(super) struct StaleSocketRound {
    /// Numbers of sockets that were ended.
    pub(super) ended: EndedSockets,
    /// Number of namespaces in which the round failed. A kernel that cannot end sockets fails in all of them.
    pub(super) failed_namespaces: usize,
    /// Error of the first of these namespaces.
    pub(super) first_error: Option<NamespaceError>,
    /// True if the processes of clients could not be listed, so that only the agent's own namespace was entered.
    is_list_missing: bool,
}

impl StaleSocketRound {
    /// Records that stale sockets of a namespace may be left.
    fn record_failure(&mut self, error: NamespaceError) {
        self.failed_namespaces += 1;
        self.first_error.get_or_insert(error);
    }

    /// Returns true if stale sockets may be left because of an error.
    pub(super) fn has_failed(&self) -> bool {
        self.is_list_missing || self.first_error.is_some()
    }
}

/// Numbers of sockets that were ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct EndedSockets {
    pub(super) tcp: u64,
    pub(super) udp: u64,
}

/// Endpoints that have left and that sockets still have, by the cookie of the sockets' namespace and their protocol.
type LeftEndpoints = BTreeMap<(u64, u8), BTreeSet<SocketAddr>>;

/// Ends the stale sockets of all processes in the cgroup `clients`, and of the agent's network namespace. Blocks.
///
/// The records tell the namespaces with such sockets, and only there sockets are listed. Without such records, no
/// namespace is entered.
pub(super) fn end_stale_sockets(
    clients: &Path,
    records: &ClientSocketRecords,
    endpoints: &EndpointRounds,
) -> Result<StaleSocketRound, KernelMapError> {
    let mut round = StaleSocketRound::default();
    // An open socket may be older than the last change of the maps' sizes, and has its record in maps of those sizes.
    let records = &records.with_other_sizes();
    let mut left = LeftEndpoints::new();
    records.for_each(|socket| {
        if endpoints.has_left(&socket) {
            let key = (socket.netns_cookie, socket.frontend.protocol);
            left.entry(key).or_default().insert(socket.endpoint);
        }
    })?;
    if left.is_empty() {
        return Ok(round);
    }
    let ProcessesByNamespace { known, unknown } =
        client_namespaces(clients).unwrap_or_else(|error| {
            warn!(%error, "cannot list the processes of clients");
            round.is_list_missing = true;
            ProcessesByNamespace::default()
        });
    let of_clients = known.values().map(|pids| open_namespace_of(pids));
    let own = iter::once_with(|| NetworkNamespace::open(OWN_NAMESPACE).map(Some));
    for opened in of_clients.chain(own) {
        if left.is_empty() {
            break;
        }
        let ended = &mut round.ended;
        let end = || end_in_namespace(&mut left, records, endpoints, ended);
        let done = match opened {
            Ok(Some(namespace)) => namespace.run_inside("end sockets", end),
            // Its processes have just ended, and their sockets with them.
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        done.unwrap_or_else(|error| round.record_failure(error));
    }
    // Those that no namespace had may be of these processes.
    if !left.is_empty() {
        unknown.into_values().for_each(|error| round.record_failure(error));
    }
    Ok(round)
}

/// Ends the stale sockets of the calling thread's namespace, and removes the namespace from `left`.
fn end_in_namespace(
    left: &mut LeftEndpoints,
    records: &ClientSocketRecords,
    endpoints: &EndpointRounds,
    ended: &mut EndedSockets,
) -> io::Result<()> {
    let diag = SockDiag::open()?;
    let cookie = netns_cookies::cookie_of_socket(diag.socket())?;
    let of_tcp = endpoints_left(left, cookie, abi::IPPROTO_TCP);
    let of_udp = endpoints_left(left, cookie, abi::IPPROTO_UDP);
    let is_stale_tcp = |socket: &DiagConnection| {
        is_stale(socket, &of_tcp, endpoints, |cookie| records.find_tcp(cookie))
    };
    let is_stale_udp = |socket: &DiagConnection| {
        is_stale(socket, &of_udp, endpoints, |cookie| records.find_udp(cookie))
    };
    let tcp = if of_tcp.is_empty() { Ok(Vec::new()) } else { diag.usable_connections() };
    let tcp = tcp.and_then(|listed| end_listed(&diag, listed, is_stale_tcp, &mut ended.tcp));
    // Also after a failure with TCP: the endpoints were taken, so no later namespace has them.
    let udp = if of_udp.is_empty() { Ok(Vec::new()) } else { diag.connected_udp_sockets() };
    let udp = udp.and_then(|listed| end_listed(&diag, listed, is_stale_udp, &mut ended.udp));
    tcp.and(udp)
}

/// Takes the endpoints that have left and that sockets of a namespace and protocol have. Without a cookie, which the
/// kernel does not tell before 5.14, these are the endpoints of all namespaces, and they stay.
fn endpoints_left(
    left: &mut LeftEndpoints,
    cookie: Option<u64>,
    protocol: u8,
) -> BTreeSet<SocketAddr> {
    if let Some(cookie) = cookie {
        return left.remove(&(cookie, protocol)).unwrap_or_default();
    }
    let of_protocol = left.iter().filter(|((_, it), _)| *it == protocol);
    of_protocol.flat_map(|(_, endpoints)| endpoints).copied().collect()
}

/// Returns true if a listed socket has one of the endpoints `left`, and its record tells that it was led there.
///
/// The record is read after the socket was listed. A socket with a peer has connected, and its record stays as it is
/// until it closes.
fn is_stale(
    socket: &DiagConnection,
    left: &BTreeSet<SocketAddr>,
    endpoints: &EndpointRounds,
    find: impl FnOnce(u64) -> Result<Option<LedSocket>, KernelMapError>,
) -> io::Result<bool> {
    let peer = socket.canonical_peer();
    if !left.contains(&peer) {
        return Ok(false);
    }
    let led = find(socket.cookie()).map_err(io::Error::other)?;
    Ok(led.is_some_and(|led| endpoints.is_stale(&led, peer)))
}

/// Ends the listed sockets that are stale, and adds their number to `ended`.
fn end_listed(
    diag: &SockDiag,
    listed: Vec<DiagConnection>,
    is_stale: impl Fn(&DiagConnection) -> io::Result<bool>,
    ended: &mut u64,
) -> io::Result<()> {
    for socket in listed {
        if !is_stale(&socket)? {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_that_could_not_open_a_namespace_has_failed() {
        let mut round = StaleSocketRound::default();
        assert!(!round.has_failed());
        for pid in [7, 8] {
            let path = std::path::PathBuf::from(format!("/proc/{pid}/ns/net"));
            let source = io::Error::from_raw_os_error(libc::EMFILE);
            round.record_failure(NamespaceError::Open { path, source });
        }
        assert!(round.has_failed());
        assert_eq!(round.failed_namespaces, 2);
        let first = round.first_error.expect("recorded").to_string();
        assert_eq!(first, "cannot open network namespace /proc/7/ns/net");
    }

    #[test]
    fn a_namespace_has_the_endpoints_of_its_own_sockets() {
        let at = |port: u16| SocketAddr::from(([10, 244, 0, 1], port));
        let (tcp, udp) = (abi::IPPROTO_TCP, abi::IPPROTO_UDP);
        let mut left = LeftEndpoints::from([
            ((1, tcp), [at(1)].into()),
            ((1, udp), [at(2)].into()),
            ((2, tcp), [at(3)].into()),
        ]);
        assert_eq!(endpoints_left(&mut left, None, tcp), [at(1), at(3)].into());
        assert_eq!(endpoints_left(&mut left, Some(1), tcp), [at(1)].into());
        assert_eq!(endpoints_left(&mut left, Some(1), tcp), BTreeSet::new(), "taken");
        assert_eq!(endpoints_left(&mut left, Some(3), udp), BTreeSet::new());
        assert_eq!(left.len(), 2, "those that were not taken");
    }
}
