//! Pure: work queues of the kubelet. A step costs about the same for any number of pods.

use std::collections::{BTreeMap, BTreeSet};

/// Compares the keys of two maps: returns keys that only `current` has, and values of keys that only `desired` has.
///
/// Both maps are walked once, side by side. A key of both costs one comparison; values are not compared.
pub(super) fn key_difference<'a, K: Ord, C, D>(
    current: &'a BTreeMap<K, C>,
    desired: &'a BTreeMap<K, D>,
) -> (Vec<&'a K>, Vec<&'a D>) {
    let (mut current, mut desired) = (current.keys().peekable(), desired.iter().peekable());
    let (mut removed, mut new) = (Vec::new(), Vec::new());
    loop {
        match (current.peek(), desired.peek()) {
            (None, None) => return (removed, new),
            (Some(_), None) => removed.extend(current.next()),
            (None, Some(_)) => new.extend(desired.next().map(|(_, value)| value)),
            (Some(key), Some((desired_key, _))) => match key.cmp(desired_key) {
                std::cmp::Ordering::Less => removed.extend(current.next()),
                std::cmp::Ordering::Greater => new.extend(desired.next().map(|(_, value)| value)),
                std::cmp::Ordering::Equal => {
                    current.next();
                    desired.next();
                }
            },
        }
    }
}

/// Queue of due times by subject, earliest first.
#[derive(Debug)]
pub(super) struct DueQueue<K, T> {
    by_time: BTreeSet<(T, K)>,
    by_key: BTreeMap<K, T>,
}

impl<K: Ord + Clone, T: Ord + Copy> DueQueue<K, T> {
    pub(super) fn new() -> Self {
        Self { by_time: BTreeSet::new(), by_key: BTreeMap::new() }
    }

    /// Sets the next due time of a subject that was handled at `now`; `None` removes it.
    ///
    /// A time that is not after `now` is dropped: the subject waits for something else, and its time alone would make
    /// it due at once, forever.
    pub(super) fn set(&mut self, key: &K, now: T, due: Option<T>) {
        let due = due.filter(|due| *due > now);
        let before = match due {
            Some(due) => self.by_key.insert(key.clone(), due),
            None => self.by_key.remove(key),
        };
        if before == due {
            return;
        }
        if let Some(before) = before {
            self.by_time.remove(&(before, key.clone()));
        }
        self.by_time.extend(due.map(|due| (due, key.clone())));
    }

    /// Returns the earliest due time.
    pub(super) fn first_due(&self) -> Option<T> {
        self.by_time.first().map(|(due, _)| *due)
    }

    /// Removes and returns one subject that is due by `now`.
    pub(super) fn pop_due(&mut self, now: T) -> Option<K> {
        let (_, key) = self.by_time.first().filter(|(due, _)| *due <= now)?.clone();
        self.set(&key, now, None);
        Some(key)
    }
}

/// Queue of updates with one value per subject. A newer value replaces the older one and moves to the end.
#[derive(Debug)]
pub(super) struct CoalescingQueue<K, V> {
    by_sequence: BTreeMap<u64, (K, V)>,
    sequence_of: BTreeMap<K, u64>,
    next_sequence: u64,
}

