//! Pure: order and rate of the writes.
//!
//! A key waits once however often it is added, and is never written twice at the same time. A key added while it is
//! being written is written once more afterwards.
//!
//! Scale has a lane of its own, and little else is written at the same time. An API server has only so many processors,
//! and no backlog of statuses may delay a cold start. EndpointSlices have a lane with a rate limit, since an activator
//! that comes or goes concerns many at once. A failed key waits longer each time, by a share that differs between keys.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use super::write_outcome::WriteOutcome;
use crate::model::{
    cluster_state::UnixMillis,
    object::{ObjectPart, ObjectPartKey, ResourceKind},
};

/// Delay after the first failure.
const FIRST_RETRY_DELAY_MS: u64 = 20;
/// Longest delay after failures.
const MAX_RETRY_DELAY_MS: u64 = 60_000;
/// Delay after a refusal that only a change can end.
const REFUSED_RETRY_DELAY_MS: u64 = 300_000;

/// Time by which the slices begun may be ahead of their rate, in ms.
const SLICE_BURST_MS: u64 = 1000;

/// Lane in which a key waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueLane {
    Scale,
    Slices,
    Other,
}

impl QueueLane {
    fn for_key(key: &ObjectPartKey) -> Self {
        match (key.part, key.resource) {
            (ObjectPart::Scale, _) => Self::Scale,
            (_, ResourceKind::EndpointSlice) => Self::Slices,
            (ObjectPart::Object | ObjectPart::Status | ObjectPart::Resize, _) => Self::Other,
        }
    }
}

/// Need for one more write of a key after the present one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteRepeat {
    NotNeeded,
    /// The key was added again while it was being written.
    Needed,
}

/// Limits of the writes under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteLimits {
    /// Writes of scale at once.
    pub scale: usize,
    /// Other writes at once, while no scale is written.
    pub other: usize,
    /// Other writes at once, while scale is being written.
    pub other_during_scale: usize,
    /// EndpointSlices begun per second, 1 to 1000; the slices of one second may come at once.
    pub slices_per_s: u64,
}

impl Default for WriteLimits {
    /// Returns limits that were measured with 150 cold starts at once, on two processors shared with API server and
    /// etcd.
    ///
    /// With 64 scales and 2 others at a time, 464 were written per second; with 16 and 2, 645; with 16 and none, 792.
    /// With none, all other writes would wait for as long as cold starts come.
    fn default() -> Self {
        Self { scale: 16, other: 32, other_during_scale: 1, slices_per_s: 100 }
    }
}

/// Queue of the keys that wait and of the keys that are being written.
#[derive(Debug, Default)]
pub struct WriteQueue {
    limits: WriteLimits,
    scale: VecDeque<ObjectPartKey>,
    other: VecDeque<ObjectPartKey>,
    slices: VecDeque<ObjectPartKey>,
    /// Time at which the slices begun so far will have used up the rate.
    slices_paid_until: UnixMillis,
    ready: HashSet<ObjectPartKey>,
    /// Keys being written.
    in_progress: HashMap<ObjectPartKey, WriteRepeat>,
    failures: HashMap<ObjectPartKey, u32>,
    delayed: BTreeSet<(UnixMillis, ObjectPartKey)>,
    delayed_until: BTreeMap<ObjectPartKey, UnixMillis>,
}

