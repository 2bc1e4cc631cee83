//! Pure: pods as the API server holds them: pods of Revisions, pods of Rouse's components, and rejected pods.

use std::net::{IpAddr, SocketAddr};

use common::{
    local_node::{ContainerRunState, LocalContainerStatus, PodRunPhase, PodRunStatus},
    wire::{ActivatorEntry, ServerComponent, ServerReplica},
};
use serde_json::Value;

use super::revision_name_of;
use crate::{
    model::{
        cluster_state::{
            ActivatorReadiness, ConditionReason, KubePodStatus, KubeletReadiness, PendingResize,
            RevisionPod, UnixMillis,
        },
        knative::key::{DRAINING, ORIGINAL_REQUESTS, STANDBY_SINCE},
        object::json::{
            annotation, array_items, is_terminating, label, non_empty_text, object_name,
        },
    },
    read::fields,
};

/// Reads a pod and its status; `None` once all its containers have ended for good.
pub fn read_pod(object: &Value) -> Option<(RevisionPod, PodRunStatus)> {
    let meta = &object["metadata"];
    let status = &object["status"];
    // Such a pod stays as an object until it is collected, and has no address any more.
    if matches!(status["phase"].as_str(), Some("Succeeded" | "Failed")) {
        return None;
    }
    let is_terminating = is_terminating(object);
    let noted = |name: &str| annotation(object, name).and_then(UnixMillis::parse);
    let uid: Box<str> = non_empty_text(&meta["uid"])?;
    let (name, created) = (non_empty_text(&meta["name"])?, fields::read_meta(object).created);
    let pod = RevisionPod {
        kube_status: Some(Box::new(KubePodStatus {
            node: non_empty_text(&object["spec"]["nodeName"]).unwrap_or_default(),
            kubelet_readiness: kubelet_readiness(object),
            has_readiness_gates: array_items(&object["spec"]["readinessGates"]).next().is_some(),
            is_terminating,
            is_disrupted: is_disrupted(status),
            draining_since: noted(DRAINING),
            standby_since: noted(STANDBY_SINCE),
            has_reduced_requests: annotation(object, ORIGINAL_REQUESTS).is_some(),
            pending_resize: pending_resize(object).map(Box::new),
            has_debug_container: has_debug_container(object),
            unschedulable: unschedulable_reason(status),
        })),
        ..RevisionPod::new(uid.clone(), name, created)
    };
    let phase = match status["phase"].as_str() {
        // A deletion timestamp counts before the phase, which stays `Running` until the containers end.
        _ if is_terminating => PodRunPhase::Terminating,
        Some("Running") => PodRunPhase::Running,
        _ => PodRunPhase::Pending,
    };
    let init = array_items(&status["initContainerStatuses"])
        .map(|it| read_container(it, ContainerKind::Init));
    let regular = array_items(&status["containerStatuses"])
        .map(|it| read_container(it, ContainerKind::Regular));
    let ready =
        pod.kube_status.as_ref().is_some_and(|it| it.kubelet_readiness == KubeletReadiness::Ready);
    let status = PodRunStatus {
        uid: uid.into(),
        phase,
        addresses: pod_addresses(status),
        containers: init.chain(regular).collect(),
        ready,
    };
    Some((pod, status))
}

/// Returns the kubelet's view of a pod's readiness. [`KubeletReadiness::NoLongerReady`] depends on the earlier state,
/// which the caller knows.
///
/// The node controller sets `Ready` of all pods of a silent node to false (Kubernetes' `pkg/controller/util/node`,
/// `MarkPodsNotReady`). It leaves `ContainersReady` and the readiness gates, from which the kubelet computes `Ready`
/// (Kubernetes' `pkg/kubelet/status/generate.go`, `GeneratePodReadyCondition`).
/// [`ClusterState`](crate::model::cluster_state::ClusterState) decides about such a node.
fn kubelet_readiness(object: &Value) -> KubeletReadiness {
    let conditions = || array_items(&object["status"]["conditions"]);
    let is_true =
        |name: &Value| conditions().any(|it| it["type"] == *name && it["status"] == "True");
    let mut gates = array_items(&object["spec"]["readinessGates"]);
    let is_computed_ready =
        is_true(&"ContainersReady".into()) && gates.all(|gate| is_true(&gate["conditionType"]));
    match is_computed_ready || is_true(&"Ready".into()) {
        true => KubeletReadiness::Ready,
        false => KubeletReadiness::NotYetReady,
    }
}

/// Returns true if the pod is about to end by an eviction, a preemption or the kubelet itself (Kubernetes'
/// `DisruptionTarget`).
fn is_disrupted(status: &Value) -> bool {
    let mut conditions = array_items(&status["conditions"]);
    conditions.any(|it| it["type"] == "DisruptionTarget" && it["status"] == "True")
}

fn unschedulable_reason(status: &Value) -> Option<ConditionReason> {
    let mut conditions = array_items(&status["conditions"]);
    let it = conditions.find(|it| it["type"] == "PodScheduled" && it["status"] == "False")?;
    let text = |field: &str| it[field].as_str().unwrap_or_default().to_owned();
    Some(ConditionReason::new(text("reason"), text("message")))
}

