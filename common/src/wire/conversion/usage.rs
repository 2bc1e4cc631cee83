//! Pure: conversion of UsageReports, and of ScaleDecisions with their heartbeats.

use super::*;

impl TryFrom<raw::UsageItem> for UsageItem {
    type Error = WireError;
    fn try_from(message: raw::UsageItem) -> WireResult<Self> {
        use raw::usage_item::What;
        Ok(match require("usage_item.what", message.what)? {
            What::Sender(message) => Self::Sender(message.try_into()?),
            What::Usage(message) => Self::Sample(message.try_into()?),
            What::Gone(key) => Self::Removed(key.try_into()?),
            What::Synced(_) => Self::Synced,
        })
    }
}

impl From<UsageItem> for raw::UsageItem {
    fn from(value: UsageItem) -> Self {
        use raw::usage_item::What;
        let what = match value {
            UsageItem::Sender(value) => What::Sender(value.into()),
            UsageItem::Sample(value) => What::Usage(value.into()),
            UsageItem::Removed(key) => What::Gone(key.into()),
            UsageItem::Synced => What::Synced(raw::Empty {}),
        };
        Self { what: Some(what) }
    }
}

impl TryFrom<raw::UsageKey> for UsageKey {
    type Error = WireError;
    fn try_from(message: raw::UsageKey) -> WireResult<Self> {
        let pod = (!message.pod.is_empty()).then_some(message.pod);
        Ok(Self { revision: parse_revision_name(&message.revision)?, pod })
    }
}

impl From<UsageKey> for raw::UsageKey {
    fn from(value: UsageKey) -> Self {
        Self { revision: value.revision.to_string(), pod: value.pod.unwrap_or_default() }
    }
}

impl TryFrom<raw::UsageSeen> for UsageSample {
    type Error = WireError;
    fn try_from(message: raw::UsageSeen) -> WireResult<Self> {
        // `started − finished` is the number in flight, which must not wrap.
        if message.finished > message.started {
            return Err(WireError::new(
                "usage.finished",
                message.finished,
                "must not exceed started",
            ));
        }
        Ok(Self {
            key: require("usage.key", message.key)?.try_into()?,
            read_at_ns: message.at_ns,
            totals: RequestTotals {
                started: message.started,
                finished: message.finished,
                started_sum_ns: message.started_sum_ns,
                finished_sum_ns: message.finished_sum_ns,
                // Abandoned requests are part of the finished ones, and a receiver subtracts them.
                abandoned: message.left.min(message.finished),
            },
            status: message.status,
            latency: message.latency,
            client: parse_client("usage.client", &message.client),
        })
    }
}

impl From<UsageSample> for raw::UsageSeen {
    fn from(value: UsageSample) -> Self {
        Self {
            key: Some(value.key.into()),
            at_ns: value.read_at_ns,
            started: value.totals.started,
            finished: value.totals.finished,
            started_sum_ns: value.totals.started_sum_ns,
            finished_sum_ns: value.totals.finished_sum_ns,
            left: value.totals.abandoned,
            status: value.status,
            latency: value.latency,
            client: value.client.map(address_octets).unwrap_or_default(),
        }
    }
}

/// Parses the address of a client. An invalid one counts as not known: load must not be lost with a hint.
fn parse_client(field: &'static str, bytes: &[u8]) -> Option<IpAddr> {
    parse_optional_address(field, bytes).ok().flatten()
}

impl TryFrom<raw::ScaleItem> for ScaleItem {
    type Error = WireError;
    fn try_from(message: raw::ScaleItem) -> WireResult<Self> {
        use raw::scale_item::What;
        // A heartbeat is a field beside `what`, because earlier releases refuse an unknown `what`.
        if let Some(alive) = message.alive {
            let since_ms = if let Some(What::SinceMs(ms)) = message.what { ms } else { 0 };
            let raw::Alive { heard_ms, full, reporters, counts } = alive;
            // Empty means that the sender's RouteTable has not named an active autoscaler.
            let counts = Some(counts).filter(|it| !it.is_empty());
            return Ok(Self::Heartbeat(AutoscalerHeartbeat {
                since_ms,
                observed_ms: heard_ms,
                covers_all_windows: full,
                reporters,
                active_autoscaler: counts,
            }));
        }
        Ok(match require("scale_item.what", message.what)? {
            What::Sender(message) => Self::Sender(message.try_into()?),
            What::SinceMs(ms) => Self::Since(ms),
            What::Decision(message) => Self::Decision(message.try_into()?),
            What::Gone(name) => Self::Removed(parse_revision_name(&name)?),
            What::Synced(_) => Self::Synced,
        })
    }
}

impl From<ScaleItem> for raw::ScaleItem {
    fn from(value: ScaleItem) -> Self {
        use raw::scale_item::What;
        let mut alive = None;
        let what = match value {
            ScaleItem::Heartbeat(value) => {
                let AutoscalerHeartbeat {
                    since_ms,
                    observed_ms: heard_ms,
                    covers_all_windows: full,
                    reporters,
                    active_autoscaler: counts,
                } = value;
                let counts = counts.unwrap_or_default();
                alive = Some(raw::Alive { heard_ms, full, reporters, counts });
                // Earlier releases refuse an item without `what`, and read this one.
                What::SinceMs(since_ms)
            }
            ScaleItem::Sender(value) => What::Sender(value.into()),
            ScaleItem::Since(ms) => What::SinceMs(ms),
            ScaleItem::Decision(value) => What::Decision(value.into()),
            ScaleItem::Removed(name) => What::Gone(name.to_string()),
            ScaleItem::Synced => What::Synced(raw::Empty {}),
        };
        Self { what: Some(what), alive }
    }
}

