//! Shell: the part of the loop that runs once a second: metrics, not-ready reasons, the node's addresses, entries of closed
//! listeners and of pods that are gone.

use std::time::{Duration, Instant};

use common::{abi, link::chain};
use tracing::{info, warn};

use super::Agent;
use crate::{
    clock::monotonic_ns, kernel::Stage, listeners, maps, oddities::Oddity, plan::sixteen,
    pods::namespace,
};

/// Period in which the node's own addresses are read.
const ADDRESSES: Duration = Duration::from_secs(10);
/// Period in which entries of closed listeners are deleted.
const LISTENERS: Duration = Duration::from_secs(60);
/// Not-ready reason once the kernel had no room for a listener, until [`LISTENERS`] passes without another one.
const UNSEEN: &str =
    "map LISTEN is full: listeners that opened within the last minute were not seen";
/// Time after the first table at which namespaces that no pod claims are forgotten: they belong to pods that ended
/// while no agent ran.
const ORPHANS_AFTER: Duration = Duration::from_secs(10);

impl Agent {
    pub(super) fn housekeep(&mut self, now: Instant) {
        let (maps, metrics) = (&self.ends.maps, &self.ends.metrics);
        let gauge = |word| i64::try_from(maps.control(word)).unwrap_or(i64::MAX);
        let pods = self.pods.counts();
        metrics.count(pods);
        let crowded = (pods.crowded > 0)
            .then(|| format!("{} without room: {}", pods.crowded, Oddity::Crowded));
        self.ends.troubles.set("pods", crowded);
        metrics.events_dropped.set(gauge(abi::CONTROL_DROPPED));
        metrics.untracked.set(gauge(abi::CONTROL_UNTRACKED));
        metrics.fallbacks.set(gauge(abi::CONTROL_FALLBACK));
        metrics.unanswered.set(gauge(abi::CONTROL_UNANSWERED));
        metrics.listeners_beyond.set(gauge(abi::CONTROL_LISTEN_BEYOND));
        metrics.listeners_unseen.set(gauge(abi::CONTROL_LISTEN_FULL));
        let unseen = maps.control(abi::CONTROL_LISTEN_FULL).wrapping_sub(self.listeners_unseen);
        self.ends.troubles.set("listeners", (unseen > 0).then(|| UNSEEN.to_owned()));
        let trouble =
            self.first_table.is_none().then(|| "no table from the controller yet".to_owned());
        self.ends.troubles.set("routes", trouble);
        // A failed or partial plan is tried again once a second.
        self.stale |= self.torn || self.planner.is_due();
        self.read_addresses(now);
        self.forget_listeners(now);
        let claimed = self.first_table.is_some_and(|at| now.duration_since(at) >= ORPHANS_AFTER);
        if claimed {
            self.forget_orphans();
        }
        // Before that time, a pod of the previous version may just not be registered here yet.
        if self.ends.maps.settle_old(claimed) && self.first_table.is_some() {
            self.reach_stage(Stage::Counted);
        }
    }

    /// Writes the node's own addresses to the kernel: a client with one of them may be the kubelet.
    fn read_addresses(&mut self, now: Instant) {
        if now < self.next_addresses {
            return;
        }
        self.next_addresses = now + ADDRESSES;
        let own = match namespace::own_addresses() {
            Ok(own) => own.into_iter().map(sixteen).collect(),
            Err(error) => return warn!(%error, "cannot read the node's own addresses"),
        };
        let untold = self.ends.maps.set_node(&own).err().map(|error| chain(&error));
        if let Some(error) = &untold {
            warn!(error, "cannot tell the kernel the node's own addresses");
        }
        self.ends.troubles.set("addresses", untold);
    }

    /// Deletes entries of closed listeners of all pods, as the map's room is bounded.
    fn forget_listeners(&mut self, now: Instant) {
        if now < self.next_listeners {
            return;
        }
        self.next_listeners = now + LISTENERS;
        self.listeners_unseen = self.ends.maps.control(abi::CONTROL_LISTEN_FULL);
        if let Err(error) = self.forget_closed() {
            warn!(error = %chain(&error), "cannot forget closed listeners");
        }
    }

    fn forget_closed(&mut self) -> Result<(), maps::Error> {
        for (key, listen) in self.ends.maps.listeners()? {
            let Ok(port) = u16::try_from(key.port) else { continue };
            let pod = self.uids.get(&key.cookie).and_then(|uid| self.locals.get(uid));
            let is_serving = pod.is_some_and(|it| it.pod.port == port);
            if listeners::is_over(&listen, is_serving, monotonic_ns()) {
                self.ends.maps.forget_listener(key.cookie, port)?;
            }
        }
        self.ends.maps.count_listeners()
    }

    /// Advances the takeover from another version's eBPF programs. The stage never decreases.
    pub(super) fn reach_stage(&self, stage: Stage) {
        self.ends.stage.send_if_modified(|now| {
            let further = *now < stage;
            *now = stage.max(*now);
            further
        });
    }

    /// Forgets namespaces of pods that ended while no agent ran.
    fn forget_orphans(&mut self) {
        let orphan = |cookie: &u64| !self.uids.contains_key(cookie);
        let orphans: Vec<u64> = self.slots.cookies().filter(orphan).collect();
        for cookie in orphans {
            info!(cookie, "namespace without a pod forgotten");
            self.release(cookie);
        }
    }
}
