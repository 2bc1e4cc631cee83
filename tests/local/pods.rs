//! Pods on a local node: started, watched, restarted, stopped.

use std::fs;
use std::io::Read;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use common::local_node::{ContainerRunState, LocalPodSpec, PodRunPhase, PodRunStatus};
use local::cgroups::CgroupMounts;
use local::runtime::OciRuntimeKind;
use serde_json::{Value, json};
use tests::images::test_images;
use tests::test_node::{TestNode, pod_ip, pod_spec, wait_reaped};
use tests::wait::{sleep, wait_for};

/// Greeting of the pod's server, which may not listen yet.
pub(super) fn get_greeting(node: &TestNode, ip: IpAddr, port: u16) -> String {
    node.in_client_netns(|| {
        let address = SocketAddr::new(ip, port);
        let mut stream = wait_for(&format!("{address} to accept"), || {
            TcpStream::connect_timeout(&address, Duration::from_secs(10)).ok()
        });
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("a response");
        text
    })
}

fn check_pod_runs(kind: OciRuntimeKind, test: &str) {
    let mut node = TestNode::with_runtime(test, Some(kind), Vec::new());
    let extra = json!({ "container": {
        "env": [{ "name": "PORT", "value": "8080" }], "resources": { "limits": { "memory": "64Mi", "cpu": "500m" } },
    } });
    node.set_pods([pod_spec("a", &["env", "id", "show=/proc/self/cgroup", "listen=8080"], extra)]);
    let status = node.wait_pod("a running pod", "a", |pod| pod.phase == PodRunPhase::Running);
    assert_eq!(get_greeting(&node, pod_ip(&status), 8080), "hello\n");
    assert_eq!(get_greeting(&node, pod_ip(&status), 8080), "hello\n");
    let log = node.wait_log("pod-a", "0::");
    for line in ["FROM_IMAGE=yes", "PORT=8080", "HOSTNAME=pod-a", "uid 0 gid 0"] {
        assert!(log.contains(line), "{line} in {log}");
    }
    let cgroup = format!("rouse-{}/pods/poda/web", node.layout.name());
    assert!(log.lines().any(|line| line.starts_with("0::") && line.ends_with(&cgroup)), "{log}");
    node.set_pods([]);
    node.wait_pod("a pod that is gone", "a", |pod| pod.phase == PodRunPhase::Removed);
    wait_reaped(node.layout.name());
    assert!(!node.layout.pod("a").exists());
    assert!(!node.layout.pod_namespace("a").exists());
}

#[test]
fn crun_runs_a_pod() {
    check_pod_runs(OciRuntimeKind::Crun, "crun");
}

#[test]
fn runc_runs_a_pod() {
    check_pod_runs(OciRuntimeKind::Runc, "runc");
}

#[test]
fn clients_reach_a_pod_at_each_of_its_addresses() {
    let mut node = TestNode::new("families");
    node.set_pods([pod_spec("a", &["listen=8080"], json!({}))]);
    let status = node.wait_pod("a running pod", "a", |pod| pod.phase == PodRunPhase::Running);
    let families: Vec<bool> = status.addresses.iter().map(IpAddr::is_ipv4).collect();
    assert_eq!(families, [true, false]);
    for ip in status.addresses {
        assert_eq!(get_greeting(&node, ip, 8080), "hello\n", "{ip}");
    }
}

#[test]
fn an_image_may_be_an_oci_layout_at_a_path() {
    let mut node = TestNode::new("path");
    let image = format!("oci:{}:v1", test_images().join("dev.local/app").display());
    let pod = pod_spec("a", &["wait"], json!({ "container": { "image": image } }));
    node.set_pods([pod]);
    let status = node.wait_pod("a running pod", "a", |pod| pod.phase == PodRunPhase::Running);
    assert!(
        status.containers[0]
            .image_digest
            .as_ref()
            .is_some_and(|digest| digest.starts_with("sha256:"))
    );
}

