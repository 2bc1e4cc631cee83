//! Shell: maps of other sizes: programs with new maps take over from those in force, and the other way round.

use std::{collections::BTreeMap, fs};

use agent::{
    kernel::{map_op::MapOp, maps::KernelMaps, programs::EbpfPrograms},
    map_sizes::MapSizes,
    paths::AgentPaths,
};
use aya::maps::{Array, Map, MapData};
use common::wire::ConnectionPath;
use datapath::abi::{self, FrontendKey, maps};

use crate::fixture::{KernelFixture, SERVING_PORT};

const SMALLEST: MapSizes = MapSizes {
    frontends: 256,
    backends: 256,
    list_entries: 256,
    connect_records: 256,
    affinity_clients: 256,
};

/// Takes over with programs whose maps have these sizes, as an agent does that was given them.
fn change_sizes(fixture: &mut KernelFixture, map_sizes: MapSizes) {
    let paths = AgentPaths { map_sizes, ..fixture.paths().clone() };
    let mut programs = EbpfPrograms::load(paths.clone()).expect("the kernel takes them");
    drop(fixture.programs.take());
    let maps = KernelMaps::open(&paths.pins()).expect("they are pinned");
    assert_eq!(maps.read_routes().expect("readable").sizes, map_sizes);
    fixture.continue_with_maps(maps);
    fixture.apply_table();
    programs.take_over().expect("the tables are filled");
    programs.retire_previous().expect("pins can be removed");
    fixture.programs = Some(programs);
}

