//! Many requests wait when the first of several pods becomes ready.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use common::wire::RoutingPhase;
use futures::future::join_all;
use tokio::io::AsyncWriteExt as _;

use crate::harness::{ActivatorFixture, GET, OK, read_rest, start_pod};

/// Up to 64 requests wait for no other pod, and a pod always gets as many.
#[tokio::test]
async fn the_first_ready_pod_leaves_requests_to_pods_that_start() {
    let mut fixture = ActivatorFixture::new().await;
    let pods = [start_pod(OK, Duration::ZERO).await, start_pod(OK, Duration::ZERO).await];
    let mut streams = join_all((0..70).map(|_| fixture.connect())).await;
    for stream in &mut streams {
        stream.write_all(GET.as_bytes()).await.unwrap();
    }
    fixture.wait_for_queued(70).await;
    for (uid, pod) in ["a", "b"].into_iter().zip(&pods) {
        fixture.set_pod(uid, pod.address, RoutingPhase::Starting);
    }
    // No other task runs between the two changes.
    fixture.add_ready_pod("a", pods[0].address);
    fixture.add_ready_pod("b", pods[1].address);
    for mut stream in streams {
        let response = read_rest(&mut stream).await;
        assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
    }
    assert_eq!((pods[0].requests(), pods[1].requests()), (64, 6));
    assert_eq!((fixture.waiting_totals(), fixture.abandoned_requests()), ((70, 70), 0));
}
