//! Pure: the decision on one Revision as controllers get it, with its reason and the figures behind it.

use common::wire::{
    ConnectionPath, NamespacedName, RevisionActivity, ScaleDecision, ScaleDecisionInputs,
};

use super::{AwakeRevision, ScaledRevision};
use crate::{
    scale_to_zero::{RequestedScale, ScaleBound},
    scaler::ScaleReason,
    window::panic_window,
};

/// Part of a decision whose change is worth a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DecisionFingerprint {
    pods: Option<u32>,
    pub(super) path: ConnectionPath,
    activators: u32,
    activity: RevisionActivity,
}

impl ScaledRevision {
    /// Returns the decision if its fingerprint differs from that of the last one.
    pub(super) fn changed_decision(
        &mut self,
        name: &NamespacedName,
        requested: RequestedScale,
    ) -> Option<ScaleDecision> {
        let awake = self.awake.as_ref()?;
        let fingerprint = DecisionFingerprint {
            pods: requested.pods,
            path: requested.path,
            activators: awake.desired_scale.activators,
            activity: requested.activity,
        };
        // Averages change at each tick; only a change of these fields is worth a message.
        if self.sent_fingerprint.replace(fingerprint) == Some(fingerprint) {
            return None;
        }
        Some(ScaleDecision {
            revision: name.clone(),
            requested_scale: fingerprint.pods,
            connection_path: fingerprint.path,
            activator_count: fingerprint.activators,
            activity: fingerprint.activity,
            stable_load: awake.averages.stable,
            panic_load: awake.averages.panic,
            target_load: awake.desired_scale.target,
            ready_pods: self.pods.ready,
            is_panicking: awake.scaler.is_panicking(),
            excess_burst_capacity: awake.desired_scale.excess_burst_capacity,
            reason: decision_reason(requested.bound, awake.desired_scale.reason).to_owned(),
            inputs: Some(self.decision_inputs(awake, requested)),
            wake_origin: self.wake_origin.clone(),
        })
    }

    /// Returns the inputs that the decision was made from, for the decision's record.
    fn decision_inputs(
        &self,
        awake: &AwakeRevision,
        requested: RequestedScale,
    ) -> ScaleDecisionInputs {
        let policy = &self.policy;
        // These reasons name the load itself, which is no bound.
        let is_by_load = requested.bound.is_none()
            && matches!(
                awake.desired_scale.reason,
                ScaleReason::Stable | ScaleReason::InFlight | ScaleReason::NoData
            );
        let bound = if is_by_load {
            ""
        } else {
            decision_reason(requested.bound, awake.desired_scale.reason)
        };
        ScaleDecisionInputs {
            in_flight: self.load.in_flight(),
            waiting: self.load.waiting(),
            stable_window: policy.stable_window,
            panic_window: panic_window(policy.stable_window, policy.panic_window_percent),
            desired_by_load: awake.desired_scale.pods,
            min_scale: if self.is_reachable { policy.min_scale } else { 0 },
            max_scale: policy.max_scale,
            applied_bound: bound.to_owned(),
            coverage: awake.load_knowledge.coverage(),
        }
    }
}

/// Returns the reason of a decision: the bound that has changed the number, else the rule that has made it.
fn decision_reason(bound: Option<ScaleBound>, reason: ScaleReason) -> &'static str {
    match (bound, reason) {
        (Some(ScaleBound::MinScale), _) => "min-scale",
        (Some(ScaleBound::MaxScale), _) => "max-scale",
        (Some(ScaleBound::InitialScale), _) => "initial-scale",
        (Some(ScaleBound::NoScaleToZero), _) => "scale to zero is off",
        (Some(ScaleBound::Starting), _) => "waiting for pods to start",
        (Some(ScaleBound::TimedOut), _) => "progress deadline passed",
        (Some(ScaleBound::StableWindow), _) => "not active for a stable window yet",
        (Some(ScaleBound::TurningInactive), _) => "no load, turning inactive",
        (Some(ScaleBound::Retention), _) => "last pod retention",
        (Some(ScaleBound::NoLoad), _) => "no load for the stable window",
        (Some(ScaleBound::LoadUnknown), _) => "load not known for the whole window, pods are kept",
        (Some(ScaleBound::BetweenTicks), _) => "pods are kept until the next tick",
        (None, ScaleReason::NoData) => "load not known",
        (None, ScaleReason::Stable) => "stable load",
        (None, ScaleReason::InFlight) => "requests in flight",
        (None, ScaleReason::Panic) => "panic",
        (None, ScaleReason::ActivationScale) => "activation-scale",
        (None, ScaleReason::MaxScaleUpRate) => "max-scale-up-rate",
        (None, ScaleReason::MaxScaleDownRate) => "max-scale-down-rate",
        (None, ScaleReason::ScaleDownDelay) => "scale-down-delay",
    }
}
