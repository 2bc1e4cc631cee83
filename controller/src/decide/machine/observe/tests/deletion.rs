//! Objects that are being deleted: nothing is created, changed or restored for them or below them. Their pods finish
//! their requests.

use super::*;

const ALL: [&str; 1] = ["hello-00001"];

/// Returns a cluster with a running service, or with a Configuration and a Route of their own.
fn running(by_itself: bool) -> FakeApiServer {
    let mut cluster = FakeApiServer::new();
    if by_itself {
        cluster.user(
            ResourceKind::Configuration,
            "hello",
            json!({"template": template("hello:v1", 1)}),
        );
        let traffic =
            json!([{"configurationName": "hello", "latestRevision": true, "percent": 100}]);
        cluster.user(ResourceKind::Route, "hello", json!({"traffic": traffic}));
    } else {
        cluster.service("hello", "hello:v1", 1, Value::Null);
    }
    cluster.ready();
    cluster
}

/// Deletes an object, as a user does, that stays until its finalizers or the objects it owns are gone.
fn delete(cluster: &mut FakeApiServer, resource: ResourceKind, own: &NamespacedName) {
    let at = (resource, own.clone());
    let stamp = cluster.now.rfc3339();
    let object = cluster.objects.get_mut(&at).expect("an object");
    object["metadata"]["deletionTimestamp"] = json!(stamp);
    let generation = object["metadata"]["generation"].as_i64().unwrap_or(0);
    object["metadata"]["generation"] = json!(generation + 1);
    object["metadata"]["finalizers"] = json!(["foregroundDeletion"]);
    let object = object.clone();
    cluster.step(ControllerEvent::ObjectObserved(resource, own.clone(), Some(Box::new(object))));
}

/// Returns all objects made for a service, owners first.
fn made(cluster: &FakeApiServer) -> Vec<(ResourceKind, NamespacedName)> {
    let order = |resource: &ResourceKind| match resource {
        ResourceKind::KnativeService => 0,
        ResourceKind::Configuration | ResourceKind::Route => 1,
        ResourceKind::Revision => 2,
        ResourceKind::Pod => 4,
        _ => 3,
    };
    let own = cluster.objects.keys().filter(|(_, it)| it.namespace == SPACE);
    let mut all: Vec<_> = own.cloned().collect();
    all.sort_by_key(|(resource, _)| order(resource));
    all
}

/// Returns an object and all objects below it in the tree of owners.
fn below(
    cluster: &FakeApiServer,
    of: &(ResourceKind, NamespacedName),
) -> Vec<(ResourceKind, NamespacedName)> {
    let mut all = vec![of.clone()];
    let mut at = 0;
    while let Some(owner) = all.get(at).cloned() {
        at += 1;
        let uid = cluster.objects[&owner]["metadata"]["uid"].clone();
        let is_owned = |it: &Value| it["metadata"]["ownerReferences"][0]["uid"] == uid;
        let of_deployment = |(resource, it): &(ResourceKind, NamespacedName)| {
            let prefix = format!("{}-", owner.1.name);
            owner.0 == ResourceKind::Deployment
                && *resource == ResourceKind::Pod
                && it.name.starts_with(&prefix)
        };
        let owned = cluster.objects.iter().filter(|(key, it)| is_owned(it) || of_deployment(key));
        all.extend(owned.map(|(key, _)| key.clone()));
    }
    all
}

/// Has the writer check every part of these objects, as any event could.
fn look_at_all(cluster: &mut FakeApiServer, of: &[(ResourceKind, NamespacedName)]) {
    for (resource, name) in of {
        for part in [ObjectPart::Object, ObjectPart::Status, ObjectPart::Scale] {
            for event in cluster.write(&ObjectPartKey::new(*resource, part, name.clone())) {
                cluster.step(event);
            }
        }
    }
}

