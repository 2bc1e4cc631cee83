//! Shell: the part of the loop that runs once a second: metrics, not-ready reasons, the node's addresses, entries of
//! closed listeners and of pods that are gone.

use std::time::{Duration, Instant};

use common::link::error_chain;
use datapath::abi;
use tracing::{info, warn};

use super::Agent;
use crate::{
    clock::monotonic_ns,
    kernel::{
        listener_counts,
        map_op::to_v6_octets,
        maps::{KernelMapError, KernelMaps},
        takeover_stage::ProgramTakeoverStage,
    },
    pods::namespace,
};

/// Period in which the node's own addresses are read.
const ADDRESS_PERIOD: Duration = Duration::from_secs(10);
/// Period in which entries of closed listeners are deleted.
const LISTENER_CLEANUP_PERIOD: Duration = Duration::from_secs(60);
/// Not-ready reason once a listener did not fit in the map, until [`LISTENER_CLEANUP_PERIOD`] passes without another
/// one.
const LISTEN_FULL_REASON: &str =
    "map LISTEN is full: listeners that opened within the last minute were not seen";
/// Time after the first table at which namespaces that no pod claims are forgotten: they belong to pods that ended
/// while no agent ran.
const ORPHANS_AFTER: Duration = Duration::from_secs(10);

/// Times of the rarer parts of the housekeeping.
#[derive(Debug)]
pub(super) struct HousekeepingTimes {
    /// Time at which the node's own addresses are read next.
    next_addresses: Instant,
    /// Time at which entries of closed listeners are deleted next.
    next_listener_cleanup: Instant,
    /// The kernel's count of listeners that did not fit in the map, when closed entries were last deleted.
    listen_full_seen: u64,
}

impl HousekeepingTimes {
    /// Starts with all parts due.
    pub(super) fn new(now: Instant, maps: &KernelMaps) -> Self {
        let listen_full_seen = maps.control_word(abi::CONTROL_LISTEN_FULL);
        Self { next_addresses: now, next_listener_cleanup: now, listen_full_seen }
    }
}

impl Agent {
    /// Updates metrics and not-ready reasons, and deletes map entries that are no longer needed.
    pub(super) fn housekeep(&mut self, now: Instant) {
        let (maps, metrics) = (&self.handles.maps, &self.handles.metrics);
        let gauge = |word| i64::try_from(maps.control_word(word)).unwrap_or(i64::MAX);
        let pods = self.pods.counts();
        metrics.set_pod_counts(pods.by_state());
        metrics.set_pod_counts([("standby", self.standby.frozen_count())]);
        self.handles.not_ready.set("pods", pods.not_ready_reason());
        metrics.events_dropped.set(gauge(abi::CONTROL_DROPPED));
        metrics.untracked.set(gauge(abi::CONTROL_UNTRACKED));
        metrics.fallbacks.set(gauge(abi::CONTROL_FALLBACK));
        metrics.unanswered.set(gauge(abi::CONTROL_UNANSWERED));
        metrics.listeners_beyond.set(gauge(abi::CONTROL_LISTEN_OVER_QUOTA));
        metrics.listeners_unseen.set(gauge(abi::CONTROL_LISTEN_FULL));
        // Only those since the last clean-up count: it may have made room for others.
        let unseen = maps
            .control_word(abi::CONTROL_LISTEN_FULL)
            .wrapping_sub(self.housekeeping.listen_full_seen);
        self.handles
            .not_ready
            .set("listeners", (unseen > 0).then(|| LISTEN_FULL_REASON.to_owned()));
        let reason = self
            .routes
            .first_table_at()
            .is_none()
            .then(|| "no table from the controller yet".to_owned());
        self.handles.not_ready.set("routes", reason);
        self.handles.not_ready.set("clusterip", self.routes.unknown_services_reason());
        // A failed or partial plan is tried again once a second.
        self.routes.retry_unfinished();
        self.handles.service_events.log_left_out();
        self.update_node_addresses(now);
        self.delete_closed_listeners_if_due(now);
        self.update_route_metrics();
        let orphans_due =
            self.routes.first_table_at().is_some_and(|at| now.duration_since(at) >= ORPHANS_AFTER);
        if orphans_due {
            self.release_orphans();
        }
        // Before `ORPHANS_AFTER`, a pod of the previous version may not be registered here yet.
        if self.handles.maps.fold_previous(orphans_due) {
            self.advance_stage(ProgramTakeoverStage::OldIdle);
        }
    }

    /// Writes the node's own addresses to the kernel: a client with one of them may be the kubelet.
    fn update_node_addresses(&mut self, now: Instant) {
        if now < self.housekeeping.next_addresses {
            return;
        }
        self.housekeeping.next_addresses = now + ADDRESS_PERIOD;
        let addresses = match namespace::own_addresses() {
            Ok(addresses) => addresses,
            Err(error) => return warn!(%error, "cannot read the node's own addresses"),
        };
        self.routes.set_node_addresses(addresses.iter().copied().collect());
        let addresses = addresses.into_iter().map(to_v6_octets).collect();
        let failure =
            self.handles.maps.set_node_addresses(&addresses).err().map(|error| error_chain(&error));
        if let Some(error) = &failure {
            warn!(error, "cannot write the node's own addresses to the map");
        }
        self.handles.not_ready.set("addresses", failure);
    }

    /// Deletes entries of closed listeners of all pods, as the map's capacity is bounded.
    fn delete_closed_listeners_if_due(&mut self, now: Instant) {
        if now < self.housekeeping.next_listener_cleanup {
            return;
        }
        self.housekeeping.next_listener_cleanup = now + LISTENER_CLEANUP_PERIOD;
        self.housekeeping.listen_full_seen =
            self.handles.maps.control_word(abi::CONTROL_LISTEN_FULL);
        if let Err(error) = self.delete_closed_listeners() {
            warn!(error = %error_chain(&error), "cannot forget closed listeners");
        }
    }

    fn delete_closed_listeners(&mut self) -> Result<(), KernelMapError> {
        let entries = self.handles.maps.listen_entries()?;
        let limit = [("any", abi::LISTEN_MAX as usize)];
        self.handles.metrics.set_map_use(abi::maps::LISTEN, entries.len(), limit);
        for (key, listen) in entries {
            let Ok(port) = u16::try_from(key.port) else { continue };
            let uid = self.registry.uid_by_cookie(key.netns_cookie);
            let pod = uid.and_then(|uid| self.registry.get(uid));
            let is_serving = pod.is_some_and(|it| it.ports.is_watched(port));
            if listener_counts::is_deletable(&listen, is_serving, monotonic_ns()) {
                self.handles.maps.delete_listener(key.netns_cookie, port)?;
            }
        }
        // After the deletions: the counts bound the listeners that a namespace may open from now on.
        self.handles.maps.write_listener_counts()
    }

    /// Advances the takeover from another version's eBPF programs, if `reached` is its next stage.
    pub(super) fn advance_stage(&self, reached: ProgramTakeoverStage) {
        self.handles.takeover_stage.send_if_modified(|current| {
            let next = current.advance(reached);
            let is_later = *current < next;
            *current = next;
            is_later
        });
    }

    /// Forgets namespaces of pods that ended while no agent ran.
    fn release_orphans(&mut self) {
        for cookie in self.registry.orphan_cookies(&self.pods.namespace_cookies()) {
            info!(cookie, "namespace without a pod forgotten");
            self.release_slot(cookie);
        }
    }
}
