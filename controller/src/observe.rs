//! Pure: an object as the API server holds it → the facts that the controller keeps.
//!
//! Parts that cannot be read are left out rather than refused, since the object exists all the same.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use common::{
    node::{LocalContainerState, LocalContainerStatus, LocalPodPhase, LocalPodStatus},
    wire::{ActivatorEntry, NamespacedName, ServerComponent, ServerReplica},
};
use serde_json::Value;

use crate::{
    children::services::ACTIVATOR_PORT,
    config_maps::{Features, RevisionDefaults},
    knative::key,
    kube::cache::applied,
    parse::{self, AdmissionPlatform, AdmissionRules},
    policy::{self, ScalePolicyConfig},
    render,
    restore::{self, array, text},
    rollout::{self, Rollout},
    world::{
        AppRevision, CompactStringMap, ConditionReason, ConditionSet, ConditionStatus,
        ConditionType, ConfigurationState, DomainClaimState, DomainMappingState, KubePodStatus,
        KubeletReadiness, ObjectMetaSummary, ObjectOwner, PlaceholderState, PodStage, RevisionPod,
        RouteState, RoutingState, ServiceState, Uid, UnixMillis,
    },
};

/// Annotation on a draining pod: the moment at which draining began.
pub const DRAINING: &str = "rouse.dev/draining";
/// Label with the zone of a node.
const ZONE: &str = "topology.kubernetes.io/zone";

/// Returns an object's namespace and name.
pub fn name(object: &Value) -> NamespacedName {
    let field = |field: &str| object["metadata"][field].as_str().unwrap_or_default();
    NamespacedName::new(field("namespace"), field("name"))
}

fn is_deleted(object: &Value) -> bool {
    object["metadata"]["deletionTimestamp"].is_string()
}

fn label<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    object["metadata"]["labels"][key].as_str()
}

fn annotation<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    object["metadata"]["annotations"][key].as_str()
}

fn pairs(object: &Value, field: &str) -> CompactStringMap {
    let map = serde_json::from_value(object["metadata"][field].clone());
    map.ok().as_ref().map(CompactStringMap::from).unwrap_or_default()
}

/// Reads a Service. One that breaks a rule, which the webhook would have refused, keeps the manifest in force before.
pub fn service(
    object: &Value,
    config: &ScalePolicyConfig,
    before: Option<&ServiceState>,
) -> ServiceState {
    let (meta, leaving) = (restore::meta(object), is_deleted(object));
    let (defaults, features) = (RevisionDefaults::default(), Features::default());
    let rules = AdmissionRules {
        platform: AdmissionPlatform::Kubernetes,
        defaults: &defaults,
        features: &features,
        autoscaler: config,
        cluster_domain: "cluster.local",
    };
    match parse::observed(object, rules) {
        Ok((_, manifest)) => ServiceState { meta, manifest, refused: None, leaving },
        Err(problems) => {
            let manifest = before.map(|it| it.manifest.clone()).unwrap_or_default();
            ServiceState { meta, manifest, refused: Some(parse::line(&problems).into()), leaving }
        }
    }
}

/// Returns the owner of an object: the Service of its own name, none, or another object.
fn owner(object: &Value) -> ObjectOwner {
    let all = object["metadata"]["ownerReferences"].as_array();
    let controller = all.into_iter().flatten().find(|it| it["controller"] == true);
    match controller {
        None => ObjectOwner::Nobody,
        Some(it) if it["kind"] == "Service" && it["name"] == object["metadata"]["name"] => {
            ObjectOwner::Service
        }
        Some(_) => ObjectOwner::Other,
    }
}

/// Reads a Configuration with the name of its latest ready Revision.
pub fn configuration(object: &Value) -> ConfigurationState {
    let template = &object["spec"]["template"];
    ConfigurationState {
        meta: restore::meta(object),
        owner: owner(object),
        revision: text(&template["metadata"]["name"]),
        template: restore::canonical(template),
        modifier: annotation(object, key::LAST_MODIFIER).map(Into::into),
        latest_ready: text(&object["status"]["latestReadyRevisionName"]),
        applied: applied(object),
        leaving: is_deleted(object),
    }
}

