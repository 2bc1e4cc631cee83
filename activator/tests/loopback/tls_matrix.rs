//! Versions, cipher suites and groups of TLS at the gateway, as OpenSSL's client negotiates them. Each offer is made
//! alone, with each kind of key and under each setting of operators.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{ffi::OsStr, net::SocketAddr, process::Stdio};

use common::{
    fixtures::certificates::{TestAuthority, TestCertificate},
    wire::{TlsCipher, TlsMinVersion, TlsSettings},
};
use futures::{StreamExt as _, stream};
use tokio::process::Command;

use crate::{
    harness::ActivatorFixture,
    tls_client::{HOST, set_default},
};

/// Alert `handshake_failure` (RFC 8446 §6.2): version and suites have nothing in common with the settings.
pub(crate) const HANDSHAKE_FAILURE: u8 = 40;
/// Alert `protocol_version` (RFC 8446 §6.2): the version is not accepted.
const PROTOCOL_VERSION: u8 = 70;
/// Number of clients at a time.
const CLIENTS: usize = 4;
/// Suites of TLS 1.2 that no setting accepts: without forward secrecy, without authentication, with CBC, with short
/// tags, or without encryption.
const REFUSED_SUITES: [&str; 24] = [
    "DHE-RSA-AES256-GCM-SHA384",
    "DHE-RSA-CHACHA20-POLY1305",
    "DHE-DSS-AES128-GCM-SHA256",
    "ADH-AES256-GCM-SHA384",
    "ECDHE-ECDSA-AES256-SHA384",
    "ECDHE-ECDSA-AES128-SHA",
    "ECDHE-RSA-AES256-SHA384",
    "ECDHE-RSA-AES128-SHA256",
    "ECDHE-RSA-AES128-SHA",
    "DHE-RSA-AES256-SHA256",
    "DHE-RSA-AES128-SHA",
    "AECDH-AES256-SHA",
    "ADH-AES128-SHA",
    "AES256-GCM-SHA384",
    "AES128-GCM-SHA256",
    "AES256-SHA256",
    "AES128-SHA",
    "ECDHE-ECDSA-AES256-CCM8",
    "ECDHE-ECDSA-AES128-CCM",
    "AES128-CCM",
    "ECDHE-RSA-NULL-SHA",
    "AECDH-NULL-SHA",
    "NULL-SHA256",
    "NULL-MD5",
];

/// Kind of the key in the gateway's certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyKind {
    Ecdsa,
    Rsa,
}

/// Offer of a client: one version, and one suite or group.
#[derive(Clone, Debug)]
struct Offer {
    arguments: Vec<String>,
    /// Suite of the offer, if a setting may accept it. `None`: no setting does.
    cipher: Option<TlsCipher>,
    is_tls13: bool,
    /// True if the version itself is too old for each setting.
    is_old: bool,
}

/// Result of a handshake, as OpenSSL's client reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HandshakeReport {
    /// Name of the suite that was negotiated, as OpenSSL writes it.
    Suite(String),
    /// Number of the alert that the gateway has sent.
    Alert(u8),
    /// Output of a client with neither of them.
    Other(String),
}

/// Name of a suite as OpenSSL's options write it.
fn openssl_name(cipher: TlsCipher) -> &'static str {
    match cipher {
        TlsCipher::Aes256GcmSha384
        | TlsCipher::Aes128GcmSha256
        | TlsCipher::Chacha20Poly1305Sha256 => cipher.name(),
        TlsCipher::EcdheEcdsaAes256GcmSha384 => "ECDHE-ECDSA-AES256-GCM-SHA384",
        TlsCipher::EcdheEcdsaAes128GcmSha256 => "ECDHE-ECDSA-AES128-GCM-SHA256",
        TlsCipher::EcdheEcdsaChacha20Poly1305Sha256 => "ECDHE-ECDSA-CHACHA20-POLY1305",
        TlsCipher::EcdheRsaAes256GcmSha384 => "ECDHE-RSA-AES256-GCM-SHA384",
        TlsCipher::EcdheRsaAes128GcmSha256 => "ECDHE-RSA-AES128-GCM-SHA256",
        TlsCipher::EcdheRsaChacha20Poly1305Sha256 => "ECDHE-RSA-CHACHA20-POLY1305",
    }
}

/// Returns true if a key of this kind can sign in handshakes with this suite. Suites of TLS 1.3 name no key.
fn fits_key(cipher: TlsCipher, key: KeyKind) -> bool {
    let name = cipher.name();
    cipher.is_of_tls13()
        || match key {
            KeyKind::Ecdsa => name.contains("_ECDSA_"),
            KeyKind::Rsa => name.contains("_RSA_"),
        }
}

