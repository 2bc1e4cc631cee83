//! Numbers of pods: of the user, of the autoscaler, of a HorizontalPodAutoscaler, and of tools.

use common::wire::ScaleDecision;

use super::*;

/// Seconds of the stable window by default.
const WINDOW: u64 = 60;

/// Returns the largest number of pods that the autoscaler may ask for, and the number to which it wakes the workload.
fn policy(api_server: &FakeApiServer) -> (u32, u32) {
    let table = api_server.table();
    let policy = table.revisions[&name("web")].policy.as_ref().expect("a policy");
    (policy.max_scale, policy.activation_scale)
}

/// Lets a HorizontalPodAutoscaler of the user scale the workload.
fn apply_hpa(api_server: &mut FakeApiServer, min_replicas: u32) {
    let target = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"});
    let spec = json!({"scaleTargetRef": target, "minReplicas": min_replicas, "maxReplicas": 9});
    api_server.apply_as_user(ResourceKind::HorizontalPodAutoscaler, "web", spec);
}

#[test]
fn a_workload_sleeps_and_wakes_with_the_number_of_its_user() {
    for resource in [DEPLOYMENT, STATEFUL_SET] {
        let mut api_server = scaled(resource);
        assert_eq!((policy(&api_server), record(&api_server, resource)), ((3, 3), [None, None]));
        api_server.decide("web", 0);
        assert_eq!(phases(&api_server), [RoutingPhase::Draining; 3], "{resource}");
        assert_eq!(replicas(&api_server, resource), 3, "they drain first");
        advance(&mut api_server, 301);
        assert_eq!((replicas(&api_server, resource), phases(&api_server).len()), (0, 0));
        assert_eq!(record(&api_server, resource), recorded(0, 3));
        api_server.decide("web", 3);
        assert_eq!(replicas(&api_server, resource), 3);
        assert_eq!(phases(&api_server), [RoutingPhase::Starting; 3]);
        // The kubelet's readiness is enough, where no agent reports the pods.
        api_server.make_pods_ready();
        assert_eq!(phases(&api_server), [RoutingPhase::Ready; 3]);
        assert_eq!(api_server.replicas_writes, [0_u64, 3], "{resource}");
        assert_eq!(record(&api_server, resource), recorded(3, 3));
    }
}

#[test]
fn load_adds_pods_only_up_to_a_maximum_above_the_number_of_the_user() {
    for (max_scale, wanted, expected) in
        [("", 9, 3), ("2", 9, 3), ("5", 4, 4), ("5", 9, 5), ("0", 9, 9)]
    {
        let mut api_server = scaled(DEPLOYMENT);
        if !max_scale.is_empty() {
            let mut annotations = sleeps();
            annotations["autoscaling.knative.dev/max-scale"] = json!(max_scale);
            apply_service(&mut api_server, "web", annotations, service_spec("web"));
        }
        api_server.decide("web", wanted);
        assert_eq!(replicas(&api_server, DEPLOYMENT), expected, "{max_scale:?} {wanted}");
        fall_asleep(&mut api_server);
        let user = &record(&api_server, DEPLOYMENT)[1];
        assert_eq!(user.as_deref(), Some("3"), "that number is not the user's");
    }
}

/// The autoscaler decides 1 for `min-scale: 1`, without scale to zero, and in the rest of a stable window.
#[test]
fn no_decision_but_sleep_takes_pods_of_the_user_away() {
    for resource in [DEPLOYMENT, STATEFUL_SET] {
        let mut api_server = scaled(resource);
        for wanted in [2, 1] {
            api_server.decide("web", wanted);
            assert_eq!(phases(&api_server), [RoutingPhase::Ready; 3], "{resource} {wanted}");
        }
        advance(&mut api_server, 301);
        assert_eq!(api_server.replicas_writes, [0_u64; 0]);
        fall_asleep(&mut api_server);
        api_server.decide("web", 1);
        assert_eq!(api_server.replicas_writes, [0_u64, 3], "{resource}");
    }
    let mut api_server = grown(DEPLOYMENT);
    api_server.decide("web", 1);
    advance(&mut api_server, 301);
    assert_eq!(api_server.replicas_writes, [5_u64, 3], "only those for load leave");
}