/// Reads a Route, without the allocations of its names.
pub fn route(object: &Value) -> RouteState {
    let owner = owner(object);
    let own = |field| {
        if owner == ObjectOwner::Service {
            CompactStringMap::default()
        } else {
            pairs(object, field)
        }
    };
    RouteState {
        meta: restore::meta(object),
        owner,
        labels: own("labels"),
        annotations: own("annotations"),
        wanted: array(&object["spec"]["traffic"]).map(restore::traffic).collect(),
        allotted: Vec::new(),
        traffic: array(&object["status"]["traffic"]).filter_map(restore::assigned).collect(),
        rollout: rollout(object),
        blocked: None,
        applied: applied(object),
        leaving: is_deleted(object),
    }
}

/// Reads the state of a rollout, as the leader wrote it in the status.
fn rollout(object: &Value) -> Option<Box<Rollout>> {
    let noted = object["status"]["annotations"][rollout::ANNOTATION].as_str()?;
    Rollout::parse(noted).map(Box::new)
}

/// Returns the app of a Revision or of a Revision's child object: the app of its Configuration.
pub fn app(object: &Value) -> Option<NamespacedName> {
    let configuration = label(object, key::CONFIGURATION)?;
    Some(NamespacedName::new(name(object).namespace, configuration))
}

/// Returns the name of the Revision that an object was made for.
pub fn made_for(object: &Value) -> Option<&str> {
    label(object, key::REVISION)
}

/// Reads a Revision as a newly observed one, without pods and decisions.
pub fn revision(object: &Value) -> AppRevision {
    let name = name(object).name;
    let generation = label(object, key::CONFIGURATION_GENERATION).and_then(|it| it.parse().ok());
    let routing = match label(object, key::ROUTING_STATE) {
        Some("active") => RoutingState::Active,
        Some("reserve") => RoutingState::Reserve,
        _ => RoutingState::Pending,
    };
    let since = annotation(object, key::ROUTING_STATE_MODIFIED).and_then(UnixMillis::parse);
    // A container of a registry that is skipped has an entry without digest: that too is a final result.
    let digest =
        |it: &Value| Some((text(&it["name"])?, text(&it["imageDigest"]).unwrap_or_default()));
    let digests = array(&object["status"]["containerStatuses"])
        .chain(array(&object["status"]["initContainerStatuses"]));
    let mut conditions = ConditionSet::default();
    restore::conditions(&mut conditions, object, &render::REVISION);
    // A new leader has not seen the crash, and only a pod that works clears the failure.
    let failure = match conditions.get(ConditionType::RevisionHealthy) {
        ConditionStatus::False(why) if why.reason.starts_with("ExitCode") => Some(Box::new(why)),
        ConditionStatus::True(_) | ConditionStatus::Unknown(_) | ConditionStatus::False(_) => None,
    };
    AppRevision {
        failure,
        meta: ObjectMetaSummary {
            generation: generation.unwrap_or_default(),
            ..restore::meta(object)
        },
        template: template(object),
        creator: annotation(object, key::CREATOR).map(Into::into),
        routing: (routing, since.unwrap_or_default()),
        // The condition means that resources were available once; only an exceeded deadline sets it back later.
        reached: conditions.is_true(ConditionType::RevisionResources),
        digests: digests.filter_map(digest).collect(),
        conditions,
        name: name.as_str().into(),
        leaving: is_deleted(object),
        is_orphan: owner(object) == ObjectOwner::Nobody,
        ..AppRevision::default()
    }
}

