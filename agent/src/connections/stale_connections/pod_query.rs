//! Shell: queries to pods for the connections of clients that are in use, and for those that become idle.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use datapath::abi::ConnectionActivity;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::{
    net::TcpStream,
    sync::Semaphore,
    task::JoinSet,
    time::{Instant, timeout, timeout_at},
};
use tracing::debug;

use crate::{
    lock::lock,
    pods::{
        idle_positions::IdleUpdates,
        namespace::POD_SERVER_PORT,
        pod_server::{idle, in_use as page},
    },
};

/// Timeout of a pod's response. Without one nothing is known of the pod's connections, and a later round sends a query
/// again.
const QUERY_TIMEOUT: Duration = Duration::from_millis(500);

/// Connection by both its addresses, the client's first.
pub(super) type ClientPodAddresses = (SocketAddr, SocketAddr);

/// Clients of the connections that a round is about to close, by pod.
type ClientsByPod = BTreeMap<SocketAddr, Vec<SocketAddr>>;

/// Most queries for connections in use that are under way at a time, in all rounds of the node together. Each one has a
/// socket, and pods that do not respond keep theirs for the whole timeout.
const QUERIES_MAX: usize = 64;
/// Time in which the queries of a round begin. What its scan has found is too old afterwards.
const BEGIN_TIME: Duration = Duration::from_secs(1);

/// Queries for connections in use, at most [`QUERIES_MAX`] at a time. Cheap to clone; all clones share the bound.
#[derive(Clone, Debug)]
pub(super) struct InUseQueries {
    /// Permits of the queries that may be under way.
    turns: Arc<Semaphore>,
    begin_time: Duration,
    /// First pod that the last round with such pods has left out. Rounds begin with it: pods that do not respond must not
    /// keep others from their turn.
    next_pod: Arc<Mutex<Option<SocketAddr>>>,
}

/// Result of the queries of one round.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct InUseReport {
    /// Use of each connection that the pods report. Those of pods whose agent does not respond, or which a policy keeps
    /// from it, are missing.
    pub(super) activities: BTreeMap<ClientPodAddresses, ConnectionActivity>,
    /// Pods that had no turn for a query. Their connections must stay open.
    pub(super) left_out: BTreeSet<SocketAddr>,
}

impl InUseQueries {
    /// Makes queries with the bounds of an agent.
    pub(super) fn new() -> Self {
        Self {
            turns: Arc::new(Semaphore::new(QUERIES_MAX)),
            begin_time: BEGIN_TIME,
            next_pod: Arc::default(),
        }
    }

    /// Sends queries to the pods of these connections, and returns what they report.
    pub(super) async fn send(
        &self,
        connections: impl IntoIterator<Item = ClientPodAddresses>,
    ) -> InUseReport {
        // One query for each port of a pod: its agent answers for all clients at once.
        let mut clients_of = ClientsByPod::new();
        for (client, pod) in connections {
            clients_of.entry(pod).or_default().push(client);
        }
        self.send_by(clients_of, query_pod).await
    }

    /// Sends the queries by `query`, many at a time: each may wait for its whole timeout.
    async fn send_by<R>(
        &self,
        clients_of: ClientsByPod,
        query: impl Fn(SocketAddr, String) -> R,
    ) -> InUseReport
    where
        R: Future<Output = io::Result<BTreeMap<SocketAddr, ConnectionActivity>>> + Send + 'static,
    {
        let (mut report, mut queries) = (InUseReport::default(), JoinSet::new());
        let begin_until = Instant::now() + self.begin_time;
        let (first_pod, mut next_pod) = (*lock(&self.next_pod), None);
        for (pod, clients) in order_from(first_pod, clients_of) {
            for chunk in clients.chunks(page::QUERY_ADDRESSES_MAX) {
                let turn = Arc::clone(&self.turns).acquire_owned();
                let Ok(Ok(turn)) = timeout_at(begin_until, turn).await else {
                    report.left_out.insert(pod);
                    next_pod = next_pod.or(Some(pod));
                    break;
                };
                let response = query(pod, page::encode_query(chunk));
                queries.spawn(async move {
                    let result = response.await;
                    drop(turn);
                    (pod, result)
                });
            }
        }
        // A round that has reached all of its pods says nothing about those that another one has left out.
        if next_pod.is_some() {
            *lock(&self.next_pod) = next_pod;
        }
        while let Some(result) = queries.join_next().await {
            match result {
                Ok((pod, Ok(clients))) => report.activities.extend(
                    clients.into_iter().map(|(client, activity)| ((client, pod), activity)),
                ),
                // No entry means unknown, and never idle: such a connection stays open while its pod exists.
                Ok((pod, Err(error))) => {
                    debug!(%pod, %error, "a pod does not report its connections")
                }
                Err(panic) => debug!(%panic, "the query of a pod failed"),
            }
        }
        report
    }
}

