//! The controller against a model of the API server: objects in, objects out, until nothing changes any more.

use std::collections::{BTreeMap, BTreeSet};

use common::wire::{
    ClientComponent, ComponentReplica, ConnectionPath, GatewayRules, NamespacedName,
    PodObservation, RouteTag, TagRouting,
};
use datapath::abi;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::{
    decide::machine::{ControllerEvent, ControllerStateMachine},
    model::{
        cluster_state::{ConditionStatus, ConditionType, UnixMillis},
        knative::key,
        network_policies::PolicyClientPod,
        object::{DesiredState, ObjectPart, ObjectPartKey, ResourceKind},
    },
    write::desired::desired_state,
};

mod autoscaler_classes;
mod certificates;
mod client_cas;
mod containers;
mod deletion;
mod fake_api_server;
mod fields;
mod gateway_api;
mod gateway_ports;
mod ingresses;
mod inherited_metadata;
mod local_tls;
mod long_names;
mod name_conflicts;
mod path_rules;
mod pod_changes;
mod protocols;
mod requested_certificates;
mod revision_services;
mod route_references;
mod scaled_services;
mod standby;
mod stop_checks;
mod topology;
mod wake_zone;
mod write_errors;

use fake_api_server::{
    FakeApiServer, NAMESPACE, decision, differences, machine, name, observations,
    observations_of_deployments_first, observations_of_workloads, ready_observation,
    requested_replicas, table, template,
};

/// An autoscaler may follow another replica, which observed the Revision sooner, and sends each decision once.
#[test]
fn a_decision_before_its_revision_is_observed_takes_effect() {
    let mut api_server = FakeApiServer::new();
    api_server.decide("hello-00001", 1);
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    assert_eq!(requested_replicas(&api_server), 1);
    api_server.step(ControllerEvent::DecisionWithdrawn(name("hello-00001")));
    assert_eq!(api_server.machine.decided_revisions().count(), 0);
}

#[test]
fn a_decision_before_its_revision_is_observed_can_be_withdrawn() {
    let mut api_server = FakeApiServer::new();
    api_server.decide("hello-00001", 1);
    api_server.step(ControllerEvent::DecisionStreamBegin);
    api_server.step(ControllerEvent::DecisionStreamSynced);
    api_server.decide("hello-00002", 1);
    api_server.step(ControllerEvent::DecisionWithdrawn(name("hello-00002")));
    assert_eq!(api_server.machine.decided_revisions().count(), 0);
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    assert_eq!(requested_replicas(&api_server), 0);
}

/// Deletion of a Revision may be observed after the decision on a new Revision of the same name.
#[test]
fn a_decision_survives_the_recreation_of_its_revision() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.decide("hello-00001", 1);
    api_server.delete_as_user(ResourceKind::KnativeService, "hello");
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    assert_eq!(requested_replicas(&api_server), 1);
}

/// Allocation is the leader's: on other replicas, a name without numbers does not mean that none are free.
#[test]
fn a_non_leader_waits_for_the_allocation_of_a_name() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let mut follower = machine();
    for resource in [ResourceKind::Configuration, ResourceKind::Revision, ResourceKind::Route] {
        let ((_, object_name), object) =
            api_server.objects.iter().find(|((it, _), _)| *it == resource).expect("one");
        let event = ControllerEvent::ObjectObserved {
            resource,
            name: object_name.clone(),
            object: Some(Box::new(object.clone())),
        };
        follower.step(api_server.now, event);
    }
    let app = &follower.cluster().apps[&name("hello")];
    let ingress = app.conditions.get(ConditionType::RouteIngress);
    assert!(app.route.as_ref().is_some_and(|it| it.allocations.is_empty()));
    assert!(matches!(ingress, ConditionStatus::Unknown(_)), "{ingress:?}");
}

#[test]
fn a_non_leader_follows_an_activator_port_that_the_leader_has_changed() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.apply_service("other", "hello:v1", 0, Value::Null);
    let mut follower = api_server.start_replica();
    let ports = |machine: &ControllerStateMachine| {
        let table = table(machine);
        ["hello", "other"].map(|it| table.services[&name(it)].activator_port.get())
    };
    let observe_port = |follower: &mut ControllerStateMachine, service: &str, port: u16| {
        let mut object = api_server.object(ResourceKind::Service, service).clone();
        object["metadata"]["annotations"][key::ACTIVATOR_PORT_ANNOTATION] = port.to_string().into();
        let (resource, object) = (ResourceKind::Service, Some(Box::new(object)));
        let event = ControllerEvent::ObjectObserved { resource, name: name(service), object };
        follower.step(api_server.now, event);
    };
    let [first, last] = abi::ACTIVATOR_PORTS;
    let before = ports(&follower);
    let unused = (first..=last).find(|it| !before.contains(it)).expect("there are many");
    observe_port(&mut follower, "hello", before[1]);
    assert_eq!(ports(&follower), before, "the other service still has the port");
    observe_port(&mut follower, "other", unused);
    assert_eq!(ports(&follower), [before[1], unused]);
    assert_eq!(follower.cluster.allocated.ports, BTreeSet::from([before[1], unused]));
    // Names that are deleted and made again in another order may have each other's ports.
    observe_port(&mut follower, "hello", unused);
    observe_port(&mut follower, "other", before[1]);
    assert_eq!(ports(&follower), [unused, before[1]]);
    observe_port(&mut follower, "hello", 8080);
    assert_eq!(ports(&follower), [unused, before[1]], "a user wrote that port");
    assert_eq!(follower.cluster.allocated.ports, BTreeSet::from([before[1], unused]));
}

/// Users of a namespace can write the annotation. The activators' other ports are not for services.
#[test]
fn a_port_outside_of_the_range_is_not_adopted() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let placeholder = (ResourceKind::Service, name("hello"));
    let object = api_server.objects.get_mut(&placeholder).expect("a placeholder");
    object["metadata"]["annotations"][key::ACTIVATOR_PORT_ANNOTATION] = json!("8080");
    let mut replica = api_server.start_replica();
    replica.step(api_server.now, ControllerEvent::LeadershipChanged(true));
    let port = table(&replica).services[&name("hello")].activator_port.get();
    let [first, last] = abi::ACTIVATOR_PORTS;
    assert!((first..=last).contains(&port), "{port}");
}

