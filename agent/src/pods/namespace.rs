//! Shell: facts of a pod's network namespace, read by a thread that enters it.

use std::{
    fs::File,
    io,
    net::IpAddr,
    os::{fd::AsFd as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
    thread,
};

pub use common::thaw_query::POD_SERVER_PORT;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressMessage, AddressScope},
};
use netlink_sys::protocols::NETLINK_ROUTE;
use nix::{
    errno::Errno,
    sched::{CloneFlags, setns},
};

use crate::{
    incompatible::Incompatibility,
    kernel::{netns_cookies::NetnsCookies, sys},
    net::{netfilter, netlink::NetlinkSocket, sockdiag::SockDiag},
    pods::types::{NamespaceFacts, NamespaceListener, NamespaceSockets},
};

/// Error of a query in a network namespace.
#[derive(Debug, thiserror::Error)]
pub enum NamespaceError {
    /// The namespace's process has ended, or may not be inspected.
    #[error("cannot open network namespace {}", path.display())]
    Open {
        /// Path of the namespace.
        path: PathBuf,
        source: io::Error,
    },
    /// The namespace cannot be entered.
    #[error("cannot enter network namespace {}", path.display())]
    Enter {
        /// Path of the namespace.
        path: PathBuf,
        source: io::Error,
    },
    /// A job in the namespace failed.
    #[error("cannot {action} in network namespace {}", path.display())]
    Job {
        /// Path of the namespace.
        path: PathBuf,
        /// Action of the job, such as `list connections`.
        action: &'static str,
        source: io::Error,
    },
}

impl NamespaceError {
    /// Returns true if the namespace's process has ended.
    pub(crate) fn is_process_ended(&self) -> bool {
        match self {
            Self::Open { source, .. } => is_process_ended(source),
            Self::Enter { .. } | Self::Job { .. } => false,
        }
    }
}

/// Returns true if this error of an access to a process's files in `/proc` means that the process has ended. After any
/// other one, such as that of a missing file descriptor, nothing is known of the process.
pub(crate) fn is_process_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(Errno::ESRCH as i32)
}

/// A network namespace, kept alive while this value exists. Drop it after one query: the pod's interfaces stay as long
/// as its namespace.
#[derive(Debug)]
pub struct NetworkNamespace {
    path: PathBuf,
    file: File,
}

impl NetworkNamespace {
    /// Opens the namespace at `path` (`/proc/PID/ns/net` or a bind mount).
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, NamespaceError> {
        let path = path.into();
        match File::open(&path) {
            Ok(file) => Ok(Self { path, file }),
            Err(source) => Err(NamespaceError::Open { path, source }),
        }
    }

