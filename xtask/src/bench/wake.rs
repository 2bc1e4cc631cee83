//! Shell: cold starts on a local node, split into steps.

use anyhow::{Context as _, Result, bail};

use super::{
    node_context::{NodeBenchContext, run_load},
    report::{BenchGoal, BenchRow, case_row},
};
use crate::cold_start::NodeColdStart;

/// Number of sleeping services. Each gets one cold start: a second one would have to wait for the window.
const WAKES: usize = 200;

/// Measures one cold start after the other, each of another service.
pub(super) fn run(context: &NodeBenchContext) -> Result<Vec<BenchRow>> {
    let node = context.start_node()?;
    context.apply(&node, "wake", WAKES, 0)?;
    let mut cold_starts = Vec::new();
    for index in 0..WAKES {
        let host = format!("wake{index}.default.svc.cluster.local");
        let mut load = node.client_command(&context.client);
        load.args(["load", "--addr", &format!("{host}:80"), "--host", &host]);
        // One request from a new process: no connection or cached name of an earlier one helps it.
        load.args(["--stages", "1x60s", "--requests", "1"]);
        let record =
            run_load(&mut load)?.pop().with_context(|| format!("wake {index}: no record"))?;
        if !record.is_answered() {
            bail!(
                "wake {index}: no response from a pod: status {} {}",
                record.status,
                record.error
            );
        }
        cold_starts.push(record);
    }
    // Read once, behind all cold starts: reading it in between would disturb them.
    let log = node.log();
    node.stop()?;
    let starts: Vec<NodeColdStart> =
        cold_starts.iter().map(|record| NodeColdStart::from_record(record, &log)).collect();
    // The time of a decision is in the log only, which may lack one. Then neither step before `listen` is known.
    let decide: Vec<f64> = starts.iter().filter_map(|cold| cold.decide).collect();
    let start: Vec<f64> = starts.iter().filter_map(|cold| cold.start).collect();
    if decide.len() < starts.len() {
        println!("wake: {} decisions were not found in the log", starts.len() - decide.len());
    }
    let values = |value: fn(&NodeColdStart) -> f64| starts.iter().map(value).collect::<Vec<f64>>();
    let listen = values(|start| start.listen_to_first_byte);
    Ok(vec![
        case_row("decide", "rouse", "ms", &decide, BenchGoal::AtMost(1.0)),
        case_row("start", "rouse", "ms", &start, BenchGoal::None),
        case_row("listen_to_first_byte", "rouse", "ms", &listen, BenchGoal::P50P99AtMost(1.0, 5.0)),
        case_row("total", "rouse", "ms", &values(|start| start.total), BenchGoal::None),
    ])
}
