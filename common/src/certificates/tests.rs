use super::*;
use crate::fixtures::{TestAuthority, TestCertificate};

const P256_CHAIN: &str = include_str!("data/p256.crt");
const P256_KEY: &str = include_str!("data/p256-pkcs8.key");
const RSA_CHAIN: &str = include_str!("data/rsa-2048.crt");
const RSA_KEY: &str = include_str!("data/rsa-2048-pkcs8.key");

/// Seconds since 1970 at which the certificates of some tests begin and end.
const VALIDITY: CertificateValidity =
    CertificateValidity { not_before_s: 1_000, not_after_s: 1_700_000_000 };

fn parse(chain: &str, key: &str) -> Result<CertificateMaterial, CertificateFault> {
    parse_pem(chain.as_bytes(), key.as_bytes())
}

fn fault(chain: &str, key: &str) -> CertificateFault {
    parse(chain, key).expect_err("must be refused")
}

fn certificate() -> TestCertificate {
    TestAuthority::new().issue(&["shop.example"])
}

/// Returns the certificates of a text in PEM, each in DER.
fn ders(pem: &str) -> Vec<Vec<u8>> {
    read_chain(pem.as_bytes()).expect("certificates")
}

#[test]
fn a_chain_and_its_key_are_loaded() {
    let names = ["shop.example", "*.shop.example"];
    let authority = TestAuthority::new().intermediate();
    let issued = authority.issue_valid(&names, VALIDITY.not_before_s, VALIDITY.not_after_s);
    let material = issued.material();
    assert_eq!(material.chain, ders(&issued.chain_pem));
    assert_eq!(material.chain.len(), 2, "that of the hosts, and the intermediate authority");
    let loaded = load(&material).expect("usable");
    assert_eq!(loaded.key.keys_match(), Ok(()));
    let chain: Vec<&[u8]> = loaded.key.cert.iter().map(AsRef::as_ref).collect();
    assert_eq!(chain, material.chain);
    let names = CertificateNames::new(names.map(str::to_owned));
    assert_eq!(loaded.facts, CertificateFacts { names, validity: VALIDITY });
}

#[test]
fn the_common_name_and_addresses_are_no_hosts() {
    let material = TestAuthority::new().issue(&["10.0.0.1"]).material();
    let common_name = b"common-name.test".as_slice();
    let mut parts = material.chain[0].windows(common_name.len());
    assert!(parts.any(|part| part == common_name), "it has a common name");
    let facts = load(&material).expect("usable").facts;
    assert_eq!(facts.names, CertificateNames::default());
}

#[test]
fn pkcs1_sec1_and_pkcs8_keys_are_read() {
    let p384 = (include_str!("data/p384.crt"), include_str!("data/p384-pkcs8.key"));
    let ed25519 = (include_str!("data/ed25519.crt"), include_str!("data/ed25519-pkcs8.key"));
    for (chain, key) in [
        (RSA_CHAIN, RSA_KEY),
        (RSA_CHAIN, include_str!("data/rsa-2048-pkcs1.key")),
        (P256_CHAIN, P256_KEY),
        // It begins with the parameters of the curve, as openssl writes them.
        (P256_CHAIN, include_str!("data/p256-sec1.key")),
        p384,
        ed25519,
    ] {
        let command = key.lines().next();
        let material = parse(chain, key).unwrap_or_else(|fault| panic!("{command:?}: {fault}"));
        let loaded = load(&material).expect("what was read can be loaded");
        assert_eq!(loaded.key.keys_match(), Ok(()), "{command:?}");
        assert!(loaded.facts.names.has_exact("data.example"), "{command:?}");
    }
}

