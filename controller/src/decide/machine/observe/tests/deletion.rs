//! Objects that are being deleted: nothing is created, changed or restored for them or below them. Their pods finish
//! their requests.

use super::*;

const REVISIONS: [&str; 1] = ["hello-00001"];

/// Returns a cluster with a running Service, or with a Configuration and a Route without a Service.
fn running(is_serviceless: bool) -> FakeApiServer {
    let mut api_server = FakeApiServer::new();
    if is_serviceless {
        api_server.apply_as_user(
            ResourceKind::Configuration,
            "hello",
            json!({"template": template("hello:v1", 1)}),
        );
        let traffic =
            json!([{"configurationName": "hello", "latestRevision": true, "percent": 100}]);
        api_server.apply_as_user(ResourceKind::Route, "hello", json!({"traffic": traffic}));
    } else {
        api_server.apply_service("hello", "hello:v1", 1, Value::Null);
    }
    api_server.report_all_ready();
    api_server
}

/// Deletes an object, as a user does, that stays until its finalizers or the objects it owns are gone.
fn start_deletion(api_server: &mut FakeApiServer, resource: ResourceKind, name: &NamespacedName) {
    let at = (resource, name.clone());
    let stamp = api_server.now.rfc3339();
    let object = api_server.objects.get_mut(&at).expect("an object");
    object["metadata"]["deletionTimestamp"] = json!(stamp);
    let generation = object["metadata"]["generation"].as_i64().unwrap_or(0);
    object["metadata"]["generation"] = json!(generation + 1);
    object["metadata"]["finalizers"] = json!(["foregroundDeletion"]);
    let object = object.clone();
    api_server.step(ControllerEvent::ObjectObserved {
        resource,
        name: name.clone(),
        object: Some(Box::new(object)),
    });
}

/// Returns all objects made for a service, owners first.
fn owners_first(api_server: &FakeApiServer) -> Vec<(ResourceKind, NamespacedName)> {
    let order = |resource: &ResourceKind| match resource {
        ResourceKind::KnativeService => 0,
        ResourceKind::Configuration | ResourceKind::Route => 1,
        ResourceKind::Revision => 2,
        ResourceKind::Pod => 4,
        _ => 3,
    };
    let keys = api_server.objects.keys().filter(|(_, it)| it.namespace == NAMESPACE);
    let mut all: Vec<_> = keys.cloned().collect();
    all.sort_by_key(|(resource, _)| order(resource));
    all
}

/// Returns an object and all objects below it in the tree of owners.
fn owned_tree(
    api_server: &FakeApiServer,
    owner: &(ResourceKind, NamespacedName),
) -> Vec<(ResourceKind, NamespacedName)> {
    let mut all = vec![owner.clone()];
    let mut at = 0;
    while let Some(owner) = all.get(at).cloned() {
        at += 1;
        let uid = api_server.objects[&owner]["metadata"]["uid"].clone();
        let is_owned = |it: &Value| it["metadata"]["ownerReferences"][0]["uid"] == uid;
        let of_deployment = |(resource, it): &(ResourceKind, NamespacedName)| {
            let prefix = format!("{}-", owner.1.name);
            owner.0 == ResourceKind::Deployment
                && *resource == ResourceKind::Pod
                && it.name.starts_with(&prefix)
        };
        let owned =
            api_server.objects.iter().filter(|(key, it)| is_owned(it) || of_deployment(key));
        all.extend(owned.map(|(key, _)| key.clone()));
    }
    all
}

/// Has the writer check every part of these objects, as any event could.
fn check_all_parts(api_server: &mut FakeApiServer, keys: &[(ResourceKind, NamespacedName)]) {
    for (resource, name) in keys {
        for part in [ObjectPart::Object, ObjectPart::Status, ObjectPart::Scale] {
            for event in api_server.write(&ObjectPartKey::new(*resource, part, name.clone())) {
                api_server.step(event);
            }
        }
    }
}

