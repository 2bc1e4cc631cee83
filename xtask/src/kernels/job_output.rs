//! Pure: parser of the job's output, which is a machine's second serial line: results of the verifier and of tests, and
//! exit codes of the runs.

use std::{collections::BTreeMap, fmt};

use serde::Serialize;

use crate::test::TestCounts;

/// Prefix of the job's own lines among those of the tests: `rouse: begin load`, `rouse: end load 0`.
const JOB_PREFIX: &str = "rouse: ";
/// Prefix of verifier results, followed by the program's name: `connect4 5690`, `egress refused` (`end` is a program).
const VERIFIER_PREFIX: &str = "verifier: ";
/// Prefix of the summary line of a test program.
const SUMMARY_PREFIX: &str = "test result: ";

/// Result of loading one program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum VerifierVerdict {
    /// Accepted; the number of instructions that the verifier walked.
    Walked(u64),
    /// Refused by the verifier.
    Refused,
    /// Not loaded: the program needs a later kernel.
    #[serde(rename = "later")]
    NeedsLaterKernel,
}

impl fmt::Display for VerifierVerdict {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Walked(count) => out.pad(&count.to_string()),
            Self::Refused => out.pad("REFUSED"),
            Self::NeedsLaterKernel => out.pad("-"),
        }
    }
}

/// Results of a job, parsed from the lines so far.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct JobResults {
    /// Result of the verifier for each program.
    pub(crate) programs: BTreeMap<String, VerifierVerdict>,
    /// Exit code of each completed run, by the run's name.
    pub(crate) exit_codes: BTreeMap<String, i32>,
    /// Test results of each run, by the run's name.
    pub(crate) test_counts: BTreeMap<String, TestCounts>,
    /// Name of the present run, and its test results since the last summary.
    current_run: Option<(String, TestCounts)>,
}

impl JobResults {
    /// Parses one more line of the job's output.
    pub(crate) fn parse_line(&mut self, line: &str) {
        let line = line.trim_end();
        if let Some(message) = line.strip_prefix(JOB_PREFIX) {
            return self.parse_job_line(message);
        }
        // The first output of a test is on the same line as the test's name.
        if let Some((_, message)) = line.split_once(VERIFIER_PREFIX) {
            self.parse_verifier_line(message);
        }
        if let Some((run, counts)) = &mut self.current_run {
            counts.parse_line(line);
            // Only the last summary is the run's own: subprocesses of tests are test programs too and may print one.
            if line.starts_with(SUMMARY_PREFIX) {
                self.test_counts.insert(run.clone(), std::mem::take(counts));
            }
        }
    }

    fn parse_job_line(&mut self, message: &str) {
        let mut words = message.split(' ');
        match (words.next(), words.next(), words.next().map(str::parse)) {
            (Some("begin"), Some(run), None) => {
                self.current_run = Some((run.to_owned(), TestCounts::default()));
            }
            (Some("end"), Some(run), Some(Ok(code))) => {
                // Lines after the end belong to no run, even if they look like results.
                self.current_run = None;
                self.exit_codes.insert(run.to_owned(), code);
            }
            _ => {}
        }
    }

    fn parse_verifier_line(&mut self, message: &str) {
        let Some((name, message)) = message.split_once(' ') else { return };
        let verdict = match message {
            "refused" => VerifierVerdict::Refused,
            "is for later kernels" => VerifierVerdict::NeedsLaterKernel,
            count => match count.parse() {
                Ok(count) => VerifierVerdict::Walked(count),
                Err(_) => return,
            },
        };
        self.programs.insert(name.to_owned(), verdict);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_lines(lines: &[&str]) -> JobResults {
        let mut results = JobResults::default();
        lines.iter().for_each(|line| results.parse_line(line));
        results
    }

    #[test]
    fn verdicts_are_read_at_any_place_of_a_line() {
        let results = parse_lines(&[
            "rouse: begin load\r",
            "test verifier::x ... verifier: bind6 122\r",
            "verifier: egress refused\r",
            "verifier: end is for later kernels\r",
            "verifier: 14 programs loaded together\r",
            "test result: FAILED. 1 passed; 1 failed; 0 ignored\r",
            "rouse: end load 101\r",
        ]);
        let programs: Vec<_> =
            results.programs.iter().map(|(name, it)| (name.as_str(), *it)).collect();
        assert_eq!(
            programs,
            [
                ("bind6", VerifierVerdict::Walked(122)),
                ("egress", VerifierVerdict::Refused),
                ("end", VerifierVerdict::NeedsLaterKernel)
            ]
        );
        assert_eq!(results.exit_codes, [("load".to_owned(), 101)].into());
        assert_eq!(results.test_counts["load"].failed, 1);
    }

    #[test]
    fn a_run_that_was_cut_off_has_not_ended() {
        let results = parse_lines(&["rouse: begin tests", "test listening_sockets::x ... ok"]);
        assert!(results.exit_codes.is_empty());
    }

    #[test]
    fn only_the_last_result_of_a_run_is_its_own() {
        let results = parse_lines(&[
            "rouse: begin tests",
            "---- agent::role stdout ----",
            "test result: FAILED. 0 passed; 1 failed; 0 ignored",
            "test result: ok. 3 passed; 0 failed; 0 ignored",
            "rouse: end tests 0",
        ]);
        let counts = &results.test_counts["tests"];
        assert_eq!((counts.passed, counts.failed, counts.failures.len()), (3, 0, 0));
    }
}
