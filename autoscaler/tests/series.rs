//! Pure: Knative's own arithmetic, second by second: 300 series with Knative's results (`knative.dev/serving
//! v0.51.0`, `pkg/autoscaler/aggregation` and `pkg/autoscaler/scaling`; made by a seeded generator).
//!
//! One JSON object per line. `series[i]` is the concurrency recorded in second i. Tick t is in second 2t − 1 at + 0.9
//! s, after that second's record. It has `ready[t]` (again from its start when it ends) and `reachable[t]`; index 0 is
//! before the first tick. `knative[t − 1]` is `[valid, pods, excess burst capacity, stable average, panic average]`.
//!
//! Knative counts the running second as its newest; here a second counts whole once it is over. So Knative's result of
//! a second equals Rouse's result one second later, with the same seconds recorded.

use std::{
    io::{BufRead as _, BufReader},
    time::Duration,
};

use autoscaler::{
    scaler::{Scaler, ScalerPods},
    window::LoadWindow,
};
use common::wire::{ScalePolicy, WindowAggregation};
use flate2::bufread::GzDecoder;
use serde_json::Value;

const SERIES: &[u8] = include_bytes!("data/series.jsonl.gz");

/// Largest permitted difference of two averages: both sides round.
const MAX_AVERAGE_DIFFERENCE: f64 = 1.5e-6;

const SECOND: Duration = Duration::from_secs(1);

fn number(case: &Value, key: &str) -> f64 {
    case[key].as_f64().unwrap_or_else(|| panic!("{key} is a number"))
}

fn seconds(case: &Value, key: &str) -> Duration {
    Duration::from_secs_f64(number(case, key))
}

fn list<'a>(case: &'a Value, key: &str) -> &'a [Value] {
    case[key].as_array().unwrap_or_else(|| panic!("{key} is a list"))
}

fn policy(case: &Value) -> ScalePolicy {
    let is_weighted = case["weighted"].as_bool().expect("weighted is a boolean");
    let total = number(case, "total");
    ScalePolicy {
        stable_window: seconds(case, "stable"),
        panic_window_percent: number(case, "panic_pct"),
        panic_threshold_percent: number(case, "threshold"),
        max_scale_up_rate: number(case, "up"),
        max_scale_down_rate: number(case, "down"),
        activation_scale: number(case, "activation") as u32,
        scale_down_delay: seconds(case, "delay"),
        target_burst_capacity: number(case, "tbc"),
        target_total: total,
        target_utilization: number(case, "target") / total,
        aggregation: if is_weighted {
            WindowAggregation::WeightedExponential
        } else {
            WindowAggregation::Linear
        },
        ..ScalePolicy::default()
    }
}

/// Pods of the Revision at tick number `tick`.
fn pods(case: &Value, tick: usize) -> ScalerPods {
    let ready = list(case, "ready");
    ScalerPods {
        ready: ready[tick % ready.len()].as_u64().expect("a count") as u32,
        is_reachable: list(case, "reachable")[tick].as_bool().expect("a boolean"),
    }
}

/// Checks each tick of a series against Knative and returns their number; a panic names the tick that differs.
fn check_ticks(case: &Value) -> usize {
    let policy = policy(case);
    let mut window = LoadWindow::new(policy.stable_window, policy.panic_window_percent);
    let created = Duration::from_nanos(case["created_ns"].as_u64().expect("a time")) + SECOND;
    let mut scaler = Scaler::new(created, pods(case, 0).ready);
    let mut recorded = list(case, "series").iter().zip(0u32..).peekable();
    for (at, knative) in list(case, "knative").iter().enumerate() {
        let tick = at + 1;
        let second = u32::try_from(2 * tick - 1).expect("few seconds");
        while let Some((load, recorded_second)) =
            recorded.next_if(|(_, recorded_second)| *recorded_second <= second)
        {
            window.add(SECOND * recorded_second + SECOND / 2, load.as_f64().expect("a load"));
        }
        let now = SECOND * second + 9 * SECOND / 10 + SECOND;
        let load = window.averages(now, 0.0, policy.aggregation);
        let desired_scale = scaler.step(now, &policy, pods(case, tick), load);
        let figure = |at: usize| knative[at].as_f64().expect("a number");
        let context = format!("case {}, tick {tick}", case["id"]);
        assert_eq!(load.is_some(), knative[0] == true, "{context}: whether load is known");
        assert_eq!(desired_scale.pods.map(f64::from), Some(figure(1)), "{context}: pods");
        assert_eq!(
            desired_scale.excess_burst_capacity,
            figure(2),
            "{context}: excess burst capacity"
        );
        let load = load.expect("known load");
        let apart = [(load.stable, figure(3)), (load.panic, figure(4))].map(|(a, b)| (a - b).abs());
        assert!(
            apart.iter().all(|it| *it <= MAX_AVERAGE_DIFFERENCE),
            "{context}: {load:?}, not {knative}"
        );
    }
    list(case, "knative").len()
}

#[test]
fn three_hundred_series_are_decided_as_knative_decides_them() {
    let lines = BufReader::new(GzDecoder::new(SERIES)).lines();
    let (mut cases, mut ticks) = (0, 0);
    for line in lines {
        let case = serde_json::from_str(&line.expect("text")).expect("JSON");
        ticks += check_ticks(&case);
        cases += 1;
    }
    assert_eq!((cases, ticks), (300, 18_102));
}
