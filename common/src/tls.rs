//! Shell: mutual TLS between components.
//!
//! Every component makes its own key, which never leaves its process, and requests a certificate for it from the
//! controller ([`crate::enrollment`]). Both sides of a connection present theirs. Names and addresses prove nothing;
//! only the identity in the certificate does ([`request_peer()`]). Certificates live for an hour and are replaced in
//! place: [`TlsCredentials`] gives every new handshake the newest one, and open connections stay.
//!
//! | attack | defence |
//! |---|---|
//! | reading or changing messages | TLS 1.3 on every stream between pods |
//! | impersonating a controller | clients trust only Rouse's authorities and require the role `controller` |
//! | impersonating another node's agent | the node in the certificate comes from the API server, not from the caller |
//! | using a stolen certificate | useless without its key, and expired after at most an hour |
//! | holding connections open | timeouts: 5 s for a handshake, 30 s without a certificate; few of both per source |

use std::{fmt, sync::Arc};

use rustls::{
    ClientConfig, DigitallySignedStruct, DistinguishedName, Error, OtherError, ServerConfig,
    SignatureScheme,
    client::{
        self, ResolvesClientCert, Resumption,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{
        CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, TrustAnchor, UnixTime,
    },
    server::{
        self, ResolvesServerCert,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::CertifiedKey,
    version::TLS13,
};
use tokio::sync::watch;
use webpki::{EndEntityCert, KeyUsage, anchor_from_trusted_cert};

pub mod accept;
pub mod peer;

use peer::{CertificateIdentity, TlsPeer};

use crate::component::Component;

/// ALPN protocol name of HTTP/2.
const ALPN_H2: &[u8] = b"h2";

/// Error of a key or certificate that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The certificate of an authority is malformed.
    #[error("an authority's certificate cannot be used")]
    Authority(#[source] webpki::Error),
    /// The own key is malformed or does not belong to the certificate.
    #[error("the key cannot be used")]
    Key(#[source] Error),
    /// The own certificate is malformed or names no single identity.
    #[error("the certificate cannot be used")]
    Certificate(#[source] webpki::Error),
    /// The certificate chain is empty.
    #[error("the certificate chain is empty")]
    EmptyChain,
}

/// Certificate of the process and the authorities that it trusts. Both may change at any time.
pub struct TlsCredentials {
    current: watch::Sender<Arc<CurrentCredentials>>,
    provider: Arc<CryptoProvider>,
}

#[derive(Default)]
struct CurrentCredentials {
    certificate: Option<(Arc<CertifiedKey>, Arc<CertificateIdentity>)>,
    anchors: Vec<TrustAnchor<'static>>,
}

impl fmt::Debug for TlsCredentials {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let current = self.snapshot();
        out.debug_struct("Credentials")
            .field("own", &current.certificate.as_ref().map(|(_, identity)| identity.to_string()))
            .field("authorities", &current.anchors.len())
            .finish()
    }
}

impl TlsCredentials {
    /// Returns credentials without a certificate and without a trusted authority.
    pub fn new() -> Arc<Self> {
        let provider = Arc::new(ring::default_provider());
        Arc::new(Self { current: watch::Sender::new(Arc::default()), provider })
    }

    /// Replaces the trusted authorities.
    pub fn set_authorities(&self, authorities: &[CertificateDer<'_>]) -> Result<(), TlsError> {
        let anchor = |it| anchor_from_trusted_cert(it).map(|it| it.to_owned());
        let anchors: Result<Vec<_>, _> = authorities.iter().map(anchor).collect();
        let anchors = anchors.map_err(TlsError::Authority)?;
        self.current.send_modify(|current| {
            *current =
                Arc::new(CurrentCredentials { certificate: current.certificate.clone(), anchors })
        });
        Ok(())
    }

    /// Replaces the certificate to present: a chain, its own certificate first, and that one's key in PKCS#8.
    pub fn set_certificate(
        &self,
        chain: Vec<CertificateDer<'static>>,
        key: PrivatePkcs8KeyDer<'static>,
    ) -> Result<Arc<CertificateIdentity>, TlsError> {
        // All checks come before the exchange, so an unusable certificate never replaces a good one.
        let first = chain.first().ok_or(TlsError::EmptyChain)?;
        let identity = Arc::new(parse_identity(first).map_err(TlsError::Certificate)?);
        let key = ring::sign::any_supported_type(&PrivateKeyDer::Pkcs8(key));
        let certified_key = CertifiedKey::new(chain, key.map_err(TlsError::Key)?);
        certified_key.keys_match().map_err(TlsError::Key)?;
        let certified_key = Some((Arc::new(certified_key), Arc::clone(&identity)));
        self.current.send_modify(|current| {
            *current = Arc::new(CurrentCredentials {
                certificate: certified_key.clone(),
                anchors: current.anchors.clone(),
            });
        });
        Ok(identity)
    }

    /// Returns the identity in the own certificate, if there is one.
    pub fn identity(&self) -> Option<Arc<CertificateIdentity>> {
        self.snapshot().certificate.as_ref().map(|(_, identity)| Arc::clone(identity))
    }

    /// Waits until there is a certificate to present.
    pub async fn wait_for_certificate(&self) {
        let mut current = self.current.subscribe();
        // The sender belongs to `self`, so it cannot have been dropped.
        let _ready = current.wait_for(|it| it.certificate.is_some()).await;
    }

    fn snapshot(&self) -> Arc<CurrentCredentials> {
        Arc::clone(&self.current.borrow())
    }

    fn certified_key(&self) -> Option<Arc<CertifiedKey>> {
        self.snapshot().certificate.as_ref().map(|(own, _)| Arc::clone(own))
    }

    /// Returns the identity of a certificate, if a trusted authority has signed it and it is valid at `now`.
    fn verify_certificate(
        &self,
        shown: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
        usage: KeyUsage,
    ) -> Result<CertificateIdentity, Error> {
        let broken = |error: webpki::Error| {
            Error::InvalidCertificate(rustls::CertificateError::Other(OtherError(Arc::new(error))))
        };
        // One snapshot for the whole check: the authorities may be replaced meanwhile.
        let current = self.snapshot();
        let algorithms = self.provider.signature_verification_algorithms.all;
        let certificate = EndEntityCert::try_from(shown).map_err(broken)?;
        let checked = certificate.verify_for_usage(
            algorithms,
            &current.anchors,
            intermediates,
            now,
            usage,
            None,
            None,
        );
        checked.map(drop).map_err(broken)?;
        // Only after the signature is verified do the names in the certificate mean anything.
        parse_identity(shown).map_err(broken)
    }
}

/// Returns the one identity that a certificate names; none or several are an error.
fn parse_identity(certificate: &CertificateDer<'_>) -> Result<CertificateIdentity, webpki::Error> {
    let certificate = EndEntityCert::try_from(certificate)?;
    let mut all = certificate.valid_uri_names().map(str::parse::<CertificateIdentity>);
    // A second URI would leave open which identity counts, so it is refused even if it is no identity.
    match (all.next(), all.next()) {
        (Some(Ok(identity)), None) => Ok(identity),
        _ => Err(webpki::Error::NameConstraintViolation),
    }
}

/// Returns the peer of the connection that carried this request.
///
/// A TLS server attaches a peer to each connection. One at a Unix socket or a plain address attaches none.
pub fn request_peer<T>(request: &tonic::Request<T>) -> TlsPeer {
    request.extensions().get::<TlsPeer>().cloned().unwrap_or(TlsPeer::Unauthenticated)
}

/// Returns the gRPC status for a denied request.
pub fn denied_status(denied: &peer::PeerDeniedError) -> tonic::Status {
    match denied {
        peer::PeerDeniedError::Anonymous => tonic::Status::unauthenticated(denied.to_string()),
        peer::PeerDeniedError::IdentityMismatch { .. }
        | peer::PeerDeniedError::RoleNotAllowed { .. } => {
            tonic::Status::permission_denied(denied.to_string())
        }
    }
}

/// Returns the TLS configuration of a client that requires `required_role` of the server; `with_certificate`: with a
/// client certificate.
pub(crate) fn client_config(
    credentials: &Arc<TlsCredentials>,
    required_role: Component,
    with_certificate: bool,
) -> ClientConfig {
    let verifier =
        Arc::new(ServerRoleVerifier { credentials: Arc::clone(credentials), required_role });
    let config = ClientConfig::builder_with_provider(Arc::clone(&credentials.provider));
    let config = config.with_protocol_versions(&[&TLS13]).expect("ring knows TLS 1.3");
    // "Dangerous" replaces the check of host names: servers are identified by role, and their addresses change.
    let config = config.dangerous().with_custom_certificate_verifier(verifier);
    let mut config = if with_certificate {
        config.with_client_cert_resolver(Arc::new(OwnCertResolver(Arc::clone(credentials))))
    } else {
        config.with_no_client_auth()
    };
    config.alpn_protocols = vec![ALPN_H2.to_vec()];
    // A resumed session would keep using a certificate that has been replaced.
    config.resumption = Resumption::disabled();
    config
}

/// Returns the TLS configuration of a server; `allows_anonymous`: also for clients that have no certificate yet.
pub(crate) fn server_config(
    credentials: &Arc<TlsCredentials>,
    allows_anonymous: bool,
) -> ServerConfig {
    let verifier =
        Arc::new(AnyRoleVerifier { credentials: Arc::clone(credentials), allows_anonymous });
    let config = ServerConfig::builder_with_provider(Arc::clone(&credentials.provider));
    let config = config.with_protocol_versions(&[&TLS13]).expect("ring knows TLS 1.3");
    let config = config.with_client_cert_verifier(verifier);
    let mut config = config.with_cert_resolver(Arc::new(OwnCertResolver(Arc::clone(credentials))));
    config.alpn_protocols = vec![ALPN_H2.to_vec()];
    // Without tickets no session is resumed: each handshake presents and checks the newest certificates.
    config.send_tls13_tickets = 0;
    config
}

/// Resolver that presents the newest certificate.
#[derive(Debug)]
struct OwnCertResolver(Arc<TlsCredentials>);

impl ResolvesClientCert for OwnCertResolver {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.0.certified_key()
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl ResolvesServerCert for OwnCertResolver {
    fn resolve(&self, _: server::ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.certified_key()
    }
}

/// Verifier that restricts a client to servers of one role.
#[derive(Debug)]
struct ServerRoleVerifier {
    credentials: Arc<TlsCredentials>,
    required_role: Component,
}

impl ServerCertVerifier for ServerRoleVerifier {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let usage = match self.required_role {
            // Activators connect to each other with client certificates; the identity states the role.
            Component::Activator => KeyUsage::client_auth(),
            Component::Controller | Component::Autoscaler | Component::Agent => {
                KeyUsage::server_auth()
            }
        };
        let identity = self.credentials.verify_certificate(shown, intermediates, now, usage)?;
        if identity.role != self.required_role {
            return Err(Error::General(format!("{identity} is no {}", self.required_role)));
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let provider = &self.credentials.provider;
        verify_tls12_signature(message, shown, signed, &provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let provider = &self.credentials.provider;
        verify_tls13_signature(message, shown, signed, &provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.credentials.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Verifier of client certificates: any role is accepted, since each call checks the role itself.
#[derive(Debug)]
struct AnyRoleVerifier {
    credentials: Arc<TlsCredentials>,
    allows_anonymous: bool,
}

impl ClientCertVerifier for AnyRoleVerifier {
    fn client_auth_mandatory(&self) -> bool {
        !self.allows_anonymous
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        shown: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let checked =
            self.credentials.verify_certificate(shown, intermediates, now, KeyUsage::client_auth());
        checked.map(|_| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<client::danger::HandshakeSignatureValid, Error> {
        let provider = &self.credentials.provider;
        verify_tls12_signature(message, shown, signed, &provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<client::danger::HandshakeSignatureValid, Error> {
        let provider = &self.credentials.provider;
        verify_tls13_signature(message, shown, signed, &provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.credentials.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests;
