//! Pure: scale decisions of the active autoscaler → Revisions.
//!
//! An autoscaler follows the routes of one replica of the controller and sends each decision once, to all replicas. So
//! a decision may concern a Revision that this replica has not observed yet, or has lost and will observe again. Such a
//! decision is kept until it can be applied or is withdrawn: without it, requests would wait indefinitely.

use common::wire::{
    ConnectionPath, NamespacedName, ScaleDecision, ScaleDecisionInputs, UsageCoverage,
};
use smol_str::SmolStr;
use tracing::info;

use super::{ControllerStateMachine, ObjectsToStore};
use crate::{
    decide::wake_zone,
    model::{
        cluster_state::{AppRevision, AppState, CurrentDecision, UnixMillis},
        object::{ObjectPart, ObjectPartKey, ResourceKind},
    },
};

impl ControllerStateMachine {
    /// Begins a stream of decisions: each stored decision must be named again until it is synced.
    pub(super) fn handle_decision_stream_begin(&mut self) {
        self.unconfirmed_decisions = Some(self.decided_revisions().collect());
    }

    /// Withdraws the decisions that the stream has not named.
    pub(super) fn handle_decision_stream_synced(&mut self, now: UnixMillis) {
        for revision in self.unconfirmed_decisions.take().into_iter().flatten() {
            self.handle_decision_withdrawn(&revision, now);
        }
    }

    /// Stores a decision of the active autoscaler, and plans the app if the decision changes it.
    pub(super) fn handle_decision(&mut self, decision: ScaleDecision, now: UnixMillis) {
        if let Some(unconfirmed) = &mut self.unconfirmed_decisions {
            unconfirmed.remove(&decision.revision);
        }
        let wake_zone = self.record_wake_zone(&decision);
        let in_flight = decision.inputs.as_ref().map_or(0, |it| it.in_flight);
        let decided = CurrentDecision {
            requested_scale: decision.requested_scale,
            path: decision.connection_path,
            activity: decision.activity,
            has_load: in_flight > 0 || decision.stable_load > 0.0 || decision.panic_load > 0.0,
        };
        // The explanation is stored for an unknown Revision too: its status is written once it is observed.
        let is_unobserved = self.cluster.app_of_revision(&decision.revision).is_none();
        let changed = self.store_decision(&decision.revision, Some(decided));
        if is_unobserved || changed.is_some() {
            let explanations = &mut self.cluster.scaling.explanations;
            let line = explain_decision(&decision, wake_zone.as_deref());
            let last_line = explanations.get(&decision.revision);
            // A line that another replica wrote for the same decision stays; otherwise each new leader would write all
            // of them.
            if last_line.is_none_or(|last| decision_summary(last) != decision_summary(&line)) {
                explanations.insert(decision.revision.clone(), line.into());
            }
        }
        let Some((app, previous)) = changed else { return };
        info!(
            revision = %decision.revision, wanted = decided.requested_scale, path = ?decided.path,
            activity = ?decided.activity, stable = decision.stable_load,
            panic = decision.panic_load, target = decision.target_load,
            ready = decision.ready_pods, reason = decision.reason, zone = wake_zone.as_deref(),
            "scale decided"
        );
        self.reconcile_changed_app(&app, Some(&previous), ObjectsToStore::Changed, now);
    }

    pub(super) fn handle_decision_withdrawn(&mut self, revision: &NamespacedName, now: UnixMillis) {
        self.cluster.scaling.wake_zones.remove(revision);
        let was_explained = self.cluster.scaling.explanations.remove(revision).is_some();
        if let Some((app, previous)) = self.store_decision(revision, None) {
            self.reconcile_changed_app(&app, Some(&previous), ObjectsToStore::Changed, now);
        } else if was_explained {
            // Nothing is planned without a change, so the keys of the statuses are named here.
            let resources = [ResourceKind::PodAutoscaler, ResourceKind::Revision];
            let keys = resources
                .map(|resource| ObjectPartKey::new(resource, ObjectPart::Status, revision.clone()));
            self.effects.changed_keys.extend(keys);
        }
    }

