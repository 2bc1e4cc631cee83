//! Shell: the stale connections of this node's clients, and the task that closes them.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{sync::Semaphore, task::JoinHandle};

use super::{ClientScanScope, StaleConnections, close::StaleConnectionCloser, watch::PodWatches};
use crate::{
    metrics::AgentMetrics,
    routes::plan::{MapPlan, PlannerTable},
};

/// Number of scans whose due connections are closed at the same time.
const CLOSES_AT_ONCE: usize = 4;

/// Draining addresses, and the rounds that close stale connections to them.
///
/// One scan of each scope runs at a time. While the pods of one are asked, the next ones run: on a busy node the answer
/// takes as long as many pauses between requests.
#[derive(Debug)]
pub(crate) struct StaleConnectionTask {
    connections: StaleConnections,
    /// Closes stale connections of this node's client processes.
    closer: StaleConnectionCloser,
    /// Task of the newest scan of each scope.
    rounds: BTreeMap<ClientScanScope, JoinHandle<()>>,
    /// Bound on the closes that run at once, [`CLOSES_AT_ONCE`].
    closes: Arc<Semaphore>,
    /// Watches of the pods of known connections.
    watches: PodWatches,
    metrics: AgentMetrics,
}

impl StaleConnectionTask {
    /// Starts without draining addresses.
    pub(crate) fn new(closer: StaleConnectionCloser, metrics: AgentMetrics) -> Self {
        metrics.closes_locked.set(closer.can_close_locked().into());
        let connections = StaleConnections::default();
        let closes = Arc::new(Semaphore::new(CLOSES_AT_ONCE));
        let watches = PodWatches::new(closer.clone(), metrics.clone());
        Self { connections, closer, rounds: BTreeMap::new(), closes, watches, metrics }
    }

    /// Marks connections stale whose pod new connects no longer choose, and unmarks those of pods that they choose
    /// again.
    pub(crate) fn update_addresses(&mut self, plan: &MapPlan, table: &PlannerTable) {
        plan.added_pods.iter().for_each(|&at| self.connections.stop_draining(at));
        if plan.removed_pods.is_empty() {
            return;
        }
        let now = Instant::now();
        let phases = table.pod_phases(|at| plan.removed_pods.contains(at));
        plan.removed_pods
            .iter()
            .for_each(|&at| self.connections.start_draining(now, at, phases.get(&at).copied()));
    }

    /// Updates the phases of the pods that new connects no longer choose.
    pub(crate) fn update_phases(&mut self, now: Instant, table: &PlannerTable) {
        if self.connections.draining().is_empty() {
            self.metrics.connections_stale.set(0);
            return;
        }
        let draining = self.connections.draining();
        let phases = table.pod_phases(|at| draining.contains_key(at));
        self.connections.update_phases(now, |at| phases.get(&at).copied());
    }

    /// Returns true if the last round has left connections to draining addresses.
    pub(crate) fn has_known_connections(&self) -> bool {
        !self.connections.draining().is_empty() && self.closer.scan_stats().known_connections > 0
    }

    /// Returns true if an address has begun to drain lately, or its pod waits to stop.
    pub(crate) fn is_urgent(&self, now: Instant) -> bool {
        self.connections.is_urgent(now)
    }

    /// Returns the period in which rounds may be due while connections to draining addresses are known.
    pub(crate) fn known_scan_period(&self) -> Duration {
        self.connections.known_scan_period()
    }

    /// Starts the rounds that are due, and watches the pods of the connections that the last rounds have found. A round
    /// does not start while another one of its scope runs.
    pub(crate) fn start_due_rounds(&mut self, now: Instant) {
        let are_watched = self.watches.update(now, self.connections.draining());
        // Watches report no connection that was idle before. A scan closes those at the pace of each client, so further
        // ones have to follow soon.
        let has_postponed = self.closer.has_postponed(now);
        self.connections.set_pods_watched(are_watched && !has_postponed);
        self.rounds.retain(|_, round| !round.is_finished());
        while let Some(scope) = self
            .connections
            .next_scan(now, self.closer.scan_stats(), |scope| self.rounds.contains_key(&scope))
        {
            self.rounds.insert(scope, self.start_round(scope));
        }
    }

    /// Starts a scan, and the close of what is due in it.
    fn start_round(&self, scope: ClientScanScope) -> JoinHandle<()> {
        let (closer, draining) = (self.closer.clone(), self.connections.draining().clone());
        let (metrics, closes) = (self.metrics.clone(), Arc::clone(&self.closes));
        tokio::spawn(async move {
            let scan = closer.clone().scan(scope, draining).await;
            metrics.count_client_scan(scan.scope().name(), scan.walks());
            let known = closer.scan_stats().known_connections;
            metrics.connections_stale.set(i64::try_from(known).unwrap_or(i64::MAX));
            if !scan.has_due() {
                return;
            }
            // Otherwise the next scan waits, because this one would be too old once its turn came.
            let Ok(permit) = closes.acquire_owned().await else { return };
            tokio::spawn(async move {
                let (counts, left_out) = closer.close_due(scan).await;
                metrics.connections_closed.inc_by(counts.closed);
                metrics.connections_spared.inc_by(counts.spared);
                metrics.pods_not_queried.inc_by(left_out as u64);
                drop(permit);
            });
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    /// Returns a task whose clients' cgroup is missing: its rounds find no client.
    fn task() -> StaleConnectionTask {
        let closer = StaleConnectionCloser::new("/nonexistent".into(), None);
        StaleConnectionTask::new(closer, AgentMetrics::new().0)
    }

    #[tokio::test]
    async fn an_address_drains_from_its_removal_until_it_is_added_again() {
        let (mut task, table, now) = (task(), PlannerTable::default(), Instant::now());
        let at = SocketAddr::from(([10, 0, 0, 1], 80));
        let removed = MapPlan { removed_pods: [at].into(), ..MapPlan::default() };
        task.update_addresses(&removed, &table);
        assert!(task.is_urgent(now), "it has just begun");
        task.start_due_rounds(now);
        let (scope, round) = task.rounds.pop_first().expect("a round");
        assert_eq!(scope, ClientScanScope::AllClients);
        round.await.expect("no panic");
        assert!(!task.has_known_connections());
        let added = MapPlan { added_pods: [at].into(), ..MapPlan::default() };
        task.update_addresses(&added, &table);
        assert!(!task.is_urgent(now));
        task.start_due_rounds(now);
        assert!(task.rounds.is_empty(), "nothing drains");
    }
}
