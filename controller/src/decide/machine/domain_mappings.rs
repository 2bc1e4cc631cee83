//! Pure: DomainMappings and ClusterDomainClaims as the API server holds them.

use std::collections::BTreeSet;

use common::wire::{NamespacedName, RouteChange, RouteKey, wildcard_suffix};
use serde_json::Value;
use tracing::info;

use super::{ControllerStateMachine, RouteFingerprint};
use crate::{
    decide::{part_keys, plan},
    model::{
        cluster_state::{
            AppState, ConditionType, DomainMappingState, DomainSpec, UnixMillis, conditions,
        },
        object::{ObjectPart, ObjectPartKey, ResourceKind},
    },
    read::{fields, observe},
};

impl ControllerStateMachine {
    /// Handles a DomainMapping; `None`: it was deleted. Plans it, its targets, and the mappings beside it.
    pub(super) fn observe_domain_mapping(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let previous = self.take_domain_mapping(name);
        let secret = |it: &DomainMappingState| it.tls_secret.clone();
        let client_auth = |it: &DomainMappingState| it.client_auth.clone();
        let old_secret = previous.as_ref().map(secret);
        let old_client_auth = previous.as_ref().map(client_auth);
        let old_target = previous.as_ref().map(|it| it.target.clone());
        let old_domain = previous.as_ref().map(|it| it.domain.clone());
        let mut new_target = None;
        if let Some(object) = object {
            let mut mapping = observe::read_domain_mapping(object);
            match previous {
                // The conditions in the cluster state are newer than those that were written.
                Some(previous) => {
                    mapping.conditions = previous.conditions;
                    mapping.served_secret = previous.served_secret;
                    mapping.served_client_ca = previous.served_client_ca;
                }
                None => fields::read_conditions(
                    &mut mapping.conditions,
                    object,
                    &conditions::DOMAIN_CONDITIONS,
                ),
            }
            new_target = Some(mapping.target.clone());
            self.put_domain_mapping(name, mapping);
        } else {
            info!(domain = name.name.as_str(), "domain mapping gone");
        }
        let mut moved = BTreeSet::new();
        if self.cluster.domains.mappings.get(name).map(secret) != old_secret {
            moved = self.update_named_secrets(now);
        }
        if self.cluster.domains.mappings.get(name).map(client_auth) != old_client_auth {
            moved.extend(self.update_named_client_cas(now));
        }
        // The mapping competes for its host name with other mappings and Routes.
        self.update_mapping_claim(name);
        // The former target loses a host, so its routes change too.
        if old_target != new_target {
            self.reconcile_route_owner(old_target, now);
        }
        self.reconcile_route_owner(new_target, now);
        self.reconcile_mapping(name, now);
        let new_domain = self.cluster.domains.mappings.get(name).map(|it| it.domain.clone());
        let has_other_domain = old_domain != new_domain;
        let domains: BTreeSet<DomainSpec> = old_domain.into_iter().chain(new_domain).collect();
        // Mappings of one host share its certificate, and their path rules depend on each other.
        let beside = domains.iter().flat_map(|it| self.mappings_of_host(&name.namespace, it));
        moved.extend(beside);
        if has_other_domain {
            self.update_reserved_hosts(domains.iter().map(|it| it.host.to_string()));
        }
        // Time may have passed for other mappings too.
        moved.remove(name);
        self.reconcile_mappings_and_targets(&moved, now);
        // The mapping may need a ClusterDomainClaim, or its claim may have become superfluous.
        let claims = domains.iter().map(|it| domain_claim_key(it.claim_name()));
        self.effects.changed_keys.extend(claims);
        // The certificate of a host that the mapping has left may have become superfluous, or gets another owner.
        for domain in &domains {
            self.check_request_of_host(&name.namespace, domain);
        }
    }

    /// Adds a mapping to the cluster state. Its name is free.
    fn put_domain_mapping(&mut self, name: &NamespacedName, mapping: DomainMappingState) {
        let domains = &mut self.cluster.domains;
        let of_target = domains.mappings_by_target.entry(mapping.target.clone()).or_default();
        of_target.insert(name.clone());
        let of_host = domains.mappings_by_host.entry(mapping.domain.host.clone()).or_default();
        of_host.insert(name.clone());
        domains.mappings.insert(name.clone(), mapping);
    }

    /// Returns the mappings of a namespace that have this host.
    pub(super) fn mappings_of_host(
        &self,
        namespace: &str,
        domain: &DomainSpec,
    ) -> Vec<NamespacedName> {
        let all = self.cluster.domains.mappings_of_host(namespace, &domain.host);
        all.into_iter().map(|(name, _)| name.clone()).collect()
    }

    /// Returns all hosts and wildcards that DomainMappings have.
    pub(super) fn mapped_hosts(&self) -> Vec<String> {
        self.cluster.domains.mappings_by_host.keys().map(ToString::to_string).collect()
    }

    /// Puts those of these hosts and wildcards into the RouteTable that are reserved now, and takes the others out. Each
    /// is a subject of its own, so that a change of one mapping is sent without the hosts of all others.
    pub(super) fn update_reserved_hosts(&mut self, hosts: impl IntoIterator<Item = String>) {
        if self.is_loading {
            return;
        }
        for host in hosts {
            let is_reserved = self.cluster.domains.is_reserved_host(&host);
            let key = RouteKey::ReservedHost(host.clone());
            if is_reserved {
                let change = RouteChange::ReservedHost(host);
                self.routes.set(key, RouteFingerprint::of_change(&change));
            } else {
                self.routes.remove(&key);
            }
        }
    }