#[test]
fn a_workload_that_does_not_grow_falls_asleep_in_one_step() {
    let rate = |api_server: &FakeApiServer| {
        let table = api_server.table();
        table.revisions[&name("web")].policy.as_ref().map(|it| it.max_scale_down_rate)
    };
    let mut api_server = scaled(DEPLOYMENT);
    assert!(rate(&api_server) > Some(1000.0), "from any number, the next one is zero");
    let mut annotations = sleeps();
    annotations["autoscaling.knative.dev/max-scale"] = json!("9");
    apply_service(&mut api_server, "web", annotations, service_spec("web"));
    assert!(rate(&api_server) < Some(1000.0), "pods that load has added leave step by step");
}

#[test]
fn the_pods_that_have_drained_are_those_that_leave() {
    let mut api_server = grown(DEPLOYMENT);
    api_server.decide("web", 4);
    let all = api_server.table().pods;
    let drains = |pod: &&common::wire::PodEntry| pod.phase == RoutingPhase::Draining;
    let leaving: Vec<String> = all.values().filter(drains).map(|it| it.name.clone()).collect();
    assert_eq!(leaving.len(), 1);
    advance(&mut api_server, 301);
    assert_eq!(replicas(&api_server, DEPLOYMENT), 4);
    assert!(!api_server.user_pods().contains(&leaving[0]));
}

#[test]
fn the_pods_of_a_stateful_set_with_the_highest_ordinals_drain() {
    let mut api_server = grown(STATEFUL_SET);
    let [ready, draining] = [RoutingPhase::Ready, RoutingPhase::Draining];
    api_server.decide("web", 3);
    assert_eq!(phases(&api_server), [ready, ready, ready, draining, draining]);
    api_server.decide("web", 4);
    assert_eq!(phases(&api_server), [ready, ready, ready, ready, draining]);
    advance(&mut api_server, 301);
    assert_eq!(api_server.user_pods(), ["web-0", "web-1", "web-2", "web-3"]);
    fall_asleep(&mut api_server);
    assert_eq!(replicas(&api_server, STATEFUL_SET), 0);
}

#[test]
fn a_number_that_the_user_writes_while_the_workload_is_awake_is_kept() {
    for number in [5, 2] {
        let mut api_server = scaled(DEPLOYMENT);
        api_server.decide("web", 3);
        api_server.scale_as_user(DEPLOYMENT, "web", number);
        api_server.make_pods_ready();
        assert_eq!(policy(&api_server), (number, number));
        // The autoscaler follows that policy a moment later.
        api_server.decide("web", number);
        advance(&mut api_server, WINDOW + 1);
        assert_eq!(api_server.replicas_writes, [0_u64; 0]);
        fall_asleep(&mut api_server);
        assert_eq!(record(&api_server, DEPLOYMENT), recorded(0, number));
        api_server.decide("web", number);
        assert_eq!(replicas(&api_server, DEPLOYMENT), u64::from(number));
        // The decision stays below it.
        api_server.scale_as_user(DEPLOYMENT, "web", number + 1);
        advance(&mut api_server, WINDOW + 1);
        assert_eq!(replicas(&api_server, DEPLOYMENT), u64::from(number + 1));
        assert_eq!(policy(&api_server).0, number + 1, "the next wake is to the new number");
    }
}

#[test]
fn a_number_that_the_user_writes_while_pods_drain_lets_them_serve() {
    let mut api_server = scaled(DEPLOYMENT);
    // The first sleep leaves a record, by which later numbers of other clients are known.
    fall_asleep(&mut api_server);
    api_server.decide("web", 3);
    api_server.make_pods_ready();
    api_server.decide("web", 0);
    api_server.scale_as_user(DEPLOYMENT, "web", 4);
    api_server.make_pods_ready();
    assert_eq!(phases(&api_server), [RoutingPhase::Ready; 4]);
    advance(&mut api_server, WINDOW - 1);
    assert_eq!(phases(&api_server), [RoutingPhase::Ready; 4]);
    advance(&mut api_server, 2);
    assert_eq!(phases(&api_server), [RoutingPhase::Draining; 4], "nothing asks for them");
    advance(&mut api_server, 301);
    assert_eq!(record(&api_server, DEPLOYMENT), recorded(0, 4));
    assert_eq!(api_server.replicas_writes, [0_u64, 3, 4, 0], "4 is written with its record");
}

#[test]
fn a_number_that_the_user_writes_while_the_workload_sleeps_wakes_it() {
    for resource in [DEPLOYMENT, STATEFUL_SET] {
        let mut api_server = asleep(resource);
        api_server.scale_as_user(resource, "web", 2);
        api_server.make_pods_ready();
        assert_eq!(phases(&api_server), [RoutingPhase::Ready; 2]);
        advance(&mut api_server, WINDOW - 1);
        assert_eq!(replicas(&api_server, resource), 2);
        advance(&mut api_server, 2);
        advance(&mut api_server, 301);
        assert_eq!(record(&api_server, resource), recorded(0, 2));
        assert_eq!(api_server.replicas_writes, [0_u64, 2, 0], "2 is written with its record");
    }
}