/// Offer of TLS 1.2 with one suite. Security level 0 lets the client offer everything that it knows.
fn old_offer(suite: &str, cipher: Option<TlsCipher>) -> Offer {
    let arguments = ["-tls1_2", "-cipher", &format!("{suite}:@SECLEVEL=0")].map(str::to_owned);
    Offer { arguments: arguments.to_vec(), cipher, is_tls13: false, is_old: false }
}

/// Offers of one suite each: those that a setting may accept, and those that none does.
fn suite_offers() -> Vec<Offer> {
    let known = TlsCipher::ALL.into_iter().map(|cipher| match cipher.is_of_tls13() {
        false => old_offer(openssl_name(cipher), Some(cipher)),
        true => Offer {
            arguments: ["-tls1_3", "-ciphersuites", cipher.name()].map(str::to_owned).to_vec(),
            cipher: Some(cipher),
            is_tls13: true,
            is_old: false,
        },
    });
    let refused = REFUSED_SUITES.into_iter().map(|suite| old_offer(suite, None));
    let ccm = ["TLS_AES_128_CCM_SHA256", "TLS_AES_128_CCM_8_SHA256"].map(|suite| Offer {
        arguments: ["-tls1_3", "-ciphersuites", suite].map(str::to_owned).to_vec(),
        cipher: None,
        is_tls13: true,
        is_old: false,
    });
    let old = ["-tls1", "-tls1_1"].map(|version| Offer {
        arguments: [version, "-cipher", "ALL:@SECLEVEL=0"].map(str::to_owned).to_vec(),
        cipher: None,
        is_tls13: false,
        is_old: true,
    });
    known.chain(refused).chain(ccm).chain(old).collect()
}

/// Settings of the matrix.
fn settings() -> Vec<TlsSettings> {
    let chosen =
        |min_version, ciphers: &[TlsCipher]| TlsSettings { min_version, ciphers: ciphers.to_vec() };
    vec![
        TlsSettings::default(),
        chosen(TlsMinVersion::Tls13, &[]),
        chosen(
            TlsMinVersion::Tls12,
            &[
                TlsCipher::Aes128GcmSha256,
                TlsCipher::EcdheEcdsaChacha20Poly1305Sha256,
                TlsCipher::EcdheRsaAes256GcmSha384,
            ],
        ),
        chosen(
            TlsMinVersion::Tls12,
            &[TlsCipher::EcdheEcdsaAes128GcmSha256, TlsCipher::EcdheRsaAes128GcmSha256],
        ),
        chosen(TlsMinVersion::Tls13, &[TlsCipher::Chacha20Poly1305Sha256]),
    ]
}

/// Connects as OpenSSL's client does.
async fn connect(gateway: SocketAddr, arguments: &[String]) -> HandshakeReport {
    parse_report(&run_s_client(gateway, HOST, arguments).await)
}

