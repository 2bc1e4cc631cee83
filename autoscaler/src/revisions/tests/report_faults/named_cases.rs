//! Single cases of faults in reports, each with the number of pods that must remain.
//!
//! Requested pods are listed by the quarter of a second, so `pods[4 * s]` belongs to second `s`. A pod carries 7
//! requests, because `small_policy` has the target 10, of which 70 % are used.

use super::*;

#[test]
fn quiet_that_is_known_lowers() {
    let series = [constant_load(20, 10), constant_load(40, 0)].concat();
    let pods = requested_pods(&small_policy(), &series, &FaultCase::default());
    assert_eq!((pods[4 * 20], pods.last()), (9, Some(&0)), "60 at 7 a pod");
}

/// Reports stall while most requests end: the remaining requests keep their pods, and the service is never at zero.
#[test]
fn a_late_report_is_spread_over_the_time_it_covers() {
    for fault in [ReportFault::Late, ReportFault::Lost] {
        let series = [constant_load(20, 100), constant_load(70, 10)].concat();
        let stall = |sender| TimedFault { sender, fault, from: 20, long: 9 };
        let faults = FaultCase { faults: vec![stall(0), stall(1)], ..FaultCase::default() };
        let pods = requested_pods(&small_policy(), &series, &faults);
        assert_eq!(
            (min_requested(&pods, 20), pods.last()),
            (9, Some(&9)),
            "{fault:?}: 60 at 7 a pod"
        );
    }
}

/// Growth hidden by a stall counts once.
#[test]
fn a_stall_does_not_multiply_what_began_in_it() {
    let series = [constant_load(30, 0), constant_load(30, 10)].concat();
    let lost = |sender| TimedFault { sender, fault: ReportFault::Lost, from: 30, long: 9 };
    let faults = FaultCase { faults: vec![lost(0), lost(1)], ..FaultCase::default() };
    let pods = requested_pods(&small_policy(), &series, &faults);
    assert_eq!(pods.iter().skip(4 * 30).max(), Some(&9), "60 at 7 a pod");
}

#[test]
fn pods_of_an_agent_that_is_gone_are_kept() {
    // All load is on the absent agent's node, where it ends or continues.
    let one_node = [0, 100, 0, 100, 0, 100, 0];
    for after in [constant_load(60, 0), vec![one_node; 60]] {
        let series = [vec![one_node; 30], after].concat();
        let pods = requested_pods(
            &small_policy(),
            &series,
            &single_fault(1, ReportFault::StreamClosed, 30, 60),
        );
        assert_eq!(min_requested(&pods, 30), 43, "300 at 7 a pod");
    }
    let closed =
        |sender| TimedFault { sender, fault: ReportFault::StreamClosed, from: 40, long: 80 };
    let faults = FaultCase { faults: vec![closed(0), closed(1)], ..FaultCase::default() };
    // The last report was quiet, but the averages were still falling.
    let series = [constant_load(39, 10), constant_load(81, 0)].concat();
    let pods = requested_pods(&small_policy(), &series, &faults);
    assert_eq!((pods[4 * 40], min_requested(&pods, 40)), (8, 8), "nothing is known of the load");
}

/// Load rises on another node: the last reported load of the absent agent's node still counts.
#[test]
fn the_last_report_of_an_absent_agent_still_counts() {
    let (one_node, both_nodes) = ([20, 0, 20, 0, 20, 0, 0], [20, 20, 20, 20, 20, 20, 0]);
    let series = [vec![one_node; 30], vec![both_nodes; 30]].concat();
    let pods = requested_pods(
        &small_policy(),
        &series,
        &single_fault(0, ReportFault::StreamClosed, 30, 30),
    );
    assert_eq!((pods[4 * 30 + 1], pods[4 * 30 + 2]), (9, 18), "60 and 120 at 7 a pod");
}

