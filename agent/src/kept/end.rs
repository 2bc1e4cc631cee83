//! Shell: ends kept connections in the clients' network namespaces.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use common::link::chain;
use tokio::task::spawn_blocking;
use tracing::{debug, warn};

use super::{
    Leaving,
    ask::{self, Ends},
    is_due,
    locked::{Done, Ender},
    may_end,
};
use crate::{
    pods::{
        find::processes,
        namespace::{self, Namespace},
    },
    sockdiag::{Connection, SockDiag},
};

/// The clients of this node, and how their connections are ended. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Clients {
    cgroup: PathBuf,
    ender: Option<Arc<Mutex<Ender>>>,
}

impl Clients {
    /// All processes in `cgroup`; by `ender`, or without one as well as it goes.
    pub(crate) fn new(cgroup: PathBuf, ender: Option<Ender>) -> Self {
        Self { cgroup, ender: ender.map(|ender| Arc::new(Mutex::new(ender))) }
    }

    /// Whether connections are ended under their locks.
    pub(crate) fn locks(&self) -> bool {
        self.ender.is_some()
    }

    /// Ends what is due in every namespace of a client's, but for what a pod says is in use.
    ///
    /// The agent's own namespace is left out: activators there move their connections themselves.
    pub(crate) async fn round(self, leaving: BTreeMap<SocketAddr, Leaving>) -> Done {
        let leaving = Arc::new(leaving);
        let (cgroup, what) = (self.cgroup.clone(), Arc::clone(&leaving));
        let mut found = blocking(move || due(&cgroup, &what)).await;
        let all = found.iter().flat_map(|client| &client.due);
        let said = ask::in_use(all.map(ends)).await;
        let in_use: u64 = found.iter_mut().map(|client| client.leave_out(&said)).sum();
        let mut done = blocking(move || self.end(&leaving, found)).await;
        done.spared += in_use;
        if done != Done::default() {
            let Done { ended, spared } = done;
            debug!(ended, spared, in_use, "kept connections ended");
        }
        done
    }

    /// Ends what was found to be due and has not been used since then. Blocks.
    fn end(&self, leaving: &BTreeMap<SocketAddr, Leaving>, found: Vec<Client>) -> Done {
        // Rounds do not overlap, so nobody waits here.
        let mut ender =
            self.ender.as_ref().map(|it| it.lock().unwrap_or_else(PoisonError::into_inner));
        let mut done = Done::default();
        for Client { namespace, due } in found.iter().filter(|client| !client.due.is_empty()) {
            let ender = ender.as_deref_mut();
            match namespace.within("connections", || end_here(leaving, due, ender)) {
                Ok(here) => done += here,
                Err(error) => warn!(error = %chain(&error), "cannot end kept connections"),
            }
        }
        done
    }
}

/// What may block.
async fn blocking<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> T {
    match spawn_blocking(job).await {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// A client's namespace, and its connections that are to be ended.
struct Client {
    namespace: Namespace,
    due: Vec<Connection>,
}

impl Client {
    /// Leaves out those that are in use, or may be. Returns how many.
    fn leave_out(&mut self, said: &BTreeMap<Ends, bool>) -> u64 {
        let all = self.due.len();
        self.due
            .retain(|connection| may_end(connection.seen, said.get(&ends(connection)).copied()));
        (all - self.due.len()) as u64
    }
}

fn ends(connection: &Connection) -> Ends {
    (connection.plain_local(), connection.plain_peer())
}

/// The clients with connections that are due. Blocks.
fn due(cgroup: &Path, leaving: &BTreeMap<SocketAddr, Leaving>) -> Vec<Client> {
    let mut found = Vec::new();
    for path in namespaces(cgroup) {
        // Otherwise its process has just ended, and its connections with it.
        let Ok(namespace) = Namespace::open(&path) else { continue };
        match namespace.within("connections", || due_here(leaving)) {
            Ok(due) if due.is_empty() => {}
            Ok(due) => found.push(Client { namespace, due }),
            Err(error) => warn!(error = %chain(&error), "cannot look for kept connections"),
        }
    }
    found
}

fn due_here(leaving: &BTreeMap<SocketAddr, Leaving>) -> io::Result<Vec<Connection>> {
    let now = Instant::now();
    let mut connections = SockDiag::open()?.connections()?;
    connections.retain(|it| is_due(now, leaving, it));
    Ok(connections)
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

/// For kernels that cannot look and end in one step: a request that is written in between is lost.
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

/// A list of thousands is old when its end is reached: a connection whose client has just used it is left alone.
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

/// One path to each network namespace but our own.
fn namespaces(clients: &Path) -> impl Iterator<Item = PathBuf> {
    let own = namespace::inode(Path::new("/proc/thread-self/ns/net")).ok();
    let paths =
        processes(clients).into_iter().map(|pid| PathBuf::from(format!("/proc/{pid}/ns/net")));
    let named = paths.filter_map(|path| Some((namespace::inode(&path).ok()?, path)));
    let different: HashMap<u64, PathBuf> = named.filter(|(inode, _)| Some(*inode) != own).collect();
    different.into_values()
}