#[test]
fn a_service_gets_all_objects_that_knative_creates() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let made: BTreeSet<String> = api_server
        .objects
        .keys()
        .filter(|(_, it)| it.namespace == NAMESPACE)
        .map(|(resource, it)| format!("{resource}/{}", it.name))
        .collect();
    let expected = [
        "configurations.serving.knative.dev/hello",
        "deployments.apps/hello-00001-deployment",
        "endpointslices.discovery.k8s.io/hello",
        "endpointslices.discovery.k8s.io/hello-00001",
        "images.caching.internal.knative.dev/hello-00001-cache-user-container",
        "podautoscalers.autoscaling.internal.knative.dev/hello-00001",
        "revisions.serving.knative.dev/hello-00001",
        "routes.serving.knative.dev/hello",
        "serverlessservices.networking.internal.knative.dev/hello-00001",
        "services.serving.knative.dev/hello",
        "services/hello",
        "services/hello-00001",
        "services/hello-00001-private",
    ];
    assert_eq!(made, expected.map(str::to_owned).into());
    assert_eq!(api_server.condition(ResourceKind::KnativeService, "hello", "Ready"), "True : ");
    let status = &api_server.object(ResourceKind::KnativeService, "hello")["status"];
    assert_eq!(status["latestReadyRevisionName"], "hello-00001");
    assert_eq!(status["address"]["url"], "http://hello.default.svc.cluster.local");
    assert_eq!(
        api_server.object(ResourceKind::Deployment, "hello-00001-deployment")["spec"]["replicas"],
        0
    );
    let service = &api_server.table().services[&name("hello")];
    assert_eq!(service.addresses.len(), 2, "of both families");
    let slice = api_server.object(ResourceKind::EndpointSlice, "hello");
    assert_eq!(slice["ports"][0]["port"], service.activator_port.get());
    assert_eq!(slice["endpoints"][0]["addresses"][0], "10.1.0.9");
}

#[test]
fn a_decision_scales_the_deployment_and_a_listener_makes_a_route() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.decide("hello-00001", 2);
    assert_eq!(
        api_server.object(ResourceKind::Deployment, "hello-00001-deployment")["spec"]["replicas"],
        2
    );
    api_server.report_all_ready();
    let pods: Vec<_> =
        api_server.table().pods.into_values().map(|it| (it.phase, it.node)).collect();
    assert_eq!(pods, vec![(common::wire::RoutingPhase::Ready, "n1".to_owned()); 2]);
    assert_eq!(
        api_server.object(ResourceKind::ServerlessService, "hello-00001")["spec"]["mode"],
        "Serve"
    );
    let status = &api_server.object(ResourceKind::PodAutoscaler, "hello-00001")["status"];
    assert_eq!((&status["desiredScale"], &status["actualScale"]), (&json!(2), &json!(2)));
    api_server.decide("hello-00001", 0);
    let left = |api_server: &FakeApiServer| {
        api_server.names(ResourceKind::Pod).iter().filter(|it| it.namespace == NAMESPACE).count()
    };
    assert_eq!(left(&api_server), 2, "they drain first");
    api_server.now = api_server.now.plus_ms(301_000);
    api_server.step(ControllerEvent::Tick);
    assert_eq!(left(&api_server), 0);
    assert_eq!(api_server.condition(ResourceKind::Revision, "hello-00001", "Ready"), "True : ");
    assert!(
        api_server
            .condition(ResourceKind::Revision, "hello-00001", "Active")
            .starts_with("False NoTraffic")
    );
    assert_eq!(
        api_server.object(ResourceKind::ServerlessService, "hello-00001")["spec"]["mode"],
        "Proxy"
    );
}

#[test]
fn traffic_moves_when_the_new_revision_is_ready() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 1, Value::Null);
    assert!(
        api_server.condition(ResourceKind::KnativeService, "hello", "Ready").starts_with("Unknown")
    );
    api_server.report_all_ready();
    assert_eq!(api_server.condition(ResourceKind::KnativeService, "hello", "Ready"), "True : ");
    api_server.apply_service("hello", "hello:v2", 1, Value::Null);
    let target = |api_server: &FakeApiServer| {
        api_server.table().services[&name("hello")].targets[0].revision.name.clone()
    };
    assert_eq!(target(&api_server), "hello-00001");
    assert_eq!(
        api_server.object(ResourceKind::Configuration, "hello")["metadata"]["generation"],
        2
    );
    api_server.report_all_ready();
    assert_eq!(target(&api_server), "hello-00002");
    let state = |api_server: &FakeApiServer, it: &str| {
        api_server.object(ResourceKind::Revision, it)["metadata"]["labels"][key::ROUTING_STATE]
            .clone()
    };
    assert_eq!(
        [state(&api_server, "hello-00001"), state(&api_server, "hello-00002")],
        ["reserve", "active"]
    );
    assert_eq!(
        api_server.object(ResourceKind::PodAutoscaler, "hello-00001")["spec"]["reachability"],
        "Unreachable"
    );
}

#[test]
fn a_configuration_and_a_route_work_without_a_service() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_as_user(
        ResourceKind::Configuration,
        "code",
        json!({"template": template("hello:v1", 1)}),
    );
    api_server.report_all_ready();
    assert_eq!(api_server.condition(ResourceKind::Configuration, "code", "Ready"), "True : ");
    assert_eq!(
        api_server.object(ResourceKind::Revision, "code-00001")["metadata"]["labels"]
            [key::ROUTING_STATE],
        "pending"
    );
    api_server.apply_as_user(
        ResourceKind::Route,
        "way",
        json!({"traffic": [{"configurationName": "code", "percent": 100}]}),
    );
    assert_eq!(api_server.condition(ResourceKind::Route, "way", "Ready"), "True : ");
    assert_eq!(
        api_server.object(ResourceKind::Revision, "code-00001")["metadata"]["labels"]
            [key::ROUTING_STATE],
        "active"
    );
    let targets = &api_server.table().services[&name("way")].targets;
    assert_eq!(targets[0].revision, name("code-00001"));
    api_server.apply_as_user(
        ResourceKind::Configuration,
        "code",
        json!({"template": template("hello:v2", 1)}),
    );
    api_server.report_all_ready();
    let targets = &api_server.table().services[&name("way")].targets;
    assert_eq!(
        targets[0].revision,
        name("code-00002"),
        "a route follows the configuration it names"
    );
    api_server.delete_as_user(ResourceKind::Route, "way");
    assert!(api_server.table().services.is_empty());
    api_server.apply_as_user(
        ResourceKind::Route,
        "lost",
        json!({"traffic": [{"configurationName": "none", "percent": 100}]}),
    );
    assert_eq!(
        api_server.condition(ResourceKind::Route, "lost", "AllTrafficAssigned"),
        "False ConfigurationMissing: Configuration \"none\" referenced in traffic not found."
    );
}

#[test]
fn a_service_leaves_a_configuration_that_it_does_not_own() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_as_user(
        ResourceKind::Configuration,
        "hello",
        json!({"template": template("other:v1", 0)}),
    );
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    assert_eq!(
        api_server.condition(ResourceKind::KnativeService, "hello", "ConfigurationsReady"),
        "False NotOwned: There is an existing Configuration \"hello\" that we do not own."
    );
    let image = &api_server.object(ResourceKind::Configuration, "hello")["spec"]["template"]["spec"]
        ["containers"][0]["image"];
    assert_eq!(image, "other:v1");
}

