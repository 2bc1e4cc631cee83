//! Pure: hosts whose DomainMappings have path rules, and hosts with wildcards.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use common::wire::{ClientAuth, MappedDomain, NamespacedName, PathRule, wildcard_suffix};
use smol_str::SmolStr;

use crate::routes::{
    path_match::{HostPathError, UnclearPath, longest_prefix},
    service::RoutedService,
    service_match::ServiceMatch,
};

/// DomainMappings with path rules, by host and prefix. Other hosts are not in it.
#[derive(Debug, Default)]
pub(crate) struct RuledHosts {
    /// Rules of each host. A wildcard is under what its hosts end with, as `.example.com`, which is no host.
    by_host: HashMap<Box<str>, HostPathRules>,
    /// Hosts and wildcards that DomainMappings have, in force or not. A wildcard is written as in `by_host`.
    reserved: HashSet<Box<str>>,
    /// Reserved hosts as a controller of an earlier release sends them, each with the number of services that list it.
    listed_by_services: HashMap<Box<str>, usize>,
}

/// Rules of one host, by their prefixes as they are compared.
type HostPathRules = BTreeMap<SmolStr, RuleOwners>;

/// DomainMappings of one prefix, sorted by the names of their services. The first one has the prefix.
///
/// The controller lists each prefix of a host once. Should a table list one twice, each activator chooses the same.
#[derive(Debug, Default)]
struct RuleOwners(Vec<RuledDomain>);

#[derive(Debug)]
struct RuledDomain {
    service: Arc<RoutedService>,
    /// Index among the service's DomainMappings.
    domain_index: usize,
}

impl RuledHosts {
    /// Adds the DomainMappings of a service that have path rules.
    pub(crate) fn add_service(&mut self, service: &Arc<RoutedService>) {
        for (domain_index, domain, rule) in ruled_domains(service) {
            let rules = self.by_host.entry(host_key(&domain.host).into()).or_default();
            let owners = &mut rules.entry(rule.prefix.as_str().into()).or_default().0;
            let at = owners.partition_point(|it| it.service.name <= service.name);
            owners.insert(at, RuledDomain { service: Arc::clone(service), domain_index });
        }
        for host in service.reserved_hosts() {
            *self.listed_by_services.entry(host.as_str().into()).or_default() += 1;
        }
    }

    /// Reserves a host or wildcard, which a DomainMapping has.
    pub(crate) fn reserve(&mut self, host: &str) {
        self.reserved.insert(host_key(host).into());
    }

    /// Ends the reservation of a host or wildcard.
    pub(crate) fn release(&mut self, host: &str) {
        self.reserved.remove(host_key(host));
    }

    /// Iterates over the reserved hosts and wildcards, as DomainMappings have them.
    pub(crate) fn reserved_hosts(&self) -> impl Iterator<Item = String> {
        self.reserved.iter().map(|it| match it.starts_with('.') {
            true => format!("*{it}"),
            false => it.to_string(),
        })
    }

    /// Returns true if a DomainMapping has exactly this host, in force or not.
    pub(crate) fn is_reserved(&self, host: &str) -> bool {
        self.reserved.contains(host) || self.listed_by_services.contains_key(host)
    }

    /// Returns true if a DomainMapping has the wildcard that covers this host with one label, in force or not.
    pub(crate) fn is_below_reserved(&self, host: &str) -> bool {
        host.find('.').is_some_and(|at| self.reserved.contains(&host[at..]))
    }

    /// Removes the DomainMappings of a service.
    pub(crate) fn remove_service(&mut self, service: &Arc<RoutedService>) {
        for (_, domain, rule) in ruled_domains(service) {
            let (host, prefix) = (host_key(&domain.host), rule.prefix.as_str());
            let Some(rules) = self.by_host.get_mut(host) else { continue };
            if let Some(owners) = rules.get_mut(prefix) {
                // Another mapping may want the same host and prefix, and owns them from now on.
                owners.0.retain(|it| !Arc::ptr_eq(&it.service, service));
                if owners.0.is_empty() {
                    rules.remove(prefix);
                }
            }
            if rules.is_empty() {
                self.by_host.remove(host);
            }
        }
        for host in service.reserved_hosts() {
            let Some(services) = self.listed_by_services.get_mut(host.as_str()) else { continue };
            *services -= 1;
            if *services == 0 {
                self.listed_by_services.remove(host.as_str());
            }
        }
    }

    /// Finds the service for a path of a host. `None`: the host has no rules, and no wildcard covers it.
    pub(crate) fn find(
        &self,
        host: &str,
        path: &str,
    ) -> Result<Option<ServiceMatch>, HostPathError> {
        let Some(rules) = self.rules_of(host) else { return Ok(None) };
        let owners = longest_prefix(rules, path);
        let owners = owners.map_err(|UnclearPath| HostPathError::UnclearPath)?;
        let owner = owners.and_then(RuleOwners::first).ok_or(HostPathError::NoRule)?;
        Ok(Some(owner.service_match()))
    }

