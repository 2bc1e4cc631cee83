//! Shell: the stale connections of this node's clients, and the task that closes them.

use std::time::Instant;

use tokio::task::JoinHandle;

use super::{StaleConnections, close::StaleConnectionCloser};
use crate::{
    metrics::AgentMetrics,
    routes::plan::{MapPlan, PlannerTable},
};

/// Draining addresses, and the rounds that close stale connections to them. Rounds run one at a time.
#[derive(Debug)]
pub(crate) struct StaleConnectionTask {
    connections: StaleConnections,
    /// Closes stale connections of this node's client processes.
    closer: StaleConnectionCloser,
    /// Task of the newest round.
    round: Option<JoinHandle<()>>,
    metrics: AgentMetrics,
}

impl StaleConnectionTask {
    /// Starts without draining addresses.
    pub(crate) fn new(closer: StaleConnectionCloser, metrics: AgentMetrics) -> Self {
        metrics.closes_locked.set(closer.can_close_locked().into());
        Self { connections: StaleConnections::default(), closer, round: None, metrics }
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

    /// Starts the round that is due, if any, unless another one still runs.
    pub(crate) fn start_due_round(&mut self, now: Instant) {
        if self.round.as_ref().is_some_and(|round| !round.is_finished()) {
            return;
        }
        let Some(scope) = self.connections.next_scan(now, self.closer.scan_stats()) else { return };
        let (closer, draining) = (self.closer.clone(), self.connections.draining().clone());
        let metrics = self.metrics.clone();
        self.round = Some(tokio::spawn(async move {
            let (counts, stale) = closer.scan_and_close(scope, draining).await;
            metrics.connections_closed.inc_by(counts.closed);
            metrics.connections_spared.inc_by(counts.spared);
            metrics.connections_stale.set(i64::try_from(stale).unwrap_or(i64::MAX));
        }));
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
        task.start_due_round(now);
        task.round.take().expect("a round").await.expect("no panic");
        assert!(!task.has_known_connections());
        let added = MapPlan { added_pods: [at].into(), ..MapPlan::default() };
        task.update_addresses(&added, &table);
        assert!(!task.is_urgent(now));
        task.start_due_round(now);
        assert!(task.round.is_none(), "nothing drains");
    }
}
