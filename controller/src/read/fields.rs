//! Pure: readers of the parts that objects of the API server and objects on disk share.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde_json::Value;

use crate::model::{
    cluster_state::{
        AssignedTraffic, ConditionReason, ConditionSet, ConditionStatus, ConditionType,
        ObjectMetaSummary, RevisionRouting, RoutingState, TrafficSpec, Uid, UnixMillis,
    },
    knative::{KnativeCondition, RevisionTemplate},
    object::json::non_empty_text,
};

/// Reads the metadata of an object; empty if they cannot be read.
pub(crate) fn object_meta(object: &Value) -> ObjectMeta {
    serde_json::from_value(object["metadata"].clone()).unwrap_or_default()
}

/// Converts a time of the API to a moment; a time before 1970 becomes 0.
pub(crate) fn to_unix_millis(time: &Time) -> UnixMillis {
    UnixMillis(u64::try_from(time.0.as_millisecond()).unwrap_or_default())
}

/// Reads UID, generation and creation time of an object.
pub(crate) fn read_meta(object: &Value) -> ObjectMetaSummary {
    let meta = object_meta(object);
    ObjectMetaSummary {
        uid: meta.uid.as_deref().and_then(Uid::parse).unwrap_or_default(),
        generation: meta.generation.and_then(|it| u32::try_from(it).ok()).unwrap_or_default(),
        created: meta.creation_timestamp.as_ref().map(to_unix_millis).unwrap_or_default(),
    }
}

/// Returns the template as a text that does not depend on the order of its keys: equal templates have equal texts.
pub(crate) fn canonical_template(template: &Value) -> Arc<str> {
    let typed: RevisionTemplate = serde_json::from_value(template.clone()).unwrap_or_default();
    serde_json::to_string(&typed).unwrap_or_default().into()
}

/// Reads the share of a traffic target; 0 if there is none.
fn read_percent(value: &Value) -> u8 {
    value["percent"].as_u64().and_then(|it| u8::try_from(it).ok()).unwrap_or_default()
}

/// Reads a traffic target of a spec.
pub(crate) fn read_traffic_spec(value: &Value) -> TrafficSpec {
    TrafficSpec {
        tag: non_empty_text(&value["tag"]),
        revision_name: non_empty_text(&value["revisionName"]),
        configuration_name: non_empty_text(&value["configurationName"]),
        percent: read_percent(value),
    }
}

/// Reads a traffic target in force, from a status; `None` if it names no Revision.
pub(crate) fn read_assigned_traffic(value: &Value) -> Option<AssignedTraffic> {
    Some(AssignedTraffic {
        tag: non_empty_text(&value["tag"]),
        revision_name: non_empty_text(&value["revisionName"])?,
        is_latest: value["latestRevision"].as_bool().unwrap_or_default(),
        percent: read_percent(value),
    })
}

/// Reads the conditions in `table` from an object's status. Conditions that the status lacks stay as they are.
pub(crate) fn read_conditions(
    into: &mut ConditionSet,
    object: &Value,
    table: &[(ConditionType, &str)],
) {
    let all: Vec<KnativeCondition> =
        serde_json::from_value(object["status"]["conditions"].clone()).unwrap_or_default();
    for (kind, name) in table {
        let Some(it) = all.iter().find(|it| it.r#type == *name) else { continue };
        // Written objects may lack a reason; only `False` requires one.
        let reason = ConditionReason::new(it.reason.clone(), it.message.clone());
        let optional_reason = Some(reason.clone()).filter(|reason| !reason.reason.is_empty());
        let status = match it.status.as_str() {
            "True" => ConditionStatus::True(optional_reason),
            "False" => ConditionStatus::False(reason),
            _ => ConditionStatus::Unknown(optional_reason),
        };
        into.set(*kind, status, UnixMillis::parse(&it.last_transition_time).unwrap_or_default());
    }
}

/// Reads the routing state of a Revision from its label, and the moment of its last change from its annotation.
pub(crate) fn read_routing(label: Option<&str>, modified: Option<&str>) -> RevisionRouting {
    let state = match label {
        Some("active") => RoutingState::Active,
        Some("reserve") => RoutingState::Reserve,
        _ => RoutingState::Pending,
    };
    let changed_at = modified.and_then(UnixMillis::parse).unwrap_or_default();
    RevisionRouting { state, changed_at }
}
