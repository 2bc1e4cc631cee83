//! Pure: desired state of DomainMappings and of the claims to their domains.

use serde_json::json;

use super::without_nulls;
use crate::{
    model::{
        cluster_state::{ClusterState, DomainMappingState},
        object::{DesiredState, ObjectPart, ObjectPartKey, ResourceKind},
    },
    write::render,
};

/// Returns the status of a DomainMapping; the object itself belongs to its user.
pub(super) fn mapping_status(cluster: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    match (key.part, cluster.domains.mappings.get(&key.name)) {
        (ObjectPart::Status, Some(it)) => {
            DesiredState::Body(without_nulls(render::render_mapping_status(&key.name, it, cluster)))
        }
        _ => DesiredState::Unmanaged,
    }
}

/// Returns the claim of a domain, if the controller makes claims. It is removed with the last mapping of its namespace.
/// It is cluster-scoped, so no namespaced object can own it.
pub(super) fn desired_claim(cluster: &ClusterState, domain: &str) -> DesiredState {
    let needs_claim =
        |it: &DomainMappingState| it.domain.claim_name() == domain && it.domain.fault.is_none();
    let wanting = cluster.domains.mappings.iter().filter(|(_, it)| needs_claim(it));
    let first =
        || wanting.clone().min_by_key(|(name, it)| (it.meta.created, name.namespace.as_str()));
    let claimed_by = cluster.domains.claims.get(domain).map(|it| it.namespace.as_str());
    // The namespace that holds the claim keeps it while it has a mapping, however old other mappings are.
    let holder = wanting.clone().find(|(name, _)| Some(name.namespace.as_str()) == claimed_by);
    match holder.or_else(first) {
        None => DesiredState::Absent,
        Some((_, it))
            if it.is_terminating || !cluster.settings.config_maps.network.autocreate_claims =>
        {
            DesiredState::Unmanaged
        }
        // A claim of another namespace, or of a deleted mapping, is removed before a new one is made: its namespace is
        // immutable.
        Some((name, _)) if claimed_by.is_some_and(|it| it != name.namespace) => {
            DesiredState::Absent
        }
        Some((name, _)) => DesiredState::Body(json!({
            "apiVersion": ResourceKind::ClusterDomainClaim.api_version(),
            "kind": ResourceKind::ClusterDomainClaim.kind(),
            "metadata": {"name": domain},
            "spec": {"namespace": name.namespace.as_str()},
        })),
    }
}
