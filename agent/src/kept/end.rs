//! Shell: closes stale connections in the clients' network namespaces.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use common::{abi::InUse, link::chain};
use tokio::task::spawn_blocking;
use tracing::{debug, warn};

use super::{
    Leaving, Looked, Round,
    ask::{self, Ends},
    is_due,
    locked::{Done, Ender},
    may_end,
};
use crate::{
    clock::thread_cpu,
    lock,
    pods::{
        find::processes,
        namespace::{self, Namespace},
    },
    sockdiag::{Connection, SockDiag},
};

/// Clients of this node, and the way to close their connections. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Clients {
    cgroup: PathBuf,
    ender: Option<Arc<Mutex<Ender>>>,
    known: Arc<Mutex<Known>>,
}

/// Results of the newest scans.
#[derive(Debug, Default)]
struct Known {
    looked: Looked,
    /// Connections of each client to draining addresses, by its namespace's path.
    connections: Vec<(PathBuf, Vec<Connection>)>,
}

impl Clients {
    /// Makes the clients: all processes in `cgroup`. Without an `ender` they are closed by sock_diag, with a race.
    pub(crate) fn new(cgroup: PathBuf, ender: Option<Ender>) -> Self {
        let ender = ender.map(|ender| Arc::new(Mutex::new(ender)));
        Self { cgroup, ender, known: Arc::default() }
    }

    /// Returns true if connections are closed under their locks.
    pub(crate) fn locks(&self) -> bool {
        self.ender.is_some()
    }

    /// Returns the result and cost of the newest scans.
    pub(crate) fn looked(&self) -> Looked {
        lock(&self.known).looked
    }

    /// Closes the due connections in the clients' namespaces, except those that a pod reports as in use. Also returns
    /// the number of connections to draining addresses that are left.
    ///
    /// The agent's own namespace is left out: activators there move their connections themselves.
    pub(crate) async fn round(
        self,
        round: Round,
        leaving: BTreeMap<SocketAddr, Leaving>,
    ) -> (Done, u64) {
        let leaving = Arc::new(leaving);
        let (clients, what) = (self.clone(), Arc::clone(&leaving));
        // The order matters: list, ask the pods, close only what has not changed since the list. So no request can come
        // in between.
        let mut found = blocking(move || clients.look(round, &what)).await;
        let left: u64 = found.iter().map(|client| client.left.len() as u64).sum();
        let all = found.iter().flat_map(|client| &client.due);
        let said = ask::in_use(all.map(ends)).await;
        let in_use: u64 = found.iter_mut().map(|client| client.leave_out(&leaving, &said)).sum();
        let mut done = blocking(move || self.end(&leaving, found)).await;
        done.spared += in_use;
        if done != Done::default() {
            let Done { ended, spared } = done;
            debug!(ended, spared, in_use, left, "kept connections ended");
        }
        (done, left.saturating_sub(done.ended))
    }

    /// Scans the clients, and stores those with connections to draining addresses as known. Blocks.
    fn look(&self, round: Round, leaving: &BTreeMap<SocketAddr, Leaving>) -> Vec<Client> {
        let looks: Vec<Look> = match round {
            Round::All => namespaces(&self.cgroup).map(|path| (path, None)).collect(),
            Round::Known => {
                let known = lock(&self.known).connections.clone();
                known.into_iter().map(|(path, known)| (path, Some(known))).collect()
            }
        };
        let (mut found, mut took) = (Vec::new(), Duration::ZERO);
        for look in looks {
            let Some((client, its)) = Client::look(look) else { continue };
            took += its;
            found.extend(client.to(leaving));
        }
        let mut known = lock(&self.known);
        match round {
            Round::All => known.looked.took_all = took,
            Round::Known => known.looked.took_known = took,
        }
        known.looked.known = found.iter().map(|client| client.left.len()).sum();
        known.connections =
            found.iter().map(|client| (client.path.clone(), client.left.clone())).collect();
        found
    }

    /// Closes the due connections that have not been used since they were listed. Blocks.
    fn end(&self, leaving: &BTreeMap<SocketAddr, Leaving>, found: Vec<Client>) -> Done {
        // Rounds do not overlap, so this lock is free.
        let mut ender = self.ender.as_deref().map(lock);
        let mut done = Done::default();
        for Client { namespace, due, .. } in found.iter().filter(|client| !client.due.is_empty()) {
            let ender = ender.as_deref_mut();
            match namespace.within("connections", || end_here(leaving, due, ender)) {
                Ok(here) => done += here,
                Err(error) => warn!(error = %chain(&error), "cannot end kept connections"),
            }
        }
        done
    }
}

