//! Shell: the endpoints of frontends for UDP, and the task that ends stale UDP sockets.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use common::link::error_chain;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use super::scan::{StaleUdpRound, end_stale_sockets};
use crate::{
    kernel::maps::udp_sockets::UdpSocketEntries, lock::lock, metrics::AgentMetrics,
    routes::plan::UdpEndpoints,
};

/// Number of rounds after a change. The first one may miss a socket whose connect had chosen its endpoint before the
/// change, and had not completed yet.
const ROUNDS: u32 = 2;
/// Shortest time between two rounds: lists may change many times a second.
const ROUND_PERIOD: Duration = Duration::from_millis(500);

/// Rounds that end stale UDP sockets. They run one at a time, and only after changes.
#[derive(Debug)]
pub(crate) struct StaleUdpSocketTask {
    /// Cgroup of this node's client processes.
    clients: PathBuf,
    entries: UdpSocketEntries,
    /// Endpoints of all frontends, which are in force. Rounds share them.
    endpoints: Arc<Mutex<UdpEndpoints>>,
    rounds_left: u32,
    next_round: Instant,
    /// Task of the newest round.
    round: Option<JoinHandle<()>>,
    /// True if the latest round has failed in a namespace, which was logged.
    is_failing: Arc<AtomicBool>,
    metrics: AgentMetrics,
}

impl StaleUdpSocketTask {
    /// Starts without endpoints.
    pub(crate) fn new(clients: PathBuf, entries: UdpSocketEntries, metrics: AgentMetrics) -> Self {
        Self {
            clients,
            entries,
            endpoints: Arc::default(),
            rounds_left: 0,
            next_round: Instant::now(),
            round: None,
            is_failing: Arc::default(),
            metrics,
        }
    }

    /// Applies changes of endpoints, which are in force. A frontend without endpoints ends no socket.
    pub(crate) fn apply_changes(&mut self, changes: UdpEndpoints) {
        let mut endpoints = lock(&self.endpoints);
        for (frontend, changed) in changes {
            if changed.is_empty() {
                endpoints.remove(&frontend);
            } else {
                endpoints.insert(frontend, changed);
            }
        }
        drop(endpoints);
        self.rounds_left = ROUNDS;
    }

    /// Returns true if a round is still to come.
    pub(crate) fn has_rounds_left(&self) -> bool {
        self.rounds_left > 0
    }

    /// Starts the round that is due, if any, unless another one still runs.
    pub(crate) fn start_due_round(&mut self, now: Instant) {
        let is_running = self.round.as_ref().is_some_and(|round| !round.is_finished());
        if is_running || self.rounds_left == 0 || now < self.next_round {
            return;
        }
        self.rounds_left -= 1;
        self.next_round = now + ROUND_PERIOD;
        let (clients, entries) = (self.clients.clone(), self.entries.clone());
        let (endpoints, metrics) = (Arc::clone(&self.endpoints), self.metrics.clone());
        let is_failing = Arc::clone(&self.is_failing);
        self.round = Some(tokio::task::spawn_blocking(move || {
            let round = end_stale_sockets(&clients, &entries, &endpoints);
            metrics.udp_sockets_ended.inc_by(round.ended);
            log_round(&round, is_failing.swap(round.first_error.is_some(), Relaxed));
        }));
    }
}

/// Logs the result of a round. A failure is logged once, as rounds follow each change of a list.
fn log_round(round: &StaleUdpRound, was_failing: bool) {
    if round.ended > 0 {
        let count = round.ended;
        info!(count, "UDP sockets ended, whose endpoints have left their Services");
    }
    if let Some(error) = round.first_error.as_ref().filter(|_| !was_failing) {
        let namespaces = round.failed_namespaces;
        warn!(namespaces, error = %error_chain(error), "cannot end stale UDP sockets");
    }
}
