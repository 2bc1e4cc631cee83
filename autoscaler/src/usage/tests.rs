use common::wire::{NamespacedName, RequestTotals, UsageKey};
use proptest::prelude::*;

use super::*;

/// Offset of the sender's clock, which runs an hour ahead of the autoscaler's.
const SENDER_CLOCK_OFFSET: Duration = Duration::from_secs(3600);
const SYNCED_STREAM: UsageStream = UsageStream { sender: 0, number: 0, synced: true };

pub(crate) fn policy() -> ScalePolicy {
    ScalePolicy::default()
}

fn at(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

fn ns(at: Duration) -> u64 {
    u64::try_from((at + SENDER_CLOCK_OFFSET).as_nanos()).unwrap()
}

fn report(pod: Option<&str>, now: f64, totals: RequestTotals) -> UsageSample {
    UsageSample {
        key: UsageKey {
            revision: NamespacedName::new("default", "hello-00001"),
            pod: pod.map(Into::into),
        },
        read_at_ns: ns(at(now)),
        totals,
        status: Vec::new(),
        latency: Vec::new(),
        client: None,
    }
}

impl RevisionLoad {
    /// Applies a report on a wait queue, or on a pod that does not drain.
    fn apply_counted(&mut self, now: Duration, stream: UsageStream, sample: &UsageSample) {
        let is_counted = true;
        self.apply_report(now, stream, is_counted, sample);
    }
}

fn awake(metric: ScaleMetric) -> RevisionLoad {
    let mut load = RevisionLoad::new();
    load.wake(at(0.0), &ScalePolicy { metric, ..policy() });
    load
}

fn second(load: &RevisionLoad, second: u64) -> f64 {
    let load_in_second =
        load.window.as_ref().unwrap().1.load_in_second(Duration::from_secs(second));
    (load_in_second * 1e6).round() / 1e6
}

#[test]
fn requests_are_load_for_as_long_as_they_run() {
    let (mut load, mut totals) = (awake(ScaleMetric::Concurrency), RequestTotals::default());
    load.apply_counted(at(10.0), SYNCED_STREAM, &report(Some("p"), 10.0, totals));
    // Four requests of half a second, and one that stays.
    (0..4).for_each(|_| totals.record_start(ns(at(10.25))));
    (0..4).for_each(|_| totals.record_finish(ns(at(10.75))));
    totals.record_start(ns(at(10.5)));
    load.apply_counted(at(11.0), SYNCED_STREAM, &report(Some("p"), 11.0, totals));
    assert_eq!(second(&load, 10), 2.5);
    // Silence: the level holds.
    load.accrue_until(at(13.5), true);
    assert_eq!([11, 12, 13].map(|it| second(&load, it)), [1.0, 1.0, 0.5]);
    load.apply_counted(at(13.0), SYNCED_STREAM, &report(Some("p"), 13.0, totals));
    totals.record_finish(ns(at(13.25)));
    load.apply_counted(at(14.0), SYNCED_STREAM, &report(Some("p"), 14.0, totals));
    assert_eq!(second(&load, 13), 0.25, "what was taken to hold is corrected");
    assert_eq!(load.in_flight(), 0);
}

#[test]
fn the_first_request_after_quiet_counts_for_its_whole_second() {
    let (mut load, mut totals) = (awake(ScaleMetric::Concurrency), RequestTotals::default());
    load.apply_counted(at(1.0), SYNCED_STREAM, &report(None, 1.0, totals));
    totals.record_start(ns(at(10.9)));
    load.apply_counted(at(10.9), SYNCED_STREAM, &report(None, 10.9, totals));
    assert_eq!(second(&load, 10), 1.0);
    totals.record_finish(ns(at(10.9001)));
    totals.record_start(ns(at(11.5)));
    load.apply_counted(at(11.5), SYNCED_STREAM, &report(None, 11.5, totals));
    load.accrue_until(at(12.0), true);
    assert_eq!([10, 11].map(|it| second(&load, it)), [1.0, 0.5], "the next one is not the first");
}

#[test]
fn several_senders_add_up_and_a_lost_ones_report_still_counts() {
    let mut load = awake(ScaleMetric::Concurrency);
    let two = UsageStream { sender: 1, ..SYNCED_STREAM };
    let mut totals = RequestTotals::default();
    (0..3).for_each(|_| totals.record_start(ns(at(1.0))));
    load.apply_counted(at(1.0), SYNCED_STREAM, &report(None, 1.0, totals));
    load.apply_counted(at(1.0), two, &report(None, 1.0, totals));
    load.apply_counted(at(1.0), two, &report(Some("p"), 1.0, totals));
    assert_eq!((load.in_flight(), load.waiting()), (9, 6));
    load.mark_sender_offline(at(2.0), 1);
    assert_eq!((load.in_flight(), load.waiting()), (9, 6), "not known, so not zero");
    assert!(!load.is_current(at(2.0)));
    let next_stream = UsageStream { sender: 1, number: 1, synced: false };
    load.apply_counted(at(4.0), next_stream, &report(Some("p"), 4.0, totals));
    load.complete_snapshot(at(4.0), next_stream);
    load.accrue_until(at(4.0), true);
    assert_eq!((load.in_flight(), load.waiting()), (6, 3), "it did not name its wait queue again");
    assert_eq!(second(&load, 3), 9.0, "what the absence hid is made up for");
    assert!(load.take_gap());
}

#[test]
fn a_new_stream_that_does_not_name_a_pod_ends_it() {
    let mut load = awake(ScaleMetric::Concurrency);
    let mut totals = RequestTotals::default();
    totals.record_start(ns(at(1.0)));
    load.apply_counted(at(1.0), SYNCED_STREAM, &report(Some("old"), 1.0, totals));
    load.mark_sender_offline(at(2.0), 0);
    let next_stream = UsageStream { number: 1, synced: false, ..SYNCED_STREAM };
    load.apply_counted(at(3.0), next_stream, &report(Some("new"), 3.0, RequestTotals::default()));
    load.complete_snapshot(at(3.0), next_stream);
    assert_eq!((load.is_pod_reported("old"), load.is_pod_reported("new")), (false, true));
}

/// An agent sends a pod's last totals and the removal in one batch.
#[test]
fn the_last_totals_of_a_pod_are_load_although_its_removal_follows_at_once() {
    let (mut load, mut totals) = (awake(ScaleMetric::Rps), RequestTotals::default());
    load.apply_counted(at(10.0), SYNCED_STREAM, &report(Some("p"), 10.0, totals));
    (0..4).for_each(|_| totals.record_start(ns(at(10.25))));
    (0..4).for_each(|_| totals.record_finish(ns(at(10.5))));
    load.apply_counted(at(10.75), SYNCED_STREAM, &report(Some("p"), 10.75, totals));
    load.remove_source(at(10.75), SYNCED_STREAM.sender, Some("p"));
    assert_eq!((load.requests_started(), second(&load, 10)), (4, 4.0));
    assert!(!load.is_pod_reported("p"));
}

#[test]
fn counters_that_go_backwards_are_no_load() {
    let (mut load, mut totals) = (awake(ScaleMetric::Concurrency), RequestTotals::default());
    (0..50).for_each(|_| totals.record_start(ns(at(1.0))));
    (0..50).for_each(|_| totals.record_finish(ns(at(1.5))));
    load.apply_counted(at(2.0), SYNCED_STREAM, &report(Some("p"), 2.0, totals));
    load.apply_counted(at(3.0), SYNCED_STREAM, &report(Some("p"), 3.0, RequestTotals::default()));
    load.accrue_until(at(4.0), true);
    assert_eq!([0, 1, 3].map(|it| second(&load, it)), [0.0; 3]);
    let mut rps = awake(ScaleMetric::Rps);
    rps.apply_counted(at(2.0), SYNCED_STREAM, &report(Some("p"), 2.0, totals));
    rps.apply_counted(at(3.0), SYNCED_STREAM, &report(Some("p"), 3.0, RequestTotals::default()));
    assert_eq!([2, 3].map(|it| second(&rps, it)), [1.0, 0.0]);
}

#[test]
fn the_past_of_a_subject_first_met_is_not_load() {
    let (mut load, mut totals) = (awake(ScaleMetric::Concurrency), RequestTotals::default());
    (0..1_000_000).for_each(|_| totals.record_start(ns(at(0.0))));
    (0..999_990).for_each(|_| totals.record_finish(ns(at(5.0))));
    let opening = UsageStream { synced: false, ..SYNCED_STREAM };
    load.apply_counted(at(10.0), opening, &report(Some("p"), 10.0, totals));
    load.accrue_until(at(11.0), true);
    assert_eq!(second(&load, 10), 10.0);
}

#[test]
fn a_draining_pod_asks_for_no_other_pod() {
    let (mut load, mut totals) = (awake(ScaleMetric::Concurrency), RequestTotals::default());
    totals.record_start(ns(at(1.0)));
    load.apply_counted(at(1.0), SYNCED_STREAM, &report(Some("p"), 1.0, totals));
    load.set_pod_counted(at(2.0), "p", false);
    load.accrue_until(at(4.0), true);
    assert_eq!([1, 2, 3].map(|it| second(&load, it)), [1.0, 0.0, 0.0]);
    assert_eq!(load.in_flight(), 0);
}

#[test]
fn a_request_that_waited_is_one_arrival() {
    let mut load = awake(ScaleMetric::Rps);
    let (mut queue, mut pod) = (RequestTotals::default(), RequestTotals::default());
    load.apply_counted(at(1.0), SYNCED_STREAM, &report(None, 1.0, queue));
    load.apply_counted(at(1.0), SYNCED_STREAM, &report(Some("p"), 1.0, pod));
    (0..30).for_each(|_| queue.record_start(ns(at(2.0))));
    load.apply_counted(at(2.0), SYNCED_STREAM, &report(None, 2.0, queue));
    (0..30).for_each(|_| queue.record_finish(ns(at(4.5))));
    (0..40).for_each(|_| pod.record_start(ns(at(4.5))));
    load.apply_counted(at(5.0), SYNCED_STREAM, &report(None, 5.0, queue));
    load.apply_counted(at(5.0), SYNCED_STREAM, &report(Some("p"), 5.0, pod));
    let total: f64 = (1..6).map(|it| second(&load, it)).sum();
    assert_eq!(total, 40.0);
}

/// 100 requests a second arrive. 10 of them reach a pod, 90 leave or time out. All count, as in Knative's activator.
#[test]
fn a_request_that_no_pod_got_is_an_arrival() {
    let mut load = awake(ScaleMetric::Rps);
    let (mut queue, mut pod) = (RequestTotals::default(), RequestTotals::default());
    load.apply_counted(at(1.0), SYNCED_STREAM, &report(None, 1.0, queue));
    load.apply_counted(at(1.0), SYNCED_STREAM, &report(Some("p"), 1.0, pod));
    for second in 2..12 {
        let now = f64::from(second);
        (0..100).for_each(|_| queue.record_start(ns(at(now - 0.5))));
        (0..100).for_each(|_| queue.record_finish(ns(at(now - 0.25))));
        queue.abandoned += 90;
        (0..10).for_each(|_| pod.record_start(ns(at(now - 0.25))));
        (0..10).for_each(|_| pod.record_finish(ns(at(now - 0.125))));
        load.apply_counted(at(now), SYNCED_STREAM, &report(None, now, queue));
        load.apply_counted(at(now), SYNCED_STREAM, &report(Some("p"), now, pod));
    }
    let total: f64 = (1..12).map(|it| second(&load, it)).sum();
    assert_eq!(total, 1000.0);
}

#[test]
fn a_burst_that_waits_without_a_pod_counts_at_once() {
    let (mut load, mut queue) = (awake(ScaleMetric::Concurrency), RequestTotals::default());
    load.apply_counted(at(1.0), SYNCED_STREAM, &report(None, 1.0, queue));
    (0..300).for_each(|_| queue.record_start(ns(at(9.99))));
    load.apply_counted(at(9.99), SYNCED_STREAM, &report(None, 9.99, queue));
    let panic = |ready| load.averages(at(9.99), ready, &policy()).unwrap().panic;
    assert_eq!((panic(0), panic(1)), (300.0, 1.0));
}

#[test]
fn a_sleeping_revision_keeps_little_but_the_base_of_differences() {
    let (mut load, mut queue) = (awake(ScaleMetric::Concurrency), RequestTotals::default());
    queue.record_start(ns(at(1.0)));
    queue.record_finish(ns(at(2.0)));
    load.apply_counted(at(2.0), SYNCED_STREAM, &report(None, 2.0, queue));
    load.sleep();
    assert!(!load.has_new_load(SYNCED_STREAM, &report(None, 3.0, queue)));
    queue.record_start(ns(at(9.0)));
    assert!(load.has_new_load(SYNCED_STREAM, &report(None, 9.0, queue)));
    assert!(load.sources.capacity() * size_of::<UsageSource>() + size_of::<RevisionLoad>() <= 512);
}

proptest! {
    /// The load over all seconds equals the totals, however reports are cut, lost or late.
    #[test]
    fn the_sum_of_load_is_exact(
        requests in proptest::collection::vec((0.0f64..20.0, 0.0f64..8.0), 1..40),
        cuts in proptest::collection::vec(0.0f64..30.0, 0..40),
    ) {
        let mut load = awake(ScaleMetric::Concurrency);
        let mut cuts: Vec<f64> = cuts.into_iter().chain([0.0, 30.0]).collect();
        cuts.sort_by(f64::total_cmp);
        for now in cuts {
            let mut totals = RequestTotals::default();
            for &(from, long) in &requests {
                if from <= now { totals.record_start(ns(at(from))); }
                if from + long <= now { totals.record_finish(ns(at(from + long))); }
            }
            load.apply_counted(at(now), SYNCED_STREAM, &report(Some("p"), now, totals));
        }
        load.accrue_until(at(30.0), true);
        let recorded: f64 = (0..=30).map(|it| second(&load, it)).sum();
        let expected: f64 = requests.iter().map(|(_, long)| long).sum();
        // Each first request after quiet may add the rest of its second.
        prop_assert!(recorded >= expected - 0.01 && recorded <= expected + 16.0, "{recorded} of {expected}");
    }
}
