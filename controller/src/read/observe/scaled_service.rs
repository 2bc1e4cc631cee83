//! Pure: scaled Services as the API server holds them: Services of users, with their workloads and PodAutoscalers.
//!
//! Of the objects of users, the metadata and these fields are read:
//!
//! | kind | fields |
//! |---|---|
//! | Service | of the spec: `clusterIP`, `clusterIPs`, `internalTrafficPolicy`, `ports`, `selector`, `type`, |
//! | | `externalTrafficPolicy`, `sessionAffinity`, `sessionAffinityConfig`, `trafficDistribution` |
//! | Deployment, StatefulSet | of the spec: `replicas`, `ordinals`; of its template labels, `hostNetwork`, containers |
//! | HorizontalPodAutoscaler | of the spec: `scaleTargetRef`, `minReplicas` |
//! | Pod | as of Revisions, and of the spec the containers |
//! | PodAutoscaler | `status.conditions` |
//!
//! Of containers and init containers: `name`, `image`, `ports`, `readinessProbe`, `restartPolicy`, `startupProbe`.

use std::{collections::BTreeMap, net::IpAddr, num::NonZeroU16, time::Duration};

use common::wire::AppProtocol;
use serde_json::{Map, Value, json};

use super::pods::read_pod;
use crate::{
    model::{
        cluster_state::{
            ActivatorPort, AutoscalerRecord, CompactStringMap, ConditionSet, ConditionType,
            PodOwner, PortTarget, ScaledRefusal, UserAutoscaler, UserService, UserServicePort,
            WorkloadKey, WorkloadKind, WorkloadPod, WorkloadState,
        },
        knative::{key, user_container::parse_protocol},
        object::{
            ReplicaRecord, WorkloadVersion,
            json::{annotation, array_items, is_terminating, label, non_empty_text, object_name},
        },
        scale_policy::{AUTOSCALING_PREFIX, AutoscalerClass},
    },
    read::fields,
};

/// Prefix of the keys of Rouse's annotations.
const ROUSE_PREFIX: &str = "rouse.dev/";
/// Time for which a Service with affinity keeps a client's pod, if it sets none (Kubernetes'
/// `DefaultClientIPServiceAffinitySeconds`).
const DEFAULT_AFFINITY_S: u64 = 10_800;
/// Fields of a container on which its ports and its readiness depend.
const CONTAINER_FIELDS: [&str; 6] =
    ["name", "image", "ports", "readinessProbe", "restartPolicy", "startupProbe"];

/// Returns true for the PodAutoscaler of a scaled Service, which the state machine reads.
pub fn is_scaled_autoscaler(object: &Value) -> bool {
    label(object, key::SCALED_SERVICE).is_some()
}

/// Reads a Service of a user. `None`: the controller itself has made it for an object of Knative.
pub fn read_user_service(object: &Value) -> Option<UserService> {
    if label(object, key::ROUTE).is_some() || label(object, key::REVISION).is_some() {
        return None;
    }
    let spec = &object["spec"];
    let wish = annotation(object, key::SCALE_TO_ZERO).map(str::trim);
    let annotations = read_annotations(object);
    let protocol = annotations.get(key::PROTOCOL).map(|it| it.as_str());
    let all_ports = || array_items(&spec["ports"]);
    let is_tcp = |port: &&Value| port["protocol"].as_str().unwrap_or("TCP") == "TCP";
    let ports = all_ports().filter(is_tcp).filter_map(|it| read_service_port(it, protocol));
    let other_ports = all_ports().filter(|it| !is_tcp(it)).map(|port| {
        let protocol = port["protocol"].as_str().unwrap_or_default();
        Box::<str>::from(format!("{}/{protocol}", port["port"]))
    });
    let mut service = UserService {
        meta: fields::read_meta(object),
        wants_sleep: wish.is_some_and(|it| it != "false"),
        annotations: CompactStringMap::from(&annotations),
        selector: read_pairs(&spec["selector"]),
        cluster_ips: read_cluster_ips(spec),
        ports: ports.collect(),
        other_ports: other_ports.collect(),
        affinity: read_affinity(spec),
        traffic_distribution: non_empty_text(&spec["trafficDistribution"]),
        is_external_traffic_local: spec["externalTrafficPolicy"] == "Local",
        refusal: None,
        is_terminating: is_terminating(object),
    };
    service.refusal =
        annotation_refusal(wish, &annotations).or_else(|| spec_refusal(&service, spec));
    Some(service)
}

