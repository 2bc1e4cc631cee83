//! Pure: hosts that routes claim at listeners → the listeners at which a route of the other kind is rejected.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
};

use common::wire::GatewayHostKey;

use super::{GatewayRouteId, GatewayRouteKind, UnixMillis};

/// Hosts of one route at each listener. Listeners with the same transport and host are one, of whatever Gateway.
pub type RouteClaims = BTreeMap<GatewayHostKey, BTreeSet<GatewayHostKey>>;

/// Listeners at which a route is rejected, each with the oldest accepted route that has one of its hosts.
pub type RouteRejections = BTreeMap<GatewayHostKey, GatewayRouteId>;

/// Hosts that routes claim at listeners, whether the route gets them or is rejected there. Of two routes of both kinds
/// with a host in common, the older one is accepted.
#[derive(Clone, Debug, Default)]
pub struct HostClaims {
    by_route: BTreeMap<GatewayRouteId, ClaimingRoute>,
    by_host: BTreeMap<ClaimKey, BTreeSet<GatewayRouteId>>,
}

/// Route that claims a host at a listener.
#[derive(Clone, Debug)]
struct ClaimingRoute {
    created: UnixMillis,
    claims: RouteClaims,
    rejections: RouteRejections,
}

/// Place of a route by its age, the oldest first: by its creation, else by `namespace/name`, else an HTTPRoute first.
type Seniority = (UnixMillis, String, GatewayRouteKind);

