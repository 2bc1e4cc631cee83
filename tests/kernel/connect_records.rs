//! Shell: records of clients' connects in the eBPF programs, and their lifetime.

use agent::kernel::map_op::BackendTarget;
use aya::maps::{Array, HashMap, Map, MapData};
use common::wire::ConnectionPath;
use datapath::abi::{self, maps};

use crate::{
    fixture::{NetnsFixture, SERVING_PORT, SharedKernelFixture},
    scripted_process::ScriptedProcess,
};

const ENOPROTOOPT: i32 = 92;
const EPROTONOSUPPORT: i32 = 93;
const ECONNREFUSED: i32 = 111;

/// A client, a service 1 whose pod responds, and a service 2 whose pod refuses.
struct ClientConnectFixture {
    /// Dropped before `kernel`, whose cgroups must hold no process then.
    client: ScriptedProcess,
    _server: ScriptedProcess,
    kernel: SharedKernelFixture,
    /// Cookie of the client's namespace.
    client_netns: u64,
    pods: [NetnsFixture; 2],
    claims: Array<MapData, u64>,
    records: Array<MapData, abi::ConnectRecord>,
    /// Copies of records in socket storage.
    copies: HashMap<MapData, u64, abi::ConnectRecord>,
    are_rows_filled: bool,
}

impl ClientConnectFixture {
    fn new() -> Self {
        let mut kernel = SharedKernelFixture::new();
        let (client, pods) = (kernel.add_client(), [kernel.add_pod(), kernel.add_pod()]);
        let mut server = pods[0].start_process();
        // The other pod has no server, so that connects to it are refused.
        server.expect_step(&format!("listen [::]:{SERVING_PORT} one"));
        for (pod, number) in pods.iter().zip(1..) {
            kernel.add_service(number, ConnectionPath::Direct);
            kernel.add_ready_pod(pod, number);
        }
        kernel.apply_table();
        let pinned_map =
            |name| MapData::from_pin(kernel.paths().pins().join(name)).expect("it is pinned");
        let claims = Map::Array(pinned_map(maps::CLAIMS));
        let records = Map::Array(pinned_map(maps::CLIENTS));
        let copies = Map::HashMap(pinned_map(maps::OVERFLOW_COPIES));
        Self {
            client: client.start_process(),
            _server: server,
            client_netns: client.cookie,
            pods,
            claims: claims.try_into().expect("an array of words"),
            records: records.try_into().expect("an array of records"),
            copies: copies.try_into().expect("a hash of records"),
            are_rows_filled: false,
            kernel,
        }
    }

    /// Marks every row as taken, so that sockets use socket storage.
    fn fill_rows(&mut self) {
        self.set_claims(1);
        self.are_rows_filled = true;
    }

    fn set_claims(&mut self, claim: u64) {
        for row in 0..abi::CLIENTS_MAX {
            self.claims.set(row, claim, 0).expect("inside the array");
        }
    }

    fn rows_taken(&self) -> usize {
        self.claims.iter().filter(|claim| *claim.as_ref().expect("readable") != 0).count()
    }

    /// Number of rows that have the cookie of a socket.
    fn rows_with_cookie(&self) -> usize {
        let records = self.records.iter().map(|record| record.expect("readable"));
        records.filter(|record| record.socket_cookie != 0).count()
    }

    /// Namespaces that the rows of sockets name, each with true if the socket was led to one of Rouse's pods. A row
    /// without a socket may name the namespace of its last one.
    fn namespaces_in_rows(&self) -> Vec<(Option<u64>, bool)> {
        let records = self.records.iter().map(|record| record.expect("readable"));
        let of_sockets = records.filter(|it| it.socket_cookie != 0);
        of_sockets.map(|it| (it.namespace(), it.is_routed())).collect()
    }

    /// Namespaces that the copies of records name, in the same way.
    fn namespaces_in_copies(&self) -> Vec<(Option<u64>, bool)> {
        let records = self.copies.iter().map(|entry| entry.expect("readable").1);
        records.map(|it| (it.namespace(), it.is_routed())).collect()
    }

