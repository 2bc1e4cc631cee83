//! Pure: end of a pod: its drain, the preStop request of its kubelet, and the restart of a container.

use std::{
    mem,
    time::{Duration, Instant},
};

use common::wire::RoutingPhase;

use super::TrackedPod;
use crate::pods::types::{PodKernelState, PodTrackerAction};

/// Time that a draining pod must have been idle before it may stop, and for which it must have been draining.
pub(super) const DRAINED_AFTER: Duration = Duration::from_secs(1);

/// Time for which a persistent connection delays the end of a drained pod. The agents of clients close large pools one
/// after another, so it also counts from the begin of the draining.
pub(super) const OPEN_CONNECTION_DRAIN_TIME: Duration = Duration::from_secs(2);

/// Time after a preStop request in which the RouteTable may name the pod as draining. After that no other node learns
/// of the draining, and only the pod's own idleness counts.
pub(super) const DRAINING_ROUTE_TIMEOUT: Duration = Duration::from_secs(2);

/// Time after the controller's answer to a preStop request in which it may name the pod as draining. A pod that is not
/// draining by then has a container restarted: its liveness or startup probe has failed.
///
/// The answer is [`container_restarts`](common::wire::PodEntry::container_restarts): the API server does not delete the
/// pod. A kubelet that ends a pod by itself, for lack of memory for example, states so there a moment later. Without an
/// answer time proves nothing, as the controller's watch of pods may be silent.
pub(super) const RESTART_ASSUMED_AFTER: Duration = Duration::from_secs(5);

/// Time after [`RESTART_ASSUMED_AFTER`] for which a pod gets no requests while its serving container still listens.
/// Then another container restarts, or the application ignores SIGTERM.
pub(super) const RESTART_TIMEOUT: Duration = Duration::from_secs(30);

/// Period in which a draining pod's upgraded connections are counted, once they alone keep it.
const UPGRADED_COUNT_PERIOD: Duration = Duration::from_secs(1);

/// Drain of a pod, after which no client needs it.
#[derive(Debug, Default)]
pub(super) struct PodDrain {
    /// Time since which the RouteTable has named the pod as draining.
    pub(super) since: Option<Instant>,
    /// True if the RouteTable no longer names the pod, while the kubelet still waits.
    pub(super) is_route_removed: bool,
    /// True if the pod has been idle for long enough.
    pub(super) is_drained: bool,
    /// Time and number of the newest count of upgraded connections. The number holds while no request has ended since
    /// that time.
    pub(super) upgraded_count: Option<(Instant, u64)>,
    /// Time of the next count of upgraded connections.
    next_upgraded_count: Option<Instant>,
}

/// PreStop request of a pod's kubelet.
#[derive(Debug, Default)]
pub(super) struct PodPreStop {
    /// Time of the request, since which the kubelet waits to stop the pod.
    pub(super) since: Option<Instant>,
    /// Time since which the RouteTable answers that a container restarts.
    restart_known_since: Option<Instant>,
    /// True while the RouteTable's answer may be one to an earlier request, or that of a replica which knows only the
    /// earlier request. The agent does not ask until the controller has withdrawn that answer.
    awaits_withdrawal: bool,
    /// True if the request has got its response.
    pub(super) has_response: bool,
    /// True if the pod's first listener has opened since the request.
    is_reopened: bool,
}

impl PodPreStop {
    /// Returns true if the controller is to find out if the pod ends. It stays true after the response: if it is not the
    /// serving container that restarts, only the controller's answer tells that the pod goes on.
    pub(super) fn asks_controller(&self) -> bool {
        self.since.is_some() && !self.awaits_withdrawal
    }

    /// Begins a whole RouteTable. An answer in it counts only after it was withdrawn and given again.
    pub(super) fn begin_table(&mut self) {
        self.awaits_withdrawal = self.since.is_some();
    }

    /// Begins a question to the controller. `has_answer`: the RouteTable still has the answer to an earlier one.
    fn begin_question(&mut self, has_answer: bool) {
        self.awaits_withdrawal = has_answer;
        self.restart_known_since = None;
    }

    /// Follows the answer in the RouteTable.
    fn update_answer(&mut self, now: Instant, is_restart: bool) {
        self.awaits_withdrawal &= is_restart;
        let is_known = is_restart && self.asks_controller();
        let since = self.restart_known_since.unwrap_or(now);
        self.restart_known_since = is_known.then_some(since);
    }
}

impl TrackedPod {
    /// Follows the routing phase of the RouteTable. A pod that is no longer draining is not drained either.
    pub(super) fn update_draining(&mut self, now: Instant) {
        self.drain.since = match self.pod.phase {
            RoutingPhase::Draining => self.drain.since.or(Some(now)),
            RoutingPhase::Starting | RoutingPhase::Ready => None,
        };
        self.drain.is_drained &= self.drain.since.is_some();
        self.prestop.update_answer(now, self.pod.container_restarts);
    }

