//! Write errors of an app's objects: one of several is shown, and each is cleared on its own.

use super::*;
use crate::model::object::WriteError;

const REVISION: &str = "hello-00001";

fn write_error(message: &str) -> Option<WriteError> {
    Some(WriteError { reason: "Invalid", message: message.into() })
}

fn revision_message(machine: &ControllerStateMachine) -> Option<String> {
    let app = &machine.cluster().apps[&name("hello")];
    app.revisions[0].blocked_reason.as_ref().map(|reason| reason.message.to_string())
}

#[test]
fn one_of_several_write_errors_is_reported_until_it_ends() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let of = |resource| ObjectPartKey::new(resource, ObjectPart::Object, name(REVISION));
    let [first, second] = [ResourceKind::PodAutoscaler, ResourceKind::ServerlessService].map(of);
    api_server.step(ControllerEvent::WriteErrorChanged {
        key: second.clone(),
        error: write_error("second"),
    });
    assert_eq!(revision_message(&api_server.machine).as_deref(), Some("second"));
    api_server.step(ControllerEvent::WriteErrorChanged {
        key: first.clone(),
        error: write_error("first"),
    });
    let one = revision_message(&api_server.machine);
    // The writer reports both again after each attempt.
    for _ in 0..3 {
        api_server.step(ControllerEvent::WriteErrorChanged {
            key: second.clone(),
            error: write_error("second"),
        });
        assert_eq!(revision_message(&api_server.machine), one);
        api_server.step(ControllerEvent::WriteErrorChanged {
            key: first.clone(),
            error: write_error("first"),
        });
        assert_eq!(revision_message(&api_server.machine), one);
    }
    // A working Deployment clears only the error that a Deployment had reported.
    let deployment = name("hello-00001-deployment");
    let object = api_server.object(ResourceKind::Deployment, &deployment.name).clone();
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Deployment,
        name: deployment,
        object: Some(Box::new(object)),
    });
    assert_eq!(revision_message(&api_server.machine), one);
    api_server.step(ControllerEvent::WriteErrorChanged { key: first, error: None });
    assert_eq!(revision_message(&api_server.machine).as_deref(), Some("second"));
    api_server.step(ControllerEvent::WriteErrorChanged { key: second, error: None });
    assert_eq!(revision_message(&api_server.machine), None);
}

#[test]
fn write_errors_end_with_their_revision() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let key = ObjectPartKey::new(ResourceKind::Metric, ObjectPart::Object, name(REVISION));
    api_server.step(ControllerEvent::WriteErrorChanged { key, error: write_error("first") });
    api_server.delete_as_user(ResourceKind::KnativeService, "hello");
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let deployment = name("hello-00001-deployment");
    let object = api_server.object(ResourceKind::Deployment, &deployment.name).clone();
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Deployment,
        name: deployment,
        object: Some(Box::new(object)),
    });
    assert_eq!(revision_message(&api_server.machine), None);
}

#[test]
fn write_errors_end_with_a_revision_that_is_garbage_collected() {
    let mut api_server = FakeApiServer::new();
    api_server.other_replica = None;
    let config_gc = json!({
        "min-non-active-revisions": "0",
        "retain-since-create-time": "1h",
        "retain-since-last-active-time": "1h",
    });
    api_server.set_config_map("config-gc", config_gc);
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let key = ObjectPartKey::new(ResourceKind::Metric, ObjectPart::Object, name(REVISION));
    api_server.step(ControllerEvent::WriteErrorChanged { key, error: write_error("first") });
    assert_eq!(api_server.machine.blocking_causes.len(), 1);
    api_server.apply_service("hello", "hello:v2", 0, Value::Null);
    api_server.now = api_server.now.plus_ms(2 * 3_600_000);
    api_server.step(ControllerEvent::Tick);
    assert_eq!(api_server.names(ResourceKind::Revision), [name("hello-00002")]);
    assert_eq!(api_server.machine.blocking_causes.len(), 0);
}

#[test]
fn a_revision_created_late_is_no_longer_missing() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let observed = |resource, object_name: &str| {
        let object = api_server.object(resource, object_name).clone();
        ControllerEvent::ObjectObserved {
            resource,
            name: name(object_name),
            object: Some(Box::new(object)),
        }
    };
    let mut late_machine = machine();
    late_machine.step(api_server.now, ControllerEvent::LeadershipChanged(true));
    late_machine.step(api_server.now, observed(ResourceKind::KnativeService, "hello"));
    late_machine.step(api_server.now, observed(ResourceKind::Configuration, "hello"));
    let children_missing = |it| ControllerEvent::ChildrenMissing {
        app: name("hello"),
        owner_resource: ResourceKind::Configuration,
        owner: name("hello"),
        error: it,
    };
    let required_children =
        crate::write::desired::required_children(late_machine.cluster(), &name("hello"));
    assert_eq!(
        required_children[0].keys,
        [ObjectPartKey::new(ResourceKind::Revision, ObjectPart::Object, name(REVISION))]
    );
    late_machine.step(api_server.now, children_missing(write_error("missing")));
    assert_eq!(revision_message(&late_machine).as_deref(), Some("missing"));
    late_machine.step(api_server.now, observed(ResourceKind::Revision, REVISION));
    let required_children =
        crate::write::desired::required_children(late_machine.cluster(), &name("hello"));
    assert_eq!(
        (required_children[0].owner.0, required_children[0].keys.len()),
        (ResourceKind::Configuration, 0)
    );
    late_machine.step(api_server.now, children_missing(None));
    assert_eq!(revision_message(&late_machine), None);
}

