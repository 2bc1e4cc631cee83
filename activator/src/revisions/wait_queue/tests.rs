use std::net::SocketAddr;

use proptest::prelude::*;

use super::*;

const WIDE_BOUNDS: WaitQueueBounds = WaitQueueBounds { max_requests: 100, max_bytes: 10_000 };

fn pod(last: u8) -> PodEndpointKey {
    pod_port(last, None)
}

/// Returns the key of a pod's port for a port of a scaled Service.
fn pod_port(last: u8, service_port: Option<NonZeroU16>) -> PodEndpointKey {
    let address = SocketAddr::from(([10, 0, 0, last], 8080));
    PodEndpointKey { service_port, address, id: u64::from(last) }
}

/// Queue of an activator that holds all slots of its pods.
#[derive(Debug)]
struct SoleHolderQueueFixture<W> {
    wait_queue: WaitQueue<W>,
    limit: u32,
    in_flight: BTreeMap<PodEndpointKey, u32>,
}

impl<W> SoleHolderQueueFixture<W> {
    fn new(bounds: WaitQueueBounds) -> Self {
        Self { wait_queue: WaitQueue::new(bounds), limit: 0, in_flight: BTreeMap::new() }
    }

    fn assign_free_slots(&mut self, random: impl FnMut() -> u64) -> Vec<DispatchedRequest<W>> {
        let (limit, flying) = (self.limit, &self.in_flight);
        let free_slots_at =
            |pod: PodEndpointKey| limit.saturating_sub(flying.get(&pod).copied().unwrap_or(0));
        self.wait_queue.set_free_slots(free_slots_at, random)
    }

    fn count_dispatched(
        &mut self,
        dispatched: Vec<DispatchedRequest<W>>,
    ) -> Vec<DispatchedRequest<W>> {
        for (_, pod) in &dispatched {
            *self.in_flight.entry(*pod).or_default() += 1;
        }
        dispatched
    }

    fn dispatch_with_free_slots(
        &mut self,
        mut dispatched: Vec<DispatchedRequest<W>>,
        random: impl FnMut() -> u64,
    ) -> Vec<DispatchedRequest<W>> {
        for (_, pod) in &dispatched {
            *self.in_flight.entry(*pod).or_default() += 1;
        }
        let more = self.assign_free_slots(random);
        dispatched.extend(self.count_dispatched(more));
        dispatched
    }

    fn assign_place(&mut self) -> QueuePlace {
        self.wait_queue.assign_place(None)
    }

    fn admit(&mut self, random: u64) -> Option<PodEndpointKey> {
        self.admit_to_port(None, random)
    }

    fn admit_to_port(
        &mut self,
        service_port: Option<NonZeroU16>,
        random: u64,
    ) -> Option<PodEndpointKey> {
        let preview = self.wait_queue.preview(service_port, random);
        let admitted = self.wait_queue.admit(service_port, random);
        assert_eq!(preview, admitted, "a preview states the choice that follows");
        let pod = admitted?;
        *self.in_flight.entry(pod).or_default() += 1;
        Some(pod)
    }

    fn enqueue(&mut self, place: QueuePlace, bytes: usize, waiter: W) -> Result<(), WaitQueueFull> {
        self.wait_queue.enqueue(place, bytes, waiter)
    }

    fn remove_waiter(&mut self, place: QueuePlace) -> Option<W> {
        self.wait_queue.remove_waiter(place)
    }

    fn on_routes(
        &mut self,
        ready: impl IntoIterator<Item = PodEndpointKey>,
        limit: u32,
        mut random: impl FnMut() -> u64,
    ) -> Vec<DispatchedRequest<W>> {
        self.limit = limit;
        let dispatched = self.wait_queue.on_routes(ready, limit, &mut random);
        self.dispatch_with_free_slots(dispatched, random)
    }

