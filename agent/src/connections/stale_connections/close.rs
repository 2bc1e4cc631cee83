//! Shell: closes stale connections in the clients' network namespaces.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use common::link::error_chain;
use tokio::task::spawn_blocking;
use tracing::{debug, warn};

use self::{
    last_scan::LastClientScan,
    namespace_closes::{NamespaceCloses, close_in_namespace},
    scan_plan::ScanRecords,
    scan_round::{ClientScanRound, ScannedClient},
};
use super::{
    ClientScanScope, ClientScanStats, DrainingAddress,
    close_pacing::ClosePacing,
    idle_closes::CloseAttempts,
    pod_query::{ClientPodAddresses, InUseQueries},
};
use crate::{
    clock::thread_cpu_time,
    kernel::{
        locked_close::{CloseCounts, IdlePosition, LockedCloser, PositionOutcome},
        maps::client_sockets::ClientSocketRecords,
    },
    lock::lock,
    net::sockdiag::DiagConnection,
    pods::{
        namespace::{self, NamespaceError},
        processes::{ProcessesByNamespace, open_namespace_of, processes_by_namespace},
    },
};

mod last_scan;
mod namespace_closes;
mod scan_plan;
mod scan_round;

/// Time after a scan that leaves due connections to a later moment of their clients, in which known connections are
/// scanned often. It is longer than the pause between two closes of a client.
const POSTPONED_SCAN_TIME: Duration = Duration::from_millis(200);

/// Closer of stale connections of this node's clients. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct StaleConnectionCloser {
    cgroup: PathBuf,
    locked_closer: Option<Arc<Mutex<LockedCloser>>>,
    /// Records that lead to clients; `None`: each scan is one of all clients, or of known connections.
    records: Option<ScanRecords>,
    /// Queries to pods before a close.
    queries: InUseQueries,
    /// Pacing of all closes. It is locked before the locked closer, and while connections are closed: two tasks must not
    /// close connections of one client in the same moment.
    pacing: Arc<Mutex<ClosePacing>>,
    last_scan: Arc<Mutex<LastClientScan>>,
}

impl StaleConnectionCloser {
    /// The clients are all processes in `cgroup`. Without a `locked_closer`, sock_diag closes their connections, and a
    /// request between check and close is lost.
    pub(crate) fn new(cgroup: PathBuf, locked_closer: Option<LockedCloser>) -> Self {
        let locked_closer = locked_closer.map(|closer| Arc::new(Mutex::new(closer)));
        Self {
            cgroup,
            locked_closer,
            records: None,
            queries: InUseQueries::new(),
            pacing: Arc::default(),
            last_scan: Arc::default(),
        }
    }

    /// Lets scans of recorded clients enter only the namespaces that these records name. Has no effect before Linux 5.14,
    /// which does not tell user space the cookies of namespaces: each scan is one of all clients there.
    pub(crate) fn with_records(self, sockets: ClientSocketRecords) -> Self {
        Self { records: ScanRecords::new(sockets), ..self }
    }

    /// Returns the cgroup of the clients.
    pub(crate) fn cgroup(&self) -> &Path {
        &self.cgroup
    }

    /// Returns true if connections are closed under their locks.
    pub(crate) fn can_close_locked(&self) -> bool {
        self.locked_closer.is_some()
    }

    /// Returns the result and cost of the newest scans.
    pub(crate) fn scan_stats(&self) -> ClientScanStats {
        lock(&self.last_scan).stats
    }

    /// Returns true if a scan has just left due connections to a later moment of their clients.
    pub(super) fn has_postponed(&self, now: Instant) -> bool {
        lock(&self.last_scan).postponed_until.is_some_and(|until| now < until)
    }

    /// Returns the pods of the known connections.
    pub(super) fn known_pods(&self) -> BTreeSet<SocketAddr> {
        lock(&self.last_scan).clients.keys().copied().collect()
    }

    /// Returns the clients of the known connections to a pod.
    pub(super) fn known_clients(&self, pod: SocketAddr) -> Vec<SocketAddr> {
        lock(&self.last_scan).clients.get(&pod).cloned().unwrap_or_default()
    }

