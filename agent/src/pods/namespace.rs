//! Shell: what a pod's network namespace says of itself, learnt by a thread that enters it.

use std::{
    fs::File,
    io,
    net::IpAddr,
    os::{fd::AsFd as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
    thread,
};

use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressMessage, AddressScope},
};
use netlink_sys::protocols::NETLINK_ROUTE;
use nix::sched::{CloneFlags, setns};

use crate::{
    cookies::Cookies,
    door, netfilter,
    netlink::Netlink,
    oddities::Oddity,
    pods::{Facts, Listener, Sockets},
    sockdiag::SockDiag,
    sys,
};

/// Why a namespace could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its process has gone, or may not be looked at.
    #[error("cannot open network namespace {}", path.display())]
    Open {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It cannot be entered.
    #[error("cannot enter network namespace {}", path.display())]
    Enter {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It does not answer.
    #[error("cannot ask network namespace {} for its {what}", path.display())]
    Ask {
        /// Where.
        path: PathBuf,
        /// What for.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// A network namespace, kept alive while this exists. Hold it no longer than a question takes: the pod's
/// interfaces stay as long as its namespace.
#[derive(Debug)]
pub struct Namespace {
    path: PathBuf,
    file: File,
}

impl Namespace {
    /// Opens the namespace at `path` (`/proc/PID/ns/net` or a bind mount).
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, Error> {
        let path = path.into();
        match File::open(&path) {
            Ok(file) => Ok(Self { path, file }),
            Err(source) => Err(Error::Open { path, source }),
        }
    }

    /// Runs `job` on a thread of its own inside the namespace and waits for it.
    ///
    /// The thread ends with the job and is never used for anything else, so nothing can run in the wrong
    /// namespace by mistake.
    pub fn within<T: Send>(
        &self,
        what: &'static str,
        job: impl FnOnce() -> io::Result<T> + Send,
    ) -> Result<T, Error> {
        let run = || {
            let enter =
                |error: nix::Error| Error::Enter { path: self.path.clone(), source: error.into() };
            setns(self.file.as_fd(), CloneFlags::CLONE_NEWNET).map_err(enter)?;
            job().map_err(|source| Error::Ask { path: self.path.clone(), what, source })
        };
        thread::scope(|scope| match scope.spawn(run).join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    }

    /// Its cookie and addresses.
    pub fn facts(&self, cookies: &Cookies) -> Result<Facts, Error> {
        self.within("addresses", || {
            let netlink = Netlink::open(NETLINK_ROUTE)?;
            let addresses = addresses(&netlink)?;
            let cookie = match addresses.is_empty() {
                // Before there is something to find, no listener is made: each has the agent look again.
                true => sys::netns_cookie(netlink.socket())?,
                false => cookies.of(netlink.socket(), self.file.as_fd())?,
            };
            let oddity = netfilter::redirects().then_some(Oddity::Redirected);
            Ok(Facts { cookie, addresses, oddity })
        })
    }

    /// Whether it has this cookie.
    pub(crate) fn is(&self, cookie: u64, cookies: &Cookies) -> Result<bool, Error> {
        self.within("cookie", || {
            let netlink = Netlink::open(NETLINK_ROUTE)?;
            cookies.is(cookie, netlink.socket(), self.file.as_fd())
        })
    }

    /// Where its processes listen, if it is still the namespace with this cookie.
    pub fn sockets(&self, cookie: u64, cookies: &Cookies) -> Result<Option<Sockets>, Error> {
        self.within("sockets", || {
            let netlink = Netlink::open(NETLINK_ROUTE)?;
            if !cookies.is(cookie, netlink.socket(), self.file.as_fd())? {
                return Ok(None);
            }
            let all = SockDiag::open()?.listeners()?.into_iter();
            let listeners = all.map(|(at, v6_only)| Listener { at, v6_only });
            // Not our own.
            let listeners = listeners.filter(|it| it.at.port() != door::PORT).collect();
            Ok(Some(Sockets { listeners, redirects: netfilter::redirects() }))
        })
    }
}

/// Global addresses of the namespace that the calling thread is in.
pub(crate) fn own_addresses() -> io::Result<Vec<IpAddr>> {
    addresses(&Netlink::open(NETLINK_ROUTE)?)
}

/// Whether a namespace is mounted at `path`.
pub(crate) fn is_mounted(path: &Path) -> bool {
    nix::sys::statfs::statfs(path)
        .is_ok_and(|found| found.filesystem_type() == nix::sys::statfs::NSFS_MAGIC)
}

/// Identity of the namespace at `path`, to compare two of them.
pub(crate) fn inode(path: &Path) -> io::Result<u64> {
    Ok(std::fs::metadata(path)?.ino())
}

/// Global addresses of the namespace, IPv4 first, each family in the kernel's order.
fn addresses(netlink: &Netlink) -> io::Result<Vec<IpAddr>> {
    let mut question = AddressMessage::default();
    question.header.family = AddressFamily::Unspec;
    let mut found = Vec::new();
    netlink.dump(RouteNetlinkMessage::GetAddress(question), |answer| {
        if let RouteNetlinkMessage::NewAddress(message) = answer {
            found.extend(address(&message));
        }
    })?;
    found.sort_by_key(IpAddr::is_ipv6);
    Ok(found)
}

fn address(message: &AddressMessage) -> Option<IpAddr> {
    let named = |wanted: fn(&AddressAttribute) -> Option<IpAddr>| {
        message.attributes.iter().find_map(wanted)
    };
    // On a point-to-point link `Address` is the other end's and `Local` ours.
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
