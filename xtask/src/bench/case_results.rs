//! Shell: rows of a bench whose cases are measured one after the other, printed as soon as they are known.

use anyhow::{Result, bail};

use super::report::{BenchGoal, BenchRow, case_row};

/// Rows of the cases so far. A failed case does not stop the others: a run takes up to an hour.
#[derive(Debug)]
pub(super) struct CaseResults {
    bench: &'static str,
    rows: Vec<BenchRow>,
    failures: Vec<BenchRow>,
}

impl CaseResults {
    /// Creates the results of a bench, without rows.
    pub(super) fn new(bench: &'static str) -> Self {
        Self { bench, rows: Vec::new(), failures: Vec::new() }
    }

    /// Adds the rows of a case. An error is printed, and gets a row that misses its goal.
    pub(super) fn add(&mut self, case: &str, measured: Result<Vec<BenchRow>>) {
        match measured {
            Ok(rows) => {
                // A run that is stopped later leaves at least this.
                for row in &rows {
                    let BenchRow { case, subject, unit, p50, p99, n, .. } = row;
                    println!("{case} {subject}: p50 {p50:.3}, p99 {p99:.3} {unit}, n {n}");
                }
                self.rows.extend(rows);
            }
            Err(error) => {
                eprintln!("{}: {case} is not measured: {error:#}", self.bench);
                let case = format!("{case}_not_measured");
                let goal = BenchGoal::AtMost(0.0);
                self.failures.push(case_row(&case, "rouse", "failures", &[1.0], goal));
            }
        }
    }

    /// Returns all rows, those of failures last. Fails if there are only failures.
    pub(super) fn finish(self) -> Result<Vec<BenchRow>> {
        if self.rows.is_empty() && !self.failures.is_empty() {
            bail!("no case of the bench {} was measured", self.bench);
        }
        Ok(self.rows.into_iter().chain(self.failures).collect())
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    fn row(case: &str) -> BenchRow {
        case_row(case, "rouse", "ms", &[2.0], BenchGoal::AtMost(3.0))
    }

    #[test]
    fn a_failed_case_leaves_the_others_and_misses_a_goal() {
        let mut results = CaseResults::new("standby");
        results.add("resize", Err(anyhow!("no node")));
        results.add("idle_100", Ok(vec![row("idle_100_cpu"), row("idle_100_memory")]));
        let rows = results.finish().unwrap();
        let judged: Vec<_> = rows.iter().map(|row| (row.case.as_str(), row.reached)).collect();
        let expected = [
            ("idle_100_cpu", Some(true)),
            ("idle_100_memory", Some(true)),
            ("resize_not_measured", Some(false)),
        ];
        assert_eq!(judged, expected);
    }

    #[test]
    fn failures_alone_are_an_error() {
        let mut results = CaseResults::new("standby");
        results.add("resize", Err(anyhow!("no node")));
        let error = results.finish().unwrap_err().to_string();
        assert_eq!(error, "no case of the bench standby was measured");
        // A machine may be unable to measure a case, which then has no rows.
        let mut results = CaseResults::new("standby");
        results.add("wake_reclaimed", Ok(Vec::new()));
        assert!(results.finish().unwrap().is_empty());
    }
}
