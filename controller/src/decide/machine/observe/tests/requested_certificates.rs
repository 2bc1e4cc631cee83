//! Certificates that the platform requests: objects of Knative and of cert-manager, conditions, URLs, and the Secrets of
//! hosts.

use std::sync::Arc;

use common::{certificates::load, fixtures::TestAuthority};

use super::*;
use crate::model::cluster_state::{ConditionReason, SecretRead};

const HOST: &str = "hello.default.localhost";
const DOMAIN: &str = "www.shop.test";
/// Last second in which the certificates of these tests are valid.
const LAST_SECOND: i64 = 2_000_000;

/// Returns a model with the service `hello`, and requests of certificates with these further settings.
fn start(settings: &[(&str, &str)]) -> FakeApiServer {
    let mut api_server = FakeApiServer::new();
    enable(&mut api_server, settings);
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server
}

fn enable(api_server: &mut FakeApiServer, settings: &[(&str, &str)]) {
    let mut data = json!({"external-domain-tls": "Enabled"});
    for (key, value) in settings {
        data[*key] = (*value).into();
    }
    api_server.set_config_map("config-network", data);
}

/// Installs cert-manager, with an issuer for public hosts.
fn install_cert_manager(api_server: &mut FakeApiServer) {
    let issuer = json!({"issuerRef": "kind: ClusterIssuer\nname: letsencrypt\n"});
    api_server.set_config_map("config-certmanager", issuer);
    api_server.step(ControllerEvent::CertManagerFound(true));
}

/// Returns the name of the certificate of the Route `hello`.
fn request_name(api_server: &FakeApiServer) -> String {
    let uid = &api_server.object(ResourceKind::Route, "hello")["metadata"]["uid"];
    format!("route-{}", uid.as_str().expect("a UID"))
}

/// Sets the status of a certificate of cert-manager, as cert-manager does.
fn set_issued_status(api_server: &mut FakeApiServer, certificate: &str, status: Value) {
    set_status(api_server, ResourceKind::IssuedCertificate, certificate, status);
}

/// Sets the status of a certificate, as its controller does.
fn set_status(
    api_server: &mut FakeApiServer,
    resource: ResourceKind,
    certificate: &str,
    status: Value,
) {
    let at = (resource, name(certificate));
    let object = api_server.objects.get_mut(&at).expect("the certificate");
    object["status"] = status;
    let object = Some(Box::new(object.clone()));
    let (resource, name) = at;
    api_server.step(ControllerEvent::ObjectObserved { resource, name, object });
}

/// Makes the namespace of the services known, without labels.
fn observe_namespace(api_server: &mut FakeApiServer) {
    let namespace = NamespacedName::new("", NAMESPACE);
    let body = json!({"metadata": {"name": NAMESPACE}});
    for event in api_server.apply(ResourceKind::Namespace, &namespace, body) {
        api_server.step(event);
    }
}

fn ready(status: &str, reason: &str) -> Value {
    json!({
        "conditions": [{
            "type": "Ready", "status": status, "reason": reason, "message": "m",
            "lastTransitionTime": "1970-01-12T13:46:40Z",
        }],
    })
}

fn provisioned(api_server: &FakeApiServer) -> String {
    api_server.condition(ResourceKind::Route, "hello", "CertificateProvisioned")
}

fn url(api_server: &FakeApiServer) -> &str {
    api_server.object(ResourceKind::Route, "hello")["status"]["url"].as_str().unwrap_or_default()
}

fn read_usable(api_server: &mut FakeApiServer, secret: &str, host: &str) {
    let certificate = TestAuthority::new().issue_valid(&[host], 0, LAST_SECOND);
    let material = certificate.material();
    let facts = load(&material).expect("it is usable").facts;
    api_server
        .read_secret(&name(secret), SecretRead::Usable { material: Arc::new(material), facts });
}

/// Returns the hosts of `hello` with rules of their own, and the Secret of each.
fn served(api_server: &FakeApiServer) -> Vec<(String, Option<NamespacedName>)> {
    let services = api_server.table().services;
    let rules = services[&name("hello")].gateway_rules.clone().unwrap_or_default();
    rules.mapped_domains.into_iter().map(|it| (it.host, it.certificate)).collect()
}