#[test]
fn a_container_beyond_its_memory_limit_is_killed_with_reason_oomkilled() {
    let mut node = TestNode::new("oom");
    let limits = json!({ "resources": { "limits": { "memory": "16Mi" } } });
    let extra = json!({ "container": limits, "pod": { "restartPolicy": "Never" } });
    node.set_pods([pod_spec("a", &["eat=64"], extra)]);
    let ended = |state: &ContainerRunState| matches!(state, ContainerRunState::Terminated { .. });
    let status = node.wait_pod("a killed pod", "a", |pod| {
        pod.containers.iter().any(|container| ended(&container.state))
    });
    let ContainerRunState::Terminated { code, reason, .. } = &status.containers[0].state else {
        unreachable!()
    };
    assert_eq!((*code, reason.as_str()), (137, "OOMKilled"));
}

#[test]
fn a_crashing_container_backs_off_with_its_last_output_as_the_message() {
    let mut node = TestNode::new("crash");
    node.set_pods([pod_spec("a", &["say=no config file", "exit=3"], json!({}))]);
    let backing_off = |state: &ContainerRunState| {
        matches!(state, ContainerRunState::Waiting { reason, message, last_exit: Some(3) }
            if reason == "CrashLoopBackOff" && message.contains("no config file"))
    };
    let status = node.wait_pod("a back-off", "a", |pod| {
        pod.containers
            .iter()
            .any(|container| container.restarts == 1 && backing_off(&container.state))
    });
    assert_eq!(node.log("pod-a").matches("no config file").count(), 2);
    assert_eq!(status.phase, PodRunPhase::Running);
}

#[test]
fn a_container_that_no_longer_answers_its_liveness_probe_is_started_again() {
    let mut node = TestNode::new("liveness");
    let probe = json!({ "httpGet": { "path": "/live", "port": 80 }, "periodSeconds": 1, "failureThreshold": 2 });
    let startup =
        json!({ "tcpSocket": { "port": 80 }, "periodSeconds": 1, "failureThreshold": 60 });
    let extra = json!({ "container": { "livenessProbe": probe, "startupProbe": startup } });
    let patient = json!({ "tcpSocket": { "port": 80 }, "periodSeconds": 1, "timeoutSeconds": PROBE_TIMEOUT_S });
    let patient = json!({ "container": { "livenessProbe": patient, "startupProbe": startup } });
    let well = pod_spec("b", &["listen=80"], patient);
    node.set_pods([pod_spec("a", &["sick", "polite", "listen=80"], extra), well]);
    let failed = |state: &ContainerRunState| matches!(state, ContainerRunState::Waiting { message, .. } if message.contains("liveness probe failed: no response"));
    node.wait_pod("a restart because of a failed probe", "a", |pod| {
        pod.containers.iter().any(|container| failed(&container.state))
    });
    node.wait_pod("another start", "a", |pod| {
        pod.containers.iter().any(|container| {
            container.restarts > 0 && container.state == ContainerRunState::Running
        })
    });
    let other = node.wait_pod("the other", "b", |pod| pod.phase == PodRunPhase::Running);
    assert_eq!(other.containers[0].restarts, 0);
}

/// Timeout of probes whose commands end by themselves. A busy machine takes seconds to execute one.
const PROBE_TIMEOUT_S: u32 = 20;

/// Probe that executes `/app` with these arguments, every second.
pub(super) fn exec_probe(args: &[&str]) -> Value {
    let command = [&["/app"], args].concat();
    json!({
        "exec": { "command": command },
        "periodSeconds": 1, "failureThreshold": 1, "timeoutSeconds": PROBE_TIMEOUT_S,
    })
}

/// Probe of [`exec_probe`] that may take one second.
fn short_exec_probe(args: &[&str]) -> Value {
    let mut probe = exec_probe(args);
    probe["timeoutSeconds"] = json!(1);
    probe
}

fn is_running(status: &PodRunStatus) -> bool {
    status.containers.iter().all(|container| container.state == ContainerRunState::Running)
}

