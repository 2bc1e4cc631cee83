//! Pure: an [`AppState`] → its objects for users and tools, in the form of `kubectl get -o yaml`.

use std::{collections::BTreeMap, fmt};

use common::{
    node::{self, LocalContainerState},
    wire::NamespacedName,
};
use k8s_openapi::{
    api::core::v1::{ContainerStatus, Pod as PodObject, PodCondition, PodIP, PodStatus},
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time},
    jiff::Timestamp,
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    knative::{
        API_VERSION, AddressableUrl, ConfigurationStatus, ContainerDigest, KnativeCondition,
        RevisionStatus, RouteStatus, ServiceStatus, TrafficTarget, domain::DomainMappingStatus,
        key,
    },
    plan::{self, TemplateFacts},
    rollout,
    world::{
        AppRevision, AppState, AssignedTraffic, ClusterIpSource, ClusterState, ConditionSet,
        ConditionStatus, ConditionType, ConfigurationState, DomainMappingState, ObjectMetaSummary,
        PodStage, RevisionPod, RouteState, RoutingState, ServiceState, UnixMillis,
    },
};

/// Kind of an object; its plural is the name of the object's folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KnativeObjectKind {
    /// A Knative Service, in `services`.
    Service,
    /// A Configuration, in the folder `configurations`.
    Configuration,
    /// A Revision, in the folder `revisions`.
    Revision,
    /// A Route, in the folder `routes`.
    Route,
    /// A pod, in the folder `pods`.
    Pod,
    /// A PodAutoscaler, in the folder `podautoscalers`.
    PodAutoscaler,
    /// A ServerlessService, in the folder `serverlessservices`.
    ServerlessService,
}

impl KnativeObjectKind {
    /// All kinds of objects, in the order of declaration.
    pub const ALL: [Self; 7] = [
        Self::Service,
        Self::Configuration,
        Self::Revision,
        Self::Route,
        Self::Pod,
        Self::PodAutoscaler,
        Self::ServerlessService,
    ];

    /// Returns the lower-case plural, as in API paths.
    pub fn plural(self) -> &'static str {
        match self {
            Self::Service => "services",
            Self::Configuration => "configurations",
            Self::Revision => "revisions",
            Self::Route => "routes",
            Self::Pod => "pods",
            Self::PodAutoscaler => "podautoscalers",
            Self::ServerlessService => "serverlessservices",
        }
    }
}

/// Kind and name of one object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KnativeObjectKey {
    /// Kind of the object, which is also its folder.
    pub kind: KnativeObjectKind,
    /// Namespace and name of the object.
    pub name: NamespacedName,
}

impl KnativeObjectKey {
    /// Returns the keys of an app's Service, Configuration and Route.
    pub fn of_app(name: &NamespacedName) -> [Self; 3] {
        [KnativeObjectKind::Service, KnativeObjectKind::Configuration, KnativeObjectKind::Route]
            .map(|kind| Self { kind, name: name.clone() })
    }

    /// Returns the keys of a Revision, its PodAutoscaler and its ServerlessService, which share its name.
    pub fn of_revision(namespace: &str, name: &str) -> [Self; 3] {
        [
            KnativeObjectKind::Revision,
            KnativeObjectKind::PodAutoscaler,
            KnativeObjectKind::ServerlessService,
        ]
        .map(|kind| Self { kind, name: NamespacedName::new(namespace, name) })
    }

    /// Returns the key of a pod.
    pub fn pod(namespace: &str, name: &str) -> Self {
        Self { kind: KnativeObjectKind::Pod, name: NamespacedName::new(namespace, name) }
    }
}

impl fmt::Display for KnativeObjectKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.kind.plural(), self.name)
    }
}

