//! Pure: results of the newest scans: connections to draining addresses, and the clients' namespaces.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use super::{
    super::{
        ClientScanScope, ClientScanStats,
        pod_query::ClientPodAddresses,
        recorded_clients::{KnownNamespaces, RecordCompleteness, RecordGaps},
    },
    connection_addresses,
    scan_round::{ClientScanRound, ScannedClient},
};
use crate::{kernel::locked_close::IdlePosition, net::sockdiag::DiagConnection};

/// Results of the newest scans.
#[derive(Debug, Default)]
pub(super) struct LastClientScan {
    /// Result and cost of the scans, for the schedule of the next ones.
    pub(super) stats: ClientScanStats,
    /// Connections of each client to draining addresses, with the processes in its namespace.
    pub(super) connections: Vec<(Vec<u32>, Vec<DiagConnection>)>,
    /// Clients of these connections, by pod. Watches read them before each query, far more often than scans write them.
    pub(super) clients: BTreeMap<SocketAddr, Vec<SocketAddr>>,
    /// Namespaces of all clients, with or without such connections.
    pub(super) namespaces: KnownNamespaces,
    /// Time for which the connect records may lack connections.
    completeness: RecordCompleteness,
    /// Time until which known connections are scanned often, since a scan has left due ones to a later moment of their
    /// clients.
    pub(super) postponed_until: Option<Instant>,
    /// True if the last scan of all clients has not reached all of them.
    pub(super) has_missed_clients: bool,
    /// Processes of clients whose namespace could not be read, which was logged.
    pub(super) unknown: BTreeSet<u32>,
}

/// Processes in a client's namespace, and positions of its connections by the sockets' cookies.
pub(super) type ClientPositions = (Vec<u32>, BTreeMap<u64, (ClientPodAddresses, IdlePosition)>);

impl LastClientScan {
    /// Records the results of a round. A scan of all clients was for the `sought` namespaces, if there are some.
    pub(super) fn record_round(
        &mut self,
        scope: ClientScanScope,
        round: &mut ClientScanRound,
        sought: &BTreeSet<u64>,
    ) {
        let cpu_time = round.cpu_time;
        match scope {
            ClientScanScope::AllClients => {
                self.record_full_scan(cpu_time, &round.clients, &round.failed);
                self.has_missed_clients = !round.failed.is_empty();
                let found = mem::take(&mut round.namespaces);
                self.namespaces.record_full_scan(found, &round.failed, sought);
            }
            ClientScanScope::RecordedClients => {
                self.record_recorded_scan(&round.clients);
                round.ended_namespaces.iter().for_each(|&cookie| self.namespaces.forget(cookie));
            }
            ClientScanScope::KnownConnections => {
                let all = round.clients.iter().flat_map(|client| &client.stale);
                let left = all.map(DiagConnection::cookie).collect();
                self.record_known_scan(cpu_time, &round.scanned, &left);
            }
        }
    }

    /// Records the gaps of the connect records; `None`: there are no records. Without a gap, and after a scan that has
    /// reached all clients, scans of recorded clients suffice.
    pub(super) fn record_gaps(&mut self, now: Instant, gaps: Option<RecordGaps>) {
        let are_complete = gaps.is_some_and(|gaps| self.completeness.update(now, gaps));
        self.stats.are_records_sufficient = are_complete && !self.has_missed_clients;
    }

    /// Records the result of a scan of all clients. The connections of clients whose scan has failed stay known; `failed`
    /// are the processes in their namespaces.
    fn record_full_scan(
        &mut self,
        cpu_time: Duration,
        clients: &[ScannedClient],
        failed: &BTreeSet<u32>,
    ) {
        self.stats.full_scan_cpu = cpu_time;
        self.connections.retain(|(pids, _)| pids.iter().any(|pid| failed.contains(pid)));
        let found = clients.iter().map(|client| (client.pids.clone(), client.stale.clone()));
        self.connections.extend(found);
        self.index_known();
    }

    /// Records the result of a scan of known connections: those with the cookies `scanned`, of which the ones with the
    /// cookies `left` are still open. Others stay, as a scan of all clients may have found them meanwhile.
    fn record_known_scan(
        &mut self,
        cpu_time: Duration,
        scanned: &BTreeSet<u64>,
        left: &BTreeSet<u64>,
    ) {
        self.stats.known_scan_cpu = cpu_time;
        for (_, connections) in &mut self.connections {
            connections.retain(|it| left.contains(&it.cookie()) || !scanned.contains(&it.cookie()));
        }
        self.connections.retain(|(_, connections)| !connections.is_empty());
        self.index_known();
    }

