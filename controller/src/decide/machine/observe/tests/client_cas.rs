//! Certificates of clients: Secrets that are named, rules and authorities that activators get, and conditions of domains.

use std::sync::Arc;

use common::wire::{ClientAuth, ClientCaEntry, ClientCaMaterial, MappedDomain};

use super::*;
use crate::{
    decide::machine::CertificateCounts,
    model::cluster_state::{ClientCaRead, SecretRead},
};

const DOMAIN: &str = "www.shop.test";
const CLOSED: &str = " The gateway accepts no client of the domain over TLS.";
const KEPT: &str = " The client CA from before stays in force.";
/// Condition of a domain whose certificate is chosen by names.
const GOOD: &str = "True TLSNotEnabled: external-domain-tls is not enabled";

/// Returns a model with the service `hello` and a claim of the domain.
fn start() -> FakeApiServer {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.claim_domain(DOMAIN, NAMESPACE);
    api_server
}

/// Maps the domain to `hello`, with these annotations.
fn map_with(api_server: &mut FakeApiServer, annotations: Value) {
    map_host_with(api_server, DOMAIN, annotations);
}

/// Maps a host to `hello`, with these annotations.
fn map_host_with(api_server: &mut FakeApiServer, host: &str, annotations: Value) {
    let reference =
        json!({"apiVersion": "serving.knative.dev/v1", "kind": "Service", "name": "hello"});
    let body = json!({
        "apiVersion": "serving.knative.dev/v1beta1", "kind": "DomainMapping",
        "metadata": {"name": host, "namespace": NAMESPACE, "annotations": annotations},
        "spec": {"ref": reference},
    });
    for event in api_server.apply(ResourceKind::DomainMapping, &name(host), body) {
        api_server.step(event);
    }
}

fn map_with_ca(api_server: &mut FakeApiServer, secret: &str) {
    map_with(api_server, json!({"rouse.dev/client-ca": secret}));
}

fn material(byte: u8) -> Arc<ClientCaMaterial> {
    Arc::new(ClientCaMaterial(vec![vec![byte]]))
}

fn usable(byte: u8) -> ClientCaRead {
    ClientCaRead::Usable(material(byte))
}

fn absent() -> ClientCaRead {
    ClientCaRead::Absent
}

/// Returns a model whose domain has the authorities of the Secret `clients`.
fn start_with_ca() -> FakeApiServer {
    let mut api_server = start();
    map_with_ca(&mut api_server, "clients");
    api_server.read_client_ca(&name("clients"), usable(1));
    assert_eq!(provisioned(&api_server), GOOD);
    api_server
}

fn provisioned(api_server: &FakeApiServer) -> String {
    api_server.condition(ResourceKind::DomainMapping, DOMAIN, "CertificateProvisioned")
}

fn failed(message: &str) -> String {
    format!("False ClientCAFailed: {message}")
}

/// Returns the domain as activators get it.
fn domain(api_server: &FakeApiServer) -> MappedDomain {
    let services = api_server.table().services;
    let mut rules = services[&name("hello")].gateway_rules.clone().expect("a domain is mapped");
    rules.mapped_domains.remove(0)
}

fn required(ca: Option<&str>) -> Option<ClientAuth> {
    Some(ClientAuth { ca: ca.map(name), is_optional: false })
}

/// Returns the authorities of a Secret as activators get them; `None`: there is no entry.
fn entry(api_server: &FakeApiServer, secret: &str) -> Option<Option<Arc<ClientCaMaterial>>> {
    let entry: Option<ClientCaEntry> = api_server.table().client_cas.get(&name(secret)).cloned();
    entry.map(|it| it.material)
}

fn named(secrets: &[&str]) -> BTreeSet<NamespacedName> {
    secrets.iter().map(|it| name(it)).collect()
}

#[test]
fn a_domain_asks_for_certificates_of_the_named_authorities() {
    let mut api_server = start();
    map_with_ca(&mut api_server, "clients");
    assert_eq!(api_server.named_client_cas, named(&["clients"]));
    assert_eq!(api_server.named_secrets, named(&[]), "no private key is read");
    // The rule is in force at once, and without authorities no client is accepted.
    assert_eq!(domain(&api_server).client_auth, required(Some("clients")));
    assert_eq!(entry(&api_server, "clients"), Some(None));
    let message = "Secret \"clients\" of rouse.dev/client-ca was not read yet.";
    assert_eq!(provisioned(&api_server), format!("Unknown ClientCANotReady: {message}{CLOSED}"));
    api_server.read_client_ca(&name("clients"), usable(1));
    assert_eq!(entry(&api_server, "clients"), Some(Some(material(1))));
    assert_eq!(provisioned(&api_server), GOOD);
    assert_eq!(api_server.condition(ResourceKind::DomainMapping, DOMAIN, "Ready"), "True : ");
    api_server.read_client_ca(&name("clients"), usable(2));
    assert_eq!(entry(&api_server, "clients"), Some(Some(material(2))));
    let annotations =
        json!({"rouse.dev/client-ca": "clients", "rouse.dev/client-auth": "optional"});
    map_with(&mut api_server, annotations);
    let optional = ClientAuth { ca: Some(name("clients")), is_optional: true };
    assert_eq!(domain(&api_server).client_auth, Some(optional));
    map_with(&mut api_server, json!({}));
    assert_eq!(domain(&api_server).client_auth, None);
    assert_eq!((entry(&api_server, "clients"), &api_server.named_client_cas), (None, &named(&[])));
}