fn check_exec_probes(kind: OciRuntimeKind, test: &str) {
    let mut node = TestNode::with_runtime(test, Some(kind), Vec::new());
    let extra = json!({ "container": {
        "startupProbe": {
            "exec": { "command": ["/app", "need=/begun"] },
            "periodSeconds": 1, "failureThreshold": 60, "timeoutSeconds": PROBE_TIMEOUT_S,
        },
        // Without the startup probe, failures of this probe would end the container.
        "livenessProbe": exec_probe(&["need=/begun"]),
        "readinessProbe": exec_probe(&["need=/ready"]),
    } });
    let app_args = ["polite", "sleep=2", "touch=/begun", "sleep=2", "touch=/ready", "wait"];
    let pod = LocalPodSpec { kubelet_probes: true, ..pod_spec("a", &app_args, extra) };
    node.set_pods([pod]);
    let status = node.wait_pod("a running pod", "a", is_running);
    assert!(!status.ready, "no probe has run yet");
    let status = node.wait_pod("a ready pod", "a", |pod| pod.ready);
    assert_eq!(status.containers[0].restarts, 0);
    // The container writes the line only after it has made the file.
    let log = node.wait_log("pod-a", "made\nmade\n");
    assert_eq!(log, "made\nmade\n", "what a probe writes is not the container's");
    node.set_pods([]);
    node.wait_pod("a pod that is gone", "a", |pod| pod.phase == PodRunPhase::Removed);
    wait_reaped(node.layout.name());
}

#[test]
fn crun_executes_probes() {
    check_exec_probes(OciRuntimeKind::Crun, "crun-probes");
}

#[test]
fn runc_executes_probes() {
    check_exec_probes(OciRuntimeKind::Runc, "runc-probes");
}

#[test]
fn a_container_whose_exec_probe_fails_or_never_ends_is_started_again_with_a_reason() {
    let mut node = TestNode::new("exec-fails");
    let with_liveness = |probe| json!({ "container": { "livenessProbe": probe } });
    let fails = pod_spec("a", &["polite", "wait"], with_liveness(exec_probe(&["need=/no/such"])));
    let never_ends = with_liveness(short_exec_probe(&["wait"]));
    let never_ends = pod_spec("b", &["polite", "wait"], never_ends);
    let mut not_there = exec_probe(&[]);
    not_there["exec"]["command"] = json!(["/none"]);
    let not_there = pod_spec("c", &["polite", "wait"], with_liveness(not_there));
    node.set_pods([fails, never_ends, not_there]);
    for (uid, args) in [
        ("a", "\"/app need=/no/such\" exited with 1: no /no/such"),
        ("b", "\"/app wait\" did not end within 1s"),
        ("c", "/none"),
    ] {
        let has_message = |state: &ContainerRunState| {
            matches!(state, ContainerRunState::Waiting { message, .. }
                if message.contains("liveness probe failed") && message.contains(args))
        };
        let is_said = |pod: &PodRunStatus| {
            pod.containers.iter().any(|container| has_message(&container.state))
        };
        node.wait_pod(args, uid, is_said);
    }
    node.set_pods([]);
    node.wait("all gone", |pods| pods.values().all(|pod| pod.phase == PodRunPhase::Removed));
    wait_reaped(node.layout.name());
}

/// Kills a container like the node itself does: after the grace period, or if a killed node had only begun to start
/// it.
#[test]
fn a_container_that_was_killed_with_its_whole_group_starts_again() {
    let mut node = TestNode::new("killed");
    node.set_pods([pod_spec("a", &["listen=80"], json!({}))]);
    node.wait_pod("a running pod", "a", |pod| pod.phase == PodRunPhase::Running);
    CgroupMounts::find().expect("cgroup v2").kill_container(&node.layout, "a", "web");
    let status = node.wait_pod("another start", "a", |pod| {
        pod.containers.iter().any(|container| {
            container.restarts > 0 && container.state == ContainerRunState::Running
        })
    });
    assert_eq!(get_greeting(&node, pod_ip(&status), 80), "hello\n");
}