    fn on_request_done(
        &mut self,
        pod: PodEndpointKey,
        mut random: impl FnMut() -> u64,
    ) -> Vec<DispatchedRequest<W>> {
        *self.in_flight.get_mut(&pod).expect("it has a request") -= 1;
        let dispatched = self.wait_queue.on_request_done(pod, &mut random);
        self.dispatch_with_free_slots(dispatched, random)
    }

    fn pause_pod(&mut self, pod: PodEndpointKey) -> Option<PauseNumber> {
        self.wait_queue.pause_pod(pod)
    }

    fn resume_pod(
        &mut self,
        pod: PodEndpointKey,
        pause: PauseNumber,
        mut random: impl FnMut() -> u64,
    ) -> Vec<DispatchedRequest<W>> {
        let dispatched = self.wait_queue.resume_pod(pod, pause, &mut random);
        self.dispatch_with_free_slots(dispatched, random)
    }

    fn waiting_count(&self) -> usize {
        self.wait_queue.waiting_count()
    }

    fn in_flight(&self) -> u64 {
        self.wait_queue.in_flight()
    }
}

fn enqueue_request(queue: &mut SoleHolderQueueFixture<u32>, name: u32) -> QueuePlace {
    enqueue_for_port(queue, None, name)
}

fn enqueue_for_port(
    queue: &mut SoleHolderQueueFixture<u32>,
    service_port: Option<NonZeroU16>,
    name: u32,
) -> QueuePlace {
    let place = queue.wait_queue.assign_place(service_port);
    assert_eq!(queue.admit_to_port(service_port, 0), None);
    queue.enqueue(place, 1, name).expect("below the bounds");
    place
}

#[test]
fn requests_wait_until_a_pod_is_ready_and_are_dispatched_in_order() {
    let mut queue = SoleHolderQueueFixture::new(WIDE_BOUNDS);
    (1..=3).for_each(|name| _ = enqueue_request(&mut queue, name));
    assert_eq!(queue.on_routes([pod(1)], 0, || 0), [(1, pod(1)), (2, pod(1)), (3, pod(1))]);
    assert_eq!((queue.waiting_count(), queue.in_flight()), (0, 3));
}

#[test]
fn under_a_hard_limit_one_is_dispatched_for_each_that_ends() {
    let mut queue = SoleHolderQueueFixture::new(WIDE_BOUNDS);
    (1..=4).for_each(|name| _ = enqueue_request(&mut queue, name));
    assert_eq!(queue.on_routes([pod(1), pod(2)], 1, || 0), [(1, pod(1)), (2, pod(2))]);
    assert_eq!(queue.on_request_done(pod(2), || 0), [(3, pod(2))]);
    assert_eq!(queue.on_request_done(pod(1), || 0), [(4, pod(1))]);
    assert_eq!(queue.on_request_done(pod(1), || 0), []);
}

#[test]
fn a_higher_limit_dispatches_at_once() {
    let mut queue = SoleHolderQueueFixture::new(WIDE_BOUNDS);
    (1..=3).for_each(|name| _ = enqueue_request(&mut queue, name));
    assert_eq!(queue.on_routes([pod(1)], 1, || 0), [(1, pod(1))]);
    assert_eq!(queue.on_routes([pod(1)], 3, || 0), [(2, pod(1)), (3, pod(1))]);
}

#[test]
fn the_queue_is_bounded_by_requests_and_by_bytes() {
    let mut queue = SoleHolderQueueFixture::new(WaitQueueBounds { max_requests: 2, max_bytes: 10 });
    let [one, two, three] = [(); 3].map(|()| queue.assign_place());
    assert_eq!(queue.enqueue(one, 6, ()), Ok(()));
    assert_eq!(queue.enqueue(two, 5, ()), Err(WaitQueueFull));
    assert_eq!(queue.enqueue(two, 4, ()), Ok(()));
    assert_eq!(queue.enqueue(three, 0, ()), Err(WaitQueueFull));
    assert_eq!(queue.remove_waiter(one), Some(()));
    assert_eq!(queue.enqueue(three, 6, ()), Ok(()));
}

