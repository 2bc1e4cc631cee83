//! Pure: ranges of the cluster's ClusterIPs, from a setting or from the ServiceCIDR objects.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use ipnet::IpNet;
use smol_str::SmolStr;

/// Observation of the ServiceCIDR objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ServiceRangeChange {
    /// A list of all objects begins.
    ListBegun,
    /// Ranges of an object. The set is empty if the object is gone.
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
                    // Objects that a whole list does not name were deleted while the watch was broken.
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

/// Returns the connections to these ranges that another proxy's rules translate: a route to the range would end them.
/// `connections` has both ends of all connections of one network namespace, the own end first.
pub(crate) fn translated_connections(
    connections: &BTreeSet<(SocketAddr, SocketAddr)>,
    ranges: &BTreeSet<IpNet>,
) -> Vec<(SocketAddr, SocketAddr)> {
    let is_in_range = |peer: &SocketAddr| ranges.iter().any(|range| range.contains(&peer.ip()));
    // The namespace itself may own a ClusterIP, as with NodeLocal DNSCache. Then both ends are in the list.
    let is_remote = |&(own, peer): &(SocketAddr, SocketAddr)| !connections.contains(&(peer, own));
    let to_ranges = connections.iter().copied().filter(|(_, peer)| is_in_range(peer));
    to_ranges.filter(is_remote).collect()
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
    fn connections_that_a_route_would_end_are_those_to_its_range_on_another_host() {
        let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let pair = |own: &str, peer: &str| (address(own), address(peer));
        let translated = pair("10.0.0.5:40001", "10.96.0.1:443");
        let all = BTreeSet::from([
            translated,
            // Rouse's programs have led this one to its endpoint.
            pair("10.0.0.5:40002", "10.244.0.7:8080"),
            // A server of the node itself has the ClusterIP.
            pair("10.0.0.5:40003", "10.96.0.10:53"),
            pair("10.96.0.10:53", "10.0.0.5:40003"),
        ]);
        assert_eq!(translated_connections(&all, &ranges(&["10.96.0.0/12"])), [translated]);
        assert_eq!(translated_connections(&all, &ranges(&["fd00:10:96::/112"])), []);
        assert_eq!(translated_connections(&all, &ranges(&[])), []);
    }

    #[test]
    fn a_setting_counts_alone() {
        let mut given = ServiceRanges::new(ranges(&["10.96.0.0/12"]));
        assert!(!given.needs_objects());
        given.apply(object("kubernetes", &["10.1.0.0/16"]));
        assert_eq!(given.ranges(), Some(ranges(&["10.96.0.0/12"])));
    }
}
