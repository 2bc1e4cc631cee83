//! A cluster without kube-proxy, where agents alone serve ClusterIPs, also after all has stopped and started.

use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tests::client_pod::ClientPod;
use tests::installed_cluster::{HELLO_CONTAINER, RouseCluster, service_manifest};
use tests::load_process::{LoadRequest, assert_none_lost};
use tests::test_cluster::TestCluster;

use crate::clusterip::plain_service;
use crate::xtask_cluster::DedicatedCluster;

const NODES: [&str; 2] = ["node1", "node2"];
/// Arguments that start the cluster of a test.
const UP_ARGS: [&str; 6] = ["--nodes", "2", "--image", "hello", "--image", "rouse"];
/// Arguments of an installation that serves all ClusterIPs. The last one is to be followed by the API server's URL.
const INSTALL_ARGS: [&str; 8] =
    ["install", "--apply", "--wait", "--gateway", "hostport", "--clusterip", "all", "--apiserver"];
/// Processes of the control plane that write to the API server.
const CONTROLLERS: [&str; 2] = ["kube-controller-manager", "kube-scheduler"];
/// Script that removes kube-proxy's rules from a node.
const REMOVE_RULES: &str = "for it in iptables ip6tables; do \
                            $it-save | grep -v KUBE- | $it-restore || exit 1; done";
/// Script that sends a query to a name server, and prints the last four bytes of the answer: the address in it.
const ASK: &str = "exec 3<>\"/dev/udp/$0/53\" && printf \"$1\" >&3 && \
                   timeout 5 dd bs=1500 count=1 <&3 2>/dev/null | tail -c 4 | od -An -tu1";

/// URL of the API server itself.
fn api_server(cluster: &TestCluster) -> String {
    let slice = cluster.get(&["endpointslices", "--namespace", "default", "kubernetes"]);
    let address = slice["endpoints"][0]["addresses"][0].as_str().expect("it has an endpoint");
    let port = slice["ports"][0]["port"].as_u64().expect("it has a port");
    format!("https://{address}:{port}")
}

/// Ends kube-proxy on each node, and removes what it leaves there.
fn end_kube_proxy(cluster: &TestCluster) {
    for node in NODES {
        cluster.fault("kill", &format!("{node}/kube-proxy")).expect("it runs");
        cluster.on_node(node, &["sh", "-c", REMOVE_RULES]).expect("root may change rules");
    }
}

/// Kills all processes of the cluster, and starts them again but for kube-proxy.
fn restart_everything(cluster: &TestCluster) {
    let fault = |action: &str, part: &str| {
        cluster.fault(action, part).unwrap_or_else(|error| panic!("{action} {part}: {error}"));
    };
    let parts = NODES.into_iter().chain(CONTROLLERS).chain(["kube-apiserver", "etcd"]);
    parts.for_each(|part| fault("kill", part));
    fault("start", "etcd");
    cluster.wait("the API server", || {
        cluster.fault("start", "kube-apiserver").ok()?;
        cluster.get(&["nodes"])["items"].is_array().then_some(())
    });
    CONTROLLERS.into_iter().for_each(|part| fault("start", part));
    NODES.into_iter().for_each(|node| fault("boot", node));
}

/// Query for the IPv4 address of a name, in the form of the shell's `printf`.
fn dns_query(name: &str) -> String {
    // Number 7, with recursion, one question.
    let header = r"\x00\x07\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00";
    let labels = name.split('.').map(|label| format!("\\x{:02x}{label}", label.len()));
    // The end of the name, type A, class IN.
    header.to_owned() + &labels.collect::<Vec<_>>().concat() + r"\x00\x00\x01\x00\x01"
}

/// Address of a name, as the cluster's DNS tells it to a pod; another text without an answer.
fn resolve_from(client: &ClientPod, dns: &str, name: &str) -> String {
    let query = dns_query(name);
    let mut command = client.command(&["bash", "-c", ASK, dns, &query]);
    let output = command.stdin(Stdio::null()).output().expect("sh is there");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split_whitespace().collect::<Vec<_>>().join(".")
}

