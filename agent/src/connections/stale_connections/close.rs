//! Shell: closes stale connections in the clients' network namespaces.

use std::{
    collections::{BTreeMap, BTreeSet},
    io, mem,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use common::link::error_chain;
use datapath::abi::ConnectionActivity;
use tokio::task::spawn_blocking;
use tracing::{debug, warn};

use self::scan_plan::{ClientScanTarget, ScanRecords};
use super::{
    ClientScanScope, ClientScanStats, DrainingAddress, is_due, may_close,
    pod_query::{ClientPodAddresses, InUseQueries},
    recorded_clients::{ClientNamespaces, RecordCompleteness},
};
use crate::{
    clock::thread_cpu_time,
    kernel::{
        locked_close::{CloseCounts, IdlePosition, LockedCloser, PositionOutcome},
        maps::client_sockets::ClientSocketRecords,
        netns_cookies::cookie_of_socket,
    },
    lock::lock,
    net::sockdiag::{DiagConnection, SockDiag},
    pods::{
        namespace::{self, NamespaceError, NetworkNamespace},
        processes::{ProcessesByNamespace, open_namespace_of, processes_by_namespace},
    },
};

mod scan_plan;

/// Closer of stale connections of this node's clients. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct StaleConnectionCloser {
    cgroup: PathBuf,
    locked_closer: Option<Arc<Mutex<LockedCloser>>>,
    /// Records that lead to clients; `None`: each scan is one of all clients, or of known connections.
    records: Option<ScanRecords>,
    /// Queries to pods before a close.
    queries: InUseQueries,
    last_scan: Arc<Mutex<LastClientScan>>,
}

/// Results of the newest scans.
#[derive(Debug, Default)]
struct LastClientScan {
    stats: ClientScanStats,
    /// Connections of each client to draining addresses, with the processes in its namespace.
    connections: Vec<(Vec<u32>, Vec<DiagConnection>)>,
    /// Clients of these connections, by pod. Watches read them before each query, far more often than scans write them.
    clients: BTreeMap<SocketAddr, Vec<SocketAddr>>,
    /// Namespaces of all clients, with or without such connections.
    namespaces: ClientNamespaces,
    completeness: RecordCompleteness,
    /// True if the last scan of all clients has not reached all of them.
    has_missed_clients: bool,
    /// Processes of clients whose namespace could not be read, which was logged.
    unknown: BTreeSet<u32>,
}

/// Processes in a client's namespace, and positions of its connections by the sockets' cookies.
type ClientPositions = (Vec<u32>, BTreeMap<u64, (ClientPodAddresses, IdlePosition)>);

impl LastClientScan {
    /// Records the results of a round. A scan of all clients was for the `sought` namespaces, if there are some.
    fn record_round(
        &mut self,
        scope: ClientScanScope,
        round: &mut ClientScanRound,
        sought: &BTreeSet<u64>,
    ) {
        let cpu_time = round.cpu_time;
        match scope {
            ClientScanScope::AllClients => {
                self.record_all(cpu_time, &round.clients, &round.failed);
                self.has_missed_clients = !round.failed.is_empty();
                let found = mem::take(&mut round.namespaces);
                self.namespaces.record_all(found, &round.failed, sought);
            }
            ClientScanScope::RecordedClients => {
                self.record_recorded(&round.clients);
                round.ended_namespaces.iter().for_each(|&cookie| self.namespaces.forget(cookie));
            }
            ClientScanScope::KnownConnections => {
                let all = round.clients.iter().flat_map(|client| &client.stale);
                let left = all.map(DiagConnection::cookie).collect();
                self.record_known(cpu_time, &round.scanned, &left);
            }
        }
    }

    /// Records what the records lack, if there are records: a number of connects, and if connections of another version
    /// may be open. Without a gap, and after a scan that has reached all clients, scans of recorded clients suffice.
    fn record_gaps(&mut self, now: Instant, gaps: Option<(u64, bool)>) {
        let are_complete = gaps.is_some_and(|(unlisted_connects, has_other_versions)| {
            self.completeness.update(now, unlisted_connects, has_other_versions)
        });
        self.stats.are_records_sufficient = are_complete && !self.has_missed_clients;
    }

