//! Clients of TLS that take any certificate: tests compare the one that they got.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{io, net::SocketAddr, sync::Arc};

use common::{certificates, fixtures::certificates::TestCertificate, wire::NamespacedName};
use rustls::{
    ALL_VERSIONS, AlertDescription, ClientConfig, DigitallySignedStruct, Error, SignatureScheme,
    SupportedProtocolVersion,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject as _},
    sign::SingleCertAndKey,
};
use tokio::{
    io::{AsyncWrite, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;

use crate::harness::{ActivatorFixture, LONG};

pub type TlsClient = tokio_rustls::client::TlsStream<TcpStream>;

/// Public host of the service.
pub const HOST: &str = "hello.default.example.com";

/// Settings of a client that offers these protocols by ALPN, in any version of TLS.
pub fn client_config(alpn: &[&str]) -> ClientConfig {
    versioned_config(ALL_VERSIONS, alpn)
}

/// Settings of a client that offers these versions, and these protocols by ALPN.
pub fn versioned_config(
    versions: &[&'static SupportedProtocolVersion],
    alpn: &[&str],
) -> ClientConfig {
    let provider = Arc::new(ring::default_provider());
    let verifier = Arc::new(AnyCertificate(Arc::clone(&provider)));
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|it| it.as_bytes().to_vec()).collect();
    config
}

/// Settings of a client that shows this certificate if it is asked for one.
pub fn client_auth_config(
    versions: &[&'static SupportedProtocolVersion],
    alpn: &[&str],
    issued: &TestCertificate,
) -> ClientConfig {
    let key = certificates::load(&issued.material()).unwrap().key;
    let mut config = versioned_config(versions, alpn);
    config.client_auth_cert_resolver = Arc::new(SingleCertAndKey::from(key));
    config
}

/// Connects and completes the handshake for `name`, which may be an address.
pub async fn open(
    address: SocketAddr,
    config: impl Into<Arc<ClientConfig>>,
    name: &str,
) -> io::Result<TlsClient> {
    handshake(TcpStream::connect(address).await?, config, name).await
}

/// Completes the handshake for `name` on a connection.
pub async fn handshake(
    stream: TcpStream,
    config: impl Into<Arc<ClientConfig>>,
    name: &str,
) -> io::Result<TlsClient> {
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let handshake = TlsConnector::from(config.into()).connect(name, stream);
    tokio::time::timeout(LONG, handshake).await.expect("ends in time")
}

/// Sends bytes, also those that TLS still holds.
pub async fn send(stream: &mut (impl AsyncWrite + Unpin), bytes: impl AsRef<[u8]>) {
    stream.write_all(bytes.as_ref()).await.unwrap();
    stream.flush().await.unwrap();
}

/// Fatal alert because of which a handshake failed.
pub fn received_alert(error: &io::Error) -> Option<AlertDescription> {
    match error.get_ref()?.downcast_ref::<Error>()? {
        Error::AlertReceived(alert) => Some(*alert),
        _ => None,
    }
}

/// Certificate that the server has presented.
pub fn presented(client: &TlsClient) -> CertificateDer<'static> {
    client.get_ref().1.peer_certificates().unwrap()[0].clone()
}

/// Certificate itself, without its chain.
pub fn leaf(issued: &TestCertificate) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(issued.chain_pem.as_bytes()).unwrap()
}

/// Puts a certificate in force, as the default one.
pub fn set_default(fixture: &mut ActivatorFixture, issued: &TestCertificate) {
    let name = NamespacedName::new("rouse-system", "default");
    fixture.apply_change(|table| {
        table.certificates.insert(name.clone(), issued.entry(&name));
        table.settings.edge.certificates = vec![name];
    });
}

/// Verifier that checks only that the server has the key of the certificate that it presents.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, shown, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, shown, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
