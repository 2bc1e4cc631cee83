//! Shell: the part of the loop that passes over frozen pods of other nodes whose agents do not thaw them.

use std::time::Instant;

use tracing::info;

use super::Agent;
use crate::net::standby_watcher::ThawQueryResult;

impl Agent {
    /// Handles a connect to a backend whose event was armed.
    pub(super) fn handle_standby_connect(&mut self, backend: u32) {
        if let Some(at) = self.routes.planner().backend_pod_address(backend) {
            self.standby_watcher.record_use(at);
        }
    }

    /// Handles the progress or the end of a query.
    pub(super) fn handle_thaw_query_result(&mut self, result: ThawQueryResult) {
        self.standby_watcher.record_result(result);
    }

    /// Does what is due of the watches.
    pub(super) fn tick_standby_watches(&mut self) {
        if self.standby_watcher.next_wake().is_some_and(|at| at <= Instant::now()) {
            self.standby_watcher.tick();
        }
    }

    /// Finds connects whose events were lost: the kernel has cleared what this agent has armed.
    pub(super) fn check_armed_connects(&mut self) {
        let planner = self.routes.planner();
        let maps = &self.handles.maps;
        let was_used = |backend| !maps.is_connect_event_armed(backend);
        let armed = self.standby_watcher.armed().iter().copied();
        let used: Vec<_> =
            armed.filter(|at| planner.remote_pod_backend(*at).is_some_and(was_used)).collect();
        used.into_iter().for_each(|at| self.standby_watcher.record_use(at));
    }

    /// Excludes the pods that connects are to pass over, and ends that for others. Call it before routes are written.
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

    /// Excludes pods that are passed over only where activators can take their connects. Activators may have come or gone.
    pub(super) fn update_passed_over(&mut self) {
        let uids: Vec<String> = self.standby_watcher.passed_over().iter().cloned().collect();
        uids.iter().for_each(|uid| self.update_exclusion(uid));
    }

    /// Returns true if connects pass over a pod. Without an activator they would reach nothing at all.
    pub(super) fn passes_over(&self, uid: &str) -> bool {
        self.standby_watcher.is_passed_over(uid) && self.routes.table().has_activators_for_pod(uid)
    }

    /// Arms the events of the next connects to watched pods. Call it after routes were written: an address gets its backend
    /// by that. One that no list has is armed once a list has it.
    pub(super) fn arm_standby_connects(&mut self) {
        for at in self.standby_watcher.take_due_addresses() {
            if let Some(backend) = self.routes.planner().remote_pod_backend(at) {
                self.handles.maps.arm_connect_event(backend);
                self.standby_watcher.record_armed(at);
            }
        }
    }
}
