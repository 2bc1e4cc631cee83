//! Shell: time that a controller needs after its start until every agent has the whole table and no write is left.

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

use super::report::{BenchGoal, BenchRow, case_row};
use crate::sh;

/// Output of `controller/benches/resync`, as JSON.
#[derive(Debug, Deserialize)]
struct ResyncBenchOutput {
    /// Time from the start of the process until the first agent got a response, in seconds.
    known_s: f64,
    /// Time until every agent had the whole table, in seconds.
    whole_s: f64,
    /// Time until every report was processed as well, and every object compared, in seconds.
    rest_s: f64,
    /// Processor time of the controller's process alone, user and system, in seconds.
    cpu_s: f64,
    /// Peak memory of the controller's process, in MiB.
    peak_mib: f64,
    /// Number of writes that the controller requested although no object differed.
    writes: f64,
    /// True if the controller became idle, with all services and ready pods in the table.
    is_complete: bool,
}

/// Runs the bench. It imports the controller, which xtask must not, so it is a program of its own. The variable
/// `RESYNC=SERVICES,PODS,NODES` chooses another size than the goal's.
pub(super) fn run() -> Result<Vec<BenchRow>> {
    let text = sh::capture(
        sh::cargo()
            .args(["bench", "--quiet", "--package", "controller", "--bench", "resync"])
            .current_dir(env!("CARGO_MANIFEST_DIR")),
    )?;
    let line = text.lines().last().context("the bench printed nothing")?;
    let output: ResyncBenchOutput =
        serde_json::from_str(line).with_context(|| format!("cannot read `{line}`"))?;
    // Times of an incomplete run would look good.
    ensure!(output.is_complete, "the controller came to no rest: {line}");
    let row = |case, unit, value: f64, goal| case_row(case, "rouse", unit, &[value], goal);
    Ok(vec![
        row("known", "s", output.known_s, BenchGoal::None),
        row("whole_table", "s", output.whole_s, BenchGoal::None),
        row("rest", "s", output.rest_s, BenchGoal::AtMost(10.0)),
        row("cpu", "s", output.cpu_s, BenchGoal::None),
        row("memory", "MiB", output.peak_mib, BenchGoal::None),
        row("writes", "count", output.writes, BenchGoal::AtMost(0.0)),
    ])
}
