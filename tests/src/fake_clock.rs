//! A system clock that a test sets, for the processes of one node alone.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};

/// Debian's library that replaces clock functions; the dynamic loader expands `$LIB`.
const LIBRARY: &str = "/usr/$LIB/faketime/libfaketimeMT.so.1";
/// Time after which programs see a change: the library reads its file once a second.
const EFFECTIVE_AFTER: Duration = Duration::from_millis(1500);
/// Highest age of the last line of a log.
const MAX_LOG_AGE: SignedDuration = SignedDuration::from_mins(5);

/// Clock of the programs that it was given to, in a file.
#[derive(Debug)]
pub struct FakeClock(PathBuf);

impl FakeClock {
    /// Creates a clock that equals the machine's until it is set.
    pub fn new(folder: &Path) -> Self {
        let clock = Self(folder.join("clock"));
        clock.write_offset(0);
        clock
    }

    /// Gives the clock to a program. The monotonic clock and file times stay the machine's.
    pub fn apply_to(&self, program: &mut Command) {
        program.env("LD_PRELOAD", LIBRARY).env("FAKETIME_TIMESTAMP_FILE", &self.0);
        program.env("FAKETIME_CACHE_DURATION", "1").env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        program.env("DONT_FAKE_MONOTONIC", "1").env("NO_FAKE_STAT", "1");
    }

    /// Sets the clock `offset_s` seconds off the machine's, and waits until programs have seen it.
    pub fn set_offset(&self, offset_s: i64) {
        self.write_offset(offset_s);
        crate::wait::sleep(EFFECTIVE_AFTER);
    }

    fn write_offset(&self, offset_s: i64) {
        // Written aside and renamed, because a program may read the file at any moment.
        let temporary = self.0.with_extension("new");
        fs::write(&temporary, format!("{offset_s:+}")).expect("a file");
        fs::rename(temporary, &self.0).expect("a clock");
    }
}

/// Returns true if the last line of a log was written by a clock that is `offset_s` seconds off.
pub fn log_shows_offset(log: &str, offset_s: i64) -> bool {
    let stamp = |line: &str| line.split_whitespace().next()?.parse::<Timestamp>().ok();
    let last = log.lines().rev().find_map(stamp);
    let now = Timestamp::now() + SignedDuration::from_secs(offset_s);
    last.is_some_and(|it| it.duration_until(now).abs() < MAX_LOG_AGE)
}
