//! Preference of a first pod for the zone that its Revision was asked from: two nodes, each in a zone of its own.

use std::net::IpAddr;

use common::wire::{RevisionActivity, ScaleDecision, WakeOrigin};

use super::*;
use crate::decide::{
    pod_placement::{PodPlacement, place_pod},
    wake_zone::{is_order_known, preferred_zone},
};

/// Address of a client in the pod network of the node `n2`, which is in zone `b`.
const CLIENT_OF_N2: [u8; 4] = [10, 1, 1, 7];

/// Returns a ready node with the image of the service. Its pods have addresses in `10.1.NETWORK.0/24`.
fn node(zone: &str, network: u8) -> Value {
    let mut node = json!({
        "metadata": {"labels": {}},
        "spec": {"podCIDRs": [format!("10.1.{network}.0/24")]},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "images": [{"names": ["hello:v1"]}],
            "addresses": [
                {"type": "InternalIP", "address": format!("192.168.0.{network}")},
                {"type": "Hostname", "address": "node"},
            ],
        },
    });
    if !zone.is_empty() {
        node["metadata"]["labels"]["topology.kubernetes.io/zone"] = json!(zone);
    }
    node
}

fn put_node(api_server: &mut FakeApiServer, name: &str, node: Value) {
    let name = NamespacedName::new("", name);
    api_server.objects.insert((ResourceKind::Node, name.clone()), node.clone());
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Node,
        name,
        object: Some(Box::new(node)),
    });
}

/// Returns a service without pods. The activator is on `n1`, in zone `a`, with an address of its pod network.
fn sleeping_service() -> FakeApiServer {
    let mut api_server = FakeApiServer::new();
    put_node(&mut api_server, "n1", node("a", 0));
    put_node(&mut api_server, "n2", node("b", 1));
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server
}

/// Returns a pod of the service, as the ReplicaSet makes it.
fn new_pod(api_server: &FakeApiServer) -> Value {
    let deployment = api_server.object(ResourceKind::Deployment, "hello-00001-deployment");
    let labels = &deployment["spec"]["template"]["metadata"]["labels"];
    json!({
        "metadata": {"namespace": NAMESPACE, "labels": labels},
        "spec": {"containers": [{"name": "user-container", "image": "hello:v1"}]},
    })
}

/// Returns the decision on one pod, because a request of this client waits at the activator.
fn woken_by(client: Option<[u8; 4]>) -> ControllerEvent {
    let client = client.map(IpAddr::from);
    ControllerEvent::DecisionReceived(ScaleDecision {
        activity: RevisionActivity::Activating,
        wake_origin: Some(Box::new(WakeOrigin { activator: "activator-1".into(), client })),
        ..decision("hello-00001", 1)
    })
}

/// Returns the zone that the first pod prefers at a replica that starts now, after a wake by this client.
fn zone_after_wake(api_server: &FakeApiServer, client: Option<[u8; 4]>) -> Option<String> {
    let mut replica = api_server.start_replica();
    replica.step(api_server.now, woken_by(client));
    zone_at(&replica, &new_pod(api_server))
}

fn zone_at(machine: &ControllerStateMachine, pod: &Value) -> Option<String> {
    preferred_zone(machine.cluster(), pod).map(str::to_owned)
}

#[test]
fn the_first_pod_prefers_the_zone_of_the_client_or_else_of_the_activator() {
    let api_server = sleeping_service();
    for (client, expected) in [
        (Some(CLIENT_OF_N2), "b"),
        (Some([10, 1, 0, 3]), "a"),
        // On the network of the node `n2`.
        (Some([192, 168, 0, 1]), "b"),
        // From outside, and from an activator of an earlier release.
        (Some([203, 0, 113, 5]), "a"),
        (None, "a"),
    ] {
        let zone = zone_after_wake(&api_server, client);
        assert_eq!(zone.as_deref(), Some(expected), "{client:?}");
    }
    let mut replica = api_server.start_replica();
    let pod = new_pod(&api_server);
    assert_eq!(zone_at(&replica, &pod), None, "it was not asked for");
    assert!(!is_order_known(replica.cluster(), &pod), "it is behind the leader");
    replica.step(api_server.now, woken_by(None));
    assert!(is_order_known(replica.cluster(), &pod));
}

