//! Pure: which activators the EndpointSlices of routes' names lead to.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use common::wire::Name;

/// Slices by activator. Ten thousand services have twenty thousand slices, so of each only a hash is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Slices(BTreeMap<String, BTreeSet<u64>>);

impl Slices {
    /// Whether any slice leads to the activator.
    pub fn lead_to(&self, activator: &str) -> bool {
        self.0.contains_key(activator)
    }

    /// A slice leads to these activators now. Returns those to which none leads any more.
    pub fn put(&mut self, slice: &Name, activators: &[&str]) -> Vec<String> {
        let mut hash = DefaultHasher::new();
        slice.hash(&mut hash);
        let slice = hash.finish();
        for activator in activators {
            match self.0.get_mut(*activator) {
                Some(all) => drop(all.insert(slice)),
                None => drop(self.0.insert((*activator).to_owned(), BTreeSet::from([slice]))),
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_when_the_last_slice_leaves_an_activator() {
        let mut all = Slices::default();
        let slice = |name: &str| Name::new("default", name);
        assert_eq!(all.put(&slice("one"), &["a", "b"]), [""; 0]);
        assert_eq!(all.put(&slice("two"), &["a"]), [""; 0]);
        assert_eq!(all.put(&slice("one"), &["b", "c"]), [""; 0], "another leads to a");
        assert!(all.lead_to("a"));
        assert_eq!(all.put(&slice("two"), &["c"]), ["a"]);
        assert!(!all.lead_to("a") && all.lead_to("c"));
        assert_eq!(all.put(&slice("one"), &[]), ["b"]);
        assert_eq!(all.put(&slice("two"), &[]), ["c"]);
        assert_eq!(all, Slices::default());
    }
}