/// Applies the service `hello` with an annotation.
fn apply_annotated(api_server: &mut FakeApiServer, key: &str, value: &str) {
    let body = json!({
        "apiVersion": "serving.knative.dev/v1", "kind": "Service",
        "metadata": {"name": "hello", "namespace": NAMESPACE, "annotations": {key: value}},
        "spec": {"template": fake_api_server::template("hello:v1", 0)},
    });
    for event in api_server.apply(ResourceKind::KnativeService, &name("hello"), body) {
        api_server.step(event);
    }
}

/// Maps paths of a host to `hello` by a DomainMapping of this name. Later ones are younger.
fn map_path(api_server: &mut FakeApiServer, mapping: &str, host: &str, prefix: &str) {
    let annotations = json!({"rouse.dev/host": host, "rouse.dev/path-prefix": prefix});
    api_server.map_service_domain(mapping, "hello", annotations);
}

#[test]
fn nothing_is_requested_without_the_setting() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.step(ControllerEvent::CertManagerFound(true));
    assert_eq!(provisioned(&api_server), "True TLSNotEnabled: external-domain-tls is not enabled");
    assert!(api_server.names(ResourceKind::RequestedCertificate).is_empty());
}

#[test]
fn a_public_host_gets_a_request() {
    let api_server = start(&[]);
    let request = request_name(&api_server);
    let object = api_server.object(ResourceKind::RequestedCertificate, &request);
    let expected = json!({"dnsNames": [HOST], "domain": "localhost", "secretName": request});
    assert_eq!(object["spec"], expected);
    let labels = json!({
        "serving.knative.dev/route": "hello",
        "networking.knative.dev/certificate-type": "external-domain",
    });
    assert_eq!(object["metadata"]["labels"], labels);
    assert_eq!(object["metadata"]["ownerReferences"][0]["kind"], "Route");
    let class = &object["metadata"]["annotations"]["networking.knative.dev/certificate.class"];
    assert_eq!(class, "cert-manager.certificate.networking.knative.dev");
    let expected =
        format!("True HTTPDowngrade: Certificate {request} is not ready downgrade HTTP.");
    assert_eq!(provisioned(&api_server), expected);
    assert_eq!(url(&api_server), format!("http://{HOST}"));
    assert_eq!(api_server.named_secrets, BTreeSet::new());
}

#[test]
fn cert_manager_gets_a_certificate_of_the_issuer() {
    let mut api_server = start(&[]);
    assert!(api_server.names(ResourceKind::IssuedCertificate).is_empty());
    install_cert_manager(&mut api_server);
    let request = request_name(&api_server);
    let requested = api_server.object(ResourceKind::RequestedCertificate, &request);
    let uid = requested["metadata"]["uid"].clone();
    let object = api_server.object(ResourceKind::IssuedCertificate, &request);
    let expected = json!({
        "commonName": HOST, "dnsNames": [HOST], "secretName": request,
        "issuerRef": {"kind": "ClusterIssuer", "name": "letsencrypt"},
        "secretTemplate": {"labels": {"networking.internal.knative.dev/certificate-uid": uid}},
    });
    assert_eq!(object["spec"], expected);
    assert_eq!(object["metadata"]["ownerReferences"][0]["uid"], uid);
}

#[test]
fn a_ready_certificate_serves_its_host() {
    let mut api_server = start(&[]);
    install_cert_manager(&mut api_server);
    let request = request_name(&api_server);
    set_issued_status(&mut api_server, &request, ready("True", "Ready"));
    assert_eq!(api_server.named_secrets, BTreeSet::from([name(&request)]));
    assert_eq!(served(&api_server), [(HOST.to_owned(), Some(name(&request)))]);
    read_usable(&mut api_server, &request, HOST);
    assert_eq!(provisioned(&api_server), "True : ");
    assert_eq!(url(&api_server), format!("https://{HOST}"));
    // A renewal that fails takes nothing away.
    let mut failed = ready("False", "Expired");
    failed["notAfter"] = "1970-01-12T13:46:40Z".into();
    set_issued_status(&mut api_server, &request, failed);
    assert_eq!(served(&api_server), [(HOST.to_owned(), Some(name(&request)))]);
    assert!(provisioned(&api_server).starts_with("True HTTPDowngrade: "));
    // Nor does the end of cert-manager's certificate, which is requested again.
    api_server.delete_as_user(ResourceKind::IssuedCertificate, &request);
    assert_eq!(api_server.names(ResourceKind::IssuedCertificate), [name(&request)]);
    assert_eq!(served(&api_server), [(HOST.to_owned(), Some(name(&request)))]);
}

