//! Shell: queries to pods for the connections of clients that are in use, and for those that become idle.

use std::{collections::BTreeMap, io, net::SocketAddr, time::Duration};

use datapath::abi::ConnectionActivity;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, task::JoinSet, time::timeout};
use tracing::debug;

use crate::pods::{
    idle_positions::IdleUpdates,
    namespace::POD_SERVER_PORT,
    pod_server::{idle, in_use as page},
};

/// Timeout of a pod's response. Without one nothing is known of the pod's connections, and a later round sends a query
/// again.
const QUERY_TIMEOUT: Duration = Duration::from_millis(500);

/// Connection by both its addresses, the client's first.
pub(super) type ClientPodAddresses = (SocketAddr, SocketAddr);

/// Sends queries to the pods, and returns the use of each connection that they report.
///
/// If no agent responds in a pod's namespace, or a policy drops the query, its connections are missing in the result.
pub(super) async fn query_in_use(
    connections: impl IntoIterator<Item = ClientPodAddresses>,
) -> BTreeMap<ClientPodAddresses, ConnectionActivity> {
    // One query for each port of a pod: its agent answers for all clients at once.
    let mut clients_of = BTreeMap::<SocketAddr, Vec<SocketAddr>>::new();
    for (client, pod) in connections {
        clients_of.entry(pod).or_default().push(client);
    }
    // All at the same time, because each may wait for its whole timeout.
    let mut queries = JoinSet::new();
    for (pod, clients) in clients_of {
        for chunk in clients.chunks(page::QUERY_ADDRESSES_MAX) {
            let query = page::encode_query(chunk);
            queries.spawn(async move { (pod, query_pod(pod, query).await) });
        }
    }
    let mut activities = BTreeMap::new();
    while let Some(result) = queries.join_next().await {
        match result {
            Ok((pod, Ok(clients))) => {
                activities.extend(
                    clients.into_iter().map(|(client, activity)| ((client, pod), activity)),
                );
            }
            // No entry means unknown, and never idle: such a connection stays open while its pod exists.
            Ok((pod, Err(error))) => debug!(%pod, %error, "a pod does not report its connections"),
            Err(panic) => debug!(%panic, "the query of a pod failed"),
        }
    }
    activities
}

async fn query_pod(
    pod: SocketAddr,
    query: String,
) -> io::Result<BTreeMap<SocketAddr, ConnectionActivity>> {
    let at = SocketAddr::new(pod.ip(), POD_SERVER_PORT);
    let response = send_query(at, page::PATH, query, QUERY_TIMEOUT).await?;
    page::parse_response(&response).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Waits until connections of these clients to a pod have become idle, after the event with the number `after`, but no
/// longer than `wait`. Returns their positions.
///
/// An error if the pod's agent does not respond, or does not know the query.
pub(super) async fn query_idle(
    pod: SocketAddr,
    after: u64,
    wait: Duration,
    clients: &[SocketAddr],
) -> io::Result<IdleUpdates> {
    let at = SocketAddr::new(pod.ip(), POD_SERVER_PORT);
    let query = idle::encode_query(after, wait, clients);
    let response = send_query(at, idle::PATH, query, wait + QUERY_TIMEOUT).await?;
    idle::parse_response(&response).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Sends a query to a pod server, and returns the response.
async fn send_query(
    at: SocketAddr,
    path: &'static str,
    query: String,
    limit: Duration,
) -> io::Result<String> {
    timeout(limit, exchange(at, path, query)).await.unwrap_or_else(|elapsed| Err(elapsed.into()))
}

async fn exchange(at: SocketAddr, path: &'static str, query: String) -> io::Result<String> {
    let stream = TcpStream::connect(at).await?;
    // Zero linger resets the connection, so that it leaves no TIME_WAIT behind.
    stream.set_zero_linger()?;
    let (mut requests, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    let request = Request::post(path)
        .header(header::HOST, at.to_string())
        .body(Full::new(Bytes::from(query)))
        .map_err(io::Error::other)?;
    // Only the whole response counts: in a cut list, connections in use would look unknown.
    let exchange = async {
        let response = requests.send_request(request).await.map_err(io::Error::other)?;
        let status = response.status();
        if status != StatusCode::OK {
            return Err(io::Error::other(format!("status {status}")));
        }
        // Bounded, because another program may listen at this port of the pod.
        let body = Limited::new(response.into_body(), page::BODY_BYTES_MAX).collect().await;
        let bytes = body.map_err(io::Error::other)?.to_bytes();
        str::from_utf8(&bytes).map(str::to_owned).map_err(io::Error::other)
    };
    // A connection that ends before the response is an error, and must not wait for the timeout.
    tokio::select! {
        response = exchange => response,
        ended = connection => {
            ended.map_err(io::Error::other)?;
            Err(io::ErrorKind::UnexpectedEof.into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn nothing_is_known_of_a_pod_that_does_not_respond() {
        // No process listens there.
        let connections = [4_711, 4_712].map(|port| {
            let client = SocketAddr::from(([127, 0, 0, 1], port));
            (client, SocketAddr::from(([127, 99, 99, 99], 80)))
        });
        assert_eq!(query_in_use(connections).await, BTreeMap::new());
    }
}