    /// Closes known connections that stand at these positions, under their locks. Of each client the first ones have
    /// their turn, as many as may be closed now. `are_busy`: the connections are never idle for long, and their pod waits.
    pub(super) async fn close_at_positions(
        self,
        due: Vec<(ClientPodAddresses, IdlePosition)>,
        are_busy: bool,
    ) -> CloseAttempts {
        run_blocking(move || self.attempt_closes(due, are_busy)).await
    }

    /// Scans the clients' namespaces for connections to draining addresses. Nothing is closed yet.
    ///
    /// The agent's own namespace is left out: activators there move their connections themselves.
    pub(crate) async fn scan(
        self,
        scope: ClientScanScope,
        draining: BTreeMap<SocketAddr, DrainingAddress>,
    ) -> ClientScan {
        let draining = Arc::new(draining);
        let scanned_addresses = Arc::clone(&draining);
        let (scope, round) =
            run_blocking(move || self.scan_clients(scope, &scanned_addresses)).await;
        ClientScan { draining, clients: round.clients, scope, walks: round.walks }
    }

    /// Closes the due connections of a scan, except those that a pod reports as in use. Of each client as many are closed as
    /// its pace allows, and a later scan finds the others. Returns also the number of pods that had no turn for a query:
    /// their connections stay open.
    ///
    /// The order matters: list, ask the pods, close only what has not changed since the list. So no request can come in
    /// between.
    pub(crate) async fn close_due(self, scan: ClientScan) -> (CloseCounts, usize) {
        let ClientScan { draining, mut clients, .. } = scan;
        let all = clients.iter().flat_map(|client| &client.due);
        let report = self.queries.send(all.map(connection_addresses)).await;
        clients.iter_mut().for_each(|client| client.exclude_pods(&report.left_out));
        let activities = &report.activities;
        let in_use: u64 =
            clients.iter_mut().map(|client| client.exclude_in_use(&draining, activities)).sum();
        let mut counts = run_blocking(move || self.close_selected(&draining, clients)).await;
        counts.spared += in_use;
        let (CloseCounts { closed, spared }, left_out) = (counts, report.left_out.len());
        debug!(ended = closed, spared, in_use, left_out, "stale connections closed");
        (counts, left_out)
    }

    /// Attempts closes at positions, as many of each client as its pace allows. Blocks.
    fn attempt_closes(
        &self,
        due: Vec<(ClientPodAddresses, IdlePosition)>,
        are_busy: bool,
    ) -> CloseAttempts {
        let mut pacing = lock(&self.pacing);
        let mut attempts = CloseAttempts::select(&pacing, Instant::now(), due, are_busy);
        attempts.outcomes = self.close_known_at(&attempts.tried);
        let busy = match are_busy {
            true => lock(&self.last_scan).counts_by_client(),
            false => BTreeMap::new(),
        };
        attempts.record_closed(&mut pacing, Instant::now(), &busy);
        attempts
    }

    /// Closes known connections at positions, in the namespace of each client. Blocks.
    fn close_known_at(
        &self,
        positions: &BTreeMap<ClientPodAddresses, IdlePosition>,
    ) -> BTreeMap<ClientPodAddresses, PositionOutcome> {
        let mut outcomes = BTreeMap::new();
        let Some(locked_closer) = &self.locked_closer else { return outcomes };
        let clients = lock(&self.last_scan).select_known(positions);
        for (pids, connections) in clients {
            let sockets: Vec<(u64, IdlePosition)> =
                connections.iter().map(|(cookie, (_, position))| (*cookie, *position)).collect();
            let mut closes = Vec::new();
            let close = || lock(locked_closer).close_at_positions(&sockets, &mut closes);
            let done = match open_namespace_of(&pids) {
                Ok(Some(namespace)) => namespace.run_inside("close idle connections", close),
                // Its processes have ended, and their connections with them.
                Ok(None) => Ok(()),
                Err(error) => Err(error),
            };
            if let Err(error) = &done {
                warn!(error = %error_chain(error), "cannot close idle connections");
            }
            outcomes.extend(position_outcomes(&connections, closes, done.is_err()));
        }
        outcomes
    }

