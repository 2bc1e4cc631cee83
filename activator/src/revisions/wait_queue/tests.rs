use std::net::SocketAddr;

use proptest::prelude::*;

use super::*;

const WIDE_BOUNDS: WaitQueueBounds = WaitQueueBounds { max_requests: 100, max_bytes: 10_000 };

fn pod(last: u8) -> PodEndpointKey {
    PodEndpointKey { address: SocketAddr::from(([10, 0, 0, last], 8080)), id: u64::from(last) }
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

    fn assign_arrival_number(&mut self) -> ArrivalNumber {
        self.wait_queue.assign_arrival_number()
    }

    fn admit(&mut self, random: u64) -> Option<PodEndpointKey> {
        let pod = self.wait_queue.admit(random)?;
        *self.in_flight.entry(pod).or_default() += 1;
        Some(pod)
    }

    fn enqueue(
        &mut self,
        arrival: ArrivalNumber,
        bytes: usize,
        waiter: W,
    ) -> Result<(), WaitQueueFull> {
        self.wait_queue.enqueue(arrival, bytes, waiter)
    }

    fn remove_waiter(&mut self, arrival: ArrivalNumber) -> Option<W> {
        self.wait_queue.remove_waiter(arrival)
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

fn enqueue_request(queue: &mut SoleHolderQueueFixture<u32>, name: u32) -> ArrivalNumber {
    let arrival = queue.assign_arrival_number();
    assert_eq!(queue.admit(0), None);
    queue.enqueue(arrival, 1, name).expect("below the bounds");
    arrival
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
    let [one, two, three] = [(); 3].map(|()| queue.assign_arrival_number());
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
        let arrival = queue.assign_arrival_number();
        queue.enqueue(arrival, 0, ()).is_ok()
    };
    assert_eq!((admitted, (0..100).filter(|_| enqueue(&mut queue)).count()), (4, 41));
    assert!(queue.pause_pod(pod(1)).is_some(), "a paused pod still counts");
    assert_eq!(queue.on_routes([pod(2)], 0, || 0).len(), 41);
}

#[test]
fn preferred_pods_come_first_also_after_a_pause() {
    let mut queue: SoleHolderQueueFixture<u32> = SoleHolderQueueFixture::new(WIDE_BOUNDS);
    queue.wait_queue.set_preferred([pod(2)]);
    queue.on_routes([pod(1), pod(2)], 0, || 0);
    assert_eq!((0..9).filter(|random| queue.admit(*random) == Some(pod(2))).count(), 9);
    let pause = queue.pause_pod(pod(2)).expect("it is open");
    assert_eq!(queue.admit(0), Some(pod(1)), "the only open one");
    queue.resume_pod(pod(2), pause, || 0);
    assert_eq!(queue.admit(0), Some(pod(2)));
    queue.wait_queue.set_preferred([]);
    assert_eq!(queue.admit(0), Some(pod(1)), "the less loaded one");
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
    let first = queue.assign_arrival_number();
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
    waiting: Vec<(ArrivalNumber, u32)>,
    in_flight: Vec<(ArrivalNumber, u32, PodEndpointKey)>,
    ended: Vec<u32>,
    ready: BTreeSet<u8>,
    paused: BTreeMap<u8, PauseNumber>,
    /// Timers of all pauses, including those that the RouteTable has ended.
    pause_timers: Vec<(PodEndpointKey, PauseNumber)>,
    limit: u32,
    requests: u32,
}

impl WaitQueueModel {
    fn on_dispatched(&mut self, all: Vec<DispatchedRequest<u32>>) {
        for (name, pod) in all {
            let (arrival, first) = self.waiting.remove(0);
            assert_eq!(name, first, "in order of arrival, and none twice");
            self.in_flight.push((arrival, name, pod));
        }
    }

    fn admit_or_enqueue(
        &mut self,
        queue: &mut SoleHolderQueueFixture<u32>,
        arrival: ArrivalNumber,
        name: u32,
        random: u64,
    ) {
        if let Some(pod) = queue.admit(random) {
            assert!(self.waiting.is_empty(), "no request overtakes those that wait");
            self.in_flight.push((arrival, name, pod));
        } else if queue.enqueue(arrival, 7, name).is_ok() {
            let at = self.waiting.partition_point(|(other, _)| *other < arrival);
            self.waiting.insert(at, (arrival, name));
        } else {
            let of_pods = self.ready.len() * usize::try_from(self.limit).unwrap_or(0) * 10;
            assert!(self.waiting.len() >= 5 + of_pods, "refused only when full");
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
                let arrival = queue.assign_arrival_number();
                self.admit_or_enqueue(queue, arrival, self.requests, random());
            }
            WaitQueueOpCase::Leave(at) if !self.waiting.is_empty() => {
                let (arrival, name) = self.waiting.remove(at % self.waiting.len());
                assert_eq!(queue.remove_waiter(arrival), Some(name));
                self.ended.push(name);
            }
            WaitQueueOpCase::Done(at) if !self.in_flight.is_empty() => {
                let (_, name, pod) = self.in_flight.swap_remove(at % self.in_flight.len());
                self.ended.push(name);
                self.on_dispatched(queue.on_request_done(pod, random));
            }
            WaitQueueOpCase::Failed(at) if !self.in_flight.is_empty() => {
                let (arrival, name, pod) = self.in_flight.swap_remove(at % self.in_flight.len());
                if let Some(pause) = queue.pause_pod(pod) {
                    self.paused.insert(last_octet(pod), pause);
                    self.pause_timers.push((pod, pause));
                }
                self.on_dispatched(queue.on_request_done(pod, &mut random));
                self.admit_or_enqueue(queue, arrival, name, random());
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
                self.on_dispatched(queue.on_routes(ready.into_iter().map(pod), limit, random));
            }
            WaitQueueOpCase::Leave(_)
            | WaitQueueOpCase::Done(_)
            | WaitQueueOpCase::Failed(_)
            | WaitQueueOpCase::Resume(_) => {}
        }
    }

    /// Capacity of the open pods; `None`: no hard limit.
    fn free_slots(&self) -> Option<usize> {
        let open: Vec<_> = self.ready.iter().filter(|it| !self.paused.contains_key(it)).collect();
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
    fn no_request_is_lost_or_dispatched_twice(ops in ops(), seed in any::<u64>()) {
        let mut queue = SoleHolderQueueFixture::new(WaitQueueBounds { max_requests: 5, max_bytes: 10_000 });
        let (mut model, mut state) = (WaitQueueModel::default(), seed);
        for op in ops {
            model.step(&mut queue, op, || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                state.rotate_left(32)
            });
            prop_assert_eq!(queue.waiting_count(), model.waiting.len());
            prop_assert_eq!(queue.in_flight(), u64::try_from(model.in_flight.len()).expect("small"));
            let total = model.waiting.len() + model.in_flight.len() + model.ended.len();
            prop_assert_eq!(u32::try_from(total).expect("small"), model.requests);
            prop_assert!(model.waiting.is_empty() || model.free_slots() == Some(0));
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
