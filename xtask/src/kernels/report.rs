//! Pure: results of all kernels, as tables, as JSON, and as a list of errors.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::Serialize;

use super::job_output::{JobResults, VerifierVerdict};
use crate::test::TestCounts;

/// Highest number of instructions for a program: half of the verifier's limit of one million.
pub(crate) const MAX_INSTRUCTIONS: u64 = 500_000;

/// Results on one kernel.
#[derive(Debug, Serialize)]
pub(crate) struct KernelOutcome {
    /// Name of the kernel on the command line.
    pub(crate) kernel: &'static str,
    /// Version of the kernel's package; empty if it could not be downloaded.
    pub(crate) version: String,
    /// Result of the verifier for each program.
    pub(crate) programs: BTreeMap<String, VerifierVerdict>,
    #[serde(flatten)]
    pub(crate) test_counts: TestCounts,
    /// Tests that cannot pass on this kernel, each with the reason.
    #[serde(rename = "left_out")]
    pub(crate) skipped_tests: Vec<(String, &'static str)>,
    pub(crate) seconds: u64,
    /// Descriptions of all errors; empty if there are none.
    #[serde(rename = "wrong")]
    pub(crate) errors: Vec<String>,
}

/// Planned work on one kernel, and the output of the machine.
#[derive(Debug)]
pub(crate) struct KernelRunOutput<'a> {
    pub(crate) version: &'a str,
    pub(crate) results: JobResults,
    /// Number of tests to run, without those of the verifier.
    pub(crate) requested_tests: usize,
    pub(crate) skipped_tests: Vec<(String, &'static str)>,
    /// Last lines of the kernel's console.
    pub(crate) console_tail: String,
    pub(crate) seconds: u64,
}

/// Names of the runs in the job: verifier's tests, and other tests.
pub(crate) const LOAD_RUN: &str = "load";
pub(crate) const TESTS_RUN: &str = "tests";

impl KernelOutcome {
    /// Result of a kernel on which nothing could run.
    pub(crate) fn not_run(kernel: &'static str, reason: String) -> Self {
        Self {
            kernel,
            version: String::new(),
            programs: BTreeMap::new(),
            test_counts: TestCounts::default(),
            skipped_tests: vec![],
            seconds: 0,
            errors: vec![format!("cannot run: {reason}")],
        }
    }

    /// Result of a machine that has ended.
    pub(crate) fn from_run(kernel: &'static str, run_output: KernelRunOutput<'_>) -> Self {
        let JobResults { programs, exit_codes, test_counts, .. } = run_output.results;
        let mut errors = Vec::new();
        for (run, requested) in [(LOAD_RUN, 1), (TESTS_RUN, run_output.requested_tests)] {
            let test_count = test_counts.get(run).map_or(0, |counts| counts.passed + counts.failed);
            match exit_codes.get(run) {
                _ if requested == 0 => {}
                None => errors.push(format!(
                    "run {run} did not end; end of the console:\n{}",
                    run_output.console_tail
                )),
                // A run may end early for any reason: tests that did not run must not look as if they had passed.
                Some(0) if test_count < requested as u64 => {
                    errors.push(format!("{test_count} of {requested} {run} ran"));
                }
                Some(0) => {}
                Some(code) => errors.push(format!("run {run} failed ({code})")),
            }
        }
        // A machine that fails early could otherwise look like one without faults.
        if !programs.values().any(|verdict| matches!(verdict, VerifierVerdict::Walked(_))) {
            errors.push("no program was loaded".to_owned());
        }
        for (name, verdict) in &programs {
            match verdict {
                VerifierVerdict::Refused => errors.push(format!("{name} is refused")),
                VerifierVerdict::Walked(count) if *count > MAX_INSTRUCTIONS => {
                    errors.push(format!(
                        "{name} takes {count} instructions; the maximum is {MAX_INSTRUCTIONS}"
                    ));
                }
                VerifierVerdict::Walked(_) | VerifierVerdict::NeedsLaterKernel => {}
            }
        }
        Self {
            kernel,
            version: run_output.version.to_owned(),
            programs,
            // The verifier's tests count together with the others.
            test_counts: test_counts.into_values().fold(TestCounts::default(), TestCounts::combine),
            skipped_tests: run_output.skipped_tests,
            seconds: run_output.seconds,
            errors,
        }
    }

    /// Accepted programs: number of instructions and name.
    fn accepted(&self) -> impl Iterator<Item = (u64, &str)> {
        self.programs.iter().filter_map(|(name, verdict)| match verdict {
            VerifierVerdict::Walked(count) => Some((*count, name.as_str())),
            VerifierVerdict::Refused | VerifierVerdict::NeedsLaterKernel => None,
        })
    }
}

/// Tables of all kernels, for display.
pub(crate) struct KernelTables<'a>(pub(crate) &'a [KernelOutcome]);

