//! Pure: hundreds of thousands of HTTP/2 conversations, with segments in any order.

use streams::{h2, many::many};

/// Number of connections of each kind in each run.
const CONNECTIONS: u64 = 100_000;

#[test]
fn frames_written_by_hand_are_counted_as_the_reference_does() {
    let outcome = many("frames by hand", CONNECTIONS, h2::made::conversation, h2::made::play);
    assert!(outcome.requests > outcome.refused && outcome.crowded > 0, "{outcome:?}");
}

#[test]
fn what_the_server_answers_is_counted_although_the_clients_bytes_are_lost() {
    let play = h2::made::play_with_losses;
    let outcome =
        many("frames by hand, some lost", CONNECTIONS, h2::made::whole_conversation, play);
    assert!(outcome.requests > 0, "{outcome:?}");
}

#[test]
fn requests_written_by_hand_are_counted_as_the_crate_h2_serves_them() {
    let outcome = many("frames to h2", CONNECTIONS, h2::made::requests, h2::server::play);
    assert!(outcome.requests > outcome.refused && outcome.crowded > 0, "{outcome:?}");
}

#[test]
fn requests_between_client_and_server_of_the_crate_h2_are_counted() {
    let outcome = many("h2 with h2", CONNECTIONS, h2::pair::script, h2::pair::play);
    assert!(outcome.requests > outcome.refused && outcome.crowded > 0, "{outcome:?}");
}
