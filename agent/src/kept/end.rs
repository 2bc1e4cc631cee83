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
use tracing::{debug, warn};

use super::{
    Leaving, is_due,
    locked::{Done, Ender},
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

    /// Ends what is due in every namespace of a client's. Blocks.
    ///
    /// The agent's own namespace is left out: activators there move their connections themselves.
    pub(crate) fn end(&self, leaving: &BTreeMap<SocketAddr, Leaving>) -> Done {
        // Rounds do not overlap, so nobody waits here.
        let mut ender =
            self.ender.as_ref().map(|it| it.lock().unwrap_or_else(PoisonError::into_inner));
        let mut done = Done::default();
        for path in namespaces(&self.cgroup) {
            let namespace = match Namespace::open(&path) {
                Ok(namespace) => namespace,
                // Its process has just ended, and its connections with it.
                Err(_) => continue,
            };
            let ender = ender.as_deref_mut();
            match namespace.within("connections", || end_here(leaving, ender)) {
                Ok(here) => done += here,
                Err(error) => warn!(error = %chain(&error), "cannot end kept connections"),
            }
        }
        if done != Done::default() {
            let Done { ended, spared } = done;
            debug!(ended, spared, leaving = leaving.len(), "kept connections ended");
        }
        done
    }
}

fn end_here(
    leaving: &BTreeMap<SocketAddr, Leaving>,
    ender: Option<&mut Ender>,
) -> io::Result<Done> {
    let diag = SockDiag::open()?;
    let now = Instant::now();
    let connections = diag.connections()?;
    let due: Vec<&Connection> = connections.iter().filter(|it| is_due(now, leaving, it)).collect();
    match ender {
        _ if due.is_empty() => Ok(Done::default()),
        Some(ender) => ender.end(&due).or_else(|error| {
            warn!(%error, "cannot end kept connections under their locks");
            end_unlocked(&diag, leaving, &due)
        }),
        None => end_unlocked(&diag, leaving, &due),
    }
}

/// For kernels that cannot look and end in one step: a request that is written in between is lost.
fn end_unlocked(
    diag: &SockDiag,
    leaving: &BTreeMap<SocketAddr, Leaving>,
    due: &[&Connection],
) -> io::Result<Done> {
    let mut done = Done::default();
    for connection in due {
        match end_one(diag, leaving, connection) {
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
