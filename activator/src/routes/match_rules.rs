//! Pure: rules by which a request finds its service, in the order in which they are tried.

use common::wire::NamespacedName;

use crate::{edge::host::cluster_local_service, entrypoint::Entrypoint};

/// Rule by which a request finds its service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MatchRule {
    /// The connection has come to the service's own port at the activator.
    OwnPort(u16),
    /// The connection has come to the service's gateway port.
    GatewayPort(u16),
    /// The host is the name of this service within the cluster.
    ServiceName(NamespacedName),
    /// The host is the name of this Revision within the cluster: its own Service leads here while it has no pod.
    RevisionName(NamespacedName),
    /// A trusted ingress has chosen this Revision. It is tried before all other rules, and alone.
    ChosenRevision(NamespacedName),
    /// The host is one of a service or of a DomainMapping, in lower case and without port.
    Host(String),
}

/// Returns the rules for a request at this entrypoint. The first one by which a service is found decides.
///
/// `host` is called for gateways only. It returns the host of the request in lower case and without port, or an empty
/// text.
pub fn match_rules(
    entrypoint: Entrypoint,
    host: impl FnOnce() -> String,
    cluster_domain: &str,
) -> impl Iterator<Item = MatchRule> {
    let rules = match entrypoint {
        Entrypoint::Service(port) => [Some(MatchRule::OwnPort(port)), None, None],
        Entrypoint::GatewayPort(port) => [Some(MatchRule::GatewayPort(port)), None, None],
        Entrypoint::External => [Some(MatchRule::Host(host())), None, None],
        Entrypoint::Internal => {
            let host = host();
            // A name may be that of a service or of a Revision; the service comes first.
            let name = cluster_local_service(&host, cluster_domain);
            [
                name.clone().map(MatchRule::ServiceName),
                name.map(MatchRule::RevisionName),
                Some(MatchRule::Host(host)),
            ]
        }
    };
    rules.into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(entrypoint: Entrypoint, host: &str) -> Vec<MatchRule> {
        match_rules(entrypoint, || host.to_owned(), "cluster.local").collect()
    }

    #[test]
    fn names_within_the_cluster_go_before_public_hosts_at_the_inner_gateway_only() {
        let (host, name) = ("hello.default.svc", NamespacedName::new("default", "hello"));
        let by_host = MatchRule::Host(host.to_owned());
        let inside =
            [MatchRule::ServiceName(name.clone()), MatchRule::RevisionName(name), by_host.clone()];
        assert_eq!(rules(Entrypoint::Internal, host), inside);
        assert_eq!(rules(Entrypoint::External, host), [by_host]);
        let public = MatchRule::Host("shop.example.com".to_owned());
        assert_eq!(rules(Entrypoint::Internal, "shop.example.com"), [public]);
    }

    #[test]
    fn the_host_is_of_no_consequence_at_a_service_s_own_port() {
        let no_host = || -> String { panic!("it is not looked at") };
        let rules: Vec<MatchRule> =
            match_rules(Entrypoint::Service(20_001), no_host, "cluster.local").collect();
        assert_eq!(rules, [MatchRule::OwnPort(20_001)]);
    }
}
