//! Shell: `POST /in-use`, by which the agent of a client's node learns which of the client's connections are in use.
//!
//! The query is a list of addresses, one a line: the client's ends of connections to this pod. The response has one
//! line for each known connection: `busy ADDRESS` if a message is under way, `idle ADDRESS` if none is.
//! `no-request ADDRESS` means that no request is under way, but perhaps a frame of HTTP/2. Opaque connections have no
//! line. A client's node sees when bytes pass, and not which message they belong to. A response that pauses looks to it
//! like one that has ended. The eBPF programs on the pod's node follow the messages.
//!
//! Any client that reaches the pod may send a query. It learns only if a connection that it can name is in use.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{AddrParseError, SocketAddr},
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    extract::State,
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use datapath::abi::ConnectionActivity;
use tokio::{sync::watch, task::spawn_blocking, time::sleep};
use tracing::warn;

use super::PodServerState;
use crate::{
    kernel::maps::connection_storage::ConnectionStorage, lock::lock, net::sockdiag::SockDiag,
};

/// Path of the query on the pod server.
pub(crate) const PATH: &str = "/in-use";
/// Highest number of bytes of a query or a response.
pub(crate) const BODY_BYTES_MAX: usize = 64 * 1024;
/// Highest number of addresses in one query. A line has at most 47 bytes of address, a word of 11, and a line end.
pub(crate) const QUERY_ADDRESSES_MAX: usize = 1_000;
/// Pause after each scan, so that constant queries cost little.
const SCAN_PAUSE: Duration = Duration::from_millis(5);

/// Encodes a query.
pub(crate) fn encode_query(clients: &[SocketAddr]) -> String {
    clients.iter().map(|at| format!("{at}\n")).collect()
}

/// Parses a query.
fn parse_query(query: &str) -> Result<BTreeSet<SocketAddr>, AddrParseError> {
    query.lines().map(str::parse).collect()
}

/// First word of a connection's line in a response.
const USE_WORDS: [(ConnectionActivity, &str); 3] = [
    (ConnectionActivity::MessageInFlight, "busy"),
    (ConnectionActivity::Idle, "idle"),
    (ConnectionActivity::NoRequestInFlight, "no-request"),
];

fn encode_response(in_use: impl IntoIterator<Item = (SocketAddr, ConnectionActivity)>) -> String {
    let word =
        |activity| USE_WORDS.iter().find(|(it, _)| *it == activity).map_or("", |(_, word)| word);
    in_use.into_iter().map(|(at, activity)| format!("{} {at}\n", word(activity))).collect()
}

/// Parses a response: the use of each client's connection that is known. `None` if it is malformed.
pub(crate) fn parse_response(response: &str) -> Option<BTreeMap<SocketAddr, ConnectionActivity>> {
    let line = |line: &str| {
        let (first_word, at) = line.split_once(' ')?;
        let (activity, _) = USE_WORDS.into_iter().find(|(_, word)| *word == first_word)?;
        Some((at.parse().ok()?, activity))
    };
    response.lines().map(line).collect()
}

/// Lookup of the use of a pod's connections. Cheap to clone.
///
/// One scan runs at a time. Queries that arrive meanwhile wait for the next scan, which is for all of them. So each
/// node has its response after two scans, however many send queries.
#[derive(Clone, Debug)]
pub(super) struct InUseLookup {
    /// Sock_diag socket in the pod's namespace.
    diag: Arc<Mutex<SockDiag>>,
    conns: ConnectionStorage,
    scan_lock: Arc<tokio::sync::Mutex<()>>,
    /// Result of the next scan, which has not begun yet.
    next_scan: Arc<Mutex<Option<watch::Receiver<Option<InUseScanResult>>>>>,
}

/// Use of each client's connection that is known, or the error of the scan.
type InUseScanResult = Arc<io::Result<BTreeMap<SocketAddr, ConnectionActivity>>>;

impl InUseLookup {
    pub(super) fn new(diag: SockDiag, conns: ConnectionStorage) -> Self {
        let diag = Arc::new(Mutex::new(diag));
        Self { diag, conns, scan_lock: Arc::default(), next_scan: Arc::default() }
    }

