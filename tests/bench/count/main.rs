//! What counting requests costs: nginx at its maximum rate beside its client on one core, with the programs in force,
//! detached, and with a second nginx in front of it instead.
//!
//! Detached and attached are the same processes and namespaces: only links come and go between rounds, so nothing but
//! the programs differs. Time in programs, by the kernel's own statistics, is taken in rounds of its own, because the
//! statistics cost time themselves; what they record of a program that does nothing is measured in the same way.
//! Each round with programs in force ends with what they counted: it must be what nginx counted.
//!
//! It prints a profile of each program for people on standard error, and one JSON line. Quick:
//! `ROUSE_EBPF_OBJECT=… cargo bench --profile dev -p tests --bench count -- --rounds 2 --only h1`, and `--object FILE` for
//! another kernel half without building anything but that. On a machine that is not quiet, the least of several rounds
//! tells most of a program; the last column of a rate says how much of the core the measured ones had.
#![allow(clippy::print_stdout, reason = "xtask reads the figures from standard output")]
#![allow(clippy::print_stderr, reason = "people read the profile from standard error")]

// What the kernel tier's tests stand on; not all of it is used here.
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
    profile::{Sample, Spent},
    scene::Scene,
    subject::{Case, Subject, Uncounted},
};

/// Rounds with statistics on: program times vary less than rates.
const PROFILED: u32 = 5;

#[derive(Debug, clap::Parser)]
struct Args {
    /// Rounds of each comparison, behind one that warms up
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Cases to measure; all when none is named
    #[arg(long, value_delimiter = ',')]
    only: Vec<What>,
    /// Length of one measurement
    #[arg(long, default_value_t = 1)]
    seconds: u32,
    /// The core that server, client and everything between them run on; the last one when not given
    #[arg(long)]
    core: Option<usize>,
    /// Only the time in programs, without the comparison of rates
    #[arg(long)]
    profile: bool,
    /// Measure the kernel half in this file instead of the one in this build
    #[arg(long)]
    object: Option<PathBuf>,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    H1,
    #[value(name = "h1_browser")]
    H1Browser,
    H2,
    Bulk,
    /// Packets of sockets that are not counted
    Uncounted,
}

impl What {
    fn case(self) -> Option<Case> {
        match self {
            Self::H1 => Some(Case::H1),
            Self::H1Browser => Some(Case::H1Browser),
            Self::H2 => Some(Case::H2),
            Self::Bulk => Some(Case::Bulk),
            Self::Uncounted => None,
        }
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let all = What::value_variants();
    let chosen = if args.only.is_empty() { all } else { &args.only };
    let core = match args.core {
        Some(core) => core,
        None => cost::cores()?.checked_sub(1).context("a machine has a core")?,
    };
    let mut scene = Scene::new(core, args.seconds, args.object.as_deref())?;
    let (mut rates, mut profiles) = (BTreeMap::new(), BTreeMap::new());
    for case in chosen.iter().filter_map(|what| what.case()) {
        if !args.profile {
            rates.insert(case.name(), compare(&mut scene, case, args.rounds)?);
        }
        profiles.insert(case.name(), profile(&mut scene, case, args.rounds.min(PROFILED))?);
    }
    let empty = recorder(&mut scene, args.rounds.min(PROFILED))?;
    let mut packets = BTreeMap::new();
    if chosen.contains(&What::Uncounted) {
        for way in Uncounted::ALL {
            packets.insert(way.name(), uncounted(&mut scene, way, args.rounds.min(PROFILED))?);
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

/// Every subject once a round, the first of a round changing from round to round; a first round is thrown away.
fn compare(scene: &mut Scene, case: Case, rounds: u32) -> Result<Value> {
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

/// Time in each program a request, with the programs in force.
fn profile(scene: &mut Scene, case: Case, rounds: u32) -> Result<Value> {
    scene.measure(case, Subject::Rouse)?;
    let mut samples = Vec::new();
    for _ in 0..rounds {
        let (run, spent) = scene.profile(case)?;
        samples.push(Sample { requests: run.requests, spent });
    }
    eprint!("{}", profile::table(case.name(), &samples));
    Ok(profile::value(&samples))
}

/// What the statistics record of a program that does nothing, ns a run, round by round.
fn recorder(scene: &mut Scene, rounds: u32) -> Result<Vec<f64>> {
    let mut found = Vec::new();
    for _ in 0..rounds {
        let spent = scene.profile_empty()?;
        found.push(spent.iter().fold(Spent::default(), |all, one| all.with(one)).each_ns());
    }
    eprintln!("\nempty program, as recorded: {found:.1?} ns a run");
    Ok(found)
}

/// Time in programs a packet of sockets that are not counted, in and out, round by round.
fn uncounted(scene: &mut Scene, way: Uncounted, rounds: u32) -> Result<Value> {
    let mut found = BTreeMap::<&str, Vec<f64>>::new();
    for _ in 0..rounds {
        let (packets, spent) = scene.profile_uncounted(way)?;
        let both = spent.iter().filter(|one| profile::is_for_packets(&one.name));
        let both = both.fold(Spent::default(), |all, one| all.with(one));
        found.entry("ns").or_default().push(both.ns as f64 / packets as f64);
        found.entry("runs").or_default().push(both.runs as f64 / packets as f64);
        for one in spent.iter().filter(|one| one.runs > 0 && profile::is_for_packets(&one.name)) {
            let name = if one.name == "ingress" { "ingress_ns" } else { "egress_ns" };
            found.entry(name).or_default().push(one.each_ns());
        }
    }
    eprintln!("{}: {found:.1?}", way.name());
    Ok(serde_json::to_value(found)?)
}