#[test]
fn foreground_deletion_of_any_owner_ends_without_a_write() {
    for is_serviceless in [false, true] {
        for owner in owners_first(&running(is_serviceless)) {
            let mut api_server = running(is_serviceless);
            let all = owned_tree(&api_server, &owner);
            start_deletion(&mut api_server, owner.0, &owner.1);
            // The garbage collector marks the objects below, then deletes them from the leaves up.
            for (resource, name) in all.iter().skip(1) {
                start_deletion(&mut api_server, *resource, name);
            }
            api_server.decide(REVISIONS[0], 3);
            let before = api_server.objects.clone();
            for (resource, name) in all.iter().skip(1).rev() {
                api_server.objects.remove(&(*resource, name.clone()));
                api_server.step(ControllerEvent::ObjectObserved {
                    resource: *resource,
                    name: name.clone(),
                    object: None,
                });
                check_all_parts(&mut api_server, &all);
            }
            let spec = |objects: &BTreeMap<_, Value>| objects[&owner]["spec"].clone();
            assert_eq!(spec(&api_server.objects), spec(&before), "{owner:?}");
            assert_eq!(owned_tree(&api_server, &owner), [owner], "nothing below it was made again");
        }
    }
}

#[test]
fn nothing_is_created_below_an_object_that_a_finalizer_keeps() {
    // One object waits for a finalizer of another controller; the objects below it are deleted by hand.
    for owner in owners_first(&running(false)) {
        let mut api_server = running(false);
        let all = owned_tree(&api_server, &owner);
        start_deletion(&mut api_server, owner.0, &owner.1);
        for (resource, name) in all.iter().skip(1).rev() {
            api_server.objects.remove(&(*resource, name.clone()));
            api_server.step(ControllerEvent::ObjectObserved {
                resource: *resource,
                name: name.clone(),
                object: None,
            });
        }
        check_all_parts(&mut api_server, &all);
        api_server.now = api_server.now.plus_ms(60_000);
        api_server.step(ControllerEvent::Tick);
        check_all_parts(&mut api_server, &all);
        assert_eq!(owned_tree(&api_server, &owner), [owner]);
    }
}

/// Orphaning (`--cascade=orphan`): the API server removes the owner references from owned objects, then the owner.
#[test]
fn orphaned_children_stay_orphans_and_serve_on() {
    for owner in [ResourceKind::KnativeService, ResourceKind::Configuration] {
        let mut api_server = running(owner == ResourceKind::Configuration);
        let (all, owner_key) = (owners_first(&api_server), (owner, name("hello")));
        let uids = |api_server: &FakeApiServer| -> Vec<Option<Value>> {
            let rest = all.iter().filter(|at| **at != owner_key);
            rest.map(|at| api_server.objects.get(at).map(|it| it["metadata"]["uid"].clone()))
                .collect()
        };
        let (before, served) = (uids(&api_server), targets_and_phases(&api_server));
        start_deletion(&mut api_server, owner_key.0, &owner_key.1);
        assert_eq!(
            targets_and_phases(&api_server),
            served,
            "{owner:?}: its children are not deleted"
        );
        let owned: Vec<_> = {
            let uid = &api_server.objects[&owner_key]["metadata"]["uid"];
            let is_owned = |it: &Value| it["metadata"]["ownerReferences"][0]["uid"] == *uid;
            api_server
                .objects
                .iter()
                .filter(|(_, it)| is_owned(it))
                .map(|(at, _)| at.clone())
                .collect()
        };
        assert!(!owned.is_empty(), "{owner:?}");
        let is_orphan = |api_server: &FakeApiServer, at: &(ResourceKind, NamespacedName)| {
            api_server.objects[at]["metadata"].get("ownerReferences").is_none()
        };
        for at in &owned {
            orphan(&mut api_server, at);
            check_all_parts(&mut api_server, &all);
            assert!(is_orphan(&api_server, at), "{at:?} is not taken back");
            assert_eq!(targets_and_phases(&api_server), served, "{owner:?}: {at:?} is an orphan");
        }
        api_server.objects.remove(&owner_key);
        api_server.step(ControllerEvent::ObjectObserved {
            resource: owner_key.0,
            name: owner_key.1.clone(),
            object: None,
        });
        check_all_parts(&mut api_server, &all);
        assert_eq!(
            uids(&api_server),
            before,
            "{owner:?}: all is there, and nothing was made again"
        );
        assert!(owned.iter().all(|at| is_orphan(&api_server, at)), "{owner:?}");
        assert_eq!(targets_and_phases(&api_server), served, "{owner:?}");
        api_server.decide(REVISIONS[0], 1);
        assert_eq!(targets_and_phases(&api_server), served, "{owner:?}");
    }
}

