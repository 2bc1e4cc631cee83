//! Pure: objects that must exist by now. A missing one would go unnoticed otherwise: no write of it fails, and all that
//! depends on it waits forever.

use common::wire::NamespacedName;

use super::{containers, made, names, stays};
use crate::{
    children::ResourceKind,
    kube::{ObjectPart, ObjectPartKey},
    observe::ActivatorReadiness,
    world::{AppRevision, AppState, ClusterState, Uid},
};

/// Child objects that one object requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequiredChildren {
    /// Object that requires them: a Configuration, a Revision or a Route.
    pub of: (ResourceKind, NamespacedName, Uid),
    /// Keys of the required objects.
    pub keys: Vec<ObjectPartKey>,
}

/// Returns the objects that must exist for the app of this name.
pub fn owed(world: &ClusterState, name: &NamespacedName) -> Vec<RequiredChildren> {
    let Some(app) = world.apps.get(name).filter(|app| stays(world, name, app)) else {
        return Vec::new();
    };
    let Some(configuration) = app.configuration.as_ref().filter(|it| !it.leaving) else {
        return route(world, name, app).into_iter().collect();
    };
    let full = |it: &AppRevision| NamespacedName::new(name.namespace.clone(), &*it.name);
    let revisions = app.revisions.iter().filter(|it| !it.leaving && !it.gone);
    let (planned, there): (Vec<_>, Vec<_>) = revisions.partition(|it| it.meta.uid == Uid(0));
    let keys = planned
        .into_iter()
        .map(|it| ObjectPartKey::new(ResourceKind::Revision, ObjectPart::Object, full(it)));
    // Also without missing objects: the Configuration may carry an earlier error, which this clears.
    let of = (ResourceKind::Configuration, name.clone(), configuration.meta.uid);
    let first = RequiredChildren { of, keys: keys.collect() };
    let of = there.into_iter().filter_map(|revision| {
        let of = (ResourceKind::Revision, full(revision), revision.meta.uid);
        // No objects are made before tags are resolved to digests.
        let keys = (!revision.digests.is_empty()).then(|| of_revision(world, name, revision))?;
        Some(RequiredChildren { of, keys })
    });
    [first].into_iter().chain(of).chain(route(world, name, app)).collect()
}

fn of_revision(
    world: &ClusterState,
    name: &NamespacedName,
    revision: &AppRevision,
) -> Vec<ObjectPartKey> {
    let mut keys = made(&name.namespace, revision, &containers(revision, world));
    // The ServerlessService waits for a decision of the autoscaler.
    keys.retain(|key| key.resource != ResourceKind::ServerlessService);
    keys
}

fn route(world: &ClusterState, name: &NamespacedName, app: &AppState) -> Option<RequiredChildren> {
    let route = app.route.as_ref().filter(|it| it.meta.uid != Uid(0) && !it.leaving)?;
    let named =
        |it: &String| world.standing(it).is_some_and(|(_, it)| it == ActivatorReadiness::Ready);
    let leads = world.activators.keys().any(named);
    let mut keys = names(name, app);
    keys.retain(|key| match key.resource {
        // There is one slice for each IP family of the activators; the IPv4 one stands for both.
        ResourceKind::EndpointSlice => {
            leads && !key.name.name.ends_with(crate::children::slices::V6)
        }
        _ => true,
    });
    Some(RequiredChildren { of: (ResourceKind::Route, name.clone(), route.meta.uid), keys })
}