#[test]
fn a_missing_image_and_a_missing_program_are_reported_in_one_line() {
    let mut node = TestNode::new("missing");
    let image =
        json!({ "container": { "image": "dev.local/none:v1", "imagePullPolicy": "Never" } });
    let program = json!({ "container": { "command": ["/no/such/program"] } });
    let layout = json!({ "container": { "image": "oci:/no/such/layout" } });
    node.set_pods([
        pod_spec("a", &[], image),
        pod_spec("b", &[], program),
        pod_spec("c", &[], layout),
    ]);
    for (uid, expected, text_part) in [
        ("a", "ErrImageNeverPull", "is not on this node"),
        ("b", "RunContainerError", "/no/such/program"),
        ("c", "ImagePullBackOff", "is it an OCI image layout?"),
    ] {
        let has_message = |state: &ContainerRunState| {
            matches!(state, ContainerRunState::Waiting { reason, message, .. }
                if reason == expected && message.contains(text_part) && !message.contains('\n'))
        };
        node.wait_pod(text_part, uid, |pod| {
            pod.containers.iter().any(|container| has_message(&container.state))
        });
    }
}

#[test]
fn a_stopped_pod_is_asked_first_and_killed_after_its_grace() {
    let mut node = TestNode::new("grace");
    let grace = json!({ "pod": { "terminationGracePeriodSeconds": 1 } });
    // Long enough for a process that waits for a processor: the other pod shows the kill.
    let long_grace = json!({ "pod": { "terminationGracePeriodSeconds": 50 } });
    let polite_pod = pod_spec("a", &["polite", "say=ready", "wait"], long_grace);
    node.set_pods([polite_pod, pod_spec("b", &["stubborn", "say=ready", "wait"], grace)]);
    node.wait_log("pod-a", "ready");
    node.wait_log("pod-b", "ready");
    node.set_pods([]);
    node.wait("both gone", |pods| {
        pods.len() == 2 && pods.values().all(|pod| pod.phase == PodRunPhase::Removed)
    });
    assert!(node.log("pod-a").contains("asked to end"));
}

#[test]
fn a_container_may_have_the_name_of_a_file_that_all_containers_share() {
    let mut node = TestNode::new("names");
    let named = |name: &str| json!({ "container": { "name": name } });
    let names = ["hosts", "hostname", "etc"];
    node.set_pods(names.map(|name| pod_spec(name, &["listen=80"], named(name))));
    for name in names {
        node.wait_pod("a running pod", name, |pod| pod.phase == PodRunPhase::Running);
    }
}

#[test]
fn a_process_that_outlives_its_container_does_not_keep_the_cgroup() {
    let mut node = TestNode::new("stray");
    node.set_pods([pod_spec("a", &["polite", "say=runs", "wait"], json!({}))]);
    node.wait_log("pod-a", "runs\n");
    let mounts = CgroupMounts::find().expect("cgroup v2");
    let mut stray = Command::new("sleep").arg("600").spawn().expect("a process");
    let procs = node.layout.container_cgroup(&mounts.v2, "a", "web").join("cgroup.procs");
    fs::write(procs, stray.id().to_string()).expect("root");
    node.set_pods([]);
    node.wait_pod("the pod gone", "a", |pod| pod.phase == PodRunPhase::Removed);
    let is_left = node.layout.pod_cgroup(&mounts.v2, "a").exists();
    if is_left {
        stray.kill().expect("our own process");
    }
    // The node may have reaped it: its processes are children of this process.
    let _reaped = stray.wait();
    assert!(!is_left, "a cgroup without a pod");
}

