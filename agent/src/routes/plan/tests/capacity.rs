//! Pure: plans for maps that are too small: refused services, quarantine, and the services that wait for a frontend.

use super::{
    cluster::{first_lists, set_slice, set_tcp_service},
    *,
};

/// Returns ready pods of one Revision, one for each number.
fn pods(revision: u8, numbers: std::ops::RangeInclusive<u8>) -> Vec<PodEntry> {
    numbers.map(|number| pod(number, revision, RoutingPhase::Ready)).collect()
}

#[test]
fn a_service_that_does_not_fit_is_refused_alone_and_goes_by_the_activators() {
    let mut fixture = PlannerFixture::new();
    let services = [service(1, ConnectionPath::Direct), service(2, ConnectionPath::Direct)];
    fixture.plan(&table(&services, &pods(1, 1..=2), &[activator(1)]));
    fixture.planner.list_entry_pool = ExtentPool::new(20);
    // What is in force: one activator, and two pods for each family.
    fixture.planner.list_entry_pool.reserve(0, 5);
    let big = [pods(1, 1..=40), pods(2, 41..=41)].concat();
    fixture.set_table(&table(&services, &big, &[activator(1), activator(2)]));
    let plan = fixture.plan_and_write(&BTreeMap::new());
    let (refused, why) = plan.refused.first_key_value().unwrap();
    assert_eq!((refused, why.map, plan.is_partial), (&name(1), abi::maps::SLOTS, false));
    let text = why.to_string();
    assert!(
        text.contains("map SLOTS needs 40 more entries")
            && text.contains("raise list-entries in --map-sizes (now 20), or use fewer services"),
        "{text}"
    );
    assert!(fixture.planner.has_due_work());
    let found =
        |fixture: &PlannerFixture, last| fixture.kernel.find(&key([10, 96, 0, last])).unwrap();
    assert_eq!(found(&fixture, 1), (RoutingMode::Activator, vec![], 20_001u16.to_be()));
    assert_eq!(found(&fixture, 2).1, vec![target(41)], "it holds up no other");
    assert_eq!(fixture.kernel.list(&fixture.kernel.states[&abi::ACTIVATORS_V4]).len(), 2);

    // It is tried again, and the result is the same.
    fixture.now += abi::QUARANTINE_NS;
    let again = fixture.plan_and_write(&BTreeMap::new());
    assert_eq!((again.ops, again.refused.len()), (vec![], 1));
    let fits = [pods(1, 1..=3), pods(2, 41..=41)].concat();
    fixture.plan(&table(&services, &fits, &[activator(1), activator(2)]));
    assert_eq!(found(&fixture, 1).1.len(), 3);
    assert!(!fixture.planner.has_due_work());
}

/// No service is due when only activators change, and yet the plan must be tried again.
#[test]
fn activators_that_do_not_fit_are_planned_again() {
    let mut fixture = PlannerFixture::new();
    let services = [service(1, ConnectionPath::Direct)];
    fixture.plan(&table(&services, &[], &[activator(1)]));
    let free_pool = std::mem::replace(&mut fixture.planner.backends.pool, KernelIdPool::new(1, 1));
    fixture.set_table(&table(&services, &[], &[activator(1), activator(2)]));
    assert!(fixture.planner.plan(fixture.now, &BTreeMap::new()).is_err());
    assert!(fixture.planner.has_due_work());
    fixture.planner.backends.pool = free_pool;
    fixture.plan_and_write(&BTreeMap::new());
    let activators = fixture.kernel.list(&fixture.kernel.states[&abi::ACTIVATORS_V4]);
    assert_eq!((activators.len(), fixture.planner.has_due_work()), (2, false));
}

