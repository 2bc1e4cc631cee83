//! From an empty cluster to an answer, as the README says: install, apply, ask; asleep and awake again; uninstall.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use tests::cluster::{Cluster, variable};

use crate::ours::Own;

const HELLO: &str = include_str!("../../examples/hello.yaml");
const HOST: &str = "hello.default.example.com";

/// A pod that does nothing but be a place to ask from.
fn client(node: &str) -> String {
    format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: client-{node}, namespace: default}}
spec:
  nodeName: {node}
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 1
  containers:
  - {{name: client, image: \"dev.local/hello:v1\", imagePullPolicy: Never, env: [{{name: PORT, value: \"8080\"}}]}}
"
    )
}

/// `rouse ARGS --kubeconfig FILE` of the program that is in the image.
fn rouse(args: &[&str], kubeconfig: &Path) -> String {
    let mut command = Command::new(variable("ROUSE_PROGRAM"));
    command.args(args).arg("--kubeconfig").arg(kubeconfig).stdin(Stdio::null());
    let done = command.output().expect("the program starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(done.status.success(), "{args:?}: {}{}", text(&done.stdout), text(&done.stderr));
    text(&done.stdout)
}

/// The cgroup of v2 that a process is in.
fn cgroup_of(process: &Path) -> PathBuf {
    let text = std::fs::read_to_string(process.join("cgroup")).expect("a process has cgroups");
    let path = text.lines().find_map(|line| line.strip_prefix("0::")).expect("one is of v2");
    let unified = Path::new("/sys/fs/cgroup/unified");
    let root = if unified.is_dir() { unified } else { Path::new("/sys/fs/cgroup") };
    root.join(path.trim_start_matches('/'))
}

/// Asks from the pod `client-NODE`: in its network, and in its cgroup, where the kernel half sees connects.
fn ask_from(cluster: &Cluster, node: &str, url: &str) -> String {
    let netns = cluster.netns_of("default", &format!("client-{node}"));
    let process = netns.parent().and_then(Path::parent).expect("a process has a folder").to_owned();
    let script = "echo $$ > \"$0/cgroup.procs\" && exec nsenter --net=\"$1\" \
                  curl --silent --show-error --fail --max-time 60 --noproxy '*' \"$2\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).arg(cgroup_of(&process)).arg(&netns).arg(url);
    let done = shell.output().expect("sh, nsenter and curl are there");
    assert!(done.status.success(), "{url}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8_lossy(&done.stdout).into_owned()
}

fn pods(cluster: &Cluster) -> Vec<Value> {
    let list = cluster.get(&["pods", "--selector", "serving.knative.dev/service=hello"]);
    list["items"].as_array().cloned().unwrap_or_default()
}

fn asleep(cluster: &Cluster) {
    cluster.wait("the service to have no pod", || pods(cluster).is_empty().then_some(()));
}

/// The cells of the first row of `kubectl get KIND`, empty cells left out.
fn row(cluster: &Cluster, kind: &str) -> Vec<String> {
    let text = cluster.kubectl(&["get", kind, "--no-headers"]).expect("the kind is known");
    let line = text.lines().next().unwrap_or_default();
    line.split_whitespace().map(str::to_owned).collect()
}

fn columns(cluster: &Cluster) {
    let url = format!("http://{HOST}");
    let ready = ["hello-00001", "hello-00001", "True"];
    assert_eq!(row(cluster, "ksvc"), [&["hello", &url][..], &ready].concat());
    assert_eq!(row(cluster, "configuration"), [&["hello"][..], &ready].concat());
    assert_eq!(row(cluster, "revision"), ["hello-00001", "hello", "1", "True", "0", "0"]);
    assert_eq!(row(cluster, "route"), ["hello", &url, "True"]);
    assert_eq!(row(cluster, "podautoscaler"), ["hello-00001", "0", "0", "False", "NoTraffic"]);
    let sks = row(cluster, "sks");
    assert_eq!(sks[..5], ["hello-00001", "Proxy", "2", "hello-00001", "hello-00001-private"]);
}

fn applied(cluster: &Cluster) {
    cluster.apply(HELLO).expect("admission takes the example");
    cluster.wait("the service to be ready", || {
        let service = cluster.get(&["ksvc", "hello"]);
        let all = service["status"]["conditions"].as_array().cloned().unwrap_or_default();
        all.iter().any(|it| it["type"] == "Ready" && it["status"] == "True").then_some(())
    });
    asleep(cluster);
}

/// Wakes the service from a pod on `node`; says on which node the pod that answered runs.
fn woken_from(cluster: &Cluster, node: &str, url: &str) -> String {
    let body = ask_from(cluster, node, url);
    assert!(body.starts_with("Hello from hello-00001-deployment-"), "{body}");
    let node = |pod: &Value| pod["spec"]["nodeName"].as_str().unwrap_or_default().to_owned();
    pods(cluster).first().map(node).expect("a pod answered")
}

#[test]
fn a_service_wakes_on_a_cluster_that_was_just_installed() {
    let own = Own::of("install", &["up", "--nodes", "2", "--image", "hello", "--image", "rouse"]);
    let cluster = Cluster::named(&own.name);
    let status = cluster.status();
    let kubeconfig = PathBuf::from(status["kubeconfig"].as_str().expect("it has one"));
    let said = rouse(&["install", "--apply", "--wait", "--gateway", "nodeport"], &kubeconfig);
    assert!(said.contains("ready after"), "{said}");
    for node in ["node1", "node2"] {
        cluster.apply(&client(node)).unwrap();
    }
    applied(&cluster);
    columns(&cluster);

    let service = cluster.get(&["service", "hello"]);
    let address = service["spec"]["clusterIP"].as_str().expect("it has an address").to_owned();
    let url = format!("http://{address}/");
    cluster.wait("clients", || {
        let pods = cluster.get(&["pods", "client-node1", "client-node2"]);
        let all = pods["items"].as_array().cloned().unwrap_or_default();
        let runs = |it: &&Value| it["status"]["phase"] == "Running";
        (all.iter().filter(runs).count() == 2).then_some(())
    });
    // From zero, from a pod on each node: one of them is on the other node than the pod that answers.
    for node in ["node1", "node2"] {
        let at = woken_from(&cluster, node, &url);
        println!("woken from {node}, answered from {at}");
        let (other, peer) = (if at == "node1" { "node2" } else { "node1" }, cluster.clone());
        assert!(
            ask_from(&peer, other, &url).starts_with("Hello from"),
            "warm, from the other node"
        );
        asleep(&cluster);
    }

    // From outside.
    let gateway = cluster.get(&["service", "--namespace", "knative-serving", "rouse-gateway"]);
    let port = gateway["spec"]["ports"][0]["nodePort"].as_u64().expect("it has a node's port");
    let node = status["nodes"][0]["addresses"][0].as_str().expect("it has an address").to_owned();
    let through = |host: &str| {
        let (url, host) = (format!("http://{node}:{port}/"), format!("Host: {host}"));
        let curl = ["curl", "--silent", "--max-time", "60", "--write-out", "%{http_code}"];
        cluster.run(&[&curl[..], &["--header", &host, &url]].concat()).expect("curl ends well")
    };
    let body = through(HOST);
    assert!(
        body.starts_with("Hello from hello-00001-deployment-") && body.ends_with("200"),
        "{body}"
    );
    assert!(through("hello.default.svc.cluster.local").ends_with("404"), "a name for inside only");
    asleep(&cluster);

    // Once more: nothing to do, and what an operator set stays.
    let patch = r#"{"data":{"stable-window":"30s"}}"#;
    let config = ["configmap", "--namespace", "knative-serving", "config-autoscaler"];
    cluster.kubectl(&[&["patch"][..], &config, &["--patch", patch]].concat()).unwrap();
    rouse(&["install", "--apply", "--wait", "--gateway", "nodeport"], &kubeconfig);
    assert_eq!(cluster.get(&config)["data"]["stable-window"], "30s");
    woken_from(&cluster, "node1", &url);
    uninstalled(&cluster, &kubeconfig);
}

fn uninstalled(cluster: &Cluster, kubeconfig: &Path) {
    rouse(&["uninstall"], kubeconfig);
    let parts = ["--namespace", "knative-serving", "--output", "name"];
    let left = cluster
        .kubectl(&[&["get", "deployments,daemonsets,services,secrets"][..], &parts].concat());
    assert_eq!(left.expect("the namespace stays").trim(), "");
    let service = cluster.get(&["ksvc", "hello"]);
    assert_eq!(service["metadata"]["name"], "hello", "users' objects stay");
    for node in ["node1", "node2"] {
        let pins = cluster.on_node(node, &["ls", "/sys/fs/bpf/rouse"]).unwrap_or_default();
        assert_eq!(pins.trim(), "", "programs are still pinned on {node}");
    }
}