#[test]
fn other_sections_and_line_ends_are_accepted() {
    let issued = certificate();
    // Both in one file, as haproxy takes them.
    let both = format!("{}{}", issued.key_pem, issued.chain_pem);
    assert_eq!(parse(&both, &both), Ok(issued.material()));
    let windows = |pem: &str| pem.replace('\n', "\r\n");
    let parsed = parse(&windows(&issued.chain_pem), &windows(&issued.key_pem));
    assert_eq!(parsed, Ok(issued.material()));
    let bare = parse(issued.chain_pem.trim_end(), issued.key_pem.trim_end());
    assert_eq!(bare, Ok(issued.material()));
}

#[test]
fn a_chain_in_wrong_order_is_put_in_order() {
    let root = TestAuthority::new();
    let first = root.intermediate();
    let second = first.intermediate();
    let issued = second.issue(&["shop.example"]);
    // Another authority with another name, which has signed none of these.
    let stranger = TestAuthority::new().intermediate().intermediate().intermediate();
    let own = issued.chain_pem.replace(&second.chain_pem(), "");
    assert_eq!(ders(&own).len(), 1);
    let [stranger, root, first, second] =
        [stranger, root, first, second].map(|it| it.certificate_pem());
    let mixed = [&*own, &stranger, &root, &first, &second].concat();
    let material = parse(&mixed, &issued.key_pem).expect("usable");
    let ordered = [&*own, &second, &first, &root, &stranger].concat();
    assert_eq!(material.chain, ders(&ordered));
    assert_eq!(parse(&ordered, &issued.key_pem), Ok(material), "its order stays");
}

#[test]
fn what_is_too_large_is_refused() {
    let issued = certificate();
    let text = "tls.crt has more than 64 KiB or 16 certificates, or tls.key more than 16 KiB";
    assert_eq!(CertificateFault::TooLarge.to_string(), text);
    let comment = |bytes: usize| "#".repeat(bytes - 1) + "\n";
    let filled = |pem: &str, bytes: usize| comment(bytes - pem.len()) + pem;
    let (chain, key) = (&issued.chain_pem, &issued.key_pem);
    assert_eq!(parse(&filled(chain, MAX_CHAIN_BYTES), key), Ok(issued.material()));
    assert_eq!(fault(&filled(chain, MAX_CHAIN_BYTES + 1), key), CertificateFault::TooLarge);
    assert_eq!(parse(chain, &filled(key, MAX_KEY_BYTES)), Ok(issued.material()));
    assert_eq!(fault(chain, &filled(key, MAX_KEY_BYTES + 1)), CertificateFault::TooLarge);
    assert!(parse(&chain.repeat(MAX_CHAIN_LENGTH), key).is_ok());
    assert_eq!(fault(&chain.repeat(MAX_CHAIN_LENGTH + 1), key), CertificateFault::TooLarge);
}

#[test]
fn a_chain_without_pem_is_refused() {
    let issued = certificate();
    for chain in ["", "not PEM", &issued.key_pem] {
        let fault = fault(chain, &issued.key_pem);
        assert_eq!(fault, CertificateFault::NoCertificate);
        assert_eq!(fault.to_string(), "tls.crt holds no certificate in PEM");
    }
}

#[test]
fn a_file_without_one_whole_key_is_refused() {
    let TestCertificate { chain_pem, key_pem } = certificate();
    let cut = &key_pem[..key_pem.len() / 2];
    for key in ["", "not PEM", &chain_pem, cut] {
        let fault = fault(&chain_pem, key);
        assert_eq!(fault, CertificateFault::NoKey);
        assert_eq!(fault.to_string(), "tls.key holds no private key in PEM");
    }
    let fault = fault(&chain_pem, &key_pem.repeat(2));
    assert_eq!(fault, CertificateFault::SeveralKeys);
    assert_eq!(fault.to_string(), "tls.key holds several private keys: give one");
}

#[test]
fn an_encrypted_key_is_refused() {
    let pkcs8 = include_str!("data/p256-encrypted-pkcs8.key");
    let pkcs1 = include_str!("data/rsa-2048-encrypted-pkcs1.key");
    for (chain, key) in [(P256_CHAIN, pkcs8), (RSA_CHAIN, pkcs1)] {
        let fault = fault(chain, key);
        assert_eq!(fault, CertificateFault::EncryptedKey);
        assert_eq!(fault.to_string(), "tls.key is encrypted: give it without a passphrase");
    }
}

