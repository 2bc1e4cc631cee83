//! Pure: choice of the ready pod that gets a request.
//!
//! Knative's three policies by containerConcurrency (knative/serving `pkg/activator/net/throttler.go`
//! and `lb_policy.go`). 0: the better of two random pods. 1 to 3: the first free pod by address. From 4 on: round robin
//! over pods that are not full.

use std::{net::SocketAddr, time::Duration};

/// Key of one pod for as long as it keeps its address. Keys are ordered by address, as in Knative.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodEndpointKey {
    /// Address and port at which the pod serves.
    pub address: SocketAddr,
    /// Number that distinguishes pods which had the same address one after the other.
    pub id: u64,
}

/// One pod that takes requests, with its load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodLoad {
    /// Key of the pod.
    pub key: PodEndpointKey,
    /// Requests that this activator has sent to the pod and that have not ended.
    pub in_flight: u32,
    /// Further requests that it may get, under a hard limit.
    pub free_slots: u32,
}

/// Highest containerConcurrency for which the first free pod is chosen.
const FIRST_FREE_UP_TO: u32 = 3;

/// Chooses among `slots`, sorted by key. Returns an index; `None`: no pod has room, or there is none.
///
/// `limit` is containerConcurrency (0: no limit, and all pods have room). `cursor` is the position of round robin.
/// `chance` is uniform over u64.
pub fn pick_pod(slots: &[PodLoad], limit: u32, cursor: &mut usize, chance: u64) -> Option<usize> {
    match limit {
        0 => better_of_two(slots, chance),
        1..=FIRST_FREE_UP_TO => slots.iter().position(|slot| slot.free_slots > 0),
        _ => next_round_robin(slots, cursor),
    }
}

fn better_of_two(slots: &[PodLoad], chance: u64) -> Option<usize> {
    let count = u64::try_from(slots.len()).ok().filter(|&count| count > 0)?;
    let (high, low) = (chance >> 32, chance & u64::from(u32::MAX));
    let one = to_index(low % count);
    if count == 1 {
        return Some(one);
    }
    // The second pick is another pod, so that two pods are always compared.
    let other = to_index((low % count + 1 + high % (count - 1)) % count);
    // For equal loads `one` is uniformly random already.
    Some(if slots[other].in_flight < slots[one].in_flight { other } else { one })
}

fn to_index(value: u64) -> usize {
    usize::try_from(value).expect("below a slice's length: remainder of it")
}

fn next_round_robin(slots: &[PodLoad], cursor: &mut usize) -> Option<usize> {
    let count = slots.len();
    let turn = (0..count).map(|step| (*cursor + step) % count);
    let found = turn.into_iter().find(|&at| slots[at].free_slots > 0)?;
    *cursor = (found + 1) % count;
    Some(found)
}

/// Average time between two connections that are asked to reconnect: a pod's accept queue holds about a hundred.
const RECONNECT_SPACING: Duration = Duration::from_micros(200);
/// Time within which all connections are asked to reconnect, however many there are.
const RECONNECT_MAX_SPREAD: Duration = Duration::from_secs(2);

/// Position of a connection among those that are asked to reconnect, drawn at random when it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReconnectJitter(u16);

impl ReconnectJitter {
    /// Draws a position. `chance` is uniform over u64.
    pub fn from_random(chance: u64) -> Self {
        Self((chance >> 48) as u16)
    }

    /// Returns true if the connection is asked to reconnect now. `since` is the time since when all of `connections`
    /// may use the direct path.
    ///
    /// A single connection is asked at once. Many are asked one after the other, so that pods do not get all of them at
    /// the same time. Example: of 1,001 connections, half are asked within 100 ms and all within 200 ms.
    pub fn should_close(self, since: Duration, connections: u32) -> bool {
        let spread = (RECONNECT_SPACING * connections.saturating_sub(1)).min(RECONNECT_MAX_SPREAD);
        since >= spread * u32::from(self.0) / (1 << 16)
    }
}

/// Chooses the revision of one request by the targets' percents. `None` without targets.
///
/// Example: with percents 90 and 10, a `chance` whose remainder modulo 100 is 95 chooses the second.
pub fn pick_by_percent<T>(targets: &[T], percent: impl Fn(&T) -> u8, chance: u64) -> Option<&T> {
    let total: u64 = targets.iter().map(|target| u64::from(percent(target))).sum();
    let mut ticket = chance.checked_rem(total)?;
    for target in targets {
        match ticket.checked_sub(u64::from(percent(target))) {
            Some(rest) => ticket = rest,
            None => return Some(target),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pods with these numbers of requests in flight and the hard limit `limit`.
    fn pod_loads(in_flight: &[u32], limit: u32) -> Vec<PodLoad> {
        let slot = |(at, &in_flight): (usize, &u32)| {
            let address = SocketAddr::from(([10, 0, 0, u8::try_from(at).unwrap()], 80));
            let pod = PodEndpointKey { address, id: 0 };
            PodLoad { key: pod, in_flight, free_slots: limit.saturating_sub(in_flight) }
        };
        in_flight.iter().enumerate().map(slot).collect()
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
        let mut spread = |chance: u64| pick_pod(&pods, 0, &mut 0, chance);
        assert_eq!((0..100).map(&mut spread).collect::<Vec<_>>(), vec![Some(1); 100]);
    }

    #[test]
    fn without_a_limit_equal_pods_are_picked_evenly() {
        let pods = pod_loads(&[0, 0, 0], 0);
        let mut seen = [0; 3];
        for chance in 0..3_000u64 {
            seen[pick_pod(&pods, 0, &mut 0, chance.wrapping_mul(0x9E37_79B9_7F4A_7C15))
                .unwrap()] += 1;
        }
        assert!(seen.iter().all(|&count| count > 800), "{seen:?}");
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
    fn connections_that_may_use_the_direct_path_close_one_after_the_other() {
        let lots: Vec<ReconnectJitter> =
            (0..1_000).map(|at: u64| ReconnectJitter::from_random(at << 54)).collect();
        let gone = |ms, connections| {
            let since = Duration::from_millis(ms);
            lots.iter().filter(|lot| lot.should_close(since, connections)).count()
        };
        assert_eq!(gone(0, 1), 1_000, "a single one need not wait");
        assert!((400..600).contains(&gone(100, 1_001)));
        assert_eq!((gone(200, 1_001), gone(2_000, u32::MAX)), (1_000, 1_000));
        assert!(gone(1_000, u32::MAX) < 600);
    }

    #[test]
    fn a_split_follows_the_percents() {
        let targets = [("old", 90), ("new", 10)];
        let new = (0..1_000)
            .filter(|&chance| pick_by_percent(&targets, |it| it.1, chance) == Some(&("new", 10)));
        assert_eq!(new.count(), 100);
        assert_eq!(pick_by_percent(&[] as &[u8], |&it| it, 5), None);
    }
}
