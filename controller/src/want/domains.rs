//! Pure: desired state of DomainMappings and of the claims to their domains.

use serde_json::json;

use super::without_nulls;
use crate::{
    children::ResourceKind,
    kube::{DesiredState, ObjectPart, ObjectPartKey},
    render,
    world::ClusterState,
};

/// Returns the status of a DomainMapping; the object itself belongs to its user.
pub(super) fn mapping(world: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    match (key.part, world.mappings.get(&key.name)) {
        (ObjectPart::Status, Some(it)) => {
            DesiredState::Body(without_nulls(render::mapping_status(&key.name, it, world)))
        }
        _ => DesiredState::Any,
    }
}

/// Returns the claim of a domain, if the controller makes claims. It is removed with the last mapping of its namespace.
pub(super) fn claim(world: &ClusterState, domain: &str) -> DesiredState {
    let wanting = world.mappings.iter().filter(|(name, _)| name.name == domain);
    let first =
        || wanting.clone().min_by_key(|(name, it)| (it.meta.created, name.namespace.as_str()));
    let held = world.claims.get(domain).map(|it| it.namespace.as_str());
    // The namespace that holds the claim keeps it while it has a mapping, however old other mappings are.
    let holder = wanting.clone().find(|(name, _)| Some(name.namespace.as_str()) == held);
    match holder.or_else(first) {
        None => DesiredState::Gone,
        Some((_, it)) if it.leaving || !world.settings.configs.network.autocreate_claims => {
            DesiredState::Any
        }
        // A claim of another namespace, or of a deleted mapping, is removed before a new one is made: its namespace is
        // immutable.
        Some((name, _)) if held.is_some_and(|it| it != name.namespace) => DesiredState::Gone,
        Some((name, _)) => DesiredState::Body(json!({
            "apiVersion": ResourceKind::ClusterDomainClaim.api_version(),
            "kind": ResourceKind::ClusterDomainClaim.kind(),
            "metadata": {"name": domain},
            "spec": {"namespace": name.namespace.as_str()},
        })),
    }
}