/// Returns the present object; `None` if there is none, and for the two kinds that [`crate::want::shown`] makes.
pub fn object(world: &ClusterState, key: &KnativeObjectKey) -> Option<Value> {
    let name = &key.name;
    // On the local node an app that is deleted is gone for its users, although its pods still drain.
    let app = || world.apps.get(name).filter(|app| !app.leaving());
    match key.kind {
        KnativeObjectKind::Service => {
            let app = app()?;
            Some(service(app, app.service.as_ref()?, name, world))
        }
        KnativeObjectKind::Configuration => {
            let app = app()?;
            Some(configuration(app, app.configuration.as_ref()?, name))
        }
        KnativeObjectKind::Route => {
            let app = app()?;
            Some(route(app, app.route.as_ref()?, name, world))
        }
        KnativeObjectKind::Revision => {
            let owner = world.app_of(name)?;
            let app = world.apps.get(&owner).filter(|app| !app.leaving())?;
            Some(revision(app, app.revision(&name.name)?, &owner, world))
        }
        KnativeObjectKind::Pod => {
            // The name of a local pod begins with its Revision's, see `plan::scale`.
            let (revision, _) = name.name.rsplit_once("-deployment-")?;
            let owner = world.app_of(&NamespacedName::new(name.namespace.clone(), revision))?;
            let revision = world.apps.get(&owner)?.revision(revision)?;
            let pod = revision.pods.iter().find(|pod| *pod.name == *name.name)?;
            Some(pod_object(pod, revision, &owner, world))
        }
        KnativeObjectKind::PodAutoscaler | KnativeObjectKind::ServerlessService => None,
    }
}

fn time(at: UnixMillis) -> Option<Time> {
    let seconds = i64::try_from(at.0 / 1000).ok()?;
    Timestamp::from_second(seconds).ok().map(Time)
}

fn meta(name: &NamespacedName, own: &ObjectMetaSummary) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.name.to_string()),
        namespace: Some(name.namespace.to_string()),
        uid: Some(own.uid.to_string()),
        generation: Some(own.generation.into()),
        creation_timestamp: time(own.created),
        ..ObjectMeta::default()
    }
}

fn owned(kind: &str, name: &str, uid: &ObjectMetaSummary) -> Option<Vec<OwnerReference>> {
    Some(vec![OwnerReference {
        api_version: API_VERSION.into(),
        block_owner_deletion: Some(true),
        controller: Some(true),
        kind: kind.into(),
        name: name.into(),
        uid: uid.uid.to_string(),
    }])
}

fn value(it: impl Serialize) -> Value {
    serde_json::to_value(it).unwrap_or_default()
}

fn whole(kind: &str, metadata: ObjectMeta, spec: Value, status: impl Serialize) -> Value {
    json!({
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": value(metadata),
        "spec": spec,
        "status": value(status),
    })
}

fn template(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_default()
}

fn wanted_traffic(traffic: &[crate::world::TrafficSpec]) -> Vec<TrafficTarget> {
    let target = |it: &crate::world::TrafficSpec| TrafficTarget {
        tag: it.tag.as_deref().map(Into::into),
        revision_name: it.revision.as_deref().map(Into::into),
        configuration_name: it.configuration.as_deref().map(Into::into),
        latest_revision: Some(it.revision.is_none()),
        percent: Some(it.percent.into()),
        ..TrafficTarget::default()
    };
    traffic.iter().map(target).collect()
}

fn inner_url(name: &NamespacedName, world: &ClusterState) -> Option<AddressableUrl> {
    let domain = &world.settings.cluster_domain;
    Some(AddressableUrl { url: format!("http://{}.{}.svc.{domain}", name.name, name.namespace) })
}

/// Returns the external URL of a Route or of one of its tags; empty if no valid host results.
fn outer_url(
    app: &AppState,
    name: &NamespacedName,
    tag: Option<&str>,
    world: &ClusterState,
) -> String {
    plan::target_of(app, name, tag, world).map(|it| it.url).unwrap_or_default()
}

fn assigned(app: &AppState, name: &NamespacedName, world: &ClusterState) -> Vec<TrafficTarget> {
    let target = |it: &AssignedTraffic| TrafficTarget {
        tag: it.tag.as_deref().map(Into::into),
        url: it.tag.as_deref().map(|tag| outer_url(app, name, Some(tag), world)),
        revision_name: Some(it.revision.to_string()),
        latest_revision: Some(it.latest),
        percent: Some(it.percent.into()),
        configuration_name: None,
    };
    app.traffic().iter().map(target).collect()
}

fn service(
    app: &AppState,
    service: &ServiceState,
    name: &NamespacedName,
    world: &ClusterState,
) -> Value {
    let manifest = &service.manifest;
    let mut metadata = meta(name, &service.meta);
    metadata.labels = Some(manifest.labels.to_map()).filter(|it| !it.is_empty());
    metadata.annotations = Some(manifest.annotations.to_map()).filter(|it| !it.is_empty());
    // A URL in the status promises an answer, so there is none before traffic is assigned.
    let routed = !app.traffic().is_empty();
    let status = ServiceStatus {
        observed_generation: service.meta.generation.into(),
        conditions: conditions(&app.conditions, &SERVICE),
        latest_created_revision_name: latest_created(app),
        latest_ready_revision_name: app.latest_ready().unwrap_or_default().into(),
        url: if routed { outer_url(app, name, None, world) } else { String::new() },
        address: inner_url(name, world).filter(|_| routed),
        traffic: assigned(app, name, world),
    };
    let traffic = wanted_traffic(&manifest.traffic);
    let spec = json!({"template": template(&manifest.template), "traffic": traffic});
    whole("Service", metadata, spec, status)
}

