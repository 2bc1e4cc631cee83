//! Pure: standby watch: a sender of connections or requests checks that a pod with a standby order was thawed.
//!
//! Only the agent of a pod's node thaws the pod. A connection to a pod that stays frozen is established all the same, and
//! its bytes stay in the kernel. So a pod counts as running only after a sign. That is a byte of its response, a
//! response of its agent, or an order that was withdrawn. Without a sign within the order's timeout it is *passed
//! over*: new connections and requests go elsewhere. What was sent before stays with the pod, because it may have been
//! read.
//!
//! A missing sign counts only if the sender's packets reach the port at which the pod's agent answers. Where a network
//! policy drops them, nothing is known of the agent, and the pod is used as before. A query may be sent or delivered
//! late. The agent has half of the timeout for its response all the same.
//!
//! While the pod is passed over, its agent is asked again and again, and the next sign ends that.

use std::time::{Duration, Instant};

/// Longest timeout, which is also the longest one that a setting allows. A longer one counts as this.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(60);

/// Pause after a query that has not shown a running pod.
pub const QUERY_PAUSE: Duration = Duration::from_secs(1);

/// State machine of one pod, as one sender sees it.
///
/// Pass every event to [`step`](Self::step), and perform the actions that it returns in their order. Call it with
/// [`StandbyWatchEvent::Tick`] no later than [`next_wake`](Self::next_wake).
#[derive(Clone, Debug, Default)]
pub struct StandbyWatch {
    /// Timeout of the pod's standby order; `None`: the pod has no order, so it runs.
    timeout: Option<Duration>,
    phase: WatchPhase,
    query: QueryState,
    /// Number of the newest query.
    last_query: u64,
}

/// Event that concerns one pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StandbyWatchEvent {
    /// The RouteTable has a standby order with this timeout for the pod; `None`: it has none, or the pod is gone.
    Ordered(Option<Duration>),
    /// A connection or request was sent to the pod.
    Used,
    /// Bytes that the pod has sent have come.
    Answered,
    /// The connection of the query with this number was accepted: from now on a missing response counts.
    QueryReached(u64),
    /// The query with this number ended.
    QueryEnded(u64, QueryEnd),
    /// Time has passed; carries no other fact.
    Tick,
}

/// End of a query of the pod's agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryEnd {
    /// The agent responds that the pod runs.
    Running,
    /// The pod is frozen, no agent listens, or the agent does not respond.
    NotRunning,
    /// The pod's port of the agent was not reached. Nothing is known of the agent.
    Unreachable,
}

/// Action that the shell is to perform now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StandbyWatchAction {
    /// Ask the pod's agent if the pod runs, and pass in the end of the query with this number. A further query voids an
    /// earlier one.
    Query(u64),
    /// Send new connections and requests elsewhere.
    PassOver,
    /// Send connections and requests to the pod again.
    UseAgain,
}

/// Phase of the watch of a pod with an order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum WatchPhase {
    /// Every use has been followed by a sign.
    #[default]
    Idle,
    /// The pod was used, and no sign has followed since this time. A query has reached the port of the agent at
    /// `reached_at`, so that the missing sign counts; `None`: none has.
    Waiting { since: Instant, reached_at: Option<Instant> },
    /// A sign has shown a running pod, which counts as running until this time. A use before that is checked from then
    /// on. So a pod in constant use costs its agent a few queries a second at most.
    Running { until: Instant, is_used: bool },
    /// The timeout has passed without a sign.
    PassedOver,
}

/// State of the queries. While the pod is waited for or passed over, a query is under way or due.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum QueryState {
    /// The pod is not waited for, so no query is needed.
    #[default]
    NotNeeded,
    /// The next query begins at this time.
    Due(Instant),
    /// The query with this number has begun.
    UnderWay(u64),
}

impl StandbyWatch {
    /// Handles one event. Returns the actions to perform.
    pub fn step(&mut self, now: Instant, event: StandbyWatchEvent) -> Vec<StandbyWatchAction> {
        let was_passed_over = self.is_passed_over();
        match event {
            StandbyWatchEvent::Ordered(timeout) => self.set_timeout(timeout),
            StandbyWatchEvent::Used => self.handle_use(now),
            StandbyWatchEvent::Answered => self.record_sign(now),
            StandbyWatchEvent::QueryReached(number) => self.handle_reached(now, number),
            StandbyWatchEvent::QueryEnded(number, end) => self.handle_query_end(now, number, end),
            StandbyWatchEvent::Tick => {}
        }
        // At each event, so that a late tick changes nothing.
        self.handle_time(now);
        let mut out = Vec::new();
        match (was_passed_over, self.is_passed_over()) {
            (false, true) => out.push(StandbyWatchAction::PassOver),
            (true, false) => out.push(StandbyWatchAction::UseAgain),
            (false, false) | (true, true) => {}
        }
        out.extend(self.begin_due_query(now));
        out
    }

    /// Returns the time for the next [`step`](Self::step) with [`StandbyWatchEvent::Tick`].
    pub fn next_wake(&self) -> Option<Instant> {
        let timeout = self.timeout?;
        let phase_end = match self.phase {
            WatchPhase::Waiting { since, reached_at } => waiting_end(since, reached_at, timeout),
            WatchPhase::Running { until, is_used } => is_used.then_some(until),
            WatchPhase::Idle | WatchPhase::PassedOver => None,
        };
        let query_at = match self.query {
            QueryState::Due(at) => Some(at),
            QueryState::NotNeeded | QueryState::UnderWay(_) => None,
        };
        phase_end.into_iter().chain(query_at).min()
    }