/// A client that waits for a Service reads its status right after it changed the spec.
#[test]
fn a_service_is_not_ready_before_its_children_follow_its_spec() {
    let traffic = |tag: &str| json!([{"latestRevision": true, "percent": 100, "tag": tag}]);
    let desired_condition = |api_server: &FakeApiServer, condition_type: &str| {
        let key =
            ObjectPartKey::new(ResourceKind::KnativeService, ObjectPart::Status, name("hello"));
        let DesiredState::Body(status) = desired_state(api_server.machine.cluster(), &key) else {
            panic!("it has a status")
        };
        let all = status["conditions"].as_array().cloned().unwrap_or_default();
        let it =
            all.into_iter().find(|it| it["type"] == condition_type).expect("it has the condition");
        format!("{} {} {}", status["observedGeneration"], it["status"], it["reason"])
    };
    for (behind, spec) in [
        (
            "ConfigurationsReady",
            json!({"template": template("hello:v2", 0), "traffic": traffic("a")}),
        ),
        ("RoutesReady", json!({"template": template("hello:v1", 0), "traffic": traffic("b")})),
    ] {
        let mut api_server = FakeApiServer::new();
        api_server.apply_service("hello", "hello:v1", 0, traffic("a"));
        assert_eq!(desired_condition(&api_server, "Ready"), r#"1 "True" null"#);
        let mut service = api_server.object(ResourceKind::KnativeService, "hello").clone();
        service["metadata"]["generation"] = json!(2);
        service["spec"] = spec;
        // The machine has observed the new spec, and nothing has been written yet.
        let observed = Some(Box::new(service));
        api_server.machine.step(
            api_server.now,
            ControllerEvent::ObjectObserved {
                resource: ResourceKind::KnativeService,
                name: name("hello"),
                object: observed,
            },
        );
        for condition_type in [behind, "Ready"] {
            assert_eq!(
                desired_condition(&api_server, condition_type),
                r#"2 "Unknown" "OutOfDate""#,
                "{behind}: {condition_type}"
            );
        }
    }
}

/// Objects of different kinds are observed in any order.
#[test]
fn a_route_that_is_seen_before_its_services_configuration_waits_for_it() {
    let mut complete = FakeApiServer::new();
    complete.apply_service("hello", "hello:v1", 0, Value::Null);
    let mut api_server = FakeApiServer::new();
    for resource in [ResourceKind::KnativeService, ResourceKind::Route] {
        let mut object = complete.object(resource, "hello").clone();
        object["status"] = Value::Null;
        api_server.objects.insert((resource, name("hello")), object.clone());
        let observed = ControllerEvent::ObjectObserved {
            resource,
            name: name("hello"),
            object: Some(Box::new(object)),
        };
        api_server.machine.step(api_server.now, observed);
    }
    let cluster = api_server.machine.cluster();
    let key = ObjectPartKey::new(ResourceKind::Route, ObjectPart::Status, name("hello"));
    let DesiredState::Body(status) = desired_state(cluster, &key) else {
        panic!("it has a status")
    };
    let all = status["conditions"].as_array().cloned().unwrap_or_default();
    let assigned = all.iter().find(|it| it["type"] == "AllTrafficAssigned").expect("a condition");
    assert_eq!(
        (&assigned["status"], &assigned["reason"]),
        (&json!("Unknown"), &json!("RevisionMissing"))
    );
}

/// An addition of another client, such as a policy engine, does not make the Configuration an old one.
#[test]
fn a_service_is_ready_although_another_webhook_adds_to_its_configuration() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let mut object = api_server.object(ResourceKind::Configuration, "hello").clone();
    object["spec"]["template"]["metadata"]["annotations"]["policy.example/checked"] = json!("yes");
    object["metadata"]["generation"] = json!(2);
    api_server.objects.insert((ResourceKind::Configuration, name("hello")), object.clone());
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Configuration,
        name: name("hello"),
        object: Some(Box::new(object)),
    });
    assert_eq!(api_server.condition(ResourceKind::KnativeService, "hello", "Ready"), "True : ");
}

#[test]
fn a_route_of_a_service_names_that_services_revisions_only() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("one", "hello:v1", 0, Value::Null);
    api_server.apply_service(
        "two",
        "hello:v1",
        0,
        json!([{"revisionName": "one-00001", "percent": 100, "latestRevision": false}]),
    );
    assert!(
        api_server
            .condition(ResourceKind::Route, "two", "AllTrafficAssigned")
            .starts_with("False RevisionNotOwned")
    );
}

#[test]
fn a_tag_has_a_service_until_the_tag_is_removed() {
    let mut api_server = FakeApiServer::new();
    let traffic = json!([{"latestRevision": true, "percent": 100, "tag": "now"}]);
    api_server.apply_service("hello", "hello:v1", 0, traffic);
    assert_eq!(api_server.condition(ResourceKind::KnativeService, "hello", "Ready"), "True : ");
    assert!(api_server.objects.contains_key(&(ResourceKind::Service, name("now-hello"))));
    assert!(api_server.objects.contains_key(&(ResourceKind::EndpointSlice, name("now-hello"))));
    api_server.apply_service(
        "hello",
        "hello:v1",
        0,
        json!([{"latestRevision": true, "percent": 100}]),
    );
    assert!(!api_server.objects.contains_key(&(ResourceKind::Service, name("now-hello"))));
    assert!(!api_server.objects.contains_key(&(ResourceKind::EndpointSlice, name("now-hello"))));
    assert_eq!(api_server.table().services.len(), 1);
}

/// Both replicas have one name more than there are ports.
#[test]
fn a_route_without_a_port_reports_it_and_gets_the_first_free_one() {
    let mut api_server = FakeApiServer::new();
    let [first, last] = abi::ACTIVATOR_PORTS;
    for machine in
        [Some(&mut api_server.machine), api_server.other_replica.as_mut()].into_iter().flatten()
    {
        machine.cluster.allocated.ports.extend(first + 1..=last);
    }
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.apply_service("after", "hello:v1", 0, Value::Null);
    let ingress = |api_server: &FakeApiServer| {
        api_server.condition(ResourceKind::Route, "after", "IngressReady")
    };
    assert!(ingress(&api_server).starts_with("False NoAddressLeft"), "{}", ingress(&api_server));
    api_server.delete_as_user(ResourceKind::KnativeService, "hello");
    assert_eq!(ingress(&api_server), "True : ");
    assert_eq!(api_server.table().services[&name("after")].activator_port.get(), first);
}

#[test]
fn nothing_is_left_of_a_deleted_service() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 1, Value::Null);
    api_server.report_all_ready();
    api_server.delete_as_user(ResourceKind::KnativeService, "hello");
    assert_eq!(api_server.objects.len(), 1, "the activator");
    let cluster = api_server.machine.cluster();
    assert!(
        cluster.apps.is_empty()
            && cluster.allocated.ports.is_empty()
            && cluster.pods.statuses.is_empty(),
        "{:?}",
        cluster.apps
    );
    assert_eq!((api_server.table().services.len(), api_server.table().pods.len()), (0, 0));
}

/// Reports a pod as ready, as an agent on `node` does; returns the number of refused reports.
fn report_as_node(api_server: &mut FakeApiServer, node: &str, uid: &str) -> u64 {
    let agent =
        ComponentReplica { role: ClientComponent::Agent, name: node.into(), node: node.into() };
    let observation = PodObservation { uid: uid.into(), ..ready_observation() };
    api_server.other_replica = None;
    api_server
        .machine
        .step(
            api_server.now,
            ControllerEvent::PodReported { reporter: agent, stream: 1, observation },
        )
        .refused_reports
}

