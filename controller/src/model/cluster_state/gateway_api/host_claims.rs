//! Pure: hosts that routes have at listeners, by which routes of the two kinds meet.

use std::collections::{BTreeMap, BTreeSet};

use common::wire::GatewayHostKey;

use super::{GatewayRouteId, GatewayRouteKind};

/// Hosts of one route at each listener. Listeners with the same transport and host are one, of whatever Gateway.
pub type RouteClaims = BTreeMap<GatewayHostKey, BTreeSet<GatewayHostKey>>;

/// Hosts that routes have at listeners, also where a route of the other kind keeps them from it.
#[derive(Clone, Debug, Default)]
pub struct HostClaims {
    by_route: BTreeMap<GatewayRouteId, RouteClaims>,
    by_host: BTreeMap<ClaimKey, BTreeSet<GatewayRouteId>>,
}

/// Host of routes of one kind at a listener.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ClaimKey {
    listener: GatewayHostKey,
    kind: GatewayRouteKind,
    /// The host backwards, so that the hosts below a wildcard are neighbours.
    reversed_host: String,
}

impl ClaimKey {
    fn new(listener: &GatewayHostKey, kind: GatewayRouteKind, host: &str) -> Self {
        let reversed_host = host.chars().rev().collect();
        Self { listener: listener.clone(), kind, reversed_host }
    }
}

impl HostClaims {
    /// Replaces the claims of these routes; a route with none is forgotten. Returns these routes and all that may have to
    /// be accepted or rejected with them: their rivals before and now, the rivals of these, and so on.
    pub fn update(
        &mut self,
        changes: impl IntoIterator<Item = (GatewayRouteId, RouteClaims)>,
    ) -> BTreeSet<GatewayRouteId> {
        let mut open = Vec::new();
        for (id, claims) in changes {
            open.extend(self.rivals(&id));
            self.set(&id, claims);
            open.push(id);
        }
        let mut reached = BTreeSet::new();
        while let Some(id) = open.pop() {
            if reached.insert(id.clone()) {
                open.extend(self.rivals(&id));
            }
        }
        reached
    }

    /// Claims of a route by listener.
    pub fn of_route(
        &self,
        id: &GatewayRouteId,
    ) -> impl Iterator<Item = (&GatewayHostKey, &BTreeSet<GatewayHostKey>)> {
        self.by_route.get(id).into_iter().flatten()
    }

    /// Routes of the other kind than `kind` that have one of these hosts at a listener, or hosts of one of these
    /// wildcards, or a wildcard with one of these hosts.
    pub fn rivals_at(
        &self,
        kind: GatewayRouteKind,
        listener: &GatewayHostKey,
        hosts: &BTreeSet<GatewayHostKey>,
    ) -> BTreeSet<&GatewayRouteId> {
        let other = kind.other();
        let mut found = BTreeSet::new();
        // With routes of one kind alone, nothing is searched.
        if !self.has_kind(other) {
            return found;
        }
        for GatewayHostKey { is_tls, host } in hosts {
            for covering in GatewayHostKey::candidates(*is_tls, host) {
                let key = ClaimKey::new(listener, other, &covering.host);
                found.extend(self.by_host.get(&key).into_iter().flatten());
            }
            let Some(suffix) = host.strip_prefix('*') else { continue };
            let start = ClaimKey::new(listener, other, suffix);
            let prefix = start.reversed_host.clone();
            let is_below = |key: &ClaimKey| {
                (&key.listener, key.kind) == (listener, other)
                    && key.reversed_host.starts_with(&prefix)
            };
            let below = self.by_host.range(start..).take_while(|(key, _)| is_below(key));
            found.extend(below.flat_map(|(_, routes)| routes));
        }
        found
    }

    /// Routes of the other kind that have a host in common with a route at a listener.
    fn rivals(&self, id: &GatewayRouteId) -> BTreeSet<GatewayRouteId> {
        let at_listeners = self.of_route(id);
        let rivals = at_listeners.map(|(listener, hosts)| self.rivals_at(id.kind, listener, hosts));
        rivals.flatten().cloned().collect()
    }

    fn has_kind(&self, kind: GatewayRouteKind) -> bool {
        // Routes are in the order of their kinds.
        let edge = match kind {
            GatewayRouteKind::Http => self.by_route.first_key_value(),
            GatewayRouteKind::Grpc => self.by_route.last_key_value(),
        };
        edge.is_some_and(|(id, _)| id.kind == kind)
    }

    fn set(&mut self, id: &GatewayRouteId, claims: RouteClaims) {
        for (listener, hosts) in self.by_route.remove(id).unwrap_or_default() {
            for host in hosts {
                let key = ClaimKey::new(&listener, id.kind, &host.host);
                if let Some(routes) = self.by_host.get_mut(&key) {
                    routes.remove(id);
                    if routes.is_empty() {
                        self.by_host.remove(&key);
                    }
                }
            }
        }
        for (listener, hosts) in &claims {
            for host in hosts {
                let key = ClaimKey::new(listener, id.kind, &host.host);
                self.by_host.entry(key).or_default().insert(id.clone());
            }
        }
        if !claims.is_empty() {
            self.by_route.insert(id.clone(), claims);
        }
    }
}