/// Nothing tells the request that its certificate has ended if cert-manager is gone.
#[test]
fn an_expired_certificate_is_reported_although_its_request_is_ready() {
    let mut api_server = start(&[]);
    install_cert_manager(&mut api_server);
    let request = request_name(&api_server);
    set_issued_status(&mut api_server, &request, ready("True", "Ready"));
    read_usable(&mut api_server, &request, HOST);
    api_server.now = UnixMillis::from_seconds(LAST_SECOND);
    api_server.step(ControllerEvent::Tick);
    assert_eq!(provisioned(&api_server), "True : ");
    api_server.now = UnixMillis::from_seconds(LAST_SECOND + 1);
    api_server.step(ControllerEvent::Tick);
    let expected = format!(
        "False CertificateProvisionFailed: The certificate {request} is ready, but has expired at \
         1970-01-24T03:33:20Z."
    );
    assert_eq!(provisioned(&api_server), expected);
    assert_eq!(served(&api_server), [(HOST.to_owned(), Some(name(&request)))]);
    assert!(api_server.table().certificates[&name(&request)].material.is_some());
}

/// Activators keep the certificate, which the new controller does not know.
#[test]
fn a_controller_that_starts_and_cannot_read_a_secret_says_so() {
    let mut api_server = start(&[]);
    install_cert_manager(&mut api_server);
    let request = request_name(&api_server);
    set_issued_status(&mut api_server, &request, ready("True", "Ready"));
    read_usable(&mut api_server, &request, HOST);
    let mut started = api_server.start_replica();
    let provisioned = |started: &ControllerStateMachine| {
        let conditions = &started.cluster().apps[&name("hello")].conditions;
        conditions.get(ConditionType::RouteCertificate)
    };
    assert_eq!(provisioned(&started), ConditionStatus::True(None), "the Secret was not read yet");
    let read = SecretRead::Unreadable("forbidden".to_owned());
    started.step(api_server.now, ControllerEvent::SecretRead { name: name(&request), read });
    let message = format!(
        "The certificate {request} is ready, but Secret {request:?} cannot be read: forbidden."
    );
    let expected = ConditionReason::new("CertificateNotReady", message);
    assert_eq!(provisioned(&started), ConditionStatus::Unknown(Some(expected)));
    assert_eq!(table(&started).certificates[&name(&request)].material, None);
}

#[test]
fn a_redirected_host_waits_for_its_certificate() {
    let mut api_server = start(&[("http-protocol", "Redirected")]);
    install_cert_manager(&mut api_server);
    let request = request_name(&api_server);
    set_issued_status(&mut api_server, &request, ready("False", "InProgress"));
    let expected =
        format!("Unknown CertificateNotReady: Certificate {request} is not ready: InProgress");
    assert_eq!(provisioned(&api_server), expected);
    assert_eq!(url(&api_server), format!("https://{HOST}"));
    set_issued_status(&mut api_server, &request, ready("False", "Failed"));
    let expected = format!(
        "False CertificateProvisionFailed: Certificate {request} fails to be provisioned: Failed"
    );
    assert_eq!(provisioned(&api_server), expected);
}

#[test]
fn without_cert_manager_a_condition_says_so() {
    let mut api_server = start(&[]);
    let issuer = json!({"issuerRef": "kind: ClusterIssuer\nname: letsencrypt\n"});
    api_server.set_config_map("config-certmanager", issuer);
    api_server.step(ControllerEvent::CertManagerFound(false));
    let request = request_name(&api_server);
    let expected = format!(
        "True HTTPDowngrade: Certificate {request} is not ready downgrade HTTP. cert-manager is not installed."
    );
    assert_eq!(provisioned(&api_server), expected);
    assert!(api_server.names(ResourceKind::IssuedCertificate).is_empty());
    let ready = api_server.condition(ResourceKind::RequestedCertificate, &request, "Ready");
    assert!(ready.starts_with("Unknown CertManagerMissing: "), "{ready}");
    assert_eq!(api_server.condition(ResourceKind::Route, "hello", "Ready"), "True : ");
}

