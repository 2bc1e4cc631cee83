//! Cost of counting requests: nginx at its maximum rate, with its client on the same core; with programs attached,
//! detached, and detached with a second nginx as a proxy.
//!
//! Processes and namespaces are the same in all cases: only links are added and removed between rounds, so only the
//! programs differ. Time in programs, from the kernel's statistics, is measured in separate rounds, because the
//! statistics cost time themselves. Their overhead is measured with an empty program. Each round with programs
//! attached ends with a check that they counted the same number of requests as nginx.
//!
//! It prints a profile of each program on standard error, and one JSON line. A quick run: `ROUSE_EBPF_OBJECT=… cargo
//! bench --profile dev -p tests --bench count -- --rounds 2 --only h1`. With `--object FILE` it measures other eBPF
//! programs without a build of this bench. On a busy machine, the minimum of several rounds is the best figure of a
//! program; the last column of a rate is the share of the core that the measured processes had.
#![allow(clippy::print_stdout, reason = "xtask reads the figures from standard output")]
#![allow(clippy::print_stderr, reason = "people read the profile from standard error")]

mod cases;
mod count_fixture;
mod cpu_usage;
mod empty_programs;
#[allow(dead_code, reason = "the kernel tier uses the rest")]
#[path = "../../kernel/fixture.rs"]
mod fixture;
mod load_generators;
mod nginx;
mod program_costs;
#[allow(dead_code, reason = "the kernel tier uses the rest")]
#[path = "../../kernel/scripted_process.rs"]
mod scripted_process;
#[allow(dead_code, reason = "the kernel tier uses the rest")]
#[path = "../../kernel/sys.rs"]
mod sys;

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Context as _, Result};
use clap::{Parser as _, ValueEnum};
use serde_json::{Value, json};

use self::{
    cases::{CountBenchCase, CountBenchSubject, UncountedSocket},
    count_fixture::CountBenchFixture,
    program_costs::{ProfileSample, ProgramCost},
};

/// Number of rounds with statistics on: times in programs vary less than rates.
const PROFILE_ROUNDS: u32 = 5;

#[derive(Debug, clap::Parser)]
struct CountBenchArgs {
    /// Rounds of each comparison, after one that warms up
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Cases to measure; all when none is named
    #[arg(long, value_delimiter = ',')]
    only: Vec<CountBenchSelection>,
    /// Length of one measurement, in seconds
    #[arg(long, default_value_t = 1)]
    seconds: u32,
    /// Core that runs server, client and all packet processing between them [default: the last one]
    #[arg(long)]
    core: Option<usize>,
    /// Measure only the time in programs, without the comparison of rates
    #[arg(long)]
    profile: bool,
    /// Measure the eBPF programs in this file instead of those in this build
    #[arg(long)]
    object: Option<PathBuf>,
    /// Ignored; cargo passes it to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum CountBenchSelection {
    H1,
    #[value(name = "h1_browser")]
    H1Browser,
    H2,
    Bulk,
    /// Packets of sockets that are not counted
    Uncounted,
}

impl CountBenchSelection {
    fn to_case(self) -> Option<CountBenchCase> {
        match self {
            Self::H1 => Some(CountBenchCase::H1),
            Self::H1Browser => Some(CountBenchCase::H1Browser),
            Self::H2 => Some(CountBenchCase::H2),
            Self::Bulk => Some(CountBenchCase::Bulk),
            Self::Uncounted => None,
        }
    }
}

fn main() -> Result<()> {
    let args = CountBenchArgs::parse();
    let cases = CountBenchSelection::value_variants();
    let chosen = if args.only.is_empty() { cases } else { &args.only };
    let core = match args.core {
        Some(core) => core,
        None => cpu_usage::core_count()?.checked_sub(1).context("a machine has a core")?,
    };
    let mut fixture = CountBenchFixture::new(core, args.seconds, args.object.as_deref())?;
    let (mut rates, mut profiles) = (BTreeMap::new(), BTreeMap::new());
    for case in chosen.iter().filter_map(|selection| selection.to_case()) {
        if !args.profile {
            rates.insert(case.name(), compare(&mut fixture, case, args.rounds)?);
        }
        profiles.insert(case.name(), profile(&mut fixture, case, args.rounds.min(PROFILE_ROUNDS))?);
    }
    let empty = stats_overhead(&mut fixture, args.rounds.min(PROFILE_ROUNDS))?;
    let mut packets = BTreeMap::new();
    if chosen.contains(&CountBenchSelection::Uncounted) {
        for socket in UncountedSocket::ALL {
            packets.insert(
                socket.name(),
                profile_uncounted(&mut fixture, socket, args.rounds.min(PROFILE_ROUNDS))?,
            );
        }
    }
    drop(fixture);
    println!(
        "{}",
        json!({
            "rates": rates, "profiles": profiles, "empty_program": empty, "packets": packets,
            "core": core,
        })
    );
    Ok(())
}