/// A service may lack even the service ids that its frontends need to go to the activators.
#[test]
fn a_new_service_without_a_free_id_passes_unchanged_and_delays_none() {
    let mut fixture = PlannerFixture::new();
    fixture.plan(&table(&[service(1, ConnectionPath::Direct)], &[], &[activator(1)]));
    // Two ids are free: one for each address of one service.
    fixture.planner.service_id_pool = KernelIdPool::new(100, 102);
    let mut half = service(9, ConnectionPath::Direct);
    half.addresses.truncate(1);
    let wide = service(2, ConnectionPath::Direct);
    let all = [service(1, ConnectionPath::Direct), wide.clone(), half.clone()];
    fixture.set_table(&table(&all, &pods(1, 1..=1), &[activator(1)]));
    let plan = fixture.plan_and_write(&BTreeMap::new());
    assert_eq!(plan.refused.keys().collect::<Vec<_>>(), [&name(9)]);
    assert_eq!(plan.refused[&name(9)].map, abi::maps::SVC_STATE);
    assert_eq!(fixture.kernel.find(&key([10, 96, 0, 9])), None);
    assert_eq!(fixture.kernel.find(&key([10, 96, 0, 1])).unwrap().1, vec![target(1)]);
    // Service 2 is removed. The ids that it gives up are free for service 9 after the quarantine.
    fixture.plan(&table(
        &[service(1, ConnectionPath::Direct), half],
        &pods(1, 1..=1),
        &[activator(1)],
    ));
    fixture.now += abi::QUARANTINE_NS;
    fixture.plan_and_write(&BTreeMap::new());
    assert!(fixture.kernel.find(&key([10, 96, 0, 9])).is_some());
    assert!(!fixture.planner.has_due_work());
}

/// The address in force was the service's own, or that of another one, which the same batch removes.
#[test]
fn an_address_in_force_loses_its_pods_although_a_new_one_does_not_fit() {
    for earlier in [1, 3] {
        let mut fixture = PlannerFixture::new();
        let wide = service(1, ConnectionPath::Direct);
        let narrow = ServiceEntry {
            addresses: wide.addresses[..1].to_vec(),
            ..service(earlier, ConnectionPath::Direct)
        };
        fixture.plan(&table(&[narrow], &pods(earlier, 1..=2), &[activator(1)]));
        let address = key([10, 96, 0, 1]);
        assert_eq!(fixture.kernel.find(&address).unwrap().1, vec![target(1), target(2)]);
        fixture.planner.service_id_pool = KernelIdPool::new(1, 1);
        let drains = [pod(1, 1, RoutingPhase::Ready), pod(2, 1, RoutingPhase::Draining)];
        fixture.set_table(&table(&[wide], &drains, &[activator(1)]));
        let plan = fixture.plan_and_write(&BTreeMap::new());
        assert_eq!(plan.refused.keys().collect::<Vec<_>>(), [&name(1)]);
        // The plan is whole, so the agent acknowledges that pod 2 gets no more connects.
        assert!(!plan.is_partial);
        let found = fixture.kernel.find(&address).unwrap();
        assert_eq!(found, (RoutingMode::Activator, vec![], 20_001u16.to_be()));
        assert_eq!(fixture.kernel.all().len(), 1, "the new address has no frontend");
    }
}

#[test]
fn an_address_that_did_not_fit_goes_to_the_next_service_that_names_it() {
    let mut fixture = PlannerFixture::new();
    let first = service(1, ConnectionPath::Direct);
    let second =
        ServiceEntry { addresses: first.addresses.clone(), ..service(2, ConnectionPath::Direct) };
    fixture.planner.service_id_pool = KernelIdPool::new(1, 1);
    fixture.set_table(&table(&[first, second.clone()], &[], &[]));
    let plan = fixture.plan_and_write(&BTreeMap::new());
    assert_eq!(plan.refused.keys().collect::<Vec<_>>(), [&name(1)]);
    assert_eq!(fixture.kernel.all(), BTreeMap::new());
    fixture.planner.service_id_pool = KernelIdPool::new(100, 102);
    fixture.plan(&table(&[second], &[], &[]));
    let port = fixture.kernel.find(&key([10, 96, 0, 1])).map(|(.., port)| port);
    assert_eq!(port, Some(20_002u16.to_be()));
    assert!(!fixture.planner.has_due_work());
}