    /// Scans the clients, and stores those with connections to draining addresses as known. Returns the scope that the scan
    /// had in the end, and its results. Blocks.
    fn scan_clients(
        &self,
        scope: ClientScanScope,
        draining: &BTreeMap<SocketAddr, DrainingAddress>,
    ) -> (ClientScanScope, ClientScanRound) {
        // The walk through cgroups and processes runs on this thread. With many processes it costs most of the scan.
        let cpu_before = thread_cpu_time();
        let plan = self.plan_scan(scope, draining);
        let mut round = ClientScanRound::default();
        round.add_unknown(&plan.unknown);
        plan.targets.into_iter().for_each(|target| round.scan(target, draining));
        // Before the pods are asked: no connection of these clients is closed yet, whatever the pods report.
        let now = Instant::now();
        let has_postponed = self.postpone_paced(now, &mut round.clients);
        // Scans run on threads of their own, so that this thread's time is only the walk.
        round.cpu_time += thread_cpu_time().saturating_sub(cpu_before);
        let is_list = scope != ClientScanScope::KnownConnections;
        let gaps = self.records.as_ref().filter(|_| is_list).map(ScanRecords::read_gaps);
        // Locked only now: watches read it meanwhile, and a scan may take long.
        let mut last_scan = lock(&self.last_scan);
        if has_postponed {
            last_scan.postponed_until = Some(now + POSTPONED_SCAN_TIME);
        }
        last_scan.record_round(plan.scope, &mut round, &plan.sought);
        if is_list {
            last_scan.record_gaps(Instant::now(), gaps);
        }
        if scope == ClientScanScope::RecordedClients {
            // Also if all clients were scanned instead: their cost bounds the rate of such scans.
            last_scan.stats.recorded_scan_cpu = round.cpu_time;
        }
        (plan.scope, round)
    }

    /// Logs one of the processes whose namespace cannot be read, unless the last scan could not read it either.
    fn log_unknown(&self, unknown: &BTreeMap<u32, NamespaceError>) {
        let mut last_scan = lock(&self.last_scan);
        if let Some((_, error)) = unknown.iter().find(|(pid, _)| !last_scan.unknown.contains(*pid))
        {
            warn!(error = %error_chain(error), "cannot list stale connections of a client");
        }
        last_scan.unknown = unknown.keys().copied().collect();
    }

    /// Removes the connections of clients whose next moment is later from the due ones. Returns true if there are some.
    /// Blocks.
    fn postpone_paced(&self, now: Instant, clients: &mut [ScannedClient]) -> bool {
        // A scan without due connections does not wait for closes that are under way.
        if clients.iter().all(|client| client.due.is_empty()) {
            return false;
        }
        let pacing = lock(&self.pacing);
        clients.iter_mut().map(|client| client.postpone_paced(now, &pacing)).sum::<usize>() > 0
    }

    /// Closes the due connections that have not been used since they were listed, as many of each client as its pace
    /// allows. Blocks.
    fn close_selected(
        &self,
        draining: &BTreeMap<SocketAddr, DrainingAddress>,
        clients: Vec<ScannedClient>,
    ) -> CloseCounts {
        let (mut total, mut has_postponed) = (CloseCounts::default(), false);
        for client in clients.into_iter().filter(|client| !client.due.is_empty()) {
            let ScannedClient { namespace, mut due, .. } = client;
            let due_count = due.len();
            // Not for all namespaces at once: watches close connections in between.
            let mut pacing = lock(&self.pacing);
            pacing.rotate(&mut due);
            let selected = pacing.select(Instant::now(), due, client_ip);
            has_postponed |= selected.len() < due_count;
            if selected.is_empty() {
                continue;
            }
            let mut guard = self.locked_closer.as_deref().map(lock);
            let (locked_closer, mut closes) = (guard.as_deref_mut(), NamespaceCloses::default());
            let close = || close_in_namespace(draining, &selected, locked_closer, &mut closes);
            if let Err(error) = namespace.run_inside("close connections", close) {
                warn!(error = %error_chain(&error), "cannot close stale connections");
            }
            pacing.record_closed(Instant::now(), closes.clients);
            total += closes.counts;
        }
        if has_postponed {
            lock(&self.last_scan).postponed_until = Some(Instant::now() + POSTPONED_SCAN_TIME);
        }
        total
    }
}

