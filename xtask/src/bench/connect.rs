//! Shell: time of a connect through a service's address, with few and with many services.

use std::net::SocketAddr;

use anyhow::Result;

use super::{
    ebpf_run_time, interleave,
    node_context::{NodeBenchContext, service_addresses},
    report::{BenchGoal, BenchRow, case_row, case_rows},
    stats::median,
};
use crate::measure::MeasuredTimes;

/// Numbers of services, with the names of the cases.
const CASES: [(usize, &str); 3] =
    [(1, "services_1"), (1_000, "services_1000"), (10_000, "services_10000")];
/// Subjects of each case.
const SUBJECTS: [&str; 4] = ["bare", "uncounted", "direct", "rouse"];
/// Number of connects in a round.
const CONNECTS_PER_ROUND: usize = 2_000;

/// Measures all cases. `bare`: address of a server without programs; `uncounted`: address of a pod that is not Rouse's,
/// with the programs of pods; `direct`: the pod's address, with programs attached; `rouse`: the service's address.
pub(super) fn run(context: &NodeBenchContext) -> Result<Vec<BenchRow>> {
    let node = context.start_node()?;
    let bare = context.start_bare_server(&node)?;
    let uncounted = context.start_uncounted_server(&node)?;
    context.apply(&node, "awake", 1, 1)?;
    let (pod, service) = service_addresses(&node, "awake0")?;
    // Services accumulate: each case adds to those of the cases before, and all of them sleep but one.
    let mut rows = Vec::new();
    for (index, (services, case)) in CASES.into_iter().enumerate() {
        if services > 1 {
            context.apply(
                &node,
                &format!("asleep{index}x"),
                services - services_applied_before(index),
                0,
            )?;
        }
        let measure = |subject: &str| -> Result<MeasuredTimes> {
            let args = |addr: SocketAddr| {
                ["connect", "--addr", &addr.to_string(), "--count", &CONNECTS_PER_ROUND.to_string()]
                    .map(str::to_owned)
            };
            match subject {
                "bare" => context.measure_bare(&node, &args(bare.address())),
                // The same client as for `bare`, so that only the server's programs differ.
                "uncounted" => context.measure_bare(&node, &args(uncounted.address())),
                "direct" => context.measure(&node, &args(pod)),
                _ => context.measure(&node, &args(service)),
            }
        };
        let rounds = interleave(context.rounds, &SUBJECTS, |subject| Ok(measure(subject)?.p50_us))?;
        rows.extend(case_rows(case, "us", &rounds, BenchGoal::RatioAtMost(1.05)));
        // Time in programs is measured apart, because the statistics would slow the compared connects.
        let bare_us = median(rounds.get("bare").map_or(&[], Vec::as_slice)).value;
        rows.extend(program_share_rows(case, bare_us, context.rounds, || measure("rouse"))?);
    }
    drop((bare, uncounted));
    node.stop()?;
    Ok(rows)
}

/// Share that the programs take of a bare connect, by the kernel's own clock: programs in the client's calls alone
/// (all that run where the server is not a pod of Rouse), and all programs.
fn program_share_rows(
    case: &str,
    bare_us: f64,
    rounds: u32,
    measure: impl Fn() -> Result<MeasuredTimes>,
) -> Result<[BenchRow; 2]> {
    let (mut connect, mut every) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (measured, run_time) = ebpf_run_time::measure_run_time(&measure)?;
        // Per connect, as a share of a connect without any program.
        let share = |us: f64| us / measured.count as f64 / bare_us;
        connect.push(share(run_time.connect_us));
        every.push(share(run_time.all_us));
    }
    let name = |subject: &str| format!("{case}_{subject}");
    Ok([
        case_row(&name("connect_programs"), "rouse", "× bare", &connect, BenchGoal::AtMost(0.02)),
        case_row(&name("all_programs"), "rouse", "× bare", &every, BenchGoal::AtMost(0.05)),
    ])
}

/// Number of services that earlier cases have applied. `index` is that of a case behind the first.
fn services_applied_before(index: usize) -> usize {
    CASES[index - 1].0
}