impl TryFrom<raw::Decision> for ScaleDecision {
    type Error = WireError;
    fn try_from(message: raw::Decision) -> WireResult<Self> {
        // An unknown activity could be reported in no condition, so the decision is refused as a whole.
        let activity = match message.activity() {
            raw::Activity::Active => RevisionActivity::Active,
            raw::Activity::Activating => RevisionActivity::Activating,
            raw::Activity::Inactive => RevisionActivity::Inactive,
            raw::Activity::TimedOut => RevisionActivity::TimedOut,
            raw::Activity::Unspecified => {
                return Err(WireError::new(
                    "decision.activity",
                    message.activity,
                    "must be a known activity",
                ));
            }
        };
        Ok(Self {
            connection_path: parse_connection_path("decision.path", message.path())?,
            revision: parse_revision_name(&message.revision)?,
            requested_scale: message.wanted,
            activator_count: message.activators,
            activity,
            stable_load: require_finite("decision.stable", message.stable)?,
            panic_load: require_finite("decision.panic", message.panic)?,
            target_load: require_finite("decision.target", message.target)?,
            ready_pods: message.ready_pods,
            is_panicking: message.panicking,
            excess_burst_capacity: require_finite(
                "decision.excess_burst_capacity",
                message.excess_burst_capacity,
            )?,
            reason: message.reason,
            inputs: message.inputs.map(ScaleDecisionInputs::from),
            wake_origin: message.origin.and_then(parse_wake_origin).map(Box::new),
        })
    }
}

/// Parses the origin of a wake. One without an activator counts as not known, and the decision stays.
fn parse_wake_origin(message: raw::WakeOrigin) -> Option<WakeOrigin> {
    let client = parse_client("wake_origin.client", &message.client);
    let activator = Some(message.activator).filter(|it| !it.is_empty())?;
    Some(WakeOrigin { activator, client })
}

impl From<WakeOrigin> for raw::WakeOrigin {
    fn from(value: WakeOrigin) -> Self {
        let client = value.client.map(address_octets).unwrap_or_default();
        Self { activator: value.activator, client }
    }
}

impl From<raw::DecisionInputs> for ScaleDecisionInputs {
    fn from(message: raw::DecisionInputs) -> Self {
        let coverage = match message.sight() {
            raw::Sight::Whole => UsageCoverage::Complete,
            raw::Sight::Partial => UsageCoverage::Partial,
            // A value of a later release is unknown here, so the least coverage is assumed.
            raw::Sight::Blind | raw::Sight::Unspecified => UsageCoverage::Missing,
        };
        Self {
            in_flight: message.in_flight,
            waiting: message.waiting,
            stable_window: Duration::from_millis(message.stable_window_ms),
            panic_window: Duration::from_millis(message.panic_window_ms),
            desired_by_load: message.by_load,
            min_scale: message.min_scale,
            max_scale: message.max_scale,
            applied_bound: message.bound,
            coverage,
        }
    }
}

impl From<ScaleDecisionInputs> for raw::DecisionInputs {
    fn from(value: ScaleDecisionInputs) -> Self {
        let ms = |value: Duration| u64::try_from(value.as_millis()).unwrap_or(u64::MAX);
        let sight = match value.coverage {
            UsageCoverage::Complete => raw::Sight::Whole,
            UsageCoverage::Partial => raw::Sight::Partial,
            UsageCoverage::Missing => raw::Sight::Blind,
        };
        Self {
            in_flight: value.in_flight,
            waiting: value.waiting,
            stable_window_ms: ms(value.stable_window),
            panic_window_ms: ms(value.panic_window),
            by_load: value.desired_by_load,
            min_scale: value.min_scale,
            max_scale: value.max_scale,
            bound: value.applied_bound,
            sight: sight.into(),
        }
    }
}

impl From<ScaleDecision> for raw::Decision {
    fn from(value: ScaleDecision) -> Self {
        let activity = match value.activity {
            RevisionActivity::Active => raw::Activity::Active,
            RevisionActivity::Activating => raw::Activity::Activating,
            RevisionActivity::Inactive => raw::Activity::Inactive,
            RevisionActivity::TimedOut => raw::Activity::TimedOut,
        };
        Self {
            revision: value.revision.to_string(),
            wanted: value.requested_scale,
            path: raw_connection_path(value.connection_path),
            activators: value.activator_count,
            activity: activity.into(),
            stable: value.stable_load,
            panic: value.panic_load,
            target: value.target_load,
            ready_pods: value.ready_pods,
            panicking: value.is_panicking,
            excess_burst_capacity: value.excess_burst_capacity,
            reason: value.reason,
            inputs: value.inputs.map(Into::into),
            origin: value.wake_origin.map(|origin| (*origin).into()),
        }
    }
}
