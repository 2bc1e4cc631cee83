//! The activator as a gateway, beside nginx, HAProxy, Envoy and Go's ReverseProxy, in interleaved rounds.
//!
//! Each proxy has one core for itself; clients, pods and the bench share another one. On a machine of two cores, the
//! clients therefore limit the rate of the faster proxies. So a rate counts in requests for each second in which the
//! proxy's core was busy, with all packet processing there. The rate as the client sees it is a figure of its own.
//! So is the share of time in which each core was busy.
//!
//! All processes and sockets are in a network namespace of the bench, which ends with it. This program plays the
//! controller and the autoscaler of each activator. It prints progress on standard error, and one JSON line.
//!
//! A quick run: `cargo bench -p tests --bench gateway -- --rouse FILE --envoy FILE --go-proxy FILE --rounds 2 --cases
//! h1_c64`. A run needs root.
#![allow(clippy::print_stdout, reason = "xtask reads the figures from standard output")]
#![allow(clippy::print_stderr, reason = "the bench runs for minutes, and shows its progress")]

mod cases;
mod cores;
mod crowd;
mod crowd_cases;
mod figures;
mod fixture;
mod http1;
mod load_generators;
mod open_loop;
mod played_controller;
mod pods;
mod process;
mod proxy_configs;
mod route_update;
mod warm_cases;

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use clap::Parser as _;
use nix::{
    sched::{CloneFlags, unshare},
    sys::resource::{Resource, getrlimit, setrlimit},
};
use serde_json::json;

use self::{
    cases::{GatewayCase, GatewaySubject},
    cores::BenchCores,
    crowd_cases::{CrowdFigures, measure_crowd},
    figures::{Figure, MeasuredCase, add_figures, round_order},
    fixture::{BenchPrograms, GatewayFixture},
    route_update::measure_route_update,
    warm_cases::WarmCases,
};

/// Number of rounds of the cases with ten thousand connections or hosts at most: each takes many seconds.
const MAX_LARGE_ROUNDS: u32 = 5;
/// Files that each process may open, where the machine permits it: more than any case needs.
const FILE_LIMIT: u64 = 200_000;
/// Files that suffice: ten thousand connections of clients, and those to pods that are open at once.
const MIN_FILE_LIMIT: u64 = 16_000;
/// Settings of the network namespace, below `/proc/sys/net`: ports of clients apart from those of services, and accept
/// queues that a crowd cannot fill.
const NETWORK_SETTINGS: [(&str, &str); 2] =
    [("ipv4/ip_local_port_range", "30000 60999"), ("core/somaxconn", "65535")];

#[derive(Debug, clap::Parser)]
struct GatewayBenchOptions {
    /// Executable `rouse` to measure
    #[arg(long, value_name = "FILE")]
    rouse: PathBuf,
    /// Executable `rouse` of an earlier commit, as one more subject
    #[arg(long, value_name = "FILE")]
    old: Option<PathBuf>,
    /// Executable of Envoy
    #[arg(long, value_name = "FILE")]
    envoy: PathBuf,
    /// Executable of the proxy in Go
    #[arg(long, value_name = "FILE")]
    go_proxy: PathBuf,
    /// Rounds of each comparison, after one that warms up
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Cases to measure, joined by commas; all when none is named
    #[arg(long, value_delimiter = ',', value_parser = GatewayCase::parse)]
    cases: Vec<GatewayCase>,
    /// Length of one measurement, in seconds
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=20))]
    seconds: u32,
    /// Core of the proxies [default: the last one]
    #[arg(long)]
    proxy_core: Option<usize>,
    /// Ignored; cargo passes it to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

/// Figures of all cases, and what failed. One failure costs a subject of one case, as a run takes an hour.
#[derive(Debug, Default)]
struct GatewayOutcome {
    cases: BTreeMap<&'static str, MeasuredCase>,
    /// Subjects that have failed, with the cases in which they did.
    dropped: BTreeSet<(&'static str, GatewaySubject)>,
    /// Failures of the measured program by case.
    failures: BTreeMap<&'static str, String>,
}

fn main() -> Result<()> {
    let args = GatewayBenchOptions::parse();
    let cores = BenchCores::choose(args.proxy_core)?;
    enter_bench_network()?;
    raise_file_limit()?;
    cores.bind_to_client_core()?;
    let programs = BenchPrograms {
        rouse: args.rouse,
        old: args.old,
        envoy: args.envoy,
        go_proxy: args.go_proxy,
    };
    let cases = if args.cases.is_empty() { GatewayCase::ALL.to_vec() } else { args.cases };
    let fixture = GatewayFixture::start(cores, programs)?;
    eprintln!(
        "proxies on core {}; clients and pods on core {}, which limits the faster proxies",
        cores.proxy, cores.client
    );
    let mut outcome = GatewayOutcome::default();
    measure_warm_cases(&fixture, &cases, args.rounds, args.seconds, &mut outcome);
    fixture.end_kept();
    measure_large_cases(&fixture, &cases, args.rounds.min(MAX_LARGE_ROUNDS), &mut outcome);
    drop(fixture);
    println!(
        "{}",
        json!({
            "cases": outcome.cases, "failures": outcome.failures,
            "proxy_core": cores.proxy, "client_core": cores.client,
        })
    );
    Ok(())
}

/// Moves this process into a network namespace of its own, with loopback only.
fn enter_bench_network() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNET).context("cannot make a network namespace: run it as root")?;
    let status = Command::new("ip").args(["link", "set", "lo", "up"]).status();
    ensure!(status.context("cannot start ip")?.success(), "cannot enable loopback");
    for (name, value) in NETWORK_SETTINGS {
        let file = format!("/proc/sys/net/{name}");
        fs::write(&file, value).with_context(|| format!("cannot write {file}"))?;
    }
    Ok(())
}