fn pods(api_server: &FakeApiServer) -> Vec<(NamespacedName, String)> {
    let all = api_server
        .objects
        .iter()
        .filter(|((resource, it), _)| *resource == ResourceKind::Pod && it.namespace == NAMESPACE);
    let uid = |it: &Value| it["metadata"]["uid"].as_str().expect("a uid").to_owned();
    all.map(|((_, name), it)| (name.clone(), uid(it))).collect()
}

fn phases(api_server: &FakeApiServer) -> Vec<common::wire::RoutingPhase> {
    api_server.table().pods.into_values().map(|it| it.phase).collect()
}

use common::wire::RoutingPhase::{Draining, Ready, Starting};

#[test]
fn reports_of_pods_on_other_nodes_are_refused() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.decide("hello-00001", 1);
    let (_, uid) = pods(&api_server).remove(0);
    assert_eq!(
        report_as_node(&mut api_server, "n2", &uid),
        1,
        "it would attract the pod's requests"
    );
    assert_eq!(phases(&api_server), [Starting]);
    assert_eq!(report_as_node(&mut api_server, "n1", &uid), 0);
    assert_eq!(phases(&api_server), [Ready]);
    let attacker =
        ComponentReplica { role: ClientComponent::Agent, name: "n2".into(), node: "n2".into() };
    let now = api_server.now;
    let withdrawal =
        ControllerEvent::PodReportWithdrawn { reporter: attacker.clone(), stream: 1, pod_uid: uid };
    assert_eq!(api_server.machine.step(now, withdrawal).refused_reports, 1);
    api_server.step(ControllerEvent::ReportStreamBegin { reporter: attacker.clone(), stream: 9 });
    api_server.step(ControllerEvent::ReportStreamSynced { reporter: attacker, stream: 9 });
    assert_eq!(phases(&api_server), [Ready]);
}

#[test]
fn a_report_before_its_pod_is_bound_counts_once_it_is() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.decide("hello-00001", 1);
    let (name, uid) = pods(&api_server).remove(0);
    let object = api_server.objects[&(ResourceKind::Pod, name.clone())].clone();
    let observe = |object: &Value| ControllerEvent::ObjectObserved {
        resource: ResourceKind::Pod,
        name: name.clone(),
        object: Some(Box::new(object.clone())),
    };
    let mut unbound = object.clone();
    unbound["spec"] = json!({});
    api_server.step(observe(&unbound));
    assert_eq!(report_as_node(&mut api_server, "n1", &uid), 0);
    assert_eq!(report_as_node(&mut api_server, "n2", &uid), 0, "its node is not known yet");
    assert_eq!(phases(&api_server), [Starting]);
    let now = api_server.now;
    assert_eq!(
        api_server.machine.step(now, observe(&object)).refused_reports,
        1,
        "the report from another node is refused"
    );
    assert_eq!(phases(&api_server), [Ready]);
}

#[test]
fn only_pods_of_the_system_namespace_are_components() {
    let mut api_server = FakeApiServer::new();
    let pod = |part: &str, at: &str| {
        json!({
            "metadata": {"name": part, "namespace": at, "uid": part, "labels": {"app": part}},
            "spec": {"nodeName": "n1"},
            "status": {"podIP": "10.1.0.66", "conditions": [{"type": "Ready", "status": "True"}]},
        })
    };
    let mut step = |part: &str, at: &str, exists: bool| {
        let object = exists.then(|| Box::new(pod(part, at)));
        api_server.step(ControllerEvent::ObjectObserved {
            resource: ResourceKind::Pod,
            name: NamespacedName::new(at, part),
            object,
        });
        let table = api_server.table();
        let replicas = table.replicas.values().map(|it| it.members[0].address.to_string());
        (table.activators.len(), replicas.collect::<Vec<_>>())
    };
    for part in ["activator", "controller", "autoscaler", "rouse-agent"] {
        assert_eq!(step(part, NAMESPACE, true), (1, vec![]), "{part} of a user");
    }
    assert_eq!(step("controller", "knative-serving", true), (1, vec!["10.1.0.66:7100".into()]));
    assert_eq!(step("autoscaler", "knative-serving", true).1, ["10.1.0.66:7100", "10.1.0.66:7110"]);
    assert_eq!(step("controller", "knative-serving", false).1, ["10.1.0.66:7110"]);
}

#[test]
fn a_non_leader_learns_from_the_annotation_that_a_pod_drains() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.decide("hello-00001", 1);
    api_server.report_all_ready();
    let other = |api_server: &FakeApiServer| {
        table(&api_server.start_replica()).pods.into_values().map(|it| it.phase).collect::<Vec<_>>()
    };
    api_server.decide("hello-00001", 0);
    assert_eq!((phases(&api_server), other(&api_server)), (vec![Draining], vec![Draining]));
    api_server.decide("hello-00001", 1);
    assert_eq!((phases(&api_server), other(&api_server)), (vec![Ready], vec![Starting]));
}

#[test]
fn a_new_leader_drains_for_the_whole_grace_period_whatever_the_annotated_time() {
    for clock_offset_ms in [-86_400_000, 86_400_000] {
        let mut api_server = FakeApiServer::new();
        api_server.apply_service("hello", "hello:v1", 0, Value::Null);
        api_server.decide("hello-00001", 1);
        api_server.report_all_ready();
        api_server.decide("hello-00001", 0);
        let new_time = api_server.now.0.checked_add_signed(clock_offset_ms).expect("a time");
        api_server.now = UnixMillis(new_time);
        api_server.machine = api_server.start_replica();
        api_server.step(ControllerEvent::LeadershipChanged(true));
        assert_eq!(phases(&api_server), [Draining], "{clock_offset_ms}");
        api_server.now = api_server.now.plus_ms(301_000);
        api_server.step(ControllerEvent::Tick);
        assert_eq!(phases(&api_server), [], "{clock_offset_ms}");
    }
}

#[test]
fn a_start_is_waited_for_by_the_controllers_clock_and_only_once() {
    let ready = |it: &FakeApiServer| it.condition(ResourceKind::Revision, "hello-00001", "Ready");
    let start_ms = FakeApiServer::new().now.0;
    for stamps in [0, start_ms, start_ms + 86_400_000] {
        let mut api_server = FakeApiServer::new();
        api_server.api_server_clock = Some(UnixMillis(stamps));
        api_server.apply_service("hello", "hello:v1", 1, Value::Null);
        assert!(
            ready(&api_server).starts_with("Unknown Deploying"),
            "{stamps} {}",
            ready(&api_server)
        );
        api_server.now = api_server.now.plus_ms(4999);
        api_server.step(ControllerEvent::Tick);
        assert!(
            ready(&api_server).starts_with("Unknown Deploying"),
            "{stamps} {}",
            ready(&api_server)
        );
        api_server.now = api_server.now.plus_ms(1);
        api_server.step(ControllerEvent::Tick);
        let slow = "Unknown ContainerNotReady: The container runs but nothing listens on port 8080";
        assert!(ready(&api_server).starts_with(slow), "{stamps} {}", ready(&api_server));
        api_server.machine = api_server.start_replica();
        api_server.step(ControllerEvent::LeadershipChanged(true));
        assert!(ready(&api_server).starts_with(slow), "{stamps} {}", ready(&api_server));
        api_server.now = api_server.now.plus_ms(600_000);
        api_server.step(ControllerEvent::Tick);
        let overdue = "False ProgressDeadlineExceeded: Initial scale was never achieved: The container runs but nothing \
                    listens on port 8080: let it listen on $PORT (8080) or set containerPort to the port it uses";
        assert_eq!(ready(&api_server), overdue, "{stamps}");
        api_server.machine = api_server.start_replica();
        api_server.step(ControllerEvent::LeadershipChanged(true));
        assert_eq!(ready(&api_server), overdue, "{stamps}");
    }
}

