//! Shell: keys and certificates by rcgen, with the machine's random numbers.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use common::{component::Component, tls::peer::CertificateIdentity};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType,
};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, pem::PemObject as _};

use super::rotation::{
    CERTIFICATE_LIFETIME, CertificateAuthority, LOCAL_CERTIFICATE_LIFETIME, RotationSchedule,
};

/// Difference of clocks that is tolerated: a certificate is valid from this long before it is signed.
const CLOCK_SKEW: Duration = Duration::from_secs(300);

/// Error of creating a key or certificate.
#[derive(Debug, thiserror::Error)]
pub enum SignError {
    /// The crate rcgen returned an error.
    #[error("cannot make a key or certificate")]
    Rcgen(#[from] rcgen::Error),
    /// The request has another kind of key.
    #[error("the request holds no ECDSA P-256 key")]
    Key,
    /// The authority's certificate is no valid PEM.
    #[error("the authority's certificate is no PEM")]
    Pem(#[source] rustls::pki_types::pem::Error),
}

/// Creates a new authority with a self-signed certificate.
pub fn create_authority(
    schedule: &RotationSchedule,
    now: SystemTime,
) -> Result<CertificateAuthority, SignError> {
    let made_s = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let end = now + Duration::from_secs(schedule.lifetime_s);
    let mut params = CertificateParams::default();
    params.distinguished_name = distinguished_name(&format!("{} {made_s}", schedule.common_name));
    // A path length of 0: it signs certificates of components or names, and no further authorities.
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = end.into();
    let key = KeyPair::generate()?;
    Ok(CertificateAuthority {
        certificate: params.self_signed(&key)?.pem(),
        key: key.serialize_pem(),
        made_s,
        ends_s: made_s + schedule.lifetime_s,
    })
}

fn distinguished_name(name: &str) -> DistinguishedName {
    let mut all = DistinguishedName::new();
    all.push(DnType::CommonName, name);
    all
}

/// An authority with its key loaded, ready to sign.
#[derive(Debug)]
pub struct CertificateSigner(Issuer<'static, KeyPair>);

/// A certificate with its private key.
#[derive(Debug)]
pub struct OwnCertificate {
    /// The certificate in DER.
    pub certificate: CertificateDer<'static>,
    /// Private key of the certificate.
    pub key: PrivatePkcs8KeyDer<'static>,
}

impl CertificateSigner {
    /// Loads the certificate and key of an authority.
    pub fn new(authority: &CertificateAuthority) -> Result<Self, SignError> {
        let key = KeyPair::from_pem(&authority.key)?;
        let certificate = CertificateDer::from_pem_slice(authority.certificate.as_bytes());
        let certificate = certificate.map_err(SignError::Pem)?;
        Ok(Self(Issuer::from_ca_cert_der(&certificate, key)?))
    }

    /// Signs a certificate for the key in `request`, whose signature proves possession. Nothing else of the request is
    /// used: the identity never comes from the caller. Returns the certificate with its end.
    pub fn sign_request(
        &self,
        request: &[u8],
        identity: &CertificateIdentity,
        now: SystemTime,
    ) -> Result<(CertificateDer<'static>, SystemTime), SignError> {
        let request = CertificateSigningRequestParams::from_der(&request.to_vec().into())?;
        if request.public_key.algorithm() != &PKCS_ECDSA_P256_SHA256 {
            return Err(SignError::Key);
        }
        self.sign_certificate(&request.public_key, identity, now)
    }

    /// Creates a key and a certificate for the controller itself.
    pub fn issue_own(
        &self,
        identity: &CertificateIdentity,
        now: SystemTime,
    ) -> Result<OwnCertificate, SignError> {
        let key = KeyPair::generate()?;
        let (certificate, _) = self.sign_certificate(&key, identity, now)?;
        Ok(OwnCertificate { certificate, key: PrivatePkcs8KeyDer::from(key.serialize_der()) })
    }

    /// Creates a key and a certificate for hosts, of use to servers alone.
    ///
    /// # Errors
    ///
    /// If a host is not ASCII, or the system has no random numbers.
    pub fn issue_for_hosts(
        &self,
        hosts: &[String],
        now: SystemTime,
    ) -> Result<OwnCertificate, SignError> {
        let (key, end) = (KeyPair::generate()?, now + LOCAL_CERTIFICATE_LIFETIME);
        let mut params = CertificateParams::new(hosts)?;
        // Clients read the alternative names only. A common name has at most 64 characters, and hosts may have more.
        params.distinguished_name = distinguished_name("Rouse cluster-local names");
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.not_before = (now - CLOCK_SKEW).into();
        params.not_after = end.into();
        params.use_authority_key_identifier_extension = true;
        let certificate = params.signed_by(&key, &self.0)?.der().clone();
        Ok(OwnCertificate { certificate, key: PrivatePkcs8KeyDer::from(key.serialize_der()) })
    }

    /// Signs a certificate for a public key. Identity and lifetime never come from a request.
    fn sign_certificate(
        &self,
        key: &impl PublicKeyData,
        identity: &CertificateIdentity,
        now: SystemTime,
    ) -> Result<(CertificateDer<'static>, SystemTime), SignError> {
        let end = now + CERTIFICATE_LIFETIME;
        let mut params = CertificateParams::default();
        params.distinguished_name = distinguished_name(&format!("Rouse {}", identity.role));
        // Peers read only the URI name; the common name is for tools that show certificates.
        params.subject_alt_names = vec![SanType::URI(identity.to_string().try_into()?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = match identity.role {
            // No other component opens streams to these; activators accept each other's client certificates.
            Component::Agent | Component::Activator => vec![ExtendedKeyUsagePurpose::ClientAuth],
            Component::Controller | Component::Autoscaler => {
                vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth]
            }
        };
        params.not_before = (now - CLOCK_SKEW).into();
        params.not_after = end.into();
        params.use_authority_key_identifier_extension = true;
        Ok((params.signed_by(key, &self.0)?.der().clone(), end))
    }
}
