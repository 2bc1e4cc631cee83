//! Shell: cookies of network namespaces, also on kernels that do not give them to user space (before 5.14).
//!
//! There a process of the agent listens for a moment inside the namespace and below the pods' cgroup. The eBPF
//! programs, which always know the cookie, store the listener under it.

use std::{
    collections::BTreeMap,
    fs, io,
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use datapath::abi::{ListenKey, ListenValue};

use crate::{
    clock::monotonic_ns,
    kernel::{maps::KernelMaps, sys},
    lock::lock,
    paths::AgentPaths,
};

/// Source of cookies. On kernels before 5.14 the eBPF programs must be in force.
#[derive(Clone, Debug)]
pub struct NetnsCookies {
    /// Cgroup that holds the pods' cgroups.
    pods: PathBuf,
    /// Folder of the programs' pinned maps.
    pins: PathBuf,
    /// Cookies that the kernel did not give, by the namespace's inode. Inodes are reused, so there are never many.
    known: Arc<Mutex<BTreeMap<u64, u64>>>,
}

impl NetnsCookies {
    /// Uses the cgroup and the pinned maps of these places.
    pub fn new(paths: &AgentPaths) -> Self {
        Self { pods: paths.pods.clone(), pins: paths.pins(), known: Arc::default() }
    }

    /// Returns the cookie of the namespace behind `netns`, which `socket` is in.
    pub fn cookie_of(&self, socket: impl AsFd, netns: BorrowedFd<'_>) -> io::Result<u64> {
        match sys::netns_cookie(socket) {
            Err(error) if is_unsupported(&error) => {
                let cookie = self.find_by_listener(netns)?;
                lock(&self.known).insert(netns_inode(netns)?, cookie);
                Ok(cookie)
            }
            result => result,
        }
    }

    /// Returns true if the namespace behind `netns`, which `socket` is in, has this cookie. Cheap enough for every
    /// second.
    ///
    /// On kernels before 5.14, the namespace's inode must be the one for which the cookie was found. A later namespace
    /// may have the same inode, until [`cookie_of`](Self::cookie_of) is called. So call that when the namespace may be
    /// another one.
    pub fn has_cookie(
        &self,
        cookie: u64,
        socket: impl AsFd,
        netns: BorrowedFd<'_>,
    ) -> io::Result<bool> {
        match sys::netns_cookie(socket) {
            Err(error) if is_unsupported(&error) => {
                Ok(lock(&self.known).get(&netns_inode(netns)?) == Some(&cookie))
            }
            found => Ok(found? == cookie),
        }
    }

    /// Returns the namespace's cookie in the way of kernels before 5.14: by a listener. Takes milliseconds.
    pub fn find_by_listener(&self, netns: BorrowedFd<'_>) -> io::Result<u64> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let cgroup = self.pods.join(format!("rouse-cookie-{}-{number}", std::process::id()));
        fs::create_dir_all(&cgroup)?;
        let result = self.listen_and_find(&cgroup, netns);
        // Removed also after a failure, or the folders of failed calls would add up.
        let removed = fs::remove_dir(&cgroup);
        result.and_then(|cookie| removed.map(|()| cookie))
    }

    fn listen_and_find(&self, cgroup: &Path, netns: BorrowedFd<'_>) -> io::Result<u64> {
        let mut maps = KernelMaps::open(&self.pins).map_err(io::Error::other)?;
        // The listener is recognized by its port, its age and loopback: the time is read before it can exist.
        let began_ns = monotonic_ns();
        let process = sys::SelfTestProcess::start(cgroup, Some(netns))?;
        let report = process.report();
        if report.enter_errno != 0 {
            return Err(io::Error::from_raw_os_error(report.enter_errno));
        }
        let listeners = maps.listen_entries().map_err(io::Error::other)?;
        drop(process);
        let [cookie] = listening_namespaces(&listeners, report.port, began_ns)[..] else {
            // Another process has just begun to listen on the same port of its own namespace: a later call succeeds.
            return Err(io::ErrorKind::WouldBlock.into());
        };
        maps.delete_listener(cookie, report.port).map_err(io::Error::other)?;
        Ok(cookie)
    }
}

/// Returns the cookie of the network namespace that a socket is in; `None` if the kernel does not give it to user space
/// (before 5.14).
pub(crate) fn cookie_of_socket(socket: impl AsFd) -> io::Result<Option<u64>> {
    match sys::netns_cookie(socket) {
        Ok(cookie) => Ok(Some(cookie)),
        Err(error) if is_unsupported(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_unsupported(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOPROTOOPT)
}

fn netns_inode(netns: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(nix::sys::stat::fstat(netns)?.st_ino)
}

/// Returns the namespaces in which a listener on loopback at this port has opened since `since_ns`.
pub(crate) fn listening_namespaces(
    listeners: &BTreeMap<ListenKey, ListenValue>,
    port: u16,
    since_ns: u64,
) -> Vec<u64> {
    let is_it = |(key, listen): &(&ListenKey, &ListenValue)| {
        key.port == u32::from(port) && listen.loopback > 0 && listen.listening_since_ns >= since_ns
    };
    listeners.iter().filter(is_it).map(|(key, _)| key.netns_cookie).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_known_by_its_port_its_time_and_that_it_is_on_loopback() {
        let key = |cookie, port| ListenKey { netns_cookie: cookie, port, reserved: 0 };
        let loopback = |listening_since_ns| ListenValue {
            loopback: 1,
            listening_since_ns,
            ..ListenValue::default()
        };
        let listeners = BTreeMap::from([
            (key(1, 4000), loopback(10)),
            (key(2, 4000), loopback(9)),
            (key(3, 4001), loopback(11)),
            (
                key(4, 4000),
                ListenValue { reachable: 1, listening_since_ns: 12, ..ListenValue::default() },
            ),
        ]);
        assert_eq!(listening_namespaces(&listeners, 4000, 10), [1]);
        assert_eq!(listening_namespaces(&listeners, 4000, 9), [1, 2]);
        assert_eq!(listening_namespaces(&listeners, 4002, 9), [0; 0]);
    }
}