#[test]
fn without_an_issuer_a_request_fails() {
    let mut api_server = start(&[]);
    api_server.step(ControllerEvent::CertManagerFound(true));
    let request = request_name(&api_server);
    let expected = "False issuerRef not set: error creating cert-manager certificate: \
                    issuerRef was not set in config-certmanager";
    let ready = api_server.condition(ResourceKind::RequestedCertificate, &request, "Ready");
    assert_eq!(ready, expected);
}

#[test]
fn an_annotation_turns_certificates_off() {
    let mut api_server = FakeApiServer::new();
    enable(&mut api_server, &[]);
    for key in key::DISABLE_EXTERNAL_DOMAIN_TLS {
        apply_annotated(&mut api_server, key, "true");
        let expected = "True TLSNotEnabled: external-domain-tls is not enabled";
        assert_eq!(provisioned(&api_server), expected, "{key}");
    }
    assert!(api_server.names(ResourceKind::RequestedCertificate).is_empty());
}

#[test]
fn a_certificate_has_the_class_of_its_owner() {
    let mut api_server = FakeApiServer::new();
    enable(&mut api_server, &[]);
    install_cert_manager(&mut api_server);
    for key in key::CERTIFICATE_CLASS {
        apply_annotated(&mut api_server, key, "x.example.com");
        let request = request_name(&api_server);
        let object = api_server.object(ResourceKind::RequestedCertificate, &request);
        let annotations = &object["metadata"]["annotations"];
        assert_eq!(annotations["networking.knative.dev/certificate.class"], "x.example.com");
    }
    // Another controller issues it.
    assert!(api_server.names(ResourceKind::IssuedCertificate).is_empty());
}

#[test]
fn a_private_name_needs_no_certificate() {
    let mut api_server = FakeApiServer::new();
    enable(&mut api_server, &[]);
    let body = json!({
        "apiVersion": "serving.knative.dev/v1", "kind": "Service",
        "metadata": {
            "name": "hello", "namespace": NAMESPACE,
            "labels": {"networking.knative.dev/visibility": "cluster-local"},
        },
        "spec": {"template": fake_api_server::template("hello:v1", 0)},
    });
    for event in api_server.apply(ResourceKind::KnativeService, &name("hello"), body) {
        api_server.step(event);
    }
    assert_eq!(
        provisioned(&api_server),
        "True TLSNotEnabled: TLS is not enabled for cluster-local"
    );
    assert!(api_server.names(ResourceKind::RequestedCertificate).is_empty());
}

#[test]
fn a_certificate_of_another_owner_is_left_alone() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let request = request_name(&api_server);
    let spec = json!({"dnsNames": ["other.test"], "secretName": "other"});
    api_server.apply_as_user(ResourceKind::RequestedCertificate, &request, spec.clone());
    enable(&mut api_server, &[]);
    let expected = format!(
        "False CertificateNotOwned: There is an existing certificate {request} that we don't own."
    );
    assert_eq!(provisioned(&api_server), expected);
    assert_eq!(api_server.object(ResourceKind::RequestedCertificate, &request)["spec"], spec);
}

#[test]
fn a_chosen_namespace_has_one_certificate() {
    let mut api_server = FakeApiServer::new();
    enable(&mut api_server, &[("namespace-wildcard-cert-selector", "{}")]);
    install_cert_manager(&mut api_server);
    observe_namespace(&mut api_server);
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let request = "default.localhost";
    assert_eq!(api_server.names(ResourceKind::RequestedCertificate), [name(request)]);
    let object = api_server.object(ResourceKind::RequestedCertificate, request);
    assert_eq!(object["spec"]["dnsNames"], json!(["*.default.localhost"]));
    assert_eq!(object["metadata"]["ownerReferences"][0]["kind"], "Namespace");
    let labels = json!({"networking.knative.dev/wildcardDomain": "localhost"});
    assert_eq!(object["metadata"]["labels"], labels);
    set_issued_status(&mut api_server, request, ready("True", "Ready"));
    read_usable(&mut api_server, request, "*.default.localhost");
    assert_eq!(provisioned(&api_server), "True : ");
    assert_eq!(served(&api_server), [(HOST.to_owned(), Some(name(request)))]);
}