    /// Finds the service of one rule. `prefix` is as users write it: `/` for all paths.
    pub(crate) fn find_rule(&self, host: &str, prefix: &str) -> Option<ServiceMatch> {
        let rules = self.by_host.get(host_key(host))?;
        let prefix = if prefix == "/" { "" } else { prefix };
        Some(rules.get(prefix)?.first()?.service_match())
    }

    /// Finds the service of a host that has one rule, which is for all of its paths.
    pub(crate) fn find_only_rule(&self, host: &str) -> Option<ServiceMatch> {
        let rules = self.rules_of(host)?;
        Some(rules.get("").filter(|_| rules.len() == 1)?.first()?.service_match())
    }

    /// Certificate and rule for client certificates that the host has for handshakes, whose path is not known yet.
    ///
    /// The controller gives all rules of a host the same. While it changes them one after the other, the first prefix
    /// with a setting counts. A request whose own rule differs gets 421.
    pub(crate) fn handshake_rules(
        &self,
        host: &str,
    ) -> (Option<NamespacedName>, Option<ClientAuth>) {
        let Some(rules) = self.rules_of(host) else { return (None, None) };
        let domains = || rules.values().filter_map(|it| it.first()?.domain());
        let certificate = domains().find_map(|it| it.certificate.clone());
        (certificate, domains().find_map(|it| it.client_auth.clone()))
    }

    /// Returns true if the host itself has rules.
    pub(crate) fn has_host(&self, host: &str) -> bool {
        !host.starts_with('.') && self.by_host.contains_key(host)
    }

    /// Returns true if the host itself has rules, a wildcard covers it, or it is reserved.
    pub(crate) fn covers(&self, host: &str) -> bool {
        self.rules_of(host).is_some() || self.is_reserved(host)
    }

    /// Rules of a host: its own, else those of the wildcard that covers it with one label. A reserved host has its own
    /// only, or none: it may be one of another namespace, whose DomainMapping is not in force just now.
    fn rules_of(&self, host: &str) -> Option<&HostPathRules> {
        if self.by_host.is_empty() || host.starts_with('.') {
            return None;
        }
        let covering = || {
            let of_wildcard = self.by_host.get(&host[host.find('.')?..])?;
            (!self.is_reserved(host)).then_some(of_wildcard)
        };
        self.by_host.get(host).or_else(covering)
    }
}

impl RuleOwners {
    fn first(&self) -> Option<&RuledDomain> {
        self.0.first()
    }
}

impl RuledDomain {
    fn service_match(&self) -> ServiceMatch {
        let (service, domain_index) = (Arc::clone(&self.service), Some(self.domain_index));
        ServiceMatch { service, domain_index, picked_backend: None }
    }

    fn domain(&self) -> Option<&MappedDomain> {
        self.service.domains().get(self.domain_index)
    }
}

/// Key of a host or wildcard.
fn host_key(host: &str) -> &str {
    wildcard_suffix(host).unwrap_or(host)
}

