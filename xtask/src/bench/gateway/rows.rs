//! Pure: rows of the gateway's figures, with the goals of each case.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use super::super::{
    report::{BenchGoal, BenchRow, case_row},
    stats::RoundValues,
};

/// Names of all cases, in the order in which they are measured and shown.
pub(in crate::bench) const CASES: [&str; 14] = [
    "h1_c1",
    "h1_c64",
    "h1_c512",
    "h2c_c64",
    "tls_h1_c64",
    "tls_h2_c64",
    "grpc_c64",
    "bulk",
    "p99_c64",
    "memory_idle_10k",
    "memory_waiting_10k",
    "release_10k",
    "route_update_10k",
    "slow_10k",
];
/// Names of all subjects.
const SUBJECTS: [&str; 7] = ["direct", "rouse", "old", "nginx", "haproxy", "envoy", "go"];
/// Proxies that others have written.
const PEERS: [&str; 4] = ["nginx", "haproxy", "envoy", "go"];
/// Least rate of small responses over HTTP/1.1 without TLS.
const H1_GOAL: BenchGoal = BenchGoal::AtLeast(60_000.0);

/// Output of `tests/bench/gateway`, as JSON.
#[derive(Debug, Deserialize)]
pub(super) struct GatewayBenchOutput {
    /// Values of each case by subject and figure, one for each round.
    cases: BTreeMap<String, CaseFigures>,
    /// Reasons for which cases have no figures of Rouse, or not those of all rounds.
    #[serde(default)]
    failures: BTreeMap<String, String>,
}

type CaseFigures = BTreeMap<String, BTreeMap<String, Vec<f64>>>;

impl GatewayBenchOutput {
    /// Makes the rows of a case. A case without figures of Rouse is an error.
    pub(super) fn rows(&self, case: &str) -> Result<Vec<BenchRow>> {
        if let Some(reason) = self.failures.get(case) {
            bail!("{reason}");
        }
        let figures = self.cases.get(case).filter(|it| it.contains_key("rouse"));
        let figures = figures.with_context(|| format!("the bench has no figures of {case}"))?;
        Ok(case_figures_rows(case, figures))
    }
}

/// Rows of one case.
fn case_figures_rows(case: &str, figures: &CaseFigures) -> Vec<BenchRow> {
    let values = |figure: &str| figure_values(figures, figure);
    let own = |figure: &str, unit, goal| subject_rows(case, unit, &values(figure), goal);
    // A case may have several figures, each with its own unit; the suffix keeps their rows apart.
    let named = |suffix: &str, figure: &str, unit, goal| {
        subject_rows(&format!("{case}{suffix}"), unit, &values(figure), goal)
    };
    let none = BenchGoal::None;
    let parts = match case {
        "p99_c64" => vec![
            own("p99_us", "us", none),
            lowest_ratio_row(case, &values("p99_us")),
            named("_rate", "req_s", "req/s", none),
        ],
        "memory_idle_10k" => vec![own("kib", "KiB", BenchGoal::AtMost(6.0))],
        "memory_waiting_10k" => vec![own("kib", "KiB", BenchGoal::AtMost(12.0))],
        "release_10k" => vec![
            own("ms", "ms", BenchGoal::AtMost(250.0)),
            named("_most", "most_share", "× even share", BenchGoal::P99AtMost(2.0)),
            // Clients and pods share a core: these rows show if that is the limit.
            named("_client_core", "client_core_percent", "percent", none),
            named("_proxy_core", "proxy_core_percent", "percent", none),
        ],
        "route_update_10k" => vec![
            own("visible_ms", "ms", BenchGoal::AtMost(5.0)),
            named("_max", "max_ratio", "× quiet p99", BenchGoal::AtMost(2.0)),
            // The highest latency of the quiet run itself, as a control.
            named("_quiet_max", "quiet_max_ratio", "× quiet p99", none),
        ],
        "slow_10k" => vec![
            own("ratio", "× quiet p99", BenchGoal::AtMost(2.0)),
            named("_p99", "p99_us", "us", none),
            named("_quiet_p99", "quiet_p99_us", "us", none),
        ],
        _ => rate_rows(case, figures),
    };
    parts.into_iter().flatten().collect()
}