    /// Runs `job` on a thread of its own inside the namespace and waits for it. `action` names the job in errors.
    ///
    /// The thread ends with the job and does nothing else, so no other code can run in the wrong namespace by mistake.
    pub fn run_inside<T: Send>(
        &self,
        action: &'static str,
        job: impl FnOnce() -> io::Result<T> + Send,
    ) -> Result<T, NamespaceError> {
        let run = || {
            let enter = |error: nix::Error| NamespaceError::Enter {
                path: self.path.clone(),
                source: error.into(),
            };
            setns(self.file.as_fd(), CloneFlags::CLONE_NEWNET).map_err(enter)?;
            job().map_err(|source| NamespaceError::Job { path: self.path.clone(), action, source })
        };
        thread::scope(|scope| match scope.spawn(run).join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    }

    /// Returns the cookie and addresses of the namespace, and a redirection of its connections.
    pub fn read_facts(&self, cookies: &NetnsCookies) -> Result<NamespaceFacts, NamespaceError> {
        self.run_inside("list addresses", || {
            let netlink = NetlinkSocket::open(NETLINK_ROUTE)?;
            let addresses = list_addresses(&netlink, None)?;
            let cookie = match addresses.is_empty() {
                // Without an address there is nothing to find yet. A listener here would raise an event, and with it
                // another search.
                true => sys::netns_cookie(netlink.socket())?,
                false => cookies.cookie_of(netlink.socket(), self.file.as_fd())?,
            };
            let incompatibility =
                netfilter::has_redirection().then_some(Incompatibility::Redirected);
            Ok(NamespaceFacts { cookie, addresses, incompatibility })
        })
    }

    /// Returns true if the namespace has this cookie.
    pub(crate) fn has_cookie(
        &self,
        cookie: u64,
        cookies: &NetnsCookies,
    ) -> Result<bool, NamespaceError> {
        self.run_inside("read the cookie", || {
            let netlink = NetlinkSocket::open(NETLINK_ROUTE)?;
            cookies.has_cookie(cookie, netlink.socket(), self.file.as_fd())
        })
    }

    /// Returns the cookie of the namespace if rules in it redirect connections, as for a mesh's sidecar; else `None`.
    pub(crate) fn meshed_cookie(
        &self,
        cookies: &NetnsCookies,
    ) -> Result<Option<u64>, NamespaceError> {
        self.run_inside("look for redirections", || {
            if !netfilter::find_redirection()? {
                return Ok(None);
            }
            let netlink = NetlinkSocket::open(NETLINK_ROUTE)?;
            cookies.cookie_of(netlink.socket(), self.file.as_fd()).map(Some)
        })
    }

    /// Returns the listeners of the namespace's processes; `None` if the namespace does not have this cookie.
    pub fn inspect_sockets(
        &self,
        cookie: u64,
        cookies: &NetnsCookies,
    ) -> Result<Option<NamespaceSockets>, NamespaceError> {
        self.run_inside("list listeners", || {
            let netlink = NetlinkSocket::open(NETLINK_ROUTE)?;
            if !cookies.has_cookie(cookie, netlink.socket(), self.file.as_fd())? {
                return Ok(None);
            }
            let all = SockDiag::open()?.listeners()?.into_iter();
            let listeners = all.map(|(at, v6_only)| NamespaceListener { at, v6_only });
            // The pod server's own listener is not the pod's.
            let listeners = listeners.filter(|it| it.at.port() != POD_SERVER_PORT).collect();
            Ok(Some(NamespaceSockets { listeners, has_redirection: netfilter::has_redirection() }))
        })
    }
}

/// Interface on which kube-proxy in mode IPVS has the ClusterIPs of all Services.
const IPVS_INTERFACE: &str = "kube-ipvs0";

/// Returns the global addresses of the namespace that the calling thread is in, without those that kube-proxy has given
/// it for Services.
pub(crate) fn own_addresses() -> io::Result<Vec<IpAddr>> {
    let of_services = index_if_present(nix::net::if_::if_nametoindex(IPVS_INTERFACE))?;
    list_addresses(&NetlinkSocket::open(NETLINK_ROUTE)?, of_services)
}

/// Returns the index of an interface that was looked up by its name; `None` if there is no such interface.
fn index_if_present(index: nix::Result<u32>) -> io::Result<Option<u32>> {
    match index {
        Ok(index) => Ok(Some(index)),
        Err(Errno::ENODEV) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns true if a namespace is mounted at `path`.
pub(crate) fn is_mounted(path: &Path) -> bool {
    nix::sys::statfs::statfs(path)
        .is_ok_and(|filesystem| filesystem.filesystem_type() == nix::sys::statfs::NSFS_MAGIC)
}

/// Returns the inode of the namespace at `path`, which identifies it among others.
pub(crate) fn inode(path: &Path) -> io::Result<u64> {
    Ok(std::fs::metadata(path)?.ino())
}

/// Returns the global addresses of the namespace, IPv4 first, each family in the kernel's order, without those of the
/// interface with index `excluded`.
fn list_addresses(netlink: &NetlinkSocket, excluded: Option<u32>) -> io::Result<Vec<IpAddr>> {
    let mut request = AddressMessage::default();
    request.header.family = AddressFamily::Unspec;
    let mut addresses = Vec::new();
    netlink.dump(RouteNetlinkMessage::GetAddress(request), |response| {
        if let RouteNetlinkMessage::NewAddress(message) = response
            && Some(message.header.index) != excluded
        {
            addresses.extend(global_address(&message));
        }
    })?;
    addresses.sort_by_key(IpAddr::is_ipv6);
    Ok(addresses)
}

fn global_address(message: &AddressMessage) -> Option<IpAddr> {
    let named = |wanted: fn(&AddressAttribute) -> Option<IpAddr>| {
        message.attributes.iter().find_map(wanted)
    };
    // On a point-to-point link `Address` is the peer's address and `Local` the own address.
    let local = named(|it| match it {
        AddressAttribute::Local(ip) => Some(*ip),
        _ => None,
    });
    let plain = named(|it| match it {
        AddressAttribute::Address(ip) => Some(*ip),
        _ => None,
    });
    (message.header.scope == AddressScope::Universe).then_some(local.or(plain)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_some_errors_mean_that_a_process_has_ended() {
        let is_ended = |errno: Errno| {
            let source = io::Error::from(errno);
            NamespaceError::Open { path: PathBuf::new(), source }.is_process_ended()
        };
        assert!(is_ended(Errno::ENOENT) && is_ended(Errno::ESRCH));
        for errno in [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM, Errno::EACCES] {
            assert!(!is_ended(errno), "{errno}");
        }
    }

    #[test]
    fn an_interface_that_cannot_be_looked_up_is_not_taken_for_a_missing_one() {
        assert_eq!(index_if_present(Ok(7)).expect("it is there"), Some(7));
        assert_eq!(index_if_present(Err(Errno::ENODEV)).expect("known"), None);
        let error = index_if_present(Err(Errno::EMFILE)).expect_err("without a socket");
        assert_eq!(error.raw_os_error(), Some(Errno::EMFILE as i32));
    }
}