#[test]
fn a_number_that_the_user_writes_while_the_workload_wakes_is_kept() {
    let mut api_server = asleep(DEPLOYMENT);
    api_server.decide("web", 3);
    api_server.scale_as_user(DEPLOYMENT, "web", 1);
    api_server.make_pods_ready();
    assert_eq!((replicas(&api_server, DEPLOYMENT), policy(&api_server)), (1, (1, 1)));
    assert_eq!(record(&api_server, DEPLOYMENT), recorded(1, 1));
    assert_eq!(api_server.replicas_writes, [0_u64, 3, 1]);
}

#[test]
fn a_zero_of_the_user_is_no_number_to_wake_to() {
    let mut api_server = scaled(DEPLOYMENT);
    api_server.scale_as_user(DEPLOYMENT, "web", 0);
    assert_eq!(replicas(&api_server, DEPLOYMENT), 0, "nothing asks for pods");
    api_server.decide("web", 3);
    assert_eq!(record(&api_server, DEPLOYMENT), recorded(3, 3));
    // As long as requests ask for pods, they get them.
    api_server.scale_as_user(DEPLOYMENT, "web", 0);
    assert_eq!(replicas(&api_server, DEPLOYMENT), 3);
    // A workload that never ran has no number of its user.
    let mut api_server = FakeApiServer::new();
    api_server.apply_workload(DEPLOYMENT, "web", &workload_spec("web", 0));
    apply_service(&mut api_server, "web", sleeps(), service_spec("web"));
    api_server.decide("web", 1);
    assert_eq!(record(&api_server, DEPLOYMENT), recorded(1, 1));
}

#[test]
fn the_number_before_a_zero_of_the_user_is_the_one_to_wake_to() {
    for is_awake in [false, true] {
        let mut api_server = asleep(DEPLOYMENT);
        if is_awake {
            api_server.decide("web", 3);
            api_server.make_pods_ready();
            api_server.step(ControllerEvent::DecisionWithdrawn(name("web")));
        }
        api_server.scale_as_user(DEPLOYMENT, "web", 5);
        api_server.scale_as_user(DEPLOYMENT, "web", 0);
        assert_eq!((replicas(&api_server, DEPLOYMENT), policy(&api_server)), (0, (5, 5)));
        api_server.decide("web", 5);
        assert_eq!(record(&api_server, DEPLOYMENT), recorded(5, 5), "{is_awake}");
    }
}

#[test]
fn a_number_that_the_controller_has_not_observed_is_not_overwritten() {
    let mut api_server = asleep(DEPLOYMENT);
    let at = (DEPLOYMENT, name("web"));
    let object = api_server.objects.get_mut(&at).expect("the workload");
    object["spec"]["replicas"] = json!(5);
    object["metadata"]["resourceVersion"] = json!("later");
    let object = object.clone();
    api_server.decide("web", 3);
    assert_eq!((replicas(&api_server, DEPLOYMENT), api_server.conflicts > 0), (5, true));
    let (resource, object) = (DEPLOYMENT, Some(Box::new(object)));
    api_server.step(ControllerEvent::ObjectObserved { resource, name: at.1, object });
    assert_eq!((replicas(&api_server, DEPLOYMENT), policy(&api_server)), (5, (5, 5)));
}

#[test]
fn a_rollout_changes_nothing_but_the_pods() {
    let restart = |api_server: &mut FakeApiServer, at: &str| {
        let mut template = workload_spec("web", 3)["template"].clone();
        template["metadata"]["annotations"] = json!({"kubectl.kubernetes.io/restartedAt": at});
        api_server.apply_workload(DEPLOYMENT, "web", &json!({"template": template}));
    };
    let mut api_server = scaled(DEPLOYMENT);
    api_server.decide("web", 3);
    let before = api_server.user_pods();
    restart(&mut api_server, "1");
    api_server.make_pods_ready();
    assert!(api_server.user_pods().iter().all(|it| !before.contains(it)));
    assert_eq!(phases(&api_server), [RoutingPhase::Ready; 3]);
    fall_asleep(&mut api_server);
    restart(&mut api_server, "2");
    assert_eq!((replicas(&api_server, DEPLOYMENT), phases(&api_server).len()), (0, 0));
    api_server.decide("web", 3);
    api_server.make_pods_ready();
    assert_eq!(phases(&api_server), [RoutingPhase::Ready; 3]);
    assert_eq!(api_server.replicas_writes, [0_u64, 3]);
}

