//! Shell: certificates of hosts: PEM, checks, and keys for handshakes.
//!
//! A controller checks what Secrets hold, and an activator what it has been sent or reads from files. Both use these
//! functions, so what the controller accepts also serves. No fault contains bytes of a certificate or key.

use std::sync::Arc;

use rustls::{
    crypto::ring,
    pki_types::{
        CertificateDer, PrivateKeyDer,
        pem::{PemObject as _, SectionKind},
    },
    sign::{CertifiedKey, SigningKey},
};
use x509_parser::{certificate::X509Certificate, extensions::GeneralName, parse_x509_certificate};

use crate::wire::{CertificateMaterial, PrivateKeyBytes};

mod client_ca;
mod names;
mod subject;
mod validity;

pub use client_ca::{
    ClientCaFault, MAX_CLIENT_CA_BYTES, MAX_CLIENT_CA_COUNT, load_client_ca, parse_client_ca,
};
pub use names::CertificateNames;
pub use subject::format_subject;
pub use validity::{CertificateValidity, ValidityState, may_replace};

/// Maximum size of a chain, in bytes.
pub const MAX_CHAIN_BYTES: usize = 64 << 10;
/// Maximum number of certificates of a chain.
pub const MAX_CHAIN_LENGTH: usize = 16;
/// Maximum size of a private key, in bytes.
pub const MAX_KEY_BYTES: usize = 16 << 10;

/// Section of a PEM file: its kind and its content in DER.
type PemSection = (SectionKind, Vec<u8>);

/// Reason for which a chain or key cannot be used. The texts call the files as the keys of a Secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CertificateFault {
    /// The chain or the key exceeds its maximum size.
    #[error("tls.crt has more than 64 KiB or 16 certificates, or tls.key more than 16 KiB")]
    TooLarge,
    /// The chain is empty.
    #[error("tls.crt holds no certificate in PEM")]
    NoCertificate,
    /// The file of the key has no complete private key.
    #[error("tls.key holds no private key in PEM")]
    NoKey,
    /// The private key needs a passphrase.
    #[error("tls.key is encrypted: give it without a passphrase")]
    EncryptedKey,
    /// The file of the key has more than one private key.
    #[error("tls.key holds several private keys: give one")]
    SeveralKeys,
    /// The certificate at this place, counted from 1, is malformed.
    #[error("certificate {0} of tls.crt cannot be read")]
    MalformedCertificate(usize),
    /// The private key is malformed, or ring does not support it.
    // ring signs with RSA of at most 4096 bits (`PRIVATE_KEY_PUBLIC_MODULUS_MAX_BITS`).
    #[error(
        "the kind or size of the key in tls.key is not supported: use ECDSA P-256 or P-384, Ed25519, or RSA of 2048 to 4096 bits"
    )]
    UnusableKey,
    /// The key belongs to the certificate at this place, counted from 1, and not to the first.
    #[error("the key belongs to certificate {0} of tls.crt, which must be the first")]
    LeafNotFirst(usize),
    /// The key belongs to another certificate.
    #[error("the key in tls.key belongs to no certificate of tls.crt")]
    KeyMismatch,
}

/// Certificate that can be used in handshakes.
#[derive(Clone, Debug)]
pub struct LoadedCertificate {
    /// Chain and key, as rustls uses them.
    pub key: Arc<CertifiedKey>,
    /// Names and validity of the first certificate.
    pub facts: CertificateFacts,
}

/// Names and validity of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFacts {
    /// Hosts that the certificate is for.
    pub names: CertificateNames,
    /// Time in which clients accept the certificate.
    pub validity: CertificateValidity,
}

/// Parses a chain and a private key from PEM, and checks that they fit together. Other sections are ignored.
///
/// The first certificate must be that of the key. The rest is put into issuing order, which clients of TLS 1.2 need;
/// certificates that fit nowhere come last. Neither signatures nor the validity are checked: clients decide on trust.
pub fn parse_pem(certificates: &[u8], key: &[u8]) -> Result<CertificateMaterial, CertificateFault> {
    if certificates.len() > MAX_CHAIN_BYTES || key.len() > MAX_KEY_BYTES {
        return Err(CertificateFault::TooLarge);
    }
    let mut chain = read_chain(certificates)?;
    let key = read_key(key)?;
    let order = issuing_order(&CheckedCertificate::new(&chain, &key)?.chain);
    let chain = order.into_iter().map(|at| std::mem::take(&mut chain[at])).collect();
    Ok(CertificateMaterial { chain, key: PrivateKeyBytes::new(key) })
}

/// Loads a certificate for handshakes. The checks are those of [`parse_pem`], since the sender may be of another
/// release.
pub fn load(material: &CertificateMaterial) -> Result<LoadedCertificate, CertificateFault> {
    let CertificateMaterial { chain, key } = material;
    let chain_bytes: usize = chain.iter().map(Vec::len).sum();
    let is_long = chain_bytes > MAX_CHAIN_BYTES || chain.len() > MAX_CHAIN_LENGTH;
    if is_long || key.as_der().len() > MAX_KEY_BYTES {
        return Err(CertificateFault::TooLarge);
    }
    let CheckedCertificate { signing_key, facts, .. } =
        CheckedCertificate::new(chain, key.as_der())?;
    let chain = chain.iter().cloned().map(CertificateDer::from).collect();
    Ok(LoadedCertificate { key: Arc::new(CertifiedKey::new(chain, signing_key)), facts })
}

/// Chain and key that fit together.
struct CheckedCertificate<'a> {
    chain: Vec<X509Certificate<'a>>,
    signing_key: Arc<dyn SigningKey>,
    facts: CertificateFacts,
}

