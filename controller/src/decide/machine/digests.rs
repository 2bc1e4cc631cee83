//! Pure: Revisions whose images are to be resolved to digests, and the results.

use std::{collections::BTreeSet, time::Duration};

use common::wire::NamespacedName;

use super::ControllerStateMachine;
use crate::{
    decide::plan::CONTAINER_MISSING,
    model::cluster_state::{
        AppRevision, AppState, ConditionReason, ParsedTemplate, PlatformKind, UnixMillis,
    },
};

/// Images of a Revision that need digests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DigestRequest {
    /// Account with the credentials for all images.
    pub account: PullAccount,
    /// Pairs of container name and image, init containers first.
    pub images: Vec<(String, String)>,
    /// Registries whose tags are not resolved: `registries-skipping-tag-resolving`.
    pub skipped_registries: BTreeSet<String>,
    /// Timeout of one query: `digest-resolution-timeout`.
    pub timeout: Duration,
}

/// Service account and pull secrets that provide the credentials of a query.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct PullAccount {
    /// Namespace of the service account and the secrets.
    pub namespace: String,
    /// Name of the service account; empty: `default`.
    pub service_account: String,
    /// Names of the pull secrets in the pod spec itself.
    pub pull_secrets: Vec<String>,
}

/// Names of the containers, init containers first, each with its image by digest, or the error. An empty text leaves
/// the image as it is written.
pub type DigestResolution = Result<Vec<(String, String)>, String>;

impl ControllerStateMachine {
    /// Adds to the effects the Revisions whose digests are missing. Revisions that were deleted before they had digests
    /// are added as well, so that the resolver forgets them.
    pub(super) fn request_digests(
        &mut self,
        app: &NamespacedName,
        previous: &AppState,
        after: Option<&AppState>,
    ) {
        if self.cluster.settings.platform != PlatformKind::Kubernetes || !self.cluster.is_leader {
            return;
        }
        let is_unresolved = |it: &&AppRevision| it.digests.is_empty();
        let named = |it: &AppRevision| NamespacedName::new(app.namespace.clone(), &*it.name);
        let unresolved = after.iter().flat_map(|app| &app.revisions).filter(is_unresolved);
        let is_removed =
            |it: &&AppRevision| after.is_none_or(|app| app.revision(&it.name).is_none());
        let removed = previous.revisions.iter().filter(is_unresolved).filter(is_removed);
        self.effects.revisions_to_resolve.extend(unresolved.chain(removed).map(named));
    }

    /// Returns the request for a Revision's digests. `None` if it has them already, the Revision no longer exists, or
    /// this replica is not the leader.
    pub fn digest_request(&self, name: &NamespacedName) -> Option<DigestRequest> {
        let revision = self.cluster.revision(&name.namespace, &name.name)?;
        // Digests never change once they are known: a moved tag must not change a Revision.
        if !revision.digests.is_empty() || !self.cluster.is_leader {
            return None;
        }
        let template = ParsedTemplate::of_revision(revision, &self.cluster);
        let pod = &template.raw.spec.pod;
        let containers = pod.init_containers.iter().flatten().chain(&pod.containers);
        let image = |container: &k8s_openapi::api::core::v1::Container| {
            (container.name.clone(), container.image.clone().unwrap_or_default())
        };
        let config = &self.cluster.settings.config_maps.deployment;
        let secrets = pod.image_pull_secrets.iter().flatten().map(|it| it.name.clone());
        Some(DigestRequest {
            account: PullAccount {
                namespace: name.namespace.to_string(),
                service_account: pod.service_account_name.clone().unwrap_or_default(),
                pull_secrets: secrets.collect(),
            },
            images: containers.map(image).collect(),
            skipped_registries: config.skipped_registries.clone(),
            timeout: config.digest_timeout,
        })
    }

    /// Stores the digests of a Revision, or the error.
    pub(super) fn handle_digests_resolved(
        &mut self,
        name: &NamespacedName,
        resolution: DigestResolution,
        now: UnixMillis,
    ) {
        let Some(owner) = self.cluster.app_of_revision(name) else { return };
        self.change_app(owner, now, |app, _| {
            let mut all = app.revisions.iter_mut();
            let Some(revision) = all.find(|it| *it.name == *name.name) else { return };
            match resolution {
                Ok(digests) => {
                    let digests = digests.into_iter().map(|(name, it)| (name.into(), it.into()));
                    revision.digests = digests.collect();
                    let failure = revision.failure.take();
                    // Only the failure to resolve has ended; another one stays.
                    revision.failure = failure.filter(|it| it.reason != CONTAINER_MISSING);
                }
                Err(error) => {
                    revision.failure =
                        Some(Box::new(ConditionReason::new(CONTAINER_MISSING, error)))
                }
            }
        });
    }
}
