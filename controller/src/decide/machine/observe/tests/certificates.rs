//! Certificates of hosts: Secrets that are named, certificates that activators get, and the conditions of domains.

use std::{num::NonZeroU16, sync::Arc};

use common::{
    certificates::load,
    fixtures::{TestAuthority, TestCertificate},
    wire::CertificateEntry,
};

use super::*;
use crate::{
    decide::machine::{CertificateCounts, certificates::CERTIFICATE_TIMER_KEY},
    model::cluster_state::SecretRead,
};

const DOMAIN: &str = "www.shop.test";
/// Time of the model of the API server, in seconds since 1970.
const NOW_S: i64 = 1_000_000;
const HOUR_S: i64 = 3600;
const KEPT: &str = " The certificate from before stays in force.";
const PROVIDED: &str =
    "True CertificateExternallyProvided: TLS certificate was provided externally";

/// Returns a model with the service `hello` and a claim of the domain.
fn start() -> FakeApiServer {
    let mut api_server = FakeApiServer::new();
    assert_eq!(api_server.now.seconds(), NOW_S);
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.claim_domain(DOMAIN, NAMESPACE);
    api_server
}

/// Maps a domain to `hello`, with the certificate of a Secret.
fn map_with_tls(api_server: &mut FakeApiServer, domain: &str, secret: &str) {
    let to = json!({"apiVersion": "serving.knative.dev/v1", "kind": "Service", "name": "hello"});
    let spec = json!({"ref": to, "tls": {"secretName": secret}});
    api_server.apply_as_user(ResourceKind::DomainMapping, domain, spec);
}

/// Returns a model with the domain mapped and a certificate of Secret `shop` in force, and the certificate.
fn start_with_certificate() -> (FakeApiServer, TestCertificate) {
    let mut api_server = start();
    map_with_tls(&mut api_server, DOMAIN, "shop");
    let certificate = valid(&[DOMAIN]);
    api_server.read_secret(&name("shop"), usable(&certificate));
    assert_eq!(provisioned(&api_server), PROVIDED);
    (api_server, certificate)
}

/// Issues a certificate that is valid now, and for two hours.
fn valid(hosts: &[&str]) -> TestCertificate {
    TestAuthority::new().issue_valid(hosts, 0, NOW_S + 2 * HOUR_S)
}

fn usable(certificate: &TestCertificate) -> SecretRead {
    let material = certificate.material();
    let facts = load(&material).expect("it is usable").facts;
    SecretRead::Usable { material: Arc::new(material), facts }
}

fn provisioned(api_server: &FakeApiServer) -> String {
    api_server.condition(ResourceKind::DomainMapping, DOMAIN, "CertificateProvisioned")
}

fn failed(message: &str) -> String {
    format!("False CertificateProvisionFailed: {message}")
}

/// Returns the entry of a Secret in the RouteTable.
fn entry(api_server: &FakeApiServer, secret: &NamespacedName) -> Option<CertificateEntry> {
    api_server.table().certificates.get(secret).cloned()
}

/// Returns the Secrets that serve the domains of `hello`, by domain.
fn served(api_server: &FakeApiServer) -> Vec<(String, Option<NamespacedName>)> {
    let services = api_server.table().services;
    let rules = services[&name("hello")].gateway_rules.clone().unwrap_or_default();
    rules.mapped_domains.into_iter().map(|it| (it.host, it.certificate)).collect()
}

fn served_by(secret: &str) -> Vec<(String, Option<NamespacedName>)> {
    vec![(DOMAIN.to_owned(), Some(name(secret)))]
}

fn served_by_none() -> Vec<(String, Option<NamespacedName>)> {
    vec![(DOMAIN.to_owned(), None)]
}

fn named(secrets: &[&str]) -> BTreeSet<NamespacedName> {
    secrets.iter().map(|it| name(it)).collect()
}

/// Lets time pass until a second since 1970, and fires the timers.
fn advance_to(api_server: &mut FakeApiServer, seconds: i64) {
    api_server.now = UnixMillis::from_seconds(seconds);
    api_server.step(ControllerEvent::Tick);
}

#[test]
fn a_domain_without_tls_needs_no_certificate() {
    let mut api_server = start();
    api_server.map_domain(DOMAIN, "Service", "hello");
    let expected = "True TLSNotEnabled: external-domain-tls is not enabled";
    assert_eq!(provisioned(&api_server), expected);
    assert_eq!(api_server.condition(ResourceKind::DomainMapping, DOMAIN, "Ready"), "True : ");
    assert_eq!(served(&api_server), served_by_none());
    assert_eq!(api_server.named_secrets, named(&[]));
}