#[test]
fn foreground_deletion_of_any_owner_ends_without_a_write() {
    for by_itself in [false, true] {
        for owner in made(&running(by_itself)) {
            let mut cluster = running(by_itself);
            let all = below(&cluster, &owner);
            delete(&mut cluster, owner.0, &owner.1);
            // The garbage collector marks the objects below, then deletes them from the leaves up.
            for (resource, name) in all.iter().skip(1) {
                delete(&mut cluster, *resource, name);
            }
            cluster.decide(ALL[0], 3);
            let before = cluster.objects.clone();
            for (resource, name) in all.iter().skip(1).rev() {
                cluster.objects.remove(&(*resource, name.clone()));
                cluster.step(ControllerEvent::ObjectObserved(*resource, name.clone(), None));
                look_at_all(&mut cluster, &all);
            }
            let spec = |objects: &BTreeMap<_, Value>| objects[&owner]["spec"].clone();
            assert_eq!(spec(&cluster.objects), spec(&before), "{owner:?}");
            assert_eq!(below(&cluster, &owner), [owner], "nothing below it was made again");
        }
    }
}

#[test]
fn nothing_is_made_under_what_others_keep() {
    // One object waits for a finalizer of another controller; the objects below it are deleted by hand.
    for owner in made(&running(false)) {
        let mut cluster = running(false);
        let all = below(&cluster, &owner);
        delete(&mut cluster, owner.0, &owner.1);
        for (resource, name) in all.iter().skip(1).rev() {
            cluster.objects.remove(&(*resource, name.clone()));
            cluster.step(ControllerEvent::ObjectObserved(*resource, name.clone(), None));
        }
        look_at_all(&mut cluster, &all);
        cluster.now = cluster.now.plus_ms(60_000);
        cluster.step(ControllerEvent::Tick);
        look_at_all(&mut cluster, &all);
        assert_eq!(below(&cluster, &owner), [owner]);
    }
}

/// Orphaning (`--cascade=orphan`): the API server removes the owner references from owned objects, then the owner.
#[test]
fn what_a_deleted_owner_leaves_behind_stands_by_itself() {
    for owner in [ResourceKind::KnativeService, ResourceKind::Configuration] {
        let mut cluster = running(owner == ResourceKind::Configuration);
        let (all, of) = (made(&cluster), (owner, name("hello")));
        let uids = |cluster: &FakeApiServer| -> Vec<Option<Value>> {
            let rest = all.iter().filter(|at| **at != of);
            rest.map(|at| cluster.objects.get(at).map(|it| it["metadata"]["uid"].clone())).collect()
        };
        let (before, served) = (uids(&cluster), serves(&cluster));
        delete(&mut cluster, of.0, &of.1);
        assert_eq!(serves(&cluster), served, "{owner:?}: what it owns is not told to go");
        let owned: Vec<_> = {
            let uid = &cluster.objects[&of]["metadata"]["uid"];
            let is_owned = |it: &Value| it["metadata"]["ownerReferences"][0]["uid"] == *uid;
            cluster
                .objects
                .iter()
                .filter(|(_, it)| is_owned(it))
                .map(|(at, _)| at.clone())
                .collect()
        };
        assert!(!owned.is_empty(), "{owner:?}");
        let by_itself = |cluster: &FakeApiServer, at: &(ResourceKind, NamespacedName)| {
            cluster.objects[at]["metadata"].get("ownerReferences").is_none()
        };
        for at in &owned {
            orphan(&mut cluster, at);
            look_at_all(&mut cluster, &all);
            assert!(by_itself(&cluster, at), "{at:?} is not taken back");
            assert_eq!(serves(&cluster), served, "{owner:?}: {at:?} stands by itself");
        }
        cluster.objects.remove(&of);
        cluster.step(ControllerEvent::ObjectObserved(of.0, of.1.clone(), None));
        look_at_all(&mut cluster, &all);
        assert_eq!(uids(&cluster), before, "{owner:?}: all is there, and nothing was made again");
        assert!(owned.iter().all(|at| by_itself(&cluster, at)), "{owner:?}");
        assert_eq!(serves(&cluster), served, "{owner:?}");
        cluster.decide(ALL[0], 1);
        assert_eq!(serves(&cluster), served, "{owner:?}");
    }
}

