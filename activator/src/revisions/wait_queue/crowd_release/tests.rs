use std::{collections::VecDeque, net::SocketAddr};

use proptest::prelude::*;

use super::*;
use crate::{budget::WaitQueueBounds, revisions::wait_queue::PauseNumber};

const BOUNDS: WaitQueueBounds = WaitQueueBounds { max_requests: 10_000, max_bytes: 1 << 20 };

fn pod(last: u8) -> PodEndpointKey {
    pod_port(last, None)
}

fn pod_port(last: u8, service_port: Option<NonZeroU16>) -> PodEndpointKey {
    let address = SocketAddr::from(([10, 0, 0, last], 8080));
    PodEndpointKey { service_port, address, id: u64::from(last) }
}

/// Wait queue with a crowd, whose requests have the numbers from 0 on.
#[derive(Debug)]
struct CrowdFixture {
    queue: WaitQueue<usize>,
    crowd: usize,
    /// Requests that were dispatched, with their pods.
    dispatched: Vec<DispatchedRequest<usize>>,
}

impl CrowdFixture {
    fn new(crowd: usize) -> Self {
        let mut fixture = Self { queue: WaitQueue::new(BOUNDS), crowd: 0, dispatched: Vec::new() };
        (0..crowd).for_each(|_| assert!(fixture.enqueue_for(None), "below the bounds"));
        fixture
    }

    /// Puts one more request into the queue. Returns false if it is full.
    fn enqueue_for(&mut self, service_port: Option<NonZeroU16>) -> bool {
        let place = self.queue.assign_place(service_port);
        assert_eq!(self.queue.admit(service_port, 0), None);
        let has_room = self.queue.enqueue(place, 1, self.crowd).is_ok();
        self.crowd += usize::from(has_room);
        has_room
    }

    /// Applies a table with ready pods of these numbers, and with pods that start. Returns the release that begins.
    fn set_pods(
        &mut self,
        ready: impl IntoIterator<Item = u8>,
        starting: usize,
    ) -> Option<CrowdReleaseNumber> {
        self.queue.set_starting_pods(starting);
        let dispatched = self.queue.on_routes(ready.into_iter().map(pod), 0, || 0);
        self.dispatched.extend(dispatched);
        self.queue.take_new_release()
    }

    fn end(&mut self, number: CrowdReleaseNumber) {
        let dispatched = self.queue.end_release(number, || 0);
        self.dispatched.extend(dispatched);
    }

    fn finish_request(&mut self, last: u8) {
        let dispatched = self.queue.on_request_done(pod(last), || 0);
        self.dispatched.extend(dispatched);
    }

    fn resume(&mut self, last: u8, pause: PauseNumber) {
        let dispatched = self.queue.resume_pod(pod(last), pause, || 0);
        self.dispatched.extend(dispatched);
    }

    /// Number of requests that each of these pods has got.
    fn given<const N: usize>(&self, pods: [u8; N]) -> [usize; N] {
        pods.map(|last| self.dispatched.iter().filter(|(_, at)| *at == pod(last)).count())
    }
}

#[test]
fn a_crowd_is_divided_among_the_pods_that_start() {
    let mut crowd = CrowdFixture::new(1_000);
    assert!(crowd.set_pods([], 4).is_none(), "no pod is open");
    assert!(crowd.set_pods([1], 3).is_some());
    assert_eq!((crowd.given([1]), crowd.queue.waiting_count()), ([250], 750));
    assert!(crowd.set_pods([1, 2], 2).is_none(), "the release goes on");
    crowd.set_pods([1, 2, 3], 1);
    assert_eq!(crowd.given([1, 2, 3]), [250, 250, 250]);
    crowd.set_pods([1, 2, 3, 4], 0);
    assert_eq!(crowd.given([1, 2, 3, 4]), [250; 4]);
    assert_eq!(crowd.queue.admit(None, 0).map(|pod| pod.id), Some(1), "nothing waits any more");
}

#[test]
fn a_pod_that_finishes_requests_gets_up_to_twice_its_share() {
    let mut crowd = CrowdFixture::new(1_000);
    let release = crowd.set_pods([1], 9).expect("it begins");
    assert_eq!(crowd.given([1]), [100]);
    (1..=100).for_each(|done| {
        crowd.finish_request(1);
        assert_eq!(crowd.given([1]), [100 + done]);
    });
    crowd.finish_request(1);
    assert_eq!(crowd.given([1]), [200]);
    crowd.end(release);
    assert_eq!((crowd.given([1]), crowd.queue.waiting_count()), ([1_000], 0));
}