#[test]
fn a_domain_whose_secret_was_not_read_is_not_ready_and_is_served() {
    let mut api_server = start();
    map_with_tls(&mut api_server, DOMAIN, "shop");
    let expected = "Unknown CertificateNotReady: Certificate shop is not ready.";
    assert_eq!(provisioned(&api_server), expected);
    assert_eq!(api_server.condition(ResourceKind::DomainMapping, DOMAIN, "Ready"), expected);
    assert_eq!(served(&api_server), served_by("shop"));
    assert_eq!(api_server.named_secrets, named(&["shop"]));
    let expected = CertificateEntry { name: name("shop"), material: None };
    assert_eq!(entry(&api_server, &name("shop")), Some(expected));
}

#[test]
fn a_secret_that_cannot_be_read_is_reported_with_the_error() {
    let mut api_server = start();
    map_with_tls(&mut api_server, DOMAIN, "shop");
    api_server.read_secret(&name("shop"), SecretRead::Unreadable("forbidden".into()));
    let expected =
        "Unknown CertificateNotReady: Secret \"shop\" cannot be read: forbidden.".to_owned();
    assert_eq!(provisioned(&api_server), expected);
    // Another Secret that cannot be read leaves the former one in force.
    api_server.read_secret(&name("shop"), usable(&valid(&[DOMAIN])));
    map_with_tls(&mut api_server, DOMAIN, "next");
    api_server.read_secret(&name("next"), SecretRead::Unreadable("forbidden".into()));
    assert_eq!(provisioned(&api_server), expected.replace("shop", "next") + KEPT);
    // An error after a result says nothing new.
    map_with_tls(&mut api_server, DOMAIN, "shop");
    api_server.read_secret(&name("shop"), SecretRead::Unreadable("forbidden".into()));
    assert_eq!(provisioned(&api_server), PROVIDED);
}

#[test]
fn a_secret_that_does_not_exist_is_reported() {
    let mut api_server = start();
    map_with_tls(&mut api_server, DOMAIN, "shop");
    api_server.read_secret(&name("shop"), SecretRead::Absent);
    assert_eq!(provisioned(&api_server), failed("Secret \"shop\" does not exist."));
    let (mut api_server, certificate) = start_with_certificate();
    api_server.read_secret(&name("shop"), SecretRead::Absent);
    assert_eq!(provisioned(&api_server), failed("Secret \"shop\" does not exist.") + KEPT);
    let kept = entry(&api_server, &name("shop"));
    assert_eq!(kept, Some(certificate.entry(&name("shop"))));
}

#[test]
fn a_secret_that_cannot_be_used_is_reported_with_the_fault() {
    let mut api_server = start();
    map_with_tls(&mut api_server, DOMAIN, "shop");
    let fault = || SecretRead::Faulty("it has no tls.crt".into());
    api_server.read_secret(&name("shop"), fault());
    let expected = failed("Secret \"shop\" cannot be used: it has no tls.crt.");
    assert_eq!(provisioned(&api_server), expected);
    let (mut api_server, certificate) = start_with_certificate();
    api_server.read_secret(&name("shop"), fault());
    assert_eq!(provisioned(&api_server), expected + KEPT);
    let kept = entry(&api_server, &name("shop"));
    assert_eq!(kept, Some(certificate.entry(&name("shop"))));
    api_server.read_secret(&name("shop"), usable(&certificate));
    assert_eq!(provisioned(&api_server), PROVIDED, "the fault is gone");
}

/// The API server may hold mappings that were stored without admission.
#[test]
fn a_name_that_no_secret_has_is_reported_and_not_sent() {
    let mut api_server = start();
    map_with_tls(&mut api_server, DOMAIN, "a:80");
    let expected = "Secret \"a:80\" cannot be used: its name is no DNS subdomain.";
    assert_eq!(provisioned(&api_server), failed(expected));
    assert_eq!(served(&api_server), served_by_none());
    assert_eq!(api_server.named_secrets, named(&[]));
}

#[test]
fn a_secret_with_a_long_name_is_named() {
    let mut api_server = start();
    let long = "s".repeat(64);
    map_with_tls(&mut api_server, DOMAIN, &long);
    assert_eq!(api_server.named_secrets, named(&[long.as_str()]));
    api_server.read_secret(&name(&long), usable(&valid(&[DOMAIN])));
    assert_eq!(provisioned(&api_server), PROVIDED);
    assert_eq!(served(&api_server), served_by(&long));
}