fn latest_created(app: &AppState) -> String {
    app.latest_created().map(|it| it.name.to_string()).unwrap_or_default()
}

fn configuration(
    app: &AppState,
    configuration: &ConfigurationState,
    name: &NamespacedName,
) -> Value {
    let mut metadata = meta(name, &configuration.meta);
    if let Some(ServiceState { meta, manifest, .. }) = &app.service {
        let mut labels = manifest.labels.to_map();
        labels.insert(key::SERVICE.into(), name.name.to_string());
        labels.insert(key::SERVICE_UID.into(), meta.uid.to_string());
        metadata.labels = Some(labels);
        let mut annotations = manifest.annotations.to_map();
        // A rollout is the Route's: Knative leaves its annotations off the Configuration.
        annotations.retain(|name, _| !key::ROLLOUT_DURATION.contains(&name.as_str()));
        annotations.insert(key::ROUTES.into(), name.name.to_string());
        metadata.annotations = Some(annotations);
        metadata.owner_references = owned("Service", &name.name, meta);
    }
    let status = ConfigurationStatus {
        observed_generation: configuration.meta.generation.into(),
        conditions: conditions(&app.conditions, &CONFIGURATION),
        latest_created_revision_name: latest_created(app),
        latest_ready_revision_name: app.latest_ready().unwrap_or_default().into(),
    };
    let spec = json!({"template": template(&configuration.template)});
    whole("Configuration", metadata, spec, status)
}

fn route(app: &AppState, route: &RouteState, name: &NamespacedName, world: &ClusterState) -> Value {
    let mut metadata = meta(name, &route.meta);
    let (mut labels, mut annotations) = (route.labels.to_map(), route.annotations.to_map());
    if let Some(ServiceState { meta, manifest, .. }) = &app.service {
        labels = manifest.labels.to_map();
        labels.insert(key::SERVICE.into(), name.name.to_string());
        annotations = manifest.annotations.to_map();
        metadata.owner_references = owned("Service", &name.name, meta);
    }
    // A restarted controller gives each name the same numbers again by this annotation.
    annotations.insert(key::ALLOTTED.into(), allotted(route));
    (metadata.labels, metadata.annotations) = (Some(labels), Some(annotations));
    let routed = !route.traffic.is_empty();
    let status = RouteStatus {
        observed_generation: route.meta.generation.into(),
        conditions: conditions(&app.conditions, &ROUTE),
        url: if routed { outer_url(app, name, None, world) } else { String::new() },
        address: inner_url(name, world).filter(|_| routed),
        traffic: assigned(app, name, world),
        annotations: route
            .rollout
            .iter()
            .map(|it| (rollout::ANNOTATION.to_owned(), it.to_json()))
            .collect(),
    };
    whole("Route", metadata, json!({"traffic": wanted_traffic(&route.wanted)}), status)
}

/// Formats the annotation with allocations: `tag=host:port` for each name, separated by spaces. The Route's own name
/// has an empty tag.
fn allotted(route: &RouteState) -> String {
    let one = |it: &crate::world::RouteNameAllocation| match &it.addresses {
        ClusterIpSource::Host(host) => {
            Some(format!("{}={host}:{}", it.tag.as_deref().unwrap_or_default(), it.port))
        }
        ClusterIpSource::Given(_) => None,
    };
    route.allotted.iter().filter_map(one).collect::<Vec<_>>().join(" ")
}