/// A label has at most 63 characters. cert-manager takes no such domain, and other controllers do.
#[test]
fn the_certificate_of_a_namespace_is_found_by_a_domain_that_is_longer_than_a_label() {
    let domain = ["a", "b", "c"].map(|it| it.repeat(30)).join(".");
    let mut domains = json!({});
    domains[domain.as_str()] = "".into();
    let mut api_server = FakeApiServer::new();
    api_server.set_config_map("config-domain", domains);
    let settings =
        [("namespace-wildcard-cert-selector", "{}"), ("certificate-class", "x.example.com")];
    enable(&mut api_server, &settings);
    observe_namespace(&mut api_server);
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let request = format!("default.{domain}");
    let object = api_server.object(ResourceKind::RequestedCertificate, &request);
    let label = object["metadata"]["labels"]["networking.knative.dev/wildcardDomain"].as_str();
    let (cut, length) = (label.expect("a label"), label.map(str::len));
    assert!(domain.starts_with(&cut[..31]) && length == Some(63), "{cut}");
    set_status(
        &mut api_server,
        ResourceKind::RequestedCertificate,
        &request,
        ready("True", "Ready"),
    );
    read_usable(&mut api_server, &request, &format!("*.default.{domain}"));
    assert_eq!(provisioned(&api_server), "True : ");
}

/// Activators would refuse the service, and a table without it routes nothing to its hosts.
#[test]
fn a_certificate_of_a_user_whose_secret_has_no_valid_name_serves_nothing() {
    for secret in ["a/b", ""] {
        let mut api_server = start(&[]);
        let labels = json!({"networking.knative.dev/wildcardDomain": "localhost"});
        let mut body = json!({
            "metadata": {"name": "own", "namespace": NAMESPACE, "labels": labels},
            "spec": {"dnsNames": ["*.default.localhost"], "secretName": secret},
        });
        body["status"] = ready("True", "");
        for event in api_server.apply(ResourceKind::RequestedCertificate, &name("own"), body) {
            api_server.step(event);
        }
        assert!(served(&api_server).is_empty(), "{:?}", served(&api_server));
        assert_eq!(api_server.named_secrets, BTreeSet::new());
        let expected = format!(
            "False CertificateProvisionFailed: The certificate own is ready, but {secret:?} cannot \
             be the name of a Secret."
        );
        assert_eq!(provisioned(&api_server), expected);
    }
}

#[test]
fn a_domain_without_a_secret_gets_a_certificate() {
    let mut api_server = start(&[("http-protocol", "Redirected")]);
    install_cert_manager(&mut api_server);
    api_server.claim_domain(DOMAIN, NAMESPACE);
    api_server.map_domain(DOMAIN, "Service", "hello");
    let provisioned = |api_server: &FakeApiServer| {
        api_server.condition(ResourceKind::DomainMapping, DOMAIN, "CertificateProvisioned")
    };
    let expected = format!("Unknown CertificateNotReady: Certificate {DOMAIN} is not ready.");
    assert_eq!(provisioned(&api_server), expected);
    set_issued_status(&mut api_server, DOMAIN, ready("True", "Ready"));
    read_usable(&mut api_server, DOMAIN, DOMAIN);
    assert_eq!(provisioned(&api_server), "True : ");
    let status = &api_server.object(ResourceKind::DomainMapping, DOMAIN)["status"];
    assert_eq!(status["url"], format!("https://{DOMAIN}"));
    assert!(served(&api_server).contains(&(DOMAIN.to_owned(), Some(name(DOMAIN)))));
}

