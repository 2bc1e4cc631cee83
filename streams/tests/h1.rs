//! Pure: hundreds of thousands of HTTP/1.1 streams, valid and invalid, with segments in any order.

use streams::{bulk_runs::run_streams, h1};

/// Number of streams of each kind in each run.
const STREAMS: u64 = 100_000;

#[test]
fn requests_are_counted_as_hypers_server_serves_them() {
    let outcome =
        run_streams("requests to hyper", STREAMS, h1::requests::generate_stream, h1::server::play);
    assert!(outcome.requests > outcome.refused, "most are to be served: {outcome:?}");
}

#[test]
fn requests_are_counted_as_the_simulated_servers_serve_them() {
    let outcome = run_streams(
        "requests to others",
        STREAMS,
        h1::requests::generate_stream,
        h1::simulated_server::play,
    );
    assert!(outcome.requests > outcome.refused, "most are to be served: {outcome:?}");
}

#[test]
fn responses_end_where_hypers_client_sees_their_end() {
    let outcome = run_streams(
        "responses to hyper",
        STREAMS,
        h1::client::generate_conversation,
        h1::client::play,
    );
    assert!(outcome.requests > outcome.refused, "most are to be heard: {outcome:?}");
}