/// Replicas plan a Revision for the first time at different moments, so no clock but the leader's may decide.
#[test]
fn an_overdue_revision_is_unreachable_on_every_replica_at_once() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 1, Value::Null);
    api_server.now = api_server.now.plus_ms(500_000);
    api_server.other_replica = Some(api_server.start_replica());
    let reachable = |it: &FakeApiServer| it.table().revisions[&name("hello-00001")].reachable;
    assert!(reachable(&api_server));
    api_server.now = api_server.now.plus_ms(100_000);
    // Each step compares the tables of both replicas.
    api_server.step(ControllerEvent::Tick);
    assert!(!reachable(&api_server));
    let started_now = api_server.start_replica();
    assert_eq!(differences(&table(&started_now), &api_server.table()), [""; 0]);
    api_server.report_all_ready();
    assert!(reachable(&api_server));
}

#[test]
fn a_pod_that_a_user_deletes_drains_until_it_is_gone() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.decide("hello-00001", 1);
    api_server.report_all_ready();
    let (name, _) = pods(&api_server).remove(0);
    let mut object = api_server.objects[&(ResourceKind::Pod, name.clone())].clone();
    let confirmed = |api_server: &FakeApiServer| {
        api_server.table().pods.into_values().any(|it| it.kubelet_ready)
    };
    assert!(!confirmed(&api_server), "the kubelet has not said so");
    object["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Pod,
        name: name.clone(),
        object: Some(Box::new(object.clone())),
    });
    assert!(confirmed(&api_server));
    object["metadata"]["deletionTimestamp"] = json!(api_server.now.rfc3339());
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Pod,
        name: name.clone(),
        object: Some(Box::new(object)),
    });
    assert_eq!(phases(&api_server), [Draining]);
    api_server.now = api_server.now.plus_ms(400_000);
    api_server.step(ControllerEvent::Tick);
    assert_eq!(phases(&api_server), [Draining], "its end is the kubelet's to say");
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Pod,
        name,
        object: None,
    });
    assert_eq!(phases(&api_server), []);
}

#[test]
fn a_pod_whose_node_is_lost_before_its_kubelet_called_it_ready_gets_no_traffic() {
    let mut api_server = FakeApiServer::new();
    let node = |api_server: &mut FakeApiServer, ready: &str| {
        let object = json!({"status": {"conditions": [{"type": "Ready", "status": ready}]}});
        api_server.step(ControllerEvent::ObjectObserved {
            resource: ResourceKind::Node,
            name: NamespacedName::new("", "n1"),
            object: Some(Box::new(object)),
        });
    };
    node(&mut api_server, "True");
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.decide("hello-00001", 1);
    api_server.report_all_ready();
    assert_eq!(phases(&api_server), [Ready]);
    node(&mut api_server, "Unknown");
    assert_eq!(phases(&api_server), [Starting]);
    node(&mut api_server, "True");
    assert_eq!(phases(&api_server), [Ready], "its agent's word is as good as before");
}

#[test]
fn a_pod_that_replaces_one_that_kubernetes_ends_serves_in_its_place() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.decide("hello-00001", 1);
    api_server.report_all_ready();
    let (old, _) = pods(&api_server).remove(0);
    // As at a rollout, or after the Deployment was deleted and made again: first there is one pod more than desired.
    let old_pod = api_server.objects[&(ResourceKind::Pod, old.clone())].clone();
    let new_name = NamespacedName::new(NAMESPACE, format!("{}-new", old.name));
    let mut new = old_pod.clone();
    new["metadata"]["name"] = json!(new_name.name.as_str());
    new["metadata"]["uid"] = json!("00000000-0000-4000-9000-00000000ffff");
    new["status"]["podIP"] = json!("10.1.1.251");
    api_server.objects.insert((ResourceKind::Pod, new_name.clone()), new.clone());
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Pod,
        name: new_name,
        object: Some(Box::new(new)),
    });
    let mut ended = old_pod;
    ended["metadata"]["deletionTimestamp"] = json!(api_server.now.rfc3339());
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Pod,
        name: old.clone(),
        object: Some(Box::new(ended)),
    });
    assert_eq!(phases(&api_server), [Draining, Starting]);
    api_server.report_all_ready();
    api_server.objects.remove(&(ResourceKind::Pod, old.clone()));
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Pod,
        name: old,
        object: None,
    });
    assert_eq!(phases(&api_server), [Ready]);
}

#[test]
fn a_pod_that_is_one_too_many_is_not_forgotten_while_kubernetes_keeps_it() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.decide("hello-00001", 1);
    let (old, uid) = pods(&api_server).remove(0);
    // Its Deployment's controller is slow here, and the pod has lost its annotations.
    api_server.other_replica = None;
    let kept = api_server.objects[&(ResourceKind::Pod, old.clone())].clone();
    api_server.decide("hello-00001", 0);
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Pod,
        name: old,
        object: Some(Box::new(kept)),
    });
    api_server.now = api_server.now.plus_ms(400_000);
    api_server.step(ControllerEvent::Tick);
    assert!(api_server.table().pods.contains_key(&uid));
}

#[test]
fn deleted_children_of_a_present_owner_are_created_again() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 1, Value::Null);
    api_server.report_all_ready();
    let have = |api_server: &FakeApiServer| {
        let kept = api_server.objects.keys().filter(|(resource, _)| *resource != ResourceKind::Pod);
        kept.cloned().collect::<Vec<_>>()
    };
    let before = have(&api_server);
    for (resource, object_name) in [
        (ResourceKind::Service, "hello-00001-private"),
        (ResourceKind::Service, "hello"),
        (ResourceKind::Configuration, "hello"),
    ] {
        api_server.delete_as_user(resource, object_name);
        // The writer checks each deleted object.
        for event in
            api_server.write(&ObjectPartKey::new(resource, ObjectPart::Object, name(object_name)))
        {
            api_server.step(event);
        }
        assert_eq!(have(&api_server), before, "{object_name}");
    }
}

