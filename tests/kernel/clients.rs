//! Shell: records of clients' connects in the eBPF programs, and their lifetime.

use agent::kernel::map_op::BackendTarget;
use aya::maps::{Array, Map, MapData};
use common::wire::ConnectionPath as Way;
use datapath::abi::{self, maps};

use crate::{
    actor::ScriptedProcess,
    bed::{KernelFixture, NetnsFixture, SERVING_PORT},
};

const ENOPROTOOPT: i32 = 92;
const EPROTONOSUPPORT: i32 = 93;
const ECONNREFUSED: i32 = 111;

/// A client, a service 1 whose pod answers, and a service 2 whose pod refuses.
struct ClientConnectFixture {
    fixture: KernelFixture,
    client: ScriptedProcess,
    pods: [NetnsFixture; 2],
    _server: ScriptedProcess,
    claims: Array<MapData, u64>,
}

impl ClientConnectFixture {
    fn new() -> Self {
        let mut fixture = KernelFixture::new();
        let (client, pods) = (fixture.add_client(), [fixture.add_pod(), fixture.add_pod()]);
        let mut server = pods[0].start_process();
        server.expect_step(&format!("listen [::]:{SERVING_PORT} one"));
        for (pod, number) in pods.iter().zip(1..) {
            fixture.add_service(number, Way::Direct);
            fixture.add_ready_pod(pod, number);
        }
        fixture.apply_table();
        let pin = fixture.paths().pins().join(maps::CLAIMS);
        let claims = Map::Array(MapData::from_pin(pin).expect("it is pinned"));
        let claims = Array::try_from(claims).expect("an array of words");
        Self { client: client.start_process(), fixture, pods, _server: server, claims }
    }

    /// Marks every row as taken, so that sockets use socket storage.
    fn fill_rows(&mut self) {
        for row in 0..abi::CLIENTS_MAX {
            self.claims.set(row, 1, 0).expect("inside the array");
        }
    }

    fn rows_taken(&self) -> usize {
        self.claims.iter().filter(|claims| *claims.as_ref().expect("readable") != 0).count()
    }

    /// Number of sockets that use socket storage.
    fn storage_entries(&self) -> u64 {
        self.fixture.maps.control_word(abi::CONTROL_OVERFLOW)
    }

    /// Numbers of open connections to the two pods.
    fn open_connections(&self) -> [u64; 2] {
        let backends = self.fixture.maps.read_routes().expect("readable").backends;
        let of = |pod: &NetnsFixture| {
            let to_pod =
                |backend: &BackendTarget| backend.address.ends_with(&[10, 99, 0, pod.number]);
            let ids = backends.iter().filter(|(_, backend)| to_pod(backend));
            ids.map(|(id, _)| self.fixture.maps.open_connections(*id)).sum()
        };
        [of(&self.pods[0]), of(&self.pods[1])]
    }
}

#[test]
fn a_connected_socket_has_one_row_until_it_closes() {
    let mut scene = ClientConnectFixture::new();
    for connected in 1..=20 {
        assert_eq!(scene.client.expect_step("connect 10.96.0.1:80"), "one 10.96.0.1:80");
        assert_eq!(scene.open_connections(), [connected, 0]);
    }
    assert_eq!(scene.rows_taken() as u64 + scene.storage_entries(), 20);
    scene.client.expect_step("drop");
    assert_eq!(
        (scene.open_connections(), scene.rows_taken(), scene.storage_entries()),
        ([0, 0], 0, 0)
    );
}

#[test]
fn more_sockets_than_rows_come_and_go_without_a_trace() {
    let mut scene = ClientConnectFixture::new();
    let count = abi::CLIENTS_MAX + 100;
    let seen = scene.client.expect_step(&format!("hammer 10.96.0.1:80 {count}"));
    assert_eq!(seen, format!("one={count}"));
    assert_eq!(
        (scene.open_connections(), scene.rows_taken(), scene.storage_entries()),
        ([0, 0], 0, 0)
    );
    assert_eq!(scene.fixture.maps.control_word(abi::CONTROL_UNTRACKED), 0);
}

#[test]
fn a_socket_whose_row_is_taken_is_remembered_in_storage() {
    let mut scene = ClientConnectFixture::new();
    scene.fill_rows();
    assert_eq!(scene.client.expect_step("connect 10.96.0.1:80"), "one 10.96.0.1:80");
    assert_eq!(scene.client.expect_step("connect [fd96::1]:80"), "one [fd96::1]:80");
    assert_eq!((scene.open_connections(), scene.storage_entries()), ([2, 0], 2));
    scene.client.expect_step("drop");
    assert_eq!((scene.open_connections(), scene.storage_entries()), ([0, 0], 0));
    assert_eq!(scene.rows_taken(), abi::CLIENTS_MAX as usize, "others' rows are left alone");
}

