//! Pure: choice of the activators of a name, a subset of all (knative/pkg `hash/hash.go`, `ChooseSubset`).
//!
//! All replicas that know the same activators choose the same subset. Names spread evenly over activators, and a change
//! of one activator moves few names. All activators lie on a circle, at places that depend on the name too. A hash of
//! the name gives the first angle and the step; each step takes the next activator that is not taken.

use std::collections::{BTreeMap, BTreeSet};

/// Number of places on the circle; a power of two, so that a 64-bit hash falls on each equally often.
const CIRCLE_SIZE: u64 = 1 << 11;

/// Chooses at most `count` of `all` for the name `target`.
pub fn choose_subset<'a>(
    all: impl IntoIterator<Item = &'a str>,
    count: usize,
    target: &str,
) -> BTreeSet<&'a str> {
    let all: BTreeSet<&str> = all.into_iter().collect();
    // `circle_positions` searches a free place for each activator, and would not end without one.
    if count >= all.len() || all.len() as u64 >= CIRCLE_SIZE {
        return all;
    }
    let circle: Vec<(u64, &str)> = circle_positions(&all, target).into_iter().collect();
    let angle = |salt: &str| fnv1a_64(&[target, salt]) % CIRCLE_SIZE;
    let (mut at, step) = (angle("start-angle-salt"), angle("step-angle-salt"));
    let mut taken = BTreeSet::new();
    while taken.len() < count {
        let first = circle.partition_point(|(place, _)| *place < at);
        let mut around = (first..circle.len()).chain(0..first);
        // At the end of the circle the search continues at its start.
        let Some(next) = around.find(|index| !taken.contains(index)) else { break };
        taken.insert(next);
        at = (at + step) % CIRCLE_SIZE;
    }
    taken.into_iter().map(|index| circle[index].1).collect()
}

/// Place of each activator on the circle; a collision is hashed again with the old hash appended.
fn circle_positions<'a>(all: &BTreeSet<&'a str>, target: &str) -> BTreeMap<u64, &'a str> {
    let mut places = BTreeMap::new();
    for activator in all {
        let mut text = format!("{activator}{target}");
        let mut hash = fnv1a_64(&[&text]);
        while places.contains_key(&(hash % CIRCLE_SIZE)) {
            text.push_str(&format!("{hash:x}"));
            hash = fnv1a_64(&[&text]);
        }
        places.insert(hash % CIRCLE_SIZE, *activator);
    }
    places
}

/// FNV-1a hash of the concatenated parts, with 64 bits.
fn fnv1a_64(parts: &[&str]) -> u64 {
    let bytes = parts.iter().flat_map(|part| part.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn activators(count: usize) -> Vec<String> {
        (0..count).map(|it| format!("activator-7c9d-{it:05}")).collect()
    }

    fn chosen<'a>(all: &'a [String], count: usize, target: &str) -> BTreeSet<&'a str> {
        choose_subset(all.iter().map(String::as_str), count, target)
    }

    #[test]
    fn hashes_as_gos_fnv_does() {
        // The offset basis, and the hashes of "a" and "foobar" from the FNV reference.
        assert_eq!(fnv1a_64(&[""]), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a_64(&["a"]), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a_64(&["foo", "bar"]), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn every_activator_gets_its_share_of_names() {
        let all = activators(10);
        let mut uses: BTreeMap<&str, usize> = BTreeMap::new();
        for name in (0..1000).map(|it| format!("default/service-{it}")) {
            for activator in chosen(&all, 2, &name) {
                *uses.entry(activator).or_default() += 1;
            }
        }
        // A perfectly even spread would be 200 each.
        assert!(uses.len() == 10 && uses.values().all(|it| (100..=300).contains(it)), "{uses:?}");
    }

    #[test]
    fn an_activator_that_leaves_moves_little_more_than_the_names_that_used_it() {
        let all = activators(20);
        let (mut moved, mut used) = (0, 0);
        for name in (0..1000).map(|it| format!("default/service-{it}")) {
            let old_choice = chosen(&all, 3, &name);
            let after = chosen(&all[1..], 3, &name);
            used += usize::from(old_choice.contains(all[0].as_str()));
            moved += after.difference(&old_choice).count();
        }
        assert!(used > 0 && moved <= used + used / 3, "{moved} moved, {used} used it");
    }

    proptest! {
        #[test]
        fn chooses_as_many_as_asked_whatever_the_order(
            size in 0_usize..40, count in 0_usize..45, target in "[a-z/]{1,20}",
        ) {
            let all = activators(size);
            let chosen = chosen(&all, count, &target);
            prop_assert_eq!(chosen.len(), count.min(size));
            let turned: Vec<&str> = all.iter().rev().map(String::as_str).collect();
            prop_assert_eq!(chosen, choose_subset(turned, count, &target));
        }
    }
}