#[test]
fn each_pod_with_a_hard_limit_lets_ten_times_as_many_wait() {
    let mut queue = SoleHolderQueueFixture::new(WaitQueueBounds { max_requests: 1, ..WIDE_BOUNDS });
    assert_eq!(queue.on_routes([pod(1), pod(2)], 2, || 0), []);
    let admitted = (0..10).filter(|_| queue.admit(0).is_some()).count();
    let enqueue = |queue: &mut SoleHolderQueueFixture<()>| {
        let place = queue.assign_place();
        queue.enqueue(place, 0, ()).is_ok()
    };
    assert_eq!((admitted, (0..100).filter(|_| enqueue(&mut queue)).count()), (4, 41));
    assert!(queue.pause_pod(pod(1)).is_some(), "a paused pod still counts");
    assert_eq!(queue.on_routes([pod(2)], 0, || 0).len(), 41);
}

#[test]
fn preferred_pods_come_first_also_after_a_pause() {
    let mut queue: SoleHolderQueueFixture<u32> = SoleHolderQueueFixture::new(WIDE_BOUNDS);
    queue.wait_queue.set_ranks([(pod(2), PodRank::Preferred)]);
    queue.on_routes([pod(1), pod(2)], 0, || 0);
    assert_eq!((0..9).filter(|random| queue.admit(*random) == Some(pod(2))).count(), 9);
    let pause = queue.pause_pod(pod(2)).expect("it is open");
    assert_eq!(queue.admit(0), Some(pod(1)), "the only open one");
    queue.resume_pod(pod(2), pause, || 0);
    assert_eq!(queue.admit(0), Some(pod(2)));
    queue.wait_queue.set_ranks([]);
    assert_eq!(queue.admit(0), Some(pod(1)), "the less loaded one");
}

#[test]
fn a_standby_pod_comes_last_also_after_a_pause() {
    let mut queue: SoleHolderQueueFixture<u32> = SoleHolderQueueFixture::new(WIDE_BOUNDS);
    queue.wait_queue.set_ranks([(pod(1), PodRank::Standby)]);
    queue.on_routes([pod(1), pod(2)], 0, || 0);
    assert_eq!((0..9).filter(|random| queue.admit(*random) == Some(pod(2))).count(), 9);
    let standby_pause = queue.pause_pod(pod(1)).expect("it is open");
    queue.resume_pod(pod(1), standby_pause, || 0);
    assert_eq!(queue.admit(0), Some(pod(2)));
    let pause = queue.pause_pod(pod(2)).expect("it is open");
    assert_eq!(queue.admit(0), Some(pod(1)), "the only open one");
    queue.resume_pod(pod(2), pause, || 0);
    assert_eq!(queue.admit(0), Some(pod(2)));
    queue.wait_queue.set_ranks([]);
    assert_eq!(queue.admit(0), Some(pod(1)), "the less loaded one");
}

/// A standby pod of a Revision with a hard limit has slots as any other: no request waits while one is free.
#[test]
fn requests_use_the_slots_of_a_standby_pod_before_they_wait() {
    let mut queue = SoleHolderQueueFixture::new(WIDE_BOUNDS);
    queue.wait_queue.set_ranks([(pod(1), PodRank::Standby)]);
    (1..=4).for_each(|name| _ = enqueue_request(&mut queue, name));
    assert_eq!(queue.on_routes([pod(1), pod(2)], 1, || 0), [(1, pod(2)), (2, pod(1))]);
    assert_eq!(queue.on_request_done(pod(1), || 0), [(3, pod(1))]);
    assert_eq!(queue.on_request_done(pod(2), || 0), [(4, pod(2))]);
}

