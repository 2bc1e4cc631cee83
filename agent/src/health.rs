//! Pure: health of the agent, by the rules of kube-proxy (`pkg/proxy/healthcheck` of Kubernetes).
//!
//! `/livez` fails while changes wait too long, as a restart may help then. `/healthz` also fails while the node is
//! about to be deleted, so that load balancers choose others. An API server that is away changes neither, and neither
//! do changes that do not fit into the maps.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use common::admin::HealthCheck;

use crate::lock::lock;

/// Longest time for a change to come into force: twice kube-proxy's sync period of 30 s.
const UPDATE_TIMEOUT: Duration = Duration::from_secs(60);
/// Taint by which the cluster autoscaler announces that it deletes a node.
pub(crate) const TO_BE_DELETED_TAINT: &str = "ToBeDeletedByClusterAutoscaler";

/// Health of the agent. Cheap to clone; all clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct ProxyHealth {
    state: Arc<Mutex<ProxyHealthState>>,
}

#[derive(Debug, Default)]
struct ProxyHealthState {
    /// Time at which the loop last recorded its progress; `None`: it does not run yet.
    recorded_at: Option<Instant>,
    /// Time since which changes wait without any progress; `None`: all are in force.
    pending_since: Option<Instant>,
    /// Reason for which the node is about to be deleted.
    deletion_reason: Option<&'static str>,
}

impl ProxyHealth {
    /// Records the progress of the loop: if changes wait, and if some came into force since the last call. Call it at
    /// least every few seconds.
    pub(crate) fn record_progress(&self, now: Instant, has_pending: bool, has_applied: bool) {
        let mut state = lock(&self.state);
        state.recorded_at = Some(now);
        let since = state.pending_since.filter(|_| !has_applied).unwrap_or(now);
        state.pending_since = has_pending.then_some(since);
    }

    /// Sets the reason for which the node is about to be deleted; `None`: it is not.
    pub(crate) fn set_deletion_reason(&self, reason: Option<&'static str>) {
        lock(&self.state).deletion_reason = reason;
    }

    /// Returns the reasons for which a check fails, one line each.
    pub(crate) fn unhealthy_reasons(&self, check: HealthCheck, now: Instant) -> Vec<String> {
        let state = lock(&self.state);
        let is_late = |since: Option<Instant>| {
            since.is_some_and(|it| now.saturating_duration_since(it) >= UPDATE_TIMEOUT)
        };
        let seconds = UPDATE_TIMEOUT.as_secs();
        let mut reasons = Vec::new();
        if is_late(state.recorded_at) {
            reasons.push(format!("loop: no progress for more than {seconds} s"));
        }
        if is_late(state.pending_since) {
            reasons.push(format!("maps: changes have not been in force for more than {seconds} s"));
        }
        // As in kube-proxy: load balancers should leave a node that is being deleted, but a restart of the agent would
        // not help.
        if let (Some(reason), HealthCheck::Healthz) = (state.deletion_reason, check) {
            reasons.push(format!("node: {reason}"));
        }
        reasons
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATE: Duration = UPDATE_TIMEOUT;
    const JUST_IN_TIME: Duration = UPDATE_TIMEOUT.saturating_sub(Duration::from_secs(1));

    fn reasons(health: &ProxyHealth, now: Instant) -> [Vec<String>; 2] {
        [HealthCheck::Healthz, HealthCheck::Livez].map(|it| health.unhealthy_reasons(it, now))
    }

    fn is_healthy(health: &ProxyHealth, now: Instant) -> bool {
        let both = reasons(health, now);
        assert_eq!(both[0].is_empty(), both[1].is_empty(), "{both:?}");
        both[0].is_empty()
    }

    #[test]
    fn an_agent_that_starts_is_healthy_and_one_whose_loop_hangs_is_not() {
        let (health, start) = (ProxyHealth::default(), Instant::now());
        assert!(is_healthy(&health, start + 10 * LATE), "it waits for the pods' cgroup");
        health.record_progress(start, false, false);
        assert!(is_healthy(&health, start + JUST_IN_TIME));
        assert!(!is_healthy(&health, start + LATE));
        health.record_progress(start + LATE, false, false);
        assert!(is_healthy(&health, start + LATE));
    }

    #[test]
    fn changes_that_wait_too_long_fail_both_checks_until_they_are_in_force() {
        let (health, start) = (ProxyHealth::default(), Instant::now());
        for second in 0..=LATE.as_secs() {
            let now = start + Duration::from_secs(second);
            health.record_progress(now, true, false);
            assert_eq!(is_healthy(&health, now), second < LATE.as_secs(), "{second} s");
        }
        health.record_progress(start + LATE, false, true);
        assert!(is_healthy(&health, start + LATE));
    }

    #[test]
    fn changes_without_end_are_no_fault_while_they_come_into_force() {
        let (health, start) = (ProxyHealth::default(), Instant::now());
        for second in 0..=3 * LATE.as_secs() {
            let now = start + Duration::from_secs(second);
            health.record_progress(now, true, second % 50 == 0);
            assert!(is_healthy(&health, now), "{second} s");
        }
    }

    #[test]
    fn a_node_that_is_to_be_deleted_fails_healthz_only() {
        let (health, now) = (ProxyHealth::default(), Instant::now());
        health.set_deletion_reason(Some("its object is being deleted"));
        let expected = vec!["node: its object is being deleted".to_owned()];
        assert_eq!(reasons(&health, now), [expected, Vec::new()]);
        health.set_deletion_reason(None);
        assert!(is_healthy(&health, now));
    }
}
