//! Shell: requests on persistent connections on the direct path: requests a second, and processor time.

use anyhow::Result;

use super::{
    ebpf_run_time, interleave,
    node_context::{NodeBenchContext, service_addresses},
    report::{BenchGoal, BenchRow, case_row, case_rows},
    stats::RoundValues,
};
use crate::measure::MeasuredTimes;

const CASES: [(usize, &str); 3] = [(1, "c1"), (16, "c16"), (64, "c64")];
/// Length of one measurement in ms; CPU time is counted in ticks of 10 ms.
const MILLIS: u64 = 2_000;

/// Measures all cases, with the subjects of the bench `connect`.
pub(super) fn run(context: &NodeBenchContext) -> Result<Vec<BenchRow>> {
    let node = context.start_node()?;
    let bare = context.start_bare_server(&node)?;
    context.apply(&node, "awake", 1, 1)?;
    let (pod, service) = service_addresses(&node, "awake0")?;
    let measure = |subject: &str, connections: usize| -> Result<MeasuredTimes> {
        let args = |addr: String| {
            let (connections, millis) = (connections.to_string(), MILLIS.to_string());
            ["warm", "--addr", &addr, "--connections", &connections, "--millis", &millis]
                .map(str::to_owned)
        };
        match subject {
            "bare" => context.measure_bare(&node, &args(bare.address().to_string())),
            "direct" => context.measure(&node, &args(pod.to_string())),
            _ => context.measure(&node, &args(service.to_string())),
        }
    };
    let subjects = ["bare", "direct", "rouse"];
    let mut rows = Vec::new();
    let mut cpu = RoundValues::new();
    for (connections, case) in CASES {
        let mut costs: Vec<(&'static str, f64)> = Vec::new();
        // Subjects take turns, so that a slow phase of the machine meets all of them.
        let rounds = interleave(context.rounds, &subjects, |subject| {
            let measured = measure(subject, connections)?;
            costs.push((subject, measured.cpu_us / measured.count as f64));
            Ok(measured.count as f64 / measured.elapsed_us * 1e6)
        })?;
        rows.extend(case_rows(case, "req/s", &rounds, BenchGoal::RatioAtLeast(0.97)));
        // The first value of each subject is from the warming round, which `interleave` drops.
        for (subject, cost) in costs.into_iter().skip(subjects.len()) {
            cpu.entry(subject).or_default().push(cost);
        }
    }
    rows.extend(cpu_added(&cpu));
    rows.push(bpf_time(|| measure("rouse", 16))?);
    drop(bare);
    node.stop()?;
    Ok(rows)
}

/// CPU time of the whole machine a request, in µs, above the bare server's of the same round.
fn cpu_added(cpu: &RoundValues) -> Vec<BenchRow> {
    let Some(bare) = cpu.get("bare") else { return Vec::new() };
    let subjects = cpu.iter().filter(|(subject, _)| **subject != "bare");
    subjects
        .map(|(subject, costs)| {
            let added: Vec<f64> = costs.iter().zip(bare).map(|(cost, bare)| cost - bare).collect();
            let goal = if *subject == "rouse" { BenchGoal::AtMost(0.5) } else { BenchGoal::None };
            case_row("cpu_added_system", subject, "us", &added, goal)
        })
        .collect()
}

/// Time in programs a request, in µs.
fn bpf_time(measure: impl Fn() -> Result<MeasuredTimes>) -> Result<BenchRow> {
    // Few rounds suffice: the kernel sums up the time of every run exactly.
    let values = (0..5).map(|_| {
        let (measured, run_time) = ebpf_run_time::measure_run_time(&measure)?;
        Ok(run_time.all_us / measured.count as f64)
    });
    let values: Vec<f64> = values.collect::<Result<_>>()?;
    Ok(case_row("cpu_added_bpf", "rouse", "us", &values, BenchGoal::AtMost(0.5)))
}
