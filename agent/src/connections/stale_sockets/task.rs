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
    /// True if the latest round has failed, which was logged.
    is_failing: Arc<AtomicBool>,
    metrics: AgentMetrics,
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
            is_failing: Arc::default(),
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
    pub(crate) fn is_round_due(&self, now: Instant) -> bool {
        let is_running = self.round.as_ref().is_some_and(|round| !round.is_finished());
        !is_running && self.schedule.is_due(now)
    }

    /// Starts the round that is due. `changes` are those of all frontends' endpoints since the round before.
    pub(crate) fn start_round(&mut self, now: Instant, changes: FrontendEndpoints) {
        let may_end_connections = self.schedule.begin(now);
        let (clients, records) = (self.clients.clone(), self.records.clone());
        let (endpoints, metrics) = (Arc::clone(&self.endpoints), self.metrics.clone());
        let is_failing = Arc::clone(&self.is_failing);
        self.round = Some(tokio::task::spawn_blocking(move || {
            let mut endpoints = lock(&endpoints);
            endpoints.begin_next(changes, may_end_connections);
            match end_stale_sockets(&clients, &records, &endpoints) {
                Ok(round) => {
                    metrics.udp_sockets_ended.inc_by(round.ended.udp);
                    metrics.tcp_sockets_ended.inc_by(round.ended.tcp);
                    log_round(&round, is_failing.swap(round.first_error.is_some(), Relaxed));
                }
                Err(error) if !is_failing.swap(true, Relaxed) => {
                    warn!(error = %error_chain(&error), "cannot read the records of sockets");
                }
                Err(_) => {}
            }
        }));
    }
}

/// Logs the result of a round. A failure is logged once, as rounds follow each change of a list.
fn log_round(round: &StaleSocketRound, was_failing: bool) {
    if round.ended != EndedSockets::default() {
        let EndedSockets { tcp, udp } = round.ended;
        info!(tcp, udp, "sockets ended, whose endpoints have left their Services");
    }
    if let Some(error) = round.first_error.as_ref().filter(|_| !was_failing) {
        let namespaces = round.failed_namespaces;
        warn!(namespaces, error = %error_chain(error), "cannot end stale sockets");
    }
}
