//! Many freezes and thaws: probes restart nothing, and the agent's resources stay as they are.
//!
//! `ROUSE_STANDBY_ROUNDS` is the number of measured rounds, in each of which every frozen pod is thawed once.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Barrier;
use std::{fs, thread};

use agent::kernel::maps::KernelMaps;
use datapath::abi;
use serde_json::Value;
use tests::frozen_pods::frozen_pods;
use tests::multi_process_node::{COMPONENTS, MultiProcessNode, get_once};
use tests::rouse_node::RouseNode;
use tests::wait::wait_for;

use super::{AGENT, CAUSES, UP_OPTIONS, apply, manifest, restart_count, thaws_of};
use crate::component_restarts::in_client_netns;
use crate::raw_tcp::GreetedConnection;

/// Place of probes among [`CAUSES`].
const PROBE_CAUSE: usize = 1;
/// Number of thaws by probes for which the scenario of probes waits.
const PROBE_THAWS: usize = 12;
/// Services of the test of resources, each with one frozen pod.
const SERVICES: usize = 20;
/// Rounds before the first measurement, in which buffers and tables grow to their size.
const WARM_UP_ROUNDS: usize = 3;
/// Default number of measured rounds.
const ROUNDS: usize = 10;
/// Port of each pod to which no service leads. A connection there does not count, like that of a probe.
const UNCOUNTED_PORT: u16 = 9090;
/// Most memory of the agent after the measured rounds, in percent of that before them.
const MAX_MEMORY_PERCENT: u64 = 120;
/// Files that the agent may have open for a moment, as for a reading of a pod.
const MOMENTARY_FILES: usize = 4;

pub(super) fn probes_thaw_a_frozen_pod_for_their_answers_alone_and_restart_nothing(
    node: &RouseNode,
) {
    let services = [("http", "httpGet: {path: /}"), ("tcp", "tcpSocket: {}")];
    for (name, probe) in services {
        // One probe without an answer would restart the container. The first one comes once the server listens.
        let times = "initialDelaySeconds: 10, periodSeconds: 3, timeoutSeconds: 10";
        let probe = format!(", livenessProbe: {{{probe}, {times}, failureThreshold: 1}}");
        apply(node, &manifest(name, 1, "", &probe));
        node.wait_ready(name);
    }
    let frozen = services.map(|(name, _)| node.wait_briefly_frozen(name, 1));
    let thaws_by_probes =
        || -> usize { services.iter().map(|(name, _)| thaws_of(node, name)[PROBE_CAUSE]).sum() };
    let before = thaws_by_probes();
    // One wait for each: on a busy machine a probe and the freeze after it take many seconds.
    for count in 1..=PROBE_THAWS {
        wait_for("a thaw by a probe", || (thaws_by_probes() >= before + count).then_some(()));
    }
    let refrozen = services.map(|(name, _)| node.wait_briefly_frozen(name, 1));
    assert_eq!(refrozen, frozen, "frozen in between");
    assert_eq!(services.map(|(name, _)| restart_count(node, name)), [0, 0]);
}

/// Resources of the agent's process that must not grow with the number of thaws.
#[derive(Clone, Copy, Debug)]
struct AgentResourceUse {
    resident_kib: u64,
    open_files: usize,
    /// Entries of the kernel's map of pods.
    mapped_pods: usize,
}

impl AgentResourceUse {
    fn read(node: &MultiProcessNode) -> Self {
        let process = format!("/proc/{}", node.process_id("agent"));
        let status = fs::read_to_string(format!("{process}/status")).expect("the agent runs");
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let resident_kib = resident.and_then(|it| it.split_whitespace().next()?.parse().ok());
        let pins = node.layout.bpf().join(format!("v{}", abi::ABI_VERSION));
        let maps = KernelMaps::open(&pins).expect("maps");
        Self {
            resident_kib: resident_kib.expect("a process has a resident set"),
            open_files: fs::read_dir(format!("{process}/fd")).expect("its files").count(),
            mapped_pods: maps.pods().expect("pods").len(),
        }
    }
}

/// Addresses of all pods with the port that does not count.
fn uncounted_addresses(node: &MultiProcessNode) -> Vec<SocketAddr> {
    let output = node.run_rouse(&["get", "pods", "-o", "json"]);
    let list: Value = serde_json::from_slice(&output.stdout).expect("a list");
    let pods = list["items"].as_array().expect("a list has items").iter();
    let address = |pod: &Value| -> SocketAddr {
        let ip = pod["status"]["podIP"].as_str().and_then(|ip| ip.parse::<IpAddr>().ok());
        SocketAddr::new(ip.expect("a running pod has an address"), UNCOUNTED_PORT)
    };
    pods.map(address).collect()
}

