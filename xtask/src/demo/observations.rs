//! Pure: observations of a run, and the figures computed from them.

use std::fmt;

use serde::Serialize;

use crate::{cold_start::NodeColdStart, load::LoadRecord};

/// Minimum share of the load's requests on the direct path.
const MIN_DIRECT_SHARE: f64 = 0.95;
/// Minimum number of pods to which the load must scale out.
const MIN_PODS: usize = 3;
/// Width of a cold start's columns in the table, in characters.
const COLD_START_WIDTH: usize = 54;

/// Purpose of a request in the demonstration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestPurpose {
    /// Wake-up of the sleeping service.
    Wake,
    /// Part of the load, while pods are ready.
    Load,
    /// Wake-up of the service whose pod is frozen.
    StandbyWake,
}

/// Number of pods at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PodSample {
    pub(super) at_us: u64,
    pub(super) pods: usize,
    /// Number of ready pods, frozen ones included.
    pub(super) ready: usize,
    /// Number of frozen pods.
    pub(super) frozen: usize,
}

/// All requests and samples of a run.
#[derive(Debug, Default)]
pub(super) struct DemoRun {
    pub(super) records: Vec<(RequestPurpose, LoadRecord)>,
    pub(super) samples: Vec<PodSample>,
    /// Number of times that the service scaled to zero pods.
    pub(super) times_asleep: u32,
}

impl DemoRun {
    /// Number of pods in the last sample.
    pub(super) fn pods_now(&self) -> usize {
        self.samples.last().map_or(0, |sample| sample.pods)
    }

    /// Returns true if the last sample has one pod, and it is frozen.
    pub(super) fn is_on_standby(&self) -> bool {
        self.samples.last().is_some_and(|sample| (sample.pods, sample.frozen) == (1, 1))
    }

    /// One line for the live display: pods, requests in flight, path, rate over the last second.
    pub(super) fn live_line(&self, now_us: u64) -> String {
        let since_us = now_us.saturating_sub(1_000_000);
        // Records are only roughly in order of their end, so the search starts half a second earlier.
        let recent: Vec<&LoadRecord> = (self.records.iter().rev())
            .map(|(_, record)| record)
            .take_while(|record| record.at_us + record.took_us + 500_000 > since_us)
            .filter(|record| record.at_us + record.took_us > since_us)
            .collect();
        let pods = self.pods_now();
        if recent.is_empty() {
            return format!("pods {pods} {}", "█".repeat(pods));
        }
        // Little's law: requests in flight = rate × time in flight.
        let busy: u64 = recent.iter().map(|record| record.took_us).sum();
        let direct = recent.iter().filter(|record| record.direct).count();
        format!(
            "pods {pods} {:<8}  in flight {:>3}  {:>4} req/s  direct {:>3.0} %",
            "█".repeat(pods),
            busy / 1_000_000,
            recent.len(),
            100.0 * direct as f64 / recent.len() as f64
        )
    }
}

/// Distribution of one quantity over several cold starts, in ms.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct LatencyDistribution {
    p50: f64,
    p99: f64,
    n: usize,
}

impl LatencyDistribution {
    fn from_values(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        // Nearest rank, so that each figure is a measured value.
        let value_at = |share: f64| {
            let rank = (share * values.len() as f64).ceil() as usize;
            values.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
        };
        Self { p50: value_at(0.5), p99: value_at(0.99), n: values.len() }
    }
}

/// Figures of a run, as the table and the JSON file show them.
#[derive(Clone, Debug, Serialize)]
pub(super) struct DemoFigures {
    sent: usize,
    answered: usize,
    lost: usize,
    cold_start_ms: LatencyDistribution,
    listen_to_first_byte_ms: LatencyDistribution,
    /// Time from the request to its first byte while the service has a frozen pod.
    standby_wake_ms: LatencyDistribution,
    direct_share: f64,
    max_pods: usize,
    returned_to_zero: bool,
    cold_starts: Vec<NodeColdStart>,
    /// Number of pods over time: ms since the first request, pods.
    pods: Vec<(u64, usize)>,
    /// Times behind [`standby_wake_ms`](Self::standby_wake_ms), in the order of the requests.
    #[serde(skip)]
    standby_wakes: Vec<f64>,
    /// Number of these wakes that an activator passed on.
    #[serde(skip)]
    indirect_standby_wakes: usize,
    #[serde(skip)]
    first_loss: Option<String>,
}

