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
}

impl RequestTimer {
    /// Starts the timeouts of a request now.
    pub fn start(timeouts: RequestTimeouts) -> Self {
        let now = Instant::now();
        let deadline = now + timeouts.total;
        // The timer is set to the earliest of the timeouts, and set again when the response begins.
        let first = [timeouts.response_start, timeouts.between_frames].into_iter().flatten().min();
        let until = first.map_or(deadline, |it| deadline.min(now + it));
        let start_deadline = timeouts.response_start.map(|it| now + it);
        let sleep = Box::pin(tokio::time::sleep_until(until));
        Self { sleep, deadline, start_deadline, idle_timeout: timeouts.between_frames }
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

    /// Brings the deadline of the whole request forward to this one, from the next time on at which the timer is set.
    pub(crate) fn limit_deadline(&mut self, deadline: Instant) {
        self.deadline = self.deadline.min(deadline);
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