/// A running pod may lack a port that a standby pod has.
#[test]
fn ranks_count_for_each_port_by_itself() {
    let [http, postgres] = [80, 5432].map(NonZeroU16::new);
    let mut queue: SoleHolderQueueFixture<u32> = SoleHolderQueueFixture::new(WIDE_BOUNDS);
    let standby = [pod_port(1, http), pod_port(1, postgres)];
    queue.wait_queue.set_ranks(standby.map(|it| (it, PodRank::Standby)));
    let running = pod_port(2, http);
    queue.on_routes([standby[0], standby[1], running], 0, || 0);
    assert_eq!(queue.admit_to_port(http, 0), Some(running));
    assert_eq!(queue.admit_to_port(postgres, 0), Some(standby[1]));
}

#[test]
fn a_removed_waiter_is_not_dispatched() {
    let mut queue = SoleHolderQueueFixture::new(WIDE_BOUNDS);
    let first = enqueue_request(&mut queue, 1);
    enqueue_request(&mut queue, 2);
    assert_eq!(queue.remove_waiter(first), Some(1));
    assert_eq!(queue.remove_waiter(first), None);
    assert_eq!(queue.on_routes([pod(1)], 0, || 0), [(2, pod(1))]);
}

#[test]
fn a_request_whose_dial_failed_keeps_its_place() {
    let mut queue = SoleHolderQueueFixture::new(WIDE_BOUNDS);
    assert_eq!(queue.on_routes([pod(1)], 1, || 0), []);
    let first = queue.assign_place();
    assert_eq!(queue.admit(0), Some(pod(1)));
    enqueue_request(&mut queue, 2);
    let pause = queue.pause_pod(pod(1)).expect("it is open");
    assert_eq!(queue.on_request_done(pod(1), || 0), []);
    queue.enqueue(first, 1, 1).expect("below the bounds");
    assert_eq!(queue.resume_pod(pod(1), pause, || 0), [(1, pod(1))]);
}

#[test]
fn a_paused_pod_is_open_again_once_the_table_lists_it_again() {
    let mut queue = SoleHolderQueueFixture::new(WIDE_BOUNDS);
    queue.on_routes([pod(1)], 0, || 0);
    let pause = queue.pause_pod(pod(1)).expect("it is open");
    enqueue_request(&mut queue, 1);
    assert_eq!(queue.on_routes([pod(1)], 0, || 0), [], "nothing new was said of it");
    queue.on_routes([], 0, || 0);
    assert_eq!(queue.on_routes([pod(1)], 0, || 0), [(1, pod(1))]);
    assert_eq!(queue.resume_pod(pod(1), pause, || 0), []);
}

#[test]
fn the_end_of_an_earlier_pause_does_not_end_a_later_one() {
    let mut queue = SoleHolderQueueFixture::new(WIDE_BOUNDS);
    queue.on_routes([pod(1)], 0, || 0);
    let first = queue.pause_pod(pod(1)).expect("it is open");
    queue.on_routes([], 0, || 0);
    queue.on_routes([pod(1)], 0, || 0);
    let second = queue.pause_pod(pod(1)).expect("it is open again");
    enqueue_request(&mut queue, 1);
    assert_eq!(queue.resume_pod(pod(1), first, || 0), []);
    assert_eq!(queue.resume_pod(pod(1), second, || 0), [(1, pod(1))]);
}

#[test]
fn a_draining_pod_keeps_its_count_for_its_return() {
    let mut queue = SoleHolderQueueFixture::<()>::new(WIDE_BOUNDS);
    queue.on_routes([pod(1)], 1, || 0);
    assert_eq!(queue.admit(0), Some(pod(1)));
    queue.on_routes([], 1, || 0);
    assert_eq!(queue.admit(0), None);
    queue.on_routes([pod(1)], 1, || 0);
    assert_eq!(queue.admit(0), None, "its one place is still taken");
}