impl DemoFigures {
    /// Computes the figures of a run; `log` is the node's log, with the times of scale decisions.
    pub(super) fn from_run(run: &DemoRun, log: &str) -> Self {
        let sent = run.records.len();
        let answered = run.records.iter().filter(|(_, record)| record.is_answered()).count();
        let cold_starts: Vec<NodeColdStart> = (run.records.iter())
            .filter(|(purpose, record)| *purpose == RequestPurpose::Wake && record.is_answered())
            .map(|(_, record)| NodeColdStart::from_record(record, log))
            .collect();
        let load: Vec<&LoadRecord> = (run.records.iter())
            .filter(|(purpose, _)| *purpose == RequestPurpose::Load)
            .map(|(_, record)| record)
            .collect();
        let standby_wakes: Vec<&LoadRecord> = (run.records.iter())
            .filter(|(purpose, _)| *purpose == RequestPurpose::StandbyWake)
            .map(|(_, record)| record)
            .filter(|record| record.is_answered())
            .collect();
        let indirect_standby_wakes = standby_wakes.iter().filter(|it| !it.direct).count();
        let standby_wakes: Vec<f64> =
            standby_wakes.iter().map(|record| record.first_byte_us as f64 / 1e3).collect();
        // The requests that wake the service cannot be direct, so they do not count.
        let direct = load.iter().filter(|record| record.direct).count();
        let mut lost = run.records.iter().map(|(_, record)| record).filter(|it| !it.is_answered());
        let first_loss =
            lost.next().map(|record| format!("status {} {}", record.status, record.error));
        Self {
            sent,
            answered,
            lost: sent - answered,
            cold_start_ms: LatencyDistribution::from_values(
                cold_starts.iter().map(|cold| cold.total).collect(),
            ),
            listen_to_first_byte_ms: LatencyDistribution::from_values(
                cold_starts.iter().map(|cold| cold.listen_to_first_byte).collect(),
            ),
            standby_wake_ms: LatencyDistribution::from_values(standby_wakes.clone()),
            direct_share: direct as f64 / load.len().max(1) as f64,
            max_pods: run.samples.iter().map(|sample| sample.ready).max().unwrap_or(0),
            returned_to_zero: run.times_asleep >= 2,
            cold_starts,
            pods: pods_over_time(run),
            standby_wakes,
            indirect_standby_wakes,
            first_loss,
        }
    }

    /// Descriptions of the goals that the run did not reach.
    pub(super) fn failures(&self) -> Vec<String> {
        let mut failures = Vec::new();
        if self.lost > 0 || self.sent == 0 {
            let first = self.first_loss.as_deref().unwrap_or("none was sent");
            failures.push(format!("{} of {} requests lost (first: {first})", self.lost, self.sent));
        }
        if self.direct_share < MIN_DIRECT_SHARE {
            let share = 100.0 * self.direct_share;
            failures.push(format!(
                "only {share:.1} % went direct, not {:.0} %",
                100.0 * MIN_DIRECT_SHARE
            ));
        }
        if self.max_pods < MIN_PODS {
            failures.push(format!("only {} pods ran, not {MIN_PODS}", self.max_pods));
        }
        // The run scales the service to zero twice, after the load and after the second wake-up.
        if !self.returned_to_zero {
            failures.push("the service did not return to zero each time".into());
        }
        if self.standby_wakes.is_empty() {
            failures.push("no request found the service with a frozen pod".into());
        }
        if self.indirect_standby_wakes > 0 {
            let (indirect, all) = (self.indirect_standby_wakes, self.standby_wakes.len());
            failures.push(format!(
                "{indirect} of {all} wakes from standby did not go straight to the frozen pod"
            ));
        }
        failures
    }
}

/// Formats the steps of a cold start as columns of the table, [`COLD_START_WIDTH`] characters wide.
fn format_cold_start(cold: &NodeColdStart) -> String {
    let text =
        |step: Option<f64>| step.map_or_else(|| "      ?".to_owned(), |ms| format!("{ms:7.2}"));
    let (decide, start) = (text(cold.decide), text(cold.start));
    let (listen, total) = (cold.listen_to_first_byte, cold.total);
    format!("{decide} ms {start} ms          {listen:9.2} ms {total:7.2} ms")
}

/// Number of pods at each change: ms since the first request, pods.
fn pods_over_time(run: &DemoRun) -> Vec<(u64, usize)> {
    let start = run.records.first().map_or(0, |(_, record)| record.at_us);
    let mut pods: Vec<(u64, usize)> = (run.samples.iter())
        .map(|sample| (sample.at_us.saturating_sub(start) / 1000, sample.ready))
        .collect();
    pods.dedup_by_key(|(_, pods)| *pods);
    pods
}

