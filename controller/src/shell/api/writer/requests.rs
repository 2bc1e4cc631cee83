//! Shell: requests of the writer to the API server.

use common::wire::NamespacedName;
use k8s_openapi::{
    api::autoscaling::v1::{Scale, ScaleSpec},
    apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry,
};
use kube::{
    api::{DeleteParams, DynamicObject, ObjectMeta, Patch, PatchParams, PostParams, Preconditions},
    core::Status,
};
use serde_json::{Value, json};
use tracing::{debug, info};

use super::{ObjectWriter, keys_after_creation};
use crate::{
    model::{
        knative::key::{SCALED_TO, USER_REPLICAS},
        object::{
            FIELD_MANAGER, ObjectPartKey, ResourceKind, SCALE_FIELD_MANAGER, WorkloadVersion,
            hash::stable_json_hash,
        },
    },
    shell::api::{
        DesiredStateSource,
        client::object_api,
        object_cache::{ObjectOrigin, ObservedObject},
        watch_scope,
        watches::error_chain,
        write_decision::{AppliedStatus, WriteAction},
        write_outcome::{ApiResponse, WriteOutcome, classify_response},
    },
    write::desired::SUPPORTED_FEATURES_FIELD,
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
            WriteAction::Replicas { body, pods_to_remove } => {
                self.apply_replicas(key, &body, &pods_to_remove).await
            }
            WriteAction::GiveBack { version, body } => {
                self.give_back(key, &version, body.as_ref()).await
            }
            WriteAction::Resize { uid, requests } => self.resize(key, &uid, requests).await,
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
                // With this version, a change that comes in between makes the apply fail.
                body["metadata"]["resourceVersion"] = json!(object.metadata.resource_version);
                self.apply(key, &body).await
            }
            Err(error) => self.handle_error(key, error).await,
        }
    }

    /// Applies a status. A field that this API server does not know is left out, and the rest is applied.
    async fn apply_status(&self, key: &ObjectPartKey, mut body: Value) -> WriteOutcome {
        let api = object_api(&self.client, key.resource, &key.name);
        // Of the whole status, also where a part is left out: it would else be sent without an end.
        let sent_hash = stable_json_hash(&body["status"]);
        let name = &key.name.name;
        let mut applied = api.patch_status(name, &apply_params(), &Patch::Apply(&body)).await;
        if let Err(error) = &applied
            && drop_refused_field(key.resource, &error_chain(error), &mut body)
        {
            debug!(object = %key, "the API server does not have a field of the status: left out");
            applied = api.patch_status(name, &apply_params(), &Patch::Apply(&body)).await;
        }
        match applied {
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
        // Before the number is lowered: Kubernetes reads the marks when it chooses the pods to remove.
        if let Err(outcome) = self.mark_pods(key, pods_to_remove).await {
            return outcome;
        }
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

    /// Marks the pods that should be removed first. An error is the outcome of the whole scale.
    ///
    /// The marks come before the scale: the ReplicaSet controller chooses pods as soon as the number changes. Without a
    /// mark it may choose a busy pod, so a failed mark postpones the scale.
    async fn mark_pods(
        &self,
        key: &ObjectPartKey,
        pods: &[NamespacedName],
    ) -> Result<(), WriteOutcome> {
        let cost = json!({"metadata": {"annotations": {DELETION_COST: self.deletion_cost()}}});
        let marks = pods.iter().map(|pod| self.annotate_pod(pod, &cost));
        for marked in futures::future::join_all(marks).await {
            match marked {
                Ok(_) => {}
                // A pod that is already gone need not be chosen.
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                Err(error) => return Err(self.handle_error(key, error).await),
            }
        }
        Ok(())
    }

    /// Writes the number of pods of a scaled Service's workload with its record. A change of the workload that the state
    /// machine has not observed makes a conflict, and the next decision contains it.
    async fn apply_replicas(
        &self,
        key: &ObjectPartKey,
        body: &Value,
        pods_to_remove: &[NamespacedName],
    ) -> WriteOutcome {
        // Before the number is lowered: Kubernetes reads the marks when it chooses the pods to remove.
        if let Err(outcome) = self.mark_pods(key, pods_to_remove).await {
            return outcome;
        }
        let api = object_api(&self.client, key.resource, &key.name);
        match api.patch(&key.name.name, &replicas_params(), &Patch::Apply(body)).await {
            Ok(object) => {
                info!(object = %key, replicas = %body["spec"]["replicas"], "scaled");
                self.store_response(key, object, ObjectOrigin::Observed);
                WriteOutcome::Done
            }
            Err(error) => self.handle_error(key, error).await,
        }
    }

    /// Removes the record of replicas from a workload, and every field from the writer's ownership. `body` is applied
    /// before, and sets the number of pods.
    ///
    /// An apply of nothing would remove the fields that the writer owns: then the API server sets one pod.
    async fn give_back(
        &self,
        key: &ObjectPartKey,
        version: &WorkloadVersion,
        body: Option<&Value>,
    ) -> WriteOutcome {
        let (api, name) = (object_api(&self.client, key.resource, &key.name), &key.name.name);
        let current = match body {
            Some(body) => api.patch(name, &replicas_params(), &Patch::Apply(body)).await,
            None => api.get(name).await,
        };
        let object = match current {
            Ok(object) => object,
            Err(error) => return self.handle_error(key, error).await,
        };
        // A read finds any version, and an apply only the expected one.
        let found = object.metadata.resource_version.as_deref().unwrap_or_default();
        if body.is_none() && found != &*version.resource_version {
            self.store_response(key, object, ObjectOrigin::Observed);
            return WriteOutcome::Conflict;
        }
        let params = PatchParams {
            field_manager: Some(SCALE_FIELD_MANAGER.into()),
            ..PatchParams::default()
        };
        let patch = release_patch(&object);
        match api.patch(name, &params, &Patch::Merge(&patch)).await {
            Ok(object) => {
                info!(object = %key, "given back");
                self.store_response(key, object, ObjectOrigin::Observed);
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
    /// within it. Of the pods that were marked in that second, Kubernetes then chooses by its other rules.
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
    pub(super) fn store_response(
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
    pub(super) async fn handle_error(
        &self,
        key: &ObjectPartKey,
        error: kube::Error,
    ) -> WriteOutcome {
        let message = error_chain(&error);
        let none = Status::default();
        let status = match &error {
            kube::Error::Api(status) => status,
            _ => &none,
        };
        let details = status.details.as_ref();
        // The first cause tells which field was refused, and so if a repetition can help.
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
/// equal. Pods that were marked and kept are then removed as likely as the ones chosen last.
fn deletion_cost_at(now_s: u64) -> String {
    format!("-{}", now_s.min(i32::MAX.unsigned_abs().into()))
}

/// Removes the field from a status that an API server with an earlier release of the Gateway API refuses, as its message
/// tells. Returns true if there was one.
fn drop_refused_field(resource: ResourceKind, message: &str, body: &mut Value) -> bool {
    let is_refused =
        resource == ResourceKind::GatewayClass && message.contains(SUPPORTED_FEATURES_FIELD);
    let status = body["status"].as_object_mut().filter(|_| is_refused);
    status.is_some_and(|it| it.remove(SUPPORTED_FEATURES_FIELD).is_some())
}

fn apply_params() -> PatchParams {
    // Force takes over fields of other managers, as Kubernetes advises controllers to do.
    PatchParams::apply(FIELD_MANAGER).force()
}

fn replicas_params() -> PatchParams {
    PatchParams::apply(SCALE_FIELD_MANAGER).force()
}

/// Returns the merge patch that removes the record of replicas from a workload of this version, with all that
/// [`SCALE_FIELD_MANAGER`] owns of it.
fn release_patch(object: &DynamicObject) -> Value {
    let mut metadata = json!({
        "resourceVersion": object.metadata.resource_version,
        "annotations": {SCALED_TO: null, USER_REPLICAS: null},
    });
    if let Some(owners) = &object.metadata.managed_fields {
        let is_other =
            |it: &&ManagedFieldsEntry| it.manager.as_deref() != Some(SCALE_FIELD_MANAGER);
        metadata["managedFields"] = json!(owners.iter().filter(is_other).collect::<Vec<_>>());
    }
    json!({"metadata": metadata})
}

#[cfg(test)]
mod tests {
    use std::{
        collections::VecDeque,
        sync::{Arc, Mutex},
    };

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

    /// Method, query and body of a request.
    type SentRequest = (Method, String, Value);

    /// Returns a writer whose API server answers with these codes and bodies in turn, and the requests that it gets.
    fn writer_with_responses(
        responses: impl Into<VecDeque<(u16, Value)>>,
    ) -> (ObjectWriter, Arc<Mutex<Vec<SentRequest>>>) {
        let sent: Arc<Mutex<Vec<SentRequest>>> = Arc::default();
        let responses: VecDeque<(u16, Value)> = responses.into();
        let (seen, responses) = (Arc::clone(&sent), Arc::new(Mutex::new(responses)));
        let service = tower::service_fn(move |request: Request<Body>| {
            let (seen, responses) = (Arc::clone(&seen), Arc::clone(&responses));
            async move {
                let method = request.method().clone();
                let query = request.uri().query().unwrap_or_default().to_owned();
                let body = request.into_body().collect_bytes().await.expect("a body");
                let body = serde_json::from_slice(&body).unwrap_or_default();
                seen.lock().expect("no panic").push((method, query, body));
                let next = responses.lock().expect("no panic").pop_front();
                let (code, body) = next.expect("no further request");
                let body = Body::from(body.to_string().into_bytes());
                Response::builder().status(code).body(body)
            }
        });
        let client = kube::Client::new(service, "default");
        (ObjectWriter::new(client, WriteLimits::default(), Arc::default()), sent)
    }

    fn workload_scale() -> ObjectPartKey {
        let name = NamespacedName::new("default", "db");
        ObjectPartKey::new(ResourceKind::StatefulSet, ObjectPart::Scale, name)
    }

    /// Returns a workload of this version, of which the writer and its user own fields.
    fn workload(version: &str) -> Value {
        let owners = json!([
            {"manager": SCALE_FIELD_MANAGER, "operation": "Apply"}, {"manager": "kubectl"},
        ]);
        let metadata = json!({
            "name": "db", "namespace": "default", "uid": "u", "resourceVersion": version,
            "managedFields": owners,
        });
        json!({"metadata": metadata, "spec": {"replicas": 3}})
    }

    fn failure(code: u16) -> (u16, Value) {
        (code, json!({"kind": "Status", "status": "Failure", "code": code}))
    }

    #[tokio::test(start_paused = true)]
    async fn the_replicas_of_a_workload_are_applied_by_a_manager_of_their_own() {
        let (writer, sent) = writer_with_responses([(200, workload("8"))]);
        let body = json!({"metadata": {"name": "db"}, "spec": {"replicas": 0}});
        let outcome = writer.apply_replicas(&workload_scale(), &body, &[]).await;
        assert_eq!(outcome, WriteOutcome::Done);
        let sent = sent.lock().expect("no panic");
        let [(method, query, applied)] = sent.as_slice() else { panic!("{sent:?}") };
        assert_eq!((method, applied), (&Method::PATCH, &body));
        assert!(
            query.contains("fieldManager=rouse-scale") && query.contains("force=true"),
            "{query}"
        );
    }

    /// The number of another client must stay, so the next decision waits for the version that has it.
    #[tokio::test(start_paused = true)]
    async fn replicas_that_follow_from_an_old_version_are_a_conflict() {
        let (writer, sent) = writer_with_responses([failure(409), (200, workload("9"))]);
        let key = workload_scale();
        let body = json!({"metadata": {"name": "db"}, "spec": {"replicas": 0}});
        writer.with_state(|state| state.cache.begin_request(&key));
        assert_eq!(writer.apply_replicas(&key, &body, &[]).await, WriteOutcome::Conflict);
        let methods: Vec<Method> =
            sent.lock().expect("no panic").iter().map(|it| it.0.clone()).collect();
        assert_eq!(methods, [Method::PATCH, Method::GET]);
        let observed = writer.observed(key.resource, &key.name).expect("it was read");
        assert_eq!((&*observed.resource_version, observed.replicas), ("9", Some(3)));
    }

    /// The class would else never be accepted where the API server has an earlier release of the Gateway API.
    #[tokio::test(start_paused = true)]
    async fn a_class_without_features_gets_a_status_without_them_once() {
        let message = "failed to create typed patch object: .status.supportedFeatures: field not declared in schema";
        let refusal =
            json!({"kind": "Status", "status": "Failure", "code": 500, "message": message});
        let metadata = json!({"name": "rouse", "uid": "u", "resourceVersion": "8"});
        let stored = json!({"metadata": metadata, "status": {"conditions": []}});
        let (writer, sent) = writer_with_responses([(500, refusal), (200, stored)]);
        let name = NamespacedName::new("", "rouse");
        let key = ObjectPartKey::new(ResourceKind::GatewayClass, ObjectPart::Status, name);
        let status = json!({"conditions": [], "supportedFeatures": [{"name": "Gateway"}]});
        let body = json!({"metadata": {"name": "rouse"}, "status": status});
        writer.with_state(|state| state.cache.begin_request(&key));
        assert_eq!(writer.apply_status(&key, body).await, WriteOutcome::Done);
        let sent = sent.lock().expect("no panic");
        let statuses: Vec<&Value> = sent.iter().map(|(_, _, body)| &body["status"]).collect();
        assert_eq!(statuses, [&status, &json!({"conditions": []})]);
        // The whole status counts as written, so that it is not sent again.
        let applied = writer.with_state(|state| state.applied_statuses.get(&key).copied());
        assert_eq!(applied.map(|it| it.sent_hash), Some(stable_json_hash(&status)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_workload_is_given_back_without_a_field_that_the_writer_owns() {
        let version = WorkloadVersion { uid: "u".into(), resource_version: "7".into() };
        let number = json!({"metadata": {"name": "db"}, "spec": {"replicas": 3}});
        // With a number, the response to it has the version that the second patch names.
        for (body, first, found) in [(Some(&number), Method::PATCH, "8"), (None, Method::GET, "7")]
        {
            let (writer, sent) =
                writer_with_responses([(200, workload(found)), (200, workload("10"))]);
            let outcome = writer.give_back(&workload_scale(), &version, body).await;
            assert_eq!(outcome, WriteOutcome::Done);
            let sent = sent.lock().expect("no panic");
            let [(method, _, _), (_, _, patch)] = sent.as_slice() else { panic!("{sent:?}") };
            assert_eq!(*method, first);
            let annotations = json!({SCALED_TO: null, USER_REPLICAS: null});
            let metadata = json!({
                "resourceVersion": found, "annotations": annotations,
                "managedFields": [{"manager": "kubectl"}],
            });
            assert_eq!(*patch, json!({"metadata": metadata}));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_workload_that_has_changed_meanwhile_is_not_given_back() {
        let version = WorkloadVersion { uid: "u".into(), resource_version: "7".into() };
        let (writer, sent) = writer_with_responses([(200, workload("8"))]);
        let outcome = writer.give_back(&workload_scale(), &version, None).await;
        assert_eq!((outcome, sent.lock().expect("no panic").len()), (WriteOutcome::Conflict, 1));
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
