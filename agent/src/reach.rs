//! Pure: reachability of the pods of other nodes from this node.
//!
//! A pod that its own node's agent has seen listen may still be unreachable here: routes, tunnels and policies follow a
//! new pod later. Until one connect from here has succeeded, or the kubelet reports the pod as ready, connects go by an
//! activator.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::{Duration, Instant},
};

use common::wire::{Pod, PodPhase};

/// Shortest wait between two attempts; the wait is a quarter of the time spent so far.
const FIRST_WAIT: Duration = Duration::from_millis(2);
/// Longest wait between two attempts.
const LAST_WAIT: Duration = Duration::from_secs(1);
/// Time after which a pod counts as reached: a policy may block this node's agent and admit clients.
const ASSUMED: Duration = Duration::from_secs(10);

/// Reachability of the pods of other nodes. Pass in pods and results, and make the attempts that it returns.
#[derive(Debug, Default)]
pub struct Reach {
    pods: BTreeMap<String, Way>,
    /// Addresses that connects went to when this agent started: another agent had reached them.
    known: BTreeSet<SocketAddr>,
}

/// One connect to attempt now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Try {
    /// Uid of the pod.
    pub uid: String,
    /// Address and port to connect to.
    pub at: SocketAddr,
}

#[derive(Debug)]
struct Way {
    at: SocketAddr,
    since: Instant,
    state: State,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    Trying,
    Waiting(Instant),
    Reached,
}

impl Reach {
    /// Starts with the addresses that an earlier agent reached.
    pub fn new(known: BTreeSet<SocketAddr>) -> Self {
        Self { pods: BTreeMap::new(), known }
    }

    /// Adds or updates a pod of another node. Returns the attempt to make, if any.
    pub fn named(&mut self, now: Instant, pod: &Pod) -> Option<Try> {
        let at = pod.address.filter(|_| pod.phase == PodPhase::Ready)?;
        if let Some(way) = self.pods.get_mut(&pod.uid)
            && way.at == at
        {
            if pod.confirmed {
                way.state = State::Reached;
            }
            return None;
        }
        // A new address is a new pod for the network: what was known of the old address proves nothing.
        let reached = pod.confirmed || self.known.contains(&at);
        let state = if reached { State::Reached } else { State::Trying };
        self.pods.insert(pod.uid.clone(), Way { at, since: now, state });
        (!reached).then(|| Try { uid: pod.uid.clone(), at })
    }

    /// Removes a pod that the table does not name any more, or that is on this node.
    pub fn dropped(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// Forgets the addresses of the earlier agent, once the pods of the first table are known.
    pub fn forget_known(&mut self) {
        self.known.clear();
    }

    /// Records the result of an attempt.
    pub fn tried(&mut self, now: Instant, tried: &Try, reached: bool) {
        let Some(way) = self.pods.get_mut(&tried.uid) else { return };
        // A result for an earlier address, or after the kubelet's report, changes nothing.
        if way.at != tried.at || way.state != State::Trying {
            return;
        }
        let spent = now.duration_since(way.since);
        way.state = if reached || spent >= ASSUMED {
            State::Reached
        } else {
            State::Waiting(now + (spent / 4).clamp(FIRST_WAIT, LAST_WAIT))
        };
    }

    /// Returns the attempts that are due now.
    pub fn due(&mut self, now: Instant) -> Vec<Try> {
        let mut tries = Vec::new();
        for (uid, way) in &mut self.pods {
            if let State::Waiting(until) = way.state
                && until <= now
            {
                way.state = State::Trying;
                tries.push(Try { uid: uid.clone(), at: way.at });
            }
        }
        tries
    }

    /// Returns the time of the next call of [`due`](Self::due).
    pub fn next_wake(&self) -> Option<Instant> {
        let waiting = self.pods.values().filter_map(|way| match way.state {
            State::Waiting(until) => Some(until),
            State::Trying | State::Reached => None,
        });
        waiting.min()
    }

    /// Returns true if connects may not go to this pod yet.
    pub fn is_open(&self, uid: &str) -> bool {
        self.pods.get(uid).is_some_and(|way| way.state != State::Reached)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use common::wire::{Name, Probe};

    use super::*;

    fn pod(phase: PodPhase, confirmed: bool) -> Pod {
        Pod {
            uid: "a".into(),
            name: "a".into(),
            revision: Name::new("default", "hello-00001"),
            node: "other".into(),
            zone: String::new(),
            phase,
            address: Some(([10, 244, 1, 2], 8080).into()),
            also: None,
            confirmed,
            port: NonZeroU16::new(8080).expect("not zero"),
            probe: Probe::listens(),
        }
    }

    #[test]
    fn one_successful_connect_opens_the_way() {
        let now = Instant::now();
        let mut reach = Reach::default();
        assert_eq!(reach.named(now, &pod(PodPhase::Starting, false)), None);
        let first = reach.named(now, &pod(PodPhase::Ready, false)).expect("a try at once");
        assert!(reach.is_open("a"));
        assert_eq!(reach.named(now, &pod(PodPhase::Ready, false)), None, "one try at a time");
        reach.tried(now, &first, false);
        let wake = reach.next_wake().expect("another try");
        assert_eq!(wake, now + FIRST_WAIT);
        assert_eq!(reach.due(now), []);
        assert_eq!(reach.due(wake), std::slice::from_ref(&first));
        reach.tried(wake, &first, true);
        assert!(!reach.is_open("a"));
        assert_eq!(reach.next_wake(), None);
        assert_eq!(reach.named(now, &pod(PodPhase::Ready, false)), None, "reached once");
        reach.dropped("a");
        assert!(reach.named(now, &pod(PodPhase::Ready, false)).is_some(), "another pod");
    }

    #[test]
    fn the_kubelets_word_is_enough() {
        let now = Instant::now();
        let mut reach = Reach::default();
        assert_eq!(reach.named(now, &pod(PodPhase::Ready, true)), None);
        assert!(!reach.is_open("a"));
        let mut reach = Reach::default();
        reach.named(now, &pod(PodPhase::Ready, false)).expect("a try");
        reach.named(now, &pod(PodPhase::Ready, true));
        assert!(!reach.is_open("a"));
    }

    #[test]
    fn a_pod_that_stays_ready_is_believed_in_the_end() {
        let mut now = Instant::now();
        let begin = now;
        let mut reach = Reach::default();
        let attempt = reach.named(now, &pod(PodPhase::Ready, false)).expect("a try");
        let mut tries = 1;
        loop {
            reach.tried(now, &attempt, false);
            let Some(wake) = reach.next_wake() else { break };
            now = wake;
            tries += reach.due(now).len();
        }
        assert!(now - begin >= ASSUMED && now - begin < ASSUMED + LAST_WAIT);
        assert!((20..60).contains(&tries), "{tries}");
        assert!(!reach.is_open("a"));
    }

    #[test]
    fn where_connects_were_led_before_needs_no_try() {
        let now = Instant::now();
        let mut reach = Reach::new(BTreeSet::from([([10, 244, 1, 2], 8080).into()]));
        assert_eq!(reach.named(now, &pod(PodPhase::Ready, false)), None);
        reach.forget_known();
        let moved =
            Pod { address: Some(([10, 244, 1, 3], 8080).into()), ..pod(PodPhase::Ready, false) };
        assert!(reach.named(now, &moved).is_some());
    }
}
