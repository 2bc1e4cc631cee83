//! Pure: Ingresses that the controller has made for Routes.

use serde_json::Value;

use super::requested_certificates::controller_uid;
use crate::model::{
    cluster_state::{ConditionReason, ConditionStatus, IngressState},
    knative::key,
    object::{
        hash::applied_hash,
        json::{annotation, array_items, is_terminating},
    },
};

/// Reads an Ingress; `None` if another client has made it.
pub fn read_ingress(object: &Value) -> Option<IngressState> {
    applied_hash(object)?;
    let observed = object["status"]["observedGeneration"].as_i64();
    // A status is about the spec that its controller has handled.
    let is_present = observed.is_some() && observed == object["metadata"]["generation"].as_i64();
    let mut conditions = array_items(&object["status"]["conditions"]);
    let ready = conditions.find(|it| it["type"] == "Ready").filter(|_| is_present);
    Some(IngressState {
        owner_uid: controller_uid(object),
        class: annotation(object, key::CLASS_OF_INGRESS).unwrap_or_default().into(),
        spec_hash: annotation(object, key::INGRESS_SPEC)
            .and_then(|it| u64::from_str_radix(it, 16).ok()),
        readiness: ready.map(read_status),
        is_terminating: is_terminating(object),
    })
}

/// Reads the status of a condition. Each status may have a reason.
fn read_status(condition: &Value) -> ConditionStatus {
    let text = |field: &str| condition[field].as_str().unwrap_or_default().to_owned();
    let reason = ConditionReason::new(text("reason"), text("message"));
    match condition["status"].as_str() {
        // Knative passes neither reason nor message on.
        Some("True") => ConditionStatus::True(None),
        Some("False") => ConditionStatus::False(reason),
        _ => ConditionStatus::Unknown(Some(reason)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::{cluster_state::Uid, object::hash::APPLIED_ANNOTATION};

    fn ingress(applied: Option<&str>, status: Value) -> Option<IngressState> {
        read_ingress(&json!({
            "metadata": {
                "generation": 2,
                "annotations": {
                    APPLIED_ANNOTATION: applied,
                    key::CLASS_OF_INGRESS: "y.test",
                    key::INGRESS_SPEC: "2b",
                },
                "ownerReferences": [{"controller": true, "uid": "7"}],
            },
            "status": status,
        }))
    }

    fn readiness(generation: u32, status: &str) -> Option<ConditionStatus> {
        let ready = json!({"type": "Ready", "status": status, "reason": "R", "message": "m"});
        let status = json!({"observedGeneration": generation, "conditions": [ready]});
        ingress(Some("1"), status).expect("it is ours").readiness
    }

    #[test]
    fn only_an_ingress_of_the_controller_is_read() {
        let expected = IngressState {
            owner_uid: Some(Uid(7)),
            class: "y.test".into(),
            spec_hash: Some(0x2b),
            readiness: None,
            is_terminating: false,
        };
        assert_eq!(ingress(Some("1f"), json!({})), Some(expected));
        assert_eq!(ingress(None, json!({})), None);
    }

    #[test]
    fn a_status_counts_for_the_present_spec_only() {
        let reason = || ConditionReason::new("R", "m");
        assert_eq!(readiness(2, "True"), Some(ConditionStatus::True(None)));
        assert_eq!(readiness(2, "False"), Some(ConditionStatus::False(reason())));
        assert_eq!(readiness(2, "Unknown"), Some(ConditionStatus::Unknown(Some(reason()))));
        assert_eq!(readiness(1, "True"), None);
        let bare = ingress(Some("1"), json!({"observedGeneration": 2})).expect("it is ours");
        assert_eq!(bare.readiness, None);
    }
}
