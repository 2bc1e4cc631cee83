//! First pods of sleeping services: they start in the zone of the client that asks.

use serde_json::Value;
use tests::installed_cluster::{HELLO_CONTAINER, RouseCluster, service_manifest};

use crate::zoned_nodes::{NODE_ZONES, ZonedNodes};

/// Services that each zone wakes. Several, since by chance alone one first pod is on the right node half of the time.
const SERVICES: [&str; 3] = ["one", "two", "three"];
/// Zone that a pod prefers, if that is its only preference for nodes.
const PREFERRED_ZONE: &str = "/spec/affinity/nodeAffinity/preferredDuringSchedulingIgnoredDuringExecution/0/preference\
                              /matchExpressions/0/values/0";

#[test]
fn sleeping_services_wake_their_first_pods_in_the_zone_that_asks() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("wake-zone");
    let namespace = namespace.name.as_str();
    let _zones = ZonedNodes::label(&rouse);
    rouse.cluster.wait("the webhook for new pods", || {
        let kind = "mutatingwebhookconfiguration";
        let hooks = rouse.cluster.get(&[kind, "webhook.serving.knative.dev"]);
        (hooks["webhooks"].as_array()?.len() == 2).then_some(())
    });
    let manifests = SERVICES.map(|service| service_manifest(service, "", HELLO_CONTAINER));
    rouse.apply_until_ready(namespace, &manifests.join("---\n"));
    for (node, zone) in NODE_ZONES.into_iter().rev() {
        SERVICES.iter().for_each(|service| rouse.wait_asleep(namespace, service));
        let mut preferring = 0;
        for service in SERVICES {
            let response = rouse.client_on(node).get(&rouse.service_url(namespace, service));
            let pods = rouse.pods(namespace, service);
            let is_first = |pod: &&Value| pod["metadata"]["name"] == response.pod();
            let pod = pods.iter().find(is_first).expect("it has responded");
            let preferred = pod.pointer(PREFERRED_ZONE).and_then(Value::as_str);
            // On a busy machine, the webhook may respond too late, or before it knows the wake.
            let Some(preferred) = preferred else { continue };
            assert_eq!((&pod["spec"]["nodeName"], preferred), (&Value::from(node), zone));
            preferring += 1;
        }
        assert!(preferring > SERVICES.len() / 2, "{preferring} first pods prefer zone {zone}");
    }
}
