//! Pure: activators that EndpointSlices of Routes' names list.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use common::wire::NamespacedName;

/// EndpointSlices by activator. Ten thousand services have twenty thousand slices, so only a hash of each is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ActivatorSlices(BTreeMap<String, BTreeSet<u64>>);

impl ActivatorSlices {
    /// Returns true if any slice lists the activator.
    pub fn lists_activator(&self, activator: &str) -> bool {
        self.0.contains_key(activator)
    }

    /// Returns true if the slice exists and lists an activator.
    pub fn contains_slice(&self, slice: &NamespacedName) -> bool {
        let slice = hash_name(slice);
        self.0.values().any(|all| all.contains(&slice))
    }

    /// Sets the activators that a slice lists now. Returns those that no slice lists any more.
    pub fn set_slice(&mut self, slice: &NamespacedName, activators: &[&str]) -> Vec<String> {
        let slice = hash_name(slice);
        for activator in activators {
            match self.0.get_mut(*activator) {
                Some(all) => drop(all.insert(slice)),
                None => drop(self.0.insert((*activator).to_owned(), BTreeSet::from([slice]))),
            }
        }
        // Every other activator is visited: a slice's former activators are not stored, to save memory.
        let mut left = Vec::new();
        self.0.retain(|activator, all| {
            let ended =
                !activators.contains(&activator.as_str()) && all.remove(&slice) && all.is_empty();
            if ended {
                left.push(activator.clone());
            }
            !ended
        });
        left
    }
}

fn hash_name(slice: &NamespacedName) -> u64 {
    let mut hash = DefaultHasher::new();
    slice.hash(&mut hash);
    hash.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_activator_is_returned_once_no_slice_lists_it() {
        let mut all = ActivatorSlices::default();
        let slice = |name: &str| NamespacedName::new("default", name);
        assert_eq!(all.set_slice(&slice("one"), &["a", "b"]), [""; 0]);
        assert_eq!(all.set_slice(&slice("two"), &["a"]), [""; 0]);
        assert_eq!(all.set_slice(&slice("one"), &["b", "c"]), [""; 0], "slice two lists it");
        assert!(all.lists_activator("a"));
        assert!(all.contains_slice(&slice("one")) && !all.contains_slice(&slice("three")));
        assert_eq!(all.set_slice(&slice("two"), &["c"]), ["a"]);
        assert!(!all.lists_activator("a") && all.lists_activator("c"));
        assert_eq!(all.set_slice(&slice("one"), &[]), ["b"]);
        assert_eq!(all.set_slice(&slice("two"), &[]), ["c"]);
        assert!(!all.contains_slice(&slice("two")));
        assert_eq!(all, ActivatorSlices::default());
    }
}