/// Returns the pods in the order of their addresses, with `first` and those after it before the others.
fn order_from(
    first: Option<SocketAddr>,
    mut clients_of: ClientsByPod,
) -> impl Iterator<Item = (SocketAddr, Vec<SocketAddr>)> {
    let begin = first.map_or_else(ClientsByPod::new, |first| clients_of.split_off(&first));
    begin.into_iter().chain(clients_of)
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
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use tokio::time::sleep;

    use super::*;

    /// Time after which a pod of these tests responds.
    const RESPONSE_TIME: Duration = Duration::from_millis(300);

    /// Returns queries with other bounds than an agent's.
    fn queries(turns: usize, begin_time: Duration) -> InUseQueries {
        InUseQueries { turns: Arc::new(Semaphore::new(turns)), begin_time, ..InUseQueries::new() }
    }

    fn pod(host: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, host], 80))
    }

    fn client() -> SocketAddr {
        SocketAddr::from(([10, 0, 1, 1], 4_711))
    }

    /// Returns one client of each of these pods.
    fn clients_of(hosts: std::ops::RangeInclusive<u8>) -> ClientsByPod {
        hosts.map(|host| (pod(host), vec![client()])).collect()
    }

    #[tokio::test]
    async fn nothing_is_known_of_a_pod_that_does_not_respond() {
        // No process listens there.
        let connections = [4_711, 4_712].map(|port| {
            let client = SocketAddr::from(([127, 0, 0, 1], port));
            (client, SocketAddr::from(([127, 99, 99, 99], 80)))
        });
        assert_eq!(InUseQueries::new().send(connections).await, InUseReport::default());
    }

    #[tokio::test(start_paused = true)]
    async fn rounds_share_the_bound_on_queries_and_reach_all_pods() {
        let queries = queries(4, BEGIN_TIME);
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let query = |_: SocketAddr, _: String| {
            let (running, most) = (Arc::clone(&running), Arc::clone(&most));
            async move {
                most.fetch_max(running.fetch_add(1, Relaxed) + 1, Relaxed);
                sleep(RESPONSE_TIME).await;
                running.fetch_sub(1, Relaxed);
                io::Result::Ok(BTreeMap::from([(client(), ConnectionActivity::Idle)]))
            }
        };
        let (first, second) = tokio::join!(
            queries.send_by(clients_of(1..=6), query),
            queries.send_by(clients_of(1..=6), query),
        );
        assert_eq!(most.load(Relaxed), 4);
        for report in [first, second] {
            assert_eq!((report.activities.len(), report.left_out.len()), (6, 0));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn pods_without_a_turn_are_left_out_and_have_the_first_turn_of_the_next_round() {
        let queries = queries(1, RESPONSE_TIME / 2);
        let asked = Mutex::new(Vec::new());
        let query = |pod: SocketAddr, _: String| {
            lock(&asked).push(pod);
            async {
                sleep(RESPONSE_TIME).await;
                io::Result::Err(io::ErrorKind::TimedOut.into())
            }
        };
        for left_out in [[pod(2), pod(3)], [pod(1), pod(3)], [pod(1), pod(2)]] {
            let report = queries.send_by(clients_of(1..=3), query).await;
            let expected = InUseReport { left_out: left_out.into(), ..InUseReport::default() };
            assert_eq!(report, expected);
        }
        assert_eq!(*lock(&asked), [pod(1), pod(2), pod(3)]);
        // A round of few pods, which are all asked, comes between two of all pods.
        for (hosts, left_out) in [(1..=3, 2), (1..=1, 0), (1..=3, 2)] {
            let report = queries.send_by(clients_of(hosts), query).await;
            assert_eq!(report.left_out.len(), left_out);
        }
        assert_eq!(lock(&asked)[3..], [pod(1), pod(1), pod(2)]);
        let report = queries.send_by(clients_of(2..=2), query).await;
        assert_eq!(report, InUseReport::default(), "the pod at which it began has left");
    }
}
