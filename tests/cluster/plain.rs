//! What Kubernetes alone does, before anything of Rouse is installed: the ground that all other tests stand on.

use std::net::SocketAddr;

use serde_json::Value;
use tests::client;
use tests::cluster::{Cluster, Namespace, inside, resolve};

/// One pod of the sample on the node `node`, and a Service of the same name in both families.
fn sample(name: &str, node: &str) -> String {
    format!(
        "apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}}}
spec:
  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata: {{labels: {{app: {name}}}}}
    spec:
      nodeName: {node}
      automountServiceAccountToken: false
      containers:
      - name: hello
        image: dev.local/hello:v1
        imagePullPolicy: Never
        ports: [{{containerPort: 8080}}]
        readinessProbe: {{tcpSocket: {{port: 8080}}, periodSeconds: 1}}
---
apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec:
  ipFamilyPolicy: PreferDualStack
  selector: {{app: {name}}}
  ports: [{{port: 80, targetPort: 8080}}]
"
    )
}

fn applied(cluster: &Cluster, namespace: &Namespace<'_>, name: &str, node: &str) {
    let yaml = sample(name, node)
        .replace("metadata: {name:", &format!("metadata: {{namespace: {}, name:", namespace.name));
    cluster.apply(&yaml).unwrap();
    let args = ["rollout", "status", "--timeout", "90s", "--namespace", &namespace.name];
    cluster.kubectl(&[&args[..], &[&format!("deployment/{name}")]].concat()).unwrap();
}

fn pod_of(cluster: &Cluster, namespace: &str, name: &str) -> String {
    let pods =
        cluster.get(&["pods", "--namespace", namespace, "--selector", &format!("app={name}")]);
    pods["items"][0]["metadata"]["name"].as_str().unwrap_or_default().to_owned()
}

fn nodes(cluster: &Cluster) -> Vec<String> {
    let list = cluster.get(&["nodes"]);
    let name = |node: &Value| node["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    list["items"].as_array().into_iter().flatten().map(name).collect()
}

#[test]
fn every_node_is_ready() {
    let cluster = Cluster::at_hand();
    let list = cluster.get(&["nodes"]);
    let nodes = list["items"].as_array().expect("the API server answers");
    assert!(nodes.len() >= 2, "two nodes are the least that shows a path between nodes");
    for node in nodes {
        let conditions = node["status"]["conditions"].as_array().expect("a node has conditions");
        let ready = conditions.iter().find(|one| one["type"] == "Ready").expect("and says Ready");
        assert_eq!(ready["status"], "True", "{}", node["metadata"]["name"]);
    }
}

#[test]
fn a_service_answers_a_pod_on_the_other_node_in_both_families() {
    let cluster = Cluster::at_hand();
    let namespace = Namespace::new(&cluster, "plain-path");
    let nodes = nodes(&cluster);
    applied(&cluster, &namespace, "far", &nodes[0]);
    applied(&cluster, &namespace, "near", &nodes[1]);
    let service = cluster.get(&["service", "--namespace", &namespace.name, "far"]);
    let addresses = service["spec"]["clusterIPs"].as_array().expect("it has addresses").clone();
    assert_eq!(addresses.len(), 2, "{addresses:?}");
    let netns = cluster.netns_of(&namespace.name, &pod_of(&cluster, &namespace.name, "near"));
    let far = pod_of(&cluster, &namespace.name, "far");
    for address in addresses {
        let ip = address.as_str().unwrap_or_default().parse().expect("an address");
        let to = SocketAddr::new(ip, 80);
        let body = cluster.wait("an answer through kube-proxy", || {
            inside(&netns, || client::get(to, "far", "/")).ok().map(|answer| answer.body)
        });
        assert!(body.contains(&far), "{body} does not come from {far}");
    }
}

#[test]
fn names_of_services_resolve_inside_pods() {
    let cluster = Cluster::at_hand();
    let namespace = Namespace::new(&cluster, "plain-names");
    applied(&cluster, &namespace, "named", &nodes(&cluster)[1]);
    let service = cluster.get(&["service", "--namespace", &namespace.name, "named"]);
    let netns = cluster.netns_of(&namespace.name, &pod_of(&cluster, &namespace.name, "named"));
    let dns = cluster.get(&["service", "--namespace", "kube-system", "kube-dns"]);
    let dns: SocketAddr =
        format!("{}:53", dns["spec"]["clusterIP"].as_str().unwrap()).parse().unwrap();
    let name = format!("named.{}.svc.cluster.local", namespace.name);
    for (kind, want) in
        [(1, &service["spec"]["clusterIPs"][0]), (28, &service["spec"]["clusterIPs"][1])]
    {
        let found = cluster.wait("the name", || {
            inside(&netns, || resolve(dns, &name, kind)).ok().filter(|found| !found.is_empty())
        });
        assert_eq!(found, [want.as_str().unwrap_or_default()]);
    }
}
