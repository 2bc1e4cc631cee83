//! Pure: an object as the API server holds it → the facts that are kept of it.
//!
//! What cannot be read is left out rather than refused: the object is there all the same.

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

/// On a pod that drains: the moment since when.
pub const DRAINING: &str = "rouse.dev/draining";
/// The zone of a node.
const ZONE: &str = "topology.kubernetes.io/zone";

/// An object's name and namespace.
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

/// A Service. One that breaks a rule, which the webhook would have refused, keeps what was in force before.
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

/// Whose an object is: the Service of its own name, nobody's, or another one's.
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

/// A Configuration.
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

/// A Route, without what its names hold.
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

/// Where a rollout stands, as the leader noted it in the status.
fn rollout(object: &Value) -> Option<Box<Rollout>> {
    let noted = object["status"]["annotations"][rollout::ANNOTATION].as_str()?;
    Rollout::parse(noted).map(Box::new)
}

/// The app that a Revision, or something made for one, belongs to: that of its Configuration.
pub fn app(object: &Value) -> Option<Name> {
    let configuration = label(object, key::CONFIGURATION)?;
    Some(Name::new(name(object).namespace, configuration))
}

/// The Revision that something was made for.
pub fn made_for(object: &Value) -> Option<&str> {
    label(object, key::REVISION)
}

/// A Revision, as one that has just been learnt of.
pub fn revision(object: &Value) -> Revision {
    let name = name(object).name;
    let generation = label(object, key::CONFIGURATION_GENERATION).and_then(|it| it.parse().ok());
    let routing = match label(object, key::ROUTING_STATE) {
        Some("active") => Routing::Active,
        Some("reserve") => Routing::Reserve,
        _ => Routing::Pending,
    };
    let since = annotation(object, key::ROUTING_STATE_MODIFIED).and_then(Stamp::parse);
    // One of a registry that is skipped has no digest, and yet it is known that it has none.
    let digest =
        |it: &Value| Some((text(&it["name"])?, text(&it["imageDigest"]).unwrap_or_default()));
    let digests = array(&object["status"]["containerStatuses"])
        .chain(array(&object["status"]["initContainerStatuses"]));
    let mut conditions = Conditions::default();
    restore::conditions(&mut conditions, object, &render::REVISION);
    // Who leads from now on has not seen the crash, and nothing but a pod that works takes it back.
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
        // Resources were there once, which is what it means; nothing takes that back but a late deadline.
        reached: conditions.is_true(Kind::RevisionResources),
        digests: digests.filter_map(digest).collect(),
        conditions,
        name: name.as_str().into(),
        leaving: is_deleted(object),
        is_orphan: owner(object) == Owner::Nobody,
        ..Revision::default()
    }
}

/// The template a Revision was made of: what of its metadata is the user's, and its spec.
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

/// What the status of a Revision says of the decision in force.
pub fn decision(object: &Value) -> Option<Box<str>> {
    text(&object["status"]["annotations"][render::DECISION])
}

/// Whether a PodAutoscaler is of the class that a HorizontalPodAutoscaler is made for.
pub fn is_horizontal(object: &Value) -> bool {
    annotation(object, &format!("{}class", policy::PREFIX)) == Some(policy::HPA)
}

/// What a Deployment says that its pods cannot: why there are none.
pub fn deployment(object: &Value) -> Option<Why> {
    let conditions = || array(&object["status"]["conditions"]);
    let failed =
        conditions().find(|it| it["type"] == "ReplicaFailure" && it["status"] == "True")?;
    let word = |field: &str| failed[field].as_str().unwrap_or_default().to_owned();
    Some(Why::new(word("reason"), word("message")))
}

/// A pod with how it fares; `None` once every container of it has ended for good.
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

/// The kubelet's word. It is [`Kubelet::Lost`] only beside an earlier one, which the caller knows.
///
/// Whoever watches nodes takes `Ready` from all pods of one that is silent, and leaves `ContainersReady`, which is the
/// kubelet's alone (Kubernetes' `pkg/controller/util/node`, `MarkPodsNotReady`); what becomes of such a node is the
/// [`World`](crate::world::World)'s to say.
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

