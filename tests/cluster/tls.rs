//! Certificates of users at the gateway: Secrets that a DomainMapping or `config-network` names, from before they exist
//! until they cannot be used, and what of them other components see.

use std::net::SocketAddr;

use common::fixtures::certificates::{TestAuthority, TestCertificate};
use std::path::Path;

use serde_json::{Value, json};
use tests::http_client;
use tests::installed_cluster::{
    HELLO_CONTAINER, RouseCluster, SYSTEM_NAMESPACE, service_manifest, set_config_map,
};
use tests::test_cluster::{TestCluster, TestNamespace, find_condition, in_netns};
use tests::tls_client::TlsClients;
use tests::tls_files::{TlsFiles, first_certificate, tls_secret};

/// Key of `config-network` with the certificates of the installation.
const CERTIFICATES_KEY: &str = "rouse.dev.certificates";
/// Fault of a Secret whose key is no key.
const BROKEN: &str = "Secret \"web\" cannot be used: tls.key holds no private key in PEM.";

/// A domain of one namespace, which names the Secret `web`.
struct TlsDomain<'a> {
    rouse: &'a RouseCluster,
    namespace: &'a TestNamespace<'a>,
    host: String,
    clients: TlsClients,
}

impl<'a> TlsDomain<'a> {
    /// Creates the domain with the service that it leads to. The files are the certificates' for its host.
    fn create(
        rouse: &'a RouseCluster,
        namespace: &'a TestNamespace<'a>,
        folder: &Path,
    ) -> (Self, TlsFiles) {
        let host = format!("{}.example.org", namespace.name);
        let files = TlsFiles::new(folder, &[&host]);
        let clients = rouse.tls_clients(files.authority());
        let domain = Self { rouse, namespace, host, clients };
        let service = service_manifest("hello", "", HELLO_CONTAINER);
        rouse.apply_until_ready(&namespace.name, &service);
        domain.apply();
        (domain, files)
    }

    /// Applies the domain with its claim. Its namespace has the service `hello`.
    fn apply(&self) {
        let (host, namespace) = (&self.host, &self.namespace.name);
        self.rouse.claim_domain(host, namespace);
        let mapping = format!(
            "apiVersion: serving.knative.dev/v1beta1
kind: DomainMapping
metadata: {{name: {host}}}
spec:
  ref: {{apiVersion: serving.knative.dev/v1, kind: Service, name: hello}}
  tls: {{secretName: web}}
"
        );
        self.rouse.apply(namespace, &mapping).expect("admission accepts it");
    }

    fn apply_secret(&self, certificate: &str, key: &str) {
        let secret = tls_secret("web", certificate, key);
        self.rouse.apply(&self.namespace.name, &secret).expect("a Secret is taken");
    }

    /// Waits until the condition `CertificateProvisioned` has this status, reason and message.
    fn wait_condition(&self, expected: [&str; 3]) {
        let args = ["domainmapping", "--namespace", &self.namespace.name, &self.host];
        self.rouse.cluster.wait(&format!("CertificateProvisioned to be {expected:?}"), || {
            let condition =
                find_condition(&self.rouse.cluster.get(&args), "CertificateProvisioned");
            let fields = ["status", "reason", "message"]
                .map(|key| condition[key].as_str().unwrap_or_default().to_owned());
            (fields == expected).then_some(())
        });
    }

    /// Waits until the gateway serves the certificate of this pair to clients of the domain.
    fn wait_served(&self, pair: &TestCertificate) {
        let expected = first_certificate(&pair.chain_pem).expect("a certificate in PEM");
        wait_served(self.rouse, &self.clients, &["-servername", &self.host], &expected);
    }

    fn served(&self) -> Option<String> {
        self.clients.served_certificate(&self.host)
    }
}