#[test]
fn an_expired_certificate_is_served_and_reported() {
    let mut api_server = start();
    map_with_tls(&mut api_server, DOMAIN, "shop");
    let expired = TestAuthority::new().issue_valid(&[DOMAIN], 0, NOW_S - HOUR_S);
    api_server.read_secret(&name("shop"), usable(&expired));
    let message = "The certificate of Secret \"shop\" has expired at 1970-01-12T12:46:40Z.";
    assert_eq!(provisioned(&api_server), failed(message));
    assert_eq!(entry(&api_server, &name("shop")), Some(expired.entry(&name("shop"))));
}

#[test]
fn a_certificate_that_is_not_valid_yet_is_served_and_reported_until_its_time() {
    let mut api_server = start();
    map_with_tls(&mut api_server, DOMAIN, "shop");
    let early = TestAuthority::new().issue_valid(&[DOMAIN], NOW_S + HOUR_S, NOW_S + 2 * HOUR_S);
    api_server.read_secret(&name("shop"), usable(&early));
    let message = "The certificate of Secret \"shop\" is not valid before 1970-01-12T14:46:40Z.";
    assert_eq!(provisioned(&api_server), failed(message));
    assert_eq!(entry(&api_server, &name("shop")), Some(early.entry(&name("shop"))));
    advance_to(&mut api_server, NOW_S + HOUR_S);
    assert_eq!(provisioned(&api_server), PROVIDED);
}

#[test]
fn a_certificate_for_other_hosts_is_served_and_reported() {
    let mut api_server = start();
    map_with_tls(&mut api_server, DOMAIN, "shop");
    let other = valid(&["api.shop.test"]);
    api_server.read_secret(&name("shop"), usable(&other));
    let message =
        "The certificate of Secret \"shop\" is for api.shop.test, and not for www.shop.test.";
    assert_eq!(provisioned(&api_server), failed(message));
    assert_eq!(entry(&api_server, &name("shop")), Some(other.entry(&name("shop"))));
}

#[test]
fn a_certificate_for_the_host_makes_its_domain_ready() {
    let mut api_server = start();
    map_with_tls(&mut api_server, DOMAIN, "shop");
    let wildcard = valid(&["*.shop.test"]);
    api_server.read_secret(&name("shop"), usable(&wildcard));
    assert_eq!(provisioned(&api_server), PROVIDED);
    assert_eq!(api_server.condition(ResourceKind::DomainMapping, DOMAIN, "Ready"), "True : ");
    assert_eq!(entry(&api_server, &name("shop")), Some(wildcard.entry(&name("shop"))));
}

#[test]
fn a_renewed_certificate_replaces_the_one_before() {
    let (mut api_server, first) = start_with_certificate();
    let second = valid(&[DOMAIN]);
    assert_ne!(first.entry(&name("shop")), second.entry(&name("shop")));
    api_server.read_secret(&name("shop"), usable(&second));
    assert_eq!(entry(&api_server, &name("shop")), Some(second.entry(&name("shop"))));
}

/// The reader reports an unchanged Secret once, so the certificate of an early renewal must not be lost.
#[test]
fn a_renewed_certificate_that_comes_early_is_in_force_at_its_time() {
    let (mut api_server, first) = start_with_certificate();
    let second = TestAuthority::new().issue_valid(&[DOMAIN], NOW_S + HOUR_S, NOW_S + 9 * HOUR_S);
    api_server.read_secret(&name("shop"), usable(&second));
    let fault = "its certificate is not valid before 1970-01-12T14:46:40Z";
    let message = format!("Secret \"shop\" cannot be used: {fault}.{KEPT}");
    assert_eq!(provisioned(&api_server), failed(&message));
    assert_eq!(entry(&api_server, &name("shop")), Some(first.entry(&name("shop"))));
    advance_to(&mut api_server, NOW_S + HOUR_S - 1);
    assert_eq!(entry(&api_server, &name("shop")), Some(first.entry(&name("shop"))));
    advance_to(&mut api_server, NOW_S + HOUR_S);
    assert_eq!(entry(&api_server, &name("shop")), Some(second.entry(&name("shop"))));
    assert_eq!(provisioned(&api_server), PROVIDED);
}