    /// Returns true while new connections and requests should go elsewhere.
    pub fn is_passed_over(&self) -> bool {
        self.phase == WatchPhase::PassedOver
    }

    /// Returns true if the next [`StandbyWatchEvent::Used`] changes the state. While it is false, uses need not be passed
    /// in.
    pub fn awaits_use(&self) -> bool {
        let is_open = match self.phase {
            WatchPhase::Idle | WatchPhase::Running { is_used: false, .. } => true,
            WatchPhase::Running { is_used: true, .. }
            | WatchPhase::Waiting { .. }
            | WatchPhase::PassedOver => false,
        };
        is_open && self.timeout.is_some()
    }

    /// Returns true if ticks or the end of a query are awaited.
    pub fn is_active(&self) -> bool {
        self.timeout.is_some() && !self.awaits_use()
    }

    fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.timeout = timeout.map(|it| it.min(TIMEOUT_MAX));
        // Without an order the pod runs, whatever was waited for.
        if self.timeout.is_none() {
            (self.phase, self.query) = (WatchPhase::Idle, QueryState::NotNeeded);
        }
    }

    fn handle_use(&mut self, now: Instant) {
        let Some(timeout) = self.timeout else { return };
        match self.phase {
            WatchPhase::Running { until, .. } if now < until => {
                self.phase = WatchPhase::Running { until, is_used: true };
            }
            WatchPhase::Running { .. } | WatchPhase::Idle => self.start_waiting(now, timeout),
            WatchPhase::Waiting { .. } | WatchPhase::PassedOver => {}
        }
    }

    /// Begins to wait for a sign.
    fn start_waiting(&mut self, now: Instant, timeout: Duration) {
        self.phase = WatchPhase::Waiting { since: now, reached_at: None };
        // Half of the timeout: most pods have given a sign by then, and the query has the other half.
        self.query = QueryState::Due(now + timeout / 2);
    }

    /// Records a sign that the pod runs.
    fn record_sign(&mut self, now: Instant) {
        let Some(timeout) = self.timeout else { return };
        self.phase = WatchPhase::Running { until: now + timeout, is_used: false };
        self.query = QueryState::NotNeeded;
    }

    fn handle_reached(&mut self, now: Instant, number: u64) {
        // A sign may have come before, and another query may be under way by now.
        if self.query != QueryState::UnderWay(number) {
            return;
        }
        if let WatchPhase::Waiting { reached_at, .. } = &mut self.phase {
            reached_at.get_or_insert(now);
        }
    }

    /// Handles the end of the query with this number. An earlier query may end late, and has no effect.
    fn handle_query_end(&mut self, now: Instant, number: u64, end: QueryEnd) {
        if self.query != QueryState::UnderWay(number) {
            return;
        }
        match (end, self.phase) {
            (QueryEnd::Running, _) => self.record_sign(now),
            // Nothing is known of the agent, so the pod is used as before. The next use asks again.
            (QueryEnd::Unreachable, WatchPhase::Waiting { reached_at: None, .. }) => {
                (self.phase, self.query) = (WatchPhase::Idle, QueryState::NotNeeded);
            }
            // No response is awaited any more, so only the rest of the timeout is left for another sign.
            (QueryEnd::NotRunning, WatchPhase::Waiting { since, .. }) => {
                self.phase = WatchPhase::Waiting { since, reached_at: Some(since) };
                self.query = QueryState::Due(now + QUERY_PAUSE);
            }
            (QueryEnd::Unreachable | QueryEnd::NotRunning, _) => {
                self.query = QueryState::Due(now + QUERY_PAUSE);
            }
        }
    }

    /// Ends phases whose time is over.
    fn handle_time(&mut self, now: Instant) {
        let Some(timeout) = self.timeout else { return };
        match self.phase {
            // Used since its sign: it may have been frozen again, and has to give another one.
            WatchPhase::Running { until, is_used: true } if until <= now => {
                self.start_waiting(now, timeout);
            }
            WatchPhase::Running { until, is_used: false } if until <= now => {
                self.phase = WatchPhase::Idle;
            }
            WatchPhase::Waiting { since, reached_at }
                if waiting_end(since, reached_at, timeout).is_some_and(|end| end <= now) =>
            {
                self.phase = WatchPhase::PassedOver;
            }
            WatchPhase::Idle
            | WatchPhase::Waiting { .. }
            | WatchPhase::Running { .. }
            | WatchPhase::PassedOver => {}
        }
    }

    fn begin_due_query(&mut self, now: Instant) -> Option<StandbyWatchAction> {
        let QueryState::Due(at) = self.query else { return None };
        if now < at {
            return None;
        }
        self.last_query += 1;
        self.query = QueryState::UnderWay(self.last_query);
        Some(StandbyWatchAction::Query(self.last_query))
    }
}

/// Returns the time at which a pod without a sign is passed over; `None`: no query has reached its agent's port.
fn waiting_end(since: Instant, reached_at: Option<Instant>, timeout: Duration) -> Option<Instant> {
    reached_at.map(|reached_at| (since + timeout).max(reached_at + timeout / 2))
}

#[cfg(test)]
mod tests;