/// All load moves to pods that became ready while their agent's stream stalls, and that no report has named yet.
#[test]
fn a_stalled_agent_is_late_though_all_its_reported_pods_are_gone() {
    let (before, after) = ([20, 0, 20, 0, 20, 0, 0], [0, 0, 0, 30, 0, 30, 0]);
    let load = [vec![before; 48], vec![after; 30]].concat();
    let ready_spans =
        [0..NEVER_ENDS, 0..47, 0..NEVER_ENDS, 48..NEVER_ENDS, 0..NEVER_ENDS, 48..NEVER_ENDS];
    let load_case = LoadCase { policy: small_policy(), load, ready_spans };
    let pods = run_load_case(&load_case, &single_fault(1, ReportFault::Late, 46, 40)).pods;
    assert_eq!(min_requested(&pods, 20), 9, "60 at 7 a pod");
}

/// The wait queue was not reported for one second, but was on time at each tick. If its totals changed meanwhile, the
/// second was not quiet.
#[test]
fn a_second_without_an_activator_report_is_quiet_only_if_nothing_changed() {
    let lowered = |waiting, faults| {
        let second = [10, 10, 10, 10, 10, 10, waiting];
        let series = [constant_load(36, 10), vec![second; 1], constant_load(40, 0)].concat();
        requested_pods(&small_policy(), &series, &faults).iter().rposition(|&it| it >= 9)
    };
    let lost = || single_fault(ACTIVATOR, ReportFault::Lost, 36, 1);
    let at_tick = |second: usize| Some(4 * second - 1);
    assert_eq!([0, 3].map(|waiting| lowered(waiting, FaultCase::default())), [at_tick(38); 2]);
    // One tick later, or after a stable window, a panic window and a tick.
    assert_eq!([0, 3].map(|waiting| lowered(waiting, lost())), [at_tick(40), at_tick(48)]);
}

#[test]
fn an_agent_that_never_came_is_no_quiet_node() {
    let series = vec![[0, 100, 0, 100, 0, 100, 0]; 60];
    let pods = requested_pods(
        &small_policy(),
        &series,
        &single_fault(1, ReportFault::StreamClosed, 0, 60),
    );
    assert_eq!(min_requested(&pods, 0), 6, "what there is stays");
    let pods = requested_pods(
        &small_policy(),
        &constant_load(60, 0),
        &single_fault(1, ReportFault::StreamClosed, 0, 30),
    );
    assert_eq!(
        (min_requested(&pods[..4 * 30], 0), pods.last()),
        (6, Some(&0)),
        "quiet, once it came"
    );
}

#[test]
fn what_waits_at_an_activator_that_is_gone_keeps_its_pods() {
    let waits = [0, 0, 0, 0, 0, 0, 70];
    let series = [vec![waits; 30], constant_load(8, 0)].concat();
    let pods = requested_pods(
        &small_policy(),
        &series,
        &single_fault(ACTIVATOR, ReportFault::StreamClosed, 30, 8),
    );
    assert_eq!(min_requested(&pods, 30), 10, "70 at 7 a pod");
}

/// An activator reports its waiting requests once, and then is silent for some seconds.
#[test]
fn an_activator_that_falls_silent_after_its_first_report_is_missed() {
    let one_waits = [0, 0, 0, 0, 0, 0, 1];
    let series =
        [constant_load(QUIET_START_S + 11, 0), vec![one_waits], constant_load(20, 0)].concat();
    let closed = TimedFault {
        sender: ACTIVATOR,
        fault: ReportFault::StreamClosed,
        from: 0,
        long: QUIET_START_S - 1,
    };
    let silent =
        TimedFault { sender: ACTIVATOR, fault: ReportFault::Late, from: QUIET_START_S, long: 16 };
    let faults = FaultCase { faults: vec![closed, silent], ..FaultCase::default() };
    let expected = requested_pods(&small_policy(), &series, &FaultCase::default());
    let faulty = requested_pods(&small_policy(), &series, &faults);
    let ends = 4 * (QUIET_START_S + 16);
    assert_eq!((expected[ends], faulty[ends]), (1, 6), "nothing is known of what waits");
}

