//! Scaled Services against the model of the API server: Kubernetes Services of users whose workloads sleep.

use std::num::NonZeroU16;

use common::wire::{RoutingPhase, ServiceEntry};

use super::*;

mod giving_back;
mod numbers;
mod ports;
mod refusals;
mod restarts;
mod stop_checks;

const DEPLOYMENT: ResourceKind = ResourceKind::Deployment;
const STATEFUL_SET: ResourceKind = ResourceKind::StatefulSet;
/// Time that pods have to become ready, in seconds.
const PROGRESS_DEADLINE: u64 = 600;

/// Returns the spec of a workload whose pods have the label `app` of this value.
fn workload_spec(app: &str, replicas: u32) -> Value {
    let ports =
        json!([{"name": "web", "containerPort": 8080}, {"name": "sql", "containerPort": 5432}]);
    json!({"replicas": replicas, "template": {
        "metadata": {"labels": {"app": app}},
        "spec": {"containers": [{"name": "app", "image": "app:v1", "ports": ports}]},
    }})
}

/// Returns the spec of a Service that selects the pods with that label.
fn service_spec(app: &str) -> Value {
    json!({
        "clusterIP": "10.96.9.1", "clusterIPs": ["10.96.9.1"], "selector": {"app": app},
        "ports": [{"name": "http", "port": 80, "targetPort": "web", "protocol": "TCP"}],
    })
}

/// Returns the annotation by which a Service asks for scale to zero.
fn sleeps() -> Value {
    json!({"rouse.dev/scale-to-zero": "true"})
}

/// Applies a Kubernetes Service as its user does.
fn apply_service(api_server: &mut FakeApiServer, service: &str, annotations: Value, spec: Value) {
    let metadata = json!({"name": service, "namespace": NAMESPACE, "annotations": annotations});
    let body = json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec});
    for event in api_server.apply(ResourceKind::Service, &name(service), body) {
        api_server.step(event);
    }
}

/// Returns a cluster with the workload `web` of three ready pods, which the Service `web` lets sleep.
fn scaled(resource: ResourceKind) -> FakeApiServer {
    let mut api_server = FakeApiServer::new();
    api_server.apply_workload(resource, "web", &workload_spec("web", 3));
    api_server.make_pods_ready();
    apply_service(&mut api_server, "web", sleeps(), service_spec("web"));
    api_server
}

/// Returns that cluster while the workload sleeps.
fn asleep(resource: ResourceKind) -> FakeApiServer {
    let mut api_server = scaled(resource);
    fall_asleep(&mut api_server);
    assert_eq!(replicas(&api_server, resource), 0);
    api_server
}

/// Lets load ask for up to five pods.
fn allow_five_pods(api_server: &mut FakeApiServer) {
    let mut annotations = sleeps();
    annotations["autoscaling.knative.dev/max-scale"] = json!("5");
    apply_service(api_server, "web", annotations, service_spec("web"));
}

/// Returns a cluster whose workload has five ready pods for its load. Its user wants three.
fn grown(resource: ResourceKind) -> FakeApiServer {
    let mut api_server = scaled(resource);
    allow_five_pods(&mut api_server);
    api_server.decide("web", 5);
    api_server.make_pods_ready();
    assert_eq!(phases(&api_server), [RoutingPhase::Ready; 5]);
    api_server
}

/// Lets the workload sleep. Agents report nothing, so its pods drain for their whole grace period.
fn fall_asleep(api_server: &mut FakeApiServer) {
    api_server.decide("web", 0);
    advance(api_server, 301);
}

fn advance(api_server: &mut FakeApiServer, seconds: u64) {
    api_server.now = api_server.now.plus_ms(seconds * 1000);
    api_server.step(ControllerEvent::Tick);
}

/// Returns the number of pods that the workload `web` requests.
fn replicas(api_server: &FakeApiServer, resource: ResourceKind) -> u64 {
    api_server.object(resource, "web")["spec"]["replicas"].as_u64().expect("a number")
}

/// Returns the record of the workload `web`: the number that was written last, and that of the user.
fn record(api_server: &FakeApiServer, resource: ResourceKind) -> [Option<String>; 2] {
    let annotations = &api_server.object(resource, "web")["metadata"]["annotations"];
    [key::SCALED_TO, key::USER_REPLICAS].map(|it| annotations[it].as_str().map(str::to_owned))
}

fn recorded(scaled_to: u32, user_replicas: u32) -> [Option<String>; 2] {
    [scaled_to, user_replicas].map(|it| Some(it.to_string()))
}

/// Returns the phases of the pods in the RouteTable, by the names of the pods.
fn phases(api_server: &FakeApiServer) -> Vec<RoutingPhase> {
    let pods = api_server.table().pods.into_values().map(|it| (it.name, it.phase));
    pods.collect::<BTreeMap<_, _>>().into_values().collect()
}

fn count_phase(api_server: &FakeApiServer, phase: RoutingPhase) -> usize {
    phases(api_server).into_iter().filter(|it| *it == phase).count()
}

