//! Pure: containers of a workload or pod of a user → the template of a Revision, and the ports of the pod.
//!
//! Each pod has the template of its own containers, since pods of one workload differ while it is updated. A template
//! of a Revision has one serving port. It is that of the readiness probe, or else the one to which the first port of
//! the Service leads.

use std::{collections::BTreeMap, num::NonZeroU16, sync::Arc};

use common::wire::{AppProtocol, PodPort};
use k8s_openapi::{
    api::core::v1::{Container, ContainerPort, PodSpec},
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, util::intstr::IntOrString},
};

use crate::model::{
    cluster_state::{PodLayout, TargetPort, UserService, UserServicePort, WorkloadBinding},
    knative::{
        RevisionSpec, RevisionTemplate, key,
        user_container::{ReplacedPorts, set_probe_port},
    },
};

/// Serving port of pods that name no port at all, as of Knative.
const DEFAULT_PORT: NonZeroU16 = NonZeroU16::new(8080).expect("not zero");

/// Returns the layout of a pod. `shape` is the JSON of its containers.
pub(crate) fn pod_layout(shape: &str, service: &UserService) -> PodLayout {
    let pod: PodSpec = serde_json::from_str(shape).unwrap_or_default();
    let pod_port = |it: &UserServicePort| {
        let port = find_port(&pod, &it.target)?;
        Some(PodPort { service_port: it.port, port, protocol: it.protocol })
    };
    let mut ports: Vec<PodPort> = service.ports.iter().filter_map(pod_port).collect();
    ports.sort_by_key(|it| it.service_port);
    let template = to_template(&pod, service, None, RevisionSpec::default());
    PodLayout { template, ports: ports.into() }
}

/// Returns the template of the Revision that stands for a workload. `timeout_s` is the time limit of a request.
pub(crate) fn revision_template(
    binding: &WorkloadBinding,
    service: &UserService,
    timeout_s: i64,
) -> Arc<str> {
    let pod: PodSpec = serde_json::from_str(&binding.shape).unwrap_or_default();
    let mut annotations = service.annotations.to_btree_map();
    annotations.insert(key::USER_REPLICAS.into(), binding.wake_replicas().to_string());
    if binding.hpa_min_replicas.is_some() {
        annotations.insert(key::HAS_HPA.into(), "true".into());
    }
    let protocol = if is_tcp_only(service) { "tcp" } else { "http1" };
    annotations.insert(key::PROTOCOL.into(), protocol.into());
    if let Some(distribution) = &service.traffic_distribution {
        let own = annotations.entry(key::TRAFFIC_DISTRIBUTION.into());
        // An annotation of the user precedes the field of the Service.
        own.or_insert_with(|| distribution.to_string());
    }
    let spec = RevisionSpec { timeout_seconds: Some(timeout_s), ..RevisionSpec::default() };
    to_template(&pod, service, Some(annotations), spec)
}

/// Returns number and name of each port of the containers to which the Service leads. Without a name the text is empty.
pub(crate) fn named_ports(shape: &str, service: &UserService) -> Vec<(NonZeroU16, String)> {
    let pod: PodSpec = serde_json::from_str(shape).unwrap_or_default();
    let name_of = |number: NonZeroU16| {
        let mut ports = pod.containers.iter().flat_map(|it| it.ports.iter().flatten());
        let port = ports.find(|it| is_tcp(it) && port_number(it) == Some(number));
        port.and_then(|it| it.name.clone()).unwrap_or_default()
    };
    let numbers = service.ports.iter().filter_map(|it| find_port(&pod, &it.target));
    numbers.map(|number| (number, name_of(number))).collect()
}

/// Returns true if every port of the Service carries bytes of any protocol.
pub(crate) fn is_tcp_only(service: &UserService) -> bool {
    service.ports.iter().all(|it| it.protocol == AppProtocol::Tcp)
}

/// Returns the number of the pod's port that a Service means. Names are those of ports of containers, also of init
/// containers that keep running (Kubernetes' `pkg/api/v1/service`, `FindPort`).
fn find_port(pod: &PodSpec, target: &TargetPort) -> Option<NonZeroU16> {
    let name = match target {
        TargetPort::Number(number) => return Some(*number),
        TargetPort::Name(name) => name,
    };
    let sidecars = pod.init_containers.iter().flatten();
    let sidecars = sidecars.filter(|it| it.restart_policy.as_deref() == Some("Always"));
    let mut ports = pod.containers.iter().chain(sidecars).flat_map(|it| it.ports.iter().flatten());
    ports.find(|it| is_tcp(it) && it.name.as_deref() == Some(&**name)).and_then(port_number)
}