#[test]
fn a_refused_connect_leaves_nothing_behind() {
    for full in [false, true] {
        let mut scene = ClientConnectFixture::new();
        if full {
            scene.fill_rows();
        }
        let before = scene.rows_taken();
        assert_eq!(scene.client.run_step("connect 10.96.0.2:80"), Err(ECONNREFUSED));
        assert_eq!(
            (scene.open_connections(), scene.rows_taken(), scene.storage_entries()),
            ([0, 0], before, 0)
        );
    }
}

#[test]
fn a_socket_that_connects_again_counts_once_at_its_new_pod() {
    for full in [false, true] {
        let mut scene = ClientConnectFixture::new();
        if full {
            scene.fill_rows();
        }
        let before = scene.rows_taken();
        let again = "retry 10.96.0.2:80 10.96.0.1:80";
        assert_eq!(scene.client.expect_step(again), "one 10.96.0.1:80");
        let taken = scene.rows_taken() - before;
        assert_eq!((scene.open_connections(), taken as u64 + scene.storage_entries()), ([1, 0], 1));
        scene.client.expect_step("drop");
        assert_eq!(
            (scene.open_connections(), scene.rows_taken(), scene.storage_entries()),
            ([0, 0], before, 0)
        );
    }
}

/// Starts a client in a pod's cgroup, where programs see the end of a connect.
fn client_in_pod(scene: &mut ClientConnectFixture) -> ScriptedProcess {
    scene.fixture.add_pod().start_process()
}

#[test]
fn a_socket_that_stays_open_after_its_connect_was_refused_counts_no_more() {
    for full in [false, true] {
        let mut scene = ClientConnectFixture::new();
        let mut client = client_in_pod(&mut scene);
        if full {
            scene.fill_rows();
        }
        let before = scene.rows_taken();
        client.expect_step("refused 10.96.0.2:80");
        assert_eq!(scene.open_connections(), [0, 0]);
        client.expect_step("drop");
        assert_eq!(
            (scene.open_connections(), scene.rows_taken(), scene.storage_entries()),
            ([0, 0], before, 0)
        );
    }
}

#[test]
fn a_socket_that_is_disconnected_and_stays_open_counts_no_more() {
    let mut scene = ClientConnectFixture::new();
    let mut client = client_in_pod(&mut scene);
    client.expect_step("connect 10.96.0.1:80");
    assert_eq!(scene.open_connections(), [1, 0]);
    client.expect_step("disconnect");
    assert_eq!(scene.open_connections(), [0, 0]);
    client.expect_step("drop");
    assert_eq!(
        (scene.open_connections(), scene.rows_taken(), scene.storage_entries()),
        ([0, 0], 0, 0)
    );
}

/// Sockets of a client of the node itself are seen by no program between connect and close.
#[test]
fn a_socket_that_was_refused_counts_no_more_when_it_connects_elsewhere() {
    let mut scene = ClientConnectFixture::new();
    let direct = format!("{}:{SERVING_PORT}", scene.pods[0].ipv4());
    let again = format!("retry 10.96.0.2:80 {direct}");
    assert_eq!(scene.client.expect_step(&again), format!("one {direct}"));
    assert_eq!(scene.open_connections(), [0, 0]);
    scene.client.expect_step("drop");
    assert_eq!(
        (scene.open_connections(), scene.rows_taken(), scene.storage_entries()),
        ([0, 0], 0, 0)
    );
}

#[test]
fn an_mptcp_client_reaches_its_pod_and_leaves_no_row_taken() {
    let mut scene = ClientConnectFixture::new();
    match scene.client.run_step("mptcp 10.96.0.1:80") {
        // This kernel has no MPTCP, or it is disabled.
        Err(ENOPROTOOPT | EPROTONOSUPPORT) => return,
        answer => assert!(answer.expect("it connects").starts_with("one ")),
    }
    assert_eq!(scene.fixture.maps.control_word(abi::CONTROL_UNTRACKED), 1);
    scene.client.expect_step("drop");
    assert_eq!(
        (scene.open_connections(), scene.rows_taken(), scene.storage_entries()),
        ([0, 0], 0, 0)
    );
}

#[test]
fn a_killed_client_gives_its_row_back() {
    let mut scene = ClientConnectFixture::new();
    scene.client.expect_step("connect 10.96.0.1:80");
    assert_eq!(scene.open_connections(), [1, 0]);
    // Another actor takes its place, so the connected one is dropped and killed.
    scene.client = scene.pods[1].start_process();
    assert_eq!(
        (scene.open_connections(), scene.rows_taken(), scene.storage_entries()),
        ([0, 0], 0, 0)
    );
}

#[test]
fn the_next_agent_keeps_what_is_remembered() {
    let mut scene = ClientConnectFixture::new();
    scene.client.expect_step("connect 10.96.0.1:80");
    drop(scene.fixture.programs.take());
    let again = agent::kernel::programs::EbpfPrograms::load(scene.fixture.paths().clone())
        .expect("as before");
    scene.fixture.programs = Some(again);
    assert_eq!(scene.open_connections(), [1, 0]);
    scene.client.expect_step("drop");
    assert_eq!(
        (scene.open_connections(), scene.rows_taken(), scene.storage_entries()),
        ([0, 0], 0, 0)
    );
}
