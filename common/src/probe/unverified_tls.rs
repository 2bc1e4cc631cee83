//! Shell: TLS for probes, without a check of the certificate, as in Kubernetes' own probes.

use std::sync::Arc;

use rustls::{
    ClientConfig, DigitallySignedStruct, Error, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

/// Opens TLS on a connection to `host`, which is a name or an address.
pub(super) async fn connect_unverified(
    stream: TcpStream,
    host: String,
) -> Result<TlsStream<TcpStream>, String> {
    let failed = |error: &dyn std::fmt::Display| format!("cannot open TLS: {error}");
    let provider = Arc::new(ring::default_provider());
    let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| failed(&error))?
        // As in the kubelet, which verifies no certificate of a probed pod.
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(UncheckedCertVerifier(provider)))
        .with_no_client_auth();
    let name = ServerName::try_from(host).map_err(|error| failed(&error))?;
    let connector = TlsConnector::from(Arc::new(config));
    connector.connect(name, stream).await.map_err(|error| failed(&error))
}

#[derive(Debug)]
struct UncheckedCertVerifier(Arc<CryptoProvider>);

impl ServerCertVerifier for UncheckedCertVerifier {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