/// Runs a job that may block on a thread for such jobs.
async fn run_blocking<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> T {
    match spawn_blocking(job).await {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// Clients with connections to draining addresses, at the time of a scan.
pub(crate) struct ClientScan {
    draining: Arc<BTreeMap<SocketAddr, DrainingAddress>>,
    clients: Vec<ScannedClient>,
    scope: ClientScanScope,
    walks: u64,
}

impl ClientScan {
    /// Returns the scope that the scan had in the end. A scan of recorded clients may become one of all clients. That
    /// becomes one of known connections if the processes of clients cannot be listed.
    pub(crate) fn scope(&self) -> ClientScanScope {
        self.scope
    }

    /// Returns the number of namespaces whose connections were listed. For each, the kernel walks over all connections of
    /// the machine.
    pub(crate) fn walks(&self) -> u64 {
        self.walks
    }

    /// Returns true if a connection is to be closed, unless its pod reports it as in use.
    pub(crate) fn has_due(&self) -> bool {
        self.clients.iter().any(|client| !client.due.is_empty())
    }
}

/// Returns the outcome of each connection of a client that was found. After a failure also of the others: nothing is
/// known of them.
fn position_outcomes(
    connections: &BTreeMap<u64, (ClientPodAddresses, IdlePosition)>,
    found: Vec<(u64, PositionOutcome)>,
    has_failed: bool,
) -> BTreeMap<ClientPodAddresses, PositionOutcome> {
    let all = connections.values().map(|(addresses, _)| (*addresses, PositionOutcome::Failed));
    let found =
        found.into_iter().filter_map(|(cookie, it)| Some((connections.get(&cookie)?.0, it)));
    // In this order, as the last outcome of a connection counts.
    all.filter(|_| has_failed).chain(found).collect()
}

fn connection_addresses(connection: &DiagConnection) -> ClientPodAddresses {
    (connection.canonical_local(), connection.canonical_peer())
}

/// Returns the address by which the closes of a client are paced.
fn client_ip(connection: &DiagConnection) -> IpAddr {
    connection.canonical_local().ip()
}

/// Returns the processes in each network namespace except the agent's own. Returns an error if that is not known, as the
/// connections in it must not be closed.
pub(in crate::connections) fn client_namespaces(
    clients: &Path,
) -> io::Result<ProcessesByNamespace> {
    let own_inode = namespace::inode(Path::new("/proc/thread-self/ns/net"))?;
    let mut namespaces = processes_by_namespace(clients)?;
    namespaces.known.remove(&own_inode);
    Ok(namespaces)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::sockdiag::TcpActivity;

    #[test]
    fn a_failed_attempt_tells_nothing_of_the_connections_that_it_did_not_come_to() {
        let position = IdlePosition { client_seq: 7, pod_seq: 8 };
        let pod = SocketAddr::from(([10, 0, 0, 2], 80));
        let addresses = |port: u16| (SocketAddr::from(([10, 0, 0, 1], port)), pod);
        let connections =
            BTreeMap::from([(1, (addresses(1), position)), (2, (addresses(2), position))]);
        let found = || vec![(1, PositionOutcome::Closed)];
        let closed = (addresses(1), PositionOutcome::Closed);
        assert_eq!(position_outcomes(&connections, found(), false), [closed].into());
        let failed = (addresses(2), PositionOutcome::Failed);
        assert_eq!(position_outcomes(&connections, found(), true), [closed, failed].into());
    }

    #[test]
    fn a_scan_of_recorded_clients_without_records_is_one_of_all_clients() {
        let closer = StaleConnectionCloser::new("/nonexistent".into(), None);
        let (scope, round) =
            closer.scan_clients(ClientScanScope::RecordedClients, &BTreeMap::new());
        assert_eq!((scope, round.walks), (ClientScanScope::AllClients, 0));
        let ClientScanStats { full_scan_cpu, recorded_scan_cpu, .. } = closer.scan_stats();
        assert!(full_scan_cpu > Duration::ZERO);
        assert_eq!(recorded_scan_cpu, full_scan_cpu, "its cost bounds the rate of both");
        assert!(!closer.scan_stats().are_records_sufficient);
    }

    #[test]
    fn a_scan_without_a_list_of_clients_is_none_of_all_clients() {
        let cgroup = std::env::temp_dir().join(format!("rouse-clients-{}", std::process::id()));
        // No process id can be read from a folder.
        std::fs::create_dir_all(cgroup.join("cgroup.procs")).expect("a folder");
        let closer = StaleConnectionCloser::new(cgroup.clone(), None);
        let (scope, round) = closer.scan_clients(ClientScanScope::AllClients, &BTreeMap::new());
        assert_eq!(scope, ClientScanScope::KnownConnections);
        assert!(round.clients.is_empty());
        assert_eq!(closer.scan_stats().full_scan_cpu, Duration::ZERO);
        assert!(lock(&closer.last_scan).has_missed_clients);
        std::fs::remove_dir_all(cgroup).expect("removed");
    }

    #[test]
    fn positions_find_the_known_connections_of_each_client() {
        let pod = SocketAddr::from(([10, 0, 0, 2], 80));
        let client = |host: u8, port: u16| SocketAddr::from(([10, 0, 0, host], port));
        let connection = |client| DiagConnection::listed(client, pod, TcpActivity::default());
        let connections = vec![
            (vec![1], vec![connection(client(1, 1)), connection(client(1, 2))]),
            (vec![2], vec![connection(client(3, 3))]),
        ];
        let closer = StaleConnectionCloser::new("/nonexistent".into(), None);
        lock(&closer.last_scan).connections = connections;
        lock(&closer.last_scan).index_known();
        assert_eq!(closer.known_pods(), [pod].into());
        assert_eq!(closer.known_clients(pod), [client(1, 1), client(1, 2), client(3, 3)]);
        assert_eq!(closer.known_clients(client(1, 1)), []);
        let counts = lock(&closer.last_scan).counts_by_client();
        assert_eq!(counts, [(client(1, 1).ip(), 2), (client(3, 3).ip(), 1)].into());
        let position = IdlePosition { client_seq: 7, pod_seq: 8 };
        let wanted = [client(1, 2), client(4, 4)].map(|client| ((client, pod), position));
        let selected = lock(&closer.last_scan).select_known(&wanted.into());
        let expected = BTreeMap::from([(2, ((client(1, 2), pod), position))]);
        assert_eq!(selected, [(vec![1], expected)]);
        assert!(closer.close_known_at(&wanted.into()).is_empty(), "no lock to close it under");
    }

    #[test]
    fn closes_of_a_client_at_several_pods_have_one_pace() {
        let closer = StaleConnectionCloser::new("/nonexistent".into(), None);
        let client = |host: u8, port: u16| SocketAddr::from(([10, 0, 0, host], port));
        let position = IdlePosition { client_seq: 7, pod_seq: 8 };
        let tried = |pod: u8| {
            let pod = SocketAddr::from(([10, 0, 1, pod], 80));
            let clients = (1..=8).map(|port| client(1, port)).chain([client(2, 1)]);
            let due = clients.map(|client| ((client, pod), position)).collect();
            let attempts = closer.attempt_closes(due, false);
            attempts.tried.into_keys().map(|(client, _)| client).collect::<Vec<_>>()
        };
        assert_eq!(tried(1), [client(1, 1), client(2, 1)]);
        assert_eq!(tried(2), [client(1, 1), client(2, 1)], "no connection was closed");
        // Far from over, however slow this test is.
        let later = Instant::now() + Duration::from_secs(3_600);
        lock(&closer.pacing).record_closed(later, [client(1, 1).ip()]);
        assert_eq!(tried(2), [client(2, 1)]);
        // A clone closes for another task.
        assert!(lock(&closer.clone().pacing).next_moment(client(1, 1).ip()).is_some());
    }

    #[test]
    fn known_connections_are_scanned_often_after_due_ones_were_left_for_later() {
        let (closer, now) =
            (StaleConnectionCloser::new("/nonexistent".into(), None), Instant::now());
        assert!(!closer.has_postponed(now), "none was due yet");
        lock(&closer.last_scan).postponed_until = Some(now + POSTPONED_SCAN_TIME);
        assert!(closer.clone().has_postponed(now));
        assert!(!closer.has_postponed(now + POSTPONED_SCAN_TIME));
        assert!(!closer.postpone_paced(now, &mut []), "nothing is due");
    }

    #[test]
    fn the_walk_through_the_processes_is_part_of_the_cost_of_a_scan() {
        let closer = StaleConnectionCloser::new("/nonexistent".into(), None);
        let (_, round) = closer.scan_clients(ClientScanScope::AllClients, &BTreeMap::new());
        assert!(round.clients.is_empty());
        let ClientScanStats { full_scan_cpu, known_scan_cpu, .. } = closer.scan_stats();
        assert!(full_scan_cpu > Duration::ZERO, "although no namespace was entered");
        assert_eq!(known_scan_cpu, Duration::ZERO);
    }
}
