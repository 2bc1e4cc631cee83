//! Pure: what the leader notes on pods for the replicas that do not lead.

use common::wire::Name;
use serde_json::json;

use crate::{
    children::Resource,
    kube::{Key, Part, Want},
    observe::DRAINING,
    world::{Pod, Revision, Stage, World},
};

/// What we note on a pod: that it drains, for the replicas of the controller that do not lead.
pub(super) fn pod(world: &World, key: &Key) -> Want {
    let found = match key.name.name.rsplit_once("-deployment-") {
        Some((revision, _)) => world.revision(&key.name.namespace, revision),
        None => None,
    };
    let in_space = |(name, _): &(&Name, _)| name.namespace == key.name.namespace;
    // A Deployment of a long name has another one.
    let all = || world.apps.iter().filter(in_space).flat_map(|(_, app)| &app.revisions);
    let mut revisions: Box<dyn Iterator<Item = &Revision>> = match found {
        Some(found) => Box::new(std::iter::once(found)),
        None => Box::new(all()),
    };
    let own = |it: &&Pod| *it.name == *key.name.name;
    let Some(pod) = revisions.find_map(|it| it.pods.iter().find(own)) else { return Want::Any };
    let Some(placed) = pod.placed.as_ref().filter(|it| !it.deleted) else { return Want::Any };
    let annotations = match (pod.stage, placed.draining) {
        (Stage::Serving, None) => return Want::Any,
        (Stage::Serving, Some(_)) => json!({}),
        (Stage::Draining { since } | Stage::Stopping { since }, noted) => {
            json!({DRAINING: noted.unwrap_or(since).rfc3339()})
        }
    };
    let meta = json!({
        "name": key.name.name.as_str(),
        "namespace": key.name.namespace.as_str(),
        "annotations": annotations,
    });
    Want::Body(json!({"apiVersion": "v1", "kind": "Pod", "metadata": meta}))
}

/// Pods of a Revision on which something else is noted than what holds.
pub fn noted<'a>(namespace: &'a str, revision: &'a Revision) -> impl Iterator<Item = Key> + 'a {
    let wrong = |pod: &&Pod| {
        let placed = pod.placed.as_ref().filter(|it| !it.deleted);
        placed.is_some_and(|it| it.draining.is_some() != (pod.stage != Stage::Serving))
    };
    let pods = revision.pods.iter().filter(wrong);
    pods.map(move |pod| Key::new(Resource::Pod, Part::Object, Name::new(namespace, &*pod.name)))
}