/// Returns the annotations that concern the scale of a Service's workload, its path and its hints.
fn read_annotations(object: &Value) -> BTreeMap<String, String> {
    let all = object["metadata"]["annotations"].as_object().into_iter().flatten();
    let is_read = |name: &str| {
        name.starts_with(ROUSE_PREFIX)
            || name.starts_with(AUTOSCALING_PREFIX)
            || key::HINTS.contains(&name)
            || key::PROGRESS_DEADLINE.contains(&name)
    };
    let pairs = all.filter(|(name, _)| is_read(name));
    pairs.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect()
}

fn read_pairs(pairs: &Value) -> CompactStringMap {
    let all = pairs.as_object().into_iter().flatten();
    let texts = all.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())));
    CompactStringMap::from(&texts.collect::<BTreeMap<_, _>>())
}

/// Returns the ClusterIPs of a Service, IPv4 first. A headless Service has none.
fn read_cluster_ips(spec: &Value) -> Box<[IpAddr]> {
    let given = array_items(&spec["clusterIPs"]).chain([&spec["clusterIP"]]);
    let given = given.filter_map(Value::as_str).filter_map(|it| it.parse().ok());
    let mut addresses: Vec<IpAddr> = given.collect();
    addresses.sort_by_key(|it| !it.is_ipv4());
    addresses.dedup();
    addresses.into()
}

/// Returns the time for which a Service keeps a client at its pod; `None` without affinity.
pub(super) fn read_affinity(spec: &Value) -> Option<Duration> {
    if spec["sessionAffinity"] != "ClientIP" {
        return None;
    }
    let seconds = spec["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"].as_u64();
    Some(Duration::from_secs(seconds.unwrap_or(DEFAULT_AFFINITY_S)))
}

/// Reads a TCP port; `None` for a number that is no port. `protocol` is the value of the Service's annotation.
fn read_service_port(port: &Value, protocol: Option<&str>) -> Option<UserServicePort> {
    let number = read_port(&port["port"])?;
    let name = port["name"].as_str().unwrap_or_default();
    let target = match &port["targetPort"] {
        Value::String(name) => PortTarget::Name(name.as_str().into()),
        target => PortTarget::Number(read_port(target).unwrap_or(number)),
    };
    let by_annotation = protocol.and_then(parse_service_protocol);
    let protocol = by_annotation
        .unwrap_or_else(|| port_protocol(port["appProtocol"].as_str().unwrap_or_default(), name));
    Some(UserServicePort { name: name.into(), port: number, protocol, target })
}

/// Returns a port number; `None` if the value is none.
fn read_port(value: &Value) -> Option<NonZeroU16> {
    value.as_u64().and_then(|it| u16::try_from(it).ok()).and_then(NonZeroU16::new)
}

/// Returns the protocol that the annotation of a Service names for all of its ports.
fn parse_service_protocol(value: &str) -> Option<AppProtocol> {
    if value == "http" { Some(AppProtocol::Http1) } else { parse_protocol(value) }
}

