//! Pure: Knative's autoscaling configuration and annotations, checked once into a [`ScalePolicy`].
//!
//! Keys, defaults and bounds: knative/serving `config/core/configmaps/autoscaler.yaml`, `pkg/autoscaler/config`
//! and `pkg/apis/autoscaling/annotation_validation.go` at 98e5ef9. Two shipped defaults differ, because pods have no
//! sidecar here: `target-burst-capacity` is 0 and `allow-zero-initial-scale` is true.

use std::{collections::BTreeMap, time::Duration};

use common::wire::{ScaleMetric, ScalePolicy, WindowAggregation};

use crate::model::problem::Problem;

/// API group of all annotations read here.
pub const AUTOSCALING_GROUP: &str = "autoscaling.knative.dev";
/// Prefix of the keys of all annotations read here.
pub const AUTOSCALING_PREFIX: &str = "autoscaling.knative.dev/";
/// Smallest target, Knative's `TargetMin`.
const TARGET_MIN: f64 = 0.01;
/// Utilization of the target with the metric `rps`, which no key sets (`TargetUtilization` of Knative's
/// `pkg/autoscaler/config`).
const RPS_UTILIZATION: f64 = 0.7;
/// Smallest and largest value of `window`.
const STABLE_WINDOW_BOUNDS: (Duration, Duration) =
    (Duration::from_secs(6), Duration::from_secs(3600));
const HOUR: Duration = Duration::from_secs(3600);
const MAX_SCALE: i64 = i32::MAX as i64;
/// Classes that the group itself defines; a class of another group belongs to another controller.
const CLASSES: [&str; 2] = [KPA_CLASS, HPA_CLASS];
/// Autoscaler class that Rouse's autoscaler scales.
pub const KPA_CLASS: &str = "kpa.autoscaling.knative.dev";
/// Autoscaler class that Kubernetes' HorizontalPodAutoscaler scales.
pub const HPA_CLASS: &str = "hpa.autoscaling.knative.dev";

/// Autoscaler class of a Revision, by which its autoscaler is selected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AutoscalerClass {
    /// Scaled by Rouse's autoscaler.
    #[default]
    Kpa,
    /// Scaled by a HorizontalPodAutoscaler, which the controller makes for it.
    Hpa,
    /// Scaled by another controller that knows the class; Rouse does not scale it.
    Foreign,
}

impl AutoscalerClass {
    /// Returns the class in a Revision's annotations.
    pub fn from_annotations(annotations: &BTreeMap<String, String>) -> Self {
        match annotations.get(&format!("{AUTOSCALING_PREFIX}class")).map(|it| it.trim()) {
            None | Some(KPA_CLASS) => Self::Kpa,
            Some(HPA_CLASS) => Self::Hpa,
            Some(_) => Self::Foreign,
        }
    }
}

/// Checked settings of Knative's `config-autoscaler`.
#[derive(Clone, Debug, PartialEq)]
pub struct ScalePolicyConfig {
    /// Policy of a Revision without annotations.
    pub policy: ScalePolicy,
    /// Value of `requests-per-second-target-default`; 200 by default.
    pub rps_target: f64,
    /// Value of `max-scale-limit`, 0 by default: no limit.
    pub max_scale_limit: u32,
    /// Value of `allow-zero-initial-scale`; shipped as true, in Knative as false.
    pub allow_zero_initial_scale: bool,
}

impl Default for ScalePolicyConfig {
    fn default() -> Self {
        let policy = ScalePolicy::default();
        Self { policy, rps_target: 200.0, max_scale_limit: 0, allow_zero_initial_scale: true }
    }
}

impl ScalePolicyConfig {
    /// Returns the policy of a Revision with these annotations and `containerConcurrency`, or every broken rule.
    ///
    /// `path` is the path of the annotations in the object, for the messages.
    pub fn strict_policy(
        &self,
        annotations: &BTreeMap<String, String>,
        container_concurrency: u32,
        path: &str,
    ) -> Result<ScalePolicy, Vec<Problem>> {
        let (policy, problems) = self.lenient_policy(annotations, container_concurrency, path);
        if problems.is_empty() { Ok(policy) } else { Err(problems) }
    }

