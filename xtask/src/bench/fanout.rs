//! Shell: time from a pod's report until the last of 1,000 agents has the pod as ready, at 100 wakes a second.

use anyhow::{Context as _, Result, ensure};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde::Deserialize;

use super::report::{BenchGoal, BenchRow, case_row};
use crate::sh;

/// Output of `controller/benches/fanout`, as JSON.
#[derive(Debug, Deserialize)]
struct FanoutBenchOutput {
    /// Time from the report of each pod until the last agent had it, in milliseconds.
    latencies_ms: Vec<f64>,
    /// Processor time of the controller's process during the wakes, in percent of one core.
    cpu_percent: f64,
    /// Processor time of all agents together, in percent of one core.
    agents_cpu_percent: f64,
    /// Memory of the controller's process with all agents and before the first wake, in MiB.
    idle_mib: f64,
    /// Peak memory of the controller's process, in MiB.
    peak_mib: f64,
    /// Number of streams that ended; each agent should have kept its one.
    ended_streams: usize,
    /// True if every agent got every pod.
    is_complete: bool,
}

/// Runs the bench. It imports the controller, which xtask must not, so it is a program of its own. The variable
/// `FANOUT=AGENTS,WAKES,PER_SECOND` chooses another load than the goal's.
pub(super) fn run() -> Result<Vec<BenchRow>> {
    // Each agent has a connection. The programs that the bench starts inherit the limit.
    let (_, hard_limit) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard_limit, hard_limit)?;
    let text = sh::capture(
        sh::cargo()
            .args(["bench", "--quiet", "--package", "controller", "--bench", "fanout"])
            .current_dir(env!("CARGO_MANIFEST_DIR")),
    )?;
    let line = text.lines().last().context("the bench printed nothing")?;
    let output: FanoutBenchOutput =
        serde_json::from_str(line).with_context(|| format!("cannot read `{line}`"))?;
    // Wakes that no last agent has seen would be missing among the values.
    let FanoutBenchOutput { is_complete, ended_streams, .. } = output;
    ensure!(is_complete, "some agents did not get every pod; {ended_streams} streams ended");
    ensure!(ended_streams == 0, "{ended_streams} streams ended during the bench");
    let latencies = case_row(
        "report_to_last_agent",
        "rouse",
        "ms",
        &output.latencies_ms,
        BenchGoal::P99AtMost(20.0),
    );
    let row = |case, unit, value: f64| case_row(case, "rouse", unit, &[value], BenchGoal::None);
    Ok(vec![
        latencies,
        row("cpu", "% of a core", output.cpu_percent),
        row("cpu_agents", "% of a core", output.agents_cpu_percent),
        row("memory_idle", "MiB", output.idle_mib),
        row("memory_peak", "MiB", output.peak_mib),
    ])
}