/// Thaws each pod by a connection, and waits until all of them are frozen again.
fn run_round(node: &MultiProcessNode, addresses: &[SocketAddr], frozen: &BTreeSet<String>) {
    in_client_netns(node, || {
        for address in addresses {
            let connection = GreetedConnection::open(*address).expect("a greeting");
            assert_eq!(connection.finish("echo").expect("an echo"), "echo");
        }
    });
    wait_for("all pods to be frozen again", || {
        (frozen_pods(&node.layout) == *frozen).then_some(())
    });
}

/// Number of thaws for any cause so far.
fn all_thaws(node: &MultiProcessNode) -> f64 {
    let series = |cause: &str| format!("rouse_agent_thaws_total{{cause=\"{cause}\"}}");
    let count = |cause: &str| {
        let series = series(cause);
        node.metric(AGENT, &series).unwrap_or_else(|| panic!("the agent exports no {series}"))
    };
    CAUSES.into_iter().map(count).sum()
}

/// Asserts that the agent's resources do not grow while each of these frozen pods is thawed once in each round.
#[allow(clippy::print_stdout, reason = "libtest shows it with the test that failed")]
fn assert_no_growth(node: &MultiProcessNode, frozen: &BTreeSet<String>) {
    let rounds = std::env::var("ROUSE_STANDBY_ROUNDS").ok().and_then(|it| it.parse().ok());
    let rounds: usize = rounds.unwrap_or(ROUNDS);
    let addresses = uncounted_addresses(node);
    (0..WARM_UP_ROUNDS).for_each(|_| run_round(node, &addresses, frozen));
    let (before, thaws_before) = (AgentResourceUse::read(node), all_thaws(node));
    (0..rounds).for_each(|_| run_round(node, &addresses, frozen));
    // Files of probes and queries that just run are closed soon; those of a leak never are.
    let after = wait_for("no more open files than before", || {
        let after = AgentResourceUse::read(node);
        (after.open_files <= before.open_files + MOMENTARY_FILES).then_some(after)
    });
    let thaws = all_thaws(node) - thaws_before;
    let pods_thawed = rounds * frozen.len();
    println!("{thaws} thaws in {pods_thawed} exchanges: {before:?}, then {after:?}");
    assert!(thaws >= pods_thawed as f64, "only {thaws} of {pods_thawed} found a frozen pod");
    assert_eq!(after.mapped_pods, before.mapped_pods);
    let max_kib = before.resident_kib * MAX_MEMORY_PERCENT / 100;
    assert!(after.resident_kib <= max_kib, "{before:?} {after:?}");
}

/// Sends one request to each of these services at the same moment. Asserts that its frozen pod answers it directly, and
/// that no pod starts.
fn assert_woken_at_once(node: &MultiProcessNode, services: &[String], addresses: &[SocketAddr]) {
    let list_pods = || {
        let output = node.run_rouse(&["get", "pods", "-o", "name"]);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let before = list_pods();
    assert_eq!(before.lines().count(), services.len(), "{before}");
    let barrier = Barrier::new(addresses.len());
    let responses: Vec<_> = thread::scope(|scope| {
        let barrier = &barrier;
        let send_one = |address: &SocketAddr| {
            let address = *address;
            scope.spawn(move || {
                node.enter_client_netns();
                barrier.wait();
                get_once(address, "/").expect("a response")
            })
        };
        let threads: Vec<_> = addresses.iter().map(send_one).collect();
        threads.into_iter().map(|it| it.join().expect("no panic")).collect()
    });
    assert_eq!(list_pods(), before);
    for (name, response) in services.iter().zip(responses) {
        let is_own = response.pod.starts_with(&format!("{name}-00001-"));
        assert!(response.status == 200 && response.direct && is_own, "{name}: {response:?}");
    }
}

#[test]
fn twenty_frozen_pods_are_thawed_without_growth_of_the_agent_and_woken_at_once_without_other_pods()
{
    let node = MultiProcessNode::with_options("standby-flat", &UP_OPTIONS);
    node.start(&COMPONENTS);
    let services: Vec<String> = (0..SERVICES).map(|number| format!("n{number}")).collect();
    let echo = format!(", env: [{{name: HELLO_ECHO_PORT, value: \"{UNCOUNTED_PORT}\"}}]");
    let manifests: Vec<String> = services.iter().map(|name| manifest(name, 1, "", &echo)).collect();
    node.apply(&manifests.join("---\n"));
    let addresses = node.cluster_ips(&services);
    node.join_client_cgroup();
    let frozen = wait_for("all pods to be frozen", || {
        let frozen = frozen_pods(&node.layout);
        (frozen.len() == SERVICES).then_some(frozen)
    });
    assert_no_growth(&node, &frozen);
    assert_woken_at_once(&node, &services, &addresses);
}