/// Runs a job that may block on a thread for such jobs.
async fn blocking<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> T {
    match spawn_blocking(job).await {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// Scope of one scan: a namespace's path, and the connections in it, or all.
type Look = (PathBuf, Option<Vec<Connection>>);

/// A client's namespace, and its connections to draining addresses.
struct Client {
    path: PathBuf,
    namespace: Namespace,
    /// Connections to draining addresses.
    left: Vec<Connection>,
    /// Connections among them that are to be closed.
    due: Vec<Connection>,
}

impl Client {
    /// Scans a client. Returns it with all its connections, and the processor time of the scan.
    fn look((path, known): Look) -> Option<(Self, Duration)> {
        // Without a namespace its process has just ended, and its connections with it.
        let namespace = Namespace::open(&path).ok()?;
        // On a thread of its own, so that the thread's whole time is the scan's.
        let look = || {
            let diag = SockDiag::open()?;
            let found = known.map_or_else(|| diag.connections(), |known| again(&diag, &known))?;
            Ok((found, thread_cpu()))
        };
        let found = namespace.within("connections", look);
        let found = found
            .inspect_err(|error| warn!(error = %chain(error), "cannot look for kept connections"));
        let (left, took) = found.ok()?;
        Some((Self { path, namespace, left, due: Vec::new() }, took))
    }

    /// Keeps only connections to draining addresses, and selects the due ones; `None` if there are none.
    fn to(mut self, leaving: &BTreeMap<SocketAddr, Leaving>) -> Option<Self> {
        self.left.retain(|connection| leaving.contains_key(&connection.plain_peer()));
        let (now, all) = (Instant::now(), self.left.iter());
        self.due = all.filter(|&it| is_due(now, leaving, it)).cloned().collect();
        (!self.left.is_empty()).then_some(self)
    }

    /// Removes the connections that are in use, or may be, from the due ones. Returns their number.
    fn leave_out(
        &mut self,
        leaving: &BTreeMap<SocketAddr, Leaving>,
        said: &BTreeMap<Ends, InUse>,
    ) -> u64 {
        let all = self.due.len();
        self.due.retain(|it| may_end(leaving, it, said.get(&ends(it)).copied()));
        (all - self.due.len()) as u64
    }
}

/// Returns these connections as they are now, without those that have closed.
fn again(diag: &SockDiag, known: &[Connection]) -> io::Result<Vec<Connection>> {
    let mut there = Vec::with_capacity(known.len());
    for connection in known {
        match diag.look_again(connection) {
            Ok(connection) => there.push(connection),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(there)
}

fn ends(connection: &Connection) -> Ends {
    (connection.plain_local(), connection.plain_peer())
}

fn end_here(
    leaving: &BTreeMap<SocketAddr, Leaving>,
    due: &[Connection],
    ender: Option<&mut Ender>,
) -> io::Result<Done> {
    let Some(ender) = ender else { return end_unlocked(leaving, due) };
    let all: Vec<&Connection> = due.iter().collect();
    ender.end(&all).or_else(|error| {
        warn!(%error, "cannot end kept connections under their locks");
        end_unlocked(leaving, due)
    })
}

/// Closes connections on kernels that cannot check and close in one step: a request that is written in between is lost.
fn end_unlocked(leaving: &BTreeMap<SocketAddr, Leaving>, due: &[Connection]) -> io::Result<Done> {
    let diag = SockDiag::open()?;
    let mut done = Done::default();
    for connection in due {
        match end_one(&diag, leaving, connection) {
            Ok(true) => done.ended += 1,
            Ok(false) => done.spared += 1,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Closes a connection if it is still due. A list of thousands is old when its end is reached, so the connection is
/// read again right before.
fn end_one(
    diag: &SockDiag,
    leaving: &BTreeMap<SocketAddr, Leaving>,
    connection: &Connection,
) -> io::Result<bool> {
    let due = is_due(Instant::now(), leaving, &diag.look_again(connection)?);
    if due {
        diag.destroy(connection)?;
    }
    Ok(due)
}

/// Returns one path to each network namespace except the agent's own.
fn namespaces(clients: &Path) -> impl Iterator<Item = PathBuf> {
    let own = namespace::inode(Path::new("/proc/thread-self/ns/net")).ok();
    let paths =
        processes(clients).into_iter().map(|pid| PathBuf::from(format!("/proc/{pid}/ns/net")));
    let named = paths.filter_map(|path| Some((namespace::inode(&path).ok()?, path)));
    // Processes of one namespace give one entry, by whichever of their paths comes last.
    let different: HashMap<u64, PathBuf> = named.filter(|(inode, _)| Some(*inode) != own).collect();
    different.into_values()
}
