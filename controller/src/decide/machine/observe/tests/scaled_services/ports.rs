//! Ports of scaled Services, at activators and at pods, and what else of a Service its routes contain.

use std::time::Duration;

use common::wire::AppProtocol;

use super::*;

/// Returns the spec of a Service with these ports.
fn with_ports(ports: Value) -> Value {
    let mut spec = service_spec("web");
    spec["ports"] = ports;
    spec
}

fn http() -> Value {
    json!({"name": "http", "port": 80, "targetPort": "web"})
}

fn sql() -> Value {
    json!({"name": "sql", "port": 5432, "targetPort": "sql"})
}

fn apply_ports(api_server: &mut FakeApiServer, ports: Value) {
    apply_service(api_server, "web", sleeps(), with_ports(ports));
}

/// Returns the port at the activators of each port of the Service, as its PodAutoscaler records them.
fn recorded_ports(api_server: &FakeApiServer) -> String {
    let autoscaler = api_server.object(ResourceKind::PodAutoscaler, "web");
    let recorded = autoscaler["metadata"]["annotations"][key::ACTIVATOR_PORTS].as_str();
    recorded.unwrap_or_default().to_owned()
}

fn activator_port(api_server: &FakeApiServer, port: u16) -> u16 {
    port_entry(api_server, port).expect("its port").activator_port.get()
}

#[test]
fn each_tcp_port_has_an_entry_with_its_protocol_and_leads_to_a_port_of_each_pod() {
    let mut api_server = scaled(DEPLOYMENT);
    let udp = json!({"name": "dns", "port": 53, "protocol": "UDP"});
    apply_ports(&mut api_server, json!([http(), sql(), udp]));
    let entries = [80, 5432].map(|port| port_entry(&api_server, port).expect("its port"));
    assert_eq!(entries.each_ref().map(|it| it.port.get()), [80, 5432]);
    let protocols = entries.each_ref().map(|it| it.protocol);
    assert_eq!(protocols, [Some(AppProtocol::Http1), Some(AppProtocol::Tcp)]);
    assert!(entries.iter().all(|it| it.uses_pod_ports && it.hosts.is_empty()));
    assert_ne!(entries[0].activator_port, entries[1].activator_port);
    let [web, db] = entries.each_ref().map(|it| it.activator_port);
    assert_eq!(recorded_ports(&api_server), format!("80={web},5432={db}"));
    for pod in api_server.table().pods.into_values() {
        let ports: Vec<_> =
            pod.ports.iter().map(|it| (it.service_port.get(), it.port.get())).collect();
        assert_eq!((ports, pod.keeps_binds), (vec![(80, 8080), (5432, 5432)], true));
    }
    assert_eq!(api_server.table().revisions[&name("web")].protocol, AppProtocol::Http1);
    let wakes = api_server.condition(ResourceKind::PodAutoscaler, "web", "AllPortsWake");
    assert_eq!(wakes, "False NotTcp: No request wakes the workload at 53/UDP");
    assert_eq!(ready(&api_server), "True ");
}

#[test]
fn ports_that_stay_keep_theirs_at_the_activators() {
    let mut api_server = asleep(DEPLOYMENT);
    let web = activator_port(&api_server, 80);
    apply_ports(&mut api_server, json!([sql(), http()]));
    let db = activator_port(&api_server, 5432);
    assert_eq!(activator_port(&api_server, 80), web);
    let slice = api_server.object(ResourceKind::EndpointSlice, "web-rouse");
    let ports = json!([
        {"name": "sql", "port": db, "protocol": "TCP", "appProtocol": "tcp"},
        {"name": "http", "port": web, "protocol": "TCP"},
    ]);
    assert_eq!(slice["ports"], ports);
    let mut renamed = sql();
    renamed["name"] = json!("db");
    apply_ports(&mut api_server, json!([http(), renamed]));
    assert_eq!((activator_port(&api_server, 80), activator_port(&api_server, 5432)), (web, db));
    let slice = api_server.object(ResourceKind::EndpointSlice, "web-rouse");
    assert_eq!(slice["ports"][1]["name"], "db");
    apply_ports(&mut api_server, json!([sql()]));
    assert!(port_entry(&api_server, 80).is_none());
    assert_eq!(activator_port(&api_server, 5432), db);
    let allocated = &api_server.machine.cluster().allocated.ports;
    assert_eq!(allocated.iter().collect::<Vec<_>>(), [&db], "the other one is free");
    assert_eq!(api_server.table().revisions[&name("web")].protocol, AppProtocol::Tcp);
    assert_eq!(replicas(&api_server, DEPLOYMENT), 0);
}