#[test]
fn no_object_is_created_without_its_owner() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 1, Value::Null);
    api_server.report_all_ready();
    // The garbage collector deletes owners first, then the objects they own.
    for (resource, object_name) in [
        (ResourceKind::KnativeService, "hello"),
        (ResourceKind::Image, "hello-00001-cache-user-container"),
        (ResourceKind::Deployment, "hello-00001-deployment"),
        (ResourceKind::Service, "hello"),
        (ResourceKind::Configuration, "hello"),
    ] {
        api_server.objects.remove(&(resource, name(object_name)));
        api_server.step(ControllerEvent::ObjectObserved {
            resource,
            name: name(object_name),
            object: None,
        });
        let written =
            api_server.write(&ObjectPartKey::new(resource, ObjectPart::Object, name(object_name)));
        assert_eq!(written, [], "{object_name}");
    }
}

#[test]
fn a_domain_is_served_once_its_namespace_has_the_claim() {
    let mut api_server = FakeApiServer::new();
    let domain = "www.shop.test";
    let domains = |api_server: &FakeApiServer, object_name: &str| {
        let rules = api_server.table().services[&name(object_name)]
            .gateway_rules
            .clone()
            .unwrap_or_default();
        rules.mapped_domains.into_iter().map(|it| it.host).collect::<Vec<_>>()
    };
    let condition = |api_server: &FakeApiServer, condition_type: &str| {
        api_server.condition(ResourceKind::DomainMapping, domain, condition_type)
    };
    api_server.map_domain(domain, "Service", "hello");
    assert_eq!(
        condition(&api_server, "ReferenceResolved"),
        "False ResolveFailed: services.serving.knative.dev \"hello\" not found"
    );
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    assert_eq!(condition(&api_server, "ReferenceResolved"), "True : ", "it follows the service");
    assert_eq!(
        condition(&api_server, "DomainClaimed"),
        "False DomainClaimFailed: no ClusterDomainClaim found for domain \"www.shop.test\""
    );
    assert_eq!(domains(&api_server, "hello"), [""; 0]);
    api_server.claim_domain(domain, "other-namespace");
    assert!(condition(&api_server, "Ready").starts_with("False DomainAlreadyClaimed"));
    assert_eq!(domains(&api_server, "hello"), [""; 0]);
    api_server.claim_domain(domain, NAMESPACE);
    assert_eq!(
        (condition(&api_server, "Ready"), domains(&api_server, "hello")),
        ("True : ".into(), vec![domain.into()])
    );
    let status = &api_server.object(ResourceKind::DomainMapping, domain)["status"];
    assert_eq!(
        (&status["url"], &status["address"]["url"]),
        (&json!("http://www.shop.test"), &json!("http://www.shop.test"))
    );
    // The target is now the Service of a tag.
    let traffic = json!([{"latestRevision": true, "percent": 100, "tag": "now"}]);
    api_server.apply_service("hello", "hello:v1", 0, traffic);
    api_server.map_domain(domain, "CoreService", "now-hello");
    assert_eq!(
        (domains(&api_server, "hello"), domains(&api_server, "now-hello")),
        (vec![], vec![domain.into()])
    );
    api_server.delete_as_user(ResourceKind::KnativeService, "hello");
    assert!(condition(&api_server, "Ready").starts_with("False ResolveFailed"));
    api_server.delete_as_user(ResourceKind::DomainMapping, domain);
    assert!(
        api_server
            .objects
            .contains_key(&(ResourceKind::ClusterDomainClaim, NamespacedName::new("", domain)))
    );
    let cluster = api_server.machine.cluster();
    assert!(cluster.domains.mappings.is_empty() && cluster.domains.mappings_by_target.is_empty());
}

#[test]
fn created_domain_claims_exist_as_long_as_their_mappings() {
    let mut api_server = FakeApiServer::new();
    api_server
        .set_config_map("config-network", json!({"autocreate-cluster-domain-claims": "true"}));
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let domain = "www.shop.test";
    let claim = |api_server: &FakeApiServer| {
        let claim_key = (ResourceKind::ClusterDomainClaim, NamespacedName::new("", domain));
        api_server.objects.get(&claim_key).map(|it| it["spec"]["namespace"].clone())
    };
    api_server.map_domain(domain, "Service", "hello");
    assert_eq!(claim(&api_server), Some(json!(NAMESPACE)));
    assert_eq!(api_server.condition(ResourceKind::DomainMapping, domain, "Ready"), "True : ");
    api_server.delete_as_user(ResourceKind::DomainMapping, domain);
    assert_eq!(claim(&api_server), None);
}

#[test]
fn a_header_chooses_among_tags_where_the_feature_is_on() {
    let mut api_server = FakeApiServer::new();
    let traffic = json!([
        {"latestRevision": true, "percent": 100, "tag": "now"}, {"latestRevision": true, "percent": 0, "tag": "next"},
    ]);
    api_server.apply_service("hello", "hello:v1", 0, traffic);
    assert_eq!(api_server.table().services[&name("hello")].gateway_rules, None);
    api_server.set_config_map("config-features", json!({"tag-header-based-routing": "enabled"}));
    let tags = |api_server: &FakeApiServer, object_name: &str| {
        let service = api_server.table().services[&name(object_name)].clone();
        assert_eq!(
            service.connection_path,
            ConnectionPath::Activator,
            "an activator must read the header"
        );
        service.gateway_rules.and_then(|it| it.tag_routing)
    };
    let all = ["next", "now"]
        .map(|it| RouteTag { name: it.into(), service: name(&format!("{it}-hello")) });
    assert_eq!(tags(&api_server, "hello"), Some(TagRouting::ChooseTag(all.into())));
    assert_eq!(tags(&api_server, "next-hello"), Some(TagRouting::ServeTag("next".into())));
}

#[test]
fn a_visibility_label_on_the_service_of_a_tag_hides_the_tag() {
    let mut api_server = FakeApiServer::new();
    let traffic = json!([{"latestRevision": true, "percent": 100, "tag": "now"}]);
    api_server.apply_service("hello", "hello:v1", 0, traffic);
    let hosts = |api_server: &FakeApiServer, object_name: &str| {
        api_server.table().services[&name(object_name)].hosts.clone()
    };
    assert_eq!(hosts(&api_server, "now-hello"), ["now-hello.default.localhost"]);
    let mut object = api_server.object(ResourceKind::Service, "now-hello").clone();
    object["metadata"]["labels"][key::VISIBILITY] = json!("cluster-local");
    let object_key = (ResourceKind::Service, name("now-hello"));
    api_server.objects.insert(object_key.clone(), object.clone());
    api_server.step(ControllerEvent::ObjectObserved {
        resource: object_key.0,
        name: object_key.1,
        object: Some(Box::new(object)),
    });
    assert_eq!(hosts(&api_server, "now-hello"), [""; 0]);
    assert_eq!(hosts(&api_server, "hello"), ["hello.default.localhost"]);
    let url = &api_server.object(ResourceKind::Route, "hello")["status"]["traffic"][0]["url"];
    assert_eq!(url, "http://now-hello.default.svc.cluster.local");
}