impl fmt::Display for KernelTables<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.instructions(out)?;
        self.skipped_tests(out)?;
        self.summary(out)
    }
}

impl KernelTables<'_> {
    fn instructions(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:<18}", "instructions")?;
        self.0.iter().try_for_each(|it| write!(out, " {:>10}", it.kernel))?;
        writeln!(out)?;
        // All programs of all kernels: each kernel may skip some.
        let names: BTreeSet<_> = self.0.iter().flat_map(|it| it.programs.keys()).collect();
        for name in names {
            write!(out, "{name:<18}")?;
            for outcome in self.0 {
                match outcome.programs.get(name) {
                    Some(verdict) => write!(out, " {verdict:>10}")?,
                    None => write!(out, " {:>10}", "?")?,
                }
            }
            writeln!(out)?;
        }
        writeln!(out)
    }

    fn skipped_tests(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for outcome in self.0.iter().filter(|it| !it.skipped_tests.is_empty()) {
            writeln!(out, "skipped on {}:", outcome.kernel)?;
            for (name, reason) in &outcome.skipped_tests {
                writeln!(out, "  {name}: {reason}")?;
            }
        }
        Ok(())
    }

    /// Writes a row for each kernel.
    fn summary(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            out,
            "\n{:<8} {:<18} {:<7} {:>8}  {:<24} {:>6} {:>6} {:>8}  {:>6}",
            "kernel",
            "version",
            "result",
            "programs",
            "most instructions",
            "passed",
            "failed",
            "skipped",
            "time"
        )?;
        for outcome in self.0 {
            // The largest program shows how close the kernel is to the limit.
            let longest = outcome.accepted().max();
            let longest =
                longest.map_or_else(|| "-".to_owned(), |(count, name)| format!("{count} {name}"));
            writeln!(
                out,
                "{:<8} {:<18} {:<7} {:>8}  {longest:<24} {:>6} {:>6} {:>8}  {:>4} s",
                outcome.kernel,
                outcome.version,
                if outcome.errors.is_empty() { "passed" } else { "FAILED" },
                outcome.accepted().count(),
                outcome.test_counts.passed,
                outcome.test_counts.failed,
                outcome.skipped_tests.len(),
                outcome.seconds
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(lines: &[&str], requested_tests: usize) -> KernelOutcome {
        let mut results = JobResults::default();
        lines.iter().for_each(|line| results.parse_line(line));
        let console_tail = "panic".to_owned();
        KernelOutcome::from_run(
            "6.1",
            KernelRunOutput {
                version: "6.1-1",
                results,
                requested_tests,
                skipped_tests: vec![],
                console_tail,
                seconds: 9,
            },
        )
    }

    const OK: [&str; 7] = [
        "rouse: begin load",
        "verifier: bind6 122",
        "verifier: egress 500000",
        "verifier: end is for later kernels",
        "test result: ok. 3 passed; 0 failed; 0 ignored",
        "rouse: end load 0",
        "rouse: begin tests",
    ];

    #[test]
    fn a_machine_that_ran_everything_has_no_errors() {
        let ends = ["test result: ok. 2 passed; 0 failed; 0 ignored", "rouse: end tests 0"];
        let passed = outcome(&[&OK[..], &ends].concat(), 2);
        assert_eq!(passed.errors, [""; 0]);
        assert_eq!((passed.test_counts.passed, passed.test_counts.failed), (5, 0));
        let shown = KernelTables(&[passed]).to_string();
        assert!(shown.contains("500000 egress"), "{shown}");
        assert!(shown.contains("end                         -"), "{shown}");
    }

    #[test]
    fn a_machine_that_stopped_in_the_middle_has_failed() {
        assert_eq!(outcome(&OK, 2).errors, ["run tests did not end; end of the console:\npanic"]);
        assert_eq!(outcome(&[], 0).errors.len(), 2, "no program was loaded either");
    }

    #[test]
    fn tests_that_did_not_run_are_an_error() {
        let ends = ["test result: ok. 1 passed; 0 failed; 0 ignored", "rouse: end tests 0"];
        assert_eq!(outcome(&[&OK[..], &ends].concat(), 2).errors, ["1 of 2 tests ran"]);
    }

    #[test]
    fn a_refused_program_and_one_that_takes_too_much_are_named() {
        let lines = ["rouse: begin load", "verifier: egress 500001", "verifier: x refused"];
        let failed = outcome(&lines, 0);
        assert!(KernelTables(std::slice::from_ref(&failed)).to_string().contains("REFUSED"));
        let errors = failed.errors.join("; ");
        assert!(errors.contains("egress takes 500001 instructions"), "{errors}");
        assert!(errors.contains("x is refused"), "{errors}");
    }
}
