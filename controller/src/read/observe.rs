//! Pure: an object as the API server holds it → the state that the controller keeps.
//!
//! Parts that cannot be read are left out rather than refused, since the object exists all the same.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use common::{
    local_node::{ContainerRunState, LocalContainerStatus, PodRunPhase, PodRunStatus},
    wire::{ActivatorEntry, NamespacedName, ServerComponent, ServerReplica},
};
use serde_json::Value;

use crate::{
    model::{
        cluster_state::{
            ActivatorReadiness, AppRevision, CompactStringMap, ConditionReason, ConditionSet,
            ConditionStatus, ConditionType, ConfigurationState, DomainClaimState,
            DomainMappingState, KubePodStatus, KubeletReadiness, ObjectMetaSummary, ObjectOwner,
            PlaceholderState, PodStage, RevisionPod, RevisionScaling, RouteState, ServiceState,
            Uid, UnixMillis, conditions,
        },
        config_maps::{Features, RevisionDefaults},
        knative::key::{self, ACTIVATOR_PORT_ANNOTATION, DRAINING},
        object::{
            hash::applied_hash,
            json::{annotation, array_items, is_terminating, label, non_empty_text, object_name},
        },
        problem,
        rollout::{self, Rollout},
        scale_policy::{self, ScalePolicyConfig},
    },
    read::{
        fields,
        parse::{self, AdmissionPlatform, RuleSettings},
    },
};

/// Label with the zone of a node.
const ZONE_LABEL: &str = "topology.kubernetes.io/zone";

fn read_pairs(object: &Value, field: &str) -> CompactStringMap {
    let map = serde_json::from_value(object["metadata"][field].clone());
    map.ok().as_ref().map(CompactStringMap::from).unwrap_or_default()
}

/// Reads a Service. One that breaks a rule, which the webhook would have refused, keeps the manifest in force before.
pub fn read_service(
    object: &Value,
    config: &ScalePolicyConfig,
    previous: Option<&ServiceState>,
) -> ServiceState {
    let (meta, is_leaving) = (fields::read_meta(object), is_terminating(object));
    let (defaults, features) = (RevisionDefaults::default(), Features::default());
    let settings = RuleSettings {
        platform: AdmissionPlatform::Kubernetes,
        defaults: &defaults,
        features: &features,
        autoscaler: config,
        cluster_domain: "cluster.local",
    };
    match parse::observed_service(object, settings) {
        Ok((_, manifest)) => {
            ServiceState { meta, manifest, manifest_error: None, is_terminating: is_leaving }
        }
        Err(problems) => {
            let manifest = previous.map(|it| it.manifest.clone()).unwrap_or_default();
            ServiceState {
                meta,
                manifest,
                manifest_error: Some(problem::problems_line(&problems).into()),
                is_terminating: is_leaving,
            }
        }
    }
}

/// Returns the owner of an object: the Service of its own name, none, or another object.
fn read_owner(object: &Value) -> ObjectOwner {
    let all = object["metadata"]["ownerReferences"].as_array();
    let controller = all.into_iter().flatten().find(|it| it["controller"] == true);
    match controller {
        None => ObjectOwner::Unowned,
        Some(it) if it["kind"] == "Service" && it["name"] == object["metadata"]["name"] => {
            ObjectOwner::Service
        }
        Some(_) => ObjectOwner::Other,
    }
}

/// Reads a Configuration with the name of its latest ready Revision.
pub fn read_configuration(object: &Value) -> ConfigurationState {
    let template = &object["spec"]["template"];
    ConfigurationState {
        meta: fields::read_meta(object),
        owner: read_owner(object),
        revision_name: non_empty_text(&template["metadata"]["name"]),
        template: fields::canonical_template(template),
        last_modifier: annotation(object, key::LAST_MODIFIER).map(Into::into),
        latest_ready: non_empty_text(&object["status"]["latestReadyRevisionName"]),
        applied_hash: applied_hash(object),
        is_terminating: is_terminating(object),
    }
}

/// Reads a Route, without the allocations of its names.
pub fn read_route(object: &Value) -> RouteState {
    let owner = read_owner(object);
    let own = |field| {
        if owner == ObjectOwner::Service {
            CompactStringMap::default()
        } else {
            read_pairs(object, field)
        }
    };
    RouteState {
        meta: fields::read_meta(object),
        owner,
        labels: own("labels"),
        annotations: own("annotations"),
        traffic_spec: array_items(&object["spec"]["traffic"])
            .map(fields::read_traffic_spec)
            .collect(),
        allocations: Vec::new(),
        traffic: array_items(&object["status"]["traffic"])
            .filter_map(fields::read_assigned_traffic)
            .collect(),
        rollout: read_rollout(object),
        blocked_reason: None,
        applied_hash: applied_hash(object),
        is_terminating: is_terminating(object),
    }
}

