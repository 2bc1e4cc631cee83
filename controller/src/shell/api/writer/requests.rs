//! Shell: requests of the writer to the API server.

use common::wire::NamespacedName;
use k8s_openapi::api::autoscaling::v1::{Scale, ScaleSpec};
use kube::{
    api::{DeleteParams, DynamicObject, ObjectMeta, Patch, PatchParams, PostParams, Preconditions},
    core::Status,
};
use serde_json::{Value, json};
use tracing::{debug, info};

use super::{ObjectWriter, keys_after_creation};
use crate::{
    model::object::{FIELD_MANAGER, ObjectPartKey, ResourceKind, hash::stable_json_hash},
    shell::api::{
        DesiredStateSource,
        client::object_api,
        object_cache::{ObjectOrigin, ObservedObject},
        watch_scope,
        watches::error_chain,
        write_decision::{AppliedStatus, WriteAction},
        write_outcome::{ApiResponse, WriteOutcome, classify_response},
    },
};

/// Annotation of a pod: Kubernetes removes the pods with the lowest number first.
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// Field manager that owns restored fields until the apply.
const RESTORE_FIELD_MANAGER: &str = "rouse-restorer";

impl ObjectWriter {
    /// Sends the requests of one action; the outcome is that of the last request.
    pub(super) async fn perform(
        &self,
        key: &ObjectPartKey,
        action: WriteAction,
        source: &dyn DesiredStateSource,
    ) -> WriteOutcome {
        match action {
            WriteAction::None => WriteOutcome::Done,
            WriteAction::NotOwned(error) => WriteOutcome::Refused(error),
            WriteAction::Create(body) => self.create(key, &body, source).await,
            WriteAction::Apply(body) => self.apply(key, &body).await,
            WriteAction::Restore(body) => self.restore(key, body).await,
            WriteAction::Status(body) => self.apply_status(key, body).await,
            WriteAction::Scale { replicas, pods_to_remove } => {
                self.scale(key, replicas, &pods_to_remove).await
            }
            WriteAction::Delete(uid) => self.delete(key, &uid).await,
        }
    }

    /// Creates an object after a read: an apply cannot require absence, and would take over another owner's object.
    async fn create(
        &self,
        key: &ObjectPartKey,
        body: &Value,
        source: &dyn DesiredStateSource,
    ) -> WriteOutcome {
        let api = object_api(&self.client, key.resource, &key.name);
        match api.get_opt(&key.name.name).await {
            Ok(None) => {
                let outcome = self.apply(key, body).await;
                if outcome == WriteOutcome::Done {
                    source.object_created(key, body);
                    self.add(keys_after_creation(key));
                }
                outcome
            }
            Ok(Some(object)) => {
                self.store_response(key, object, ObjectOrigin::Observed);
                // The object is in the cache now, so the next decision differs.
                WriteOutcome::Conflict
            }
            Err(error) => self.handle_error(key, error).await,
        }
    }

    async fn apply(&self, key: &ObjectPartKey, body: &Value) -> WriteOutcome {
        let api = object_api(&self.client, key.resource, &key.name);
        match api.patch(&key.name.name, &apply_params(), &Patch::Apply(body)).await {
            Ok(object) => {
                info!(object = %key, "applied");
                self.store_response(key, object, ObjectOrigin::OwnApply);
                WriteOutcome::Done
            }
            Err(error) => self.handle_error(key, error).await,
        }
    }

    /// Restores an object that another client changed. An apply keeps items that others added to a list, and these may
    /// conflict with ours: two ports cannot have one name. So a merge patch replaces the lists first, under a manager
    /// of its own, whose ownership is then removed.
    async fn restore(&self, key: &ObjectPartKey, mut body: Value) -> WriteOutcome {
        let (api, name) = (object_api(&self.client, key.resource, &key.name), &key.name.name);
        let params = PatchParams {
            field_manager: Some(RESTORE_FIELD_MANAGER.into()),
            ..PatchParams::default()
        };
        let restored = async {
            let mut meta = api.patch(name, &params, &Patch::Merge(&body)).await?.metadata;
            if let Some(owners) = &mut meta.managed_fields {
                owners.retain(|it| it.manager.as_deref() != Some(RESTORE_FIELD_MANAGER));
            }
            let (owners, version) = (meta.managed_fields, meta.resource_version);
            let meta = json!({"managedFields": owners, "resourceVersion": version});
            api.patch(name, &params, &Patch::Merge(json!({"metadata": meta}))).await
        };
        match restored.await {
            Ok(object) => {
                info!(object = %key, "another client changed the object: restored");
                body["metadata"]["resourceVersion"] = json!(object.metadata.resource_version);
                self.apply(key, &body).await
            }
            Err(error) => self.handle_error(key, error).await,
        }
    }

