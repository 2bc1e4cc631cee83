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

// Modules of the kernel tier's tests, not all of which are used here.
#[allow(dead_code, reason = "the kernel tier uses the rest")]
#[path = "../../kernel/actor.rs"]
mod actor;
#[allow(dead_code, reason = "the kernel tier uses the rest")]
#[path = "../../kernel/bed.rs"]
mod bed;
mod cost;
mod empty;
mod load;
mod nginx;
mod profile;
mod scene;
mod subject;
#[allow(dead_code, reason = "the kernel tier uses the rest")]
#[path = "../../kernel/sys.rs"]
mod sys;

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Context as _, Result};
use clap::{Parser as _, ValueEnum};
use serde_json::{Value, json};

use self::{
    profile::{ProfileSample, ProgramCost},
    scene::CountBenchFixture,
    subject::{CountBenchCase, CountBenchSubject, UncountedSocket},
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
    let all = CountBenchSelection::value_variants();
    let chosen = if args.only.is_empty() { all } else { &args.only };
    let core = match args.core {
        Some(core) => core,
        None => cost::core_count()?.checked_sub(1).context("a machine has a core")?,
    };
    let mut scene = CountBenchFixture::new(core, args.seconds, args.object.as_deref())?;
    let (mut rates, mut profiles) = (BTreeMap::new(), BTreeMap::new());
    for case in chosen.iter().filter_map(|what| what.to_case()) {
        if !args.profile {
            rates.insert(case.name(), compare(&mut scene, case, args.rounds)?);
        }
        profiles.insert(case.name(), profile(&mut scene, case, args.rounds.min(PROFILE_ROUNDS))?);
    }
    let empty = stats_overhead(&mut scene, args.rounds.min(PROFILE_ROUNDS))?;
    let mut packets = BTreeMap::new();
    if chosen.contains(&CountBenchSelection::Uncounted) {
        for way in UncountedSocket::ALL {
            packets.insert(
                way.name(),
                profile_uncounted(&mut scene, way, args.rounds.min(PROFILE_ROUNDS))?,
            );
        }
    }
    drop(scene);
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
fn compare(scene: &mut CountBenchFixture, case: CountBenchCase, rounds: u32) -> Result<Value> {
    let subjects = case.subjects();
    let mut found = BTreeMap::<&str, BTreeMap<&str, Vec<f64>>>::new();
    for round in 0..=rounds as usize {
        for place in 0..subjects.len() {
            let subject = subjects[(place + round) % subjects.len()];
            let run = scene
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
            let kept = found.entry(subject.name()).or_default();
            kept.entry("req_s").or_default().push(run.per_s);
            kept.entry("cpu_us").or_default().push(run.cpu_us);
            kept.entry("machine_us").or_default().push(run.machine_us);
            if let Some(cycles) = run.cycles {
                kept.entry("cycles").or_default().push(cycles);
            }
        }
    }
    Ok(serde_json::to_value(found)?)
}

/// Time in each program a request, with the programs attached.
fn profile(scene: &mut CountBenchFixture, case: CountBenchCase, rounds: u32) -> Result<Value> {
    scene.measure(case, CountBenchSubject::Rouse)?;
    let mut samples = Vec::new();
    for _ in 0..rounds {
        let (run, spent) = scene.profile(case)?;
        samples.push(ProfileSample { requests: run.requests, costs: spent });
    }
    eprint!("{}", profile::to_table(case.name(), &samples));
    Ok(profile::to_json(&samples))
}

/// Time that the statistics record for an empty program, in ns a run, for each round.
fn stats_overhead(scene: &mut CountBenchFixture, rounds: u32) -> Result<Vec<f64>> {
    let mut found = Vec::new();
    for _ in 0..rounds {
        let spent = scene.profile_empty()?;
        found
            .push(spent.iter().fold(ProgramCost::default(), |all, one| all.plus(one)).ns_per_run());
    }
    eprintln!("\nempty program, as recorded: {found:.1?} ns a run");
    Ok(found)
}

/// Time in programs a packet of sockets that are not counted, in and out, for each round.
fn profile_uncounted(
    scene: &mut CountBenchFixture,
    way: UncountedSocket,
    rounds: u32,
) -> Result<Value> {
    let mut found = BTreeMap::<&str, Vec<f64>>::new();
    for _ in 0..rounds {
        let (packets, spent) = scene.profile_uncounted(way)?;
        let both = spent.iter().filter(|one| profile::is_packet_program(&one.name));
        let both = both.fold(ProgramCost::default(), |all, one| all.plus(one));
        found.entry("ns").or_default().push(both.ns as f64 / packets as f64);
        found.entry("runs").or_default().push(both.runs as f64 / packets as f64);
        for one in spent.iter().filter(|one| one.runs > 0 && profile::is_packet_program(&one.name))
        {
            let name = if one.name == "ingress" { "ingress_ns" } else { "egress_ns" };
            found.entry(name).or_default().push(one.ns_per_run());
        }
    }
    eprintln!("{}: {found:.1?}", way.name());
    Ok(serde_json::to_value(found)?)
}