    /// Decides from a reading of the maps if the pod is drained. Time that passes between two readings proves nothing.
    /// The pod waits for upgraded connections for `upgraded_drain_time`.
    pub(super) fn update_drained(
        &mut self,
        now: Instant,
        upgraded_drain_time: Duration,
        out: &mut Vec<PodTrackerAction>,
    ) {
        let PodKernelState { connections, unused_connections, idle, .. } = self.kernel_state;
        // If the RouteTable never names it as draining, the pod counts as such a moment after the preStop request.
        let draining_since =
            self.drain.since.or_else(|| self.prestop.since.map(|at| at + DRAINING_ROUTE_TIMEOUT));
        let is_limit_over = draining_since.is_some_and(|at| now >= at + upgraded_drain_time);
        let in_flight = self.awaited_requests(now, is_limit_over, out);
        // Clients' agents are closing the idle connections: a pod that stopped with one open would lose a request that
        // arrives at the same moment.
        let required_time =
            if connections > 0 { OPEN_CONNECTION_DRAIN_TIME } else { DRAINED_AFTER };
        let is_quiet = in_flight == 0 && unused_connections == 0 && idle >= required_time;
        let is_long_ago = |since: Instant| now.saturating_duration_since(since) >= required_time;
        self.drain.is_drained = is_quiet && self.drain.since.is_some_and(is_long_ago);
        if is_quiet && self.is_waiting_to_stop() && draining_since.is_some_and(is_long_ago) {
            self.prestop.has_response = true;
            out.push(PodTrackerAction::AllowStop(self.uid()));
        }
    }

    /// Returns the requests in flight that the pod must wait for. Upgraded connections do not count if
    /// `is_limit_over`: the application closes them best itself, and learns from its SIGTERM that it is time.
    fn awaited_requests(
        &mut self,
        now: Instant,
        is_limit_over: bool,
        out: &mut Vec<PodTrackerAction>,
    ) -> u64 {
        let PodKernelState { in_flight, idle, .. } = self.kernel_state;
        if !is_limit_over || in_flight == 0 {
            return in_flight;
        }
        if self.drain.next_upgraded_count.is_none_or(|at| now >= at) {
            self.drain.next_upgraded_count = Some(now + UPGRADED_COUNT_PERIOD);
            out.push(PodTrackerAction::CountUpgraded(self.uid()));
        }
        // As no request has ended since the count, all counted connections are among those in flight.
        let counted =
            self.drain.upgraded_count.filter(|(at, _)| now.saturating_duration_since(*at) <= idle);
        in_flight.saturating_sub(counted.map_or(0, |(_, count)| count))
    }

    /// Handles a container's restart. The kubelet may restart it without waiting for requests that may never end,
    /// and the pod returns to service afterwards. Without the controller's answer nothing happens here, because the pod
    /// may as well be one that stops. Then the kubelet's grace period alone bounds the wait.
    pub(super) fn update_restart(
        &mut self,
        now: Instant,
        is_connected: bool,
        out: &mut Vec<PodTrackerAction>,
    ) {
        let Some(known_since) =
            self.prestop.restart_known_since.filter(|_| is_connected && self.drain.since.is_none())
        else {
            return;
        };
        let since = now.saturating_duration_since(known_since);
        if since >= RESTART_ASSUMED_AFTER && self.is_waiting_to_stop() {
            self.prestop.has_response = true;
            out.push(PodTrackerAction::AllowStop(self.uid()));
        }
        // Reopened: the new container listens. Otherwise the serving container never closed, and another one restarted.
        let is_over = (self.prestop.is_reopened && since >= DRAINING_ROUTE_TIMEOUT)
            || since >= RESTART_ASSUMED_AFTER + RESTART_TIMEOUT;
        if is_over && self.is_listening() {
            self.end_restart(out);
        }
    }

    /// Handles a preStop request. The kubelet sends one for each container, and each gets the same response.
    pub(super) fn handle_prestop(&mut self, now: Instant, out: &mut Vec<PodTrackerAction>) {
        if self.prestop.since.is_none() {
            self.prestop.since = Some(now);
            self.prestop.is_reopened = false;
        }
        // Also for a further request: the pod may have been deleted since the answer to the first one.
        self.prestop.begin_question(self.pod.container_restarts);
        if self.prestop.has_response {
            out.push(PodTrackerAction::AllowStop(self.uid()));
        }
        // Reports the pod as not ready, and asks the controller if it ends: no new request may come from here on.
        self.report(now, out);
    }

    /// Handles the opening of the first listener. The kubelet also sends a preStop request before it restarts a
    /// container whose liveness probe failed. A later preStop request then counts as the first one. A pod that really
    /// stops is draining by now.
    pub(super) fn handle_reopened(&mut self, now: Instant, out: &mut Vec<PodTrackerAction>) {
        self.prestop.is_reopened = self.prestop.since.is_some();
        let is_early =
            |prestop_since| now.saturating_duration_since(prestop_since) < DRAINING_ROUTE_TIMEOUT;
        if self.drain.since.is_some() || self.prestop.since.is_some_and(is_early) {
            return;
        }
        self.end_restart(out);
    }

    /// Ends the restart: the container that the preStop request was for runs again.
    fn end_restart(&mut self, out: &mut Vec<PodTrackerAction>) {
        let was_asked = self.prestop.since.take().is_some();
        self.prestop.restart_known_since = None;
        self.prestop.awaits_withdrawal = false;
        if mem::take(&mut self.prestop.has_response) || was_asked {
            out.push(PodTrackerAction::EndExclusion(self.uid()));
        }
    }

    /// Marks the pod as dropped from the RouteTable: no client is routed to it.
    pub(super) fn handle_route_removed(&mut self, now: Instant) {
        self.drain.is_route_removed = true;
        self.drain.since.get_or_insert(now);
    }

    pub(super) fn is_waiting_to_stop(&self) -> bool {
        self.prestop.since.is_some() && !self.prestop.has_response
    }
}