/// Reads the state of a rollout, as the leader wrote it in the status.
fn read_rollout(object: &Value) -> Option<Box<Rollout>> {
    let noted = object["status"]["annotations"][rollout::ROLLOUT_ANNOTATION].as_str()?;
    Rollout::parse(noted).map(Box::new)
}

/// Returns the app of a Revision or of a Revision's child object: the app of its Configuration.
pub fn owning_app(object: &Value) -> Option<NamespacedName> {
    let configuration = label(object, key::CONFIGURATION)?;
    Some(NamespacedName::new(object_name(object).namespace, configuration))
}

/// Returns the name of the Revision that an object was made for.
pub fn revision_name_of(object: &Value) -> Option<&str> {
    label(object, key::REVISION)
}

/// Reads a Revision as a newly observed one, without pods and decisions.
pub fn read_revision(object: &Value) -> AppRevision {
    let name = object_name(object).name;
    let generation = label(object, key::CONFIGURATION_GENERATION).and_then(|it| it.parse().ok());
    let modified = annotation(object, key::ROUTING_STATE_MODIFIED);
    // A container of a registry that is skipped has an entry without digest: that too is a final result.
    let digest = |status: &Value| {
        Some((
            non_empty_text(&status["name"])?,
            non_empty_text(&status["imageDigest"]).unwrap_or_default(),
        ))
    };
    let digests = array_items(&object["status"]["containerStatuses"])
        .chain(array_items(&object["status"]["initContainerStatuses"]));
    let mut conditions = ConditionSet::default();
    fields::read_conditions(&mut conditions, object, &conditions::REVISION_CONDITIONS);
    // A new leader has not seen the crash, and only a pod that works clears the failure.
    let failure = match conditions.get(ConditionType::RevisionHealthy) {
        ConditionStatus::False(reason) if reason.reason.starts_with("ExitCode") => {
            Some(Box::new(reason))
        }
        ConditionStatus::True(_) | ConditionStatus::Unknown(_) | ConditionStatus::False(_) => None,
    };
    AppRevision {
        failure,
        meta: ObjectMetaSummary {
            generation: generation.unwrap_or_default(),
            ..fields::read_meta(object)
        },
        template: user_template(object),
        creator: annotation(object, key::CREATOR).map(Into::into),
        routing: fields::read_routing(label(object, key::ROUTING_STATE), modified),
        scaling: RevisionScaling {
            // The condition means that resources were available once; only an exceeded deadline sets it back later.
            initial_scale_reached: conditions.is_true(ConditionType::RevisionResources),
            ..RevisionScaling::default()
        },
        digests: digests.filter_map(digest).collect(),
        conditions,
        name: name.as_str().into(),
        is_terminating: is_terminating(object),
        is_orphan: read_owner(object) == ObjectOwner::Unowned,
        ..AppRevision::default()
    }
}

/// Returns the template a Revision was made of: its spec, and the labels and annotations that are the user's.
fn user_template(object: &Value) -> Arc<str> {
    let user = |field: &str| {
        let mut map: std::collections::BTreeMap<String, String> =
            serde_json::from_value(object["metadata"][field].clone()).unwrap_or_default();
        map.retain(|name, _| key::is_set_by_user(name));
        map
    };
    fields::canonical_template(&serde_json::json!({
        "metadata": {"labels": user("labels"), "annotations": user("annotations")},
        "spec": object["spec"],
    }))
}

/// Returns the explanation of the decision in force, as the Revision's status shows it.
pub fn read_decision_explanation(object: &Value) -> Option<Box<str>> {
    non_empty_text(&object["status"]["annotations"][key::DECISION_ANNOTATION])
}

/// Returns true for a PodAutoscaler of the class that requires a HorizontalPodAutoscaler.
pub fn is_hpa_class(object: &Value) -> bool {
    annotation(object, &format!("{}class", scale_policy::AUTOSCALING_PREFIX))
        == Some(scale_policy::HPA_CLASS)
}

/// Returns the reason why a Deployment's pods cannot be made, from its condition `ReplicaFailure`.
pub fn replica_failure(object: &Value) -> Option<ConditionReason> {
    let conditions = || array_items(&object["status"]["conditions"]);
    let failed =
        conditions().find(|it| it["type"] == "ReplicaFailure" && it["status"] == "True")?;
    let word = |field: &str| failed[field].as_str().unwrap_or_default().to_owned();
    Some(ConditionReason::new(word("reason"), word("message")))
}

