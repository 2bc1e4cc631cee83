//! Shell: connects to Services of the cluster whose endpoints come and go thousands of times a second.

use std::{
    ffi::OsStr,
    io,
    net::{IpAddr, SocketAddr, TcpStream},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    thread::{self, ScopedJoinHandle},
    time::Duration,
};

use agent::{
    config::ClusterIpMode,
    routes::plan::{ClusterChange, ClusterResource},
};
use common::wire::NamespacedName;
use nix::time::{ClockId, clock_gettime};
use socket2::SockRef;

use crate::{
    cluster_ip::{observed_service, observed_slice},
    fixture::{NetnsFixture, SERVING_PORT, SharedKernelFixture, run_ip},
    scripted_process::{ScriptedProcess, read_greeting, run_steps},
};

const ROLE: &str = "ROUSE_TEST_TIMED_CONNECTS";
/// ClusterIPs of the two Services. Each uses backend numbers that the other one gave up.
const CLUSTER_IPS: [&str; 2] = ["10.96.0.9", "10.96.0.10"];
/// Endpoints of each Service, of which some are ready at any time, often one alone.
const ENDPOINTS: u8 = 6;
const SLICES: u8 = 2;
/// Least number of changes while clients connect: those of two seconds, at 10,000 a second.
const CHANGES: usize = 20_000;
/// Least number of steps of each client.
const STEPS: usize = 20;
const CONNECTS_PER_STEP: usize = 100;
/// Least number of connects of each client during which an endpoint was not ready. On a busy machine many connects
/// take so long that each endpoint was ready at some moment of them.
const SELECTIVE_CONNECTS: usize = STEPS * CONNECTS_PER_STEP / 4;

/// Main function of this program as a client, which the test starts. It is not a test itself.
///
/// The step `connects ADDRESS N` has the reply `NAME:BEGAN:CONNECTED …`: the server, or the error as `errERRNO`, and
/// the times around each connect.
#[test]
#[ignore = "a role, run by the other tests"]
fn role() {
    if std::env::var_os(ROLE).is_some() {
        run_steps(run_step);
    }
}

fn run_step(words: &[&str]) -> io::Result<String> {
    let ["connects", address, count] = words else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let address: SocketAddr = address.parse().map_err(io::Error::other)?;
    let count: usize = count.parse().map_err(io::Error::other)?;
    let connects: Vec<String> = (0..count).map(|_| connect(address)).collect();
    Ok(connects.join(" "))
}

/// Connects once, and returns the server with the times before and after the connect.
fn connect(address: SocketAddr) -> String {
    let began_ns = now_ns();
    let result = TcpStream::connect(address);
    let connected_ns = now_ns();
    let name = result
        .and_then(greeting_of)
        .unwrap_or_else(|error| format!("err{}", error.raw_os_error().unwrap_or_default()));
    format!("{name}:{began_ns}:{connected_ns}")
}

/// Reads the name of the server, and resets the connection, so that no port waits.
fn greeting_of(mut stream: TcpStream) -> io::Result<String> {
    SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    read_greeting(&mut stream)
}

/// Time by a clock that all processes share.
fn now_ns() -> u64 {
    let now: Duration = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("Linux has it").into();
    u64::try_from(now.as_nanos()).expect("less than 500 years")
}

/// A connect of a client.
struct TimedConnect {
    /// Name of the server, or the error.
    name: String,
    began_ns: u64,
    connected_ns: u64,
}

impl TimedConnect {
    fn parse(word: &str) -> Self {
        let fields: Vec<&str> = word.split(':').collect();
        let [name, began, connected] = fields[..] else { panic!("`{word}` is no connect") };
        let [began_ns, connected_ns] = [began, connected].map(|it| it.parse().expect("a time"));
        Self { name: name.to_owned(), began_ns, connected_ns }
    }
}

