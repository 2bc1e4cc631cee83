//! Shell: requests of an HTTP/2 connection that its client resets, counted until there are too many of them.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use common::once_signal::OnceSignal;

use crate::clients::connections::ClientConnections;

/// Counters of a connection's requests, and of those that their client resets before the response.
#[derive(Debug)]
pub struct StreamResetCounter {
    connections: Arc<ClientConnections>,
    requests: AtomicU64,
    resets: AtomicU64,
    /// Set once there are too many resets.
    pub flood: OnceSignal,
}

impl StreamResetCounter {
    /// Creates the counters of a new connection.
    pub fn new(client_connections: Arc<ClientConnections>) -> Arc<Self> {
        let (requests, resets) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self {
            connections: client_connections,
            requests,
            resets,
            flood: OnceSignal::new(),
        })
    }

    /// Counts a request. Dropping the guard counts a reset, unless the response has begun.
    pub fn start_request(self: &Arc<Self>) -> ResetGuard {
        self.requests.fetch_add(1, Ordering::Relaxed);
        ResetGuard(Some(Arc::clone(self)))
    }
}

/// Guard of a request that counts as reset if it is dropped without a response.
#[derive(Debug)]
pub struct ResetGuard(Option<Arc<StreamResetCounter>>);

impl ResetGuard {
    /// Registers that the response has begun, so that a reset does not count any more.
    pub fn mark_responded(mut self) {
        self.0 = None;
    }
}

impl Drop for ResetGuard {
    fn drop(&mut self) {
        let Some(counter) = &self.0 else { return };
        let resets = counter.resets.fetch_add(1, Ordering::Relaxed) + 1;
        let requests = counter.requests.load(Ordering::Relaxed);
        if counter.connections.budget.is_reset_flood(resets, requests) {
            counter.flood.set();
        }
    }
}
