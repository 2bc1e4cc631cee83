//! Shell: the stream to the autoscaler: what the kernel counted, pod by pod.

use std::collections::BTreeMap;

use common::{
    outbox::Outbox,
    wire::{Name, UsageKey, UsageSeen},
};

use crate::{clock::monotonic_ns, maps::Maps};

/// Reports the running totals of registered pods.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    outbox: Outbox<UsageKey, UsageSeen>,
    /// The subject under which a slot's totals were last reported.
    keys: BTreeMap<u32, UsageKey>,
    /// How many requests were in flight there then.
    levels: BTreeMap<u32, u64>,
}

impl Usage {
    /// The box that the stream is fed from.
    pub(crate) fn outbox(&self) -> Outbox<UsageKey, UsageSeen> {
        self.outbox.clone()
    }

    /// From now on this slot counts for this pod.
    pub(crate) fn add(&mut self, slot: u32, revision: &Name, uid: &str) {
        let key = UsageKey { revision: revision.clone(), pod: Some(uid.to_owned()) };
        if let Some(old) = self.keys.insert(slot, key.clone())
            && old != key
        {
            self.outbox.remove(&old);
        }
    }

    /// The slot's pod has gone: says its last totals, then that it is gone.
    pub(crate) fn remove(&mut self, slot: u32, maps: &Maps) {
        self.report(slot, maps);
        self.levels.remove(&slot);
        if let Some(key) = self.keys.remove(&slot) {
            self.outbox.remove(&key);
        }
    }

    /// Reports one slot's totals now.
    pub(crate) fn report(&mut self, slot: u32, maps: &Maps) {
        let Some(key) = self.keys.get(&slot) else { return };
        // Read before the totals: what begins meanwhile is reported, and asked for once more.
        self.levels.insert(slot, maps.state(slot).in_flight);
        let responses = maps.responses(slot);
        let seen = UsageSeen {
            key: key.clone(),
            totals: maps.totals(slot),
            // Read after the totals: no request counts that began later.
            at_ns: monotonic_ns(),
            status: responses.status.to_vec(),
            latency: responses.latency.to_vec(),
        };
        self.outbox.set(key.clone(), seen);
    }

    /// Asks the kernel to tell when more is in flight than was reported of a slot, and reports where that is so already.
    /// Returns whether it did.
    pub(crate) fn follow(&mut self, slot: u32, maps: &Maps) -> bool {
        let Some(&level) = self.levels.get(&slot) else { return false };
        maps.arm(slot, level);
        // Armed first: what begins after this look makes an event.
        let grew = maps.state(slot).in_flight > level;
        if grew {
            self.report(slot, maps);
        }
        grew
    }

    /// Reports every slot, and asks the kernel to tell when more is in flight than that.
    pub(crate) fn report_all(&mut self, maps: &Maps) {
        let slots: Vec<u32> = self.keys.keys().copied().collect();
        for slot in slots {
            self.report(slot, maps);
            self.follow(slot, maps);
        }
    }
}
