//! Shell: scans pods' network namespaces for overdue requests, and closes their connections.
//!
//! Scan and close are two calls. In between a request may get its response after all, and the connection's next request
//! may begin, which must not be cut off. So an overdue connection is scanned again right before the close. If the pod
//! has sent nothing since before that scan, no response can have ended. For a pod that sends all the time this is tried
//! three times. Then its connections are closed by the last scan alone, which is as old as a dump takes.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::Arc,
    time::Duration,
};

use common::link::error_chain;
use tokio::{sync::mpsc::Sender, task::spawn_blocking};
use tracing::{info, warn};

use super::{DeadlineScan, DeadlineScanResult, DeadlineScanTarget, is_overdue};
use crate::{
    clock::{monotonic_ns, thread_cpu_time},
    kernel::maps::connection_storage::ConnectionStorage,
    net::sockdiag::{DiagConnection, SockDiag},
    pods::{
        finder::{FinderCommand, request_namespace},
        namespace::NetworkNamespace,
        pod_ports::PodPorts,
        registry::RegisteredPod,
    },
};

/// Number of scans of an overdue connection before it is closed while its pod sends.
const SCANS_MAX: u32 = 3;

/// Returns an error if this kernel does not show the eBPF programs' storage of connections, or cannot close them.
pub(crate) fn check_support(conns: &ConnectionStorage) -> io::Result<()> {
    let diag = SockDiag::open()?;
    conns.open_requests(&diag)?;
    diag.can_destroy()
}

/// Scans each of these registered pods, and closes overdue connections.
pub(crate) async fn scan_pods(
    due: Vec<(DeadlineScanTarget, RegisteredPod)>,
    finder: Sender<FinderCommand>,
    conns: ConnectionStorage,
) -> Vec<DeadlineScanResult> {
    let mut results = Vec::with_capacity(due.len());
    // One pod after the other: the bound on processor time is for each pod, and parallel scans would add up.
    for (due, pod) in due {
        let namespace = request_namespace(&finder, &due.uid, pod.cookie).await;
        results.push(match namespace {
            Some(namespace) => scan_pod(namespace, due, pod.ports, conns.clone()).await,
            None => DeadlineScanResult { uid: due.uid, closed: 0, scan: None },
        });
    }
    results
}

/// Scans one pod on a thread of its own, and closes the connections whose requests are overdue.
async fn scan_pod(
    namespace: NetworkNamespace,
    due: DeadlineScanTarget,
    ports: Arc<PodPorts>,
    conns: ConnectionStorage,
) -> DeadlineScanResult {
    let DeadlineScanTarget { uid, timeout } = due;
    let job = move || {
        // Outside of the scan: connections that were closed before an error count too.
        let mut closed = 0;
        let scan = || DeadlineScanner { timeout, ports, conns }.scan(&mut closed);
        let scan = namespace.run_inside("list connections", scan);
        (closed, scan)
    };
    let (closed, scan) = match spawn_blocking(job).await {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    };
    if closed > 0 {
        info!(uid, ended = closed, ?timeout, "connections ended: their requests took too long");
    }
    let scan = scan.inspect_err(|error| {
        warn!(uid, error = %error_chain(error), "cannot look for requests that take too long");
    });
    DeadlineScanResult { uid, closed, scan: scan.ok() }
}

/// Scan of one pod, for a thread inside its namespace.
struct DeadlineScanner {
    timeout: Duration,
    ports: Arc<PodPorts>,
    conns: ConnectionStorage,
}

/// Connections that wait for the end of a request, each with the request's start.
type OpenRequestList = Vec<(DiagConnection, u64)>;
/// Number of segments that each connection had sent, by socket cookie; `None`: it could not send any more.
type SentSegments = BTreeMap<u64, Option<u32>>;

impl DeadlineScanner {
    /// Scans the calling thread's namespace. `closed` grows by the number of closed connections, also if the scan fails
    /// later.
    fn scan(&self, closed: &mut u64) -> io::Result<DeadlineScan> {
        let diag = SockDiag::open()?;
        let at_ns = monotonic_ns();
        let mut waiting = self.open_requests(&diag)?;
        for tries_left in (0..SCANS_MAX).rev() {
            // Segments are counted before the second dump: a count that is unchanged afterwards proves that nothing was
            // sent in between.
            let all = self.overdue(&waiting).map(|it| Ok((it.cookie(), sent_segments(&diag, it)?)));
            let sent_before = all.collect::<io::Result<SentSegments>>()?;
            if sent_before.is_empty() {
                break;
            }
            waiting = self.open_requests(&diag)?;
            let ended =
                self.close_overdue(&diag, &waiting, &sent_before, tries_left == 0, closed)?;
            waiting.retain(|(connection, _)| !ended.contains(&connection.cookie()));
        }
        let oldest_ns = waiting.iter().map(|(_, began_ns)| *began_ns).min();
        Ok(DeadlineScan { at_ns, oldest_ns, cpu_time: thread_cpu_time() })
    }

    /// Returns the connections that wait for the end of a request. Connections to opaque ports have none with a deadline,
    /// also if they were opened before the port became opaque.
    fn open_requests(&self, diag: &SockDiag) -> io::Result<OpenRequestList> {
        let mut waiting = self.conns.open_requests(diag)?;
        waiting.retain(|(connection, _)| !self.ports.is_opaque(connection.local.port()));
        Ok(waiting)
    }

    /// Returns the connections whose request is overdue.
    fn overdue<'a>(
        &self,
        waiting: &'a OpenRequestList,
    ) -> impl Iterator<Item = &'a DiagConnection> {
        let (now, timeout) = (monotonic_ns(), self.timeout);
        let overdue = waiting.iter().filter(move |(_, began)| is_overdue(now, timeout, *began));
        overdue.map(|(connection, _)| connection)
    }

    /// Closes the connections in `sent_before` that are still overdue and have sent nothing since. At the last try it
    /// also closes those that have sent. Returns the cookies of the closed connections, and adds their number to
    /// `closed`.
    fn close_overdue(
        &self,
        diag: &SockDiag,
        waiting: &OpenRequestList,
        sent_before: &SentSegments,
        is_last: bool,
        closed: &mut u64,
    ) -> io::Result<BTreeSet<u64>> {
        let mut ended = BTreeSet::new();
        for connection in self.overdue(waiting) {
            let Some(before) = sent_before.get(&connection.cookie()) else { continue };
            // Read again just before the close: the pod may have sent a part of its response since.
            let is_unchanged = sent_segments(diag, connection)? == *before;
            if (is_unchanged || is_last) && destroy(diag, connection)? {
                ended.insert(connection.cookie());
                *closed += 1;
            }
        }
        Ok(ended)
    }
}

/// Returns the number of segments that the connection has sent; `None` if it cannot send any more.
fn sent_segments(diag: &SockDiag, connection: &DiagConnection) -> io::Result<Option<u32>> {
    none_if_gone(diag.sent_segments(connection))
}

/// Closes a connection. Returns true if it still existed.
fn destroy(diag: &SockDiag, connection: &DiagConnection) -> io::Result<bool> {
    none_if_gone(diag.destroy(connection)).map(|done| done.is_some())
}

fn none_if_gone<T>(done: io::Result<T>) -> io::Result<Option<T>> {
    use io::ErrorKind::{NotFound, StaleNetworkFileHandle};
    match done {
        Ok(done) => Ok(Some(done)),
        // No socket has these addresses any more, or another socket has.
        Err(error) if matches!(error.kind(), NotFound | StaleNetworkFileHandle) => Ok(None),
        Err(error) => Err(error),
    }
}
