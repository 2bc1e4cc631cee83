//! Pure: growing pauses between attempts of a pod, as the kubelet's back-off.

use std::time::{Duration, Instant};

/// First wait (kubernetes `pkg/kubelet/kubelet.go`, `backOffPeriod`).
const FIRST_DELAY: Duration = Duration::from_secs(10);
/// Longest wait (kubernetes `pkg/kubelet/kubelet.go`, `MaxContainerBackOff`).
const MAX_DELAY: Duration = Duration::from_secs(300);
/// Time without a failure after which waits begin at the first again: twice the longest wait.
const RESET_AFTER: Duration = Duration::from_secs(600);

/// Back-off for failures of one kind, of one container.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Backoff {
    next_delay: Option<Duration>,
    last_retry_at: Option<Instant>,
    delays_first: bool,
}

impl Backoff {
    /// Records a failure and returns the pause before the next attempt: 0, 10, 20, 40 … 300 seconds.
    ///
    /// The first restart of a container has no pause, as in the kubelet. Pulls and starts that failed call
    /// [`Backoff::delay_first_failure`] before.
    pub(super) fn record_failure(&mut self, now: Instant) -> Duration {
        let forgotten =
            self.last_retry_at.is_some_and(|last| now.duration_since(last) > RESET_AFTER);
        if forgotten {
            *self = Self { delays_first: self.delays_first, ..Self::default() };
        }
        let wait =
            self.next_delay.unwrap_or(if self.delays_first { FIRST_DELAY } else { Duration::ZERO });
        self.next_delay = Some((wait * 2).clamp(FIRST_DELAY, MAX_DELAY));
        // The time to forget counts from the end of the pause, not from the failure.
        self.last_retry_at = Some(now + wait);
        wait
    }

    /// Makes the first failure wait too, from now on.
    pub(super) fn delay_first_failure(&mut self) {
        self.delays_first = true;
    }
}