/// Measures every subject once in a round, rotating which comes first; the first round is dropped.
fn compare(fixture: &mut CountBenchFixture, case: CountBenchCase, rounds: u32) -> Result<Value> {
    let subjects = case.subjects();
    let mut values = BTreeMap::<&str, BTreeMap<&str, Vec<f64>>>::new();
    for round in 0..=rounds as usize {
        for offset in 0..subjects.len() {
            let subject = subjects[(offset + round) % subjects.len()];
            let run = fixture
                .measure(case, subject)
                .with_context(|| format!("{}, {}", case.name(), subject.name()))?;
            if round == 0 {
                continue;
            }
            eprintln!(
                "{:10} {:13} {:8.0} req/s  {:7.3} us CPU a request  {:3.0} % of the core",
                case.name(),
                subject.name(),
                run.per_s,
                run.cpu_us,
                run.per_s * run.cpu_us / 1e4
            );
            let measurements = values.entry(subject.name()).or_default();
            measurements.entry("req_s").or_default().push(run.per_s);
            measurements.entry("cpu_us").or_default().push(run.cpu_us);
            measurements.entry("machine_us").or_default().push(run.machine_us);
            if let Some(cycles) = run.cycles {
                measurements.entry("cycles").or_default().push(cycles);
            }
        }
    }
    Ok(serde_json::to_value(values)?)
}

/// Time in each program a request, with the programs attached.
fn profile(fixture: &mut CountBenchFixture, case: CountBenchCase, rounds: u32) -> Result<Value> {
    fixture.measure(case, CountBenchSubject::Rouse)?;
    let mut samples = Vec::new();
    for _ in 0..rounds {
        let (run, costs) = fixture.profile(case)?;
        samples.push(ProfileSample { requests: run.requests, costs });
    }
    eprint!("{}", program_costs::to_table(case.name(), &samples));
    Ok(program_costs::to_json(&samples))
}

/// Time that the statistics record for an empty program, in ns a run, for each round.
fn stats_overhead(fixture: &mut CountBenchFixture, rounds: u32) -> Result<Vec<f64>> {
    let mut overheads = Vec::new();
    for _ in 0..rounds {
        let costs = fixture.profile_empty()?;
        overheads.push(
            costs.iter().fold(ProgramCost::default(), |all, cost| all.plus(cost)).ns_per_run(),
        );
    }
    eprintln!("\nempty program, as recorded: {overheads:.1?} ns a run");
    Ok(overheads)
}

/// Time in programs a packet of sockets that are not counted, in and out, for each round.
fn profile_uncounted(
    fixture: &mut CountBenchFixture,
    socket: UncountedSocket,
    rounds: u32,
) -> Result<Value> {
    let mut values = BTreeMap::<&str, Vec<f64>>::new();
    for _ in 0..rounds {
        let (packets, costs) = fixture.profile_uncounted(socket)?;
        let packet_costs = costs.iter().filter(|cost| program_costs::is_packet_program(&cost.name));
        let total_cost = packet_costs.fold(ProgramCost::default(), |all, cost| all.plus(cost));
        values.entry("ns").or_default().push(total_cost.ns as f64 / packets as f64);
        values.entry("runs").or_default().push(total_cost.runs as f64 / packets as f64);
        for cost in costs
            .iter()
            .filter(|cost| cost.runs > 0 && program_costs::is_packet_program(&cost.name))
        {
            let name = if cost.name == "ingress" { "ingress_ns" } else { "egress_ns" };
            values.entry(name).or_default().push(cost.ns_per_run());
        }
    }
    eprintln!("{}: {values:.1?}", socket.name());
    Ok(serde_json::to_value(values)?)
}