fn is_tcp(port: &ContainerPort) -> bool {
    port.protocol.as_deref().is_none_or(|it| it == "TCP")
}

fn port_number(port: &ContainerPort) -> Option<NonZeroU16> {
    u16::try_from(port.container_port).ok().and_then(NonZeroU16::new)
}

/// Returns a template with the containers of a pod, in which only the serving container has a port.
fn to_template(
    pod: &PodSpec,
    service: &UserService,
    annotations: Option<BTreeMap<String, String>>,
    spec: RevisionSpec,
) -> Arc<str> {
    let (serving_index, port) = serving_port(pod, service);
    let serving_port =
        ContainerPort { container_port: port.get().into(), ..ContainerPort::default() };
    // Knative's rules allow one container with ports, so the others lose theirs.
    let container = |(index, it): (usize, &Container)| {
        let is_serving = index == serving_index;
        let mut probe = it.readiness_probe.clone();
        // The probe may name its port, and the container has no named ports any more.
        for probe in probe.iter_mut().filter(|_| is_serving) {
            set_probe_port(probe, port.get().into(), ReplacedPorts::WithoutNumber);
        }
        Container {
            ports: is_serving.then(|| vec![serving_port.clone()]),
            readiness_probe: probe,
            ..read_fields(it)
        }
    };
    // Init containers that keep running may have readiness probes, which count for the pod.
    let init_container = |it: &Container| Container {
        readiness_probe: it.readiness_probe.clone(),
        ..read_fields(it)
    };
    let inits = pod.init_containers.as_ref();
    let pod = PodSpec {
        containers: pod.containers.iter().enumerate().map(container).collect(),
        init_containers: inits.map(|all| all.iter().map(init_container).collect()),
        ..PodSpec::default()
    };
    let metadata = ObjectMeta {
        // No user can write this name: it marks the template of a scaled Service.
        generate_name: Some(key::SCALED_SERVICE.into()),
        annotations,
        ..ObjectMeta::default()
    };
    let template = RevisionTemplate { metadata, spec: RevisionSpec { pod, ..spec } };
    // Types of an API always serialize.
    serde_json::to_string(&template).unwrap_or_default().into()
}

/// Returns the fields of a container that templates of scaled Services contain, without ports and readiness probe.
fn read_fields(container: &Container) -> Container {
    Container {
        name: container.name.clone(),
        image: container.image.clone(),
        startup_probe: container.startup_probe.clone(),
        ..Container::default()
    }
}

/// Returns the index of the serving container, and the serving port.
fn serving_port(pod: &PodSpec, service: &UserService) -> (usize, NonZeroU16) {
    let first = service.ports.iter().find_map(|it| find_port(pod, &it.target));
    let has_first = |it: &Container| {
        it.ports.iter().flatten().any(|port| is_tcp(port) && port_number(port) == first)
    };
    let containers = &pod.containers;
    let index = first.and_then(|_| containers.iter().position(has_first));
    let index = index
        .or_else(|| containers.iter().position(|it| it.readiness_probe.is_some()))
        .unwrap_or(0);
    let probed = containers.get(index).and_then(probe_port);
    let declared = containers.iter().flat_map(|it| it.ports.iter().flatten()).find_map(port_number);
    (index, probed.or(first).or(declared).unwrap_or(DEFAULT_PORT))
}