#[test]
fn without_a_pod_that_starts_one_pod_gets_all_at_once() {
    let mut crowd = CrowdFixture::new(1_000);
    assert!(crowd.set_pods([1], 0).is_none());
    assert_eq!(crowd.given([1]), [1_000]);
}

#[test]
fn a_short_queue_waits_for_no_other_pod() {
    let mut queue = CrowdFixture::new(MAX_SMALL_QUEUE);
    assert!(queue.set_pods([1], 9).is_none());
    assert_eq!(queue.given([1]), [MAX_SMALL_QUEUE]);
    let mut crowd = CrowdFixture::new(MAX_SMALL_QUEUE + 1);
    assert!(crowd.set_pods([1], 9).is_some());
    assert_eq!(crowd.given([1]), [MAX_SMALL_QUEUE], "not only its share of 7");
}

#[test]
fn the_rest_goes_to_those_that_have_got_fewest() {
    let mut crowd = CrowdFixture::new(1_000);
    let release = crowd.set_pods([1], 4).expect("it begins");
    (0..200).for_each(|_| crowd.finish_request(1));
    crowd.set_pods([1, 2], 3);
    assert_eq!(crowd.given([1, 2]), [400, 200]);
    crowd.end(release);
    assert_eq!(crowd.given([1, 2]), [500, 500]);
}

#[test]
fn pods_that_are_not_to_start_any_more_end_the_release() {
    let mut crowd = CrowdFixture::new(1_000);
    let release = crowd.set_pods([1], 4).expect("it begins");
    crowd.set_pods([1], 0);
    assert_eq!(crowd.given([1]), [1_000]);
    // The end that was scheduled comes later, and concerns no later release.
    crowd.set_pods([], 2);
    (0..200).for_each(|_| assert!(crowd.enqueue_for(None)));
    assert!(crowd.set_pods([1], 2).is_some_and(|later| later != release));
    let waiting = crowd.queue.waiting_count();
    crowd.end(release);
    assert_eq!((waiting > 0, crowd.queue.waiting_count()), (true, waiting));
}

#[test]
fn a_request_that_comes_meanwhile_waits_behind_the_crowd() {
    let mut crowd = CrowdFixture::new(200);
    let release = crowd.set_pods([1], 1).expect("it begins");
    assert_eq!(crowd.given([1]), [100]);
    assert!(crowd.enqueue_for(None));
    assert_eq!(crowd.queue.preview(None, 0), None);
    crowd.end(release);
    let order: Vec<usize> = crowd.dispatched.iter().map(|(name, _)| *name).collect();
    assert_eq!(order, (0..=200).collect::<Vec<_>>());
}

#[test]
fn a_release_refuses_no_request() {
    let mut crowd = CrowdFixture::new(BOUNDS.max_requests);
    crowd.set_pods([1], 1).expect("it begins");
    while crowd.queue.has_room(None, 1) {
        assert!(crowd.queue.make_room(None, 1, || 0).is_empty());
        assert!(crowd.enqueue_for(None));
    }
    let dispatched = crowd.queue.make_room(None, 1, || 0);
    assert_eq!((dispatched.len(), crowd.queue.waiting_count()), (BOUNDS.max_requests, 0));
    assert_eq!(crowd.queue.admit(None, 0), Some(pod(1)));
}

#[test]
fn a_paused_pod_keeps_its_share_and_delays_no_end() {
    let mut crowd = CrowdFixture::new(1_000);
    let release = crowd.set_pods([1], 1).expect("it begins");
    let pause = crowd.queue.pause_pod(pod(1)).expect("it is open");
    crowd.set_pods([1], 1);
    assert_eq!(crowd.given([1]), [500], "it is still paused");
    crowd.end(release);
    assert_eq!(crowd.queue.waiting_count(), 500, "no pod is open");
    crowd.resume(1, pause);
    assert_eq!((crowd.given([1]), crowd.queue.waiting_count()), ([1_000], 0));
}

