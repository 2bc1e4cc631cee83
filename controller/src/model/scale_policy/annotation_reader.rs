//! Pure: reader of the annotations `autoscaling.knative.dev/*`, with Knative's bounds and messages.

use std::{collections::BTreeMap, fmt::Display, time::Duration};

use common::wire::WindowAggregation;

use super::{AUTOSCALING_GROUP, AUTOSCALING_PREFIX, CLASSES, KPA_CLASS};
use crate::model::{
    go_values::{self, GoDuration},
    problem::Problem,
};

/// Reader of autoscaling annotations by name, which collects broken rules.
///
/// Names are those after [`AUTOSCALING_PREFIX`], such as `min-scale`. An invalid value leaves its target unchanged.
pub(super) struct AnnotationReader<'a> {
    annotations: &'a BTreeMap<String, String>,
    /// Path of the annotations in the object, for the messages.
    path: &'a str,
    /// Broken rules so far.
    pub(super) problems: Vec<Problem>,
}

impl<'a> AnnotationReader<'a> {
    pub(super) fn new(annotations: &'a BTreeMap<String, String>, path: &'a str) -> Self {
        Self { annotations, path, problems: Vec::new() }
    }

    /// Returns the first of the alternate names that is set, with its value.
    pub(super) fn get(&self, names: &[&'static str]) -> Option<(&'static str, &'a str)> {
        let value =
            |name: &&'static str| self.annotations.get(&format!("{AUTOSCALING_PREFIX}{name}"));
        names.iter().find_map(|name| value(name).map(|value| (*name, value.trim())))
    }

    /// Returns the path of an annotation in the object.
    pub(super) fn field_path(&self, name: &str) -> String {
        format!("{}.{AUTOSCALING_PREFIX}{name}", self.path)
    }

    /// Reads a number within bounds; `None` if there is none or it is invalid.
    pub(super) fn read_number(
        &mut self,
        names: &[&'static str],
        bounds: std::ops::RangeInclusive<f64>,
    ) -> Option<f64> {
        let (name, text) = self.get(names)?;
        match text.parse::<f64>() {
            Ok(value) if value.is_finite() && bounds.contains(&value) => return Some(value),
            Ok(_) => self.report_out_of_bounds(name, text, &bounds),
            Err(_) => self.problems.push(Problem::invalid(self.field_path(name), text)),
        }
        None
    }

    fn report_out_of_bounds<T: Display>(
        &mut self,
        name: &str,
        text: &str,
        bounds: &std::ops::RangeInclusive<T>,
    ) {
        let (path, low, high) = (self.field_path(name), bounds.start(), bounds.end());
        self.problems.push(Problem::out_of_bounds(path, low, text, high));
    }

    pub(super) fn read_number_into(
        &mut self,
        target: &mut f64,
        names: &[&'static str],
        bounds: std::ops::RangeInclusive<f64>,
    ) {
        *target = self.read_number(names, bounds).unwrap_or(*target);
    }

    pub(super) fn read_burst_capacity(&mut self, target: &mut f64) {
        let names = ["target-burst-capacity", "targetBurstCapacity"];
        // -1 stands for unlimited burst capacity: activators then stay in the path at all times.
        let Some((name, text)) = self.get(&names) else { return };
        match text.parse::<f64>() {
            Ok(value) if value.is_finite() && (value >= 0.0 || value == -1.0) => *target = value,
            Ok(_) | Err(_) => {
                let problem = Problem::invalid(self.field_path(name), text);
                self.problems.push(problem.with_advice("use -1, 0 or a number above 0"));
            }
        }
    }

    /// Reads a count within bounds; `None` if there is none or it is invalid.
    pub(super) fn read_count(
        &mut self,
        names: &[&'static str],
        bounds: std::ops::RangeInclusive<i64>,
    ) -> Option<u32> {
        let (name, text) = self.get(names)?;
        match text.parse::<i64>() {
            Ok(value) if bounds.contains(&value) => return u32::try_from(value).ok(),
            // Too large for an i64 is out of bounds, not malformed.
            Err(_) if !is_integer(text) => {
                self.problems.push(Problem::invalid(self.field_path(name), text))
            }
            Ok(_) | Err(_) => self.report_out_of_bounds(name, text, &bounds),
        }
        None
    }

    /// Reads `activation-scale`: at least 2, between minimum and maximum.
    pub(super) fn read_activation_scale(&mut self, target: &mut u32, min: u32, max: u32) {
        let Some((name, text)) = self.get(&["activation-scale", "activationScale"]) else { return };
        let Ok(value) = text.parse::<i32>() else {
            self.problems.push(Problem::invalid(self.field_path(name), text));
            return;
        };
        let message = if i64::from(min) > i64::from(value) {
            format!("min-scale={min} is greater than activation-scale={value}")
        } else if max > 0 && i64::from(max) < i64::from(value) {
            format!("max-scale={max} is less than activation-scale={value}")
        } else if value < 2 {
            format!("activation-scale={value} must be greater than 1")
        } else {
            *target = value.unsigned_abs();
            return;
        };
        self.problems.push(Problem::new(self.field_path(name), message));
    }

    /// Returns true if `max-scale` obeys `max-scale-limit`.
    pub(super) fn check_max_scale_limit(&mut self, name: &str, max: u32, limit: u32) -> bool {
        let problem_count = self.problems.len();
        if limit > 0 && max == 0 {
            let message = format!("max-scale=0 (unlimited), must be less than {limit}");
            self.problems.push(Problem::new(self.field_path(name), message));
        } else if limit > 0 && max > limit {
            self.problems.push(Problem::out_of_bounds(self.field_path(name), 1, max, limit));
        }
        self.problems.len() == problem_count
    }

    pub(super) fn read_initial_scale(&mut self, target: &mut u32, allow_zero: bool) {
        let Some((name, text)) = self.get(&["initial-scale", "initialScale"]) else { return };
        let at = self.field_path(name);
        // Knative writes the rule behind the path in these two messages.
        self.problems.push(match text.parse::<i32>() {
            Ok(0) if !allow_zero => {
                Problem::invalid(format!("{at}=0 not allowed by cluster"), text)
            }
            Ok(value) if value >= 0 => {
                *target = value.unsigned_abs();
                return;
            }
            Ok(_) => Problem::invalid(format!("{at} must be greater than 0"), text),
            Err(_) => Problem::invalid(at, text),
        });
    }

    /// Reads a duration annotation in whole seconds within bounds.
    pub(super) fn read_whole_seconds(
        &mut self,
        target: &mut Duration,
        names: &[&'static str],
        bounds: (Duration, Duration),
    ) {
        let mut value = *target;
        self.read_duration(&mut value, names, bounds);
        match self.get(names) {
            Some((name, _)) if value.subsec_nanos() != 0 => {
                let message = "must be specified with at most second precision";
                self.problems.push(Problem::new(self.field_path(name), message));
            }
            _ => *target = value,
        }
    }

    /// Reads a duration annotation within bounds.
    pub(super) fn read_duration(
        &mut self,
        target: &mut Duration,
        names: &[&'static str],
        (low, high): (Duration, Duration),
    ) {
        let Some((name, text)) = self.get(names) else { return };
        let (low, high) = (GoDuration::from(low), GoDuration::from(high));
        let problem = match go_values::parse_duration(text) {
            Ok(value) if value >= low && value <= high => {
                *target = value.to_duration();
                return;
            }
            Ok(_) => Problem::out_of_bounds(self.field_path(name), low, text, high),
            Err(_) => Problem::invalid(self.field_path(name), text)
                .with_advice("write it as 30s or 1m30s"),
        };
        self.problems.push(problem);
    }

    /// Checks that a class of this group is one of [`CLASSES`].
    pub(super) fn check_class(&mut self) {
        let Some((name, class)) = self.get(&["class"]) else { return };
        if class.ends_with(AUTOSCALING_GROUP) && !CLASSES.contains(&class) {
            self.problems.push(Problem::invalid(self.field_path(name), class));
        }
    }

    pub(super) fn read_aggregation(&mut self, target: &mut WindowAggregation) {
        let names = ["metric-aggregation-algorithm", "metricAggregationAlgorithm"];
        match self.get(&names) {
            None | Some((_, "")) => {}
            Some((_, "linear")) => *target = WindowAggregation::Linear,
            Some((_, "weighted-exponential" | "weightedExponential")) => {
                *target = WindowAggregation::WeightedExponential;
            }
            // Without a class Knative does not check: another autoscaler may know the algorithm.
            Some((name, other)) if self.get(&["class"]).is_some_and(|(_, it)| it == KPA_CLASS) => {
                self.problems.push(Problem::invalid(self.field_path(name), other));
            }
            Some(_) => {}
        }
    }
}

/// Returns true if `text` is a whole number of any size.
fn is_integer(text: &str) -> bool {
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    !digits.is_empty() && digits.bytes().all(|it| it.is_ascii_digit())
}
