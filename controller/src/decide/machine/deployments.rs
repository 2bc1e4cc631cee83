//! Pure: Deployments of Revisions: the scale that others set, and the pods that Kubernetes refuses.

use common::wire::NamespacedName;
use serde_json::Value;

use super::{BlockedPart, BlockingCause, ControllerStateMachine};
use crate::{
    decide::part_keys,
    model::{
        cluster_state::{AppRevision, AppState, ConditionReason, ParsedTemplate, Uid, UnixMillis},
        knative::key,
        object::{ObjectPart, ObjectPartKey, ResourceKind, json, names},
        scale_policy::AutoscalerClass,
    },
    read::observe,
};

/// Facts of a Deployment that the plan of its Revision depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DeploymentFacts {
    /// UID of the Revision, as the Deployment's label states it.
    revision_uid: Box<str>,
    /// Number of pods that the Deployment requests. If Kubernetes scales the Revision, it is the requested scale.
    replicas: Option<u32>,
    /// Reason why Kubernetes makes no pods.
    failure: Option<ConditionReason>,
}

impl DeploymentFacts {
    fn from_object(object: &Value) -> Self {
        let replicas = object["spec"]["replicas"].as_u64();
        Self {
            revision_uid: json::label(object, key::REVISION_UID).unwrap_or_default().into(),
            replicas: replicas.and_then(|it| u32::try_from(it).ok()),
            failure: observe::replica_failure(object),
        }
    }
}

impl ControllerStateMachine {
    /// Handles a Deployment; `None`: it was deleted.
    pub(super) fn observe_deployment(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        let facts = object.map(DeploymentFacts::from_object);
        // A deleted Deployment, or one whose Revision is known, is not awaited any more.
        self.early_deployments.remove(name);
        let key = ObjectPartKey::new(ResourceKind::Deployment, ObjectPart::Object, name.clone());
        let owner = part_keys::owner_revision_of(&self.cluster, &key).filter(|(app, revision)| {
            // The known Revision may be an earlier one of this name, whose deletion is not observed yet.
            facts.as_ref().is_none_or(|it| self.is_revision(app, revision, &it.revision_uid))
        });
        match (owner, facts) {
            (Some((owner, revision)), facts) => {
                self.store_deployment(&owner, &revision, facts.unwrap_or_default(), now);
            }
            // Each kind has a watch of its own: the Revision will be observed soon.
            (None, Some(facts)) => drop(self.early_deployments.insert(name.clone(), facts)),
            (None, None) => {}
        }
    }

    /// Returns true if the app's Revision of this name has this UID.
    fn is_revision(&self, app: &NamespacedName, revision: &str, uid: &str) -> bool {
        let app = self.cluster.apps.get(app);
        let revision = app.and_then(|it| it.revision(revision));
        revision.is_some_and(|it| Some(it.meta.uid) == Uid::parse(uid))
    }

    /// Applies the Deployment of a Revision if it was observed before the Revision, whose UID is `uid`.
    pub(super) fn apply_early_deployment(
        &mut self,
        revision: &NamespacedName,
        uid: Option<&str>,
        now: UnixMillis,
    ) {
        let deployment = names::deployment_name(&revision.name);
        let name = NamespacedName::new(revision.namespace.clone(), deployment);
        let early = self.early_deployments.get(&name);
        // A Deployment of an earlier Revision of this name is about to be deleted.
        let Some(facts) = early.filter(|it| uid == Some(&*it.revision_uid)).cloned() else {
            return;
        };
        let Some(owner) = self.cluster.app_of_revision(revision) else { return };
        self.early_deployments.remove(&name);
        self.store_deployment(&owner, &revision.name, facts, now);
    }

    /// Applies what was observed of a Revision's Deployment: its failure, and the number that another autoscaler has
    /// set.
    fn store_deployment(
        &mut self,
        owner: &NamespacedName,
        revision_name: &str,
        facts: DeploymentFacts,
        now: UnixMillis,
    ) {
        let DeploymentFacts { replicas, failure, .. } = facts;
        let has_replica_failure = failure.is_some();
        let blocked_object = (owner.clone(), BlockedPart::Revision(revision_name.into()));
        let blocked_reason =
            self.set_blocking_cause(&blocked_object, BlockingCause::Deployment, failure);
        let key = NamespacedName::new(owner.namespace.clone(), revision_name);
        let previous_scale = self.cluster.scaling.external_scales.get(&key).copied();
        let is_planned = self.change_app(owner.clone(), now, |app, cluster| {
            let mut all = app.revisions.iter_mut();
            let Some(revision) = all.find(|it| *it.name == *revision_name) else { return };
            revision.blocked_reason = blocked_reason;
            revision.scaling.has_replica_failure = has_replica_failure;
            let class = ParsedTemplate::of_revision(revision, cluster).class;
            let scales = &mut cluster.scaling.external_scales;
            // Another autoscaler scales the Deployment, so its number is an observation and not a plan.
            if let Some(replicas) = replicas.filter(|_| class != AutoscalerClass::Kpa) {
                scales.insert(key.clone(), replicas);
            } else {
                scales.remove(&key);
            }
        });
        // The app has no field for this scale, so a change of it alone is not planned yet.
        let scale = self.cluster.scaling.external_scales.get(&key).copied();
        if !is_planned && scale != previous_scale {
            self.reconcile_app(owner, now);
        }
    }

    /// Forgets the scale that others set of an app's Revisions that no longer exist: their Deployments may be observed
    /// as deleted only later, when no Revision shows to whom they belong.
    pub(super) fn drop_external_scales(
        &mut self,
        name: &NamespacedName,
        previous: &AppState,
        app: Option<&AppState>,
    ) {
        let scales = &mut self.cluster.scaling.external_scales;
        // Nearly always there is none.
        if scales.is_empty() {
            return;
        }
        let is_gone = |it: &&AppRevision| app.is_none_or(|app| app.revision(&it.name).is_none());
        for revision in previous.revisions.iter().filter(is_gone) {
            scales.remove(&NamespacedName::new(name.namespace.clone(), &*revision.name));
        }
    }
}
