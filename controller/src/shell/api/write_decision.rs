//! Pure: desired and observed state of an object → next write.

use common::wire::NamespacedName;
use serde_json::{Value, json};

use super::object_cache::{ObservedObject, spec_hash};
use crate::model::{
    knative::key::{SCALED_TO, USER_REPLICAS},
    object::{
        DesiredState, ObjectPart, ObjectPartKey, PodRequests, ReplicaRecord, ResourceKind,
        WorkloadVersion, WriteError,
        hash::{APPLIED_ANNOTATION, applied_hash, stable_json_hash},
    },
};

/// Next write of one part of an object.
#[derive(Clone, Debug, PartialEq)]
pub enum WriteAction {
    /// Nothing to write: the observed state matches.
    None,
    /// Apply this body to an object that seems absent: first read it, to be sure.
    Create(Value),
    /// Apply this body to an existing object.
    Apply(Value),
    /// Undo a change that another client made to the object. An apply alone keeps entries that the client added to
    /// lists, so the lists are replaced first; then this body is applied.
    Restore(Value),
    /// Apply this body to the status subresource.
    Status(Value),
    /// Scale to this number of pods, after marking the pods to remove first.
    Scale {
        /// Number of pods, for `spec.replicas`.
        replicas: i64,
        /// Pods that get a deletion cost before the scale.
        pods_to_remove: Vec<NamespacedName>,
    },
    /// Apply this body, the number of pods of a scaled Service's workload with its record, after marking the pods to
    /// remove first. The body has the version of the workload, and another version refuses it.
    Replicas {
        /// Body of the apply.
        body: Value,
        /// Pods that get a deletion cost before the apply.
        pods_to_remove: Vec<NamespacedName>,
    },
    /// Give the workload of a scaled Service back, if it still has this version.
    GiveBack {
        /// Version of the workload that the state machine has observed.
        version: WorkloadVersion,
        /// Body to apply first, which sets the number of pods; `None`: the present number stays.
        body: Option<Value>,
    },
    /// Give the pod these requests, if it still has this UID. What differs is known only after a read: the cache has no
    /// containers.
    Resize {
        /// UID of the pod.
        uid: Box<str>,
        /// Requests that the pod should have.
        requests: PodRequests,
    },
    /// Delete the object, if it still has this UID.
    Delete(Box<str>),
    /// Write nothing: an object of another owner has the name.
    NotOwned(WriteError),
}

impl WriteAction {
    /// Returns the body to write to the object itself, if the action has one whose repetitions count.
    pub fn body(&self) -> Option<&Value> {
        match self {
            Self::Create(body)
            | Self::Apply(body)
            | Self::Restore(body)
            | Self::Replicas { body, .. } => Some(body),
            Self::None
            | Self::Status(_)
            | Self::Scale { .. }
            | Self::GiveBack { .. }
            | Self::Resize { .. }
            | Self::Delete(_)
            | Self::NotOwned(_) => None,
        }
    }

    /// Returns the [body](Self::body) with a hash of its content, which is equal for each repetition.
    pub fn content(&self) -> Option<(&Value, u64)> {
        let body = self.body()?;
        let hash = match self {
            // Each write names another version, and the record has all numbers.
            Self::Replicas { .. } => stable_json_hash(&body["metadata"]["annotations"]),
            _ => applied_hash(body).unwrap_or_default(),
        };
        Some((body, hash))
    }
}

/// Status that the writer applied last to an object, and the one that the API server stored for it.
///
/// They differ if the API server drops or adds a field, which must not cause a write each time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AppliedStatus {
    /// Hash of the status that was sent.
    pub sent_hash: u64,
    /// Hash of the status in the response.
    pub stored_hash: u64,
}

