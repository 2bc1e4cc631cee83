//! Pure: arithmetic on numbers of slots by pod.

use common::wire::SlotsByPod;
use smol_str::SmolStr;

/// Number of slots at all pods together.
pub(crate) fn total_slots(all: &SlotsByPod) -> u32 {
    all.values().fold(0, |sum, slots| sum.saturating_add(*slots))
}

/// Adds slots of one pod.
pub(crate) fn add_slots(all: &mut SlotsByPod, pod: &str, slots: u32) {
    match all.get_mut(pod) {
        Some(it) => *it += slots,
        None => drop(all.insert(pod.into(), slots)),
    }
}

/// Removes one slot of a pod, if there is one.
pub(crate) fn remove_slot(all: &mut SlotsByPod, pod: &str) {
    if let Some(slots) = all.get_mut(pod) {
        *slots -= 1;
        if *slots == 0 {
            all.remove(pod);
        }
    }
}

/// Greater number of both maps for each pod.
pub(crate) fn max_by_pod(mut counts: SlotsByPod, other: &SlotsByPod) -> SlotsByPod {
    for (pod, slots) in other {
        let count = counts.entry(pod.clone()).or_default();
        *count = (*count).max(*slots);
    }
    counts
}

/// Slots that are held and not in use, by pod.
pub(crate) fn idle_slots(held: &SlotsByPod, in_use: &SlotsByPod) -> SlotsByPod {
    let of = |(pod, slots): (&SmolStr, &u32)| {
        let idle = slots.saturating_sub(in_use.get(pod).copied().unwrap_or(0));
        (idle > 0).then(|| (pod.clone(), idle))
    };
    held.iter().filter_map(of).collect()
}
