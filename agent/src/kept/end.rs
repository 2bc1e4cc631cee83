//! Shell: ends kept connections in the clients' network namespaces.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Instant,
};

use common::link::chain;
use tracing::{debug, warn};

use super::{Leaving, is_due};
use crate::{
    pods::{
        find::processes,
        namespace::{self, Namespace},
    },
    sockdiag::{Connection, SockDiag},
};

/// Ends what is due in every namespace of a process in the cgroup `clients`. Returns how many. Blocks.
///
/// The agent's own namespace is left out: activators there move their connections themselves.
pub(crate) fn end(clients: &Path, leaving: &BTreeMap<SocketAddr, Leaving>) -> u64 {
    let mut ended = 0;
    for path in namespaces(clients) {
        let namespace = match Namespace::open(&path) {
            Ok(namespace) => namespace,
            // Its process has just ended, and its connections with it.
            Err(_) => continue,
        };
        match namespace.within("connections", || end_here(leaving)) {
            Ok(count) => ended += count,
            Err(error) => warn!(error = %chain(&error), "cannot end kept connections"),
        }
    }
    if ended > 0 {
        debug!(ended, leaving = leaving.len(), "kept connections ended");
    }
    ended
}

fn end_here(leaving: &BTreeMap<SocketAddr, Leaving>) -> io::Result<u64> {
    let diag = SockDiag::open()?;
    let now = Instant::now();
    let mut ended = 0;
    for connection in diag.connections()?.iter().filter(|it| is_due(now, leaving, it)) {
        match end_one(&diag, leaving, connection) {
            Ok(did) => ended += u64::from(did),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(ended)
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
