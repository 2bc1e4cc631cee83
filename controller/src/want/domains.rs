//! Pure: desired state of DomainMappings and of the claims to their domains.

use serde_json::json;

use super::without_nulls;
use crate::{
    children::Resource,
    kube::{Key, Part, Want},
    render,
    world::World,
};

/// Returns the status of a DomainMapping; the object itself belongs to its user.
pub(super) fn mapping(world: &World, key: &Key) -> Want {
    match (key.part, world.mappings.get(&key.name)) {
        (Part::Status, Some(it)) => {
            Want::Body(without_nulls(render::mapping_status(&key.name, it, world)))
        }
        _ => Want::Any,
    }
}

/// Returns the claim of a domain, if the controller makes claims. It is removed with the last mapping of its namespace.
pub(super) fn claim(world: &World, domain: &str) -> Want {
    let wanting = world.mappings.iter().filter(|(name, _)| name.name == domain);
    let first =
        || wanting.clone().min_by_key(|(name, it)| (it.meta.created, name.namespace.as_str()));
    let held = world.claims.get(domain).map(|it| it.namespace.as_str());
    // The namespace that holds the claim keeps it while it has a mapping, however old other mappings are.
    let holder = wanting.clone().find(|(name, _)| Some(name.namespace.as_str()) == held);
    match holder.or_else(first) {
        None => Want::Gone,
        Some((_, it)) if it.leaving || !world.settings.configs.network.autocreate_claims => {
            Want::Any
        }
        // A claim of another namespace, or of a deleted mapping, is removed before a new one is made: its namespace is
        // immutable.
        Some((name, _)) if held.is_some_and(|it| it != name.namespace) => Want::Gone,
        Some((name, _)) => Want::Body(json!({
            "apiVersion": Resource::ClusterDomainClaim.api_version(),
            "kind": Resource::ClusterDomainClaim.kind(),
            "metadata": {"name": domain},
            "spec": {"namespace": name.namespace.as_str()},
        })),
    }
}
