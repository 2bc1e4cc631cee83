//! Restarts, changes of the leader, and observations in any order.

use super::*;

/// Starts both replicas again, and makes one of them the leader. No agent has reported to them yet.
fn restart(api_server: &mut FakeApiServer) {
    let [leader, other] = [api_server.start_replica(), api_server.start_replica()];
    (api_server.machine, api_server.other_replica) = (leader, Some(other));
    api_server.step(ControllerEvent::LeadershipChanged(true));
}

/// Makes the other replica the leader; the former one has ended.
fn change_leader(api_server: &mut FakeApiServer) {
    api_server.machine = api_server.other_replica.take().expect("another replica");
    api_server.step(ControllerEvent::LeadershipChanged(true));
}

/// Returns the number of writes to the API server that `change` causes.
fn writes_of(api_server: &mut FakeApiServer, change: impl FnOnce(&mut FakeApiServer)) -> usize {
    let before = api_server.writes;
    change(api_server);
    api_server.writes - before
}

#[test]
fn a_controller_that_starts_while_the_workload_sleeps_writes_nothing_and_wakes_it() {
    for resource in [DEPLOYMENT, STATEFUL_SET] {
        let mut api_server = asleep(resource);
        let before = api_server.table();
        assert_eq!(writes_of(&mut api_server, restart), 0, "{resource}");
        assert_eq!(differences(&api_server.table(), &before), [""; 0]);
        assert_eq!(replicas(&api_server, resource), 0, "no decision wakes it");
        api_server.decide("web", 3);
        assert_eq!(replicas(&api_server, resource), 3);
    }
}

#[test]
fn a_controller_that_starts_while_the_workload_is_awake_keeps_its_number() {
    let mut api_server = asleep(DEPLOYMENT);
    allow_five_pods(&mut api_server);
    api_server.decide("web", 4);
    api_server.make_pods_ready();
    advance(&mut api_server, 6);
    let before = api_server.table();
    assert_eq!(writes_of(&mut api_server, restart), 0);
    assert_eq!(differences(&api_server.table(), &before), [""; 0]);
    api_server.decide("web", 5);
    assert_eq!(record(&api_server, DEPLOYMENT), recorded(5, 3), "3 is the user's number");
}

#[test]
fn a_number_written_while_no_controller_runs_is_the_users() {
    let mut api_server = asleep(DEPLOYMENT);
    // These controllers do not know the Service.
    (api_server.machine, api_server.other_replica) = (machine(), Some(machine()));
    api_server.scale_as_user(DEPLOYMENT, "web", 4);
    restart(&mut api_server);
    assert_eq!(replicas(&api_server, DEPLOYMENT), 4);
    api_server.make_pods_ready();
    advance(&mut api_server, 61);
    fall_asleep(&mut api_server);
    assert_eq!(record(&api_server, DEPLOYMENT), recorded(0, 4));
}

/// Without the record of 5, the 0 would look like a sleep from 3 pods.
#[test]
fn a_controller_that_starts_knows_the_number_before_a_zero_of_the_user() {
    let mut api_server = asleep(DEPLOYMENT);
    api_server.scale_as_user(DEPLOYMENT, "web", 5);
    assert_eq!(record(&api_server, DEPLOYMENT), recorded(5, 5));
    api_server.scale_as_user(DEPLOYMENT, "web", 0);
    restart(&mut api_server);
    assert_eq!(replicas(&api_server, DEPLOYMENT), 0);
    api_server.decide("web", 1);
    assert_eq!(replicas(&api_server, DEPLOYMENT), 5);
}

#[test]
fn a_new_leader_lets_draining_pods_go_on_draining() {
    let mut api_server = scaled(DEPLOYMENT);
    api_server.decide("web", 0);
    let before = api_server.table();
    change_leader(&mut api_server);
    assert_eq!(differences(&api_server.table(), &before), [""; 0]);
    assert_eq!(phases(&api_server), [RoutingPhase::Draining; 3]);
    advance(&mut api_server, 301);
    assert_eq!(record(&api_server, DEPLOYMENT), recorded(0, 3));
}

