//! Pure: Knative's autoscaling configuration and annotations, checked once into a [`ScalePolicy`].
//!
//! Keys, defaults and bounds: knative/serving `config/core/configmaps/autoscaler.yaml`, `pkg/autoscaler/config`
//! and `pkg/apis/autoscaling/annotation_validation.go` at 98e5ef9. Two shipped defaults differ, because no
//! sidecar stands before a pod here: `target-burst-capacity` is 0 and `allow-zero-initial-scale` is true.

use std::{collections::BTreeMap, time::Duration};

use common::wire::{Aggregation, Metric, ScalePolicy};

use crate::parse::Problem;

/// Prefix of all annotations read here.
pub const PREFIX: &str = "autoscaling.knative.dev/";
/// Least target, Knative's `TargetMin`.
const TARGET_MIN: f64 = 0.01;
/// Bounds of `window`.
const WINDOW: (Duration, Duration) = (Duration::from_secs(6), Duration::from_secs(3600));
const HOUR: Duration = Duration::from_secs(3600);
const MAX_SCALE: i64 = i32::MAX as i64;

/// Knative's `config-autoscaler`, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct AutoscalerConfig {
    /// What a revision without annotations gets.
    pub policy: ScalePolicy,
    /// `requests-per-second-target-default`. Default 200.
    pub rps_target: f64,
    /// `max-scale-limit`; 0: none. Default 0.
    pub max_scale_limit: u32,
    /// `allow-zero-initial-scale`. Shipped true, Knative false.
    pub allow_zero_initial_scale: bool,
}

impl Default for AutoscalerConfig {
    fn default() -> Self {
        let policy = ScalePolicy::default();
        Self { policy, rps_target: 200.0, max_scale_limit: 0, allow_zero_initial_scale: true }
    }
}

impl AutoscalerConfig {
    /// Reads the keys of a `config-autoscaler` ConfigMap. Unknown keys (`_example`) mean nothing, as in Knative.
    pub fn parse(keys: &BTreeMap<String, String>) -> Result<Self, Vec<Problem>> {
        let mut read = Reader { values: keys, prefix: "", path: "data.", problems: Vec::new() };
        let mut it = Self::default();
        let all = 0.0..=f64::MAX;
        let p = &mut it.policy;
        if let Some(v) = read.number(&["container-concurrency-target-percentage"], 0.01..=100.0) {
            p.utilization = v / 100.0;
        }
        let target = TARGET_MIN..=f64::MAX;
        read.set(&mut p.total, &["container-concurrency-target-default"], target.clone());
        read.set(&mut it.rps_target, &["requests-per-second-target-default"], target);
        read.burst(&mut p.target_burst_capacity);
        read.span(&mut p.stable_window, &["stable-window"], WINDOW);
        read.set(&mut p.panic_window_percent, &["panic-window-percentage"], 1.0..=100.0);
        read.set(&mut p.panic_threshold_percent, &["panic-threshold-percentage"], all);
        read.set(&mut p.max_scale_up_rate, &["max-scale-up-rate"], 1.0..=f64::MAX);
        read.set(&mut p.max_scale_down_rate, &["max-scale-down-rate"], 1.0..=f64::MAX);
        read.flag(&mut p.scale_to_zero, "enable-scale-to-zero");
        let grace = (Duration::from_millis(1), Duration::MAX);
        read.span(&mut p.grace, &["scale-to-zero-grace-period"], grace);
        let any = (Duration::ZERO, Duration::MAX);
        read.span(&mut p.retention, &["scale-to-zero-pod-retention-period"], any);
        read.set(&mut p.activator_capacity, &["activator-capacity"], 1.0..=f64::MAX);
        read.flag(&mut it.allow_zero_initial_scale, "allow-zero-initial-scale");
        let least = i64::from(!it.allow_zero_initial_scale);
        read.count(&mut p.initial_scale, &["initial-scale"], least..=MAX_SCALE);
        read.count(&mut it.max_scale_limit, &["max-scale-limit"], 0..=MAX_SCALE);
        read.count(&mut p.min_scale, &["min-scale"], 0..=MAX_SCALE);
        read.count(&mut p.max_scale, &["max-scale"], 0..=MAX_SCALE);
        read.span(&mut p.scale_down_delay, &["scale-down-delay"], (Duration::ZERO, HOUR));
        read.scales(p, it.max_scale_limit);
        read.done(it)
    }

