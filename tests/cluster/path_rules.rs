//! DomainMappings that share a host by their paths, and a host with a wildcard, through the gateway.

use tests::installed_cluster::{HELLO_CONTAINER, RouseCluster, service_manifest};
use tests::test_cluster::TestNamespace;

/// Domain with its claim, and the namespace that has it.
struct ClaimedDomain<'a> {
    rouse: &'a RouseCluster,
    namespace: &'a TestNamespace<'a>,
    domain: String,
}

impl ClaimedDomain<'_> {
    /// Applies a DomainMapping with these annotations, and waits until it is ready.
    fn map(&self, name: &str, service: &str, annotations: &str) {
        let mapping = format!(
            "apiVersion: serving.knative.dev/v1beta1
kind: DomainMapping
metadata:
  name: {name}
  annotations: {{{annotations}}}
spec:
  ref: {{apiVersion: serving.knative.dev/v1, kind: Service, name: {service}}}
"
        );
        self.rouse.apply(&self.namespace.name, &mapping).expect("admission accepts it");
        self.rouse.wait_ready(&self.namespace.name, "domainmapping", name);
    }

    /// Waits until the service responds to requests for the path of the host.
    fn wait_served(&self, host: &str, path: &str, service: &str) {
        let begin = format!("Hello from {service}-");
        self.rouse.cluster.wait(&format!("{service} at {host}{path}"), || {
            let response = self.rouse.get_through_gateway(host, path, &[]);
            response.body.starts_with(&begin).then_some(())
        });
    }

    /// Waits until the gateway itself responds with this status code.
    fn wait_status(&self, host: &str, path: &str, status: u16) {
        self.rouse.cluster.wait(&format!("{status} at {host}{path}"), || {
            let response = self.rouse.get_through_gateway(host, path, &[]);
            (response.status == status).then_some(())
        });
    }
}

impl Drop for ClaimedDomain<'_> {
    fn drop(&mut self) {
        let args = ["delete", "clusterdomainclaim", "--ignore-not-found", &self.domain];
        let _stays = self.rouse.cluster.kubectl(&args);
    }
}

#[test]
fn mappings_share_a_host_and_a_wildcard_serves_the_hosts_below() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("path-rules");
    let domain = format!("{}.example.org", namespace.name);
    let claimed = ClaimedDomain { rouse: &rouse, namespace: &namespace, domain: domain.clone() };
    let services = ["shop", "api"].map(|name| service_manifest(name, "", HELLO_CONTAINER));
    rouse.apply_until_ready(&namespace.name, &services.join("---\n"));
    rouse.claim_domain(&domain, &namespace.name);
    claimed.map(&domain, "shop", "");
    claimed.wait_served(&domain, "/api", "shop");
    let of_api = format!(
        "rouse.dev/host: {domain}, rouse.dev/path-prefix: /api, rouse.dev/strip-prefix: \"true\""
    );
    claimed.map("api-paths", "api", &of_api);
    claimed.wait_served(&domain, "/api", "api");
    claimed.wait_served(&domain, "/apis", "shop");
    claimed.wait_status(&domain, "/x%2F..%2Fapi", 400);
    claimed.map(
        "all",
        "shop",
        &format!("rouse.dev/host: \"*.{domain}\", rouse.dev/path-prefix: /s"),
    );
    claimed.wait_served(&format!("a.{domain}"), "/s/1", "shop");
    claimed.wait_status(&format!("a.{domain}"), "/", 404);
    claimed.wait_status(&format!("a.b.{domain}"), "/s", 404);
    let url = rouse.wait_ready(&namespace.name, "domainmapping", "api-paths");
    assert_eq!(url["status"]["url"], format!("http://{domain}/api"));
    let args = ["delete", "domainmapping", "--namespace", &namespace.name, "api-paths"];
    rouse.cluster.kubectl(&args).expect("it is deleted");
    claimed.wait_served(&domain, "/api", "shop");
}
