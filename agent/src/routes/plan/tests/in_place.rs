//! Pure: changes of lists in place, and the extents that they keep.

use super::*;

/// Returns ready pods of Revision 1, one for each number.
fn pods(numbers: impl IntoIterator<Item = u16>) -> Vec<PodEntry> {
    let pod = |number: u16| {
        let [high, low] = number.to_be_bytes();
        let address = SocketAddr::from(([10, 245, high, low], 8080));
        let uid = format!("uid{number}");
        fixtures::pod_at(&uid, &name(1), RoutingPhase::Ready, address)
    };
    numbers.into_iter().map(pod).collect()
}

/// Returns a service with one address, and these pods.
fn one_service(numbers: impl IntoIterator<Item = u16>) -> RouteTable {
    let mut narrow = service(1, ConnectionPath::Direct);
    narrow.addresses.truncate(1);
    table(&[narrow], &pods(numbers), &[])
}

impl PlannerFixture {
    /// Puts these pods in force. Returns the numbers of entries of `SLOTS` and of backends that were written, and of
    /// all map operations.
    fn change(&mut self, numbers: impl IntoIterator<Item = u16>) -> [usize; 3] {
        let ops = self.plan(&one_service(numbers));
        let entries = |op: &MapOp| match op {
            MapOp::ListEntries { backends, .. } => backends.len(),
            _ => 0,
        };
        let backends = ops.iter().filter(|op| matches!(op, MapOp::Backend { .. })).count();
        [ops.iter().map(entries).sum(), backends, ops.len()]
    }

    /// Returns offset and length of the service's list.
    fn extent(&self) -> (u32, u32) {
        let state = self.kernel.states[&self.kernel.frontends[&key([10, 96, 0, 1])]];
        (state.offset, state.count)
    }

    /// Returns the pods that connects find, by number.
    fn found(&self) -> BTreeSet<u16> {
        let (_, list, _) = self.kernel.find(&key([10, 96, 0, 1])).unwrap();
        list.iter().map(|it| u16::from_be_bytes([it.address[14], it.address[15]])).collect()
    }
}

#[test]
fn a_change_of_a_service_with_5000_endpoints_writes_three_words_at_most() {
    let mut fixture = PlannerFixture::new();
    assert_eq!(fixture.change(0..5_000)[..2], [5_000, 5_000]);
    let (offset, _) = fixture.extent();
    assert_eq!(fixture.change(1..5_000), [1, 0, 2], "one leaves: the last one takes its place");
    assert_eq!(fixture.change(1..5_001), [1, 1, 3], "one joins");
    assert_eq!(fixture.change((1..5_000).chain([6_000])), [1, 1, 3], "one in place of another");
    assert_eq!(fixture.change((1..2_000).chain(2_002..5_000).chain([6_000])), [2, 0, 3]);
    assert_eq!(fixture.extent(), (offset, 4_998));
    let wanted: BTreeSet<u16> = (1..2_000).chain(2_002..5_000).chain([6_000]).collect();
    assert_eq!(fixture.found(), wanted);
}

#[test]
fn a_service_with_5000_endpoints_may_change_at_any_rate() {
    let mut fixture = PlannerFixture::new();
    fixture.change(0..5_000);
    let extent = fixture.extent();
    // No time passes, so no quarantine ends. New extents would be used up by 26 changes.
    for turn in 1..=60 {
        let numbers = (turn..5_000).chain(5_000..5_000 + turn);
        assert_eq!(fixture.change(numbers.clone())[..2], [1, 1], "change {turn}");
        assert_eq!(fixture.found(), numbers.collect());
    }
    assert_eq!(fixture.extent(), extent);
    assert!(!fixture.planner.has_due_work());
}

#[test]
fn a_growing_list_moves_a_few_times_only() {
    let mut fixture = PlannerFixture::new();
    fixture.change(0..1);
    let mut written = 0;
    let mut offsets = BTreeSet::new();
    for count in 2..=600 {
        written += fixture.change(0..count)[0];
        offsets.insert(fixture.extent().0);
    }
    // Each move writes the list, and leaves room for an eighth more.
    assert!(offsets.len() < 60 && written < 600 * 10, "{} moves, {written} writes", offsets.len());
}