    /// Records the result of a scan of all clients. Of those whose scan has failed nothing new is known, so what was
    /// known of them stays; `failed` are the processes in their namespaces.
    fn record_all(
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

    /// Records the result of a scan of the connections with the cookies `scanned`, of which those with the cookies
    /// `left` are still open. It says nothing about others, which a scan of all clients may have found meanwhile.
    fn record_known(&mut self, cpu_time: Duration, scanned: &BTreeSet<u64>, left: &BTreeSet<u64>) {
        self.stats.known_scan_cpu = cpu_time;
        for (_, connections) in &mut self.connections {
            connections.retain(|it| left.contains(&it.cookie()) || !scanned.contains(&it.cookie()));
        }
        self.connections.retain(|(_, connections)| !connections.is_empty());
        self.index_known();
    }

    /// Records the result of a scan of recorded clients: adds the connections that were not known. Those that were stay,
    /// as scans of known connections find out if they have closed.
    fn record_recorded(&mut self, clients: &[ScannedClient]) {
        let found = clients.iter().map(|client| (&client.pids, &client.stale));
        self.add_found(found);
    }

    /// Adds connections of clients to draining addresses, with the processes in their namespaces. Known ones stay.
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
    fn known_cookies(&self) -> BTreeSet<u64> {
        let connections = self.connections.iter().flat_map(|(_, connections)| connections);
        connections.map(DiagConnection::cookie).collect()
    }

    /// Returns the known connections among these, by client.
    fn select_known(
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
    fn index_known(&mut self) {
        self.stats.known_connections = self.connections.iter().map(|(_, all)| all.len()).sum();
        self.clients.clear();
        for connection in self.connections.iter().flat_map(|(_, connections)| connections) {
            let (client, pod) = connection_addresses(connection);
            self.clients.entry(pod).or_default().push(client);
        }
    }
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

    /// Returns the pods of the known connections.
    pub(super) fn known_pods(&self) -> BTreeSet<SocketAddr> {
        lock(&self.last_scan).clients.keys().copied().collect()
    }

    /// Returns the clients of the known connections to a pod.
    pub(super) fn known_clients(&self, pod: SocketAddr) -> Vec<SocketAddr> {
        lock(&self.last_scan).clients.get(&pod).cloned().unwrap_or_default()
    }

    /// Closes known connections that stand at these positions, under their locks. Returns the outcome of each that was
    /// found.
    pub(super) async fn close_at_positions(
        self,
        positions: BTreeMap<ClientPodAddresses, IdlePosition>,
    ) -> BTreeMap<ClientPodAddresses, PositionOutcome> {
        run_blocking(move || self.close_known_at(&positions)).await
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

    /// Closes the due connections of a scan, except those that a pod reports as in use. Returns also the number of pods
    /// that had no turn for a query: their connections stay open.
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
        // Scans run on threads of their own, so that this thread's time is only the walk.
        round.cpu_time += thread_cpu_time().saturating_sub(cpu_before);
        let is_list = scope != ClientScanScope::KnownConnections;
        let gaps = self.records.as_ref().filter(|_| is_list).map(ScanRecords::read_gaps);
        // Locked only now: watches read it meanwhile, and a scan may take long.
        let mut last_scan = lock(&self.last_scan);
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

    /// Closes the due connections that have not been used since they were listed. Blocks.
    fn close_selected(
        &self,
        draining: &BTreeMap<SocketAddr, DrainingAddress>,
        clients: Vec<ScannedClient>,
    ) -> CloseCounts {
        let mut locked_closer = self.locked_closer.as_deref().map(lock);
        let mut total = CloseCounts::default();
        for ScannedClient { namespace, due, .. } in
            clients.iter().filter(|client| !client.due.is_empty())
        {
            let locked_closer = locked_closer.as_deref_mut();
            let close = || close_in_namespace(draining, due, locked_closer, &mut total);
            if let Err(error) = namespace.run_inside("close connections", close) {
                warn!(error = %error_chain(&error), "cannot close stale connections");
            }
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
    /// Returns the scope that the scan had. One of recorded clients may have become one of all, and one of all clients
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

/// Result of the scan of one client.
enum ClientScanOutcome {
    /// Its connections, and the processor time of the scan.
    Scanned(ScannedClient, Duration),
    /// Its processes have ended, and their connections with them.
    Ended,
    /// Nothing new is known of its connections. These are the processes in its namespace.
    Failed(Vec<u32>),
}

/// Results of the scans of one round.
#[derive(Default)]
struct ClientScanRound {
    /// Clients with connections to draining addresses.
    clients: Vec<ScannedClient>,
    /// Processes in all scanned namespaces, by the namespaces' cookies, where the kernel tells them.
    namespaces: BTreeMap<u64, Vec<u32>>,
    /// Cookies of namespaces whose processes have ended.
    ended_namespaces: Vec<u64>,
    /// Cookies of the known connections that were looked for.
    scanned: BTreeSet<u64>,
    /// Processes of the clients whose scan has failed.
    failed: BTreeSet<u32>,
    /// Number of namespaces whose connections were listed.
    walks: u64,
    cpu_time: Duration,
}

impl ClientScanRound {
    /// Scans a client, and adds the result.
    fn scan(&mut self, target: ClientScanTarget, draining: &BTreeMap<SocketAddr, DrainingAddress>) {
        // Taken before the scan: only of these can it say that they have closed.
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
    fn add(
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
    fn add_unknown<'a>(&mut self, pids: impl IntoIterator<Item = &'a u32>) {
        self.failed.extend(pids);
    }
}

/// A client's namespace, and its connections to draining addresses.
struct ScannedClient {
    /// Processes in the namespace when it was listed.
    pids: Vec<u32>,
    /// Cookie of the namespace, where the kernel tells it.
    netns_cookie: Option<u64>,
    namespace: NetworkNamespace,
    /// Connections to draining addresses.
    stale: Vec<DiagConnection>,
    /// Connections among them that are to be closed.
    due: Vec<DiagConnection>,
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

    /// Removes the connections to these pods from the due ones.
    fn exclude_pods(&mut self, pods: &BTreeSet<SocketAddr>) {
        self.due.retain(|connection| !pods.contains(&connection.canonical_peer()));
    }

    /// Removes the connections that are in use, or may be, from the due ones. Returns their number.
    fn exclude_in_use(
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

/// Closes connections of the calling thread's network namespace. `counts` grows by the outcomes, also if a later close
/// fails.
fn close_in_namespace(
    draining: &BTreeMap<SocketAddr, DrainingAddress>,
    due: &[DiagConnection],
    locked_closer: Option<&mut LockedCloser>,
    counts: &mut CloseCounts,
) -> io::Result<()> {
    let Some(locked_closer) = locked_closer else { return close_unlocked(draining, due, counts) };
    let all: Vec<&DiagConnection> = due.iter().collect();
    let mut locked_counts = CloseCounts::default();
    let result = locked_closer.close(&all, &mut locked_counts);
    counts.closed += locked_counts.closed;
    let Err(error) = result else {
        counts.spared += locked_counts.spared;
        return Ok(());
    };
    warn!(%error, "cannot close stale connections under their locks");
    // It judges those again that were spared.
    close_unlocked(draining, due, counts)
}

/// Closes connections on kernels that cannot check and close in one step: a request that is written in between is lost.
fn close_unlocked(
    draining: &BTreeMap<SocketAddr, DrainingAddress>,
    due: &[DiagConnection],
    counts: &mut CloseCounts,
) -> io::Result<()> {
    let diag = SockDiag::open()?;
    for connection in due {
        match close_if_due(&diag, draining, connection) {
            Ok(true) => counts.closed += 1,
            Ok(false) => counts.spared += 1,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Closes a connection if it is still due. A list of thousands is old when its end is reached, so the connection is
/// read again right before.
fn close_if_due(
    diag: &SockDiag,
    draining: &BTreeMap<SocketAddr, DrainingAddress>,
    connection: &DiagConnection,
) -> io::Result<bool> {
    let due = is_due(Instant::now(), draining, &diag.refresh(connection)?);
    if due {
        diag.destroy(connection)?;
    }
    Ok(due)
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
    fn a_scan_of_known_connections_forgets_only_those_that_it_found_closed() {
        let connection = |port: u16| {
            let (local, peer) = (([10, 0, 0, 1], port).into(), ([10, 0, 0, 2], 80).into());
            DiagConnection::listed(local, peer, TcpActivity::default())
        };
        let connections = vec![(vec![1], vec![connection(1), connection(2)]), (vec![2], vec![])];
        let mut last = LastClientScan { connections, ..LastClientScan::default() };
        // A scan of all clients has found the second one while that of the first one was under way.
        last.record_known(Duration::ZERO, &[1].into(), &[1].into());
        assert_eq!(last.stats.known_connections, 2);
        last.record_known(Duration::ZERO, &[1].into(), &[].into());
        assert_eq!(last.stats.known_connections, 1);
        assert_eq!(last.connections[0].1[0].cookie(), 2);
        let pod = SocketAddr::from(([10, 0, 0, 2], 80));
        assert_eq!(last.clients[&pod], [SocketAddr::from(([10, 0, 0, 1], 2))]);
        last.record_known(Duration::ZERO, &[2].into(), &[].into());
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
        last.record_known(Duration::ZERO, &round.scanned, &BTreeSet::new());
        assert_eq!(last.connections, connections[..1]);
        // A scan of all clients found the first one with another process, and the second one no more.
        let mut last = known();
        last.record_all(Duration::ZERO, &round.clients, &round.failed);
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
        last.record_all(Duration::ZERO, &round.clients, &round.failed);
        assert_eq!(last.connections, connections[..1]);
    }

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
        assert!(!do_suffice(&[], None), "there are no records");
        assert!(do_suffice(&[], Some((0, false))));
        assert!(!do_suffice(&[7], Some((0, false))), "one client was not reached");
        assert!(!do_suffice(&[], Some((0, true))), "programs of another version");
        assert!(do_suffice(&[], Some((0, false))));
        assert!(!do_suffice(&[], Some((1, false))), "a connect without a record");
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
        let position = IdlePosition { client_seq: 7, pod_seq: 8 };
        let wanted = [client(1, 2), client(4, 4)].map(|client| ((client, pod), position));
        let selected = lock(&closer.last_scan).select_known(&wanted.into());
        let expected = BTreeMap::from([(2, ((client(1, 2), pod), position))]);
        assert_eq!(selected, [(vec![1], expected)]);
        assert!(closer.close_known_at(&wanted.into()).is_empty(), "no lock to close it under");
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