#[test]
fn all_paths_of_a_host_share_one_requested_certificate() {
    let mut api_server = start(&[]);
    install_cert_manager(&mut api_server);
    api_server.claim_domain(DOMAIN, NAMESPACE);
    for (mapping, prefix) in [("first", "/a"), ("second", "/b")] {
        map_path(&mut api_server, mapping, DOMAIN, prefix);
    }
    let names: BTreeSet<NamespacedName> =
        api_server.names(ResourceKind::RequestedCertificate).into_iter().collect();
    assert_eq!(names, BTreeSet::from([name(&request_name(&api_server)), name(DOMAIN)]));
    let owner = |api_server: &FakeApiServer| {
        let object = api_server.object(ResourceKind::RequestedCertificate, DOMAIN);
        object["metadata"]["ownerReferences"][0]["name"].clone()
    };
    assert_eq!(owner(&api_server), "first");
    set_issued_status(&mut api_server, DOMAIN, ready("True", "Ready"));
    read_usable(&mut api_server, DOMAIN, DOMAIN);
    let of_domain = |api_server: &FakeApiServer| -> Vec<Option<NamespacedName>> {
        let all = served(api_server).into_iter().filter(|(host, _)| host == DOMAIN);
        all.map(|(_, secret)| secret).collect()
    };
    assert_eq!(of_domain(&api_server), [Some(name(DOMAIN)), Some(name(DOMAIN))]);
    for mapping in ["first", "second"] {
        let provisioned =
            api_server.condition(ResourceKind::DomainMapping, mapping, "CertificateProvisioned");
        assert_eq!(provisioned, "True : ", "{mapping}");
    }
    // The other mapping gets the certificate of the host that the owner leaves.
    map_path(&mut api_server, "first", "other.shop.test", "/a");
    assert_eq!(owner(&api_server), "second");
    set_issued_status(&mut api_server, DOMAIN, ready("True", "Ready"));
    assert_eq!(of_domain(&api_server), [Some(name(DOMAIN))]);
    // An older mapping that comes to the host takes nothing from its owner.
    map_path(&mut api_server, "first", DOMAIN, "/a");
    assert_eq!(owner(&api_server), "second");
    assert_eq!(of_domain(&api_server), [Some(name(DOMAIN)), Some(name(DOMAIN))]);
}

/// An issuer that checks domains by DNS would issue it to any namespace.
#[test]
fn only_the_namespace_of_a_domain_requests_its_certificate() {
    let mut api_server = start(&[]);
    install_cert_manager(&mut api_server);
    api_server.claim_domain(DOMAIN, "other");
    api_server.map_domain(DOMAIN, "Service", "hello");
    let is_requested = |api_server: &FakeApiServer| {
        let requests = api_server.names(ResourceKind::RequestedCertificate);
        let issued = api_server.names(ResourceKind::IssuedCertificate);
        assert_eq!(requests.contains(&name(DOMAIN)), issued.contains(&name(DOMAIN)));
        requests.contains(&name(DOMAIN))
    };
    assert!(!is_requested(&api_server));
    let provisioned =
        api_server.condition(ResourceKind::DomainMapping, DOMAIN, "CertificateProvisioned");
    assert_eq!(provisioned, "Unknown : ");
    api_server.claim_domain(DOMAIN, NAMESPACE);
    assert!(is_requested(&api_server));
    api_server.claim_domain(DOMAIN, "other");
    assert!(!is_requested(&api_server), "it is not renewed any more");
}

#[test]
fn no_certificate_is_requested_for_a_wildcard() {
    let mut api_server = start(&[]);
    install_cert_manager(&mut api_server);
    api_server.claim_domain("shop.test", NAMESPACE);
    map_path(&mut api_server, "all-shops", "*.shop.test", "/");
    let names = api_server.names(ResourceKind::RequestedCertificate);
    assert_eq!(names, [name(&request_name(&api_server))]);
    let provisioned =
        api_server.condition(ResourceKind::DomainMapping, "all-shops", "CertificateProvisioned");
    let expected = "True TLSNotEnabled: no certificate is requested for a host with a wildcard: \
                    name a Secret in spec.tls";
    assert_eq!(provisioned, expected);
}

