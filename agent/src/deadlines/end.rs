//! Shell: scans pods' network namespaces for overdue requests, and closes their connections.
//!
//! Scan and close are two calls. In between a request may get its response after all, and the connection's next request
//! may begin, which must not be cut off. So an overdue connection is scanned again right before the close. If the pod
//! has sent nothing since before that scan, no response can have ended. For a pod that sends all the time this is tried
//! three times. Then its connections are closed by the last scan alone, which is as old as a dump takes.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    time::Duration,
};

use common::link::chain;
use tokio::{sync::mpsc::Sender, task::spawn_blocking};
use tracing::{info, warn};

use super::{Due, Looked, is_over};
use crate::{
    clock::{monotonic_ns, thread_cpu},
    maps::conns::Conns,
    pods::{
        find::{Command, borrow},
        namespace::Namespace,
    },
    sockdiag::{Connection, SockDiag},
};

/// Number of scans of an overdue connection before it is closed while its pod sends.
const TRIES: u32 = 3;

/// Returns an error if this kernel does not show the eBPF programs' storage of connections, or cannot close them.
pub(crate) fn able(conns: &Conns) -> io::Result<()> {
    let diag = SockDiag::open()?;
    conns.waiting(&diag)?;
    diag.can_destroy()
}

/// Scans each of these pods, given with their namespaces' cookies, and closes overdue connections. A result is `None`
/// if the scan failed.
pub(crate) async fn round(
    due: Vec<(Due, u64)>,
    finder: Sender<Command>,
    conns: Conns,
) -> Vec<(String, Option<Looked>)> {
    let mut found = Vec::with_capacity(due.len());
    // One pod after the other: the bound on processor time is for each pod, and parallel scans would add up.
    for (due, cookie) in due {
        let looked = match borrow(&finder, &due.uid, cookie).await {
            Some(namespace) => look(namespace, due.clone(), conns.clone()).await,
            None => None,
        };
        found.push((due.uid, looked));
    }
    found
}

async fn look(namespace: Namespace, due: Due, conns: Conns) -> Option<Looked> {
    let Due { uid, timeout } = due;
    let job = move || namespace.within("connections", || Pod { timeout, conns }.look());
    match spawn_blocking(job).await {
        Ok(Ok(looked)) => {
            let ended = looked.ended;
            if ended > 0 {
                info!(uid, ended, ?timeout, "connections ended: their requests took too long");
            }
            Some(looked)
        }
        Ok(Err(error)) => {
            warn!(uid, error = %chain(&error), "cannot look for requests that take too long");
            None
        }
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// A pod, as seen from inside its namespace.
struct Pod {
    timeout: Duration,
    conns: Conns,
}

/// Connections that wait for the end of a request, each with the request's start.
type Waiting = Vec<(Connection, u64)>;

impl Pod {
    fn look(&self) -> io::Result<Looked> {
        let diag = SockDiag::open()?;
        let at_ns = monotonic_ns();
        let mut waiting = self.conns.waiting(&diag)?;
        let mut ended = 0;
        for tries_left in (0..TRIES).rev() {
            // Segments are counted before the second dump: a count that is unchanged afterwards proves that nothing was
            // sent in between.
            let all = self.over(&waiting).map(|it| Ok((it.cookie(), segments(&diag, it)?)));
            let before = all.collect::<io::Result<BTreeMap<u64, Option<u32>>>>()?;
            if before.is_empty() {
                break;
            }
            waiting = self.conns.waiting(&diag)?;
            ended += self.end(&diag, &mut waiting, &before, tries_left == 0)?;
        }
        let oldest_ns = waiting.iter().map(|(_, began_ns)| *began_ns).min();
        Ok(Looked { at_ns, oldest_ns, ended, took: thread_cpu() })
    }

    /// Returns the connections whose request is overdue.
    fn over<'a>(&self, waiting: &'a Waiting) -> impl Iterator<Item = &'a Connection> {
        let (now, timeout) = (monotonic_ns(), self.timeout);
        let over = waiting.iter().filter(move |(_, began)| is_over(now, timeout, *began));
        over.map(|(connection, _)| connection)
    }

    /// Closes connections that are overdue, were so `before`, and have sent nothing since; at the last try also the
    /// others. Closed connections are removed from `waiting`.
    fn end(
        &self,
        diag: &SockDiag,
        waiting: &mut Waiting,
        before: &BTreeMap<u64, Option<u32>>,
        is_last: bool,
    ) -> io::Result<u64> {
        let mut ended = BTreeSet::new();
        for connection in self.over(waiting) {
            let Some(before) = before.get(&connection.cookie()) else { continue };
            let is_still = segments(diag, connection)? == *before;
            if (is_still || is_last) && destroy(diag, connection)? {
                ended.insert(connection.cookie());
            }
        }
        waiting.retain(|(connection, _)| !ended.contains(&connection.cookie()));
        Ok(ended.len() as u64)
    }
}

/// Returns the number of segments that the connection has sent; `None` if it has closed.
fn segments(diag: &SockDiag, connection: &Connection) -> io::Result<Option<u32>> {
    unless_gone(diag.segments(connection))
}

/// Closes a connection. Returns true if it still existed.
fn destroy(diag: &SockDiag, connection: &Connection) -> io::Result<bool> {
    unless_gone(diag.destroy(connection)).map(|done| done.is_some())
}

fn unless_gone<T>(done: io::Result<T>) -> io::Result<Option<T>> {
    use io::ErrorKind::{NotFound, StaleNetworkFileHandle};
    match done {
        Ok(done) => Ok(Some(done)),
        // No socket has these addresses any more, or another socket has.
        Err(error) if matches!(error.kind(), NotFound | StaleNetworkFileHandle) => Ok(None),
        Err(error) => Err(error),
    }
}