impl fmt::Display for DemoFigures {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            out,
            "cold start        decide      start   listen → first byte      total   from standby"
        )?;
        for index in 0..self.cold_starts.len().max(self.standby_wakes.len()) {
            let cold_start = self.cold_starts.get(index).map(format_cold_start);
            let from_standby = self.standby_wakes.get(index).map(|ms| format!("   {ms:9.2} ms"));
            writeln!(
                out,
                "{:>10} {:COLD_START_WIDTH$}{}",
                index + 1,
                cold_start.unwrap_or_default(),
                from_standby.unwrap_or_default()
            )?;
        }
        writeln!(out, "\nrequests sent     {:>7}", self.sent)?;
        writeln!(out, "         answered {:>7}", self.answered)?;
        writeln!(out, "         lost     {:>7}", self.lost)?;
        writeln!(out, "went direct       {:>7.2} %", 100.0 * self.direct_share)?;
        writeln!(out, "most pods         {:>7}", self.max_pods)?;
        writeln!(out, "back to zero      {:>7}", if self.returned_to_zero { "yes" } else { "no" })?;
        let pods: Vec<String> = (self.pods.iter())
            .map(|(ms, pods)| format!("{pods} at {:.1} s", *ms as f64 / 1e3))
            .collect();
        write!(out, "pods over time    {}", pods.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(at_us: u64, direct: bool) -> LoadRecord {
        LoadRecord {
            at_us,
            took_us: 2_000,
            first_byte_us: 1_900,
            status: 200,
            fresh: true,
            pod: "hello-00001-x".into(),
            direct,
            listening_us: at_us + 1_500,
            error: String::new(),
        }
    }

    fn run() -> DemoRun {
        let start = crate::cold_start::parse_unix_us("2026-11-21T10:00:00.000000Z").unwrap();
        let mut run = DemoRun { times_asleep: 2, ..DemoRun::default() };
        run.records.push((RequestPurpose::Wake, record(start, false)));
        for index in 1..=100 {
            run.records.push((RequestPurpose::Load, record(start + index * 10_000, index > 4)));
        }
        let sample = |at_us, pods| PodSample { at_us, pods, ready: pods, frozen: 0 };
        run.samples = vec![sample(start, 0), sample(start + 2_000, 3), sample(start + 9_000, 3)];
        let woken = LoadRecord { first_byte_us: 620, ..record(start + 9_500_000, true) };
        run.records.push((RequestPurpose::StandbyWake, woken));
        run
    }

    const LOG: &str = "2026-11-21T09:59:59.000000Z  INFO autoscaler: scale decided revision=d/hello-00001\n\
                       2026-11-21T10:00:00.000400Z  INFO autoscaler: scale decided revision=d/hello-00001 wanted=1\n";

    #[test]
    fn a_good_run_has_no_failure_and_its_cold_start_is_split() {
        let figures = DemoFigures::from_run(&run(), LOG);
        assert_eq!(figures.failures(), [""; 0]);
        let split = NodeColdStart {
            decide: Some(0.4),
            start: Some(1.1),
            listen_to_first_byte: 0.4,
            total: 1.9,
        };
        assert_eq!(figures.cold_starts, [split]);
        assert_eq!(figures.pods, [(0, 0), (2, 3)]);
        let standby_wake = LatencyDistribution { p50: 0.62, p99: 0.62, n: 1 };
        assert_eq!(figures.standby_wake_ms, standby_wake);
        let json = serde_json::to_value(&figures).unwrap();
        assert_eq!(json["standby_wake_ms"], serde_json::json!({"p50": 0.62, "p99": 0.62, "n": 1}));
        let row =
            "         1    0.40 ms    1.10 ms               0.40 ms    1.90 ms        0.62 ms\n";
        assert!(figures.to_string().contains(row), "{figures}");
    }

    #[test]
    fn a_wake_from_standby_without_a_cold_start_beside_it_keeps_its_column() {
        let mut run = run();
        let again = run.records.last().unwrap().clone();
        run.records.push(again);
        let shown = DemoFigures::from_run(&run, LOG).to_string();
        let rows: Vec<&str> = shown.lines().filter(|line| line.ends_with("  0.62 ms")).collect();
        let column = |row: &&str| row.find("0.62 ms");
        assert_eq!(rows.len(), 2, "{shown}");
        assert_eq!(column(&rows[0]), column(&rows[1]), "{shown}");
    }

    #[test]
    fn one_pod_that_is_frozen_is_the_standby() {
        let mut run = DemoRun::default();
        assert!(!run.is_on_standby(), "no sample");
        for (pods, frozen, is_on_standby) in [(1, 1, true), (1, 0, false), (2, 1, false)] {
            run.samples.push(PodSample { at_us: 0, pods, ready: pods, frozen });
            assert_eq!(run.is_on_standby(), is_on_standby, "{frozen} of {pods}");
        }
    }

    #[test]
    fn a_cold_start_without_a_logged_decision_is_not_split_before_listen() {
        let figures = DemoFigures::from_run(&run(), "");
        let split =
            NodeColdStart { decide: None, start: None, listen_to_first_byte: 0.4, total: 1.9 };
        assert_eq!(figures.cold_starts, [split]);
        let shown = figures.to_string();
        assert!(
            shown.contains("         1       ? ms       ? ms               0.40 ms"),
            "{shown}"
        );
    }

    #[test]
    fn each_missed_goal_is_named() {
        let mut run = run();
        run.times_asleep = 1;
        run.samples.truncate(1);
        for (_, record) in run.records.iter_mut().take(20) {
            record.direct = false;
        }
        run.records[5].1.status = 503;
        run.records.last_mut().unwrap().1.direct = false;
        let failures = DemoFigures::from_run(&run, "").failures();
        assert_eq!(
            failures,
            [
                "1 of 102 requests lost (first: status 503 )",
                "only 81.0 % went direct, not 95 %",
                "only 0 pods ran, not 3",
                "the service did not return to zero each time",
                "1 of 1 wakes from standby did not go straight to the frozen pod",
            ]
        );
        run.records.pop();
        let failures = DemoFigures::from_run(&run, "").failures();
        assert_eq!(
            failures.last().map(String::as_str),
            Some("no request found the service with a frozen pod")
        );
    }
}