#[test]
fn requests_for_a_port_wait_only_for_pods_that_have_it() {
    let [http, postgres] = [80, 5432].map(NonZeroU16::new);
    let mut queue = SoleHolderQueueFixture::new(WIDE_BOUNDS);
    for (name, port) in [(1, postgres), (2, http), (3, postgres), (4, http)] {
        enqueue_for_port(&mut queue, port, name);
    }
    let [first, second] = [pod_port(1, http), pod_port(2, http)];
    assert_eq!(queue.on_routes([first], 0, || 0), [(2, first), (4, first)]);
    assert_eq!(queue.on_routes([first, second], 0, || 0), [], "no pod has the other port");
    assert_eq!(queue.admit_to_port(postgres, 0), None);
    assert_eq!(queue.admit_to_port(http, 0), Some(second), "the less loaded one");
    let third = pod_port(3, postgres);
    assert_eq!(queue.on_routes([first, third], 0, || 0), [(1, third), (3, third)]);
    assert_eq!((queue.waiting_count(), queue.in_flight()), (0, 5));
}

#[test]
fn capacity_at_several_ports_is_given_in_the_order_of_arrival() {
    let [http, postgres] = [80, 5432].map(NonZeroU16::new);
    let mut queue = SoleHolderQueueFixture::new(WIDE_BOUNDS);
    for (name, port) in [(1, postgres), (2, http), (3, postgres)] {
        enqueue_for_port(&mut queue, port, name);
    }
    let pods = [pod_port(1, http), pod_port(1, postgres)];
    assert_eq!(queue.on_routes(pods, 0, || 0), [(1, pods[1]), (2, pods[0]), (3, pods[1])]);
}

#[test]
fn a_pause_at_one_port_concerns_no_other_port_of_the_pod() {
    let [http, postgres] = [80, 5432].map(NonZeroU16::new);
    let mut queue = SoleHolderQueueFixture::new(WIDE_BOUNDS);
    let pods = [pod_port(1, http), pod_port(1, postgres)];
    queue.on_routes(pods, 0, || 0);
    let pause = queue.pause_pod(pods[1]).expect("it is open");
    assert!(!queue.wait_queue.has_other_open(pods[1]), "another port is no other pod");
    enqueue_for_port(&mut queue, postgres, 1);
    assert_eq!(queue.admit_to_port(http, 0), Some(pods[0]));
    assert_eq!(queue.resume_pod(pods[1], pause, || 0), [(1, pods[1])]);
}

#[test]
fn a_full_port_refuses_no_request_for_another_one() {
    let [http, postgres] = [80, 5432].map(NonZeroU16::new);
    let mut queue = SoleHolderQueueFixture::new(WaitQueueBounds { max_requests: 2, max_bytes: 10 });
    let places =
        [http, http, http, postgres, postgres].map(|port| queue.wait_queue.assign_place(port));
    assert_eq!(queue.enqueue(places[0], 6, 1), Ok(()));
    assert_eq!(queue.enqueue(places[1], 5, 2), Err(WaitQueueFull), "too many bytes");
    assert_eq!(queue.enqueue(places[1], 4, 2), Ok(()));
    assert_eq!(queue.enqueue(places[2], 0, 3), Err(WaitQueueFull), "too many requests");
    assert_eq!(queue.enqueue(places[3], 10, 4), Ok(()));
    assert_eq!(queue.enqueue(places[4], 1, 5), Err(WaitQueueFull), "this port is full too");
    // A pod of one port makes room there only.
    let pod = pod_port(1, postgres);
    assert_eq!(queue.on_routes([pod], 0, || 0), [(4, pod)]);
    assert_eq!(queue.enqueue(places[4], 10, 5), Ok(()));
    assert_eq!(queue.enqueue(places[2], 0, 3), Err(WaitQueueFull));
    assert_eq!(queue.wait_queue.drain_waiters().len(), 3);
    assert_eq!(queue.enqueue(places[2], 10, 3), Ok(()), "the queue is empty");
}