#[test]
fn files_of_the_node_are_there_and_the_root_can_be_read_only() {
    let node = TestNode::new("files");
    let extra = json!({
        "container": {
            "securityContext": { "readOnlyRootFilesystem": true, "runAsUser": 7 },
            "volumeMounts": [{ "name": "scratch", "mountPath": "/scratch" }],
        },
        "pod": { "volumes": [{ "name": "scratch", "emptyDir": {} }] },
    });
    let args = [
        "id",
        "touch=/x",
        "touch=/scratch/x",
        "show=/etc/resolv.conf",
        "show=/etc/hosts",
        "say=end",
        "wait",
    ];
    node.set_pods([pod_spec("a", &args, extra)]);
    let log = node.wait_log("pod-a", "end\n");
    assert!(log.starts_with("uid 7 gid 8\nrefused\nmade\nnameserver 10.96.0.10\n"), "{log}");
    assert!(log.contains("search default.svc.cluster.local") && log.contains("\tpod-a\n"), "{log}");
}

#[test]
fn other_users_of_the_machine_reach_no_files_of_pods_and_images_and_no_lock() {
    let node = TestNode::new("rights");
    let extra = json!({
        "container": {
            "securityContext": { "runAsUser": 7 },
            "volumeMounts": [{ "name": "s", "mountPath": "/s" }],
        },
        "pod": { "volumes": [{ "name": "s", "emptyDir": {} }] },
    });
    node.set_pods([pod_spec("a", &["touch=/s/x", "say=written", "wait"], extra)]);
    node.wait_log("pod-a", "written\n");
    let volume = node.layout.pod_data("a").join("volumes/s");
    assert!(volume.join("x").exists(), "the pod's own user reaches its volume");
    let bundle = node.layout.bundle("a", "web").join("config.json");
    let image_files = node.layout.images().join("rootfs");
    // The lock of the node is on the last one: a lock of another user would stop `rouse down`.
    for path in [volume, bundle, image_files, node.layout.run_folder()] {
        let mut command = Command::new("ls");
        let listed = command.arg(&path).env("LC_ALL", "C").uid(65_534).output().expect("ls");
        let message = String::from_utf8_lossy(&listed.stderr);
        assert!(!listed.status.success() && message.contains("Permission denied"), "{message}");
        assert!(path.exists(), "{} is there", path.display());
    }
}

#[test]
fn a_sub_path_is_mounted_alone_and_never_from_outside_of_its_volume() {
    let mut node = TestNode::new("subpath");
    let mounts = json!([
        { "name": "s", "mountPath": "/whole" },
        { "name": "s", "mountPath": "/part", "subPath": "a/b" },
        { "name": "s", "mountPath": "/file", "subPath": "a/b/x" },
    ]);
    let container = json!({ "volumeMounts": mounts });
    let volumes = json!([{ "name": "s", "emptyDir": {} }]);
    let first = json!([{ "name": "first", "image": "dev.local/app:v1", "args": ["touch=/s/x"],
        "volumeMounts": [{ "name": "s", "mountPath": "/s", "subPath": "a/b" }] }]);
    let extra = json!({
        "container": container, "pod": { "initContainers": first, "volumes": volumes },
    });
    let args = ["need=/file", "need=/part/x", "say=there", "await=/whole/go", "exit=1"];
    node.set_pods([pod_spec("a", &args, extra)]);
    node.wait_log("pod-a", "there\n");
    let volume = node.layout.pod_data("a").join("volumes/s");
    // As the container itself can do it.
    fs::rename(volume.join("a"), volume.join("c")).expect("our own folder");
    symlink("/etc", volume.join("a")).expect("our own folder");
    fs::write(volume.join("go"), "").expect("our own folder");
    node.wait_pod("a refused start", "a", |pod| {
        pod.containers.iter().any(|container| {
            matches!(&container.state, ContainerRunState::Waiting { message, .. }
                if message.contains("subPath a/b outside its volume"))
        })
    });
    assert!(!Path::new("/etc/b").exists(), "nothing is made outside");
}

