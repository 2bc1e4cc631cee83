//! Pure: growing pauses between attempts of a pod, as the kubelet's back-off.

use std::time::{Duration, Instant};

/// First wait (kubernetes `pkg/kubelet/kubelet.go`, `backOffPeriod`).
const FIRST: Duration = Duration::from_secs(10);
/// Longest wait (kubernetes `pkg/kubelet/kubelet.go`, `MaxContainerBackOff`).
const LONGEST: Duration = Duration::from_secs(300);
/// Time without a failure after which waits begin at the first again: twice the longest wait.
const FORGET: Duration = Duration::from_secs(600);

/// Back-off for failures of one kind, of one container.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Backoff {
    next: Option<Duration>,
    last: Option<Instant>,
    paid: bool,
}

impl Backoff {
    /// Records a failure and returns the pause before the next attempt: 0, 10, 20, 40 … 300 seconds.
    ///
    /// The first restart of a container has no pause, as in the kubelet. Pulls and starts that failed call
    /// [`Backoff::skip_free`] before.
    pub(super) fn failed(&mut self, now: Instant) -> Duration {
        let forgotten = self.last.is_some_and(|last| now.duration_since(last) > FORGET);
        if forgotten {
            *self = Self { paid: self.paid, ..Self::default() };
        }
        let wait = self.next.unwrap_or(if self.paid { FIRST } else { Duration::ZERO });
        self.next = Some((wait * 2).clamp(FIRST, LONGEST));
        // The time to forget counts from the end of the pause, not from the failure.
        self.last = Some(now + wait);
        wait
    }

    /// Makes the first failure wait too, from now on.
    pub(super) fn skip_free(&mut self) {
        self.paid = true;
    }
}
