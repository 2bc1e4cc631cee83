//! Shell: the stream to the autoscaler: the kernel's totals of each pod.

use std::{collections::BTreeMap, time::Instant};

use common::{
    outbox::Outbox,
    wire::{NamespacedName, UsageKey, UsageSample},
};

use crate::{
    clock::monotonic_ns, kernel::maps::KernelMaps, usage::growth_throttle::GrowthThrottle,
};

/// Reports the running totals of registered pods.
#[derive(Debug, Default)]
pub(crate) struct PodUsageReporter {
    outbox: Outbox<UsageKey, UsageSample>,
    /// Subject under which a row's totals were last reported.
    keys: BTreeMap<u32, UsageKey>,
    /// Number of requests in flight in the last report, by row.
    reported_in_flight: BTreeMap<u32, u64>,
    /// Pods whose growth was reported a moment ago.
    growth_throttle: GrowthThrottle,
}

impl PodUsageReporter {
    /// Returns the outbox that the stream sends from.
    pub(crate) fn outbox(&self) -> Outbox<UsageKey, UsageSample> {
        self.outbox.clone()
    }

    /// Assigns a row to a pod: later reports of the row are of that pod.
    pub(crate) fn assign_slot(
        &mut self,
        slot: u32,
        revision: &NamespacedName,
        uid: &str,
        maps: &KernelMaps,
    ) {
        let key = UsageKey { revision: revision.clone(), pod: Some(uid.to_owned()) };
        if self.keys.get(&slot).is_some_and(|old| *old != key) {
            self.release_slot(slot, maps);
        }
        self.keys.insert(slot, key);
    }

    /// Ends the reports of a row whose pod is gone: sends its last totals, then its removal.
    pub(crate) fn release_slot(&mut self, slot: u32, maps: &KernelMaps) {
        self.reported_in_flight.remove(&slot);
        if let Some(key) = self.keys.remove(&slot) {
            let mut last = read_usage(key.clone(), slot, maps);
            // They end with the pod, and must not ask for another one before the removal is received.
            last.totals.finish_all(last.read_at_ns);
            self.outbox.remove_with_last(key, last);
        }
    }

    /// Reports one row's totals now.
    pub(crate) fn report_slot(&mut self, slot: u32, maps: &KernelMaps) {
        let Some(key) = self.keys.get(&slot) else { return };
        // Read before the totals: a request that begins meanwhile is in the totals, and raises one more event.
        self.reported_in_flight.insert(slot, maps.pod_state(slot).in_flight);
        self.outbox.set(key.clone(), read_usage(key.clone(), slot, maps));
    }

    /// Arms the kernel's growth event for a row at the level of its last report. If the level has already grown,
    /// reports it at once. Returns true if it did.
    pub(crate) fn arm_growth_event(&mut self, slot: u32, maps: &KernelMaps) -> bool {
        let Some(&level) = self.reported_in_flight.get(&slot) else { return false };
        maps.arm_growth_event(slot, level);
        // Armed first: a request that begins after this read raises an event.
        let grew = maps.pod_state(slot).in_flight > level;
        if grew {
            self.report_slot(slot, maps);
        }
        grew
    }

    /// Arms the kernel's growth event for the next request of a row at rest, whatever was reported of it last. Read
    /// its state afterwards: a request may be in flight already.
    pub(crate) fn arm_next_request(&mut self, slot: u32, maps: &KernelMaps) {
        // Otherwise the end of a pause, or the next periodic report, would arm the event at an earlier level.
        self.growth_throttle.end_pause(slot);
        self.reported_in_flight.insert(slot, 0);
        maps.arm_growth_event(slot, 0);
    }

    /// Reports the growth that an event of the kernel states for a row. The row's next event is armed after a pause, by
    /// [`rearm_growth_events`](Self::rearm_growth_events).
    pub(crate) fn handle_growth(&mut self, slot: u32, maps: &KernelMaps) {
        self.report_slot(slot, maps);
        self.growth_throttle.start_pause(Instant::now(), slot);
    }

    /// Returns the time of the next call of [`rearm_growth_events`](Self::rearm_growth_events).
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        self.growth_throttle.next_wake()
    }

    /// Arms the growth events of pods whose pause is over.
    pub(crate) fn rearm_growth_events(&mut self, maps: &KernelMaps) {
        let now = Instant::now();
        for slot in self.growth_throttle.take_due(now) {
            if self.arm_growth_event(slot, maps) {
                self.growth_throttle.start_pause(now, slot);
            }
        }
    }

    /// Reports every row, and arms the growth event of each at the reported level.
    pub(crate) fn report_all(&mut self, maps: &KernelMaps) {
        let slots: Vec<u32> = self.keys.keys().copied().collect();
        for slot in slots {
            self.report_slot(slot, maps);
            self.arm_growth_event(slot, maps);
        }
    }
}

/// Reads the totals of a row as those of this subject.
fn read_usage(key: UsageKey, slot: u32, maps: &KernelMaps) -> UsageSample {
    let responses = maps.responses(slot);
    UsageSample {
        key,
        totals: maps.totals(slot),
        // Read after the totals: each counted request began before this time.
        read_at_ns: monotonic_ns(),
        status: responses.status.to_vec(),
        latency: responses.latency.to_vec(),
        client: None,
    }
}
