//! Faults of Rouse's components: a leader that is killed or leaves, and replicas that freeze.

use std::io::Read as _;
use std::process::{Child, Stdio};
use std::thread;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tests::installed_cluster::{RouseCluster, SYSTEM_NAMESPACE};
use tests::load_process::{LoadProcess, LoadRequest, assert_none_lost};

use super::{
    create_services, leader, leader_after, service_with_min_scale, slowest_ms, start_traffic,
    start_wake,
};

/// A watch of the lease, to measure the time without a holder.
struct LeaseWatch(Child);

impl LeaseWatch {
    fn start(rouse: &RouseCluster) -> Self {
        let args =
            ["lease", "rouse-controller", "--namespace", SYSTEM_NAMESPACE, "--watch", "-o", "json"];
        let args = [&["kubectl", "get"], &args[..]].concat();
        let mut command = rouse.cluster.command(&args).expect("a cluster of xtask's");
        Self(command.stdout(Stdio::piped()).spawn().expect("it starts"))
    }

    /// Time from the lease's release until another replica acquired it.
    fn handover_time(mut self) -> Duration {
        let _ended = self.0.kill();
        let mut output = Vec::new();
        self.0.stdout.take().expect("piped").read_to_end(&mut output).expect("it has ended");
        let leases = serde_json::Deserializer::from_slice(&output).into_iter::<Lease>();
        let specs: Vec<LeaseSpec> = leases.map_while(Result::ok).filter_map(|it| it.spec).collect();
        let is_free = |it: &LeaseSpec| it.holder_identity.as_deref().unwrap_or_default().is_empty();
        let handover = specs.windows(2).find(|pair| is_free(&pair[0]) && !is_free(&pair[1]));
        let [released, acquired] = handover.expect("it is released and acquired") else {
            unreachable!("two")
        };
        let released_at = released.renew_time.as_ref().expect("the time of the release");
        let acquired_at = acquired.acquire_time.as_ref().expect("the time of the acquisition");
        acquired_at.0.duration_since(released_at.0).unsigned_abs()
    }
}

impl Drop for LeaseWatch {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _reaped = self.0.wait();
    }
}

/// Process id of one of Rouse's own pods.
pub(crate) fn pod_pid(rouse: &RouseCluster, pod: &str) -> Pid {
    // `/proc/<process id>/ns/net`.
    let netns = rouse.cluster.netns_of(SYSTEM_NAMESPACE, pod);
    let id = netns.iter().nth(2).and_then(|it| it.to_str()).and_then(|it| it.parse().ok());
    Pid::from_raw(id.expect("a process has a number"))
}

/// Wakes `count` sleeping services, ten a second, and runs `inject_fault` after half of them.
fn wake_during(
    rouse: &RouseCluster,
    namespace: &str,
    count: usize,
    inject_fault: impl FnOnce(),
) -> Vec<LoadRequest> {
    let names: Vec<String> = (0..count).map(|number| format!("w{number}")).collect();
    let manifests: Vec<String> = names.iter().map(|name| service_with_min_scale(name, 0)).collect();
    rouse.apply_until_ready(namespace, &manifests.join("---\n"));
    names.iter().for_each(|name| rouse.wait_asleep(namespace, name));
    let addresses: Vec<String> =
        names.iter().map(|name| rouse.service_address(namespace, name)).collect();
    let client = rouse.client_on("node1");
    let mut inject_fault = Some(inject_fault);
    let mut loads = Vec::new();
    for (number, address) in addresses.iter().enumerate() {
        if number == count / 2
            && let Some(inject_fault) = inject_fault.take()
        {
            inject_fault();
        }
        let args = ["--stages", "1x1s", "--requests", "1", "--timeout-s", "120"];
        loads.push(client.start_load(address, "any", &args));
        #[allow(clippy::disallowed_methods, reason = "ten a second")]
        thread::sleep(Duration::from_millis(100));
    }
    loads.into_iter().flat_map(LoadProcess::finish).collect()
}

