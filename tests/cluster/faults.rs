//! Faults of Kubernetes, of Rouse's components and of nodes: awake services keep serving, sleeping ones wake.
#![allow(clippy::print_stdout, reason = "a test's own output is where its reader looks")]

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use tests::installed_cluster::{HELLO_CONTAINER, RouseCluster, SYSTEM_NAMESPACE, service_manifest};
use tests::load_process::{LoadProcess, LoadRequest, assert_none_lost};
use tests::test_cluster::{TestCluster, find_condition};

pub(crate) mod components;
mod nodes;

/// A fault, reversed on drop, also when the test fails.
pub(crate) struct InjectedFault<'a> {
    cluster: &'a TestCluster,
    component: &'static str,
    reversal: &'static str,
}

impl<'a> InjectedFault<'a> {
    pub(crate) fn inject(
        cluster: &'a TestCluster,
        action: &str,
        component: &'static str,
        reversal: &'static str,
    ) -> Self {
        cluster
            .fault(action, component)
            .unwrap_or_else(|error| panic!("{action} {component}: {error}"));
        Self { cluster, component, reversal }
    }
}

impl Drop for InjectedFault<'_> {
    fn drop(&mut self) {
        let _undone = self.cluster.fault(self.reversal, self.component);
    }
}

fn service_with_min_scale(name: &str, min_scale: u32) -> String {
    service_manifest(
        name,
        &format!(", autoscaling.knative.dev/min-scale: \"{min_scale}\""),
        HELLO_CONTAINER,
    )
}

fn pause(seconds: u64) {
    #[allow(clippy::disallowed_methods, reason = "the fault lasts so long")]
    thread::sleep(Duration::from_secs(seconds));
}

/// Load on a service that is awake: four clients, half of them on persistent connections.
fn start_traffic(rouse: &RouseCluster, namespace: &str, name: &str, seconds: u64) -> LoadProcess {
    let stages = format!("4x{seconds}s");
    let args = ["--stages", &stages, "--path", "/?sleep=50"];
    rouse.client_on("node1").start_load(&rouse.service_address(namespace, name), name, &args)
}

/// One request to a service that sleeps, with a timeout above the length of any fault.
fn start_wake(rouse: &RouseCluster, address: &str) -> LoadProcess {
    let args = ["--stages", "1x1s", "--requests", "1", "--timeout-s", "180"];
    rouse.client_on("node2").start_load(address, "asleep", &args)
}

fn slowest_ms(requests: &[LoadRequest]) -> u64 {
    requests.iter().map(|request| request.took_us / 1000).max().unwrap_or_default()
}

/// Creates a service that is awake and one that sleeps, in one namespace.
fn create_services(rouse: &RouseCluster, namespace: &str) {
    rouse.apply_until_ready(
        namespace,
        &[service_with_min_scale("awake", 1), service_with_min_scale("asleep", 0)].join("---\n"),
    );
    rouse.wait_asleep(namespace, "asleep");
}

/// Creates another service, as soon as API server and admission accept it again after a fault.
fn create_later_service(rouse: &RouseCluster, namespace: &str) {
    let yaml = service_with_min_scale("later", 0);
    rouse.cluster.wait("a new service to be taken", || rouse.apply(namespace, &yaml).ok());
    rouse.wait_ready(namespace, "ksvc", "later");
}

#[test]
fn an_api_server_that_is_suspended_for_a_minute_stops_no_traffic() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("no-api");
    let namespace = &namespace.name;
    create_services(&rouse, namespace);
    let asleep_address = rouse.service_address(namespace, "asleep");
    let traffic = start_traffic(&rouse, namespace, "awake", 70);
    let fault = InjectedFault::inject(&rouse.cluster, "stop", "kube-apiserver", "resume");
    pause(50);
    // No pod can start now, so the request waits.
    let wake = start_wake(&rouse, &asleep_address);
    pause(10);
    drop(fault);
    assert_none_lost(&traffic.finish(), 500);
    let wake_requests = wake.finish();
    assert_none_lost(&wake_requests, 1);
    println!(
        "a request that came while the API server was suspended was answered after {} ms",
        slowest_ms(&wake_requests)
    );
    create_later_service(&rouse, namespace);
}

