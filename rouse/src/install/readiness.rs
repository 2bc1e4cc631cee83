//! Pure: conditions that an installation still waits for, read from its objects in the API server.

use serde_json::Value;

/// Reason why a Deployment or DaemonSet is not ready yet; `None` when it is.
pub(crate) fn unready_reason(object: &Value) -> Option<String> {
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let status = &object["status"];
    let name = super::objects::kind_and_name(object);
    // The status of an older generation still describes the pods before the change.
    if number(&status["observedGeneration"]) < number(&object["metadata"]["generation"]) {
        return Some(format!("{name}: not observed yet"));
    }
    let (desired, updated, ready) = if object["kind"] == "DaemonSet" {
        let desired = number(&status["desiredNumberScheduled"]);
        (desired, number(&status["updatedNumberScheduled"]), number(&status["numberReady"]))
    } else {
        let desired = object["spec"]["replicas"].as_u64().unwrap_or(1);
        (desired, number(&status["updatedReplicas"]), number(&status["availableReplicas"]))
    };
    // Pods of the old template must be gone too: a rollout that has not ended is no success.
    let old = number(&status["replicas"]).saturating_sub(updated);
    let is_ready = desired > 0 && updated >= desired && ready >= desired && old == 0;
    (!is_ready).then(|| format!("{name}: {} of {desired} ready", ready.min(updated)))
}

/// First reason that a pod's status gives for not being ready.
pub(crate) fn pod_unready_reason(pod: &Value) -> Option<String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let status = &pod["status"];
    let statuses = status["containerStatuses"].as_array().into_iter().flatten();
    let waiting = statuses.map(|it| &it["state"]["waiting"]).find(|it| it.is_object());
    let conditions = status["conditions"].as_array().into_iter().flatten();
    let unscheduled =
        conditions.clone().find(|it| it["type"] == "PodScheduled" && it["status"] == "False");
    let unready = conditions.clone().find(|it| it["type"] == "Ready" && it["status"] == "False");
    // The earlier cause comes first: a pod that is not scheduled has no containers, and both make it unready.
    let reason = unscheduled.or(waiting).or(unready)?;
    let name = text(&pod["metadata"]["name"]);
    Some(
        format!("pod {name}: {} {}", text(&reason["reason"]), text(&reason["message"]))
            .trim()
            .to_owned(),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_deployment_is_ready_when_all_its_pods_are_new_and_ready() {
        let deployment = |status: Value| {
            let meta = json!({"name": "controller", "generation": 2});
            json!({"kind": "Deployment", "metadata": meta, "spec": {"replicas": 2}, "status": status})
        };
        let ready_status = json!({"observedGeneration": 2, "replicas": 2, "updatedReplicas": 2, "availableReplicas": 2});
        assert_eq!(unready_reason(&deployment(ready_status.clone())), None);
        for (field, value, reason) in [
            ("observedGeneration", 1, "Deployment/controller: not observed yet"),
            ("availableReplicas", 1, "Deployment/controller: 1 of 2 ready"),
            ("updatedReplicas", 1, "Deployment/controller: 1 of 2 ready"),
            ("replicas", 3, "Deployment/controller: 2 of 2 ready"),
        ] {
            let mut status = ready_status.clone();
            status[field] = value.into();
            assert_eq!(unready_reason(&deployment(status)).as_deref(), Some(reason), "{field}");
        }
    }

    #[test]
    fn agents_are_ready_when_one_is_on_each_node() {
        let daemon_set = |ready: u64| {
            let status = json!({"desiredNumberScheduled": 2, "updatedNumberScheduled": 2, "numberReady": ready});
            json!({"kind": "DaemonSet", "metadata": {"name": "rouse-agent"}, "status": status})
        };
        assert_eq!(
            unready_reason(&daemon_set(1)).as_deref(),
            Some("DaemonSet/rouse-agent: 1 of 2 ready")
        );
        assert_eq!(unready_reason(&daemon_set(2)), None);
    }

    #[test]
    fn a_pod_says_why_it_is_not_ready() {
        let waiting = json!({"state": {"waiting": {"reason": "ErrImageNeverPull", "message": "no such image"}}});
        let pod = json!({"metadata": {"name": "a"}, "status": {"containerStatuses": [waiting]}});
        assert_eq!(
            pod_unready_reason(&pod).as_deref(),
            Some("pod a: ErrImageNeverPull no such image")
        );
        assert_eq!(pod_unready_reason(&json!({"metadata": {"name": "a"}, "status": {}})), None);
    }
}