    /// Records the zone from which the Revision was asked for its first pod, before that pod is ordered, and returns it.
    fn record_wake_zone(&mut self, decision: &ScaleDecision) -> Option<SmolStr> {
        let origin = decision.wake_origin.as_deref();
        let zone = origin.and_then(|it| wake_zone::origin_zone(&self.cluster, it));
        let zone = zone.map(SmolStr::from);
        let zones = &mut self.cluster.scaling.wake_zones;
        match &zone {
            Some(zone) => drop(zones.insert(decision.revision.clone(), zone.clone())),
            None => drop(zones.remove(&decision.revision)),
        }
        zone
    }

    /// Applies the decisions on Revisions that have been observed since.
    pub(super) fn apply_pending_decisions(&mut self, now: UnixMillis) {
        // Nearly always there is none.
        let revisions =
            self.pending_decisions.keys().filter(|it| self.cluster.app_of_revision(it).is_some());
        for revision in revisions.cloned().collect::<Vec<_>>() {
            let decided = self.pending_decisions.get(&revision).copied();
            let Some((app, previous)) = self.store_decision(&revision, decided) else { continue };
            info!(revision = %revision, ?decided, "decided before it was known");
            self.reconcile_changed_app(&app, Some(&previous), ObjectsToStore::Changed, now);
        }
    }

    /// Keeps the decision on a deleted Revision until it is withdrawn, since another Revision may get the name.
    pub(super) fn keep_decision(&mut self, revision: &NamespacedName) {
        let app = self.cluster.app_of_revision(revision).and_then(|it| self.cluster.apps.get(&it));
        let revision_state = app.and_then(|app| app.revision(&revision.name));
        if let Some(decided) = revision_state.and_then(|it| it.scaling.decision) {
            self.pending_decisions.insert(revision.clone(), decided);
        }
    }

    /// Keeps the decisions on deleted Revisions whose last pods have ended now.
    pub(super) fn keep_decisions_of_deleted(
        &mut self,
        name: &NamespacedName,
        previous: &AppState,
        after: Option<&AppState>,
    ) {
        let is_lost = |it: &&AppRevision| after.is_none_or(|app| app.revision(&it.name).is_none());
        for revision in previous.revisions.iter().filter(|it| it.is_deleted).filter(is_lost) {
            let revision_name = NamespacedName::new(name.namespace.clone(), &*revision.name);
            self.pending_decisions
                .extend(revision.scaling.decision.map(|decided| (revision_name, decided)));
        }
    }

    /// Returns the Revisions for which a decision, or its explanation, is stored.
    pub(super) fn decided_revisions(&self) -> impl Iterator<Item = NamespacedName> {
        let named = |(app, revision): (&NamespacedName, &AppRevision)| {
            NamespacedName::new(app.namespace.clone(), &*revision.name)
        };
        let all = self.cluster.apps.iter();
        all.flat_map(|(name, app)| app.revisions.iter().map(move |it| (name, it)))
            .filter(|(_, it)| it.scaling.decision.is_some())
            .map(named)
            .chain(self.pending_decisions.keys().cloned())
            .chain(self.cluster.scaling.explanations.keys().cloned())
    }

    /// Stores the decision on a Revision. Returns the app as it was before, if the decision changes it.
    fn store_decision(
        &mut self,
        revision_name: &NamespacedName,
        decided: Option<CurrentDecision>,
    ) -> Option<(NamespacedName, Box<AppState>)> {
        let Some(name) = self.cluster.app_of_revision(revision_name) else {
            match decided {
                // The Revision may be observed later than the decision: streams and watches start in any order.
                Some(decided) => self.pending_decisions.insert(revision_name.clone(), decided),
                None => self.pending_decisions.remove(revision_name),
            };
            return None;
        };
        self.pending_decisions.remove(revision_name);
        let app = self.cluster.apps.get_mut(&name)?;
        let index = app.revisions.iter().position(|it| *it.name == *revision_name.name)?;
        (app.revisions[index].scaling.decision != decided).then(|| {
            let previous = app.clone();
            app.revisions[index].scaling.decision = decided;
            (name, previous)
        })
    }
}

