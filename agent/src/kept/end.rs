//! Shell: ends kept connections in the clients' network namespaces.

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

/// The clients of this node, and how their connections are ended. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Clients {
    cgroup: PathBuf,
    ender: Option<Arc<Mutex<Ender>>>,
    known: Arc<Mutex<Known>>,
}

/// What the newest looks found.
#[derive(Debug, Default)]
struct Known {
    looked: Looked,
    /// Each client's connections to what is left.
    connections: Vec<(PathBuf, Vec<Connection>)>,
}

impl Clients {
    /// All processes in `cgroup`; by `ender`, or without one as well as it goes.
    pub(crate) fn new(cgroup: PathBuf, ender: Option<Ender>) -> Self {
        let ender = ender.map(|ender| Arc::new(Mutex::new(ender)));
        Self { cgroup, ender, known: Arc::default() }
    }

    /// Whether connections are ended under their locks.
    pub(crate) fn locks(&self) -> bool {
        self.ender.is_some()
    }

    /// What the newest looks found and cost.
    pub(crate) fn looked(&self) -> Looked {
        lock(&self.known).looked
    }

    /// Ends what is due in the namespaces of clients, but for what a pod says is in use. Returns also how many connections
    /// to what is left there are still.
    ///
    /// The agent's own namespace is left out: activators there move their connections themselves.
    pub(crate) async fn round(
        self,
        round: Round,
        leaving: BTreeMap<SocketAddr, Leaving>,
    ) -> (Done, u64) {
        let leaving = Arc::new(leaving);
        let (clients, what) = (self.clone(), Arc::clone(&leaving));
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

    /// The clients with connections to what is left, which are the known ones from now on. Blocks.
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

    /// Ends what was found to be due and has not been used since then. Blocks.
    fn end(&self, leaving: &BTreeMap<SocketAddr, Leaving>, found: Vec<Client>) -> Done {
        // Rounds do not overlap, so nobody waits here.
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

/// What may block.
async fn blocking<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> T {
    match spawn_blocking(job).await {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// Where to look for connections: for these, or for all that there are.
type Look = (PathBuf, Option<Vec<Connection>>);

/// A client's namespace, and its connections to what is left.
struct Client {
    path: PathBuf,
    namespace: Namespace,
    /// All of them.
    left: Vec<Connection>,
    /// Those that are to be ended.
    due: Vec<Connection>,
}

impl Client {
    /// A client with its connections wherever they lead, and the processor time it took to look.
    fn look((path, known): Look) -> Option<(Self, Duration)> {
        // Otherwise its process has just ended, and its connections with it.
        let namespace = Namespace::open(&path).ok()?;
        // On a thread of its own, all of whose time this is.
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

    /// Only what leads to what is left; `None` where nothing does.
    fn to(mut self, leaving: &BTreeMap<SocketAddr, Leaving>) -> Option<Self> {
        self.left.retain(|connection| leaving.contains_key(&connection.plain_peer()));
        let (now, all) = (Instant::now(), self.left.iter());
        self.due = all.filter(|&it| is_due(now, leaving, it)).cloned().collect();
        (!self.left.is_empty()).then_some(self)
    }

    /// Leaves out those that are in use, or may be. Returns how many.
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

/// What there still is of these.
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
