//! Pure: choice of the ready pod that gets a request, and of the Revision by a service's percents.
//!
//! Knative's three policies by containerConcurrency (knative/serving `pkg/activator/net/throttler.go`
//! and `lb_policy.go`). 0: the better of two random pods. 1 to 3: the first free pod by address. From 4 on: round robin
//! over pods that are not full.
//!
//! Pods have ranks: hints may prefer some, and those with a standby order come last. A request goes to a pod of the
//! first rank in which one has capacity, by the same policies.

use crate::pods::endpoint_key::PodEndpointKey;

/// One pod that takes requests, with its load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodLoad {
    /// Key of the pod.
    pub key: PodEndpointKey,
    /// Requests that this activator has sent to the pod and that have not ended.
    pub in_flight: u32,
    /// Further requests that it may get, under a hard limit.
    pub free_slots: u32,
    /// Rank of the pod for requests of this activator.
    pub rank: PodRank,
}

/// Rank of a pod for requests of one activator. Pods of a later rank get requests only if none before has capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PodRank {
    /// Hints prefer the pod.
    Preferred,
    /// Hints do not prefer the pod, and it need not stay frozen.
    #[default]
    Usual,
    /// The pod has a standby order, and stays frozen while a pod without one takes requests.
    Standby,
}

impl PodRank {
    /// Ranks in the order in which pods get requests.
    pub const ALL: [Self; 3] = [Self::Preferred, Self::Usual, Self::Standby];
}

/// Policy by which a pod is chosen among those of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BalancePolicy {
    /// The less loaded of two random pods.
    BetterOfTwo,
    /// The first pod with a free slot, by address.
    FirstFree,
    /// The next pod with a free slot, in turn.
    RoundRobin,
}

/// Highest containerConcurrency for which the first free pod is chosen.
const FIRST_FREE_UP_TO: u32 = 3;

impl BalancePolicy {
    /// Returns the policy for a hard limit (containerConcurrency); 0: no limit.
    pub fn of_limit(limit: u32) -> Self {
        match limit {
            0 => Self::BetterOfTwo,
            1..=FIRST_FREE_UP_TO => Self::FirstFree,
            _ => Self::RoundRobin,
        }
    }
}

/// Chooses among `pods`, sorted by key. Returns an index; `None`: no pod has capacity, or there is none.
///
/// `limit` is containerConcurrency (0: no limit, and all pods have capacity). `cursor` is the position of round robin.
/// `random` is uniform over u64.
pub fn pick_pod(pods: &[PodLoad], limit: u32, cursor: &mut usize, random: u64) -> Option<usize> {
    match BalancePolicy::of_limit(limit) {
        BalancePolicy::BetterOfTwo => better_of_two(pods, random),
        BalancePolicy::FirstFree => pods.iter().position(|pod| pod.free_slots > 0),
        BalancePolicy::RoundRobin => next_round_robin(pods, cursor),
    }
}

/// Chooses among `pods` as [`pick_pod`] does, of the first rank in which a pod has capacity.
pub fn pick_ranked_pod(
    pods: &[PodLoad],
    limit: u32,
    cursor: &mut usize,
    random: u64,
) -> Option<usize> {
    PodRank::ALL.into_iter().find_map(|rank| {
        let places: Vec<usize> = (0..pods.len()).filter(|&at| pods[at].rank == rank).collect();
        let ranked: Vec<PodLoad> = places.iter().map(|&at| pods[at]).collect();
        pick_pod(&ranked, limit, cursor, random).map(|at| places[at])
    })
}

fn better_of_two(pods: &[PodLoad], random: u64) -> Option<usize> {
    let count = u64::try_from(pods.len()).ok().filter(|&count| count > 0)?;
    let (high, low) = (random >> 32, random & u64::from(u32::MAX));
    let one = to_index(low % count);
    if count == 1 {
        return Some(one);
    }
    // The second pick is another pod, so that two pods are always compared.
    let other = to_index((low % count + 1 + high % (count - 1)) % count);
    // For equal loads `one` is uniformly random already.
    Some(if pods[other].in_flight < pods[one].in_flight { other } else { one })
}

fn to_index(value: u64) -> usize {
    usize::try_from(value).expect("below a slice's length: remainder of it")
}

fn next_round_robin(pods: &[PodLoad], cursor: &mut usize) -> Option<usize> {
    let count = pods.len();
    let order = (0..count).map(|step| (*cursor + step) % count);
    let index = order.into_iter().find(|&at| pods[at].free_slots > 0)?;
    *cursor = (index + 1) % count;
    Some(index)
}

