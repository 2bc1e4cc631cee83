//! Pure: desired and observed state of an object → next write.

use common::wire::Name;
use serde_json::{Value, json};

use super::{
    Key, Part, Trouble, Want,
    cache::{APPLIED, Seen, hash},
};
use crate::children::Resource;

/// Next write of one part of an object.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Nothing to write: the observed state matches.
    None,
    /// Apply this body to an object that seems absent: first read it, to be sure.
    Create(Value),
    /// Apply this body to an existing object.
    Apply(Value),
    /// Undo a change that another client made to the object: restore its lists, then apply this body.
    Restore(Value),
    /// Apply this body to the status subresource.
    Status(Value),
    /// Scale to this number of pods, after marking the pods to remove first.
    Scale {
        /// Number of pods, for `spec.replicas`.
        replicas: i64,
        /// Pods that get a deletion cost before the scale.
        leaving: Vec<Name>,
    },
    /// Delete the object, if it still has this UID.
    Delete(Box<str>),
    /// Write nothing: an object of another owner has the name.
    NotOwned(Trouble),
}

impl Action {
    /// Returns the body to write to the object itself, if the action has one.
    pub fn body(&self) -> Option<&Value> {
        match self {
            Self::Create(body) | Self::Apply(body) | Self::Restore(body) => Some(body),
            Self::None
            | Self::Status(_)
            | Self::Scale { .. }
            | Self::Delete(_)
            | Self::NotOwned(_) => None,
        }
    }
}

/// Returns the write that brings the part named by `key`, last observed as `seen`, to its desired state.
///
/// `wrote` is the hash of the status that was applied last, with the hash of the status that the API server stored.
/// A field that the API server drops or adds must not cause a write each time.
pub fn decide(key: &Key, want: Want, seen: Option<&Seen>, wrote: Option<(u64, u64)>) -> Action {
    match (want, key.part) {
        (Want::Any, _) => Action::None,
        (Want::Gone, Part::Object) => gone(key, seen),
        (Want::Scale { replicas, most, leaving }, Part::Scale) => {
            scale(replicas, most, leaving, seen)
        }
        // Only the object itself can be deleted, and a body and a scale fit only their own parts.
        (Want::Gone | Want::Scale { .. }, _) | (Want::Body(_), Part::Scale) => Action::None,
        (Want::Body(body), Part::Object) => object(key, body, seen),
        (Want::Body(mut status), Part::Status) => {
            // The API server deletes the status with the object; a write would only race with the deletion.
            let stays = |it: &&Seen| key.resource.has_status() && !it.deleting;
            let Some(seen) = seen.filter(stays) else {
                return Action::None;
            };
            // The renderer of the status may not know the generation of the object that was applied.
            if status.get("observedGeneration").is_none() && seen.generation > 0 {
                status["observedGeneration"] = json!(seen.generation);
            }
            let wanted = hash(&status);
            // The second comparison: the API server has already stored a different status for this one.
            if seen.status == wanted || wrote == Some((wanted, seen.status)) {
                return Action::None;
            }
            let mut body = identity(key, seen);
            body["status"] = status;
            Action::Status(body)
        }
    }
}

/// Deletes the object only if the controller applied it for an owner. A copy made by a user bears the annotation too,
/// but has no owner. A ClusterDomainClaim has no owner either, since a cluster-wide object cannot be owned from a
/// namespace.
fn gone(key: &Key, seen: Option<&Seen>) -> Action {
    let owned = |it: &Seen| it.controller.is_some() || !key.resource.namespaced();
    let ours = |it: &&Seen| it.applied.is_some() && owned(it) && !it.deleting;
    seen.filter(ours).map_or(Action::None, |it| Action::Delete(it.uid.clone()))
}

fn identity(key: &Key, seen: &Seen) -> Value {
    let mut meta = json!({"name": key.name.name.as_str(), "uid": seen.uid});
    if key.resource.namespaced() {
        meta["namespace"] = json!(key.name.namespace.as_str());
    }
    json!({"apiVersion": key.resource.api_version(), "kind": key.resource.kind(), "metadata": meta})
}

