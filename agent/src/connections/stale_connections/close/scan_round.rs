//! Shell: scans of clients: lists the connections in their network namespaces, for one round.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use common::link::error_chain;
use datapath::abi::ConnectionActivity;
use tracing::warn;

use super::{
    super::{
        DrainingAddress, close_pacing::ClosePacing, is_due, may_close,
        pod_query::ClientPodAddresses,
    },
    client_ip, connection_addresses,
    scan_plan::ClientScanTarget,
};
use crate::{
    clock::thread_cpu_time,
    kernel::netns_cookies::cookie_of_socket,
    net::sockdiag::{DiagConnection, SockDiag},
    pods::{
        namespace::{NamespaceError, NetworkNamespace},
        processes::open_namespace_of,
    },
};

/// Result of the scan of one client.
pub(super) enum ClientScanOutcome {
    /// Its connections, and the processor time of the scan.
    Scanned(ScannedClient, Duration),
    /// Its processes have ended, and their connections with them.
    Ended,
    /// Nothing new is known of its connections. These are the processes in its namespace.
    Failed(Vec<u32>),
}

/// Results of the scans of one round.
#[derive(Default)]
pub(super) struct ClientScanRound {
    /// Clients with connections to draining addresses.
    pub(super) clients: Vec<ScannedClient>,
    /// Processes in all scanned namespaces, by the namespaces' cookies, where the kernel tells them.
    pub(super) namespaces: BTreeMap<u64, Vec<u32>>,
    /// Cookies of namespaces whose processes have ended.
    pub(super) ended_namespaces: Vec<u64>,
    /// Cookies of the known connections that were looked for.
    pub(super) scanned: BTreeSet<u64>,
    /// Processes of the clients whose scan has failed.
    pub(super) failed: BTreeSet<u32>,
    /// Number of namespaces whose connections were listed.
    pub(super) walks: u64,
    /// Processor time of the scans.
    pub(super) cpu_time: Duration,
}

impl ClientScanRound {
    /// Scans a client, and adds the result.
    pub(super) fn scan(
        &mut self,
        target: ClientScanTarget,
        draining: &BTreeMap<SocketAddr, DrainingAddress>,
    ) {
        // Taken before the scan, which shows only of these connections that they have closed.
        let known = target.known.iter().flatten().map(DiagConnection::cookie).collect();
        let (is_listed, netns_cookie) = (target.known.is_none(), target.netns_cookie);
        let outcome = ScannedClient::scan(target);
        match &outcome {
            ClientScanOutcome::Scanned(..) => self.walks += u64::from(is_listed),
            ClientScanOutcome::Ended => self.ended_namespaces.extend(netns_cookie),
            ClientScanOutcome::Failed(_) => {}
        }
        self.add(known, outcome, draining);
    }

    /// Adds the result of a client; `known` are the cookies of the connections to which its scan was limited.
    pub(super) fn add(
        &mut self,
        known: Vec<u64>,
        outcome: ClientScanOutcome,
        draining: &BTreeMap<SocketAddr, DrainingAddress>,
    ) {
        match outcome {
            ClientScanOutcome::Scanned(client, cpu_time) => {
                self.cpu_time += cpu_time;
                self.scanned.extend(known);
                self.namespaces.extend(client.netns_cookie.map(|it| (it, client.pids.clone())));
                self.clients.extend(client.select_stale(draining));
            }
            ClientScanOutcome::Ended => self.scanned.extend(known),
            ClientScanOutcome::Failed(pids) => self.failed.extend(pids),
        }
    }

    /// Adds processes whose namespace is not known: nothing new is known of the connections of their clients.
    pub(super) fn add_unknown<'a>(&mut self, pids: impl IntoIterator<Item = &'a u32>) {
        self.failed.extend(pids);
    }
}

/// A client's namespace, and its connections to draining addresses.
pub(super) struct ScannedClient {
    /// Processes in the namespace when it was listed.
    pub(super) pids: Vec<u32>,
    /// Cookie of the namespace, where the kernel tells it.
    netns_cookie: Option<u64>,
    pub(super) namespace: NetworkNamespace,
    /// Connections to draining addresses.
    pub(super) stale: Vec<DiagConnection>,
    /// Connections among them that are to be closed.
    pub(super) due: Vec<DiagConnection>,
}