impl Drop for TlsDomain<'_> {
    fn drop(&mut self) {
        let args = ["delete", "clusterdomainclaim", "--ignore-not-found", &self.host];
        let _stays = self.rouse.cluster.kubectl(&args);
    }
}

/// Waits until a handshake with these arguments gets this certificate.
pub(super) fn wait_served(
    rouse: &RouseCluster,
    clients: &TlsClients,
    args: &[&str],
    certificate: &str,
) {
    rouse.cluster.wait(&format!("the certificate at a handshake with {args:?}"), || {
        let served = first_certificate(&clients.s_client(args));
        (served.as_deref() == Some(certificate)).then_some(())
    });
}

/// Waits until a handshake with these arguments ends with the alert `unrecognized_name` (RFC 6066 §3): there is no
/// certificate for the host, and no default.
pub(super) fn wait_unserved(rouse: &RouseCluster, clients: &TlsClients, args: &[&str]) {
    rouse.cluster.wait(&format!("alert 112 at a handshake with {args:?}"), || {
        clients.s_client(args).contains("alert number 112").then_some(())
    });
}

#[test]
fn a_domain_is_served_with_the_certificate_of_its_secret() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("tls-domain");
    let folder = tempfile::tempdir().expect("a folder");
    let (domain, files) = TlsDomain::create(&rouse, &namespace, folder.path());
    let absent = "Secret \"web\" does not exist.";
    domain.wait_condition(["False", "CertificateProvisionFailed", absent]);

    let first = files.issue();
    domain.apply_secret(&first.chain_pem, &first.key_pem);
    let provided = "TLS certificate was provided externally";
    domain.wait_condition(["True", "CertificateExternallyProvided", provided]);
    let mapping = rouse.wait_ready(&namespace.name, "domainmapping", &domain.host);
    assert_eq!(mapping["status"]["url"], format!("https://{}", domain.host));
    domain.wait_served(&first);
    assert_eq!(domain.clients.curl(&domain.host, &["--http2"]), "200 2");
    assert_eq!(domain.clients.curl(&domain.host, &["--http1.1"]), "200 1.1");

    let second = files.issue();
    domain.clients.with_load(&domain.host, |load| {
        domain.apply_secret(&second.chain_pem, &second.key_pem);
        domain.wait_served(&second);
        load.wait_for_another_run();
    });
    check_broken_secret(&domain, &second);
    let third = files.issue();
    domain.apply_secret(&third.chain_pem, &third.key_pem);
    domain.wait_served(&third);
    domain.wait_condition(["True", "CertificateExternallyProvided", provided]);
    for pair in [&first, &second, &third] {
        check_no_key_leaked(&rouse, pair);
    }
}