#[test]
fn init_containers_come_first() {
    let mut node = TestNode::new("init");
    let init = json!([{ "name": "first", "image": "dev.local/app:v1", "args": ["touch=/s/made"],
        "volumeMounts": [{ "name": "s", "mountPath": "/s" }] }]);
    let extra = json!({
        "container": { "volumeMounts": [{ "name": "s", "mountPath": "/s" }] },
        "pod": { "initContainers": init, "volumes": [{ "name": "s", "emptyDir": {} }] },
    });
    node.set_pods([pod_spec("a", &["show=/s/made", "say=second", "wait"], extra)]);
    node.wait_log("pod-a", "second");
    node.wait_pod("a running pod", "a", |pod| pod.phase == PodRunPhase::Running);
}

#[test]
fn names_are_resolved_for_clients_and_a_cluster_ip_without_pods_is_refused() {
    let node = TestNode::new("dns");
    let name = common::wire::NamespacedName::new("default", "hello");
    let addresses = vec!["10.96.0.77".parse().expect("an address")];
    node.node_spec.send_modify(|spec| drop(spec.dns_names.insert(name, addresses)));
    let reply = node.in_client_netns(|| {
        let socket = std::net::UdpSocket::bind("10.244.0.2:0").expect("the client's address");
        socket.set_read_timeout(Some(Duration::from_millis(200))).expect("a timeout");
        let mut question = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in "hello.default.svc.cluster.local".split('.') {
            question.push(label.len() as u8);
            question.extend(label.as_bytes());
        }
        question.extend([0, 0, 1, 0, 1]);
        let mut reply = [0; 512];
        for _ in 0..100 {
            let _ = socket.send_to(&question, "10.96.0.10:53");
            if let Ok(length) = socket.recv(&mut reply) {
                return reply[..length].to_vec();
            }
        }
        panic!("no reply")
    });
    assert_eq!(reply[reply.len() - 4..], [10, 96, 0, 77]);
    let refused = node.in_client_netns(|| {
        let address = "10.96.0.78:80".parse().expect("an address");
        TcpStream::connect_timeout(&address, Duration::from_secs(10)).expect_err("no pod serves it")
    });
    assert_eq!(refused.kind(), std::io::ErrorKind::HostUnreachable);
}

/// runc starts a command in a cgroup of the node. If the container ends meanwhile, parts of runc become children of the
/// node, and the container cannot end before they are reaped.
#[test]
#[allow(clippy::zombie_processes, reason = "the node has to reap it")]
fn a_process_that_a_runtime_leaves_in_the_nodes_cgroup_is_reaped() {
    let node = TestNode::new("left-behind");
    let cgroups = CgroupMounts::find().expect("cgroup v2");
    let procs = node.layout.runtime_cgroup(&cgroups.v2).join("cgroup.procs");
    let script = format!("echo $$ > {}", procs.display());
    let left_behind = Command::new("sh").args(["-c", &script]).spawn().expect("sh is there");
    let folder = Path::new("/proc").join(left_behind.id().to_string());
    wait_for("the process to be reaped", || (!folder.exists()).then_some(()));
}

/// The moment at which a container ends decides how far runc is with the command.
#[test]
fn a_pod_that_goes_at_any_moment_of_a_probe_leaves_no_process() {
    let mut node = TestNode::with_runtime("moments", Some(OciRuntimeKind::Runc), Vec::new());
    for round in 0..32 {
        let uid = format!("p{round}");
        // A command that the end of its container leaves behind ends with its time.
        let extra = json!({ "container": { "livenessProbe": short_exec_probe(&["need=/"]) } });
        node.set_pods([pod_spec(&uid, &["polite", "wait"], extra)]);
        node.wait_pod("a running pod", &uid, |pod| pod.phase == PodRunPhase::Running);
        // A probe takes less than 100 ms. The factor spreads the rounds over that time.
        sleep(Duration::from_millis(round * 37 % 100));
        node.set_pods([]);
        node.wait_pod("a pod that is gone", &uid, |pod| pod.phase == PodRunPhase::Removed);
        wait_reaped(node.layout.name());
    }
}