/// Host that routes of one kind claim at a listener.
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
    /// Replaces the times of creation and the claims of these routes; a route without claims is forgotten. Returns these
    /// routes, and all others whose rejections change by it.
    ///
    /// A rejection depends on older routes only. So the open routes are decided from the oldest one on, and a decision
    /// that stays opens no further route. Thousands of routes below the wildcard of another one stay untouched.
    pub fn update(
        &mut self,
        changes: impl IntoIterator<Item = (GatewayRouteId, UnixMillis, RouteClaims)>,
    ) -> BTreeSet<GatewayRouteId> {
        let mut open: BTreeMap<Seniority, GatewayRouteId> = BTreeMap::new();
        let mut reached = BTreeSet::new();
        for (id, created, claims) in changes {
            let known = self.by_route.get(&id).map(|it| (it.created, &it.claims));
            if known.unwrap_or((created, &RouteClaims::new())) != (created, &claims) {
                // Rivals by the former claims may be accepted now, and those by the new ones rejected.
                open.extend(self.younger_rivals(&id));
                self.replace_claims(&id, created, claims);
                open.extend(self.younger_rivals(&id));
                open.extend(self.seniority(&id).map(|it| (it, id.clone())));
            }
            reached.insert(id);
        }
        while let Some((_, id)) = open.pop_first() {
            // Older routes are decided already, and only younger ones are opened: each is decided once.
            let next = self.decide_rejections(&id);
            let Some(route) = self.by_route.get_mut(&id) else { continue };
            if mem::replace(&mut route.rejections, next.clone()) != next {
                open.extend(self.younger_rivals(&id));
                reached.insert(id);
            }
        }
        reached
    }

    /// Listeners at which a route is rejected; `None`: it has no claims.
    pub fn rejections(&self, id: &GatewayRouteId) -> Option<&RouteRejections> {
        self.by_route.get(id).map(|it| &it.rejections)
    }

    /// Returns the listeners at which a route has to be rejected, by the rejections of older routes.
    fn decide_rejections(&self, id: &GatewayRouteId) -> RouteRejections {
        let (Some(route), Some(own)) = (self.by_route.get(id), self.seniority(id)) else {
            return RouteRejections::new();
        };
        let at_listeners = route.claims.iter().filter_map(|(listener, hosts)| {
            let rivals = self.rivals_at(id.kind, listener, hosts).into_iter();
            // A route that is rejected itself keeps no other one from its hosts.
            let accepted = rivals.filter(|it| !self.is_rejected(it, listener));
            let ages = accepted.filter_map(|it| Some((self.seniority(it)?, it)));
            let (_, oldest) = ages.filter(|(seniority, _)| *seniority < own).min()?;
            Some((listener.clone(), oldest.clone()))
        });
        at_listeners.collect()
    }

    fn is_rejected(&self, id: &GatewayRouteId, listener: &GatewayHostKey) -> bool {
        self.rejections(id).is_some_and(|it| it.contains_key(listener))
    }

    fn seniority(&self, id: &GatewayRouteId) -> Option<Seniority> {
        let route = self.by_route.get(id)?;
        Some((route.created, id.name.to_string(), id.kind))
    }

    /// Routes of the other kind than `kind` with a host in common at a listener. They claim one of these hosts, a host
    /// below one of these wildcards, or a wildcard above one of these hosts.
    fn rivals_at(
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
            // Backwards, all hosts below the wildcard begin with its suffix, and follow each other.
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

    /// Returns the younger routes of the other kind that have a host in common with a route at a listener.
    fn younger_rivals(&self, id: &GatewayRouteId) -> BTreeMap<Seniority, GatewayRouteId> {
        let (Some(route), Some(own)) = (self.by_route.get(id), self.seniority(id)) else {
            return BTreeMap::new();
        };
        let at_listeners = route.claims.iter();
        let rivals =
            at_listeners.flat_map(|(listener, hosts)| self.rivals_at(id.kind, listener, hosts));
        let ages = rivals.filter_map(|it| Some((self.seniority(it)?, it.clone())));
        ages.filter(|(seniority, _)| *seniority > own).collect()
    }

    fn has_kind(&self, kind: GatewayRouteKind) -> bool {
        // Routes are in the order of their kinds.
        let edge = match kind {
            GatewayRouteKind::Http => self.by_route.first_key_value(),
            GatewayRouteKind::Grpc => self.by_route.last_key_value(),
        };
        edge.is_some_and(|(id, _)| id.kind == kind)
    }

    /// Replaces the claims of a route, in both indexes.
    fn replace_claims(&mut self, id: &GatewayRouteId, created: UnixMillis, claims: RouteClaims) {
        // The rejections stay until they are decided, so that a change of them is seen.
        let previous = self.by_route.remove(id);
        let (before, rejections) =
            previous.map(|it| (it.claims, it.rejections)).unwrap_or_default();
        for (listener, hosts) in before {
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
            self.by_route.insert(id.clone(), ClaimingRoute { created, claims, rejections });
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

    fn created(at: u64) -> UnixMillis {
        UnixMillis(at)
    }

    #[test]
    fn hosts_meet_by_wildcards_at_one_listener() {
        let (http, grpc) = (id(GatewayRouteKind::Http, "a"), id(GatewayRouteKind::Grpc, "b"));
        for one in HOSTS {
            for other in HOSTS {
                let mut all = HostClaims::default();
                all.update([(http.clone(), created(1), claims("*", &[one]))]);
                let reached = all.update([(grpc.clone(), created(2), claims("*", &[other]))]);
                assert_eq!(reached, [grpc.clone()].into(), "{one} {other}");
                let rejected: RouteRejections = [(key("*"), http.clone())].into();
                let expected = if meet(one, other) { rejected } else { RouteRejections::new() };
                assert_eq!(all.rejections(&grpc), Some(&expected), "{one} {other}");
                assert_eq!(all.rejections(&http), Some(&RouteRejections::new()), "it is older");
                // The former claim still leads to the rival.
                let reached = all.update([(http.clone(), created(1), claims("*.test", &[one]))]);
                let mut freed: BTreeSet<_> = [http.clone()].into();
                freed.extend(meet(one, other).then(|| grpc.clone()));
                assert_eq!(reached, freed, "{one} {other}");
                assert_eq!(all.rejections(&grpc), Some(&RouteRejections::new()), "{one} {other}");
            }
        }
    }

    #[test]
    fn a_change_reaches_the_routes_that_it_frees_and_those_that_these_reject() {
        let (http, grpc) = (GatewayRouteKind::Http, GatewayRouteKind::Grpc);
        let [first, second, third] = [id(http, "a"), id(grpc, "b"), id(http, "c")];
        let mut all = HostClaims::default();
        all.update([
            (third.clone(), created(3), claims("*", &["b.test"])),
            (second.clone(), created(2), claims("*", &["a.test", "b.test"])),
            (first.clone(), created(1), claims("*", &["a.test"])),
        ]);
        let is_rejected = |all: &HostClaims| {
            [&second, &third].map(|id| all.rejections(id).is_some_and(|it| !it.is_empty()))
        };
        assert_eq!(is_rejected(&all), [true, false]);
        let reached = all.update([(first.clone(), created(1), RouteClaims::new())]);
        assert_eq!(reached, [first.clone(), second.clone(), third.clone()].into());
        assert_eq!(is_rejected(&all), [false, true]);
        // It was made again, and is the youngest one now.
        let reached = all.update([(first.clone(), created(4), claims("*", &["a.test"]))]);
        assert_eq!(reached, [first.clone()].into());
        assert_eq!(is_rejected(&all), [false, true]);
        all.update([first, second, third].map(|id| (id, created(1), RouteClaims::new())));
        assert!(all.by_route.is_empty() && all.by_host.is_empty());
    }

    /// Each of thousands of routes would else be planned again at every change and every status of one of them.
    #[test]
    fn routes_below_the_wildcard_of_another_one_are_not_reached_by_each_other() {
        for wildcard_age in [0, 1000] {
            let wildcard = id(GatewayRouteKind::Http, "all");
            let mut all = HostClaims::default();
            all.update([(wildcard, created(wildcard_age), claims("*", &["*"]))]);
            for at in 1..=100 {
                let own = id(GatewayRouteKind::Grpc, &at.to_string());
                let (host, moved) = (format!("{at}.test"), format!("{at}.example"));
                let mut reached = BTreeSet::new();
                for host in [&host, &host, &moved] {
                    let change = (own.clone(), created(at), claims("*", &[host.as_str()]));
                    reached.extend(all.update([change]));
                }
                // The wildcard is rejected by the first older route, and then stays so.
                let most = if at == 1 && wildcard_age > 0 { 2 } else { 1 };
                assert_eq!(reached.len(), most, "{at} {wildcard_age}");
            }
        }
    }

    proptest! {
        /// After any changes, the rejections are those of a search in all pairs, and those that changed were reached.
        #[test]
        fn rejections_are_those_of_a_search_in_all_pairs(
            changes in proptest::collection::vec(
                (0usize..6, 0u64..4, proptest::sample::subsequence(HOSTS.to_vec(), 0..3)),
                1..12,
            ),
        ) {
            let mut all = HostClaims::default();
            let mut wanted: BTreeMap<Seniority, (GatewayRouteId, Vec<&str>)> = BTreeMap::new();
            let mut previous: BTreeMap<GatewayRouteId, GatewayRouteId> = BTreeMap::new();
            for (at, age, hosts) in changes {
                let own = id(GatewayRouteKind::ALL[at % 2], &at.to_string());
                wanted.retain(|_, (it, _)| *it != own);
                let seniority = (created(age), own.name.to_string(), own.kind);
                let reached = all.update([(own.clone(), created(age), claims("*", &hosts))]);
                wanted.insert(seniority, (own.clone(), hosts));
                let mut rejected: BTreeMap<GatewayRouteId, GatewayRouteId> = BTreeMap::new();
                let mut accepted: Vec<(&GatewayRouteId, &[&str])> = Vec::new();
                // The oldest one first.
                for (id, hosts) in wanted.values() {
                    let is_rival = |(other, others): &&(&GatewayRouteId, &[&str])| {
                        let meets = |it: &str| others.iter().any(|other| meet(it, other));
                        other.kind != id.kind && hosts.iter().any(|it| meets(it))
                    };
                    match accepted.iter().find(is_rival) {
                        Some((rival, _)) => drop(rejected.insert(id.clone(), (*rival).clone())),
                        None => accepted.push((id, hosts.as_slice())),
                    }
                }
                for (id, _) in wanted.values() {
                    let found = all.rejections(id).and_then(|it| it.get(&key("*")));
                    prop_assert_eq!(found, rejected.get(id));
                    if *id != own && previous.get(id) != rejected.get(id) {
                        prop_assert!(reached.contains(id));
                    }
                }
                previous = rejected;
            }
        }
    }
}
