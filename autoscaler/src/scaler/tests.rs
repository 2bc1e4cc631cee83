use common::wire::ScaleMetric;
use proptest::prelude::*;

use super::*;
use crate::usage::tests::policy;

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn load(stable: f64, panic: f64) -> Option<LoadAverages> {
    Some(LoadAverages { stable, panic })
}

fn pods(ready: u32) -> ScalerPods {
    ScalerPods { ready, is_reachable: true }
}

/// A scaler outside panic mode, whatever pods the test has.
fn scaler_outside_panic() -> Scaler {
    Scaler::new(at(0), 0)
}

fn desired(
    policy: &ScalePolicy,
    ready: u32,
    stable: f64,
    panic: f64,
) -> (Option<u32>, ScaleReason) {
    let desired_scale =
        scaler_outside_panic().step(at(100), policy, pods(ready), load(stable, panic));
    (desired_scale.pods, desired_scale.reason)
}

/// Cases of Knative's formula for the desired scale.
#[test]
fn desired_scale_follows_the_formula() {
    let plain = policy();
    let slow = ScalePolicy { max_scale_up_rate: 1.1, target_utilization: 0.01, ..policy() };
    let rps = ScalePolicy { metric: ScaleMetric::Rps, target_total: 200.0, ..policy() };
    let active = ScalePolicy { activation_scale: 5, ..policy() };
    let table = [
        // The default target is 70 requests in flight per pod.
        ("no load", &plain, 0, 0.0, 0.0, 0, ScaleReason::Stable),
        ("one request", &plain, 0, 0.016667, 0.166667, 1, ScaleReason::Stable),
        ("just full", &plain, 1, 70.0, 70.0, 1, ScaleReason::Stable),
        ("just over", &plain, 1, 70.01, 70.01, 2, ScaleReason::Panic),
        ("no pod counts as one", &plain, 0, 300.0, 300.0, 5, ScaleReason::Panic),
        ("panic below the threshold", &plain, 3, 150.0, 350.0, 3, ScaleReason::Stable),
        ("panic at the threshold", &plain, 3, 150.0, 351.0, 6, ScaleReason::Panic),
        // One step down keeps floor(ready / 2).
        ("10 pods idle", &plain, 10, 0.0, 0.0, 5, ScaleReason::MaxScaleDownRate),
        ("3 pods idle", &plain, 3, 0.0, 0.0, 1, ScaleReason::MaxScaleDownRate),
        ("1 pod idle", &plain, 1, 0.0, 0.0, 0, ScaleReason::Stable),
        // Rate 1.1 of 2 pods rounds up to 3, so it is never stuck.
        ("slow rate", &slow, 2, 3.0, 3.0, 3, ScaleReason::Stable),
        ("slower than the load", &slow, 2, 4.0, 2.0, 3, ScaleReason::MaxScaleUpRate),
        // RPS: 200 × 0.7 = 140 a pod.
        ("rps", &rps, 2, 281.0, 281.0, 3, ScaleReason::Stable),
        ("activation scale", &active, 0, 0.1, 0.1, 5, ScaleReason::ActivationScale),
        ("activation scale while loaded", &active, 5, 0.1, 0.1, 5, ScaleReason::ActivationScale),
        ("no activation without load", &active, 1, 0.0, 0.0, 0, ScaleReason::Stable),
        ("more than the activation scale", &active, 8, 550.0, 550.0, 8, ScaleReason::Stable),
    ];
    for (case, policy, ready, stable, panic, expected, reason) in table {
        assert_eq!(desired(policy, ready, stable, panic), (Some(expected), reason), "{case}");
    }
}

#[test]
fn an_unreachable_revision_may_shrink_in_one_step() {
    let unreachable = ScalerPods { ready: 10, is_reachable: false };
    let desired_scale = scaler_outside_panic().step(at(9), &policy(), unreachable, load(0.0, 0.0));
    assert_eq!(desired_scale.pods, Some(0));
}