    async fn apply_status(&self, key: &ObjectPartKey, body: Value) -> WriteOutcome {
        let api = object_api(&self.client, key.resource, &key.name);
        let sent_hash = stable_json_hash(&body["status"]);
        match api.patch_status(&key.name.name, &apply_params(), &Patch::Apply(&body)).await {
            Ok(object) => {
                if let Some(observed) = self.store_response(key, object, ObjectOrigin::Observed) {
                    let applied = AppliedStatus { sent_hash, stored_hash: observed.status_hash };
                    self.with_state(|state| state.applied_statuses.insert(key.clone(), applied));
                }
                WriteOutcome::Done
            }
            Err(error) => self.handle_error(key, error).await,
        }
    }

    async fn scale(
        &self,
        key: &ObjectPartKey,
        replicas: i64,
        pods_to_remove: &[NamespacedName],
    ) -> WriteOutcome {
        let cost = json!({"metadata": {"annotations": {DELETION_COST: self.deletion_cost()}}});
        let marks = pods_to_remove.iter().map(|pod| self.annotate_pod(pod, &cost));
        for marked in futures::future::join_all(marks).await {
            match marked {
                Ok(_) => {}
                // A pod that is already gone need not be chosen.
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                Err(error) => return self.handle_error(key, error).await,
            }
        }
        // The marks come first: the ReplicaSet controller chooses pods as soon as the number changes. Without a mark it
        // may choose a busy pod, so a failed mark postpones the scale.
        match self.replace_scale(key, replicas).await {
            Ok(scale) => {
                info!(object = %key, replicas, "scaled");
                let version = scale.metadata.resource_version.unwrap_or_default();
                self.with_state(|state| {
                    state.cache.apply_scale(key.resource, &key.name, &version, replicas)
                });
                WriteOutcome::Done
            }
            Err(error) => self.handle_error(key, error).await,
        }
    }

    /// Writes the scale subresource, which costs the API server little more than half of a patch of the whole object.
    async fn replace_scale(
        &self,
        key: &ObjectPartKey,
        replicas: i64,
    ) -> Result<Scale, kube::Error> {
        let name = &key.name.name;
        let metadata = ObjectMeta {
            name: Some(name.to_string()),
            namespace: Some(key.name.namespace.to_string()),
            // No version: the number is set whatever else has changed.
            ..ObjectMeta::default()
        };
        let replicas = i32::try_from(replicas).unwrap_or(i32::MAX);
        let spec = Some(ScaleSpec { replicas: Some(replicas) });
        let params =
            PostParams { field_manager: Some(FIELD_MANAGER.into()), ..PostParams::default() };
        let scale = Scale { metadata, spec, status: None };
        object_api(&self.client, key.resource, &key.name).replace_scale(name, &params, &scale).await
    }

    /// Returns a deletion cost lower than all earlier ones, so that a pod that was chosen once and kept is not chosen
    /// again. It uses the monotonic clock, in case the time of day is set meanwhile.
    ///
    /// Scales within one second have the same cost. That matters only if a Deployment is scaled down, up and down again
    /// within it: of the pods that were marked in that second, Kubernetes then chooses by its other rules.
    fn deletion_cost(&self) -> String {
        deletion_cost_at(self.started_at_s.saturating_add(self.started_at.elapsed().as_secs()))
    }

    async fn annotate_pod(
        &self,
        name: &NamespacedName,
        patch: &Value,
    ) -> Result<DynamicObject, kube::Error> {
        let params =
            PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
        let api = object_api(&self.client, ResourceKind::Pod, name);
        api.patch(&name.name, &params, &Patch::Merge(patch)).await
    }

    async fn delete(&self, key: &ObjectPartKey, uid: &str) -> WriteOutcome {
        let api = object_api(&self.client, key.resource, &key.name);
        // The object with this UID only: the name may have another object by now.
        let preconditions = Preconditions { uid: Some(uid.into()), resource_version: None };
        let params = DeleteParams::background().preconditions(preconditions);
        match api.delete(&key.name.name, &params).await {
            Ok(_) => {
                info!(object = %key, "deleted");
                WriteOutcome::Done
            }
            Err(kube::Error::Api(status)) if status.code == 404 => WriteOutcome::Done,
            Err(error) => self.handle_error(key, error).await,
        }
    }

    /// Stores an object from a response, which is newer than the watch's, unless the object was deleted meanwhile.
    fn store_response(
        &self,
        key: &ObjectPartKey,
        object: DynamicObject,
        origin: ObjectOrigin,
    ) -> Option<ObservedObject> {
        let mut object = serde_json::to_value(object).ok()?;
        // Trimmed as the watch trims it, or the two would seem to differ.
        watch_scope::prune_fields(key.resource, &mut object);
        let observed = ObservedObject::from_object(&object);
        self.with_state(|state| state.cache.apply_response(key, observed.clone(), origin))
            .then_some(observed)
    }

