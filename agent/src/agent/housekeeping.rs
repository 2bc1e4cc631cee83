//! Shell: the part of the loop that runs once a second: metrics, not-ready reasons, the node's addresses, entries of
//! closed listeners and of pods that are gone.

use std::time::{Duration, Instant};

use common::link::chain;
use datapath::abi;
use tracing::{info, warn};

use super::Agent;
use crate::{
    clock::monotonic_ns, incompatible::Incompatibility, listener_counts, maps, plan::to_v6_octets,
    pods::namespace, program_supervisor::ProgramTakeoverStage,
};

/// Period in which the node's own addresses are read.
const ADDRESS_PERIOD: Duration = Duration::from_secs(10);
/// Period in which entries of closed listeners are deleted.
const LISTENER_CLEANUP_PERIOD: Duration = Duration::from_secs(60);
/// Not-ready reason once the kernel had no room for a listener, until [`LISTENER_CLEANUP_PERIOD`] passes without
/// another one.
const LISTEN_FULL_REASON: &str =
    "map LISTEN is full: listeners that opened within the last minute were not seen";
/// Time after the first table at which namespaces that no pod claims are forgotten: they belong to pods that ended
/// while no agent ran.
const ORPHANS_AFTER: Duration = Duration::from_secs(10);

impl Agent {
    pub(super) fn housekeep(&mut self, now: Instant) {
        let (maps, metrics) = (&self.handles.maps, &self.handles.metrics);
        let gauge = |word| i64::try_from(maps.control_word(word)).unwrap_or(i64::MAX);
        let pods = self.pods.counts();
        metrics.set_pod_counts(pods);
        let crowded = (pods.crowded > 0)
            .then(|| format!("{} without room: {}", pods.crowded, Incompatibility::Crowded));
        self.handles.not_ready.set("pods", crowded);
        metrics.events_dropped.set(gauge(abi::CONTROL_DROPPED));
        metrics.untracked.set(gauge(abi::CONTROL_UNTRACKED));
        metrics.fallbacks.set(gauge(abi::CONTROL_FALLBACK));
        metrics.unanswered.set(gauge(abi::CONTROL_UNANSWERED));
        metrics.listeners_beyond.set(gauge(abi::CONTROL_LISTEN_BEYOND));
        metrics.listeners_unseen.set(gauge(abi::CONTROL_LISTEN_FULL));
        let unseen =
            maps.control_word(abi::CONTROL_LISTEN_FULL).wrapping_sub(self.listen_full_seen);
        self.handles
            .not_ready
            .set("listeners", (unseen > 0).then(|| LISTEN_FULL_REASON.to_owned()));
        let trouble =
            self.first_table_at.is_none().then(|| "no table from the controller yet".to_owned());
        self.handles.not_ready.set("routes", trouble);
        // A failed or partial plan is tried again once a second.
        self.plan_dirty |= self.maps_inconsistent || self.planner.has_due_work();
        self.update_node_addresses(now);
        self.delete_closed_listeners_if_due(now);
        let claimed = self.first_table_at.is_some_and(|at| now.duration_since(at) >= ORPHANS_AFTER);
        if claimed {
            self.release_orphans();
        }
        // Before that time, a pod of the previous version may just not be registered here yet.
        if self.handles.maps.fold_previous(claimed) && self.first_table_at.is_some() {
            self.advance_stage(ProgramTakeoverStage::OldIdle);
        }
    }

    /// Writes the node's own addresses to the kernel: a client with one of them may be the kubelet.
    fn update_node_addresses(&mut self, now: Instant) {
        if now < self.next_addresses {
            return;
        }
        self.next_addresses = now + ADDRESS_PERIOD;
        let own = match namespace::own_addresses() {
            Ok(own) => own.into_iter().map(to_v6_octets).collect(),
            Err(error) => return warn!(%error, "cannot read the node's own addresses"),
        };
        let untold = self.handles.maps.set_node_addresses(&own).err().map(|error| chain(&error));
        if let Some(error) = &untold {
            warn!(error, "cannot tell the kernel the node's own addresses");
        }
        self.handles.not_ready.set("addresses", untold);
    }

    /// Deletes entries of closed listeners of all pods, as the map's room is bounded.
    fn delete_closed_listeners_if_due(&mut self, now: Instant) {
        if now < self.next_listeners {
            return;
        }
        self.next_listeners = now + LISTENER_CLEANUP_PERIOD;
        self.listen_full_seen = self.handles.maps.control_word(abi::CONTROL_LISTEN_FULL);
        if let Err(error) = self.delete_closed_listeners() {
            warn!(error = %chain(&error), "cannot forget closed listeners");
        }
    }

    fn delete_closed_listeners(&mut self) -> Result<(), maps::KernelMapError> {
        for (key, listen) in self.handles.maps.listeners()? {
            let Ok(port) = u16::try_from(key.port) else { continue };
            let pod =
                self.uids_by_cookie.get(&key.cookie).and_then(|uid| self.registered_pods.get(uid));
            let is_serving = pod.is_some_and(|it| it.entry.port == port);
            if listener_counts::is_deletable(&listen, is_serving, monotonic_ns()) {
                self.handles.maps.delete_listener(key.cookie, port)?;
            }
        }
        self.handles.maps.count_listeners()
    }

    /// Advances the takeover from another version's eBPF programs. The stage never decreases.
    pub(super) fn advance_stage(&self, stage: ProgramTakeoverStage) {
        self.handles.takeover_stage.send_if_modified(|now| {
            let further = *now < stage;
            *now = stage.max(*now);
            further
        });
    }

    /// Forgets namespaces of pods that ended while no agent ran.
    fn release_orphans(&mut self) {
        let orphan = |cookie: &u64| !self.uids_by_cookie.contains_key(cookie);
        let orphans: Vec<u64> = self.slots.cookies().filter(orphan).collect();
        for cookie in orphans {
            info!(cookie, "namespace without a pod forgotten");
            self.release_slot(cookie);
        }
    }
}