/// Raises the limit of open files, which all processes of the bench inherit.
fn raise_file_limit() -> Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).context("cannot read the file limit")?;
    let wanted = hard.max(FILE_LIMIT);
    // Containers may withhold the capability that a higher hard limit needs.
    if setrlimit(Resource::RLIMIT_NOFILE, wanted, wanted).is_err() {
        ensure!(
            hard >= MIN_FILE_LIMIT,
            "only {hard} files may be open; {MIN_FILE_LIMIT} are needed"
        );
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard).context("cannot raise the file limit")?;
    }
    Ok(())
}

/// Measures the cases with normal requests, whose proxies stay.
fn measure_warm_cases(
    fixture: &GatewayFixture,
    cases: &[GatewayCase],
    rounds: u32,
    seconds: u32,
    outcome: &mut GatewayOutcome,
) {
    let warm = WarmCases { fixture, seconds, h2_requests: RefCell::default() };
    let all = GatewaySubject::all(fixture.has_old());
    let proxies: Vec<GatewaySubject> =
        all.iter().copied().filter(|it| *it != GatewaySubject::Direct).collect();
    for case in cases {
        let name = case.name();
        if let Some(load) = case.throughput() {
            let measure = |subject| warm.measure_rate(*case, load, subject);
            outcome.compare(fixture, name, rounds, &all, measure);
        } else if *case == GatewayCase::P99C64 {
            outcome.compare(fixture, name, rounds, &all, |subject| warm.measure_latency(subject));
        } else if *case == GatewayCase::Slow10k {
            let rounds = rounds.min(MAX_LARGE_ROUNDS);
            let measure = |subject| warm.measure_slow_clients(subject);
            outcome.compare(fixture, name, rounds, &proxies, measure);
        }
    }
}

/// Measures the cases that need a new process of a proxy in each round.
fn measure_large_cases(
    fixture: &GatewayFixture,
    cases: &[GatewayCase],
    rounds: u32,
    outcome: &mut GatewayOutcome,
) {
    let has = |case: GatewayCase| cases.contains(&case);
    let subjects = |only_activators: bool| -> Vec<GatewaySubject> {
        let all = GatewaySubject::all(fixture.has_old()).into_iter();
        let all = all.filter(|it| *it != GatewaySubject::Direct);
        all.filter(|it| it.is_activator() || !only_activators).collect()
    };
    let crowd_cases =
        [GatewayCase::MemoryIdle10k, GatewayCase::MemoryWaiting10k, GatewayCase::Release10k];
    if crowd_cases.into_iter().any(has) {
        let subjects = subjects(!has(GatewayCase::MemoryIdle10k));
        for round in 0..=rounds as usize {
            for subject in round_order(&subjects, round) {
                let mut crowd = CrowdFigures::default();
                let failure = measure_crowd(fixture, subject, &mut crowd).err();
                let parts = [crowd.idle, crowd.waiting, crowd.release];
                let parts = crowd_cases.into_iter().zip(parts).filter(|(case, _)| has(*case));
                for (case, part) in parts {
                    match &failure {
                        _ if !part.is_empty() => outcome.keep(case.name(), round, subject, &part),
                        Some(error) => outcome.drop_subject(case.name(), subject, error),
                        // Such a part belongs to a proxy that has no wait queue.
                        None => {}
                    }
                }
            }
        }
    }
    if has(GatewayCase::RouteUpdate10k) {
        let name = GatewayCase::RouteUpdate10k.name();
        let measure = |subject| measure_route_update(fixture, subject);
        outcome.compare(fixture, name, rounds, &subjects(true), measure);
    }
}

impl GatewayOutcome {
    /// Measures every subject once in each round, as long as it does not fail. Without the measured program there is
    /// nothing to compare with.
    fn compare(
        &mut self,
        fixture: &GatewayFixture,
        case: &'static str,
        rounds: u32,
        subjects: &[GatewaySubject],
        measure: impl Fn(GatewaySubject) -> Result<Vec<Figure>>,
    ) {
        for round in 0..=rounds as usize {
            for subject in round_order(subjects, round) {
                if self.failures.contains_key(case) {
                    return;
                }
                if self.dropped.contains(&(case, subject)) {
                    continue;
                }
                match measure(subject) {
                    Ok(figures) => self.keep(case, round, subject, &figures),
                    Err(error) => {
                        self.drop_subject(case, subject, &error);
                        // It may have ended, or have open connections of this case.
                        fixture.end_kept_of(subject);
                    }
                }
            }
        }
    }

    /// Prints the figures of one measurement, and adds them to the others. Those of the round that warms up are dropped.
    fn keep(
        &mut self,
        case: &'static str,
        round: usize,
        subject: GatewaySubject,
        figures: &[Figure],
    ) {
        if round == 0 || self.dropped.contains(&(case, subject)) {
            return;
        }
        let shown: Vec<String> =
            figures.iter().map(|(name, value)| format!("{value:.1} {name}")).collect();
        eprintln!("{case:18} {:8} {}", subject.name(), shown.join(", "));
        add_figures(self.cases.entry(case).or_default(), subject.name(), figures);
    }

    /// Drops the figures of a subject in one case, so that all values of a round stay side by side.
    fn drop_subject(&mut self, case: &'static str, subject: GatewaySubject, error: &anyhow::Error) {
        eprintln!("{case:18} {:8} failed: {error:#}", subject.name());
        self.dropped.insert((case, subject));
        if let Some(measured) = self.cases.get_mut(case) {
            measured.remove(subject.name());
        }
        if subject == GatewaySubject::Rouse {
            self.failures.entry(case).or_insert_with(|| format!("{error:#}"));
        }
    }
}