#[test]
fn a_change_of_more_than_half_of_a_list_goes_to_a_new_extent() {
    let mut fixture = PlannerFixture::new();
    fixture.change(0..10);
    let (offset, _) = fixture.extent();
    fixture.change(5..15);
    assert_eq!(fixture.extent(), (offset, 10), "half of it");
    fixture.change(11..21);
    assert_ne!(fixture.extent().0, offset);
    assert_eq!(fixture.found(), (11..21).collect());
}

#[test]
fn a_list_that_shrinks_gives_entries_back() {
    let mut fixture = PlannerFixture::new();
    fixture.change(0..64);
    let (offset, _) = fixture.extent();
    let mut count = 64;
    while fixture.extent().0 == offset && count > 1 {
        count -= 1;
        fixture.change(0..count);
    }
    assert!((24..40).contains(&count), "left at {count}");
}

/// The maps may be full for others, while a change in place needs nothing.
#[test]
fn where_no_extent_is_free_a_large_change_is_made_in_place() {
    let mut fixture = PlannerFixture::new();
    fixture.planner.list_entry_pool = ExtentPool::new(12);
    fixture.change(0..10);
    let extent = fixture.extent();
    assert_eq!(fixture.change(10..20), [10, 10, 12]);
    assert_eq!((fixture.extent(), fixture.found()), (extent, (10..20).collect()));
    assert!(!fixture.planner.has_due_work());
}

/// An agent that ended between two stores leaves an entry that stands twice.
#[test]
fn another_agent_goes_on_from_an_entry_that_stands_twice() {
    let mut fixture = PlannerFixture::new();
    fixture.change(0..10);
    fixture.set_table(&one_service(1..10));
    let ops = fixture.planner.plan(fixture.now, &BTreeMap::new()).unwrap().ops;
    let [entry @ MapOp::ListEntries { .. }, MapOp::State { .. }] = &ops[..] else {
        panic!("{ops:?}");
    };
    fixture.kernel.write(entry);
    assert_eq!(fixture.extent().1, 10);
    fixture.planner = resumed(&fixture.kernel, &fixture.table, fixture.now);
    let ops = fixture.plan_and_write(&BTreeMap::new()).ops;
    assert_eq!(ops.len(), 1, "the length is left: {ops:?}");
    assert_eq!((fixture.extent().1, fixture.found()), (9, (1..10).collect()));
    // The number of the pod that left is free once, and no other one is.
    fixture.now += abi::QUARANTINE_NS;
    assert_eq!(fixture.change(0..10)[1], 1);
    let ids: BTreeSet<&u32> = fixture.kernel.backends.keys().collect();
    assert_eq!(ids.len(), 10, "the number of the pod that left is used again");
}

/// An agent that ended between the last entry and the word leaves the list that the next one wants. A connect that had
/// read the replaced entry must not find the word as it was.
#[test]
fn a_replaced_entry_without_its_word_gets_another_generation_at_the_next_start() {
    let mut fixture = PlannerFixture::new();
    fixture.change(0..10);
    let service_id = fixture.kernel.frontends[&key([10, 96, 0, 1])];
    let before = fixture.kernel.states[&service_id];
    fixture.set_table(&one_service(1..11));
    let ops = fixture.planner.plan(fixture.now, &BTreeMap::new()).unwrap().ops;
    let Some((MapOp::State { .. }, stores)) = ops.split_last() else { panic!("{ops:?}") };
    stores.iter().for_each(|op| fixture.kernel.write(op));
    let mut routes = fixture.kernel.table();
    routes.raise_generations().iter().for_each(|op| fixture.kernel.write(op));
    assert_eq!(routes, fixture.kernel.table());
    fixture.planner = resumed(&fixture.kernel, &fixture.table, fixture.now);
    assert_eq!(fixture.plan_and_write(&BTreeMap::new()).ops, [], "nothing else is left");
    let after = fixture.kernel.states[&service_id];
    let generation = before.generation.wrapping_add(1);
    assert_eq!((after, fixture.found()), (SvcState { generation, ..before }, (1..11).collect()));
}
