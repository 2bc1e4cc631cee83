//! Shell: the part of the loop that reads the kernel's maps in a fixed period, because events may be lost.

use std::time::{Duration, Instant};

use super::Agent;
use crate::connections::deadlines::task::DeadlineScanResults;

/// Period in which the state of all pods is read.
const SWEEP_PERIOD: Duration = Duration::from_secs(1);
/// Period in which draining pods are read, so that the end of the draining is noticed soon.
const DRAINING_SWEEP_PERIOD: Duration = Duration::from_millis(100);

impl Agent {
    /// Reads the state of pods that are due: all pods once a second, draining pods more often.
    pub(super) fn sweep(&mut self) {
        let now = Instant::now();
        let draining = self.pods.draining_uids();
        self.stale_connections.start_due_rounds(now);
        if self.stale_sockets.is_round_due(now) {
            self.stale_sockets.start_round(now, self.routes.take_changed_endpoints());
        }
        let has_known = self.stale_connections.has_known_connections();
        let is_closing = has_known || self.stale_connections.is_urgent(now);
        // Kubelets wait for draining pods, and a connection can be closed only in a pause of its client.
        let is_frequent =
            is_closing || self.stale_sockets.has_rounds_left() || !draining.is_empty();
        if now >= self.next_full_sweep {
            self.next_full_sweep = now + SWEEP_PERIOD;
            self.stale_connections.update_phases(now, self.routes.table());
            let uids = self.registry.uids();
            uids.iter().for_each(|uid| self.read_pod(uid));
            self.sweep_standby();
            self.update_passed_over();
            self.handles.idle.remove_unwatched(now);
            uids.iter().for_each(|uid| self.update_deadline(uid));
            self.handles.usage.report_all(&self.handles.maps);
            self.handles.revision_totals.read_slots(&self.handles.maps);
            self.housekeep(now);
        } else {
            // Between full sweeps only the pods that a kubelet waits for are read.
            draining.iter().for_each(|uid| self.read_pod(uid));
        }
        self.overdue_requests.start_due_round(|uid| self.registry.get(uid));
        let known_scan_period = self.stale_connections.known_scan_period();
        let soon = now + if has_known { known_scan_period } else { DRAINING_SWEEP_PERIOD };
        self.next_sweep =
            if is_frequent { self.next_full_sweep.min(soon) } else { self.next_full_sweep };
        self.advance_next_sweep();
    }

    /// Handles the results of a finished round of deadline scans.
    pub(super) fn handle_deadline_scans(&mut self, results: DeadlineScanResults) {
        self.overdue_requests.handle_results(results);
        self.advance_next_sweep();
    }

    /// Moves the next sweep forward if the next deadline scan of a pod is due before it.
    fn advance_next_sweep(&mut self) {
        self.next_sweep =
            self.overdue_requests.next_scan().map_or(self.next_sweep, |at| at.min(self.next_sweep));
    }

    /// Reads the number of requests in flight in a pod, for its deadline.
    pub(super) fn update_deadline(&mut self, uid: &str) {
        if !self.overdue_requests.is_enforced() {
            return;
        }
        let Some(local) = self.registry.get(uid) else { return };
        // A connection of raw TCP may last for as long as its ends want.
        if local.ports.are_all_opaque() {
            return self.overdue_requests.forget(uid);
        }
        let Some(tracked) = self.pods.get(uid) else { return };
        let timeout = self.routes.table().request_terms(&tracked.revision).timeout;
        let maps = &self.handles.maps;
        self.overdue_requests
            .update_in_flight(uid, timeout, || maps.pod_state(local.entry.slot).in_flight);
    }
}
