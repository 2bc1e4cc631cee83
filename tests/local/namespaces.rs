//! Settings of the network namespaces that a node makes. What surrounds them stays as it is.

use std::fs;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::Command;
use std::thread;

use common::local_node::PodRunPhase;
use local::NodeManager;
use local::net::{create_node_namespaces, enter_namespace, open_namespace};
use serde_json::json;
use tests::images::scratch_directory;
use tests::test_node::{TestNode, pod_spec};

/// Settings of a network namespace, which the node changes in the namespaces that it makes. The second one is absent
/// before Linux 6.1.
const CHANGED_SETTINGS: [&str; 2] = ["ip_unprivileged_port_start", "tcp_child_ehash_entries"];
/// Path of the second of these settings.
const CHILD_TABLE_ENTRIES: &str = "/proc/sys/net/ipv4/tcp_child_ehash_entries";
/// Limits that the kernel derives from the size of a namespace's connection table.
const DERIVED_LIMITS: [&str; 2] = ["tcp_max_tw_buckets", "tcp_max_syn_backlog"];
/// Variable of the process that the test starts.
const ROLE: &str = "ROUSE_TEST_NAMESPACES";

/// Returns a setting of the calling thread's network namespace; `None` if the kernel does not have it.
fn read_setting(name: &str) -> Option<i64> {
    let text = fs::read_to_string(Path::new("/proc/sys/net/ipv4").join(name)).ok()?;
    Some(text.trim().parse().expect("a number"))
}

/// Runs `work` in a network namespace, on a thread of its own.
fn run_inside<T: Send>(namespace: &Path, work: impl FnOnce() -> T + Send) -> T {
    let namespace = open_namespace(namespace).expect("a namespace");
    let inside = || {
        enter_namespace(namespace.as_fd()).expect("root");
        work()
    };
    thread::scope(|scope| scope.spawn(inside).join()).expect("no panic inside")
}

#[test]
fn pods_and_clients_have_connection_tables_of_their_own_and_the_limits_of_the_node() {
    let before = CHANGED_SETTINGS.map(read_setting);
    let mut node = TestNode::new("tables");
    node.set_pods([pod_spec("a", &["wait"], json!({}))]);
    node.wait_pod("a running pod", "a", |pod| pod.phase == PodRunPhase::Running);
    // The node's namespace shares the machine's table, unless the machine is set up for small ones.
    let node_namespace = node.layout.node_namespace();
    let limits = run_inside(&node_namespace, || DERIVED_LIMITS.map(read_setting));
    assert!(limits.iter().all(Option::is_some), "{limits:?}");
    // In a namespace that shares the machine's table the number is negative. Before Linux 6.1 there is none.
    let entries = read_setting("tcp_ehash_entries").map(|_| 16_384);
    for path in [node.layout.pod_namespace("a"), node.layout.client_namespace()] {
        run_inside(&path, || {
            assert_eq!(read_setting("tcp_ehash_entries"), entries, "{}", path.display());
            assert_eq!(DERIVED_LIMITS.map(read_setting), limits, "{}", path.display());
            assert_eq!(read_setting("ip_unprivileged_port_start"), Some(0), "{}", path.display());
        });
    }
    // A node of an earlier version does not have the setting. Kernels before 6.1 refuse the write.
    let _ = run_inside(&node_namespace, || fs::write(CHILD_TABLE_ENTRIES, "0"));
    NodeManager::create(&node.layout).expect("a node that exists");
    let child_entries = run_inside(&node_namespace, || read_setting("tcp_child_ehash_entries"));
    assert_eq!(child_entries, entries);
    assert_eq!(CHANGED_SETTINGS.map(read_setting), before, "of the machine");
}

#[test]
fn a_namespace_that_cannot_be_made_changes_no_other_one() {
    // In a namespace of its own, and without the right to make another one.
    let mut command = Command::new("unshare");
    command.args(["--net", "setpriv", "--bounding-set", "-sys_admin"]);
    command.arg(std::env::current_exe().expect("a path"));
    command.args(["--exact", "namespaces::fail_to_make", "--ignored", "--nocapture"]);
    let output = command.env(ROLE, "fail").output().expect("util-linux");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
}

/// Main function of the process that may make no namespace; not a test itself.
#[test]
#[ignore = "run by a_namespace_that_cannot_be_made_changes_no_other_one"]
fn fail_to_make() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let before = CHANGED_SETTINGS.map(read_setting);
    assert!(before[0].is_some());
    let folder = scratch_directory("namespaces");
    let made = create_node_namespaces(&folder.join("node"), &folder.join("client"));
    fs::remove_dir_all(&folder).expect("our own folder");
    assert!(made.is_err(), "it may make namespaces");
    assert_eq!(CHANGED_SETTINGS.map(read_setting), before);
}
