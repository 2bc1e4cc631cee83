//! Containers that write longer logs than there is room for.

use std::fs;
use std::io::Read as _;
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use common::local_node::PodRunPhase;
use serde_json::json;
use tests::test_node::{TestNode, pod_ip, pod_spec};
use tests::wait::wait_for;

/// Maximum size of a log, as in Kubernetes.
const MAX_LOG_BYTES: u64 = 10 << 20;

#[test]
fn a_long_log_is_rotated_and_the_container_continues_to_write() {
    let node = TestNode::new("rotate");
    let extra = json!({
        "container": { "volumeMounts": [{ "name": "s", "mountPath": "/s" }] },
        "pod": { "volumes": [{ "name": "s", "emptyDir": {} }] },
    });
    let args = ["say=first", "fill=25", "say=last", "await=/s/go", "say=afterwards", "wait"];
    node.set_pods([pod_spec("a", &args, extra)]);
    let log = node.layout.log("default", "pod-a", "web");
    let old = log.with_extension("log.1");
    wait_for("a rotated log", || {
        let size = |path| fs::metadata(path).map_or(0, |meta| meta.len());
        (old.exists() && size(&log) <= MAX_LOG_BYTES && size(&old) > 0).then_some(())
    });
    assert!(
        fs::metadata(&old).expect("it exists").len() <= MAX_LOG_BYTES,
        "many times the bound is kept"
    );
    fs::write(node.layout.pod_data("a").join("volumes/s/go"), "").expect("the pod's volume");
    let text = wait_for("the line after", || {
        let text = fs::read_to_string(&log).ok()?;
        text.contains("afterwards\n").then_some(text)
    });
    // The container appends to the truncated file: there is no hole before its new position.
    assert!(!text.contains('\0') && text.ends_with("afterwards\n"));
}

#[test]
fn a_full_disk_for_logs_stops_no_pod() {
    let mut node = TestNode::new("full");
    let logs = node.layout.logs();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m,mode=700", "full"])
        .arg(&logs)
        .status();
    assert!(mounted.expect("mount").success());
    let _unmounted = UnmountGuard(&logs);
    node.set_pods([pod_spec("a", &["fill=4", "listen=80"], json!({}))]);
    let first = node.wait_pod("a running pod", "a", |pod| pod.phase == PodRunPhase::Running);
    assert_eq!(get_greeting(&node, &first), "hello\n");
    // The volume is full now.
    let chatty = pod_spec("b", &["say=nobody reads this", "listen=80"], json!({}));
    node.set_pods([pod_spec("a", &["fill=4", "listen=80"], json!({})), chatty]);
    let second = node.wait_pod("another running pod", "b", |pod| pod.phase == PodRunPhase::Running);
    assert_eq!(get_greeting(&node, &second), "hello\n");
    node.set_pods([]);
    node.wait("both gone", |pods| pods.values().all(|pod| pod.phase == PodRunPhase::Removed));
}

struct UnmountGuard<'a>(&'a std::path::Path);

impl Drop for UnmountGuard<'_> {
    fn drop(&mut self) {
        // A lazy unmount, because a container may still hold its log open.
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}

fn get_greeting(node: &TestNode, status: &common::local_node::PodRunStatus) -> String {
    let address = SocketAddr::new(pod_ip(status), 80);
    node.in_client_netns(|| {
        wait_for("a response", || {
            let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(10)).ok()?;
            let mut text = String::new();
            stream.read_to_string(&mut text).ok().map(|_| text)
        })
    })
}
