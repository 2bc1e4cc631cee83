//! Shell: certificate authority of the webhook and its server certificate, made here and kept in a Secret.
//!
//! The Secret's keys for certificates and the server's key are Knative's. The authority is valid for ten years and the
//! certificate for thirty days. The leader renews the certificate after twenty days under the same authority, so that
//! no client needs another one.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError, RwLock},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use k8s_openapi::ByteString;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};

const AUTHORITY_LIFETIME: Duration = days(3650);
/// Time for which an authority signs: its last certificate ends before the authority does.
const AUTHORITY_RENEWAL_AGE: Duration = days(3650 - 30 - 1);
const CERTIFICATE_LIFETIME: Duration = days(30);
/// Time after which a certificate is replaced, well before it ends.
const CERTIFICATE_RENEWAL_AGE: Duration = days(20);
/// Allowance for differences between the clocks of machines.
const CLOCK_SKEW: Duration = Duration::from_secs(3600);
/// Keys of the Secret's data, each with one PEM text.
const AUTHORITY_CERT_KEY: &str = "ca-cert.pem";
const AUTHORITY_KEY_KEY: &str = "ca-key.pem";
const SERVER_CERT_KEY: &str = "server-cert.pem";
const SERVER_KEY_KEY: &str = "server-key.pem";
/// Key with the time to make another certificate, in seconds since 1970; kept beside the certificate.
const RENEW_AFTER_KEY: &str = "renew-after";
/// Key with the time to make another authority, in seconds since 1970.
const RENEW_AUTHORITY_AFTER_KEY: &str = "renew-ca-after";

const fn days(count: u64) -> Duration {
    Duration::from_secs(count * 24 * 3600)
}

/// Error about the webhook's certificates.
#[derive(Debug, thiserror::Error)]
pub enum WebhookCertError {
    /// The certificate could not be made.
    #[error("cannot make the webhook's certificate")]
    Make(#[from] rcgen::Error),
    /// The certificate or its key could not be parsed.
    #[error("cannot read {key} of the webhook's Secret")]
    Read {
        /// Key of the Secret whose text is not PEM.
        key: &'static str,
        /// Error of the PEM parser.
        #[source]
        source: rustls::pki_types::pem::Error,
    },
    /// Key and certificate do not belong together.
    #[error("cannot use the webhook's certificate")]
    Use(#[from] rustls::Error),
}

/// Content of the Secret: the authority, the certificate, and their keys.
#[derive(Clone, PartialEq, Eq)]
pub struct WebhookCertBundle {
    /// Certificate of the authority, as PEM.
    pub authority: String,
    authority_key: String,
    certificate: String,
    key: String,
    renew_after: u64,
    renew_authority_after: u64,
}

impl std::fmt::Debug for WebhookCertBundle {
    /// Formats the bundle without its private keys.
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("WebhookCertBundle")
            .field("renew_after", &self.renew_after)
            .finish_non_exhaustive()
    }
}

impl WebhookCertBundle {
    /// Makes a certificate for `names`, under the authority of `previous` while that is in use.
    pub fn create(
        names: &[String],
        previous: Option<&Self>,
        now: SystemTime,
    ) -> Result<Self, WebhookCertError> {
        let holds = |it: &&Self| !is_due(it.renew_authority_after, AUTHORITY_RENEWAL_AGE, now);
        // Clients trust the authority, so it outlives its certificates wherever possible.
        let usable_bundle = previous.filter(holds);
        let kept_issuer = match usable_bundle {
            Some(it) => Self::issuer(&it.authority, &it.authority_key).ok(),
            None => None,
        };
        let (authority, authority_key, issuer, renew_authority_after) =
            match (kept_issuer, usable_bundle) {
                (Some(issuer), Some(it)) => (
                    it.authority.clone(),
                    it.authority_key.clone(),
                    issuer,
                    it.renew_authority_after,
                ),
                // No authority, one that is due, or one that cannot be read: all are replaced.
                _ => {
                    let (pem, key) = create_authority(now)?;
                    let issuer = Self::issuer(&pem, &key)?;
                    (pem, key, issuer, unix_seconds(now + AUTHORITY_RENEWAL_AGE))
                }
            };
        let key = KeyPair::generate()?;
        let certificate = certificate_params(names, now)?.signed_by(&key, &issuer)?.pem();
        Ok(Self {
            authority,
            authority_key,
            certificate,
            key: key.serialize_pem(),
            renew_after: unix_seconds(now + CERTIFICATE_RENEWAL_AGE),
            renew_authority_after,
        })
    }

    fn issuer(pem: &str, key: &str) -> Result<Issuer<'static, KeyPair>, rcgen::Error> {
        Issuer::from_ca_cert_pem(pem, KeyPair::from_pem(key)?)
    }

    /// Returns true if another certificate should be made now.
    pub fn is_due(&self, now: SystemTime) -> bool {
        is_due(self.renew_after, CERTIFICATE_RENEWAL_AGE, now)
            || is_due(self.renew_authority_after, AUTHORITY_RENEWAL_AGE, now)
    }

