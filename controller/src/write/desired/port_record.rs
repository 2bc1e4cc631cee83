//! Pure: record of the owners of gateway ports, a ConfigMap in the system namespace.
//!
//! Users of a namespace may write its Services, and the status of its Routes. They have no rights in the system
//! namespace, so none of them can claim by the record to have come first.

use std::collections::BTreeMap;

use serde_json::json;

use crate::{
    decide::{part_keys, plan::gateway_ports},
    model::{
        cluster_state::ClusterState,
        object::{DesiredState, ObjectPartKey},
    },
};

/// Returns the record. There is none before the first Route asks for a port.
///
/// It follows from the record that was observed last, and so the write requires the version of that one. Without it, a
/// leader could replace an entry that it, or the leader before, has written and that it does not know yet.
pub(super) fn record_part(cluster: &ClusterState, key: &ObjectPartKey) -> DesiredState {
    if *key != part_keys::port_record_key(cluster) {
        return DesiredState::Unmanaged;
    }
    let owners = gateway_ports::ports_to_record(cluster);
    if owners.is_empty() && cluster.names.port_record.is_none() {
        return DesiredState::Unmanaged;
    }
    // The UID is what counts: a new Route of the same name has to wait like others. The name is for readers.
    let data: BTreeMap<String, String> = owners
        .into_iter()
        .map(|(port, (name, uid))| (port.to_string(), format!("{name} {uid}")))
        .collect();
    DesiredState::Body(json!({
        "apiVersion": key.resource.api_version(),
        "kind": key.resource.kind(),
        "metadata": {
            "name": key.name.name.as_str(),
            "namespace": key.name.namespace.as_str(),
            "resourceVersion": cluster.names.port_record_version,
        },
        "data": data,
    }))
}