/// A big service that changes often: the extents that it gave up are in quarantine for a second.
#[test]
fn a_service_that_fits_after_quarantine_keeps_its_list_until_then_and_delays_no_other() {
    let mut fixture = PlannerFixture::new();
    let services = [service(1, ConnectionPath::Direct), service(2, ConnectionPath::Direct)];
    fixture.planner.list_entry_pool = ExtentPool::new(60);
    fixture.plan(&table(&services, &pods(1, 1..=10), &[]));
    fixture.plan(&table(&services, &pods(1, 11..=20), &[]));
    // More pods than its extents have room for.
    fixture.set_table(&table(&services, &[pods(1, 21..=32), pods(2, 40..=40)].concat(), &[]));
    let plan = fixture.plan_and_write(&BTreeMap::new());
    assert!(plan.is_partial && plan.refused.is_empty(), "{plan:?}");
    let found =
        |fixture: &PlannerFixture, last| fixture.kernel.find(&key([10, 96, 0, last])).unwrap().1;
    assert_eq!(found(&fixture, 1)[0], target(11));
    assert_eq!(found(&fixture, 2), vec![target(40)]);
    fixture.now += abi::QUARANTINE_NS;
    let plan = fixture.plan_and_write(&BTreeMap::new());
    assert!(!plan.is_partial && plan.refused.is_empty(), "{plan:?}");
    assert_eq!(found(&fixture, 1)[0], target(21));
    assert!(!fixture.planner.has_due_work());

    // It does not wait indefinitely while others keep entries in quarantine.
    fixture.planner.list_entry_pool = ExtentPool::new(4);
    fixture.planner.list_entry_pool.quarantine(100, 1_000, u64::MAX / 2);
    fixture.set_table(&table(&services, &pods(1, 1..=14), &[]));
    assert!(fixture.plan_and_write(&BTreeMap::new()).is_partial);
    fixture.now += QUARANTINE_WAIT_NS;
    let plan = fixture.plan_and_write(&BTreeMap::new());
    assert_eq!((plan.refused.len(), plan.is_partial), (1, false));
}

/// Returns a pool without a free entry, of which entries 2 to 5 are in quarantine.
fn pool_in_quarantine(now_ns: u64) -> ExtentPool {
    let mut pool = ExtentPool::new(8);
    pool.reserve(0, 8);
    pool.quarantine(2, 4, now_ns);
    pool
}

/// Until then the list names the endpoints of the Service of the cluster, of whose requests nothing is known.
#[test]
fn pods_are_added_when_a_service_that_waited_has_its_list_at_an_address_of_the_cluster() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    fixture.observe(first_lists(vec![set_tcp_service(1, None), set_slice(1, &[5])]));
    fixture.planner.list_entry_pool = pool_in_quarantine(fixture.now);
    let mut routed = service(1, ConnectionPath::Direct);
    routed.addresses.truncate(1);
    fixture.set_table(&table(&[routed], &pods(1, 7..=8), &[]));
    let plan = fixture.plan_and_write(&BTreeMap::new());
    assert_eq!((plan.is_partial, plan.added_pods), (true, BTreeSet::new()));
    fixture.now += abi::QUARANTINE_NS;
    let plan = fixture.plan_and_write(&BTreeMap::new());
    let at = |number: u8| SocketAddr::from(([10, 244, 0, number], 8080));
    assert_eq!(plan.added_pods, [7, 8].map(at).into());
    assert_eq!((plan.is_partial, plan.removed_pods), (false, BTreeSet::new()));
}

/// Idle connections to a pod are closed only if a plan names it as removed.
#[test]
fn pods_are_removed_when_a_service_of_the_cluster_that_waited_has_its_list_at_their_address() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let mut routed = service(1, ConnectionPath::Direct);
    routed.addresses.truncate(1);
    fixture.set_table(&table(&[routed], &pods(1, 7..=7), &[]));
    fixture.observe(first_lists(vec![set_tcp_service(1, None), set_slice(1, &[5, 6])]));
    fixture.planner.list_entry_pool = pool_in_quarantine(fixture.now);
    fixture.set_table(&table(&[], &[], &[]));
    let plan = fixture.plan_and_write(&BTreeMap::new());
    assert_eq!((plan.newly_refused, plan.removed_pods), (vec![], BTreeSet::new()));
    assert!(plan.is_partial, "the pod may be draining, and connects go there");
    assert!(fixture.plan_and_write(&BTreeMap::new()).is_partial, "and so is each plan until then");
    let list = |fixture: &PlannerFixture| fixture.kernel.find(&key([10, 96, 0, 1])).unwrap().1;
    assert_eq!(list(&fixture), [target(7)], "it waits");
    fixture.now += abi::QUARANTINE_NS;
    fixture.planner.retry_unfit();
    let plan = fixture.plan_and_write(&BTreeMap::new());
    assert_eq!(list(&fixture), [target(5), target(6)]);
    assert_eq!(plan.removed_pods, [SocketAddr::from(([10, 244, 0, 7], 8080))].into());
    assert!(!plan.is_partial);
}

