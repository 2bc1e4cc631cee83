//! Pure: Knative's autoscaling configuration and annotations, checked once into a [`ScalePolicy`].
//!
//! Keys, defaults and bounds: knative/serving `config/core/configmaps/autoscaler.yaml`, `pkg/autoscaler/config`
//! and `pkg/apis/autoscaling/annotation_validation.go` at 98e5ef9. Two shipped defaults differ, because pods have no
//! sidecar here: `target-burst-capacity` is 0 and `allow-zero-initial-scale` is true.

use std::{collections::BTreeMap, time::Duration};

use common::wire::{ScaleMetric, ScalePolicy};

use crate::model::{problem::Problem, standby_policy::StandbyConfig};

mod annotation_reader;

use annotation_reader::AnnotationReader;

/// API group of all annotations read here.
pub const AUTOSCALING_GROUP: &str = "autoscaling.knative.dev";
/// Prefix of the keys of all annotations read here.
pub const AUTOSCALING_PREFIX: &str = "autoscaling.knative.dev/";
/// Smallest target of a pod (Knative's `autoscaling.TargetMin`).
pub(super) const TARGET_MIN: f64 = 0.01;
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
    /// Settings of standby.
    pub standby: StandbyConfig,
}

impl Default for ScalePolicyConfig {
    fn default() -> Self {
        Self {
            policy: ScalePolicy::default(),
            rps_target: 200.0,
            max_scale_limit: 0,
            allow_zero_initial_scale: true,
            standby: StandbyConfig::default(),
        }
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
        let mut reader = AnnotationReader::new(annotations, path);
        // Every annotation overrides one default; an invalid one leaves the default in force.
        let mut policy = self.policy.clone();
        reader.check_class();
        self.read_target(&mut reader, &mut policy, container_concurrency);
        reader.read_burst_capacity(&mut policy.target_burst_capacity);
        reader.read_whole_seconds(&mut policy.stable_window, &["window"], STABLE_WINDOW_BOUNDS);
        let panic = ["panic-window-percentage", "panicWindowPercentage"];
        reader.read_number_into(&mut policy.panic_window_percent, &panic, 1.0..=100.0);
        let threshold = ["panic-threshold-percentage", "panicThresholdPercentage"];
        reader.read_number_into(&mut policy.panic_threshold_percent, &threshold, 110.0..=1000.0);
        self.read_scale_bounds(&mut reader, &mut policy);
        reader.read_initial_scale(&mut policy.initial_scale, self.allow_zero_initial_scale);
        let delay = ["scale-down-delay", "scaleDownDelay"];
        let up_to_an_hour = (Duration::ZERO, HOUR);
        reader.read_whole_seconds(&mut policy.scale_down_delay, &delay, up_to_an_hour);
        let retention = ["scale-to-zero-pod-retention-period", "scaleToZeroPodRetentionPeriod"];
        let target = &mut policy.scale_to_zero_retention_period;
        reader.read_duration(target, &retention, up_to_an_hour);
        reader.read_aggregation(&mut policy.aggregation);
        (policy, reader.problems)
    }

    /// Reads minimum, maximum and activation scale, and checks them against each other.
    fn read_scale_bounds(&self, reader: &mut AnnotationReader<'_>, policy: &mut ScalePolicy) {
        let min_annotation = reader.read_count(&["min-scale", "minScale"], 0..=MAX_SCALE);
        let max_annotation = reader.read_count(&["max-scale", "maxScale"], 0..=MAX_SCALE);
        let (min, max) = (min_annotation.unwrap_or(0), max_annotation.unwrap_or(0));
        // 0 means unlimited.
        let is_contradictory = max > 0 && max < min;
        if is_contradictory {
            let path =
                format!("{}, {}", reader.field_path("max-scale"), reader.field_path("min-scale"));
            let message = format!("max-scale={max} is less than min-scale={min}");
            reader.problems.push(Problem::new(path, message));
        }
        let is_within_limit = match reader.get(&["max-scale", "maxScale"]) {
            Some((name, _)) => reader.check_max_scale_limit(name, max, self.max_scale_limit),
            None => true,
        };
        if let Some(max) = max_annotation.filter(|_| is_within_limit && !is_contradictory) {
            policy.max_scale = max;
        }
        // A default minimum of the installation overrides a smaller maximum of the service, as in Knative.
        if let Some(min) = min_annotation.filter(|_| !is_contradictory) {
            policy.min_scale = min;
        }
        reader.read_activation_scale(&mut policy.activation_scale, min, max);
    }

