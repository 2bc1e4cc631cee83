//! Shell: agents that restart, are upgraded to another ABI, and are rolled back, while clients connect without a pause.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    os::fd::AsFd as _,
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
};

use agent::{
    config::ClusterIpMode,
    kernel::sys,
    routes::plan::{ClusterChange, ClusterResource},
};
use common::wire::NamespacedName;

use super::*;
use crate::{
    cluster_ip::{observed_service, observed_slice},
    fixture::NetnsFixture,
};

/// Number of connects in one step of a client.
const CONNECTS_PER_STEP: u64 = 50;
/// ClusterIP of a Service of the cluster. All other addresses are those of Rouse's services.
const CLUSTER_IP: &str = "10.96.0.3";
/// Addresses that the clients connect to, each with the names of the pods behind it.
const TARGETS: [(&str, &[&str]); 4] = [
    ("10.96.0.1:80", &["one", "two"]),
    ("[fd96::1]:80", &["one", "two"]),
    ("10.96.0.2:80", &["three"]),
    ("10.96.0.3:80", &["three"]),
];
/// Hooks in the clients' cgroup that must never be without a program, each with the kernel's attach type
/// (`enum bpf_attach_type`).
const CLIENT_HOOKS: [(&str, u32); 9] = [
    ("connect4", 10),
    ("connect6", 11),
    ("sendmsg4", 14),
    ("sendmsg6", 15),
    ("recvmsg4", 19),
    ("recvmsg6", 20),
    ("getpeername4", 29),
    ("getpeername6", 30),
    ("release", 34),
];

/// Results of the clients and of the watch over the hooks.
#[derive(Default)]
struct ReplacementLoad {
    /// Number of connects by address and by the name of the pod, or by the error.
    connects: Mutex<BTreeMap<(&'static str, String), u64>>,
    /// Number of finished steps of each client.
    steps: [AtomicU64; TARGETS.len()],
    /// Number of times that all hooks were read.
    hook_readings: AtomicU64,
    /// Hooks that were found without a program.
    empty_hooks: Mutex<BTreeSet<&'static str>>,
    is_over: AtomicBool,
}

impl ReplacementLoad {
    /// Connects to a target until the test is over.
    fn run_client(&self, index: usize, client: &NetnsFixture) {
        let mut process = client.start_process();
        let (address, _) = TARGETS[index];
        let step = format!("flood {address} {CONNECTS_PER_STEP}");
        while !self.is_over.load(Relaxed) {
            let reply = process.expect_step(&step);
            let mut connects =
                self.connects.lock().expect("no client panics while it has the lock");
            for (name, count) in reply.split(' ').filter_map(|it| it.split_once('=')) {
                let count: u64 = count.parse().expect("a number");
                *connects.entry((address, name.to_owned())).or_default() += count;
            }
            drop(connects);
            self.steps[index].fetch_add(1, Relaxed);
        }
    }

    /// Reads the hooks of a cgroup until the test is over.
    fn watch_hooks(&self, cgroup: &Path) {
        let cgroup = File::open(cgroup).expect("the fixture created it");
        while !self.is_over.load(Relaxed) {
            for (name, attach_type) in CLIENT_HOOKS {
                let programs = sys::attached_programs(cgroup.as_fd(), attach_type);
                if programs.expect("root may ask").is_empty() {
                    self.empty_hooks.lock().expect("no panic while it is held").insert(name);
                }
            }
            self.hook_readings.fetch_add(1, Relaxed);
            thread::yield_now();
        }
    }

    /// Waits until each client has finished a whole step that began after this call, and all hooks were read again.
    fn wait_for_progress(&self) {
        let counters = || self.steps.iter().chain([&self.hook_readings]);
        let before: Vec<u64> = counters().map(|it| it.load(Relaxed)).collect();
        // Two more: the first step may have begun before.
        let is_behind = |(now, before): (&AtomicU64, &u64)| now.load(Relaxed) < before + 2;
        while !self.is_over.load(Relaxed) && counters().zip(&before).any(is_behind) {
            thread::yield_now();
        }
    }