#[test]
fn a_replica_that_starts_keeps_certificates_of_activators() {
    let (api_server, certificate) = start_with_certificate();
    let mut replica = machine().loading();
    for event in observations(&api_server.objects, &[]) {
        let effects = replica.step(api_server.now, event);
        assert_eq!(effects.named_secrets, None, "a part of the mappings is unknown");
    }
    let effects = replica.step(api_server.now, ControllerEvent::InitialListSynced);
    assert_eq!(effects.named_secrets, Some(named(&["shop"])));
    let empty = CertificateEntry { name: name("shop"), material: None };
    assert_eq!(table(&replica).certificates.values().collect::<Vec<_>>(), [&empty]);
    let read = ControllerEvent::SecretRead { name: name("shop"), read: usable(&certificate) };
    replica.step(api_server.now, read);
    assert_eq!(table(&replica).certificates, api_server.table().certificates);
    assert_eq!(differences(&table(&replica), &api_server.table()), [""; 0]);
}

#[test]
fn a_replica_without_named_secrets_says_so_when_it_has_started() {
    let mut replica = machine().loading();
    let effects = replica.step(UnixMillis(1_000_000_000), ControllerEvent::InitialListSynced);
    assert_eq!(effects.named_secrets, Some(BTreeSet::new()));
    let effects = replica.step(UnixMillis(1_000_000_000), ControllerEvent::Tick);
    assert_eq!(effects.named_secrets, None);
}

#[test]
fn a_mapping_moved_to_a_broken_secret_keeps_its_certificate() {
    let (mut api_server, _) = start_with_certificate();
    map_with_tls(&mut api_server, DOMAIN, "next");
    let pending = "Unknown CertificateNotReady: Certificate next is not ready.";
    assert_eq!(provisioned(&api_server), pending);
    assert_eq!(served(&api_server), served_by("shop"));
    assert_eq!(api_server.named_secrets, named(&["next", "shop"]));
    api_server.read_secret(&name("next"), SecretRead::Faulty("it has no tls.key".into()));
    let expected = failed("Secret \"next\" cannot be used: it has no tls.key.") + KEPT;
    assert_eq!(provisioned(&api_server), expected);
    assert_eq!(served(&api_server), served_by("shop"));
    // The former Secret is renewed as long as it serves the domain.
    let renewed = valid(&[DOMAIN]);
    api_server.read_secret(&name("shop"), usable(&renewed));
    assert_eq!(entry(&api_server, &name("shop")), Some(renewed.entry(&name("shop"))));
    let next = valid(&[DOMAIN]);
    api_server.read_secret(&name("next"), usable(&next));
    assert_eq!(
        (provisioned(&api_server), served(&api_server)),
        (PROVIDED.into(), served_by("next"))
    );
    assert_eq!(api_server.named_secrets, named(&["next"]));
    assert_eq!(api_server.table().certificates.len(), 1);
    assert_eq!(entry(&api_server, &name("next")), Some(next.entry(&name("next"))));
}

#[test]
fn a_mapping_moved_to_a_certificate_that_is_not_valid_keeps_its_own_as_long_as_that_is() {
    let (mut api_server, _) = start_with_certificate();
    let issue = |from_s, to_s| usable(&TestAuthority::new().issue_valid(&[DOMAIN], from_s, to_s));
    map_with_tls(&mut api_server, DOMAIN, "early");
    api_server.read_secret(&name("early"), issue(NOW_S + HOUR_S, NOW_S + 9 * HOUR_S));
    let message = "The certificate of Secret \"early\" is not valid before 1970-01-12T14:46:40Z.";
    assert_eq!(provisioned(&api_server), failed(message) + KEPT);
    assert_eq!(served(&api_server), served_by("shop"));
    assert_eq!(api_server.named_secrets, named(&["early", "shop"]));
    advance_to(&mut api_server, NOW_S + HOUR_S);
    assert_eq!(provisioned(&api_server), PROVIDED);
    assert_eq!(served(&api_server), served_by("early"));
    assert_eq!(api_server.named_secrets, named(&["early"]));

    map_with_tls(&mut api_server, DOMAIN, "expired");
    api_server.read_secret(&name("expired"), issue(0, NOW_S - HOUR_S));
    let expired =
        failed("The certificate of Secret \"expired\" has expired at 1970-01-12T12:46:40Z.");
    assert_eq!(provisioned(&api_server), expired.clone() + KEPT);
    assert_eq!(served(&api_server), served_by("early"));
    // Of two that are not valid, the named one is served.
    advance_to(&mut api_server, NOW_S + 9 * HOUR_S + 1);
    assert_eq!(provisioned(&api_server), expired);
    assert_eq!(served(&api_server), served_by("expired"));
    assert_eq!(api_server.named_secrets, named(&["expired"]));
}

