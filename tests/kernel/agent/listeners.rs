//! Shell: a map of listeners that has no room is told of, and a pod is found all the same.

use aya::maps::{HashMap, Map, MapData};

use super::*;

const UNSEEN: &str = "rouse_agent_listeners_unseen";
const ADMIN: &str = "127.0.0.1:7104";

/// Enters listeners of namespaces that there are not, until there is no room.
fn fill(world: &World) {
    let pin = world.folder.join(format!("bpf/v{}/{}", abi::ABI_VERSION, abi::maps::LISTEN));
    let map = Map::HashMap(MapData::from_pin(pin).expect("it is pinned"));
    let mut listen: HashMap<MapData, abi::ListenKey, abi::Listen> =
        map.try_into().expect("a hash of listeners");
    let value = abi::Listen { open: 1, ..abi::Listen::default() };
    let keys = (1 << 60..).map(|cookie| abi::ListenKey { cookie, port: 1, reserved: 0 });
    let entered = keys.take_while(|key| listen.insert(key, value, 0).is_ok()).count();
    assert!(entered <= abi::LISTEN_MAX as usize);
}

#[test]
fn without_room_for_listeners_a_pod_is_found_and_the_trouble_is_told() {
    let mut world = World::new("room");
    world.name_pod(PodPhase::Starting, ProbeHow::Listen);
    world.start_agent();
    world.start_pod();
    world.wait("found", |seen| seen.address.is_some());
    fill(&world);
    world.tell("listen");
    world.wait_counted(UNSEEN, 1);
    let page = world.get("n", ADMIN, "/readyz");
    assert!(page.contains("listeners: map LISTEN is full"), "{page}");
    world.wait("ready", |seen| seen.ready);
}
