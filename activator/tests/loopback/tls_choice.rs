//! Choice of the certificate at the gateway: by the keys that a client accepts, by names, and with strict SNI.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::net::SocketAddr;

use common::{
    fixtures::{
        self,
        certificates::{TestAuthority, TestCertificate},
    },
    wire::{GatewayHostEntry, NamespacedName},
};
use rustls::{
    AlertDescription,
    pki_types::{CertificateDer, pem::PemObject as _},
};

use crate::{
    harness::{ActivatorFixture, wait_until},
    tls_client::{client_config, leaf, open, presented, received_alert, set_default},
    tls_matrix::{HANDSHAKE_FAILURE, HandshakeReport, issue_rsa, parse_report, run_s_client},
};

/// Host of the certificates.
const HOST: &str = "shop.example";
/// Offers of OpenSSL's client that fit keys of one kind alone. Many clients of TLS 1.2 accept signatures of both kinds,
/// and have suites of one.
const RSA_OFFERS: [&[&str]; 3] = [
    &["-tls1_3", "-sigalgs", "rsa_pss_rsae_sha256"],
    &["-tls1_2", "-cipher", "ECDHE-RSA-AES128-GCM-SHA256"],
    &["-tls1_2", "-sigalgs", "rsa_pkcs1_sha256"],
];
const ECDSA_OFFERS: [&[&str]; 3] = [
    &["-tls1_3", "-sigalgs", "ecdsa_secp256r1_sha256"],
    &["-tls1_2", "-cipher", "ECDHE-ECDSA-AES128-GCM-SHA256"],
    &["-tls1_2", "-sigalgs", "ecdsa_secp256r1_sha256"],
];
/// Offers that fit keys of both kinds, and of none.
const EITHER_OFFER: &[&str] = &[];
const OTHER_OFFER: &[&str] = &["-sigalgs", "ed25519"];

/// Certificates of one host, with keys of two kinds.
struct CertificatePair {
    ecdsa: TestCertificate,
    rsa: TestCertificate,
}

impl CertificatePair {
    async fn issue() -> Self {
        Self { ecdsa: TestAuthority::new().issue(&[HOST]), rsa: issue_rsa(HOST).await }
    }

    /// Connects by each offer, and asserts that each gets a certificate that it fits.
    async fn check(&self, gateway: SocketAddr, either: &TestCertificate) {
        let of_rsa = RSA_OFFERS.map(|offer| (offer, &self.rsa));
        let of_ecdsa = ECDSA_OFFERS.map(|offer| (offer, &self.ecdsa));
        let all = of_rsa.into_iter().chain(of_ecdsa).chain([(EITHER_OFFER, either)]);
        for (offer, expected) in all {
            let output = run_s_client(gateway, HOST, offer).await;
            let shown = CertificateDer::from_pem_slice(output.as_bytes());
            assert!(shown.is_ok_and(|it| it == leaf(expected)), "{offer:?}: {output}");
            let report = parse_report(&output);
            assert!(matches!(report, HandshakeReport::Suite(_)), "{offer:?}: {output}");
        }
        let refused = parse_report(&run_s_client(gateway, HOST, OTHER_OFFER).await);
        assert_eq!(refused, HandshakeReport::Alert(HANDSHAKE_FAILURE));
    }
}

fn secret(name: &str) -> NamespacedName {
    NamespacedName::new("default", name)
}

/// Puts certificates in force, which no host names.
fn set_certificates(fixture: &mut ActivatorFixture, all: &[(&str, &TestCertificate)]) {
    fixture.apply_change(|table| {
        for (name, issued) in all {
            table.certificates.insert(secret(name), issued.entry(&secret(name)));
        }
    });
}

/// Names certificates for a host of the Gateway API, in this order.
fn set_listener(fixture: &mut ActivatorFixture, host: &str, names: &[&str]) {
    let certificates = names.iter().map(|name| secret(name)).collect();
    let host = fixtures::gateway_host(&format!("https://{host}"), Vec::new());
    let entry = GatewayHostEntry { certificates, ..host };
    fixture.apply_change(|table| drop(table.gateway_hosts.insert(entry.key.clone(), entry)));
}

