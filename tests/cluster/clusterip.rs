//! Services of the cluster that agents serve in kube-proxy's place.

use std::collections::BTreeSet;
use std::process::Command;

use tests::installed_cluster::{HELLO_CONTAINER, RouseCluster, service_manifest};
use tests::test_cluster::HELLO_IMAGE;

/// Returns a Deployment and its Service, with these labels on the Service.
pub(crate) fn plain_service(labels: &str, replicas: u8) -> String {
    format!(
        "apiVersion: apps/v1
kind: Deployment
metadata: {{name: plain}}
spec:
  replicas: {replicas}
  selector: {{matchLabels: {{app: plain}}}}
  template:
    metadata: {{labels: {{app: plain}}}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: web
        image: \"{HELLO_IMAGE}\"
        imagePullPolicy: Never
        env: [{{name: PORT, value: \"8080\"}}]
        readinessProbe: {{httpGet: {{path: /, port: 8080}}, periodSeconds: 1, timeoutSeconds: 10}}
---
apiVersion: v1
kind: Service
metadata: {{name: plain, labels: {{{labels}}}}}
spec: {{selector: {{app: plain}}, ports: [{{port: 80, targetPort: 8080}}]}}
"
    )
}

/// Command of the node itself, beside the kubelet: in its network and cgroup.
fn node_command(rouse: &RouseCluster, node: &str, args: &[&str]) -> Command {
    let status = rouse.cluster.status();
    let nodes = status["nodes"].as_array().expect("it has nodes");
    let node = nodes.iter().find(|it| it["name"] == node).expect("it is one of them");
    let text = |key: &str| node[key].as_str().expect("it has one").to_owned();
    let script = "echo $$ > \"$0/daemons/cgroup.procs\" && netns=$1 && shift && \
                  exec nsenter --net=\"$netns\" \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, &text("cgroup"), &text("netns")]).args(args);
    command
}

/// Script that connects to the address and prints the peer that the kernel has, which kube-proxy's rules do not change.
fn peer_script(address: &str) -> String {
    let peers = "ss --no-header --numeric --tcp state established dst";
    format!("exec 3<>/dev/tcp/{address}/80 && {peers} {address} && {peers} 10.0.0.0/8")
}

/// Cluster with `rouse install --clusterip MODE`; without it again on drop.
pub(crate) struct ServingCluster<'a>(&'a RouseCluster);

impl<'a> ServingCluster<'a> {
    pub(crate) fn install(rouse: &'a RouseCluster, mode: &str) -> Self {
        let cluster = Self(rouse);
        rouse.install_with(&["--clusterip", mode]);
        cluster
    }
}

impl Drop for ServingCluster<'_> {
    fn drop(&mut self) {
        self.0.install();
    }
}

/// Addresses and ports of the ready endpoints of the Service `plain`.
fn endpoints(rouse: &RouseCluster, namespace: &str) -> Vec<String> {
    let label = "kubernetes.io/service-name=plain";
    let list =
        rouse.cluster.get(&["endpointslices", "--namespace", namespace, "--selector", label]);
    let slices = list["items"].as_array().cloned().unwrap_or_default();
    let slices = slices.iter().filter(|slice| slice["addressType"] == "IPv4");
    let endpoints =
        slices.flat_map(|slice| slice["endpoints"].as_array().cloned().unwrap_or_default());
    let ready = endpoints.filter(|it| it["conditions"]["ready"] == true);
    ready.filter_map(|it| Some(format!("{}:8080", it["addresses"][0].as_str()?))).collect()
}

/// Peer that the kernel shows for a connect to a ClusterIP.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ExpectedPeer {
    /// One of the endpoints: Rouse's programs have redirected the connect.
    Endpoint,
    /// The ClusterIP: kube-proxy's rules translate it.
    ClusterIp,
}

/// Waits until a connect to the Service `plain`, from a pod and from the node itself, has the expected peer.
fn wait_peers(rouse: &RouseCluster, namespace: &str, address: &str, expected: ExpectedPeer) {
    let are_endpoints = expected == ExpectedPeer::Endpoint;
    for client in &rouse.clients {
        rouse.cluster.wait("the expected peers", || {
            let script = peer_script(address);
            let words = ["bash", "-c", script.as_str()];
            let commands = [client.command(&words), node_command(rouse, &client.node, &words)];
            let endpoints = endpoints(rouse, namespace);
            let is_expected = |mut command: Command| {
                let output = command.output().expect("sh is there");
                let peers = String::from_utf8_lossy(&output.stdout).into_owned();
                let is_endpoint = endpoints.iter().any(|it| peers.contains(it.as_str()));
                let is_cluster_ip = peers.contains(&format!("{address}:80"));
                (is_endpoint, is_cluster_ip) == (are_endpoints, !are_endpoints)
            };
            commands.into_iter().all(is_expected).then_some(())
        });
    }
}

#[test]
fn a_plain_service_is_served_if_its_label_or_the_mode_selects_it() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("clusterip");
    let name = namespace.name.as_str();
    rouse.apply(name, &plain_service("", 2)).expect("it is valid");
    let service = rouse.cluster.get(&["service", "--namespace", name, "plain"]);
    let address = service["spec"]["clusterIP"].as_str().expect("it has an address").to_owned();
    rouse.cluster.wait("two endpoints", || (endpoints(&rouse, name).len() == 2).then_some(()));
    wait_peers(&rouse, name, &address, ExpectedPeer::ClusterIp);

    let labelled = ServingCluster::install(&rouse, "labelled");
    wait_peers(&rouse, name, &address, ExpectedPeer::ClusterIp);
    rouse.apply(name, &plain_service("rouse.dev/clusterip: \"true\"", 2)).expect("it is valid");
    wait_peers(&rouse, name, &address, ExpectedPeer::Endpoint);
    let client = &rouse.clients[0];
    let url = format!("http://{address}");
    let pods: BTreeSet<String> = (0..40).map(|_| client.get(&url).pod().to_owned()).collect();
    assert_eq!(pods.len(), 2, "both pods get connects");

    // Without an endpoint connects are refused, as kube-proxy does.
    rouse.apply(name, &plain_service("rouse.dev/clusterip: \"true\"", 0)).expect("it is valid");
    rouse.cluster.wait("a refusal", || (!client.can_connect(&url)).then_some(()));
    rouse.apply(name, &plain_service("", 1)).expect("it is valid");
    rouse.cluster.wait("a connection", || client.can_connect(&url).then_some(()));
    wait_peers(&rouse, name, &address, ExpectedPeer::ClusterIp);

    let all = ServingCluster::install(&rouse, "all");
    wait_peers(&rouse, name, &address, ExpectedPeer::Endpoint);
    // A service of Rouse goes its own way in every mode.
    rouse.apply_until_ready(name, &service_manifest("ours", "", HELLO_CONTAINER));
    let response = client.get(&rouse.service_url(name, "ours"));
    assert_eq!(response.status, 200, "{response}");
    drop((labelled, all));
    wait_peers(&rouse, name, &address, ExpectedPeer::ClusterIp);
}
