//! Pure: changes of an app → parts of objects that may have to be written.
//!
//! A superfluous key costs one rendering, since an equal object is not written. A missing key loses a change.

use common::wire::NamespacedName;

use crate::{
    decide::part_keys,
    model::{
        cluster_state::{AppRevision, AppState, ClusterState, RevisionScaling},
        object::{ObjectPart, ObjectPartKey, ResourceKind},
    },
};

/// Returns the parts of objects that may differ between two states of an app.
pub(super) fn changed_keys(
    name: &NamespacedName,
    previous: &AppState,
    after: Option<&AppState>,
    cluster: &ClusterState,
) -> Vec<ObjectPartKey> {
    let mut scaled = changed_scaled_keys(name, previous, after);
    let Some(after) = after else {
        scaled.extend(part_keys::claimed_port_key(previous, cluster));
        return scaled;
    };
    let mut keys = changed_knative_keys(name, previous, after, cluster);
    keys.extend(scaled);
    keys
}

/// Returns the parts of a scaled Service's objects that may differ between two states of its app.
fn changed_scaled_keys(
    name: &NamespacedName,
    previous: &AppState,
    after: Option<&AppState>,
) -> Vec<ObjectPartKey> {
    let has_none = |app: &AppState| app.scaled.is_none();
    if has_none(previous) && after.is_none_or(has_none) {
        return Vec::new();
    }
    if after.is_some_and(|after| scaled_inputs(after) == scaled_inputs(previous)) {
        return Vec::new();
    }
    // With the keys of before, since objects of ports or pods that are gone must be deleted.
    let mut keys = part_keys::scaled_keys(name, previous);
    keys.extend(after.into_iter().flat_map(|after| part_keys::scaled_keys(name, after)));
    let pods = after.into_iter().flat_map(|after| &after.revisions);
    let pods = pods.filter(|it| it.is_scaled_service);
    keys.extend(pods.flat_map(|it| part_keys::pod_annotation_keys(&name.namespace, it)));
    keys
}

/// Returns the parts of an app's objects of Knative, and of their child objects, that may differ between two states.
fn changed_knative_keys(
    name: &NamespacedName,
    previous: &AppState,
    after: &AppState,
    cluster: &ClusterState,
) -> Vec<ObjectPartKey> {
    let mut keys = Vec::new();
    // An app that is a scaled Service alone has none.
    if after.is_scaled_service_only() && !previous.has_knative_object() {
        return keys;
    }
    if previous.service != after.service
        || previous.configuration != after.configuration
        || previous.route != after.route
    {
        keys.extend(part_keys::object_keys(name));
        keys.extend(part_keys::route_name_keys(name, after));
        keys.extend(part_keys::route_name_keys(name, previous));
        keys.extend(part_keys::claimed_port_key(after, cluster));
        keys.extend(part_keys::claimed_port_key(previous, cluster));
        keys.extend(part_keys::certificate_keys(name, after, cluster));
        keys.extend(part_keys::certificate_keys(name, previous, cluster));
        // An annotation of the Route may set the path of its Revisions.
        let path_keys_of = |it: &AppRevision| part_keys::path_keys(&name.namespace, it);
        keys.extend(knative_revisions(after).flat_map(path_keys_of));
    }
    if keys.is_empty()
        && previous.conditions == after.conditions
        && previous.revisions == after.revisions
    {
        return keys;
    }
    keys.extend(part_keys::status_keys(name));
    keys.extend(part_keys::ingress_key(name, after, cluster));
    // A scale that was decided while the owner was being deleted was not written, and nothing else would name it again.
    let is_freed = |revision: &AppRevision| {
        part_keys::is_scaled(cluster, name, after, revision)
            && !part_keys::is_scaled(cluster, name, previous, revision)
    };
    for revision in knative_revisions(after) {
        let old = previous.revision(&revision.name);
        if old.is_none_or(|old| child_inputs(old) != child_inputs(revision)) {
            let containers = part_keys::container_names(revision, cluster);
            keys.extend(part_keys::revision_keys(&name.namespace, revision, &containers));
            keys.extend(part_keys::hpa_key(&name.namespace, revision, cluster));
        }
        if old != Some(revision) || is_freed(revision) {
            keys.extend(part_keys::scale_keys(&name.namespace, revision));
            keys.extend(part_keys::pod_annotation_keys(&name.namespace, revision));
            keys.extend(part_keys::resize_keys(&name.namespace, revision));
        }
    }
    // A Revision that the plan has dropped or collected, such as an old one, is deleted on the API server as well.
    let is_kept = |name: &str| after.revision(name).is_some_and(|it| !it.is_deleted);
    let removed = knative_revisions(previous).filter(|it| !is_kept(&it.name));
    keys.extend(removed.map(|revision| {
        let name = NamespacedName::new(name.namespace.clone(), &*revision.name);
        ObjectPartKey::new(ResourceKind::Revision, ObjectPart::Object, name)
    }));
    keys
}

/// Returns the fields of an app on which the objects of a scaled Service depend.
fn scaled_inputs(app: &AppState) -> impl PartialEq + '_ {
    (&app.scaled, &app.revisions, &app.conditions)
}

/// Iterates over the Revisions that are objects of the API.
fn knative_revisions(app: &AppState) -> impl Iterator<Item = &AppRevision> {
    app.revisions.iter().filter(|it| !it.is_scaled_service)
}

/// Returns the fields of a Revision on which its child objects depend.
fn child_inputs(revision: &AppRevision) -> impl PartialEq + '_ {
    let AppRevision {
        meta,
        template,
        routing,
        digests,
        scaling: RevisionScaling { initial_scale_reached: reached, .. },
        ..
    } = revision;
    (meta, template, routing, digests, reached, revision.is_stuck())
}