    /// Parses the data that [`to_secret_data`](Self::to_secret_data) makes; `None` if a part is missing or invalid.
    pub fn from_secret_data(data: &BTreeMap<String, ByteString>) -> Option<Self> {
        let text = |key: &str| {
            let bytes = data.get(key)?;
            String::from_utf8(bytes.0.clone()).ok().filter(|text| !text.is_empty())
        };
        let bundle = Self {
            authority: text(AUTHORITY_CERT_KEY)?,
            authority_key: text(AUTHORITY_KEY_KEY)?,
            certificate: text(SERVER_CERT_KEY)?,
            key: text(SERVER_KEY_KEY)?,
            renew_after: text(RENEW_AFTER_KEY)?.parse().ok()?,
            renew_authority_after: text(RENEW_AUTHORITY_AFTER_KEY)?.parse().ok()?,
        };
        // A certificate that does not fit its key is as good as none: the leader makes another.
        bundle.certified_key().is_ok().then_some(bundle)
    }

    /// Returns the bundle in the form that a Secret stores.
    pub fn to_secret_data(&self) -> BTreeMap<String, ByteString> {
        let (renew, renew_ca) =
            (self.renew_after.to_string(), self.renew_authority_after.to_string());
        let pairs = [
            (AUTHORITY_CERT_KEY, &self.authority),
            (AUTHORITY_KEY_KEY, &self.authority_key),
            (SERVER_CERT_KEY, &self.certificate),
            (SERVER_KEY_KEY, &self.key),
            (RENEW_AFTER_KEY, &renew),
            (RENEW_AUTHORITY_AFTER_KEY, &renew_ca),
        ];
        let bytes = |text: &str| ByteString(text.as_bytes().to_vec());
        pairs.map(|(key, text)| (key.to_owned(), bytes(text))).into()
    }

    fn certified_key(&self) -> Result<CertifiedKey, WebhookCertError> {
        let chain: Result<Vec<_>, _> =
            CertificateDer::pem_slice_iter(self.certificate.as_bytes()).collect();
        let chain =
            chain.map_err(|source| WebhookCertError::Read { key: SERVER_CERT_KEY, source })?;
        let key = PrivateKeyDer::from_pem_slice(self.key.as_bytes())
            .map_err(|source| WebhookCertError::Read { key: SERVER_KEY_KEY, source })?;
        let provider = rustls::crypto::ring::default_provider();
        Ok(CertifiedKey::from_der(chain, key, &provider)?)
    }
}

/// The certificate in use, which can be replaced without closing connections.
#[derive(Debug, Default)]
pub struct WebhookCertResolver(RwLock<Option<(WebhookCertBundle, Arc<CertifiedKey>)>>);

impl WebhookCertResolver {
    /// Uses `bundle` for every handshake from now on. Returns true if it differs from the one before.
    pub fn set(&self, bundle: &WebhookCertBundle) -> Result<bool, WebhookCertError> {
        if self.bundle().as_ref() == Some(bundle) {
            return Ok(false);
        }
        let certified = Arc::new(bundle.certified_key()?);
        // Parsed before the lock is taken: handshakes only wait for the swap.
        let mut slot = self.0.write().unwrap_or_else(PoisonError::into_inner);
        *slot = Some((bundle.clone(), certified));
        Ok(true)
    }

    /// Returns the bundle in use, if one was set.
    pub fn bundle(&self) -> Option<WebhookCertBundle> {
        let slot = self.0.read().unwrap_or_else(PoisonError::into_inner);
        slot.as_ref().map(|(bundle, _)| bundle.clone())
    }

    /// Returns the TLS configuration of the server, which reads the certificate at each handshake.
    pub(super) fn server_config(self: &Arc<Self>) -> Result<ServerConfig, rustls::Error> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(Arc::clone(self) as Arc<dyn ResolvesServerCert>);
        // `serve_connection` in `webhook.rs` serves HTTP/1.1 only.
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }
}

impl ResolvesServerCert for WebhookCertResolver {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let slot = self.0.read().unwrap_or_else(PoisonError::into_inner);
        slot.as_ref().map(|(_, certified)| Arc::clone(certified))
    }
}

/// Returns true if a certificate should be replaced that is in use for `used` until `renew_after`. This includes one
/// made while the clock was ahead: the API server would refuse it until the clock has caught up.
fn is_due(renew_after: u64, used: Duration, now: SystemTime) -> bool {
    let made_at_s = renew_after.saturating_sub(used.as_secs());
    unix_seconds(now) >= renew_after || unix_seconds(now + CLOCK_SKEW) < made_at_s
}

fn create_authority(now: SystemTime) -> Result<(String, String), rcgen::Error> {
    let mut params = CertificateParams::new(Vec::<String>::new())?;
    params.distinguished_name.push(DnType::CommonName, "rouse webhook authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    set_validity(&mut params, now, AUTHORITY_LIFETIME);
    let key = KeyPair::generate()?;
    Ok((params.self_signed(&key)?.pem(), key.serialize_pem()))
}

fn certificate_params(
    names: &[String],
    now: SystemTime,
) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names.to_vec())?;
    params.distinguished_name.push(DnType::CommonName, "rouse webhook");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    // Several authorities may have the same name over time; the identifier names the key that signed.
    params.use_authority_key_identifier_extension = true;
    set_validity(&mut params, now, CERTIFICATE_LIFETIME);
    Ok(params)
}

fn set_validity(params: &mut CertificateParams, now: SystemTime, validity: Duration) {
    let at =
        |moment: SystemTime| date_time_ymd(1970, 1, 1) + Duration::from_secs(unix_seconds(moment));
    // Machines whose clocks are behind must accept the certificate at once.
    params.not_before = at(now - CLOCK_SKEW);
    params.not_after = at(now + validity);
}

fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