#[test]
fn a_certificate_expires_at_its_timer() {
    let (mut api_server, certificate) = start_with_certificate();
    let end = NOW_S + 2 * HOUR_S;
    advance_to(&mut api_server, end);
    assert_eq!(provisioned(&api_server), PROVIDED, "the last second is valid");
    advance_to(&mut api_server, end + 1);
    let message = "The certificate of Secret \"shop\" has expired at 1970-01-12T15:46:40Z.";
    assert_eq!(provisioned(&api_server), failed(message));
    assert_eq!(entry(&api_server, &name("shop")), Some(certificate.entry(&name("shop"))));
    let timers = &api_server.machine.timers;
    assert!(!timers.is_set(&CERTIFICATE_TIMER_KEY), "time alone changes nothing more");
}

#[test]
fn two_mappings_share_a_secret() {
    let other = "api.shop.test";
    let mut api_server = start();
    api_server.claim_domain(other, NAMESPACE);
    map_with_tls(&mut api_server, DOMAIN, "shop");
    map_with_tls(&mut api_server, other, "shop");
    let certificate = valid(&[DOMAIN, other]);
    api_server.read_secret(&name("shop"), usable(&certificate));
    let other_provisioned =
        api_server.condition(ResourceKind::DomainMapping, other, "CertificateProvisioned");
    assert_eq!((provisioned(&api_server), other_provisioned), (PROVIDED.into(), PROVIDED.into()));
    let shop = Some(name("shop"));
    let expected = vec![(other.to_owned(), shop.clone()), (DOMAIN.to_owned(), shop)];
    assert_eq!(served(&api_server), expected);
    assert_eq!(api_server.table().certificates.len(), 1);
    api_server.delete_as_user(ResourceKind::DomainMapping, other);
    assert_eq!(entry(&api_server, &name("shop")), Some(certificate.entry(&name("shop"))));
    api_server.delete_as_user(ResourceKind::DomainMapping, DOMAIN);
    assert_eq!((entry(&api_server, &name("shop")), &api_server.named_secrets), (None, &named(&[])));
}

#[test]
fn a_secret_no_longer_named_leaves_the_table() {
    let (mut api_server, certificate) = start_with_certificate();
    // The mapping stays, without TLS.
    api_server.map_domain(DOMAIN, "Service", "hello");
    assert_eq!(served(&api_server), served_by_none());
    assert_eq!((entry(&api_server, &name("shop")), &api_server.named_secrets), (None, &named(&[])));
    assert_eq!(api_server.certificate_counts, CertificateCounts::default());
    // A read that was on its way.
    api_server.read_secret(&name("shop"), usable(&certificate));
    assert_eq!(entry(&api_server, &name("shop")), None);
}

/// The reader may see only the last set, and reports an unchanged Secret once.
#[test]
fn a_mapping_that_is_made_again_soon_has_its_certificate() {
    let (mut api_server, _) = start_with_certificate();
    api_server.delete_as_user(ResourceKind::DomainMapping, DOMAIN);
    let renewed = valid(&[DOMAIN]);
    api_server.read_secret(&name("shop"), usable(&renewed));
    map_with_tls(&mut api_server, DOMAIN, "shop");
    assert_eq!(entry(&api_server, &name("shop")), Some(renewed.entry(&name("shop"))));
    assert_eq!(provisioned(&api_server), PROVIDED);
    api_server.delete_as_user(ResourceKind::DomainMapping, DOMAIN);
    advance_to(&mut api_server, NOW_S + 60);
    assert!(api_server.machine.unnamed_certificates.is_empty(), "keys are not kept for longer");
    map_with_tls(&mut api_server, DOMAIN, "shop");
    let empty = CertificateEntry { name: name("shop"), material: None };
    assert_eq!(entry(&api_server, &name("shop")), Some(empty));
}

/// A DomainMapping that is being deleted may wait for its finalizers for long, and serves its domain meanwhile.
#[test]
fn a_mapping_that_is_being_deleted_keeps_its_certificate() {
    let (mut api_server, certificate) = start_with_certificate();
    let mut object = api_server.object(ResourceKind::DomainMapping, DOMAIN).clone();
    object["metadata"]["deletionTimestamp"] = "1970-01-12T13:46:40Z".into();
    api_server.objects.insert((ResourceKind::DomainMapping, name(DOMAIN)), object.clone());
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::DomainMapping,
        name: name(DOMAIN),
        object: Some(Box::new(object)),
    });
    assert_eq!(served(&api_server), served_by("shop"));
    assert_eq!(entry(&api_server, &name("shop")), Some(certificate.entry(&name("shop"))));
    assert_eq!(api_server.named_secrets, named(&["shop"]));
    api_server.delete_as_user(ResourceKind::DomainMapping, DOMAIN);
    assert_eq!((entry(&api_server, &name("shop")), &api_server.named_secrets), (None, &named(&[])));
}

