//! Pure: hosts of listeners, and the hosts that a route has at a listener.

use std::collections::BTreeSet;

use common::wire::{GatewayHostKey, NamespacedName};
use smol_str::SmolStr;

use super::{HTTPS, plan_gateway};
use crate::model::cluster_state::{ClusterState, GatewayRouteKind, ListenerSpec};

/// Listener to which routes may attach.
#[derive(Clone, Copy, Debug)]
pub(super) struct UsableListener<'a> {
    /// Gateway of the listener.
    pub(super) gateway: &'a NamespacedName,
    /// Settings of the listener.
    pub(super) spec: &'a ListenerSpec,
    /// Kinds of routes that it takes.
    pub(super) kinds: &'static [GatewayRouteKind],
}

/// Returns the listeners of all Gateways to which routes may attach.
pub(super) fn usable_listeners(cluster: &ClusterState) -> Vec<UsableListener<'_>> {
    let mut all = Vec::new();
    for (gateway, state) in cluster.gateway_api.own_gateways() {
        let plan = plan_gateway(cluster, gateway, state);
        let listeners = state.listeners.iter().zip(plan.listeners);
        let usable = listeners.filter(|(_, plan)| plan.is_usable);
        all.extend(usable.map(|(spec, plan)| UsableListener { gateway, spec, kinds: plan.kinds }));
    }
    all
}

/// Returns the hosts of all listeners. They have an entry also without a route, so that no request to them is for a less
/// specific listener.
pub fn listener_hosts(cluster: &ClusterState) -> BTreeSet<GatewayHostKey> {
    let listeners = usable_listeners(cluster);
    listeners.iter().map(|it| listener_key(it.spec)).collect()
}