fn object(key: &Key, mut body: Value, seen: Option<&Seen>) -> Action {
    let wanted = body_hash(key.resource, &body);
    body["metadata"]["annotations"][APPLIED] = json!(format!("{wanted:016x}"));
    let Some(seen) = seen else {
        // The controller never creates pods; it only annotates them.
        return if key.resource == Resource::Pod { Action::None } else { Action::Create(body) };
    };
    if let Some(trouble) = foreign(key, &body, seen) {
        return Action::NotOwned(trouble);
    }
    // The hash covers the last applied body only, so `touched` is needed to notice changes by others.
    let stands = seen.applied == Some(wanted) && !seen.touched;
    // A deletion cannot be stopped; once it is done, the watch reports it and the object is created again.
    if stands || seen.deleting {
        return Action::None;
    }
    if key.resource == Resource::Deployment {
        // Replicas follow the load. An apply must name them, or it would give up the ownership of the field. With the
        // version at which they were read, it cannot reset a scale that came in between.
        body["spec"]["replicas"] = json!(seen.replicas);
        body["metadata"]["resourceVersion"] = json!(seen.version);
    }
    // With the UID, the apply fails if the object was replaced by another one of the same name.
    body["metadata"]["uid"] = json!(seen.uid);
    if seen.touched { Action::Restore(body) } else { Action::Apply(body) }
}

/// Returns the hash of a body, as the annotation on the object holds it; a Deployment's replicas do not count.
pub fn body_hash(resource: Resource, body: &Value) -> u64 {
    if resource != Resource::Deployment {
        return hash(body);
    }
    let mut body = body.clone();
    if let Some(spec) = body.pointer_mut("/spec").and_then(Value::as_object_mut) {
        spec.remove("replicas");
    }
    hash(&body)
}

/// Returns a write error if the object has another owner than the desired one. A body without an owner never conflicts:
/// it holds only the few fields that the controller sets on a user's object.
fn foreign(key: &Key, body: &Value, seen: &Seen) -> Option<Trouble> {
    let owners = body["metadata"]["ownerReferences"].as_array()?;
    let owner = owners.iter().find(|it| it["controller"] == true)?["uid"].as_str()?;
    (seen.controller.as_deref() != Some(owner)).then(|| not_owned(key))
}

/// Returns Knative's write error for an object that has the name and another owner.
pub fn not_owned(key: &Key) -> Trouble {
    let (kind, name) = (key.resource.kind(), &key.name.name);
    let message = format!("There is an existing {kind} {name:?} that we do not own.");
    Trouble { reason: "NotOwned", message }
}