/// Reads a pod and its status; `None` once all its containers have ended for good.
pub fn read_pod(object: &Value) -> Option<(RevisionPod, PodRunStatus)> {
    let meta = &object["metadata"];
    let status = &object["status"];
    if matches!(status["phase"].as_str(), Some("Succeeded" | "Failed")) {
        return None;
    }
    let deleted = is_terminating(object);
    let since = annotation(object, DRAINING).and_then(UnixMillis::parse);
    let uid: Box<str> = non_empty_text(&meta["uid"])?;
    let pod = RevisionPod {
        uid: uid.clone(),
        name: non_empty_text(&meta["name"])?,
        created: fields::read_meta(object).created,
        first_seen_at: UnixMillis::default(),
        was_ready: false,
        steady_readiness: None,
        stage: PodStage::Serving,
        restored_address: None,
        kube_status: Some(Box::new(KubePodStatus {
            node: non_empty_text(&object["spec"]["nodeName"]).unwrap_or_default(),
            kubelet_readiness: kubelet_readiness(status),
            is_terminating: deleted,
            draining_since: since,
            unschedulable: unschedulable_reason(status),
        })),
    };
    let phase = match status["phase"].as_str() {
        // A deletion timestamp counts before the phase, which stays `Running` until the containers end.
        _ if deleted => PodRunPhase::Terminating,
        Some("Running") => PodRunPhase::Running,
        _ => PodRunPhase::Pending,
    };
    let init = array_items(&status["initContainerStatuses"]).map(|it| read_container(it, true));
    let all =
        init.chain(array_items(&status["containerStatuses"]).map(|it| read_container(it, false)));
    let ready =
        pod.kube_status.as_ref().is_some_and(|it| it.kubelet_readiness == KubeletReadiness::Ready);
    let status = PodRunStatus {
        uid: uid.into(),
        phase,
        addresses: pod_addresses(status),
        containers: all.collect(),
        ready,
    };
    Some((pod, status))
}

/// Returns the kubelet's view of readiness. [`KubeletReadiness::NoLongerReady`] depends on the earlier state, which the
/// caller knows.
///
/// The node controller sets `Ready` of all pods of a silent node to false (Kubernetes' `pkg/controller/util/node`,
/// `MarkPodsNotReady`). It leaves `ContainersReady`, which only the kubelet sets.
/// [`ClusterState`](crate::model::cluster_state::ClusterState) decides about such a node.
fn kubelet_readiness(status: &Value) -> KubeletReadiness {
    let mut conditions = array_items(&status["conditions"]);
    let is_ready = |it: &Value| it["type"] == "Ready" || it["type"] == "ContainersReady";
    match conditions.any(|it| is_ready(it) && it["status"] == "True") {
        true => KubeletReadiness::Ready,
        false => KubeletReadiness::NotYetReady,
    }
}

