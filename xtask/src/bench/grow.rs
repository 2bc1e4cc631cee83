//! Shell: growth from one request in flight to fifty, and the time until the autoscaler requests the pods for all.

use anyhow::{Context as _, Result, bail};

use super::{
    node_context::{NodeBenchContext, run_load},
    report::{BenchGoal, BenchRow, case_row},
};
use crate::cold_start;

/// Number of services with one pod each. Each grows only once, because added pods stay until the end of their window.
const SERVICES: usize = 10;
/// Number of requests in flight at the end.
const REQUESTS: usize = 50;
/// Scaling with one pod for every 7 requests, so that the eighth pod is needed for the fiftieth request alone.
const SCALING: [(&str, &str); 4] = [
    ("initial-scale", "1"),
    ("min-scale", "1"),
    ("target", "7"),
    ("target-utilization-percentage", "100"),
];
/// Number of pods that the requests need.
const PODS: u32 = 8;
/// Load: one request alone, for longer than the second between two reports of the agent, then all requests.
const STAGES: &str = "1x1500ms,50x200ms";
/// Path with responses so slow that the first request is still in flight when the last one arrives.
const PATH: &str = "/?sleep=3000";

/// Lets each service grow once, on one local node.
pub(super) fn run(context: &NodeBenchContext) -> Result<Vec<BenchRow>> {
    let node = context.start_node()?;
    context.apply_scaled(&node, "grow", SERVICES, &SCALING)?;
    let mut times_ms = Vec::new();
    for index in 0..SERVICES {
        let host = format!("grow{index}.default.svc.cluster.local");
        let mut load = node.client_command(&context.client);
        load.args(["load", "--addr", &format!("{host}:80"), "--host", &host]);
        let sent = run_load(load.args(["--stages", STAGES, "--path", PATH]))?;
        if sent.len() != REQUESTS || !sent.iter().all(|it| it.is_answered()) {
            bail!("grow {index}: not {REQUESTS} requests, all answered: {sent:?}");
        }
        // The time counts from the last request, which alone needs the last pod.
        let last_us = sent.iter().map(|it| it.at_us).max().unwrap_or(0);
        let revision = format!("grow{index}-00001");
        let log = node.log();
        // Load generator and log have the same clock. An earlier decision was made for fewer requests.
        let requested_at = cold_start::decisions(&log)
            .filter(|it| it.revision == revision && it.wanted >= PODS)
            .find(|it| it.at_us >= last_us);
        let requested_at = requested_at
            .with_context(|| format!("{PODS} pods of {revision} were not requested"))?;
        times_ms.push((requested_at.at_us - last_us) as f64 / 1e3);
    }
    node.stop()?;
    let goal = BenchGoal::P50P99AtMost(50.0, 50.0);
    Ok(vec![case_row("1_to_50_in_flight_to_decision", "rouse", "ms", &times_ms, goal)])
}