    /// Number of sockets that use socket storage.
    fn storage_entries(&self) -> u64 {
        self.kernel.maps.control_word(abi::CONTROL_OVERFLOW)
    }

    /// Numbers of open connections to the two pods.
    fn open_connections(&self) -> [u64; 2] {
        let backends = self.kernel.maps.read_routes().expect("readable").backends;
        let connections_of = |pod: &NetnsFixture| {
            let to_pod =
                |backend: &BackendTarget| backend.address.ends_with(&[10, 99, 0, pod.number]);
            let ids = backends.iter().filter(|(_, backend)| to_pod(backend));
            ids.map(|(id, _)| self.kernel.maps.open_connections(*id)).sum()
        };
        [connections_of(&self.pods[0]), connections_of(&self.pods[1])]
    }
}

impl Drop for ClientConnectFixture {
    fn drop(&mut self) {
        // Later tests use the same rows; after a failure they get other ones.
        if self.are_rows_filled && !std::thread::panicking() {
            self.set_claims(0);
        }
    }
}

#[test]
fn a_connected_socket_has_one_row_until_it_closes() {
    let mut fixture = ClientConnectFixture::new();
    for connected in 1..=20 {
        assert_eq!(fixture.client.expect_step("connect 10.96.0.1:80"), "one 10.96.0.1:80");
        assert_eq!(fixture.open_connections(), [connected, 0]);
    }
    assert_eq!(fixture.rows_taken() as u64 + fixture.storage_entries(), 20);
    assert_eq!(fixture.rows_with_cookie(), fixture.rows_taken());
    let of_client = (Some(fixture.client_netns), true);
    assert_eq!(fixture.namespaces_in_rows(), vec![of_client; fixture.rows_taken()]);
    fixture.client.expect_step("drop");
    assert_eq!(
        (fixture.open_connections(), fixture.rows_taken(), fixture.storage_entries()),
        ([0, 0], 0, 0)
    );
    // TCP closes later than the socket, and must not find the row that the next socket has claimed.
    assert_eq!(fixture.rows_with_cookie(), 0);
}

#[test]
fn more_sockets_than_rows_come_and_go_without_a_trace() {
    let mut fixture = ClientConnectFixture::new();
    let untracked = fixture.kernel.maps.control_word(abi::CONTROL_UNTRACKED);
    let count = abi::CLIENTS_MAX + 100;
    let reply = fixture.client.expect_step(&format!("hammer 10.96.0.1:80 {count}"));
    assert_eq!(reply, format!("one={count}"));
    assert_eq!(
        (fixture.open_connections(), fixture.rows_taken(), fixture.storage_entries()),
        ([0, 0], 0, 0)
    );
    assert_eq!(fixture.kernel.maps.control_word(abi::CONTROL_UNTRACKED), untracked);
}

#[test]
fn a_socket_whose_row_is_taken_has_its_record_in_socket_storage() {
    let mut fixture = ClientConnectFixture::new();
    fixture.fill_rows();
    assert_eq!(fixture.client.expect_step("connect 10.96.0.1:80"), "one 10.96.0.1:80");
    assert_eq!(fixture.client.expect_step("connect [fd96::1]:80"), "one [fd96::1]:80");
    assert_eq!((fixture.open_connections(), fixture.storage_entries()), ([2, 0], 2));
    assert_eq!(fixture.namespaces_in_copies(), [(Some(fixture.client_netns), true); 2]);
    fixture.client.expect_step("drop");
    assert_eq!((fixture.open_connections(), fixture.storage_entries()), ([0, 0], 0));
    assert_eq!(fixture.namespaces_in_copies(), []);
    assert_eq!(fixture.rows_taken(), abi::CLIENTS_MAX as usize, "others' rows are left alone");
}