fn scale(fewest: i64, most: i64, leaving: Vec<Name>, seen: Option<&Seen>) -> Action {
    let Some(seen) = seen.filter(|it| !it.deleting) else { return Action::None };
    // A number between both bounds stays: the pods beyond the desired number are draining.
    let replicas = seen.replicas.map_or(fewest, |it| it.min(most).max(fewest));
    match seen.replicas == Some(replicas) {
        true => Action::None,
        false => Action::Scale { replicas, leaving },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(resource: Resource, part: Part) -> Key {
        Key::new(resource, part, Name::new("default", "hello"))
    }

    fn body() -> Value {
        json!({
            "metadata": {"name": "hello", "ownerReferences": [{"uid": "boss", "controller": true}]},
            "spec": {"replicas": 1, "a": "b"},
        })
    }

    fn ours(applied: Option<u64>) -> Seen {
        Seen {
            uid: "u".into(),
            version: "7".into(),
            controller: Some("boss".into()),
            replicas: Some(5),
            applied,
            ..Seen::default()
        }
    }

    fn deployment(seen: Option<&Seen>) -> Action {
        decide(&key(Resource::Deployment, Part::Object), Want::Body(body()), seen, None)
    }

    #[test]
    fn creates_what_is_missing_with_the_hash_of_its_body() {
        let Action::Create(made) = deployment(None) else { panic!("not created") };
        let hash = format!("{:016x}", body_hash(Resource::Deployment, &body()));
        assert_eq!(made["metadata"]["annotations"][APPLIED], json!(hash));
        assert_eq!(made["spec"]["replicas"], 1);
    }

    #[test]
    fn applies_only_what_differs_and_never_the_replicas() {
        let current = body_hash(Resource::Deployment, &body());
        assert_eq!(deployment(Some(&ours(Some(current)))), Action::None);
        let Action::Apply(body) = deployment(Some(&ours(Some(1)))) else { panic!("not applied") };
        assert_eq!(body["spec"], json!({"replicas": 5, "a": "b"}));
        assert_eq!(body["metadata"]["resourceVersion"], "7");
        assert_eq!(body["metadata"]["uid"], "u");
        let touched = Seen { touched: true, ..ours(Some(current)) };
        assert!(matches!(deployment(Some(&touched)), Action::Restore(_)), "changed by others");
    }

    #[test]
    fn replicas_do_not_count_as_a_difference() {
        let mut other = body();
        other["spec"]["replicas"] = json!(9);
        let of = |resource| (body_hash(resource, &body()), body_hash(resource, &other));
        let (one, two) = of(Resource::Deployment);
        assert_eq!(one, two);
        let (one, two) = of(Resource::Service);
        assert_ne!(one, two);
    }

    #[test]
    fn an_object_of_somebody_else_is_reported_and_left_alone() {
        let key = key(Resource::Service, Part::Object);
        let message = "There is an existing Service \"hello\" that we do not own.".to_owned();
        let trouble = Trouble { reason: "NotOwned", message };
        for controller in [None, Some("another".into())] {
            let seen = Seen { controller, ..ours(Some(1)) };
            let action = decide(&key, Want::Body(body()), Some(&seen), None);
            assert_eq!(action, Action::NotOwned(trouble.clone()));
        }
    }

    #[test]
    fn deletes_only_what_was_applied_and_only_that_object() {
        let key = key(Resource::Service, Part::Object);
        let gone = |seen: &Seen| decide(&key, Want::Gone, Some(seen), None);
        assert_eq!(gone(&ours(Some(1))), Action::Delete("u".into()));
        assert_eq!(gone(&ours(None)), Action::None);
        assert_eq!(gone(&Seen { controller: None, ..ours(Some(1)) }), Action::None, "a copy");
        assert_eq!(gone(&Seen { deleting: true, ..ours(Some(1)) }), Action::None);
        assert_eq!(decide(&key, Want::Gone, None, None), Action::None);
    }

    #[test]
    fn waits_until_what_goes_is_gone() {
        assert_eq!(deployment(Some(&Seen { deleting: true, ..ours(Some(1)) })), Action::None);
    }

    #[test]
    fn a_status_is_written_when_it_differs_and_not_again_when_the_server_made_it_another() {
        let key = key(Resource::Revision, Part::Status);
        let status = json!({"ready": true});
        let write =
            |seen: &Seen, wrote| decide(&key, Want::Body(status.clone()), Some(seen), wrote);
        let same = Seen { status: hash(&status), ..ours(None) };
        assert_eq!(write(&same, None), Action::None);
        let other = Seen { status: 3, ..ours(None) };
        let Action::Status(body) = write(&other, None) else { panic!("not written") };
        let meta = json!({"name": "hello", "namespace": "default", "uid": "u"});
        assert_eq!((&body["metadata"], &body["status"]), (&meta, &status));
        assert_eq!(write(&other, Some((hash(&status), 3))), Action::None);
        assert!(
            matches!(write(&other, Some((hash(&status), 4))), Action::Status(_)),
            "changed by others"
        );
    }

    #[test]
    fn nothing_is_written_to_what_goes() {
        let going = Seen { deleting: true, ..ours(Some(1)) };
        let decide =
            |part, want| decide(&key(Resource::Deployment, part), want, Some(&going), None);
        let scale = Want::Scale { replicas: 1, most: 1, leaving: Vec::new() };
        for (part, want) in [
            (Part::Object, Want::Body(body())),
            (Part::Object, Want::Gone),
            (Part::Status, Want::Body(json!({"ready": true}))),
            (Part::Scale, scale),
        ] {
            assert_eq!(decide(part, want.clone()), Action::None, "{want:?}");
        }
        let revision = key(Resource::Revision, Part::Status);
        let status = Want::Body(json!({"ready": true}));
        assert_eq!(super::decide(&revision, status, Some(&going), None), Action::None);
    }

    #[test]
    fn scales_only_to_another_number() {
        let key = key(Resource::Deployment, Part::Scale);
        let leaving = vec![Name::new("default", "pod")];
        let scale = |replicas: i64, most: i64| {
            let want = Want::Scale { replicas, most, leaving: leaving.clone() };
            decide(&key, want, Some(&ours(None)), None)
        };
        let to = |replicas| Action::Scale { replicas, leaving: leaving.clone() };
        assert_eq!(scale(5, 5), Action::None);
        assert_eq!(scale(0, 0), to(0));
        assert_eq!([scale(4, 7), scale(0, 3), scale(6, 7)], [Action::None, to(3), to(6)]);
    }
}
