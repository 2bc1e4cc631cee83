//! Shell: connects to the ports of a scaled Service: each pod's own ports, and clients that keep their pod.

use std::{num::NonZeroU16, time::Duration};

use common::{
    fixtures,
    wire::{AppProtocol, NamespacedName, PodPort, RoutingPhase},
};
use datapath::abi;

use crate::{
    fixture::{NetnsFixture, SERVING_PORT, SharedKernelFixture, pod_uid},
    scripted_process::{ScriptedProcess, parse_counts},
};

/// Affinity timeout, which no test reaches.
const AFFINITY: Duration = Duration::from_secs(3_600);
/// Port of each pod beside [`SERVING_PORT`].
const DATABASE_PORT: u16 = 9_432;
/// ClusterIP of the Service.
const CLUSTER_IP: &str = "10.96.0.1";

/// Name of the Service, and of the Revision of its pods.
fn service_name() -> NamespacedName {
    NamespacedName::new("default", "s1")
}

/// Adds the ports 80 and 5432 of the scaled Service on the direct path.
fn add_ports(fixture: &mut SharedKernelFixture, affinity: Option<Duration>) {
    for (port, protocol) in [(80, AppProtocol::Http1), (5432, AppProtocol::Tcp)] {
        let mut entry = fixtures::scaled_port(&service_name(), port, protocol);
        entry.addresses = vec![CLUSTER_IP.parse().expect("an address")];
        entry.activator_port = NonZeroU16::new(20_000 + port % 100).expect("not 0");
        entry.affinity = affinity;
        fixture.table.services.insert(entry.name.clone(), entry);
    }
}

/// Adds a ready pod with these ports.
fn add_pod(fixture: &mut SharedKernelFixture, pod: &NetnsFixture, ports: Vec<PodPort>) {
    fixture.set_pod(pod, 1, RoutingPhase::Ready, pod.ipv4());
    let entry = fixture.table.pods.get_mut(&pod_uid(pod)).expect("just added");
    (entry.ports, entry.keeps_binds) = (ports, true);
}

fn both_ports() -> Vec<PodPort> {
    vec![
        fixtures::pod_port(80, SERVING_PORT, AppProtocol::Http1),
        fixtures::pod_port(5432, DATABASE_PORT, AppProtocol::Tcp),
    ]
}

/// Starts a process of the pod that listens on both ports.
fn serve(pod: &NetnsFixture) -> ScriptedProcess {
    let mut server = pod.start_process();
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} web{}", pod.number));
    server.expect_step(&format!("listen 0.0.0.0:{DATABASE_PORT} db{}", pod.number));
    server
}

#[test]
fn each_port_of_a_scaled_service_leads_to_the_pods_port_for_it() {
    let mut fixture = SharedKernelFixture::new();
    let (client, activator_netns) = (fixture.add_client(), fixture.add_client());
    let (full, partial) = (fixture.add_pod(), fixture.add_pod());
    let mut activator = activator_netns.start_process();
    activator.expect_step("listen 0.0.0.0:20032 activator");
    fixture.add_activator(&activator_netns);
    let _servers = [serve(&full), serve(&partial)];
    add_ports(&mut fixture, None);
    add_pod(&mut fixture, &partial, both_ports()[..1].to_vec());
    fixture.apply_table();
    let mut client = client.start_process();
    let database = format!("hammer {CLUSTER_IP}:5432 10");
    assert_eq!(client.expect_step(&database), "activator=10", "no pod has a port for it");
    add_pod(&mut fixture, &full, both_ports());
    fixture.apply_table();
    assert_eq!(client.expect_step(&database), format!("db{}=10", full.number));
    let counts = client.expect_step(&format!("hammer {CLUSTER_IP}:80 100"));
    let names: Vec<String> = parse_counts(&counts).into_keys().map(str::to_owned).collect();
    let mut expected = [full.number, partial.number].map(|it| format!("web{it}"));
    expected.sort();
    assert_eq!(names, expected);
    let reply = client.expect_step(&format!("connect {CLUSTER_IP}:5432"));
    assert_eq!(reply, format!("db{} {CLUSTER_IP}:5432", full.number), "the peer is the Service");
}

#[test]
fn a_client_keeps_its_pod_while_the_pod_is_ready() {
    let mut fixture = SharedKernelFixture::new();
    let client = fixture.add_client();
    let pods = [fixture.add_pod(), fixture.add_pod(), fixture.add_pod()];
    let _servers = pods.each_ref().map(serve);
    add_ports(&mut fixture, Some(AFFINITY));
    pods.iter().for_each(|pod| add_pod(&mut fixture, pod, both_ports()));
    fixture.apply_table();
    let mut client = client.start_process();
    let hammer = format!("hammer {CLUSTER_IP}:80 40");
    let first = client.expect_step(&hammer);
    let kept = pods.iter().find(|pod| first == format!("web{}=40", pod.number));
    let kept = kept.unwrap_or_else(|| panic!("one of the pods: {first}"));
    // Another pod leaves and comes back: the list moves.
    let other = pods.iter().find(|pod| pod.number != kept.number).expect("there are three");
    let mut set_phase = |fixture: &mut SharedKernelFixture, pod: &NetnsFixture, phase| {
        fixture.table.pods.get_mut(&pod_uid(pod)).expect("in the table").phase = phase;
        fixture.apply_table();
        client.expect_step(&hammer)
    };
    assert_eq!(set_phase(&mut fixture, other, RoutingPhase::Draining), first);
    assert_eq!(set_phase(&mut fixture, other, RoutingPhase::Ready), first);
    let second = set_phase(&mut fixture, kept, RoutingPhase::Draining);
    assert!(!second.contains(' ') && second != first, "another one: {second}");
    let third = set_phase(&mut fixture, kept, RoutingPhase::Ready);
    assert_eq!(third, second, "it does not go back");
}

#[test]
fn a_kept_pod_that_stops_listening_gives_way_to_others_and_then_to_the_activator() {
    let mut fixture = SharedKernelFixture::new();
    let (client, activator_netns) = (fixture.add_client(), fixture.add_client());
    let pods = [fixture.add_pod(), fixture.add_pod()];
    let mut activator = activator_netns.start_process();
    activator.expect_step("listen 0.0.0.0:20080 activator");
    fixture.add_activator(&activator_netns);
    add_ports(&mut fixture, Some(AFFINITY));
    for pod in &pods {
        fixture.register_pod(pod, 0);
        add_pod(&mut fixture, pod, both_ports());
    }
    fixture.apply_table();
    let mut servers = pods.each_ref().map(|pod| Some(serve(pod)));
    let mut client = client.start_process();
    let hammer = format!("hammer {CLUSTER_IP}:80 20");
    let first = client.expect_step(&hammer);
    let kept = pods.iter().position(|pod| first == format!("web{}=20", pod.number));
    let kept = kept.unwrap_or_else(|| panic!("one of the pods: {first}"));
    let fallbacks = fixture.maps.control_word(abi::CONTROL_FALLBACK);
    servers[kept] = None;
    let other = format!("web{}=20", pods[1 - kept].number);
    assert_eq!(client.expect_step(&hammer), other);
    assert_eq!(fixture.maps.control_word(abi::CONTROL_FALLBACK), fallbacks);
    servers[1 - kept] = None;
    assert_eq!(client.expect_step(&hammer), "activator=20");
    assert_eq!(fixture.maps.control_word(abi::CONTROL_FALLBACK) - fallbacks, 20);
    servers[kept] = Some(serve(&pods[kept]));
    assert_eq!(client.expect_step(&hammer), first);
}
