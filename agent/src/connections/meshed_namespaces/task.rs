//! Shell: the task that looks for meshed namespaces, and writes their cookies into the kernel's map.

use std::{
    collections::BTreeMap,
    error::Error,
    io, mem,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use common::link::error_chain;
use tokio::{task::spawn_blocking, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{NamespaceIdentity, SeenNamespaces};
use crate::{
    kernel::{
        maps::{KernelMapError, meshed_namespaces::MeshedNamespaceEntries},
        netns_cookies::NetnsCookies,
    },
    metrics::AgentMetrics,
    pods::{
        namespace::{self, NamespaceError, NetworkNamespace, is_process_ended},
        processes::{ProcessesByNamespace, open_namespace_of, processes_by_namespace},
    },
};

/// Time between two scans.
const SCAN_PERIOD: Duration = Duration::from_millis(500);
/// Path of the agent's own namespace, which is never meshed: in the node's own one kube-proxy has rules that redirect.
const OWN_NAMESPACE: &str = "/proc/thread-self/ns/net";
/// Path of the namespace of process 1, which is never meshed either.
const INIT_NAMESPACE: &str = "/proc/1/ns/net";

/// Scans of all namespaces of this node's clients for rules of a mesh.
#[derive(Debug)]
pub(crate) struct MeshedNamespaceTask {
    /// Cgroup of this node's client processes.
    clients: PathBuf,
    cookies: NetnsCookies,
    entries: MeshedNamespaceEntries,
    seen: SeenNamespaces,
    /// True if the latest scan could not read all processes and namespaces, which was logged.
    is_scan_failing: bool,
    /// True if the latest write of the map has failed, which was logged.
    is_write_failing: bool,
    metrics: AgentMetrics,
}

impl MeshedNamespaceTask {
    /// Starts without a scan, with the entries of an earlier agent. `clients` is the cgroup of this node's client
    /// processes.
    pub(crate) fn new(
        clients: PathBuf,
        cookies: NetnsCookies,
        entries: MeshedNamespaceEntries,
        metrics: AgentMetrics,
    ) -> Result<Self, KernelMapError> {
        let seen = SeenNamespaces::new(entries.cookies()?);
        let (is_scan_failing, is_write_failing) = (false, false);
        Ok(Self { clients, cookies, entries, seen, is_scan_failing, is_write_failing, metrics })
    }

    /// Removes the entries of an earlier agent, where no namespace is to be left alone.
    pub(crate) fn clear(mut self) {
        self.seen = SeenNamespaces::default();
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
        let clients = match client_namespaces(&self.clients) {
            Ok(clients) => clients,
            // Nothing is known of the namespaces now. What the scan before has found stays.
            Err(error) => return self.log_scan(Some(&error)),
        };
        let present = clients.namespaces.keys().copied().collect();
        let unknown = clients.unknown.keys().copied().collect();
        let (mut failure, mut has_looked) = (clients.unknown.into_values().next(), true);
        for identity in self.seen.due(Instant::now(), &present, &unknown) {
            match open_namespace_of(&clients.namespaces[&identity]) {
                Ok(Some(namespace)) => has_looked &= self.look_at(identity, &namespace),
                // Its processes have just ended. The next scan looks again.
                Ok(None) => {}
                // It stays as it was known, and the next scan tries again.
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        self.log_scan(failure.as_ref().map(|error| error as &dyn Error));
        self.seen.finish_scan(has_looked && failure.is_none());
        self.write_entries();
    }

    /// Looks for rules of a mesh in a namespace. Returns false if that fails, as with a kernel without netfilter.
    fn look_at(&mut self, identity: NamespaceIdentity, namespace: &NetworkNamespace) -> bool {
        match namespace.meshed_cookie(&self.cookies) {
            Ok(cookie) => {
                self.seen.record(Instant::now(), identity, cookie);
                true
            }
            Err(error) => {
                debug!(error = %error_chain(&error), "cannot look for a mesh");
                self.seen.record_failure(Instant::now(), identity);
                false
            }
        }
    }

    /// Logs the first failure of a scan after a success: a process that may not be inspected fails each time.
    fn log_scan(&mut self, failure: Option<&dyn Error>) {
        let was_failing = mem::replace(&mut self.is_scan_failing, failure.is_some());
        if let Some(error) = failure
            && !was_failing
        {
            let error = error_chain(error);
            warn!(error, "cannot read all clients: what was known of their namespaces stays");
        }
    }

    fn write_entries(&mut self) {
        let cookies = self.seen.meshed_cookies();
        let count = cookies.len() as i64;
        if self.metrics.meshed_namespaces.set(count) != count {
            info!(count, "network namespaces redirect connections: theirs go on unchanged");
        }
        let written = self.entries.set(&cookies);
        let was_failing = mem::replace(&mut self.is_write_failing, written.is_err());
        if let Err(error) = written
            && !was_failing
        {
            warn!(error = %error_chain(&error), "some meshed namespaces are not left alone");
        }
    }
}

/// Network namespaces of clients.
struct NamespaceScan {
    /// Processes of each namespace.
    namespaces: BTreeMap<NamespaceIdentity, Vec<u32>>,
    /// Processes whose namespace cannot be read, with the reason.
    unknown: BTreeMap<u32, NamespaceError>,
}

/// Returns the network namespaces of the processes in a cgroup, without those of the agent and of process 1.
fn client_namespaces(clients: &Path) -> io::Result<NamespaceScan> {
    // Not known, it would be taken for a client's: connects of the node's own processes would go on unchanged.
    let own = namespace::inode(Path::new(OWN_NAMESPACE))?;
    let init = inode_if_visible(namespace::inode(Path::new(INIT_NAMESPACE)))?;
    let ProcessesByNamespace { known, unknown } = processes_by_namespace(clients)?;
    let of_clients = known.into_iter().filter(|(inode, _)| *inode != own && Some(*inode) != init);
    let with_identity = |(inode, pids): (u64, Vec<u32>)| {
        let pid = *pids.first()?;
        Some((NamespaceIdentity { inode, pid }, pids))
    };
    Ok(NamespaceScan { namespaces: of_clients.filter_map(with_identity).collect(), unknown })
}

/// Returns the inode of a process's namespace; `None` if the agent may not see the process. Then it sees no other
/// process of that namespace either, or it is in it.
fn inode_if_visible(inode: io::Result<u64>) -> io::Result<Option<u64>> {
    match inode {
        Ok(inode) => Ok(Some(inode)),
        Err(error) if is_process_ended(&error) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_that_cannot_be_read_now_is_not_taken_for_a_hidden_one() {
        let read = |errno| inode_if_visible(Err(io::Error::from_raw_os_error(errno)));
        assert_eq!(inode_if_visible(Ok(7)).expect("readable"), Some(7));
        assert_eq!(read(libc::EACCES).expect("hidden"), None);
        assert_eq!(read(libc::ENOENT).expect("hidden"), None);
        assert!(read(libc::ENOMEM).is_err());
    }
}
