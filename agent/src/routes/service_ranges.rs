//! Pure: ranges of the cluster's ClusterIPs, from a setting or from the ServiceCIDR objects.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use smol_str::SmolStr;

/// Observation of the ServiceCIDR objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ServiceRangeChange {
    /// A list of all objects begins.
    ListBegun,
    /// Ranges of an object; none if it is gone.
    Object(SmolStr, BTreeSet<IpNet>),
    /// The list is complete: objects that it does not name do not exist.
    ListCompleted,
}

/// Ranges of the cluster's ClusterIPs.
#[derive(Debug, Default)]
pub(crate) struct ServiceRanges {
    /// Ranges that a setting names, which count alone.
    given: BTreeSet<IpNet>,
    /// Ranges of each object.
    objects: BTreeMap<SmolStr, BTreeSet<IpNet>>,
    /// Names that the list in progress has named.
    list: Option<BTreeSet<SmolStr>>,
    /// True once a list was complete.
    is_listed: bool,
}

impl ServiceRanges {
    /// Starts with the ranges of a setting. Without any, the objects decide.
    pub(crate) fn new(given: impl IntoIterator<Item = IpNet>) -> Self {
        Self { given: given.into_iter().collect(), ..Self::default() }
    }

    /// Returns true if the ranges come from the objects.
    pub(crate) fn needs_objects(&self) -> bool {
        self.given.is_empty()
    }

    /// Applies one observation.
    pub(crate) fn apply(&mut self, change: ServiceRangeChange) {
        match change {
            ServiceRangeChange::ListBegun => self.list = Some(BTreeSet::new()),
            ServiceRangeChange::Object(name, ranges) => {
                if let Some(list) = &mut self.list {
                    list.insert(name.clone());
                }
                if ranges.is_empty() {
                    self.objects.remove(&name);
                } else {
                    self.objects.insert(name, ranges);
                }
            }
            ServiceRangeChange::ListCompleted => {
                if let Some(named) = self.list.take() {
                    self.objects.retain(|name, _| named.contains(name));
                    self.is_listed = true;
                }
            }
        }
    }

    /// Returns the ranges; `None` while they are not known. A cluster without any range has no Services, so an empty
    /// list is none either.
    pub(crate) fn ranges(&self) -> Option<BTreeSet<IpNet>> {
        if !self.needs_objects() {
            return Some(self.given.clone());
        }
        let ranges: BTreeSet<IpNet> = self.objects.values().flatten().copied().collect();
        (self.is_listed && !ranges.is_empty()).then_some(ranges)
    }
}

#[cfg(test)]
mod tests {
    use super::{
        ServiceRangeChange::{ListBegun, ListCompleted, Object},
        *,
    };

    fn ranges(texts: &[&str]) -> BTreeSet<IpNet> {
        texts.iter().map(|text| text.parse().expect("a range")).collect()
    }

    fn object(name: &str, texts: &[&str]) -> ServiceRangeChange {
        Object(name.into(), ranges(texts))
    }

    #[test]
    fn ranges_are_known_once_a_list_is_complete() {
        let mut observed = ServiceRanges::new([]);
        let both = ["10.96.0.0/12", "fd00:10:96::/112"];
        for change in [ListBegun, object("kubernetes", &both)] {
            observed.apply(change);
            assert_eq!(observed.ranges(), None);
        }
        observed.apply(ListCompleted);
        assert_eq!(observed.ranges(), Some(ranges(&both)));
        observed.apply(object("more", &["10.200.0.0/16"]));
        assert_eq!(observed.ranges().map(|it| it.len()), Some(3));
        observed.apply(object("more", &[]));
        assert_eq!(observed.ranges(), Some(ranges(&both)), "it is deleted");
    }

    #[test]
    fn a_later_list_removes_what_it_does_not_name_when_it_is_complete() {
        let mut observed = ServiceRanges::new([]);
        let first = [ListBegun, object("a", &["10.1.0.0/16"]), object("b", &["10.2.0.0/16"])];
        first.into_iter().chain([ListCompleted]).for_each(|change| observed.apply(change));
        observed.apply(ListBegun);
        observed.apply(object("b", &["10.2.0.0/16"]));
        assert_eq!(observed.ranges().map(|it| it.len()), Some(2));
        observed.apply(ListCompleted);
        assert_eq!(observed.ranges(), Some(ranges(&["10.2.0.0/16"])));
        [ListBegun, ListCompleted].into_iter().for_each(|change| observed.apply(change));
        assert_eq!(observed.ranges(), None, "a cluster always has a range");
    }

    #[test]
    fn a_setting_counts_alone() {
        let mut given = ServiceRanges::new(ranges(&["10.96.0.0/12"]));
        assert!(!given.needs_objects());
        given.apply(object("kubernetes", &["10.1.0.0/16"]));
        assert_eq!(given.ranges(), Some(ranges(&["10.96.0.0/12"])));
    }
}
