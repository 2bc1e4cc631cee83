//! Shell: connections of this node's pods that the eBPF programs report as idle, for agents of the clients' nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use common::link::error_chain;
use datapath::abi::IdleEvent;
use tokio::{sync::watch, time::timeout};
use tracing::warn;

use super::idle_positions::{IdlePositions, IdleUpdates};
use crate::{
    kernel::maps::{KernelMapError, KernelMaps, idle_events::IdleEventFlags},
    lock::lock,
};

/// Positions of the connections of watched pods, and the pods' flags in the kernel. Cheap to clone.
///
/// A pod is watched while agents ask for its connections. Other pods send no events.
#[derive(Clone, Debug)]
pub struct IdleConnections {
    /// Flags by which the programs send events. Written while `watched` is locked, so that they follow it.
    flags: Arc<IdleEventFlags>,
    watched: Arc<Mutex<WatchedPods>>,
}

#[derive(Debug, Default)]
struct WatchedPods {
    positions: IdlePositions,
    /// Wakes the queries of each watched pod.
    changes: BTreeMap<u64, watch::Sender<()>>,
}

impl IdleConnections {
    /// Opens the flags of these maps. No pod is watched yet.
    pub(crate) fn open(maps: &KernelMaps) -> Result<Self, KernelMapError> {
        Ok(Self { flags: Arc::new(maps.idle_event_flags()?), watched: Arc::default() })
    }

    /// Records events of the programs, and wakes the queries that wait for them.
    pub(crate) fn record(&self, events: &[IdleEvent]) {
        if events.is_empty() {
            return;
        }
        let mut watched = lock(&self.watched);
        let pods: BTreeSet<u64> =
            events.iter().filter_map(|event| watched.positions.record(event)).collect();
        let changes = pods.iter().filter_map(|cookie| watched.changes.get(cookie));
        changes.for_each(|changed| changed.send_replace(()));
    }

    /// Ends the events of pods for whose connections no agent has asked lately.
    pub(crate) fn remove_unwatched(&self, now: Instant) {
        let mut watched = lock(&self.watched);
        for cookie in watched.positions.remove_unwatched(now) {
            watched.changes.remove(&cookie);
            if let Err(error) = self.flags.set(cookie, false) {
                warn!(cookie, error = %error_chain(&error), "cannot end events of a pod");
            }
        }
    }

    /// Returns the positions of these clients' connections to a pod that came after the event with the number `after`.
    /// Without any it waits for one, at most for `wait`. The pod is watched from now on.
    ///
    /// `None` if the pod in the namespace with this cookie is not registered, so that no events come.
    pub(super) async fn next_updates(
        &self,
        cookie: u64,
        after: u64,
        clients: &BTreeSet<SocketAddr>,
        wait: Duration,
    ) -> Result<Option<IdleUpdates>, KernelMapError> {
        let Some(mut changes) = self.watch(cookie)? else { return Ok(None) };
        let updates = |after| lock(&self.watched).positions.updates(cookie, after, clients);
        let mut found = updates(after);
        let wait_for_some = async {
            // An event after the last reading has woken this already. An error means that the pod is no longer watched.
            while found.positions.is_empty() && changes.changed().await.is_ok() {
                // Only what has come since: events of other clients may be many.
                found = updates(found.newest);
            }
        };
        // Once the time is over, `found` has what came until the last event.
        let _is_over = timeout(wait, wait_for_some).await;
        Ok(Some(found))
    }

    /// Lets a pod send events. Returns the receiver that they wake.
    fn watch(&self, cookie: u64) -> Result<Option<watch::Receiver<()>>, KernelMapError> {
        let mut watched = lock(&self.watched);
        if !self.flags.set(cookie, true)? {
            return Ok(None);
        }
        watched.positions.watch(Instant::now(), cookie);
        let changes = watched.changes.entry(cookie).or_insert_with(|| watch::channel(()).0);
        Ok(Some(changes.subscribe()))
    }
}
