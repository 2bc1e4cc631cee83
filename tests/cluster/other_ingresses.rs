//! Public hosts that another ingress fronts, from a new service to the way back to Rouse's gateway. The test plays the
//! controller of that ingress, and its pod.

use serde_json::{Value, json};
use tests::client_pod::ClientPod;
use tests::installed_cluster::{HELLO_CONTAINER, RouseCluster, service_manifest, set_config_map};
use tests::test_cluster::{TestCluster, find_condition};

/// Kind of the objects that the controller of an ingress follows.
const INGRESSES: &str = "ingresses.networking.internal.knative.dev";
/// Annotation of a service with the class of its ingress.
const CLASS_KEY: &str = "networking.knative.dev/ingress-class";
/// Class that only this test serves, and that of Rouse's gateway.
const CLASS: &str = "test.ingress.networking.knative.dev";
const OWN_CLASS: &str = "rouse.ingress.networking.knative.dev";
/// Key of `config-network` with the networks of the pods of ingresses.
const TRUST_KEY: &str = "rouse.dev.trusted-ingresses";
/// Port of the activators for requests from inside the cluster.
const ACTIVATOR_PORT: u16 = 8012;
/// Number of requests of which each of the two activators gets at least one in all but one of 128 runs.
const GATEWAY_REQUESTS: usize = 8;

/// Trust in a pod of an ingress, until this value is dropped. No other test sets the key, and services without a class
/// of their own do not depend on it.
struct IngressTrust<'a>(&'a TestCluster);

impl<'a> IngressTrust<'a> {
    fn of_pod(cluster: &'a TestCluster, pod: &ClientPod) -> Self {
        let trust = Self(cluster);
        let network = |ip: String| format!("{ip}/{}", if ip.contains(':') { 128 } else { 32 });
        let networks: Vec<String> = pod.addresses().into_iter().map(network).collect();
        let value = json!(networks.join(",")).to_string();
        set_config_map(cluster, "config-network", &[TRUST_KEY], &value)
            .expect("a good value is taken");
        trust
    }
}

impl Drop for IngressTrust<'_> {
    fn drop(&mut self) {
        let _stays = set_config_map(self.0, "config-network", &[TRUST_KEY], "null");
    }
}

/// The service `hello`, whose public host another ingress fronts.
struct FrontedService<'a> {
    rouse: &'a RouseCluster,
    namespace: &'a str,
    host: String,
}