/// Load falls at a tick and rises to a multiple before the next one: the burst is decided at once.
#[test]
fn a_burst_between_two_ticks_lowers_nothing() {
    let series =
        [constant_load(20, 10), constant_load(21, 3), constant_load(4, 60), constant_load(4, 3)]
            .concat();
    let pods = requested_pods(&small_policy(), &series, &FaultCase::default());
    let at = 4 * 41 + 2;
    assert_eq!((pods[at - 1], pods[at]), (3, 52), "as soon as it is told: 360 at 7 a pod");
    assert_eq!(scale_down_steps(&pods).find(|it| it % 8 != 0), None, "only at a tick");
}

#[test]
fn a_new_autoscaler_asks_for_pods_in_place_of_those_that_have_gone() {
    // One pod is decided, and five more start until a moment after the takeover.
    let mut ready_spans = [const { QUIET_START_S + 6..QUIET_START_S + 6 }; BASE_PODS];
    ready_spans[0] = 0..NEVER_ENDS;
    let waiting = |level| [0, 0, 0, 0, 0, 0, level];
    let load =
        [vec![waiting(0); QUIET_START_S], vec![waiting(1); 10], vec![waiting(20); 20]].concat();
    let load_case = LoadCase { policy: small_policy(), load, ready_spans };
    let pods = run_load_case(
        &load_case,
        &FaultCase { replaced_at: Some(QUIET_START_S + 4), ..FaultCase::default() },
    )
    .pods;
    assert_eq!(pods[4 * (QUIET_START_S + 9)], 1, "{pods:?}");
    // For its windows the new one knows too little to lower anything, but what is missing it asks for.
    assert!(min_requested(&pods, QUIET_START_S + 14) >= 3, "{pods:?}");
}

/// One waiting request keeps one pod, because an absent agent blocks the step down to zero. Then load comes that the pods
/// being removed could carry: it needs pods of its own at once, as after a sleep.
#[test]
fn pods_beyond_the_decided_number_carry_no_load() {
    let waiting = |level| [0, 0, 0, 0, 0, 0, level];
    let busy = [0, 20, 0, 0, 0, 0, 0];
    let load = [
        vec![waiting(0); QUIET_START_S],
        vec![waiting(1); 7],
        vec![waiting(0); 10],
        vec![busy; 11],
        vec![waiting(0); QUIET_END_S],
    ]
    .concat();
    let ready_spans = [const { 0..NEVER_ENDS }; BASE_PODS];
    let load_case = LoadCase { policy: small_policy(), load, ready_spans };
    let absent = single_fault(0, ReportFault::StreamClosed, QUIET_START_S, 6);
    let expected = run_load_case(&load_case, &FaultCase::default()).pods;
    let faulty = run_load_case(&load_case, &absent).pods;
    let reported = 4 * (QUIET_START_S + 17) + 2;
    assert_eq!((expected[reported - 1], faulty[reported - 1]), (0, 1), "zero, and held up");
    assert_eq!((expected[reported], faulty[reported]), (3, 3), "20 at 7 a pod");
}

/// A new autoscaler has named no number, because its pods carry the load that began between two ticks. Then most of
/// those pods drain before the next tick.
#[test]
fn a_new_autoscaler_remembers_load_between_two_ticks() {
    let quiet = [0; BASE_PODS + 1];
    let [few, many] = [1, 20].map(|level| [level, level, 0, 0, 0, 0, 0]);
    let load = [
        vec![quiet; QUIET_START_S],
        vec![few; 6],
        vec![many; 1],
        vec![few; 1],
        vec![quiet; QUIET_END_S],
    ]
    .concat();
    let mut ready_spans = [const { 0..QUIET_START_S + 7 }; BASE_PODS];
    ready_spans[0] = 0..NEVER_ENDS;
    let load_case = LoadCase { policy: small_policy(), load, ready_spans };
    let replaced = FaultCase { replaced_at: Some(QUIET_START_S), ..FaultCase::default() };
    let expected = run_load_case(&load_case, &FaultCase::default()).pods;
    let kept = run_load_case(&load_case, &replaced).kept;
    let drained = 4 * (QUIET_START_S + 7);
    assert_eq!((expected[drained], kept[drained - 1]), (6, 6), "40 at 7 a pod");
    assert_eq!(kept[drained], 6);
}

