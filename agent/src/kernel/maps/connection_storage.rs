//! Shell: the eBPF programs' storage of the connections of a pod.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
    sync::Arc,
};

use datapath::abi::{ConnectionActivity, ServerSocket, maps};

use super::{KernelMapError, open_pinned};
use crate::net::sockdiag::{DiagConnection, SockDiag};

/// Connection storages of this version's programs, and of the previous version's while these still count. Cheap to
/// clone.
#[derive(Clone, Debug, Default)]
pub struct ConnectionStorage(Arc<Vec<OwnedFd>>);

impl ConnectionStorage {
    /// Opens the storages that are pinned in these folders.
    pub(super) fn open<'a>(
        pins: impl IntoIterator<Item = &'a Path>,
    ) -> Result<Self, KernelMapError> {
        let opened = pins.into_iter().map(|pins| open_pinned(pins, maps::CONNS));
        opened.collect::<Result<_, _>>().map(|opened| Self(Arc::new(opened)))
    }

    /// Returns the clients' addresses in the namespace of `diag`, each with the [use](ServerSocket::activity) of its
    /// connection. Opaque connections are left out.
    pub fn in_use(&self, diag: &SockDiag) -> io::Result<BTreeMap<SocketAddr, ConnectionActivity>> {
        let mut activities = BTreeMap::new();
        for storage in self.0.iter() {
            let stored = diag.stored_values(storage.as_fd())?.into_iter();
            let in_use = |value: &[u8]| ServerSocket::read(value)?.activity();
            activities.extend(
                stored.filter_map(|(it, value)| Some((it.canonical_peer(), in_use(&value)?))),
            );
        }
        Ok(activities)
    }

    /// Returns the connections in the namespace of `diag` that wait for the end of a request, each with [the request's
    /// start](ServerSocket::pending_request_started_ns).
    pub fn open_requests(&self, diag: &SockDiag) -> io::Result<Vec<(DiagConnection, u64)>> {
        let mut requests = Vec::new();
        for storage in self.0.iter() {
            let stored = diag.stored_values(storage.as_fd())?.into_iter();
            let since = |value: &[u8]| ServerSocket::read(value)?.pending_request_started_ns();
            requests.extend(stored.filter_map(|(it, value)| Some((it, since(&value)?))));
        }
        Ok(requests)
    }

    /// Returns the number of [upgraded](ServerSocket::is_upgraded) connections in the namespace of `diag`.
    pub fn count_upgraded(&self, diag: &SockDiag) -> io::Result<u64> {
        let mut count = 0;
        for storage in self.0.iter() {
            let stored = diag.stored_values(storage.as_fd())?.into_iter();
            let is_upgraded =
                |value: &[u8]| ServerSocket::read(value).is_some_and(|it| it.is_upgraded());
            count += stored.filter(|(_, value)| is_upgraded(value)).count() as u64;
        }
        Ok(count)
    }

    /// Returns all open connections in the namespace of `diag`, each with the entry that this version's programs have
    /// of it, if any.
    pub fn all_connections(
        &self,
        diag: &SockDiag,
    ) -> io::Result<Vec<(DiagConnection, Option<ServerSocket>)>> {
        // The first storage is this version's: the previous version has gauges of its own.
        let Some(storage) = self.0.first() else { return Ok(Vec::new()) };
        let stored = diag.all_with_stored_values(storage.as_fd())?.into_iter();
        Ok(stored.map(|(it, value)| (it, value.as_deref().and_then(ServerSocket::read))).collect())
    }
}
