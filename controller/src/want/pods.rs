//! Pure: annotations by which the leader passes the stage of pods to other replicas.

use common::wire::Name;
use serde_json::json;

use crate::{
    children::Resource,
    kube::{Key, Part, Want},
    observe::DRAINING,
    world::{Pod, Revision, Stage, World},
};

/// Returns the annotation of a draining pod, which other replicas of the controller read.
pub(super) fn pod(world: &World, key: &Key) -> Want {
    let likely = key.name.name.rsplit_once("-deployment-");
    let likely = likely.and_then(|(revision, _)| world.revision(&key.name.namespace, revision));
    // Kubernetes cuts the pod's name if the Deployment's is long: then all Revisions of the namespace are searched.
    let from = world.apps.range(Name::new(key.name.namespace.clone(), "")..);
    let here = from.take_while(|(name, _)| name.namespace == key.name.namespace);
    let all = here.flat_map(|(_, app)| &app.revisions);
    let own = |it: &&Pod| *it.name == *key.name.name;
    let found = likely.into_iter().chain(all).find_map(|it| it.pods.iter().find(own));
    let Some(pod) = found else { return Want::Any };
    let Some(placed) = pod.placed.as_ref().filter(|it| !it.deleted) else { return Want::Any };
    let annotations = match (pod.stage, placed.draining) {
        (Stage::Serving, None) => return Want::Any,
        // The pod serves again: with server-side apply an annotation that is left out is removed.
        (Stage::Serving, Some(_)) => json!({}),
        (Stage::Draining { since } | Stage::Stopping { since }, noted) => {
            // The first moment counts: another leader may have noted it, and the grace period runs from there.
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

/// Returns the keys of a Revision's pods whose annotation differs from their stage.
pub fn noted<'a>(namespace: &'a str, revision: &'a Revision) -> impl Iterator<Item = Key> + 'a {
    let wrong = |pod: &&Pod| {
        let placed = pod.placed.as_ref().filter(|it| !it.deleted);
        placed.is_some_and(|it| it.draining.is_some() != (pod.stage != Stage::Serving))
    };
    let pods = revision.pods.iter().filter(wrong);
    pods.map(move |pod| Key::new(Resource::Pod, Part::Object, Name::new(namespace, &*pod.name)))
}