/// Returns the Configuration or Route of a Service as it is applied, without status.
pub(crate) fn made_for_service(
    kind: KnativeObjectKind,
    service: &ServiceState,
    name: &NamespacedName,
) -> Value {
    let ServiceState { meta: own, manifest, .. } = service;
    let (mut labels, mut annotations) = (manifest.labels.to_map(), manifest.annotations.to_map());
    labels.insert(key::SERVICE.into(), name.name.to_string());
    let spec = if kind == KnativeObjectKind::Configuration {
        labels.insert(key::SERVICE_UID.into(), own.uid.to_string());
        annotations.retain(|name, _| !key::ROLLOUT_DURATION.contains(&name.as_str()));
        annotations.insert(key::ROUTES.into(), name.name.to_string());
        json!({"template": template(&manifest.template)})
    } else {
        let mut traffic = wanted_traffic(&manifest.traffic);
        // A Route names the Configuration, since it has no Service to imply it (Knative's `resources.MakeRoute`).
        for target in traffic.iter_mut().filter(|it| it.revision_name.is_none()) {
            target.configuration_name = Some(name.name.to_string());
        }
        json!({"traffic": traffic})
    };
    let metadata = ObjectMeta {
        name: Some(name.name.to_string()),
        namespace: Some(name.namespace.to_string()),
        labels: Some(labels),
        annotations: Some(annotations).filter(|it| !it.is_empty()),
        owner_references: owned("Service", &name.name, own),
        ..ObjectMeta::default()
    };
    let kind = if kind == KnativeObjectKind::Configuration { "Configuration" } else { "Route" };
    json!({"apiVersion": API_VERSION, "kind": kind, "metadata": value(metadata), "spec": spec})
}

/// Returns labels, annotations and owner of a Revision.
pub(crate) fn revision_meta(
    app: &AppState,
    revision: &AppRevision,
    owner: &NamespacedName,
) -> ObjectMeta {
    let name = NamespacedName::new(owner.namespace.clone(), &*revision.name);
    let template = template(&revision.template);
    let metadata = template.get("metadata").cloned().unwrap_or_default();
    let given: ObjectMeta = serde_json::from_value(metadata).unwrap_or_default();
    let mut metadata = meta(&name, &revision.meta);
    // The spec of a Revision never changes; `generation` in its metadata here counts its Configuration's changes.
    metadata.generation = Some(1);
    let mut labels = given.labels.unwrap_or_default();
    let state = match revision.routing.0 {
        RoutingState::Pending => "pending",
        RoutingState::Active => "active",
        RoutingState::Reserve => "reserve",
    };
    let configuration = app.configuration.as_ref().map(|it| it.meta.clone()).unwrap_or_default();
    for (key, value) in [
        (key::CONFIGURATION, owner.name.to_string()),
        // `restore` and `observe` read the Revision's generation back from this label.
        (key::CONFIGURATION_GENERATION, revision.meta.generation.to_string()),
        (key::CONFIGURATION_UID, configuration.uid.to_string()),
        (key::ROUTING_STATE, state.into()),
    ] {
        labels.insert(key.into(), value);
    }
    if let Some(service) = &app.service {
        labels.insert(key::SERVICE.into(), owner.name.to_string());
        labels.insert(key::SERVICE_UID.into(), service.meta.uid.to_string());
    }
    metadata.labels = Some(labels);
    let mut annotations = given.annotations.unwrap_or_default();
    annotations.insert(key::ROUTING_STATE_MODIFIED.into(), revision.routing.1.rfc3339());
    if let Some(creator) = &revision.creator {
        annotations.insert(key::CREATOR.into(), creator.to_string());
    }
    if revision.routing.0 == RoutingState::Active {
        annotations.insert(key::ROUTES.into(), owner.name.to_string());
    }
    if revision.reached {
        annotations.insert(key::REACHED.into(), "true".into());
    }
    metadata.annotations = Some(annotations);
    metadata.owner_references = owned("Configuration", &owner.name, &configuration);
    metadata
}

fn revision(
    app: &AppState,
    revision: &AppRevision,
    owner: &NamespacedName,
    world: &ClusterState,
) -> Value {
    let metadata = revision_meta(app, revision, owner);
    let mut template = template(&revision.template);
    let first: Vec<String> = template["spec"]["initContainers"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|it| it["name"].as_str().map(str::to_owned))
        .collect();
    // The Revision keeps the digests of all containers in one list; a status shows those of init containers apart.
    let digests = |init: bool| {
        let all = revision
            .digests
            .iter()
            .filter(|(name, _)| first.iter().any(|it| **it == **name) == init);
        let digest = |(name, digest): &(Box<str>, Box<str>)| ContainerDigest {
            name: name.to_string(),
            image_digest: digest.to_string(),
        };
        all.map(digest).collect()
    };
    let log_url = world.settings.configs.observability.log_url(&revision.meta.uid.to_string());
    let status = RevisionStatus {
        observed_generation: 1,
        conditions: conditions(&revision.conditions, &REVISION),
        annotations: decision(
            world,
            &NamespacedName::new(owner.namespace.clone(), &*revision.name),
        ),
        log_url: log_url.unwrap_or_default(),
        container_statuses: digests(false),
        init_container_statuses: digests(true),
        actual_replicas: i32::try_from(revision.actual).ok(),
        desired_replicas: i32::try_from(revision.desired).ok(),
    };
    let spec = template.get_mut("spec").map(Value::take).unwrap_or_default();
    whole("Revision", metadata, spec, status)
}

