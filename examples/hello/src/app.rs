//! Shell: state that all connections share, and the pause that a request may specify.

use std::time::{Duration, Instant};

use crate::{config::HelloConfig, request_counts::HelloCounts, request_ids::RequestIdFile};

/// State shared by all connections.
#[derive(Debug)]
pub(crate) struct HelloApp {
    pub(crate) config: HelloConfig,
    pub(crate) counts: HelloCounts,
    pub(crate) ids: RequestIdFile,
    pub(crate) started: Instant,
    /// Unix time in microseconds at the start of the process and right after `listen`, for cold-start measurements.
    pub(crate) started_us: u128,
    pub(crate) listening_us: u128,
}

/// Sleeps for `wait`; returns at once for zero, because the timer's first tick alone takes a millisecond.
pub(crate) async fn sleep(wait: Duration) {
    if !wait.is_zero() {
        tokio::time::sleep(wait).await;
    }
}