#[test]
fn an_etcd_that_is_suspended_delays_a_wake_and_loses_none() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("no-etcd");
    let namespace = &namespace.name;
    create_services(&rouse, namespace);
    let traffic = start_traffic(&rouse, namespace, "awake", 20);
    let asleep_address = rouse.service_address(namespace, "asleep");
    let fault = InjectedFault::inject(&rouse.cluster, "stop", "etcd", "resume");
    let wake = start_wake(&rouse, &asleep_address);
    pause(8);
    drop(fault);
    let wake_requests = wake.finish();
    assert_none_lost(&wake_requests, 1);
    assert_none_lost(&traffic.finish(), 100);
    println!(
        "a request that came while etcd was suspended was answered after {} ms",
        slowest_ms(&wake_requests)
    );
}

#[test]
#[ignore = "takes minutes: --long"]
fn an_etcd_that_is_slow_delays_wakes_and_growth_and_loses_none() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("slow-etcd");
    let namespace = &namespace.name;
    let sleepers = ["w0", "w1", "w2", "w3"];
    let annotations = ", autoscaling.knative.dev/min-scale: \"1\", \
                       autoscaling.knative.dev/target: \"1\"";
    let mut manifests = vec![service_manifest("grows", annotations, HELLO_CONTAINER)];
    manifests.extend(sleepers.map(|name| service_with_min_scale(name, 0)));
    rouse.apply_until_ready(namespace, &manifests.join("---\n"));
    sleepers.iter().for_each(|name| rouse.wait_asleep(namespace, name));
    let addresses = sleepers.map(|name| rouse.service_address(namespace, name));
    let first = leader(&rouse);
    let grows = thread::scope(|scope| {
        // Returns after a minute, and always leaves etcd running.
        let fault = scope.spawn(|| rouse.cluster.fault("slow", "etcd"));
        pause(1);
        let grows = start_traffic(&rouse, namespace, "grows", 65);
        let waking = addresses.each_ref().map(|address| {
            pause(8);
            start_wake(&rouse, address)
        });
        let wake_requests: Vec<LoadRequest> =
            waking.into_iter().flat_map(LoadProcess::finish).collect();
        assert_none_lost(&wake_requests, sleepers.len());
        println!("slowest wake while etcd was slow: {} ms", slowest_ms(&wake_requests));
        fault.join().expect("no panic").expect("etcd runs");
        grows
    });
    let requests = grows.finish();
    assert_none_lost(&requests, 500);
    let pods: BTreeSet<&str> = requests.iter().map(|it| it.pod.as_str()).collect();
    assert!(pods.len() > 1, "{pods:?} served, so it never grew");
    let last = leader(&rouse);
    println!("led by {first} before and {last} after; {} pods served", pods.len());
    // The present leader has written the right state in the end, whichever replica it is.
    create_later_service(&rouse, namespace);
    sleepers.iter().for_each(|name| rouse.wait_asleep(namespace, name));
    rouse.cluster.wait("all revisions to be ready", || {
        let list = rouse.cluster.get(&["revisions", "--namespace", namespace]);
        let revisions = list["items"].as_array()?;
        let is_ready = |it| find_condition(it, "Ready")["status"] == "True";
        (revisions.len() == sleepers.len() + 2 && revisions.iter().all(is_ready)).then_some(())
    });
}

#[test]
fn watches_that_break_are_taken_up_again() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("watches");
    let namespace = &namespace.name;
    create_services(&rouse, namespace);
    let traffic = start_traffic(&rouse, namespace, "awake", 15);
    for _ in 0..2 {
        drop(InjectedFault::inject(&rouse.cluster, "kill", "kube-apiserver", "start"));
        // Like any supervisor of a control plane: a server that ends while it starts is started again.
        rouse.cluster.wait("the API server", || {
            rouse.cluster.fault("start", "kube-apiserver").ok()?;
            rouse.cluster.get(&["nodes"])["items"].is_array().then_some(())
        });
    }
    // Changes during the fault and after it are observed.
    let wake_requests = start_wake(&rouse, &rouse.service_address(namespace, "asleep")).finish();
    assert_none_lost(&wake_requests, 1);
    create_later_service(&rouse, namespace);
    assert_none_lost(&traffic.finish(), 100);
}

/// Name of the pod that holds the lease, once one does.
fn leader(rouse: &RouseCluster) -> String {
    leader_after(rouse, "")
}

/// Name of the pod that holds the lease, once it is another one than `before`.
fn leader_after(rouse: &RouseCluster, before: &str) -> String {
    rouse.cluster.wait("a leader", || {
        let lease =
            rouse.cluster.get(&["lease", "--namespace", SYSTEM_NAMESPACE, "rouse-controller"]);
        let holder = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
        let pod = holder.split(['_', '/']).next().unwrap_or_default();
        (!pod.is_empty() && pod != before).then(|| pod.to_owned())
    })
}