#[test]
fn a_connect_whose_record_has_no_room_for_a_copy_is_counted() {
    let mut fixture = ClientConnectFixture::new();
    fixture.fill_rows();
    let unlisted = |it: &ClientConnectFixture| it.kernel.maps.control_word(abi::CONTROL_UNLISTED);
    let before = unlisted(&fixture);
    assert_eq!(fixture.client.expect_step("connect 10.96.0.1:80"), "one 10.96.0.1:80");
    assert_eq!(unlisted(&fixture), before);
    // Cookies that no socket has.
    let others = 1 << 60..(1 << 60) + u64::from(abi::OVERFLOW_COPIES_MAX) - 1;
    for cookie in others.clone() {
        let written = fixture.copies.insert(cookie, abi::ConnectRecord::default(), 0);
        written.expect("it holds as many");
    }
    let reply = fixture.client.run_step("connect 10.96.0.1:80");
    // Removed before anything can fail: other tests use the same map.
    for cookie in others {
        fixture.copies.remove(&cookie).expect("it is there");
    }
    assert_eq!(reply, Ok("one 10.96.0.1:80".into()), "it works all the same");
    assert_eq!(unlisted(&fixture), before + 1);
    let (open, copied) = (fixture.storage_entries(), fixture.namespaces_in_copies().len());
    assert_eq!((open, copied), (2, 1));
    fixture.client.expect_step("drop");
    let (open, copied) = (fixture.storage_entries(), fixture.namespaces_in_copies().len());
    assert_eq!((open, copied), (0, 0));
}

#[test]
fn a_refused_connect_leaves_nothing_behind() {
    for full in [false, true] {
        let mut fixture = ClientConnectFixture::new();
        if full {
            fixture.fill_rows();
        }
        let before = fixture.rows_taken();
        assert_eq!(fixture.client.run_step("connect 10.96.0.2:80"), Err(ECONNREFUSED));
        assert_eq!(
            (fixture.open_connections(), fixture.rows_taken(), fixture.storage_entries()),
            ([0, 0], before, 0)
        );
    }
}

#[test]
fn a_socket_that_connects_again_counts_once_at_its_new_pod() {
    for full in [false, true] {
        let mut fixture = ClientConnectFixture::new();
        if full {
            fixture.fill_rows();
        }
        let before = fixture.rows_taken();
        let step = "retry 10.96.0.2:80 10.96.0.1:80";
        assert_eq!(fixture.client.expect_step(step), "one 10.96.0.1:80");
        let rows_taken = fixture.rows_taken() - before;
        assert_eq!(
            (fixture.open_connections(), rows_taken as u64 + fixture.storage_entries()),
            ([1, 0], 1)
        );
        fixture.client.expect_step("drop");
        assert_eq!(
            (fixture.open_connections(), fixture.rows_taken(), fixture.storage_entries()),
            ([0, 0], before, 0)
        );
    }
}

/// Starts a client in a pod's cgroup, where programs see the end of a connect.
fn client_in_pod(fixture: &mut ClientConnectFixture) -> ScriptedProcess {
    fixture.kernel.add_pod().start_process()
}

#[test]
fn a_socket_that_stays_open_after_its_connect_was_refused_counts_no_more() {
    for full in [false, true] {
        let mut fixture = ClientConnectFixture::new();
        let mut client = client_in_pod(&mut fixture);
        if full {
            fixture.fill_rows();
        }
        let before = fixture.rows_taken();
        client.expect_step("refused 10.96.0.2:80");
        assert_eq!(fixture.open_connections(), [0, 0]);
        client.expect_step("drop");
        assert_eq!(
            (fixture.open_connections(), fixture.rows_taken(), fixture.storage_entries()),
            ([0, 0], before, 0)
        );
    }
}

#[test]
fn a_socket_that_is_disconnected_and_stays_open_counts_no_more() {
    let mut fixture = ClientConnectFixture::new();
    let mut client = client_in_pod(&mut fixture);
    client.expect_step("connect 10.96.0.1:80");
    assert_eq!(fixture.open_connections(), [1, 0]);
    client.expect_step("disconnect");
    assert_eq!(fixture.open_connections(), [0, 0]);
    let namespaces = [fixture.namespaces_in_rows(), fixture.namespaces_in_copies()].concat();
    assert!(namespaces.iter().all(|(namespace, _)| namespace.is_none()), "{namespaces:?}");
    client.expect_step("drop");
    assert_eq!(
        (fixture.open_connections(), fixture.rows_taken(), fixture.storage_entries()),
        ([0, 0], 0, 0)
    );
}