#[test]
fn a_domain_that_requires_client_certificates_is_never_open() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("tls-clients");
    let folder = tempfile::tempdir().expect("a folder");
    let (domain, files) = TlsDomain::create(&rouse, &namespace, folder.path());
    let pair = files.issue();
    domain.apply_secret(&pair.chain_pem, &pair.key_pem);
    domain.wait_served(&pair);
    assert_eq!(domain.clients.curl(&domain.host, &[]), "200 2");

    let args = ["annotate", "domainmapping", "--namespace", &namespace.name, &domain.host];
    let annotated = [&args[..], &["rouse.dev/client-ca=partners"]].concat();
    rouse.cluster.kubectl(&annotated).expect("admission accepts it");
    let absent = "Secret \"partners\" of rouse.dev/client-ca does not exist.";
    let closed = format!("{absent} The gateway accepts no client of the domain over TLS.");
    domain.wait_condition(["False", "ClientCAFailed", &closed]);
    // In TLS 1.2 a client learns of a refusal within the handshake.
    let handshake = ["-servername", domain.host.as_str(), "-tls1_2"];
    rouse.cluster.wait("alert 80 at a handshake", || {
        domain.clients.s_client(&handshake).contains("alert number 80").then_some(())
    });

    let partners = TestAuthority::new();
    let alice = partners.issue_client("alice");
    let [certificate, key] =
        ["alice.crt", "alice.key"].map(|it| folder.path().join(it).display().to_string());
    std::fs::write(&certificate, &alice.chain_pem).expect("a file");
    std::fs::write(&key, &alice.key_pem).expect("a file");
    let shown = ["--cert", &certificate, "--key", &key];
    apply_client_ca(&domain, &partners.certificate_pem());
    let provided = "TLS certificate was provided externally";
    domain.wait_condition(["True", "CertificateExternallyProvided", provided]);
    let is_refused = || {
        let output = domain.clients.s_client(&handshake);
        output.contains("alert number") && !output.contains("alert number 80")
    };
    rouse.cluster.wait("the authorities at the gateway", || is_refused().then_some(()));
    assert_eq!(domain.clients.curl(&domain.host, &shown), "200 2");

    apply_client_ca(&domain, "no certificate");
    let fault = "cannot be used: ca.crt holds no certificate in PEM.";
    let kept = format!(
        "Secret \"partners\" of rouse.dev/client-ca {fault} The client CA from before stays in force."
    );
    domain.wait_condition(["False", "ClientCAFailed", &kept]);
    assert_eq!(domain.clients.curl(&domain.host, &shown), "200 2");
    assert!(is_refused(), "a client without a certificate");
}

/// Applies the Secret with the authorities of the domain's clients.
fn apply_client_ca(domain: &TlsDomain<'_>, authorities: &str) {
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "partners"},
        "stringData": {"ca.crt": authorities},
    });
    domain.rouse.apply(&domain.namespace.name, &secret.to_string()).expect("a Secret is taken");
}

/// Checks that a broken Secret leaves the certificate in force, also after a restart of all controllers.
fn check_broken_secret(domain: &TlsDomain<'_>, in_force: &TestCertificate) {
    let kept = format!("{BROKEN} The certificate from before stays in force.");
    let expected = first_certificate(&in_force.chain_pem);
    domain.apply_secret(&in_force.chain_pem, "no key\n");
    domain.wait_condition(["False", "CertificateProvisionFailed", &kept]);
    assert_eq!(domain.served(), expected);
    domain.clients.with_load(&domain.host, |load| {
        for action in ["restart", "status"] {
            let args =
                ["rollout", action, "deployment/controller", "--namespace", SYSTEM_NAMESPACE];
            domain.rouse.cluster.kubectl(&args).expect("an operator may");
        }
        // A new controller never had the certificate, so it reports none. By then its table is in force.
        domain.wait_condition(["False", "CertificateProvisionFailed", BROKEN]);
        load.wait_for_another_run();
    });
    assert_eq!(domain.served(), expected);
}

/// Checks that neither logs of the components nor the pages of those without certificates hold the key.
fn check_no_key_leaked(rouse: &RouseCluster, pair: &TestCertificate) {
    let fragments = key_fragments(pair);
    let check = |place: &str, text: &str| {
        assert!(!text.is_empty(), "{place} is empty");
        let found = fragments.iter().find(|fragment| text.contains(fragment.as_str()));
        assert_eq!(found, None, "a part of the key in {place}");
    };
    for component in ["controller", "activator", "autoscaler", "rouse-agent"] {
        for pod in staying_pods(rouse, component) {
            let name = pod["metadata"]["name"].as_str().expect("a name");
            let args = ["logs", "--namespace", SYSTEM_NAMESPACE, name];
            check(&format!("the log of {name}"), &rouse.cluster.kubectl(&args).expect("a log"));
        }
    }
    for (component, port) in [("autoscaler", 7102), ("rouse-agent", 7104)] {
        for pod in staying_pods(rouse, component) {
            let name = pod["metadata"]["name"].as_str().expect("a name");
            let ip = pod["status"]["podIP"].as_str().and_then(|ip| ip.parse().ok());
            let admin = SocketAddr::new(ip.expect("the pod has an address"), port);
            let netns = rouse.cluster.netns_of(SYSTEM_NAMESPACE, name);
            let page = in_netns(&netns, || http_client::get(admin, component, "/metrics"));
            check(&format!("the metrics of {name}"), &page.expect("a page").body);
        }
    }
}

