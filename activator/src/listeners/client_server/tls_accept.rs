//! Shell: the handshake of a client's connection of TLS: its name, the certificate for it, and the end of failed ones.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use common::{link::error_chain, wire::NamespacedName};
use rustls::{
    ServerConfig,
    server::{Acceptor, ClientHello},
};
use tokio::{
    io::AsyncWriteExt as _,
    net::TcpStream,
    time::{Instant, sleep, timeout, timeout_at},
};
use tokio_rustls::LazyConfigAcceptor;
use tracing::debug;

use super::{ClientConnectionServer, SHUTDOWN_PREFACE_TIMEOUT};
use crate::{
    budget::TLS_BUFFER_BYTES,
    clients::{
        bounded_tcp::BoundedTcp, client_auth_result::ClientAuthResult,
        client_stream::AcceptedStream, connections::ClientConnection, socket::drain_bytes,
    },
    edge::client_certificate::describe_certificate,
    metrics::{HandshakeResult, TlsMetrics},
    routes::{index::HandshakeRules, service::RoutedService},
};

/// Alert `unrecognized_name` (RFC 6066 §3).
const UNRECOGNIZED_NAME: u8 = 112;
/// Alert `internal_error`: the fault is not the client's.
const INTERNAL_ERROR: u8 = 80;
/// Time for the certificate of names inside the cluster. The controller that this activator follows signs its own, and
/// may do so a little later than another one that has told clients of it.
const LOCAL_CERTIFICATE_TIMEOUT: Duration = Duration::from_secs(2);
/// Time between two looks for it.
const LOCAL_CERTIFICATE_INTERVAL: Duration = Duration::from_millis(20);
/// Response to a client that speaks HTTP without TLS.
const PLAIN_HTTP_RESPONSE: &[u8] = b"HTTP/1.1 400 Bad Request\r\n\
    content-type: text/plain; charset=utf-8\r\n\
    connection: close\r\n\
    content-length: 52\r\n\
    \r\n\
    This port speaks TLS: use an https:// URL instead.\r\n";
/// Number of bytes that are drained at once behind that response. Many clients may cause it at the same time.
const PLAIN_HTTP_DRAIN_PIECE: usize = 4 << 10;

/// Reason for which a handshake has brought no stream.
#[derive(Debug, thiserror::Error)]
enum HandshakeError {
    /// The client speaks HTTP without TLS on this connection.
    #[error("client speaks HTTP without TLS")]
    PlainHttp(TcpStream),
    /// No certificate is for this name (empty: the client names none), and no default is presented.
    #[error("no certificate for the name {0:?}")]
    NoCertificate(String),
    /// The host of this name asks for certificates of clients, and no authorities of these are known.
    #[error("no authorities of client certificates for the name {0:?}")]
    NoClientCa(String),
    /// The settings of the handshake cannot be made.
    #[error("settings of the handshake cannot be made")]
    Settings(#[source] rustls::Error),
    /// The connection has ended, or a message was refused.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl HandshakeError {
    /// Result to count.
    fn result(&self) -> HandshakeResult {
        match self {
            Self::PlainHttp(_) => HandshakeResult::PlainHttp,
            Self::NoCertificate(_) => HandshakeResult::NoCertificate,
            Self::NoClientCa(_) => HandshakeResult::NoClientCa,
            Self::Settings(_) => HandshakeResult::Refused,
            Self::Io(error) => match error.kind() {
                // Errors of rustls, among which are alerts of the client.
                io::ErrorKind::InvalidData => HandshakeResult::Refused,
                io::ErrorKind::TimedOut => HandshakeResult::Timeout,
                _ => HandshakeResult::Closed,
            },
        }
    }
}

/// Stream whose handshake is complete, with what its host is for.
#[derive(Debug)]
pub(super) struct AcceptedTls {
    pub(super) stream: AcceptedStream,
    /// Service that gets the bytes as raw TCP; `None`: they are HTTP.
    pub(super) tcp_service: Option<Arc<RoutedService>>,
}

/// Guard that counts a handshake once. One that is dropped before its end was closed in favour of other connections.
struct HandshakeGuard<'a> {
    metrics: &'a TlsMetrics,
    result: Option<HandshakeResult>,
}

impl Drop for HandshakeGuard<'_> {
    fn drop(&mut self) {
        self.metrics.count_handshake(self.result.take().unwrap_or(HandshakeResult::Closed));
    }
}