    /// Records the result of a scan of recorded clients: adds the connections that were not known. Known ones stay, as
    /// scans of known connections find out if they have closed.
    fn record_recorded_scan(&mut self, clients: &[ScannedClient]) {
        let found = clients.iter().map(|client| (&client.pids, &client.stale));
        self.add_found(found);
    }

    /// Adds connections of clients to draining addresses, each with the processes in the client's namespace. Known ones
    /// stay.
    fn add_found<'a>(
        &mut self,
        found: impl Iterator<Item = (&'a Vec<u32>, &'a Vec<DiagConnection>)>,
    ) {
        let known = self.known_cookies();
        for (pids, connections) in found {
            let is_new = |it: &&DiagConnection| !known.contains(&it.cookie());
            let new: Vec<_> = connections.iter().filter(is_new).cloned().collect();
            if new.is_empty() {
                continue;
            }
            let same = self.connections.iter_mut().find(|(known_pids, _)| known_pids == pids);
            match same {
                Some((_, all)) => all.extend(new),
                None => self.connections.push((pids.clone(), new)),
            }
        }
        self.index_known();
    }

    /// Returns the cookies of the known connections.
    pub(super) fn known_cookies(&self) -> BTreeSet<u64> {
        let connections = self.connections.iter().flat_map(|(_, connections)| connections);
        connections.map(DiagConnection::cookie).collect()
    }

    /// Returns the numbers of known connections by the addresses of their clients.
    pub(super) fn counts_by_client(&self) -> BTreeMap<IpAddr, usize> {
        let mut counts = BTreeMap::new();
        for client in self.clients.values().flatten() {
            *counts.entry(client.ip()).or_default() += 1;
        }
        counts
    }

    /// Returns the known connections among these, by client.
    pub(super) fn select_known(
        &self,
        positions: &BTreeMap<ClientPodAddresses, IdlePosition>,
    ) -> Vec<ClientPositions> {
        let select = |connection: &DiagConnection| {
            let addresses = connection_addresses(connection);
            Some((connection.cookie(), (addresses, *positions.get(&addresses)?)))
        };
        let clients = self.connections.iter().map(|(pids, connections)| {
            (pids.clone(), connections.iter().filter_map(select).collect::<BTreeMap<_, _>>())
        });
        clients.filter(|(_, connections)| !connections.is_empty()).collect()
    }

    /// Counts the known connections, and sorts their clients by pod.
    pub(super) fn index_known(&mut self) {
        self.stats.known_connections = self.connections.iter().map(|(_, all)| all.len()).sum();
        self.clients.clear();
        for connection in self.connections.iter().flat_map(|(_, connections)| connections) {
            let (client, pod) = connection_addresses(connection);
            self.clients.entry(pod).or_default().push(client);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        connections::stale_connections::close::scan_round::ClientScanOutcome,
        net::sockdiag::TcpActivity,
    };

    #[test]
    fn a_scan_of_known_connections_forgets_only_those_that_it_found_closed() {
        let connection = |port: u16| {
            let (local, peer) = (([10, 0, 0, 1], port).into(), ([10, 0, 0, 2], 80).into());
            DiagConnection::listed(local, peer, TcpActivity::default())
        };
        let connections = vec![(vec![1], vec![connection(1), connection(2)]), (vec![2], vec![])];
        let mut last = LastClientScan { connections, ..LastClientScan::default() };
        // A scan of all clients has found the second one while that of the first one was under way.
        last.record_known_scan(Duration::ZERO, &[1].into(), &[1].into());
        assert_eq!(last.stats.known_connections, 2);
        last.record_known_scan(Duration::ZERO, &[1].into(), &[].into());
        assert_eq!(last.stats.known_connections, 1);
        assert_eq!(last.connections[0].1[0].cookie(), 2);
        let pod = SocketAddr::from(([10, 0, 0, 2], 80));
        assert_eq!(last.clients[&pod], [SocketAddr::from(([10, 0, 0, 1], 2))]);
        last.record_known_scan(Duration::ZERO, &[2].into(), &[].into());
        assert!(last.connections.is_empty() && last.clients.is_empty());
    }

    /// An ended client is known to have no connection; a failed scan tells nothing.
    #[test]
    fn connections_of_a_client_whose_scan_has_failed_stay_known() {
        let connection = |port: u16| {
            let (local, peer) = (([10, 0, 0, 1], port).into(), ([10, 0, 0, 2], 80).into());
            DiagConnection::listed(local, peer, TcpActivity::default())
        };
        let connections = vec![(vec![1, 4], vec![connection(1)]), (vec![2], vec![connection(2)])];
        let known = || LastClientScan { connections: connections.clone(), ..Default::default() };
        let mut round = ClientScanRound::default();
        round.add(vec![1], ClientScanOutcome::Failed(vec![4, 7]), &BTreeMap::new());
        round.add(vec![2], ClientScanOutcome::Ended, &BTreeMap::new());
        let mut last = known();
        last.record_known_scan(Duration::ZERO, &round.scanned, &BTreeSet::new());
        assert_eq!(last.connections, connections[..1]);
        // A scan of all clients found the first one with another process, and the second one no more.
        let mut last = known();
        last.record_full_scan(Duration::ZERO, &round.clients, &round.failed);
        assert_eq!(last.connections, connections[..1]);
        assert_eq!(last.stats.known_connections, 1);
    }

    #[test]
    fn connections_of_a_client_whose_process_cannot_be_read_stay_known() {
        let (local, peer) = (([10, 0, 0, 1], 1).into(), ([10, 0, 0, 2], 80).into());
        let connection = DiagConnection::listed(local, peer, TcpActivity::default());
        let connections = vec![(vec![4], vec![connection.clone()]), (vec![2], vec![connection])];
        let mut last =
            LastClientScan { connections: connections.clone(), ..LastClientScan::default() };
        let mut round = ClientScanRound::default();
        round.add_unknown(&[4]);
        last.record_full_scan(Duration::ZERO, &round.clients, &round.failed);
        assert_eq!(last.connections, connections[..1]);
    }

    #[test]
    fn what_a_scan_of_recorded_clients_finds_is_added_to_what_is_known() {
        let connection = |port: u16| {
            let (local, peer) = (([10, 0, 0, 1], port).into(), ([10, 0, 0, 2], 80).into());
            DiagConnection::listed(local, peer, TcpActivity::default())
        };
        let connections = vec![(vec![1, 4], vec![connection(1)]), (vec![2], vec![connection(2)])];
        let mut last = LastClientScan { connections, ..LastClientScan::default() };
        // It has entered the namespaces of two clients, and found nothing new in a third one.
        let found = [
            (vec![1, 4], vec![connection(1), connection(3)]),
            (vec![5], vec![connection(5)]),
            (vec![6], vec![]),
        ];
        last.add_found(found.iter().map(|(pids, connections)| (pids, connections)));
        let expected = [
            (vec![1, 4], vec![connection(1), connection(3)]),
            (vec![2], vec![connection(2)]),
            (vec![5], vec![connection(5)]),
        ];
        assert_eq!(last.connections, expected);
        assert_eq!(last.stats.known_connections, 4);
    }

    #[test]
    fn records_suffice_without_gaps_and_after_a_scan_that_has_reached_all_clients() {
        let (now, mut last) = (Instant::now(), LastClientScan::default());
        let mut do_suffice = |failed: &[u32], gaps| {
            let failed = failed.iter().copied().collect();
            let mut round = ClientScanRound { failed, ..ClientScanRound::default() };
            last.record_round(ClientScanScope::AllClients, &mut round, &BTreeSet::new());
            last.record_gaps(now, gaps);
            last.stats.are_records_sufficient
        };
        let gaps = |unlisted_connects, has_other_versions| {
            Some(RecordGaps { unlisted_connects, has_other_versions })
        };
        assert!(!do_suffice(&[], None), "there are no records");
        assert!(do_suffice(&[], gaps(0, false)));
        assert!(!do_suffice(&[7], gaps(0, false)), "one client was not reached");
        assert!(!do_suffice(&[], gaps(0, true)), "programs of another version");
        assert!(do_suffice(&[], gaps(0, false)));
        assert!(!do_suffice(&[], gaps(1, false)), "a connect without a record");
    }
}