/// Ready endpoints of a Service, with the times around the write that put them in force.
#[derive(Clone, Copy)]
struct ReadyEndpoints {
    began_ns: u64,
    ended_ns: u64,
    /// One bit for each endpoint.
    bits: u8,
}

/// Two Services with endpoints at addresses of one pod each.
struct ChurnFixture {
    /// Dropped before `kernel`, whose cgroups must hold no process then.
    _servers: [ScriptedProcess; 2],
    kernel: SharedKernelFixture,
    clients: [NetnsFixture; 2],
    /// Ready endpoints of each Service, from the first to the present ones.
    histories: [Vec<ReadyEndpoints>; 2],
}

impl ChurnFixture {
    /// Makes a fixture in which the first endpoint of each Service is ready.
    fn new() -> Self {
        let mut kernel = SharedKernelFixture::new();
        kernel.serve_cluster_services(ClusterIpMode::All);
        let clients = [kernel.add_client(), kernel.add_client()];
        let pods = [kernel.add_pod(), kernel.add_pod()];
        let mut servers = pods.each_ref().map(NetnsFixture::start_process);
        for ((pod, server), service) in pods.iter().zip(&mut servers).zip(0u8..) {
            let network = format!("10.{}.0.0/16", 100 + service);
            run_ip(&["-n", &pod.netns, "route", "add", "local", &network, "dev", "lo"]);
            for client in &clients {
                run_ip(&["-n", &client.netns, "route", "add", &network, "via", &pod.ipv4()]);
            }
            for endpoint in 0..ENDPOINTS {
                let at = SocketAddr::new(address(service, endpoint), SERVING_PORT);
                server.expect_step(&format!("listen {at} {}", name_of(service, endpoint)));
            }
        }
        let first = ReadyEndpoints { began_ns: 0, ended_ns: 0, bits: 1 };
        let histories = [vec![first], vec![first]];
        let mut fixture = Self { _servers: servers, kernel, clients, histories };
        let mut changes = ClusterResource::ALL.map(ClusterChange::ListBegun).to_vec();
        for (service, cluster_ip) in (0u8..).zip(CLUSTER_IPS) {
            let observed = observed_service(cluster_ip, None);
            changes.push(ClusterChange::Service(service_name(service), Some(observed)));
            changes.extend((0..SLICES).map(|slice| slice_change(service, slice, first.bits)));
        }
        changes.extend(ClusterResource::ALL.map(ClusterChange::ListCompleted));
        fixture.kernel.observe_cluster(changes);
        fixture
    }

    /// Starts a client for each Service.
    fn start_clients(&self) -> [ScriptedProcess; 2] {
        self.clients.each_ref().map(|client| {
            let variable = (ROLE, OsStr::new("1"));
            let (cgroup, netns) = (&client.cgroup, &client.netns);
            ScriptedProcess::start_role("endpoint_churn::role", variable, cgroup, netns)
        })
    }

    /// Makes an endpoint ready, or not ready. If it is the last ready one, another of its slice takes its place.
    fn change(&mut self, service: u8, endpoint: u8) {
        let history = &mut self.histories[usize::from(service)];
        let present = history.last().expect("it has its first endpoints").bits;
        let bits = match present ^ (1 << endpoint) {
            0 => 1 << ((endpoint + SLICES) % ENDPOINTS),
            bits => bits,
        };
        let change = slice_change(service, endpoint % SLICES, bits);
        let began_ns = now_ns();
        self.kernel.observe_cluster(vec![change]);
        history.push(ReadyEndpoints { began_ns, ended_ns: now_ns(), bits });
    }
}

/// Returns the content of a slice, if these endpoints of the Service are ready.
fn slice_change(service: u8, slice: u8, bits: u8) -> ClusterChange {
    let endpoints = (0..ENDPOINTS).filter(|it| it % SLICES == slice && bits & (1u8 << it) != 0);
    let addresses = endpoints.map(|endpoint| address(service, endpoint));
    let observed = observed_slice(service_name(service), addresses);
    let name = NamespacedName::new("default", format!("s{service}-{slice}"));
    ClusterChange::Slice(name, Some(observed))
}