/// Names of the folders of pins.
fn pin_folders(fixture: &KernelFixture) -> Vec<String> {
    let entries = fs::read_dir(&fixture.paths().bpffs).expect("a folder").flatten();
    // The kernel puts files of its own into each bpf filesystem.
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let mut names: Vec<String> =
        folders.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Sockets stay open from all sizes, also from those that come back.
#[test]
fn sizes_change_under_traffic_and_back_without_a_failed_connect() {
    let mut fixture = KernelFixture::new();
    let (client, pod) = (fixture.add_client(), fixture.add_pod());
    let mut server = pod.start_process();
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.add_ready_pod(&pod, 1);
    fixture.apply_table();
    let (mut busy, mut holders) = (client.start_process(), Vec::new());
    let default = MapSizes::default();
    for sizes in [MapSizes::WHOLE_CLUSTER, default, SMALLEST, default] {
        let mut holder = client.start_process();
        assert_eq!(holder.expect_step("connect 10.96.0.1:80"), "one 10.96.0.1:80");
        holders.push(holder);
        busy.send_step("hammer 10.96.0.1:80 3000");
        change_sizes(&mut fixture, sizes);
        assert_eq!(busy.read_reply(), Ok("one=3000".into()), "{sizes:?}");
        assert_eq!(busy.expect_step("hammer 10.96.0.1:80 20"), "one=20");
        for holder in &mut holders {
            assert_eq!(holder.expect_step("peer"), "10.96.0.1:80", "{sizes:?}");
        }
        let programs = fixture.programs.as_ref().expect("loaded above");
        programs.verify_by_self_test(&mut fixture.maps).expect("they are in force");
    }
    // One folder in force, and one for each of the four that have open sockets.
    let folders = pin_folders(&fixture);
    assert_eq!(folders.len(), 5, "{folders:?}");
    drop(holders);
    busy.expect_step("drop");
    let programs = fixture.programs.as_mut().expect("loaded above");
    assert_eq!(programs.remove_outlived_pins(), 0);
    assert_eq!(pin_folders(&fixture), [format!("v{}", abi::ABI_VERSION)]);
    assert_eq!(busy.expect_step("hammer 10.96.0.1:80 20"), "one=20");
}

/// An agent may end, or get other sizes again, before its tables are filled.
#[test]
fn connects_follow_the_tables_in_force_after_a_change_of_sizes_that_was_given_up() {
    let mut fixture = KernelFixture::new();
    let (client, pod) = (fixture.add_client(), fixture.add_pod());
    let mut server = pod.start_process();
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.add_ready_pod(&pod, 1);
    fixture.apply_table();
    let mut busy = client.start_process();
    for sizes in [SMALLEST, MapSizes::WHOLE_CLUSTER] {
        busy.send_step("hammer 10.96.0.1:80 3000");
        let paths = AgentPaths { map_sizes: sizes, ..fixture.paths().clone() };
        let programs = EbpfPrograms::load(paths).expect("the kernel takes them");
        drop(fixture.programs.replace(programs));
        assert_eq!(busy.read_reply(), Ok("one=3000".into()), "{sizes:?}");
    }
    // The third one takes over from the first one.
    change_sizes(&mut fixture, MapSizes { backends: 512, ..SMALLEST });
    assert_eq!(busy.expect_step("hammer 10.96.0.1:80 20"), "one=20");
    busy.expect_step("drop");
    fixture.programs.as_mut().expect("loaded above").remove_outlived_pins();
    let folder = format!("v{}-256-512-256-256-256", abi::ABI_VERSION);
    assert_eq!(pin_folders(&fixture), [folder]);
}

#[test]
fn sockets_find_their_rows_in_a_small_map_of_connect_records() {
    let mut fixture = KernelFixture::new();
    let (client, pod) = (fixture.add_client(), fixture.add_pod());
    let mut server = pod.start_process();
    server.expect_step(&format!("listen 0.0.0.0:{SERVING_PORT} one"));
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.add_ready_pod(&pod, 1);
    change_sizes(&mut fixture, SMALLEST);
    let mut client = client.start_process();
    for _ in 0..30 {
        assert_eq!(client.expect_step("connect 10.96.0.1:80"), "one 10.96.0.1:80");
    }
    let pins = fixture.programs.as_ref().expect("loaded above").pins();
    let claims = MapData::from_pin(pins.join(maps::CLAIMS)).expect("it is pinned");
    let claims: Array<MapData, u64> = Array::try_from(Map::Array(claims)).expect("words");
    let taken = || claims.iter().filter(|claim| *claim.as_ref().expect("readable") != 0).count();
    let overflow = fixture.maps.control_word(abi::CONTROL_OVERFLOW);
    assert_eq!(taken() as u64 + overflow, 30);
    // By chance a few sockets have equal indexes. With a wrong mask nearly all would be outside of the map.
    assert!(taken() >= 20, "{} rows", taken());
    client.expect_step("drop");
    assert_eq!((taken(), fixture.maps.control_word(abi::CONTROL_OVERFLOW)), (0, 0));
}

/// Returns the writes of so many frontends, at different addresses.
fn frontend_writes(count: u32) -> Vec<MapOp> {
    let write = |number: u32| {
        let mut address = [0xFD; 16];
        address[12..].copy_from_slice(&number.to_be_bytes());
        let key = FrontendKey { address, port_be: 80_u16.to_be(), protocol: 6, reserved: 0 };
        MapOp::Frontend { key, service_id: abi::FIRST_SERVICE + number }
    };
    (0..count).map(write).collect()
}

/// One system call writes about a thousand frontends, so several are needed.
#[test]
fn thousands_of_frontends_are_written_and_found() {
    let mut fixture = KernelFixture::new();
    let ops = frontend_writes(10_000);
    fixture.maps.apply(&ops).expect("they fit");
    let found = fixture.maps.read_routes().expect("readable").frontends;
    let entry = |op: &MapOp| match op {
        MapOp::Frontend { key, service_id } => (*key, *service_id),
        other => panic!("{other:?}"),
    };
    assert_eq!(found, ops.iter().map(entry).collect::<BTreeMap<FrontendKey, u32>>());
}

#[test]
fn more_frontends_than_a_map_holds_are_an_error_that_names_it() {
    let mut fixture = KernelFixture::new();
    change_sizes(&mut fixture, SMALLEST);
    let error = fixture.maps.apply(&frontend_writes(300)).expect_err("256 fit");
    assert_eq!(error.to_string(), "cannot write 300 entries to map FRONTENDS");
    let found = fixture.maps.read_routes().expect("readable").frontends;
    let fitting = 256 - abi::SELF_TEST_FRONTENDS as usize;
    assert_eq!(found.len(), fitting, "beside the frontends of the self-test");
}
