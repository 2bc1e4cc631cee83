//! Pure: what test programs say: how many tests passed, and why the others did not.

use serde::Serialize;

/// So many lines of what a failed test said are repeated at the end, where its reader looks first.
const MOST_LINES: usize = 12;
/// So many of the slowest tests are named after a run.
const MOST_SLOW: usize = 10;

/// Tests that ran.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// Left out unless asked for.
    pub(super) ignored: u64,
    /// Each failed test's name, with what it said as it failed.
    pub(crate) failures: Vec<Vec<String>>,
    /// Seconds that each test took, where tests ran one after the other.
    #[serde(skip)]
    seconds: Vec<(String, f64)>,
    /// What the next line belongs to.
    #[serde(skip)]
    at: Place,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    /// To no test.
    #[default]
    Outside,
    /// To one that has not said yet why it failed.
    Before,
    /// To why it failed.
    Why,
}

impl Tally {
    /// Adds what a line of libtest's output says.
    pub(crate) fn absorb(&mut self, line: &str) {
        let line = line.trim_end();
        if let Some(rest) = line.trim_start().strip_prefix("test result: ") {
            self.close(rest);
        } else if let Some(name) = name_of_section(line) {
            self.failures.push(vec![name.to_owned()]);
            self.at = Place::Before;
        } else if self.at != Place::Outside {
            self.add(line);
        }
    }

    /// Records that the test which `line` reports took `seconds`; other lines are ignored.
    pub(super) fn record(&mut self, line: &str, seconds: f64) {
        if let Some(name) = name_of_result(line) {
            self.seconds.push((name.to_owned(), seconds));
        }
    }

    /// The slowest tests with their seconds, slowest first; none where tests ran side by side.
    pub(super) fn slowest(&self) -> Vec<(&str, f64)> {
        let mut all: Vec<_> = self.seconds.iter().map(|(name, s)| (name.as_str(), *s)).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all.truncate(MOST_SLOW);
        all
    }

    /// This and then `next`.
    pub(crate) fn and(mut self, next: Self) -> Self {
        self.seconds.extend(next.seconds);
        self.passed += next.passed;
        self.failed += next.failed;
        self.ignored += next.ignored;
        self.failures.extend(next.failures);
        self
    }

    fn close(&mut self, rest: &str) {
        let number = |word: &str| -> u64 {
            let before =
                rest.split(&[';', '.'][..]).find_map(|part| part.trim().strip_suffix(word));
            before.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
        };
        self.passed += number(" passed");
        self.failed += number(" failed");
        self.ignored += number(" ignored");
        self.at = Place::Outside;
    }

    fn add(&mut self, line: &str) {
        let Some(failure) = self.failures.last_mut() else { return };
        let begins = line.starts_with("thread '") && line.contains("panicked at");
        let is_over = line == "stack backtrace:" || failure.len() > MOST_LINES;
        self.at = match self.at {
            Place::Before if begins => Place::Why,
            Place::Why if is_over => Place::Outside,
            at => at,
        };
        if self.at == Place::Why {
            failure.push(line.to_owned());
        }
    }
}

/// `test NAME ... ok`. What the test printed itself may stand before the result, on lines of its own.
fn name_of_result(line: &str) -> Option<&str> {
    let (name, result) = line.trim_end().strip_prefix("test ")?.split_once(" ... ")?;
    (result.ends_with("ok") || result.ends_with("FAILED")).then_some(name)
}

/// `---- NAME stdout ----`
fn name_of_section(line: &str) -> Option<&str> {
    line.strip_prefix("---- ")?.strip_suffix(" stdout ----")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(lines: &[&str]) -> Tally {
        let mut tally = Tally::default();
        lines.iter().for_each(|line| tally.absorb(line));
        tally
    }

    #[test]
    fn counts_are_read_from_closing_lines_only() {
        let tally = tally(&[
            "test plan::tests::x ... ok",
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.01s",
            "test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out",
        ]);
        assert_eq!((tally.passed, tally.failed, tally.ignored), (15, 2, 1));
    }

    #[test]
    fn the_slowest_tests_come_first_and_ignored_ones_not_at_all() {
        let mut tally = Tally::default();
        tally.record("test story::it_wakes ... ok", 2.0);
        tally.record("test faults::it_dies ... FAILED", 30.5);
        tally.record("test faults::it_lives ... ignored, takes minutes", 9.0);
        tally.record("test result: ok. 1 passed; 0 failed", 9.0);
        assert_eq!(tally.slowest(), [("faults::it_dies", 30.5), ("story::it_wakes", 2.0)]);
    }

    #[test]
    fn why_a_test_failed_is_kept_without_what_it_said_before_and_where() {
        let tally = tally(&[
            "---- story::it_wakes stdout ----",
            "first answer after 2 ms",
            "thread 'story::it_wakes' (7) panicked at tests/cluster/story.rs:3:5:",
            "1 of 2 lost",
            "stack backtrace:",
            "   0: rust_begin_unwind",
            "---- plain::it_answers stdout ----",
            "thread 'plain::it_answers' (8) panicked at x.rs:1:1:",
            "no answer",
            "test result: FAILED. 0 passed; 2 failed; 0 ignored",
            "else",
        ]);
        let why = |name: &str, at: &str, said: &str| {
            let thread = format!("thread '{name}' {at}:");
            vec![name.to_owned(), thread, said.to_owned()]
        };
        assert_eq!(
            tally.failures,
            [
                why("story::it_wakes", "(7) panicked at tests/cluster/story.rs:3:5", "1 of 2 lost"),
                why("plain::it_answers", "(8) panicked at x.rs:1:1", "no answer"),
            ]
        );
    }
}
