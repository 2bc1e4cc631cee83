//! Certificates that Rouse requests for public hosts, from the request to the renewal. The test plays cert-manager.

use common::fixtures::certificates::TestCertificate;
use serde_json::json;
use tests::installed_cluster::{HELLO_CONTAINER, RouseCluster, service_manifest, set_config_map};
use tests::test_cluster::{TestCluster, find_condition};
use tests::tls_files::{TlsFiles, first_certificate, tls_secret};

use super::tls::{wait_served, wait_unserved};

/// Kind of cert-manager's certificates.
const ISSUED: &str = "certificates.cert-manager.io";
/// Groups, kinds and plurals of the objects of cert-manager that Rouse reads.
const KINDS: [(&str, &str, &str); 2] = [
    ("cert-manager.io", "Certificate", "certificates"),
    ("acme.cert-manager.io", "Challenge", "challenges"),
];
/// Key of `config-certmanager` with the issuer, and the name of the issuer, which no component reads.
const ISSUER_KEY: &str = "issuerRef";
const ISSUER: &str = "issuer-of-a-test";
/// Key of `config-network` that lets Rouse request certificates.
const EXTERNAL_TLS_KEY: &str = "external-domain-tls";
/// Token of the challenge of an authority.
const TOKEN: &str = "token-of-a-test";

/// Manifest of a kind that takes any fields and has a status of its own, as all kinds of cert-manager.
fn kind_manifest((group, kind, plural): (&str, &str, &str)) -> String {
    format!(
        "apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {{name: {plural}.{group}}}
spec:
  group: {group}
  scope: Namespaced
  names: {{kind: {kind}, plural: {plural}}}
  versions:
  - name: v1
    served: true
    storage: true
    subresources: {{status: {{}}}}
    schema: {{openAPIV3Schema: {{type: object, x-kubernetes-preserve-unknown-fields: true}}}}
"
    )
}

/// Installs the kinds. They stay until the cluster goes: once controllers follow the objects, they would go on to list
/// them.
fn install_kinds(cluster: &TestCluster) {
    let manifests = KINDS.map(kind_manifest).join("---\n");
    cluster.apply(&manifests).expect("the API server takes the kinds");
    let names = KINDS.map(|(group, _, plural)| format!("{plural}.{group}"));
    cluster.wait_established(&names.each_ref().map(String::as_str));
}

/// Settings by which Rouse requests certificates, in force until this value is dropped.
struct RequestSettings<'a>(&'a TestCluster);

impl<'a> RequestSettings<'a> {
    fn apply(cluster: &'a TestCluster) -> Self {
        let settings = Self(cluster);
        let issuer = json!(format!("kind: ClusterIssuer\nname: {ISSUER}\n")).to_string();
        set_config_map(cluster, "config-certmanager", &[ISSUER_KEY], &issuer)
            .expect("an issuer is taken");
        set_config_map(cluster, "config-network", &[EXTERNAL_TLS_KEY], "\"Enabled\"")
            .expect("a good value is taken");
        settings
    }
}

impl Drop for RequestSettings<'_> {
    fn drop(&mut self) {
        let _stays = set_config_map(self.0, "config-network", &[EXTERNAL_TLS_KEY], "null");
        let _stays = set_config_map(self.0, "config-certmanager", &[ISSUER_KEY], "null");
    }
}

/// The service `hello`, for whose host Rouse requests a certificate.
struct CertifiedService<'a> {
    rouse: &'a RouseCluster,
    namespace: &'a str,
    host: String,
}

