//! Components killed under load and started again: effects on users, counts, and leftovers.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, Scope, ScopedJoinHandle};

use agent::kernel::maps::KernelMaps;
use datapath::abi;
use tests::multi_process_node::{
    COMPONENTS, HelloResponse, MultiProcessNode, PersistentConnection, find_remains, get_once,
    poll_until, wait_for,
};

/// Manifest of the demo's service.
const HELLO: &str = include_str!("../../examples/hello.yaml");
/// Admin port of the activator.
const ACTIVATOR: u16 = 7103;
/// Number of requests on new connections that must succeed while a component is dead.
const REQUESTS_WHILE_DEAD: u64 = 100;

/// Manifest of a service of one pod that never sleeps. The load stays below its target of 100 requests.
fn steady_manifest() -> String {
    let hello = HELLO.replace("name: hello", "name: steady").replace("\"10\"", "\"100\"");
    hello.replace(
        "max-scale: \"8\"",
        "max-scale: \"1\"\n        autoscaling.knative.dev/min-scale: \"1\"",
    )
}

/// Name of a sleeping service.
fn sleeper_name(number: usize) -> String {
    format!("sleeper-{number}")
}

/// Manifest of a sleeping service whose pod listens so late that a test can act while requests wait: read a metric and
/// kill a component, on a machine on which each takes a second.
fn sleeper_manifest(number: usize) -> String {
    let delayed_container =
        "        - env: [{ name: HELLO_LISTEN_DELAY_MS, value: \"4000\" }]\n          image:";
    let hello = HELLO.replace("name: hello", &format!("name: {}", sleeper_name(number)));
    hello.replace("        - image:", delayed_container)
}

/// Results of the load.
#[derive(Default)]
pub(super) struct LoadResults {
    stop: AtomicBool,
    answered: AtomicU64,
    new_connections: AtomicU64,
    failures: Mutex<Vec<String>>,
}

impl LoadResults {
    fn record(&self, request: &str, response: &io::Result<HelloResponse>) {
        let is_correct =
            matches!(response, Ok(response) if response.status == 200 && response.direct);
        if is_correct {
            self.answered.fetch_add(1, Ordering::Relaxed);
        } else {
            let line = format!("{request}: {response:?}");
            self.failures.lock().unwrap_or_else(PoisonError::into_inner).push(line);
        }
    }

    fn is_running(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    fn new_connections(&self) -> u64 {
        self.new_connections.load(Ordering::Relaxed)
    }

    pub(super) fn failures(&self) -> Vec<String> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Sends requests on a connection that must last as long as the load.
fn run_keep_alive_client(node: &MultiProcessNode, address: SocketAddr, results: &LoadResults) {
    node.enter_client_netns();
    let mut connection = PersistentConnection::open(address).expect("a connection");
    while results.is_running() {
        let response = connection.get("/?sleep=5");
        results.record("kept", &response);
        if response.is_err() {
            return;
        }
    }
}

/// Sends requests that each open a connection.
fn run_new_connection_client(node: &MultiProcessNode, address: SocketAddr, results: &LoadResults) {
    node.enter_client_netns();
    while results.is_running() {
        results.record("new", &get_once(address, "/?sleep=2&close"));
        results.new_connections.fetch_add(1, Ordering::Relaxed);
    }
}

/// Sends one request beside the load.
fn spawn_request<'scope>(
    scope: &'scope Scope<'scope, '_>,
    node: &'scope MultiProcessNode,
    address: SocketAddr,
    path: &'static str,
) -> ScopedJoinHandle<'scope, io::Result<HelloResponse>> {
    // The namespace is entered before the test kills a component.
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = scope.spawn(move || {
        node.enter_client_netns();
        sender.send(()).expect("the test waits");
        get_once(address, path)
    });
    receiver.recv().expect("a client");
    thread
}

fn join_request(
    thread: ScopedJoinHandle<'_, io::Result<HelloResponse>>,
) -> io::Result<HelloResponse> {
    thread.join().expect("no panic")
}

/// Runs load on `address` while `meanwhile` runs. Ends the load also when `meanwhile` panics.
pub(super) fn under_load(
    node: &MultiProcessNode,
    address: SocketAddr,
    meanwhile: impl FnOnce(&LoadResults),
) -> LoadResults {
    let results = LoadResults::default();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| run_keep_alive_client(node, address, &results));
        }
        for _ in 0..2 {
            scope.spawn(|| run_new_connection_client(node, address, &results));
        }
        let work = std::panic::AssertUnwindSafe(|| meanwhile(&results));
        let result = std::panic::catch_unwind(work);
        results.stop.store(true, Ordering::Relaxed);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    results
}

fn wait_progress(results: &LoadResults, count: u64) {
    let before = results.new_connections();
    wait_for("new connections", || (results.new_connections() >= before + count).then_some(()));
}

/// Waits until the activator holds `count` requests.
fn wait_for_waiting_requests(node: &MultiProcessNode, count: f64) {
    let figure = "rouse_activator_waiting_requests";
    wait_for("requests that wait", || (node.metric(ACTIVATOR, figure)? == count).then_some(()));
}

