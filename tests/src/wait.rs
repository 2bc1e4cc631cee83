//! Waits of tests: their timeout, and pauses between two looks.

use std::thread;
use std::time::{Duration, Instant};

/// Timeout of every wait in these tests.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Time between two checks of a wait.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Calls `look` until it returns a value; panics after [`WAIT_TIMEOUT`].
pub fn wait_for<T>(description: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(value) = look() {
            return value;
        }
        assert!(started.elapsed() < WAIT_TIMEOUT, "waited for {description}");
        sleep(POLL_INTERVAL);
    }
}

/// Sleeps on a thread of a test.
#[allow(clippy::disallowed_methods, reason = "a test's own thread; no runtime is blocked")]
pub fn sleep(time: Duration) {
    thread::sleep(time);
}