    /// Returns the outcome of a failed request. After a conflict the object is read, so that the next attempt has its
    /// state.
    async fn handle_error(&self, key: &ObjectPartKey, error: kube::Error) -> WriteOutcome {
        let message = error_chain(&error);
        let none = Status::default();
        let status = match &error {
            kube::Error::Api(status) => status,
            _ => &none,
        };
        let details = status.details.as_ref();
        let cause = details.and_then(|it| it.causes.first()).map(|it| it.reason.as_str());
        let outcome = classify_response(ApiResponse {
            code: status.code,
            message: if status.message.is_empty() { &message } else { &status.message },
            cause: cause.unwrap_or_default(),
            retry_after: details.map_or(0, |it| it.retry_after_seconds),
        });
        debug!(object = %key, outcome = outcome.label(), error = message, "write failed");
        if matches!(outcome, WriteOutcome::Conflict | WriteOutcome::NotFound) {
            self.refresh(key).await;
        }
        outcome
    }

    async fn refresh(&self, key: &ObjectPartKey) {
        let api = object_api(&self.client, key.resource, &key.name);
        match api.get_opt(&key.name.name).await {
            Ok(Some(object)) => {
                self.store_response(key, object, ObjectOrigin::Observed);
            }
            Ok(None) => self.with_state(|state| state.cache.remove(key.resource, &key.name)),
            Err(error) => debug!(object = %key, error = %error_chain(&error), "not read again"),
        }
    }
}

/// Returns the deletion cost of this second since 1970. Kubernetes reads costs as `i32`, so from 2038-01-19 on all are
/// equal: pods that were marked and kept are then removed as likely as the ones chosen last.
fn deletion_cost_at(now_s: u64) -> String {
    format!("-{}", now_s.min(i32::MAX.unsigned_abs().into()))
}

fn apply_params() -> PatchParams {
    // Force takes over fields of other managers, as Kubernetes advises controllers to do.
    PatchParams::apply(FIELD_MANAGER).force()
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use hyper::{Method, Request, Response};
    use kube::client::Body;

    use super::*;
    use crate::{model::object::ObjectPart, shell::api::write_queue::WriteLimits};

    /// Scales a Deployment down while the API server responds to the pod's mark with `code`. Returns the outcome, and
    /// true if the scale was written.
    async fn scale_with_response_to_mark(code: u16) -> (WriteOutcome, bool) {
        let methods = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&methods);
        let service = tower::service_fn(move |request: Request<Body>| {
            seen.lock().expect("no panic").push(request.method().clone());
            let (code, body) = if request.method() == Method::PATCH {
                (code, json!({"kind": "Status", "status": "Failure", "code": code}))
            } else {
                (200, json!({"metadata": {"name": "a", "namespace": "default"}}))
            };
            async move {
                let body = Body::from(body.to_string().into_bytes());
                Response::builder().status(code).body(body)
            }
        });
        let client = kube::Client::new(service, "default");
        let writer = ObjectWriter::new(client, WriteLimits::default(), Arc::default());
        let name = |name: &str| NamespacedName::new("default", name);
        let key = ObjectPartKey::new(ResourceKind::Deployment, ObjectPart::Scale, name("a"));
        let outcome = writer.scale(&key, 1, &[name("a-1")]).await;
        let is_written = methods.lock().expect("no panic").contains(&Method::PUT);
        (outcome, is_written)
    }

    #[test]
    fn deletion_costs_fall_every_second_until_2038() {
        let cost = |now_s| deletion_cost_at(now_s).parse::<i32>().expect("a cost for Kubernetes");
        let (may_2033, january_2038) = (2_000_000_000, 2_147_483_647);
        assert!(cost(may_2033 + 1) < cost(may_2033));
        assert!(cost(january_2038) < cost(january_2038 - 1));
        assert_eq!(cost(january_2038 + 1), cost(january_2038));
    }

    /// Without the mark, Kubernetes may remove a busy pod.
    #[tokio::test(start_paused = true)]
    async fn a_scale_waits_for_the_mark_of_each_pod_that_exists() {
        assert_eq!(scale_with_response_to_mark(404).await, (WriteOutcome::Done, true));
        for code in [400, 403, 409, 422, 429, 500] {
            let (outcome, is_written) = scale_with_response_to_mark(code).await;
            assert!(!is_written && outcome != WriteOutcome::Done, "{code}: {outcome:?}");
        }
    }
}
