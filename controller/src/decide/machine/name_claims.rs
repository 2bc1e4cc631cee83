//! Pure: claims of Routes and DomainMappings to names, and the effects when a name gets another owner.

use std::collections::BTreeSet;

use common::wire::NamespacedName;

use super::{ControllerStateMachine, allocate};
use crate::{
    decide::plan,
    model::{
        object::names::tagged_name,
        world::{
            AppState, ClusterState, DomainMappingState, PlatformKind, UnixMillis,
            name_registry::{ClaimantNames, NameClaim, NameClaimant},
        },
    },
};

/// Records the names that an app's Route claims. The Route is read from `app`, not from the world.
pub(super) fn update_route_claims(app: &AppState, name: &NamespacedName, world: &mut ClusterState) {
    let wish = route_claims(app, name, world);
    world.names.registry.set_claims(&NameClaimant::Route(name.clone()), wish);
}

fn route_claims(app: &AppState, name: &NamespacedName, world: &ClusterState) -> ClaimantNames {
    let mut wish = ClaimantNames::default();
    // On Kubernetes the name's Service exists until it is deleted, and no other app can have the name before.
    let has_left = app.cascades_deletion(world.settings.platform);
    let Some(route) = app.route.as_ref().filter(|_| !has_left) else { return wish };
    let mut tags: Vec<Option<&str>> = vec![None];
    for tag in route.traffic_spec.iter().filter_map(|it| it.tag.as_deref()) {
        if !tags.contains(&Some(tag)) {
            tags.push(Some(tag));
        }
    }
    for tag in tags {
        let has_numbers = || route.allocations.iter().any(|it| it.tag.as_deref() == tag);
        let bid = NameClaim {
            claimant: NameClaimant::Route(name.clone()),
            service: NamespacedName::new(name.namespace.clone(), tagged_name(tag, &name.name)),
            created: route.meta.created,
            uid: route.meta.uid,
            is_tag: tag.is_some(),
            // On the local platform the allocation decides; on Kubernetes the placeholder Service does.
            holds_allocation: world.settings.platform == PlatformKind::Local && has_numbers(),
        };
        let target = plan::route_host(app, name, tag, world).filter(|it| !it.is_local);
        wish.hosts.extend(target.map(|it| (it.host, bid.clone())));
        wish.services.push(bid);
    }
    wish
}

impl ControllerStateMachine {
    /// Records a mapping's claim to its domain, if its namespace may use the domain.
    pub(super) fn update_mapping_claim(&mut self, name: &NamespacedName) {
        let mut wish = ClaimantNames::default();
        let claimed = self.world.domains.claims.get(name.name.as_str());
        let is_claimed = claimed.is_some_and(|it| it.namespace == *name.namespace);
        if let Some(DomainMappingState { meta, target, .. }) = self.world.domains.mappings.get(name)
            && is_claimed
        {
            let bid = NameClaim {
                claimant: NameClaimant::Mapping(name.clone()),
                service: target.clone(),
                created: meta.created,
                uid: meta.uid,
                is_tag: false,
                holds_allocation: false,
            };
            wish.hosts.push((name.name.to_ascii_lowercase(), bid));
        }
        self.world.names.registry.set_claims(&NameClaimant::Mapping(name.clone()), wish);
    }

    /// Plans the apps and mappings whose names may have another owner now.
    pub(super) fn reconcile_claimants(&mut self, now: UnixMillis) {
        // A plan may move further names, whose claimants are planned in the next round.
        while !self.is_loading {
            let touched = self.world.names.registry.take_changed_claimants();
            if touched.is_empty() {
                return;
            }
            self.reconcile_changed_claimants(&touched, now);
        }
    }

    fn reconcile_changed_claimants(&mut self, touched: &BTreeSet<NameClaimant>, now: UnixMillis) {
        let routes = touched.iter().filter_map(|it| match it {
            NameClaimant::Route(app) => {
                Some((app.clone(), AppState::clone(self.world.apps.get(app)?)))
            }
            NameClaimant::Mapping(_) => None,
        });
        let routes: Vec<(NamespacedName, AppState)> = routes.collect();
        // Twice: an allocation that one app releases in the first round, another may get in the second.
        for (name, _) in routes.iter().chain(&routes) {
            let Some(mut app) = self.world.apps.remove(name) else { continue };
            allocate::allocate(&mut app, name, &mut self.world);
            self.world.apps.insert(name.clone(), app);
        }
        for (name, before) in routes {
            self.reconcile_app(&name, Some(&before), true, now);
            let app = self.world.apps.get(&name);
            let keys = app
                .map(|app| crate::decide::part_keys::route_name_keys(&name, app))
                .unwrap_or_default();
            self.effects.changed_keys.extend(keys);
        }
        for mapping in touched {
            let NameClaimant::Mapping(name) = mapping else { continue };
            let target = self.world.domains.mappings.get(name).map(|it| it.target.clone());
            self.reconcile_route_owner(target, now);
            self.reconcile_mapping(name, now);
        }
    }
}
