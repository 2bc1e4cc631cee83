//! Shell: full maps of listeners or pods: the agent reports it, and finds the pod all the same, or later.

use aya::maps::{HashMap, Map, MapData};

use super::*;

const UNSEEN: &str = "rouse_agent_listeners_unseen";

fn open_pinned(fixture: &AgentFixture, name: &str) -> Map {
    let pin = fixture.folder.join(format!("bpf/v{}/{name}", abi::ABI_VERSION));
    Map::HashMap(MapData::from_pin(pin).expect("it is pinned"))
}

/// Fills the map with listeners of namespaces that do not exist.
fn fill_listeners_map(fixture: &AgentFixture) {
    let map = open_pinned(fixture, abi::maps::LISTEN);
    let mut listen: HashMap<MapData, abi::ListenKey, abi::ListenValue> =
        map.try_into().expect("a hash of listeners");
    let value = abi::ListenValue { reachable: 1, ..abi::ListenValue::default() };
    let keys =
        (1 << 60..).map(|netns_cookie| abi::ListenKey { netns_cookie, port: 1, reserved: 0 });
    let entered = keys.take_while(|key| listen.insert(key, value, 0).is_ok()).count();
    assert!(entered <= abi::LISTEN_MAX as usize);
}

#[test]
fn without_room_for_listeners_a_pod_is_found_and_the_full_map_is_reported() {
    let mut fixture = AgentFixture::new("room");
    fixture.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    fixture.start_agent();
    fixture.start_pod();
    fixture.wait_pod("found", |pod| pod.address.is_some());
    fill_listeners_map(&fixture);
    fixture.send_to_pod("listen");
    fixture.wait_metric(UNSEEN, 1);
    fixture.wait_not_ready_reason("listeners: map LISTEN is full");
    fixture.wait_pod("ready", |pod| pod.ready);
}

/// Rows of an earlier agent whose pods are in no RouteTable are freed after a while.
#[test]
fn a_pod_without_room_in_the_maps_is_reported_and_served_once_there_is_room() {
    let mut fixture = AgentFixture::new("crowd");
    fixture.start_agent();
    fixture.kill_agent();
    let mut pods: HashMap<MapData, u64, abi::PodValue> =
        open_pinned(&fixture, abi::maps::PODS).try_into().expect("a hash of pods");
    for slot in 1..abi::PODS_MAX {
        let pod = abi::PodValue { slot, port: 1, flags: 0 };
        pods.insert(u64::from(slot) << 32, pod, 0).expect("it holds as many");
    }
    fixture.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    // Before the agent, which frees those rows ten seconds after its first RouteTable.
    fixture.start_pod();
    fixture.send_to_pod("listen");
    while fixture.request_fails() {}
    fixture.start_agent();
    let pod = fixture
        .wait_pod("without slot", |pod| pod.not_ready_reason.contains("more pods of services"));
    assert!(!pod.ready, "what is not counted gets no request");
    fixture.wait_metric("rouse_agent_pods{state=\"crowded\"}", 1);
    fixture.wait_not_ready_reason("pods: 1 without a pod slot: its node runs more pods");
    let pod = fixture.wait_pod("served", |pod| pod.ready);
    assert_eq!(pod.not_ready_reason, "");
}