/// Returns the resize that the kubelet has not allocated (KEP-1287); `None`: there is none, or the pod has asked for
/// another one since.
fn pending_resize(object: &Value) -> Option<PendingResize> {
    let mut conditions = array_items(&object["status"]["conditions"]);
    let it = conditions.find(|it| it["type"] == "PodResizePending" && it["status"] == "True")?;
    let generation = it["observedGeneration"].as_i64().filter(|it| *it > 0);
    let present = object["metadata"]["generation"].as_i64().unwrap_or(0);
    if generation.is_some_and(|it| it < present) {
        return None;
    }
    let text = |field: &str| it[field].as_str().unwrap_or_default().to_owned();
    let reason = ConditionReason::new(text("reason"), text("message"));
    Some(PendingResize { reason, generation })
}

/// Returns true if a pod has an ephemeral container that has not ended. One without a status is about to start.
fn has_debug_container(object: &Value) -> bool {
    let statuses = || array_items(&object["status"]["ephemeralContainerStatuses"]);
    let has_ended = |name: &Value| {
        statuses().any(|it| it["name"] == *name && it["state"].get("terminated").is_some())
    };
    array_items(&object["spec"]["ephemeralContainers"]).any(|it| !has_ended(&it["name"]))
}

/// Returns the addresses of a pod, IPv4 first.
fn pod_addresses(status: &Value) -> Vec<IpAddr> {
    let many = array_items(&status["podIPs"]).filter_map(|it| it["ip"].as_str());
    let all = status["podIP"].as_str().into_iter().chain(many);
    let mut all: Vec<IpAddr> = all.filter_map(|it| it.parse().ok()).collect();
    all.sort_by_key(|it| !it.is_ipv4());
    all.dedup();
    all
}

/// Kind of a container, by its list in the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ContainerKind {
    /// Init container, which is expected to end.
    Init,
    /// Regular container, which is expected to run.
    Regular,
}

/// Reads the state of a container from its status.
fn read_container(status: &Value, kind: ContainerKind) -> LocalContainerStatus {
    let is_init = kind == ContainerKind::Init;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let code = |value: &Value| value.as_i64().and_then(|it| i32::try_from(it).ok());
    let (state, last) = (&status["state"], &status["lastState"]["terminated"]);
    let ended = state.get("terminated").filter(|it| !is_init || it["exitCode"] != 0);
    let state = if let Some(ended) = ended {
        ContainerRunState::Terminated {
            code: code(&ended["exitCode"]).unwrap_or(-1),
            reason: text(&ended["reason"]),
            message: text(&ended["message"]),
        }
    } else if let Some(waiting) = state.get("waiting") {
        // For a crashing container the message of its last end explains more than the kubelet's back-off message.
        let message = if last.is_object() { &last["message"] } else { &waiting["message"] };
        ContainerRunState::Waiting {
            reason: text(&waiting["reason"]),
            message: text(message),
            last_exit: code(&last["exitCode"]),
        }
    } else if is_init || state.get("running").is_some() {
        // An init container that ended well does not keep the pod from becoming ready.
        ContainerRunState::Running
    } else {
        // The kubelet has not reported on the container yet.
        ContainerRunState::Waiting {
            reason: String::new(),
            message: String::new(),
            last_exit: None,
        }
    };
    LocalContainerStatus {
        name: text(&status["name"]),
        state,
        restarts: status["restartCount"]
            .as_u64()
            .and_then(|it| u32::try_from(it).ok())
            .unwrap_or(0),
        image_digest: None,
    }
}

/// A pod of one of Rouse's own components.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ComponentPod {
    /// An activator, with its readiness for requests.
    Activator { entry: ActivatorEntry, readiness: ActivatorReadiness },
    /// The agent of one node.
    Agent {
        /// Name of the node that the agent runs on.
        node: String,
    },
    /// A replica of the controller or the autoscaler.
    Replica { component: ServerComponent, replica: ServerReplica },
}

/// Port at which controllers accept streams.
const CONTROLLER_PORT: u16 = 7100;
/// Port at which autoscalers accept streams.
const AUTOSCALER_PORT: u16 = 7110;

/// Returns the component that a pod of the system namespace runs, by its label `app`.
pub fn read_component_pod(object: &Value) -> Option<ComponentPod> {
    let status = &object["status"];
    // An evicted pod stays as an object until the garbage collector or an operator removes it.
    let ended = matches!(status["phase"].as_str(), Some("Succeeded" | "Failed"));
    if revision_name_of(object).is_some() || ended {
        return None;
    }
    let replica = |component, port| {
        // A replica that is being deleted takes no new streams, so it has no address any more.
        let address = pod_addresses(status).first().copied().filter(|_| !is_terminating(object))?;
        let address = SocketAddr::new(address, port);
        Some(ComponentPod::Replica {
            component,
            replica: ServerReplica { name: object_name(object).name.into(), address },
        })
    };
    match label(object, "app")? {
        "activator" => read_activator(object)
            .map(|(entry, readiness)| ComponentPod::Activator { entry, readiness }),
        "rouse-agent" => {
            let node = non_empty_text(&object["spec"]["nodeName"])?;
            Some(ComponentPod::Agent { node: node.into() })
        }
        "controller" => replica(ServerComponent::Controller, CONTROLLER_PORT),
        "autoscaler" => replica(ServerComponent::Autoscaler, AUTOSCALER_PORT),
        _ => None,
    }
}

