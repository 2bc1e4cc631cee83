//! Clusters of `cargo xtask cluster`: start, repair and removal, their isolation, and the view of a pod in them.
#![allow(
    clippy::unwrap_used,
    reason = "a panic in a test names the line, which is what a test is for"
)]

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use tests::test_cluster::{TestCluster, TestNamespace, in_netns, required_variable, xtask_output};

/// A cluster of one test, removed on drop, also when the test fails.
pub(crate) struct DedicatedCluster {
    pub(crate) name: String,
    xtask: PathBuf,
}

impl DedicatedCluster {
    fn start(test: &str) -> Self {
        Self::start_with(test, &["--nodes", "1", "--image", "hello"])
    }

    /// Creates a cluster with the given arguments of `xtask cluster up`.
    pub(crate) fn start_with(test: &str, up_args: &[&str]) -> Self {
        let cluster = Self {
            name: format!("{test}-{}", std::process::id()),
            xtask: PathBuf::from(required_variable("ROUSE_XTASK")),
        };
        // If this process is killed, the next run removes the cluster.
        let owner = std::process::id().to_string();
        cluster.run_xtask(&[&["up", "--owner", &owner][..], up_args].concat());
        cluster
    }

    /// Runs `xtask cluster` with these arguments, and returns its output.
    pub(crate) fn run_xtask(&self, args: &[&str]) -> String {
        xtask_output(&self.xtask, &self.name, args)
            .unwrap_or_else(|error| panic!("{args:?}: {error}"))
    }
}

impl Drop for DedicatedCluster {
    fn drop(&mut self) {
        let _down = xtask_output(&self.xtask, &self.name, &["down"]);
    }
}

/// Leftovers of a cluster on this machine, by its name: processes, mounts, cgroups, files.
#[derive(Debug, Default, PartialEq, Eq)]
struct ClusterLeftovers {
    processes: usize,
    mounts: usize,
    cgroups: usize,
    files: usize,
}

fn find_leftovers(name: &str) -> ClusterLeftovers {
    let prefix = format!("rouse-cluster-{name}");
    let processes = fs::read_dir("/proc").unwrap().flatten();
    // A zombie that process 1 has not reaped yet does not count.
    let has_ended = |entry: &fs::DirEntry| {
        fs::read_to_string(entry.path().join("stat")).map_or(true, |text| text.contains(") Z "))
    };
    let is_its = |entry: &fs::DirEntry| {
        let group = fs::read_to_string(entry.path().join("cgroup"));
        group.is_ok_and(|text| text.contains(&prefix)) && !has_ended(entry)
    };
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let hierarchies = fs::read_dir("/sys/fs/cgroup").unwrap().flatten();
    let folders =
        ["/run/rouse-cluster", "/var/lib/rouse-cluster"].map(|base| Path::new(base).join(name));
    ClusterLeftovers {
        processes: processes.filter(is_its).count(),
        mounts: mounts.lines().filter(|line| line.contains(&format!("/{name}/"))).count(),
        cgroups: hierarchies.filter(|entry| entry.path().join(&prefix).exists()).count()
            + usize::from(Path::new("/sys/fs/cgroup").join(&prefix).exists()),
        files: folders.iter().filter(|folder| folder.exists()).count(),
    }
}

/// Network devices and routes of the host itself.
fn host_network() -> (Vec<String>, String) {
    let devices = fs::read_dir("/sys/class/net").unwrap().flatten();
    let mut devices: Vec<String> =
        devices.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    devices.sort();
    (devices, fs::read_to_string("/proc/net/route").unwrap())
}

#[test]
fn down_leaves_nothing() {
    let before = host_network();
    let cluster = DedicatedCluster::start("leaves");
    let during = find_leftovers(&cluster.name);
    assert!(during.processes > 8 && during.mounts >= 2 && during.cgroups > 0, "{during:?}");
    assert_eq!(host_network(), before, "the host's network is not touched");
    cluster.run_xtask(&["down"]);
    assert_eq!(find_leftovers(&cluster.name), ClusterLeftovers::default());
    assert_eq!(host_network(), before);
}

