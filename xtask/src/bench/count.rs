//! Shell: cost of counting requests: time in programs, requests a second with and without them, processor time.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

use super::{
    EbpfBenchContext,
    report::{BenchGoal, BenchRow, case_row, case_rows},
    stats::{RoundValues, median},
};
use crate::{build_ebpf, sh};

/// Output of `tests/bench/count`, as JSON.
#[derive(Debug, Deserialize)]
struct CountBenchOutput {
    /// Request rates by case and subject.
    rates: BTreeMap<String, BTreeMap<String, CountBenchRates>>,
    /// Times in programs by case.
    profiles: BTreeMap<String, CountBenchProfile>,
    /// Time that the kernel's statistics record for a program that does nothing, in ns a run.
    empty_program: Vec<f64>,
    /// Times for packets of sockets that are not counted, by the reason.
    packets: BTreeMap<String, PacketProfile>,
}

/// Results of one subject in one case, one value for each round.
#[derive(Debug, Deserialize)]
struct CountBenchRates {
    req_s: Vec<f64>,
    /// Processor time a request of client, server and the packet processing between them, in µs.
    cpu_us: Vec<f64>,
    /// Processor time a request of the whole machine, in µs.
    machine_us: Vec<f64>,
    /// Processor cycles a request of the whole machine; empty if the machine does not count cycles.
    #[serde(default)]
    cycles: Vec<f64>,
}

/// Time in programs a request, one value for each round.
#[derive(Debug, Deserialize)]
struct CountBenchProfile {
    ns: Vec<f64>,
    runs: Vec<f64>,
    programs: Vec<ProgramProfile>,
}

#[derive(Debug, Deserialize)]
struct ProgramProfile {
    name: String,
    ns: Vec<f64>,
    runs: Vec<f64>,
}

/// Time in programs a packet, one value for each round.
#[derive(Debug, Deserialize)]
struct PacketProfile {
    ns: Vec<f64>,
    runs: Vec<f64>,
}

/// Runs the bench. It imports the agent, which xtask must not, so it is a program of its own. The program itself does
/// no expensive work, so it is built with the profile of the tests.
pub(super) fn run(ebpf: &EbpfBenchContext) -> Result<Vec<BenchRow>> {
    let text = sh::capture(
        sh::cargo()
            .args([
                "bench",
                "--quiet",
                "--profile",
                "dev",
                "--package",
                "tests",
                "--bench",
                "count",
            ])
            .args(["--", "--rounds", &ebpf.rounds.to_string()])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .env(build_ebpf::OBJECT_VARIABLE, &ebpf.object)
            .env("RUST_LOG", "warn"),
    )?;
    // Cargo and the bench print progress first; the JSON is the last line.
    let line = text.lines().last().context("the bench printed nothing")?;
    let output: CountBenchOutput =
        serde_json::from_str(line).with_context(|| format!("cannot read `{line}`"))?;
    result_rows(&output)
}

/// Rows: time in programs, as recorded and without the recorder's share; then rates and processor time.
fn result_rows(output: &CountBenchOutput) -> Result<Vec<BenchRow>> {
    ensure!(!output.empty_program.is_empty(), "nothing was recorded of an empty program");
    // The recorder's own time is in each recorded value. That of an empty program is nothing else.
    let recorder = median(&output.empty_program).value;
    let mut rows = Vec::new();
    for (case, profile) in &output.profiles {
        rows.extend(program_time_rows(case, profile, recorder));
    }
    let none = BenchGoal::None;
    rows.push(case_row("empty_program", "empty", "ns", &output.empty_program, none));
    rows.extend(packet_rows(&output.packets, recorder));
    for (case, subjects) in &output.rates {
        let values = |pick: fn(&CountBenchRates) -> &Vec<f64>| -> RoundValues {
            let known_subjects = SUBJECTS.into_iter();
            known_subjects.filter_map(|it| Some((it, pick(subjects.get(it)?).clone()))).collect()
        };
        // Goals of bulk responses are stricter: where bytes dominate, counting adds less.
        let (min_ratio, max_ratio) = if case == "bulk" { (0.99, 1.01) } else { (0.97, 1.03) };
        let (min_goal, max_goal) =
            (BenchGoal::RatioAtLeast(min_ratio), BenchGoal::RatioAtMost(max_ratio));
        rows.extend(case_rows(
            &format!("req_s_{case}"),
            "req/s",
            &values(|it| &it.req_s),
            min_goal,
        ));
        rows.extend(case_rows(&format!("cpu_{case}"), "us", &values(|it| &it.cpu_us), max_goal));
        let core_share_goal = BenchGoal::AtLeast(MIN_CORE_SHARE_PERCENT);
        rows.push(case_row(
            &format!("core_{case}"),
            "all",
            "percent",
            &core_shares(subjects),
            core_share_goal,
        ));
        // A virtual machine often has no counter of cycles. The machine's processor time then stands in.
        if subjects.values().all(|it| !it.cycles.is_empty()) {
            rows.extend(case_rows(
                &format!("cycles_{case}"),
                "cycles",
                &values(|it| &it.cycles),
                none,
            ));
        } else {
            rows.extend(case_rows(
                &format!("machine_{case}"),
                "us",
                &values(|it| &it.machine_us),
                none,
            ));
        }
    }
    Ok(rows)
}

/// Least share of the core for the measured processes, in percent. With less, other processes ran there as well:
/// rates then depend on those, and only processor time a request is about the subjects.
const MIN_CORE_SHARE_PERCENT: f64 = 95.0;

