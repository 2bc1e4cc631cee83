//! Shell: mutual TLS between the parts.
//!
//! Every part makes its own key, which never leaves its process, and has the controller sign a certificate for it
//! (`enrol`). Both sides of a connection show theirs; names and addresses prove nothing, only the identity in the
//! certificate does ([`peer()`]). Certificates live for an hour and are replaced in place: [`Credentials`] hands every
//! new handshake what is newest, and connections that stand go on.
//!
//! | what could be tried | what stands against it |
//! |---|---|
//! | listening in, changing messages | TLS 1.3 on every stream between pods |
//! | posing as a controller | clients trust only Rouse's authorities and ask for the role `controller` |
//! | posing as an agent of another node | the node in the certificate comes from the API server, not from the caller |
//! | a stolen certificate | useless after at most an hour, and without its key at once |
//! | holding connections open without a word | handshakes end after 5 s, connections without a certificate after 30 s, both few a source |

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
pub mod enrol;
pub mod peer;

use peer::{Holder, Identity, Peer};

/// What HTTP/2 is called in a handshake.
const H2: &[u8] = b"h2";

/// Keys or certificates could not be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// An authority's certificate makes no sense.
    #[error("an authority's certificate cannot be used")]
    Authority(#[source] webpki::Error),
    /// The own key makes no sense.
    #[error("the key cannot be used")]
    Key(#[source] Error),
    /// The own certificate makes no sense.
    #[error("the certificate cannot be used")]
    Certificate(#[source] webpki::Error),
    /// The own certificate names nobody.
    #[error("the certificate names nobody")]
    Nobody,
}

/// A process's own certificate and whom it trusts. Both may change at any time.
pub struct Credentials {
    current: watch::Sender<Arc<Current>>,
    provider: Arc<CryptoProvider>,
}

#[derive(Default)]
struct Current {
    own: Option<(Arc<CertifiedKey>, Arc<Identity>)>,
    anchors: Vec<TrustAnchor<'static>>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let current = self.now();
        out.debug_struct("Credentials")
            .field("own", &current.own.as_ref().map(|(_, identity)| identity.to_string()))
            .field("authorities", &current.anchors.len())
            .finish()
    }
}

impl Credentials {
    /// Nobody yet, who trusts nobody.
    pub fn new() -> Arc<Self> {
        let provider = Arc::new(ring::default_provider());
        Arc::new(Self { current: watch::Sender::new(Arc::default()), provider })
    }

    /// From now on exactly these authorities are trusted.
    pub fn trust(&self, authorities: &[CertificateDer<'_>]) -> Result<(), TlsError> {
        let anchor = |it| anchor_from_trusted_cert(it).map(|it| it.to_owned());
        let anchors: Result<Vec<_>, _> = authorities.iter().map(anchor).collect();
        let anchors = anchors.map_err(TlsError::Authority)?;
        self.current.send_modify(|it| *it = Arc::new(Current { own: it.own.clone(), anchors }));
        Ok(())
    }

    /// From now on this is shown: a chain, its own certificate first, and that one's key in PKCS#8.
    pub fn show(
        &self,
        chain: Vec<CertificateDer<'static>>,
        key: PrivatePkcs8KeyDer<'static>,
    ) -> Result<Arc<Identity>, TlsError> {
        let first = chain.first().ok_or(TlsError::Nobody)?;
        let identity = Arc::new(identity_of(first).map_err(TlsError::Certificate)?);
        let key = ring::sign::any_supported_type(&PrivateKeyDer::Pkcs8(key));
        let own = CertifiedKey::new(chain, key.map_err(TlsError::Key)?);
        own.keys_match().map_err(TlsError::Key)?;
        let own = Some((Arc::new(own), Arc::clone(&identity)));
        self.current.send_modify(|it| {
            *it = Arc::new(Current { own: own.clone(), anchors: it.anchors.clone() });
        });
        Ok(identity)
    }

    /// Whom the own certificate speaks for.
    pub fn identity(&self) -> Option<Arc<Identity>> {
        self.now().own.as_ref().map(|(_, identity)| Arc::clone(identity))
    }

    /// Waits until there is a certificate to show.
    pub async fn ready(&self) {
        let mut current = self.current.subscribe();
        // The sender is ours, so it cannot have gone.
        let _ready = current.wait_for(|it| it.own.is_some()).await;
    }

    fn now(&self) -> Arc<Current> {
        Arc::clone(&self.current.borrow())
    }

    fn key(&self) -> Option<Arc<CertifiedKey>> {
        self.now().own.as_ref().map(|(own, _)| Arc::clone(own))
    }

    /// Whom a certificate speaks for, if an authority says so at `now`.
    fn check(
        &self,
        shown: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
        usage: KeyUsage,
    ) -> Result<Identity, Error> {
        let broken = |error: webpki::Error| {
            Error::InvalidCertificate(rustls::CertificateError::Other(OtherError(Arc::new(error))))
        };
        let current = self.now();
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
        identity_of(shown).map_err(broken)
    }
}

/// The one identity that a certificate names.
fn identity_of(certificate: &CertificateDer<'_>) -> Result<Identity, webpki::Error> {
    let certificate = EndEntityCert::try_from(certificate)?;
    let mut all = certificate.valid_uri_names().map(str::parse::<Identity>);
    match (all.next(), all.next()) {
        (Some(Ok(identity)), None) => Ok(identity),
        _ => Err(webpki::Error::NameConstraintViolation),
    }
}

/// Who is on the other end of the connection that brought this request.
pub fn peer<T>(request: &tonic::Request<T>) -> Peer {
    request.extensions().get::<Peer>().cloned().unwrap_or(Peer::Unchecked)
}

/// What an intruder is told.
pub fn status(denied: &peer::Denied) -> tonic::Status {
    match denied {
        peer::Denied::Anonymous => tonic::Status::unauthenticated(denied.to_string()),
        peer::Denied::Other { .. } | peer::Denied::Role { .. } => {
            tonic::Status::permission_denied(denied.to_string())
        }
    }
}

/// How a client connects to a `server`; `named`: showing who it is.
pub(crate) fn client_config(
    credentials: &Arc<Credentials>,
    server: Holder,
    named: bool,
) -> ClientConfig {
    let verifier = Arc::new(OfServers { credentials: Arc::clone(credentials), server });
    let config = ClientConfig::builder_with_provider(Arc::clone(&credentials.provider));
    let config = config.with_protocol_versions(&[&TLS13]).expect("ring knows TLS 1.3");
    let config = config.dangerous().with_custom_certificate_verifier(verifier);
    let mut config = if named {
        config.with_client_cert_resolver(Arc::new(Own(Arc::clone(credentials))))
    } else {
        config.with_no_client_auth()
    };
    config.alpn_protocols = vec![H2.to_vec()];
    // A resumed session would go on with a certificate that has been replaced.
    config.resumption = Resumption::disabled();
    config
}

/// How a server is connected to; `open`: also by those who have no certificate yet.
pub(crate) fn server_config(credentials: &Arc<Credentials>, open: bool) -> ServerConfig {
    let verifier = Arc::new(OfClients { credentials: Arc::clone(credentials), open });
    let config = ServerConfig::builder_with_provider(Arc::clone(&credentials.provider));
    let config = config.with_protocol_versions(&[&TLS13]).expect("ring knows TLS 1.3");
    let config = config.with_client_cert_verifier(verifier);
    let mut config = config.with_cert_resolver(Arc::new(Own(Arc::clone(credentials))));
    config.alpn_protocols = vec![H2.to_vec()];
    config.send_tls13_tickets = 0;
    config
}

/// Shows the newest certificate.
#[derive(Debug)]
struct Own(Arc<Credentials>);

impl ResolvesClientCert for Own {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.0.key()
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl ResolvesServerCert for Own {
    fn resolve(&self, _: server::ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.key()
    }
}

/// Lets a client talk to servers of one role only.
#[derive(Debug)]
struct OfServers {
    credentials: Arc<Credentials>,
    server: Holder,
}

impl ServerCertVerifier for OfServers {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let usage = match self.server {
            // Known to each other as clients: what they are stands in the identity.
            Holder::Activator => KeyUsage::client_auth(),
            Holder::Controller | Holder::Autoscaler | Holder::Agent => KeyUsage::server_auth(),
        };
        let identity = self.credentials.check(shown, intermediates, now, usage)?;
        if identity.holder != self.server {
            return Err(Error::General(format!("{identity} is no {}", self.server)));
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

/// Lets in clients whose certificate an authority signed, whatever their role: that is judged call by call.
#[derive(Debug)]
struct OfClients {
    credentials: Arc<Credentials>,
    open: bool,
}

impl ClientCertVerifier for OfClients {
    fn client_auth_mandatory(&self) -> bool {
        !self.open
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
        let checked = self.credentials.check(shown, intermediates, now, KeyUsage::client_auth());
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
