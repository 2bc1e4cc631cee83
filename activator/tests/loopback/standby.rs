//! Pods with a standby order.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use common::{
    fixtures::standby_order,
    wire::{PodEntry, RoutingPhase},
};

use crate::harness::{ActivatorFixture, GET, OK, pod, start_pod};

/// A frozen process closes no connection whose time is over. It may do so at its thaw, together with the next request.
#[tokio::test]
async fn no_connection_to_a_pod_with_a_standby_order_is_used_twice() {
    let mut fixture = ActivatorFixture::new().await;
    let server = start_pod(OK, Duration::ZERO).await;
    for (standby, connections) in [(None, 1), (Some(standby_order()), 3), (None, 4)] {
        let entry = PodEntry { standby, ..pod("p", server.address, RoutingPhase::Ready) };
        fixture.apply_change(|table| drop(table.pods.insert("p".to_owned(), entry)));
        for _ in 0..2 {
            assert!(fixture.exchange(GET).await.ends_with("hello"));
        }
        assert_eq!(server.connections(), connections, "{standby:?}");
    }
    assert_eq!(server.requests(), 6);
}