    /// Checks that no connect has failed, that each led to a pod of its service, and that no hook was empty.
    fn check(&self) {
        let connects = self.connects.lock().expect("all clients have ended");
        for ((address, name), count) in connects.iter() {
            let (_, pods) = TARGETS.iter().find(|it| it.0 == *address).expect("a target");
            assert!(pods.contains(&name.as_str()), "{count} connects to {address} led to {name}");
        }
        let steps: u64 = self.steps.iter().map(|it| it.load(Relaxed)).sum();
        assert_eq!(connects.values().sum::<u64>(), steps * CONNECTS_PER_STEP);
        let reached: BTreeSet<_> = connects.keys().map(|(address, _)| *address).collect();
        assert_eq!(reached.len(), TARGETS.len(), "each address was connected to");
        let empty_hooks = self.empty_hooks.lock().expect("the watch has ended");
        assert_eq!(*empty_hooks, BTreeSet::new(), "hooks without a program");
    }
}

/// Ends the load when it is dropped, also by a panic, so that the threads end.
struct EndOfLoad<'a>(&'a ReplacementLoad);

impl Drop for EndOfLoad<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Relaxed);
    }
}

/// Returns what an agent observes of the cluster: one Service, with this pod as its endpoint.
fn cluster_lists(pod: &NetnsFixture) -> Vec<ClusterChange> {
    let name = NamespacedName::new("default", "plain");
    let slice = observed_slice(name.clone(), [pod.ipv4().parse().expect("an address")]);
    let slice_name = NamespacedName::new("default", "plain-1");
    let mut changes = ClusterResource::ALL.map(ClusterChange::ListBegun).to_vec();
    changes.push(ClusterChange::Service(name, Some(observed_service(CLUSTER_IP, None))));
    changes.push(ClusterChange::Slice(slice_name, Some(slice)));
    changes.extend(ClusterResource::ALL.map(ClusterChange::ListCompleted));
    changes
}

/// Replaces the agent by one with these paths, which takes over as an agent of their version does. `pod` is the
/// endpoint of the Service of the cluster.
fn replace_agent(fixture: &mut KernelFixture, paths: &AgentPaths, pod: &NetnsFixture) {
    // What the earlier agent leaves is pinned.
    drop(fixture.programs.take());
    let mut programs = EbpfPrograms::load(paths.clone()).expect("the kernel takes them");
    fixture.continue_with_maps(KernelMaps::open(&paths.pins()).expect("they are pinned"));
    fixture.serve_cluster_services(ClusterIpMode::All);
    // The RouteTable comes first: until the lists are complete, the Service stays as it is in the maps.
    fixture.apply_table();
    fixture.observe_cluster(cluster_lists(pod));
    programs.take_over().expect("the tables are filled");
    programs.verify_by_self_test(&mut fixture.maps).expect("they are in force");
    programs.retire_previous().expect("nothing is counted there");
    fixture.programs = Some(programs);
}

#[test]
fn agents_restart_and_change_their_abi_and_back_under_load_without_a_failed_or_misled_connect() {
    let mut fixture = KernelFixture::new();
    let clients: Vec<_> = TARGETS.iter().map(|_| fixture.add_client()).collect();
    let pods = [fixture.add_pod(), fixture.add_pod(), fixture.add_pod()];
    let mut servers = pods.each_ref().map(NetnsFixture::start_process);
    for ((server, name), (pod, service)) in
        servers.iter_mut().zip(["one", "two", "three"]).zip(pods.iter().zip([1, 1, 2]))
    {
        server.expect_step(&format!("listen [::]:{SERVING_PORT} {name}"));
        fixture.add_service(service, ConnectionPath::Direct);
        fixture.add_ready_pod(pod, service);
    }
    fixture.serve_cluster_services(ClusterIpMode::All);
    fixture.observe_cluster(cluster_lists(&pods[2]));
    let mut holder = fixture.add_client().start_process();
    holder.expect_step("connect 10.96.0.2:80");
    let own = fixture.paths().clone();
    let next = AgentPaths { version: own.version + 1, ..own.clone() };
    let cgroup = own.clients.clone();
    let results = ReplacementLoad::default();
    thread::scope(|scope| {
        let _end = EndOfLoad(&results);
        for (index, client) in clients.iter().enumerate() {
            let results = &results;
            scope.spawn(move || {
                let _end = EndOfLoad(results);
                results.run_client(index, client);
            });
        }
        scope.spawn(|| results.watch_hooks(&cgroup));
        results.wait_for_progress();
        // Restart, upgrade, restart, rollback, restart, and once more.
        for paths in [&own, &next, &next, &own, &own, &next, &own] {
            replace_agent(&mut fixture, paths, &pods[2]);
            results.wait_for_progress();
            // This socket is older than all of them.
            assert_eq!(holder.expect_step("peer"), "10.96.0.2:80");
        }
    });
    results.check();
    holder.expect_step("drop");
    let programs = fixture.programs.as_mut().expect("the last agent's");
    assert_eq!(programs.remove_outlived_pins(), 0, "no socket needs earlier programs");
}