#[derive(Clone, Debug)]
enum WaitQueueOpCase {
    Request,
    Leave(usize),
    Done(usize),
    Failed(usize),
    Resume(usize),
    Routes(Vec<u8>, u32),
}

fn ops() -> impl Strategy<Value = Vec<WaitQueueOpCase>> {
    let op = prop_oneof![
        4 => Just(WaitQueueOpCase::Request),
        1 => any::<usize>().prop_map(WaitQueueOpCase::Leave),
        3 => any::<usize>().prop_map(WaitQueueOpCase::Done),
        1 => any::<usize>().prop_map(WaitQueueOpCase::Failed),
        1 => any::<usize>().prop_map(WaitQueueOpCase::Resume),
        2 => (proptest::collection::vec(0..4u8, 0..4), 0..6u32).prop_map(|(p, l)| WaitQueueOpCase::Routes(p, l)),
    ];
    proptest::collection::vec(op, 0..200)
}

/// Model of a shell's requests, to be compared with the queue's state.
#[derive(Debug, Default)]
struct WaitQueueModel {
    /// Number of ports; pods and requests are spread over them by their numbers.
    ports: u8,
    waiting: Vec<(QueuePlace, u32)>,
    in_flight: Vec<(QueuePlace, u32, PodEndpointKey)>,
    ended: Vec<u32>,
    ready: BTreeSet<u8>,
    paused: BTreeMap<u8, PauseNumber>,
    /// Timers of all pauses, including those that the RouteTable has ended.
    pause_timers: Vec<(PodEndpointKey, PauseNumber)>,
    limit: u32,
    requests: u32,
}

impl WaitQueueModel {
    /// Returns the port of a pod or request with this number; `None` for each `ports`-th one.
    fn port_of(&self, number: u32) -> Option<NonZeroU16> {
        NonZeroU16::new(u16::try_from(number % u32::from(self.ports)).expect("small"))
    }

    fn pod(&self, last: u8) -> PodEndpointKey {
        pod_port(last, self.port_of(u32::from(last)))
    }

    fn on_dispatched(&mut self, all: Vec<DispatchedRequest<u32>>) {
        for (name, pod) in all {
            let is_for_port =
                |(place, _): &(QueuePlace, u32)| place.service_port == pod.service_port;
            let at = self.waiting.iter().position(is_for_port).expect("one waits for the port");
            let (place, first) = self.waiting.remove(at);
            assert_eq!(name, first, "in order of arrival, and none twice");
            self.in_flight.push((place, name, pod));
        }
    }

    fn admit_or_enqueue(
        &mut self,
        queue: &mut SoleHolderQueueFixture<u32>,
        place: QueuePlace,
        name: u32,
        random: u64,
    ) {
        let port = place.service_port;
        if let Some(pod) = queue.admit_to_port(port, random) {
            let has_others = self.waiting.iter().any(|(other, _)| other.service_port == port);
            assert!(!has_others, "no request overtakes those that wait for the port");
            assert_eq!(pod.service_port, port);
            self.in_flight.push((place, name, pod));
        } else if queue.enqueue(place, 7, name).is_ok() {
            let at = self.waiting.partition_point(|(other, _)| other.arrival < place.arrival);
            self.waiting.insert(at, (place, name));
        } else {
            let of_pods = self.ready.len() * usize::try_from(self.limit).unwrap_or(0) * 10;
            let for_port = self.waiting.iter().filter(|(other, _)| other.service_port == port);
            assert!(for_port.count() >= 5 + of_pods, "refused only when full");
            self.ended.push(name);
        }
    }

