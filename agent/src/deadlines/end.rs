//! Shell: looks into pods' network namespaces for requests that have taken longer than they may, and ends their connections.
//!
//! A look and the end are two calls. In between a request may be answered after all, and the next one of its connection
//! begin, which must not be cut off. So what is over is looked at again right before: where the pod has sent nothing since
//! before that look, no answer can have ended. A pod that sends all the time is tried three times, and then ended by the
//! look's word alone, which is as old as a dump takes.

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

/// How often a connection is looked at before it is ended while its pod sends.
const TRIES: u32 = 3;

/// Whether this kernel shows what the kernel half stores of connections, and ends them; why not, if not.
pub(crate) fn able(conns: &Conns) -> io::Result<()> {
    let diag = SockDiag::open()?;
    conns.waiting(&diag)?;
    diag.can_destroy()
}

/// Looks into each of these pods, whose namespaces have these cookies, and ends what is over there. `None` where no look
/// could be made.
pub(crate) async fn round(
    due: Vec<(Due, u64)>,
    finder: Sender<Command>,
    conns: Conns,
) -> Vec<(String, Option<Looked>)> {
    let mut found = Vec::with_capacity(due.len());
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

/// A pod, from inside its namespace.
struct Pod {
    timeout: Duration,
    conns: Conns,
}

/// Connections that wait for the end of a request, each with when that began.
type Waiting = Vec<(Connection, u64)>;

impl Pod {
    fn look(&self) -> io::Result<Looked> {
        let diag = SockDiag::open()?;
        let at_ns = monotonic_ns();
        let mut waiting = self.conns.waiting(&diag)?;
        let mut ended = 0;
        for tries_left in (0..TRIES).rev() {
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

    /// The connections whose request is over.
    fn over<'a>(&self, waiting: &'a Waiting) -> impl Iterator<Item = &'a Connection> {
        let (now, timeout) = (monotonic_ns(), self.timeout);
        let over = waiting.iter().filter(move |(_, began)| is_over(now, timeout, *began));
        over.map(|(connection, _)| connection)
    }

    /// Ends what is over, was so `before`, and has sent nothing since; or also what has. What it ends waits no more.
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

/// How many segments it has sent; `None` where it has gone.
fn segments(diag: &SockDiag, connection: &Connection) -> io::Result<Option<u32>> {
    unless_gone(diag.segments(connection))
}

/// Ends a connection. Returns whether it was there.
fn destroy(diag: &SockDiag, connection: &Connection) -> io::Result<bool> {
    unless_gone(diag.destroy(connection)).map(|done| done.is_some())
}

fn unless_gone<T>(done: io::Result<T>) -> io::Result<Option<T>> {
    use io::ErrorKind::{NotFound, StaleNetworkFileHandle};
    match done {
        Ok(done) => Ok(Some(done)),
        // Nobody has these addresses any more, or another socket has.
        Err(error) if matches!(error.kind(), NotFound | StaleNetworkFileHandle) => Ok(None),
        Err(error) => Err(error),
    }
}