/// DomainMappings of a service that have path rules, each with its index.
fn ruled_domains(
    service: &RoutedService,
) -> impl Iterator<Item = (usize, &MappedDomain, &PathRule)> {
    let domains = service.domains().iter().enumerate();
    domains.filter_map(|(at, domain)| Some((at, domain, domain.path_rule.as_ref()?)))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use common::{
        fixtures::ruled_domain as domain,
        wire::{ConnectionPath, GatewayRules},
    };

    use super::*;

    fn service(name: &str, mapped_domains: Vec<MappedDomain>) -> Arc<RoutedService> {
        Arc::new(RoutedService {
            name: NamespacedName::new("default", name),
            targets: Box::default(),
            path: ConnectionPath::Activator,
            path_since: Instant::now(),
            protocol: None,
            service_port: None,
            serves_local_tls: false,
            port: 20_001,
            hosts: Box::default(),
            gateway_rules: Some(Box::new(GatewayRules {
                mapped_domains,
                ..GatewayRules::default()
            })),
        })
    }

    fn found(hosts: &RuledHosts, host: &str, path: &str) -> Result<String, Option<HostPathError>> {
        match hosts.find(host, path) {
            Ok(Some(found)) => Ok(found.service.name.name.to_string()),
            Ok(None) => Err(None),
            Err(error) => Err(Some(error)),
        }
    }

    #[test]
    fn an_exact_host_goes_before_a_wildcard_of_one_label() {
        let mut hosts = RuledHosts::default();
        let wild = service("wild", vec![domain("*.example.com", "/")]);
        let exact = service("exact", vec![domain("a.example.com", "/v1")]);
        let deep = service("deep", vec![domain("*.b.example.com", "/")]);
        for it in [&wild, &exact, &deep] {
            hosts.add_service(it);
        }
        assert_eq!(found(&hosts, "x.example.com", "/"), Ok("wild".to_owned()));
        assert_eq!(found(&hosts, "a.example.com", "/v1/x"), Ok("exact".to_owned()));
        // The host is chosen before the path.
        assert_eq!(found(&hosts, "a.example.com", "/v2"), Err(Some(HostPathError::NoRule)));
        assert_eq!(found(&hosts, "a.b.example.com", "/"), Ok("deep".to_owned()));
        let unclear = Err(Some(HostPathError::UnclearPath));
        assert_eq!(found(&hosts, "a.example.com", "/v1/../v2"), unclear);
        for host in ["example.com", ".example.com", "x.y.example.com", "com", ""] {
            assert_eq!(found(&hosts, host, "/"), Err(None), "{host:?}");
        }
        for it in [&wild, &exact, &deep] {
            hosts.remove_service(it);
        }
        assert!(hosts.by_host.is_empty());
    }

    #[test]
    fn a_wildcard_does_not_cover_a_reserved_host() {
        let reserving = |name: &str, prefix: &str| {
            let mut it = Arc::into_inner(service(name, Vec::new())).unwrap();
            it.gateway_rules = Some(Box::new(GatewayRules {
                mapped_domains: vec![domain("*.example.com", prefix)],
                reserved_hosts: vec!["a.example.com".to_owned()],
                ..GatewayRules::default()
            }));
            Arc::new(it)
        };
        let mut hosts = RuledHosts::default();
        let (all, part) = (reserving("all", "/"), reserving("part", "/v1"));
        let exact = service("exact", vec![domain("a.example.com", "/")]);
        hosts.add_service(&all);
        hosts.add_service(&part);
        assert_eq!(found(&hosts, "b.example.com", "/v1"), Ok("part".to_owned()));
        assert_eq!(found(&hosts, "a.example.com", "/"), Err(None));
        assert!(hosts.covers("a.example.com") && !hosts.has_host("a.example.com"));
        hosts.add_service(&exact);
        assert_eq!(found(&hosts, "a.example.com", "/v1"), Ok("exact".to_owned()));
        hosts.remove_service(&exact);
        // The other service lists it still.
        hosts.remove_service(&part);
        assert_eq!(found(&hosts, "a.example.com", "/"), Err(None));
        hosts.remove_service(&all);
        assert!(hosts.listed_by_services.is_empty());
        hosts.add_service(&service("all", vec![domain("*.example.com", "/")]));
        assert_eq!(found(&hosts, "a.example.com", "/"), Ok("all".to_owned()));
    }

    #[test]
    fn a_host_of_the_table_is_reserved_until_it_is_released() {
        let mut hosts = RuledHosts::default();
        hosts.add_service(&service("all", vec![domain("*.example.com", "/")]));
        ["a.example.com", "*.b.test", "c.test"].iter().for_each(|it| hosts.reserve(it));
        assert_eq!(found(&hosts, "a.example.com", "/"), Err(None));
        assert_eq!(found(&hosts, "b.example.com", "/"), Ok("all".to_owned()));
        let reserved = ["a.example.com", "x.b.test", "b.test", "c.test", ""];
        let is_reserved = reserved.map(|it| (hosts.is_reserved(it), hosts.is_below_reserved(it)));
        let (exact, below, free) = ((true, false), (false, true), (false, false));
        assert_eq!(is_reserved, [exact, below, free, exact, free]);
        let mut all: Vec<String> = hosts.reserved_hosts().collect();
        all.sort();
        assert_eq!(all, ["*.b.test", "a.example.com", "c.test"]);
        all.iter().for_each(|it| hosts.release(it));
        assert_eq!(found(&hosts, "a.example.com", "/"), Ok("all".to_owned()));
        assert_eq!(hosts.reserved_hosts().count(), 0);
    }

    #[test]
    fn a_prefix_that_is_listed_twice_has_one_owner_in_any_order() {
        let (first, second) = (
            service("a", vec![domain("a.example", "/v1")]),
            service("b", vec![domain("a.example", "/v1"), domain("a.example", "/")]),
        );
        for order in [[&first, &second], [&second, &first]] {
            let mut hosts = RuledHosts::default();
            for it in order {
                hosts.add_service(it);
            }
            assert_eq!(found(&hosts, "a.example", "/v1"), Ok("a".to_owned()));
            hosts.remove_service(&first);
            assert_eq!(found(&hosts, "a.example", "/v1"), Ok("b".to_owned()));
            assert!(hosts.find_rule("a.example", "/").is_some());
            assert!(hosts.find_rule("a.example", "/v2").is_none());
        }
    }

    #[test]
    fn handshakes_get_the_settings_of_any_rule_of_the_host() {
        let secret = NamespacedName::new("default", "tls");
        let client_auth = ClientAuth { ca: None, is_optional: false };
        let with_secret =
            MappedDomain { certificate: Some(secret.clone()), ..domain("*.example", "/b") };
        let guarded =
            MappedDomain { client_auth: Some(client_auth.clone()), ..domain("*.example", "/c") };
        let mut hosts = RuledHosts::default();
        let domains = vec![domain("*.example", "/a"), with_secret, guarded];
        hosts.add_service(&service("a", domains));
        assert_eq!(hosts.handshake_rules("x.example"), (Some(secret), Some(client_auth)));
        assert_eq!(hosts.handshake_rules("x.y.example"), (None, None));
    }
}
