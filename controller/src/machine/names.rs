//! Pure: claims of Routes and DomainMappings to names, and the effects when a name gets another owner.

use std::collections::BTreeSet;

use common::wire::NamespacedName;

use super::{ControllerStateMachine, allot};
use crate::{
    children::tagged,
    plan,
    world::{
        AppState, ClusterState, DomainMappingState, PlatformKind, UnixMillis,
        names::{ClaimantNames, NameClaim, NameClaimant},
    },
};

/// Records the names that an app's Route claims. The Route is read from `app`, not from the world.
pub(super) fn ask(app: &AppState, name: &NamespacedName, world: &mut ClusterState) {
    let wish = wish(app, name, world);
    world.names.ask(&NameClaimant::Route(name.clone()), wish);
}

fn wish(app: &AppState, name: &NamespacedName, world: &ClusterState) -> ClaimantNames {
    let mut wish = ClaimantNames::default();
    // On Kubernetes the name's Service exists until it is deleted, and no other app can have the name before.
    let has_left = app.ends(world.settings.platform);
    let Some(route) = app.route.as_ref().filter(|_| !has_left) else { return wish };
    let mut tags: Vec<Option<&str>> = vec![None];
    for tag in route.wanted.iter().filter_map(|it| it.tag.as_deref()) {
        if !tags.contains(&Some(tag)) {
            tags.push(Some(tag));
        }
    }
    for tag in tags {
        let has_numbers = || route.allotted.iter().any(|it| it.tag.as_deref() == tag);
        let bid = NameClaim {
            by: NameClaimant::Route(name.clone()),
            to: NamespacedName::new(name.namespace.clone(), tagged(tag, &name.name)),
            created: route.meta.created,
            uid: route.meta.uid,
            is_tag: tag.is_some(),
            // On the local platform the allocation decides; on Kubernetes the placeholder Service does.
            held: world.settings.platform == PlatformKind::Local && has_numbers(),
        };
        let target = plan::target_of(app, name, tag, world).filter(|it| !it.is_local);
        wish.hosts.extend(target.map(|it| (it.host, bid.clone())));
        wish.services.push(bid);
    }
    wish
}

impl ControllerStateMachine {
    /// Records a mapping's claim to its domain, if its namespace may use the domain.
    pub(super) fn ask_mapping(&mut self, name: &NamespacedName) {
        let mut wish = ClaimantNames::default();
        let claimed = self.world.claims.get(name.name.as_str());
        let is_claimed = claimed.is_some_and(|it| it.namespace == *name.namespace);
        if let Some(DomainMappingState { meta, target, .. }) = self.world.mappings.get(name)
            && is_claimed
        {
            let bid = NameClaim {
                by: NameClaimant::Mapping(name.clone()),
                to: target.clone(),
                created: meta.created,
                uid: meta.uid,
                is_tag: false,
                held: false,
            };
            wish.hosts.push((name.name.to_ascii_lowercase(), bid));
        }
        self.world.names.ask(&NameClaimant::Mapping(name.clone()), wish);
    }

    /// Plans the apps and mappings whose names may have another owner now.
    pub(super) fn settle_rivals(&mut self, now: UnixMillis) {
        // A plan may move further names, whose claimants are planned in the next round.
        while !self.loading {
            let touched = self.world.names.take_touched();
            if touched.is_empty() {
                return;
            }
            self.settle_touched(&touched, now);
        }
    }

    fn settle_touched(&mut self, touched: &BTreeSet<NameClaimant>, now: UnixMillis) {
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
            allot::allot(&mut app, name, &mut self.world);
            self.world.apps.insert(name.clone(), app);
        }
        for (name, before) in routes {
            self.settle(&name, Some(&before), true, now);
            let app = self.world.apps.get(&name);
            let keys = app.map(|app| crate::want::names(&name, app)).unwrap_or_default();
            self.effects.keys.extend(keys);
        }
        for mapping in touched {
            let NameClaimant::Mapping(name) = mapping else { continue };
            let target = self.world.mappings.get(name).map(|it| it.target.clone());
            self.settle_named(target, now);
            self.settle_mapping(name, now);
        }
    }
}