/// Returns the decision in an explanation, without its inputs.
fn decision_summary(line: &str) -> &str {
    line.split_once(": ").map_or(line, |(head, _)| head)
}

/// Explains a decision with its inputs in one line, with the zone of the request that woke the Revision. The line is
/// written with the decision and not again while it holds, though the inputs go on changing: each change would be a
/// write.
fn explain_decision(decision: &ScaleDecision, wake_zone: Option<&str>) -> String {
    let pods = match decision.requested_scale {
        Some(1) => "1 pod".to_owned(),
        Some(pods) => format!("{pods} pods"),
        None => "as many pods as there are".to_owned(),
    };
    let path = match decision.connection_path {
        ConnectionPath::Direct => "straight to pods",
        ConnectionPath::Activator => "through activators",
    };
    let panics = if decision.is_panicking { ", in panic" } else { "" };
    let reason =
        if decision.reason.is_empty() { String::new() } else { format!("{}; ", decision.reason) };
    format!(
        "{pods}, {path}: {reason}load {stable:.2} in the stable window, {panic:.2} in the panic window{panics}; \
         target {target:.2} a pod; {ready} ready; excess burst capacity {capacity:.0}{inputs}{asked}",
        stable = decision.stable_load,
        panic = decision.panic_load,
        target = decision.target_load,
        ready = decision.ready_pods,
        capacity = decision.excess_burst_capacity,
        inputs = decision.inputs.as_ref().map(explain_inputs).unwrap_or_default(),
        asked = wake_zone.map(|zone| format!("; asked from zone {zone}")).unwrap_or_default(),
    )
}

/// Describes the inputs of a decision beside the averages, if its sender included them.
fn explain_inputs(inputs: &ScaleDecisionInputs) -> String {
    let desired_scale = match inputs.desired_by_load {
        Some(pods) => pods.to_string(),
        None => "unknown".to_owned(),
    };
    let max_scale =
        if inputs.max_scale == 0 { "unlimited".to_owned() } else { inputs.max_scale.to_string() };
    let bound =
        if inputs.applied_bound.is_empty() { "none" } else { inputs.applied_bound.as_str() };
    let coverage = match inputs.coverage {
        UsageCoverage::Complete => "complete",
        UsageCoverage::Partial => "partial",
        UsageCoverage::Missing => "missing",
    };
    format!(
        "; {} in flight, {} of them waiting; windows of {} s and {} s; desired scale {desired_scale}; min scale {}, max \
         scale {max_scale}; applied bound: {bound}; usage coverage: {coverage}",
        inputs.in_flight,
        inputs.waiting,
        inputs.stable_window.as_secs(),
        inputs.panic_window.as_secs(),
        inputs.min_scale,
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use common::wire::RevisionActivity;

    use super::*;

    #[test]
    fn an_explanation_has_inputs_windows_and_the_applied_bound() {
        let inputs = ScaleDecisionInputs {
            in_flight: 300,
            waiting: 140,
            stable_window: Duration::from_secs(60),
            panic_window: Duration::from_secs(6),
            desired_by_load: Some(5),
            min_scale: 1,
            max_scale: 3,
            applied_bound: "max-scale".into(),
            coverage: UsageCoverage::Partial,
        };
        let decision = ScaleDecision {
            revision: NamespacedName::new("default", "hello-00001"),
            requested_scale: Some(3),
            connection_path: ConnectionPath::Activator,
            activator_count: 2,
            activity: RevisionActivity::Active,
            stable_load: 70.0,
            panic_load: 300.0,
            target_load: 70.0,
            ready_pods: 1,
            is_panicking: true,
            excess_burst_capacity: -1.0,
            reason: "max-scale".into(),
            inputs: Some(inputs),
            wake_origin: None,
        };
        assert_eq!(
            explain_decision(&decision, Some("b")),
            "3 pods, through activators: max-scale; load 70.00 in the stable window, 300.00 in the panic window, in \
             panic; target 70.00 a pod; 1 ready; excess burst capacity -1; 300 in flight, 140 of them waiting; windows \
             of 60 s and 6 s; desired scale 5; min scale 1, max scale 3; applied bound: max-scale; usage coverage: \
             partial; asked from zone b"
        );
    }
}