/// Returns the template a Revision was made of: its spec, and the labels and annotations that are the user's.
fn template(object: &Value) -> Arc<str> {
    let user = |field: &str| {
        let mut map: std::collections::BTreeMap<String, String> =
            serde_json::from_value(object["metadata"][field].clone()).unwrap_or_default();
        map.retain(|name, _| key::is_users(name));
        map
    };
    restore::canonical(&serde_json::json!({
        "metadata": {"labels": user("labels"), "annotations": user("annotations")},
        "spec": object["spec"],
    }))
}

/// Returns the decision in force, as the Revision's status shows it.
pub fn decision(object: &Value) -> Option<Box<str>> {
    text(&object["status"]["annotations"][render::DECISION])
}

/// Returns true for a PodAutoscaler of the class that requires a HorizontalPodAutoscaler.
pub fn is_horizontal(object: &Value) -> bool {
    annotation(object, &format!("{}class", policy::PREFIX)) == Some(policy::HPA)
}

/// Returns the reason why a Deployment's pods cannot be made, from its condition `ReplicaFailure`.
pub fn deployment(object: &Value) -> Option<ConditionReason> {
    let conditions = || array(&object["status"]["conditions"]);
    let failed =
        conditions().find(|it| it["type"] == "ReplicaFailure" && it["status"] == "True")?;
    let word = |field: &str| failed[field].as_str().unwrap_or_default().to_owned();
    Some(ConditionReason::new(word("reason"), word("message")))
}

/// Reads a pod and its status; `None` once all its containers have ended for good.
pub fn pod(object: &Value) -> Option<(RevisionPod, LocalPodStatus)> {
    let meta = &object["metadata"];
    let status = &object["status"];
    if matches!(status["phase"].as_str(), Some("Succeeded" | "Failed")) {
        return None;
    }
    let deleted = is_deleted(object);
    let since = annotation(object, DRAINING).and_then(UnixMillis::parse);
    let uid: Box<str> = text(&meta["uid"])?;
    let pod = RevisionPod {
        uid: uid.clone(),
        name: text(&meta["name"])?,
        created: restore::meta(object).created,
        met: UnixMillis::default(),
        was_ready: false,
        steady: None,
        stage: PodStage::Serving,
        remembered: None,
        placed: Some(Box::new(KubePodStatus {
            node: text(&object["spec"]["nodeName"]).unwrap_or_default(),
            kubelet: kubelet(status),
            deleted,
            draining: since,
            unschedulable: unschedulable(status),
        })),
    };
    let phase = match status["phase"].as_str() {
        // A deletion timestamp counts before the phase, which stays `Running` until the containers end.
        _ if deleted => LocalPodPhase::Terminating,
        Some("Running") => LocalPodPhase::Running,
        _ => LocalPodPhase::Pending,
    };
    let init = array(&status["initContainerStatuses"]).map(|it| container(it, true));
    let all = init.chain(array(&status["containerStatuses"]).map(|it| container(it, false)));
    let ready = pod.placed.as_ref().is_some_and(|it| it.kubelet == KubeletReadiness::Ready);
    let status = LocalPodStatus {
        uid: uid.into(),
        phase,
        addresses: addresses(status),
        containers: all.collect(),
        ready,
    };
    Some((pod, status))
}

/// Returns the kubelet's view of readiness. [`KubeletReadiness::Lost`] depends on the earlier state, which the caller
/// knows.
///
/// The node controller sets `Ready` of all pods of a silent node to false (Kubernetes' `pkg/controller/util/node`,
/// `MarkPodsNotReady`). It leaves `ContainersReady`, which only the kubelet sets.
/// [`ClusterState`](crate::world::ClusterState) decides about such a node.
fn kubelet(status: &Value) -> KubeletReadiness {
    let mut conditions = array(&status["conditions"]);
    let is_ready = |it: &Value| it["type"] == "Ready" || it["type"] == "ContainersReady";
    match conditions.any(|it| is_ready(it) && it["status"] == "True") {
        true => KubeletReadiness::Ready,
        false => KubeletReadiness::Waits,
    }
}