#[cfg(test)]
mod tests {
    use common::wire::NamespacedName;
    use proptest::prelude::*;

    use super::*;

    const HOSTS: [&str; 7] =
        ["*", "*.test", "a.test", "*.a.test", "b.a.test", "*.b.a.test", "ca.test"];

    fn id(kind: GatewayRouteKind, name: &str) -> GatewayRouteId {
        GatewayRouteId { kind, name: NamespacedName::new("n", name) }
    }

    fn key(host: &str) -> GatewayHostKey {
        GatewayHostKey { is_tls: false, host: host.into() }
    }

    fn claims(listener: &str, hosts: &[&str]) -> RouteClaims {
        let hosts: BTreeSet<GatewayHostKey> = hosts.iter().map(|it| key(it)).collect();
        if hosts.is_empty() { RouteClaims::new() } else { [(key(listener), hosts)].into() }
    }

    /// Returns true if one of the hosts is the other one, or a wildcard with it.
    fn meet(one: &str, other: &str) -> bool {
        let covers = |wide: &str, narrow: &str| {
            let suffix = wide.strip_prefix('*');
            wide == narrow || suffix.is_some_and(|it| narrow.ends_with(it) && narrow != it)
        };
        covers(one, other) || covers(other, one)
    }

    #[test]
    fn hosts_meet_by_wildcards_at_one_listener() {
        for one in HOSTS {
            for other in HOSTS {
                let (http, grpc) =
                    (id(GatewayRouteKind::Http, "a"), id(GatewayRouteKind::Grpc, "b"));
                let mut all = HostClaims::default();
                all.update([(http.clone(), claims("*", &[one]))]);
                let reached = all.update([(grpc.clone(), claims("*", &[other]))]);
                let both: BTreeSet<_> = [http.clone(), grpc.clone()].into();
                let alone: BTreeSet<_> = [grpc.clone()].into();
                let expected = if meet(one, other) { &both } else { &alone };
                assert_eq!(&reached, expected, "{one} {other}");
                let elsewhere = all.update([(grpc, claims("*.test", &[other]))]);
                // The former claim still leads to the rival.
                assert_eq!(&elsewhere, expected, "{one} {other}");
                let own: BTreeSet<_> = [http.clone()].into();
                assert_eq!(all.update([(http, claims("*", &[one]))]), own, "{one} {other}");
            }
        }
    }

    #[test]
    fn rivals_of_rivals_are_reached_and_routes_of_one_kind_are_no_rivals() {
        let (http, grpc) = (GatewayRouteKind::Http, GatewayRouteKind::Grpc);
        let mut all = HostClaims::default();
        all.update([
            (id(http, "a"), claims("*", &["a.test"])),
            (id(http, "b"), claims("*", &["a.test", "c.test"])),
        ]);
        assert_eq!(all.update([(id(http, "a"), claims("*", &["a.test"]))]).len(), 1);
        all.update([(id(grpc, "c"), claims("*", &["a.test"]))]);
        let reached = all.update([(id(http, "a"), RouteClaims::new())]);
        assert_eq!(reached, [id(http, "a"), id(http, "b"), id(grpc, "c")].into());
        assert_eq!(all.update([(id(http, "a"), RouteClaims::new())]).len(), 1, "it is forgotten");
        all.update([(id(http, "b"), RouteClaims::new()), (id(grpc, "c"), RouteClaims::new())]);
        assert!(all.by_route.is_empty() && all.by_host.is_empty());
    }

    proptest! {
        /// After any changes, the routes that are reached are those of a search in all pairs.
        #[test]
        fn changes_reach_what_a_search_in_all_pairs_reaches(
            changes in proptest::collection::vec(
                (0usize..6, proptest::sample::subsequence(HOSTS.to_vec(), 0..3)),
                1..12,
            ),
        ) {
            let mut all = HostClaims::default();
            let mut hosts: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
            let route = |at: usize| {
                let kind = GatewayRouteKind::ALL[at % 2];
                id(kind, &at.to_string())
            };
            for (at, next) in changes {
                let previous = hosts.insert(at, next.clone()).unwrap_or_default();
                let is_rival = |one: usize, other: usize| {
                    let pairs = |it: &str| hosts[&other].iter().any(|other| meet(it, other));
                    one % 2 != other % 2 && hosts[&one].iter().any(|it| pairs(it))
                };
                let was_rival = |other: usize| {
                    let pairs = |it: &str| hosts[&other].iter().any(|other| meet(it, other));
                    at % 2 != other % 2 && previous.iter().any(|it| pairs(it))
                };
                let others: Vec<usize> = hosts.keys().copied().collect();
                let mut open: Vec<usize> =
                    others.iter().copied().filter(|it| was_rival(*it)).collect();
                open.push(at);
                let mut expected = BTreeSet::new();
                while let Some(one) = open.pop() {
                    if expected.insert(route(one)) {
                        open.extend(others.iter().copied().filter(|other| is_rival(one, *other)));
                    }
                }
                let reached = all.update([(route(at), claims("*", &next))]);
                prop_assert_eq!(reached, expected);
            }
        }
    }
}
