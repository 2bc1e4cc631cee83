//! Write errors of a Revision's or Route's child objects: one of several is shown, and each is cleared on its own.

use super::*;
use crate::kube::WriteError;

const REVISION: &str = "hello-00001";

fn trouble(message: &str) -> Option<WriteError> {
    Some(WriteError { reason: "Invalid", message: message.into() })
}

fn told(machine: &ControllerStateMachine) -> Option<String> {
    let app = &machine.world().apps[&name("hello")];
    app.revisions[0].blocked.as_ref().map(|why| why.message.to_string())
}

#[test]
fn of_several_troubles_the_same_one_is_told_until_it_is_over() {
    let mut cluster = FakeApiServer::new();
    cluster.service("hello", "hello:v1", 0, Value::Null);
    let of = |resource| ObjectPartKey::new(resource, ObjectPart::Object, name(REVISION));
    let [first, second] = [ResourceKind::PodAutoscaler, ResourceKind::ServerlessService].map(of);
    cluster.step(ControllerEvent::Trouble(second.clone(), trouble("second")));
    assert_eq!(told(&cluster.machine).as_deref(), Some("second"));
    cluster.step(ControllerEvent::Trouble(first.clone(), trouble("first")));
    let one = told(&cluster.machine);
    // The writer reports both again after each attempt.
    for _ in 0..3 {
        cluster.step(ControllerEvent::Trouble(second.clone(), trouble("second")));
        assert_eq!(told(&cluster.machine), one);
        cluster.step(ControllerEvent::Trouble(first.clone(), trouble("first")));
        assert_eq!(told(&cluster.machine), one);
    }
    // A working Deployment clears only the error that a Deployment had reported.
    let deployment = name("hello-00001-deployment");
    let object = cluster.object(ResourceKind::Deployment, &deployment.name).clone();
    cluster.step(ControllerEvent::Observe(
        ResourceKind::Deployment,
        deployment,
        Some(Box::new(object)),
    ));
    assert_eq!(told(&cluster.machine), one);
    cluster.step(ControllerEvent::Trouble(first, None));
    assert_eq!(told(&cluster.machine).as_deref(), Some("second"));
    cluster.step(ControllerEvent::Trouble(second, None));
    assert_eq!(told(&cluster.machine), None);
}

#[test]
fn troubles_go_with_the_revision_that_had_them() {
    let mut cluster = FakeApiServer::new();
    cluster.service("hello", "hello:v1", 0, Value::Null);
    let key = ObjectPartKey::new(ResourceKind::Metric, ObjectPart::Object, name(REVISION));
    cluster.step(ControllerEvent::Trouble(key, trouble("first")));
    cluster.remove(ResourceKind::KnativeService, "hello");
    cluster.service("hello", "hello:v1", 0, Value::Null);
    let deployment = name("hello-00001-deployment");
    let object = cluster.object(ResourceKind::Deployment, &deployment.name).clone();
    cluster.step(ControllerEvent::Observe(
        ResourceKind::Deployment,
        deployment,
        Some(Box::new(object)),
    ));
    assert_eq!(told(&cluster.machine), None);
}

#[test]
fn a_revision_that_was_made_late_is_missed_no_more() {
    let mut cluster = FakeApiServer::new();
    cluster.service("hello", "hello:v1", 0, Value::Null);
    let seen = |resource, own: &str| {
        let object = cluster.object(resource, own).clone();
        ControllerEvent::Observe(resource, name(own), Some(Box::new(object)))
    };
    let mut late = machine();
    late.step(cluster.now, ControllerEvent::Lead(true));
    late.step(cluster.now, seen(ResourceKind::KnativeService, "hello"));
    late.step(cluster.now, seen(ResourceKind::Configuration, "hello"));
    let unmade =
        |it| ControllerEvent::Unmade(name("hello"), ResourceKind::Configuration, name("hello"), it);
    let owed = crate::want::owed(late.world(), &name("hello"));
    assert_eq!(
        owed[0].keys,
        [ObjectPartKey::new(ResourceKind::Revision, ObjectPart::Object, name(REVISION))]
    );
    late.step(cluster.now, unmade(trouble("missing")));
    assert_eq!(told(&late).as_deref(), Some("missing"));
    late.step(cluster.now, seen(ResourceKind::Revision, REVISION));
    let owed = crate::want::owed(late.world(), &name("hello"));
    assert_eq!((owed[0].of.0, owed[0].keys.len()), (ResourceKind::Configuration, 0));
    late.step(cluster.now, unmade(None));
    assert_eq!(told(&late), None);
}
