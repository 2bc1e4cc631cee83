//! Pure: hundreds of thousands of HTTP/1.1 streams, valid and invalid, with segments in any order.

use streams::{h1, many::many};

/// Number of streams of each kind in each run.
const STREAMS: u64 = 100_000;

#[test]
fn requests_are_counted_as_hypers_server_serves_them() {
    let outcome = many("requests to hyper", STREAMS, h1::requests::stream, h1::server::play);
    assert!(outcome.requests > outcome.refused, "most are to be served: {outcome:?}");
}

#[test]
fn requests_are_counted_as_servers_of_other_habits_serve_them() {
    let outcome = many("requests to others", STREAMS, h1::requests::stream, h1::simulated::play);
    assert!(outcome.requests > outcome.refused, "most are to be served: {outcome:?}");
}

#[test]
fn answers_end_where_hypers_client_hears_their_end() {
    let outcome = many("answers to hyper", STREAMS, h1::client::conversation, h1::client::play);
    assert!(outcome.requests > outcome.refused, "most are to be heard: {outcome:?}");
}
