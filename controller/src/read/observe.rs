//! Pure: an object as the API server holds it → the state that the controller keeps. Pods are in `pods.rs`.
//!
//! Parts that cannot be read are left out rather than refused, since the object exists all the same.

use std::{collections::BTreeMap, net::IpAddr, num::NonZeroU16, sync::Arc};

use common::{
    decimal::{parse_digits, parse_port},
    service_routing::TopologyHints,
    wire::{HstsPolicy, NamespacedName},
};
use serde_json::Value;
use smol_str::SmolStr;

use crate::{
    model::{
        cluster_state::{
            AppRevision, ClientAuthSpec, CompactStringMap, ConditionReason, ConditionSet,
            ConditionStatus, ConditionType, ConfigurationState, DomainClaimState,
            DomainMappingState, DomainSpec, HintedPod, ObjectMetaSummary, ObjectOwner,
            PlaceholderState, PlatformKind, RevisionScaling, RouteState, ServiceManifest,
            ServiceState, StandbyStop, Uid, conditions,
        },
        config_maps::{Features, RevisionDefaults},
        knative::key::{self, ACTIVATOR_PORT_ANNOTATION},
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
        parse::{self, RuleSettings},
    },
};

mod gateway_api;
mod ingresses;
mod pods;
mod requested_certificates;
mod scaled_service;

pub use gateway_api::{
    read_backend_service, read_gateway, read_gateway_addresses, read_gateway_class,
    read_gateway_route, read_reference_grant,
};
pub use ingresses::read_ingress;
pub use pods::{ComponentPod, PodRejection, read_component_pod, read_pod, read_rejection};
pub use requested_certificates::{
    read_certificate_namespace, read_challenge_solver, read_http_challenge,
    read_issued_certificate, read_requested_certificate,
};
pub use scaled_service::{
    is_scaled_autoscaler, read_autoscaler_conditions, read_scaled_autoscaler, read_user_autoscaler,
    read_user_service, read_workload, read_workload_pod,
};

/// Label with the zone of a node.
pub(crate) const ZONE_LABEL: &str = "topology.kubernetes.io/zone";

fn read_pairs(object: &Value, field: &str) -> CompactStringMap {
    let map = serde_json::from_value(object["metadata"][field].clone());
    map.ok().as_ref().map(CompactStringMap::from).unwrap_or_default()
}