    /// Returns the result of a scan that begins after this call. `None` if the runtime ends.
    async fn next_result(&self) -> Option<InUseScanResult> {
        let mut result = {
            let mut next = lock(&self.next_scan);
            next.get_or_insert_with(|| self.schedule_scan()).clone()
        };
        result.wait_for(Option::is_some).await.ok()?.clone()
    }

    fn schedule_scan(&self) -> watch::Receiver<Option<InUseScanResult>> {
        let (result_tx, result_rx) = watch::channel(None);
        let lookup = self.clone();
        tokio::spawn(async move {
            let _turn = lookup.scan_lock.lock().await;
            // A query that arrives from here on needs a scan that begins later.
            lock(&lookup.next_scan).take();
            let Self { diag, conns, .. } = lookup.clone();
            let scan = spawn_blocking(move || conns.in_use(&lock(&diag)));
            let result = scan.await.unwrap_or_else(|panic| Err(io::Error::other(panic)));
            result_tx.send_replace(Some(Arc::new(result)));
            sleep(SCAN_PAUSE).await;
        });
        result_rx
    }
}

/// Responds to a query after the next scan.
pub(super) async fn handle_in_use(State(state): State<PodServerState>, query: String) -> Response {
    let clients = match parse_query(&query) {
        Ok(clients) => clients,
        Err(error) => {
            let rule = format!("one address and port a line: {error}\n");
            return (StatusCode::BAD_REQUEST, rule).into_response();
        }
    };
    match state.in_use_lookup.next_result().await.as_deref() {
        Some(Ok(all)) => {
            // Only the addresses of the query: a client learns nothing of other clients' connections.
            let queried = all.iter().filter(|(client, _)| clients.contains(client));
            encode_response(queried.map(|(client, activity)| (*client, *activity))).into_response()
        }
        other => {
            warn!(uid = state.uid, ?other, "cannot read which connections are in use");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn a_query_is_parsed_as_it_was_encoded_or_not_at_all() {
        let clients = [at("10.0.0.1:80"), at("[fd00::1]:65535")];
        assert_eq!(parse_query(&encode_query(&clients)).expect("as written"), clients.into());
        assert_eq!(parse_query("").expect("nothing"), BTreeSet::new());
        for bad in ["10.0.0.1", "10.0.0.1:80\n\n", "10.0.0.1:65536", "a:1"] {
            assert!(parse_query(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_response_is_parsed_as_it_was_encoded_or_not_at_all() {
        let all = BTreeMap::from([
            (at("10.0.0.1:80"), ConnectionActivity::MessageInFlight),
            (at("[fd00::1]:65535"), ConnectionActivity::Idle),
            (at("[fd00::1]:1"), ConnectionActivity::NoRequestInFlight),
        ]);
        assert_eq!(parse_response(&encode_response(all.clone())), Some(all));
        assert_eq!(parse_response(""), Some(BTreeMap::new()));
        for bad in ["10.0.0.1:80", "busy", "busy 10.0.0.1", "lazy 10.0.0.1:80", "<html>"] {
            assert_eq!(parse_response(bad), None, "{bad:?}");
        }
    }

    #[tokio::test]
    async fn queries_that_arrive_during_a_scan_share_the_next_one() {
        let lookup =
            InUseLookup::new(SockDiag::open().expect("netlink"), ConnectionStorage::default());
        let scan_guard = lookup.scan_lock.clone().lock_owned().await;
        let queries: Vec<_> = (0..100)
            .map(|_| {
                let lookup = lookup.clone();
                tokio::spawn(async move { lookup.next_result().await.expect("a result") })
            })
            .collect();
        tokio::task::yield_now().await;
        drop(scan_guard);
        let mut results = Vec::new();
        for query in queries {
            results.push(query.await.expect("no panic"));
        }
        assert!(results.iter().all(|it| Arc::ptr_eq(it, &results[0])), "one scan");
        let later = lookup.next_result().await.expect("a result");
        assert!(!Arc::ptr_eq(&later, &results[0]), "another scan");
    }

    #[test]
    fn the_longest_response_fits() {
        let longest = at("[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535");
        assert!(
            encode_response(std::iter::repeat_n(
                (longest, ConnectionActivity::NoRequestInFlight),
                QUERY_ADDRESSES_MAX
            ))
            .len()
                <= BODY_BYTES_MAX
        );
    }
}
