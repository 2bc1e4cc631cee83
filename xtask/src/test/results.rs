//! Shell: results of the tiers, and the table that shows them.

use std::fmt;

use anyhow::{Result, bail};

use super::{TestCounts, TestTier};

/// Result of one tier.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum TierOutcome {
    /// The tests ran. `skipped_note` names skipped tests with reasons, each behind `; `.
    Ran { counts: TestCounts, has_passed: bool, skipped_note: String },
    /// The tests could not run, for this reason.
    CannotRun(String),
}

impl TierOutcome {
    /// Result before any test has run.
    pub(super) fn empty() -> Self {
        let counts = TestCounts::default();
        Self::Ran { counts, has_passed: true, skipped_note: String::new() }
    }

    /// Returns true if the tier ran and every test passed.
    pub(super) fn is_success(&self) -> bool {
        matches!(self, Self::Ran { has_passed: true, .. })
    }

    /// Number of tests that ran.
    pub(super) fn test_count(&self) -> u64 {
        match self {
            Self::Ran { counts, .. } => counts.passed + counts.failed,
            Self::CannotRun(_) => 0,
        }
    }

    /// Combines this result and `next` into one.
    pub(super) fn combine(self, next: Self) -> Self {
        match (self, next) {
            (
                Self::Ran { counts, has_passed, skipped_note },
                Self::Ran {
                    counts: next_counts,
                    has_passed: next_has_passed,
                    skipped_note: next_skipped_note,
                },
            ) => Self::Ran {
                counts: counts.combine(next_counts),
                has_passed: has_passed && next_has_passed,
                skipped_note: skipped_note + &next_skipped_note,
            },
            (Self::CannotRun(reason), _) | (_, Self::CannotRun(reason)) => Self::CannotRun(reason),
        }
    }
}

/// Result and duration of one tier.
#[derive(Debug)]
pub(super) struct TierRow {
    pub(super) tier: TestTier,
    pub(super) outcome: TierOutcome,
    pub(super) seconds: f64,
}

impl TierRow {
    /// Returns the row of a tier that could not run, with the reason.
    pub(super) fn cannot_run(tier: TestTier, error: &anyhow::Error) -> Self {
        Self { tier, outcome: TierOutcome::CannotRun(format!("{error:#}")), seconds: 0.0 }
    }
}

impl fmt::Display for TierRow {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (result, detail) = match &self.outcome {
            TierOutcome::Ran { counts, has_passed, skipped_note } => (
                if *has_passed { "passed" } else { "FAILED" },
                // Tests that did not run must not look as if they had passed.
                format!("{} passed, {} failed{skipped_note}", counts.passed, counts.failed),
            ),
            TierOutcome::CannotRun(reason) => ("FAILED", format!("cannot run: {reason}")),
        };
        write!(out, "{:<8} {result:<8} {:>6.1} s  {detail}", self.tier.name(), self.seconds)
    }
}

/// Prints the table. Fails unless every tier ran and passed.
pub(super) fn print_results(rows: &[TierRow]) -> Result<()> {
    println!("\ntier     result     time");
    let mut total = TestCounts::default();
    let mut failed_tiers = Vec::new();
    for row in rows {
        println!("{row}");
        print_slowest(row);
        match &row.outcome {
            TierOutcome::Ran { counts, has_passed, .. } => {
                total = total.combine(counts.clone());
                if !has_passed {
                    failed_tiers.push(row.tier.name());
                }
            }
            TierOutcome::CannotRun(_) => failed_tiers.push(row.tier.name()),
        }
    }
    for failure in &total.failures {
        println!("\n{}", failure.join("\n  "));
    }
    println!("\ntotal: {} passed, {} failed", total.passed, total.failed);
    if !failed_tiers.is_empty() {
        bail!("not every tier passed: {}", failed_tiers.join(", "));
    }
    // A misspelt name selects no test, and must not look like success.
    if total.passed == 0 {
        bail!("no test ran");
    }
    Ok(())
}

/// Prints the slowest tests, if their times are known.
fn print_slowest(row: &TierRow) {
    if let TierOutcome::Ran { counts, .. } = &row.outcome {
        for (name, seconds) in counts.slowest() {
            println!("{:<18}{seconds:>6.1} s  {name}", "");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_without_a_test_fails() {
        let mut counts = TestCounts::default();
        counts.parse_line("test result: ok. 1 passed; 0 failed; 0 ignored");
        let row = TierRow {
            tier: TestTier::Pure,
            outcome: TierOutcome::Ran { counts, has_passed: true, skipped_note: String::new() },
            seconds: 0.0,
        };
        assert!(print_results(&[row]).is_ok());
        assert!(print_results(&[]).is_err());
    }

    #[test]
    fn a_tier_that_cannot_run_fails_the_whole_run() {
        let row = TierRow {
            tier: TestTier::Kernel,
            outcome: TierOutcome::CannotRun("no root".into()),
            seconds: 0.0,
        };
        assert_eq!(row.to_string(), "kernel   FAILED      0.0 s  cannot run: no root");
        assert!(print_results(&[row]).is_err());
    }
}