fn service_name(service: u8) -> NamespacedName {
    NamespacedName::new("default", format!("s{service}"))
}

fn address(service: u8, endpoint: u8) -> IpAddr {
    IpAddr::from([10, 100 + service, 0, 1 + endpoint])
}

/// Name by which an endpoint greets its clients.
fn name_of(service: u8, endpoint: u8) -> String {
    format!("s{service}e{endpoint}")
}

/// Number of changes, set to the largest number on drop, also by a panic, so that clients end.
struct ChangeCounter<'a>(&'a AtomicUsize);

impl Drop for ChangeCounter<'_> {
    fn drop(&mut self) {
        self.0.store(usize::MAX, Relaxed);
    }
}

/// Connects until enough changes and steps were made.
fn run_client(
    mut process: ScriptedProcess,
    cluster_ip: &str,
    changes: &AtomicUsize,
) -> Vec<TimedConnect> {
    let step = format!("connects {cluster_ip}:80 {CONNECTS_PER_STEP}");
    let mut connects = Vec::new();
    while changes.load(Relaxed) < CHANGES || connects.len() < STEPS * CONNECTS_PER_STEP {
        let reply = process.expect_step(&step);
        connects.extend(reply.split(' ').map(TimedConnect::parse));
    }
    connects
}

/// Asserts that a connect has reached an endpoint that was ready at some moment of it. Returns true if other endpoints
/// were not ready all the time.
fn check_connect(service: u8, connect: &TimedConnect, history: &[ReadyEndpoints]) -> bool {
    let TimedConnect { name, began_ns, connected_ns } = connect;
    // Endpoints may be in force until the write of the next ones has ended.
    let first = history[1..].partition_point(|next| next.ended_ns < *began_ns);
    let possible = history[first..].iter().take_while(|it| it.began_ns <= *connected_ns);
    let bits = possible.fold(0u8, |bits, it| bits | it.bits);
    let is_ready = |endpoint: &u8| bits & (1u8 << endpoint) != 0;
    let mut ready = (0..ENDPOINTS).filter(is_ready).map(|endpoint| name_of(service, endpoint));
    let has_reached_one = ready.any(|it| it == *name);
    assert!(has_reached_one, "{name} of {bits:#b}, from {began_ns} to {connected_ns}");
    bits.count_ones() < u32::from(ENDPOINTS)
}

/// The fixture's time passes at each plan, so backend numbers are used again at once.
#[test]
fn each_connect_among_thousands_of_changes_reaches_an_endpoint_that_was_ready_during_it() {
    let mut fixture = ChurnFixture::new();
    let changes = AtomicUsize::new(0);
    let counted = &changes;
    let processes = fixture.start_clients();
    let connects: Vec<Vec<TimedConnect>> = thread::scope(|scope| {
        let counter = ChangeCounter(counted);
        let started = processes.into_iter().zip(CLUSTER_IPS).map(|(process, cluster_ip)| {
            scope.spawn(move || run_client(process, cluster_ip, counted))
        });
        let clients: Vec<_> = started.collect();
        let mut random = 1u64;
        while !clients.iter().all(ScopedJoinHandle::is_finished) {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let choice = u8::try_from(random >> 56).expect("eight bits");
            fixture.change(choice % 2, choice / 2 % ENDPOINTS);
            counted.fetch_add(1, Relaxed);
        }
        drop(counter);
        clients.into_iter().map(|it| it.join().expect("no client failed")).collect()
    });
    for (service, connects) in (0u8..).zip(&connects) {
        let history = &fixture.histories[usize::from(service)];
        let selective = connects.iter().filter(|it| check_connect(service, it, history)).count();
        println!("{} connects, {} changes", connects.len(), history.len() - 1);
        assert!(selective >= SELECTIVE_CONNECTS, "only {selective} could have gone wrong");
    }
}
