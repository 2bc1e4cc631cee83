//! Random load with random faults: pods fall only on knowledge.

use proptest::{collection::vec, prelude::*};

use super::*;

fn fault_cases() -> impl Strategy<Value = FaultCase> {
    let kinds = [
        ReportFault::Late,
        ReportFault::Lost,
        ReportFault::EmptyFirst,
        ReportFault::Repeated,
        ReportFault::Reordered,
        ReportFault::StreamClosed,
    ];
    let kind = proptest::sample::select(kinds.to_vec());
    let later_fault = (0..=ACTIVATOR, kind, QUIET_START_S..QUIET_START_S + 48, 1usize..20)
        .prop_map(|(sender, fault, from, long)| TimedFault { sender, fault, from, long });
    let initial_fault = (0..=ACTIVATOR, 1usize..60).prop_map(|(sender, long)| TimedFault {
        sender,
        fault: ReportFault::StreamClosed,
        from: 0,
        long,
    });
    let faults = vec(prop_oneof![4 => later_fault, 1 => initial_fault], 0..4);
    // The new autoscaler begins at a tick, so that both runs can be compared there.
    let replaced_at =
        proptest::option::of((QUIET_START_S / 2..QUIET_START_S / 2 + 24).prop_map(|half| 2 * half));
    (faults, replaced_at, any::<[u32; 3]>(), any::<bool>()).prop_map(
        |(faults, replaced_at, clock_offsets, is_reversed)| FaultCase {
            faults,
            replaced_at,
            clocks_ns: clock_offsets.map(|offset| u64::from(offset) * 1_000_000),
            is_reversed,
        },
    )
}

fn load_series() -> impl Strategy<Value = Vec<LoadLevels>> {
    let level = prop_oneof![3 => Just(0u64), 3 => 1u64..20, 1 => 20u64..60];
    let levels =
        vec(level, BASE_PODS + 1).prop_map(|it| <LoadLevels>::try_from(it).expect("so many"));
    let segments = vec((levels, 1usize..12), 6..14);
    segments.prop_map(|segments| {
        let repeat = |(levels, long)| vec![levels; long];
        let load = segments.into_iter().flat_map(repeat);
        let quiet_start = [[0; BASE_PODS + 1]; QUIET_START_S].into_iter();
        quiet_start.chain(load).chain([[0; BASE_PODS + 1]; QUIET_END_S]).collect()
    })
}

fn policies() -> impl Strategy<Value = ScalePolicy> {
    let aggregation =
        prop_oneof![Just(WindowAggregation::Linear), Just(WindowAggregation::WeightedExponential)];
    let metric = prop_oneof![3 => Just(ScaleMetric::Concurrency), 1 => Just(ScaleMetric::Rps)];
    let bounds = (prop_oneof![Just(0u32), 0u32..8], prop_oneof![2 => Just(0u32), 1 => 6u32..20]);
    let windows = (6u64..12, 10.0f64..60.0, 0u64..6, 0u64..6);
    (aggregation, metric, bounds, windows).prop_map(|(aggregation, metric, bounds, windows)| {
        let (stable, panic_window_percent, delay, retention) = windows;
        ScalePolicy {
            aggregation,
            metric,
            min_scale: bounds.0,
            max_scale: bounds.1,
            stable_window: Duration::from_secs(stable),
            panic_window_percent,
            scale_down_delay: Duration::from_secs(delay),
            scale_to_zero_retention_period: Duration::from_secs(retention),
            ..small_policy()
        }
    })
}

/// Ready spans of the base pods; most are always ready.
fn ready_spans() -> impl Strategy<Value = [Range<usize>; BASE_PODS]> {
    let ready_span = prop_oneof![
        2 => Just(0..NEVER_ENDS),
        1 => (QUIET_START_S..QUIET_START_S + 60).prop_map(|from| from..NEVER_ENDS),
        1 => (QUIET_START_S..QUIET_START_S + 60).prop_map(|to| 0..to),
        1 => (QUIET_START_S..QUIET_START_S + 40, 1usize..40).prop_map(|(from, long)| from..from + long),
    ];
    vec(ready_span, BASE_PODS).prop_map(|it| it.try_into().expect("so many"))
}