/// Returns the write that brings the part named by `key`, last observed as `observed`, to its desired state.
/// `applied_status` is used for the part status only.
pub fn next_write(
    key: &ObjectPartKey,
    desired: DesiredState,
    observed: Option<&ObservedObject>,
    applied_status: Option<AppliedStatus>,
) -> WriteAction {
    match (desired, key.part) {
        (DesiredState::Unmanaged, _) => WriteAction::None,
        (DesiredState::Absent, ObjectPart::Object) => delete_action(key, observed),
        (DesiredState::Scale { min_replicas, max_replicas, pods_to_remove }, ObjectPart::Scale) => {
            scale_action(min_replicas, max_replicas, pods_to_remove, observed)
        }
        (
            DesiredState::Replicas { version, replicas, recorded, pods_to_remove },
            ObjectPart::Scale,
        ) => {
            let record = ReplicaRecord { scaled_to: replicas, user_replicas: recorded };
            replicas_action(key, &version, record, pods_to_remove, observed)
        }
        (DesiredState::GivenBack { version, replicas }, ObjectPart::Scale) => {
            give_back_action(key, version, replicas, observed)
        }
        (DesiredState::Requests { uid, requests }, ObjectPart::Resize) => {
            WriteAction::Resize { uid, requests }
        }
        // Only the object itself can be deleted, and all else fits only its own part.
        (
            DesiredState::Absent
            | DesiredState::Scale { .. }
            | DesiredState::Replicas { .. }
            | DesiredState::GivenBack { .. }
            | DesiredState::Requests { .. },
            _,
        )
        | (DesiredState::Body(_), ObjectPart::Scale | ObjectPart::Resize) => WriteAction::None,
        (DesiredState::Body(body), ObjectPart::Object) => object_action(key, body, observed),
        (DesiredState::Body(mut status), ObjectPart::Status) => {
            // The API server deletes the status with the object; a write would only race with the deletion.
            let stays = |it: &&ObservedObject| key.resource.has_status() && !it.is_terminating;
            let Some(observed) = observed.filter(stays) else {
                return WriteAction::None;
            };
            // The renderer of the status may not know the generation of the object that was applied.
            let lacks_generation =
                key.resource.has_status_generation() && status.get("observedGeneration").is_none();
            if lacks_generation && observed.generation > 0 {
                status["observedGeneration"] = json!(observed.generation);
            }
            let desired_hash = stable_json_hash(&status);
            let current =
                AppliedStatus { sent_hash: desired_hash, stored_hash: observed.status_hash };
            // The second comparison: the API server has already stored a different status for this one.
            if observed.status_hash == desired_hash || applied_status == Some(current) {
                return WriteAction::None;
            }
            let mut body = object_identity(key, observed);
            if matches!(key.resource, ResourceKind::HttpRoute | ResourceKind::GrpcRoute) {
                // Its parents are one value, with entries of other controllers. None of theirs that the body does not
                // have may be lost.
                body["metadata"]["resourceVersion"] = json!(observed.resource_version);
            }
            body["status"] = status;
            WriteAction::Status(body)
        }
    }
}

/// Deletes the object only if the controller applied it for an owner. A copy made by a user bears the annotation too,
/// but has no owner. A ClusterDomainClaim has no owner either, since a cluster-wide object cannot be owned from a
/// namespace.
fn delete_action(key: &ObjectPartKey, observed: Option<&ObservedObject>) -> WriteAction {
    let owned = |it: &ObservedObject| it.controller_uid.is_some() || !key.resource.is_namespaced();
    let is_own =
        |it: &&ObservedObject| it.applied_hash.is_some() && owned(it) && !it.is_terminating;
    observed.filter(is_own).map_or(WriteAction::None, |it| WriteAction::Delete(it.uid.clone()))
}

fn object_identity(key: &ObjectPartKey, observed: &ObservedObject) -> Value {
    let mut meta = json!({"name": key.name.name.as_str(), "uid": observed.uid});
    if key.resource.is_namespaced() {
        meta["namespace"] = json!(key.name.namespace.as_str());
    }
    json!({"apiVersion": key.resource.api_version(), "kind": key.resource.kind(), "metadata": meta})
}

