//! Write errors of a Revision's or Route's child objects: one of several is shown, and each is cleared on its own.

use super::*;
use crate::model::object::WriteError;

const REVISION: &str = "hello-00001";

fn write_error(message: &str) -> Option<WriteError> {
    Some(WriteError { reason: "Invalid", message: message.into() })
}

fn revision_message(machine: &ControllerStateMachine) -> Option<String> {
    let app = &machine.world().apps[&name("hello")];
    app.revisions[0].blocked_reason.as_ref().map(|why| why.message.to_string())
}

#[test]
fn one_of_several_write_errors_is_reported_until_it_ends() {
    let mut cluster = FakeApiServer::new();
    cluster.service("hello", "hello:v1", 0, Value::Null);
    let of = |resource| ObjectPartKey::new(resource, ObjectPart::Object, name(REVISION));
    let [first, second] = [ResourceKind::PodAutoscaler, ResourceKind::ServerlessService].map(of);
    cluster.step(ControllerEvent::WriteErrorChanged(second.clone(), write_error("second")));
    assert_eq!(revision_message(&cluster.machine).as_deref(), Some("second"));
    cluster.step(ControllerEvent::WriteErrorChanged(first.clone(), write_error("first")));
    let one = revision_message(&cluster.machine);
    // The writer reports both again after each attempt.
    for _ in 0..3 {
        cluster.step(ControllerEvent::WriteErrorChanged(second.clone(), write_error("second")));
        assert_eq!(revision_message(&cluster.machine), one);
        cluster.step(ControllerEvent::WriteErrorChanged(first.clone(), write_error("first")));
        assert_eq!(revision_message(&cluster.machine), one);
    }
    // A working Deployment clears only the error that a Deployment had reported.
    let deployment = name("hello-00001-deployment");
    let object = cluster.object(ResourceKind::Deployment, &deployment.name).clone();
    cluster.step(ControllerEvent::ObjectObserved(
        ResourceKind::Deployment,
        deployment,
        Some(Box::new(object)),
    ));
    assert_eq!(revision_message(&cluster.machine), one);
    cluster.step(ControllerEvent::WriteErrorChanged(first, None));
    assert_eq!(revision_message(&cluster.machine).as_deref(), Some("second"));
    cluster.step(ControllerEvent::WriteErrorChanged(second, None));
    assert_eq!(revision_message(&cluster.machine), None);
}

#[test]
fn write_errors_end_with_their_revision() {
    let mut cluster = FakeApiServer::new();
    cluster.service("hello", "hello:v1", 0, Value::Null);
    let key = ObjectPartKey::new(ResourceKind::Metric, ObjectPart::Object, name(REVISION));
    cluster.step(ControllerEvent::WriteErrorChanged(key, write_error("first")));
    cluster.remove(ResourceKind::KnativeService, "hello");
    cluster.service("hello", "hello:v1", 0, Value::Null);
    let deployment = name("hello-00001-deployment");
    let object = cluster.object(ResourceKind::Deployment, &deployment.name).clone();
    cluster.step(ControllerEvent::ObjectObserved(
        ResourceKind::Deployment,
        deployment,
        Some(Box::new(object)),
    ));
    assert_eq!(revision_message(&cluster.machine), None);
}

#[test]
fn a_revision_created_late_is_no_longer_missing() {
    let mut cluster = FakeApiServer::new();
    cluster.service("hello", "hello:v1", 0, Value::Null);
    let seen = |resource, own: &str| {
        let object = cluster.object(resource, own).clone();
        ControllerEvent::ObjectObserved(resource, name(own), Some(Box::new(object)))
    };
    let mut late = machine();
    late.step(cluster.now, ControllerEvent::LeadershipChanged(true));
    late.step(cluster.now, seen(ResourceKind::KnativeService, "hello"));
    late.step(cluster.now, seen(ResourceKind::Configuration, "hello"));
    let unmade = |it| {
        ControllerEvent::ChildrenMissing(
            name("hello"),
            ResourceKind::Configuration,
            name("hello"),
            it,
        )
    };
    let owed = crate::write::desired::required_children(late.world(), &name("hello"));
    assert_eq!(
        owed[0].keys,
        [ObjectPartKey::new(ResourceKind::Revision, ObjectPart::Object, name(REVISION))]
    );
    late.step(cluster.now, unmade(write_error("missing")));
    assert_eq!(revision_message(&late).as_deref(), Some("missing"));
    late.step(cluster.now, seen(ResourceKind::Revision, REVISION));
    let owed = crate::write::desired::required_children(late.world(), &name("hello"));
    assert_eq!((owed[0].owner.0, owed[0].keys.len()), (ResourceKind::Configuration, 0));
    late.step(cluster.now, unmade(None));
    assert_eq!(revision_message(&late), None);
}
