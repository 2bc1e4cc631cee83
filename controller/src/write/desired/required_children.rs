//! Pure: objects that must exist by now. A missing one would go unnoticed otherwise: no write of it fails, and all that
//! depends on it waits forever.

use std::net::IpAddr;

use common::wire::NamespacedName;

use crate::{
    decide::part_keys::{container_names, revision_keys, route_name_keys},
    model::{
        cluster_state::{ActivatorReadiness, AppRevision, AppState, ClusterState, Uid},
        object::{ObjectPart, ObjectPartKey, ResourceKind, names::V6_SUFFIX},
    },
};

/// Child objects that one object requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequiredChildren {
    /// Object that requires them: a Configuration, a Revision or a Route.
    pub owner: (ResourceKind, NamespacedName, Uid),
    /// Keys of the required objects.
    pub keys: Vec<ObjectPartKey>,
}

/// Returns the objects that must exist for the app of this name.
pub fn required_children(cluster: &ClusterState, name: &NamespacedName) -> Vec<RequiredChildren> {
    let Some(app) = cluster.apps.get(name).filter(|app| cluster.is_maintained(name, app)) else {
        return Vec::new();
    };
    let Some(configuration) = app.configuration.as_ref().filter(|it| !it.is_terminating) else {
        return required_by_route(cluster, name, app).into_iter().collect();
    };
    let full_name = |it: &AppRevision| NamespacedName::new(name.namespace.clone(), &*it.name);
    let revisions = app.revisions.iter().filter(|it| !it.is_terminating && !it.is_deleted);
    let (planned, existing): (Vec<_>, Vec<_>) = revisions.partition(|it| !it.meta.exists());
    let keys = planned
        .into_iter()
        .map(|it| ObjectPartKey::new(ResourceKind::Revision, ObjectPart::Object, full_name(it)));
    // Also without missing objects: the Configuration may carry an earlier error, which this clears.
    let owner = (ResourceKind::Configuration, name.clone(), configuration.meta.uid);
    let of_configuration = RequiredChildren { owner, keys: keys.collect() };
    let of_revisions = existing.into_iter().filter_map(|revision| {
        let owner = (ResourceKind::Revision, full_name(revision), revision.meta.uid);
        // No objects are made before tags are resolved to digests.
        let keys = (!revision.digests.is_empty())
            .then(|| required_by_revision(cluster, name, revision))?;
        Some(RequiredChildren { owner, keys })
    });
    [of_configuration]
        .into_iter()
        .chain(of_revisions)
        .chain(required_by_route(cluster, name, app))
        .collect()
}

fn required_by_revision(
    cluster: &ClusterState,
    name: &NamespacedName,
    revision: &AppRevision,
) -> Vec<ObjectPartKey> {
    let mut keys = revision_keys(&name.namespace, revision, &container_names(revision, cluster));
    // The ServerlessService waits for a decision of the autoscaler.
    keys.retain(|key| key.resource != ResourceKind::ServerlessService);
    keys
}

fn required_by_route(
    cluster: &ClusterState,
    name: &NamespacedName,
    app: &AppState,
) -> Option<RequiredChildren> {
    let route = app.route.as_ref().filter(|it| it.meta.exists() && !it.is_terminating)?;
    let activators = cluster.activators.pods.keys();
    let activators = activators.filter_map(|pod| cluster.activator_readiness(pod));
    let ready = activators.filter(|(_, readiness)| *readiness == ActivatorReadiness::Ready);
    let addresses: Vec<IpAddr> =
        ready.flat_map(|(activator, _)| activator.addresses.iter().copied()).collect();
    let mut keys = route_name_keys(name, app);
    keys.retain(|key| match key.resource {
        // There is one slice for each IP family in which an activator has an address: maybe IPv6 only.
        ResourceKind::EndpointSlice => {
            let is_ipv6_slice = key.name.name.ends_with(V6_SUFFIX);
            addresses.iter().any(|it| it.is_ipv6() == is_ipv6_slice)
        }
        _ => true,
    });
    Some(RequiredChildren { owner: (ResourceKind::Route, name.clone(), route.meta.uid), keys })
}