#[test]
fn a_secret_without_authorities_is_reported_and_opens_nothing() {
    let faulty = || ClientCaRead::Faulty("it has no ca.crt".into());
    for (read, text) in [
        (absent(), "Secret \"clients\" of rouse.dev/client-ca does not exist."),
        (faulty(), "Secret \"clients\" of rouse.dev/client-ca cannot be used: it has no ca.crt."),
    ] {
        let mut api_server = start();
        map_with_ca(&mut api_server, "clients");
        api_server.read_client_ca(&name("clients"), read.clone());
        assert_eq!(provisioned(&api_server), failed(&format!("{text}{CLOSED}")));
        assert_eq!(entry(&api_server, "clients"), Some(None));
        let mut api_server = start_with_ca();
        api_server.read_client_ca(&name("clients"), read);
        assert_eq!(provisioned(&api_server), failed(&format!("{text}{KEPT}")));
        assert_eq!(entry(&api_server, "clients"), Some(Some(material(1))));
        assert_eq!(domain(&api_server).client_auth, required(Some("clients")));
    }
    let mut api_server = start();
    map_with_ca(&mut api_server, "clients");
    api_server.read_client_ca(&name("clients"), ClientCaRead::Unreadable("forbidden".into()));
    let text = "Secret \"clients\" of rouse.dev/client-ca cannot be read: forbidden.";
    assert_eq!(provisioned(&api_server), format!("Unknown ClientCANotReady: {text}{CLOSED}"));
}

#[test]
fn a_domain_moved_to_a_broken_secret_keeps_its_authorities() {
    let mut api_server = start_with_ca();
    map_with_ca(&mut api_server, "next");
    assert_eq!(domain(&api_server).client_auth, required(Some("clients")), "not read yet");
    assert_eq!(api_server.named_client_cas, named(&["clients", "next"]));
    api_server.read_client_ca(&name("next"), absent());
    let text = "Secret \"next\" of rouse.dev/client-ca does not exist.";
    assert_eq!(provisioned(&api_server), failed(&format!("{text}{KEPT}")));
    assert_eq!(domain(&api_server).client_auth, required(Some("clients")));
    api_server.read_client_ca(&name("next"), usable(2));
    assert_eq!(domain(&api_server).client_auth, required(Some("next")));
    assert_eq!(api_server.named_client_cas, named(&["next"]));
    assert_eq!(entry(&api_server, "clients"), None);
    assert_eq!(provisioned(&api_server), GOOD);
}

/// The API server may hold mappings that were stored without admission.
#[test]
fn annotations_that_cannot_be_followed_never_open_the_domain() {
    let annotations = json!({"rouse.dev/client-ca": "clients", "rouse.dev/client-auth": "maybe"});
    let fault = "rouse.dev/client-auth is \"maybe\", must be require or optional.";
    let mut api_server = start();
    map_with(&mut api_server, annotations.clone());
    assert_eq!(domain(&api_server).client_auth, required(None));
    assert_eq!(provisioned(&api_server), failed(&format!("{fault}{CLOSED}")));
    assert_eq!(api_server.named_client_cas, named(&[]));
    let mut api_server = start_with_ca();
    map_with(&mut api_server, annotations);
    assert_eq!(domain(&api_server).client_auth, required(Some("clients")));
    assert_eq!(provisioned(&api_server), failed(&format!("{fault}{KEPT}")));
}

/// Hosts of the service `hello`: its own, and those of its domains with their rules.
fn hosts(api_server: &FakeApiServer) -> (Vec<String>, Vec<(String, Option<ClientAuth>)>) {
    let service = api_server.table().services[&name("hello")].clone();
    let domains = service.gateway_rules.into_iter().flat_map(|it| it.mapped_domains);
    (service.hosts, domains.map(|it| (it.host, it.client_auth)).collect())
}

/// A user may map the host that the Route has already.
#[test]
fn the_own_host_of_a_route_follows_the_client_auth_of_its_mapping() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let host = format!("hello.{NAMESPACE}.localhost");
    api_server.claim_domain(&host, NAMESPACE);
    // The Route is the older one, and so the owner of the host.
    api_server.now = api_server.now.plus_ms(2000);
    let open = (vec![host.clone()], vec![]);
    let guarded = (vec![], vec![(host.clone(), required(Some("clients")))]);
    for (annotations, expected) in [
        (json!({}), &open),
        (json!({"rouse.dev/client-ca": "clients"}), &guarded),
        (json!({}), &open),
    ] {
        map_host_with(&mut api_server, &host, annotations);
        assert_eq!(&hosts(&api_server), expected);
    }
}