/// Returns the protocol of a port by its `appProtocol`, else by its name. Only those that name HTTP are HTTP: an
/// activator would wait for a request that the other protocols never send.
fn port_protocol(app_protocol: &str, name: &str) -> AppProtocol {
    let text = if app_protocol.is_empty() { name } else { app_protocol };
    let text = text.to_ascii_lowercase();
    let has = |word: &str| text.contains(word);
    if has("https") || has("wss") || has("tls") {
        // The HTTP inside is encrypted.
        AppProtocol::Tcp
    } else if has("grpc-web") {
        AppProtocol::Http1
    } else if has("h2c") || has("http2") || has("grpc") {
        AppProtocol::H2c
    } else if has("http") || text == "ws" || text.ends_with("/ws") {
        AppProtocol::Http1
    } else {
        AppProtocol::Tcp
    }
}

/// Returns the refusal of annotations with unknown values.
fn annotation_refusal(
    wish: Option<&str>,
    annotations: &BTreeMap<String, String>,
) -> Option<ScaledRefusal> {
    let refused = |message: String| Some(ScaledRefusal::InvalidAnnotation(message.into()));
    if let Some(value) = wish.filter(|it| !matches!(*it, "true" | "false")) {
        return refused(format!("{} is {value:?}: use \"true\" or \"false\"", key::SCALE_TO_ZERO));
    }
    if let Some(value) =
        annotations.get(key::PROTOCOL).filter(|it| parse_service_protocol(it).is_none())
    {
        return refused(format!("{} is {value:?}: use http, h2c or tcp", key::PROTOCOL));
    }
    if AutoscalerClass::from_annotations(annotations) != AutoscalerClass::Kpa {
        let class = format!("{AUTOSCALING_PREFIX}class");
        return refused(format!(
            "{class} must be that of Rouse: a HorizontalPodAutoscaler of your own needs no class"
        ));
    }
    None
}

/// Returns the refusal of a Service that no activator can hold connections for.
fn spec_refusal(service: &UserService, spec: &Value) -> Option<ScaledRefusal> {
    if spec["type"] == "ExternalName" {
        Some(ScaledRefusal::ExternalName)
    } else if spec["clusterIP"] == "None" || spec["clusterIPs"][0] == "None" {
        Some(ScaledRefusal::Headless)
    } else if service.selector.is_empty() {
        Some(ScaledRefusal::NoSelector)
    } else if spec["internalTrafficPolicy"] == "Local" {
        Some(ScaledRefusal::LocalTrafficPolicy)
    } else if service.ports.is_empty() {
        Some(ScaledRefusal::NoTcpPort)
    } else {
        None
    }
}

/// Reads a Deployment or StatefulSet of a user.
pub fn read_workload(object: &Value) -> WorkloadState {
    let spec = &object["spec"];
    let pod = &spec["template"]["spec"];
    let text = |field: &str| non_empty_text(&object["metadata"][field]).unwrap_or_default();
    let number = |value: &Value| value.as_u64().and_then(|it| u32::try_from(it).ok());
    let recorded = |key: &str| annotation(object, key).and_then(|it| it.parse::<u32>().ok());
    let record = recorded(key::SCALED_TO).map(|scaled_to| ReplicaRecord {
        scaled_to,
        user_replicas: recorded(key::USER_REPLICAS).unwrap_or(scaled_to).max(1),
    });
    WorkloadState {
        version: WorkloadVersion { uid: text("uid"), resource_version: text("resourceVersion") },
        replicas: number(&spec["replicas"]).unwrap_or(1),
        record,
        first_ordinal: number(&spec["ordinals"]["start"]).unwrap_or(0),
        template_labels: read_pairs(&spec["template"]["metadata"]["labels"]),
        shape: container_shape(pod).to_string().into(),
        uses_host_network: pod["hostNetwork"] == true,
        is_terminating: is_terminating(object),
    }
}

/// Returns the containers of a pod, with the fields that are read.
fn container_shape(pod: &Value) -> Value {
    let container = |it: &Value| -> Value {
        let kept = CONTAINER_FIELDS.into_iter().filter_map(|field| {
            let value = it.get(field).filter(|it| !it.is_null())?;
            Some((field.to_owned(), value.clone()))
        });
        Value::Object(kept.collect::<Map<_, _>>())
    };
    let all = |field: &str| array_items(&pod[field]).map(container).collect::<Vec<_>>();
    let mut shape = json!({"containers": all("containers")});
    let inits = all("initContainers");
    if !inits.is_empty() {
        shape["initContainers"] = inits.into();
    }
    shape
}