/// Rows of a case that measures the highest rate.
fn rate_rows(case: &str, figures: &CaseFigures) -> Vec<Vec<BenchRow>> {
    let rates = figure_values(figures, "req_s_core");
    let goal = if case.starts_with("h1_") { H1_GOAL } else { BenchGoal::None };
    let ratio = |suffix: &str, unit, peers: &[&str], least| {
        // Ratios are taken within one round, so that a slow phase of the machine meets both sides.
        let ratios = peer_ratios(&rates, peers, f64::max);
        vec![case_row(
            &format!("{case}{suffix}"),
            "rouse",
            unit,
            &ratios,
            BenchGoal::AtLeast(least),
        )]
    };
    let mut parts = vec![subject_rows(case, "req/s/core", &rates, goal)];
    if case == "bulk" {
        parts.push(ratio("_to_nginx", "× nginx", &["nginx"], 0.95));
    } else {
        parts.push(ratio("_to_envoy", "× envoy", &["envoy"], 1.0));
        let best = "× best of nginx, haproxy";
        parts.push(ratio("_to_best", best, &["nginx", "haproxy"], 0.85));
    }
    let seen = figure_values(figures, "req_s");
    parts.push(subject_rows(&format!("{case}_seen"), "req/s", &seen, BenchGoal::None));
    // A client at the limit of its core measures itself: this row shows it.
    let client_core: Vec<f64> =
        figure_values(figures, "client_core_percent").into_values().flatten().collect();
    let client_case = format!("{case}_client_core");
    parts.push(vec![case_row(&client_case, "all", "percent", &client_core, BenchGoal::None)]);
    parts
}

/// Row of Rouse's ratio to the lowest value of all peers in each round.
fn lowest_ratio_row(case: &str, values: &RoundValues) -> Vec<BenchRow> {
    let ratios = peer_ratios(values, &PEERS, f64::min);
    let goal = BenchGoal::AtMost(1.0);
    vec![case_row(&format!("{case}_to_lowest"), "rouse", "× lowest", &ratios, goal)]
}

/// Values of a figure by subject. Subjects without it are left out.
fn figure_values(figures: &CaseFigures, figure: &str) -> RoundValues {
    let known = SUBJECTS.into_iter();
    known.filter_map(|it| Some((it, figures.get(it)?.get(figure)?.clone()))).collect()
}

/// One row for each subject. The goal is for Rouse alone.
fn subject_rows(case: &str, unit: &str, values: &RoundValues, goal: BenchGoal) -> Vec<BenchRow> {
    let goal_of = |subject: &str| if subject == "rouse" { goal } else { BenchGoal::None };
    values
        .iter()
        .map(|(subject, values)| case_row(case, subject, unit, values, goal_of(subject)))
        .collect()
}

