//! Shell: Services of a cluster, served by Rouse's agent and by the real kube-proxy: time until a change is in force,
//! time of a connect and of a datagram's answer, start, churn, and upgrade.
//!
//! Each proxy has a node of its own: network namespaces, cgroups, and an API server that serves the same objects to each.
//! All run in the same kernel, one at a time: the others are suspended, with their rules or maps in force.

mod api_server;
mod churn;
mod datagrams;
mod flips;
mod node;
mod objects;
mod proxy;
mod starts;
mod steady_client;
mod upgrades;

use std::{net::SocketAddr, path::PathBuf};

use anyhow::{Context as _, Result, ensure};

use self::{
    node::BenchCgroup,
    objects::{ServiceProtocol, ServiceSet, cluster_ip},
    proxy::{ProxyStart, ProxySubject, RunningProxy},
};
use super::{
    CaseSelection,
    case_results::CaseResults,
    ebpf_run_time, interleave,
    report::{BenchGoal, BenchRow, case_row, case_rows},
    stats::median,
};
use crate::{
    measure::{MeasuredTimes, service_connects::SERVICE_PORT},
    sh,
};

/// Names of the cases in the order in which they are measured, those of `flip` and `connect` in turn.
pub(super) const CASES: [&str; 6] = ["flip", "connect", "udp", "start", "churn", "upgrade"];
/// Numbers of Services, each with one endpoint, with which connects are measured.
const SIZES: [u32; 4] = [1, 100, 1_000, 10_000];
/// Least number of Services with which flips are measured.
const FLIPS_FROM: u32 = 100;
/// Number of connects in a round.
const CONNECTS_PER_ROUND: &str = "2000";
/// Number of Services that connects go to in turn. In mode iptables a connect takes longer the later its rule is.
const CONNECTED_SERVICES: u32 = 16;
/// Subject that connects to the endpoints themselves.
const BARE: &str = "bare";
/// Number of rounds of the other cases for which there is one start, or half a minute of churn.
const ROUNDS_PER_LONG_ROUND: u32 = 5;

/// Programs and settings of the bench.
#[derive(Debug)]
pub(super) struct ClusterIpBenchContext {
    pub(super) rouse: PathBuf,
    /// Optimised build of xtask, which connects.
    pub(super) client: PathBuf,
    pub(super) kube_proxy: PathBuf,
    /// Directory of logs and settings.
    pub(super) folder: PathBuf,
    pub(super) cases: CaseSelection,
    pub(super) rounds: u32,
}

/// Addresses that connects go to, joined by commas.
#[derive(Debug)]
struct ConnectTargets {
    services: String,
    endpoints: String,
}

/// Measures Rouse beside kube-proxy with growing numbers of Services.
pub(super) fn run(context: &ClusterIpBenchContext) -> Result<Vec<BenchRow>> {
    // An interrupted run leaves its namespaces behind, which would be measured as well.
    node::remove_leftovers()?;
    let mut results = CaseResults::new("clusterip");
    for services in SIZES {
        let measured = measure_services(context, services, &mut results);
        measured.unwrap_or_else(|error| results.add(&format!("services_{services}"), Err(error)));
    }
    if context.cases.contains("udp") {
        for services in SIZES {
            results.add(&format!("udp_{services}"), datagrams::measure(context, services));
        }
    }
    // Rounds with thousands of Services take minutes, and need fewer repetitions.
    let long_rounds = context.rounds.div_ceil(ROUNDS_PER_LONG_ROUND);
    if context.cases.contains("start") {
        results.add("start", starts::measure(context, long_rounds));
    }
    if context.cases.contains("churn") {
        results.add("churn", churn::measure(context, long_rounds));
    }
    if context.cases.contains("upgrade") {
        results.add("upgrade", upgrades::measure(context, long_rounds));
    }
    results.finish()
}

/// Measures flips and connects with this number of Services, as far as they are chosen.
fn measure_services(
    context: &ClusterIpBenchContext,
    services: u32,
    results: &mut CaseResults,
) -> Result<()> {
    let has_flips = services >= FLIPS_FROM && context.cases.contains("flip");
    let has_connects = context.cases.contains("connect");
    if !has_flips && !has_connects {
        return Ok(());
    }
    let set =
        ServiceSet { services, endpoints_each: 1, switches: true, protocol: ServiceProtocol::Tcp };
    // Connects do not depend on the time between two syncs.
    let subjects: &[ProxySubject] =
        if has_flips { &ProxySubject::ALL } else { &ProxySubject::MODES };
    let mut proxies = start_all(context, set, subjects)?;
    if has_flips {
        let flips = flips::measure(&mut proxies, context.rounds);
        results.add(&format!("flip_{services}"), flips);
    }
    if has_connects {
        let connects = measure_connects(&proxies, context.rounds);
        results.add(&format!("connect_{services}"), connects);
    }
    Ok(())
}

/// Starts the subjects, one after the other, and suspends each once it serves all Services.
fn start_all(
    context: &ClusterIpBenchContext,
    set: ServiceSet,
    subjects: &[ProxySubject],
) -> Result<Vec<RunningProxy>> {
    let start = |subject: &ProxySubject| {
        let subject = *subject;
        let (proxy, start) = RunningProxy::start(context, subject, set)?;
        ensure_complete(context, subject, &start)?;
        proxy.suspend()?;
        Ok(proxy)
    };
    subjects.iter().map(start).collect()
}