/// The Route keeps the mapping of a part from the host, so that mapping decides nothing about it.
#[test]
fn a_mapping_of_a_part_does_not_open_the_own_host_of_a_route() {
    let host = format!("hello.{NAMESPACE}.localhost");
    let part = json!({"rouse.dev/host": host, "rouse.dev/path-prefix": "/a"});
    let mut other = part.clone();
    other["rouse.dev/client-ca"] = "others".into();
    let all = json!({"rouse.dev/client-ca": "clients"});
    let guarded = (vec![], vec![(host.clone(), required(Some("clients")))]);
    for part in [part, other] {
        for part_is_older in [false, true] {
            let mut api_server = FakeApiServer::new();
            api_server.apply_service("hello", "hello:v1", 0, Value::Null);
            api_server.claim_domain(&host, NAMESPACE);
            let mut order = [(host.as_str(), &all), ("part", &part)];
            if part_is_older {
                order.reverse();
            }
            for (mapping, annotations) in order {
                // The Route is the oldest, and so the owner of the host.
                api_server.now = api_server.now.plus_ms(2000);
                map_host_with(&mut api_server, mapping, annotations.clone());
            }
            assert_eq!(hosts(&api_server), guarded, "{part} {part_is_older}");
            let claimed =
                api_server.condition(ResourceKind::DomainMapping, "part", "DomainClaimed");
            assert!(claimed.starts_with("False DomainAlreadyClaimed: "), "{claimed}");
        }
    }
}

#[test]
fn a_condition_shows_the_faults_of_both_secrets() {
    let mut api_server = start();
    let reference =
        json!({"apiVersion": "serving.knative.dev/v1", "kind": "Service", "name": "hello"});
    let annotations = json!({"rouse.dev/client-ca": "clients"});
    let body = json!({
        "apiVersion": "serving.knative.dev/v1beta1", "kind": "DomainMapping",
        "metadata": {"name": DOMAIN, "namespace": NAMESPACE, "annotations": annotations},
        "spec": {"ref": reference, "tls": {"secretName": "shop"}},
    });
    for event in api_server.apply(ResourceKind::DomainMapping, &name(DOMAIN), body) {
        api_server.step(event);
    }
    api_server.read_secret(&name("shop"), SecretRead::Absent);
    api_server.read_client_ca(&name("clients"), absent());
    let both =
        "Secret \"shop\" does not exist. Secret \"clients\" of rouse.dev/client-ca does not exist.";
    let expected = format!("False CertificateProvisionFailed: {both}{CLOSED}");
    assert_eq!(provisioned(&api_server), expected);
    let counts = CertificateCounts { absent: 2, ..CertificateCounts::default() };
    assert_eq!(api_server.certificate_counts, counts);
}

#[test]
fn a_domain_that_is_made_again_at_once_has_its_authorities() {
    let mut api_server = start_with_ca();
    for event in api_server.delete(ResourceKind::DomainMapping, &name(DOMAIN)) {
        api_server.step(event);
    }
    assert_eq!((entry(&api_server, "clients"), &api_server.named_client_cas), (None, &named(&[])));
    map_with_ca(&mut api_server, "clients");
    assert_eq!(entry(&api_server, "clients"), Some(Some(material(1))));
}

#[test]
fn a_replica_that_starts_keeps_the_authorities_of_activators() {
    let api_server = start_with_ca();
    let mut replica = machine().loading();
    for event in observations(&api_server.objects, &[]) {
        let effects = replica.step(api_server.now, event);
        assert_eq!(effects.named_client_cas, None, "a part of the mappings is unknown");
    }
    let effects = replica.step(api_server.now, ControllerEvent::InitialListSynced);
    assert_eq!(effects.named_client_cas, Some(named(&["clients"])));
    let sent = table(&replica).client_cas;
    let expected = ClientCaEntry { name: name("clients"), material: None };
    assert_eq!(sent.into_values().collect::<Vec<_>>(), [expected]);
}

#[test]
fn a_domain_has_its_own_strict_transport_security() {
    let mut api_server = start();
    map_with(&mut api_server, json!({"rouse.dev/hsts": "max-age=31536000; includeSubDomains"}));
    let hsts = domain(&api_server).hsts.map(|it| it.to_string());
    assert_eq!(hsts.as_deref(), Some("max-age=31536000; includeSubDomains"));
    map_with(&mut api_server, json!({"rouse.dev/hsts": "includeSubDomains"}));
    assert_eq!(domain(&api_server).hsts, None, "stored without admission");
}
