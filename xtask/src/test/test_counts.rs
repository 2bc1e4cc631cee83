//! Pure: results parsed from the output of test programs: numbers of tests, and messages of failed ones.

use serde::Serialize;

/// Maximum number of lines of a failed test's message that are repeated at the end of the run.
const MAX_MESSAGE_LINES: usize = 12;
/// Maximum number of slow tests that are printed after a run.
const MAX_SLOWEST: usize = 10;

/// Results of tests so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct TestCounts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// Number of tests that run only on request.
    pub(super) ignored: u64,
    /// Name of each failed test, followed by the lines of its message.
    pub(crate) failures: Vec<Vec<String>>,
    /// Seconds that each test took; empty if tests ran in parallel.
    #[serde(skip)]
    seconds: Vec<(String, f64)>,
    /// Section of the output that the next line belongs to.
    #[serde(skip)]
    section: OutputSection,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum OutputSection {
    /// Section outside of any failed test's output.
    #[default]
    Outside,
    /// Output of a failed test, before its panic message.
    BeforePanic,
    /// Panic message of a failed test.
    Panic,
}

impl TestCounts {
    /// Parses one line of libtest's output.
    pub(crate) fn parse_line(&mut self, line: &str) {
        let line = line.trim_end();
        if let Some(rest) = line.trim_start().strip_prefix("test result: ") {
            self.parse_summary(rest);
        } else if let Some(name) = section_name(line) {
            self.failures.push(vec![name.to_owned()]);
            self.section = OutputSection::BeforePanic;
        } else if self.section != OutputSection::Outside {
            self.add_failure_line(line);
        }
    }

    /// Records that the test in the result line `line` took `seconds`. Other lines are ignored.
    pub(super) fn record_seconds(&mut self, line: &str, seconds: f64) {
        if let Some(name) = result_name(line) {
            self.seconds.push((name.to_owned(), seconds));
        }
    }

    /// Slowest tests with their seconds, slowest first; empty if tests ran in parallel.
    pub(super) fn slowest(&self) -> Vec<(&str, f64)> {
        let mut tests: Vec<_> = self.seconds.iter().map(|(name, s)| (name.as_str(), *s)).collect();
        tests.sort_by(|a, b| b.1.total_cmp(&a.1));
        tests.truncate(MAX_SLOWEST);
        tests
    }

    /// Combines these results with those of `next`.
    pub(crate) fn combine(mut self, next: Self) -> Self {
        self.seconds.extend(next.seconds);
        self.passed += next.passed;
        self.failed += next.failed;
        self.ignored += next.ignored;
        self.failures.extend(next.failures);
        self
    }

    fn parse_summary(&mut self, rest: &str) {
        let number = |word: &str| -> u64 {
            let before =
                rest.split(&[';', '.'][..]).find_map(|part| part.trim().strip_suffix(word));
            before.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
        };
        self.passed += number(" passed");
        self.failed += number(" failed");
        self.ignored += number(" ignored");
        self.section = OutputSection::Outside;
    }

    fn add_failure_line(&mut self, line: &str) {
        let Some(failure) = self.failures.last_mut() else { return };
        let is_panic = line.starts_with("thread '") && line.contains("panicked at");
        // The message ends where the backtrace begins; the backtrace itself is long and rarely needed.
        let is_over = line == "stack backtrace:" || failure.len() > MAX_MESSAGE_LINES;
        self.section = match self.section {
            OutputSection::BeforePanic if is_panic => OutputSection::Panic,
            OutputSection::Panic if is_over => OutputSection::Outside,
            unchanged => unchanged,
        };
        if self.section == OutputSection::Panic {
            failure.push(line.to_owned());
        }
    }
}

/// Name of the test in a result line `test NAME ... ok`.
fn result_name(line: &str) -> Option<&str> {
    let (name, result) = line.trim_end().strip_prefix("test ")?.split_once(" ... ")?;
    (result.ends_with("ok") || result.ends_with("FAILED")).then_some(name)
}

/// Name of the test in a heading `---- NAME stdout ----`.
fn section_name(line: &str) -> Option<&str> {
    line.strip_prefix("---- ")?.strip_suffix(" stdout ----")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count_lines(lines: &[&str]) -> TestCounts {
        let mut counts = TestCounts::default();
        lines.iter().for_each(|line| counts.parse_line(line));
        counts
    }

    #[test]
    fn counts_are_read_from_closing_lines_only() {
        let counts = count_lines(&[
            "test plan::tests::x ... ok",
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.01s",
            "test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out",
        ]);
        assert_eq!((counts.passed, counts.failed, counts.ignored), (15, 2, 1));
    }

    #[test]
    fn the_slowest_tests_come_first_and_ignored_ones_not_at_all() {
        let mut counts = TestCounts::default();
        counts.record_seconds("test service_lifecycle::it_wakes ... ok", 2.0);
        counts.record_seconds("test faults::it_dies ... FAILED", 30.5);
        counts.record_seconds("test faults::it_lives ... ignored, takes minutes", 9.0);
        counts.record_seconds("test result: ok. 1 passed; 0 failed", 9.0);
        assert_eq!(
            counts.slowest(),
            [("faults::it_dies", 30.5), ("service_lifecycle::it_wakes", 2.0)]
        );
    }

    #[test]
    fn panic_messages_are_kept_without_other_output_and_backtrace() {
        let counts = count_lines(&[
            "---- service_lifecycle::it_wakes stdout ----",
            "first response after 2 ms",
            "thread 'service_lifecycle::it_wakes' (7) panicked at tests/cluster/service_lifecycle.rs:3:5:",
            "1 of 2 lost",
            "stack backtrace:",
            "   0: rust_begin_unwind",
            "---- baseline::it_responds stdout ----",
            "thread 'baseline::it_responds' (8) panicked at x.rs:1:1:",
            "no response",
            "test result: FAILED. 0 passed; 2 failed; 0 ignored",
            "else",
        ]);
        let failure = |name: &str, at: &str, message: &str| {
            let thread = format!("thread '{name}' {at}:");
            vec![name.to_owned(), thread, message.to_owned()]
        };
        assert_eq!(
            counts.failures,
            [
                failure(
                    "service_lifecycle::it_wakes",
                    "(7) panicked at tests/cluster/service_lifecycle.rs:3:5",
                    "1 of 2 lost"
                ),
                failure("baseline::it_responds", "(8) panicked at x.rs:1:1", "no response"),
            ]
        );
    }
}
