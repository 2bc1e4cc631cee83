//! Pure: conversion of the two messages of scaling.

use super::*;

impl TryFrom<raw::UsageItem> for UsageItem {
    type Error = WireError;
    fn try_from(it: raw::UsageItem) -> WireResult<Self> {
        use raw::usage_item::What;
        Ok(match require("usage_item.what", it.what)? {
            What::Sender(it) => Self::Sender(it.try_into()?),
            What::Usage(it) => Self::Sample(it.try_into()?),
            What::Gone(key) => Self::Removed(key.try_into()?),
            What::Synced(_) => Self::Synced,
        })
    }
}

impl From<UsageItem> for raw::UsageItem {
    fn from(it: UsageItem) -> Self {
        use raw::usage_item::What;
        let what = match it {
            UsageItem::Sender(it) => What::Sender(it.into()),
            UsageItem::Sample(it) => What::Usage(it.into()),
            UsageItem::Removed(key) => What::Gone(key.into()),
            UsageItem::Synced => What::Synced(raw::Empty {}),
        };
        Self { what: Some(what) }
    }
}

impl TryFrom<raw::UsageKey> for UsageKey {
    type Error = WireError;
    fn try_from(it: raw::UsageKey) -> WireResult<Self> {
        let pod = (!it.pod.is_empty()).then_some(it.pod);
        Ok(Self { revision: it.revision.parse()?, pod })
    }
}

impl From<UsageKey> for raw::UsageKey {
    fn from(it: UsageKey) -> Self {
        Self { revision: it.revision.to_string(), pod: it.pod.unwrap_or_default() }
    }
}

impl TryFrom<raw::UsageSeen> for UsageSample {
    type Error = WireError;
    fn try_from(it: raw::UsageSeen) -> WireResult<Self> {
        // `started − finished` is the number in flight, which must not wrap.
        if it.finished > it.started {
            return Err(WireError::new("usage.finished", it.finished, "must not exceed started"));
        }
        Ok(Self {
            key: require("usage.key", it.key)?.try_into()?,
            read_at_ns: it.at_ns,
            totals: RequestTotals {
                started: it.started,
                finished: it.finished,
                started_sum_ns: it.started_sum_ns,
                finished_sum_ns: it.finished_sum_ns,
                abandoned: it.left.min(it.finished),
            },
            status: it.status,
            latency: it.latency,
        })
    }
}

impl From<UsageSample> for raw::UsageSeen {
    fn from(it: UsageSample) -> Self {
        Self {
            key: Some(it.key.into()),
            at_ns: it.read_at_ns,
            started: it.totals.started,
            finished: it.totals.finished,
            started_sum_ns: it.totals.started_sum_ns,
            finished_sum_ns: it.totals.finished_sum_ns,
            left: it.totals.abandoned,
            status: it.status,
            latency: it.latency,
        }
    }
}

impl TryFrom<raw::ScaleItem> for ScaleItem {
    type Error = WireError;
    fn try_from(it: raw::ScaleItem) -> WireResult<Self> {
        use raw::scale_item::What;
        // A heartbeat is a field beside `what`, because earlier releases refuse an unknown `what`.
        if let Some(alive) = it.alive {
            let since_ms = if let Some(What::SinceMs(ms)) = it.what { ms } else { 0 };
            let raw::Alive { heard_ms, full: is_full, reporters, counts } = alive;
            // Empty stands for an active autoscaler that the table has not named.
            let counts = Some(counts).filter(|it| !it.is_empty());
            return Ok(Self::Heartbeat(AutoscalerHeartbeat {
                since_ms,
                observed_ms: heard_ms,
                covers_all_windows: is_full,
                reporters,
                active_autoscaler: counts,
            }));
        }
        Ok(match require("scale_item.what", it.what)? {
            What::Sender(it) => Self::Sender(it.try_into()?),
            What::SinceMs(ms) => Self::Since(ms),
            What::Decision(it) => Self::Decision(it.try_into()?),
            What::Gone(name) => Self::Removed(name.parse()?),
            What::Synced(_) => Self::Synced,
        })
    }
}

