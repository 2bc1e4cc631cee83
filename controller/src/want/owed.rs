//! Pure: objects that must exist by now. A missing one would go unnoticed otherwise: no write of it fails, and all that
//! depends on it waits forever.

use common::wire::Name;

use super::{containers, made, names, stays};
use crate::{
    children::Resource,
    kube::{Key, Part},
    observe::Standing,
    world::{App, Revision, Uid, World},
};

/// Child objects that one object requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owed {
    /// Object that requires them: a Configuration, a Revision or a Route.
    pub of: (Resource, Name, Uid),
    /// Keys of the required objects.
    pub keys: Vec<Key>,
}

/// Returns the objects that must exist for the app of this name.
pub fn owed(world: &World, name: &Name) -> Vec<Owed> {
    let Some(app) = world.apps.get(name).filter(|app| stays(world, name, app)) else {
        return Vec::new();
    };
    let Some(configuration) = app.configuration.as_ref().filter(|it| !it.leaving) else {
        return route(world, name, app).into_iter().collect();
    };
    let full = |it: &Revision| Name::new(name.namespace.clone(), &*it.name);
    let revisions = app.revisions.iter().filter(|it| !it.leaving && !it.gone);
    let (planned, there): (Vec<_>, Vec<_>) = revisions.partition(|it| it.meta.uid == Uid(0));
    let keys = planned.into_iter().map(|it| Key::new(Resource::Revision, Part::Object, full(it)));
    // Also without missing objects: the Configuration may carry an earlier error, which this clears.
    let of = (Resource::Configuration, name.clone(), configuration.meta.uid);
    let first = Owed { of, keys: keys.collect() };
    let of = there.into_iter().filter_map(|revision| {
        let of = (Resource::Revision, full(revision), revision.meta.uid);
        // No objects are made before tags are resolved to digests.
        let keys = (!revision.digests.is_empty()).then(|| of_revision(world, name, revision))?;
        Some(Owed { of, keys })
    });
    [first].into_iter().chain(of).chain(route(world, name, app)).collect()
}

fn of_revision(world: &World, name: &Name, revision: &Revision) -> Vec<Key> {
    let mut keys = made(&name.namespace, revision, &containers(revision, world));
    // The ServerlessService waits for a decision of the autoscaler.
    keys.retain(|key| key.resource != Resource::ServerlessService);
    keys
}

fn route(world: &World, name: &Name, app: &App) -> Option<Owed> {
    let route = app.route.as_ref().filter(|it| it.meta.uid != Uid(0) && !it.leaving)?;
    let named = |it: &String| world.standing(it).is_some_and(|(_, it)| it == Standing::Ready);
    let leads = world.activators.keys().any(named);
    let mut keys = names(name, app);
    keys.retain(|key| match key.resource {
        // There is one slice for each IP family of the activators; the IPv4 one stands for both.
        Resource::EndpointSlice => leads && !key.name.name.ends_with(crate::children::slices::V6),
        _ => true,
    });
    Some(Owed { of: (Resource::Route, name.clone(), route.meta.uid), keys })
}
