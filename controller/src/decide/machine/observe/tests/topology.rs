//! Hints of pods in the RouteTable and in slices, by the annotations of services and by the zones of nodes.

use common::service_routing::TopologyHints;

use super::*;
use crate::model::zone_shares::HintRefusal;

/// Returns a ready node in a zone, or in none if it is empty.
fn node(zone: &str, cpu: &str) -> Value {
    let mut node = json!({
        "metadata": {"labels": {}},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"cpu": cpu},
        },
    });
    if !zone.is_empty() {
        node["metadata"]["labels"]["topology.kubernetes.io/zone"] = json!(zone);
    }
    node
}

fn observe_node(api_server: &mut FakeApiServer, name: &str, node: Value) {
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Node,
        name: NamespacedName::new("", name),
        object: Some(Box::new(node)),
    });
}

/// Applies the Service `hello`, with one annotation at the pointer `metadata`, or with none.
fn apply_annotated(
    api_server: &mut FakeApiServer,
    metadata: &str,
    annotation: Option<(&str, &str)>,
) {
    let mut service = json!({
        "apiVersion": "serving.knative.dev/v1", "kind": "Service",
        "metadata": {"name": "hello", "namespace": NAMESPACE},
        "spec": {"template": template("hello:v1", 1)},
    });
    if let Some((key, value)) = annotation {
        service.pointer_mut(metadata).expect("metadata")["annotations"][key] = json!(value);
    }
    for event in api_server.apply(ResourceKind::KnativeService, &name("hello"), service) {
        api_server.step(event);
    }
}

