//! Pure: figures of each case, by subject, name and round, and the order in which subjects take turns.

use std::collections::BTreeMap;

use crate::cases::GatewaySubject;

/// A figure of one measurement, with its name.
pub(crate) type Figure = (&'static str, f64);

/// Values of one case by subject and figure, one for each round.
pub(crate) type MeasuredCase = BTreeMap<&'static str, BTreeMap<&'static str, Vec<f64>>>;

/// Order of the subjects in a round. It rotates, so that a drift within rounds favours none of them.
pub(crate) fn round_order(subjects: &[GatewaySubject], round: usize) -> Vec<GatewaySubject> {
    (0..subjects.len()).map(|offset| subjects[(offset + round) % subjects.len()]).collect()
}

/// Adds the figures of one measurement.
pub(crate) fn add_figures(all: &mut MeasuredCase, subject: &'static str, figures: &[Figure]) {
    let by_name = all.entry(subject).or_default();
    for (name, value) in figures {
        by_name.entry(*name).or_default().push(*value);
    }
}
