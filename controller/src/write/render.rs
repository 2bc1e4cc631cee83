//! Pure: an [`AppState`] → its objects for users and tools, in the form of `kubectl get -o yaml`.

use std::collections::BTreeMap;

use common::wire::NamespacedName;
use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
    jiff::Timestamp,
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    decide::{
        plan::{self, host_certificates, local_tls},
        service_children::{
            child_metadata, owner_references, spec_traffic, template_json, to_json_value,
        },
    },
    model::{
        cluster_state::{
            AppRevision, AppState, AssignedTraffic, ClusterIpSource, ClusterState, ConditionSet,
            ConditionStatus, ConditionType, ConfigurationState, DomainMappingState,
            ObjectMetaSummary, RouteNameAllocation, RouteState, RoutingState, ServiceState,
            UnixMillis,
            conditions::{
                CONFIGURATION_CONDITIONS, ConditionTable, DOMAIN_CONDITIONS, REVISION_CONDITIONS,
                ROUTE_CONDITIONS, SERVICE_CONDITIONS,
            },
        },
        knative::{
            API_VERSION, AddressableUrl, ConfigurationStatus, ContainerDigest, KnativeCondition,
            RevisionStatus, RouteStatus, ServiceStatus, TrafficTarget,
            domain_mapping::DomainMappingStatus,
            key::{self, DECISION_ANNOTATION},
        },
        object::{LocalObjectKey, LocalObjectKind, names::tagged_name},
        rollout,
    },
};

mod local_pods;

/// Returns the present object; `None` if there is none, and for the two kinds that
/// [`crate::write::desired::local_object`] makes.
pub fn render_object(cluster: &ClusterState, key: &LocalObjectKey) -> Option<Value> {
    let name = &key.name;
    // On the local node an app that is deleted is gone for its users, although its pods still drain.
    let app = || cluster.apps.get(name).filter(|app| !app.is_terminating());
    match key.kind {
        LocalObjectKind::Service => {
            let app = app()?;
            Some(render_service(app, app.service.as_ref()?, name, cluster))
        }
        LocalObjectKind::Configuration => {
            let app = app()?;
            Some(render_configuration(app, app.configuration.as_ref()?, name))
        }
        LocalObjectKind::Route => {
            let app = app()?;
            Some(render_route(app, app.route.as_ref()?, name, cluster))
        }
        LocalObjectKind::Revision => {
            let owner = cluster.app_of_revision(name)?;
            let app = cluster.apps.get(&owner).filter(|app| !app.is_terminating())?;
            Some(render_revision(app, app.revision(&name.name)?, &owner, cluster))
        }
        LocalObjectKind::Pod => {
            // The name of a local pod begins with its Revision's, see `plan::scale`.
            let (revision, _) = name.name.rsplit_once("-deployment-")?;
            let owner =
                cluster.app_of_revision(&NamespacedName::new(name.namespace.clone(), revision))?;
            let revision = cluster.apps.get(&owner)?.revision(revision)?;
            let pod = revision.pods.iter().find(|pod| *pod.name == *name.name)?;
            Some(local_pods::render_pod(pod, revision, &owner, cluster))
        }
        LocalObjectKind::PodAutoscaler | LocalObjectKind::ServerlessService => None,
    }
}

fn api_time(at: UnixMillis) -> Option<Time> {
    let seconds = i64::try_from(at.0 / 1000).ok()?;
    Timestamp::from_second(seconds).ok().map(Time)
}

fn object_meta(name: &NamespacedName, meta: &ObjectMetaSummary) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.name.to_string()),
        namespace: Some(name.namespace.to_string()),
        uid: Some(meta.uid.to_string()),
        generation: Some(meta.generation.into()),
        creation_timestamp: api_time(meta.created),
        ..ObjectMeta::default()
    }
}

fn object_json(kind: &str, metadata: ObjectMeta, spec: Value, status: impl Serialize) -> Value {
    json!({
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": to_json_value(metadata),
        "spec": spec,
        "status": to_json_value(status),
    })
}

