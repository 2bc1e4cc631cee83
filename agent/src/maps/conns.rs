//! Shell: what the kernel half remembers of the connections of a pod.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
    sync::Arc,
};

use common::abi::{Conn, InUse, maps};

use super::{Error, pinned};
use crate::sockdiag::{Connection, SockDiag};

/// The storages of the programs of this version, and of those of the version before that still count. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Conns(Arc<Vec<OwnedFd>>);

impl Conns {
    /// Opens those that are pinned in the folders.
    pub(super) fn open<'a>(pins: impl IntoIterator<Item = &'a Path>) -> Result<Self, Error> {
        let opened = pins.into_iter().map(|pins| pinned(pins, maps::CONNS));
        opened.collect::<Result<_, _>>().map(|opened| Self(Arc::new(opened)))
    }

    /// The clients, as the namespace that `diag` is in sees them, each with whether its connection is [in use](Conn::in_use).
    /// Connections whose messages are not followed are left out.
    pub fn in_use(&self, diag: &SockDiag) -> io::Result<BTreeMap<SocketAddr, InUse>> {
        let mut found = BTreeMap::new();
        for storage in self.0.iter() {
            let stored = diag.stored(storage.as_fd())?.into_iter();
            let in_use = |value: &[u8]| Conn::read(value)?.in_use();
            found.extend(stored.filter_map(|(it, value)| Some((it.plain_peer(), in_use(&value)?))));
        }
        Ok(found)
    }

    /// The connections of the namespace that `diag` is in that wait for the end of a request, each with when that
    /// [began](Conn::overdue_since).
    pub fn waiting(&self, diag: &SockDiag) -> io::Result<Vec<(Connection, u64)>> {
        let mut found = Vec::new();
        for storage in self.0.iter() {
            let stored = diag.stored(storage.as_fd())?.into_iter();
            let since = |value: &[u8]| Conn::read(value)?.overdue_since();
            found.extend(stored.filter_map(|(it, value)| Some((it, since(&value)?))));
        }
        Ok(found)
    }

    /// How many connections of the namespace that `diag` is in have [changed their protocol](Conn::is_upgraded).
    pub fn upgraded(&self, diag: &SockDiag) -> io::Result<u64> {
        let mut count = 0;
        for storage in self.0.iter() {
            let stored = diag.stored(storage.as_fd())?.into_iter();
            let is_upgraded = |value: &[u8]| Conn::read(value).is_some_and(|it| it.is_upgraded());
            count += stored.filter(|(_, value)| is_upgraded(value)).count() as u64;
        }
        Ok(count)
    }

    /// All connections of the namespace that `diag` is in which have not closed, each with what this version's programs
    /// remember of it, if anything.
    pub fn all(&self, diag: &SockDiag) -> io::Result<Vec<(Connection, Option<Conn>)>> {
        let Some(storage) = self.0.first() else { return Ok(Vec::new()) };
        let stored = diag.stored_or_not(storage.as_fd())?.into_iter();
        Ok(stored.map(|(it, value)| (it, value.as_deref().and_then(Conn::read))).collect())
    }
}