fn unschedulable_reason(status: &Value) -> Option<ConditionReason> {
    let mut conditions = array_items(&status["conditions"]);
    let it = conditions.find(|it| it["type"] == "PodScheduled" && it["status"] == "False")?;
    let word = |field: &str| it[field].as_str().unwrap_or_default().to_owned();
    Some(ConditionReason::new(word("reason"), word("message")))
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

/// Reads the state of a container. An init container is expected to end, any other one to run.
fn read_container(it: &Value, is_init: bool) -> LocalContainerStatus {
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let code = |value: &Value| value.as_i64().and_then(|it| i32::try_from(it).ok());
    let (state, last) = (&it["state"], &it["lastState"]["terminated"]);
    let ended = state.get("terminated").filter(|it| !is_init || it["exitCode"] != 0);
    let state = if let Some(ended) = ended {
        ContainerRunState::Terminated {
            code: code(&ended["exitCode"]).unwrap_or(-1),
            reason: word(&ended["reason"]),
            message: word(&ended["message"]),
        }
    } else if let Some(waiting) = state.get("waiting") {
        // For a crashing container the message of its last end explains more than the kubelet's back-off message.
        let message = if last.is_object() { &last["message"] } else { &waiting["message"] };
        ContainerRunState::Waiting {
            reason: word(&waiting["reason"]),
            message: word(message),
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
        name: word(&it["name"]),
        state,
        restarts: it["restartCount"].as_u64().and_then(|it| u32::try_from(it).ok()).unwrap_or(0),
        image_digest: None,
    }
}

/// Reads a placeholder: the ClusterIPs and the port allocated to a name of a Route.
pub fn read_placeholder(object: &Value) -> Option<PlaceholderState> {
    label(object, key::ROUTE)?;
    let given = array_items(&object["spec"]["clusterIPs"]).filter_map(Value::as_str);
    let mut addresses: Vec<IpAddr> = given.filter_map(|it| it.parse().ok()).collect();
    addresses.sort_by_key(|it| !it.is_ipv4());
    let port = annotation(object, ACTIVATOR_PORT_ANNOTATION).and_then(|it| it.parse().ok());
    let is_cluster_local = label(object, key::VISIBILITY) == Some("cluster-local");
    let mut owners = array_items(&object["metadata"]["ownerReferences"]);
    let owner = owners.find(|it| it["controller"] == true && it["kind"] == "Route");
    // An unreadable UID counts as no owner: then the claimants' age decides about the name.
    let owner = owner.and_then(|it| Uid::parse(it["uid"].as_str()?)).unwrap_or_default();
    let created = fields::read_meta(object).created;
    Some(PlaceholderState {
        cluster_ips: addresses.into(),
        activator_port: port,
        is_cluster_local,
        owner_uid: owner,
        created,
    })
}

/// Reads a DomainMapping, without its conditions.
pub fn read_domain_mapping(object: &Value) -> DomainMappingState {
    let (name, target) = (object_name(object), &object["spec"]["ref"]);
    let word = |field: &str| target[field].as_str().unwrap_or_default();
    let group = word("apiVersion").rsplit_once('/').map_or("", |(group, _)| group);
    // Lower case and an `s` is the plural of every resource that a mapping may refer to.
    let plural = format!("{}s", word("kind").to_ascii_lowercase());
    let kind = if group.is_empty() { plural } else { format!("{plural}.{group}") };
    let namespace = Some(word("namespace")).filter(|it| !it.is_empty());
    let http = key::HTTP_PROTOCOL.iter().find_map(|it| annotation(object, it));
    let secret = object["spec"]["tls"]["secretName"].as_str();
    DomainMappingState {
        meta: fields::read_meta(object),
        target_resource: kind.into(),
        target: NamespacedName::new(namespace.unwrap_or(&name.namespace), word("name")),
        tls_secret: secret.filter(|it| !it.is_empty()).map(Into::into),
        http_protocol: http.map(Into::into),
        conditions: ConditionSet::default(),
        is_terminating: is_terminating(object),
    }
}

/// Reads a ClusterDomainClaim: the namespace that may use the domain.
pub fn read_domain_claim(object: &Value) -> DomainClaimState {
    DomainClaimState {
        namespace: object["spec"]["namespace"].as_str().unwrap_or_default().to_owned(),
    }
}

/// Returns the zone of a node, if it has one.
pub fn node_zone(object: &Value) -> Option<String> {
    label(object, ZONE_LABEL).map(Into::into)
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
            let node = non_empty_text(&object["spec"]["nodeName"]).filter(|it| !it.is_empty())?;
            Some(ComponentPod::Agent { node: node.into() })
        }
        "controller" => replica(ServerComponent::Controller, CONTROLLER_PORT),
        "autoscaler" => replica(ServerComponent::Autoscaler, AUTOSCALER_PORT),
        _ => None,
    }
}

fn read_activator(object: &Value) -> Option<(ActivatorEntry, ActivatorReadiness)> {
    let status = &object["status"];
    let entry = ActivatorEntry {
        name: object_name(object).name.into(),
        node: object["spec"]["nodeName"].as_str().unwrap_or_default().to_owned(),
        zone: String::new(),
        addresses: pod_addresses(status),
    };
    // Deletion counts before readiness: a pod that is being deleted stays ready until it stops.
    let readiness = match kubelet_readiness(status) {
        _ if is_terminating(object) => ActivatorReadiness::Terminating,
        KubeletReadiness::Ready => ActivatorReadiness::Ready,
        KubeletReadiness::NotYetReady | KubeletReadiness::NoLongerReady => {
            ActivatorReadiness::NotReady
        }
    };
    (!entry.addresses.is_empty()).then_some((entry, readiness))
}

/// Returns the names of the pods that an EndpointSlice lists.
pub fn slice_target_names(object: &Value) -> Vec<&str> {
    array_items(&object["endpoints"]).filter_map(|it| it["targetRef"]["name"].as_str()).collect()
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
