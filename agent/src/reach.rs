//! Pure: which pods of other nodes this node is known to reach.
//!
//! A pod that its own node's agent has seen to listen may still be out of reach here: routes, tunnels and policies
//! follow a new pod at their own pace. Until one connect from here has succeeded, or the kubelet calls it ready,
//! connects go by an activator.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::{Duration, Instant},
};

use common::wire::{Pod, PodPhase};

/// Shortest and longest wait between two tries; in between it is a quarter of the time spent.
const FIRST_WAIT: Duration = Duration::from_millis(2);
const LAST_WAIT: Duration = Duration::from_secs(1);
/// After this long a pod counts as reached: a policy may keep this node's agent out and let clients in.
const ASSUMED: Duration = Duration::from_secs(10);

/// What is known of the pods of other nodes. Feed it pods and results; carry out the tries it gives.
#[derive(Debug, Default)]
pub struct Reach {
    pods: BTreeMap<String, Way>,
    /// Where connects were led when this agent started: another one had reached them.
    known: BTreeSet<SocketAddr>,
}

/// One connect to try now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Try {
    /// The pod.
    pub uid: String,
    /// Where.
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
    /// Begins with what was reached before.
    pub fn new(known: BTreeSet<SocketAddr>) -> Self {
        Self { pods: BTreeMap::new(), known }
    }

    /// Takes in a pod of another node. Returns the try to make, if any.
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
        let reached = pod.confirmed || self.known.contains(&at);
        let state = if reached { State::Reached } else { State::Trying };
        self.pods.insert(pod.uid.clone(), Way { at, since: now, state });
        (!reached).then(|| Try { uid: pod.uid.clone(), at })
    }

    /// The table does not name the pod any more, or it is on this node.
    pub fn dropped(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// What was reached before is in the pods by now.
    pub fn forget_known(&mut self) {
        self.known.clear();
    }

    /// A try has ended.
    pub fn tried(&mut self, now: Instant, tried: &Try, reached: bool) {
        let Some(way) = self.pods.get_mut(&tried.uid) else { return };
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

    /// The tries that are due now.
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

    /// When to call [`due`](Self::due) next.
    pub fn next_wake(&self) -> Option<Instant> {
        let waiting = self.pods.values().filter_map(|way| match way.state {
            State::Waiting(until) => Some(until),
            State::Trying | State::Reached => None,
        });
        waiting.min()
    }

    /// Whether connects should not be led to this pod yet.
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