/// As in Knative, panic mode starts at the threshold, is extended while load is over it, and never lowers pods. It
/// ends a stable window later.
#[test]
fn panic_only_rises_and_ends_after_a_stable_window() {
    let (policy, mut scaler) = (policy(), scaler_outside_panic());
    let mut step = |now, ready, stable, panic| {
        let desired_scale = scaler.step(at(now), &policy, pods(ready), load(stable, panic));
        (desired_scale.pods, scaler.is_panicking())
    };
    assert_eq!(step(2, 1, 30.0, 150.0), (Some(3), true));
    assert_eq!(step(4, 1, 60.0, 300.0), (Some(5), true));
    assert_eq!(step(6, 5, 60.0, 100.0), (Some(5), true), "it does not shrink");
    assert_eq!(step(8, 5, 400.0, 100.0), (Some(6), true), "stable load counts too");
    assert_eq!(step(10, 6, 60.0, 900.0), (Some(13), true), "over the threshold again: extended");
    assert_eq!(step(70, 13, 10.0, 10.0), (Some(13), true), "60 s later it still holds");
    assert_eq!(step(71, 13, 10.0, 10.0), (Some(6), false), "then one step down");
}

/// As in Knative, a new scaler with more than one ready pod starts in panic.
#[test]
fn a_restart_keeps_the_pods_there_are() {
    let mut scaler = Scaler::new(at(100), 7);
    assert!(scaler.is_panicking());
    assert_eq!(scaler.step(at(102), &policy(), pods(7), load(0.0, 0.0)).pods, Some(7));
    assert_eq!(scaler.step(at(161), &policy(), pods(7), load(0.0, 0.0)).pods, Some(3));
    assert!(!Scaler::new(at(100), 1).is_panicking());
}

#[test]
fn without_data_no_scale_is_desired() {
    let desired_scale = scaler_outside_panic().step(at(1), &policy(), pods(3), None);
    assert_eq!((desired_scale.pods, desired_scale.reason), (None, ScaleReason::NoData));
}

/// As in Knative, scale-down-delay takes the highest desired scale of the delay, in buckets of 2 s.
#[test]
fn a_lower_scale_waits_for_the_delay() {
    let policy = ScalePolicy { scale_down_delay: at(10), ..policy() };
    let mut scaler = scaler_outside_panic();
    let mut step = |now, is_reachable, stable| {
        let pods = ScalerPods { ready: 4, is_reachable };
        scaler.step(at(now), &policy, pods, load(stable, 0.0)).pods
    };
    assert_eq!(step(20, true, 280.0), Some(4));
    assert_eq!(step(22, true, 140.0), Some(4));
    assert_eq!(step(28, true, 140.0), Some(4));
    assert_eq!(step(29, true, 280.0), Some(4), "within one bucket the highest stands");
    assert_eq!(step(30, true, 140.0), Some(4));
    assert_eq!(step(36, true, 140.0), Some(4));
    assert_eq!(step(38, true, 140.0), Some(2));
    assert_eq!(step(39, true, 350.0), Some(5), "up at once");
    assert_eq!(step(40, false, 70.0), Some(1), "an unreachable one needs no more");
}

/// A changed delay applies from the next evaluation on. In Knative a running scaler keeps its first delay.
#[test]
fn a_delay_that_changes_holds_from_the_next_evaluation_on() {
    let mut scaler = scaler_outside_panic();
    let mut step = |now, delay, stable| {
        let policy = ScalePolicy { scale_down_delay: at(delay), ..policy() };
        scaler.step(at(now), &policy, pods(4), load(stable, 0.0)).pods
    };
    assert_eq!(step(20, 4, 280.0), Some(4));
    assert_eq!(step(22, 60, 140.0), Some(4));
    assert_eq!(step(40, 60, 140.0), Some(4), "longer");
    assert_eq!(step(42, 2, 140.0), Some(2), "shorter");
}

/// Knative's formula for a target burst capacity TBC is
/// `TBC == 0 ? 0 : TBC > 0 ? floor(ready·total − TBC − panic) : −1`.
#[test]
fn burst_capacity_and_activators_follow_the_formula() {
    let table = [
        // (target burst capacity, ready pods, panic load) → (excess burst capacity, activators)
        (211.0, 2, 0.0, -11.0, 5),
        (211.0, 3, 0.0, 89.0, 6),
        (211.0, 7, 490.0, -1.0, 10),
        (211.0, 8, 560.0, 29.0, 11),
        (211.0, 3, 88.5, 0.0, 6),
        (211.0, 0, 0.0, -211.0, 3),
        (0.0, 0, 900.0, 0.0, 2),
        (0.0, 9, 900.0, 0.0, 2),
        (-1.0, 9, 0.0, -1.0, 9),
        (-1.0, 1, 0.0, -1.0, 2),
        (1.0, 1, 0.0, 99.0, 2),
    ];
    for (burst, ready, panic, capacity, activators) in table {
        let policy = ScalePolicy { target_burst_capacity: burst, ..policy() };
        let desired_scale =
            scaler_outside_panic().step(at(9), &policy, pods(ready), load(0.0, panic));
        let got = (desired_scale.excess_burst_capacity, desired_scale.activators);
        assert_eq!(got, (capacity, activators), "burst {burst}, {ready} ready, panic {panic}");
    }
}