/// Returns the entry of a port of the Service `web`.
fn port_entry(api_server: &FakeApiServer, port: u16) -> Option<ServiceEntry> {
    let port = NonZeroU16::new(port).expect("a port");
    api_server.table().services.remove(&name("web").with_port(port))
}

fn exists(api_server: &FakeApiServer, resource: ResourceKind, object: &str) -> bool {
    api_server.objects.contains_key(&(resource, name(object)))
}

/// Returns true if a slice leads connections to the Service `web` to activators.
fn leads_to_activators(api_server: &FakeApiServer) -> bool {
    exists(api_server, ResourceKind::EndpointSlice, "web-rouse")
}

/// Returns the condition `Ready` of the PodAutoscaler `web`, without its message.
fn ready(api_server: &FakeApiServer) -> String {
    let condition = api_server.condition(ResourceKind::PodAutoscaler, "web", "Ready");
    condition.split_once(':').map(|(head, _)| head.to_owned()).unwrap_or_default()
}

/// Returns the reasons of all Events on Services, in their order.
fn events(api_server: &FakeApiServer) -> Vec<&str> {
    api_server.object_events.iter().map(|it| it.reason.as_str()).collect()
}

#[test]
fn a_scaled_service_gets_a_pod_autoscaler_and_a_route_and_nothing_else() {
    let api_server = scaled(DEPLOYMENT);
    let made: BTreeSet<String> = api_server
        .objects
        .keys()
        .filter(|(resource, it)| it.namespace == NAMESPACE && *resource != ResourceKind::Pod)
        .map(|(resource, it)| format!("{resource}/{}", it.name))
        .collect();
    let expected = [
        "deployments.apps/web",
        "podautoscalers.autoscaling.internal.knative.dev/web",
        "services/web",
    ];
    assert_eq!(made, expected.map(str::to_owned).into());
    assert_eq!(api_server.replicas_writes, [0_u64; 0]);
    let table = api_server.table();
    assert_eq!(table.revisions.keys().collect::<Vec<_>>(), [&name("web")]);
    assert_eq!(phases(&api_server), [RoutingPhase::Ready; 3]);
    let entry = port_entry(&api_server, 80).expect("its port");
    assert_eq!(entry.addresses, ["10.96.9.1".parse::<std::net::IpAddr>().expect("an address")]);
    assert_eq!(entry.targets[0].revision, name("web"));
    let autoscaler = api_server.object(ResourceKind::PodAutoscaler, "web");
    let target = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"});
    assert_eq!(autoscaler["spec"]["scaleTargetRef"], target);
    let ports = format!("80={}", entry.activator_port);
    assert_eq!(autoscaler["metadata"]["annotations"][key::ACTIVATOR_PORTS], ports.as_str());
    let owner = &autoscaler["metadata"]["ownerReferences"][0];
    assert_eq!(owner["uid"], api_server.object(DEPLOYMENT, "web")["metadata"]["uid"]);
    assert_eq!(ready(&api_server), "True ");
}

#[test]
fn the_pod_autoscaler_shows_that_the_workload_sleeps() {
    let mut api_server = asleep(DEPLOYMENT);
    assert_eq!(ready(&api_server), "False NoTraffic");
    let status = |api_server: &FakeApiServer| {
        let status = &api_server.object(ResourceKind::PodAutoscaler, "web")["status"];
        [status["desiredScale"].clone(), status["actualScale"].clone()]
    };
    assert_eq!(status(&api_server), [json!(0), json!(0)]);
    api_server.decide("web", 3);
    assert_eq!(status(&api_server), [json!(3), json!(0)]);
    api_server.make_pods_ready();
    assert_eq!((status(&api_server), ready(&api_server)), ([json!(3), json!(3)], "True ".into()));
}

/// Without a slice, kube-proxy would refuse connections as soon as the last pod is gone.
#[test]
fn slices_lead_to_activators_from_before_the_last_pods_leave_until_pods_are_ready() {
    let mut api_server = scaled(DEPLOYMENT);
    assert!(!leads_to_activators(&api_server));
    api_server.decide("web", 0);
    assert!(leads_to_activators(&api_server));
    let slice = api_server.object(ResourceKind::EndpointSlice, "web-rouse");
    assert_eq!(slice["endpoints"][0]["addresses"][0], "10.1.0.9");
    assert_eq!(slice["metadata"]["labels"]["kubernetes.io/service-name"], "web");
    let port = port_entry(&api_server, 80).expect("its port").activator_port.get();
    assert_eq!(slice["ports"], json!([{"name": "http", "port": port, "protocol": "TCP"}]));
    advance(&mut api_server, 301);
    api_server.decide("web", 3);
    assert!(leads_to_activators(&api_server), "no pod is ready");
    api_server.report_all_ready();
    assert!(leads_to_activators(&api_server), "kube-proxy follows the kubelet");
    api_server.make_pods_ready();
    assert!(leads_to_activators(&api_server), "kube-proxy follows a moment later");
    advance(&mut api_server, 6);
    assert!(!leads_to_activators(&api_server));
}