/// Kubernetes has more pods than requested for a while. None of them is surplus.
#[test]
fn pods_that_a_rollout_adds_serve_and_those_that_it_ends_drain() {
    let mut api_server = scaled(DEPLOYMENT);
    api_server.decide("web", 3);
    let ended = api_server.user_pods().swap_remove(0);
    api_server.change_object(ResourceKind::Pod, &ended, |it| {
        it["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    });
    assert_eq!(count_phase(&api_server, RoutingPhase::Draining), 1);
    let mut added = api_server.object(ResourceKind::Pod, &ended).clone();
    added["metadata"].as_object_mut().expect("metadata").remove("deletionTimestamp");
    for number in 1..3 {
        added["metadata"]["name"] = json!(format!("web-surge-{number}"));
        added["metadata"]["uid"] = json!(format!("surge-{number}"));
        let pod = name(&format!("web-surge-{number}"));
        api_server.objects.insert((ResourceKind::Pod, pod.clone()), added.clone());
        let (resource, object) = (ResourceKind::Pod, Some(Box::new(added.clone())));
        api_server.step(ControllerEvent::ObjectObserved { resource, name: pod, object });
    }
    assert_eq!(count_phase(&api_server, RoutingPhase::Ready), 4, "one more than requested");
    assert_eq!(api_server.replicas_writes, [0_u64; 0]);
}

#[test]
fn a_horizontal_pod_autoscaler_keeps_the_number_of_a_workload_that_is_awake() {
    let mut api_server = asleep(DEPLOYMENT);
    apply_hpa(&mut api_server, 2);
    assert_eq!(api_server.replicas_writes, [0_u64], "it pauses at zero");
    api_server.decide("web", 1);
    assert_eq!(replicas(&api_server, DEPLOYMENT), 2, "its own minimum");
    let table = api_server.table();
    let rate = table.revisions[&name("web")].policy.as_ref().map(|it| it.max_scale_down_rate);
    assert!(rate > Some(1000.0), "{rate:?}: from any number, the next one is zero");
    // That autoscaler counts otherwise.
    api_server.scale_as_user(DEPLOYMENT, "web", 7);
    for wanted in [1, 3] {
        api_server.decide("web", wanted);
        advance(&mut api_server, WINDOW + 1);
        assert_eq!(replicas(&api_server, DEPLOYMENT), 7, "{wanted}");
    }
    fall_asleep(&mut api_server);
    assert_eq!(record(&api_server, DEPLOYMENT), recorded(0, 3), "7 is no wish of the user");
    assert_eq!(api_server.replicas_writes, [0_u64, 2, 0]);
    api_server.delete_as_user(ResourceKind::HorizontalPodAutoscaler, "web");
    api_server.decide("web", 3);
    assert_eq!(replicas(&api_server, DEPLOYMENT), 3, "the user's again");
}

/// A HorizontalPodAutoscaler would add pods again for those that leave before the last one.
#[test]
fn with_a_horizontal_pod_autoscaler_all_pods_leave_at_once() {
    for (has_hpa, writes) in [(false, vec![3_u64, 0]), (true, vec![0])] {
        let mut api_server = scaled(DEPLOYMENT);
        if has_hpa {
            apply_hpa(&mut api_server, 2);
        }
        // The new pod has never been ready, so it has nothing to drain.
        api_server.scale_as_user(DEPLOYMENT, "web", 4);
        advance(&mut api_server, PROGRESS_DEADLINE + 1);
        fall_asleep(&mut api_server);
        assert_eq!(api_server.replicas_writes, writes, "{has_hpa}");
    }
}

#[test]
fn a_horizontal_pod_autoscaler_may_come_and_go_while_the_workload_is_awake() {
    let mut api_server = scaled(DEPLOYMENT);
    api_server.decide("web", 3);
    apply_hpa(&mut api_server, 1);
    api_server.scale_as_user(DEPLOYMENT, "web", 6);
    api_server.decide("web", 2);
    assert_eq!(replicas(&api_server, DEPLOYMENT), 6);
    api_server.delete_as_user(ResourceKind::HorizontalPodAutoscaler, "web");
    api_server.make_pods_ready();
    api_server.decide("web", 0);
    assert_eq!(phases(&api_server), [RoutingPhase::Ready; 6], "it is kept for a while");
    advance(&mut api_server, WINDOW + 1);
    advance(&mut api_server, 301);
    assert_eq!(replicas(&api_server, DEPLOYMENT), 0, "now the decision counts");
    assert_eq!(policy(&api_server), (6, 6), "the last number of another client");
}

/// Lets the workload fall asleep once the number of another client is no longer kept.
fn fall_asleep_after_window(api_server: &mut FakeApiServer) {
    advance(api_server, WINDOW + 1);
    api_server.decide("web", 0);
    advance(api_server, 1);
    api_server.report_all_drained();
    assert_eq!(replicas(api_server, DEPLOYMENT), 0);
}

/// On a busy node, pods may start for longer than a window.
#[test]
fn a_number_that_wakes_the_workload_is_kept_for_a_window_once_its_pods_are_ready() {
    let mut api_server = asleep(DEPLOYMENT);
    api_server.scale_as_user(DEPLOYMENT, "web", 3);
    advance(&mut api_server, WINDOW + 1);
    api_server.decide("web", 0);
    assert_eq!(replicas(&api_server, DEPLOYMENT), 3, "they start");
    api_server.make_pods_ready();
    advance(&mut api_server, WINDOW - 1);
    assert_eq!(replicas(&api_server, DEPLOYMENT), 3, "they serve");
    fall_asleep_after_window(&mut api_server);
}

#[test]
fn a_tool_whose_pods_get_requests_each_time_does_not_end_the_sleep() {
    let mut api_server = asleep(DEPLOYMENT);
    for round in 1..=4 {
        assert_eq!(ready(&api_server), "False NoTraffic", "{round}");
        api_server.scale_as_user(DEPLOYMENT, "web", 3);
        api_server.make_pods_ready();
        let loaded = ScaleDecision { stable_load: 0.5, ..decision("web", 3) };
        api_server.step(ControllerEvent::DecisionReceived(loaded));
        fall_asleep_after_window(&mut api_server);
    }
    assert_eq!(events(&api_server), [""; 0]);
}

#[test]
fn a_tool_that_restores_the_number_again_and_again_ends_the_sleep() {
    let mut api_server = asleep(DEPLOYMENT);
    for round in 1..=3 {
        assert_eq!(ready(&api_server), "False NoTraffic", "{round}");
        api_server.scale_as_user(DEPLOYMENT, "web", 3);
        api_server.make_pods_ready();
        // The autoscaler also keeps pods for a while that no request has asked for.
        api_server.decide("web", 1);
        if round < 3 {
            fall_asleep_after_window(&mut api_server);
        }
    }
    assert_eq!(ready(&api_server), "False ReplicasManaged");
    assert_eq!(events(&api_server), ["ReplicasManaged"]);
    advance(&mut api_server, WINDOW + 1);
    advance(&mut api_server, 301);
    assert_eq!((replicas(&api_server, DEPLOYMENT), phases(&api_server).len()), (3, 3));
    // The user corrects the manifest and sets the annotation again.
    apply_service(&mut api_server, "web", json!({}), service_spec("web"));
    apply_service(&mut api_server, "web", sleeps(), service_spec("web"));
    fall_asleep(&mut api_server);
    assert_eq!((replicas(&api_server, DEPLOYMENT), events(&api_server).len()), (0, 1));
}

#[test]
fn a_zero_of_the_user_stays_although_a_tool_has_managed_the_number() {
    let mut api_server = asleep(DEPLOYMENT);
    for _ in 0..3 {
        api_server.scale_as_user(DEPLOYMENT, "web", 3);
        api_server.make_pods_ready();
        advance(&mut api_server, WINDOW + 1);
        advance(&mut api_server, 1);
        api_server.report_all_drained();
    }
    assert_eq!(ready(&api_server), "False ReplicasManaged");
    assert_eq!(replicas(&api_server, DEPLOYMENT), 3);
    api_server.scale_as_user(DEPLOYMENT, "web", 0);
    assert_eq!(replicas(&api_server, DEPLOYMENT), 0);
    api_server.decide("web", 3);
    assert_eq!(replicas(&api_server, DEPLOYMENT), 3, "requests wake it");
}

#[test]
fn requests_between_the_wakes_of_a_tool_show_that_it_is_none() {
    let mut api_server = asleep(DEPLOYMENT);
    for _ in 0..4 {
        api_server.scale_as_user(DEPLOYMENT, "web", 3);
        api_server.decide("web", 3);
        api_server.make_pods_ready();
        advance(&mut api_server, WINDOW + 1);
        fall_asleep(&mut api_server);
        assert_eq!(replicas(&api_server, DEPLOYMENT), 0);
    }
    assert_eq!(events(&api_server), [""; 0]);
}
