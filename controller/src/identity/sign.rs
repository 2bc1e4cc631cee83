//! Shell: keys and certificates, by rcgen: their chance and their clock are the machine's.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use common::tls::peer::{Holder, Identity};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType,
};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, pem::PemObject as _};

use super::rotation::{AUTHORITY_S, Authority, LIFETIME};

/// Clocks of machines differ: what is signed now is valid for those that are so far behind.
const BEHIND: Duration = Duration::from_secs(300);

/// Nothing could be signed.
#[derive(Debug, thiserror::Error)]
pub enum SignError {
    /// The library refused.
    #[error("cannot make a key or certificate")]
    Rcgen(#[from] rcgen::Error),
    /// The request is of no use.
    #[error("the request holds no ECDSA P-256 key")]
    Key,
    /// The authority's certificate cannot be read.
    #[error("the authority's certificate is no PEM")]
    Pem(#[source] rustls::pki_types::pem::Error),
}

/// Makes an authority of its own.
pub fn authority(now: SystemTime) -> Result<Authority, SignError> {
    let made_s = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let end = now + Duration::from_secs(AUTHORITY_S);
    let mut params = CertificateParams::default();
    params.distinguished_name = named(&format!("Rouse authority {made_s}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params.not_before = (now - BEHIND).into();
    params.not_after = end.into();
    let key = KeyPair::generate()?;
    Ok(Authority {
        certificate: params.self_signed(&key)?.pem(),
        key: key.serialize_pem(),
        made_s,
        ends_s: made_s + AUTHORITY_S,
    })
}

fn named(name: &str) -> DistinguishedName {
    let mut all = DistinguishedName::new();
    all.push(DnType::CommonName, name);
    all
}

/// An authority ready to sign.
#[derive(Debug)]
pub struct Signer(Issuer<'static, KeyPair>);

/// A certificate with the key that only its owner has.
#[derive(Debug)]
pub struct Own {
    /// The certificate.
    pub certificate: CertificateDer<'static>,
    /// Its key.
    pub key: PrivatePkcs8KeyDer<'static>,
}

impl Signer {
    /// The signer that an authority makes.
    pub fn new(authority: &Authority) -> Result<Self, SignError> {
        let key = KeyPair::from_pem(&authority.key)?;
        let certificate = CertificateDer::from_pem_slice(authority.certificate.as_bytes());
        let certificate = certificate.map_err(SignError::Pem)?;
        Ok(Self(Issuer::from_ca_cert_der(&certificate, key)?))
    }

    /// Signs a certificate for the key in `request`, whose owner proved to have it. Nothing else of the request is
    /// used: whom the certificate speaks for is not the caller's to say. Returns it with its end.
    pub fn sign(
        &self,
        request: &[u8],
        identity: &Identity,
        now: SystemTime,
    ) -> Result<(CertificateDer<'static>, SystemTime), SignError> {
        let request = CertificateSigningRequestParams::from_der(&request.to_vec().into())?;
        if request.public_key.algorithm() != &PKCS_ECDSA_P256_SHA256 {
            return Err(SignError::Key);
        }
        self.certify(&request.public_key, identity, now)
    }

    /// A certificate for the controller itself.
    pub fn own(&self, identity: &Identity, now: SystemTime) -> Result<Own, SignError> {
        let key = KeyPair::generate()?;
        let (certificate, _) = self.certify(&key, identity, now)?;
        Ok(Own { certificate, key: PrivatePkcs8KeyDer::from(key.serialize_der()) })
    }

    fn certify(
        &self,
        key: &impl PublicKeyData,
        identity: &Identity,
        now: SystemTime,
    ) -> Result<(CertificateDer<'static>, SystemTime), SignError> {
        let end = now + LIFETIME;
        let mut params = CertificateParams::default();
        params.distinguished_name = named(&format!("Rouse {}", identity.holder));
        params.subject_alt_names = vec![SanType::URI(identity.to_string().try_into()?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = match identity.holder {
            // No other part opens streams to these; activators know each other as clients.
            Holder::Agent | Holder::Activator => vec![ExtendedKeyUsagePurpose::ClientAuth],
            Holder::Controller | Holder::Autoscaler => {
                vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth]
            }
        };
        params.not_before = (now - BEHIND).into();
        params.not_after = end.into();
        params.use_authority_key_identifier_extension = true;
        Ok((params.signed_by(key, &self.0)?.der().clone(), end))
    }
}
