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
    let likely = key.name.name.rsplit_once("-deployment-");
    let likely = likely.and_then(|(revision, _)| world.revision(&key.name.namespace, revision));
    // Kubernetes cuts a pod's name of a long Deployment's, and then it shows nothing.
    let from = world.apps.range(Name::new(key.name.namespace.clone(), "")..);
    let here = from.take_while(|(name, _)| name.namespace == key.name.namespace);
    let all = here.flat_map(|(_, app)| &app.revisions);
    let own = |it: &&Pod| *it.name == *key.name.name;
    let found = likely.into_iter().chain(all).find_map(|it| it.pods.iter().find(own));
    let Some(pod) = found else { return Want::Any };
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