    fn step(
        &mut self,
        queue: &mut SoleHolderQueueFixture<u32>,
        op: WaitQueueOpCase,
        mut random: impl FnMut() -> u64,
    ) {
        match op {
            WaitQueueOpCase::Request => {
                self.requests += 1;
                let place = queue.wait_queue.assign_place(self.port_of(self.requests));
                self.admit_or_enqueue(queue, place, self.requests, random());
            }
            WaitQueueOpCase::Leave(at) if !self.waiting.is_empty() => {
                let (place, name) = self.waiting.remove(at % self.waiting.len());
                assert_eq!(queue.remove_waiter(place), Some(name));
                self.ended.push(name);
            }
            WaitQueueOpCase::Done(at) if !self.in_flight.is_empty() => {
                let (_, name, pod) = self.in_flight.swap_remove(at % self.in_flight.len());
                self.ended.push(name);
                self.on_dispatched(queue.on_request_done(pod, random));
            }
            WaitQueueOpCase::Failed(at) if !self.in_flight.is_empty() => {
                let (place, name, pod) = self.in_flight.swap_remove(at % self.in_flight.len());
                // A timer outlives its pause if the routes end that, and must not end a later one.
                if let Some(pause) = queue.pause_pod(pod) {
                    self.paused.insert(last_octet(pod), pause);
                    self.pause_timers.push((pod, pause));
                }
                // As at a failed dial: the slot is given back before the request asks for another.
                self.on_dispatched(queue.on_request_done(pod, &mut random));
                self.admit_or_enqueue(queue, place, name, random());
            }
            WaitQueueOpCase::Resume(at) if !self.pause_timers.is_empty() => {
                let (pod, pause) = self.pause_timers.swap_remove(at % self.pause_timers.len());
                self.paused.retain(|_, it| *it != pause);
                self.on_dispatched(queue.resume_pod(pod, pause, random));
            }
            WaitQueueOpCase::Routes(ready, limit) => {
                self.ready = ready.iter().copied().collect();
                self.paused.retain(|last, _| self.ready.contains(last));
                self.limit = limit;
                let ready: Vec<PodEndpointKey> = ready.iter().map(|last| self.pod(*last)).collect();
                self.on_dispatched(queue.on_routes(ready, limit, random));
            }
            WaitQueueOpCase::Leave(_)
            | WaitQueueOpCase::Done(_)
            | WaitQueueOpCase::Failed(_)
            | WaitQueueOpCase::Resume(_) => {}
        }
    }

    /// Capacity of the open pods for a port; `None`: no hard limit.
    fn free_slots(&self, port: Option<NonZeroU16>) -> Option<usize> {
        let is_open =
            |it: &&u8| !self.paused.contains_key(it) && self.port_of(u32::from(**it)) == port;
        let open: Vec<_> = self.ready.iter().filter(is_open).collect();
        if open.is_empty() {
            return Some(0);
        }
        let limit = usize::try_from(self.limit).ok().filter(|&limit| limit > 0)?;
        let free = |&&at: &&u8| {
            let used = self.in_flight.iter().filter(|(_, _, pod)| last_octet(*pod) == at).count();
            limit.saturating_sub(used)
        };
        Some(open.iter().map(free).sum())
    }
}

fn last_octet(pod: PodEndpointKey) -> u8 {
    u8::try_from(pod.id).expect("test pods have small ids")
}