fn unschedulable(status: &Value) -> Option<ConditionReason> {
    let mut conditions = array(&status["conditions"]);
    let it = conditions.find(|it| it["type"] == "PodScheduled" && it["status"] == "False")?;
    let word = |field: &str| it[field].as_str().unwrap_or_default().to_owned();
    Some(ConditionReason::new(word("reason"), word("message")))
}

/// Returns the addresses of a pod, IPv4 first.
fn addresses(status: &Value) -> Vec<IpAddr> {
    let many = array(&status["podIPs"]).filter_map(|it| it["ip"].as_str());
    let all = status["podIP"].as_str().into_iter().chain(many);
    let mut all: Vec<IpAddr> = all.filter_map(|it| it.parse().ok()).collect();
    all.sort_by_key(|it| !it.is_ipv4());
    all.dedup();
    all
}

/// Reads the state of a container. An init container is expected to end, any other one to run.
fn container(it: &Value, is_init: bool) -> LocalContainerStatus {
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let code = |value: &Value| value.as_i64().and_then(|it| i32::try_from(it).ok());
    let (state, last) = (&it["state"], &it["lastState"]["terminated"]);
    let ended = state.get("terminated").filter(|it| !is_init || it["exitCode"] != 0);
    let state = if let Some(ended) = ended {
        LocalContainerState::Terminated {
            code: code(&ended["exitCode"]).unwrap_or(-1),
            reason: word(&ended["reason"]),
            message: word(&ended["message"]),
        }
    } else if let Some(waiting) = state.get("waiting") {
        // For a crashing container the message of its last end explains more than the kubelet's back-off message.
        let message = if last.is_object() { &last["message"] } else { &waiting["message"] };
        LocalContainerState::Waiting {
            reason: word(&waiting["reason"]),
            message: word(message),
            last_exit: code(&last["exitCode"]),
        }
    } else if is_init || state.get("running").is_some() {
        // An init container that ended well does not keep the pod from becoming ready.
        LocalContainerState::Running
    } else {
        // The kubelet has not reported on the container yet.
        LocalContainerState::Waiting {
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
pub fn placeholder(object: &Value) -> Option<PlaceholderState> {
    label(object, key::ROUTE)?;
    let given = array(&object["spec"]["clusterIPs"]).filter_map(Value::as_str);
    let mut addresses: Vec<IpAddr> = given.filter_map(|it| it.parse().ok()).collect();
    addresses.sort_by_key(|it| !it.is_ipv4());
    let port = annotation(object, ACTIVATOR_PORT).and_then(|it| it.parse().ok());
    let hidden = label(object, key::VISIBILITY) == Some("cluster-local");
    let mut owners = array(&object["metadata"]["ownerReferences"]);
    let owner = owners.find(|it| it["controller"] == true && it["kind"] == "Route");
    // An unreadable UID counts as no owner: then the claimants' age decides about the name.
    let owner = owner.and_then(|it| Uid::parse(it["uid"].as_str()?)).unwrap_or_default();
    let created = restore::meta(object).created;
    Some(PlaceholderState { addresses: addresses.into(), port, hidden, owner, created })
}

/// Reads a DomainMapping, without its conditions.
pub fn mapping(object: &Value) -> DomainMappingState {
    let (own, to) = (name(object), &object["spec"]["ref"]);
    let word = |field: &str| to[field].as_str().unwrap_or_default();
    let group = word("apiVersion").rsplit_once('/').map_or("", |(group, _)| group);
    // Lower case and an `s` is the plural of every resource that a mapping may refer to.
    let plural = format!("{}s", word("kind").to_ascii_lowercase());
    let kind = if group.is_empty() { plural } else { format!("{plural}.{group}") };
    let namespace = Some(word("namespace")).filter(|it| !it.is_empty());
    let http = key::HTTP_PROTOCOL.iter().find_map(|it| annotation(object, it));
    let secret = object["spec"]["tls"]["secretName"].as_str();
    DomainMappingState {
        meta: restore::meta(object),
        kind: kind.into(),
        target: NamespacedName::new(namespace.unwrap_or(&own.namespace), word("name")),
        secret: secret.filter(|it| !it.is_empty()).map(Into::into),
        http: http.map(Into::into),
        conditions: ConditionSet::default(),
        leaving: is_deleted(object),
    }
}

/// Reads a ClusterDomainClaim: the namespace that may use the domain.
pub fn claim(object: &Value) -> DomainClaimState {
    DomainClaimState {
        namespace: object["spec"]["namespace"].as_str().unwrap_or_default().to_owned(),
    }
}

/// Returns the zone of a node, if it has one.
pub fn zone(object: &Value) -> Option<String> {
    label(object, ZONE).map(Into::into)
}

/// A pod of one of Rouse's own components.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ComponentPod {
    /// An activator, with its readiness for requests.
    Activator(ActivatorEntry, ActivatorReadiness),
    /// The agent of one node.
    Agent {
        /// Name of the node that the agent runs on.
        node: String,
    },
    /// A replica of the controller or the autoscaler.
    Replica(ServerComponent, ServerReplica),
}

/// Port at which controllers accept streams.
const CONTROLLER_PORT: u16 = 7100;
/// Port at which autoscalers accept streams.
const AUTOSCALER_PORT: u16 = 7110;

/// Returns the component that a pod of the system namespace runs, by its label `app`.
pub fn own(object: &Value) -> Option<ComponentPod> {
    let status = &object["status"];
    // An evicted pod stays as an object until the garbage collector or an operator removes it.
    let ended = matches!(status["phase"].as_str(), Some("Succeeded" | "Failed"));
    if made_for(object).is_some() || ended {
        return None;
    }
    let replica = |part, port| {
        // A replica that is being deleted takes no new streams, so it has no address any more.
        let address = addresses(status).first().copied().filter(|_| !is_deleted(object))?;
        let address = SocketAddr::new(address, port);
        Some(ComponentPod::Replica(part, ServerReplica { name: name(object).name.into(), address }))
    };
    match label(object, "app")? {
        "activator" => {
            activator(object).map(|(it, standing)| ComponentPod::Activator(it, standing))
        }
        "rouse-agent" => {
            let node = text(&object["spec"]["nodeName"]).filter(|it| !it.is_empty())?;
            Some(ComponentPod::Agent { node: node.into() })
        }
        "controller" => replica(ServerComponent::Controller, CONTROLLER_PORT),
        "autoscaler" => replica(ServerComponent::Autoscaler, AUTOSCALER_PORT),
        _ => None,
    }
}

fn activator(object: &Value) -> Option<(ActivatorEntry, ActivatorReadiness)> {
    let status = &object["status"];
    let activator = ActivatorEntry {
        name: name(object).name.into(),
        node: object["spec"]["nodeName"].as_str().unwrap_or_default().to_owned(),
        zone: String::new(),
        addresses: addresses(status),
    };
    // Deletion counts before readiness: a pod that is being deleted stays ready until it stops.
    let standing = match kubelet(status) {
        _ if is_deleted(object) => ActivatorReadiness::Leaving,
        KubeletReadiness::Ready => ActivatorReadiness::Ready,
        KubeletReadiness::Waits | KubeletReadiness::Lost => ActivatorReadiness::Waits,
    };
    Some((activator, standing)).filter(|(it, _)| !it.addresses.is_empty())
}

/// Returns the names of the pods that an EndpointSlice lists.
pub fn targets(object: &Value) -> Vec<&str> {
    array(&object["endpoints"]).filter_map(|it| it["targetRef"]["name"].as_str()).collect()
}

/// Readiness of an activator for requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivatorReadiness {
    /// The activator is not ready yet, or not at present.
    Waits,
    /// The activator is ready for requests.
    Ready,
    /// The activator is being deleted and about to stop.
    Leaving,
}