fn internal_address(
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> Option<AddressableUrl> {
    let domain = &cluster.settings.cluster_domain;
    let url = match plan::serves_tcp(app, name, None, cluster) {
        true => tcp_url(name, None, cluster),
        false => {
            let scheme = local_tls::scheme(cluster);
            format!("{scheme}://{}.{}.svc.{domain}", name.name, name.namespace)
        }
    };
    Some(AddressableUrl { url })
}

/// Returns the URL of a name of a Route that serves raw TCP, which only clients inside the cluster can reach.
fn tcp_url(name: &NamespacedName, tag: Option<&str>, cluster: &ClusterState) -> String {
    let (service, domain) = (tagged_name(tag, &name.name), &cluster.settings.cluster_domain);
    format!("tcp://{service}.{}.svc.{domain}:80", name.namespace)
}

/// Returns the external URL of a Route or of one of its tags; empty if no valid host results. A name that serves raw
/// TCP has none, and the internal URL is returned.
fn external_url(
    app: &AppState,
    name: &NamespacedName,
    tag: Option<&str>,
    cluster: &ClusterState,
) -> String {
    if plan::serves_tcp(app, name, tag, cluster) {
        return tcp_url(name, tag, cluster);
    }
    let Some(host) = plan::route_host(app, name, tag, cluster) else { return String::new() };
    // A requested certificate decides by its state; without one, the settings do.
    match host_certificates::scheme_of_route(app, name, &host.host, cluster) {
        Some(scheme) => format!("{scheme}://{}", host.host),
        None => host.url,
    }
}

fn status_traffic(
    app: &AppState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> Vec<TrafficTarget> {
    let target = |target: &AssignedTraffic| TrafficTarget {
        tag: target.tag.as_deref().map(Into::into),
        url: target.tag.as_deref().map(|tag| external_url(app, name, Some(tag), cluster)),
        revision_name: Some(target.revision_name.to_string()),
        latest_revision: Some(target.is_latest),
        percent: Some(target.percent.into()),
        configuration_name: None,
    };
    app.traffic().iter().map(target).collect()
}

/// Renders a Service with its status.
fn render_service(
    app: &AppState,
    service: &ServiceState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> Value {
    let manifest = &service.manifest;
    let mut metadata = object_meta(name, &service.meta);
    metadata.labels = Some(manifest.labels.to_btree_map()).filter(|it| !it.is_empty());
    metadata.annotations = Some(manifest.annotations.to_btree_map()).filter(|it| !it.is_empty());
    // A URL in the status promises that requests are served, so there is none before traffic is assigned.
    let routed = !app.traffic().is_empty();
    let status = ServiceStatus {
        observed_generation: service.meta.generation.into(),
        conditions: render_conditions(&app.conditions, &SERVICE_CONDITIONS),
        latest_created_revision_name: latest_created_name(app),
        latest_ready_revision_name: app.latest_ready().unwrap_or_default().into(),
        url: if routed { external_url(app, name, None, cluster) } else { String::new() },
        address: internal_address(app, name, cluster).filter(|_| routed),
        traffic: status_traffic(app, name, cluster),
    };
    let traffic = spec_traffic(&manifest.traffic);
    let spec = json!({"template": template_json(&manifest.template), "traffic": traffic});
    object_json("Service", metadata, spec, status)
}

fn latest_created_name(app: &AppState) -> String {
    app.latest_created().map(|it| it.name.to_string()).unwrap_or_default()
}

fn render_configuration(
    app: &AppState,
    configuration: &ConfigurationState,
    name: &NamespacedName,
) -> Value {
    let mut metadata = object_meta(name, &configuration.meta);
    if let Some(service) = &app.service {
        let (labels, annotations) = child_metadata(LocalObjectKind::Configuration, service, name);
        (metadata.labels, metadata.annotations) = (Some(labels), Some(annotations));
        metadata.owner_references = owner_references("Service", &name.name, &service.meta);
    }
    let status = ConfigurationStatus {
        observed_generation: configuration.meta.generation.into(),
        conditions: render_conditions(&app.conditions, &CONFIGURATION_CONDITIONS),
        latest_created_revision_name: latest_created_name(app),
        latest_ready_revision_name: app.latest_ready().unwrap_or_default().into(),
    };
    let spec = json!({"template": template_json(&configuration.template)});
    object_json("Configuration", metadata, spec, status)
}

/// Renders a Route with its status.
fn render_route(
    app: &AppState,
    route: &RouteState,
    name: &NamespacedName,
    cluster: &ClusterState,
) -> Value {
    let mut metadata = object_meta(name, &route.meta);
    let (mut labels, mut annotations) =
        (route.labels.to_btree_map(), route.annotations.to_btree_map());
    if let Some(service) = &app.service {
        (labels, annotations) = child_metadata(LocalObjectKind::Route, service, name);
        metadata.owner_references = owner_references("Service", &name.name, &service.meta);
    }
    // A restarted controller gives each name the same numbers again by this annotation.
    annotations.insert(key::ALLOCATIONS.into(), allocation_annotation(route));
    (metadata.labels, metadata.annotations) = (Some(labels), Some(annotations));
    let routed = !route.traffic.is_empty();
    let status = RouteStatus {
        observed_generation: route.meta.generation.into(),
        conditions: render_conditions(&app.conditions, &ROUTE_CONDITIONS),
        url: if routed { external_url(app, name, None, cluster) } else { String::new() },
        address: internal_address(app, name, cluster).filter(|_| routed),
        traffic: status_traffic(app, name, cluster),
        annotations: route_status_annotations(route),
    };
    object_json("Route", metadata, json!({"traffic": spec_traffic(&route.traffic_spec)}), status)
}

/// Returns what another leader must know of a Route: the state of a rollout, and another ingress that fronts its hosts.
fn route_status_annotations(route: &RouteState) -> BTreeMap<String, String> {
    let rollout = route.rollout.iter();
    let rollout = rollout.map(|it| (rollout::ROLLOUT_ANNOTATION.to_owned(), it.to_json()));
    let class = route.ingress_class.iter();
    rollout.chain(class.map(|it| (key::CLASS_IN_FORCE.to_owned(), it.to_string()))).collect()
}

/// Formats the annotation with allocations: `tag=suffix:port` for each name, separated by spaces. The Route's own name
/// has an empty tag.
fn allocation_annotation(route: &RouteState) -> String {
    let one = |allocation: &RouteNameAllocation| match &allocation.cluster_ips {
        ClusterIpSource::LocalRange(suffix) => Some(format!(
            "{}={suffix}:{}",
            allocation.tag.as_deref().unwrap_or_default(),
            allocation.activator_port
        )),
        ClusterIpSource::ApiServer(_) => None,
    };
    route.allocations.iter().filter_map(one).collect::<Vec<_>>().join(" ")
}

/// Returns labels, annotations and owner of a Revision.
pub(crate) fn revision_meta(
    app: &AppState,
    revision: &AppRevision,
    owner: &NamespacedName,
) -> ObjectMeta {
    let name = NamespacedName::new(owner.namespace.clone(), &*revision.name);
    let template = template_json(&revision.template);
    let metadata = template.get("metadata").cloned().unwrap_or_default();
    let given: ObjectMeta = serde_json::from_value(metadata).unwrap_or_default();
    let mut metadata = object_meta(&name, &revision.meta);
    // The spec of a Revision never changes; `generation` in its metadata here counts its Configuration's changes.
    metadata.generation = Some(1);
    let mut labels = given.labels.unwrap_or_default();
    let state = match revision.routing.state {
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
    annotations.insert(key::ROUTING_STATE_MODIFIED.into(), revision.routing.changed_at.rfc3339());
    if let Some(creator) = &revision.creator {
        annotations.insert(key::CREATOR.into(), creator.to_string());
    }
    // As Knative's labeler writes it, for tools that look for unused Revisions.
    if revision.routing.state == RoutingState::Active {
        annotations.insert(key::ROUTES.into(), owner.name.to_string());
    }
    if revision.scaling.initial_scale_reached {
        annotations.insert(key::INITIAL_SCALE_REACHED.into(), "true".into());
    }
    metadata.annotations = Some(annotations);
    metadata.owner_references = owner_references("Configuration", &owner.name, &configuration);
    metadata
}

/// Renders a Revision with its status. Its spec is that of the template.
fn render_revision(
    app: &AppState,
    revision: &AppRevision,
    owner: &NamespacedName,
    cluster: &ClusterState,
) -> Value {
    let metadata = revision_meta(app, revision, owner);
    let mut template = template_json(&revision.template);
    let init_containers: Vec<String> = template["spec"]["initContainers"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|it| it["name"].as_str().map(str::to_owned))
        .collect();
    let digests = revision.digests.iter().map(|(name, digest)| ContainerDigest {
        name: name.to_string(),
        image_digest: digest.to_string(),
    });
    // The Revision keeps the digests of all containers in one list; a status shows those of init containers apart.
    let (init_container_statuses, container_statuses): (Vec<_>, Vec<_>) =
        digests.partition(|it| init_containers.contains(&it.name));
    let log_url =
        cluster.settings.config_maps.observability.log_url(&revision.meta.uid.to_string());
    let status = RevisionStatus {
        observed_generation: 1,
        conditions: render_conditions(&revision.conditions, &REVISION_CONDITIONS),
        annotations: decision_annotation(
            cluster,
            &NamespacedName::new(owner.namespace.clone(), &*revision.name),
        ),
        log_url: log_url.unwrap_or_default(),
        container_statuses,
        init_container_statuses,
        actual_replicas: i32::try_from(revision.scaling.actual_scale).ok(),
        desired_replicas: i32::try_from(revision.scaling.requested_scale).ok(),
    };
    let spec = template.get_mut("spec").map(Value::take).unwrap_or_default();
    object_json("Revision", metadata, spec, status)
}

/// Returns the annotation that explains the Revision's number of pods, for a status.
pub(crate) fn decision_annotation(
    cluster: &ClusterState,
    revision: &NamespacedName,
) -> BTreeMap<String, String> {
    let line = cluster.scaling.explanations.get(revision);
    line.into_iter().map(|line| (DECISION_ANNOTATION.to_owned(), line.to_string())).collect()
}

/// Renders the conditions of a table in the form of Knative's statuses.
fn render_conditions(all: &ConditionSet, table: &ConditionTable) -> Vec<KnativeCondition> {
    let one = |(kind, name): &(ConditionType, &str)| {
        // An absent condition means `Unknown` (Kubernetes API conventions).
        let (_, since, condition) =
            all.iter().find(|(condition_type, _, _)| condition_type == kind)?;
        let (status, reason) = match condition {
            ConditionStatus::True(reason) => ("True", reason),
            ConditionStatus::Unknown(reason) => ("Unknown", reason),
            ConditionStatus::False(reason) => ("False", Some(reason)),
        };
        let (reason, message) =
            reason.map(|reason| (reason.reason.into(), reason.message.into())).unwrap_or_default();
        Some(KnativeCondition {
            r#type: (*name).into(),
            status: status.into(),
            // Knative's severities: conditions with one do not count for `Ready`.
            severity: match kind {
                ConditionType::RevisionActive | ConditionType::RevisionStandby => "Info".into(),
                ConditionType::RevisionAnnotations | ConditionType::RouteGatewayPort => {
                    "Warning".into()
                }
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
pub(crate) fn render_mapping_status(
    name: &NamespacedName,
    mapping: &DomainMappingState,
    cluster: &ClusterState,
) -> Value {
    let default = cluster.settings.config_maps.network.external_scheme.as_str();
    let scheme = match cluster.domains.certificate_lead(&name.namespace, &mapping.domain.host) {
        Some(_) => "https",
        None => host_certificates::scheme_of_mapping(cluster, name, mapping).unwrap_or(default),
    };
    let url = mapping.domain.url(scheme);
    to_json_value(DomainMappingStatus {
        observed_generation: mapping.meta.generation.into(),
        conditions: render_conditions(&mapping.conditions, &DOMAIN_CONDITIONS),
        address: Some(AddressableUrl { url: url.clone() }),
        url,
    })
}
