//! `TestCluster::get`, which asks the API server itself, returns the same objects as kubectl.

use serde_json::Value;
use tests::installed_cluster::{HELLO_CONTAINER, RouseCluster, SYSTEM_NAMESPACE, service_manifest};
use tests::test_cluster::TestCluster;

/// A word for each kind that tests read, of those that every cluster with Rouse has.
const KINDS: &str = "cm,events,pod,quota,secrets,svc,ns,no,ds,deployment,rs,sts,hpa,lease,endpointslices,\
                     mutatingwebhookconfiguration,crd,ksvc,configuration,revisions,route,domainmapping,pa,\
                     metrics.autoscaling.internal.knative.dev,sks,kingress,kcert,\
                     images.caching.internal.knative.dev";

/// Asserts that both read the same. Objects change, so kubectl reads between two equal reads.
fn assert_same_as_kubectl(cluster: &TestCluster, args: &[&str]) -> Value {
    let kubectl_args = [&["get", "--output", "json"][..], args].concat();
    let (printed, read) = cluster.wait("objects that stay as they are", || {
        let before = cluster.get(args);
        let printed = cluster.kubectl(&kubectl_args).unwrap_or_default();
        let after = cluster.get(args);
        (before == after).then_some((printed, after))
    });
    let printed: Value = serde_json::from_str(&printed).unwrap_or_default();
    assert_eq!(read, printed, "{args:?}");
    read
}

#[test]
fn get_returns_the_same_objects_as_kubectl() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("get");
    let namespace = &namespace.name;
    let awake = ", autoscaling.knative.dev/min-scale: \"1\"";
    rouse.apply_until_ready(namespace, &service_manifest("hello", awake, HELLO_CONTAINER));
    let same = |args: &[&str]| assert_same_as_kubectl(&rouse.cluster, args);

    assert!(same(&[KINDS, "--namespace", namespace])["items"].is_array(), "all are known");
    assert_eq!(same(&["ksvc", "--namespace", namespace, "hello"])["kind"], "Service");
    assert_eq!(same(&["pod", "--namespace", namespace, "absent"]), Value::Null);
    assert_eq!(same(&["nodes", "node1", "node2"])["items"][1]["kind"], "Node");
    assert_eq!(same(&["nodes", "node1", "absent"]), Value::Null);
    let selected = same(&["pods", "--all-namespaces", "--selector", "app in (activator)"]);
    assert_eq!(selected["items"][0]["metadata"]["namespace"], SYSTEM_NAMESPACE);
    let none = same(&["pods", "--namespace", namespace, "--selector=app=absent"]);
    assert_eq!(none["items"], Value::Array(Vec::new()));
    // What only kubectl understands.
    let field = ["node/node1", "--field-selector=metadata.name=node1"];
    assert_eq!(same(&["nodes", field[1]])["items"][0]["metadata"]["name"], "node1");
    assert_eq!(same(&field[..1])["kind"], "Node");
}
