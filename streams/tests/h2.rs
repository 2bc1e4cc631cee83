//! Pure: hundreds of thousands of HTTP/2 conversations, with segments in any order.

use streams::{bulk_runs::run_streams, h2};

/// Number of connections of each kind in each run.
const CONNECTIONS: u64 = 100_000;

#[test]
fn frames_written_by_hand_are_counted_as_the_reference_does() {
    let outcome = run_streams(
        "frames by hand",
        CONNECTIONS,
        h2::frame_script::generate_conversation,
        h2::scripted::play,
    );
    assert!(outcome.requests > outcome.refused && outcome.crowded > 0, "{outcome:?}");
}

#[test]
fn responses_are_counted_although_requests_are_lost() {
    let play = h2::scripted::play_with_losses;
    let outcome = run_streams(
        "frames by hand, some lost",
        CONNECTIONS,
        h2::frame_script::generate_whole_conversation,
        play,
    );
    assert!(outcome.requests > 0, "{outcome:?}");
}

#[test]
fn requests_written_by_hand_are_counted_as_the_crate_h2_serves_them() {
    let outcome = run_streams(
        "frames to h2",
        CONNECTIONS,
        h2::frame_script::generate_requests,
        h2::server::play,
    );
    assert!(outcome.requests > outcome.refused && outcome.crowded > 0, "{outcome:?}");
}

#[test]
fn requests_between_client_and_server_of_the_crate_h2_are_counted() {
    let outcome = run_streams(
        "h2 with h2",
        CONNECTIONS,
        h2::client_server::generate_script,
        h2::client_server::play,
    );
    assert!(outcome.requests > outcome.refused && outcome.crowded > 0, "{outcome:?}");
}