impl<K: Ord + Clone, V> CoalescingQueue<K, V> {
    pub(super) fn new() -> Self {
        Self { by_sequence: BTreeMap::new(), sequence_of: BTreeMap::new(), next_sequence: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_sequence.is_empty()
    }

    /// Sets the value of a subject and puts it last.
    pub(super) fn push(&mut self, key: K, value: V) {
        if let Some(old) = self.sequence_of.insert(key.clone(), self.next_sequence) {
            self.by_sequence.remove(&old);
        }
        self.by_sequence.insert(self.next_sequence, (key, value));
        self.next_sequence += 1;
    }

    /// Removes and returns the first value.
    pub(super) fn pop(&mut self) -> Option<V> {
        let (_, (key, value)) = self.by_sequence.pop_first()?;
        self.sequence_of.remove(&key);
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::cmp::Ordering;

    use super::*;

    thread_local! {
        static COMPARED: Cell<u32> = const { Cell::new(0) };
    }

    /// A subject that counts comparisons, as a measure of cost.
    #[derive(Clone, Debug, PartialEq, Eq)]
    struct CountedKey(u32);

    impl Ord for CountedKey {
        fn cmp(&self, other: &Self) -> Ordering {
            COMPARED.set(COMPARED.get() + 1);
            self.0.cmp(&other.0)
        }
    }

    impl PartialOrd for CountedKey {
        fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
            Some(self.cmp(other))
        }
    }

    fn count_comparisons(work: impl FnOnce()) -> u32 {
        COMPARED.set(0);
        work();
        COMPARED.get()
    }

    #[test]
    fn the_difference_of_two_maps_is_found_in_one_walk() {
        let current: BTreeMap<_, ()> = (0..1_000).map(|at| (CountedKey(at), ())).collect();
        let desired: BTreeMap<_, _> =
            (2..1_001).map(|number| (CountedKey(number), number)).collect();
        let walk = count_comparisons(|| {
            let (removed, new) = key_difference(&current, &desired);
            assert_eq!((removed, new), (vec![&CountedKey(0), &CountedKey(1)], vec![&1_000]));
        });
        assert!(walk <= 1_000, "{walk}");
        let none = BTreeMap::<CountedKey, u32>::new();
        assert_eq!(key_difference(&current, &none).0.len(), 1_000);
        assert_eq!(key_difference(&none, &desired).1.len(), 999);
        assert_eq!(key_difference(&current, &current), (vec![], vec![]));
    }

    #[test]
    fn the_earliest_is_due_first_and_a_new_time_replaces_the_old() {
        let mut due_queue = DueQueue::new();
        for (key, due) in
            [("a", Some(5)), ("b", Some(3)), ("c", Some(4)), ("a", Some(1)), ("b", None)]
        {
            due_queue.set(&key, 0, due);
        }
        assert_eq!(due_queue.first_due(), Some(1));
        assert_eq!(
            (
                due_queue.pop_due(0),
                due_queue.pop_due(9),
                due_queue.pop_due(9),
                due_queue.pop_due(9)
            ),
            (None, Some("a"), Some("c"), None)
        );
        assert!(due_queue.by_key.is_empty());
    }

    #[test]
    fn a_subject_that_waits_for_something_else_than_time_is_not_due() {
        let mut due_queue = DueQueue::new();
        due_queue.set(&"stuck", 0, Some(5));
        assert_eq!(due_queue.pop_due(5), Some("stuck"));
        due_queue.set(&"stuck", 5, Some(5));
        assert_eq!((due_queue.first_due(), due_queue.pop_due(9)), (None, None));
    }

    #[test]
    fn the_latest_value_of_a_key_is_sent_once_and_last() {
        let mut queue = CoalescingQueue::new();
        for (key, value) in [("a", 1), ("b", 2), ("a", 3), ("c", 4)] {
            queue.push(key, value);
        }
        let sent: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(sent, [2, 3, 4]);
        assert!(queue.is_empty() && queue.sequence_of.is_empty());
    }

    #[test]
    fn the_cost_of_a_step_barely_grows_with_the_pods() {
        let cost = |pods: u32| {
            let (mut due_queue, mut queue) = (DueQueue::new(), CoalescingQueue::new());
            for index in 0..pods {
                due_queue.set(&CountedKey(index), 0, Some(index + 1));
                queue.push(CountedKey(index), index);
            }
            let middle = CountedKey(pods / 2);
            count_comparisons(|| {
                due_queue.set(&middle, 0, Some(pods + 1));
                due_queue.pop_due(1);
                queue.push(middle.clone(), 7);
                queue.pop();
            })
        };
        // A tree with a hundred times as many entries is about two levels deeper.
        assert!(cost(10_000) < 3 * cost(100), "{} {}", cost(10_000), cost(100));
    }
}
