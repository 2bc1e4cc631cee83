//! Shell: the task that ends stale sockets.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Instant,
};

use common::link::error_chain;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use super::{
    EndpointRounds, RoundSchedule,
    scan::{EndedSockets, StaleSocketRound, end_stale_sockets},
};
use crate::{
    kernel::maps::client_sockets::ClientSocketRecords,
    lock::lock,
    metrics::AgentMetrics,
    routes::plan::{DepartureSource, FrontendEndpoints},
};

/// Rounds that end stale sockets. They run one at a time, and only after changes.
#[derive(Debug)]
pub(crate) struct StaleSocketTask {
    /// Cgroup of this node's client processes.
    clients: PathBuf,
    records: ClientSocketRecords,
    /// Endpoints of the rounds. Only the round that runs locks them.
    endpoints: Arc<Mutex<EndpointRounds>>,
    schedule: RoundSchedule,
    /// Task of the newest round.
    round: Option<JoinHandle<()>>,
    failures: Arc<RoundFailures>,
    metrics: AgentMetrics,
}

/// Failures of the rounds. The first one after a success is logged and repeated: no change may follow that would bring
/// another round. A kernel that cannot end sockets fails each time.
#[derive(Debug, Default)]
struct RoundFailures {
    /// True if the latest round has failed.
    is_failing: AtomicBool,
    /// True if a round is to be repeated.
    wants_retry: AtomicBool,
}

impl RoundFailures {
    /// Records the outcome of a round. Returns true for the first failure after a success.
    fn record(&self, has_failed: bool) -> bool {
        let was_failing = self.is_failing.swap(has_failed, Relaxed);
        let is_first = has_failed && !was_failing;
        if is_first {
            self.wants_retry.store(true, Relaxed);
        }
        is_first
    }

    /// Returns true if a round is to be repeated, at the first call after its failure.
    fn take_retry(&self) -> bool {
        self.wants_retry.swap(false, Relaxed)
    }
}

impl StaleSocketTask {
    /// Starts without a round.
    pub(crate) fn new(
        clients: PathBuf,
        records: ClientSocketRecords,
        metrics: AgentMetrics,
    ) -> Self {
        Self {
            clients,
            records,
            endpoints: Arc::default(),
            schedule: RoundSchedule::new(Instant::now()),
            round: None,
            failures: Arc::default(),
            metrics,
        }
    }

    /// Requests rounds, as endpoints may have left. Lists without them are in force.
    pub(crate) fn request_rounds(&mut self, now: Instant, source: DepartureSource) {
        self.schedule.request(now, source);
    }

    /// Returns true if one of the rounds that follow a change at once is still to come. The round of connections after
    /// a list comes seconds later, and is not meant.
    pub(crate) fn has_rounds_left(&self) -> bool {
        self.schedule.rounds_left > 0
    }

    /// Returns true if a round is to start: one is still to come, its time has come, and no other one runs.
    pub(crate) fn is_round_due(&mut self, now: Instant) -> bool {
        if self.round.as_ref().is_some_and(|round| !round.is_finished()) {
            return false;
        }
        if self.failures.take_retry() {
            self.schedule.request_retry();
        }
        self.schedule.is_due(now)
    }

    /// Starts the round that is due. `changes` are those of all frontends' endpoints since the round before.
    pub(crate) fn start_round(&mut self, now: Instant, changes: FrontendEndpoints) {
        let may_end_connections = self.schedule.begin(now);
        let (clients, records) = (self.clients.clone(), self.records.clone());
        let (endpoints, metrics) = (Arc::clone(&self.endpoints), self.metrics.clone());
        let failures = Arc::clone(&self.failures);
        self.round = Some(tokio::task::spawn_blocking(move || {
            let mut endpoints = lock(&endpoints);
            endpoints.begin_next(changes, may_end_connections);
            match end_stale_sockets(&clients, &records, &endpoints) {
                Ok(round) => {
                    metrics.udp_sockets_ended.inc_by(round.ended.udp);
                    metrics.tcp_sockets_ended.inc_by(round.ended.tcp);
                    log_round(&round, failures.record(round.has_failed()));
                }
                // Only the first of several failures in a row is logged.
                Err(error) if failures.record(true) => {
                    warn!(error = %error_chain(&error), "cannot read the records of sockets");
                }
                Err(_) => {}
            }
        }));
    }
}

/// Logs the result of a round. A failure is logged once, as rounds follow each change of a list.
fn log_round(round: &StaleSocketRound, is_first_failure: bool) {
    if round.ended != EndedSockets::default() {
        let EndedSockets { tcp, udp } = round.ended;
        info!(tcp, udp, "sockets ended, whose endpoints have left their Services");
    }
    if let Some(error) = round.first_error.as_ref().filter(|_| is_first_failure) {
        let namespaces = round.failed_namespaces;
        warn!(namespaces, error = %error_chain(error), "cannot end stale sockets");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failed_round_after_a_success_is_repeated_and_no_later_one() {
        let failures = RoundFailures::default();
        let record = |has_failed| (failures.record(has_failed), failures.take_retry());
        assert_eq!(record(false), (false, false));
        assert_eq!(record(true), (true, true));
        assert_eq!(record(true), (false, false), "it fails each time");
        assert_eq!(record(false), (false, false));
        assert_eq!(record(true), (true, true));
        assert!(!failures.take_retry(), "once");
    }
}