#[test]
fn the_last_pods_stay_until_a_slice_leads_to_activators() {
    let mut api_server = scaled(DEPLOYMENT);
    // Only the machine of the leader does not know the slice.
    api_server.decide("web", 0);
    let slice = ControllerEvent::ObjectObserved {
        resource: ResourceKind::EndpointSlice,
        name: name("web-rouse"),
        object: None,
    };
    api_server.machine.step(api_server.now, slice);
    advance(&mut api_server, 301);
    assert_eq!(replicas(&api_server, DEPLOYMENT), 3);
    let slice = api_server.object(ResourceKind::EndpointSlice, "web-rouse").clone();
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::EndpointSlice,
        name: name("web-rouse"),
        object: Some(Box::new(slice)),
    });
    assert_eq!(replicas(&api_server, DEPLOYMENT), 0);
}

/// Returns the pod of the only activator, as it is while the activator is ready or not.
fn activator_pod(api_server: &FakeApiServer, is_ready: bool) -> Value {
    let at = (ResourceKind::Pod, NamespacedName::new("knative-serving", "activator-1"));
    let mut pod = api_server.objects[&at].clone();
    let status = if is_ready { "True" } else { "False" };
    pod["status"]["conditions"][0]["status"] = json!(status);
    pod
}

/// Lets the controller observe the only activator; `None`: it was deleted.
fn observe_activator(api_server: &mut FakeApiServer, pod: Option<Value>) {
    let activator = NamespacedName::new("knative-serving", "activator-1");
    let (resource, object) = (ResourceKind::Pod, pod.map(Box::new));
    api_server.step(ControllerEvent::ObjectObserved { resource, name: activator, object });
}

#[test]
fn a_workload_stays_awake_while_no_activator_could_wake_it() {
    for is_deleted in [true, false] {
        let mut api_server = scaled(DEPLOYMENT);
        let present = activator_pod(&api_server, true);
        let absent = (!is_deleted).then(|| activator_pod(&api_server, false));
        observe_activator(&mut api_server, absent.clone());
        fall_asleep(&mut api_server);
        assert_eq!(phases(&api_server), [RoutingPhase::Ready; 3], "{is_deleted}");
        observe_activator(&mut api_server, Some(present.clone()));
        assert_eq!(phases(&api_server), [RoutingPhase::Draining; 3], "{is_deleted}");
        observe_activator(&mut api_server, absent.clone());
        assert_eq!(phases(&api_server), [RoutingPhase::Ready; 3], "they serve again");
        observe_activator(&mut api_server, Some(present));
        advance(&mut api_server, 301);
        assert_eq!(replicas(&api_server, DEPLOYMENT), 0, "{is_deleted}");
        observe_activator(&mut api_server, absent);
        assert_eq!(replicas(&api_server, DEPLOYMENT), 0, "it goes on sleeping");
    }
}

#[test]
fn nothing_is_decided_before_all_workloads_are_known() {
    let mut api_server = FakeApiServer::new();
    api_server.lists_workloads = false;
    api_server.apply_workload(DEPLOYMENT, "web", &workload_spec("web", 3));
    apply_service(&mut api_server, "web", sleeps(), service_spec("web"));
    assert!(api_server.machine.needs_workload_watch());
    api_server.decide("web", 0);
    advance(&mut api_server, 301);
    assert!(api_server.table().services.is_empty() && events(&api_server).is_empty());
    assert!(!exists(&api_server, ResourceKind::PodAutoscaler, "web"));
    for event in observations_of_workloads(&api_server.objects) {
        api_server.step(event);
    }
    api_server.step(ControllerEvent::WorkloadsListed);
    assert!(exists(&api_server, ResourceKind::PodAutoscaler, "web"));
    assert!(port_entry(&api_server, 80).is_some());
}

/// The system namespace has a watch from the start, and that of users' pods leaves it out.
#[test]
fn pods_that_were_observed_before_the_first_scaled_service_are_known() {
    let mut api_server = FakeApiServer::new();
    api_server.lists_workloads = false;
    api_server.apply_workload(DEPLOYMENT, "web", &workload_spec("web", 3));
    api_server.make_pods_ready();
    apply_service(&mut api_server, "web", sleeps(), service_spec("web"));
    api_server.step(ControllerEvent::WorkloadsListed);
    assert_eq!(phases(&api_server), [RoutingPhase::Ready; 3]);
}

#[test]
fn a_service_without_the_annotation_is_left_alone() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_workload(DEPLOYMENT, "web", &workload_spec("web", 3));
    for annotations in [json!({}), json!({"rouse.dev/scale-to-zero": "false"})] {
        apply_service(&mut api_server, "web", annotations, service_spec("web"));
        assert!(!api_server.machine.needs_workload_watch());
        assert!(api_server.machine.cluster().apps.is_empty());
    }
}
