//! Pure: how long a pod waits before it tries again, as the kubelet does.

use std::time::{Duration, Instant};

/// First wait (kubernetes `pkg/kubelet/kubelet.go`, `backOffPeriod`).
const FIRST: Duration = Duration::from_secs(10);
/// Longest wait (`MaxContainerBackOff`).
const LONGEST: Duration = Duration::from_secs(300);
/// After this long without a failure the count begins anew (twice the longest wait).
const FORGET: Duration = Duration::from_secs(600);

/// Counts failures of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Backoff {
    next: Option<Duration>,
    last: Option<Instant>,
    paid: bool,
}

impl Backoff {
    /// Records a failure; returns how long to wait: 0, 10, 20, 40 … 300 seconds.
    ///
    /// For containers the first restart is free, like the kubelet's. Pulls and starts that failed call
    /// [`Backoff::skip_free`] before.
    pub(super) fn failed(&mut self, now: Instant) -> Duration {
        let forgotten = self.last.is_some_and(|last| now.duration_since(last) > FORGET);
        if forgotten {
            *self = Self { paid: self.paid, ..Self::default() };
        }
        let wait = self.next.unwrap_or(if self.paid { FIRST } else { Duration::ZERO });
        self.next = Some((wait * 2).clamp(FIRST, LONGEST));
        // What counts is the time that passed since the wait was over.
        self.last = Some(now + wait);
        wait
    }

    /// From now on the first failure waits too.
    pub(super) fn skip_free(&mut self) {
        self.paid = true;
    }
}