/// Removes the owner reference from an object, as the garbage collector does.
fn orphan(cluster: &mut FakeApiServer, at: &(ResourceKind, NamespacedName)) {
    let mut object = cluster.objects[at].clone();
    object["metadata"].as_object_mut().expect("a map").remove("ownerReferences");
    cluster.objects.insert(at.clone(), object.clone());
    cluster.step(ControllerEvent::ObjectObserved(at.0, at.1.clone(), Some(Box::new(object))));
}

/// Returns the targets of the service's requests, and the phases of its pods.
fn serves(cluster: &FakeApiServer) -> (Vec<NamespacedName>, Vec<common::wire::RoutingPhase>) {
    let table = cluster.table();
    let targets = table.services.get(&name("hello")).map(|it| it.targets.iter());
    (targets.into_iter().flatten().map(|it| it.revision.clone()).collect(), phases(cluster))
}

/// A decision made while a Service is being deleted is written once its children have become orphans.
#[test]
fn what_an_orphaned_service_leaves_behind_is_scaled() {
    let mut cluster = running(false);
    let own = name("hello");
    delete(&mut cluster, ResourceKind::KnativeService, &own);
    for resource in [ResourceKind::Configuration, ResourceKind::Route] {
        orphan(&mut cluster, &(resource, own.clone()));
    }
    cluster.decide(ALL[0], 3);
    cluster.objects.remove(&(ResourceKind::KnativeService, own.clone()));
    cluster.step(ControllerEvent::ObjectObserved(ResourceKind::KnativeService, own, None));
    let deployment = cluster.object(ResourceKind::Deployment, "hello-00001-deployment");
    assert_eq!(deployment["spec"]["replicas"], 3);
}

/// A Revision without its Configuration scales as before; one that is deleted with it does not.
#[test]
fn what_an_orphaned_configuration_leaves_behind_is_scaled() {
    for (is_orphaned, replicas) in [(true, 3), (false, 1)] {
        let mut cluster = running(true);
        let own = name("hello");
        delete(&mut cluster, ResourceKind::Configuration, &own);
        if is_orphaned {
            ALL.iter().for_each(|it| orphan(&mut cluster, &(ResourceKind::Revision, name(it))));
        }
        cluster.objects.remove(&(ResourceKind::Configuration, own.clone()));
        cluster.step(ControllerEvent::ObjectObserved(ResourceKind::Configuration, own, None));
        cluster.decide(ALL[0], 3);
        let deployment = cluster.object(ResourceKind::Deployment, "hello-00001-deployment");
        assert_eq!(deployment["spec"]["replicas"], replicas, "orphaned: {is_orphaned}");
    }
}

/// Finalizers of other controllers may keep a Service for any time, and nothing below it is deleted meanwhile.
#[test]
fn children_of_a_service_with_foreign_finalizers_serve_until_deleted() {
    let mut cluster = running(false);
    let served = serves(&cluster);
    assert_eq!(served, (ALL.map(name).to_vec(), vec![common::wire::RoutingPhase::Ready]));
    delete(&mut cluster, ResourceKind::KnativeService, &name("hello"));
    cluster.now = cluster.now.plus_ms(60_000);
    cluster.step(ControllerEvent::Tick);
    assert_eq!(serves(&cluster), served);
    delete(&mut cluster, ResourceKind::Revision, &name(ALL[0]));
    assert_eq!(draining(&cluster), (true, 1));
}

#[test]
fn a_configuration_that_goes_makes_no_revision_of_its_new_generation() {
    let mut cluster = running(true);
    delete(&mut cluster, ResourceKind::Configuration, &name("hello"));
    assert_eq!(cluster.names(ResourceKind::Revision), ALL.map(name));
    // A controller that starts now observes the new generation only.
    cluster.other_replica = None;
    cluster.machine = cluster.other();
    cluster.step(ControllerEvent::LeadershipChanged(true));
    assert_eq!(cluster.names(ResourceKind::Revision), ALL.map(name));
}

