//! Pure: claims of Routes and DomainMappings to names, and the effects when a name gets another owner.

use std::{
    collections::{BTreeMap, BTreeSet},
    num::NonZeroU16,
};

use common::wire::NamespacedName;
use serde_json::Value;

use super::{ControllerStateMachine, ObjectsToStore, allocate};
use crate::{
    decide::{part_keys, plan},
    model::{
        cluster_state::{
            AppState, ClusterState, DomainMappingState, DomainSpec, PlatformKind, UnixMillis,
            name_registry::{ClaimantNames, NameClaim, NameClaimant},
        },
        object::names::tagged_name,
    },
    read::observe,
};

/// Records the names that an app's Route claims. The Route is read from `app`, not from the cluster state.
pub(super) fn update_route_claims(
    app: &AppState,
    name: &NamespacedName,
    cluster: &mut ClusterState,
) {
    let claims = route_claims(app, name, cluster);
    cluster.names.registry.set_claims(&NameClaimant::Route(name.clone()), claims);
}

/// Returns the claims of a Route: to the names of itself and its tags, to their hosts, and to a gateway port.
fn route_claims(app: &AppState, name: &NamespacedName, cluster: &ClusterState) -> ClaimantNames {
    let mut claims = ClaimantNames::default();
    // On Kubernetes the name's Service exists until it is deleted, and no other app can have the name before.
    let is_deleted = app.cascades_deletion(cluster.settings.platform);
    let Some(route) = app.route.as_ref().filter(|_| !is_deleted) else { return claims };
    let mut tags: Vec<Option<&str>> = vec![None];
    for tag in route.traffic_spec.iter().filter_map(|it| it.tag.as_deref()) {
        if !tags.contains(&Some(tag)) {
            tags.push(Some(tag));
        }
    }
    for tag in tags {
        let has_allocation = || route.allocations.iter().any(|it| it.tag.as_deref() == tag);
        let claim = NameClaim {
            claimant: NameClaimant::Route(name.clone()),
            service: NamespacedName::new(name.namespace.clone(), tagged_name(tag, &name.name)),
            created: route.meta.created,
            uid: route.meta.uid,
            is_tag: tag.is_some(),
            // On the local platform the allocation decides; on Kubernetes the placeholder Service does.
            holds_allocation: cluster.settings.platform == PlatformKind::Local && has_allocation(),
        };
        let public_host = plan::route_host(app, name, tag, cluster).filter(|it| !it.is_private);
        claims.hosts.extend(public_host.map(|it| (it.host, claim.clone())));
        if tag.is_none() {
            let port = plan::gateway_ports::claimable_port(app, name, cluster);
            claims.gateway_port = port.and_then(Result::ok).map(|port| (port, claim.clone()));
        }
        claims.services.push(claim);
    }
    claims
}

impl ControllerStateMachine {
    /// Records a mapping's claim to its domain, if its namespace may use the domain.
    pub(super) fn update_mapping_claim(&mut self, name: &NamespacedName) {
        let mut claims = ClaimantNames::default();
        let domain_claims = &self.cluster.domains.claims;
        let is_claimed = |domain: &DomainSpec| {
            let claim = domain_claims.get(domain.claim_name());
            domain.fault.is_none() && claim.is_some_and(|it| it.namespace == *name.namespace)
        };
        if let Some(DomainMappingState { meta, target, domain, .. }) =
            self.cluster.domains.mappings.get(name)
            && is_claimed(domain)
        {
            let claim = NameClaim {
                claimant: NameClaimant::Mapping(name.clone()),
                service: target.clone(),
                created: meta.created,
                uid: meta.uid,
                is_tag: false,
                holds_allocation: false,
            };
            // No host has a `/`, so that Routes compete for the host, and other mappings for its paths.
            claims.hosts.push((domain.rule_name(), claim.clone()));
            claims.hosts.push((domain.host.to_string(), claim));
        }
        self.cluster.names.registry.set_claims(&NameClaimant::Mapping(name.clone()), claims);
    }

    /// Handles the record of the owners of gateway ports, which the leader writes and every replica follows.
    pub(super) fn observe_port_record(&mut self, object: Option<&Value>) {
        // Also without a change: a record that was deleted is to be written again, and one that was written on an earlier
        // version is compared with the next one.
        self.effects.changed_keys.push(part_keys::port_record_key(&self.cluster));
        let version = object.and_then(|it| it["metadata"]["resourceVersion"].as_str());
        self.cluster.names.port_record_version = version.unwrap_or_default().into();
        // The owners of a deleted record stay. Otherwise those of the annotations would count, which users may write.
        let Some(record) = object.map(observe::read_port_record) else { return };
        let names = &mut self.cluster.names;
        if names.port_record.as_ref() == Some(&record) {
            return;
        }
        let before = names.port_record.replace(record);
        let owned = names.placeholders.values().filter_map(|it| it.gateway_port);
        // The annotations have counted until the first record.
        let annotated = owned.filter(|_| before.is_none());
        let recorded = before.iter().chain(&names.port_record).flat_map(BTreeMap::keys).copied();
        let ports: BTreeSet<NonZeroU16> = recorded.chain(annotated).collect();
        ports.into_iter().for_each(|port| names.registry.mark_port_changed(port));
    }

    /// Plans the apps and mappings whose names may have another owner now.
    pub(super) fn reconcile_claimants(&mut self, now: UnixMillis) {
        // A plan may move further names, whose claimants are planned in the next round.
        while !self.is_loading {
            let changed_claimants = self.cluster.names.registry.take_changed_claimants();
            if changed_claimants.is_empty() {
                return;
            }
            self.reconcile_changed_claimants(&changed_claimants, now);
        }
    }

    /// Plans the Routes and mappings whose names have got or lost an owner.
    fn reconcile_changed_claimants(&mut self, claimants: &BTreeSet<NameClaimant>, now: UnixMillis) {
        let routes = claimants.iter().filter_map(|claimant| match claimant {
            NameClaimant::Route(app) => {
                Some((app.clone(), AppState::clone(self.cluster.apps.get(app)?)))
            }
            NameClaimant::Mapping(_) => None,
        });
        let routes: Vec<(NamespacedName, AppState)> = routes.collect();
        // Two rounds: an app may need an allocation that another app releases in the first round.
        for (name, _) in routes.iter().chain(&routes) {
            let Some(mut app) = self.cluster.apps.remove(name) else { continue };
            allocate::allocate(&mut app, name, &mut self.cluster);
            self.cluster.apps.insert(name.clone(), app);
        }
        for (name, previous) in routes {
            self.reconcile_changed_app(&name, Some(&previous), ObjectsToStore::All, now);
            let app = self.cluster.apps.get(&name);
            let keys = app.map(|app| part_keys::route_name_keys(&name, app)).unwrap_or_default();
            self.effects.changed_keys.extend(keys);
            let port_key = app.and_then(|app| part_keys::claimed_port_key(app, &self.cluster));
            self.effects.changed_keys.extend(port_key);
        }
        // After the Routes: a mapping is ready only once its target has its names.
        for mapping in claimants {
            let NameClaimant::Mapping(name) = mapping else { continue };
            let target = self.cluster.domains.mappings.get(name).map(|it| it.target.clone());
            self.reconcile_route_owner(target, now);
            self.reconcile_mapping(name, now);
        }
    }
}
