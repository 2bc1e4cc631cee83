//! Shell: maps full of foreign entries, while connections are still counted.

use aya::maps::{HashMap, Map, MapData};
use datapath::abi::{self, BufferedSegment, BufferedSegmentKey, ProbeKey};

use super::*;

fn open_pinned(fixture: &CountFixture, name: &str) -> Map {
    let pin = fixture.kernel.paths().pins().join(name);
    Map::LruHashMap(MapData::from_pin(pin).expect("it is pinned"))
}

/// Address of a network that no test has.
const UNUSED_ADDRESS: [u32; 4] = [0, 0, u32::from_be(0xffff), u32::from_be(0xcb00_7100)];

/// The oldest segments are evicted for new ones, so a flood of them harms other connections only briefly.
#[test]
fn segments_that_are_never_taken_leave_room_for_others() {
    let mut fixture = CountFixture::exclusive();
    let mut segments: HashMap<MapData, BufferedSegmentKey, BufferedSegment> =
        open_pinned(&fixture, abi::maps::KEPT).try_into().expect("a hash of segments");
    let value = BufferedSegment { len: 1, syn: 0, bytes: [0; size_of::<BufferedSegment>() - 8] };
    for seq in 0..8 * abi::KEPT_MAX {
        segments
            .insert(BufferedSegmentKey { remote: UNUSED_ADDRESS, remote_port: 1, seq }, value, 0)
            .expect("room");
    }
    let request = get_request("/length/5");
    for cut in 1..request.len() {
        // The first segments may arrive before the pod has accepted the connection, and are buffered.
        let mut stream = fixture.connect();
        stream.write_all(&request.as_bytes()[..cut]).unwrap();
        stream.write_all(&request.as_bytes()[cut..]).unwrap();
        read_until(&mut stream, "xxxxx");
    }
    fixture.wait_settled(request.len() as u64 - 1);
}

#[test]
fn probes_that_never_came_leave_room_for_others() {
    let mut fixture = CountFixture::exclusive();
    let mut probes: HashMap<MapData, ProbeKey, u64> =
        open_pinned(&fixture, abi::maps::PROBES).try_into().expect("a hash of probes");
    for remote_port in 0..8 * abi::PROBES_MAX {
        let key = ProbeKey { remote: UNUSED_ADDRESS, remote_port };
        probes.insert(key, u64::MAX, 0).expect("room");
    }
    // Ports above 65535 are not in the map yet.
    for port in 1..=50 {
        let key = ProbeKey { remote: UNUSED_ADDRESS, remote_port: 1 << 16 | port };
        probes.insert(key, u64::MAX, 0).expect("room");
        assert_eq!(probes.get(&key, 0).ok(), Some(u64::MAX), "a new one takes the oldest's place");
    }
    let mut stream = fixture.connect();
    fixture.send_and_read(&mut stream, &get_request("/length/5"), "xxxxx");
    fixture.wait_settled_with_open(1, |_pod| 1);
}

/// The error is only reported: probes from an address without an entry count as requests, and other counts are right.
#[test]
fn more_node_addresses_than_the_map_holds_are_an_error() {
    let mut fixture = CountFixture::new();
    let address = |number: u32| {
        let mut octets = [0; 16];
        octets[12..].copy_from_slice(&(0x0a63_0001 + number).to_be_bytes());
        octets[10..12].fill(0xff);
        octets
    };
    let maps = &mut fixture.kernel.maps;
    let result = maps.set_node_addresses(&(0..=abi::NODE_MAX).map(address).collect());
    let message = result.expect_err("one too many").to_string();
    assert!(message.contains("NODE"), "{message}");
    maps.set_node_addresses(&(0..abi::NODE_MAX).map(address).collect())
        .expect("as many as there is room for");
    maps.set_node_addresses(&[address(0)].into()).expect("addresses that are removed leave room");
}
