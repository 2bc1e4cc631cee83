//! Shell: the part of the loop that passes over frozen pods of other nodes whose agents do not thaw them.

use std::time::Instant;

use tracing::info;

use super::Agent;
use crate::net::standby_watcher::ThawQueryResult;

impl Agent {
    /// Handles a standby connect: a connect was led to this backend, which was armed.
    pub(super) fn handle_standby_connect(&mut self, backend: u32) {
        if let Some(at) = self.routes.planner().backend_pod_address(backend) {
            self.standby_watcher.record_use(at);
        }
    }

    /// Handles the progress or the end of a thaw query.
    pub(super) fn handle_thaw_query_result(&mut self, result: ThawQueryResult) {
        self.standby_watcher.record_result(result);
    }

    /// Passes the time to the watches if one of them is due.
    pub(super) fn tick_standby_watches(&mut self) {
        if self.standby_watcher.next_wake().is_some_and(|at| at <= Instant::now()) {
            self.standby_watcher.tick();
        }
    }

    /// Finds standby connects whose events were lost: the kernel has disarmed their backends.
    pub(super) fn check_armed_connects(&mut self) {
        let planner = self.routes.planner();
        let maps = &self.handles.maps;
        let was_used = |backend| !maps.is_connect_event_armed(backend);
        let armed = self.standby_watcher.armed().iter().copied();
        let used: Vec<_> =
            armed.filter(|at| planner.remote_pod_backend(*at).is_some_and(was_used)).collect();
        used.into_iter().for_each(|at| self.standby_watcher.record_use(at));
    }

    /// Excludes pods that connects pass over from now on, and admits pods that connects use again. Call it before
    /// routes are written.
    pub(super) fn apply_standby_watches(&mut self) {
        for uid in self.standby_watcher.take_changed() {
            let is_passed_over = self.standby_watcher.is_passed_over(&uid);
            info!(uid, is_passed_over, "standby of a pod of another node checked");
            self.update_exclusion(&uid);
        }
        let passed_over = self.standby_watcher.passed_over().len();
        let passed_over = i64::try_from(passed_over).unwrap_or(i64::MAX);
        self.handles.metrics.pods_passed_over.set(passed_over);
    }

    /// Excludes passed-over pods again or no longer, as activators may have come or gone since.
    pub(super) fn update_passed_over(&mut self) {
        let uids: Vec<String> = self.standby_watcher.passed_over().iter().cloned().collect();
        uids.iter().for_each(|uid| self.update_exclusion(uid));
    }

    /// Returns true if connects pass over a pod. Without an activator they would reach nothing at all.
    pub(super) fn passes_over(&self, uid: &str) -> bool {
        self.standby_watcher.is_passed_over(uid) && self.routes.table().has_activators_for_pod(uid)
    }

    /// Arms the backends of watched pods, so that the next connect to each sends an event. Call it after routes were
    /// written, by which an address gets its backend. An address that no list has is due again once a list has it.
    pub(super) fn arm_standby_connects(&mut self) {
        for at in self.standby_watcher.take_due_addresses() {
            if let Some(backend) = self.routes.planner().remote_pod_backend(at) {
                self.handles.maps.arm_connect_event(backend);
                self.standby_watcher.record_armed(at);
            }
        }
    }
}