/// Runs OpenSSL's client for one handshake, and returns all that it prints.
pub(crate) async fn run_s_client(
    gateway: SocketAddr,
    host: &str,
    arguments: &[impl AsRef<OsStr>],
) -> String {
    let mut command = Command::new("openssl");
    command.args(["s_client", "-connect", &gateway.to_string(), "-servername", host]);
    // Without input the client ends behind the handshake.
    let output = command.args(arguments).stdin(Stdio::null()).output().await.unwrap();
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

pub(crate) fn parse_report(text: &str) -> HandshakeReport {
    let behind = |mark: &str| text.split_once(mark).map(|(_, behind)| behind);
    let alert = behind("alert number ")
        .and_then(|it| it.split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok());
    let suite = behind(", Cipher is ").and_then(|it| it.lines().next()).map(str::trim);
    match (alert, suite) {
        (Some(alert), _) => HandshakeReport::Alert(alert),
        (None, Some(suite)) if suite != "(NONE)" => HandshakeReport::Suite(suite.to_owned()),
        (None, _) => HandshakeReport::Other(text.to_owned()),
    }
}

/// Checks the report of one offer against the settings.
fn check(
    offer: &Offer,
    key: KeyKind,
    settings: &TlsSettings,
    report: &HandshakeReport,
) -> Result<(), String> {
    let is_version_accepted =
        !offer.is_old && (offer.is_tls13 || settings.min_version == TlsMinVersion::Tls12);
    let accepted = offer.cipher.filter(|cipher| {
        is_version_accepted && settings.accepts(*cipher) && fits_key(*cipher, key)
    });
    let is_as_expected = match (accepted, report) {
        (Some(cipher), HandshakeReport::Suite(suite)) => suite == openssl_name(cipher),
        (None, HandshakeReport::Alert(alert)) if !is_version_accepted => {
            // Of a version without any common suite, a server may name either reason.
            [PROTOCOL_VERSION, HANDSHAKE_FAILURE].contains(alert)
        }
        (None, HandshakeReport::Alert(alert)) => {
            let has_suite_of_version = settings.ciphers.is_empty()
                || settings.ciphers.iter().any(|it| it.is_of_tls13() == offer.is_tls13);
            // A version without suites in the settings counts as one that is not accepted.
            *alert == HANDSHAKE_FAILURE || !has_suite_of_version && *alert == PROTOCOL_VERSION
        }
        _ => false,
    };
    match is_as_expected {
        true => Ok(()),
        false => Err(format!("{key:?} {settings:?} {offer:?}: {accepted:?} and {report:?}\n")),
    }
}

/// Certificate of a host with an RSA key, which the fixtures cannot make.
pub(crate) async fn issue_rsa(host: &str) -> TestCertificate {
    let folder = tempfile::tempdir().unwrap();
    let [key, chain] = ["key.pem", "chain.pem"].map(|name| folder.path().join(name));
    let mut command = Command::new("openssl");
    command
        .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=a"]);
    command.args(["-addext", &format!("subjectAltName=DNS:{host}")]);
    command.arg("-keyout").arg(&key).arg("-out").arg(&chain);
    let made = command.output().await.unwrap();
    assert!(made.status.success(), "{made:?}");
    let [key_pem, chain_pem] = [key, chain].map(|file| std::fs::read_to_string(file).unwrap());
    TestCertificate { chain_pem, key_pem }
}

/// Connects with each of these arguments, some clients at a time. The reports are in the same order.
async fn connect_all(gateway: SocketAddr, all: &[&[String]]) -> Vec<HandshakeReport> {
    let handshakes = all.iter().map(|arguments| connect(gateway, arguments));
    stream::iter(handshakes.collect::<Vec<_>>()).buffered(CLIENTS).collect().await
}

#[tokio::test]
async fn each_version_and_suite_is_negotiated_or_refused_as_the_settings_say() {
    let mut fixture = ActivatorFixture::new().await;
    let certificates = [
        (KeyKind::Ecdsa, TestAuthority::new().issue(&[HOST])),
        (KeyKind::Rsa, issue_rsa(HOST).await),
    ];
    let offers = suite_offers();
    let arguments: Vec<&[String]> = offers.iter().map(|offer| &offer.arguments[..]).collect();
    let (mut wrong, mut negotiated) = (String::new(), 0);
    for (key, certificate) in &certificates {
        set_default(&mut fixture, certificate);
        for settings in settings() {
            fixture.apply_change(|table| table.settings.edge.tls = settings.clone());
            let reports = connect_all(fixture.outside_tls, &arguments).await;
            for (offer, report) in offers.iter().zip(&reports) {
                negotiated += usize::from(matches!(report, HandshakeReport::Suite(_)));
                wrong += &check(offer, *key, &settings, report).err().unwrap_or_default();
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    // With each kind of key: 6 suites by default, 3 of TLS 1.3 alone, 2 and 1 of the chosen ones, and 1.
    assert_eq!(negotiated, 2 * (6 + 3 + 2 + 1 + 1));
}

#[tokio::test]
async fn only_groups_of_common_strength_are_negotiated() {
    let mut fixture = ActivatorFixture::new().await;
    set_default(&mut fixture, &TestAuthority::new().issue(&[HOST]));
    let groups = [
        ("X25519", true),
        ("P-256", true),
        ("P-384", true),
        ("X448", false),
        ("P-521", false),
        ("ffdhe2048", false),
    ];
    let arguments =
        groups.map(|(group, _)| ["-tls1_3", "-groups", group].map(str::to_owned).to_vec());
    let reports = connect_all(fixture.outside_tls, &arguments.each_ref().map(|it| &it[..])).await;
    for ((group, is_accepted), report) in groups.into_iter().zip(reports) {
        match is_accepted {
            true => assert!(matches!(report, HandshakeReport::Suite(_)), "{group}: {report:?}"),
            false => assert_eq!(report, HandshakeReport::Alert(HANDSHAKE_FAILURE), "{group}"),
        }
    }
}