/// Addresses, IPv4 first.
fn addresses(status: &Value) -> Vec<IpAddr> {
    let many = array(&status["podIPs"]).filter_map(|it| it["ip"].as_str());
    let all = status["podIP"].as_str().into_iter().chain(many);
    let mut all: Vec<IpAddr> = all.filter_map(|it| it.parse().ok()).collect();
    all.sort_by_key(|it| !it.is_ipv4());
    all.dedup();
    all
}

/// How a container fares. An init container is there to end, any other one is to run.
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
        // The message of a container that crashes is that of its last end, not the kubelet's about waiting.
        let message = if last.is_object() { &last["message"] } else { &waiting["message"] };
        ContainerState::Waiting {
            reason: word(&waiting["reason"]),
            message: word(message),
            last_exit: code(&last["exitCode"]),
        }
    } else if is_init || state.get("running").is_some() {
        // An init container that ended well is no objection.
        ContainerState::Running
    } else {
        // Nothing is said yet.
        ContainerState::Waiting { reason: String::new(), message: String::new(), last_exit: None }
    };
    ContainerStatus {
        name: word(&it["name"]),
        state,
        restarts: it["restartCount"].as_u64().and_then(|it| u32::try_from(it).ok()).unwrap_or(0),
        image_digest: None,
    }
}

/// What a name holds: the ClusterIPs and the port that stand on its Service.
pub fn placeholder(object: &Value) -> Option<Placeholder> {
    label(object, key::ROUTE)?;
    let given = array(&object["spec"]["clusterIPs"]).filter_map(Value::as_str);
    let mut addresses: Vec<IpAddr> = given.filter_map(|it| it.parse().ok()).collect();
    addresses.sort_by_key(|it| !it.is_ipv4());
    let port = annotation(object, ACTIVATOR_PORT).and_then(|it| it.parse().ok());
    let hidden = label(object, key::VISIBILITY) == Some("cluster-local");
    let mut owners = array(&object["metadata"]["ownerReferences"]);
    let owner = owners.find(|it| it["controller"] == true && it["kind"] == "Route");
    let owner = owner.and_then(|it| Uid::parse(it["uid"].as_str()?)).unwrap_or_default();
    let created = restore::meta(object).created;
    Some(Placeholder { addresses: addresses.into(), port, hidden, owner, created })
}

/// A DomainMapping, but for how it fares.
pub fn mapping(object: &Value) -> Mapping {
    let (own, to) = (name(object), &object["spec"]["ref"]);
    let word = |field: &str| to[field].as_str().unwrap_or_default();
    let group = word("apiVersion").rsplit_once('/').map_or("", |(group, _)| group);
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

/// A ClusterDomainClaim.
pub fn claim(object: &Value) -> Claim {
    Claim { namespace: object["spec"]["namespace"].as_str().unwrap_or_default().to_owned() }
}

/// A node's zone, if it has one.
pub fn zone(object: &Value) -> Option<String> {
    label(object, ZONE).map(Into::into)
}

/// A pod of one of our own parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Own {
    /// An activator, with whether it is ready and stays.
    Activator(Activator, Standing),
    /// The agent of a node.
    Agent {
        /// That node.
        node: String,
    },
    /// A replica of the controller or the autoscaler.
    Replica(Part, Replica),
}

/// Where the controller takes streams.
const CONTROLLER_PORT: u16 = 7100;
/// Where autoscalers do.
const AUTOSCALER_PORT: u16 = 7110;

/// The part that a pod of the system namespace is, by its label `app`.
pub fn own(object: &Value) -> Option<Own> {
    let status = &object["status"];
    // One that was evicted stays as an object until somebody removes it.
    let ended = matches!(status["phase"].as_str(), Some("Succeeded" | "Failed"));
    if made_for(object).is_some() || ended {
        return None;
    }
    let replica = |part, port| {
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
    let standing = match kubelet(status) {
        _ if is_deleted(object) => Standing::Leaving,
        Kubelet::Ready => Standing::Ready,
        Kubelet::Waits | Kubelet::Lost => Standing::Waits,
    };
    Some((activator, standing)).filter(|(it, _)| !it.addresses.is_empty())
}

/// The pods that an EndpointSlice leads to.
pub fn targets(object: &Value) -> Vec<&str> {
    array(&object["endpoints"]).filter_map(|it| it["targetRef"]["name"].as_str()).collect()
}

/// Whether an activator may be sent requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Not yet, or not now.
    Waits,
    /// Yes.
    Ready,
    /// It is about to stop.
    Leaving,
}