/// Of ten free entries and twenty in quarantine, a quarter of the map is left to services of the RouteTable.
#[test]
fn an_error_counts_only_what_the_share_of_the_service_gets_after_the_quarantine() {
    let mut ids = KernelIdPool::new(0, 100);
    (0..90).for_each(|id| ids.reserve(id));
    (0..20).for_each(|id| ids.quarantine(id, 0));
    let mut entries = ExtentPool::new(100);
    entries.reserve(0, 90);
    entries.quarantine(0, 20, 0);
    for (share, expected) in [(MapShare::All, (10, 20)), (MapShare::ThreeQuarters, (0, 5))] {
        let of_ids = ids.check_free(abi::maps::BACKENDS, 11, share).expect_err("too many");
        assert_eq!((of_ids.free, of_ids.quarantined), expected, "{share:?}");
        let of_entries = entries.share_error(11, share);
        assert_eq!((of_entries.free, of_entries.quarantined), expected, "{share:?}");
    }
}

/// A wait for a quarantine that frees too little would keep endpoints in force that have left.
#[test]
fn a_service_of_the_cluster_does_not_wait_for_what_its_share_does_not_leave() {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    fixture.observe(first_lists(vec![set_tcp_service(1, None), set_slice(1, &[5])]));
    // After the quarantine three ids are free, of which two are left to services of the RouteTable.
    let mut ids = KernelIdPool::new(1, 8);
    (1..8).for_each(|id| ids.reserve(id));
    (1..4).for_each(|id| ids.quarantine(id, fixture.now));
    fixture.planner.backends.pool = ids;
    let plan = fixture.observe(vec![set_slice(1, &[6, 7])]);
    assert_eq!(plan.newly_refused.len(), 1);
    let found = fixture.kernel.find(&key([10, 96, 0, 1])).unwrap();
    assert_eq!(found, (RoutingMode::Pass, vec![], 0), "kube-proxy serves it");
}

#[test]
fn extents_fit_after_quarantine_only_if_free_runs_are_long_enough() {
    let mut pool = ExtentPool::new(40);
    pool.reserve(0, 40);
    // Ten entries in two runs of five.
    pool.quarantine(0, 5, 0);
    pool.quarantine(10, 5, 0);
    assert!(pool.fits_after_quarantine(&[5, 5], MapShare::All));
    assert!(!pool.fits_after_quarantine(&[10], MapShare::All));
    assert_eq!(pool.allocate(5), None, "the check has freed nothing");
    // One run of fifteen.
    pool.quarantine(5, 5, 0);
    assert!(
        pool.fits_after_quarantine(&[10, 5], MapShare::All)
            && !pool.fits_after_quarantine(&[10, 6], MapShare::All)
    );

    // A run in quarantine that joins two free ones.
    let mut pool = ExtentPool::new(30);
    pool.reserve(10, 10);
    pool.quarantine(10, 10, 0);
    assert_eq!(pool.capacity_error(30).free, 10);
    assert!(pool.fits_after_quarantine(&[30], MapShare::All));
}

/// Returns the address of a pod with each port at which it serves.
fn all_addresses(pod: &PodEntry) -> impl Iterator<Item = SocketAddr> {
    let ports = pod.ports.iter().map(|it| it.port.get());
    pod.address.into_iter().flat_map(move |at| {
        let others = ports.clone().map(move |port| SocketAddr::new(at.ip(), port));
        others.chain([at])
    })
}

proptest! {
    /// The agent acknowledges the draining pods of a version once a plan is not partial. There is room for three of up
    /// to six addresses, and for few pods.
    #[test]
    fn in_full_maps_only_a_partial_plan_leaves_connects_to_a_pod_that_is_not_ready(
        turns in route_changes(),
    ) {
        let (mut sim, mut kernel) = (RouteSim::new(), FakeKernelMaps::default());
        let mut planner = RoutePlanner::resume(kernel.table(), 0);
        planner.service_id_pool = KernelIdPool::new(abi::FIRST_SERVICE, abi::FIRST_SERVICE + 3);
        planner.list_entry_pool = ExtentPool::new(12);
        for turn in &turns {
            sim.apply(turn, &mut planner);
            // Without room for the activators no version is acknowledged.
            let Ok(plan) = planner.plan(sim.now, &sim.locals) else { continue };
            plan.ops.iter().for_each(|op| kernel.write(op));
            if plan.is_partial {
                continue;
            }
            let ready = sim.table.pods.values().filter(|pod| pod.phase == RoutingPhase::Ready);
            let ready: BTreeSet<SocketAddr> = ready.flat_map(all_addresses).collect();
            for (key, (_, list, _)) in kernel.all() {
                for at in list.iter().filter_map(BackendTarget::pod_address) {
                    prop_assert!(ready.contains(&at), "{:?} leads to {}", key, at);
                }
            }
        }
    }
}