#[test]
fn a_leader_that_is_killed_or_leaves_while_services_wake_loses_none() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("leader");
    let namespace = &namespace.name;
    // Baseline without a fault, to compare the times below with.
    let requests = wake_during(&rouse, namespace, 10, || {});
    assert_none_lost(&requests, 10);
    println!("undisturbed: slowest wake {} ms", slowest_ms(&requests));
    let all_asleep =
        || (0..10).for_each(|number| rouse.wait_asleep(namespace, &format!("w{number}")));
    all_asleep();

    let first = leader(&rouse);
    let id = pod_pid(&rouse, &first);
    let requests =
        wake_during(&rouse, namespace, 10, || kill(id, Signal::SIGKILL).expect("it runs"));
    assert_none_lost(&requests, 10);
    println!("killed: slowest wake {} ms", slowest_ms(&requests));
    all_asleep();

    let second = leader(&rouse);
    let leases = LeaseWatch::start(&rouse);
    let requests = wake_during(&rouse, namespace, 10, || {
        let args = ["delete", "pod", "--namespace", SYSTEM_NAMESPACE, &second, "--wait=false"];
        rouse.cluster.kubectl(&args).expect("it may be deleted");
    });
    assert_none_lost(&requests, 10);
    println!("handed over: slowest wake {} ms", slowest_ms(&requests));
    leader_after(&rouse, &second);
    println!("handed over: no controller held the lease for {:?}", leases.handover_time());
}

/// A suspended process, continued on drop.
pub(crate) struct SuspendedProcess(Pid);

impl SuspendedProcess {
    pub(crate) fn suspend(pid: Pid) -> Self {
        kill(pid, Signal::SIGSTOP).expect("it runs");
        Self(pid)
    }
}

impl Drop for SuspendedProcess {
    fn drop(&mut self) {
        let _goes_on = kill(self.0, Signal::SIGCONT);
    }
}

#[test]
fn two_controllers_that_both_think_they_lead_do_no_harm() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("two");
    let namespace = &namespace.name;
    create_services(&rouse, namespace);
    let traffic = start_traffic(&rouse, namespace, "awake", 25);
    let first = leader(&rouse);
    let suspended = SuspendedProcess::suspend(pod_pid(&rouse, &first));
    let second = leader_after(&rouse, &first);
    // Every other admission request goes to the suspended replica.
    rouse.cluster.wait("admission to respond", || {
        rouse.apply(namespace, &service_with_min_scale("awake", 2)).ok()
    });
    // It continues in the middle of its work, with an outdated view of the cluster.
    drop(suspended);
    assert_none_lost(&start_wake(&rouse, &rouse.service_address(namespace, "asleep")).finish(), 1);
    rouse.wait_ready(namespace, "ksvc", "awake");
    assert_none_lost(&traffic.finish(), 100);
    assert_eq!(leader(&rouse), second, "a replica that lost the Lease does not lead");
    let list = rouse.cluster.get(&["revisions", "--namespace", namespace]);
    assert_eq!(list["items"].as_array().map(Vec::len), Some(3), "awake has two, asleep one");
}

/// Only one of the autoscalers is active, the others count. A frozen one keeps its connections, so only its missing
/// heartbeats show the fault.
#[test]
fn an_autoscaler_that_freezes_is_replaced_and_wakes_go_on() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("frozen");
    let namespace = &namespace.name;
    let names = ["asleep", "asleep-too"];
    let yaml = [
        service_with_min_scale("awake", 1),
        service_with_min_scale(names[0], 0),
        service_with_min_scale(names[1], 0),
    ];
    rouse.apply_until_ready(namespace, &yaml.join("---\n"));
    names.iter().for_each(|name| rouse.wait_asleep(namespace, name));
    let args = ["pods", "--namespace", SYSTEM_NAMESPACE, "--selector", "app=autoscaler"];
    let pods = rouse.cluster.get(&args);
    let pods = pods["items"].as_array().expect("a list").iter();
    let pods: Vec<String> = pods
        .filter(|it| it["metadata"]["deletionTimestamp"].is_null())
        .filter_map(|it| it["metadata"]["name"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(pods.len(), 2, "{pods:?}");
    let traffic = start_traffic(&rouse, namespace, "awake", 15);
    // Both in turn, because either may be the active one.
    for (pod, name) in pods.iter().zip(names) {
        let _suspended = SuspendedProcess::suspend(pod_pid(&rouse, pod));
        let wake_requests = start_wake(&rouse, &rouse.service_address(namespace, name)).finish();
        assert_none_lost(&wake_requests, 1);
        println!("{pod} is frozen: the wake takes {} ms", slowest_ms(&wake_requests));
    }
    assert_none_lost(&traffic.finish(), 100);
}
