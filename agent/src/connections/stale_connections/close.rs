//! Shell: closes stale connections in the clients' network namespaces.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use common::link::error_chain;
use datapath::abi::ConnectionActivity;
use tokio::task::spawn_blocking;
use tracing::{debug, warn};

use super::{
    ClientScanScope, ClientScanStats, DrainingAddress, is_due, may_close,
    pod_query::{self, ClientPodAddresses},
};
use crate::{
    clock::thread_cpu_time,
    kernel::locked_close::{CloseCounts, LockedCloser},
    lock::lock,
    net::sockdiag::{DiagConnection, SockDiag},
    pods::{
        namespace::{self, NetworkNamespace},
        processes::{open_namespace_of, processes_by_namespace},
    },
};

/// Closer of stale connections of this node's clients. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct StaleConnectionCloser {
    cgroup: PathBuf,
    locked_closer: Option<Arc<Mutex<LockedCloser>>>,
    last_scan: Arc<Mutex<LastClientScan>>,
}

/// Results of the newest scans.
#[derive(Debug, Default)]
struct LastClientScan {
    stats: ClientScanStats,
    /// Connections of each client to draining addresses, with the processes in its namespace.
    connections: Vec<(Vec<u32>, Vec<DiagConnection>)>,
}

impl StaleConnectionCloser {
    /// The clients are all processes in `cgroup`. Without a `locked_closer`, sock_diag closes their connections, and a
    /// request between check and close is lost.
    pub(crate) fn new(cgroup: PathBuf, locked_closer: Option<LockedCloser>) -> Self {
        let locked_closer = locked_closer.map(|closer| Arc::new(Mutex::new(closer)));
        Self { cgroup, locked_closer, last_scan: Arc::default() }
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

    /// Closes the due connections in the clients' namespaces, except those that a pod reports as in use. Also returns
    /// the number of connections to draining addresses that are left.
    ///
    /// The agent's own namespace is left out: activators there move their connections themselves.
    pub(crate) async fn scan_and_close(
        self,
        scope: ClientScanScope,
        draining: BTreeMap<SocketAddr, DrainingAddress>,
    ) -> (CloseCounts, u64) {
        let draining = Arc::new(draining);
        let (clients, scanned_addresses) = (self.clone(), Arc::clone(&draining));
        // The order matters: list, ask the pods, close only what has not changed since the list. So no request can come
        // in between.
        let mut found = run_blocking(move || clients.scan_clients(scope, &scanned_addresses)).await;
        let stale: u64 = found.iter().map(|client| client.stale.len() as u64).sum();
        let all = found.iter().flat_map(|client| &client.due);
        let activities = pod_query::query_in_use(all.map(connection_addresses)).await;
        let in_use: u64 =
            found.iter_mut().map(|client| client.exclude_in_use(&draining, &activities)).sum();
        let mut counts = run_blocking(move || self.close_due(&draining, found)).await;
        counts.spared += in_use;
        let left = stale.saturating_sub(counts.closed);
        if counts != CloseCounts::default() {
            let CloseCounts { closed, spared } = counts;
            debug!(ended = closed, spared, in_use, left, "stale connections closed");
        }
        (counts, left)
    }

    /// Scans the clients, and stores those with connections to draining addresses as known. Blocks.
    fn scan_clients(
        &self,
        scope: ClientScanScope,
        draining: &BTreeMap<SocketAddr, DrainingAddress>,
    ) -> Vec<ScannedClient> {
        let targets: Vec<ClientScanTarget> = match scope {
            ClientScanScope::AllClients => match client_namespaces(&self.cgroup) {
                Ok(all) => all.into_iter().map(|pids| (pids, None)).collect(),
                Err(error) => {
                    warn!(%error, "cannot list the processes of clients");
                    self.known_targets()
                }
            },
            ClientScanScope::KnownConnections => self.known_targets(),
        };
        let (mut clients, mut total_cpu_time) = (Vec::new(), Duration::ZERO);
        for target in targets {
            let Some((client, cpu_time)) = ScannedClient::scan(target) else { continue };
            total_cpu_time += cpu_time;
            clients.extend(client.select_stale(draining));
        }
        let mut last_scan = lock(&self.last_scan);
        match scope {
            ClientScanScope::AllClients => last_scan.stats.full_scan_cpu = total_cpu_time,
            ClientScanScope::KnownConnections => last_scan.stats.known_scan_cpu = total_cpu_time,
        }
        last_scan.stats.known_connections = clients.iter().map(|client| client.stale.len()).sum();
        last_scan.connections =
            clients.iter().map(|client| (client.pids.clone(), client.stale.clone())).collect();
        clients
    }

    /// Returns the connections to draining addresses that the last scan has found.
    fn known_targets(&self) -> Vec<ClientScanTarget> {
        let known = lock(&self.last_scan).connections.clone();
        known.into_iter().map(|(pids, connections)| (pids, Some(connections))).collect()
    }

    /// Closes the due connections that have not been used since they were listed. Blocks.
    fn close_due(
        &self,
        draining: &BTreeMap<SocketAddr, DrainingAddress>,
        clients: Vec<ScannedClient>,
    ) -> CloseCounts {
        // Rounds do not overlap, so this lock is free.
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

/// Scope of one scan: the processes in a namespace, and the connections in it, or all.
type ClientScanTarget = (Vec<u32>, Option<Vec<DiagConnection>>);

/// A client's namespace, and its connections to draining addresses.
struct ScannedClient {
    /// Processes in the namespace when it was listed.
    pids: Vec<u32>,
    namespace: NetworkNamespace,
    /// Connections to draining addresses.
    stale: Vec<DiagConnection>,
    /// Connections among them that are to be closed.
    due: Vec<DiagConnection>,
}

impl ScannedClient {
    /// Scans a client. Returns it with all its connections, and the processor time of the scan.
    fn scan((pids, connections): ClientScanTarget) -> Option<(Self, Duration)> {
        // Without a namespace its processes have ended. If it has new ones, the next scan of all clients finds them.
        let namespace = open_namespace_of(&pids)?;
        // On a thread of its own, so that the thread's whole time is the scan's.
        let list_connections = || {
            let diag = SockDiag::open()?;
            let found = connections.map_or_else(
                || diag.connections(),
                |connections| refresh_connections(&diag, &connections),
            )?;
            Ok((found, thread_cpu_time()))
        };
        let found = namespace.run_inside("list connections", list_connections);
        let found = found.inspect_err(
            |error| warn!(error = %error_chain(error), "cannot list stale connections"),
        );
        let (stale, cpu_time) = found.ok()?;
        Some((Self { pids, namespace, stale, due: Vec::new() }, cpu_time))
    }

    /// Keeps only connections to draining addresses, and selects the due ones; `None` if there are none.
    fn select_stale(mut self, draining: &BTreeMap<SocketAddr, DrainingAddress>) -> Option<Self> {
        self.stale.retain(|connection| draining.contains_key(&connection.canonical_peer()));
        let (now, all) = (Instant::now(), self.stale.iter());
        self.due = all.filter(|&it| is_due(now, draining, it)).cloned().collect();
        (!self.stale.is_empty()).then_some(self)
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

/// Returns the processes in each network namespace except the agent's own.
pub(in crate::connections) fn client_namespaces(clients: &Path) -> io::Result<Vec<Vec<u32>>> {
    let mut namespaces = processes_by_namespace(clients)?;
    if let Ok(own_inode) = namespace::inode(Path::new("/proc/thread-self/ns/net")) {
        namespaces.remove(&own_inode);
    }
    Ok(namespaces.into_values().collect())
}