/// Chooses the Revision of one request by the targets' percents. `None` without targets.
///
/// Example: with percents 90 and 10, a `random` value whose remainder modulo 100 is 95 chooses the second.
pub fn pick_by_percent<T>(targets: &[T], percent: impl Fn(&T) -> u8, random: u64) -> Option<&T> {
    let total: u64 = targets.iter().map(|target| u64::from(percent(target))).sum();
    let mut remainder = random.checked_rem(total)?;
    for target in targets {
        match remainder.checked_sub(u64::from(percent(target))) {
            Some(rest) => remainder = rest,
            None => return Some(target),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    /// Pods with these numbers of requests in flight and the hard limit `limit`.
    fn pod_loads(in_flight: &[u32], limit: u32) -> Vec<PodLoad> {
        let load = |(at, &in_flight): (usize, &u32)| {
            let address = SocketAddr::from(([10, 0, 0, u8::try_from(at).unwrap()], 80));
            let key = PodEndpointKey { service_port: None, address, id: 0 };
            let free_slots = limit.saturating_sub(in_flight);
            PodLoad { key, in_flight, free_slots, rank: PodRank::Usual }
        };
        in_flight.iter().enumerate().map(load).collect()
    }

    #[test]
    fn without_pods_none_is_picked() {
        for limit in [0, 1, 9] {
            assert_eq!(pick_pod(&[], limit, &mut 0, 7), None);
        }
    }

    #[test]
    fn without_a_limit_the_less_loaded_of_two_is_picked() {
        let pods = pod_loads(&[5, 1], 0);
        let mut spread = |random: u64| pick_pod(&pods, 0, &mut 0, random);
        assert_eq!((0..100).map(&mut spread).collect::<Vec<_>>(), vec![Some(1); 100]);
    }

    #[test]
    fn without_a_limit_equal_pods_are_picked_evenly() {
        let pods = pod_loads(&[0, 0, 0], 0);
        let mut picks = [0; 3];
        for random in 0..3_000u64 {
            picks[pick_pod(&pods, 0, &mut 0, random.wrapping_mul(0x9E37_79B9_7F4A_7C15))
                .unwrap()] += 1;
        }
        assert!(picks.iter().all(|&count| count > 800), "{picks:?}");
    }

    #[test]
    fn a_small_limit_takes_the_first_free_by_address() {
        assert_eq!(pick_pod(&pod_loads(&[2, 1, 0], 2), 2, &mut 0, 9), Some(1));
        assert_eq!(pick_pod(&pod_loads(&[2, 2, 2], 2), 2, &mut 0, 9), None);
    }

    #[test]
    fn a_larger_limit_is_round_robin_and_skips_full_pods() {
        let (pods, mut cursor) = (pod_loads(&[0, 4, 0], 4), 0);
        let picked: Vec<_> = (0..4).map(|_| pick_pod(&pods, 4, &mut cursor, 0)).collect();
        assert_eq!(picked, [Some(0), Some(2), Some(0), Some(2)]);
    }

    #[test]
    fn preferred_pods_get_the_requests_as_long_as_they_have_capacity() {
        for limit in [0, 2, 4] {
            let mut pods = pod_loads(&[0, 1, 1, 0], limit);
            pods[1].rank = PodRank::Preferred;
            pods[2].rank = PodRank::Preferred;
            let mut cursor = 0;
            let mut pick = |random| pick_ranked_pod(&pods, limit, &mut cursor, random);
            let mut picks: Vec<_> = (0..100).map(&mut pick).collect();
            picks.sort_unstable();
            picks.dedup();
            let first_free = vec![Some(1)];
            let both = vec![Some(1), Some(2)];
            assert_eq!(picks, if limit == 2 { first_free } else { both }, "limit {limit}");
        }
        let mut full = pod_loads(&[0, 2], 2);
        full[1].rank = PodRank::Preferred;
        assert_eq!(pick_ranked_pod(&full, 2, &mut 0, 0), Some(0));
    }

    #[test]
    fn standby_pods_get_requests_only_if_no_other_has_capacity() {
        use PodRank::{Preferred, Standby, Usual};
        let ranked = |in_flight: &[u32], limit, ranks: &[PodRank]| {
            let mut pods = pod_loads(in_flight, limit);
            pods.iter_mut().zip(ranks).for_each(|(pod, rank)| pod.rank = *rank);
            pods
        };
        for limit in [0, 2, 4] {
            let pods = ranked(&[0, 1, 1], limit, &[Standby, Usual, Usual]);
            let mut cursor = 0;
            let mut pick = |random| pick_ranked_pod(&pods, limit, &mut cursor, random);
            assert!((0..100).map(&mut pick).all(|it| it > Some(0)), "limit {limit}");
            let alone = ranked(&[7, 0], limit, &[Standby, Standby]);
            assert_eq!(pick_ranked_pod(&alone, limit, &mut 0, 0), Some(1), "limit {limit}");
        }
        let full = ranked(&[0, 2, 2], 2, &[Standby, Usual, Preferred]);
        assert_eq!(pick_ranked_pod(&full, 2, &mut 0, 0), Some(0));
        let free = ranked(&[0, 1, 2], 2, &[Standby, Usual, Preferred]);
        assert_eq!(pick_ranked_pod(&free, 2, &mut 0, 0), Some(1));
        assert_eq!(pick_ranked_pod(&[], 0, &mut 0, 0), None);
    }

    #[test]
    fn a_split_follows_the_percents() {
        let targets = [("old", 90), ("new", 10)];
        let new = (0..1_000)
            .filter(|&random| pick_by_percent(&targets, |it| it.1, random) == Some(&("new", 10)));
        assert_eq!(new.count(), 100);
        assert_eq!(pick_by_percent(&[] as &[u8], |&it| it, 5), None);
    }
}
