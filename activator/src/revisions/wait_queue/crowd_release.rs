//! Pure: the release of a crowd: of many requests that wait for one port when its first pod opens, while more pods
//! start.
//!
//! Each pod gets its even share at once, and more as its requests end, up to twice the share. The other requests wait
//! for the pods that start. A release ends once no pod starts any more, and at the latest [`CROWD_RELEASE_TIME`] after
//! its begin. The rest then goes to the open pods, each request to the one that has got fewest.

use std::{collections::BTreeMap, num::NonZeroU16, time::Duration};

use super::{DispatchedRequest, WaitQueue, WaitingAmount};
use crate::{
    pods::endpoint_key::PodEndpointKey,
    revisions::balance::{PodLoad, PodRank},
};

/// Number of waiting requests up to which they are no crowd. Each pod may have as many, however small its share is.
/// A pod with a usual listen backlog gets no more connections at once before its first response.
const MAX_SMALL_QUEUE: usize = 64;

/// Time from the begin of a release to its end, in which more pods become ready. No request waits longer because pods
/// start.
pub const CROWD_RELEASE_TIME: Duration = Duration::from_millis(100);

/// Number of one release. It distinguishes the release from later ones of the same queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrowdReleaseNumber(u64);

/// Release of the requests that waited for one port.
#[derive(Debug)]
pub(super) struct CrowdRelease {
    number: CrowdReleaseNumber,
    /// Number of requests that waited at its begin.
    crowd: usize,
    /// Number of pods among which the crowd is divided: ready ones, and those that start.
    pods: usize,
    /// Number of requests that each pod has got, by the id of its key.
    given: BTreeMap<u64, usize>,
    /// True until its end, from which on the pods get all that waits.
    is_bounded: bool,
}

impl<W> WaitQueue<W> {
    /// Sets the number of pods that start, before the next [`on_routes`](Self::on_routes).
    pub fn set_starting_pods(&mut self, count: usize) {
        self.starting_pods = count;
    }

    /// Returns true while the crowd that waits for a port is released. A further request waits behind it, and always has
    /// room.
    pub fn is_releasing(&self, service_port: Option<NonZeroU16>) -> bool {
        self.releases.contains_key(&service_port)
    }

    /// Begins the release of each crowd whose port has an open pod now. Ends all releases if no pod starts any more.
    pub(super) fn update_releases(&mut self) {
        if self.limit > 0 {
            // Slots bound what each pod gets.
            self.releases.clear();
            return;
        }
        if self.starting_pods == 0 {
            self.releases.values_mut().for_each(CrowdRelease::end);
            return;
        }
        let is_new = |(port, amount): &(&Option<NonZeroU16>, &WaitingAmount)| {
            amount.requests > MAX_SMALL_QUEUE
                && !self.open_range(**port).is_empty()
                && !self.is_releasing(**port)
        };
        let crowds = self.waiting_by_port.iter().filter(is_new);
        let crowds: Vec<_> = crowds.map(|(port, amount)| (*port, amount.requests)).collect();
        if !crowds.is_empty() {
            self.last_release += 1;
            let number = CrowdReleaseNumber(self.last_release);
            self.new_release = Some(number);
            let begun =
                crowds.into_iter().map(|(port, crowd)| (port, CrowdRelease::new(number, crowd)));
            self.releases.extend(begun);
        }
        for (port, release) in &mut self.releases {
            // Paused pods count too, so that a short pause leaves the shares as they are.
            let ready = self.ready_pods.iter().filter(|pod| pod.service_port == *port).count();
            release.set_pods(ready + self.starting_pods);
        }
    }

    /// Returns the release that the last [`on_routes`](Self::on_routes) has begun. The shell
    /// [ends](Self::end_release) it after [`CROWD_RELEASE_TIME`].
    pub fn take_new_release(&mut self) -> Option<CrowdReleaseNumber> {
        self.new_release.take()
    }

    /// Ends this release. Returns the requests dispatched by it. It has no effect if the release has ended already, even
    /// if a later one has begun.
    pub fn end_release(
        &mut self,
        number: CrowdReleaseNumber,
        random: impl FnMut() -> u64,
    ) -> Vec<DispatchedRequest<W>> {
        let ended = self.releases.values_mut().filter(|release| release.number == number);
        ended.for_each(CrowdRelease::end);
        self.dispatch_waiting(random)
    }

    /// Ends the release for a port if a further request of `bytes` bytes has no room in the queue: a release must not
    /// make a request fail. Returns the requests dispatched by it.
    pub fn make_room(
        &mut self,
        service_port: Option<NonZeroU16>,
        bytes: usize,
        random: impl FnMut() -> u64,
    ) -> Vec<DispatchedRequest<W>> {
        // Nearly always there is no release, so that requests pay nothing for it.
        if self.releases.is_empty() || self.has_room(service_port, bytes) {
            return Vec::new();
        }
        if let Some(release) = self.releases.get_mut(&service_port) {
            release.end();
        }
        self.dispatch_waiting(random)
    }
}

impl CrowdRelease {
    /// Begins the release of this number of requests.
    fn new(number: CrowdReleaseNumber, crowd: usize) -> Self {
        Self { number, crowd, pods: 1, given: BTreeMap::new(), is_bounded: true }
    }

    /// Sets the number of pods among which the crowd is divided.
    fn set_pods(&mut self, pods: usize) {
        self.pods = pods.max(1);
    }

    /// Ends the release: all open pods have capacity.
    fn end(&mut self) {
        self.is_bounded = false;
    }

    /// Returns true once the release has ended.
    pub(super) fn has_ended(&self) -> bool {
        !self.is_bounded
    }

    /// Chooses the pod for the next request: of those with the first rank and capacity, the one that has got fewest.
    /// Returns an index; `None`: no pod has capacity.
    pub(super) fn pick(&self, pods: &[PodLoad]) -> Option<usize> {
        // Without a hard limit, pods of a later rank get nothing while one of the first is open.
        let rank = first_rank(pods)?;
        let candidates = pods.iter().enumerate().filter(|(_, pod)| pod.rank == rank);
        let candidates = candidates.map(|(at, pod)| (self.given_to(pod.key), at, pod));
        let candidates = candidates.filter(|(given, _, pod)| self.has_capacity(*given, pod));
        candidates.min_by_key(|(given, at, _)| (*given, *at)).map(|(_, at, _)| at)
    }

    /// Records that a pod gets one request.
    pub(super) fn record(&mut self, pod: PodEndpointKey) {
        *self.given.entry(pod.id).or_default() += 1;
    }

    fn given_to(&self, pod: PodEndpointKey) -> usize {
        self.given.get(&pod.id).copied().unwrap_or(0)
    }

    /// Returns true if a pod that has got `given` requests may get another one.
    fn has_capacity(&self, given: usize, pod: &PodLoad) -> bool {
        if !self.is_bounded {
            return true;
        }
        let max_in_flight = self.crowd.div_ceil(self.pods).max(MAX_SMALL_QUEUE);
        let max_given = (self.crowd.saturating_mul(2) / self.pods).max(MAX_SMALL_QUEUE);
        let in_flight = usize::try_from(pod.in_flight).unwrap_or(usize::MAX);
        in_flight < max_in_flight && given < max_given
    }
}

fn first_rank(pods: &[PodLoad]) -> Option<PodRank> {
    PodRank::ALL.into_iter().find(|rank| pods.iter().any(|pod| pod.rank == *rank))
}

#[cfg(test)]
mod tests;
