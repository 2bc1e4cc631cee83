//! Waits of tests: their timeout, and pauses between two checks.

use std::thread;
use std::time::{Duration, Instant};

/// Timeout of every wait in these tests. A thread of a busy machine may wait seconds for a processor at each step.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(180);

/// Shortest time between two checks of a wait.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Calls `check` until it returns a value; panics after [`WAIT_TIMEOUT`].
pub fn wait_for<T>(description: &str, mut check: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        let checked_at = Instant::now();
        if let Some(value) = check() {
            return value;
        }
        assert!(started.elapsed() < WAIT_TIMEOUT, "waited for {description}");
        pause_after_check(checked_at.elapsed());
    }
}

/// Pauses between two checks, of which the last one took `duration`. A check that starts a process costs time of the
/// processors that the thing waited for needs, so checks take a third of the time at most.
pub(crate) fn pause_after_check(duration: Duration) {
    sleep(POLL_INTERVAL.max(duration * 2));
}

/// Sleeps on a thread of a test.
#[allow(clippy::disallowed_methods, reason = "a test's own thread; no runtime is blocked")]
pub fn sleep(time: Duration) {
    thread::sleep(time);
}
