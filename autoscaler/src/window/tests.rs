use proptest::prelude::*;

use super::*;

const MINUTE: Duration = Duration::from_secs(60);

fn at(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

/// A one-minute window with `value` recorded in each second of `seconds`.
fn window_with(seconds: impl IntoIterator<Item = u32>, value: f64) -> LoadWindow {
    let mut window = LoadWindow::new(MINUTE, 10.0);
    seconds.into_iter().for_each(|second| window.add(at(second.into()), value));
    window
}

fn linear(window: &LoadWindow, now: f64) -> Option<(f64, f64)> {
    let both = window.averages(at(now), 0.0, WindowAggregation::Linear);
    both.map(|both| (both.stable, both.panic))
}

/// As in Knative, panic window = round(stable × percent / 100), at least one bucket of 1 s.
#[test]
fn the_panic_window_is_a_rounded_share_of_the_stable_one() {
    let table =
        [(60, 10.0, 6), (6, 10.0, 1), (6, 1.0, 1), (15, 10.0, 2), (3600, 10.0, 360), (6, 100.0, 6)];
    for (stable, percent, panic) in table {
        let window = LoadWindow::new(Duration::from_secs(stable), percent);
        assert_eq!(window.panic_len, panic, "{percent} % of {stable} s");
    }
}

/// As in Knative, partial windows are not diluted at either end, inner gaps count as 0.
#[test]
fn silence_dilutes_an_average_only_between_two_writes() {
    // First write 6 s ago: the mean of 6 seconds.
    assert_eq!(linear(&window_with(0..6, 12.0), 6.0), Some((12.0, 12.0)));
    // Last write 10 s ago: the mean of the older 50 seconds only; the panic window is empty.
    assert_eq!(linear(&window_with(0..100, 12.0), 110.0), Some((12.0, 0.0)));
    // A gap of 5 s between two writes of 12 counts as 0.
    assert_eq!(linear(&window_with([0, 6], 12.0), 7.0), Some((round(24.0 / 7.0), 12.0)));
    // A gap as long as the panic window restarts that window.
    assert_eq!(linear(&window_with([0, 5], 12.0), 6.0), Some((4.0, 4.0)));
    // Silence as long as the window empties and restarts it.
    assert_eq!(linear(&window_with([0, 60], 12.0), 61.0), Some((12.0, 12.0)));
    assert_eq!(linear(&window_with([0, 59], 12.0), 60.0), Some((0.4, 12.0)));
}

#[test]
fn silence_longer_than_the_window_means_that_nothing_is_known() {
    assert_eq!(linear(&LoadWindow::new(MINUTE, 10.0), 5.0), None);
    let window = window_with(0..10, 12.0);
    assert_eq!(linear(&window, 69.0), Some((12.0, 0.0)));
    assert_eq!(linear(&window, 70.0), Some((0.0, 0.0)), "as long as the window, as in Knative");
    assert_eq!(linear(&window, 71.0), None);
    let mut window = window_with(0..10, 12.0);
    window.mark_known_until(at(70.0));
    assert_eq!(linear(&window, 70.0), Some((0.0, 0.0)), "known silence is no load");
}

#[test]
fn a_full_window_forgets_its_oldest_second() {
    let mut window = LoadWindow::new(Duration::from_secs(6), 50.0);
    (0..6).for_each(|second| window.add(at(second.into()), 10.0));
    window.add(at(6.0), 70.0);
    assert_eq!(linear(&window, 7.0), Some((20.0, 30.0)));
}

/// As in Knative, linear averages are rounded to 6 digits.
#[test]
fn linear_averages_are_rounded_to_six_digits() {
    assert_eq!(linear(&window_with([0, 1, 2], 1.0 / 3.0), 3.0), Some((0.333333, 0.333333)));
    let mut window = window_with([0], 1e-5);
    window.mark_known_until(at(60.0));
    assert_eq!(linear(&window, 60.0), Some((0.0, 0.0)));
}

/// As in Knative, coefficient = max(1 − (1 − 0.9999)^(1/n), 0.2); newest weighs c, then c(1−c), …
#[test]
fn exponential_weights_fall_from_the_newest_second() {
    let table = [(60, 0.2), (6, 0.784557), (41, 0.201198), (1, 0.9999)];
    for (len, expected) in table {
        assert_eq!(round(newest_weight(len)), expected, "{len} s");
    }
    let mut window = window_with([0, 1], 0.0);
    window.add(at(2.0), 10.0);
    window.add(at(3.0), 20.0);
    let both = window.averages(at(4.0), 0.0, WindowAggregation::WeightedExponential).unwrap();
    assert_eq!(round(both.stable), round(20.0 * 0.2 + 10.0 * 0.2 * 0.8));
    let fast = newest_weight(6);
    assert_eq!(round(both.panic), round(20.0 * fast + 10.0 * fast * (1.0 - fast)));
}

/// As in Knative, each second that was reported without load takes its weight off the average: 10 s of 100, then none.
/// Seconds that no report covers take nothing off.
#[test]
fn a_weighted_average_falls_by_reported_silence_alone() {
    let mut window = window_with(0..10, 100.0);
    let stable = |window: &LoadWindow, now: f64| {
        let both = window.averages(at(now), 0.0, WindowAggregation::WeightedExponential);
        both.map(|both| round(both.stable))
    };
    assert_eq!([10.0, 14.0, 20.0].map(|now| stable(&window, now)), [Some(89.262582); 3]);
    window.mark_known_until(at(14.0));
    assert_eq!([14.0, 20.0].map(|now| stable(&window, now)), [Some(36.561953); 2]);
    window.mark_known_until(at(20.0));
    assert_eq!(stable(&window, 20.0), Some(9.584497));
}

#[test]
fn the_running_second_counts_when_it_raises_the_average() {
    let mut window = window_with([0, 1], 10.0);
    window.add(at(2.1), 4.0);
    assert_eq!(linear(&window, 2.1), Some((10.0, 10.0)), "4 so far is no fall yet");
    window.add(at(2.2), 36.0);
    assert_eq!(linear(&window, 2.2), Some((20.0, 20.0)));
    assert_eq!(linear(&window, 3.0), Some((20.0, 20.0)));
    let floored = window.averages(at(2.2), 100.0, WindowAggregation::Linear).unwrap();
    assert_eq!((floored.stable, floored.panic), (40.0, 40.0));
}

#[test]
fn what_was_prepaid_is_not_counted_again() {
    let mut window = LoadWindow::new(MINUTE, 10.0);
    window.prepay(at(3.2), 1.0);
    window.add_level(1.0, at(3.2), at(5.0));
    assert_eq!([3.0, 4.0].map(|second| round(window.load_in_second(at(second)))), [1.0, 1.0]);
    window.add_level(1.0, at(3.0), at(4.0));
    assert_eq!(round(window.load_in_second(at(3.0))), 1.8, "0.2 of it was left");
}

#[test]
fn another_length_keeps_the_newest_seconds() {
    let mut window = window_with(0..30, 5.0);
    window.resize(Duration::from_secs(10), 10.0);
    assert_eq!(linear(&window, 30.0), Some((5.0, 5.0)));
    window.resize(MINUTE, 10.0);
    window.mark_known_until(at(40.0));
    assert_eq!(linear(&window, 40.0), Some((round(11.0 * 5.0 / 21.0), 0.0)));
}

proptest! {
    /// The area under a level is preserved when it is cut into seconds.
    #[test]
    fn levels_keep_their_area(level in 0.1f64..500.0, from in 0.0f64..20.0, long in 0.01f64..30.0) {
        let mut window = LoadWindow::new(MINUTE, 10.0);
        window.add_level(level, at(from), at(from + long));
        let area: f64 = (0..60).map(|second| window.load_in_second(at(second.into()))).sum();
        prop_assert!((area - level * long).abs() < 1e-3 * level, "{area} of {}", level * long);
    }

    /// The average of any history lies between its least and its greatest second.
    #[test]
    fn averages_stay_within_what_was_written(sums in proptest::collection::vec(0.0f64..1000.0, 1..150)) {
        let mut window = LoadWindow::new(MINUTE, 10.0);
        for (second, &sum) in sums.iter().enumerate() {
            window.add(Duration::from_secs(second as u64), sum);
        }
        let (stable, panic) = linear(&window, sums.len() as f64).unwrap();
        let newest = |len: usize| &sums[sums.len().saturating_sub(len)..];
        for (average, seconds) in [(stable, newest(60)), (panic, newest(6))] {
            let least = seconds.iter().copied().fold(f64::MAX, f64::min);
            let greatest = seconds.iter().copied().fold(0.0, f64::max);
            prop_assert!(average >= least - 1e-5 && average <= greatest + 1e-5);
        }
    }
}
