//! Shell: the timer of a client connection, for one deadline after another.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::time::{Instant, Sleep, sleep_until};

/// Timer of a connection. Most deadlines are not reached, and each is later than the one before. So the timer is left as
/// it is set, and is set again only when it expires too early.
#[derive(Debug)]
pub(super) struct ConnectionTimer(Pin<Box<Sleep>>);

impl ConnectionTimer {
    /// Creates a timer that is set to this deadline.
    pub(super) fn new(deadline: Instant) -> Self {
        Self(Box::pin(sleep_until(deadline)))
    }

    /// Resolves at the deadline or later. Each call may have another deadline.
    pub(super) fn poll_expired(&mut self, cx: &mut Context<'_>, deadline: Instant) -> Poll<()> {
        if deadline < self.0.deadline() {
            self.0.as_mut().reset(deadline);
        }
        loop {
            ready!(self.0.as_mut().poll(cx));
            if deadline <= Instant::now() {
                return Poll::Ready(());
            }
            self.0.as_mut().reset(deadline);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, time::Duration};

    use futures::FutureExt as _;

    use super::*;

    async fn advance(seconds: u64) {
        tokio::time::advance(Duration::from_secs(seconds)).await;
        // The runtime processes its timers between two turns of the task.
        tokio::task::yield_now().await;
    }

    #[tokio::test(start_paused = true)]
    async fn each_deadline_counts_whatever_the_timer_was_set_to() {
        let begun = Instant::now();
        let after = |seconds| begun + Duration::from_secs(seconds);
        let mut timer = ConnectionTimer::new(after(10));
        let mut is_expired =
            |deadline| poll_fn(|cx| timer.poll_expired(cx, deadline)).now_or_never().is_some();
        assert!(!is_expired(after(10)) && !is_expired(after(30)));
        advance(11).await;
        assert!(!is_expired(after(30)), "the timer was set to an earlier one");
        assert!(!is_expired(after(20)), "a later one was set");
        advance(10).await;
        assert!(is_expired(after(20)) && !is_expired(after(40)));
        advance(20).await;
        assert!(is_expired(after(40)));
    }
}