#[tokio::test]
async fn clients_of_one_kind_of_key_get_the_certificate_of_the_installation_with_that_key() {
    let (mut fixture, pair) = (ActivatorFixture::new().await, CertificatePair::issue().await);
    let default = TestAuthority::new().issue(&["other.example"]);
    let all = [("default", &default), ("ecdsa", &pair.ecdsa), ("rsa", &pair.rsa)];
    set_certificates(&mut fixture, &all);
    for (order, either) in [(["ecdsa", "rsa"], &pair.ecdsa), (["rsa", "ecdsa"], &pair.rsa)] {
        fixture.apply_change(|table| {
            let shared = ["default", order[0], order[1]].map(secret);
            table.settings.edge.certificates = shared.into();
        });
        pair.check(fixture.outside_tls, either).await;
    }
}

#[tokio::test]
async fn clients_of_one_kind_of_key_get_the_certificate_of_a_listener_with_that_key() {
    let (mut fixture, pair) = (ActivatorFixture::new().await, CertificatePair::issue().await);
    set_certificates(&mut fixture, &[("ecdsa", &pair.ecdsa), ("rsa", &pair.rsa)]);
    set_listener(&mut fixture, "*.example", &["ecdsa", "rsa"]);
    pair.check(fixture.outside_tls, &pair.ecdsa).await;
}

#[tokio::test]
async fn each_host_of_a_listener_gets_the_certificate_that_names_it() {
    let (mut fixture, authority) = (ActivatorFixture::new().await, TestAuthority::new());
    let [first, wildcard, exact] =
        [["a.example"], ["*.example"], ["b.example"]].map(|names| authority.issue(&names));
    let all = [("first", &first), ("wildcard", &wildcard), ("exact", &exact)];
    set_certificates(&mut fixture, &all);
    set_listener(&mut fixture, "*", &["absent", "first", "wildcard", "exact"]);
    for (host, expected) in [
        ("a.example", &first),
        ("b.example", &exact),
        ("c.example", &wildcard),
        ("d.c.example", &first),
    ] {
        let client = open(fixture.outside_tls, client_config(&[]), host).await.unwrap();
        assert!(presented(&client) == leaf(expected), "{host}");
    }
}

#[tokio::test]
async fn with_strict_sni_the_default_certificate_is_for_the_hosts_that_it_names() {
    let (mut fixture, authority) = (ActivatorFixture::new().await, TestAuthority::new());
    let (default, own) = (authority.issue(&[HOST]), authority.issue(&["elsewhere.example"]));
    set_default(&mut fixture, &default);
    set_certificates(&mut fixture, &[("own", &own)]);
    set_listener(&mut fixture, "*.listener.example", &["own"]);
    let mut nameless = client_config(&[]);
    nameless.enable_sni = false;
    let clients = [
        (client_config(&[]), "unknown.example"),
        (client_config(&[]), "127.0.0.1"),
        (nameless, HOST),
    ];
    for is_sni_strict in [true, false] {
        fixture.apply_change(|table| table.settings.edge.is_sni_strict = is_sni_strict);
        for (name, expected) in [(HOST, &default), ("a.listener.example", &own)] {
            let client = open(fixture.outside_tls, client_config(&[]), name).await.unwrap();
            assert!(presented(&client) == leaf(expected), "{name}, strict: {is_sni_strict}");
        }
        for (config, name) in clients.clone() {
            let has_sni = config.enable_sni;
            match open(fixture.outside_tls, config, name).await {
                Ok(client) => {
                    let is_default = presented(&client) == leaf(&default);
                    assert!(is_default && !is_sni_strict, "{name}, SNI: {has_sni}");
                }
                Err(error) => {
                    let unrecognized = Some(AlertDescription::UnrecognisedName);
                    assert_eq!(received_alert(&error), unrecognized, "{name}, SNI: {has_sni}");
                    assert!(is_sni_strict, "{name}, SNI: {has_sni}");
                }
            }
        }
    }
    let refused = "rouse_activator_tls_handshakes_total{result=\"no_certificate\"}";
    wait_until(|| fixture.metric(refused) == 3.0).await;
}