/// Asserts that a pod on this node finds the sleeping service by its name, and wakes it.
fn check_dns_and_wake(rouse: &RouseCluster, namespace: &str, node: &str) {
    let client = ClientPod::new(&rouse.cluster, namespace, node);
    let dns = rouse.cluster.get(&["service", "--namespace", "kube-system", "kube-dns"]);
    let dns = dns["spec"]["clusterIP"].as_str().expect("it has an address").to_owned();
    let url = rouse.service_url(namespace, "asleep");
    let address = url.trim_start_matches("http://");
    let name = format!("asleep.{namespace}.svc.cluster.local");
    rouse.cluster.wait("the name of the service", || {
        (resolve_from(&client, &dns, &name) == address).then_some(())
    });
    // An attempt to connect sends no request, so the service sleeps on.
    rouse.cluster.wait("its address to lead somewhere", || client.can_connect(&url).then_some(()));
    let args = ["--stages", "1x1s", "--requests", "1", "--timeout-s", "180"];
    let load = client.start_load(&rouse.service_address(namespace, "asleep"), "asleep", &args);
    assert_none_lost(&load.finish(), 1);
    for node in NODES {
        let rules = rouse.cluster.on_node(node, &["iptables-save"]).expect("root may read rules");
        assert!(!rules.contains("KUBE-SVC-"), "kube-proxy has rules on {node}: {rules}");
    }
}

#[test]
#[ignore = "takes minutes: --long"]
fn after_everything_has_stopped_and_started_dns_and_a_wake_work_without_kube_proxy() {
    let dedicated = DedicatedCluster::start_with("restart", &UP_ARGS);
    let cluster = TestCluster::by_name(&dedicated.name);
    let server = api_server(&cluster);
    let install = [&INSTALL_ARGS[..], &[server.as_str(), "--without-kube-proxy"]].concat();
    let rouse = RouseCluster::on_own_cluster(cluster, &install);
    end_kube_proxy(&rouse.cluster);
    let namespace = rouse.namespace("everything");
    let name = namespace.name.as_str();
    rouse.apply_until_ready(name, &service_manifest("asleep", "", HELLO_CONTAINER));
    rouse.wait_asleep(name, "asleep");
    check_dns_and_wake(&rouse, name, "node1");
    rouse.wait_asleep(name, "asleep");
    restart_everything(&rouse.cluster);
    check_dns_and_wake(&rouse, name, "node2");
}

/// Starts kube-proxy on each node, and waits until it has written its rules.
fn start_kube_proxy(cluster: &TestCluster) {
    for node in NODES {
        cluster.fault("start", &format!("{node}/kube-proxy")).expect("it starts");
        cluster.wait("kube-proxy's rules", || {
            cluster.on_node(node, &["iptables-save"]).ok()?.contains("KUBE-SVC-").then_some(())
        });
    }
}

/// End of the load when it is dropped, also by a panic, so that its thread ends.
struct EndOfMigration<'a>(&'a AtomicBool);

impl Drop for EndOfMigration<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Sends requests, each over a connection of its own, until the migration is over. They are slow, so that connections
/// which have ended leave enough ports.
fn send_until(client: &ClientPod, address: &str, is_over: &AtomicBool) -> Vec<LoadRequest> {
    let args = ["--stages", "2x3s", "--path", "/?sleep=50", "--fresh-pct", "100"];
    let mut requests = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        requests.extend(client.start_load(address, "plain", &args).finish());
    }
    requests
}

/// The steps are those of docs/clusterip.md.
#[test]
#[ignore = "takes minutes: --long"]
fn no_connect_fails_on_the_way_from_kube_proxy_and_back() {
    let dedicated = DedicatedCluster::start_with("migration", &UP_ARGS);
    let cluster = TestCluster::by_name(&dedicated.name);
    let server = api_server(&cluster);
    let beside = [&INSTALL_ARGS[..], &[server.as_str()]].concat();
    let without = [&beside[..], &["--without-kube-proxy"]].concat();
    let rouse = RouseCluster::on_own_cluster(cluster, &beside);
    let namespace = rouse.namespace("migration");
    let name = namespace.name.as_str();
    rouse.apply(name, &plain_service("", 2)).expect("it is valid");
    let client = ClientPod::new(&rouse.cluster, name, "node1");
    let url = rouse.service_url(name, "plain");
    rouse.cluster.wait("an endpoint", || client.can_connect(&url).then_some(()));
    let address = rouse.service_address(name, "plain");
    let is_over = AtomicBool::new(false);
    let requests = thread::scope(|scope| {
        let load = scope.spawn(|| send_until(&client, &address, &is_over));
        let end = EndOfMigration(&is_over);
        rouse.run_rouse(&without);
        end_kube_proxy(&rouse.cluster);
        start_kube_proxy(&rouse.cluster);
        rouse.run_rouse(&beside);
        drop(end);
        load.join().expect("the load ends by itself")
    });
    assert_none_lost(&requests, 100);
}
