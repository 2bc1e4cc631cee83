//! Pure: the statistics that a fair comparison needs.

use std::collections::BTreeMap;

/// A median and the bounds of an interval that holds the true one with at least 95 % certainty.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MedianInterval {
    pub(super) value: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

/// Values of each subject, round by round.
pub(super) type RoundValues = BTreeMap<&'static str, Vec<f64>>;

/// Value below which `share` of the `sorted` values lie, by the nearest-rank method.
pub(super) fn quantile(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

/// Returns a copy in ascending order.
pub(super) fn sorted(values: &[f64]) -> Vec<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values
}

/// Median with its distribution-free confidence interval.
///
/// The k-th smallest and k-th largest of n values enclose the true median unless fewer than k of n coin flips fall
/// on one side. Worked example: n = 15 gives k = 4, for P(fewer than 4 heads of 15) = 576 / 32768 = 1.8 %.
pub(super) fn median(values: &[f64]) -> MedianInterval {
    let sorted = sorted(values);
    let count = sorted.len();
    let value = match count % 2 {
        0 if count > 0 => f64::midpoint(sorted[count / 2 - 1], sorted[count / 2]),
        _ => sorted.get(count / 2).copied().unwrap_or(f64::NAN),
    };
    let rank = interval_rank(count);
    let low = sorted.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN);
    let high = sorted.get(count.saturating_sub(rank.max(1))).copied().unwrap_or(f64::NAN);
    MedianInterval { value, low, high }
}

/// Largest k with P(fewer than k of `count` fair coins show heads) ≤ 2.5 %; 0 when there are too few values.
fn interval_rank(count: usize) -> usize {
    let mut rank = 0;
    let mut probability = 0.5_f64.powi(i32::try_from(count).unwrap_or(i32::MAX));
    let mut below = probability;
    while below <= 0.025 && rank < count {
        rank += 1;
        // Binomial coefficients by recurrence: C(n, k) = C(n, k-1) · (n+1-k) / k.
        probability *= (count + 1 - rank) as f64 / rank as f64;
        below += probability;
    }
    rank
}

/// Median ratio of two subjects within each round, in which influences on both cancel out.
pub(super) fn ratio(rounds: &RoundValues, subject: &str, control: &str) -> Option<MedianInterval> {
    let (subject, control) = (rounds.get(subject)?, rounds.get(control)?);
    let ratios: Vec<f64> = subject.iter().zip(control).map(|(one, other)| one / other).collect();
    Some(median(&ratios))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fifteen_rounds_give_the_fourth_and_the_twelfth_as_bounds() {
        let values: Vec<f64> = (1..=15).map(f64::from).collect();
        assert_eq!(median(&values), MedianInterval { value: 8.0, low: 4.0, high: 12.0 });
    }

    #[test]
    fn a_ratio_is_taken_within_each_round() {
        let rounds =
            RoundValues::from([("a", vec![2.0, 20.0, 200.0]), ("b", vec![1.0, 10.0, 100.0])]);
        assert_eq!(ratio(&rounds, "a", "b").map(|ratio| ratio.value), Some(2.0));
        assert_eq!(ratio(&rounds, "a", "c"), None);
    }

    #[test]
    fn quantiles_are_values_that_were_measured() {
        let values: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!([quantile(&values, 0.5), quantile(&values, 0.99)], [100.0, 198.0]);
        assert!(quantile(&[], 0.5).is_nan());
    }
}
