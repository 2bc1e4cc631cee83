//! Shell: one connection to one replica, with or without TLS.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use http::Uri;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::{self, Channel};

use super::LinkError;
use crate::{
    component::Component,
    replicas::ReplicaEndpoint,
    tls::{TlsCredentials, client_config},
};

/// Keepalive interval and timeout: a dead TCP peer is found within their sum; Unix sockets report it at once.
pub(super) const KEEPALIVE: Duration = Duration::from_secs(5);
/// Connect timeout, since a machine that is down does not answer at all.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

fn transport_endpoint(
    endpoint: &ReplicaEndpoint,
    uri: String,
) -> Result<transport::Endpoint, LinkError> {
    let bad = |_| LinkError::Endpoint { endpoint: endpoint.to_string() };
    let to = transport::Endpoint::from_shared(uri).map_err(bad)?.connect_timeout(CONNECT_TIMEOUT);
    Ok(to.http2_keep_alive_interval(KEEPALIVE).keep_alive_timeout(KEEPALIVE))
}

/// Opens a connection without TLS.
pub(super) async fn dial_plain(to: &ReplicaEndpoint) -> Result<Channel, LinkError> {
    let failed = |source| LinkError::Connect { endpoint: to.to_string(), source };
    transport_endpoint(to, to.to_string())?.connect().await.map_err(failed)
}

/// Opens a TLS connection to a replica whose certificate proves `component`; `with_certificate`: with a client
/// certificate.
pub(crate) async fn dial_tls(
    address: SocketAddr,
    credentials: &Arc<TlsCredentials>,
    component: Component,
    with_certificate: bool,
) -> Result<Channel, LinkError> {
    let to = ReplicaEndpoint::Tcp { address, tls: true };
    let failed = |source| LinkError::Connect { endpoint: to.to_string(), source };
    let tls = TlsConnector::from(Arc::new(client_config(credentials, component, with_certificate)));
    let connect = tower::service_fn(move |_: Uri| {
        let tls = tls.clone();
        async move {
            let socket = TcpStream::connect(address).await?;
            socket.set_nodelay(true)?;
            let stream = tls.connect(ServerName::from(address.ip()), socket).await?;
            Ok::<_, io::Error>(TokioIo::new(stream))
        }
    });
    // The connector does TLS itself, so tonic gets an `http` URI, which only names the authority of the calls.
    let uri = format!("http://{address}");
    transport_endpoint(&to, uri)?.connect_with_connector(connect).await.map_err(failed)
}
