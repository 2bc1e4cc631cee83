//! Pure: lists of earlier maps that are copied to maps of other sizes.

use super::{
    cluster::{first_lists, set_slice, set_tcp_service},
    *,
};

/// Returns a planner's fixture with services of both sources, and its RouteTable. One pod is of this node.
fn fixture() -> (PlannerFixture, RouteTable) {
    let mut fixture = PlannerFixture::with_mode(ClusterIpMode::All);
    let services = [service(1, ConnectionPath::Direct), service(2, ConnectionPath::Activator)];
    let wanted = table(&services, &[pod(7, 1, RoutingPhase::Ready)], &[activator(1)]);
    fixture.set_table(&wanted);
    let objects = vec![
        set_tcp_service(3, None),
        set_slice(3, &[5, 6]),
        // Without endpoints, so that its connects are refused.
        set_tcp_service(4, None),
    ];
    fixture.planner.apply_cluster_changes(first_lists(objects));
    let ids = KernelPodIds { cookie: 99, slot: 3, ..KernelPodIds::default() };
    fixture.plan_and_write(&BTreeMap::from([("uid7".to_owned(), ids)]));
    (fixture, wanted)
}

/// Returns what connects find in `earlier`, where no pod is registered yet.
fn unregistered(earlier: &FakeKernelMaps) -> BTreeMap<FrontendKey, SimConnectResult> {
    let mut found = earlier.all();
    for (_, backends, _) in found.values_mut() {
        backends.iter_mut().for_each(|it| *it = BackendTarget { cookie: 0, slot: 0, ..*it });
    }
    found
}

#[test]
fn maps_of_other_sizes_get_every_list_in_force() {
    let (fixture, _) = fixture();
    let ops = copy_ops(KernelRoutes::default(), &fixture.kernel.table(), 0).expect("they fit");
    let mut kernel = FakeKernelMaps::default();
    ops.iter().for_each(|op| kernel.write(op));
    assert_eq!(kernel.all(), unregistered(&fixture.kernel));
    let mode = |number| kernel.find(&key([10, 96, 0, number])).map(|(mode, ..)| mode);
    let modes = [RoutingMode::PickBackend, RoutingMode::Activator, RoutingMode::PickRandom];
    assert_eq!([1, 2, 3].map(mode), modes.map(Some));
    assert_eq!(mode(4), Some(RoutingMode::Refuse));
    let activators = |kernel: &FakeKernelMaps| kernel.list(&kernel.states[&abi::ACTIVATORS_V4]);
    assert_eq!(activators(&kernel), activators(&fixture.kernel));
}

#[test]
fn copied_lists_stay_until_their_source_is_known() {
    let (fixture, wanted) = fixture();
    let ops = copy_ops(KernelRoutes::default(), &fixture.kernel.table(), 0).expect("they fit");
    let mut kernel = FakeKernelMaps::default();
    ops.iter().for_each(|op| kernel.write(op));
    let mut planner = RoutePlanner::resume(kernel.table(), fixture.now);
    planner.serve_cluster_services(ClusterIpMode::All, "here");
    wanted.all_states().for_each(|state| planner.apply_change(state));
    let plan = planner.plan(fixture.now, &BTreeMap::new()).expect("it fits");
    plan.ops.iter().for_each(|op| kernel.write(op));
    assert_eq!(kernel.all(), unregistered(&fixture.kernel), "the API server is away");
    planner.apply_cluster_changes(first_lists(Vec::new()));
    let plan = planner.plan(fixture.now, &BTreeMap::new()).expect("it fits");
    plan.ops.iter().for_each(|op| kernel.write(op));
    let is_found = |number| kernel.find(&key([10, 96, 0, number])).is_some();
    assert_eq!([1, 2, 3, 4].map(is_found), [true, true, false, false]);
}

#[test]
fn a_copy_that_ended_midway_is_made_again() {
    let (fixture, _) = fixture();
    let earlier = fixture.kernel.table();
    let ops = copy_ops(KernelRoutes::default(), &earlier, 0).expect("they fit");
    for written in 0..=ops.len() {
        let mut kernel = FakeKernelMaps::default();
        ops.iter().take(written).for_each(|op| kernel.write(op));
        let again = copy_ops(kernel.table(), &earlier, fixture.now).expect("they fit");
        again.iter().for_each(|op| kernel.write(op));
        assert_eq!(kernel.all(), unregistered(&fixture.kernel), "after {written} writes");
    }
}

/// The sizes changed, services went, and the sizes changed back before the first maps were removed.
#[test]
fn frontends_of_services_that_have_gone_since_are_removed() {
    let (mut fixture, _) = fixture();
    let mut kernel = FakeKernelMaps::default();
    let ops = copy_ops(KernelRoutes::default(), &fixture.kernel.table(), 0).expect("they fit");
    ops.iter().for_each(|op| kernel.write(op));
    let kept = [service(1, ConnectionPath::Direct)];
    let wanted = table(&kept, &[pod(7, 1, RoutingPhase::Ready)], &[activator(1)]);
    fixture.set_table(&wanted);
    fixture.planner.apply_cluster_changes(vec![ClusterChange::Service(name(4), None)]);
    fixture.plan_and_write(&BTreeMap::new());
    assert!(fixture.kernel.all().len() < kernel.all().len());
    let earlier = fixture.kernel.table();
    let ops = copy_ops(kernel.table(), &earlier, fixture.now).expect("they fit");
    ops.iter().for_each(|op| kernel.write(op));
    assert_eq!(kernel.all(), unregistered(&fixture.kernel));
}

#[test]
fn lists_that_do_not_all_fit_are_not_copied() {
    let (fixture, _) = fixture();
    let sizes = MapSizes { backends: 3, ..MapSizes::default() };
    let kernel = KernelRoutes { sizes, ..KernelRoutes::default() };
    let refused = copy_ops(kernel, &fixture.kernel.table(), 0).expect_err("four of them");
    assert_eq!(refused.map, abi::maps::BACKENDS);
}