impl FrontedService<'_> {
    fn manifest() -> String {
        let annotations = format!("annotations: {{{CLASS_KEY}: {CLASS}}}");
        let metadata = format!("metadata: {{name: hello, {annotations}}}");
        service_manifest("hello", "", HELLO_CONTAINER).replace("metadata: {name: hello}", &metadata)
    }

    /// Ingresses of the namespace; `None` without a response.
    fn ingresses(&self) -> Option<Vec<Value>> {
        let list = self.rouse.cluster.get(&[INGRESSES, "--namespace", self.namespace]);
        list["items"].as_array().cloned()
    }

    /// Waits for the Ingress, and checks the fields that controllers of ingresses read.
    fn check_ingress(&self) {
        let find = || self.ingresses().filter(|all| !all.is_empty());
        let all = self.rouse.cluster.wait("an Ingress", find);
        let [ingress] = &all[..] else { panic!("{} Ingresses", all.len()) };
        let Self { namespace, host, .. } = self;
        let split = json!({
            "serviceName": "hello-00001", "serviceNamespace": namespace, "servicePort": 80,
            "percent": 100,
            "appendHeaders": {
                "Knative-Serving-Revision": "hello-00001", "Knative-Serving-Namespace": namespace,
            },
        });
        let local = ["", ".svc", ".svc.cluster.local"];
        let local = local.map(|domain| format!("hello.{namespace}{domain}"));
        let rule = |hosts: &[String], visibility: &str| {
            let paths = json!([{"splits": [split]}]);
            json!({"hosts": hosts, "visibility": visibility, "http": {"paths": paths}})
        };
        let public = std::slice::from_ref(host);
        let rules = [rule(&local, "ClusterLocal"), rule(public, "ExternalIP")];
        assert_eq!(ingress["spec"], json!({"httpOption": "Enabled", "rules": rules}));
        let metadata = &ingress["metadata"];
        assert_eq!(metadata["name"], "hello");
        assert_eq!(metadata["annotations"]["networking.knative.dev/ingress.class"], CLASS);
        assert_eq!(metadata["labels"]["serving.knative.dev/route"], "hello");
        assert_eq!(metadata["ownerReferences"][0]["kind"], "Route");
    }

    /// Sets the condition `Ready` of the Ingress for its present generation.
    fn report(&self, ready: Value) {
        let object = self.rouse.cluster.get(&[INGRESSES, "--namespace", self.namespace, "hello"]);
        let generation = &object["metadata"]["generation"];
        let status = json!({"observedGeneration": generation, "conditions": [ready]});
        self.rouse.patch_status(self.namespace, INGRESSES, "hello", &status);
    }

    /// Waits until the Route has this status and reason for its ingress.
    fn wait_route(&self, status: &str, reason: &str) {
        self.rouse.cluster.wait(&format!("IngressReady={status} for {reason}"), || {
            let args = ["route", "--namespace", self.namespace, "hello"];
            let condition = find_condition(&self.rouse.cluster.get(&args), "IngressReady");
            (condition["status"] == status && condition["reason"] == reason).then_some(())
        });
    }

    /// Checks that Rouse's gateway does not know the public host.
    fn check_unknown_at_gateway(&self) {
        for _ in 0..GATEWAY_REQUESTS {
            let response = self.rouse.get_through_gateway(&self.host, "/", &[]);
            assert_eq!(response.status, 404, "{response}");
        }
    }

    /// Address of an activator, as the slice of the Revision's Service has it for ingresses.
    fn activator_url(&self) -> String {
        let label = "kubernetes.io/service-name=hello-00001";
        let args = ["endpointslices", "--namespace", self.namespace, "--selector", label];
        self.rouse.cluster.wait("an activator in the slice of the Revision", || {
            let slices = self.rouse.cluster.get(&args);
            let mut slices = slices["items"].as_array()?.iter();
            let slice = slices.find(|it| it["addressType"] == "IPv4")?;
            let address = slice["endpoints"][0]["addresses"][0].as_str()?;
            (slice["ports"][0]["port"] == ACTIVATOR_PORT)
                .then(|| format!("http://{address}:{ACTIVATOR_PORT}"))
        })
    }

    /// Checks that the headers of the ingress' pod choose a Revision that sleeps, and those of another pod none.
    fn check_chosen_revision(&self, ingress: &ClientPod) {
        let url = self.activator_url() + "/headers";
        let host = format!("Host: {}", self.host);
        let namespace = format!("Knative-Serving-Namespace: {}", self.namespace);
        let headers = [host.as_str(), "Knative-Serving-Revision: hello-00001", &namespace];
        self.rouse.wait_asleep(self.namespace, "hello");
        let foreign = self.rouse.client_on("node2").get_with_headers(&url, &headers);
        assert_eq!(foreign.status, 404, "{foreign}");
        let response = self.rouse.cluster.wait("a response to the ingress", || {
            let response = ingress.get_with_headers(&url, &headers);
            (response.status == 200).then_some(response)
        });
        assert!(response.pod().starts_with("hello-00001-deployment-"), "{response}");
        let received = response.body.to_lowercase();
        assert!(received.contains("host: hello."), "{response}");
        assert!(!received.contains("knative-serving-"), "{response}");
    }
}

#[test]
fn a_service_of_another_class_follows_its_ingress_and_comes_back() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("other-ingress");
    let ingress = ClientPod::new(&rouse.cluster, &namespace.name, "node1");
    let _trust = IngressTrust::of_pod(&rouse.cluster, &ingress);
    let host = format!("hello.{}.example.com", namespace.name);
    let service = FrontedService { rouse: &rouse, namespace: &namespace.name, host };
    rouse.apply(&namespace.name, &FrontedService::manifest()).expect("admission accepts it");
    service.check_ingress();
    service.wait_route("Unknown", "IngressNotConfigured");
    service.check_unknown_at_gateway();

    service.report(json!({
        "type": "Ready", "status": "False", "reason": "NoProxy", "message": "no proxy listens",
    }));
    service.wait_route("False", "NoProxy");
    service.report(json!({"type": "Ready", "status": "True"}));
    let ready = rouse.wait_ready(&namespace.name, "ksvc", "hello");
    assert_eq!(ready["status"]["url"], format!("http://{}", service.host));
    service.check_unknown_at_gateway();
    service.check_chosen_revision(&ingress);

    let class = format!("{CLASS_KEY}={OWN_CLASS}");
    let annotate = ["annotate", "ksvc", "--namespace", &namespace.name, "--overwrite", "hello"];
    rouse
        .cluster
        .kubectl(&[&annotate[..], &[class.as_str()]].concat())
        .expect("admission accepts it");
    rouse.cluster.wait("Rouse's gateway to serve the host", || {
        let response = rouse.get_through_gateway(&service.host, "/", &[]);
        (response.status == 200).then_some(())
    });
    rouse.cluster.wait("the Ingress to be gone", || service.ingresses()?.is_empty().then_some(()));
}
