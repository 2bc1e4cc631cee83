//! Shell: the eBPF programs' storage of the connections of a pod.

use std::{
    collections::{BTreeMap, BTreeSet},
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
    ///
    /// A client may connect from one address and port to several ports of the pod. Then the address has the use of the
    /// connection that is least idle, and is left out if one of them is opaque.
    pub fn in_use(&self, diag: &SockDiag) -> io::Result<BTreeMap<SocketAddr, ConnectionActivity>> {
        let mut activities = BTreeMap::new();
        for storage in self.0.iter() {
            let stored = diag.stored_values(storage.as_fd())?.into_iter();
            let counted = stored.filter_map(|(it, value)| {
                let socket = ServerSocket::read(&value).filter(|it| it.pod_slot != 0)?;
                Some((it.canonical_peer(), socket.activity()))
            });
            merge_activities(&mut activities, counted);
        }
        let known = activities.into_iter();
        Ok(known.filter_map(|(client, activity)| Some((client, activity?))).collect())
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

    /// Returns the cookies of the connections in the namespace of `diag` that this version's programs count. With
    /// `has_desynced`, those are left out on which the programs [may miss requests](ServerSocket::may_miss_requests).
    pub fn counted_sockets(
        &self,
        diag: &SockDiag,
        has_desynced: bool,
    ) -> io::Result<BTreeSet<u64>> {
        // The first storage is this version's. The previous version's programs send their events to no agent.
        let Some(storage) = self.0.first() else { return Ok(BTreeSet::new()) };
        let stored = diag.stored_values(storage.as_fd())?.into_iter();
        let shows_requests =
            |it: &ServerSocket| it.pod_slot != 0 && !(has_desynced && it.may_miss_requests());
        let is_counted =
            |value: &[u8]| ServerSocket::read(value).is_some_and(|it| shows_requests(&it));
        let counted = stored.filter(|(_, value)| is_counted(value));
        Ok(counted.map(|(connection, _)| connection.cookie()).collect())
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

/// Adds the use of connections by their clients' addresses; `None`: it is not known. Of several connections of one
/// address, the use that forbids most counts.
fn merge_activities(
    activities: &mut BTreeMap<SocketAddr, Option<ConnectionActivity>>,
    connections: impl IntoIterator<Item = (SocketAddr, Option<ConnectionActivity>)>,
) {
    for (client, activity) in connections {
        activities
            .entry(client)
            .and_modify(|known| *known = stricter_activity(*known, activity))
            .or_insert(activity);
    }
}

/// Returns the use of two connections that forbids more. A connection of unknown use must not be closed by the use of
/// another one.
fn stricter_activity(
    one: Option<ConnectionActivity>,
    other: Option<ConnectionActivity>,
) -> Option<ConnectionActivity> {
    use ConnectionActivity::{Idle, MessageInFlight, NoRequestInFlight};
    match (one?, other?) {
        (MessageInFlight, _) | (_, MessageInFlight) => Some(MessageInFlight),
        (NoRequestInFlight, _) | (_, NoRequestInFlight) => Some(NoRequestInFlight),
        (Idle, Idle) => Some(Idle),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_connections_from_one_port_to_several_ports_the_busiest_counts() {
        use ConnectionActivity::{Idle, MessageInFlight, NoRequestInFlight};
        let (idle, frame, busy) = (Some(Idle), Some(NoRequestInFlight), Some(MessageInFlight));
        let [one, other] = [4711, 4712].map(|port| SocketAddr::from(([10, 0, 0, 9], port)));
        let in_order = [idle, frame, busy, None];
        for (index, activity) in in_order.into_iter().enumerate() {
            for weaker in in_order.into_iter().take(index + 1) {
                for pair in [[activity, weaker], [weaker, activity]] {
                    let mut all = BTreeMap::from([(other, idle)]);
                    merge_activities(&mut all, pair.map(|it| (one, it)));
                    assert_eq!(all, BTreeMap::from([(one, activity), (other, idle)]));
                }
            }
        }
    }
}