#[test]
fn a_disconnected_socket_that_connects_to_its_backend_itself_shows_the_backend() {
    let mut fixture = ClientConnectFixture::new();
    let direct = format!("{}:{SERVING_PORT}", fixture.pods[0].ipv4());
    assert_eq!(fixture.client.expect_step("connect 10.96.0.1:80"), "one 10.96.0.1:80");
    fixture.client.expect_step("disconnect");
    let reply = fixture.client.expect_step(&format!("reconnect {direct}"));
    assert_eq!(reply, format!("one {direct}"));
}

/// Sockets of a client of the node itself are seen by no program between connect and close.
#[test]
fn a_socket_that_was_refused_counts_no_more_when_it_connects_elsewhere() {
    let mut fixture = ClientConnectFixture::new();
    let direct = format!("{}:{SERVING_PORT}", fixture.pods[0].ipv4());
    let step = format!("retry 10.96.0.2:80 {direct}");
    assert_eq!(fixture.client.expect_step(&step), format!("one {direct}"));
    assert_eq!(fixture.open_connections(), [0, 0]);
    fixture.client.expect_step("drop");
    assert_eq!(
        (fixture.open_connections(), fixture.rows_taken(), fixture.storage_entries()),
        ([0, 0], 0, 0)
    );
}

#[test]
fn an_mptcp_client_reaches_its_pod_and_leaves_no_row_taken() {
    let mut fixture = ClientConnectFixture::new();
    let untracked = fixture.kernel.maps.control_word(abi::CONTROL_UNTRACKED);
    let has_unlisted = |it: &ClientConnectFixture| it.kernel.maps.may_have_unlisted_clients([]);
    assert_eq!(has_unlisted(&fixture), untracked > 0);
    match fixture.client.run_step("mptcp 10.96.0.1:80") {
        // This kernel has no MPTCP, or it is disabled.
        Err(ENOPROTOOPT | EPROTONOSUPPORT) => return,
        reply => assert!(reply.expect("it connects").starts_with("one ")),
    }
    assert_eq!(fixture.kernel.maps.control_word(abi::CONTROL_UNTRACKED), untracked + 1);
    assert!(has_unlisted(&fixture), "no record names the frontend of this client");
    fixture.client.expect_step("drop");
    assert_eq!(
        (fixture.open_connections(), fixture.rows_taken(), fixture.storage_entries()),
        ([0, 0], 0, 0)
    );
}

#[test]
fn a_killed_client_gives_its_row_back() {
    let mut fixture = ClientConnectFixture::new();
    fixture.client.expect_step("connect 10.96.0.1:80");
    assert_eq!(fixture.open_connections(), [1, 0]);
    // Another process takes its place, so the connected one is dropped and killed.
    fixture.client = fixture.pods[1].start_process();
    assert_eq!(
        (fixture.open_connections(), fixture.rows_taken(), fixture.storage_entries()),
        ([0, 0], 0, 0)
    );
}

#[test]
fn the_next_agent_keeps_connect_records() {
    let mut fixture = ClientConnectFixture::new();
    fixture.client.expect_step("connect 10.96.0.1:80");
    drop(fixture.kernel.programs.take());
    let programs = agent::kernel::programs::EbpfPrograms::load(fixture.kernel.paths().clone())
        .expect("as before");
    fixture.kernel.programs = Some(programs);
    assert_eq!(fixture.open_connections(), [1, 0]);
    fixture.client.expect_step("drop");
    assert_eq!(
        (fixture.open_connections(), fixture.rows_taken(), fixture.storage_entries()),
        ([0, 0], 0, 0)
    );
}