/// The only pod of a node drains while its agent is absent, and no tick falls between the two moments. Its last
/// requests are never reported, so nothing is lowered until a decision no longer depends on them.
#[test]
fn load_of_a_pod_that_leaves_unreported_stays_unknown() {
    let load = [
        constant_load(QUIET_START_S, 0),
        vec![[0, 0, 0, 0, 0, 20, 0]; 8],
        vec![[3, 0, 0, 0, 0, 0, 0]; QUIET_END_S],
    ]
    .concat();
    let mut ready_spans = [const { 0..NEVER_ENDS }; BASE_PODS];
    (ready_spans[1], ready_spans[3], ready_spans[5]) = (0..5, 0..5, 0..QUIET_START_S + 8);
    let policy = ScalePolicy { metric: ScaleMetric::Rps, ..small_policy() };
    let load_case = LoadCase { policy, load, ready_spans };
    let closed_at = QUIET_START_S + 6;
    let absent = single_fault(1, ReportFault::StreamClosed, closed_at, 5);
    let pods = run_load_case(&load_case, &absent).pods;
    let lowered = scale_down_steps(&pods).find(|&at| at > 4 * closed_at);
    // At the first tick after a stable window, a panic window and a tick.
    assert_eq!(lowered, Some(4 * (closed_at + 2 + 10)), "{pods:?}");
}

/// Constant waiting requests, of which each report arrives a second late. The estimate of its time allows for a drift
/// of the clock, which must not take load from a second: 21 asks for 4 pods only while the average is not below it.
#[test]
fn the_drift_of_a_clock_lowers_no_load() {
    let [before, after] = [[0, 0, 8, 0, 10, 7, 0], [0, 0, 0, 0, 0, 11, 10]];
    let load = [
        constant_load(QUIET_START_S + 9, 0),
        vec![before; 5],
        vec![after; 6],
        constant_load(QUIET_END_S, 0),
    ]
    .concat();
    let policy = ScalePolicy {
        stable_window: Duration::from_secs(7),
        aggregation: WindowAggregation::WeightedExponential,
        ..small_policy()
    };
    let repeated = single_fault(ACTIVATOR, ReportFault::Repeated, QUIET_START_S + 4, 13);
    let [expected, faulty] =
        [FaultCase::default(), repeated].map(|faults| requested_pods(&policy, &load, &faults));
    let at = 4 * (QUIET_START_S + 20);
    assert_eq!((expected[at], faulty[at]), (4, 4), "the average is just above 21, at 7 a pod");
}

/// A new autoscaler keeps the pods for its windows, and meanwhile the load ends and returns. The last pod stays for a
/// stable window after that, as with the old autoscaler, which saw the Revision turn inactive in between.
#[test]
fn a_takeover_does_not_shorten_the_stable_window() {
    let load = [
        constant_load(QUIET_START_S + 1, 0),
        vec![[0, 6, 0, 4, 0, 17, 16]; 10],
        constant_load(9, 0),
        vec![[0, 0, 0, 0, 0, 0, 1]; 1],
        constant_load(QUIET_END_S, 0),
    ]
    .concat();
    let policy = ScalePolicy {
        metric: ScaleMetric::Rps,
        stable_window: Duration::from_secs(7),
        scale_to_zero_retention_period: Duration::from_secs(3),
        ..small_policy()
    };
    let replaced = FaultCase { replaced_at: Some(QUIET_START_S + 8), ..FaultCase::default() };
    let [expected, after_takeover] = [FaultCase::default(), replaced]
        .map(|faults| requested_pods(&policy, &load, &faults))
        .map(|pods| pods.iter().rposition(|&it| it > 0));
    let last_quarter = Some(4 * 74 - 1);
    assert_eq!([expected, after_takeover], [last_quarter; 2], "last moment with a pod");
}