    /// Returns the policy and every broken rule of annotations that were accepted before. A ConfigMap may have become
    /// stricter since: annotations that it forbids are ignored, and all others are in force.
    pub fn lenient_policy(
        &self,
        annotations: &BTreeMap<String, String>,
        container_concurrency: u32,
        path: &str,
    ) -> (ScalePolicy, Vec<Problem>) {
        let path = format!("{path}.");
        let mut read = AnnotationReader {
            values: annotations,
            prefix: AUTOSCALING_PREFIX,
            path: &path,
            problems: Vec::new(),
        };
        // Every annotation overrides one default; an invalid one leaves the default in force.
        let mut p = self.policy.clone();
        read.check_class();
        self.read_target(&mut read, &mut p, container_concurrency);
        read.read_burst_capacity(&mut p.target_burst_capacity);
        read.read_stable_window(&mut p.stable_window);
        let panic = ["panic-window-percentage", "panicWindowPercentage"];
        read.read_number_into(&mut p.panic_window_percent, &panic, 1.0..=100.0);
        let threshold = ["panic-threshold-percentage", "panicThresholdPercentage"];
        read.read_number_into(&mut p.panic_threshold_percent, &threshold, 110.0..=1000.0);
        self.read_scale_bounds(&mut read, &mut p);
        read.read_initial_scale(&mut p.initial_scale, self.allow_zero_initial_scale);
        let delay = ["scale-down-delay", "scaleDownDelay"];
        let hour = (Duration::ZERO, HOUR);
        read.read_whole_seconds(&mut p.scale_down_delay, &delay, hour);
        let retention = ["scale-to-zero-pod-retention-period", "scaleToZeroPodRetentionPeriod"];
        read.read_duration(&mut p.scale_to_zero_retention_period, &retention, hour);
        read.read_aggregation(&mut p.aggregation);
        (p, read.problems)
    }

    /// Reads minimum, maximum and activation scale, and checks them against each other.
    fn read_scale_bounds(&self, read: &mut AnnotationReader<'_>, p: &mut ScalePolicy) {
        let (mut min, mut max) = (0, 0);
        read.read_count(&mut min, &["min-scale", "minScale"], 0..=MAX_SCALE);
        read.read_count(&mut max, &["max-scale", "maxScale"], 0..=MAX_SCALE);
        // 0 means unlimited.
        if max > 0 && max < min {
            let path =
                format!("{}, {}", read.field_path("max-scale"), read.field_path("min-scale"));
            let message = format!("max-scale={max} is less than min-scale={min}");
            read.problems.push(Problem::new(path, message));
        }
        if let Some((name, _)) = read.get(&["max-scale", "maxScale"])
            && read.check_max_scale_limit(name, max, self.max_scale_limit)
        {
            p.max_scale = max;
        }
        // A default minimum of the installation overrides a smaller maximum of the service, as in Knative.
        if read.get(&["min-scale", "minScale"]).is_some() {
            p.min_scale = min;
        }
        read.read_activation_scale(&mut p.activation_scale, min, max);
    }