    /// The policy of a revision with these annotations and `containerConcurrency`.
    ///
    /// `path` leads to the annotations, for the messages.
    pub fn policy(
        &self,
        annotations: &BTreeMap<String, String>,
        container_concurrency: u32,
        path: &str,
    ) -> Result<ScalePolicy, Vec<Problem>> {
        let path = format!("{path}.");
        let mut read =
            Reader { values: annotations, prefix: PREFIX, path: &path, problems: Vec::new() };
        let mut p = self.policy.clone();
        read.class();
        self.target(&mut read, &mut p, container_concurrency);
        read.burst(&mut p.target_burst_capacity);
        read.span(&mut p.stable_window, &["window"], WINDOW);
        let panic = ["panic-window-percentage", "panicWindowPercentage"];
        read.set(&mut p.panic_window_percent, &panic, 1.0..=100.0);
        let threshold = ["panic-threshold-percentage", "panicThresholdPercentage"];
        read.set(&mut p.panic_threshold_percent, &threshold, 110.0..=1000.0);
        read.count(&mut p.min_scale, &["min-scale", "minScale"], 0..=MAX_SCALE);
        read.count(&mut p.max_scale, &["max-scale", "maxScale"], 0..=MAX_SCALE);
        read.initial(&mut p.initial_scale, self.allow_zero_initial_scale);
        read.count(
            &mut p.activation_scale,
            &["activation-scale", "activationScale"],
            2..=MAX_SCALE,
        );
        let delay = ["scale-down-delay", "scaleDownDelay"];
        read.span(&mut p.scale_down_delay, &delay, (Duration::ZERO, HOUR));
        let retention = ["scale-to-zero-pod-retention-period", "scaleToZeroPodRetentionPeriod"];
        read.span(&mut p.retention, &retention, (Duration::ZERO, HOUR));
        read.aggregation(&mut p.aggregation);
        read.scales(&p, self.max_scale_limit);
        read.done(p)
    }

    /// Metric, total and utilisation (knative/serving `pkg/reconciler/autoscaling/resources/target.go`).
    fn target(&self, read: &mut Reader<'_>, p: &mut ScalePolicy, limit: u32) {
        match read.get(&["metric"]).map(|(_, value)| value) {
            None | Some("concurrency") => {
                p.total = if limit > 0 { f64::from(limit) } else { p.total };
            }
            Some("rps") => (p.metric, p.total) = (Metric::Rps, self.rps_target),
            Some(other) => {
                let problem = Problem::invalid(read.at("metric"), other);
                read.problems.push(problem.advise("use concurrency or rps"));
            }
        }
        if let Some((name, text)) = read.get(&["target"]) {
            match text.parse::<f64>() {
                Ok(target) if target.is_finite() && target >= TARGET_MIN => {
                    let bounded = limit > 0 && p.metric == Metric::Concurrency;
                    p.total = if bounded { target.min(f64::from(limit)) } else { target };
                }
                Ok(target) => {
                    let message = format!("target {target} should be at least {TARGET_MIN}");
                    read.problems.push(Problem::new(read.at(name), message));
                }
                Err(_) => read.problems.push(Problem::invalid(read.at(name), text)),
            }
        }
        let share = ["target-utilization-percentage", "targetUtilizationPercentage"];
        if let Some(percent) = read.number(&share, 1.0..=100.0) {
            p.utilization = percent / 100.0;
        }
    }
}

/// Reads values by name and collects what is wrong with them.
struct Reader<'a> {
    values: &'a BTreeMap<String, String>,
    prefix: &'a str,
    path: &'a str,
    problems: Vec<Problem>,
}

