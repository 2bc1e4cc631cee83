//! Pure: conversion of standby orders and reports from protobuf to checked types and back.

use super::*;

impl TryFrom<raw::StandbyOrder> for StandbyOrder {
    type Error = WireError;
    fn try_from(message: raw::StandbyOrder) -> WireResult<Self> {
        Ok(Self {
            quiet_time: require_some_time("standby.quiet_ms", message.quiet_ms)?,
            probe_time: require_some_time("standby.probe_ms", message.probe_ms)?,
            reclaims_memory: message.reclaims_memory,
            agent_timeout: parse_optional_ms(message.agent_timeout_ms)
                .unwrap_or(StandbyOrder::DEFAULT_AGENT_TIMEOUT),
        })
    }
}

/// Parses a time that must not be zero: a pod that is frozen at once after its thaw would answer nothing.
fn require_some_time(field: &'static str, ms: u64) -> WireResult<Duration> {
    parse_optional_ms(ms).ok_or_else(|| WireError::new(field, ms, "must be above 0"))
}

impl From<StandbyOrder> for raw::StandbyOrder {
    fn from(value: StandbyOrder) -> Self {
        Self {
            // Less than a millisecond would arrive as zero, which receivers refuse.
            quiet_ms: to_ms(value.quiet_time).max(1),
            probe_ms: to_ms(value.probe_time).max(1),
            reclaims_memory: value.reclaims_memory,
            agent_timeout_ms: to_ms(value.agent_timeout).max(1),
        }
    }
}

impl From<raw::StandbySeen> for StandbyReport {
    fn from(message: raw::StandbySeen) -> Self {
        Self {
            is_frozen: message.frozen,
            memory_bytes: message.memory_bytes,
            failure: message.failure,
        }
    }
}

impl From<StandbyReport> for raw::StandbySeen {
    fn from(value: StandbyReport) -> Self {
        Self { frozen: value.is_frozen, memory_bytes: value.memory_bytes, failure: value.failure }
    }
}