    /// Reads metric, target and utilization (knative/serving `pkg/reconciler/autoscaling/resources/target.go`).
    fn read_target(&self, read: &mut AnnotationReader<'_>, p: &mut ScalePolicy, limit: u32) {
        let class = read.get(&["class"]).map_or(KPA_CLASS, |(_, class)| class);
        match read.get(&["metric"]).map(|(_, value)| value) {
            // The default target and utilization of `rps` replace those of concurrency; annotations may override both
            // below.
            Some("rps") if class == KPA_CLASS => {
                (p.metric, p.target_total, p.target_utilization) =
                    (ScaleMetric::Rps, self.rps_target, RPS_UTILIZATION);
            }
            Some(other) if other != "concurrency" && class == KPA_CLASS => {
                let problem = Problem::invalid(read.field_path("metric"), other);
                read.problems.push(problem.with_advice("use concurrency or rps"));
            }
            // A HorizontalPodAutoscaler has metrics of other names, but none is empty.
            Some("") if CLASSES.contains(&class) => {
                read.problems.push(Problem::invalid(read.field_path("metric"), ""));
            }
            // A hard limit is the default target, since a pod never has more requests than that.
            _ => p.target_total = if limit > 0 { f64::from(limit) } else { p.target_total },
        }
        if let Some((name, text)) = read.get(&["target"]) {
            match text.parse::<f64>() {
                Ok(target) if target.is_finite() && target >= TARGET_MIN => {
                    // A target above the hard limit could never be reached, so no further pod would be added.
                    let bounded = limit > 0 && p.metric == ScaleMetric::Concurrency;
                    p.target_total = if bounded { target.min(f64::from(limit)) } else { target };
                }
                Ok(_) => {
                    let message = format!("target {text} should be at least {TARGET_MIN}");
                    read.problems.push(Problem::new(read.field_path(name), message));
                }
                Err(_) => read.problems.push(Problem::invalid(read.field_path(name), text)),
            }
        }
        let share = ["target-utilization-percentage", "targetUtilizationPercentage"];
        if let Some(percent) = read.read_number(&share, 1.0..=100.0) {
            p.target_utilization = percent / 100.0;
        }
    }
}

/// Reader of values by name, which collects broken rules.
struct AnnotationReader<'a> {
    values: &'a BTreeMap<String, String>,
    prefix: &'a str,
    path: &'a str,
    problems: Vec<Problem>,
}

