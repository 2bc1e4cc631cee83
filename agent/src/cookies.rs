//! Shell: cookies of network namespaces, also where the kernel does not tell them to user space (before 5.14).
//!
//! There a process of ours listens for a moment inside the namespace and below the pods' cgroup, and the kernel half, which
//! always learns them, notes whose listener that is.

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

use common::abi::{Listen, ListenKey};

use crate::{clock::monotonic_ns, lock, maps::Maps, programs::Places, sys};

/// Learns cookies. Where the kernel does not tell them, the programs must be in force.
#[derive(Clone, Debug)]
pub struct Cookies {
    /// Cgroup of the pods.
    pods: PathBuf,
    /// Where the programs' maps are.
    pins: PathBuf,
    /// By inode, those that the kernel did not tell. Inodes are used again, so there are never many.
    learnt: Arc<Mutex<BTreeMap<u64, u64>>>,
}

impl Cookies {
    /// By the programs of these places.
    pub fn new(places: &Places) -> Self {
        Self { pods: places.pods.clone(), pins: places.pins(), learnt: Arc::default() }
    }

    /// Of the namespace behind `netns`, which `socket` is in.
    pub fn of(&self, socket: impl AsFd, netns: BorrowedFd<'_>) -> io::Result<u64> {
        match sys::netns_cookie(socket) {
            Err(error) if is_untold(&error) => {
                let cookie = self.by_listener(netns)?;
                lock(&self.learnt).insert(inode(netns)?, cookie);
                Ok(cookie)
            }
            told => told,
        }
    }

    /// Whether the namespace behind `netns`, which `socket` is in, has this cookie. Cheap enough for every second.
    ///
    /// Where the kernel does not tell, its inode has to be the one for which the cookie was learnt. A later namespace may
    /// have that too, until [`of`](Self::of) is asked: ask that whenever another one may have come.
    pub fn is(&self, cookie: u64, socket: impl AsFd, netns: BorrowedFd<'_>) -> io::Result<bool> {
        match sys::netns_cookie(socket) {
            Err(error) if is_untold(&error) => {
                Ok(lock(&self.learnt).get(&inode(netns)?) == Some(&cookie))
            }
            told => Ok(told? == cookie),
        }
    }

    /// The same, as on kernels that do not tell it. Takes milliseconds.
    pub fn by_listener(&self, netns: BorrowedFd<'_>) -> io::Result<u64> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let cgroup = self.pods.join(format!("rouse-cookie-{}-{number}", std::process::id()));
        fs::create_dir_all(&cgroup)?;
        let found = self.listen_in(&cgroup, netns);
        let removed = fs::remove_dir(&cgroup);
        found.and_then(|cookie| removed.map(|()| cookie))
    }

    fn listen_in(&self, cgroup: &Path, netns: BorrowedFd<'_>) -> io::Result<u64> {
        let mut maps = Maps::open(&self.pins).map_err(io::Error::other)?;
        let began_ns = monotonic_ns();
        let canary = sys::Canary::start(cgroup, Some(netns))?;
        let report = canary.report();
        if report.enter_errno != 0 {
            return Err(io::Error::from_raw_os_error(report.enter_errno));
        }
        let listeners = maps.listeners().map_err(io::Error::other)?;
        drop(canary);
        let [cookie] = listening(&listeners, report.port, began_ns)[..] else {
            // Another process has just begun to listen at the same port of its own namespace.
            return Err(io::ErrorKind::WouldBlock.into());
        };
        maps.forget_listener(cookie, report.port).map_err(io::Error::other)?;
        Ok(cookie)
    }
}

fn is_untold(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOPROTOOPT)
}

fn inode(netns: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(nix::sys::stat::fstat(netns)?.st_ino)
}

/// Namespaces where somebody has begun to listen on loopback at this port since then.
pub(crate) fn listening(
    listeners: &BTreeMap<ListenKey, Listen>,
    port: u16,
    since_ns: u64,
) -> Vec<u64> {
    let is_it = |(key, listen): &(&ListenKey, &Listen)| {
        key.port == u32::from(port) && listen.loopback > 0 && listen.since_ns >= since_ns
    };
    listeners.iter().filter(is_it).map(|(key, _)| key.cookie).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_known_by_its_port_its_time_and_that_it_is_on_loopback() {
        let key = |cookie, port| ListenKey { cookie, port, reserved: 0 };
        let loopback = |since_ns| Listen { loopback: 1, since_ns, ..Listen::default() };
        let listeners = BTreeMap::from([
            (key(1, 4000), loopback(10)),
            (key(2, 4000), loopback(9)),
            (key(3, 4001), loopback(11)),
            (key(4, 4000), Listen { open: 1, since_ns: 12, ..Listen::default() }),
        ]);
        assert_eq!(listening(&listeners, 4000, 10), [1]);
        assert_eq!(listening(&listeners, 4000, 9), [1, 2]);
        assert_eq!(listening(&listeners, 4002, 9), [0; 0]);
    }
}