/// Fails unless all Services answer. Figures of the cases after this would be those of fewer Services.
fn ensure_complete(
    context: &ClusterIpBenchContext,
    subject: ProxySubject,
    start: &ProxyStart,
) -> Result<()> {
    let answers = start.answers;
    ensure!(
        answers.unanswered == 0,
        "{} does not serve {} of {} Services: see {}",
        subject.name(),
        answers.unanswered,
        answers.answered + answers.unanswered,
        context.folder.join(format!("clusterip-{}.log", subject.name())).display()
    );
    Ok(())
}

/// Measures connects to ClusterIPs, and to the endpoints themselves by a client that no program sees.
fn measure_connects(proxies: &[RunningProxy], rounds: u32) -> Result<Vec<BenchRow>> {
    let find = |name: &str| proxies.iter().find(|proxy| proxy.subject.name() == name);
    let rouse = find(ProxySubject::Rouse.name()).context("Rouse runs")?;
    let targets = ConnectTargets::of_set(rouse.set);
    let subjects = [&[BARE][..], &ProxySubject::MODES.map(ProxySubject::name)].concat();
    let case = format!("connect_{}", rouse.set.services);
    let mut rates = Vec::new();
    let times = interleave(rounds, &subjects, |subject| {
        let times = match find(subject) {
            Some(proxy) => run_connects(proxy, BenchCgroup::Client, &targets.services)?,
            // The same node and path: only the programs are missing.
            None => run_connects(rouse, BenchCgroup::Outside, &targets.endpoints)?,
        };
        rates.push((subject, times.count as f64 * 1e6 / times.elapsed_us));
        Ok(times.p50_us)
    })?;
    // The first round warms the caches, as for the times.
    let rates = &rates[subjects.len()..];
    let rate_row = |subject: &&'static str| {
        let own = rates.iter().filter(|(name, _)| name == subject);
        let values: Vec<f64> = own.map(|(_, rate)| *rate).collect();
        case_row(&format!("{case}_rate"), subject, "per_s", &values, BenchGoal::None)
    };
    let mut rows = case_rows(&case, "us", &times, BenchGoal::RatioAtMost(1.02));
    rows.extend(subjects.iter().map(rate_row));
    // Time in programs is measured apart, because the statistics would slow the compared connects.
    let bare_us = median(times.get(BARE).map_or(&[], Vec::as_slice)).value;
    let mut shares = Vec::new();
    for _ in 0..rounds {
        let (measured, run_time) = ebpf_run_time::measure_run_time(|| {
            run_connects(rouse, BenchCgroup::Client, &targets.services)
        })?;
        shares.push(run_time.connect_us / measured.count as f64 / bare_us);
    }
    let (case, goal) = (format!("{case}_programs"), BenchGoal::AtMost(0.02));
    rows.push(case_row(&case, ProxySubject::Rouse.name(), "× bare", &shares, goal));
    Ok(rows)
}

/// Runs one client that connects to the addresses in turn.
fn run_connects(
    proxy: &RunningProxy,
    cgroup: BenchCgroup,
    addresses: &str,
) -> Result<MeasuredTimes> {
    let args = ["connect", "--addr", addresses, "--count", CONNECTS_PER_ROUND];
    run_client(proxy, cgroup, &args)
}

/// Runs `xtask measure ARGS` in the client's pod.
fn run_client(proxy: &RunningProxy, cgroup: BenchCgroup, args: &[&str]) -> Result<MeasuredTimes> {
    let text = sh::capture(&mut proxy.client_command(cgroup, args))?;
    serde_json::from_str(text.trim()).context("cannot read what `xtask measure` printed")
}

impl ConnectTargets {
    fn of_set(set: ServiceSet) -> Self {
        let count = CONNECTED_SERVICES.min(set.services);
        let numbers = || (0..count).map(|position| position * set.services / count);
        let service = |number| SocketAddr::from((cluster_ip(number), SERVICE_PORT));
        Self {
            services: join(numbers().map(service)),
            endpoints: join(numbers().map(|number| set.endpoint(number))),
        }
    }
}

fn join(addresses: impl Iterator<Item = SocketAddr>) -> String {
    addresses.map(|address| address.to_string()).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connects_go_to_services_from_the_first_to_near_the_last_and_to_their_endpoints() {
        let set = ServiceSet {
            services: 32,
            endpoints_each: 1,
            switches: true,
            protocol: ServiceProtocol::Tcp,
        };
        let targets = ConnectTargets::of_set(set);
        let services: Vec<&str> = targets.services.split(',').collect();
        assert_eq!(
            (services.len(), services[0], services[15]),
            (16, "10.96.1.0:80", "10.96.1.30:80")
        );
        let endpoints: Vec<&str> = targets.endpoints.split(',').collect();
        assert_eq!((endpoints[0], endpoints[15]), ("10.192.0.1:8081", "10.193.0.30:8080"));
        let one = ConnectTargets::of_set(ServiceSet { services: 1, ..set });
        assert_eq!(
            (one.services.as_str(), one.endpoints.as_str()),
            ("10.96.1.0:80", "10.192.0.1:8081")
        );
    }
}