#[test]
fn no_two_services_have_the_same_port_at_the_activators() {
    let mut api_server = scaled(DEPLOYMENT);
    let taken = activator_port(&api_server, 80);
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let hello = api_server.table().services[&name("hello")].activator_port.get();
    assert_ne!(hello, taken);
    // Users may write ports into the PodAutoscaler, and the controller reads them when it starts.
    let written = |ports: &str| {
        let mut api_server = scaled(DEPLOYMENT);
        apply_ports(&mut api_server, json!([http(), sql()]));
        let at = (ResourceKind::PodAutoscaler, name("web"));
        let autoscaler = api_server.objects.get_mut(&at).expect("a PodAutoscaler");
        autoscaler["metadata"]["annotations"][key::ACTIVATOR_PORTS] = json!(ports);
        let mut replica = api_server.start_replica();
        replica.step(api_server.now, ControllerEvent::LeadershipChanged(true));
        let services = table(&replica).services.into_values();
        services.map(|it| it.activator_port.get()).collect::<Vec<u16>>()
    };
    let [first, last] = abi::ACTIVATOR_PORTS;
    let free = (first..=last).find(|it| *it != taken).expect("there are many");
    let is_in_range = |port: &u16| (first..=last).contains(port);
    for ports in [format!("80={free},5432={free}"), "80=8080,5432=x".to_owned(), String::new()] {
        let given = written(&ports);
        assert!(given.len() == 2 && given[0] != given[1], "{ports} {given:?}");
        assert!(given.iter().all(is_in_range), "{ports} {given:?}");
    }
    let two = [free, if free < last { free + 1 } else { first }];
    let mut given = written(&format!("80={},5432={}", two[0], two[1]));
    given.sort_unstable();
    let mut expected = two.to_vec();
    expected.sort_unstable();
    assert_eq!(given, expected, "they are kept");
}

#[test]
fn a_workload_stays_awake_while_a_port_has_none_at_the_activators() {
    let mut api_server = FakeApiServer::new();
    let [first, _] = abi::ACTIVATOR_PORTS;
    let replicas_of_controller = [Some(&mut api_server.machine), api_server.other_replica.as_mut()];
    for replica in replicas_of_controller.into_iter().flatten() {
        std::sync::Arc::make_mut(&mut replica.cluster.settings).activator_port_range =
            (first, first);
    }
    api_server.apply_workload(DEPLOYMENT, "web", &workload_spec("web", 3));
    api_server.make_pods_ready();
    apply_ports(&mut api_server, json!([http(), sql()]));
    fall_asleep(&mut api_server);
    assert_eq!(recorded_ports(&api_server), format!("80={first}"));
    assert_eq!(api_server.replicas_writes, [0_u64; 0]);
    apply_ports(&mut api_server, json!([http()]));
    fall_asleep(&mut api_server);
    assert_eq!(api_server.replicas_writes, [0_u64]);
}

#[test]
fn a_named_port_may_have_another_number_in_each_pod() {
    let mut api_server = scaled(DEPLOYMENT);
    let pod = api_server.user_pods().swap_remove(0);
    let uid = api_server.object(ResourceKind::Pod, &pod)["metadata"]["uid"].clone();
    api_server.change_object(ResourceKind::Pod, &pod, |it| {
        it["spec"]["containers"][0]["ports"] = json!([{"name": "web", "containerPort": 9090}]);
    });
    let ports = |pod: &common::wire::PodEntry| {
        let entry = port_entry(&api_server, 80).expect("its port");
        (pod.port.get(), pod.port_for(&entry).map(NonZeroU16::get))
    };
    for (of, entry) in &api_server.table().pods {
        let expected = if uid == of.as_str() { 9090 } else { 8080 };
        assert_eq!(ports(entry), (expected, Some(expected)));
    }
}

#[test]
fn affinity_path_and_settings_of_the_service_are_in_the_table() {
    let mut api_server = scaled(DEPLOYMENT);
    let mut spec = service_spec("web");
    spec["sessionAffinity"] = json!("ClientIP");
    let mut annotations = sleeps();
    annotations["rouse.dev/path"] = json!("activator");
    annotations["autoscaling.knative.dev/window"] = json!("30s");
    annotations["autoscaling.knative.dev/initial-scale"] = json!("7");
    annotations[key::STANDBY] = json!("1");
    apply_service(&mut api_server, "web", annotations, spec);
    let entry = port_entry(&api_server, 80).expect("its port");
    assert_eq!(entry.affinity, Some(Duration::from_secs(10_800)));
    assert_eq!(entry.connection_path, ConnectionPath::Activator);
    let table = api_server.table();
    let policy = table.revisions[&name("web")].policy.as_ref().expect("a policy");
    assert_eq!((policy.stable_window, policy.initial_scale), (Duration::from_secs(30), 3));
    let valid =
        api_server.condition(ResourceKind::PodAutoscaler, "web", "AutoscalingAnnotationsValid");
    assert!(valid.starts_with("False WithoutEffect: Without effect: "), "{valid}");
    assert!(valid.contains("initial-scale"), "{valid}");
    assert!(valid.contains("only pods of a Knative Service stand by"), "{valid}");
}

