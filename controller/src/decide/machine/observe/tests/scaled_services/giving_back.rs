//! Ends of scaled Services: everything of the user's is as it was, in whatever order objects go.

use super::*;

/// Returns true if nothing of Rouse is left: no object, no entry of the RouteTable, no state.
fn is_forgotten(api_server: &FakeApiServer) -> bool {
    let table = api_server.table();
    let objects =
        [(ResourceKind::PodAutoscaler, "web"), (ResourceKind::EndpointSlice, "web-rouse")];
    table.services.is_empty()
        && table.revisions.is_empty()
        && table.pods.is_empty()
        && api_server.machine.cluster().apps.is_empty()
        && api_server.machine.cluster().allocated.ports.is_empty()
        && !objects.iter().any(|(resource, it)| exists(api_server, *resource, it))
}

fn remove_annotation(api_server: &mut FakeApiServer) {
    apply_service(api_server, "web", json!({}), service_spec("web"));
}

#[test]
fn without_its_annotation_an_awake_service_is_as_before() {
    let mut api_server = scaled(DEPLOYMENT);
    api_server.decide("web", 3);
    remove_annotation(&mut api_server);
    assert!(is_forgotten(&api_server));
    assert_eq!(api_server.replicas_writes, [0_u64; 0]);
    // A workload that has slept before has a record.
    let mut api_server = asleep(DEPLOYMENT);
    api_server.decide("web", 3);
    api_server.make_pods_ready();
    remove_annotation(&mut api_server);
    assert!(is_forgotten(&api_server));
    let now = (replicas(&api_server, DEPLOYMENT), record(&api_server, DEPLOYMENT));
    assert_eq!(now, (3, [None, None]));
}

/// Requests that wait in that moment get a pod, too.
#[test]
fn without_its_annotation_a_sleeping_service_is_served_until_a_pod_is_ready() {
    for resource in [DEPLOYMENT, STATEFUL_SET] {
        let mut api_server = asleep(resource);
        remove_annotation(&mut api_server);
        assert_eq!(
            (replicas(&api_server, resource), record(&api_server, resource)),
            (3, [None, None])
        );
        assert!(port_entry(&api_server, 80).is_some() && leads_to_activators(&api_server));
        // A decision has no effect on what is the user's again.
        api_server.decide("web", 1);
        assert_eq!(replicas(&api_server, resource), 3);
        api_server.make_pods_ready();
        assert!(is_forgotten(&api_server), "{resource}");
        assert_eq!(api_server.replicas_writes, [0_u64], "the record is gone with the number");
    }
}

#[test]
fn a_release_ends_although_no_pod_becomes_ready() {
    let mut api_server = asleep(DEPLOYMENT);
    remove_annotation(&mut api_server);
    advance(&mut api_server, 590);
    assert!(port_entry(&api_server, 80).is_some());
    advance(&mut api_server, 20);
    assert!(is_forgotten(&api_server));
    assert_eq!(replicas(&api_server, DEPLOYMENT), 3);
}

/// While pods drain, some may have left before the others.
#[test]
fn a_workload_with_fewer_pods_than_its_user_wants_gets_the_others_again() {
    for resource in [DEPLOYMENT, STATEFUL_SET] {
        for is_deleted in [false, true] {
            let mut api_server = scaled(resource);
            // The new pod has never been ready, so it has nothing to drain.
            api_server.scale_as_user(resource, "web", 4);
            advance(&mut api_server, PROGRESS_DEADLINE + 1);
            api_server.decide("web", 0);
            assert_eq!(record(&api_server, resource), recorded(3, 4));
            if is_deleted {
                api_server.delete_as_user(ResourceKind::Service, "web");
            } else {
                remove_annotation(&mut api_server);
            }
            let now = (replicas(&api_server, resource), record(&api_server, resource));
            assert_eq!(now, (4, [None, None]), "{resource} {is_deleted}");
        }
    }
}

#[test]
fn a_number_that_a_horizontal_pod_autoscaler_keeps_is_given_back_as_it_is() {
    let mut api_server = asleep(DEPLOYMENT);
    let target = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"});
    let spec = json!({"scaleTargetRef": target, "minReplicas": 2, "maxReplicas": 9});
    api_server.apply_as_user(ResourceKind::HorizontalPodAutoscaler, "web", spec);
    api_server.decide("web", 1);
    assert_eq!(record(&api_server, DEPLOYMENT), recorded(2, 3));
    api_server.make_pods_ready();
    remove_annotation(&mut api_server);
    let now = (replicas(&api_server, DEPLOYMENT), record(&api_server, DEPLOYMENT));
    assert_eq!(now, (2, [None, None]));
}

#[test]
fn a_workload_that_its_user_has_stopped_stays_so() {
    for wakes_by_request in [true, false] {
        let mut api_server = asleep(DEPLOYMENT);
        if wakes_by_request {
            api_server.decide("web", 3);
        } else {
            api_server.scale_as_user(DEPLOYMENT, "web", 5);
        }
        api_server.make_pods_ready();
        api_server.step(ControllerEvent::DecisionWithdrawn(name("web")));
        api_server.scale_as_user(DEPLOYMENT, "web", 0);
        remove_annotation(&mut api_server);
        assert!(is_forgotten(&api_server), "{wakes_by_request}");
        let now = (replicas(&api_server, DEPLOYMENT), record(&api_server, DEPLOYMENT));
        assert_eq!(now, (0, [None, None]), "{wakes_by_request}");
    }
}