impl WriteQueue {
    /// Returns an empty queue with these limits.
    pub fn new(limits: WriteLimits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Adds a key, to be written as soon as the limits permit.
    pub fn add(&mut self, key: ObjectPartKey) {
        if let Some(repeat) = self.in_progress.get_mut(&key) {
            *repeat = WriteRepeat::Needed;
            return;
        }
        self.cancel_delay(&key);
        if self.ready.insert(key.clone()) {
            self.lane_queue(QueueLane::for_key(&key)).push_back(key);
        }
    }

    /// Returns the next key to write; it then counts as being written until [`finish`](Self::finish).
    pub fn next(&mut self, now: UnixMillis) -> Option<ObjectPartKey> {
        while let Some((at, key)) = self.delayed.first().cloned() {
            if at > now {
                break;
            }
            self.add(key);
        }
        // A scale that only waits limits the other writes too, so that they do not take its processor time.
        let scaling = self.in_progress.keys().filter(|key| key.part == ObjectPart::Scale).count();
        let is_scaling = scaling > 0 || !self.scale.is_empty();
        let most = if is_scaling { self.limits.other_during_scale } else { usize::MAX };
        let has_capacity = self.in_progress.len() - scaling < most.min(self.limits.other);
        let is_slice_paid = self.slices_paid_until <= now.plus_ms(SLICE_BURST_MS);
        // The order is the priority: scale, then the rest, then slices, which come in large numbers.
        let lanes = [
            (QueueLane::Scale, scaling < self.limits.scale),
            (QueueLane::Other, has_capacity),
            (QueueLane::Slices, has_capacity && is_slice_paid),
        ];
        let next_key = lanes.into_iter().find_map(|(lane, free)| {
            let key = if free { self.lane_queue(lane).pop_front() } else { None };
            key.map(|key| (lane, key))
        });
        let (lane, key) = next_key?;
        if lane == QueueLane::Slices {
            // A virtual clock (GCRA): each slice moves it on by its cost, and it may be ahead by the burst.
            self.slices_paid_until = self.slices_paid_until.max(now).plus_ms(self.slice_cost());
        }
        self.ready.remove(&key);
        self.in_progress.insert(key.clone(), WriteRepeat::NotNeeded);
        Some(key)
    }

    /// Returns a slice's cost to the rate, since nothing of it differed and nothing is written.
    pub fn refund_slice(&mut self, key: &ObjectPartKey) {
        if QueueLane::for_key(key) == QueueLane::Slices {
            self.slices_paid_until =
                UnixMillis(self.slices_paid_until.0.saturating_sub(self.slice_cost()));
        }
    }

    fn slice_cost(&self) -> u64 {
        1000 / self.limits.slices_per_s.clamp(1, 1000)
    }

    /// Ends the write of a key, and schedules the next attempt if `outcome` asks for one.
    pub fn finish(&mut self, key: &ObjectPartKey, outcome: &WriteOutcome, now: UnixMillis) {
        let is_repeated = self.in_progress.remove(key) == Some(WriteRepeat::Needed);
        let wait = match outcome {
            WriteOutcome::Done | WriteOutcome::Abandoned | WriteOutcome::Unsupported(_) => {
                self.failures.remove(key);
                None
            }
            WriteOutcome::Refused(_) => Some(REFUSED_RETRY_DELAY_MS),
            WriteOutcome::RetryAfter(seconds) => Some(u64::from(*seconds) * 1000),
            WriteOutcome::Repeated(ms) => Some(*ms),
            WriteOutcome::Conflict | WriteOutcome::NotFound | WriteOutcome::Retry(_) => {
                Some(self.retry_delay_ms(key))
            }
        };
        // After a failure the delay holds even if the key was added again, or a busy object would be tried all the
        // time.
        if is_repeated
            && matches!(
                outcome,
                WriteOutcome::Done
                    | WriteOutcome::Abandoned
                    | WriteOutcome::Unsupported(_)
                    | WriteOutcome::Refused(_)
            )
        {
            return self.add(key.clone());
        }
        if let Some(wait) = wait {
            let at = now.plus_ms(wait);
            self.delayed.insert((at, key.clone()));
            self.delayed_until.insert(key.clone(), at);
        }
    }

    /// Returns the time at which [`next`](Self::next) may have a new key by time alone, after it had none for `now`.
    pub fn next_at(&self, now: UnixMillis) -> Option<UnixMillis> {
        let later = self.delayed.first().map(|(at, _)| *at);
        let slices = (!self.slices.is_empty())
            .then(|| UnixMillis(self.slices_paid_until.0.saturating_sub(SLICE_BURST_MS)));
        // Slices that the rate already permits wait until a write ends; time alone does not help them.
        later.into_iter().chain(slices.filter(|at| *at > now)).min()
    }

    /// Returns the numbers of keys that are ready, that wait for a time, and that are being written.
    pub fn lengths(&self) -> (usize, usize, usize) {
        (self.ready.len(), self.delayed.len(), self.in_progress.len())
    }

    /// Forgets everything, since another replica is the leader now. All writes under way must have been stopped before:
    /// a key still marked as being written would never be written again.
    pub fn clear(&mut self) {
        *self = Self::new(self.limits);
    }

    fn lane_queue(&mut self, lane: QueueLane) -> &mut VecDeque<ObjectPartKey> {
        match lane {
            QueueLane::Scale => &mut self.scale,
            QueueLane::Slices => &mut self.slices,
            QueueLane::Other => &mut self.other,
        }
    }

    fn cancel_delay(&mut self, key: &ObjectPartKey) {
        if let Some(at) = self.delayed_until.remove(key) {
            self.delayed.remove(&(at, key.clone()));
        }
    }

    /// Returns the delay after a failure: it doubles with each failure, and is between half and all of that. The share
    /// depends on the key and the number of failures, so that keys that failed together do not come back together.
    fn retry_delay_ms(&mut self, key: &ObjectPartKey) -> u64 {
        let failures = self.failures.entry(key.clone()).or_default();
        let delay =
            FIRST_RETRY_DELAY_MS.saturating_mul(1 << (*failures).min(20)).min(MAX_RETRY_DELAY_MS);
        let mut hasher = DefaultHasher::new();
        (key, *failures).hash(&mut hasher);
        *failures += 1;
        delay / 2 + hasher.finish() % (delay / 2 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::object::WriteError;
    use common::wire::NamespacedName;

    const NOW: UnixMillis = UnixMillis(1_000_000);

    fn key(name: &str, part: ObjectPart) -> ObjectPartKey {
        ObjectPartKey::new(ResourceKind::Deployment, part, NamespacedName::new("default", name))
    }

    fn object(name: &str) -> ObjectPartKey {
        key(name, ObjectPart::Object)
    }

    /// Takes all keys that may be written at `now`.
    fn all(queue: &mut WriteQueue, now: UnixMillis) -> Vec<ObjectPartKey> {
        std::iter::from_fn(|| queue.next(now)).collect()
    }

    #[test]
    fn a_key_waits_once_and_is_written_again_when_it_changed_meanwhile() {
        let mut queue = WriteQueue::new(WriteLimits::default());
        queue.add(object("a"));
        queue.add(object("a"));
        assert_eq!(all(&mut queue, NOW), [object("a")]);
        queue.add(object("a"));
        assert_eq!(all(&mut queue, NOW), [], "it is being written");
        queue.finish(&object("a"), &WriteOutcome::Done, NOW);
        assert_eq!(all(&mut queue, NOW), [object("a")]);
        queue.finish(&object("a"), &WriteOutcome::Done, NOW);
        assert_eq!((all(&mut queue, NOW), queue.lengths()), (vec![], (0, 0, 0)));
    }

    #[test]
    fn little_else_is_written_while_scale_is() {
        let mut queue = WriteQueue::new(WriteLimits {
            scale: 1,
            other: 3,
            other_during_scale: 1,
            ..WriteLimits::default()
        });
        let fast = key("a", ObjectPart::Scale);
        let others = ["a", "b", "c", "d"].map(object);
        [&fast].into_iter().chain(&others).for_each(|it| queue.add(it.clone()));
        assert_eq!(all(&mut queue, NOW), [fast.clone(), object("a")]);
        queue.finish(&object("a"), &WriteOutcome::Done, NOW);
        assert_eq!(all(&mut queue, NOW), [object("b")], "one other write goes on");
        queue.finish(&fast, &WriteOutcome::Done, NOW);
        assert_eq!(all(&mut queue, NOW), [object("c"), object("d")]);
    }

    /// docs/operations.md states the same numbers.
    #[test]
    fn sixteen_scales_and_one_else_are_written_at_once_or_thirty_two_without_scale() {
        let mut queue = WriteQueue::new(WriteLimits::default());
        (0..100).for_each(|number| queue.add(object(&number.to_string())));
        assert_eq!(all(&mut queue, NOW).len(), 32);
        let mut queue = WriteQueue::new(WriteLimits::default());
        for number in 0..100 {
            let number = number.to_string();
            queue.add(object(&number));
            queue.add(key(&number, ObjectPart::Scale));
            queue.add(ObjectPartKey::new(
                ResourceKind::EndpointSlice,
                ObjectPart::Object,
                NamespacedName::new("default", number),
            ));
        }
        let busy = all(&mut queue, NOW);
        let scales = busy.iter().filter(|it| it.part == ObjectPart::Scale).count();
        assert_eq!((scales, busy.len()), (16, 17));
        assert_eq!(WriteLimits::default().slices_per_s, 100);
    }

    #[test]
    fn scale_overtakes_everything_and_has_capacity_of_its_own() {
        let mut queue =
            WriteQueue::new(WriteLimits { scale: 1, other: 1, ..WriteLimits::default() });
        let (fast, other) = (key("a", ObjectPart::Scale), key("b", ObjectPart::Scale));
        for it in [object("a"), object("b"), fast.clone(), other.clone()] {
            queue.add(it);
        }
        assert_eq!(all(&mut queue, NOW), [fast.clone(), object("a")]);
        queue.finish(&object("a"), &WriteOutcome::Done, NOW);
        assert_eq!(all(&mut queue, NOW), [object("b")]);
        queue.finish(&fast, &WriteOutcome::Done, NOW);
        assert_eq!(all(&mut queue, NOW), [other]);
    }

    #[test]
    fn slices_keep_a_rate_and_delay_nothing_else() {
        let mut queue = WriteQueue::new(WriteLimits {
            other: 10_000,
            slices_per_s: 100,
            ..WriteLimits::default()
        });
        for it in 0..1000 {
            let name = NamespacedName::new("default", format!("s{it}"));
            queue.add(ObjectPartKey::new(ResourceKind::EndpointSlice, ObjectPart::Object, name));
        }
        queue.add(object("a"));
        let (mut now, mut started) = (NOW, Vec::new());
        assert_eq!(queue.next(now), Some(object("a")), "others go first");
        while started.len() < 1000 {
            started.extend(all(&mut queue, now).iter().map(|_| now));
            now = queue.next_at(now).map_or(now, |at| at.max(now.plus_ms(1)));
        }
        let second = |from: u64| {
            let within = NOW.plus_ms(from)..NOW.plus_ms(from + 1000);
            started.iter().filter(|at| within.contains(at)).count()
        };
        assert!(started.iter().filter(|at| **at == NOW).count() > 90, "a few come at once");
        assert!((95..=105).contains(&second(2000)), "{} in the third second", second(2000));
    }

    #[test]
    fn slices_that_did_not_differ_use_up_no_rate() {
        let mut queue = WriteQueue::new(WriteLimits {
            other: 10_000,
            slices_per_s: 10,
            ..WriteLimits::default()
        });
        let slice = |number: usize| {
            ObjectPartKey::new(
                ResourceKind::EndpointSlice,
                ObjectPart::Object,
                NamespacedName::new("default", number.to_string()),
            )
        };
        (0..1000).for_each(|number| queue.add(slice(number)));
        let mut looked = 0;
        while let Some(key) = queue.next(UnixMillis(0)) {
            looked += 1;
            queue.refund_slice(&key);
            queue.finish(&key, &WriteOutcome::Done, UnixMillis(0));
        }
        assert_eq!(looked, 1000);
    }

    #[test]
    fn slices_without_capacity_are_not_asked_for_again_and_again() {
        let mut queue = WriteQueue::new(WriteLimits { other: 1, ..WriteLimits::default() });
        queue.add(object("a"));
        queue.add(ObjectPartKey::new(
            ResourceKind::EndpointSlice,
            ObjectPart::Object,
            NamespacedName::new("default", "s"),
        ));
        assert_eq!(all(&mut queue, NOW), [object("a")]);
        assert_eq!(queue.next_at(NOW), None, "only the end of that write frees capacity");
    }

    #[test]
    fn failures_wait_longer_each_time_and_never_longer_than_a_minute() {
        let mut queue = WriteQueue::new(WriteLimits::default());
        queue.add(object("a"));
        let (mut now, mut waits) = (NOW, Vec::new());
        for _ in 0..20 {
            assert_eq!(queue.next(now), Some(object("a")));
            queue.finish(&object("a"), &WriteOutcome::Retry(None), now);
            let at = queue.next_at(now).unwrap();
            assert_eq!(queue.next(UnixMillis(at.0 - 1)), None, "too early");
            waits.push(at.0 - now.0);
            now = at;
        }
        assert!((10..=20).contains(&waits[0]), "{waits:?}");
        assert!(waits[..10].windows(2).all(|it| it[0] <= it[1]), "{waits:?}");
        assert!(waits[12..].iter().all(|it| (30_000..=60_000).contains(it)), "{waits:?}");
        assert!(waits[12..].iter().collect::<BTreeSet<_>>().len() > 1, "no jitter: {waits:?}");
        queue.next(now);
        queue.finish(&object("a"), &WriteOutcome::Done, now);
        queue.add(object("a"));
        queue.next(now);
        queue.finish(&object("a"), &WriteOutcome::Retry(None), now);
        assert!(queue.next_at(now).unwrap().0 - now.0 <= 20, "success forgets failures");
    }

    #[test]
    fn keys_that_fail_together_do_not_come_back_together() {
        let mut queue = WriteQueue::new(WriteLimits::default());
        let keys: Vec<ObjectPartKey> = (0..20).map(|it| object(&format!("k{it}"))).collect();
        let mut now = NOW;
        for _ in 0..8 {
            keys.iter().for_each(|key| queue.add(key.clone()));
            for key in all(&mut queue, now) {
                queue.finish(&key, &WriteOutcome::Retry(None), now);
            }
            now = now.plus_ms(1);
        }
        let moments: BTreeSet<UnixMillis> = queue.delayed.iter().map(|(at, _)| *at).collect();
        assert!(moments.len() > 15, "{moments:?}");
    }

    #[test]
    fn an_added_key_ends_its_delay_and_a_refusal_waits_for_a_change() {
        let mut queue = WriteQueue::new(WriteLimits::default());
        let error = WriteError { reason: "Invalid", message: String::new() };
        queue.add(object("a"));
        queue.next(NOW);
        queue.finish(&object("a"), &WriteOutcome::Refused(error), NOW);
        assert_eq!(queue.next_at(NOW), Some(NOW.plus_ms(REFUSED_RETRY_DELAY_MS)));
        queue.add(object("a"));
        assert_eq!(queue.next(NOW), Some(object("a")));
        assert_eq!(queue.next_at(NOW), None);
        queue.finish(&object("a"), &WriteOutcome::RetryAfter(3), NOW);
        assert_eq!(queue.next_at(NOW), Some(NOW.plus_ms(3000)));
    }

    #[test]
    fn what_cannot_be_written_is_tried_again_only_after_a_change() {
        let mut queue = WriteQueue::new(WriteLimits::default());
        let error = WriteError { reason: "ResizeUnsupported", message: String::new() };
        let unsupported = WriteOutcome::Unsupported(error);
        queue.add(object("a"));
        queue.next(NOW);
        queue.finish(&object("a"), &unsupported, NOW);
        assert_eq!((queue.lengths(), queue.next_at(NOW)), ((0, 0, 0), None));
        queue.add(object("a"));
        queue.next(NOW);
        queue.add(object("a"));
        queue.finish(&object("a"), &unsupported, NOW);
        assert_eq!(queue.next(NOW), Some(object("a")), "its desired state may be another one");
    }

    #[test]
    fn a_failed_key_keeps_its_delay_if_it_is_added_meanwhile() {
        let mut queue = WriteQueue::new(WriteLimits::default());
        queue.add(object("a"));
        queue.next(NOW);
        queue.add(object("a"));
        queue.finish(&object("a"), &WriteOutcome::Retry(None), NOW);
        assert_eq!(queue.next(NOW), None);
        assert!(queue.next_at(NOW).is_some());
    }

    #[test]
    fn losing_the_lease_clears_the_queue() {
        let mut queue = WriteQueue::new(WriteLimits::default());
        for object_name in ["a", "b"] {
            queue.add(object(object_name));
        }
        queue.next(NOW);
        queue.add(object("a"));
        queue.clear();
        queue.finish(&object("a"), &WriteOutcome::Done, NOW);
        assert_eq!((all(&mut queue, NOW), queue.lengths()), (vec![], (0, 0, 0)));
    }

    #[test]
    fn a_replica_that_leads_again_writes_abandoned_keys() {
        let limits = WriteLimits { other: 1, ..WriteLimits::default() };
        let mut queue = WriteQueue::new(limits);
        queue.add(object("a"));
        assert_eq!(queue.next(NOW), Some(object("a")));
        queue.clear();
        queue.add(object("b"));
        queue.add(object("a"));
        assert_eq!(queue.next(NOW), Some(object("b")), "nothing is under way");
        queue.finish(&object("b"), &WriteOutcome::Done, NOW);
        assert_eq!(queue.next(NOW), Some(object("a")));
    }
}