#[test]
fn a_network_policy_limits_the_admitted_sources() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let sources = |api_server: &FakeApiServer| {
        let sources = api_server.table().revisions[&name("hello-00001")].allowed_sources.clone();
        sources.map(|it| it.addresses.iter().map(ToString::to_string).collect::<Vec<_>>())
    };
    assert_eq!(sources(&api_server), None, "all clients");
    let policy = json!({"spec": {
        "podSelector": {"matchLabels": {"serving.knative.dev/service": "hello"}},
        "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "web"}}}]}],
    }});
    let observed = |it| ControllerEvent::ObjectObserved {
        resource: ResourceKind::NetworkPolicy,
        name: name("web"),
        object: it,
    };
    api_server.step(observed(Some(Box::new(policy))));
    assert_eq!(sources(&api_server), None, "the clients that it admits are not known");
    api_server.step(ControllerEvent::ClientPodsListed);
    assert_eq!(sources(&api_server), Some(vec![]), "there is no such client");
    let pod = json!({
        "metadata": {"labels": {"app": "web"}},
        "status": {"podIPs": [{"ip": "10.244.0.9"}, {"ip": "fd00::9"}]},
    });
    api_server.step(ControllerEvent::ClientPodObserved {
        name: name("web-1"),
        pod: PolicyClientPod::from_pod(&pod),
    });
    assert_eq!(sources(&api_server), Some(vec!["10.244.0.9".into(), "fd00::9".into()]));
    api_server.step(ControllerEvent::ClientPodObserved { name: name("web-1"), pod: None });
    assert_eq!(sources(&api_server), Some(vec![]));
    api_server.step(observed(None));
    assert_eq!(sources(&api_server), None);
}

#[test]
fn a_gradual_rollout_continues_under_a_new_leader() {
    let mut api_server = FakeApiServer::new();
    api_server.set_config_map("config-network", json!({"rollout-duration": "10"}));
    api_server.apply_service("hello", "hello:v1", 1, Value::Null);
    api_server.report_all_ready();
    let shares = |machine: &ControllerStateMachine| {
        let targets = table(machine).services[&name("hello")].targets.clone();
        targets.into_iter().map(|it| (it.revision.name, it.percent)).collect::<BTreeMap<_, _>>()
    };
    let newest =
        |api_server: &FakeApiServer| shares(&api_server.machine).get("hello-00002").copied();
    assert_eq!(shares(&api_server.machine), [("hello-00001".into(), 100)].into());
    api_server.apply_service("hello", "hello:v2", 1, Value::Null);
    assert_eq!(newest(&api_server), None, "it is not ready yet");
    api_server.report_all_ready();
    assert_eq!(newest(&api_server), Some(1));
    let ingress = |it: &FakeApiServer| it.condition(ResourceKind::Route, "hello", "IngressReady");
    assert!(ingress(&api_server).starts_with("Unknown RolloutInProgress"));
    let mut shares_seen = Vec::new();
    for second in 1..=10 {
        api_server.now = api_server.now.plus_ms(1000);
        api_server.step(ControllerEvent::Tick);
        shares_seen.extend(newest(&api_server));
        if second == 4 {
            // Another replica has the same shares without any step of its own, and continues as leader.
            let mut other = machine().loading();
            let network = json!({"data": {"rollout-duration": "10"}});
            let config_name = NamespacedName::new("knative-serving", "config-network");
            other.step(
                api_server.now,
                ControllerEvent::ObjectObserved {
                    resource: ResourceKind::ConfigMap,
                    name: config_name,
                    object: Some(Box::new(network)),
                },
            );
            for event in observations(&api_server.objects, &[]) {
                other.step(api_server.now, event);
            }
            other.step(api_server.now, ControllerEvent::InitialListSynced);
            assert_eq!(shares(&other), shares(&api_server.machine));
            (api_server.machine, api_server.other_replica) = (other, None);
            api_server.step(ControllerEvent::LeadershipChanged(true));
            api_server.report_all_ready();
        }
    }
    assert_eq!(shares_seen, [1, 12, 23, 34, 45, 56, 67, 78, 89, 100]);
    assert_eq!(ingress(&api_server), "True : ");
    let state = |it: &str| {
        api_server.object(ResourceKind::Revision, it)["metadata"]["labels"][key::ROUTING_STATE]
            .clone()
    };
    assert_eq!(state("hello-00001"), "reserve");
    assert!(api_server.object(ResourceKind::Route, "hello")["status"].get("annotations").is_none());
}

#[test]
fn plain_http_is_redirected_if_config_network_says_so() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.set_config_map("config-network", json!({"http-protocol": "Redirected"}));
    let rules = api_server.table().services[&name("hello")].gateway_rules.clone();
    assert_eq!(
        rules,
        Some(Box::new(GatewayRules { redirects_to_https: true, ..GatewayRules::default() }))
    );
}

#[test]
fn no_deployment_is_created_before_digests_are_resolved() {
    let mut api_server = FakeApiServer::new();
    api_server.completes_digests = false;
    api_server.apply_service("hello", "registry.test/hello:v1", 1, Value::Null);
    let made = |api_server: &FakeApiServer| {
        let name = name("hello-00001-deployment");
        api_server.objects.get(&(ResourceKind::Deployment, name)).cloned()
    };
    let healthy = |it: &FakeApiServer| {
        it.condition(ResourceKind::Revision, "hello-00001", "ContainerHealthy")
    };
    assert_eq!(
        (made(&api_server), healthy(&api_server)),
        (None, "Unknown ResolvingDigests: ".into())
    );
    let revision = name("hello-00001");
    let request = api_server.machine.digest_request(&revision).expect("a request");
    assert_eq!(request.images, [("user-container".into(), "registry.test/hello:v1".into())]);
    let error = "Unable to fetch image \"registry.test/hello:v1\": it is not there";
    api_server.step(ControllerEvent::DigestsResolved {
        revision: revision.clone(),
        resolution: Err(error.into()),
    });
    assert_eq!(
        (made(&api_server), healthy(&api_server)),
        (None, format!("False ContainerMissing: {error}"))
    );
    assert!(
        api_server
            .condition(ResourceKind::KnativeService, "hello", "Ready")
            .starts_with("False RevisionFailed")
    );
    let digest = "registry.test/hello@sha256:abc";
    let digests = vec![("user-container".to_owned(), digest.to_owned())];
    api_server.step(ControllerEvent::DigestsResolved {
        revision: revision.clone(),
        resolution: Ok(digests),
    });
    let deployment = made(&api_server).expect("made");
    assert_eq!(deployment["spec"]["template"]["spec"]["containers"][0]["image"], digest);
    assert_eq!(healthy(&api_server), "Unknown Deploying: ");
    let status = &api_server.object(ResourceKind::Revision, "hello-00001")["status"];
    let named = json!([{"name": "user-container", "imageDigest": digest}]);
    assert_eq!(status["containerStatuses"], named);
    assert_eq!(api_server.machine.digest_request(&revision), None, "once is enough");
    // A tag that now points to another image is not resolved again.
    let mut other = api_server.start_replica();
    assert_eq!(
        other.step(api_server.now, ControllerEvent::LeadershipChanged(true)).revisions_to_resolve,
        []
    );
}

