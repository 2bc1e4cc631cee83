//! Pure: an object as the API server holds it → the facts that the controller keeps.
//!
//! Parts that cannot be read are left out rather than refused, since the object exists all the same.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use common::{
    node::{ContainerState, ContainerStatus, PodPhase, PodStatus},
    wire::{Activator, Name, Part, Replica},
};
use serde_json::Value;

use crate::{
    children::services::ACTIVATOR_PORT,
    config_maps::{Defaults, Features},
    knative::key,
    kube::cache::applied,
    parse::{self, Platform, Rules},
    policy::{self, AutoscalerConfig},
    render,
    restore::{self, array, text},
    rollout::{self, Rollout},
    world::{
        Claim, Conditions, Configuration, Kind, Kubelet, Mapping, Meta, Owner, Pairs, Placed,
        Placeholder, Pod, Revision, Route, Routing, Service, Stage, Stamp, Truth, Uid, Why,
    },
};

/// Annotation on a draining pod: the moment at which draining began.
pub const DRAINING: &str = "rouse.dev/draining";
/// Label with the zone of a node.
const ZONE: &str = "topology.kubernetes.io/zone";

/// Returns an object's namespace and name.
pub fn name(object: &Value) -> Name {
    let field = |field: &str| object["metadata"][field].as_str().unwrap_or_default();
    Name::new(field("namespace"), field("name"))
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

fn pairs(object: &Value, field: &str) -> Pairs {
    let map = serde_json::from_value(object["metadata"][field].clone());
    map.ok().as_ref().map(Pairs::from).unwrap_or_default()
}

/// Reads a Service. One that breaks a rule, which the webhook would have refused, keeps the manifest in force before.
pub fn service(object: &Value, config: &AutoscalerConfig, before: Option<&Service>) -> Service {
    let (meta, leaving) = (restore::meta(object), is_deleted(object));
    let (defaults, features) = (Defaults::default(), Features::default());
    let rules = Rules {
        platform: Platform::Kubernetes,
        defaults: &defaults,
        features: &features,
        autoscaler: config,
        cluster_domain: "cluster.local",
    };
    match parse::observed(object, rules) {
        Ok((_, manifest)) => Service { meta, manifest, refused: None, leaving },
        Err(problems) => {
            let manifest = before.map(|it| it.manifest.clone()).unwrap_or_default();
            Service { meta, manifest, refused: Some(parse::line(&problems).into()), leaving }
        }
    }
}

/// Returns the owner of an object: the Service of its own name, none, or another object.
fn owner(object: &Value) -> Owner {
    let all = object["metadata"]["ownerReferences"].as_array();
    let controller = all.into_iter().flatten().find(|it| it["controller"] == true);
    match controller {
        None => Owner::Nobody,
        Some(it) if it["kind"] == "Service" && it["name"] == object["metadata"]["name"] => {
            Owner::Service
        }
        Some(_) => Owner::Other,
    }
}

/// Reads a Configuration with the name of its latest ready Revision.
pub fn configuration(object: &Value) -> Configuration {
    let template = &object["spec"]["template"];
    Configuration {
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
pub fn route(object: &Value) -> Route {
    let owner = owner(object);
    let own = |field| if owner == Owner::Service { Pairs::default() } else { pairs(object, field) };
    Route {
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
pub fn app(object: &Value) -> Option<Name> {
    let configuration = label(object, key::CONFIGURATION)?;
    Some(Name::new(name(object).namespace, configuration))
}

/// Returns the name of the Revision that an object was made for.
pub fn made_for(object: &Value) -> Option<&str> {
    label(object, key::REVISION)
}

/// Reads a Revision as a newly observed one, without pods and decisions.
pub fn revision(object: &Value) -> Revision {
    let name = name(object).name;
    let generation = label(object, key::CONFIGURATION_GENERATION).and_then(|it| it.parse().ok());
    let routing = match label(object, key::ROUTING_STATE) {
        Some("active") => Routing::Active,
        Some("reserve") => Routing::Reserve,
        _ => Routing::Pending,
    };
    let since = annotation(object, key::ROUTING_STATE_MODIFIED).and_then(Stamp::parse);
    // A container of a registry that is skipped has an entry without digest: that too is a final result.
    let digest =
        |it: &Value| Some((text(&it["name"])?, text(&it["imageDigest"]).unwrap_or_default()));
    let digests = array(&object["status"]["containerStatuses"])
        .chain(array(&object["status"]["initContainerStatuses"]));
    let mut conditions = Conditions::default();
    restore::conditions(&mut conditions, object, &render::REVISION);
    // A new leader has not seen the crash, and only a pod that works clears the failure.
    let failure = match conditions.get(Kind::RevisionHealthy) {
        Truth::False(why) if why.reason.starts_with("ExitCode") => Some(Box::new(why)),
        Truth::True(_) | Truth::Unknown(_) | Truth::False(_) => None,
    };
    Revision {
        failure,
        meta: Meta { generation: generation.unwrap_or_default(), ..restore::meta(object) },
        template: template(object),
        creator: annotation(object, key::CREATOR).map(Into::into),
        routing: (routing, since.unwrap_or_default()),
        // The condition means that resources were available once; only an exceeded deadline sets it back later.
        reached: conditions.is_true(Kind::RevisionResources),
        digests: digests.filter_map(digest).collect(),
        conditions,
        name: name.as_str().into(),
        leaving: is_deleted(object),
        is_orphan: owner(object) == Owner::Nobody,
        ..Revision::default()
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
pub fn deployment(object: &Value) -> Option<Why> {
    let conditions = || array(&object["status"]["conditions"]);
    let failed =
        conditions().find(|it| it["type"] == "ReplicaFailure" && it["status"] == "True")?;
    let word = |field: &str| failed[field].as_str().unwrap_or_default().to_owned();
    Some(Why::new(word("reason"), word("message")))
}

/// Reads a pod and its status; `None` once all its containers have ended for good.
pub fn pod(object: &Value) -> Option<(Pod, PodStatus)> {
    let meta = &object["metadata"];
    let status = &object["status"];
    if matches!(status["phase"].as_str(), Some("Succeeded" | "Failed")) {
        return None;
    }
    let deleted = is_deleted(object);
    let since = annotation(object, DRAINING).and_then(Stamp::parse);
    let uid: Box<str> = text(&meta["uid"])?;
    let pod = Pod {
        uid: uid.clone(),
        name: text(&meta["name"])?,
        created: restore::meta(object).created,
        met: Stamp::default(),
        was_ready: false,
        steady: None,
        stage: Stage::Serving,
        remembered: None,
        placed: Some(Box::new(Placed {
            node: text(&object["spec"]["nodeName"]).unwrap_or_default(),
            kubelet: kubelet(status),
            deleted,
            draining: since,
            unschedulable: unschedulable(status),
        })),
    };
    let phase = match status["phase"].as_str() {
        // A deletion timestamp counts before the phase, which stays `Running` until the containers end.
        _ if deleted => PodPhase::Terminating,
        Some("Running") => PodPhase::Running,
        _ => PodPhase::Pending,
    };
    let init = array(&status["initContainerStatuses"]).map(|it| container(it, true));
    let all = init.chain(array(&status["containerStatuses"]).map(|it| container(it, false)));
    let ready = pod.placed.as_ref().is_some_and(|it| it.kubelet == Kubelet::Ready);
    let status = PodStatus {
        uid: uid.into(),
        phase,
        addresses: addresses(status),
        containers: all.collect(),
        ready,
    };
    Some((pod, status))
}

/// Returns the kubelet's view of readiness. [`Kubelet::Lost`] depends on the earlier state, which the caller knows.
///
/// The node controller sets `Ready` of all pods of a silent node to false (Kubernetes' `pkg/controller/util/node`,
/// `MarkPodsNotReady`). It leaves `ContainersReady`, which only the kubelet sets. [`World`](crate::world::World)
/// decides about such a node.
fn kubelet(status: &Value) -> Kubelet {
    let mut conditions = array(&status["conditions"]);
    let is_ready = |it: &Value| it["type"] == "Ready" || it["type"] == "ContainersReady";
    match conditions.any(|it| is_ready(it) && it["status"] == "True") {
        true => Kubelet::Ready,
        false => Kubelet::Waits,
    }
}

fn unschedulable(status: &Value) -> Option<Why> {
    let mut conditions = array(&status["conditions"]);
    let it = conditions.find(|it| it["type"] == "PodScheduled" && it["status"] == "False")?;
    let word = |field: &str| it[field].as_str().unwrap_or_default().to_owned();
    Some(Why::new(word("reason"), word("message")))
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
fn container(it: &Value, is_init: bool) -> ContainerStatus {
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let code = |value: &Value| value.as_i64().and_then(|it| i32::try_from(it).ok());
    let (state, last) = (&it["state"], &it["lastState"]["terminated"]);
    let ended = state.get("terminated").filter(|it| !is_init || it["exitCode"] != 0);
    let state = if let Some(ended) = ended {
        ContainerState::Terminated {
            code: code(&ended["exitCode"]).unwrap_or(-1),
            reason: word(&ended["reason"]),
            message: word(&ended["message"]),
        }
    } else if let Some(waiting) = state.get("waiting") {
        // For a crashing container the message of its last end explains more than the kubelet's back-off message.
        let message = if last.is_object() { &last["message"] } else { &waiting["message"] };
        ContainerState::Waiting {
            reason: word(&waiting["reason"]),
            message: word(message),
            last_exit: code(&last["exitCode"]),
        }
    } else if is_init || state.get("running").is_some() {
        // An init container that ended well does not keep the pod from becoming ready.
        ContainerState::Running
    } else {
        // The kubelet has not reported on the container yet.
        ContainerState::Waiting { reason: String::new(), message: String::new(), last_exit: None }
    };
    ContainerStatus {
        name: word(&it["name"]),
        state,
        restarts: it["restartCount"].as_u64().and_then(|it| u32::try_from(it).ok()).unwrap_or(0),
        image_digest: None,
    }
}

/// Reads a placeholder: the ClusterIPs and the port allocated to a name of a Route.
pub fn placeholder(object: &Value) -> Option<Placeholder> {
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
    Some(Placeholder { addresses: addresses.into(), port, hidden, owner, created })
}

/// Reads a DomainMapping, without its conditions.
pub fn mapping(object: &Value) -> Mapping {
    let (own, to) = (name(object), &object["spec"]["ref"]);
    let word = |field: &str| to[field].as_str().unwrap_or_default();
    let group = word("apiVersion").rsplit_once('/').map_or("", |(group, _)| group);
    // Lower case and an `s` is the plural of every resource that a mapping may refer to.
    let plural = format!("{}s", word("kind").to_ascii_lowercase());
    let kind = if group.is_empty() { plural } else { format!("{plural}.{group}") };
    let namespace = Some(word("namespace")).filter(|it| !it.is_empty());
    let http = key::HTTP_PROTOCOL.iter().find_map(|it| annotation(object, it));
    let secret = object["spec"]["tls"]["secretName"].as_str();
    Mapping {
        meta: restore::meta(object),
        kind: kind.into(),
        target: Name::new(namespace.unwrap_or(&own.namespace), word("name")),
        secret: secret.filter(|it| !it.is_empty()).map(Into::into),
        http: http.map(Into::into),
        conditions: Conditions::default(),
        leaving: is_deleted(object),
    }
}

/// Reads a ClusterDomainClaim: the namespace that may use the domain.
pub fn claim(object: &Value) -> Claim {
    Claim { namespace: object["spec"]["namespace"].as_str().unwrap_or_default().to_owned() }
}

/// Returns the zone of a node, if it has one.
pub fn zone(object: &Value) -> Option<String> {
    label(object, ZONE).map(Into::into)
}

/// A pod of one of Rouse's own components.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Own {
    /// An activator, with its readiness for requests.
    Activator(Activator, Standing),
    /// The agent of one node.
    Agent {
        /// Name of the node that the agent runs on.
        node: String,
    },
    /// A replica of the controller or the autoscaler.
    Replica(Part, Replica),
}

/// Port at which controllers accept streams.
const CONTROLLER_PORT: u16 = 7100;
/// Port at which autoscalers accept streams.
const AUTOSCALER_PORT: u16 = 7110;

/// Returns the component that a pod of the system namespace runs, by its label `app`.
pub fn own(object: &Value) -> Option<Own> {
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
        Some(Own::Replica(part, Replica { name: name(object).name.into(), address }))
    };
    match label(object, "app")? {
        "activator" => activator(object).map(|(it, standing)| Own::Activator(it, standing)),
        "rouse-agent" => {
            let node = text(&object["spec"]["nodeName"]).filter(|it| !it.is_empty())?;
            Some(Own::Agent { node: node.into() })
        }
        "controller" => replica(Part::Controller, CONTROLLER_PORT),
        "autoscaler" => replica(Part::Autoscaler, AUTOSCALER_PORT),
        _ => None,
    }
}

fn activator(object: &Value) -> Option<(Activator, Standing)> {
    let status = &object["status"];
    let activator = Activator {
        name: name(object).name.into(),
        node: object["spec"]["nodeName"].as_str().unwrap_or_default().to_owned(),
        zone: String::new(),
        addresses: addresses(status),
    };
    // Deletion counts before readiness: a pod that is being deleted stays ready until it stops.
    let standing = match kubelet(status) {
        _ if is_deleted(object) => Standing::Leaving,
        Kubelet::Ready => Standing::Ready,
        Kubelet::Waits | Kubelet::Lost => Standing::Waits,
    };
    Some((activator, standing)).filter(|(it, _)| !it.addresses.is_empty())
}

/// Returns the names of the pods that an EndpointSlice lists.
pub fn targets(object: &Value) -> Vec<&str> {
    array(&object["endpoints"]).filter_map(|it| it["targetRef"]["name"].as_str()).collect()
}

/// Readiness of an activator for requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The activator is not ready yet, or not at present.
    Waits,
    /// The activator is ready for requests.
    Ready,
    /// The activator is being deleted and about to stop.
    Leaving,
}
