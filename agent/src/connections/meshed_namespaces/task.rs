//! Shell: the task that looks for meshed namespaces, and writes their cookies into the kernel's map.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use common::link::error_chain;
use tokio::{task::spawn_blocking, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{NamespaceIdentity, SeenNamespaces};
use crate::{
    kernel::{maps::meshed_namespaces::MeshedNamespaceEntries, netns_cookies::NetnsCookies},
    metrics::AgentMetrics,
    pods::{
        namespace,
        processes::{open_namespace_of, processes_by_namespace},
    },
};

/// Time between two scans.
const SCAN_PERIOD: Duration = Duration::from_millis(500);
/// Namespaces that are never meshed: the agent's own, and that of process 1. In the node's own one kube-proxy has rules
/// that redirect.
const NODE_NAMESPACES: [&str; 2] = ["/proc/thread-self/ns/net", "/proc/1/ns/net"];

/// Scans of all namespaces of this node's clients for rules of a mesh.
#[derive(Debug)]
pub(crate) struct MeshedNamespaceTask {
    /// Cgroup of this node's client processes.
    clients: PathBuf,
    cookies: NetnsCookies,
    entries: MeshedNamespaceEntries,
    seen: SeenNamespaces,
    /// True if the latest write of the map has failed, which was logged.
    is_failing: bool,
    metrics: AgentMetrics,
}

impl MeshedNamespaceTask {
    /// Starts without a scan. `clients` is the cgroup of this node's client processes.
    pub(crate) fn new(
        clients: PathBuf,
        cookies: NetnsCookies,
        entries: MeshedNamespaceEntries,
        metrics: AgentMetrics,
    ) -> Self {
        let (seen, is_failing) = (SeenNamespaces::default(), false);
        Self { clients, cookies, entries, seen, is_failing, metrics }
    }

    /// Removes the entries of an earlier agent, where no namespace is to be left alone.
    pub(crate) fn clear(mut self) {
        self.write_entries();
    }

    /// Scans all namespaces once.
    pub(crate) async fn scan_once(mut self) -> Self {
        let scan = spawn_blocking(move || {
            self.scan();
            self
        });
        match scan.await {
            Ok(task) => task,
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }

    /// Scans all namespaces again and again, until `shutdown`.
    pub(crate) async fn run(mut self, shutdown: CancellationToken) {
        loop {
            tokio::select! {
                () = sleep(SCAN_PERIOD) => {}
                () = shutdown.cancelled() => return,
            }
            self = self.scan_once().await;
        }
    }

    /// Looks at the namespaces that are due, and writes the meshed ones. Blocks.
    fn scan(&mut self) {
        let namespaces = match client_namespaces(&self.clients) {
            Ok(namespaces) => namespaces,
            // Nothing is known of the namespaces now. What the scan before has found stays.
            Err(error) => return debug!(%error, "cannot list the processes of clients"),
        };
        let present = namespaces.keys().copied().collect();
        for identity in self.seen.due(Instant::now(), &present) {
            // Without a namespace its processes have just ended. The next scan looks again.
            let Some(namespace) = open_namespace_of(&namespaces[&identity]) else { continue };
            match namespace.meshed_cookie(&self.cookies) {
                Ok(cookie) => self.seen.record(Instant::now(), identity, cookie),
                Err(error) => {
                    debug!(error = %error_chain(&error), "cannot look for a mesh");
                    self.seen.record_failure(Instant::now(), identity);
                }
            }
        }
        self.write_entries();
    }

    fn write_entries(&mut self) {
        let cookies = self.seen.meshed_cookies();
        let count = cookies.len() as i64;
        if self.metrics.meshed_namespaces.set(count) != count {
            info!(count, "network namespaces redirect connections: theirs go on unchanged");
        }
        let written = self.entries.set(&cookies);
        let was_failing = std::mem::replace(&mut self.is_failing, written.is_err());
        if let Err(error) = written
            && !was_failing
        {
            warn!(error = %error_chain(&error), "some meshed namespaces are not left alone");
        }
    }
}

/// Returns the network namespaces of the processes in a cgroup, without [`NODE_NAMESPACES`], each with its processes.
fn client_namespaces(clients: &Path) -> io::Result<BTreeMap<NamespaceIdentity, Vec<u32>>> {
    let of_node = NODE_NAMESPACES.map(|path| namespace::inode(Path::new(path)).ok());
    let all = processes_by_namespace(clients)?.into_iter();
    let of_clients = all.filter(|(inode, _)| !of_node.contains(&Some(*inode)));
    let with_identity = |(inode, pids): (u64, Vec<u32>)| {
        let pid = *pids.first()?;
        Some((NamespaceIdentity { inode, pid }, pids))
    };
    Ok(of_clients.filter_map(with_identity).collect())
}