/// Annotation in the status of a PodAutoscaler or Revision: the decision in force, and the figures behind it.
pub(crate) const DECISION: &str = "rouse.dev/decision";

/// Returns the annotation that explains the Revision's number of pods, for a status.
pub(crate) fn decision(
    world: &ClusterState,
    revision: &NamespacedName,
) -> BTreeMap<String, String> {
    let line = world.decisions.get(revision);
    line.into_iter().map(|line| (DECISION.to_owned(), line.to_string())).collect()
}

/// Conditions of a kind of object with their types, in Knative's order (by type).
type ConditionTable = [(ConditionType, &'static str)];
pub(crate) const SERVICE: [(ConditionType, &str); 3] = [
    (ConditionType::ServiceConfigurations, "ConfigurationsReady"),
    (ConditionType::ServiceReady, "Ready"),
    (ConditionType::ServiceRoutes, "RoutesReady"),
];
pub(crate) const CONFIGURATION: [(ConditionType, &str); 1] =
    [(ConditionType::ConfigurationReady, "Ready")];
pub(crate) const ROUTE: [(ConditionType, &str); 4] = [
    (ConditionType::RouteTraffic, "AllTrafficAssigned"),
    (ConditionType::RouteCertificate, "CertificateProvisioned"),
    (ConditionType::RouteIngress, "IngressReady"),
    (ConditionType::RouteReady, "Ready"),
];
pub(crate) const DOMAIN: [(ConditionType, &str); 5] = [
    (ConditionType::DomainCertificate, "CertificateProvisioned"),
    (ConditionType::DomainClaimed, "DomainClaimed"),
    (ConditionType::DomainIngress, "IngressReady"),
    (ConditionType::DomainReady, "Ready"),
    (ConditionType::DomainReference, "ReferenceResolved"),
];
pub(crate) const REVISION: [(ConditionType, &str); 5] = [
    (ConditionType::RevisionActive, "Active"),
    (ConditionType::RevisionAnnotations, "AutoscalingAnnotationsValid"),
    (ConditionType::RevisionHealthy, "ContainerHealthy"),
    (ConditionType::RevisionReady, "Ready"),
    (ConditionType::RevisionResources, "ResourcesAvailable"),
];

fn conditions(all: &ConditionSet, table: &ConditionTable) -> Vec<KnativeCondition> {
    let one = |(kind, name): &(ConditionType, &str)| {
        // An absent condition means `Unknown` (Kubernetes API conventions).
        let (_, since, truth) = all.iter().find(|(have, _, _)| have == kind)?;
        let (status, why) = match truth {
            ConditionStatus::True(why) => ("True", why),
            ConditionStatus::Unknown(why) => ("Unknown", why),
            ConditionStatus::False(why) => ("False", Some(why)),
        };
        let (reason, message) =
            why.map(|why| (why.reason.into(), why.message.into())).unwrap_or_default();
        Some(KnativeCondition {
            r#type: (*name).into(),
            status: status.into(),
            // Knative's severities: conditions with one do not count for `Ready`.
            severity: match kind {
                ConditionType::RevisionActive => "Info".into(),
                ConditionType::RevisionAnnotations => "Warning".into(),
                _ => String::new(),
            },
            last_transition_time: since.rfc3339(),
            reason,
            message,
        })
    };
    table.iter().filter_map(one).collect()
}

/// Returns the status of a DomainMapping.
pub(crate) fn mapping_status(
    name: &NamespacedName,
    mapping: &DomainMappingState,
    world: &ClusterState,
) -> Value {
    let url = format!("{}://{}", world.settings.configs.network.external_scheme, name.name);
    value(DomainMappingStatus {
        observed_generation: mapping.meta.generation.into(),
        conditions: conditions(&mapping.conditions, &DOMAIN),
        address: Some(AddressableUrl { url: url.clone() }),
        url,
    })
}

fn pod_object(
    pod: &RevisionPod,
    revision: &AppRevision,
    owner: &NamespacedName,
    world: &ClusterState,
) -> Value {
    let facts = TemplateFacts::of(revision, world);
    let order = facts.order(owner, revision, pod);
    let own = ObjectMetaSummary { uid: revision.meta.uid, ..ObjectMetaSummary::default() };
    let status = world.statuses.get(&*pod.uid);
    let seen = world.seen.get(&*pod.uid);
    // Until its agent reports, a pod that served before the restart counts as ready.
    let ready = seen.map_or_else(|| pod.remembered.is_some(), |seen| seen.ready);
    let mut annotations = std::collections::BTreeMap::new();
    // Read by `restore` after a restart of the controller.
    annotations.insert(BOOT.to_owned(), world.settings.boot.clone());
    let address = seen.and_then(|seen| seen.address).or(pod.remembered).filter(|_| ready);
    if let Some(address) = address {
        annotations.insert(ADDRESS.to_owned(), address.to_string());
    }
    // A draining pod is no deleted one yet: it still answers requests.
    let stopping = match pod.stage {
        PodStage::Stopping { since } => time(since),
        PodStage::Serving | PodStage::Draining { .. } => None,
    };
    let metadata = ObjectMeta {
        name: Some(order.name),
        namespace: Some(owner.namespace.to_string()),
        uid: Some(order.uid),
        creation_timestamp: time(pod.created),
        deletion_timestamp: stopping,
        labels: Some(order.labels),
        annotations: Some(annotations),
        owner_references: owned("Revision", &revision.name, &own),
        ..ObjectMeta::default()
    };
    let condition = |r#type: &str, holds: bool| PodCondition {
        type_: r#type.into(),
        status: if holds { "True" } else { "False" }.into(),
        ..PodCondition::default()
    };
    let ips = status.map(|it| it.addresses.as_slice()).unwrap_or_default();
    let phase = match status.map(|it| it.phase) {
        // As in Kubernetes: a pod that is being deleted stays `Running` until its containers have ended.
        Some(node::LocalPodPhase::Running | node::LocalPodPhase::Terminating) => "Running",
        Some(node::LocalPodPhase::Gone) => "Succeeded",
        Some(node::LocalPodPhase::Pending) | None => "Pending",
    };
    let containers = status.map(|it| it.containers.as_slice()).unwrap_or_default();
    let status = PodStatus {
        phase: Some(phase.into()),
        pod_ip: ips.first().map(ToString::to_string),
        pod_ips: Some(ips.iter().map(|ip| PodIP { ip: ip.to_string() }).collect()),
        start_time: time(pod.created),
        conditions: Some(vec![condition("Ready", ready)]),
        container_statuses: Some(containers.iter().map(|it| container(it, ready)).collect()),
        ..PodStatus::default()
    };
    let spec = Some(order.spec);
    let mut out = value(PodObject { metadata, spec, status: Some(status) });
    // Only in the object: the order itself goes to the only node there is.
    out["spec"]["nodeName"] = json!(world.settings.node);
    out
}

/// Annotation on a pod: its last serving address, so that a restarted controller need not wait for a report.
pub(crate) const ADDRESS: &str = "rouse.dev/address";
/// Annotation on a pod: the boot of the machine in which it was started. No pod outlives that boot.
pub(crate) const BOOT: &str = "rouse.dev/boot";

fn container(it: &node::LocalContainerStatus, ready: bool) -> ContainerStatus {
    let state = match &it.state {
        LocalContainerState::Waiting { reason, message, .. } => {
            json!({"waiting": {"reason": reason, "message": message}})
        }
        LocalContainerState::Running => json!({"running": {}}),
        LocalContainerState::Terminated { code, reason, message } => {
            json!({"terminated": {"exitCode": code, "reason": reason, "message": message}})
        }
    };
    // A crashed container waits for its restart, and shows the exit code of its last run.
    let last = match &it.state {
        LocalContainerState::Waiting { last_exit: Some(code), .. } => {
            serde_json::from_value(json!({"terminated": {"exitCode": code}})).ok()
        }
        LocalContainerState::Waiting { .. }
        | LocalContainerState::Running
        | LocalContainerState::Terminated { .. } => None,
    };
    ContainerStatus {
        name: it.name.clone(),
        ready: ready && it.state == LocalContainerState::Running,
        restart_count: i32::try_from(it.restarts).unwrap_or(i32::MAX),
        image_id: it.image_digest.clone().unwrap_or_default(),
        state: serde_json::from_value(state).ok(),
        last_state: last,
        ..ContainerStatus::default()
    }
}