#[test]
fn an_annotation_that_is_set_again_during_the_release_ends_it() {
    let mut api_server = asleep(DEPLOYMENT);
    let port = port_entry(&api_server, 80).expect("its port").activator_port;
    remove_annotation(&mut api_server);
    apply_service(&mut api_server, "web", sleeps(), service_spec("web"));
    api_server.make_pods_ready();
    assert_eq!(port_entry(&api_server, 80).expect("its port").activator_port, port);
    assert_eq!(ready(&api_server), "False NoTraffic", "the decision is the last one");
    fall_asleep(&mut api_server);
    assert_eq!(record(&api_server, DEPLOYMENT), recorded(0, 3));
}

#[test]
fn a_deleted_service_gives_its_workload_back_at_once() {
    for resource in [DEPLOYMENT, STATEFUL_SET] {
        let mut api_server = asleep(resource);
        api_server.delete_as_user(ResourceKind::Service, "web");
        assert!(is_forgotten(&api_server), "{resource}");
        assert_eq!(
            (replicas(&api_server, resource), record(&api_server, resource)),
            (3, [None, None])
        );
    }
    let mut api_server = scaled(DEPLOYMENT);
    api_server.decide("web", 0);
    api_server.delete_as_user(ResourceKind::Service, "web");
    assert!(is_forgotten(&api_server));
    assert_eq!(replicas(&api_server, DEPLOYMENT), 3, "while its pods drained");
    let draining = |pod: &String| {
        let pod = api_server.object(ResourceKind::Pod, pod);
        pod["metadata"]["annotations"].get(key::DRAINING).is_some()
    };
    assert!(!api_server.user_pods().iter().any(draining), "they go on");
}

#[test]
fn a_deleted_workload_takes_its_pod_autoscaler_along_and_another_one_takes_its_place() {
    let mut api_server = asleep(DEPLOYMENT);
    let port = port_entry(&api_server, 80).expect("its port").activator_port;
    api_server.delete_as_user(DEPLOYMENT, "web");
    assert!(!exists(&api_server, ResourceKind::PodAutoscaler, "web"));
    assert!(port_entry(&api_server, 80).is_some(), "it may be made again in a moment");
    api_server.apply_workload(DEPLOYMENT, "web", &workload_spec("web", 2));
    api_server.make_pods_ready();
    assert_eq!(port_entry(&api_server, 80).expect("its port").activator_port, port);
    assert_eq!(events(&api_server), [""; 0]);
    fall_asleep(&mut api_server);
    assert_eq!(record(&api_server, DEPLOYMENT), recorded(0, 2), "of the new workload");
    api_server.delete_as_user(DEPLOYMENT, "web");
    advance(&mut api_server, 6);
    assert_eq!(
        (events(&api_server), ready(&api_server)),
        (vec!["NoWorkload"], "False NoWorkload".into())
    );
    assert!(api_server.table().services.is_empty());
    api_server.delete_as_user(ResourceKind::Service, "web");
    assert!(is_forgotten(&api_server));
}

#[test]
fn a_deleted_pod_autoscaler_is_made_again_with_the_same_ports() {
    for is_asleep in [false, true] {
        let mut api_server = scaled(DEPLOYMENT);
        if is_asleep {
            fall_asleep(&mut api_server);
        }
        let before = api_server.table();
        api_server.delete_as_user(ResourceKind::PodAutoscaler, "web");
        assert!(exists(&api_server, ResourceKind::PodAutoscaler, "web"));
        assert_eq!(differences(&api_server.table(), &before), [""; 0]);
        let number = if is_asleep { 0 } else { 3 };
        assert_eq!(replicas(&api_server, DEPLOYMENT), number);
    }
}

#[test]
fn everything_may_go_in_any_order() {
    let all = [
        (ResourceKind::Service, "web"),
        (DEPLOYMENT, "web"),
        (ResourceKind::PodAutoscaler, "web"),
        (ResourceKind::EndpointSlice, "web-rouse"),
    ];
    for first in 0..all.len() {
        for second in 0..all.len() {
            let mut api_server = asleep(DEPLOYMENT);
            let order = [first, second].into_iter().chain(0..all.len());
            for (resource, object) in order.map(|at| all[at]) {
                api_server.delete_as_user(resource, object);
            }
            advance(&mut api_server, 6);
            // What the controller has made again meanwhile has gone with its owners.
            assert!(is_forgotten(&api_server), "{first} {second}");
        }
    }
}

#[test]
fn another_selector_means_another_workload() {
    let mut api_server = asleep(DEPLOYMENT);
    api_server.apply_workload(DEPLOYMENT, "next", &workload_spec("next", 2));
    api_server.make_pods_ready();
    apply_service(&mut api_server, "web", sleeps(), service_spec("next"));
    let now = (replicas(&api_server, DEPLOYMENT), record(&api_server, DEPLOYMENT));
    assert_eq!(now, (3, [None, None]), "the former one is given back");
    let autoscaler = api_server.object(ResourceKind::PodAutoscaler, "web");
    assert_eq!(autoscaler["spec"]["scaleTargetRef"]["name"], "next");
    let names: BTreeSet<String> = api_server.table().pods.into_values().map(|it| it.name).collect();
    assert_eq!(names.len(), 2);
    assert!(names.iter().all(|it| it.starts_with("next-")), "{names:?}");
    assert_eq!(events(&api_server), [""; 0]);
    advance(&mut api_server, 301);
    let next = api_server.object(DEPLOYMENT, "next");
    assert_eq!(next["spec"]["replicas"], 0, "the last decision is about the Service");
}