#[test]
fn the_service_reports_write_errors_of_its_configuration_and_route() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    for (resource, condition) in
        [(ResourceKind::Configuration, "ConfigurationsReady"), (ResourceKind::Route, "RoutesReady")]
    {
        let status = |api_server: &FakeApiServer| {
            api_server.condition(ResourceKind::KnativeService, "hello", condition)
        };
        assert_eq!(status(&api_server), "True : ");
        let key = ObjectPartKey::new(resource, ObjectPart::Object, name("hello"));
        let error = write_error("quota");
        api_server.step(ControllerEvent::WriteErrorChanged { key: key.clone(), error });
        assert_eq!(status(&api_server), "False Invalid: quota");
        let object = api_server.object(ResourceKind::KnativeService, "hello").clone();
        api_server.step(ControllerEvent::ObjectObserved {
            resource: ResourceKind::KnativeService,
            name: name("hello"),
            object: Some(Box::new(object)),
        });
        assert_eq!(status(&api_server), "False Invalid: quota", "the writer reports it once");
        api_server.step(ControllerEvent::WriteErrorChanged { key, error: None });
        assert_eq!(status(&api_server), "True : ");
    }
    assert_eq!(api_server.machine.blocking_causes.len(), 0);
}

#[test]
fn an_object_that_is_named_like_a_revision_does_not_block_it() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    for resource in [
        ResourceKind::KnativeService,
        ResourceKind::Configuration,
        ResourceKind::Route,
        ResourceKind::DomainMapping,
    ] {
        let key = ObjectPartKey::new(resource, ObjectPart::Status, name(REVISION));
        let error = write_error("other");
        api_server.step(ControllerEvent::WriteErrorChanged { key, error });
        assert_eq!(revision_message(&api_server.machine), None, "{resource}");
    }
}

/// A slice is made for each family in which an activator has an address, and a Route waits for no other.
#[test]
fn a_route_requires_the_slices_of_its_activators_families() {
    let cases: [(&[&str], &[&str]); 3] = [
        (&["10.1.0.9"], &["hello"]),
        (&["fd00:1::9"], &["hello.v6"]),
        (&["fd00:1::9", "10.1.0.9"], &["hello", "hello.v6"]),
    ];
    for (addresses, expected) in cases {
        let mut api_server = FakeApiServer::new();
        let activator_name = NamespacedName::new("knative-serving", "activator-1");
        let at = (ResourceKind::Pod, activator_name.clone());
        let pod = api_server.objects.get_mut(&at).expect("an activator");
        pod["status"]["podIP"] = json!(addresses[0]);
        pod["status"]["podIPs"] = addresses.iter().map(|ip| json!({"ip": ip})).collect();
        let object = Some(Box::new(pod.clone()));
        api_server.step(ControllerEvent::ObjectObserved {
            resource: ResourceKind::Pod,
            name: activator_name,
            object,
        });
        api_server.apply_service("hello", "hello:v1", 0, Value::Null);
        let all =
            crate::write::desired::required_children(api_server.machine.cluster(), &name("hello"));
        let of_route = all.into_iter().filter(|it| it.owner.0 == ResourceKind::Route);
        let keys = of_route.flat_map(|it| it.keys);
        let slices = keys.filter(|it| it.resource == ResourceKind::EndpointSlice);
        let required: Vec<NamespacedName> = slices.map(|it| it.name).collect();
        let expected: Vec<NamespacedName> = expected.iter().map(|it| name(it)).collect();
        assert_eq!(required, expected, "{addresses:?}");
        for slice in required {
            let at = (ResourceKind::EndpointSlice, slice);
            assert!(api_server.objects.contains_key(&at), "{addresses:?}: {at:?}");
        }
    }
}

/// Only the leader knows its write errors: replicas that judged by them would send different RouteTables.
#[test]
fn a_write_error_makes_no_revision_unreachable() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 1, Value::Null);
    let key = ObjectPartKey::new(ResourceKind::Metric, ObjectPart::Object, name(REVISION));
    // Each step compares the table with that of the other replica.
    api_server.step(ControllerEvent::WriteErrorChanged { key, error: write_error("first") });
    let available = api_server.condition(ResourceKind::Revision, REVISION, "ResourcesAvailable");
    assert_eq!(available, "False Invalid: first");
    assert!(api_server.table().revisions[&name(REVISION)].reachable);
}

/// Every replica observes the Deployment, so a Revision whose pods Kubernetes refuses is unreachable on all of them.
#[test]
fn a_replica_failure_makes_a_revision_unreachable_on_every_replica() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 1, Value::Null);
    let deployment = name("hello-00001-deployment");
    let mut object = api_server.object(ResourceKind::Deployment, &deployment.name).clone();
    object["status"]["conditions"] = json!([{
        "type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "quota",
    }]);
    api_server.objects.insert((ResourceKind::Deployment, deployment.clone()), object.clone());
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Deployment,
        name: deployment,
        object: Some(Box::new(object)),
    });
    assert!(!api_server.table().revisions[&name(REVISION)].reachable);
    let mut late_machine = machine().loading();
    for event in observations_of_deployments_first(&api_server.objects) {
        late_machine.step(api_server.now, event);
    }
    late_machine.step(api_server.now, ControllerEvent::InitialListSynced);
    assert_eq!(differences(&table(&late_machine), &api_server.table()), [""; 0]);
}
