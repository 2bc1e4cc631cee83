//! Shell: facts about a pod with a standby order that the kernel's maps do not have. They are its cgroup, its sessions,
//! and its open connections that do not count.

use std::{
    collections::{BTreeSet, HashSet},
    fs, io,
    net::SocketAddr,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use common::link::error_chain;
use tokio::{sync::mpsc::Sender, task::spawn_blocking};

use crate::{
    kernel::{cgroup_search::try_subdirectories, maps::connection_storage::ConnectionStorage},
    net::sockdiag::{DiagConnection, SockDiag},
    pods::{
        finder::{FinderCommand, request_cgroup, request_namespace},
        namespace::NetworkNamespace,
        processes::has_sessions,
    },
};

/// Facts about a pod at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StandbyFacts {
    /// Directory of the pod's cgroup.
    pub(crate) cgroup: PathBuf,
    /// True if the pod has processes besides the containers' own, as of `kubectl exec`.
    pub(crate) has_sessions: bool,
    /// Number of connections to listeners of the pod, accepted or not, that the pod's side has not closed and whose
    /// requests send no events. Probes' connections do not count, and on others the programs may miss requests.
    pub(crate) other_connections: u64,
}

/// Reads the facts about a pod whose namespace has this cookie. `has_desynced` is true if the programs have lost the
/// boundaries of requests on any connection of the pod. Returns the reason for which the facts are not known.
pub(crate) async fn read_standby_facts(
    finder: &Sender<FinderCommand>,
    uid: &str,
    cookie: u64,
    conns: ConnectionStorage,
    has_desynced: bool,
) -> Result<StandbyFacts, String> {
    let cgroup = request_cgroup(finder, uid).await;
    let cgroup = cgroup.ok_or_else(|| "its cgroup is not found".to_owned())?;
    let namespace = request_namespace(finder, uid, cookie).await;
    let namespace = namespace.ok_or_else(|| "its network namespace is not found".to_owned())?;
    match spawn_blocking(move || read_facts(cgroup, &namespace, &conns, has_desynced)).await {
        Ok(facts) => facts,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// Reads the facts in the calling thread, which may block on the file system and on netlink.
fn read_facts(
    cgroup: PathBuf,
    namespace: &NetworkNamespace,
    conns: &ConnectionStorage,
    has_desynced: bool,
) -> Result<StandbyFacts, String> {
    let describe_error = |error: io::Error| format!("its processes cannot be read: {error}");
    let has_sessions = has_sessions(&cgroup).map_err(describe_error)?;
    let own_cgroups = cgroup_ids(&cgroup).map_err(describe_error)?;
    let count = || -> io::Result<u64> {
        let diag = SockDiag::open()?;
        // Before the connections are listed: one that opens in between is taken for one that does not count. That only
        // delays the freeze.
        let counted = conns.counted_sockets(&diag, has_desynced)?;
        let ports = diag.listeners()?.into_iter().map(|(at, _)| at.port()).collect();
        let all = diag.sendable_connections()?;
        Ok(count_other_connections(&all, &counted, &ports, &own_cgroups))
    };
    let other_connections = namespace
        .run_inside("list connections", count)
        .map_err(|error| format!("its connections cannot be listed: {}", error_chain(&error)))?;
    Ok(StandbyFacts { cgroup, has_sessions, other_connections })
}

/// Returns the numbers of a cgroup and of those below it, by which the kernel names the cgroup of a socket.
fn cgroup_ids(cgroup: &Path) -> io::Result<BTreeSet<u64>> {
    let mut ids = BTreeSet::from([fs::metadata(cgroup)?.ino()]);
    for child in try_subdirectories(cgroup)? {
        ids.extend(cgroup_ids(&child)?);
    }
    Ok(ids)
}

/// Returns the number of connections to the listening `ports` of a pod that are not `counted`. `all` are the
/// connections of its namespace that can still send.
///
/// Connections between processes of the pod are left out, since both ends are frozen together. Connections to sockets
/// of other programs in the namespace, such as the pod server's, are left out too.
fn count_other_connections(
    all: &[DiagConnection],
    counted: &BTreeSet<u64>,
    ports: &BTreeSet<u16>,
    own_cgroups: &BTreeSet<u64>,
) -> u64 {
    // `None`: the kernel does not tell. Such a socket may be the pod's, and its peer may be outside of the pod.
    let is_own = |it: &DiagConnection| it.cgroup_id.map(|id| own_cgroups.contains(&id));
    let ends = |it: &DiagConnection| (it.canonical_local(), it.canonical_peer());
    let own = all.iter().filter(|it| is_own(it) == Some(true));
    let own_ends: HashSet<(SocketAddr, SocketAddr)> = own.map(ends).collect();
    let is_other = |it: &&DiagConnection| {
        let (local, peer) = ends(it);
        let is_incoming = ports.contains(&local.port()) && is_own(it) != Some(false);
        is_incoming && !counted.contains(&it.cookie()) && !own_ends.contains(&(peer, local))
    };
    all.iter().filter(is_other).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::sockdiag::TcpActivity;

    /// Cgroup of the pod's container.
    const OWN: u64 = 7;
    /// Cgroup of another program.
    const FOREIGN: u64 = 8;

    fn connection(local: &str, peer: &str, cgroup_id: Option<u64>) -> DiagConnection {
        let [local, peer] = [local, peer].map(|at| at.parse().expect("an address"));
        let mut connection = DiagConnection::listed(local, peer, TcpActivity::default());
        connection.cgroup_id = cgroup_id;
        connection
    }

    fn count(all: &[DiagConnection]) -> u64 {
        let (ports, own) = (BTreeSet::from([8080, 8022]), BTreeSet::from([OWN]));
        count_other_connections(all, &BTreeSet::new(), &ports, &own)
    }

    #[test]
    fn an_accepted_connection_counts_unless_the_programs_count_it() {
        let probe = connection("10.0.0.2:8080", "10.0.0.1:40000", Some(OWN));
        assert_eq!(count(std::slice::from_ref(&probe)), 1);
        let (counted, ports) = (BTreeSet::from([probe.cookie()]), BTreeSet::from([8080]));
        let own = BTreeSet::from([OWN]);
        assert_eq!(count_other_connections(&[probe], &counted, &ports, &own), 0);
        let mapped = connection("[::ffff:10.0.0.2]:8080", "[::ffff:10.0.0.1]:40000", Some(OWN));
        assert_eq!(count(&[mapped]), 1);
    }

    #[test]
    fn connections_of_the_pod_to_others_and_to_itself_do_not_delay_its_freeze() {
        let to_a_database = connection("10.0.0.2:40000", "10.0.0.9:5432", Some(OWN));
        let to_the_pod_server = connection("10.0.0.2:8022", "10.0.0.1:40000", Some(FOREIGN));
        let sidecar = connection("127.0.0.1:40000", "127.0.0.1:8080", Some(OWN));
        let behind_sidecar = connection("127.0.0.1:8080", "127.0.0.1:40000", Some(OWN));
        assert_eq!(count(&[to_a_database, to_the_pod_server, sidecar, behind_sidecar]), 0);
    }

    #[test]
    fn a_forwarded_port_delays_the_freeze() {
        let runtime = connection("127.0.0.1:40000", "127.0.0.1:8080", Some(FOREIGN));
        let served = connection("127.0.0.1:8080", "127.0.0.1:40000", Some(OWN));
        assert_eq!(count(&[runtime, served]), 1);
    }

    #[test]
    fn a_socket_whose_cgroup_is_not_known_may_be_a_probe() {
        assert_eq!(count(&[connection("10.0.0.2:8080", "10.0.0.1:40000", None)]), 1);
        let both = [("127.0.0.1:40000", "127.0.0.1:8080"), ("127.0.0.1:8080", "127.0.0.1:40000")];
        assert_eq!(count(&both.map(|(local, peer)| connection(local, peer, None))), 1);
    }

    #[test]
    fn a_pod_has_the_cgroups_of_its_containers() {
        let pod = std::env::temp_dir().join(format!("rouse-cgroup-ids-{}", std::process::id()));
        fs::create_dir_all(pod.join("main/nested")).expect("a folder");
        let ids = cgroup_ids(&pod).expect("readable");
        let inode = |path: &str| fs::metadata(pod.join(path)).expect("it exists").ino();
        assert_eq!(ids, BTreeSet::from(["", "main", "main/nested"].map(inode)));
        fs::remove_dir_all(&pod).expect("removed");
        assert!(cgroup_ids(&pod).is_err(), "not known is not none");
    }
}