#[test]
#[ignore = "takes minutes: --long"]
fn up_repairs_what_was_killed() {
    let cluster = DedicatedCluster::start("repair");
    for component in ["node1", "kube-scheduler", "forward", "etcd"] {
        cluster.run_xtask(&["fault", "kill", component]);
    }
    cluster.run_xtask(&["fault", "stop", "kube-controller-manager"]);
    let table = cluster.run_xtask(&["up", "--image", "hello"]);
    assert!(table.contains("node1    yes"), "{table}");
    // Everything runs, so another `up` has only the final check to do.
    let table = cluster.run_xtask(&["up", "--image", "hello"]);
    assert!(table.contains("[ 1/1]"), "{table}");
}

#[test]
fn kubectl_finds_the_cluster_from_every_place() {
    let cluster = TestCluster::from_environment();
    let command = ["kubectl", "get", "nodes", "--output", "name"];
    let outputs =
        [cluster.kubectl(&command[1..]), cluster.run(&command), cluster.on_node("node2", &command)];
    for output in outputs {
        assert!(output.unwrap().contains("node/node2"));
    }
}

#[test]
fn no_packet_leaves_the_cluster() {
    let cluster = TestCluster::from_environment();
    let status = cluster.status();
    let netns = |value: &serde_json::Value| PathBuf::from(value.as_str().unwrap_or_default());
    let nodes = status["nodes"].as_array().expect("there are nodes");
    for file in nodes.iter().map(|node| netns(&node["netns"])).chain([netns(&status["netns"])]) {
        let outside: SocketAddr = "192.0.2.1:80".parse().unwrap();
        let socket = in_netns(&file, || {
            let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
            socket.connect(outside)
        });
        assert!(socket.is_err(), "{} has a route to the outside", file.display());
    }
}

#[test]
fn a_node_agent_sees_its_own_nodes_cgroups_and_a_bpf_file_system() {
    let cluster = TestCluster::from_environment();
    let namespace = TestNamespace::new(&cluster, "agent-view");
    let name = &namespace.name;
    let yaml = format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: look, namespace: {name}}}
spec:
  nodeName: node2
  hostNetwork: true
  containers:
  - name: look
    image: dev.local/hello:v1
    imagePullPolicy: Never
    env: [{{name: PORT, value: \"18080\"}}]
    securityContext: {{privileged: true, runAsUser: 0}}
    volumeMounts:
    - {{name: bpf, mountPath: /sys/fs/bpf, mountPropagation: HostToContainer}}
    - {{name: cgroup, mountPath: /sys/fs/cgroup, mountPropagation: HostToContainer}}
  volumes:
  - {{name: bpf, hostPath: {{path: /sys/fs/bpf}}}}
  - {{name: cgroup, hostPath: {{path: /sys/fs/cgroup}}}}
"
    );
    cluster.apply(&yaml).unwrap();
    cluster.wait("the pod", || {
        let pod = cluster.get(&["pod", "--namespace", name, "look"]);
        (pod["status"]["phase"] == "Running").then_some(())
    });
    // The pod's view of the file system is that of its first process.
    let netns = cluster.netns_of(name, "look");
    let root = netns.parent().and_then(Path::parent).expect("a process has a folder").join("root");
    let mounts = fs::read_to_string(root.parent().unwrap().join("mountinfo")).unwrap();
    let v2 = mounts
        .lines()
        .filter_map(|line| line.split_once(" - "))
        .find(|(_, kind)| kind.starts_with("cgroup2 "))
        .and_then(|(mount_point, _)| mount_point.split(' ').nth(4))
        .expect("cgroup v2 is mounted in the pod");
    let kubepods = root.join(v2.trim_start_matches('/')).join("kubepods");
    assert!(kubepods.is_dir(), "{} is not there", kubepods.display());
    let metadata = fs::metadata(&kubepods).unwrap();
    let status = cluster.status();
    let of_node = |node: usize| {
        let group = status["nodes"][node]["cgroup"].as_str().unwrap_or_default().to_owned();
        fs::metadata(Path::new(&group).join("kubepods")).unwrap()
    };
    use std::os::unix::fs::MetadataExt as _;
    assert_eq!(metadata.ino(), of_node(1).ino(), "it is its own node's");
    assert_ne!(metadata.ino(), of_node(0).ino(), "and not the other's");
    assert!(mounts.lines().any(|line| line.contains(" /sys/fs/bpf ") && line.contains(" - bpf ")));
}
