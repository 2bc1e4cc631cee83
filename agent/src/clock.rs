//! Shell: the clock that the eBPF programs stamp their events with, and the time of day.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::time::{ClockId, clock_gettime};

/// Returns CLOCK_MONOTONIC in ns, the same clock as `bpf_ktime_get_ns`.
pub(crate) fn monotonic_ns() -> u64 {
    // The call cannot fail for a clock that every kernel has.
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |time| {
        time.tv_sec().unsigned_abs() * 1_000_000_000 + time.tv_nsec().unsigned_abs()
    })
}

/// Returns the time of day in ms since the epoch, to compare with times of the control plane. It may jump.
pub(crate) fn unix_ms() -> i64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since_epoch.as_millis()).unwrap_or(i64::MAX)
}

/// Returns the CPU time of the calling thread. Unlike elapsed time, it does not include other threads' work.
pub(crate) fn thread_cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Into::into)
}