#[test]
fn each_node_that_may_be_asked_alone_has_its_activator_in_the_slice() {
    for (policy, expected) in [("Cluster", 2), ("Local", 3)] {
        let mut api_server = FakeApiServer::new();
        for number in 2..=3 {
            let activator = format!("activator-{number}");
            let labels = json!({"app": "activator"});
            let pod = NamespacedName::new("knative-serving", activator.as_str());
            let object = json!({
                "metadata": {
                    "name": activator, "namespace": "knative-serving",
                    "uid": format!("a{number}"), "labels": labels,
                },
                "spec": {"nodeName": format!("n{number}")},
                "status": {
                    "podIP": format!("10.1.0.{number}"),
                    "conditions": [{"type": "Ready", "status": "True"}],
                },
            });
            let (resource, object) = (ResourceKind::Pod, Some(Box::new(object)));
            api_server.step(ControllerEvent::ObjectObserved { resource, name: pod, object });
        }
        api_server.apply_workload(DEPLOYMENT, "web", &workload_spec("web", 0));
        let mut spec = service_spec("web");
        spec["externalTrafficPolicy"] = json!(policy);
        apply_service(&mut api_server, "web", sleeps(), spec);
        let slice = api_server.object(ResourceKind::EndpointSlice, "web-rouse");
        let endpoints = slice["endpoints"].as_array().expect("a list");
        assert_eq!(endpoints.len(), expected, "{policy}");
    }
}

/// The Service of a Route's name is the controller's own, but its users may want affinity.
#[test]
fn an_affinity_that_a_user_gives_the_service_of_a_name_holds() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let affinity = |api_server: &FakeApiServer| {
        let spec = &api_server.object(ResourceKind::Service, "hello")["spec"];
        let entry = api_server.table().services.remove(&name("hello")).expect("the service");
        (spec["sessionAffinity"].clone(), spec["sessionAffinityConfig"].clone(), entry.affinity)
    };
    assert_eq!(affinity(&api_server), (json!("None"), Value::Null, None));
    let config = json!({"clientIP": {"timeoutSeconds": 60}});
    api_server.change_object(ResourceKind::Service, "hello", |it| {
        it["spec"]["sessionAffinity"] = json!("ClientIP");
        it["spec"]["sessionAffinityConfig"] = config.clone();
    });
    let minute = Some(Duration::from_secs(60));
    assert_eq!(affinity(&api_server), (json!("ClientIP"), config.clone(), minute));
    // The next write of the Service keeps it.
    api_server.apply_service("hello", "hello:v2", 0, Value::Null);
    let key = ObjectPartKey::new(ResourceKind::Service, ObjectPart::Object, name("hello"));
    for event in api_server.write(&key) {
        api_server.step(event);
    }
    assert_eq!(affinity(&api_server), (json!("ClientIP"), config, minute));
    api_server.change_object(ResourceKind::Service, "hello", |it| {
        it["spec"]["sessionAffinity"] = json!("None");
    });
    assert_eq!(affinity(&api_server).2, None);
}

/// Reports these pods as ready and drained, by an agent that counts all of their ports or not.
fn report_drained(api_server: &mut FakeApiServer, uids: &[String], counts_all_ports: bool) {
    for uid in uids {
        let reporter =
            ComponentReplica { role: ClientComponent::Agent, name: "n1".into(), node: "n1".into() };
        let observation = PodObservation {
            uid: uid.clone(),
            drained: true,
            counts_all_ports,
            ..ready_observation()
        };
        api_server.step(ControllerEvent::PodReported { reporter, stream: 1, observation });
    }
}

fn pod_uids(api_server: &FakeApiServer) -> Vec<String> {
    api_server.table().pods.into_keys().collect()
}

/// An agent of an earlier release counts the requests at one port of each pod.
#[test]
fn a_workload_does_not_sleep_until_agents_count_all_of_its_ports() {
    let mut api_server = scaled(DEPLOYMENT);
    let uids = pod_uids(&api_server);
    assert_eq!(uids.len(), 3);
    report_drained(&mut api_server, &uids, false);
    fall_asleep(&mut api_server);
    assert_eq!(phases(&api_server), [RoutingPhase::Ready; 3]);
    assert_eq!(replicas(&api_server, DEPLOYMENT), 3);
    report_drained(&mut api_server, &uids[1..], true);
    advance(&mut api_server, 301);
    assert_eq!(phases(&api_server), [RoutingPhase::Ready; 3], "one may have connections");
    report_drained(&mut api_server, &uids[..1], true);
    advance(&mut api_server, 10);
    assert_eq!(replicas(&api_server, DEPLOYMENT), 0, "without another decision");
}

#[test]
fn a_pod_of_which_not_all_ports_are_counted_drains_for_its_whole_grace_period() {
    for counts_all_ports in [false, true] {
        let mut api_server = scaled(DEPLOYMENT);
        let mut annotations = sleeps();
        annotations["autoscaling.knative.dev/max-scale"] = json!("9");
        apply_service(&mut api_server, "web", annotations, service_spec("web"));
        api_server.decide("web", 5);
        api_server.make_pods_ready();
        let uids = pod_uids(&api_server);
        assert_eq!(uids.len(), 5);
        report_drained(&mut api_server, &uids, counts_all_ports);
        api_server.decide("web", 3);
        advance(&mut api_server, 10);
        let expected = if counts_all_ports { 3 } else { 5 };
        assert_eq!(replicas(&api_server, DEPLOYMENT), expected);
        advance(&mut api_server, 301);
        assert_eq!(replicas(&api_server, DEPLOYMENT), 3);
    }
}