/// Returns the action that gives an object its desired body, by what was last observed of it.
fn object_action(
    key: &ObjectPartKey,
    mut body: Value,
    observed: Option<&ObservedObject>,
) -> WriteAction {
    // A version that the body requires is not part of its content. An empty one requires that there is no object.
    let version = body["metadata"].as_object_mut().and_then(|it| it.remove("resourceVersion"));
    let desired_hash = body_hash(key.resource, &body);
    body["metadata"]["annotations"][APPLIED_ANNOTATION] = json!(format!("{desired_hash:016x}"));
    let Some(observed) = observed else {
        // The controller never creates pods; it only annotates them.
        return if key.resource == ResourceKind::Pod {
            WriteAction::None
        } else {
            WriteAction::Create(body)
        };
    };
    if let Some(error) = ownership_error(key, &body, observed) {
        return WriteAction::NotOwned(error);
    }
    // The state machine has not observed the object yet. Once it has, the body is another one.
    if version.as_ref().is_some_and(|it| *it == "") {
        return WriteAction::None;
    }
    // The hash covers the last applied body only, so `changed_by_others` is needed to notice changes by others.
    // Changes of a ConfigMap are seen by its data: it has neither an owner nor a generation.
    let is_changed = observed.changed_by_others
        || (key.resource == ResourceKind::ConfigMap && observed.spec_hash != spec_hash(&body));
    let stands = observed.applied_hash == Some(desired_hash) && !is_changed;
    // A deletion cannot be stopped; once it is done, the watch reports it and the object is created again.
    if stands || observed.is_terminating {
        return WriteAction::None;
    }
    if key.resource == ResourceKind::Deployment {
        // Replicas follow the load. An apply must name them, or it would give up the ownership of the field. With the
        // version at which they were read, it cannot reset a scale that came in between.
        body["spec"]["replicas"] = json!(observed.replicas);
        body["metadata"]["resourceVersion"] = json!(observed.resource_version);
    }
    if let Some(version) = version {
        body["metadata"]["resourceVersion"] = version;
    }
    // With the UID, the apply fails if the object was replaced by another one of the same name.
    body["metadata"]["uid"] = json!(observed.uid);
    if observed.changed_by_others { WriteAction::Restore(body) } else { WriteAction::Apply(body) }
}

/// Returns the hash of a body, as the annotation on the object holds it; a Deployment's replicas do not count.
pub fn body_hash(resource: ResourceKind, body: &Value) -> u64 {
    if resource != ResourceKind::Deployment {
        return stable_json_hash(body);
    }
    let mut body = body.clone();
    if let Some(spec) = body.pointer_mut("/spec").and_then(Value::as_object_mut) {
        spec.remove("replicas");
    }
    stable_json_hash(&body)
}

/// Returns a write error if the object has another owner than the desired one. A body without an owner never conflicts:
/// it holds only the few fields that the controller sets on a user's object.
fn ownership_error(
    key: &ObjectPartKey,
    body: &Value,
    observed: &ObservedObject,
) -> Option<WriteError> {
    let owners = body["metadata"]["ownerReferences"].as_array()?;
    let owner = owners.iter().find(|it| it["controller"] == true)?["uid"].as_str()?;
    (observed.controller_uid.as_deref() != Some(owner)).then(|| not_owned_error(key))
}

/// Returns Knative's write error for an object that has the name and another owner.
pub fn not_owned_error(key: &ObjectPartKey) -> WriteError {
    let (kind, name) = (key.resource.kind(), &key.name.name);
    let message = format!("There is an existing {kind} {name:?} that we do not own.");
    WriteError { reason: "NotOwned", message }
}

fn scale_action(
    min_replicas: i64,
    max_replicas: i64,
    pods_to_remove: Vec<NamespacedName>,
    observed: Option<&ObservedObject>,
) -> WriteAction {
    let Some(observed) = observed.filter(|it| !it.is_terminating) else { return WriteAction::None };
    // A number between both bounds stays: the pods beyond the requested scale are draining.
    let replicas =
        observed.replicas.map_or(min_replicas, |it| it.min(max_replicas).max(min_replicas));
    match observed.replicas == Some(replicas) {
        true => WriteAction::None,
        false => WriteAction::Scale { replicas, pods_to_remove },
    }
}

/// Writes the number of pods and its record, unless the workload is known to have both, or to be in deletion. The state
/// machine may know a new workload before the cache does; the version in the body keeps the write from any other one.
fn replicas_action(
    key: &ObjectPartKey,
    version: &WorkloadVersion,
    record: ReplicaRecord,
    pods_to_remove: Vec<NamespacedName>,
    observed: Option<&ObservedObject>,
) -> WriteAction {
    let ReplicaRecord { scaled_to, user_replicas } = record;
    let is_done = |it: &ObservedObject| {
        let recorded = (it.scaled_to, it.user_replicas);
        recorded == (Some(scaled_to), Some(user_replicas))
            && it.replicas == Some(i64::from(scaled_to))
    };
    // A workload that was deleted and made again has another UID, and none of the earlier writes.
    let known = observed.filter(|it| it.uid == version.uid);
    if known.is_some_and(|it| it.is_terminating || is_done(it)) {
        return WriteAction::None;
    }
    WriteAction::Replicas { body: replicas_body(key, version, record), pods_to_remove }
}