fn core_shares(subjects: &BTreeMap<String, CountBenchRates>) -> Vec<f64> {
    // Requests a second times µs a request is µs a second; 10,000 of them are one percent of a core.
    let share = |(per_s, cpu_us): (&f64, &f64)| per_s * cpu_us / 1e4;
    subjects.values().flat_map(|it| it.req_s.iter().zip(&it.cpu_us).map(share)).collect()
}

const SUBJECTS: [&str; 4] = ["off", "rouse", "empty", "nginx-sidecar"];

/// Least runs a request for a program to have rows of its own; programs of connections run less often.
const MIN_RUNS_PER_REQUEST: f64 = 0.05;

/// Returns rows of a request's CPU time in all programs, and of the time and runs of each frequent program.
fn program_time_rows(case: &str, profile: &CountBenchProfile, recorder: f64) -> Vec<BenchRow> {
    let goal = match case {
        "h1" => BenchGoal::AtMost(300.0),
        "h1_browser" => BenchGoal::AtMost(500.0),
        "h2" => BenchGoal::AtMost(700.0),
        _ => BenchGoal::None,
    };
    let row = |case: &str, unit, values: &[f64], goal| case_row(case, "rouse", unit, values, goal);
    // Goals apply to both figures, with and without the recorder's share.
    let net = without_stats_overhead(&profile.ns, &profile.runs, recorder);
    let mut rows =
        vec![row(case, "ns", &profile.ns, goal), row(&format!("{case}_net"), "ns", &net, goal)];
    for program in profile
        .programs
        .iter()
        .filter(|program| median(&program.runs).value >= MIN_RUNS_PER_REQUEST)
    {
        let name = format!("{case}_{}", program.name);
        rows.push(row(&name, "ns", &program.ns, BenchGoal::None));
        rows.push(row(&format!("{name}_runs"), "runs", &program.runs, BenchGoal::None));
    }
    rows
}

/// Rows of uncounted packets. `uncounted_packet` is the most expensive reason; pods without programs are apart.
fn packet_rows(packets: &BTreeMap<String, PacketProfile>, recorder: f64) -> Vec<BenchRow> {
    let row = |case: &str, values: &[f64], goal| case_row(case, "rouse", "ns", values, goal);
    let packets_of_rouse = || packets.iter().filter(|(name, _)| *name != "foreign");
    let median_ns = |it: &PacketProfile| median(&it.ns).value;
    // Goals are for the worst reason not to count a packet.
    let slowest = packets_of_rouse()
        .max_by(|(_, one), (_, other)| median_ns(one).total_cmp(&median_ns(other)));
    let mut rows = Vec::new();
    if let Some((_, slowest)) = slowest {
        let net = without_stats_overhead(&slowest.ns, &slowest.runs, recorder);
        rows.push(row("uncounted_packet", &slowest.ns, BenchGoal::AtMost(60.0)));
        rows.push(row("uncounted_packet_net", &net, BenchGoal::AtMost(60.0)));
    }
    rows.extend(packets_of_rouse().map(|(name, it)| row(name, &it.ns, BenchGoal::None)));
    if let Some(foreign) = packets.get("foreign") {
        rows.push(row("foreign_packet", &foreign.ns, BenchGoal::AtMost(0.0)));
    }
    rows
}

/// Time of the programs without the time that the kernel's statistics add to each run.
fn without_stats_overhead(ns: &[f64], runs: &[f64], recorder: f64) -> Vec<f64> {
    ns.iter().zip(runs).map(|(ns, runs)| ns - runs * recorder).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = r#"{
        "rates": {"bulk": {
            "off": {"req_s": [1000.0], "cpu_us": [990.0], "machine_us": [999.0]},
            "rouse": {"req_s": [980.0], "cpu_us": [995.0], "machine_us": [1002.0]}
        }},
        "profiles": {"h1": {"ns": [420.0], "runs": [2.0], "programs": [
            {"name": "ingress", "ns": [420.0], "runs": [2.0], "ns_per_run": 210.0, "runs_per_request": 2.0},
            {"name": "sockets", "ns": [0.1], "runs": [0.01], "ns_per_run": 10.0, "runs_per_request": 0.01}
        ]}},
        "empty_program": [70.0],
        "packets": {
            "foreign": {"ns": [0.0], "runs": [0.0]},
            "uncounted_pod": {"ns": [90.0], "runs": [1.0]},
            "uncounted_port": {"ns": [95.0], "runs": [1.0]}
        },
        "core": 1
    }"#;

    #[test]
    fn the_overhead_of_statistics_is_subtracted_from_each_run() {
        let rows = result_rows(&serde_json::from_str(PRINTED).unwrap()).unwrap();
        let figures: Vec<_> =
            rows.iter().map(|row| (row.case.as_str(), row.p50, row.reached)).collect();
        let expected = [
            ("h1", 420.0, Some(false)),
            ("h1_net", 280.0, Some(true)),
            ("h1_ingress", 420.0, None),
            ("h1_ingress_runs", 2.0, None),
            ("empty_program", 70.0, None),
            ("uncounted_packet", 95.0, Some(false)),
            ("uncounted_packet_net", 25.0, Some(true)),
            ("uncounted_pod", 90.0, None),
            ("uncounted_port", 95.0, None),
            ("foreign_packet", 0.0, Some(true)),
            ("req_s_bulk", 1000.0, None),
            ("req_s_bulk", 980.0, Some(false)),
            ("cpu_bulk", 990.0, None),
            ("cpu_bulk", 995.0, Some(true)),
            ("core_bulk", 98.255, Some(true)),
            ("machine_bulk", 999.0, None),
            ("machine_bulk", 1002.0, None),
        ];
        assert_eq!(figures, expected);
    }
}
