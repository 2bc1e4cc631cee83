//! Shell: what the kernel half remembers of the connections of a pod.

use std::{
    collections::BTreeSet,
    io,
    net::SocketAddr,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
    sync::Arc,
};

use common::abi::{Conn, maps};

use super::{Error, pinned};
use crate::sockdiag::SockDiag;

/// The storages of the programs of this version, and of those of the version before that still count. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Conns(Arc<Vec<OwnedFd>>);

impl Conns {
    /// Opens those that are pinned in the folders.
    pub(super) fn open<'a>(pins: impl IntoIterator<Item = &'a Path>) -> Result<Self, Error> {
        let opened = pins.into_iter().map(|pins| pinned(pins, maps::CONNS));
        opened.collect::<Result<_, _>>().map(|opened| Self(Arc::new(opened)))
    }

    /// The clients, as the namespace that `diag` is in sees them, whose connection to its pod has a message under way.
    /// What does not speak HTTP/1 is not among them, because nobody knows.
    pub fn busy(&self, diag: &SockDiag) -> io::Result<BTreeSet<SocketAddr>> {
        let mut busy = BTreeSet::new();
        for storage in self.0.iter() {
            let stored = diag.stored(storage.as_fd())?.into_iter();
            let open = stored.filter(|(_, value)| Conn::read(value).is_some_and(|it| it.is_open()));
            busy.extend(open.map(|(peer, _)| peer));
        }
        Ok(busy)
    }
}