impl From<ScaleItem> for raw::ScaleItem {
    fn from(it: ScaleItem) -> Self {
        use raw::scale_item::What;
        let mut alive = None;
        let what = match it {
            ScaleItem::Heartbeat(it) => {
                let AutoscalerHeartbeat {
                    since_ms,
                    observed_ms: heard_ms,
                    covers_all_windows: full,
                    reporters,
                    active_autoscaler: counts,
                } = it;
                let counts = counts.unwrap_or_default();
                alive = Some(raw::Alive { heard_ms, full, reporters, counts });
                // Earlier releases refuse an item without `what`, and read this one.
                What::SinceMs(since_ms)
            }
            ScaleItem::Sender(it) => What::Sender(it.into()),
            ScaleItem::Since(ms) => What::SinceMs(ms),
            ScaleItem::Decision(it) => What::Decision(it.into()),
            ScaleItem::Removed(name) => What::Gone(name.to_string()),
            ScaleItem::Synced => What::Synced(raw::Empty {}),
        };
        Self { what: Some(what), alive }
    }
}

impl TryFrom<raw::Decision> for ScaleDecision {
    type Error = WireError;
    fn try_from(it: raw::Decision) -> WireResult<Self> {
        // An unknown activity could be reported in no condition, so the decision is refused as a whole.
        let activity = match it.activity() {
            raw::Activity::Active => RevisionActivity::Active,
            raw::Activity::Activating => RevisionActivity::Activating,
            raw::Activity::Inactive => RevisionActivity::Inactive,
            raw::Activity::TimedOut => RevisionActivity::TimedOut,
            raw::Activity::Unspecified => {
                return Err(WireError::new(
                    "decision.activity",
                    it.activity,
                    "must be a known activity",
                ));
            }
        };
        Ok(Self {
            connection_path: parse_connection_path("decision.path", it.path())?,
            revision: it.revision.parse()?,
            desired_scale: it.wanted,
            activator_count: it.activators,
            activity,
            stable_load: require_finite("decision.stable", it.stable)?,
            panic_load: require_finite("decision.panic", it.panic)?,
            target_load: require_finite("decision.target", it.target)?,
            ready_pods: it.ready_pods,
            is_panicking: it.panicking,
            excess_burst_capacity: require_finite(
                "decision.excess_burst_capacity",
                it.excess_burst_capacity,
            )?,
            reason: it.reason,
            inputs: it.inputs.map(ScaleDecisionInputs::from),
        })
    }
}

impl From<raw::DecisionInputs> for ScaleDecisionInputs {
    fn from(it: raw::DecisionInputs) -> Self {
        let sight = match it.sight() {
            raw::Sight::Whole => UsageCoverage::Complete,
            raw::Sight::Partial => UsageCoverage::Partial,
            // A value of a later release is unknown here, so the least coverage is assumed.
            raw::Sight::Blind | raw::Sight::Unspecified => UsageCoverage::Missing,
        };
        Self {
            in_flight: it.in_flight,
            waiting: it.waiting,
            stable_window: Duration::from_millis(it.stable_window_ms),
            panic_window: Duration::from_millis(it.panic_window_ms),
            desired_by_load: it.by_load,
            min_scale: it.min_scale,
            max_scale: it.max_scale,
            applied_bound: it.bound,
            coverage: sight,
        }
    }
}

impl From<ScaleDecisionInputs> for raw::DecisionInputs {
    fn from(it: ScaleDecisionInputs) -> Self {
        let ms = |it: Duration| u64::try_from(it.as_millis()).unwrap_or(u64::MAX);
        let sight = match it.coverage {
            UsageCoverage::Complete => raw::Sight::Whole,
            UsageCoverage::Partial => raw::Sight::Partial,
            UsageCoverage::Missing => raw::Sight::Blind,
        };
        Self {
            in_flight: it.in_flight,
            waiting: it.waiting,
            stable_window_ms: ms(it.stable_window),
            panic_window_ms: ms(it.panic_window),
            by_load: it.desired_by_load,
            min_scale: it.min_scale,
            max_scale: it.max_scale,
            bound: it.applied_bound,
            sight: sight.into(),
        }
    }
}

impl From<ScaleDecision> for raw::Decision {
    fn from(it: ScaleDecision) -> Self {
        let activity = match it.activity {
            RevisionActivity::Active => raw::Activity::Active,
            RevisionActivity::Activating => raw::Activity::Activating,
            RevisionActivity::Inactive => raw::Activity::Inactive,
            RevisionActivity::TimedOut => raw::Activity::TimedOut,
        };
        Self {
            revision: it.revision.to_string(),
            wanted: it.desired_scale,
            path: raw_connection_path(it.connection_path),
            activators: it.activator_count,
            activity: activity.into(),
            stable: it.stable_load,
            panic: it.panic_load,
            target: it.target_load,
            ready_pods: it.ready_pods,
            panicking: it.is_panicking,
            excess_burst_capacity: it.excess_burst_capacity,
            reason: it.reason,
            inputs: it.inputs.map(Into::into),
        }
    }
}