#[test]
fn digests_of_deleted_revisions_are_no_longer_requested() {
    let mut api_server = FakeApiServer::new();
    api_server.completes_digests = false;
    api_server.apply_service("hello", "registry.test/hello:v1", 1, Value::Null);
    let events = api_server.delete(ResourceKind::KnativeService, &name("hello"));
    let mut named = Vec::new();
    for event in events {
        named.extend(api_server.machine.step(api_server.now, event).revisions_to_resolve);
    }
    assert!(named.contains(&name("hello-00001")));
    assert_eq!(api_server.machine.digest_request(&name("hello-00001")), None);
}

/// Returns the observation of a ready activator's pod, which may be terminating.
fn activator(name: &str, is_terminating: bool) -> ControllerEvent {
    let mut pod = json!({
        "metadata": {"name": name, "namespace": "knative-serving", "uid": name, "labels": {"app": "activator"}},
        "spec": {"nodeName": "n1"},
        "status": {
            "podIP": format!("10.1.0.{}", name.len()), "conditions": [{"type": "Ready", "status": "True"}],
        },
    });
    if is_terminating {
        pod["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:00:00Z");
    }
    ControllerEvent::ObjectObserved {
        resource: ResourceKind::Pod,
        name: NamespacedName::new("knative-serving", name),
        object: Some(Box::new(pod)),
    }
}

#[test]
fn an_activator_that_leaves_is_named_until_no_slice_leads_to_it() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.apply_service("other", "hello:v1", 0, Value::Null);
    api_server.step(activator("activator-22", false));
    api_server.step(activator("activator-333", false));
    let named =
        |api_server: &FakeApiServer| api_server.table().activators.into_keys().collect::<Vec<_>>();
    let targets = |api_server: &FakeApiServer, object_name: &str| {
        let slice = api_server.object(ResourceKind::EndpointSlice, object_name);
        crate::read::observe::slice_target_names(slice)
            .iter()
            .map(|it| (*it).to_owned())
            .collect::<Vec<_>>()
    };
    let leaving = targets(&api_server, "hello").remove(0);
    let now = api_server.now;
    let keys = api_server.machine.step(now, activator(&leaving, true)).changed_keys;
    assert_eq!(named(&api_server).len(), 3, "clients without an agent still come");
    for (turn, key) in keys.into_iter().enumerate() {
        let slices = ["hello", "other", "hello-00001", "other-00001"];
        let leads = slices.iter().any(|it| targets(&api_server, it).contains(&leaving));
        assert_eq!(named(&api_server).contains(&leaving), leads, "after {turn}");
        for event in api_server.write(&key) {
            api_server.step(event);
        }
    }
    assert!(!named(&api_server).contains(&leaving));
    assert_eq!(targets(&api_server, "hello").len(), 2);
    // If the last activator drains, it stays in the slices, since no other one can replace it.
    let rest = named(&api_server);
    for it in &rest {
        api_server.step(activator(it, true));
    }
    assert!(!targets(&api_server, "hello").is_empty());
}

/// Activators of a removed installation may still have requests; they follow no controller of this one.
#[test]
fn slices_never_list_an_activator_that_ended_before_the_name_existed() {
    let mut api_server = FakeApiServer::new();
    for it in api_server.table().activators.into_keys() {
        api_server.step(activator(&it, true));
    }
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let slices = |api_server: &FakeApiServer| {
        let all =
            api_server.objects.iter().filter(|((kind, _), _)| *kind == ResourceKind::EndpointSlice);
        let all = all.flat_map(|(_, it)| {
            crate::read::observe::slice_target_names(it).into_iter().map(str::to_owned)
        });
        all.collect::<BTreeSet<String>>()
    };
    assert_eq!(slices(&api_server), BTreeSet::new());
    assert!(api_server.table().activators.is_empty(), "nor do agents lead there");
    api_server.step(activator("activator-22", false));
    assert_eq!(slices(&api_server), ["activator-22".to_owned()].into());
}

#[test]
fn an_agent_that_runs_but_does_not_report_is_waited_for_one_second() {
    let mut api_server = FakeApiServer::new();
    let agent = json!({
        "metadata": {"name": "agent-x", "namespace": "knative-serving", "uid": "x", "labels": {"app": "rouse-agent"}},
        "spec": {"nodeName": "n2"}, "status": {"podIP": "10.0.0.2"},
    });
    let agent_name = NamespacedName::new("knative-serving", "agent-x");
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Pod,
        name: agent_name,
        object: Some(Box::new(agent)),
    });
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.decide("hello-00001", 1);
    api_server.report_all_ready();
    let (_, uid) = pods(&api_server).remove(0);
    api_server.decide("hello-00001", 0);
    let on_n1 =
        ComponentReplica { role: ClientComponent::Agent, name: "n1".into(), node: "n1".into() };
    api_server.step(ControllerEvent::PodReported {
        reporter: on_n1,
        stream: 1,
        observation: PodObservation { uid, drained: true, ..ready_observation() },
    });
    assert_eq!(pods(&api_server).len(), 1);
    api_server.now = api_server.now.plus_ms(1000);
    api_server.step(ControllerEvent::Tick);
    assert_eq!(pods(&api_server).len(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Another replica, or the same one after a restart, observes the objects in any order. It has the same table, and
    /// nothing to write.
    #[test]
    fn a_new_leader_has_nothing_to_write(
        order in proptest::collection::vec(any::<usize>(), 0..40), split in any::<bool>(), scale in 0..3u32,
        leads_without_decisions in any::<bool>(),
    ) {
        let mut api_server = FakeApiServer::new();
        api_server.apply_service("hello", "hello:v1", 1, Value::Null);
        api_server.report_all_ready();
        api_server.apply_as_user(ResourceKind::Configuration, "code", json!({"template": template("hello:v1", 0)}));
        api_server.apply_as_user(ResourceKind::Route, "way", json!({"traffic": [{"configurationName": "code", "percent": 100}]}));
        if split {
            let traffic = json!([
                {"revisionName": "hello-00001", "latestRevision": false, "percent": 40, "tag": "old"},
                {"latestRevision": true, "percent": 60},
            ]);
            api_server.apply_service("hello", "hello:v2", 1, traffic);
            api_server.report_all_ready();
        }
        api_server.decide("hello-00001", scale);
        api_server.report_all_ready();
        let (before, table) = (api_server.objects.clone(), api_server.table());

        api_server.machine = machine().loading();
        for event in observations(&before, &order) {
            api_server.step(event);
        }
        api_server.step(ControllerEvent::InitialListSynced);
        api_server.report_all_ready();
        api_server.writes = 0;
        if leads_without_decisions {
            // A leader that has no decisions yet leaves the scale as it is.
            api_server.step(ControllerEvent::LeadershipChanged(true));
            prop_assert_eq!(api_server.writes, 0, "nothing is known that would have to be written");
        }
        api_server.decide("hello-00001", scale);
        // Draining is annotated on the pods, so that every replica has the same table.
        prop_assert_eq!(&api_server.table(), &table, "what it says");
        api_server.step(ControllerEvent::LeadershipChanged(true));
        let changed: Vec<_> = api_server.objects.iter().filter(|(at, it)| before.get(at) != Some(it)).collect();
        prop_assert!(api_server.writes == 0, "{:#?}", changed);
    }
}