/// Waits until none of the sleepers has a pod.
pub(super) fn wait_asleep(node: &MultiProcessNode, sleepers: &[SocketAddr]) {
    (0..sleepers.len()).for_each(|number| node.wait_asleep(&sleeper_name(number)));
}

/// Starts a node of four processes with the service `steady` and `count` sleepers, and waits until `steady` is on the
/// direct path. Returns the addresses of `steady` and of the sleepers.
///
/// Each component that is killed has a sleeper of its own: those before it still wait for the end of their windows.
pub(super) fn start_with_services(
    node: MultiProcessNode,
    count: usize,
) -> (MultiProcessNode, SocketAddr, Vec<SocketAddr>) {
    node.start(&COMPONENTS);
    let manifests = (0..count).map(sleeper_manifest).chain([steady_manifest()]);
    node.apply(&manifests.collect::<Vec<_>>().join("---\n"));
    let names: Vec<String> = (0..count).map(sleeper_name).collect();
    let (steady, sleepers) = (node.cluster_ip("steady"), node.cluster_ips(&names));
    node.join_client_cgroup();
    wait_for("direct connections", || {
        in_client_netns(&node, || get_once(steady, "/").ok())?.direct.then_some(())
    });
    wait_asleep(&node, &sleepers);
    (node, steady, sleepers)
}

/// Runs `work` on a thread in the clients' network namespace.
pub(super) fn in_client_netns<T: Send>(
    node: &MultiProcessNode,
    work: impl FnOnce() -> T + Send,
) -> T {
    let inside = || {
        node.enter_client_netns();
        work()
    };
    thread::scope(|scope| scope.spawn(inside).join()).expect("no panic")
}

/// Kills `component` while one request waits for a sleeper, sends another request meanwhile, and starts the component
/// again. Returns the results of both requests.
pub(super) fn kill_and_start(
    node: &MultiProcessNode,
    component: &'static str,
    results: &LoadResults,
    (steady, sleeper): (SocketAddr, SocketAddr),
) -> [io::Result<HelloResponse>; 2] {
    thread::scope(|scope| {
        let long_request = spawn_request(scope, node, steady, "/?sleep=3000");
        let before = spawn_request(scope, node, sleeper, "/before");
        wait_for_waiting_requests(node, 1.0);
        node.kill(component);
        let during = spawn_request(scope, node, sleeper, "/during");
        wait_progress(results, REQUESTS_WHILE_DEAD);
        if component == "activator" {
            // A client that gets no processor for a while would connect to the next activator.
            let are_refused = || before.is_finished() && during.is_finished();
            wait_for("the requests to be refused", || are_refused().then_some(()));
        }
        node.start(&[component]);
        let responses = [join_request(before), join_request(during)];
        results.record("long", &join_request(long_request));
        responses
    })
}

/// Sends one request to each sleeper at the same time, and asserts that it is answered.
pub(super) fn assert_woken_again(node: &MultiProcessNode, sleepers: &[SocketAddr]) {
    thread::scope(|scope| {
        let send = |sleeper: &SocketAddr| spawn_request(scope, node, *sleeper, "/again");
        let running: Vec<_> = sleepers.iter().map(send).collect();
        for request in running {
            let response = join_request(request).expect("a response");
            assert_eq!(response.status, 200, "{response:?}");
        }
    });
}

/// Number of requests that the application at `address` has counted, including this query, and the name of its pod.
fn application_count(node: &MultiProcessNode, address: SocketAddr) -> (u64, String) {
    let response = in_client_netns(node, || get_once(address, "/counts")).expect("a response");
    let text = response.body.split("\"started\":").nth(1).unwrap_or_default();
    let digits: String = text.chars().take_while(char::is_ascii_digit).collect();
    (digits.parse().expect("a count"), response.pod)
}