/// A fault of three seconds every five seconds, at the same time in the reports of all these senders.
fn frequent_faults(senders: &[usize], fault: ReportFault) -> FaultCase {
    let times = (32..88).step_by(5).flat_map(|from| senders.iter().map(move |&it| (it, from)));
    let faults = times.map(|(sender, from)| TimedFault { sender, fault, from, long: 3 });
    FaultCase { faults: faults.collect(), ..FaultCase::default() }
}

/// Reports of totals that do not change come late again and again: they show that nothing has happened meanwhile.
#[test]
fn late_reports_of_quiet_pods_keep_none() {
    let series = [constant_load(30, 10), constant_load(60, 0)].concat();
    for fault in [ReportFault::Late, ReportFault::Lost] {
        let faults = frequent_faults(&[0, 1, ACTIVATOR], fault);
        let pods = requested_pods(&small_policy(), &series, &faults);
        assert_eq!((pods[4 * 30], pods.last()), (9, Some(&0)), "{fault:?}: 60 at 7 a pod");
    }
}

/// Load that does not change while reports are late is known as well.
#[test]
fn late_reports_of_constant_load_keep_only_its_pods() {
    let series = [constant_load(30, 10), constant_load(60, 5)].concat();
    let faults = frequent_faults(&[0, 1], ReportFault::Late);
    let pods = requested_pods(&small_policy(), &series, &faults);
    assert_eq!((pods[4 * 30], pods.last()), (9, Some(&5)), "60 and 30 at 7 a pod");
}

/// Panic mode keeps its highest number while it lasts, and moments without an average prolong it. A report that comes
/// late makes that number too low, so nothing is lowered for as long.
#[test]
fn a_panic_that_lasts_without_averages_keeps_its_pods() {
    let quiet = [0; BASE_PODS + 1];
    let load = [
        vec![quiet; 74],
        vec![[0, 0, 0, 0, 0, 20, 2]; 10],
        vec![quiet; 8],
        vec![[0, 0, 0, 0, 0, 0, 8]; 2],
        vec![quiet; QUIET_END_S],
    ]
    .concat();
    // No pod is ready between the two bursts, so there is no average.
    let ready_spans = [0..40, 0..40, 0..40, 93..NEVER_ENDS, 0..40, 0..84];
    let load_case = LoadCase { policy: small_policy(), load, ready_spans };
    let lost = single_fault(1, ReportFault::Lost, 65, 18);
    let pods = [FaultCase::default(), lost].map(|faults| run_load_case(&load_case, &faults).pods);
    assert_eq!(pods.map(|pods| pods[4 * 94]), [4, 4], "22 at 7 a pod");
}

/// A burst that follows quiet seconds is averaged over the whole panic window, which here is as long as a tick. A new
/// autoscaler has the same average, and lowers nothing that the former one would have kept.
#[test]
fn a_burst_after_known_quiet_begins_no_panic_that_a_new_autoscaler_would_not_begin() {
    let quiet = [0; BASE_PODS + 1];
    let load = [
        vec![quiet; 53],
        vec![[0, 0, 9, 0, 0, 59, 0]; 9],
        vec![quiet; 11],
        vec![[0, 0, 38, 19, 0, 0, 9]],
        vec![quiet; QUIET_END_S],
    ]
    .concat();
    let policy = ScalePolicy {
        stable_window: Duration::from_secs(11),
        panic_window_percent: 14.2,
        ..small_policy()
    };
    let ready_spans = [0..40, 0..NEVER_ENDS, 0..NEVER_ENDS, 0..NEVER_ENDS, 0..40, 0..NEVER_ENDS];
    let load_case = LoadCase { policy, load, ready_spans };
    let replaced = FaultCase { replaced_at: Some(62), ..FaultCase::default() };
    let [one, new] =
        [FaultCase::default(), replaced].map(|faults| run_load_case(&load_case, &faults).pods);
    assert_eq!([one[4 * 72], new[4 * 72]], [10, 10], "68 at 7 a pod");
    assert!(one.iter().zip(&new).all(|(one, new)| new >= one), "{one:?} {new:?}");
}