fn read_activator(object: &Value) -> Option<(ActivatorEntry, ActivatorReadiness)> {
    let entry = ActivatorEntry {
        name: object_name(object).name.into(),
        node: object["spec"]["nodeName"].as_str().unwrap_or_default().to_owned(),
        zone: String::new(),
        addresses: pod_addresses(&object["status"]),
        gets_all_reports: false,
    };
    // Deletion counts before readiness: a pod that is being deleted stays ready until it stops.
    let readiness = match kubelet_readiness(object) {
        _ if is_terminating(object) => ActivatorReadiness::Terminating,
        KubeletReadiness::Ready => ActivatorReadiness::Ready,
        KubeletReadiness::NotYetReady | KubeletReadiness::NoLongerReady => {
            ActivatorReadiness::NotReady
        }
    };
    (!entry.addresses.is_empty()).then_some((entry, readiness))
}

/// Rejection or eviction of a pod by the kubelet of its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodRejection<'a> {
    /// Name of the node.
    pub node: &'a str,
    /// Time of the last change that the pod's status states; `None` if it states none.
    pub at: Option<UnixMillis>,
}

/// Reads the rejection or eviction of a pod; `None` for any other pod.
///
/// The pod object stays for hours and is observed again, so the time is the pod's own.
pub fn read_rejection(pod: &Value) -> Option<PodRejection<'_>> {
    let status = &pod["status"];
    // The kubelet sets a reason (`OutOfpods`, `Evicted`, …) when it rejects or evicts. Failed containers set none.
    let is_rejected = status["phase"] == "Failed" && status["reason"].is_string();
    let node = pod["spec"]["nodeName"].as_str().filter(|_| is_rejected)?;
    // A rejected pod starts and fails at once; conditions of an evicted one change when it is evicted.
    let changes = array_items(&status["conditions"]).map(|it| &it["lastTransitionTime"]);
    let times = changes.chain([&status["startTime"]]).filter_map(Value::as_str);
    Some(PodRejection { node, at: times.filter_map(UnixMillis::parse).max() })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_resize_that_is_not_allocated_is_read_unless_it_is_of_earlier_requests() {
        let read = |condition: Value, generation: i64| {
            let ready = json!({"type": "Ready", "status": "True"});
            pending_resize(&json!({
                "metadata": {"generation": generation},
                "status": {"conditions": [ready, condition]},
            }))
        };
        let condition = |observed_generation: Option<i64>| {
            json!({
                "type": "PodResizePending", "status": "True", "reason": "Deferred", "message": "full",
                "observedGeneration": observed_generation,
            })
        };
        let pending = |generation: Option<i64>| {
            Some(PendingResize { reason: ConditionReason::new("Deferred", "full"), generation })
        };
        assert_eq!(read(condition(Some(3)), 3), pending(Some(3)));
        assert_eq!(read(condition(None), 3), pending(None), "before Kubernetes 1.34");
        assert_eq!(read(condition(Some(2)), 3), None, "the pod has asked for another one since");
        let mut ended = condition(Some(3));
        ended["status"] = json!("False");
        assert_eq!(read(ended, 3), None);
        assert_eq!(read(json!({"type": "PodResizeInProgress", "status": "True"}), 3), None);
    }

    #[test]
    fn a_debug_container_counts_from_its_request_to_its_end() {
        let has = |statuses: Value| {
            has_debug_container(&json!({
                "spec": {"ephemeralContainers": [{"name": "a"}, {"name": "b"}]},
                "status": {"ephemeralContainerStatuses": statuses},
            }))
        };
        let status = |name: &str, state: &str| json!({"name": name, "state": {state: {}}});
        assert!(!has_debug_container(&json!({"status": {}})));
        assert!(has(Value::Null), "the kubelet has not started them yet");
        assert!(has(json!([status("a", "terminated")])));
        assert!(has(json!([status("a", "terminated"), status("b", "running")])));
        assert!(!has(json!([status("a", "terminated"), status("b", "terminated")])));
    }

    #[test]
    fn a_pod_has_reduced_requests_while_it_has_their_note() {
        let read = |annotations: Value| {
            let metadata = json!({"uid": "u", "name": "a", "annotations": annotations});
            let (pod, _) = read_pod(&json!({"metadata": metadata})).expect("it has not ended");
            pod.kube_status.expect("it is one of Kubernetes").has_reduced_requests
        };
        assert!(!read(json!({})));
        assert!(read(json!({ORIGINAL_REQUESTS: "{}"})));
    }
}
