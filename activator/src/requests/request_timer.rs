//! Shell: the timeouts of one request.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::{Instant, Sleep};

use crate::revisions::route_settings::RequestTimeouts;

/// Timeouts of one request: a single timer, set to the timeout that is over first.
#[derive(Debug)]
pub struct RequestTimer {
    sleep: Pin<Box<Sleep>>,
    deadline: Instant,
    start_deadline: Option<Instant>,
    idle_timeout: Option<Duration>,
    /// True if the deadline is that of a rule of the Gateway API.
    has_rule_deadline: bool,
}

impl RequestTimer {
    /// Starts the timeouts of a request now.
    pub fn start(timeouts: RequestTimeouts) -> Self {
        Self::started_at(timeouts, Instant::now())
    }

    /// Starts the timeouts of a request that arrived at this time.
    pub(crate) fn started_at(timeouts: RequestTimeouts, now: Instant) -> Self {
        let deadline = now + timeouts.total;
        let start_deadline = timeouts.response_start.map(|it| now + it);
        // The timer is set again when the response begins.
        let sleep = Box::pin(tokio::time::sleep_until(first_deadline(timeouts, now)));
        let (idle_timeout, has_rule_deadline) = (timeouts.between_frames, false);
        Self { sleep, deadline, start_deadline, idle_timeout, has_rule_deadline }
    }

    /// Waits until a timeout is over.
    pub async fn expired(&mut self) {
        self.sleep.as_mut().await;
    }

    /// Polls for a timeout that is over.
    pub(crate) fn poll_expired(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.sleep.as_mut().poll(cx)
    }

    /// Time at which the whole request has to be over.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Time by which the first byte of the response has to have come; `None`: there is no such timeout.
    pub fn start_deadline(&self) -> Option<Instant> {
        self.start_deadline
    }

    /// Time for which the response may be silent; `None`: there is no such timeout.
    pub fn idle_timeout(&self) -> Option<Duration> {
        self.idle_timeout
    }

    /// Brings the deadline of the whole request forward to the earlier one of a rule. It counts once the timer is set
    /// again, by [`restart_idle_timeout`](Self::restart_idle_timeout).
    pub(crate) fn limit_deadline(&mut self, deadline: Instant) {
        if deadline < self.deadline {
            self.deadline = deadline;
            self.has_rule_deadline = true;
        }
    }

    /// Registers that the deadline of the whole request is that of a rule of the Gateway API.
    pub(crate) fn mark_rule_deadline(&mut self) {
        self.has_rule_deadline = true;
    }

    /// Returns true if the deadline of a rule is over, and not only another timeout.
    pub(crate) fn is_rule_deadline_over(&self) -> bool {
        self.has_rule_deadline && self.deadline <= Instant::now()
    }

    /// Sets the timer again, at the response's beginning and at each frame. From then on only the timeouts of the whole
    /// request and of silence apply.
    pub(crate) fn restart_idle_timeout(&mut self) {
        let until =
            self.idle_timeout.map_or(self.deadline, |it| self.deadline.min(Instant::now() + it));
        if until != self.sleep.deadline() {
            self.sleep.as_mut().reset(until);
        }
    }
}

/// Earliest time at which a timeout of a request is over that arrived at `now` and has no response yet.
pub(crate) fn first_deadline(timeouts: RequestTimeouts, now: Instant) -> Instant {
    let first = [timeouts.response_start, timeouts.between_frames].into_iter().flatten().min();
    now + first.map_or(timeouts.total, |it| it.min(timeouts.total))
}
