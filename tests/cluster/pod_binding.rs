//! `bind-pods` of `config-deployment`: pods without resource requests are bound to a node when they are created.

use serde_json::Value;
use tests::installed_cluster::{HELLO_CONTAINER, RouseCluster, SYSTEM_NAMESPACE, service_manifest};
use tests::test_cluster::TestNamespace;

/// Enables `bind-pods` until drop, which also removes the test's taints.
struct BindPodsSetting<'a>(&'a RouseCluster);

impl<'a> BindPodsSetting<'a> {
    fn enable(rouse: &'a RouseCluster) -> Self {
        let bound = Self(rouse);
        // The webhook of a test with several zones may still be registered, which would look like that of this setting.
        bound.set_bind_pods("false");
        bound.set_bind_pods("true");
        bound
    }

    fn set_bind_pods(&self, flag: &str) {
        let patch = format!("{{\"data\": {{\"bind-pods\": \"{flag}\"}}}}");
        let args = ["patch", "configmap", "config-deployment", "--namespace", SYSTEM_NAMESPACE];
        self.kubectl(&[&args[..], &["--type", "merge", "--patch", &patch]].concat());
        self.0.cluster.wait(&format!("bind-pods {flag} to be in force"), || {
            let kind = "mutatingwebhookconfiguration";
            let hooks = self.0.cluster.get(&[kind, "webhook.serving.knative.dev"]);
            let hooks = hooks["webhooks"].as_array().map_or(0, Vec::len);
            (hooks == if flag == "true" { 2 } else { 1 }).then_some(())
        });
    }

    fn kubectl(&self, args: &[&str]) {
        self.0.cluster.kubectl(args).expect("an operator may");
    }
}

impl Drop for BindPodsSetting<'_> {
    fn drop(&mut self) {
        for node in ["node1", "node2"] {
            let _clean = self.0.cluster.kubectl(&["taint", "node", node, "test-"]);
        }
        if !std::thread::panicking() {
            self.set_bind_pods("false");
        }
    }
}

/// Number of pods of a service's first revision that the scheduler has placed, by its Events until now.
fn count_scheduled(rouse: &RouseCluster, namespace: &TestNamespace<'_>, name: &str) -> usize {
    let list = rouse.cluster.wait("a list of Events", || {
        rouse.cluster.get(&["events", "--namespace", &namespace.name])["items"].as_array().cloned()
    });
    let is_scheduled = |event: &&Value| {
        let pod = event["involvedObject"]["name"].as_str().unwrap_or_default();
        event["reason"] == "Scheduled" && pod.starts_with(&format!("{name}-00001-"))
    };
    list.iter().filter(is_scheduled).count()
}

/// Creates a service with three pods. Returns their nodes, and the number of those that the scheduler placed.
fn create_spread_service(
    rouse: &RouseCluster,
    namespace: &TestNamespace<'_>,
    name: &str,
    extra_yaml: &str,
) -> (Vec<String>, usize) {
    let three = ", autoscaling.knative.dev/min-scale: \"3\"";
    let yaml = service_manifest(name, three, &format!("{HELLO_CONTAINER}{extra_yaml}"));
    rouse.apply_until_ready(&namespace.name, &yaml);
    let text = |it: &Value| it.as_str().unwrap_or_default().to_owned();
    let pods = rouse.pods(&namespace.name, name);
    let nodes = pods.iter().map(|it| text(&it["spec"]["nodeName"])).collect();
    (nodes, count_scheduled(rouse, namespace, name))
}

#[test]
fn pods_without_resource_requests_are_bound_to_nodes_that_may_run_them() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("bound");
    let bound = BindPodsSetting::enable(&rouse);
    let (mut nodes, scheduled) = create_spread_service(&rouse, &namespace, "free", "");
    nodes.sort();
    nodes.dedup();
    assert_eq!((nodes, scheduled), (vec!["node1".to_owned(), "node2".to_owned()], 0));

    let cordon = rouse.cordon("node1");
    let all_on = |node: &str| (vec![node.to_owned(); 3], 0);
    assert_eq!(create_spread_service(&rouse, &namespace, "cordoned", ""), all_on("node2"));
    drop(cordon);
    bound.kubectl(&["taint", "node", "node2", "--overwrite", "test=here:NoSchedule"]);
    assert_eq!(create_spread_service(&rouse, &namespace, "tainted", ""), all_on("node1"));

    // Pods with resource requests are left to the scheduler, which keeps account of them.
    let (nodes, _) =
        create_spread_service(&rouse, &namespace, "asks", ", resources: {requests: {cpu: 10m}}");
    assert_eq!(nodes, all_on("node1").0);
    // The scheduler writes its Events after it has placed the pods.
    rouse.cluster.wait("the scheduler's Events about three pods", || {
        (count_scheduled(&rouse, &namespace, "asks") == 3).then_some(())
    });
}
