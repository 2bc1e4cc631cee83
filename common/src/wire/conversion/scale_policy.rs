//! Pure: conversion of scaling parameters.

use super::*;

impl TryFrom<raw::ScalePolicy> for ScalePolicy {
    type Error = WireError;
    fn try_from(message: raw::ScalePolicy) -> WireResult<Self> {
        let metric = match message.metric() {
            raw::Metric::Concurrency => ScaleMetric::Concurrency,
            raw::Metric::Rps => ScaleMetric::Rps,
            raw::Metric::Unspecified => {
                return Err(WireError::new(
                    "policy.metric",
                    message.metric,
                    "must be a known metric",
                ));
            }
        };
        // Unspecified counts as `Linear`, which is the default of Knative, so a sender may omit it.
        let aggregation = match message.aggregation() {
            raw::Aggregation::WeightedExponential => WindowAggregation::WeightedExponential,
            raw::Aggregation::Linear | raw::Aggregation::Unspecified => WindowAggregation::Linear,
        };
        // Zero would divide by zero in every average.
        let stable_window = parse_optional_ms(message.stable_window_ms);
        let stable_window = stable_window
            .ok_or_else(|| WireError::new("policy.stable_window_ms", 0, "must be above 0"))?;
        Ok(Self {
            metric,
            target_total: require_positive("policy.total", message.total)?,
            target_utilization: require_positive("policy.utilization", message.utilization)?,
            target_burst_capacity: require_finite(
                "policy.target_burst_capacity",
                message.target_burst_capacity,
            )?,
            activator_capacity: require_positive(
                "policy.activator_capacity",
                message.activator_capacity,
            )?,
            stable_window,
            panic_window_percent: require_positive(
                "policy.panic_window_percent",
                message.panic_window_percent,
            )?,
            panic_threshold_percent: require_positive(
                "policy.panic_threshold_percent",
                message.panic_threshold_percent,
            )?,
            max_scale_up_rate: require_positive(
                "policy.max_scale_up_rate",
                message.max_scale_up_rate,
            )?,
            max_scale_down_rate: require_positive(
                "policy.max_scale_down_rate",
                message.max_scale_down_rate,
            )?,
            min_scale: message.min_scale,
            max_scale: message.max_scale,
            initial_scale: message.initial_scale,
            activation_scale: message.activation_scale,
            scale_down_delay: Duration::from_millis(message.scale_down_delay_ms),
            scale_to_zero: message.scale_to_zero,
            scale_to_zero_grace_period: Duration::from_millis(message.grace_ms),
            scale_to_zero_retention_period: Duration::from_millis(message.retention_ms),
            progress_deadline: Duration::from_millis(message.progress_deadline_ms),
            aggregation,
        })
    }
}

impl From<ScalePolicy> for raw::ScalePolicy {
    fn from(value: ScalePolicy) -> Self {
        let metric = match value.metric {
            ScaleMetric::Concurrency => raw::Metric::Concurrency,
            ScaleMetric::Rps => raw::Metric::Rps,
        };
        let aggregation = match value.aggregation {
            WindowAggregation::Linear => raw::Aggregation::Linear,
            WindowAggregation::WeightedExponential => raw::Aggregation::WeightedExponential,
        };
        Self {
            metric: metric.into(),
            total: value.target_total,
            utilization: value.target_utilization,
            target_burst_capacity: value.target_burst_capacity,
            activator_capacity: value.activator_capacity,
            stable_window_ms: to_ms(value.stable_window),
            panic_window_percent: value.panic_window_percent,
            panic_threshold_percent: value.panic_threshold_percent,
            max_scale_up_rate: value.max_scale_up_rate,
            max_scale_down_rate: value.max_scale_down_rate,
            min_scale: value.min_scale,
            max_scale: value.max_scale,
            initial_scale: value.initial_scale,
            activation_scale: value.activation_scale,
            scale_down_delay_ms: to_ms(value.scale_down_delay),
            scale_to_zero: value.scale_to_zero,
            grace_ms: to_ms(value.scale_to_zero_grace_period),
            retention_ms: to_ms(value.scale_to_zero_retention_period),
            progress_deadline_ms: to_ms(value.progress_deadline),
            aggregation: aggregation.into(),
        }
    }
}