/// Removes the owner reference from an object, as the garbage collector does.
fn orphan(api_server: &mut FakeApiServer, at: &(ResourceKind, NamespacedName)) {
    let mut object = api_server.objects[at].clone();
    object["metadata"].as_object_mut().expect("a map").remove("ownerReferences");
    api_server.objects.insert(at.clone(), object.clone());
    api_server.step(ControllerEvent::ObjectObserved {
        resource: at.0,
        name: at.1.clone(),
        object: Some(Box::new(object)),
    });
}

/// Returns the targets of the service's requests, and the phases of its pods.
fn targets_and_phases(
    api_server: &FakeApiServer,
) -> (Vec<NamespacedName>, Vec<common::wire::RoutingPhase>) {
    let table = api_server.table();
    let targets = table.services.get(&name("hello")).map(|it| it.targets.iter());
    (targets.into_iter().flatten().map(|it| it.revision.clone()).collect(), phases(api_server))
}

/// A decision made while a Service is being deleted is written once its children have become orphans.
#[test]
fn orphaned_children_of_a_service_are_scaled() {
    let mut api_server = running(false);
    let object_name = name("hello");
    start_deletion(&mut api_server, ResourceKind::KnativeService, &object_name);
    for resource in [ResourceKind::Configuration, ResourceKind::Route] {
        orphan(&mut api_server, &(resource, object_name.clone()));
    }
    api_server.decide(REVISIONS[0], 3);
    api_server.objects.remove(&(ResourceKind::KnativeService, object_name.clone()));
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::KnativeService,
        name: object_name,
        object: None,
    });
    let deployment = api_server.object(ResourceKind::Deployment, "hello-00001-deployment");
    assert_eq!(deployment["spec"]["replicas"], 3);
}

/// A Revision without its Configuration scales as before; one that is deleted with it does not.
#[test]
fn orphaned_revisions_of_a_configuration_are_scaled() {
    for (is_orphaned, replicas) in [(true, 3), (false, 1)] {
        let mut api_server = running(true);
        let object_name = name("hello");
        start_deletion(&mut api_server, ResourceKind::Configuration, &object_name);
        if is_orphaned {
            REVISIONS
                .iter()
                .for_each(|it| orphan(&mut api_server, &(ResourceKind::Revision, name(it))));
        }
        api_server.objects.remove(&(ResourceKind::Configuration, object_name.clone()));
        api_server.step(ControllerEvent::ObjectObserved {
            resource: ResourceKind::Configuration,
            name: object_name,
            object: None,
        });
        api_server.decide(REVISIONS[0], 3);
        let deployment = api_server.object(ResourceKind::Deployment, "hello-00001-deployment");
        assert_eq!(deployment["spec"]["replicas"], replicas, "orphaned: {is_orphaned}");
    }
}

/// Finalizers of other controllers may keep a Service for any time, and nothing below it is deleted meanwhile.
#[test]
fn children_of_a_service_with_foreign_finalizers_serve_until_deleted() {
    let mut api_server = running(false);
    let served = targets_and_phases(&api_server);
    assert_eq!(served, (REVISIONS.map(name).to_vec(), vec![common::wire::RoutingPhase::Ready]));
    start_deletion(&mut api_server, ResourceKind::KnativeService, &name("hello"));
    api_server.now = api_server.now.plus_ms(60_000);
    api_server.step(ControllerEvent::Tick);
    assert_eq!(targets_and_phases(&api_server), served);
    start_deletion(&mut api_server, ResourceKind::Revision, &name(REVISIONS[0]));
    assert_eq!(draining(&api_server), (true, 1));
}