/// Pods of a component that are not being deleted.
fn staying_pods(rouse: &RouseCluster, component: &str) -> Vec<Value> {
    let mut pods = rouse.component_pods(component);
    pods.retain(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    assert!(!pods.is_empty(), "no pod of {component}");
    pods
}

/// Parts of a private key as text: its lines in PEM, and the middle of its bytes as Debug and as hexadecimal numbers.
fn key_fragments(pair: &TestCertificate) -> Vec<String> {
    let lines = pair.key_pem.lines().map(str::trim);
    let lines = lines.filter(|line| line.len() >= 32 && !line.starts_with("-----"));
    let mut fragments: Vec<String> = lines.map(str::to_owned).collect();
    let material = pair.material();
    // Of the secret number: PKCS#8 has 36 bytes before it, which all keys of P-256 share.
    let secret = &material.key.as_der()[40..60];
    fragments.push(format!("{secret:?}").trim_matches(['[', ']']).to_owned());
    fragments.push(secret.iter().map(|byte| format!("{byte:02x}")).collect());
    assert!(fragments.len() >= 4, "{} fragments", fragments.len());
    fragments
}

/// A certificate of the installation, until this value is dropped.
struct InstallationCertificate<'a> {
    cluster: &'a TestCluster,
    secret: &'static str,
}

impl<'a> InstallationCertificate<'a> {
    fn apply(rouse: &'a RouseCluster, secret: &'static str, pair: &TestCertificate) -> Self {
        let manifest = tls_secret(secret, &pair.chain_pem, &pair.key_pem);
        rouse.apply(SYSTEM_NAMESPACE, &manifest).expect("a Secret is taken");
        let certificate = Self { cluster: &rouse.cluster, secret };
        let value = format!("\"{secret}\"");
        set_config_map(&rouse.cluster, "config-network", &[CERTIFICATES_KEY], &value)
            .expect("a good value is taken");
        certificate
    }
}

impl Drop for InstallationCertificate<'_> {
    fn drop(&mut self) {
        let _stays = set_config_map(self.cluster, "config-network", &[CERTIFICATES_KEY], "null");
        let args = ["delete", "secret", "--namespace", SYSTEM_NAMESPACE, self.secret];
        let _stays = self.cluster.kubectl(&args);
    }
}

#[test]
fn a_certificate_of_the_installation_serves_routes_and_clients_without_a_name() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("tls-shared");
    let host = format!("hello.{}.example.com", namespace.name);
    let folder = tempfile::tempdir().expect("a folder");
    let files = TlsFiles::new(folder.path(), &[&format!("*.{}.example.com", namespace.name)]);
    let clients = rouse.tls_clients(files.authority());
    let service = service_manifest("hello", "", HELLO_CONTAINER);
    rouse.apply_until_ready(&namespace.name, &service);
    let wait_refused = |args: &[&str]| wait_unserved(&rouse, &clients, args);
    let (named, unnamed) = (["-servername", host.as_str()], ["-noservername"]);
    wait_refused(&named);
    wait_refused(&unnamed);

    let pair = files.issue();
    let expected = first_certificate(&pair.chain_pem).expect("a certificate in PEM");
    let certificate = InstallationCertificate::apply(&rouse, "tls-of-a-test", &pair);
    wait_served(&rouse, &clients, &named, &expected);
    wait_served(&rouse, &clients, &unnamed, &expected);
    assert_eq!(clients.curl(&host, &["--http2"]), "200 2");
    drop(certificate);
    wait_refused(&named);
    wait_refused(&unnamed);
}
