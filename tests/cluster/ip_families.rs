//! Applications that listen on one family of IP addresses only, on a dual-stack cluster.

use serde_json::Value;
use tests::installed_cluster::RouseCluster;
use tests::mounted_app::MountedApp;
use tests::test_cluster::find_condition;

#[test]
fn an_application_that_listens_on_ipv6_only_is_reported_as_unreachable_by_ipv4() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("families");
    let namespace = &namespace.name;
    let app = MountedApp::new(&rouse, namespace);
    let yaml = [app.service("both", "", "listen=8080"), app.service("six", "", "listen6=8080")];
    app.apply(&rouse, namespace, &yaml.join("---\n"));
    rouse.wait_ready(namespace, "ksvc", "both");
    let revision = rouse.cluster.wait("the Revision's condition to name the family", || {
        let revision = rouse.cluster.get(&["revision", "--namespace", namespace, "six-00001"]);
        let healthy = find_condition(&revision, "ContainerHealthy");
        let message = healthy["message"].as_str().unwrap_or_default();
        let is_expected = message.contains("open for IPv6 only, and clients come by IPv4");
        (is_expected && healthy["status"] != "True").then_some(revision)
    });
    assert_ne!(find_condition(&revision, "Ready")["status"], "True");
    let service: Value = rouse.cluster.get(&["ksvc", "--namespace", namespace, "six"]);
    assert_ne!(find_condition(&service, "Ready")["status"], "True");
}
