//! Pure: scaled Services as the API server holds them: Services of users, with their workloads and PodAutoscalers.
//!
//! Of the objects of users, the metadata and these fields are read:
//!
//! | kind | fields |
//! |---|---|
//! | Service | of the spec: `clusterIP`, `clusterIPs`, `internalTrafficPolicy`, `ports`, `selector`, `type`, |
//! | | `externalTrafficPolicy`, `sessionAffinity`, `sessionAffinityConfig`, `trafficDistribution` |
//! | Deployment, StatefulSet | of the spec: `replicas`, `ordinals`, `persistentVolumeClaimRetentionPolicy`; of its |
//! | | template labels, `hostNetwork`, containers |
//! | HorizontalPodAutoscaler | of the spec: `scaleTargetRef`, `minReplicas` |
//! | Pod | as of Revisions, and of the spec the containers |
//! | PodAutoscaler | `status.conditions` |
//!
//! Of containers and init containers: `name`, `image`, `ports`, `readinessProbe`, `restartPolicy`, `startupProbe`.

use std::{collections::BTreeMap, net::IpAddr, num::NonZeroU16, time::Duration};

use common::{decimal::parse_port, wire::AppProtocol};
use serde_json::{Map, Value, json};

use super::pods::read_pod;
use crate::{
    model::{
        cluster_state::{
            ActivatorPort, AutoscalerRecord, CompactStringMap, ConditionSet, ConditionType,
            PodOwner, ScaledRefusal, TargetPort, UserAutoscaler, UserService, UserServicePort,
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
        // Any other text counts as a wish, so that a mistake is shown as a refusal and not ignored.
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
    // A refused Service is still read as a whole, since conditions of its PodAutoscaler name the reason.
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
        Value::String(name) => TargetPort::Name(name.as_str().into()),
        target => TargetPort::Number(read_port(target).unwrap_or(number)),
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
    // Another class would leave the number of pods to a controller that knows nothing of sleep.
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
        // Without the number of the user, the last one of the controller is the best guess, but never zero.
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
        deletes_volumes: spec["persistentVolumeClaimRetentionPolicy"]["whenScaled"] == "Delete",
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
    // Most pods have none, and equal shapes share their memory as texts.
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
            service_port: parse_port(service_port)?,
            activator_port: parse_port(activator_port)?,
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a Service with these ports, and with one annotation if its value is not empty.
    fn service(ports: &Value, annotation: (&str, &str)) -> UserService {
        let spec = json!({"selector": {"app": "web"}, "clusterIP": "10.96.0.7", "ports": ports});
        let mut object = json!({"metadata": {"name": "web"}, "spec": spec});
        if !annotation.1.is_empty() {
            object["metadata"]["annotations"][annotation.0] = json!(annotation.1);
        }
        read_user_service(&object).expect("a user's own")
    }

    #[test]
    fn the_protocol_of_a_port_follows_from_its_app_protocol_or_its_name() {
        use AppProtocol::{H2c, Http1, Tcp};
        for (name, app_protocol, expected) in [
            ("http", "", Http1),
            ("http-web", "", Http1),
            ("web", "http", Http1),
            ("web", "HTTP", Http1),
            ("sql", "kubernetes.io/ws", Http1),
            ("grpc-web", "", Http1),
            ("h2c", "", H2c),
            ("http2", "", H2c),
            ("grpc", "", H2c),
            ("web", "kubernetes.io/h2c", H2c),
            ("https", "", Tcp),
            ("web", "https", Tcp),
            ("web", "kubernetes.io/wss", Tcp),
            ("http-tls", "", Tcp),
            ("http", "tcp", Tcp),
            ("news", "", Tcp),
            ("", "", Tcp),
        ] {
            let port = json!([{"name": name, "port": 80, "appProtocol": app_protocol}]);
            let read = service(&port, ("", "")).ports[0].protocol;
            assert_eq!(read, expected, "{name:?} {app_protocol:?}");
        }
        let ports = json!([{"name": "sql", "port": 1}, {"name": "http", "port": 2}]);
        for (value, expected) in [("http", Http1), ("http1", Http1), ("h2c", H2c), ("tcp", Tcp)] {
            let service = service(&ports, ("rouse.dev/protocol", value));
            assert!(service.ports.iter().all(|it| it.protocol == expected), "{value}");
            assert_eq!(service.refusal, None);
        }
    }

    #[test]
    fn ports_without_a_name_or_target_and_of_other_protocols_are_read() {
        let service = service(
            &json!([
                {"port": 80},
                {"port": 81, "targetPort": "web", "protocol": "TCP"},
                {"port": 82, "targetPort": 8082},
                {"port": 53, "protocol": "UDP"},
                {"port": 54, "protocol": "SCTP"},
            ]),
            ("", ""),
        );
        let number = |it: u16| TargetPort::Number(NonZeroU16::new(it).expect("a port"));
        let targets: Vec<&TargetPort> = service.ports.iter().map(|it| &it.target).collect();
        assert_eq!(targets, [&number(80), &TargetPort::Name("web".into()), &number(8082)]);
        assert_eq!(service.other_ports.join(" "), "53/UDP 54/SCTP");
    }

    #[test]
    fn a_service_that_the_controller_made_is_none_of_a_user() {
        for label in ["serving.knative.dev/route", "serving.knative.dev/revision"] {
            let mut object = json!({"metadata": {"name": "web", "labels": {label: "x"}}});
            object["metadata"]["annotations"] = json!({"rouse.dev/scale-to-zero": "true"});
            assert_eq!(read_user_service(&object), None, "{label}");
        }
    }

    #[test]
    fn affinity_lasts_three_hours_unless_the_service_sets_a_time() {
        let client = |seconds: Value| {
            let config = json!({"clientIP": {"timeoutSeconds": seconds}});
            read_affinity(&json!({"sessionAffinity": "ClientIP", "sessionAffinityConfig": config}))
        };
        assert_eq!(client(json!(60)), Some(Duration::from_secs(60)));
        assert_eq!(client(Value::Null), Some(Duration::from_secs(10_800)));
        assert_eq!(read_affinity(&json!({"sessionAffinity": "None"})), None);
    }

    #[test]
    fn the_record_of_a_workload_is_read_as_far_as_it_is_readable() {
        let record = |annotations: Value| {
            let metadata = json!({"name": "web", "annotations": annotations});
            read_workload(&json!({"metadata": metadata, "spec": {}})).record
        };
        let expected = |scaled_to, user_replicas| Some(ReplicaRecord { scaled_to, user_replicas });
        let both = json!({"rouse.dev/scaled-to": "0", "rouse.dev/replicas": "3"});
        assert_eq!(record(both), expected(0, 3));
        assert_eq!(record(json!({"rouse.dev/scaled-to": "2"})), expected(2, 2));
        assert_eq!(record(json!({"rouse.dev/scaled-to": "0"})), expected(0, 1));
        let never = json!({"rouse.dev/scaled-to": "0", "rouse.dev/replicas": "0"});
        assert_eq!(record(never), expected(0, 1), "it would never wake");
        assert_eq!(record(json!({"rouse.dev/replicas": "3"})), None);
    }

    #[test]
    fn the_ports_that_a_pod_autoscaler_records_are_read_as_far_as_they_are_readable() {
        let read = |text: &str| {
            let ports = parse_activator_ports(text);
            ports.iter().map(|it| (it.service_port.get(), it.activator_port.get())).collect()
        };
        let pairs: Vec<(u16, u16)> = read("80=20017,5432=20018");
        assert_eq!(pairs, [(80, 20_017), (5432, 20_018)]);
        let pairs: Vec<(u16, u16)> = read(" 80=20017 ,x=1,81=0,82,=3,70000=4,+83=20018,84=+20018");
        assert_eq!(pairs, [(80, 20_017)]);
    }

    #[test]
    fn a_horizontal_pod_autoscaler_of_another_kind_concerns_no_workload() {
        let read = |kind: &str, min: Value| {
            let spec = json!({"scaleTargetRef": {"kind": kind, "name": "db"}, "minReplicas": min});
            let metadata = json!({"name": "x", "namespace": "default"});
            read_user_autoscaler(&json!({"metadata": metadata, "spec": spec}))
        };
        let found = read("StatefulSet", json!(2)).expect("a workload");
        assert_eq!(found.target.to_string(), "StatefulSet \"db\"");
        assert_eq!((&*found.target.name.namespace, found.min_replicas), ("default", 2));
        assert_eq!(read("Deployment", Value::Null).map(|it| it.min_replicas), Some(1));
        assert_eq!(read("Deployment", json!(0)).map(|it| it.min_replicas), Some(1));
        assert_eq!(read("Rollout", json!(1)), None);
    }
}
