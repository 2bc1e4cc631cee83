//! Shell: full maps of listeners or pods: the agent reports it, and finds the pod all the same, or later.

use aya::maps::{HashMap, Map, MapData};

use super::*;

const UNSEEN: &str = "rouse_agent_listeners_unseen";
const ADMIN: &str = "127.0.0.1:7104";

fn open_pinned(world: &AgentFixture, name: &str) -> Map {
    let pin = world.folder.join(format!("bpf/v{}/{name}", abi::ABI_VERSION));
    Map::HashMap(MapData::from_pin(pin).expect("it is pinned"))
}

/// Fills the map with listeners of namespaces that do not exist.
fn fill_listeners_map(world: &AgentFixture) {
    let map = open_pinned(world, abi::maps::LISTEN);
    let mut listen: HashMap<MapData, abi::ListenKey, abi::ListenValue> =
        map.try_into().expect("a hash of listeners");
    let value = abi::ListenValue { reachable: 1, ..abi::ListenValue::default() };
    let keys =
        (1 << 60..).map(|cookie| abi::ListenKey { netns_cookie: cookie, port: 1, reserved: 0 });
    let entered = keys.take_while(|key| listen.insert(key, value, 0).is_ok()).count();
    assert!(entered <= abi::LISTEN_MAX as usize);
}

#[test]
fn without_room_for_listeners_a_pod_is_found_and_the_full_map_is_reported() {
    let mut world = AgentFixture::new("room");
    world.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    world.start_agent();
    world.start_pod();
    world.wait_pod("found", |seen| seen.address.is_some());
    fill_listeners_map(&world);
    world.send_to_pod("listen");
    world.wait_metric(UNSEEN, 1);
    let page = world.get_page("n", ADMIN, "/readyz");
    assert!(page.contains("listeners: map LISTEN is full"), "{page}");
    world.wait_pod("ready", |seen| seen.ready);
}

/// Rows of an earlier agent whose pods are in no RouteTable are freed after a while.
#[test]
fn a_pod_that_the_maps_have_no_room_for_says_so_and_is_served_once_there_is() {
    let mut world = AgentFixture::new("crowd");
    world.start_agent();
    world.kill_agent();
    let mut pods: HashMap<MapData, u64, abi::PodValue> =
        open_pinned(&world, abi::maps::PODS).try_into().expect("a hash of pods");
    for slot in 1..abi::PODS_MAX {
        let pod = abi::PodValue { slot, port: 1, flags: 0 };
        pods.insert(u64::from(slot) << 32, pod, 0).expect("it holds as many");
    }
    world.set_pod(RoutingPhase::Starting, ProbeHandler::Listen);
    world.start_agent();
    world.start_pod();
    world.send_to_pod("listen");
    let seen = world
        .wait_pod("without room", |seen| seen.not_ready_reason.contains("more pods of services"));
    assert!(!seen.ready, "what is not counted gets no request");
    world.wait_metric("rouse_agent_pods{state=\"crowded\"}", 1);
    let page = world.get_page("n", ADMIN, "/readyz");
    assert!(page.contains("pods: 1 without room: its node runs more pods"), "{page}");
    let seen = world.wait_pod("served", |seen| seen.ready);
    assert_eq!(seen.not_ready_reason, "");
}
