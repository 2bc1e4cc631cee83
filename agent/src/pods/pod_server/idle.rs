//! Shell: `POST /idle`, by which the agent of a client's node learns at once that connections have become idle.
//!
//! The first line of the query is `after NUMBER wait MILLISECONDS`. The others are addresses, as in a query for
//! connections in use. The response comes once a connection of these clients has become idle after the event with that
//! number, or after the time. Its first line is `newest NUMBER`, for the next query. Each other line is
//! `idle CLIENT PORT CLIENT_SEQ POD_SEQ`: the sequence numbers of the next bytes of the client and of the pod, at which
//! no request is under way on the client's connection to that port.
//!
//! An agent closes a connection only if it stands at this position when it is closed. So a report may be old. One that
//! a process of the pod makes up can only end connections to this pod, which the pod could end itself.

use std::{collections::BTreeSet, net::SocketAddr, time::Duration};

use axum::{
    extract::State,
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use tracing::warn;

use super::PodServerState;
use crate::{
    kernel::locked_close::IdlePosition,
    pods::idle_positions::{ClientPodPort, IdleUpdates},
};

/// Path of the query on the pod server.
pub(crate) const PATH: &str = "/idle";
/// Highest number of addresses in one query.
pub(crate) const QUERY_ADDRESSES_MAX: usize = 500;
/// Longest time for which a query waits.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(1);
/// Most queries that wait at one pod server, half of its connections. The kubelet must always be served.
pub(super) const QUERIES_MAX: usize = 128;

/// Encodes a query.
pub(crate) fn encode_query(after: u64, wait: Duration, clients: &[SocketAddr]) -> String {
    let first = format!("after {after} wait {}\n", wait.as_millis());
    first + &super::in_use::encode_query(clients)
}

/// Parses a query; `None` if it is malformed or has too many addresses.
fn parse_query(query: &str) -> Option<(u64, Duration, BTreeSet<SocketAddr>)> {
    let (first, clients) = query.split_once('\n')?;
    let (after, wait) = first.strip_prefix("after ")?.split_once(" wait ")?;
    let clients: Result<BTreeSet<SocketAddr>, _> = clients.lines().map(str::parse).collect();
    let clients = clients.ok().filter(|clients| clients.len() <= QUERY_ADDRESSES_MAX)?;
    let wait = Duration::from_millis(wait.parse().ok()?).min(WAIT_MAX);
    Some((after.parse().ok()?, wait, clients))
}

fn encode_response(updates: &IdleUpdates) -> String {
    let mut text = format!("newest {}\n", updates.newest);
    for ((client, port), IdlePosition { client_seq, pod_seq }) in &updates.positions {
        text += &format!("idle {client} {port} {client_seq} {pod_seq}\n");
    }
    text
}

/// Parses a response; `None` if it is malformed.
pub(crate) fn parse_response(response: &str) -> Option<IdleUpdates> {
    let mut lines = response.lines();
    let newest = lines.next()?.strip_prefix("newest ")?.parse().ok()?;
    let positions: Option<Vec<_>> = lines.map(parse_position).collect();
    Some(IdleUpdates { newest, positions: positions? })
}

fn parse_position(line: &str) -> Option<(ClientPodPort, IdlePosition)> {
    let mut words = line.strip_prefix("idle ")?.split(' ');
    let connection = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    let position = IdlePosition {
        client_seq: words.next()?.parse().ok()?,
        pod_seq: words.next()?.parse().ok()?,
    };
    words.next().is_none().then_some((connection, position))
}

/// Responds to a query once a connection has become idle.
pub(super) async fn handle_idle(State(state): State<PodServerState>, query: String) -> Response {
    let Some((after, wait, clients)) = parse_query(&query) else {
        let rule = "after NUMBER wait MILLISECONDS, then one address and port a line";
        let rule = format!("{rule}, at most {QUERY_ADDRESSES_MAX}\n");
        return (StatusCode::BAD_REQUEST, rule).into_response();
    };
    // The text would take memory for as long as the query waits.
    drop(query);
    let Ok(_permit) = state.idle_queries.try_acquire() else {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    };
    let idle = &state.servers.idle;
    match idle.next_updates(state.cookie, after, &clients, wait).await {
        Ok(Some(updates)) => encode_response(&updates).into_response(),
        // The pod is not registered, so no event would come.
        Ok(None) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        Err(error) => {
            warn!(uid = state.uid, %error, "cannot watch the connections of a pod");
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
        let wait = Duration::from_millis(20);
        let query = encode_query(7, wait, &clients);
        assert_eq!(parse_query(&query), Some((7, wait, clients.into())));
        let long = encode_query(0, WAIT_MAX * 60, &[]);
        assert_eq!(parse_query(&long), Some((0, WAIT_MAX, BTreeSet::new())));
        for bad in ["", "10.0.0.1:80\n", "after 1\n", "after 1 wait x\n", "after 1 wait 2\nx\n"] {
            assert_eq!(parse_query(bad), None, "{bad:?}");
        }
        let ports = 1..=QUERY_ADDRESSES_MAX as u16 + 1;
        let many: Vec<_> = ports.map(|port| SocketAddr::from(([10, 0, 0, 1], port))).collect();
        assert_eq!(parse_query(&encode_query(0, wait, &many)), None, "one too many");
        assert!(parse_query(&encode_query(0, wait, &many[1..])).is_some());
    }

    #[test]
    fn a_response_is_parsed_as_it_was_encoded_or_not_at_all() {
        let position = |client_seq, pod_seq| IdlePosition { client_seq, pod_seq };
        let positions = vec![
            ((at("10.0.0.1:80"), 8080), position(0, u32::MAX)),
            ((at("[fd00::1]:65535"), 1), position(7, 8)),
        ];
        let updates = IdleUpdates { newest: u64::MAX, positions };
        assert_eq!(parse_response(&encode_response(&updates)), Some(updates));
        assert_eq!(parse_response("newest 0\n"), Some(IdleUpdates::default()));
        for bad in [
            "",
            "<html>",
            "newest x\n",
            "newest 1\nbusy 10.0.0.1:80 80 1 2\n",
            "newest 1\nidle 10.0.0.1:80 80 1\n",
            "newest 1\nidle 10.0.0.1:80 80 1 2 3\n",
            "newest 1\nidle 10.0.0.1:80 80 1 4294967296\n",
        ] {
            assert_eq!(parse_response(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn the_longest_query_and_response_fit() {
        let longest = at("[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535");
        let position = IdlePosition { client_seq: u32::MAX, pod_seq: u32::MAX };
        let all = vec![((longest, u16::MAX), position); QUERY_ADDRESSES_MAX];
        let response = encode_response(&IdleUpdates { newest: u64::MAX, positions: all });
        assert!(response.len() <= super::super::in_use::BODY_BYTES_MAX);
        let query = encode_query(u64::MAX, WAIT_MAX, &[longest; QUERY_ADDRESSES_MAX]);
        assert!(query.len() <= super::super::in_use::BODY_BYTES_MAX);
    }
}
