//! Shell: connects while the agent is upgraded again and again, compared with a quiet time just before.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::{
    ClusterIpBenchContext,
    flips::{BackendWatch, other_backend},
    objects::{ServiceProtocol, ServiceSet, switched_slice},
    proxy::{ProxySubject, RunningProxy, pins_folder},
    steady_client::SteadyClient,
};
use crate::{
    bench::report::{BenchGoal, BenchRow, case_row},
    measure::service_connects::SteadyConnects,
};

/// Services and endpoints of the case. The switched Service shows when an agent follows changes.
const SET: ServiceSet = ServiceSet {
    services: 1_000,
    endpoints_each: 10,
    switches: true,
    protocol: ServiceProtocol::Tcp,
};
const CASE: &str = "upgrade";
/// Time from one connect to the next: five thousand a second.
const CONNECT_PERIOD: Duration = Duration::from_micros(200);
/// Length of the quiet time, and of the time in which one upgrade follows another.
const SPAN: Duration = Duration::from_secs(20);
/// Pause between two connects that look for the backend of the switched Service, in µs.
const WATCH_PERIOD_US: &str = "20000";
/// Sizes of maps that agents have in turn. Other sizes mean other maps, which an agent fills and takes over as those of
/// another version.
const MAP_SIZES: [&str; 2] = ["", "affinity-clients=131072"];
/// Number of agents in a row with the same sizes: the second one keeps the maps of the first.
const AGENTS_WITH_SAME_SIZES: usize = 2;

/// A bpf filesystem for the agent's pins. It outlives the agent, as that of a node does. Unmounted on drop.
#[derive(Debug)]
struct PinsMount(PathBuf);

/// Figures of all rounds, one value for each.
#[derive(Debug, Default)]
struct UpgradeFigures {
    quiet_p99_us: Vec<f64>,
    p99_us: Vec<f64>,
    /// Ratio of the two within the round.
    p99_ratio: Vec<f64>,
    upgrades: Vec<f64>,
    connects: Vec<f64>,
    /// Failed connects, also those of the quiet time.
    failed: Vec<f64>,
    /// Changes of the switched Service's backend that no flip explains.
    unexplained: Vec<f64>,
}

/// Upgrades in the time of one round.
#[derive(Clone, Copy, Debug, Default)]
struct UpgradeCounts {
    upgrades: usize,
    unexplained: usize,
}

/// Measures Rouse alone: only its agent promises connects that no upgrade disturbs.
pub(super) fn measure(context: &ClusterIpBenchContext, rounds: u32) -> Result<Vec<BenchRow>> {
    // Dropped after the proxy, whose pins are there.
    let _pins = PinsMount::create(&pins_folder(context, ProxySubject::Rouse))?;
    let (mut proxy, start) = RunningProxy::start(context, ProxySubject::Rouse, SET)?;
    super::ensure_complete(context, ProxySubject::Rouse, &start)?;
    let (mut figures, mut agents) = (UpgradeFigures::default(), 1);
    for _ in 0..rounds {
        let quiet = SteadyClient::start(&proxy, CONNECT_PERIOD, SPAN)?.wait()?;
        let client = SteadyClient::start(&proxy, CONNECT_PERIOD, SPAN)?;
        let counts = upgrade_repeatedly(context, &mut proxy, &mut agents)?;
        figures.add(quiet, client.wait()?, counts);
    }
    Ok(figures.rows())
}

/// Upgrades the agent for as long as the client connects, so that no quiet time is part of its figures.
fn upgrade_repeatedly(
    context: &ClusterIpBenchContext,
    proxy: &mut RunningProxy,
    agents: &mut usize,
) -> Result<UpgradeCounts> {
    let (started, mut counts) = (Instant::now(), UpgradeCounts::default());
    let watch = BackendWatch::start(proxy, WATCH_PERIOD_US)?;
    let mut present = watch.first_backend()?;
    while started.elapsed() < SPAN {
        proxy.restart(context, &[("ROUSE_MAP_SIZES", map_sizes(*agents))])?;
        *agents += 1;
        // The upgrade is over when the new agent has brought a change into force.
        let (expected, address) = other_backend(present)?;
        let event = proxy.server.set(switched_slice(address))?;
        let (_change, unexplained) = watch.wait_for(expected, event.begun_us)?;
        present = expected;
        counts.upgrades += 1;
        counts.unexplained += unexplained;
    }
    Ok(counts)
}