    /// Reads metric, target and utilization (knative/serving `pkg/reconciler/autoscaling/resources/target.go`).
    fn read_target(
        &self,
        reader: &mut AnnotationReader<'_>,
        policy: &mut ScalePolicy,
        hard_limit: u32,
    ) {
        let class = reader.get(&["class"]).map_or(KPA_CLASS, |(_, class)| class);
        let metric = reader.get(&["metric"]).map(|(_, value)| value);
        match metric {
            // The defaults of `rps` replace those of concurrency. Annotations override both below.
            Some("rps") if class == KPA_CLASS => {
                (policy.metric, policy.target_total, policy.target_utilization) =
                    (ScaleMetric::Rps, self.rps_target, RPS_UTILIZATION);
            }
            Some(other) if other != "concurrency" && class == KPA_CLASS => {
                let problem = Problem::invalid(reader.field_path("metric"), other);
                reader.problems.push(problem.with_advice("use concurrency or rps"));
            }
            // A HorizontalPodAutoscaler has metrics of other names, but none is empty.
            Some("") if CLASSES.contains(&class) => {
                reader.problems.push(Problem::invalid(reader.field_path("metric"), ""));
            }
            Some(name) if class == HPA_CLASS && !is_metric_name(name) => {
                reader.problems.push(Problem::invalid(reader.field_path("metric"), name));
            }
            // A hard limit is the default target, since a pod never has more requests than that.
            _ if hard_limit > 0 => policy.target_total = f64::from(hard_limit),
            _ => {}
        }
        // These targets lose their decimals in a HorizontalPodAutoscaler, which must not have 0.
        let is_whole = class == HPA_CLASS && metric.is_some_and(|it| it != "cpu");
        let target_min = if is_whole { 1.0 } else { TARGET_MIN };
        if let Some((name, text)) = reader.get(&["target"]) {
            match text.parse::<f64>() {
                Ok(target) if target.is_finite() && target >= target_min => {
                    // A target above the hard limit could never be reached, so no further pod would be added.
                    let bounded = hard_limit > 0 && policy.metric == ScaleMetric::Concurrency;
                    policy.target_total =
                        if bounded { target.min(f64::from(hard_limit)) } else { target };
                }
                Ok(_) => {
                    let message = format!("target {text} should be at least {target_min}");
                    reader.problems.push(Problem::new(reader.field_path(name), message));
                }
                Err(_) => reader.problems.push(Problem::invalid(reader.field_path(name), text)),
            }
        }
        let share = ["target-utilization-percentage", "targetUtilizationPercentage"];
        if let Some(percent) = reader.read_number(&share, 1.0..=100.0) {
            policy.target_utilization = percent / 100.0;
        }
    }
}

/// Rate at which any number of pods may change to any other.
pub const UNBOUNDED_RATE: f64 = 1e9;

/// Bounds the scale of a workload by the number of pods that its user wants while it is awake: it wakes to that number,
/// and grows beyond it only with an annotation for the maximum. Returns a problem for each annotation that has no
/// effect because of that.
pub fn bound_by_replicas(
    policy: &mut ScalePolicy,
    replicas: u32,
    annotations: &BTreeMap<String, String>,
) -> Vec<Problem> {
    let reader = AnnotationReader::new(annotations, "metadata.annotations");
    let max = reader.get(&["max-scale", "maxScale"]);
    let max: Option<u32> = max.and_then(|(_, text)| text.parse().ok());
    let least_max = replicas.max(policy.min_scale);
    policy.max_scale = match max {
        // A maximum that is refused has left the default in force.
        Some(0) if policy.max_scale == 0 => 0,
        Some(max) if policy.max_scale == max => least_max.max(max),
        Some(_) | None => least_max,
    };
    (policy.initial_scale, policy.activation_scale) = (replicas, replicas);
    let without_effect = |names: [&'static str; 2]| {
        let (name, _) = reader.get(&names)?;
        let message = "the number of the workload's own spec.replicas counts instead";
        Some(Problem::new(reader.field_path(name), message))
    };
    let starts = ["initial-scale", "initialScale"];
    let activations = ["activation-scale", "activationScale"];
    [starts, activations].into_iter().filter_map(without_effect).collect()
}

/// Returns true if a HorizontalPodAutoscaler may name a metric so: the name is a part of a path (apimachinery
/// `api/validation/path`).
fn is_metric_name(name: &str) -> bool {
    !matches!(name, "." | "..") && !name.contains(['/', '%'])
}

#[cfg(test)]
mod tests;