#[test]
fn components_are_killed_and_started_and_only_requests_inside_the_activator_are_lost() {
    let node = MultiProcessNode::new("restarts");
    let (node, steady, sleepers) = start_with_services(node, COMPONENTS.len());
    let (count_at_start, pod) = application_count(&node, steady);
    let results = under_load(&node, steady, |results| {
        wait_progress(results, REQUESTS_WHILE_DEAD);
        for (component, sleeper) in COMPONENTS.into_iter().zip(&sleepers) {
            let responses = kill_and_start(&node, component, results, (steady, *sleeper));
            let message = format!("{component} killed: {responses:?}");
            let is_success =
                responses.map(|response| response.is_ok_and(|response| response.status == 200));
            // Requests at the activator are lost when it is killed; later ones are refused until it is back, and may
            // be sent again.
            assert_eq!(is_success, [component != "activator"; 2], "{message}");
            println!("{message}");
        }
        // Also those whose windows began before a component was killed.
        wait_asleep(&node, &sleepers);
    });
    assert_eq!(results.failures(), [] as [String; 0]);

    let (count_at_end, pod_at_end) = application_count(&node, steady);
    assert_eq!(pod_at_end, pod, "the pod outlives every component");
    let answered = results.answered.load(Ordering::Relaxed);
    assert_eq!(count_at_end - count_at_start, answered + 1, "the application's own count");
    let maps =
        KernelMaps::open(&node.layout.bpf().join(format!("v{}", abi::ABI_VERSION))).expect("maps");
    // The agent learns of the end of the others a moment after the objects are gone.
    let slot = wait_for("one pod to be left in the map", || {
        let pods = maps.pods().expect("pods");
        let mut slots = pods.values().map(|pod| pod.slot);
        slots.next().filter(|_| slots.next().is_none())
    });
    wait_for("the last connection to end", || {
        (maps.pod_state(slot).connections == 0).then_some(())
    });
    let (totals, state) = (maps.totals(slot), maps.pod_state(slot));
    assert_eq!(
        (totals.started, totals.finished),
        (count_at_end, count_at_end),
        "the kernel's counts"
    );
    assert_eq!(state.in_flight, 0);
    assert_woken_again(&node, &sleepers);
}

#[test]
fn a_killed_node_is_taken_down_without_a_trace_and_comes_up_again() {
    let node = MultiProcessNode::new("killed");
    for round in 0..2 {
        node.start(&["node"]);
        if round == 0 {
            node.apply(&steady_manifest());
        }
        let address = node.cluster_ip("steady");
        node.join_client_cgroup();
        wait_for("a direct response", || {
            in_client_netns(&node, || get_once(address, "/").ok())?.direct.then_some(())
        });
        under_load(&node, address, |results| {
            wait_progress(results, REQUESTS_WHILE_DEAD);
            node.kill("node");
            wait_progress(results, REQUESTS_WHILE_DEAD);
            assert_eq!(results.failures(), [] as [String; 0], "without any component");
        });
        take_down(&node);
    }
}

#[test]
fn a_gateway_port_that_is_taken_removes_nothing_of_a_killed_node() {
    let node = MultiProcessNode::new("port");
    node.start(&["node"]);
    node.kill("node");
    let namespaces = node.namespaces().inodes();
    let taken = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = taken.local_addr().expect("bound").to_string();
    let output = node.run_rouse(&["up", "--gateway", &address]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && message.contains("--gateway"), "{message}");
    assert!(!namespaces.is_empty());
    assert_eq!(node.namespaces().inodes(), namespaces);
    assert!(!node.pinned_maps().is_empty());
}

#[test]
fn a_gateway_port_that_is_taken_leaves_no_folder_of_a_new_node() {
    let node = MultiProcessNode::new("taken");
    let taken = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = taken.local_addr().expect("bound").to_string();
    let output = node.run_rouse(&["up", "--gateway", &address]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && message.contains("--gateway"), "{message}");
    assert!(!node.layout.run_folder().exists(), "it was made for the lock");
}

#[test]
fn a_node_that_lost_any_component_is_taken_down_without_a_trace() {
    let node = MultiProcessNode::new("lost");
    for component in COMPONENTS {
        node.start(&COMPONENTS);
        node.apply(&steady_manifest());
        let address = node.cluster_ip("steady");
        node.join_client_cgroup();
        wait_for("a direct response", || {
            in_client_netns(&node, || get_once(address, "/").ok())?.direct.then_some(())
        });
        node.kill(component);
        take_down(&node);
        node.wait_for_exit();
    }
}

/// Takes the node down, and asserts that it leaves nothing behind.
fn take_down(node: &MultiProcessNode) {
    node.leave_client_cgroup();
    let (namespaces, maps) = (node.namespaces(), node.pinned_maps());
    assert!(namespaces.inodes().len() >= 3 && !maps.is_empty(), "{namespaces:?} {maps:?}");
    assert!(!find_remains(&node.layout, &namespaces, &maps).is_empty());
    let _bystander = MountNamespaceProcess::new();
    let result = node.run_rouse(&["down"]);
    assert!(result.status.success(), "{result:?}");
    // The kernel frees programs and maps a moment after their last user has ended.
    let mut remaining = Vec::new();
    let freed = poll_until(|| {
        remaining = find_remains(&node.layout, &namespaces, &maps);
        remaining.iter().all(|one| !one.starts_with("BPF")).then_some(())
    });
    assert!(freed.is_some(), "the kernel keeps {remaining:?}");
    assert_eq!(find_remains(&node.layout, &namespaces, &maps), [] as [String; 0]);
}

/// Process in a mount namespace of its own with copies of all mounts, like many system services.
struct MountNamespaceProcess(Child);

impl MountNamespaceProcess {
    fn new() -> Self {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sleep", "600"]);
        let child = command.spawn().expect("util-linux");
        let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
        let pid = child.id().to_string();
        wait_for("a mount namespace", || (namespace(&pid) != namespace("self")).then_some(()));
        Self(child)
    }
}

impl Drop for MountNamespaceProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