    /// Removes a mapping from the cluster state.
    fn take_domain_mapping(&mut self, name: &NamespacedName) -> Option<DomainMappingState> {
        let domains = &mut self.cluster.domains;
        let mapping = domains.mappings.remove(name)?;
        if let Some(all) = domains.mappings_by_target.get_mut(&mapping.target) {
            all.remove(name);
            if all.is_empty() {
                domains.mappings_by_target.remove(&mapping.target);
            }
        }
        let host = &mapping.domain.host;
        if let Some(all) = domains.mappings_by_host.get_mut(host) {
            all.remove(name);
            if all.is_empty() {
                domains.mappings_by_host.remove(host);
            }
        }
        Some(mapping)
    }

    /// Handles a ClusterDomainClaim; `None`: it was deleted. Plans the mappings whose domain it covers.
    pub(super) fn observe_domain_claim(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        match object.map(observe::read_domain_claim) {
            Some(claim) => drop(self.cluster.domains.claims.insert(name.name.to_string(), claim)),
            None => drop(self.cluster.domains.claims.remove(name.name.as_str())),
        }
        // Mappings in several namespaces may need the claim; only the claim's namespace may use the domain.
        let is_same_domain = |(_, mapping): &(&NamespacedName, &DomainMappingState)| {
            mapping.domain.claim_name() == name.name.as_str()
        };
        let mappings: Vec<(NamespacedName, NamespacedName)> = self
            .cluster
            .domains
            .mappings
            .iter()
            .filter(is_same_domain)
            .map(|(name, it)| (name.clone(), it.target.clone()))
            .collect();
        for (mapping, target) in mappings {
            self.update_mapping_claim(&mapping);
            self.reconcile_route_owner(Some(target), now);
            self.reconcile_mapping(&mapping, now);
        }
        // The claim is also the one of a wildcard below the domain.
        self.update_reserved_hosts([name.name.to_string(), format!("*.{}", name.name)]);
        self.effects.changed_keys.push(domain_claim_key(&name.name));
    }

    /// Plans the app whose Route has the name `target`.
    pub(super) fn reconcile_route_owner(
        &mut self,
        target: Option<NamespacedName>,
        now: UnixMillis,
    ) {
        if let Some(owner) = target.and_then(|it| self.cluster.app_of_route_name(&it)) {
            self.reconcile_app(&owner, now);
        }
    }

    /// Plans the conditions of a mapping again.
    pub(super) fn reconcile_mapping(&mut self, name: &NamespacedName, now: UnixMillis) {
        if self.is_loading {
            return;
        }
        let Some(previous) = self.cluster.domains.mappings.get(name).cloned() else { return };
        let mut mapping = previous.clone();
        plan::domain_mappings::update_conditions(&self.cluster, name, &mut mapping, now);
        if mapping != previous {
            let ready = mapping.conditions.is_true(ConditionType::DomainReady);
            info!(
                domain = name.name.as_str(),
                namespace = name.namespace.as_str(),
                ready,
                "domain mapping changed"
            );
            self.cluster.domains.mappings.insert(name.clone(), mapping);
        }
        // Also without a change of conditions: the status may differ at the API server.
        self.effects.changed_keys.push(ObjectPartKey::new(
            ResourceKind::DomainMapping,
            ObjectPart::Status,
            name.clone(),
        ));
        self.check_request_of_host(&name.namespace, &previous.domain);
    }

    /// Passes the keys of the requested certificate of a host to the writer, which checks it. No certificate is
    /// requested for a wildcard.
    fn check_request_of_host(&mut self, namespace: &str, domain: &DomainSpec) {
        let is_enabled = plan::requested_certificates::is_enabled(&self.cluster);
        if self.is_loading || !is_enabled || wildcard_suffix(&domain.host).is_some() {
            return;
        }
        let certificate =
            plan::requested_certificates::host_certificate_name(namespace, &domain.host);
        self.effects.changed_keys.extend(part_keys::request_keys(&certificate));
    }

    /// Plans the mappings to an app's names, before and after a change of the app.
    pub(super) fn reconcile_mappings_of_app(
        &mut self,
        app: &NamespacedName,
        previous: &AppState,
        now: UnixMillis,
    ) {
        if self.cluster.domains.mappings_by_target.is_empty() {
            return;
        }
        let after = self.cluster.apps.get(app).map(|it| &**it);
        // A mapping to a tag that has just gone must lose its target.
        let allocations = after.into_iter().chain([previous]).flat_map(AppState::allocations);
        let names = allocations
            .map(|it| NamespacedName::new(&*app.namespace, plan::placeholder_name(it, &app.name)));
        let names: BTreeSet<NamespacedName> = names.chain([app.clone()]).collect();
        let mapped =
            names.iter().filter_map(|it| self.cluster.domains.mappings_by_target.get(it)).flatten();
        for mapping in mapped.cloned().collect::<Vec<_>>() {
            self.reconcile_mapping(&mapping, now);
        }
    }

    /// Plans all mappings, and checks all ClusterDomainClaims, also those whose mappings no longer exist.
    pub(super) fn reconcile_all_mappings(&mut self, now: UnixMillis) {
        for name in self.cluster.domains.mappings.keys().cloned().collect::<Vec<_>>() {
            self.reconcile_mapping(&name, now);
        }
        let wanted = self.cluster.domains.mappings.values();
        let wanted = wanted.map(|it| domain_claim_key(it.domain.claim_name()));
        self.effects.changed_keys.extend(wanted);
        let claims = self.cluster.domains.claims.keys().map(|it| domain_claim_key(it));
        self.effects.changed_keys.extend(claims);
    }
}

fn domain_claim_key(domain: &str) -> ObjectPartKey {
    ObjectPartKey::new(
        ResourceKind::ClusterDomainClaim,
        ObjectPart::Object,
        NamespacedName::new("", domain),
    )
}