/// Reads a Service. One that breaks a rule, which the webhook would have refused, keeps the manifest in force before,
/// as far as it is known.
pub fn read_service(
    object: &Value,
    config: &ScalePolicyConfig,
    previous: Option<&ServiceState>,
) -> ServiceState {
    let (meta, is_terminating) = (fields::read_meta(object), is_terminating(object));
    // Only a Service that never passed admission gets defaults here, and these are the shipped ones. With the settings
    // of the moment, a restart after a change of `config-defaults` would make another template and another Revision.
    let (defaults, features) = (RevisionDefaults::default(), Features::default());
    let settings = RuleSettings {
        platform: PlatformKind::Kubernetes,
        defaults: &defaults,
        features: &features,
        autoscaler: config,
        cluster_domain: "cluster.local",
        trusts_ingresses: false,
    };
    match parse::observed_service(object, settings) {
        Ok((_, manifest)) => {
            ServiceState { meta, manifest, is_terminating, ..ServiceState::default() }
        }
        Err(problems) => {
            // After a restart the manifest in force is not known. Nothing is written by it while this one is refused,
            // but the Route's hosts and protocol follow from labels and annotations.
            let manifest = previous.map_or_else(
                || ServiceManifest {
                    labels: read_pairs(object, "labels"),
                    annotations: read_pairs(object, "annotations"),
                    ..ServiceManifest::default()
                },
                |it| it.manifest.clone(),
            );
            ServiceState {
                meta,
                manifest,
                manifest_error: Some(problem::problems_line(&problems).into()),
                is_terminating,
                ..ServiceState::default()
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
    // An owned Route's labels and annotations are read from its Service.
    let own_pairs = |field| {
        if owner == ObjectOwner::Service {
            CompactStringMap::default()
        } else {
            read_pairs(object, field)
        }
    };
    RouteState {
        meta: fields::read_meta(object),
        owner,
        labels: own_pairs("labels"),
        annotations: own_pairs("annotations"),
        traffic_spec: array_items(&object["spec"]["traffic"])
            .map(fields::read_traffic_spec)
            .collect(),
        allocations: Vec::new(),
        traffic: array_items(&object["status"]["traffic"])
            .filter_map(fields::read_assigned_traffic)
            .collect(),
        rollout: read_rollout(object),
        ingress_class: non_empty_text(&object["status"]["annotations"][key::CLASS_IN_FORCE]),
        blocked_reason: None,
        applied_hash: applied_hash(object),
        is_terminating: is_terminating(object),
    }
}

/// Reads the state of a rollout, as the leader wrote it in the status.
fn read_rollout(object: &Value) -> Option<Box<Rollout>> {
    let json = object["status"]["annotations"][rollout::ROLLOUT_ANNOTATION].as_str()?;
    Rollout::parse(json).map(Box::new)
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
    // A new leader has not observed the crash itself: it takes the failure from the condition, until a pod is ready.
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
            standby_stop: StandbyStop::from_conditions(&conditions),
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

/// Returns the template from which a Revision was made, without the controller's labels and annotations.
fn user_template(object: &Value) -> Arc<str> {
    let user_pairs = |field: &str| {
        let mut map: std::collections::BTreeMap<String, String> =
            serde_json::from_value(object["metadata"][field].clone()).unwrap_or_default();
        map.retain(|name, _| key::is_set_by_user(name));
        map
    };
    fields::canonical_template(&serde_json::json!({
        "metadata": {"labels": user_pairs("labels"), "annotations": user_pairs("annotations")},
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
    let text = |field: &str| failed[field].as_str().unwrap_or_default().to_owned();
    Some(ConditionReason::new(text("reason"), text("message")))
}

/// Reads a placeholder: the ClusterIPs and the port allocated to a name of a Route.
pub fn read_placeholder(object: &Value) -> Option<PlaceholderState> {
    label(object, key::ROUTE)?;
    let given = array_items(&object["spec"]["clusterIPs"]).filter_map(Value::as_str);
    let mut addresses: Vec<IpAddr> = given.filter_map(|it| it.parse().ok()).collect();
    addresses.sort_by_key(|it| !it.is_ipv4());
    let port = annotation(object, ACTIVATOR_PORT_ANNOTATION).and_then(parse_digits);
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
        affinity: scaled_service::read_affinity(&object["spec"]),
        gateway_port: annotation(object, key::OWNED_GATEWAY_PORT).and_then(parse_port),
    })
}

/// Reads the record of the owners of gateway ports: the UID of each port's Route. Entries that cannot be read are left
/// out.
pub fn read_port_record(object: &Value) -> BTreeMap<NonZeroU16, Uid> {
    let entries = object["data"].as_object().into_iter().flatten();
    let read = |(port, owner): (&String, &Value)| {
        let (_, uid) = owner.as_str()?.rsplit_once(' ')?;
        Some((parse_port(port)?, Uid::parse(uid)?))
    };
    entries.filter_map(read).collect()
}

/// Reads a DomainMapping, without its conditions.
pub fn read_domain_mapping(object: &Value) -> DomainMappingState {
    let (name, target) = (object_name(object), &object["spec"]["ref"]);
    let text = |field: &str| target[field].as_str().unwrap_or_default();
    let group = text("apiVersion").rsplit_once('/').map_or("", |(group, _)| group);
    // Lower case and an `s` is the plural of every resource that a mapping may refer to.
    let plural = format!("{}s", text("kind").to_ascii_lowercase());
    let kind = if group.is_empty() { plural } else { format!("{plural}.{group}") };
    let namespace = Some(text("namespace")).filter(|it| !it.is_empty());
    let http = key::HTTP_PROTOCOL.iter().find_map(|it| annotation(object, it));
    let secret = object["spec"]["tls"]["secretName"].as_str();
    DomainMappingState {
        meta: fields::read_meta(object),
        annotations: read_pairs(object, "annotations"),
        target_resource: kind.into(),
        target: NamespacedName::new(namespace.unwrap_or(&name.namespace), text("name")),
        domain: DomainSpec::from_annotations(
            &name.name,
            annotation(object, key::HOST),
            annotation(object, key::PATH_PREFIX),
            annotation(object, key::STRIP_PREFIX),
        ),
        tls_secret: secret.filter(|it| !it.is_empty()).map(Into::into),
        served_secret: None,
        client_auth: ClientAuthSpec::from_annotations(
            annotation(object, key::CLIENT_CA),
            annotation(object, key::CLIENT_AUTH),
        ),
        served_client_ca: None,
        passes_tls: annotation(object, key::TLS) == Some(key::TLS_PASSTHROUGH),
        hsts: annotation(object, key::HSTS).and_then(|it| HstsPolicy::parse(it).ok()),
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
    // Kubernetes allows an empty label, which names no zone.
    label(object, ZONE_LABEL).filter(|it| !it.is_empty()).map(Into::into)
}

/// Returns the names of the pods that an EndpointSlice lists.
pub fn slice_target_names(object: &Value) -> Vec<&str> {
    array_items(&object["endpoints"]).filter_map(|it| it["targetRef"]["name"].as_str()).collect()
}

/// Returns the pods of its own namespace that an EndpointSlice lists, with their hints for zones, sorted by name.
/// `None` if any of them has no such hint. The other endpoints are activators.
pub fn slice_hints(object: &Value) -> Option<Vec<HintedPod>> {
    let pod = |endpoint: &Value| {
        let zone = endpoint["hints"]["forZones"][0]["name"].as_str()?;
        Some(HintedPod {
            name: endpoint["targetRef"]["name"].as_str()?.into(),
            zone: endpoint["zone"].as_str().unwrap_or_default().into(),
            hints: TopologyHints { zone: zone.into(), node: SmolStr::default() },
        })
    };
    let namespace = &object["metadata"]["namespace"];
    let is_own = |endpoint: &&Value| endpoint["targetRef"]["namespace"] == *namespace;
    let own_pods = array_items(&object["endpoints"]).filter(is_own);
    // One pod without a hint shows that the slice is of a plan without hints.
    let mut pods: Vec<HintedPod> = own_pods.map(pod).collect::<Option<_>>()?;
    pods.sort_by(|a, b| a.name.cmp(&b.name));
    Some(pods)
}
