//! Shell: how long a controller that has just started takes until every agent knows everything and nothing is left to
//! write.

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

use super::report::{Goal, Row, row};
use crate::sh;

/// What `controller/benches/resync` prints.
#[derive(Debug, Deserialize)]
struct Printed {
    /// Seconds from the start of the process until the first agent was answered.
    known_s: f64,
    /// Until every agent had the whole table.
    whole_s: f64,
    /// Until every report was taken in, too, and every object looked at.
    rest_s: f64,
    /// Of the controller's process alone, user and kernel.
    cpu_s: f64,
    /// The most memory it had.
    peak_mib: f64,
    /// What it asked to write although nothing differed.
    writes: f64,
    /// Whether it came to rest at all, with all services and ready pods in the table.
    is_complete: bool,
}

/// The body imports the controller, which xtask must not: it is a program of its own. `RESYNC=SERVICES,PODS,NODES`
/// chooses another size than that of the goal.
pub(super) fn run() -> Result<Vec<Row>> {
    let text = sh::capture(
        sh::cargo()
            .args(["bench", "--quiet", "--package", "controller", "--bench", "resync"])
            .current_dir(env!("CARGO_MANIFEST_DIR")),
    )?;
    let line = text.lines().last().context("the bench printed nothing")?;
    let it: Printed =
        serde_json::from_str(line).with_context(|| format!("cannot read `{line}`"))?;
    ensure!(it.is_complete, "the controller came to no rest: {line}");
    let one = |case, unit, value: f64, goal| row(case, "rouse", unit, &[value], None, goal);
    Ok(vec![
        one("known", "s", it.known_s, Goal::None),
        one("whole_table", "s", it.whole_s, Goal::None),
        one("rest", "s", it.rest_s, Goal::AtMost(10.0)),
        one("cpu", "s", it.cpu_s, Goal::None),
        one("memory", "MiB", it.peak_mib, Goal::None),
        one("writes", "count", it.writes, Goal::AtMost(0.0)),
    ])
}
