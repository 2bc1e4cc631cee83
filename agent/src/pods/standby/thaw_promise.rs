//! Pure: end of the promise that the agent thaws the frozen pods of its node.
//!
//! Connects of the node read it in the kernel, and pass frozen pods over once it is over. So they need no agent to notice
//! that the agent is gone. It is renewed beside the loop, which does the thaws: work that keeps the loop busy for a moment
//! must not end it. A loop that hangs ends it, too.

use std::time::Duration;

/// Shortest promise. A shorter one would end whenever the node is busy for a moment.
const PROMISE_MIN: Duration = Duration::from_millis(100);
/// Longest promise, which is also the longest timeout that a setting allows.
const PROMISE_MAX: Duration = Duration::from_secs(60);
/// Time without a turn of the loop after which the loop hangs. An idle one has a turn each second.
const LOOP_SILENCE_MAX: Duration = Duration::from_secs(3);
/// Number of times that a promise is renewed before it ends.
const RENEWALS: u32 = 4;

/// Returns the end of a promise that is made now, in ns of the clock of `now_ns`. `None`: the loop hangs, so no promise can
/// be made. `loop_turn_ns` is the time of its last turn, and `timeout` that of the standby orders.
pub(crate) fn promise_until_ns(now_ns: u64, loop_turn_ns: u64, timeout: Duration) -> Option<u64> {
    let silence = Duration::from_nanos(now_ns.saturating_sub(loop_turn_ns));
    let length_ns = u64::try_from(promise_length(timeout).as_nanos()).unwrap_or(u64::MAX);
    (silence < LOOP_SILENCE_MAX).then(|| now_ns.saturating_add(length_ns))
}

/// Returns the time after which a promise is renewed.
pub(crate) fn renewal_period(timeout: Duration) -> Duration {
    promise_length(timeout) / RENEWALS
}

fn promise_length(timeout: Duration) -> Duration {
    timeout.clamp(PROMISE_MIN, PROMISE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    #[test]
    fn a_promise_is_as_long_as_the_timeout_within_its_bounds() {
        for (timeout_ms, length_ms) in [(10, 100), (250, 250), (60_000, 60_000), (u64::MAX, 60_000)]
        {
            let timeout = Duration::from_millis(timeout_ms);
            let until = promise_until_ns(SECOND_NS, SECOND_NS, timeout);
            assert_eq!(until, Some(SECOND_NS + length_ms * 1_000_000), "{timeout_ms}");
            assert_eq!(renewal_period(timeout), Duration::from_millis(length_ms) / RENEWALS);
        }
    }

    #[test]
    fn an_idle_loop_keeps_the_promise_and_one_that_hangs_breaks_it() {
        let timeout = Duration::from_millis(250);
        let is_kept =
            |silence_ns| promise_until_ns(9 * SECOND_NS, 9 * SECOND_NS - silence_ns, timeout);
        assert!(is_kept(0).is_some() && is_kept(SECOND_NS).is_some());
        assert_eq!(is_kept(3 * SECOND_NS), None);
        // The turn of a loop on another processor may be later.
        assert!(promise_until_ns(SECOND_NS, 2 * SECOND_NS, timeout).is_some());
    }
}