/// Some network plugins ignore the nodes' networks. By them, the client would be on another node than it is.
#[test]
fn networks_of_nodes_do_not_count_if_an_activator_has_another_address() {
    let mut api_server = sleeping_service();
    put_node(&mut api_server, "n1", node("a", 7));
    assert_eq!(zone_after_wake(&api_server, Some(CLIENT_OF_N2)).as_deref(), Some("a"));
    let own_address = Some([192, 168, 0, 1]);
    assert_eq!(zone_after_wake(&api_server, own_address).as_deref(), Some("b"));
}

#[test]
fn an_unknown_zone_is_no_preference() {
    let mut api_server = sleeping_service();
    put_node(&mut api_server, "n1", node("", 0));
    put_node(&mut api_server, "n3", node("c", 2));
    assert_eq!(zone_after_wake(&api_server, None), None, "the activator has no zone");
    assert_eq!(zone_after_wake(&api_server, Some([10, 1, 0, 3])), None, "nor has the client");
    assert_eq!(zone_after_wake(&api_server, Some(CLIENT_OF_N2)).as_deref(), Some("b"));
}

#[test]
fn one_zone_or_the_setting_turns_the_preference_off() {
    let mut api_server = sleeping_service();
    let zone = |api_server: &mut FakeApiServer, value: &str| {
        api_server.set_config_map("config-deployment", json!({"wake-zone-preference": value}));
        zone_after_wake(api_server, Some(CLIENT_OF_N2))
    };
    assert_eq!(zone(&mut api_server, "false"), None);
    assert_eq!(zone(&mut api_server, "true").as_deref(), Some("b"));
    put_node(&mut api_server, "n1", node("b", 0));
    assert_eq!(zone(&mut api_server, "true"), None, "all nodes are in one zone");
}

#[test]
fn a_template_that_chooses_zones_keeps_its_own_choice() {
    let api_server = sleeping_service();
    let mut replica = api_server.start_replica();
    replica.step(api_server.now, woken_by(Some(CLIENT_OF_N2)));
    let mut pod = new_pod(&api_server);
    assert_eq!(zone_at(&replica, &pod).as_deref(), Some("b"));
    pod["spec"]["nodeSelector"] = json!({"topology.kubernetes.io/zone": "a"});
    assert_eq!(zone_at(&replica, &pod), None);
}

/// A Deployment whose template changed would replace its pods, or make another ReplicaSet at each wake.
#[test]
fn a_wake_changes_no_template_and_later_pods_have_no_preference() {
    let mut api_server = sleeping_service();
    let deployment = |api_server: &FakeApiServer| {
        api_server.object(ResourceKind::Deployment, "hello-00001-deployment").clone()
    };
    let before = deployment(&api_server);
    api_server.step(woken_by(Some(CLIENT_OF_N2)));
    let after = deployment(&api_server);
    assert_eq!((&before["spec"]["replicas"], &after["spec"]["replicas"]), (&json!(0), &json!(1)));
    assert_eq!(before["spec"]["template"], after["spec"]["template"]);
    assert_eq!(before["metadata"], after["metadata"], "nothing else was written");
    // The pod exists now, so each further one is for load. Its own replacement prefers the zone again.
    let mut replica = api_server.start_replica();
    replica.step(api_server.now, woken_by(Some(CLIENT_OF_N2)));
    let pod = new_pod(&api_server);
    assert_eq!([zone_at(&api_server.machine, &pod), zone_at(&replica, &pod)], [None, None]);
    let mut first = api_server.names(ResourceKind::Pod);
    first.retain(|it| it.namespace == NAMESPACE);
    let [first] = first.as_slice() else { panic!("{first:?}") };
    let ended = || {
        let (resource, name) = (ResourceKind::Pod, first.clone());
        ControllerEvent::ObjectObserved { resource, name, object: None }
    };
    replica.step(api_server.now, ended());
    assert_eq!(zone_at(&replica, &pod).as_deref(), Some("b"));
    let mut behind = api_server.start_replica();
    assert!(is_order_known(behind.cluster(), &pod), "a further pod has no preference anyway");
    behind.step(api_server.now, ended());
    assert!(!is_order_known(behind.cluster(), &pod), "the zone of a first pod is not known yet");
}

