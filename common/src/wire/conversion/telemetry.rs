//! Pure: conversion of the settings of traces and request metrics.

use std::time::Duration;

use super::{
    super::{
        OtlpCollector, OtlpProtocol, RequestMetricsSettings, SamplingRate, TelemetrySettings,
        TraceSettings,
    },
    WireError, WireResult, raw, require,
};

impl TryFrom<raw::Telemetry> for TelemetrySettings {
    type Error = WireError;
    fn try_from(message: raw::Telemetry) -> WireResult<Self> {
        Ok(Self {
            traces: message.traces.map(TraceSettings::try_from).transpose()?,
            metrics: message.metrics.map(RequestMetricsSettings::try_from).transpose()?,
        })
    }
}

impl From<TelemetrySettings> for raw::Telemetry {
    fn from(value: TelemetrySettings) -> Self {
        Self { traces: value.traces.map(Into::into), metrics: value.metrics.map(Into::into) }
    }
}

impl TryFrom<raw::Traces> for TraceSettings {
    type Error = WireError;
    fn try_from(message: raw::Traces) -> WireResult<Self> {
        let threshold = message.sampling_threshold;
        let sampling = SamplingRate::from_threshold(threshold).ok_or_else(|| {
            WireError::new("traces.sampling_threshold", threshold, "must be at most 2^63")
        })?;
        let collector = require("traces.collector", message.collector)?;
        Ok(Self { collector: OtlpCollector::try_from(collector)?, sampling })
    }
}

impl From<TraceSettings> for raw::Traces {
    fn from(value: TraceSettings) -> Self {
        Self {
            collector: Some(value.collector.into()),
            sampling_threshold: value.sampling.threshold(),
        }
    }
}

impl TryFrom<raw::RequestMetrics> for RequestMetricsSettings {
    type Error = WireError;
    fn try_from(message: raw::RequestMetrics) -> WireResult<Self> {
        if message.interval_ms == 0 {
            return Err(WireError::new("metrics.interval_ms", 0, "must not be 0"));
        }
        Ok(Self {
            collector: message.collector.map(OtlpCollector::try_from).transpose()?,
            interval: Duration::from_millis(message.interval_ms),
        })
    }
}

impl From<RequestMetricsSettings> for raw::RequestMetrics {
    fn from(value: RequestMetricsSettings) -> Self {
        // 0 is no interval, so a shorter one than the unit becomes the unit.
        let interval_ms = u64::try_from(value.interval.as_millis()).unwrap_or(u64::MAX).max(1);
        Self { collector: value.collector.map(Into::into), interval_ms }
    }
}

impl TryFrom<raw::Collector> for OtlpCollector {
    type Error = WireError;
    fn try_from(message: raw::Collector) -> WireResult<Self> {
        let protocol = match message.protocol() {
            raw::CollectorProtocol::Grpc => OtlpProtocol::Grpc,
            raw::CollectorProtocol::HttpProtobuf => OtlpProtocol::HttpProtobuf,
            raw::CollectorProtocol::Unspecified => {
                let rule = "must be a supported protocol";
                return Err(WireError::new("collector.protocol", message.protocol, rule));
            }
        };
        let parsed = Self::parse(protocol, &message.endpoint);
        parsed.map_err(|_fault| {
            WireError::new("collector.endpoint", &message.endpoint, "must be a URL of http")
        })
    }
}

impl From<OtlpCollector> for raw::Collector {
    fn from(value: OtlpCollector) -> Self {
        let protocol = match value.protocol {
            OtlpProtocol::Grpc => raw::CollectorProtocol::Grpc,
            OtlpProtocol::HttpProtobuf => raw::CollectorProtocol::HttpProtobuf,
        };
        Self { protocol: protocol.into(), endpoint: value.to_string() }
    }
}