/// Gives a workload back, unless it is known to be in deletion, or to have its number and no record.
fn give_back_action(
    key: &ObjectPartKey,
    version: WorkloadVersion,
    replicas: Option<u32>,
    observed: Option<&ObservedObject>,
) -> WriteAction {
    // The cache may still have a workload of the same name that was replaced.
    let known = observed.filter(|it| it.uid == version.uid);
    let has = |it: &ObservedObject, number: u32| it.replicas == Some(i64::from(number));
    let missing = replicas.filter(|number| known.is_none_or(|it| !has(it, *number)));
    let is_done = |it: &ObservedObject| {
        missing.is_none() && it.scaled_to.is_none() && it.user_replicas.is_none()
    };
    if known.is_some_and(|it| it.is_terminating || is_done(it)) {
        return WriteAction::None;
    }
    let body = missing.map(|replicas| {
        let record = ReplicaRecord { scaled_to: replicas, user_replicas: replicas };
        replicas_body(key, &version, record)
    });
    WriteAction::GiveBack { version, body }
}

/// Returns the body that sets the number of pods of a workload, with its record and the expected version.
fn replicas_body(key: &ObjectPartKey, version: &WorkloadVersion, record: ReplicaRecord) -> Value {
    let ReplicaRecord { scaled_to, user_replicas } = record;
    json!({
        "apiVersion": key.resource.api_version(),
        "kind": key.resource.kind(),
        "metadata": {
            "name": key.name.name.as_str(),
            "namespace": key.name.namespace.as_str(),
            "uid": version.uid,
            "resourceVersion": version.resource_version,
            "annotations": {
                SCALED_TO: scaled_to.to_string(),
                USER_REPLICAS: user_replicas.to_string(),
            },
        },
        "spec": {"replicas": scaled_to},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(resource: ResourceKind, part: ObjectPart) -> ObjectPartKey {
        ObjectPartKey::new(resource, part, NamespacedName::new("default", "hello"))
    }

    fn body() -> Value {
        json!({
            "metadata": {"name": "hello", "ownerReferences": [{"uid": "boss", "controller": true}]},
            "spec": {"replicas": 1, "a": "b"},
        })
    }

    fn ours(applied: Option<u64>) -> ObservedObject {
        ObservedObject {
            uid: "u".into(),
            resource_version: "7".into(),
            controller_uid: Some("boss".into()),
            replicas: Some(5),
            applied_hash: applied,
            ..ObservedObject::default()
        }
    }

    fn deployment(observed: Option<&ObservedObject>) -> WriteAction {
        next_write(
            &key(ResourceKind::Deployment, ObjectPart::Object),
            DesiredState::Body(body()),
            observed,
            None,
        )
    }

    #[test]
    fn creates_what_is_missing_with_the_hash_of_its_body() {
        let WriteAction::Create(created) = deployment(None) else { panic!("not created") };
        let hash = format!("{:016x}", body_hash(ResourceKind::Deployment, &body()));
        assert_eq!(created["metadata"]["annotations"][APPLIED_ANNOTATION], json!(hash));
        assert_eq!(created["spec"]["replicas"], 1);
    }

    #[test]
    fn applies_only_what_differs_and_never_the_replicas() {
        let current = body_hash(ResourceKind::Deployment, &body());
        assert_eq!(deployment(Some(&ours(Some(current)))), WriteAction::None);
        let WriteAction::Apply(body) = deployment(Some(&ours(Some(1)))) else {
            panic!("not applied")
        };
        assert_eq!(body["spec"], json!({"replicas": 5, "a": "b"}));
        assert_eq!(body["metadata"]["resourceVersion"], "7");
        assert_eq!(body["metadata"]["uid"], "u");
        let changed = ObservedObject { changed_by_others: true, ..ours(Some(current)) };
        assert!(matches!(deployment(Some(&changed)), WriteAction::Restore(_)), "changed by others");
    }

    /// The record of gateway ports: what it has follows from the version that it requires.
    #[test]
    fn a_version_that_a_body_requires_is_sent_and_does_not_count_as_a_difference() {
        let key = key(ResourceKind::ConfigMap, ObjectPart::Object);
        let body = |version: &str, entry: &str| {
            let metadata = json!({"name": "hello", "resourceVersion": version});
            DesiredState::Body(json!({"metadata": metadata, "data": {"5432": entry}}))
        };
        let WriteAction::Create(mut stored) = next_write(&key, body("3", "a"), None, None) else {
            panic!("not created")
        };
        assert_eq!(stored["metadata"]["resourceVersion"], Value::Null);
        stored["metadata"]["resourceVersion"] = json!("9");
        let observed = ObservedObject::from_object(&stored);
        let next = |desired| next_write(&key, desired, Some(&observed), None);
        assert_eq!(next(body("3", "a")), WriteAction::None);
        // The cache has a newer version than the one from which the body follows.
        let WriteAction::Apply(applied) = next(body("3", "b")) else { panic!("not applied") };
        assert_eq!(applied["metadata"]["resourceVersion"], "3");
        assert_eq!(next(body("", "b")), WriteAction::None, "it is about to be observed");
        let created = next_write(&key, body("", "b"), None, None);
        assert!(matches!(created, WriteAction::Create(_)), "{created:?}");
    }

    #[test]
    fn replicas_do_not_count_as_a_difference() {
        let mut other = body();
        other["spec"]["replicas"] = json!(9);
        let of = |resource| (body_hash(resource, &body()), body_hash(resource, &other));
        let (one, two) = of(ResourceKind::Deployment);
        assert_eq!(one, two);
        let (one, two) = of(ResourceKind::Service);
        assert_ne!(one, two);
    }

    #[test]
    fn an_object_of_another_owner_is_reported_and_left_alone() {
        let key = key(ResourceKind::Service, ObjectPart::Object);
        let message = "There is an existing Service \"hello\" that we do not own.".to_owned();
        let error = WriteError { reason: "NotOwned", message };
        for controller in [None, Some("another".into())] {
            let observed = ObservedObject { controller_uid: controller, ..ours(Some(1)) };
            let action = next_write(&key, DesiredState::Body(body()), Some(&observed), None);
            assert_eq!(action, WriteAction::NotOwned(error.clone()));
        }
    }

    #[test]
    fn deletes_only_what_was_applied_and_only_that_object() {
        let key = key(ResourceKind::Service, ObjectPart::Object);
        let action = |observed: &ObservedObject| {
            next_write(&key, DesiredState::Absent, Some(observed), None)
        };
        assert_eq!(action(&ours(Some(1))), WriteAction::Delete("u".into()));
        assert_eq!(action(&ours(None)), WriteAction::None);
        assert_eq!(
            action(&ObservedObject { controller_uid: None, ..ours(Some(1)) }),
            WriteAction::None,
            "a copy"
        );
        assert_eq!(
            action(&ObservedObject { is_terminating: true, ..ours(Some(1)) }),
            WriteAction::None
        );
        assert_eq!(next_write(&key, DesiredState::Absent, None, None), WriteAction::None);
    }

    #[test]
    fn creation_waits_until_a_terminating_object_is_gone() {
        assert_eq!(
            deployment(Some(&ObservedObject { is_terminating: true, ..ours(Some(1)) })),
            WriteAction::None
        );
    }

    /// The kinds of the Gateway API have no such field, and share the status of a route with other controllers.
    #[test]
    fn a_status_of_the_gateway_api_has_no_generation_and_that_of_a_route_a_version() {
        let written = |resource| {
            let key = key(resource, ObjectPart::Status);
            let observed = ObservedObject { generation: 3, status_hash: 9, ..ours(None) };
            match next_write(&key, DesiredState::Body(json!({})), Some(&observed), None) {
                WriteAction::Status(body) => body,
                other => panic!("{other:?}"),
            }
        };
        for kind in [ResourceKind::HttpRoute, ResourceKind::GrpcRoute] {
            let route = written(kind);
            assert_eq!(
                (&route["status"], &route["metadata"]["resourceVersion"]),
                (&json!({}), &json!("7"))
            );
        }
        let gateway = written(ResourceKind::Gateway);
        assert_eq!(gateway["metadata"]["resourceVersion"], Value::Null);
        assert_eq!(written(ResourceKind::Route)["status"], json!({"observedGeneration": 3}));
    }

    #[test]
    fn a_status_is_written_when_it_differs_and_not_again_when_the_server_made_it_another() {
        let key = key(ResourceKind::Revision, ObjectPart::Status);
        let status = json!({"ready": true});
        let write = |observed: &ObservedObject, applied_status| {
            next_write(&key, DesiredState::Body(status.clone()), Some(observed), applied_status)
        };
        let applied =
            |stored_hash| Some(AppliedStatus { sent_hash: stable_json_hash(&status), stored_hash });
        let unchanged = ObservedObject { status_hash: stable_json_hash(&status), ..ours(None) };
        assert_eq!(write(&unchanged, None), WriteAction::None);
        let other = ObservedObject { status_hash: 3, ..ours(None) };
        let WriteAction::Status(body) = write(&other, None) else { panic!("not written") };
        let meta = json!({"name": "hello", "namespace": "default", "uid": "u"});
        assert_eq!((&body["metadata"], &body["status"]), (&meta, &status));
        assert_eq!(write(&other, applied(3)), WriteAction::None);
        assert!(matches!(write(&other, applied(4)), WriteAction::Status(_)), "changed by others");
    }

    #[test]
    fn nothing_is_written_to_a_terminating_object() {
        let going = ObservedObject { is_terminating: true, ..ours(Some(1)) };
        let decide = |part, desired| {
            next_write(&key(ResourceKind::Deployment, part), desired, Some(&going), None)
        };
        let scale =
            DesiredState::Scale { min_replicas: 1, max_replicas: 1, pods_to_remove: Vec::new() };
        for (part, desired) in [
            (ObjectPart::Object, DesiredState::Body(body())),
            (ObjectPart::Object, DesiredState::Absent),
            (ObjectPart::Status, DesiredState::Body(json!({"ready": true}))),
            (ObjectPart::Scale, scale),
        ] {
            assert_eq!(decide(part, desired.clone()), WriteAction::None, "{desired:?}");
        }
        let revision = key(ResourceKind::Revision, ObjectPart::Status);
        let status = DesiredState::Body(json!({"ready": true}));
        assert_eq!(next_write(&revision, status, Some(&going), None), WriteAction::None);
    }

    #[test]
    fn scales_only_to_another_number() {
        let key = key(ResourceKind::Deployment, ObjectPart::Scale);
        let pods_to_remove = vec![NamespacedName::new("default", "pod")];
        let scale = |min_replicas: i64, max_replicas: i64| {
            let desired = DesiredState::Scale {
                min_replicas,
                max_replicas,
                pods_to_remove: pods_to_remove.clone(),
            };
            next_write(&key, desired, Some(&ours(None)), None)
        };
        let scale_to =
            |replicas| WriteAction::Scale { replicas, pods_to_remove: pods_to_remove.clone() };
        assert_eq!(scale(5, 5), WriteAction::None);
        assert_eq!(scale(0, 0), scale_to(0));
        assert_eq!(
            [scale(4, 7), scale(0, 3), scale(6, 7)],
            [WriteAction::None, scale_to(3), scale_to(6)]
        );
    }

    /// A read finds what differs, so the cache does not matter: it may not have the pod yet.
    #[test]
    fn requests_of_a_pod_are_written_by_its_resize_alone() {
        let requests = PodRequests::Reduced { memory_mib: Some(7) };
        let write = |part, observed: Option<&ObservedObject>| {
            let desired = DesiredState::Requests { uid: "u".into(), requests };
            next_write(&key(ResourceKind::Pod, part), desired, observed, None)
        };
        let resize = WriteAction::Resize { uid: "u".into(), requests };
        assert_eq!(write(ObjectPart::Resize, None), resize);
        assert_eq!(write(ObjectPart::Resize, Some(&ours(Some(1)))), resize);
        assert_eq!(resize.content(), None, "a service that wakes often is not delayed");
        for part in [ObjectPart::Object, ObjectPart::Status, ObjectPart::Scale] {
            assert_eq!(write(part, Some(&ours(Some(1)))), WriteAction::None);
        }
        let key = key(ResourceKind::Pod, ObjectPart::Resize);
        let annotated = DesiredState::Body(body());
        assert_eq!(next_write(&key, annotated, Some(&ours(None)), None), WriteAction::None);
    }

    /// Returns a workload of a user as the API server holds it: its number of pods, and the record of it.
    fn workload(replicas: i64, record: Option<(u32, u32)>) -> ObservedObject {
        ObservedObject {
            uid: "u".into(),
            resource_version: "9".into(),
            replicas: Some(replicas),
            scaled_to: record.map(|it| it.0),
            user_replicas: record.map(|it| it.1),
            ..ObservedObject::default()
        }
    }

    /// Returns the version that the state machine has observed, which may be behind the cache.
    fn version() -> WorkloadVersion {
        WorkloadVersion { uid: "u".into(), resource_version: "7".into() }
    }

    #[test]
    fn replicas_are_written_with_their_record_and_the_version_they_follow_from() {
        let pods_to_remove = vec![NamespacedName::new("default", "pod")];
        let write = |observed: Option<&ObservedObject>| {
            let desired = DesiredState::Replicas {
                version: version(),
                replicas: 0,
                recorded: 3,
                pods_to_remove: pods_to_remove.clone(),
            };
            let key = key(ResourceKind::StatefulSet, ObjectPart::Scale);
            next_write(&key, desired, observed, None)
        };
        let done = workload(0, Some((0, 3)));
        assert_eq!(write(Some(&done)), WriteAction::None);
        let body = json!({
            "apiVersion": "apps/v1", "kind": "StatefulSet",
            "metadata": {
                "name": "hello", "namespace": "default", "uid": "u", "resourceVersion": "7",
                "annotations": {"rouse.dev/scaled-to": "0", "rouse.dev/replicas": "3"},
            },
            "spec": {"replicas": 0},
        });
        let expected = WriteAction::Replicas { body, pods_to_remove: pods_to_remove.clone() };
        // Another number, a number of another client, and a user's number that was not recorded.
        for observed in [workload(3, Some((0, 3))), workload(0, None), workload(0, Some((0, 2)))] {
            assert_eq!(write(Some(&observed)), expected, "{observed:?}");
        }
        // The state machine knows a new workload first.
        let replaced = ObservedObject { uid: "v".into(), ..done };
        assert_eq!([write(Some(&replaced)), write(None)], [expected.clone(), expected]);
        let going = ObservedObject { is_terminating: true, ..workload(3, None) };
        assert_eq!(write(Some(&going)), WriteAction::None);
    }

    /// The number comes first: without the record it would count as the user's.
    #[test]
    fn a_workload_is_given_back_with_its_number_and_without_its_record() {
        let write = |replicas: Option<u32>, observed: Option<ObservedObject>| {
            let desired = DesiredState::GivenBack { version: version(), replicas };
            let key = key(ResourceKind::Deployment, ObjectPart::Scale);
            match next_write(&key, desired, observed.as_ref(), None) {
                WriteAction::GiveBack { version: sent, body } => {
                    assert_eq!(sent, version());
                    Some(body.map(|it| (it["spec"].clone(), it["metadata"]["annotations"].clone())))
                }
                other => {
                    assert_eq!(other, WriteAction::None);
                    None
                }
            }
        };
        let first = (
            json!({"replicas": 3}),
            json!({"rouse.dev/scaled-to": "3", "rouse.dev/replicas": "3"}),
        );
        assert_eq!(write(Some(3), Some(workload(0, Some((0, 3))))), Some(Some(first.clone())));
        assert_eq!(write(Some(3), Some(workload(3, Some((3, 3))))), Some(None));
        assert_eq!(write(None, Some(workload(5, Some((0, 3))))), Some(None));
        assert_eq!(write(None, Some(workload(5, None))), None);
        assert_eq!(write(Some(3), Some(workload(3, None))), None, "it was given back");
        assert_eq!(write(Some(3), None), Some(Some(first)), "the cache does not know it yet");
        let going = ObservedObject { is_terminating: true, ..workload(0, Some((0, 3))) };
        assert_eq!(write(Some(3), Some(going)), None);
    }

    /// A write that another client undoes is delayed, and a service that wakes and sleeps by itself is not.
    #[test]
    fn equal_numbers_are_repetitions_whatever_their_version() {
        let content = |resource_version: &str, replicas: u32| {
            let version =
                WorkloadVersion { resource_version: resource_version.into(), ..version() };
            let desired = DesiredState::Replicas {
                version,
                replicas,
                recorded: 3,
                pods_to_remove: Vec::new(),
            };
            let key = key(ResourceKind::Deployment, ObjectPart::Scale);
            let action = next_write(&key, desired, Some(&workload(2, None)), None);
            action.content().map(|(_, hash)| hash)
        };
        assert!(content("7", 0).is_some());
        assert_eq!(content("7", 0), content("8", 0));
        assert_ne!(content("7", 0), content("7", 3));
    }
}
