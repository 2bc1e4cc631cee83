//! Shell: run time of given programs, by the kernel's own statistics.
//!
//! The time of a program includes that of programs which it tail-calls.

use std::{fmt::Write as _, fs, os::fd::AsRawFd as _, path::Path};

use anyhow::{Context as _, Result};
use aya::{
    programs::loaded_programs,
    sys::{Stats, enable_stats},
};
use serde_json::{Value, json};

/// Run time of one program, in ns, and its number of runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProgramCost {
    pub(crate) name: String,
    pub(crate) runs: u64,
    pub(crate) ns: u64,
}

impl ProgramCost {
    pub(crate) fn plus(self, other: &Self) -> Self {
        Self { name: self.name, runs: self.runs + other.runs, ns: self.ns + other.ns }
    }

    pub(crate) fn ns_per_run(&self) -> f64 {
        self.ns as f64 / self.runs as f64
    }
}

/// One measurement with statistics enabled.
#[derive(Debug)]
pub(crate) struct ProfileSample {
    pub(crate) requests: u64,
    pub(crate) costs: Vec<ProgramCost>,
}

/// Returns true if the program runs once for each packet.
pub(crate) fn is_packet_program(program: &str) -> bool {
    matches!(program, "ingress" | "egress")
}

/// Runs `act` with statistics enabled. Returns its result and the programs' run time meanwhile. The kernel disables
/// the statistics when this process ends.
pub(crate) fn measure_run_time<T>(
    programs: &[(String, u32)],
    act: impl FnOnce() -> Result<T>,
) -> Result<(T, Vec<ProgramCost>)> {
    let stats_guard =
        enable_stats(Stats::RunTime).context("cannot switch the program statistics on")?;
    let before = read_costs(programs)?;
    let result = act()?;
    let after = read_costs(programs)?;
    drop(stats_guard);
    let since = |(after, before): (ProgramCost, ProgramCost)| ProgramCost {
        runs: after.runs - before.runs,
        ns: after.ns - before.ns,
        name: after.name,
    };
    Ok((result, after.into_iter().zip(before).map(since).collect()))
}

fn read_costs(programs: &[(String, u32)]) -> Result<Vec<ProgramCost>> {
    let mut costs: Vec<ProgramCost> = programs
        .iter()
        .map(|(name, _)| ProgramCost { name: name.clone(), ..ProgramCost::default() })
        .collect();
    for program in loaded_programs() {
        let program = program.context("cannot list the kernel's programs")?;
        if let Some(index) = programs.iter().position(|(_, id)| *id == program.id()) {
            costs[index].runs = program.run_count();
            costs[index].ns = u64::try_from(program.run_time().as_nanos())?;
        }
    }
    Ok(costs)
}

/// Names and ids of the programs in the links that are pinned in a directory.
pub(crate) fn pinned_programs(links: &Path) -> Result<Vec<(String, u32)>> {
    let mut programs = Vec::new();
    for entry in fs::read_dir(links).context("cannot read the folder of links")? {
        let path = entry?.path();
        let link = agent::kernel::sys::open_pin(&path).context("cannot open a link")?;
        let fdinfo = fs::read_to_string(format!("/proc/self/fdinfo/{}", link.as_raw_fd()))?;
        let id = fdinfo.lines().find_map(|line| line.strip_prefix("prog_id:"));
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        programs.push((name, id.context("no program id")?.trim().parse()?));
    }
    programs.sort();
    Ok(programs)
}

/// Sum of all samples: number of requests, and time of each program.
fn sum_samples(samples: &[ProfileSample]) -> (f64, Vec<ProgramCost>) {
    let requests: u64 = samples.iter().map(|sample| sample.requests).sum();
    let mut costs = samples[0].costs.clone();
    for sample in &samples[1..] {
        costs =
            costs.into_iter().zip(&sample.costs).map(|(cost, other)| cost.plus(other)).collect();
    }
    costs.retain(|cost| cost.runs > 0);
    (requests as f64, costs)
}

/// Formats a profile as a table, for readers.
pub(crate) fn to_table(case: &str, samples: &[ProfileSample]) -> String {
    let (requests, costs) = sum_samples(samples);
    let mut out = format!("\n{case}: program       runs/request   ns/run    least   ns/request\n");
    let mut whole = 0.0;
    for cost in &costs {
        let (runs, ns) = (cost.runs as f64 / requests, cost.ns as f64 / requests);
        whole += ns;
        let rounds = samples.iter().flat_map(|sample| &sample.costs);
        let rounds =
            rounds.filter(|it| it.name == cost.name && it.runs > 0).map(ProgramCost::ns_per_run);
        let (min, each) = (rounds.fold(f64::INFINITY, f64::min), cost.ns_per_run());
        // Writing to a string cannot fail.
        let _ = writeln!(out, "  {:20} {runs:12.3} {each:8.1} {min:8.1} {ns:12.1}", cost.name);
    }
    let _ = writeln!(out, "  {:20} {:12} {:8} {:8} {whole:12.1}", "all", "", "", "");
    out
}

/// Formats a profile as JSON: values of each round, ns and runs a request, of all programs together and of each.
pub(crate) fn to_json(samples: &[ProfileSample]) -> Value {
    let (requests, costs) = sum_samples(samples);
    let per_request = |name: Option<&str>, value: fn(&ProgramCost) -> u64| -> Vec<f64> {
        let to_values = |sample: &ProfileSample| {
            let chosen = sample.costs.iter().filter(|it| name.is_none_or(|name| it.name == name));
            chosen.map(value).sum::<u64>() as f64 / sample.requests as f64
        };
        samples.iter().map(to_values).collect()
    };
    let ns = |name: Option<&str>| per_request(name, |it| it.ns);
    let runs = |name: Option<&str>| per_request(name, |it| it.runs);
    let program = |cost: &ProgramCost| {
        let name = Some(cost.name.as_str());
        json!({
            "name": name, "ns": ns(name), "runs": runs(name),
            "ns_per_run": cost.ns_per_run(), "runs_per_request": cost.runs as f64 / requests,
        })
    };
    let programs: Vec<Value> = costs.iter().map(program).collect();
    json!({ "ns": ns(None), "runs": runs(None), "programs": programs })
}