/// Ratio of Rouse's value to that of the peers in each round; `choose` picks one of two peers' values. A round in which
/// a peer has no value gives NaN, with which no goal is reached.
fn peer_ratios(values: &RoundValues, peers: &[&str], choose: fn(f64, f64) -> f64) -> Vec<f64> {
    let own = values.get("rouse").map(Vec::as_slice).unwrap_or_default();
    let ratio = |(round, own): (usize, &f64)| {
        let of_peers = peers.iter().map(|peer| values.get(*peer)?.get(round).copied());
        let of_peers: Option<Vec<f64>> = of_peers.collect();
        let chosen = of_peers.and_then(|it| it.into_iter().reduce(choose));
        chosen.map_or(f64::NAN, |chosen| own / chosen)
    };
    own.iter().enumerate().map(ratio).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = r#"{
        "cases": {
            "h1_c64": {
                "direct": {"req_s": [66000.0], "client_core_percent": [100.0]},
                "rouse": {"req_s": [50000.0], "req_s_core": [62000.0], "client_core_percent": [90.0]},
                "nginx": {"req_s": [50000.0], "req_s_core": [72000.0], "client_core_percent": [90.0]},
                "haproxy": {"req_s": [50000.0], "req_s_core": [70000.0], "client_core_percent": [90.0]},
                "envoy": {"req_s": [20000.0], "req_s_core": [20000.0], "client_core_percent": [50.0]}
            },
            "p99_c64": {
                "rouse": {"p99_us": [300.0, 200.0], "req_s": [25000.0, 25000.0]},
                "nginx": {"p99_us": [250.0, 250.0], "req_s": [25000.0, 25000.0]},
                "haproxy": {"p99_us": [400.0, 400.0], "req_s": [25000.0, 25000.0]},
                "envoy": {"p99_us": [900.0, 900.0], "req_s": [9000.0, 9000.0]},
                "go": {"p99_us": [900.0, 900.0], "req_s": [9000.0, 9000.0]}
            },
            "release_10k": {"rouse": {"ms": [240.0, 240.0, 240.0], "most_share": [1.2, 1.3, 2.4]}}
        },
        "failures": {"slow_10k": "a client was cut off"},
        "client_core": 0,
        "proxy_core": 1
    }"#;

    fn rows(case: &str) -> Result<Vec<BenchRow>> {
        serde_json::from_str::<GatewayBenchOutput>(PRINTED).unwrap().rows(case)
    }

    fn judged(rows: &[BenchRow]) -> Vec<(&str, &str, f64, Option<bool>)> {
        let rows = rows.iter().filter(|row| row.reached.is_some());
        rows.map(|row| (row.case.as_str(), row.subject.as_str(), row.p50, row.reached)).collect()
    }

    #[test]
    fn a_rate_is_judged_by_the_core_and_beside_the_better_of_two_peers() {
        let rows = rows("h1_c64").unwrap();
        let expected = [
            ("h1_c64", "rouse", 62_000.0, Some(true)),
            ("h1_c64_to_envoy", "rouse", 3.1, Some(true)),
            ("h1_c64_to_best", "rouse", 62.0 / 72.0, Some(true)),
        ];
        assert_eq!(judged(&rows), expected);
        assert_eq!(rows.iter().filter(|row| row.case == "h1_c64_seen").count(), 5);
    }

    #[test]
    fn the_lowest_latency_is_that_of_the_same_round() {
        let rows = rows("p99_c64").unwrap();
        // Rounds: 300 / 250 and 200 / 250.
        assert_eq!(judged(&rows), [("p99_c64_to_lowest", "rouse", 1.0, Some(true))]);
    }

    #[test]
    fn one_pod_above_its_share_in_one_round_is_too_many() {
        let rows = rows("release_10k").unwrap();
        let expected = [
            ("release_10k", "rouse", 240.0, Some(true)),
            ("release_10k_most", "rouse", 1.3, Some(false)),
        ];
        assert_eq!(judged(&rows), expected);
    }

    #[test]
    fn a_peer_without_a_value_reaches_no_goal() {
        let values = RoundValues::from([("rouse", vec![1.0])]);
        assert!(peer_ratios(&values, &["nginx"], f64::max)[0].is_nan());
        let row = &lowest_ratio_row("p99_c64", &values)[0];
        assert_eq!(row.reached, Some(false));
    }

    #[test]
    fn a_case_without_figures_is_an_error() {
        let error = rows("bulk").unwrap_err().to_string();
        assert_eq!(error, "the bench has no figures of bulk");
        let error = rows("slow_10k").unwrap_err().to_string();
        assert_eq!(error, "a client was cut off");
    }
}