/// Places the pods on these nodes, in the order of their names, and reports all as ready.
fn place_pods(api_server: &mut FakeApiServer, nodes: &[&str]) {
    let mut pods = api_server.names(ResourceKind::Pod);
    pods.retain(|it| it.namespace == NAMESPACE);
    assert_eq!(pods.len(), nodes.len());
    for (pod, node) in pods.into_iter().zip(nodes) {
        let object = api_server.objects.get_mut(&(ResourceKind::Pod, pod.clone())).expect("it is");
        object["spec"]["nodeName"] = json!(node);
        object["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
        let object = object.clone();
        api_server.step(ControllerEvent::ObjectObserved {
            resource: ResourceKind::Pod,
            name: pod,
            object: Some(Box::new(object)),
        });
    }
    api_server.report_all_ready();
}

/// Returns name, zone hint and node hint of each pod in the RouteTable, sorted.
fn pod_hints(api_server: &FakeApiServer) -> Vec<[String; 3]> {
    hints_of(&api_server.machine)
}

fn hints_of(machine: &ControllerStateMachine) -> Vec<[String; 3]> {
    let table = table(machine);
    let hints = table.pods.values().map(|it| {
        let TopologyHints { zone, node } = &it.hints;
        [it.name.clone(), zone.to_string(), node.to_string()]
    });
    let mut hints: Vec<_> = hints.collect();
    hints.sort();
    hints
}

/// Returns the zone hints of all pods.
fn zone_hints(api_server: &FakeApiServer) -> Vec<String> {
    pod_hints(api_server).into_iter().map(|[_, zone, _]| zone).collect()
}

/// Returns the pods in the slice of the Revision's own Service, each with the JSON of its hints.
fn slice_hints(api_server: &FakeApiServer) -> Vec<(Value, Value)> {
    let slice = api_server.object(ResourceKind::EndpointSlice, "hello-00001");
    let endpoints = slice["endpoints"].as_array().expect("a list").iter();
    endpoints.map(|it| (it["targetRef"]["name"].clone(), it["hints"].clone())).collect()
}

#[test]
fn a_traffic_distribution_of_a_service_or_a_template_hints_at_near_pods() {
    const KEY: &str = "rouse.dev/traffic-distribution";
    for (metadata, value, is_for_node) in [
        ("/metadata", "PreferSameZone", false),
        ("/metadata", "PreferSameNode", true),
        ("/spec/template/metadata", "PreferClose", false),
    ] {
        let mut api_server = FakeApiServer::new();
        observe_node(&mut api_server, "n1", node("a", "4"));
        observe_node(&mut api_server, "n2", node("b", "4"));
        apply_annotated(&mut api_server, metadata, Some((KEY, value)));
        api_server.decide("hello-00001", 2);
        place_pods(&mut api_server, &["n1", "n2"]);
        let hints = pod_hints(&api_server);
        let expected: Vec<[String; 3]> = hints
            .iter()
            .zip([("a", "n1"), ("b", "n2")])
            .map(|([pod, ..], (zone, node))| {
                let node = if is_for_node { node } else { "" };
                [pod.clone(), zone.into(), node.into()]
            })
            .collect();
        assert_eq!(hints, expected, "{value}");
        let of_slice =
            |[pod, zone, _]: &[String; 3]| (json!(pod), json!({"forZones": [{"name": zone}]}));
        // API servers before 1.33 refuse a slice with hints for nodes.
        assert_eq!(slice_hints(&api_server), expected.iter().map(of_slice).collect::<Vec<_>>());
        if metadata == "/metadata" {
            apply_annotated(&mut api_server, metadata, None);
            assert_eq!(zone_hints(&api_server), ["", ""], "taken back");
            assert!(slice_hints(&api_server).iter().all(|(_, hints)| hints.is_null()));
            assert_eq!(api_server.table().revisions.len(), 1, "without a new Revision");
        }
    }
}

#[test]
fn an_annotation_of_a_service_counts_before_all_of_its_template() {
    let mut api_server = FakeApiServer::new();
    observe_node(&mut api_server, "n1", node("a", "4"));
    observe_node(&mut api_server, "n2", node("b", "4"));
    let mut template = template("hello:v1", 1);
    template["metadata"]["annotations"][key::TOPOLOGY_MODE] = json!("Auto");
    let service = json!({
        "apiVersion": "serving.knative.dev/v1", "kind": "Service",
        "metadata": {
            "name": "hello", "namespace": NAMESPACE,
            "annotations": {key::TRAFFIC_DISTRIBUTION: "PreferSameNode"},
        },
        "spec": {"template": template},
    });
    for event in api_server.apply(ResourceKind::KnativeService, &name("hello"), service) {
        api_server.step(event);
    }
    api_server.decide("hello-00001", 2);
    place_pods(&mut api_server, &["n1", "n2"]);
    let nodes: Vec<String> = pod_hints(&api_server).into_iter().map(|[.., node]| node).collect();
    assert_eq!(nodes, ["n1", "n2"], "the topology mode has no hints for nodes");
}

#[test]
fn the_reason_for_no_hints_is_the_present_one() {
    let mut api_server = FakeApiServer::new();
    observe_node(&mut api_server, "n1", node("a", "4"));
    observe_node(&mut api_server, "n2", node("", "4"));
    apply_annotated(&mut api_server, "/metadata", Some((key::TOPOLOGY_MODE, "Auto")));
    api_server.decide("hello-00001", 1);
    place_pods(&mut api_server, &["n1"]);
    let refusal = |api_server: &FakeApiServer| {
        let app = &api_server.machine.cluster().apps[&name("hello")];
        app.revisions[0].topology.as_ref().and_then(|it| it.refusal)
    };
    assert_eq!(refusal(&api_server), Some(HintRefusal::IncompleteNode));
    observe_node(&mut api_server, "n2", node("b", "4"));
    assert_eq!(refusal(&api_server), Some(HintRefusal::TooFewEndpoints));
}

#[test]
fn the_topology_mode_hints_in_proportion_and_keeps_hints_until_a_zone_is_overloaded() {
    let mut api_server = FakeApiServer::new();
    observe_node(&mut api_server, "n1", node("a", "4"));
    observe_node(&mut api_server, "n2", node("b", "8"));
    let auto = ("service.kubernetes.io/topology-mode", "Auto");
    apply_annotated(&mut api_server, "/metadata", Some(auto));
    api_server.decide("hello-00001", 6);
    place_pods(&mut api_server, &["n1", "n1", "n1", "n1", "n1", "n2"]);
    let count = |hints: &[String], zone: &str| hints.iter().filter(|it| *it == zone).count();
    let first = zone_hints(&api_server);
    assert_eq!((count(&first, "a"), count(&first, "b")), (2, 4));
    let in_slice = slice_hints(&api_server);
    assert_eq!(in_slice.iter().filter(|(_, it)| it["forZones"][0]["name"] == "b").count(), 4);

    observe_node(&mut api_server, "n2", node("b", "9"));
    assert_eq!(zone_hints(&api_server), first, "no zone is overloaded");
    let mut control_plane = node("", "2");
    control_plane["metadata"]["labels"]["node-role.kubernetes.io/control-plane"] = json!("");
    observe_node(&mut api_server, "n4", control_plane);
    assert_eq!(zone_hints(&api_server), first, "a node of the control plane does not count");

    observe_node(&mut api_server, "n2", node("b", "40"));
    let hints = zone_hints(&api_server);
    assert_eq!((count(&hints, "a"), count(&hints, "b")), (1, 5));
    observe_node(&mut api_server, "n3", node("", "4"));
    assert_eq!(zone_hints(&api_server), vec![""; 6], "a ready node has no zone");
    assert!(slice_hints(&api_server).iter().all(|(_, hints)| hints.is_null()));
    observe_node(&mut api_server, "n2", node("b", "4"));
    observe_node(&mut api_server, "n3", node("c", "4"));
    let hints = zone_hints(&api_server);
    let counts = ["a", "b", "c"].map(|zone| count(&hints, zone));
    assert_eq!(counts, [2, 2, 2], "a zone without pods gets some too");
}

/// Pods are planned by the shares that follow from the new zone: by the old ones each would be for its own zone.
#[test]
fn a_node_that_changes_its_zone_gets_its_share_of_the_hints() {
    let mut api_server = FakeApiServer::new();
    observe_node(&mut api_server, "n1", node("a", "4"));
    observe_node(&mut api_server, "n2", node("b", "4"));
    let auto = ("service.kubernetes.io/topology-mode", "Auto");
    apply_annotated(&mut api_server, "/metadata", Some(auto));
    api_server.decide("hello-00001", 12);
    place_pods(&mut api_server, &[["n1"; 7].as_slice(), &["n2"; 5]].concat());
    let counts = |api_server: &FakeApiServer| {
        let hints = zone_hints(api_server);
        ["a", "b", "c"].map(|zone| hints.iter().filter(|it| *it == zone).count())
    };
    assert_eq!(counts(&api_server), [6, 6, 0]);
    observe_node(&mut api_server, "n1", node("c", "4"));
    assert_eq!(counts(&api_server), [0, 6, 6]);
}

#[test]
fn a_zone_that_a_node_gets_later_reaches_its_pods_and_activators() {
    let mut api_server = FakeApiServer::new();
    observe_node(&mut api_server, "n1", node("", "4"));
    api_server.apply_service("hello", "hello:v1", 1, Value::Null);
    api_server.report_all_ready();
    let zones = |api_server: &FakeApiServer| {
        let table = api_server.table();
        let of_pods = table.pods.values().map(|it| it.zone.clone());
        let of_activators = table.activators.values().map(|it| it.zone.clone());
        let of_nodes = table.nodes.values().map(|it| format!("{} {}", it.name, it.zone));
        of_pods.chain(of_activators).chain(of_nodes).collect::<Vec<_>>()
    };
    assert_eq!(zones(&api_server), ["", ""]);
    observe_node(&mut api_server, "n1", node("a", "4"));
    assert_eq!(zones(&api_server), ["a", "a", "n1 a"]);
    let slice = api_server.object(ResourceKind::EndpointSlice, "hello");
    assert_eq!(slice["endpoints"][0]["zone"], "a");
    observe_node(&mut api_server, "n1", node("", "4"));
    assert_eq!(zones(&api_server), ["", ""]);
    observe_node(&mut api_server, "n1", node("a", "4"));
    let mut unnamed = node("", "4");
    unnamed["metadata"]["labels"]["topology.kubernetes.io/zone"] = json!("");
    observe_node(&mut api_server, "n1", unnamed);
    assert_eq!(zones(&api_server), ["", ""], "agents refuse a node with an empty zone");
}

#[test]
fn the_activators_in_a_slice_are_no_pods_with_hints() {
    let endpoint = |namespace: &str, pod: &str| {
        let hints = json!({"forZones": [{"name": "a"}]});
        json!({"targetRef": {"namespace": namespace, "name": pod}, "zone": "a", "hints": hints})
    };
    let endpoints = [endpoint(NAMESPACE, "pod"), endpoint("knative-serving", "activator-1")];
    let slice = json!({"metadata": {"namespace": NAMESPACE}, "endpoints": endpoints});
    let pods = crate::read::observe::slice_hints(&slice).expect("hints");
    let names: Vec<&str> = pods.iter().map(|it| &*it.name).collect();
    assert_eq!(names, ["pod"]);
}

/// Without the slices it would assign the hints again: five pods for zone `a` and seven for zone `b`.
#[test]
fn a_replica_that_starts_gives_the_hints_that_the_leader_has_kept() {
    let mut api_server = FakeApiServer::new();
    observe_node(&mut api_server, "n1", node("a", "4"));
    observe_node(&mut api_server, "n2", node("b", "8"));
    let auto = ("service.kubernetes.io/topology-mode", "Auto");
    apply_annotated(&mut api_server, "/metadata", Some(auto));
    api_server.decide("hello-00001", 12);
    place_pods(&mut api_server, &[["n1"; 10].as_slice(), &["n2"; 2]].concat());
    let n2 = node("b", "7");
    observe_node(&mut api_server, "n2", n2.clone());
    let kept = pod_hints(&api_server);
    assert_eq!(kept.iter().filter(|[_, zone, _]| zone == "a").count(), 4);
    for (name, node) in [("n1", node("a", "4")), ("n2", n2)] {
        let name = NamespacedName::new("", name);
        api_server.objects.insert((ResourceKind::Node, name), node);
    }
    assert_eq!(hints_of(&api_server.start_replica()), kept);
    // Pods with an address of one family are in one slice each.
    let (four, six) = (name("hello-00001"), name("hello-00001.v6"));
    let slice = api_server.object(ResourceKind::EndpointSlice, "hello-00001").clone();
    let endpoints = slice["endpoints"].as_array().expect("a list").clone();
    let (first, second) = endpoints.split_at(5);
    for (slice_name, endpoints) in [(four, first), (six, second)] {
        let mut part = slice.clone();
        part["endpoints"] = json!(endpoints);
        api_server.objects.insert((ResourceKind::EndpointSlice, slice_name), part);
    }
    assert_eq!(hints_of(&api_server.start_replica()), kept);
    // Only the slices tell it.
    let slices = |(resource, _): &(ResourceKind, NamespacedName), _: &mut Value| {
        *resource != ResourceKind::EndpointSlice
    };
    api_server.objects.retain(slices);
    let assigned = hints_of(&api_server.start_replica());
    assert_eq!(assigned.iter().filter(|[_, zone, _]| zone == "a").count(), 5);
}