fn load_cases() -> impl Strategy<Value = LoadCase> {
    (policies(), load_series(), ready_spans()).prop_map(|(policy, load, ready_spans)| LoadCase {
        policy,
        load,
        ready_spans,
    })
}

/// Number of quarters of a second that a decision may depend on.
fn lookback_quarters(policy: &ScalePolicy) -> usize {
    let lookback = 2 * policy.stable_window
        + policy.scale_down_delay
        + policy.scale_to_zero_retention_period
        + 2 * TICK;
    4 * usize::try_from(lookback.as_secs()).unwrap()
}

/// Index at which the Revision next falls asleep. In reality it has no pods then. Here they stay: it wakes with enough
/// of them and asks for none.
fn next_zero(pods: &[u32], from: usize) -> usize {
    (from..pods.len()).find(|&at| pods[at] == 0).unwrap_or(pods.len())
}

proptest! {
    /// Faults in reports never lower pods below what the same load asks for when all of it is reported in time. Pods
    /// are lowered only at a tick.
    ///
    /// Nor are fewer pods requested at any moment, until load has grown and no report shows it in the same second. From
    /// then on the autoscaler cannot know. It recovers once the growth is reported, nothing hidden is remembered, and
    /// it asks for as many pods again.
    #[test]
    fn scale_falls_only_on_knowledge(load_case in load_cases(), faults in fault_cases()) {
        let expected = run_load_case(&load_case, &FaultCase::default()).pods;
        let LoadCaseOutcome { pods: faulty, kept, hidden_growth } = run_load_case(&load_case, &faults);
        for at in scale_down_steps(&faulty) {
            prop_assert!(faulty[at] >= expected[at], "{} of {} at {}", faulty[at], expected[at], at);
            prop_assert_eq!(at % 8, 0, "lowered between two ticks");
        }
        prop_assert!(scale_down_steps(&expected).all(|at| at % 8 == 0));
        // Load that moves between senders counts twice until both have reported it, so their order is the same here.
        let reversed = FaultCase { is_reversed: faults.is_reversed, ..FaultCase::default() };
        let expected = run_load_case(&load_case, &reversed).pods;
        let is_less = |at: &usize| kept[*at] < expected[*at] && !load_case.is_carried(*at, kept[*at]);
        let (first, last) = hidden_growth.unwrap_or((expected.len(), expected.len()));
        prop_assert_eq!((0..first).find(is_less), None, "all was known");
        let known_again = last + lookback_quarters(&load_case.policy);
        // Panic mode remembers its highest number for as long as it lasts.
        let recovered = (known_again..expected.len()).find(|&at| kept[at] >= expected[at]).unwrap_or(expected.len());
        prop_assert_eq!((recovered..next_zero(&faulty, recovered)).find(is_less), None, "all is known again");
        // Without a pod, the first number is kept until the start has failed.
        let has_pods = load_case.ready_spans.iter().any(|it| it.end == NEVER_ENDS);
        prop_assert!(!has_pods || known_again >= expected.len() || recovered < expected.len(), "never back");
    }

    /// Zero is never decided while any reported request is in flight or waits.
    #[test]
    fn what_is_in_flight_is_never_decided_to_zero(series in load_series(), faults in fault_cases()) {
        let pods = requested_pods(&small_policy(), &series, &faults);
        for at in scale_down_steps(&pods).filter(|&at| pods[at] == 0) {
            // At a tick the last report is half a second old.
            prop_assert_eq!(series[at / 4 - 1], [0; BASE_PODS + 1], "at {}", at);
        }
    }
}
