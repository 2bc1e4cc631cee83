//! Shell: processor time of a proxy while endpoints change, and connects that fail meanwhile.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::Result;

use super::{
    ClusterIpBenchContext,
    objects::{ServiceProtocol, ServiceSet},
    proxy::{ProxySubject, RunningProxy},
    steady_client::SteadyClient,
};
use crate::{
    bench::report::{BenchGoal, BenchRow, case_row},
    sh,
};

/// Services and endpoints of the case.
const SET: ServiceSet = ServiceSet {
    services: 1_000,
    endpoints_each: 10,
    switches: false,
    protocol: ServiceProtocol::Tcp,
};
const CASE: &str = "churn_1000";
/// Time in which endpoints change.
const CHURN_TIME: Duration = Duration::from_secs(30);
/// Time from one change to the next: a thousand changes a second.
const CHANGE_PERIOD: Duration = Duration::from_millis(1);
/// Time from one connect to the next.
const CONNECT_PERIOD: Duration = Duration::from_millis(1);

/// Figures of one subject, one value for each round.
#[derive(Debug, Default)]
struct ChurnFigures {
    /// Processor time of the proxy, in percent of one core.
    cpu_percent: Vec<f64>,
    changes_per_s: Vec<f64>,
    connects: Vec<f64>,
    failed: Vec<f64>,
}

/// Measures all subjects in turn. Only the measured one runs.
pub(super) fn measure(context: &ClusterIpBenchContext, rounds: u32) -> Result<Vec<BenchRow>> {
    let mut proxies = super::start_all(context, SET, &ProxySubject::ALL)?;
    let mut figures: BTreeMap<ProxySubject, ChurnFigures> = BTreeMap::new();
    for round in 0..rounds {
        // Each round begins with another proxy, so that none profits from its place.
        for offset in 0..proxies.len() {
            let index = (round as usize + offset) % proxies.len();
            let proxy = &mut proxies[index];
            let figures = figures.entry(proxy.subject).or_default();
            proxy.while_running(|proxy| measure_round(proxy, round, figures))?;
        }
    }
    Ok(figures.iter().flat_map(|(subject, figures)| figures.rows(*subject)).collect())
}

/// Changes endpoints for [`CHURN_TIME`] while a client connects.
fn measure_round(proxy: &RunningProxy, round: u32, figures: &mut ChurnFigures) -> Result<()> {
    let client = SteadyClient::start(proxy, CONNECT_PERIOD, CHURN_TIME)?;
    let (cpu_before, started) = (proxy.cpu_us()?, Instant::now());
    let changes = changes_each_round();
    for change in 0..changes {
        // Absolute times, so that a slow write delays the next changes and does not make them fewer.
        if let Some(wait) = (CHANGE_PERIOD * change).checked_sub(started.elapsed()) {
            sh::sleep(wait);
        }
        // Rounds continue where the last one ended, so that each write changes endpoints.
        proxy.server.set(SET.changed_slice(round * changes + change))?;
    }
    let changing_s = started.elapsed().as_secs_f64();
    let connects = client.wait()?;
    let cpu_us = proxy.cpu_us()? - cpu_before;
    let elapsed_us = started.elapsed().as_secs_f64() * 1e6;
    figures.cpu_percent.push(100.0 * cpu_us / elapsed_us);
    figures.changes_per_s.push(f64::from(changes) / changing_s);
    figures.connects.push(connects.sent as f64);
    figures.failed.push(connects.failed as f64);
    Ok(())
}

fn changes_each_round() -> u32 {
    let changes = CHURN_TIME.as_micros() / CHANGE_PERIOD.as_micros();
    u32::try_from(changes).unwrap_or(u32::MAX)
}

impl ChurnFigures {
    fn rows(&self, subject: ProxySubject) -> Vec<BenchRow> {
        let goal = |goal| if subject == ProxySubject::Rouse { goal } else { BenchGoal::None };
        let none = BenchGoal::None;
        let row = |suffix: &str, unit, values: &[f64], goal| {
            case_row(&format!("{CASE}{suffix}"), subject.name(), unit, values, goal)
        };
        vec![
            row("", "percent", &self.cpu_percent, goal(BenchGoal::AtMost(5.0))),
            row("_changes", "per_s", &self.changes_per_s, none),
            row("_connects", "connects", &self.connects, none),
            // A median would hide a failure that is in one round only.
            row("_failed", "connects", &self.failed, goal(BenchGoal::P99AtMost(0.0))),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failed_connect_misses_the_goal_of_rouse() {
        let figures = ChurnFigures {
            cpu_percent: vec![4.0],
            changes_per_s: vec![1_000.0],
            connects: vec![30_000.0],
            failed: vec![1.0],
        };
        let reached = |subject| -> Vec<Option<bool>> {
            figures.rows(subject).iter().map(|row| row.reached).collect()
        };
        assert_eq!(reached(ProxySubject::Rouse), [Some(true), None, None, Some(false)]);
        assert_eq!(reached(ProxySubject::Iptables), [None; 4]);
    }

    #[test]
    fn a_thousand_endpoints_change_each_second() {
        assert_eq!(changes_each_round(), 30_000);
    }
}