impl<'a> Reader<'a> {
    /// The first of the alternate names that is set, with its value.
    fn get(&self, names: &[&'static str]) -> Option<(&'static str, &'a str)> {
        let value = |name: &&'static str| self.values.get(&format!("{}{name}", self.prefix));
        names.iter().find_map(|name| value(name).map(|value| (*name, value.trim())))
    }

    fn at(&self, name: &str) -> String {
        format!("{}{}{name}", self.path, self.prefix)
    }

    fn number(
        &mut self,
        names: &[&'static str],
        bounds: std::ops::RangeInclusive<f64>,
    ) -> Option<f64> {
        let (name, text) = self.get(names)?;
        match text.parse::<f64>() {
            Ok(value) if value.is_finite() && bounds.contains(&value) => return Some(value),
            Ok(value) if bounds.end() < &f64::MAX => {
                let problem = Problem::bounds(self.at(name), bounds.start(), value, bounds.end());
                self.problems.push(problem);
            }
            Ok(value) => {
                let message = format!("{name} = {value}, must be at least {}", bounds.start());
                self.problems.push(Problem::new(self.at(name), message));
            }
            Err(_) => self.problems.push(Problem::invalid(self.at(name), text)),
        }
        None
    }

    fn set(&mut self, to: &mut f64, names: &[&'static str], within: std::ops::RangeInclusive<f64>) {
        *to = self.number(names, within).unwrap_or(*to);
    }

    fn burst(&mut self, to: &mut f64) {
        let names = ["target-burst-capacity", "targetBurstCapacity"];
        let Some((name, text)) = self.get(&names) else { return };
        match text.parse::<f64>() {
            Ok(value) if value.is_finite() && (value >= 0.0 || value == -1.0) => *to = value,
            Ok(_) | Err(_) => {
                let problem = Problem::invalid(self.at(name), text);
                self.problems.push(problem.advise("use -1, 0 or a number above 0"));
            }
        }
    }

    fn count(
        &mut self,
        to: &mut u32,
        names: &[&'static str],
        bounds: std::ops::RangeInclusive<i64>,
    ) {
        let Some((name, text)) = self.get(names) else { return };
        match text.parse::<i64>() {
            Ok(value) if bounds.contains(&value) => *to = u32::try_from(value).unwrap_or(*to),
            Ok(value) if name.starts_with("activation") => {
                let message = format!("activation-scale={value} must be greater than 1");
                self.problems.push(Problem::new(self.at(name), message));
            }
            Ok(value) => {
                let problem = Problem::bounds(self.at(name), bounds.start(), value, bounds.end());
                self.problems.push(problem);
            }
            Err(_) => self.problems.push(Problem::invalid(self.at(name), text)),
        }
    }

    fn initial(&mut self, to: &mut u32, allow_zero: bool) {
        let Some((name, text)) = self.get(&["initial-scale", "initialScale"]) else { return };
        let message = match text.parse::<u32>() {
            Ok(0) if !allow_zero => format!("{name}=0 not allowed by cluster"),
            Ok(value) => {
                *to = value;
                return;
            }
            Err(_) if text.parse::<i64>().is_ok() => format!("{name}={text} must be at least 0"),
            Err(_) => format!("invalid value: {text}"),
        };
        self.problems.push(Problem::new(self.at(name), message));
    }

    /// A duration in whole seconds within bounds.
    fn span(
        &mut self,
        to: &mut Duration,
        names: &[&'static str],
        (low, high): (Duration, Duration),
    ) {
        let Some((name, text)) = self.get(names) else { return };
        let problem = match parse_duration(text) {
            None => Problem::invalid(self.at(name), text).advise("write it as 30s or 1m30s"),
            Some(value) if value < low || value > high => {
                let high = if high == Duration::MAX { "∞".into() } else { go_duration(high) };
                Problem::bounds(self.at(name), go_duration(low), text, high)
            }
            Some(value) if value.subsec_nanos() != 0 => {
                let message = format!("{name}={text} is not at second precision");
                Problem::new(self.at(name), message)
            }
            Some(value) => {
                *to = value;
                return;
            }
        };
        self.problems.push(problem);
    }

    fn flag(&mut self, to: &mut bool, name: &'static str) {
        match self.get(&[name]) {
            None => {}
            Some((_, "true")) => *to = true,
            Some((_, "false")) => *to = false,
            Some((_, other)) => self.problems.push(Problem::invalid(self.at(name), other)),
        }
    }

    fn class(&mut self) {
        let Some((name, class)) = self.get(&["class"]) else { return };
        if class != "kpa.autoscaling.knative.dev" {
            let problem = Problem::invalid(self.at(name), class);
            self.problems.push(problem.advise("only kpa.autoscaling.knative.dev scales here"));
        }
    }

    fn aggregation(&mut self, to: &mut Aggregation) {
        let names = ["metric-aggregation-algorithm", "metricAggregationAlgorithm"];
        match self.get(&names) {
            None => {}
            Some((_, "linear")) => *to = Aggregation::Linear,
            Some((_, "weighted-exponential" | "weightedExponential")) => {
                *to = Aggregation::WeightedExponential;
            }
            Some((name, other)) => self.problems.push(Problem::invalid(self.at(name), other)),
        }
    }

    /// How minimum, maximum and activation scale must stand to each other.
    fn scales(&mut self, p: &ScalePolicy, limit: u32) {
        let (min, max, activation) = (p.min_scale, p.max_scale, p.activation_scale);
        let mut say = |name: &str, message| {
            let at = self.at(name);
            self.problems.push(Problem::new(at, message));
        };
        if max > 0 && max < min {
            say("max-scale", format!("max-scale={max} is less than min-scale={min}"));
        }
        if activation > 0 && min > activation {
            let message = format!("min-scale={min} is greater than activation-scale={activation}");
            say("min-scale", message);
        }
        if activation > 0 && max > 0 && activation > max {
            let message = format!("activation-scale={activation} is greater than max-scale={max}");
            say("activation-scale", message);
        }
        if limit > 0 && max == 0 {
            say("max-scale", format!("max-scale=0 (unlimited), must be less than {limit}"));
        } else if limit > 0 && max > limit {
            say("max-scale", format!("max-scale={max}, must be less than {limit}"));
        }
    }

    fn done<T>(self, value: T) -> Result<T, Vec<Problem>> {
        if self.problems.is_empty() { Ok(value) } else { Err(self.problems) }
    }
}

/// Reads a duration as Go writes it: `6s`, `1m30s`, `1.5h`, `0`.
pub fn parse_duration(text: &str) -> Option<Duration> {
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
    let whole = !text.is_empty();
    Duration::try_from_secs_f64(total).ok().filter(|_| whole)
}

/// Writes a duration as Go does: `1h0m0s`, `1m30s`, `6s`, `1ms`.
pub fn go_duration(it: Duration) -> String {
    let seconds = it.as_secs();
    let (h, m, s) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (h, m) {
        (0, 0) if s == 0 && it.subsec_millis() > 0 => format!("{}ms", it.subsec_millis()),
        (0, 0) => format!("{s}s"),
        (0, _) => format!("{m}m{s}s"),
        _ => format!("{h}h{m}m{s}s"),
    }
}

#[cfg(test)]
mod tests;