impl ClientConnectionServer {
    /// Completes the handshake of a client, and registers at `connection` what the client has shown if its host asks
    /// for that. `None`: the handshake has failed, and the connection is closed.
    ///
    /// `local` names the certificate of a connection to a service's own port, whatever name the client asks for.
    ///
    /// `deadline` bounds all steps. Meanwhile the connection is idle, so it is among those that are closed first at
    /// the bound on all connections.
    pub(super) async fn accept_tls(
        &self,
        stream: TcpStream,
        peer: SocketAddr,
        connection: &ClientConnection,
        deadline: Instant,
        local: Option<&NamespacedName>,
    ) -> Option<AcceptedTls> {
        let mut guard = HandshakeGuard { metrics: &self.forwarder.metrics.tls, result: None };
        let handshake = self.run_handshake(stream, connection, local);
        let error = match timeout_at(deadline, handshake).await {
            Ok(Ok(accepted)) => {
                guard.result = Some(HandshakeResult::Complete);
                return Some(accepted);
            }
            Ok(Err(error)) => error,
            Err(_late) => HandshakeError::Io(io::ErrorKind::TimedOut.into()),
        };
        // At no higher level: floods must not fill logs.
        debug!(client = %peer, result = ?error.result(), error = %error_chain(&error), "handshake failed");
        // Without a result the guard would count a client that has left.
        guard.result = Some(error.result());
        // Counted before the refusal is sent: a client that reads it slowly must not delay the count.
        drop(guard);
        if let HandshakeError::PlainHttp(stream) = error {
            // The client is gone, or has its response, or neither comes in time.
            let _ = timeout_at(deadline, refuse_plain_http(stream)).await;
        }
        None
    }

    /// Reads the client's name, chooses the certificate, and completes the handshake with it.
    async fn run_handshake(
        &self,
        stream: TcpStream,
        connection: &ClientConnection,
        local: Option<&NamespacedName>,
    ) -> Result<AcceptedTls, HandshakeError> {
        // Methods of HTTP begin with a capital letter, and no message of TLS does.
        if self.peek_first_byte(&stream).await?.is_ascii_uppercase() {
            return Err(HandshakeError::PlainHttp(stream));
        }
        let start = LazyConfigAcceptor::new(Acceptor::default(), BoundedTcp::new(stream)).await?;
        let name = start.client_hello().server_name().map(normalize_name);
        // The rules of a host are for connections from outside.
        let outside = name.as_deref().filter(|_| local.is_none());
        let routes = &self.forwarder.routes;
        if let Some(name) = outside.filter(|it| routes.passthrough_service(it).is_some()) {
            // The table did not name it so when the ClientHello was looked at, or it came too late. The certificate of
            // another host would be a wrong answer.
            let error = HandshakeError::NoCertificate(name.to_owned());
            let mut stream = start.io;
            let _ = stream.write_all(&alert_record(&error)).await;
            return Err(error);
        }
        let rules = outside.map(|it| routes.handshake_rules(it)).unwrap_or_default();
        let chosen = match local {
            Some(certificate) => self.wait_for_local_config(certificate).await,
            None => self.choose_config(&rules, name.as_deref(), &start.client_hello()),
        };
        let config = match chosen {
            // The gateway knows no protocol of the pod's, and must not choose HTTP for it.
            Ok(config) if rules.tcp_service.is_some() => without_alpn(&config),
            Ok(config) => config,
            Err(error) => {
                let mut stream = start.io;
                // A client that is gone needs no alert.
                let _ = stream.write_all(&alert_record(&error)).await;
                return Err(error);
            }
        };
        let handshake =
            start.into_stream_with(config, |it| it.set_buffer_limit(Some(TLS_BUFFER_BYTES)));
        // rustls checks the client's certificate here, so that what follows only records it.
        let stream = handshake.await?;
        if let Some(client_auth) = rules.client_auth {
            let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
            let certificate = chain.first().map(|it| describe_certificate(it));
            // Only a named host has a rule.
            let host = name.unwrap_or_default().into();
            connection.set_client_auth_result(ClientAuthResult { host, client_auth, certificate });
        }
        Ok(AcceptedTls { stream: stream.into(), tcp_service: rules.tcp_service })
    }