/// Returns the hosts of a route at a listener. `None`: the two have no host in common. A host for which a more specific
/// listener exists is for that one alone, and left out.
pub(super) fn route_hosts(
    hostnames: &[SmolStr],
    listener: UsableListener<'_>,
    all: &[UsableListener<'_>],
) -> Option<BTreeSet<GatewayHostKey>> {
    let own = listener_host(listener.spec);
    let common: Vec<&str> = match hostnames {
        [] => vec![own],
        hostnames => hostnames.iter().filter_map(|it| intersection(own, it)).collect(),
    };
    if common.is_empty() {
        return None;
    }
    // Also by a listener of another Gateway: all share the gateway's ports, at which only the host distinguishes them.
    let is_taken = |host: &str| {
        all.iter()
            .filter(|it| it.spec.port == listener.spec.port)
            .map(|it| listener_host(it.spec))
            .any(|it| it != own && covers(own, it) && covers(it, host))
    };
    let own_hosts = common.into_iter().filter(|it| !is_taken(it));
    Some(own_hosts.map(|it| host_key(listener.spec, it)).collect())
}

/// Returns the reserved hosts and wildcards that get none of the rules of a host, in order: the host itself, or those below
/// it.
pub fn reserved_hosts(cluster: &ClusterState, key: &GatewayHostKey) -> Vec<String> {
    let domains = &cluster.domains;
    if key.is_exact() {
        let is_reserved = domains.is_reserved_host(&key.host);
        return is_reserved.then(|| key.host.to_string()).into_iter().collect();
    }
    let all = domains.mappings_by_host.keys();
    let reserved = all.filter(|it| covers(&key.host, it) && domains.is_reserved_host(it));
    reserved.map(ToString::to_string).collect()
}

/// Returns transport and host of a listener.
pub(super) fn listener_key(listener: &ListenerSpec) -> GatewayHostKey {
    host_key(listener, listener_host(listener))
}

fn host_key(listener: &ListenerSpec, host: &str) -> GatewayHostKey {
    GatewayHostKey { is_tls: *listener.protocol == *HTTPS, host: host.into() }
}

/// Returns the host of a listener: `*` for all hosts.
pub(super) fn listener_host(listener: &ListenerSpec) -> &str {
    listener.hostname.as_deref().unwrap_or("*")
}

/// Returns the more specific one of two hosts of which one covers the other.
fn intersection<'a>(one: &'a str, other: &'a str) -> Option<&'a str> {
    match (covers(one, other), covers(other, one)) {
        (true, _) => Some(other),
        (false, true) => Some(one),
        (false, false) => None,
    }
}

/// Returns true if each host that `narrow` means is one that `wide` means. `*.a` means hosts with one label or more in
/// front of `.a`.
pub(super) fn covers(wide: &str, narrow: &str) -> bool {
    match wide.strip_prefix('*') {
        _ if wide == narrow => true,
        None => false,
        Some("") => true,
        Some(suffix) => {
            let rest = narrow.strip_suffix(suffix);
            rest.is_some_and(|rest| !rest.is_empty())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::cluster_state::AllowedNamespaces;

    fn listener(hostname: &str) -> ListenerSpec {
        ListenerSpec {
            name: "http".into(),
            hostname: (hostname != "*").then(|| hostname.into()),
            port: 80,
            protocol: "HTTP".into(),
            tls: None,
            namespaces: AllowedNamespaces::Same,
            kinds: Vec::new(),
        }
    }

    /// Returns the hosts of a route with these names at the first one of these listeners.
    fn hosts(names: &[&str], listeners: &[&str]) -> Option<Vec<String>> {
        let gateway = NamespacedName::new("a", "g");
        let specs: Vec<ListenerSpec> = listeners.iter().map(|it| listener(it)).collect();
        let kinds = &GatewayRouteKind::ALL;
        let all = specs.iter().map(|spec| UsableListener { gateway: &gateway, spec, kinds });
        let all: Vec<UsableListener<'_>> = all.collect();
        let names: Vec<SmolStr> = names.iter().map(|it| (*it).into()).collect();
        let found = route_hosts(&names, all[0], &all)?;
        Some(found.into_iter().map(|it| it.host.to_string()).collect())
    }

    #[test]
    fn a_route_has_the_hosts_that_it_shares_with_its_listener() {
        for (names, own, expected) in [
            (vec![], "*", Some(vec!["*"])),
            (vec![], "*.a.test", Some(vec!["*.a.test"])),
            (vec!["b.test"], "*", Some(vec!["b.test"])),
            (vec!["x.a.test", "b.test"], "*.a.test", Some(vec!["x.a.test"])),
            (vec!["*.a.test"], "x.a.test", Some(vec!["x.a.test"])),
            (vec!["*.a.test"], "*.x.a.test", Some(vec!["*.x.a.test"])),
            (vec!["x.y.a.test"], "*.a.test", Some(vec!["x.y.a.test"])),
            (vec!["a.test"], "*.a.test", None),
            (vec!["*.b.test"], "*.a.test", None),
            (vec!["xa.test"], "*.a.test", None),
        ] {
            let expected: Option<Vec<String>> =
                expected.map(|it| it.into_iter().map(str::to_owned).collect());
            assert_eq!(hosts(&names, &[own]), expected, "{names:?} at {own}");
        }
    }

    #[test]
    fn a_host_of_a_more_specific_listener_is_left_to_it() {
        let names = ["x.a.test", "*.a.test", "*.test", "b.test"];
        let left = |others: &[&str]| hosts(&names, &[&["*"][..], others].concat());
        let some = |hosts: &[&str]| -> Option<Vec<String>> {
            Some(hosts.iter().map(|it| (*it).to_owned()).collect())
        };
        let all = some(&["*.a.test", "*.test", "b.test", "x.a.test"]);
        assert_eq!(left(&[]), all);
        assert_eq!(left(&["*"]), all, "another Gateway may have the same host");
        assert_eq!(left(&["*.a.test"]), some(&["*.test", "b.test"]));
        assert_eq!(left(&["*.test"]), some(&[]));
    }
}