/// Returns the sizes of maps of the agent after so many others.
fn map_sizes(agents_before: usize) -> &'static str {
    MAP_SIZES[agents_before / AGENTS_WITH_SAME_SIZES % MAP_SIZES.len()]
}

impl PinsMount {
    fn create(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        // A killed bench may have left its own. Usually there is none, which is an error.
        let _none = umount2(folder, MntFlags::MNT_DETACH);
        let data: Option<&str> = None;
        mount(Some("bpf"), folder, Some("bpf"), MsFlags::empty(), data)
            .with_context(|| format!("cannot mount a bpf filesystem on {}", folder.display()))?;
        Ok(Self(folder.to_owned()))
    }
}

impl Drop for PinsMount {
    fn drop(&mut self) {
        if let Err(error) = umount2(self.0.as_path(), MntFlags::MNT_DETACH) {
            eprintln!("{} stays mounted: {error}", self.0.display());
        }
    }
}

impl UpgradeFigures {
    fn add(&mut self, quiet: SteadyConnects, upgraded: SteadyConnects, counts: UpgradeCounts) {
        self.quiet_p99_us.push(quiet.p99_us);
        self.p99_us.push(upgraded.p99_us);
        self.p99_ratio.push(upgraded.p99_us / quiet.p99_us);
        self.upgrades.push(counts.upgrades as f64);
        self.connects.push(upgraded.sent as f64);
        self.failed.push((quiet.failed + upgraded.failed) as f64);
        self.unexplained.push(counts.unexplained as f64);
    }

    fn rows(&self) -> Vec<BenchRow> {
        let none = BenchGoal::None;
        // Each failure counts: a median would hide one that is in one round only.
        let no_failure = BenchGoal::P99AtMost(0.0);
        let row = |suffix: &str, unit, values: &[f64], goal| {
            let subject = ProxySubject::Rouse.name();
            case_row(&format!("{CASE}{suffix}"), subject, unit, values, goal)
        };
        vec![
            row("_quiet_p99", "us", &self.quiet_p99_us, none),
            row("_p99", "us", &self.p99_us, none),
            row("_p99_ratio", "× quiet", &self.p99_ratio, BenchGoal::AtMost(1.1)),
            row("_count", "upgrades", &self.upgrades, none),
            row("_connects", "connects", &self.connects, none),
            row("_failed", "connects", &self.failed, no_failure),
            row("_unexplained", "changes", &self.unexplained, no_failure),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connects(failed: usize, p99_us: f64) -> SteadyConnects {
        SteadyConnects { sent: 100_000, failed, p50_us: 30.0, p99_us }
    }

    #[test]
    fn one_failed_connect_in_one_of_three_rounds_misses_the_goal() {
        let mut figures = UpgradeFigures::default();
        let counts = UpgradeCounts { upgrades: 8, unexplained: 0 };
        for failed in [0, 1, 0] {
            figures.add(connects(0, 80.0), connects(failed, 84.0), counts);
        }
        let rows = figures.rows();
        let judged = rows.iter().filter_map(|row| Some((row.case.as_str(), row.reached?)));
        let expected =
            [("upgrade_p99_ratio", true), ("upgrade_failed", false), ("upgrade_unexplained", true)];
        assert_eq!(judged.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn agents_keep_the_maps_before_them_and_replace_them_in_turn() {
        let sizes: Vec<&str> = (0..6).map(map_sizes).collect();
        let [first, second] = MAP_SIZES;
        assert_eq!(sizes, [first, first, second, second, first, first]);
    }
}