impl<'a> CheckedCertificate<'a> {
    /// Parses and checks a chain and a key in DER.
    fn new(chain: &'a [Vec<u8>], key: &[u8]) -> Result<Self, CertificateFault> {
        let chain = parse_chain(chain)?;
        let own = chain.first().ok_or(CertificateFault::NoCertificate)?;
        let facts = read_facts(own).ok_or(CertificateFault::MalformedCertificate(1))?;
        let signing_key = load_key(key).ok_or(CertificateFault::UnusableKey)?;
        check_key(&chain, &*signing_key)?;
        Ok(Self { chain, signing_key, facts })
    }
}

fn read_chain(pem: &[u8]) -> Result<Vec<Vec<u8>>, CertificateFault> {
    let mut chain = Vec::new();
    for section in PemSection::pem_slice_iter(pem) {
        match section {
            Ok((SectionKind::Certificate, der)) => chain.push(der),
            // The file may have the private key beside the chain.
            Ok(_) => {}
            Err(_) => return Err(CertificateFault::MalformedCertificate(chain.len() + 1)),
        }
    }
    match chain.len() {
        0 => Err(CertificateFault::NoCertificate),
        1..=MAX_CHAIN_LENGTH => Ok(chain),
        _ => Err(CertificateFault::TooLarge),
    }
}

fn read_key(pem: &[u8]) -> Result<Vec<u8>, CertificateFault> {
    if is_encrypted(pem) {
        return Err(CertificateFault::EncryptedKey);
    }
    // A section that cannot be decoded may be the key, so none of the file is used.
    let sections: Option<Vec<PemSection>> =
        PemSection::pem_slice_iter(pem).map(Result::ok).collect();
    let is_key = |kind: &SectionKind| {
        matches!(
            kind,
            SectionKind::PrivateKey | SectionKind::EcPrivateKey | SectionKind::RsaPrivateKey
        )
    };
    let mut keys = sections.unwrap_or_default().into_iter().filter(|(kind, _)| is_key(kind));
    match (keys.next(), keys.next()) {
        (None, _) => Err(CertificateFault::NoKey),
        (Some((_, key)), None) => Ok(key),
        (Some(_), Some(_)) => Err(CertificateFault::SeveralKeys),
    }
}

/// Returns true if a private key in PEM needs a passphrase: in PKCS#8, or in the older form with a header (RFC 1421).
fn is_encrypted(pem: &[u8]) -> bool {
    pem.split(|byte| matches!(byte, b'\n' | b'\r')).any(|line| {
        line.starts_with(b"-----BEGIN ENCRYPTED PRIVATE KEY-----")
            || line.starts_with(b"Proc-Type: 4,ENCRYPTED")
    })
}

fn parse_chain(chain: &[Vec<u8>]) -> Result<Vec<X509Certificate<'_>>, CertificateFault> {
    chain.iter().enumerate().map(|(index, der)| parse_certificate(index + 1, der)).collect()
}

/// Parses the certificate at a place, counted from 1.
fn parse_certificate(place: usize, der: &[u8]) -> Result<X509Certificate<'_>, CertificateFault> {
    match parse_x509_certificate(der) {
        Ok(([], certificate)) => Ok(certificate),
        // With bytes behind the certificate, clients refuse it.
        Ok(_) | Err(_) => Err(CertificateFault::MalformedCertificate(place)),
    }
}

/// Returns names and validity of a certificate; `None`: its alternative names are malformed. The common name does not
/// count, as clients ignore it (RFC 9525).
fn read_facts(certificate: &X509Certificate<'_>) -> Option<CertificateFacts> {
    let alternatives = certificate.subject_alternative_name().ok()?;
    let names = alternatives.iter().flat_map(|it| &it.value.general_names);
    let names = names.filter_map(|it| match it {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        _ => None,
    });
    let validity = CertificateValidity {
        not_before_s: certificate.validity().not_before.timestamp(),
        not_after_s: certificate.validity().not_after.timestamp(),
    };
    Some(CertificateFacts { names: CertificateNames::new(names), validity })
}

/// Returns the key for signatures; `None`: it is malformed or not supported. The form of the DER shows whether it is
/// PKCS#8, SEC1 or PKCS#1.
fn load_key(der: &[u8]) -> Option<Arc<dyn SigningKey>> {
    let der = PrivateKeyDer::try_from(der).ok()?;
    ring::sign::any_supported_type(&der).ok()
}

/// Checks that the key is that of the first certificate, by their public keys.
fn check_key(chain: &[X509Certificate<'_>], key: &dyn SigningKey) -> Result<(), CertificateFault> {
    let own = key.public_key().ok_or(CertificateFault::UnusableKey)?;
    match chain.iter().position(|it| *it.public_key().raw == *own) {
        Some(0) => Ok(()),
        Some(index) => Err(CertificateFault::LeafNotFirst(index + 1)),
        None => Err(CertificateFault::KeyMismatch),
    }
}

/// Returns the indices of a chain in issuing order: each certificate is followed by that of its issuer, as far as there
/// is one. The others keep their order, at the end. The chain must not be empty.
fn issuing_order(chain: &[X509Certificate<'_>]) -> Vec<usize> {
    let (mut order, mut rest) = (vec![0], (1..chain.len()).collect::<Vec<_>>());
    let mut last = 0;
    let is_issuer =
        |issuer: usize, of: usize| chain[issuer].subject().as_raw() == chain[of].issuer().as_raw();
    while let Some(place) = rest.iter().position(|it| is_issuer(*it, last)) {
        last = rest.remove(place);
        order.push(last);
    }
    order.extend(rest);
    order
}

#[cfg(test)]
mod tests;