impl ScannedClient {
    /// Scans a client for all its connections, or for those to which the scan is limited.
    fn scan(target: ClientScanTarget) -> ClientScanOutcome {
        let ClientScanTarget { pids, netns_cookie: wanted_cookie, known } = target;
        let failed = |pids, error: &NamespaceError| {
            warn!(error = %error_chain(error), "cannot list stale connections");
            ClientScanOutcome::Failed(pids)
        };
        let namespace = match open_namespace_of(&pids) {
            Ok(Some(namespace)) => namespace,
            // If it has new processes, the next scan of all clients finds them.
            Ok(None) => return ClientScanOutcome::Ended,
            Err(error) => return failed(pids, &error),
        };
        // On a thread of its own, so that the thread's whole time is the scan's.
        let list_connections = || {
            let diag = SockDiag::open()?;
            let netns_cookie = cookie_of_socket(diag.socket())?;
            // The process id may be that of another process by now, in a namespace that the scan is not for.
            if wanted_cookie.is_some_and(|wanted| netns_cookie != Some(wanted)) {
                return Ok(None);
            }
            let found = known.map_or_else(
                || diag.connections(),
                |connections| refresh_connections(&diag, &connections),
            )?;
            Ok(Some((netns_cookie, found, thread_cpu_time())))
        };
        match namespace.run_inside("list connections", list_connections) {
            Ok(Some((netns_cookie, stale, cpu_time))) => {
                let client = Self { pids, netns_cookie, namespace, stale, due: Vec::new() };
                ClientScanOutcome::Scanned(client, cpu_time)
            }
            // It is another process's namespace.
            Ok(None) => ClientScanOutcome::Ended,
            Err(error) => failed(pids, &error),
        }
    }

    /// Keeps only connections to draining addresses, and selects the due ones; `None` if there are none.
    fn select_stale(mut self, draining: &BTreeMap<SocketAddr, DrainingAddress>) -> Option<Self> {
        self.stale.retain(|connection| draining.contains_key(&connection.canonical_peer()));
        let (now, all) = (Instant::now(), self.stale.iter());
        self.due = all.filter(|&it| is_due(now, draining, it)).cloned().collect();
        (!self.stale.is_empty()).then_some(self)
    }

    /// Removes the connections of clients whose next moment is later from the due ones. Returns their number.
    pub(super) fn postpone_paced(&mut self, now: Instant, pacing: &ClosePacing) -> usize {
        let all = self.due.len();
        self.due.retain(|connection| pacing.allowed(now, client_ip(connection), 1) > 0);
        all - self.due.len()
    }

    /// Removes the connections to these pods from the due ones.
    pub(super) fn exclude_pods(&mut self, pods: &BTreeSet<SocketAddr>) {
        self.due.retain(|connection| !pods.contains(&connection.canonical_peer()));
    }

    /// Removes the connections that are in use, or may be, from the due ones. Returns their number.
    pub(super) fn exclude_in_use(
        &mut self,
        draining: &BTreeMap<SocketAddr, DrainingAddress>,
        activities: &BTreeMap<ClientPodAddresses, ConnectionActivity>,
    ) -> u64 {
        let all = self.due.len();
        self.due.retain(|connection| {
            may_close(
                draining,
                connection,
                activities.get(&connection_addresses(connection)).copied(),
            )
        });
        (all - self.due.len()) as u64
    }
}

/// Returns these connections as they are now, without those that have closed.
fn refresh_connections(
    diag: &SockDiag,
    connections: &[DiagConnection],
) -> io::Result<Vec<DiagConnection>> {
    let mut open = Vec::with_capacity(connections.len());
    for connection in connections {
        match diag.refresh(connection) {
            Ok(connection) => open.push(connection),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(open)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::sockdiag::TcpActivity;

    #[test]
    fn due_connections_of_a_client_with_a_close_just_now_are_left_for_later() {
        let connection = |host: u8, port: u16| {
            let (local, peer) = (([10, 0, 0, host], port).into(), ([10, 0, 1, 1], 80).into());
            DiagConnection::listed(local, peer, TcpActivity::default())
        };
        // One namespace may have clients at several addresses.
        let due = vec![connection(1, 1), connection(2, 2), connection(1, 3)];
        let own = open_namespace_of(&[std::process::id()]).expect("it can be read");
        let namespace = own.expect("this process has not ended");
        let (pids, netns_cookie, stale) = (vec![1], None, due.clone());
        let mut client = ScannedClient { pids, netns_cookie, namespace, stale, due: due.clone() };
        let (mut pacing, now) = (ClosePacing::default(), Instant::now());
        assert_eq!((client.postpone_paced(now, &pacing), client.due.len()), (0, 3));
        pacing.record_closed(now, [client_ip(&due[0])]);
        assert_eq!(client.postpone_paced(now, &pacing), 2);
        assert_eq!(client.due, due[1..2]);
        assert_eq!(client.stale, due, "they stay known");
    }
}