#[test]
fn nothing_is_written_in_a_namespace_that_goes() {
    let mut cluster = running(false);
    let space = |going: bool| {
        let mut meta = json!({"name": SPACE});
        if going {
            meta["deletionTimestamp"] = json!("2027-01-15T08:00:00Z");
        }
        let object = json!({"metadata": meta});
        ControllerEvent::ObjectObserved(
            ResourceKind::Namespace,
            NamespacedName::new("", SPACE),
            Some(Box::new(object)),
        )
    };
    cluster.step(space(true));
    let (all, before) = (made(&cluster), cluster.writes);
    for (resource, name) in all.iter().rev().filter(|(it, _)| *it != ResourceKind::KnativeService) {
        cluster.objects.remove(&(*resource, name.clone()));
        cluster.step(ControllerEvent::ObjectObserved(*resource, name.clone(), None));
        look_at_all(&mut cluster, &all);
    }
    assert_eq!(cluster.writes, before);
    // A service of the same name is created afterwards.
    cluster.step(ControllerEvent::ObjectObserved(
        ResourceKind::Namespace,
        NamespacedName::new("", SPACE),
        None,
    ));
    cluster.step(space(false));
    cluster.service("hello", "hello:v2", 1, Value::Null);
    assert!(cluster.objects.contains_key(&(ResourceKind::Configuration, name("hello"))));
}

/// Returns true if every pod is draining in the table, and the number of pods.
fn draining(cluster: &FakeApiServer) -> (bool, usize) {
    let phases = phases(cluster);
    (phases.iter().all(|it| *it == common::wire::RoutingPhase::Draining), phases.len())
}

#[test]
fn pods_of_what_is_gone_drain_until_they_end() {
    for by_itself in [false, true] {
        let owns_revisions =
            [ResourceKind::KnativeService, ResourceKind::Configuration, ResourceKind::Revision];
        let owners = made(&running(by_itself));
        for owner in owners.iter().filter(|it| owns_revisions.contains(&it.0)) {
            let mut cluster = running(by_itself);
            let all = below(&cluster, owner);
            // Owners first, as in a background deletion; the pods take longer to end.
            for (resource, name) in all.iter().filter(|it| it.0 != ResourceKind::Pod) {
                cluster.objects.remove(&(*resource, name.clone()));
                cluster.step(ControllerEvent::ObjectObserved(*resource, name.clone(), None));
            }
            assert_eq!(draining(&cluster), (true, 1), "{owner:?}");
            for (resource, name) in all.iter().filter(|it| it.0 == ResourceKind::Pod) {
                delete(&mut cluster, *resource, name);
                assert_eq!(draining(&cluster), (true, 1), "{owner:?}");
                cluster.objects.remove(&(*resource, name.clone()));
                cluster.step(ControllerEvent::ObjectObserved(*resource, name.clone(), None));
            }
            assert_eq!(cluster.table().pods.len(), 0, "{owner:?}");
        }
    }
}

#[test]
fn a_revision_that_comes_back_under_its_name_leaves_the_old_pods_their_last_requests() {
    let mut cluster = running(false);
    let (old, _) = pods(&cluster).remove(0);
    let revision = (ResourceKind::Revision, name(ALL[0]));
    cluster.objects.remove(&revision);
    // It is its Configuration's newest Revision, so it is created again at once.
    cluster.step(ControllerEvent::ObjectObserved(revision.0, revision.1.clone(), None));
    assert!(cluster.objects.contains_key(&revision));
    let is_old = |(key, _): &(&(ResourceKind, NamespacedName), &Value)| key.1 == old;
    let uid = cluster.objects.iter().find(is_old).map(|(_, it)| it["metadata"]["uid"].clone());
    let uid = uid.expect("the old pod");
    let uid = uid.as_str().expect("a uid");
    let phase = cluster.table().pods.get(uid).map(|it| it.phase);
    assert_eq!(phase, Some(common::wire::RoutingPhase::Draining));
}