/// Returns the port that the readiness probe of a container asks; `None`: there is none, or it asks no port.
fn probe_port(container: &Container) -> Option<NonZeroU16> {
    let probe = container.readiness_probe.as_ref()?;
    let http = probe.http_get.as_ref().map(|it| &it.port);
    let asked = http.or_else(|| probe.tcp_socket.as_ref().map(|it| &it.port));
    match asked {
        Some(IntOrString::Int(number)) => u16::try_from(*number).ok().and_then(NonZeroU16::new),
        // As the kubelet reads it: a number, or the name of a port of the container.
        Some(IntOrString::String(text)) => text.parse().ok().or_else(|| {
            let mut ports = container.ports.iter().flatten();
            ports.find(|it| it.name.as_deref() == Some(text)).and_then(port_number)
        }),
        None => {
            probe.grpc.as_ref().and_then(|it| u16::try_from(it.port).ok()).and_then(NonZeroU16::new)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::observe;
    use serde_json::{Value, json};

    /// Returns a Service of these ports.
    fn service(ports: Value) -> UserService {
        let spec = json!({"ports": ports, "selector": {"app": "web"}, "clusterIP": "10.96.0.7"});
        observe::read_user_service(&json!({"metadata": {"name": "web"}, "spec": spec}))
            .expect("a user's own")
    }

    /// Returns the ports of a pod for those of the Service, and its serving port.
    fn ports(pod: Value, service: &UserService) -> (Vec<(u16, u16)>, i32, usize) {
        let layout = pod_layout(&pod.to_string(), service);
        let template: RevisionTemplate = serde_json::from_str(&layout.template).expect("JSON");
        let containers = &template.spec.pod.containers;
        let with_port = |it: &Container| it.ports.as_ref().map(|it| it[0].container_port);
        let (index, port) = containers
            .iter()
            .enumerate()
            .find_map(|(index, it)| Some((index, with_port(it)?)))
            .expect("a serving container");
        let pairs = layout.ports.iter().map(|it| (it.service_port.get(), it.port.get()));
        (pairs.collect(), port, index)
    }

    #[test]
    fn each_port_of_a_service_leads_to_the_port_that_the_pod_names_so() {
        let service = service(json!([
            {"name": "sql", "port": 5432, "targetPort": "db"},
            {"name": "http", "port": 80, "targetPort": 8080},
            {"name": "same", "port": 81},
            {"name": "none", "port": 82, "targetPort": "missing"},
            {"name": "dns", "port": 53, "protocol": "UDP"},
        ]));
        let pod = |number: u16| {
            json!({"containers": [
                {"name": "a", "ports": [{"containerPort": 8080}]},
                {"name": "b", "ports": [
                    {"name": "db", "containerPort": 1, "protocol": "UDP"},
                    {"name": "db", "containerPort": number},
                ]},
            ]})
        };
        let all = |sql| vec![(80, 8080), (81, 81), (5432, sql)];
        assert_eq!(ports(pod(15_432), &service), (all(15_432), 15_432, 1), "the first port serves");
        assert_eq!(ports(pod(5433), &service).0, all(5433), "another pod");
    }

    #[test]
    fn the_serving_port_is_the_one_that_the_readiness_probe_asks() {
        let web = service(json!([{"port": 80, "targetPort": "web"}]));
        let pod = |probe: Value| {
            json!({"containers": [
                {"name": "proxy", "readinessProbe": {"tcpSocket": {"port": 15_000}}},
                {"name": "app", "readinessProbe": probe, "ports": [
                    {"name": "web", "containerPort": 8080}, {"name": "health", "containerPort": 9000},
                ]},
            ]})
        };
        for (probe, port) in [
            (json!({"httpGet": {"port": "health"}}), 9000),
            (json!({"httpGet": {"port": 8081}}), 8081),
            (json!({"tcpSocket": {"port": "8082"}}), 8082),
            (json!({"grpc": {"port": 8083}}), 8083),
            (json!({"exec": {"command": ["true"]}}), 8080),
            (Value::Null, 8080),
        ] {
            assert_eq!(ports(pod(probe.clone()), &web), (vec![(80, 8080)], port, 1), "{probe}");
        }
        let bare = json!({"containers": [{"name": "app"}]});
        assert_eq!(ports(bare.clone(), &web), (vec![], 8080, 0), "no port has the name");
        let number = service(json!([{"port": 80, "targetPort": 7000}]));
        assert_eq!(ports(bare, &number), (vec![(80, 7000)], 7000, 0), "ports need no declaration");
    }

    #[test]
    fn a_running_init_container_may_have_the_port() {
        let named = service(json!([{"port": 80, "targetPort": "web"}]));
        let pod = |policy: Value| {
            let ports = json!([{"name": "web", "containerPort": 8080}]);
            let init = json!({"name": "i", "restartPolicy": policy, "ports": ports});
            json!({"containers": [{"name": "app"}], "initContainers": [init]})
        };
        assert_eq!(ports(pod(json!("Always")), &named).0, [(80, 8080)]);
        assert_eq!(ports(pod(Value::Null), &named).0, [(0, 0); 0]);
    }
}