impl CertifiedService<'_> {
    /// Waits for the certificate of cert-manager, checks it, and returns its name, which its Secret gets too.
    fn wait_requested(&self) -> String {
        let issued = self.rouse.cluster.wait("a certificate of cert-manager", || {
            let list = self.rouse.cluster.get(&[ISSUED, "--namespace", self.namespace]);
            list["items"].as_array()?.first().cloned()
        });
        let name = issued["metadata"]["name"].as_str().expect("it has a name").to_owned();
        let request = self.rouse.cluster.get(&["kcert", "--namespace", self.namespace, &name]);
        let uid = &request["metadata"]["uid"];
        let expected = json!({
            "commonName": self.host, "dnsNames": [self.host], "secretName": name,
            "issuerRef": {"kind": "ClusterIssuer", "name": ISSUER},
            "secretTemplate": {"labels": {"networking.internal.knative.dev/certificate-uid": uid}},
        });
        assert_eq!(issued["spec"], expected);
        // Kubernetes deletes it with the request.
        let owner = &issued["metadata"]["ownerReferences"][0];
        assert_eq!((&owner["kind"], &owner["uid"]), (&json!("Certificate"), uid));
        name
    }

    /// Waits until the condition `CertificateProvisioned` of the Route is true with this reason, and the service has a
    /// URL with this scheme. An empty reason means none.
    fn wait_provisioned(&self, reason: &str, scheme: &str) {
        let url = format!("{scheme}://{}", self.host);
        self.rouse.cluster.wait(&format!("{url}, provisioned for the reason {reason:?}"), || {
            let object = |kind: &str| {
                self.rouse.cluster.get(&[kind, "--namespace", self.namespace, "hello"])
            };
            let condition = find_condition(&object("route"), "CertificateProvisioned");
            let is_provisioned = condition["status"] == "True"
                && condition["reason"].as_str().unwrap_or_default() == reason;
            (is_provisioned && object("ksvc")["status"]["url"] == url).then_some(())
        });
    }

    /// Checks the response to a challenge, by which an authority asks for the control over the host.
    fn check_challenge(&self) {
        let response = format!("{TOKEN}.hash-of-a-key");
        let challenge = json!({
            "apiVersion": "acme.cert-manager.io/v1",
            "kind": "Challenge",
            "metadata": {"name": "hello"},
            "spec": {"type": "HTTP-01", "dnsName": self.host, "token": TOKEN, "key": response},
        });
        self.rouse.apply(self.namespace, &challenge.to_string()).expect("the kind is installed");
        let path = format!("/.well-known/acme-challenge/{TOKEN}");
        // The service itself responds until the activators know the challenge.
        self.rouse.cluster.wait("the response to the challenge", || {
            let received = self.rouse.get_through_gateway(&self.host, &path, &[]);
            (received.status == 200 && received.body == response).then_some(())
        });
    }

    /// Writes the Secret of a certificate, as cert-manager does at the first issue and at each renewal.
    fn write_secret(&self, name: &str, pair: &TestCertificate) {
        let secret = tls_secret(name, &pair.chain_pem, &pair.key_pem);
        self.rouse.apply(self.namespace, &secret).expect("a Secret is taken");
    }

    /// Writes the status of a certificate whose Secret is complete.
    fn report_issued(&self, name: &str) {
        let ready = json!({
            "type": "Ready", "status": "True", "reason": "Ready",
            "message": "Certificate is up to date and has not expired",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        });
        let status = json!({"conditions": [ready], "notAfter": "2099-01-01T00:00:00Z"});
        self.rouse.patch_status(self.namespace, ISSUED, name, &status);
    }
}

#[test]
fn a_requested_certificate_serves_its_host_and_is_renewed_without_a_lost_request() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("requested-tls");
    let host = format!("hello.{}.example.com", namespace.name);
    let folder = tempfile::tempdir().expect("a folder");
    let files = TlsFiles::new(folder.path(), &[&host]);
    let clients = rouse.tls_clients(files.authority());
    install_kinds(&rouse.cluster);
    let _requesting = RequestSettings::apply(&rouse.cluster);
    let manifest = service_manifest("hello", "", HELLO_CONTAINER);
    rouse.apply_until_ready(&namespace.name, &manifest);
    let service = CertifiedService { rouse: &rouse, namespace: &namespace.name, host };
    service.wait_provisioned("HTTPDowngrade", "http");
    let name = service.wait_requested();
    service.check_challenge();

    let handshake = ["-servername", service.host.as_str()];
    let certificate =
        |pair: &TestCertificate| first_certificate(&pair.chain_pem).expect("a certificate in PEM");
    let [first, second] = [files.issue(), files.issue()];
    service.write_secret(&name, &first);
    service.report_issued(&name);
    service.wait_provisioned("", "https");
    wait_served(&rouse, &clients, &handshake, &certificate(&first));
    assert_eq!(clients.curl(&service.host, &[]), "200 2");
    clients.with_load(&service.host, |load| {
        service.write_secret(&name, &second);
        wait_served(&rouse, &clients, &handshake, &certificate(&second));
        load.wait_for_another_run();
    });

    rouse.delete(&namespace.name, &manifest).expect("it is deleted");
    rouse.cluster.wait("the request to be gone", || {
        let list = rouse.cluster.get(&["kcert", "--namespace", &namespace.name]);
        list["items"].as_array()?.is_empty().then_some(())
    });
    wait_unserved(&rouse, &clients, &handshake);
}
