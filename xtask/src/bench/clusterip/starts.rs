//! Shell: time from the start of a proxy until it serves all Services, and the memory that it then has.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

use anyhow::{Context as _, Result};

use super::{
    ClusterIpBenchContext,
    node::BenchNetns,
    objects::{ServiceProtocol, ServiceSet},
    proxy::{ProxyStart, ProxySubject, RunningProxy},
};
use crate::{
    bench::{
        process_memory::{map_bytes, peak_rss_mib, pss_mib},
        report::{BenchGoal, BenchRow, case_row},
    },
    sh,
};

/// Services and endpoints of the case: 100,000 endpoints in all.
const SET: ServiceSet = ServiceSet {
    services: 10_000,
    endpoints_each: 10,
    switches: false,
    protocol: ServiceProtocol::Tcp,
};
const CASE: &str = "start_10000";
/// Default address of the agent's admin pages.
const ADMIN_ADDRESS: &str = "127.0.0.1:7104";
const REFUSED_METRIC: &str = "rouse_agent_cluster_services_refused";
/// Time after the last answer until memory is read.
const SETTLE_TIME: Duration = Duration::from_secs(2);

/// Figures of one subject, one value for each start.
#[derive(Debug, Default)]
struct StartFigures {
    /// Time to complete rules or maps, in seconds; only of starts after which all Services answer.
    seconds: Vec<f64>,
    /// Time of the last answer of the other starts, in seconds.
    partial_seconds: Vec<f64>,
    unanswered: Vec<f64>,
    /// Services that the agent has left to kube-proxy because they do not fit; empty for kube-proxy.
    refused: Vec<f64>,
    memory_mib: Vec<f64>,
    peak_mib: Vec<f64>,
    /// Memory of the eBPF maps; empty for kube-proxy.
    maps_mib: Vec<f64>,
}

/// Starts each subject once in each round, on a new node.
pub(super) fn measure(context: &ClusterIpBenchContext, rounds: u32) -> Result<Vec<BenchRow>> {
    let mut figures: BTreeMap<ProxySubject, StartFigures> = BTreeMap::new();
    let subjects = ProxySubject::MODES;
    for round in 0..rounds as usize {
        for offset in 0..subjects.len() {
            let subject = subjects[(round + offset) % subjects.len()];
            let (proxy, start) = RunningProxy::start(context, subject, SET)?;
            sh::sleep(SETTLE_TIME);
            figures.entry(subject).or_default().add(&proxy, start)?;
        }
    }
    Ok(figures.iter().flat_map(|(subject, figures)| figures.rows(*subject)).collect())
}

impl StartFigures {
    fn add(&mut self, proxy: &RunningProxy, start: ProxyStart) -> Result<()> {
        self.add_start(start);
        self.memory_mib.push(pss_mib(proxy.pid())?);
        self.peak_mib.push(peak_rss_mib(proxy.pid()));
        if proxy.subject == ProxySubject::Rouse {
            let bytes: f64 = map_bytes(proxy.pid())?.values().sum();
            self.maps_mib.push(bytes / 1024.0 / 1024.0);
            self.refused.push(refused_services(proxy)?);
        }
        Ok(())
    }

    fn add_start(&mut self, start: ProxyStart) {
        // A time until some Services are served is not a time to complete maps.
        let times = match start.answers.unanswered {
            0 => &mut self.seconds,
            _ => &mut self.partial_seconds,
        };
        times.push(start.seconds);
        self.unanswered.push(start.answers.unanswered as f64);
    }

    fn rows(&self, subject: ProxySubject) -> Vec<BenchRow> {
        let goal = |goal| if subject == ProxySubject::Rouse { goal } else { BenchGoal::None };
        let none = BenchGoal::None;
        let figures = [
            ("", "s", &self.seconds, goal(BenchGoal::AtMost(1.0))),
            ("_incomplete", "s", &self.partial_seconds, none),
            ("_unanswered", "services", &self.unanswered, goal(BenchGoal::P99AtMost(0.0))),
            ("_refused", "services", &self.refused, none),
            ("_memory", "MiB", &self.memory_mib, goal(BenchGoal::AtMost(80.0))),
            ("_memory_peak", "MiB", &self.peak_mib, none),
            ("_maps", "MiB", &self.maps_mib, none),
        ];
        // Some figures exist for one proxy only.
        let measured = figures.into_iter().filter(|(_, _, values, _)| !values.is_empty());
        let row = |(suffix, unit, values, goal): (&str, &str, &Vec<f64>, BenchGoal)| {
            case_row(&format!("{CASE}{suffix}"), subject.name(), unit, values, goal)
        };
        measured.map(row).collect()
    }
}

/// Number of Services that do not fit, as the agent's metrics have it.
fn refused_services(proxy: &RunningProxy) -> Result<f64> {
    let page = proxy.node.run_inside(BenchNetns::Node, || {
        let mut stream = TcpStream::connect(ADMIN_ADDRESS).context("the agent has no metrics")?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: agent\r\nconnection: close\r\n\r\n")?;
        let mut page = String::new();
        stream.read_to_string(&mut page)?;
        Ok(page)
    })?;
    find_metric(&page, REFUSED_METRIC).with_context(|| format!("no {REFUSED_METRIC}: {page}"))
}

/// Returns the value of a metric without labels.
fn find_metric(page: &str, name: &str) -> Option<f64> {
    let mut values = page.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    values.find_map(|value| value.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::service_connects::ServiceAnswers;

    #[test]
    fn an_incomplete_start_has_no_time_to_complete_maps() {
        let start = |unanswered| ProxyStart {
            seconds: 0.5,
            answers: ServiceAnswers { last_us: 1, answered: 10_000 - unanswered, unanswered },
        };
        let mut figures = StartFigures::default();
        figures.add_start(start(0));
        figures.add_start(start(7_000));
        figures.add_start(start(7_000));
        let rows = figures.rows(ProxySubject::Rouse);
        let judged: Vec<_> =
            rows.iter().map(|row| (row.case.as_str(), row.n, row.reached)).collect();
        assert_eq!(
            judged,
            [
                ("start_10000", 1, Some(true)),
                ("start_10000_incomplete", 2, None),
                ("start_10000_unanswered", 3, Some(false)),
            ]
        );
    }

    #[test]
    fn a_metric_that_is_missing_has_no_value() {
        let page = "# HELP a_b text\na_b_more 3\na_b 7\n";
        assert_eq!(find_metric(page, "a_b"), Some(7.0));
        assert_eq!(find_metric(page, "a"), None);
    }
}