/// A review that waited for a decision would delay each wake by that other autoscaler.
#[test]
fn a_first_pod_of_another_autoscaler_waits_for_no_decision() {
    let mut api_server = FakeApiServer::new();
    put_node(&mut api_server, "n1", node("a", 0));
    put_node(&mut api_server, "n2", node("b", 1));
    let mut template = template("hello:v1", 1);
    let class = "autoscaling.knative.dev/class";
    template["metadata"]["annotations"][class] = json!("sloth.example.com");
    let spec = json!({"template": template});
    api_server.apply_as_user(ResourceKind::KnativeService, "hello", spec);
    for event in api_server.scale(&name("hello-00001-deployment"), 0, &[]) {
        api_server.step(event);
    }
    let cluster = api_server.machine.cluster();
    assert_eq!(cluster.apps[&name("hello")].revisions[0].serving_pods(), 0);
    assert!(is_order_known(cluster, &new_pod(&api_server)));
}

#[test]
fn each_wake_has_its_own_zone_at_every_replica() {
    let mut api_server = sleeping_service();
    let explanation = |machine: &ControllerStateMachine| {
        let line = machine.cluster().scaling.explanations.get(&name("hello-00001"));
        line.and_then(|line| line.rsplit("; ").next()).unwrap_or_default().to_owned()
    };
    let zones = |machine: &ControllerStateMachine| {
        let all = &machine.cluster().scaling.wake_zones;
        all.values().map(ToString::to_string).collect::<Vec<_>>()
    };
    for (client, zone) in [(CLIENT_OF_N2, "b"), ([10, 1, 0, 3], "a")] {
        api_server.step(woken_by(Some(client)));
        assert_eq!(explanation(&api_server.machine), format!("asked from zone {zone}"));
        for machine in [Some(&api_server.machine), api_server.other_replica.as_ref()] {
            assert_eq!(zones(machine.expect("two replicas")), [zone]);
        }
        // A pod is ready.
        api_server.decide("hello-00001", 1);
        assert_eq!(zones(&api_server.machine), [""; 0]);
        api_server.step(woken_by(Some(client)));
        api_server.step(ControllerEvent::DecisionWithdrawn(name("hello-00001")));
        assert_eq!(zones(&api_server.machine), [""; 0], "it sleeps");
    }
}

/// An image that is missing takes longer than a way between zones.
#[test]
fn a_bound_pod_goes_to_the_zone_if_a_node_there_has_the_image() {
    let mut api_server = sleeping_service();
    api_server.set_config_map("config-deployment", json!({"bind-pods": "true"}));
    let place = |api_server: &FakeApiServer, change: &dyn Fn(&mut Value), chance: u64| {
        let mut replica = api_server.start_replica();
        replica.step(api_server.now, woken_by(Some(CLIENT_OF_N2)));
        let mut pod = new_pod(api_server);
        change(&mut pod);
        place_pod(replica.cluster(), &pod, chance, api_server.now)
    };
    for chance in 0..4 {
        let bound = place(&api_server, &|_| {}, chance);
        assert_eq!(bound, Some(PodPlacement::Node("n2".into())));
    }
    let asks = |pod: &mut Value| {
        pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "1"}});
    };
    let placement = place(&api_server, &asks, 0);
    assert!(matches!(placement, Some(PodPlacement::Affinity(_))), "{placement:?}");
    let mut without_image = node("b", 1);
    without_image["status"]["images"] = json!([]);
    put_node(&mut api_server, "n2", without_image);
    assert_eq!(place(&api_server, &|_| {}, 1), Some(PodPlacement::Node("n1".into())));
}