impl<'a> AnnotationReader<'a> {
    /// Returns the first of the alternate names that is set, with its value.
    fn get(&self, names: &[&'static str]) -> Option<(&'static str, &'a str)> {
        let value = |name: &&'static str| self.values.get(&format!("{}{name}", self.prefix));
        names.iter().find_map(|name| value(name).map(|value| (*name, value.trim())))
    }

    fn field_path(&self, name: &str) -> String {
        format!("{}{}{name}", self.path, self.prefix)
    }

    fn read_number(
        &mut self,
        names: &[&'static str],
        bounds: std::ops::RangeInclusive<f64>,
    ) -> Option<f64> {
        let (name, text) = self.get(names)?;
        match text.parse::<f64>() {
            Ok(value) if value.is_finite() && bounds.contains(&value) => return Some(value),
            // Knative has two messages: one for a range, one for a lower bound alone.
            Ok(_) if bounds.end() < &f64::MAX => {
                let problem = Problem::out_of_bounds(
                    self.field_path(name),
                    bounds.start(),
                    text,
                    bounds.end(),
                );
                self.problems.push(problem);
            }
            Ok(value) => {
                let message = format!("{name} = {value}, must be at least {}", bounds.start());
                self.problems.push(Problem::new(self.field_path(name), message));
            }
            Err(_) => self.problems.push(Problem::invalid(self.field_path(name), text)),
        }
        None
    }

    fn read_number_into(
        &mut self,
        target: &mut f64,
        names: &[&'static str],
        within: std::ops::RangeInclusive<f64>,
    ) {
        *target = self.read_number(names, within).unwrap_or(*target);
    }

    fn read_burst_capacity(&mut self, target: &mut f64) {
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

    fn read_count(
        &mut self,
        target: &mut u32,
        names: &[&'static str],
        bounds: std::ops::RangeInclusive<i64>,
    ) {
        let Some((name, text)) = self.get(names) else { return };
        match text.parse::<i64>() {
            Ok(value) if bounds.contains(&value) => {
                *target = u32::try_from(value).unwrap_or(*target)
            }
            // Too large for an i64 is out of bounds, not malformed.
            Err(_) if !is_integer(text) => {
                self.problems.push(Problem::invalid(self.field_path(name), text))
            }
            Ok(_) | Err(_) => {
                let problem = Problem::out_of_bounds(
                    self.field_path(name),
                    bounds.start(),
                    text,
                    bounds.end(),
                );
                self.problems.push(problem);
            }
        }
    }

    /// Reads `activation-scale`: at least 2, between minimum and maximum.
    fn read_activation_scale(&mut self, target: &mut u32, min: u32, max: u32) {
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
    fn check_max_scale_limit(&mut self, name: &str, max: u32, limit: u32) -> bool {
        let problem_count = self.problems.len();
        if limit > 0 && max == 0 {
            let message = format!("max-scale=0 (unlimited), must be less than {limit}");
            self.problems.push(Problem::new(self.field_path(name), message));
        } else if limit > 0 && max > limit {
            self.problems.push(Problem::out_of_bounds(self.field_path(name), 1, max, limit));
        }
        self.problems.len() == problem_count
    }

    fn read_initial_scale(&mut self, target: &mut u32, allow_zero: bool) {
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

    /// Reads `window`, the stable window.
    fn read_stable_window(&mut self, target: &mut Duration) {
        self.read_whole_seconds(target, &["window"], STABLE_WINDOW_BOUNDS);
    }

    /// Reads a duration annotation in whole seconds within bounds.
    fn read_whole_seconds(
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
    fn read_duration(
        &mut self,
        target: &mut Duration,
        names: &[&'static str],
        (low, high): (Duration, Duration),
    ) {
        let Some((name, text)) = self.get(names) else { return };
        // Negative durations are well-formed in Go, so they are out of bounds rather than malformed.
        let negative = text.strip_prefix('-').and_then(parse_go_duration);
        let problem = match parse_go_duration(text) {
            Some(value) if value >= low && value <= high => {
                *target = value;
                return;
            }
            None if negative.is_none() => Problem::invalid(self.field_path(name), text)
                .with_advice("write it as 30s or 1m30s"),
            Some(_) | None => Problem::out_of_bounds(
                self.field_path(name),
                format_go_duration(low),
                text,
                format_go_duration(high),
            ),
        };
        self.problems.push(problem);
    }

    fn check_class(&mut self) {
        let Some((name, class)) = self.get(&["class"]) else { return };
        if class.ends_with(AUTOSCALING_GROUP) && !CLASSES.contains(&class) {
            self.problems.push(Problem::invalid(self.field_path(name), class));
        }
    }

    fn read_aggregation(&mut self, target: &mut WindowAggregation) {
        let names = ["metric-aggregation-algorithm", "metricAggregationAlgorithm"];
        match self.get(&names) {
            None => {}
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

/// Parses a duration as Go writes it: `6s`, `1m30s`, `1.5h`, `0`.
pub fn parse_go_duration(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let (mut rest, mut total) = (text, 0.0);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let value: f64 = rest.get(..digits)?.parse().ok()?;
        let unit = rest.get(digits..)?;
        let end = unit.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(unit.len());
        total += value
            * match unit.get(..end)? {
                "ns" => 1e-9,
                "us" | "µs" => 1e-6,
                "ms" => 1e-3,
                "s" => 1.0,
                "m" => 60.0,
                "h" => 3600.0,
                _ => return None,
            };
        rest = unit.get(end..)?;
    }
    // Empty text has no number, and is not zero.
    let has_number = !text.is_empty();
    Duration::try_from_secs_f64(total).ok().filter(|_| has_number)
}

/// Formats a duration as Go does: `1h0m0s`, `1m30s`, `6s`, `1ms`.
pub fn format_go_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (h, m, s) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (h, m) {
        (0, 0) if s == 0 && duration.subsec_millis() > 0 => {
            format!("{}ms", duration.subsec_millis())
        }
        (0, 0) => format!("{s}s"),
        (0, _) => format!("{m}m{s}s"),
        _ => format!("{h}h{m}m{s}s"),
    }
}

#[cfg(test)]
mod tests;