#[test]
fn a_malformed_certificate_is_refused_by_its_number() {
    let TestCertificate { chain_pem, key_pem } = certificate();
    let no_certificate = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let no_base64 = "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n";
    let cut = &chain_pem[..chain_pem.len() / 2];
    for second in [no_certificate, no_base64, cut] {
        let fault = fault(&format!("{chain_pem}{second}"), &key_pem);
        assert_eq!(fault, CertificateFault::MalformedCertificate(2));
        assert_eq!(fault.to_string(), "certificate 2 of tls.crt cannot be read");
    }
    let mut material = certificate().material();
    material.chain[0].push(0);
    let fault = load(&material).expect_err("a byte too many");
    assert_eq!(fault, CertificateFault::MalformedCertificate(1));
}

#[test]
fn a_key_of_an_unsupported_kind_or_size_is_refused() {
    let p521 = include_str!("data/p521-pkcs8.key");
    let rsa_1024 = include_str!("data/rsa-1024-pkcs8.key");
    let no_key = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
    for key in [p521, rsa_1024, no_key] {
        let fault = fault(P256_CHAIN, key);
        assert_eq!(fault, CertificateFault::UnusableKey);
        assert_eq!(
            fault.to_string(),
            "the kind or size of the key in tls.key is not supported: use ECDSA P-256 or P-384, \
             Ed25519, or RSA of 2048 to 4096 bits"
        );
    }
}

#[test]
fn the_certificate_of_the_key_must_come_first() {
    let authority = TestAuthority::new().intermediate();
    let issued = authority.issue(&["shop.example"]);
    let chain = format!("{}{}", authority.certificate_pem(), issued.chain_pem);
    let fault = fault(&chain, &issued.key_pem);
    assert_eq!(fault, CertificateFault::LeafNotFirst(2));
    assert_eq!(
        fault.to_string(),
        "the key belongs to certificate 2 of tls.crt, which must be the first"
    );
}

#[test]
fn a_key_of_another_certificate_is_refused() {
    let fault = fault(&certificate().chain_pem, &certificate().key_pem);
    assert_eq!(fault, CertificateFault::KeyMismatch);
    assert_eq!(fault.to_string(), "the key in tls.key belongs to no certificate of tls.crt");
}

#[test]
fn what_is_loaded_is_checked_again() {
    let good = certificate().material();
    let load_fault = |material: CertificateMaterial| load(&material).expect_err("unusable");
    let none = CertificateMaterial { chain: Vec::new(), ..good.clone() };
    assert_eq!(load_fault(none), CertificateFault::NoCertificate);
    let foreign = CertificateMaterial { key: certificate().material().key, ..good.clone() };
    assert_eq!(load_fault(foreign), CertificateFault::KeyMismatch);
    let keyless = CertificateMaterial { key: PrivateKeyBytes::new(Vec::new()), ..good.clone() };
    assert_eq!(load_fault(keyless), CertificateFault::UnusableKey);
    let many = vec![good.chain[0].clone(); MAX_CHAIN_LENGTH + 1];
    let long = CertificateMaterial { chain: many, ..good.clone() };
    assert_eq!(load_fault(long), CertificateFault::TooLarge);
    let large_key = PrivateKeyBytes::new(vec![0; MAX_KEY_BYTES + 1]);
    let large = CertificateMaterial { key: large_key, ..good.clone() };
    assert_eq!(load_fault(large), CertificateFault::TooLarge);
    let large_chain = vec![good.chain[0].clone(), vec![0; MAX_CHAIN_BYTES]];
    let large = CertificateMaterial { chain: large_chain, ..good };
    assert_eq!(load_fault(large), CertificateFault::TooLarge);
}
