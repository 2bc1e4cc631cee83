//! Pure: patches that give the workloads of scaled Services back to their users when Rouse is removed.

use controller::model::{
    knative::key::{SCALED_TO, USER_REPLICAS},
    object::SCALE_FIELD_MANAGER,
};
use serde_json::{Value, json};

/// Returns the merge patch that gives a Deployment or StatefulSet back, for its present version; `None`: it is not the
/// workload of a scaled Service.
///
/// A workload that sleeps, or of which some pods have left already, gets the number of pods of its user, since nothing
/// would wake it any more. The record of both numbers is removed, and with it the ownership of them.
pub(super) fn give_back_patch(workload: &Value) -> Option<Value> {
    let metadata = &workload["metadata"];
    let recorded = |key: &str| metadata["annotations"][key].as_str();
    let (scaled_to, user_replicas) = (recorded(SCALED_TO), recorded(USER_REPLICAS));
    if scaled_to.is_none() && user_replicas.is_none() {
        return None;
    }
    let mut patch = json!({"metadata": {
        "resourceVersion": metadata["resourceVersion"],
        "annotations": {SCALED_TO: null, USER_REPLICAS: null},
    }});
    if let Some(owners) = metadata["managedFields"].as_array() {
        let is_other = |it: &&Value| it["manager"] != SCALE_FIELD_MANAGER;
        patch["metadata"]["managedFields"] = owners.iter().filter(is_other).cloned().collect();
    }
    // Any other number is the one that its user, or a HorizontalPodAutoscaler, wants now. Such an autoscaler also
    // corrects the number that is written here.
    let to_number = |text: &str| text.parse::<u32>().ok().map(u64::from);
    let present = workload["spec"]["replicas"].as_u64();
    let is_own_number = present.is_some() && present == scaled_to.and_then(to_number);
    let wanted = user_replicas.and_then(to_number).unwrap_or(1).max(1);
    if is_own_number && present < Some(wanted) {
        patch["spec"] = json!({"replicas": wanted});
    }
    Some(patch)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(replicas: u32, annotations: Value) -> Value {
        let owners = json!([{"manager": "kubectl"}, {"manager": SCALE_FIELD_MANAGER}]);
        let metadata = json!({
            "name": "db", "resourceVersion": "7", "annotations": annotations,
            "managedFields": owners,
        });
        json!({"metadata": metadata, "spec": {"replicas": replicas}})
    }

    #[test]
    fn a_workload_that_sleeps_wakes_with_the_number_of_its_user() {
        let record = json!({SCALED_TO: "0", USER_REPLICAS: "3", "own": "stays"});
        let metadata = json!({
            "resourceVersion": "7", "annotations": {SCALED_TO: null, USER_REPLICAS: null},
            "managedFields": [{"manager": "kubectl"}],
        });
        let expected = json!({"metadata": metadata, "spec": {"replicas": 3}});
        assert_eq!(give_back_patch(&workload(0, record)), Some(expected));
    }

    #[test]
    fn only_the_controllers_own_number_is_replaced() {
        let replicas = |present: u32, annotations: Value| {
            let patch = give_back_patch(&workload(present, annotations));
            patch.map(|it| it["spec"]["replicas"].clone())
        };
        let record = |scaled_to: &str| json!({SCALED_TO: scaled_to, USER_REPLICAS: "3"});
        assert_eq!(replicas(5, record("0")), Some(Value::Null), "another client woke it");
        assert_eq!(replicas(0, record("3")), Some(Value::Null), "its user stopped it");
        assert_eq!(replicas(1, record("1")), Some(json!(3)), "some of its pods have left");
        assert_eq!(replicas(2, record("1")), Some(Value::Null), "another client's");
        assert_eq!(replicas(5, record("5")), Some(Value::Null), "more than its user's");
        assert_eq!(replicas(0, json!({SCALED_TO: "0"})), Some(json!(1)), "half of the record");
        assert_eq!(replicas(0, json!({SCALED_TO: "0", USER_REPLICAS: "0"})), Some(json!(1)));
        assert_eq!(replicas(0, json!({"own": "1"})), None, "no scaled Service has it");
    }
}