#[test]
fn a_terminating_configuration_creates_no_revision() {
    let mut api_server = running(true);
    start_deletion(&mut api_server, ResourceKind::Configuration, &name("hello"));
    assert_eq!(api_server.names(ResourceKind::Revision), REVISIONS.map(name));
    // A controller that starts now observes the new generation only.
    api_server.other_replica = None;
    api_server.machine = api_server.start_replica();
    api_server.step(ControllerEvent::LeadershipChanged(true));
    assert_eq!(api_server.names(ResourceKind::Revision), REVISIONS.map(name));
}

#[test]
fn nothing_is_written_in_a_terminating_namespace() {
    let mut api_server = running(false);
    let namespace = |is_terminating: bool| {
        let mut meta = json!({"name": NAMESPACE});
        if is_terminating {
            meta["deletionTimestamp"] = json!("2027-01-15T08:00:00Z");
        }
        let object = json!({"metadata": meta});
        ControllerEvent::ObjectObserved {
            resource: ResourceKind::Namespace,
            name: NamespacedName::new("", NAMESPACE),
            object: Some(Box::new(object)),
        }
    };
    api_server.step(namespace(true));
    let (all, before) = (owners_first(&api_server), api_server.writes);
    for (resource, name) in all.iter().rev().filter(|(it, _)| *it != ResourceKind::KnativeService) {
        api_server.objects.remove(&(*resource, name.clone()));
        api_server.step(ControllerEvent::ObjectObserved {
            resource: *resource,
            name: name.clone(),
            object: None,
        });
        check_all_parts(&mut api_server, &all);
    }
    assert_eq!(api_server.writes, before);
    // A service of the same name is created afterwards.
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Namespace,
        name: NamespacedName::new("", NAMESPACE),
        object: None,
    });
    api_server.step(namespace(false));
    api_server.apply_service("hello", "hello:v2", 1, Value::Null);
    assert!(api_server.objects.contains_key(&(ResourceKind::Configuration, name("hello"))));
}

/// Returns true if every pod is draining in the table, and the number of pods.
fn draining(api_server: &FakeApiServer) -> (bool, usize) {
    let phases = phases(api_server);
    (phases.iter().all(|it| *it == common::wire::RoutingPhase::Draining), phases.len())
}

#[test]
fn pods_of_deleted_owners_drain_until_they_end() {
    for is_serviceless in [false, true] {
        let owns_revisions =
            [ResourceKind::KnativeService, ResourceKind::Configuration, ResourceKind::Revision];
        let owners = owners_first(&running(is_serviceless));
        for owner in owners.iter().filter(|it| owns_revisions.contains(&it.0)) {
            let mut api_server = running(is_serviceless);
            let all = owned_tree(&api_server, owner);
            // Owners first, as in a background deletion; the pods take longer to end.
            for (resource, name) in all.iter().filter(|it| it.0 != ResourceKind::Pod) {
                api_server.objects.remove(&(*resource, name.clone()));
                api_server.step(ControllerEvent::ObjectObserved {
                    resource: *resource,
                    name: name.clone(),
                    object: None,
                });
            }
            assert_eq!(draining(&api_server), (true, 1), "{owner:?}");
            for (resource, name) in all.iter().filter(|it| it.0 == ResourceKind::Pod) {
                start_deletion(&mut api_server, *resource, name);
                assert_eq!(draining(&api_server), (true, 1), "{owner:?}");
                api_server.objects.remove(&(*resource, name.clone()));
                api_server.step(ControllerEvent::ObjectObserved {
                    resource: *resource,
                    name: name.clone(),
                    object: None,
                });
            }
            assert_eq!(api_server.table().pods.len(), 0, "{owner:?}");
        }
    }
}