#[test]
fn certificates_of_the_installation_are_named_and_listed_in_order() {
    let mut api_server = start();
    let system = |secret: &str| NamespacedName::new("knative-serving", secret);
    let data =
        json!({"rouse.dev.certificates": "shop, default-tls", "rouse.dev.https-port": "8443"});
    api_server.set_config_map("config-network", data);
    let both = BTreeSet::from([system("default-tls"), system("shop")]);
    assert_eq!(api_server.named_secrets, both);
    let edge = api_server.table().settings.edge;
    assert_eq!(edge.certificates, [system("shop"), system("default-tls")]);
    assert_eq!(edge.https_port, NonZeroU16::new(8443));
    // A mapping of another namespace names another Secret.
    map_with_tls(&mut api_server, DOMAIN, "shop");
    let certificate = valid(&["*.example.com"]);
    api_server.read_secret(&system("shop"), usable(&certificate));
    assert_eq!(entry(&api_server, &system("shop")), Some(certificate.entry(&system("shop"))));
    let empty = CertificateEntry { name: name("shop"), material: None };
    assert_eq!(entry(&api_server, &name("shop")), Some(empty));
    api_server.set_config_map("config-network", json!({}));
    assert_eq!(api_server.named_secrets, named(&["shop"]));
    assert_eq!(entry(&api_server, &system("shop")), None);
    assert_eq!(api_server.table().settings.edge.certificates, []);
}

#[test]
fn each_named_secret_is_counted_by_its_state() {
    let mut api_server = start();
    let secrets = ["in-force", "kept", "unusable", "absent", "unreadable", "pending"];
    for (at, secret) in secrets.iter().enumerate() {
        map_with_tls(&mut api_server, &format!("{at}.shop.test"), secret);
    }
    let all_pending = CertificateCounts { pending: 6, ..CertificateCounts::default() };
    assert_eq!(api_server.certificate_counts, all_pending);
    let certificate = valid(&["*.shop.test"]);
    for (secret, read) in [
        ("in-force", usable(&certificate)),
        ("kept", usable(&certificate)),
        ("kept", SecretRead::Absent),
        ("unusable", SecretRead::Faulty("it has no tls.crt".into())),
        ("absent", SecretRead::Absent),
        ("unreadable", SecretRead::Unreadable("forbidden".into())),
    ] {
        api_server.read_secret(&name(secret), read);
    }
    let expected = CertificateCounts {
        pending: 1,
        in_force: 1,
        kept: 1,
        unusable: 1,
        absent: 1,
        unreadable: 1,
    };
    assert_eq!(api_server.certificate_counts, expected);
}

/// Each step compares the other entries, but keys and chains are in no debug output.
#[test]
fn all_replicas_send_the_same_table() {
    let same = |api_server: &FakeApiServer| {
        let other = table(api_server.other_replica.as_ref().expect("another replica"));
        let table = api_server.table();
        assert_eq!((&other.certificates, &other.settings), (&table.certificates, &table.settings));
        assert_eq!(differences(&other, &table), [""; 0]);
        table.certificates.len()
    };
    let (mut api_server, _) = start_with_certificate();
    assert_eq!(same(&api_server), 1);
    api_server.read_secret(&name("shop"), usable(&valid(&[DOMAIN])));
    assert_eq!(same(&api_server), 1);
    api_server.read_secret(&name("shop"), SecretRead::Absent);
    map_with_tls(&mut api_server, DOMAIN, "next");
    assert_eq!(same(&api_server), 2);
    api_server.set_config_map("config-network", json!({"rouse.dev.certificates": "default-tls"}));
    assert_eq!(same(&api_server), 3);
    api_server.read_secret(&name("next"), usable(&valid(&[DOMAIN])));
    assert_eq!(same(&api_server), 2);
    // A new leader continues with what it has.
    api_server.step(ControllerEvent::LeadershipChanged(false));
    api_server.step(ControllerEvent::LeadershipChanged(true));
    assert_eq!(same(&api_server), 2);
}