#[test]
fn a_new_leader_keeps_the_ports_and_the_condition() {
    let mut api_server = asleep(DEPLOYMENT);
    let port =
        |api_server: &FakeApiServer| port_entry(api_server, 80).expect("its port").activator_port;
    let before = port(&api_server);
    assert_eq!(writes_of(&mut api_server, change_leader), 0);
    assert_eq!((port(&api_server), ready(&api_server)), (before, "False NoTraffic".into()));
}

#[test]
fn a_controller_that_starts_knows_that_a_tool_manages_the_number() {
    let mut api_server = asleep(DEPLOYMENT);
    for _ in 0..3 {
        api_server.scale_as_user(DEPLOYMENT, "web", 3);
        api_server.make_pods_ready();
        advance(&mut api_server, 61);
        advance(&mut api_server, 1);
        api_server.report_all_drained();
    }
    assert_eq!((ready(&api_server), replicas(&api_server, DEPLOYMENT)), (managed(), 3));
    restart(&mut api_server);
    api_server.decide("web", 0);
    advance(&mut api_server, 61);
    advance(&mut api_server, 301);
    assert_eq!((ready(&api_server), replicas(&api_server, DEPLOYMENT)), (managed(), 3));
    assert_eq!(events(&api_server), ["ReplicasManaged"], "it is recorded once");
}

fn managed() -> String {
    "False ReplicasManaged".into()
}

#[test]
fn a_controller_that_starts_records_no_refusal_again() {
    let mut api_server = FakeApiServer::new();
    apply_service(&mut api_server, "web", sleeps(), service_spec("web"));
    advance(&mut api_server, 6);
    assert_eq!(
        (ready(&api_server), events(&api_server)),
        ("False NoWorkload".into(), vec!["NoWorkload"])
    );
    assert_eq!(writes_of(&mut api_server, restart), 0);
    advance(&mut api_server, 6);
    assert_eq!((ready(&api_server), events(&api_server).len()), ("False NoWorkload".into(), 1));
}

/// While no controller ran, the user has taken the annotation away.
#[test]
fn a_controller_that_starts_gives_back_what_no_service_wants_any_more() {
    for is_deleted in [false, true] {
        let mut api_server = asleep(DEPLOYMENT);
        (api_server.machine, api_server.other_replica) = (machine(), Some(machine()));
        if is_deleted {
            api_server.delete_as_user(ResourceKind::Service, "web");
        } else {
            apply_service(&mut api_server, "web", json!({}), service_spec("web"));
        }
        restart(&mut api_server);
        assert_eq!(replicas(&api_server, DEPLOYMENT), 3, "{is_deleted}");
        assert_eq!(record(&api_server, DEPLOYMENT), [None, None]);
        assert!(!exists(&api_server, ResourceKind::PodAutoscaler, "web"));
        assert!(!leads_to_activators(&api_server));
        assert!(api_server.machine.cluster().apps.is_empty());
    }
}

/// Returns clusters in the states in which a replica may start.
fn states() -> Vec<FakeApiServer> {
    let mut waking = asleep(STATEFUL_SET);
    waking.decide("web", 2);
    let mut refused = FakeApiServer::new();
    apply_service(&mut refused, "web", sleeps(), service_spec("web"));
    advance(&mut refused, 6);
    vec![scaled(DEPLOYMENT), asleep(DEPLOYMENT), waking, refused]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// Each kind has a watch of its own. Those of workloads begin once they are needed.
    #[test]
    fn the_order_of_observations_does_not_matter(
        order in proptest::collection::vec(any::<usize>(), 0..12),
    ) {
        for api_server in states() {
            let mut replica = machine();
            let mut are_listed = false;
            for event in observations(&api_server.objects, &order) {
                replica.step(api_server.now, event);
                if replica.needs_workload_watch() && !are_listed {
                    are_listed = true;
                    for event in observations_of_workloads(&api_server.objects) {
                        replica.step(api_server.now, event);
                    }
                    replica.step(api_server.now, ControllerEvent::WorkloadsListed);
                }
            }
            prop_assert_eq!(differences(&table(&replica), &api_server.table()), [""; 0]);
        }
    }
}