#[test]
fn each_port_has_a_release_of_its_own() {
    let [http, postgres] = [80, 5432].map(NonZeroU16::new);
    let mut crowd = CrowdFixture::new(0);
    for _ in 0..200 {
        assert!(crowd.enqueue_for(http));
    }
    assert!(crowd.enqueue_for(postgres));
    let pods = [pod_port(1, http), pod_port(1, postgres)];
    crowd.queue.set_starting_pods(1);
    let dispatched = crowd.queue.on_routes(pods, 0, || 0);
    let at = |pod: PodEndpointKey| dispatched.iter().filter(|(_, to)| *to == pod).count();
    assert_eq!(pods.map(at), [100, 1]);
    assert_eq!(crowd.queue.admit(postgres, 0), Some(pods[1]));
    assert_eq!(crowd.queue.admit(http, 0), None);
}

#[test]
fn standby_pods_stay_frozen_while_another_pod_is_open() {
    let mut crowd = CrowdFixture::new(1_000);
    crowd.queue.set_ranks([(pod(1), PodRank::Standby)]);
    let release = crowd.set_pods([1, 2], 2).expect("it begins");
    assert_eq!(crowd.given([1, 2]), [0, 250]);
    crowd.end(release);
    assert_eq!(crowd.given([1, 2]), [0, 1_000]);
}

#[test]
fn a_hard_limit_ends_a_release_and_its_slots_count() {
    let mut crowd = CrowdFixture::new(1_000);
    crowd.set_pods([1], 1).expect("it begins");
    crowd.queue.set_starting_pods(1);
    assert!(crowd.queue.on_routes([pod(1)], 600, || 0).is_empty());
    assert_eq!(crowd.queue.set_free_slots(|_| 100, || 0).len(), 100);
    assert!(crowd.queue.take_new_release().is_none());
}

proptest! {
    /// Ten pods become ready within the time of a release, one every ten steps of a millisecond. Whatever time each
    /// takes for a request, all requests are dispatched once and in order, and no pod gets more than twice its share.
    #[test]
    fn no_pod_gets_more_than_twice_its_share_whatever_its_speed(
        crowd in 320..1_200usize,
        response_ms in proptest::collection::vec(0..150usize, 10),
    ) {
        let mut fixture = CrowdFixture::new(crowd);
        let mut release = None;
        // Times at which requests end, for each pod.
        let mut ends: Vec<VecDeque<usize>> = vec![VecDeque::new(); 10];
        let mut seen = 0;
        for now_ms in 0..=100usize {
            if now_ms % 10 == 0 && now_ms < 100 {
                let ready = now_ms / 10 + 1;
                let begun = fixture.set_pods((0..10u8).take(ready), 10 - ready);
                release = release.or(begun);
            }
            // Without a pause between request and response, one response leads to the next in the same step.
            loop {
                for (_, at) in &fixture.dispatched[seen..] {
                    let at = usize::try_from(at.id).expect("small");
                    ends[at].push_back(now_ms + response_ms[at]);
                }
                seen = fixture.dispatched.len();
                let is_first_over = |at: &u8| ends[usize::from(*at)].front().is_some_and(|end| *end <= now_ms);
                let Some(last) = (0..10u8).find(is_first_over) else { break };
                ends[usize::from(last)].pop_front();
                fixture.finish_request(last);
            }
            prop_assert_eq!(fixture.queue.waiting_count() + fixture.dispatched.len(), crowd);
        }
        prop_assert!(release.is_some());
        prop_assert_eq!(fixture.queue.waiting_count(), 0, "all pods were there after 90 steps");
        let order: Vec<usize> = fixture.dispatched.iter().map(|(name, _)| *name).collect();
        prop_assert_eq!(order, (0..crowd).collect::<Vec<_>>());
        let given = fixture.given([0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        prop_assert!(given.iter().all(|count| count * 10 <= crowd * 2), "{:?}", given);
    }

    /// Pods that are awaited and never come delay the crowd only up to the end of its release.
    #[test]
    fn one_pod_gets_all_at_the_end_of_the_release(
        crowd in 65..1_000usize,
        missing in 1..200usize,
        done in 0..1_500usize,
    ) {
        let mut fixture = CrowdFixture::new(crowd);
        let release = fixture.set_pods([1], missing).expect("it begins");
        for _ in 0..done {
            if fixture.queue.in_flight() > 0 {
                fixture.finish_request(1);
            }
        }
        fixture.end(release);
        let order: Vec<usize> = fixture.dispatched.iter().map(|(name, _)| *name).collect();
        prop_assert_eq!(order, (0..crowd).collect::<Vec<_>>());
        prop_assert_eq!(fixture.queue.waiting_count(), 0);
    }
}
