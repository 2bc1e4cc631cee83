//! Shell: what counting requests costs: time in programs, requests a second with and without them, processor time.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

use super::{
    Half,
    report::{Goal, Row, row, rows},
    stats::{Rounds, median},
};
use crate::{build_ebpf, sh};

/// What `tests/bench/count` prints.
#[derive(Debug, Deserialize)]
struct Printed {
    /// By case and subject.
    rates: BTreeMap<String, BTreeMap<String, Rates>>,
    /// By case.
    profiles: BTreeMap<String, Profile>,
    /// What the kernel's statistics record of a program that does nothing, ns a run.
    empty_program: Vec<f64>,
    /// Of sockets that are not counted, by the reason why not.
    packets: BTreeMap<String, Packets>,
}

/// One subject in one case, round by round.
#[derive(Debug, Deserialize)]
struct Rates {
    req_s: Vec<f64>,
    /// Processor time a request of client, server and what works on packets between them.
    cpu_us: Vec<f64>,
    /// Processor time a request of the whole machine.
    machine_us: Vec<f64>,
    /// Cycles a request of the whole machine, where it counts them.
    #[serde(default)]
    cycles: Vec<f64>,
}

/// Time in programs, round by round, a request.
#[derive(Debug, Deserialize)]
struct Profile {
    ns: Vec<f64>,
    runs: Vec<f64>,
    programs: Vec<Program>,
}

#[derive(Debug, Deserialize)]
struct Program {
    name: String,
    ns: Vec<f64>,
    runs: Vec<f64>,
}

/// Time in programs, round by round, a packet.
#[derive(Debug, Deserialize)]
struct Packets {
    ns: Vec<f64>,
    runs: Vec<f64>,
}

/// The body imports the agent, which xtask must not: it is a program of its own. It does nothing itself that takes time,
/// so it is built as the tests are.
pub(super) fn run(half: &Half) -> Result<Vec<Row>> {
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
            .args(["--", "--rounds", &half.rounds.to_string()])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .env(build_ebpf::VARIABLE, &half.object)
            .env("RUST_LOG", "warn"),
    )?;
    let line = text.lines().last().context("the bench printed nothing")?;
    let printed: Printed =
        serde_json::from_str(line).with_context(|| format!("cannot read `{line}`"))?;
    figures(&printed)
}

/// Time in programs first, as recorded and without what the recorder adds to each run; then rates and processor time.
fn figures(printed: &Printed) -> Result<Vec<Row>> {
    ensure!(!printed.empty_program.is_empty(), "nothing was recorded of an empty program");
    let recorder = median(&printed.empty_program).value;
    let mut all = Vec::new();
    for (case, profile) in &printed.profiles {
        all.extend(time(case, profile, recorder));
    }
    let none = Goal::None;
    all.push(row("empty_program", "empty", "ns", &printed.empty_program, None, none));
    all.extend(packets(&printed.packets, recorder));
    for (case, subjects) in &printed.rates {
        let of = |pick: fn(&Rates) -> &Vec<f64>| -> Rounds {
            let known = SUBJECTS.into_iter();
            known.filter_map(|it| Some((it, pick(subjects.get(it)?).clone()))).collect()
        };
        let (fewer, more) = if case == "bulk" { (0.99, 1.01) } else { (0.97, 1.03) };
        let (fewer, more) = (Goal::RatioAtLeast(fewer), Goal::RatioAtMost(more));
        all.extend(rows(&format!("req_s_{case}"), "req/s", &of(|it| &it.req_s), fewer));
        all.extend(rows(&format!("cpu_{case}"), "us", &of(|it| &it.cpu_us), more));
        let whole = Goal::AtLeast(WHOLE);
        all.push(row(&format!("core_{case}"), "all", "percent", &shares(subjects), None, whole));
        if subjects.values().all(|it| !it.cycles.is_empty()) {
            all.extend(rows(&format!("cycles_{case}"), "cycles", &of(|it| &it.cycles), none));
        } else {
            all.extend(rows(&format!("machine_{case}"), "us", &of(|it| &it.machine_us), none));
        }
    }
    Ok(all)
}

/// Share of the core that the measured ones must have had, percent. With less, others ran there as well: rates then say
/// something about those, and only processor time a request about the subjects.
const WHOLE: f64 = 95.0;

fn shares(subjects: &BTreeMap<String, Rates>) -> Vec<f64> {
    let share = |(per_s, cpu_us): (&f64, &f64)| per_s * cpu_us / 1e4;
    subjects.values().flat_map(|it| it.req_s.iter().zip(&it.cpu_us).map(share)).collect()
}

const SUBJECTS: [&str; 4] = ["off", "rouse", "empty", "nginx-sidecar"];

/// Runs a request from which a program has rows of its own; below are those of connections.
const OFTEN: f64 = 0.05;

fn time(case: &str, profile: &Profile, recorder: f64) -> Vec<Row> {
    let goal = match case {
        "h1" => Goal::AtMost(300.0),
        "h1_browser" => Goal::AtMost(500.0),
        "h2" => Goal::AtMost(700.0),
        _ => Goal::None,
    };
    let one = |case: &str, unit, values: &[f64], goal| row(case, "rouse", unit, values, None, goal);
    let net = without(&profile.ns, &profile.runs, recorder);
    let mut all =
        vec![one(case, "ns", &profile.ns, goal), one(&format!("{case}_net"), "ns", &net, goal)];
    for it in profile.programs.iter().filter(|it| median(&it.runs).value >= OFTEN) {
        let name = format!("{case}_{}", it.name);
        all.push(one(&name, "ns", &it.ns, Goal::None));
        all.push(one(&format!("{name}_runs"), "runs", &it.runs, Goal::None));
    }
    all
}

/// `uncounted_packet` is the most expensive of all reasons not to count; pods where nothing is attached are apart.
fn packets(found: &BTreeMap<String, Packets>, recorder: f64) -> Vec<Row> {
    let one = |case: &str, values: &[f64], goal| row(case, "rouse", "ns", values, None, goal);
    let ours = || found.iter().filter(|(name, _)| *name != "foreign");
    let middle = |it: &Packets| median(&it.ns).value;
    let most = ours().max_by(|(_, one), (_, other)| middle(one).total_cmp(&middle(other)));
    let mut all = Vec::new();
    if let Some((_, most)) = most {
        let net = without(&most.ns, &most.runs, recorder);
        all.push(one("uncounted_packet", &most.ns, Goal::AtMost(60.0)));
        all.push(one("uncounted_packet_net", &net, Goal::AtMost(60.0)));
    }
    all.extend(ours().map(|(name, it)| one(name, &it.ns, Goal::None)));
    if let Some(foreign) = found.get("foreign") {
        all.push(one("foreign_packet", &foreign.ns, Goal::AtMost(0.0)));
    }
    all
}

/// What the programs take while nobody records it.
fn without(ns: &[f64], runs: &[f64], recorder: f64) -> Vec<f64> {
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
    fn what_the_recorder_adds_to_each_run_is_told_apart() {
        let rows = figures(&serde_json::from_str(PRINTED).unwrap()).unwrap();
        let figures: Vec<_> =
            rows.iter().map(|row| (row.case.as_str(), row.p50, row.reached)).collect();
        let want = [
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
        assert_eq!(figures, want);
    }
}