proptest! {
    /// Under any order of events every request is waiting, in flight or ended, and none waits while a pod has capacity.
    #[test]
    fn no_request_is_lost_or_dispatched_twice(ops in ops(), ports in 1..4u8, seed in any::<u64>()) {
        let mut queue = SoleHolderQueueFixture::new(WaitQueueBounds { max_requests: 5, max_bytes: 10_000 });
        let (mut model, mut state) = (WaitQueueModel { ports, ..WaitQueueModel::default() }, seed);
        for op in ops {
            model.step(&mut queue, op, || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                state.rotate_left(32)
            });
            prop_assert_eq!(queue.waiting_count(), model.waiting.len());
            prop_assert_eq!(queue.in_flight(), u64::try_from(model.in_flight.len()).expect("small"));
            let listed = queue.wait_queue.queued_pods().map(|it| u64::from(it.load.in_flight));
            prop_assert_eq!(listed.sum::<u64>(), queue.in_flight());
            let paused = queue.wait_queue.queued_pods().filter(|it| it.state == PodQueueState::Paused);
            prop_assert_eq!(paused.count(), model.paused.len());
            let total = model.waiting.len() + model.in_flight.len() + model.ended.len();
            prop_assert_eq!(u32::try_from(total).expect("small"), model.requests);
            let mut waiting = model.waiting.iter().map(|(place, _)| place.service_port);
            prop_assert!(waiting.all(|port| model.free_slots(port) == Some(0)));
        }
    }

    /// With a hard limit no pod ever has more requests, unless the limit was lowered while they were in flight.
    #[test]
    fn a_hard_limit_holds(limit in 1..6u32, requests in 1..60usize, pods in 1..5u8) {
        let mut queue = SoleHolderQueueFixture::<()>::new(WIDE_BOUNDS);
        queue.on_routes((0..pods).map(pod), limit, || 0);
        let mut used = BTreeMap::<PodEndpointKey, u32>::new();
        for _ in 0..requests {
            let Some(pod) = queue.admit(0) else { break };
            *used.entry(pod).or_default() += 1;
        }
        prop_assert!(used.values().all(|&count| count <= limit));
        let capacity = usize::from(pods) * usize::try_from(limit).expect("small");
        prop_assert_eq!(queue.in_flight(), u64::try_from(requests.min(capacity)).expect("small"));
    }
}

#[test]
fn a_passed_over_pod_gets_no_request_until_it_is_used_again_whatever_the_table_states() {
    let mut queue = WaitQueue::new(WIDE_BOUNDS);
    queue.on_routes([pod(1)], 0, || 0);
    assert_eq!(queue.admit(None, 0), Some(pod(1)));
    queue.pass_over(pod(1));
    assert_eq!(queue.admit(None, 0), None);
    for ready in [vec![], vec![pod(1)]] {
        queue.on_routes(ready, 0, || 0);
        assert_eq!(queue.admit(None, 0), None);
    }
    let paused = queue.queued_pods().map(|it| (it.load.key, it.load.in_flight, it.state));
    assert_eq!(paused.collect::<Vec<_>>(), [(pod(1), 1, PodQueueState::Paused)]);
    assert_eq!(queue.pause_pod(pod(1)), None, "it is not open");
    let place = queue.assign_place(None);
    queue.enqueue(place, 1, "waits").expect("room");
    assert_eq!(queue.use_again(pod(1), || 0), [("waits", pod(1))]);
    assert_eq!((queue.in_flight_at(pod(1)), queue.is_open(pod(1))), (2, true));
    assert!(queue.use_again(pod(1), || 0).is_empty(), "it is open");
}

#[test]
fn a_pod_that_is_passed_over_and_paused_is_open_once_both_have_ended() {
    let mut queue: WaitQueue<()> = WaitQueue::new(WIDE_BOUNDS);
    for is_pause_first in [false, true] {
        queue.on_routes([pod(1), pod(2)], 0, || 0);
        let pause = queue.pause_pod(pod(1)).expect("it is open");
        queue.pass_over(pod(1));
        if is_pause_first {
            queue.resume_pod(pod(1), pause, || 0);
        } else {
            queue.use_again(pod(1), || 0);
        }
        assert!(!queue.is_open(pod(1)));
        if is_pause_first {
            queue.use_again(pod(1), || 0);
        } else {
            queue.resume_pod(pod(1), pause, || 0);
        }
        assert!(queue.is_open(pod(1)));
    }
    queue.pass_over(pod(1));
    queue.on_routes([pod(2)], 0, || 0);
    queue.use_again(pod(1), || 0);
    assert!(!queue.is_open(pod(1)), "it is not ready");
}