/// Reads a pod that may belong to a workload of a user; `None` once all its containers have ended for good.
pub fn read_workload_pod(object: &Value) -> Option<WorkloadPod> {
    let (pod, status) = read_pod(object)?;
    let mut owners = array_items(&object["metadata"]["ownerReferences"]);
    let owner = owners.find(|it| it["controller"] == true).map(|it| {
        let text = |field: &str| non_empty_text(&it[field]).unwrap_or_default();
        PodOwner { kind: text("kind"), name: text("name"), uid: text("uid") }
    });
    Some(WorkloadPod {
        pod,
        status,
        labels: read_pairs(&object["metadata"]["labels"]),
        owner,
        shape: container_shape(&object["spec"]).to_string().into(),
    })
}

/// Reads a HorizontalPodAutoscaler; `None` if it scales no workload of these kinds.
pub fn read_user_autoscaler(object: &Value) -> Option<UserAutoscaler> {
    let (spec, mut name) = (&object["spec"], object_name(object));
    let target = &spec["scaleTargetRef"];
    let kinds = [WorkloadKind::Deployment, WorkloadKind::StatefulSet];
    let kind = kinds.into_iter().find(|it| target["kind"] == it.resource().kind())?;
    name.name = target["name"].as_str()?.into();
    let min = spec["minReplicas"].as_u64().and_then(|it| u32::try_from(it).ok());
    Some(UserAutoscaler {
        target: WorkloadKey { name, kind },
        min_replicas: min.unwrap_or(1).max(1),
    })
}

/// Reads the PodAutoscaler of a scaled Service.
pub fn read_scaled_autoscaler(object: &Value) -> AutoscalerRecord {
    let mut owners = array_items(&object["metadata"]["ownerReferences"]);
    let owner = owners.find(|it| it["controller"] == true);
    AutoscalerRecord {
        owner_uid: owner.and_then(|it| non_empty_text(&it["uid"])),
        ports: parse_activator_ports(annotation(object, key::ACTIVATOR_PORTS).unwrap_or_default()),
        is_terminating: is_terminating(object),
    }
}

/// Parses the annotation with the ports at the activators, `80=20017,5432=20018`. Users may have written it: parts that
/// are no ports are left out.
fn parse_activator_ports(text: &str) -> Vec<ActivatorPort> {
    let port = |part: &str| {
        let (service_port, activator_port) = part.trim().split_once('=')?;
        Some(ActivatorPort {
            service_port: service_port.parse().ok()?,
            activator_port: activator_port.parse().ok()?,
        })
    };
    text.split(',').filter_map(port).collect()
}

/// Conditions of the PodAutoscaler of a scaled Service that its state keeps: of the app, and of its Revision.
const APP_CONDITIONS: [(ConditionType, &str); 1] = [(ConditionType::ScaledServiceReady, "Ready")];
const REVISION_CONDITIONS: [(ConditionType, &str); 3] = [
    (ConditionType::RevisionActive, "Active"),
    (ConditionType::RevisionAnnotations, "AutoscalingAnnotationsValid"),
    (ConditionType::RevisionResources, "ScaleTargetInitialized"),
];

/// Reads the conditions that an earlier leader wrote: those of the app, and those of its Revision.
pub fn read_autoscaler_conditions(object: &Value) -> (ConditionSet, ConditionSet) {
    let [mut app, mut revision] = [ConditionSet::default(), ConditionSet::default()];
    fields::read_conditions(&mut app, object, &APP_CONDITIONS);
    fields::read_conditions(&mut revision, object, &REVISION_CONDITIONS);
    (app, revision)
}