/// As in Knative, excess burst capacity before any data is initialScale·total − TBC.
#[test]
fn burst_capacity_before_any_data_is_that_of_the_initial_scale() {
    for (burst, initial, capacity) in
        [(211.0, 1, -111.0), (211.0, 3, 89.0), (100.5, 1, 0.0), (0.0, 1, 0.0), (-1.0, 9, -1.0)]
    {
        let policy =
            ScalePolicy { target_burst_capacity: burst, initial_scale: initial, ..policy() };
        assert_eq!(
            scaler_outside_panic().step(at(9), &policy, pods(0), None).excess_burst_capacity,
            capacity
        );
    }
}

/// With 5 idle pods it is 5 · 100 − 211. Load that becomes unknown does not lower it, so the path stays.
#[test]
fn burst_capacity_is_kept_while_load_is_unknown() {
    let policy = ScalePolicy { target_burst_capacity: 211.0, ..policy() };
    let mut scaler = scaler_outside_panic();
    for load in [load(0.0, 0.0), None, None] {
        let desired_scale = scaler.step(at(9), &policy, pods(5), load);
        assert_eq!(
            (desired_scale.excess_burst_capacity, desired_scale.activators),
            (289.0, 8),
            "{load:?}"
        );
    }
}

#[test]
fn a_target_is_never_below_a_hundredth() {
    assert_eq!(target_per_pod(&policy()), 70.0);
    assert_eq!(target_per_pod(&ScalePolicy { target_total: 0.01, ..policy() }), 0.01);
}

proptest! {
    /// More load never asks for fewer pods.
    #[test]
    fn desired_scale_grows_with_load(
        ready in 0u32..200, low in 0.0f64..20_000.0, more in 0.0f64..20_000.0, panic in 0.0f64..20_000.0,
    ) {
        let fewer = desired(&policy(), ready, low, panic).0;
        prop_assert!(desired(&policy(), ready, low + more, panic).0 >= fewer);
        prop_assert!(desired(&policy(), ready, low, panic + more).0 >= fewer);
    }

    /// One evaluation changes the pods at most by the rates.
    #[test]
    fn a_step_stays_within_the_rates(
        ready in 1u32..500, stable in 0.0f64..1e6, panic in 0.0f64..1e6, up in 1.01f64..20.0, down in 1.01f64..20.0,
    ) {
        let policy = ScalePolicy { max_scale_up_rate: up, max_scale_down_rate: down, ..policy() };
        let pods = f64::from(desired(&policy, ready, stable, panic).0.unwrap());
        let ready = f64::from(ready);
        prop_assert!(pods <= (up * ready).ceil() && pods >= (ready / down).floor());
    }

    /// The same input at the same moment gives the same desired pods again.
    #[test]
    fn an_evaluation_repeated_changes_nothing(
        ready in 0u32..50, first in 0.0f64..5000.0, stable in 0.0f64..5000.0, panic in 0.0f64..5000.0, delay in 0u64..20,
    ) {
        let policy = ScalePolicy { scale_down_delay: at(delay), ..policy() };
        let mut scaler = Scaler::new(at(0), ready);
        scaler.step(at(2), &policy, pods(ready), load(first, first));
        let once = scaler.step(at(4), &policy, pods(ready), load(stable, panic));
        prop_assert_eq!(scaler.step(at(4), &policy, pods(ready), load(stable, panic)), once);
    }

    /// No load ever moves the path with a burst capacity of 0.
    #[test]
    fn a_target_burst_capacity_of_zero_never_moves_the_path(ready in 0u32..100, panic in 0.0f64..1e6) {
        let desired_scale = scaler_outside_panic().step(at(9), &policy(), pods(ready), load(0.0, panic));
        prop_assert_eq!((desired_scale.excess_burst_capacity, desired_scale.activators), (0.0, 2));
    }
}