#[test]
fn old_pods_of_a_recreated_revision_drain() {
    let mut api_server = running(false);
    let (old, _) = pods(&api_server).remove(0);
    let revision = (ResourceKind::Revision, name(REVISIONS[0]));
    api_server.objects.remove(&revision);
    // It is its Configuration's newest Revision, so it is created again at once.
    api_server.step(ControllerEvent::ObjectObserved {
        resource: revision.0,
        name: revision.1.clone(),
        object: None,
    });
    assert!(api_server.objects.contains_key(&revision));
    let is_old = |(key, _): &(&(ResourceKind, NamespacedName), &Value)| key.1 == old;
    let uid = api_server.objects.iter().find(is_old).map(|(_, it)| it["metadata"]["uid"].clone());
    let uid = uid.expect("the old pod");
    let uid = uid.as_str().expect("a uid");
    let phase = api_server.table().pods.get(uid).map(|it| it.phase);
    assert_eq!(phase, Some(common::wire::RoutingPhase::Draining));
}

/// Each kind has a watch of its own, and one may lag behind the others when a replica becomes the leader.
#[test]
fn a_child_object_stays_while_its_owner_is_not_observed() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 1, Value::Null);
    let owners = [
        ResourceKind::KnativeService,
        ResourceKind::Configuration,
        ResourceKind::Route,
        ResourceKind::Revision,
    ];
    let mut children = api_server.objects.clone();
    // The slice of a Revision is made again at once, and holds nothing that would be lost.
    let slice_of_revision = (ResourceKind::EndpointSlice, name("hello-00001"));
    children.retain(|child, _| !owners.contains(&child.0) && *child != slice_of_revision);
    assert!(children.contains_key(&(ResourceKind::EndpointSlice, name("hello"))));
    let mut late_machine = machine();
    late_machine.step(api_server.now, ControllerEvent::LeadershipChanged(true));
    for event in observations(&children, &[]) {
        late_machine.step(api_server.now, event);
    }
    assert!(children.keys().any(|(it, _)| *it == ResourceKind::Deployment));
    for (resource, object_name) in children.into_keys() {
        let key = ObjectPartKey::new(resource, ObjectPart::Object, object_name);
        let desired = desired_state(late_machine.cluster(), &key);
        assert!(!matches!(desired, DesiredState::Absent), "{key:?}");
    }
}

#[test]
fn a_sleeping_revision_without_a_configuration_stays_known() {
    let mut api_server = FakeApiServer::new();
    let code = name("code");
    let spec = json!({"template": template("hello:v1", 0)});
    api_server.apply_as_user(ResourceKind::Configuration, "code", spec);
    let traffic = json!({"traffic": [{"revisionName": "code-00001", "percent": 100}]});
    api_server.apply_as_user(ResourceKind::Route, "way", traffic);
    let observed =
        |resource: ResourceKind, object_name: &NamespacedName, object: Option<&Value>| {
            let (name, object) = (object_name.clone(), object.cloned().map(Box::new));
            ControllerEvent::ObjectObserved { resource, name, object }
        };
    // Each kind has a watch of its own.
    let mut late_machine = machine();
    for (resource, name) in
        [(ResourceKind::Revision, name("code-00001")), (ResourceKind::Configuration, code.clone())]
    {
        let object = &api_server.objects[&(resource, name.clone())];
        late_machine.step(api_server.now, observed(resource, &name, Some(object)));
    }
    assert!(late_machine.cluster().apps[&code].revisions[0].meta.exists());
    start_deletion(&mut api_server, ResourceKind::Configuration, &code);
    orphan(&mut api_server, &(ResourceKind::Revision, name("code-00001")));
    api_server.objects.remove(&(ResourceKind::Configuration, code.clone()));
    api_server.step(observed(ResourceKind::Configuration, &code, None));
    assert!(api_server.table().revisions.contains_key(&name("code-00001")));
    api_server.delete_as_user(ResourceKind::Revision, "code-00001");
    assert!(!api_server.machine.cluster().apps.contains_key(&code));
}