    /// Chooses the settings of a handshake for a client that asks for this name. Without the authorities that its host
    /// names, no client is accepted, also if certificates of clients are optional.
    fn choose_config(
        &self,
        rules: &HandshakeRules,
        name: Option<&str>,
        client: &ClientHello<'_>,
    ) -> Result<Arc<ServerConfig>, HandshakeError> {
        let shown_name = || name.unwrap_or_default().to_owned();
        let certificates = &self.forwarder.certificates;
        let certificate = certificates
            .choose_certificate(&rules.certificates, name, |it| it.is_usable_for(client));
        let certificate = certificate.ok_or_else(|| HandshakeError::NoCertificate(shown_name()))?;
        let Some(client_auth) = &rules.client_auth else {
            return Ok(Arc::clone(&certificate.config));
        };
        let ca = client_auth.ca.as_ref().and_then(|it| self.forwarder.client_cas.get(it));
        let ca = ca.ok_or_else(|| HandshakeError::NoClientCa(shown_name()))?;
        ca.config(&certificate, client_auth.is_optional).map_err(HandshakeError::Settings)
    }

    /// Waits for the settings of a handshake for names inside the cluster. No other certificate takes the place of
    /// theirs, since clients would not trust it.
    async fn wait_for_local_config(
        &self,
        name: &NamespacedName,
    ) -> Result<Arc<ServerConfig>, HandshakeError> {
        let begun = Instant::now();
        loop {
            if let Some(certificate) = self.forwarder.certificates.find(name) {
                return Ok(Arc::clone(&certificate.config));
            }
            if begun.elapsed() >= LOCAL_CERTIFICATE_TIMEOUT {
                return Err(HandshakeError::NoCertificate(name.to_string()));
            }
            sleep(LOCAL_CERTIFICATE_INTERVAL).await;
        }
    }

    /// Waits for the client's first byte, which stays unread. Fails if none comes before the client closes, or soon
    /// after the activator has stopped: a silent client must not delay that.
    pub(super) async fn peek_first_byte(&self, stream: &TcpStream) -> io::Result<u8> {
        let mut first = [0];
        let count = {
            let peek = stream.peek(&mut first);
            tokio::pin!(peek);
            // Biased: a byte that is there counts, also after the activator has stopped.
            tokio::select! {
                biased;
                peeked = peek.as_mut() => peeked?,
                () = self.forwarder.close_when_idle.cancelled() => {
                    let late = |_elapsed| io::Error::from(io::ErrorKind::ConnectionAborted);
                    timeout(SHUTDOWN_PREFACE_TIMEOUT, peek).await.map_err(late)??
                }
            }
        };
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(first[0])
    }
}

/// Settings of a handshake that selects no protocol, whatever the client offers.
fn without_alpn(config: &ServerConfig) -> Arc<ServerConfig> {
    let mut config = config.clone();
    config.alpn_protocols.clear();
    Arc::new(config)
}

/// Record with the fatal alert for a handshake that ends before the activator has sent anything. Clients of every
/// version read it.
fn alert_record(error: &HandshakeError) -> [u8; 7] {
    let alert = match error {
        HandshakeError::NoCertificate(_) => UNRECOGNIZED_NAME,
        HandshakeError::NoClientCa(_)
        | HandshakeError::Settings(_)
        | HandshakeError::PlainHttp(_)
        | HandshakeError::Io(_) => INTERNAL_ERROR,
    };
    [0x15, 3, 3, 0, 2, 2, alert]
}

/// Name of a ClientHello as hosts are compared: lower case, without final dot.
fn normalize_name(name: &str) -> String {
    name.trim_end_matches('.').to_ascii_lowercase()
}

/// Responds to HTTP without TLS, and reads what the client still sends: a close with unread bytes would reset the
/// connection, and the client might never see the response.
async fn refuse_plain_http(mut stream: TcpStream) {
    if stream.write_all(PLAIN_HTTP_RESPONSE).await.is_err() || stream.shutdown().await.is_err() {
        return;
    }
    let mut stream = AcceptedStream::from(stream);
    drain_bytes(PLAIN_HTTP_DRAIN_PIECE, |cx, into| stream.poll_read_tcp(cx, into)).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_response_to_plain_http_has_its_length() {
        let response = std::str::from_utf8(PLAIN_HTTP_RESPONSE).expect("text");
        let (head, body) = response.split_once("\r\n\r\n").expect("a head");
        assert!(head.ends_with(&format!("content-length: {}", body.len())), "{head}");
    }
}