#[test]
fn a_challenge_reaches_the_gateway_and_the_request() {
    // Authorities ask by http, also where it is redirected.
    let mut api_server = start(&[("http-protocol", "Redirected")]);
    install_cert_manager(&mut api_server);
    let spec = json!({"type": "HTTP-01", "dnsName": HOST, "token": "t", "key": "t.hash"});
    api_server.apply_as_user(ResourceKind::AcmeChallenge, "order-1", spec);
    let uid = &api_server.object(ResourceKind::AcmeChallenge, "order-1")["metadata"]["uid"];
    let solver = json!({
        "metadata": {
            "name": "cm-acme-http-solver-x", "namespace": NAMESPACE,
            "labels": {"acme.cert-manager.io/http01-solver": "true"},
            "ownerReferences": [{"controller": true, "uid": uid}],
        },
        "spec": {"clusterIPs": ["10.96.7.7"], "ports": [{"port": 8089}], "selector": {"a": "b"}},
    });
    let at = name("cm-acme-http-solver-x");
    for event in api_server.apply(ResourceKind::Service, &at, solver) {
        api_server.step(event);
    }
    let challenges = |api_server: &FakeApiServer| {
        let services = api_server.table().services;
        let rules = services[&name("hello")].gateway_rules.clone().unwrap_or_default();
        rules.challenges
    };
    let expected = common::wire::HttpChallenge {
        host: HOST.into(),
        token: "t".into(),
        response: "t.hash".into(),
    };
    assert_eq!(challenges(&api_server), [expected]);
    let request = request_name(&api_server);
    let status = &api_server.object(ResourceKind::RequestedCertificate, &request)["status"];
    let expected = json!([{
        "url": format!("http://{HOST}/.well-known/acme-challenge/t"),
        "serviceName": "cm-acme-http-solver-x", "serviceNamespace": NAMESPACE, "servicePort": 8089,
    }]);
    assert_eq!(status["http01Challenges"], expected);
    api_server.delete_as_user(ResourceKind::AcmeChallenge, "order-1");
    assert!(challenges(&api_server).is_empty());
    let status = &api_server.object(ResourceKind::RequestedCertificate, &request)["status"];
    assert!(status["http01Challenges"].is_null());
}

/// The certificate of a long host has a second one, which could be the host of a Route of another namespace.
#[test]
fn no_route_responds_to_challenges_for_the_host_of_another() {
    let mut api_server = FakeApiServer::new();
    enable(&mut api_server, &[]);
    for service in ["k", "hello"] {
        api_server.apply_service(service, "hello:v1", 0, Value::Null);
    }
    install_cert_manager(&mut api_server);
    for host in ["k.default.localhost", "k.localhost"] {
        let spec = json!({"type": "HTTP-01", "dnsName": host, "token": "t", "key": "t.hash"});
        api_server.apply_as_user(ResourceKind::AcmeChallenge, host, spec);
    }
    let hosts = |service: &str| -> Vec<String> {
        let rules = api_server.table().services[&name(service)].gateway_rules.clone();
        rules.unwrap_or_default().challenges.into_iter().map(|it| it.host).collect()
    };
    assert_eq!(hosts("hello"), ["k.localhost"]);
    assert_eq!(hosts("k"), ["k.default.localhost", "k.localhost"]);
}

#[test]
fn a_tag_that_goes_takes_its_certificate_with_it() {
    let tagged = |tag: &str| json!([{"latestRevision": true, "percent": 100}, {"latestRevision": true, "tag": tag}]);
    let mut api_server = FakeApiServer::new();
    enable(&mut api_server, &[]);
    api_server.apply_service("hello", "hello:v1", 0, tagged("blue"));
    let request = request_name(&api_server);
    let of_tag = format!("{request}-69140905");
    let names = |api_server: &FakeApiServer| -> BTreeSet<NamespacedName> {
        api_server.names(ResourceKind::RequestedCertificate).into_iter().collect()
    };
    assert_eq!(names(&api_server), BTreeSet::from([name(&request), name(&of_tag)]));
    let plain = json!([{"latestRevision": true, "percent": 100}]);
    api_server.apply_service("hello", "hello:v1", 0, plain);
    assert_eq!(names(&api_server), BTreeSet::from([name(&request)]));
}
