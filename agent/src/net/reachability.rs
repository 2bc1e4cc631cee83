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

use common::wire::{PodEntry, RoutingPhase};

/// Shortest wait between two probes of a pod; the wait is a quarter of the time spent so far.
const RETRY_WAIT_MIN: Duration = Duration::from_millis(2);
/// Longest wait between two probes of a pod.
const RETRY_WAIT_MAX: Duration = Duration::from_secs(1);
/// Time after which a pod counts as reached: a policy may block this node's agent and admit clients.
const ASSUME_REACHED_AFTER: Duration = Duration::from_secs(10);

/// Reachability of the pods of other nodes. Pass in pods and results, and start the probes that it returns.
#[derive(Debug, Default)]
pub struct PodReachability {
    pods: BTreeMap<String, RemotePod>,
    /// Addresses that connects went to when this agent started: another agent had reached them.
    known_addresses: BTreeSet<SocketAddr>,
}

/// Probe of a pod to start now: one connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReachabilityProbe {
    /// Uid of the pod.
    pub uid: String,
    /// Address and port to connect to.
    pub at: SocketAddr,
}

#[derive(Debug)]
struct RemotePod {
    at: SocketAddr,
    since: Instant,
    state: RemotePodState,
}

#[derive(Debug, PartialEq, Eq)]
enum RemotePodState {
    Probing,
    Waiting(Instant),
    Reached,
}

impl PodReachability {
    /// Starts with the addresses that an earlier agent reached.
    pub fn new(known_addresses: BTreeSet<SocketAddr>) -> Self {
        Self { pods: BTreeMap::new(), known_addresses }
    }

    /// Adds or updates a pod of another node. Returns the probe to start, if any.
    pub fn update_pod(&mut self, now: Instant, pod: &PodEntry) -> Option<ReachabilityProbe> {
        let at = pod.address.filter(|_| pod.phase == RoutingPhase::Ready)?;
        if let Some(remote_pod) = self.pods.get_mut(&pod.uid)
            && remote_pod.at == at
        {
            if pod.kubelet_ready {
                remote_pod.state = RemotePodState::Reached;
            }
            return None;
        }
        // A new address is a new pod for the network: what was known of the old address proves nothing.
        let reached = pod.kubelet_ready || self.known_addresses.contains(&at);
        let state = if reached { RemotePodState::Reached } else { RemotePodState::Probing };
        self.pods.insert(pod.uid.clone(), RemotePod { at, since: now, state });
        (!reached).then(|| ReachabilityProbe { uid: pod.uid.clone(), at })
    }

    /// Removes a pod that the table does not name any more.
    pub fn remove_pod(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// Forgets the addresses of the earlier agent, once the pods of the first table are known.
    pub fn forget_known_addresses(&mut self) {
        self.known_addresses.clear();
    }

    /// Records the result of a probe.
    pub fn record_result(&mut self, now: Instant, probe: &ReachabilityProbe, reached: bool) {
        let Some(remote_pod) = self.pods.get_mut(&probe.uid) else { return };
        // A result for an earlier address, or after the kubelet's report, changes nothing.
        if remote_pod.at != probe.at || remote_pod.state != RemotePodState::Probing {
            return;
        }
        let elapsed = now.duration_since(remote_pod.since);
        remote_pod.state = if reached || elapsed >= ASSUME_REACHED_AFTER {
            RemotePodState::Reached
        } else {
            RemotePodState::Waiting(now + (elapsed / 4).clamp(RETRY_WAIT_MIN, RETRY_WAIT_MAX))
        };
    }

    /// Returns the probes that are due now.
    pub fn take_due_probes(&mut self, now: Instant) -> Vec<ReachabilityProbe> {
        let mut probes = Vec::new();
        for (uid, remote_pod) in &mut self.pods {
            if let RemotePodState::Waiting(until) = remote_pod.state
                && until <= now
            {
                remote_pod.state = RemotePodState::Probing;
                probes.push(ReachabilityProbe { uid: uid.clone(), at: remote_pod.at });
            }
        }
        probes
    }

    /// Returns the time of the next call of [`take_due_probes`](Self::take_due_probes).
    pub fn next_wake(&self) -> Option<Instant> {
        let waiting = self.pods.values().filter_map(|remote_pod| match remote_pod.state {
            RemotePodState::Waiting(until) => Some(until),
            RemotePodState::Probing | RemotePodState::Reached => None,
        });
        waiting.min()
    }

    /// Returns true if connects may not go to this pod yet.
    pub fn is_unreached(&self, uid: &str) -> bool {
        self.pods.get(uid).is_some_and(|remote_pod| remote_pod.state != RemotePodState::Reached)
    }
}

#[cfg(test)]
mod tests {
    use common::{fixtures, wire::NamespacedName};

    use super::*;

    fn pod(phase: RoutingPhase, kubelet_ready: bool) -> PodEntry {
        let revision = NamespacedName::new("default", "hello-00001");
        PodEntry {
            node: "other".into(),
            kubelet_ready,
            ..fixtures::pod_at("a", &revision, phase, ([10, 244, 1, 2], 8080).into())
        }
    }

    #[test]
    fn one_successful_connect_makes_a_pod_reachable() {
        let now = Instant::now();
        let mut reach = PodReachability::default();
        assert_eq!(reach.update_pod(now, &pod(RoutingPhase::Starting, false)), None);
        let first = reach.update_pod(now, &pod(RoutingPhase::Ready, false)).expect("a probe");
        assert!(reach.is_unreached("a"));
        assert_eq!(
            reach.update_pod(now, &pod(RoutingPhase::Ready, false)),
            None,
            "one probe at a time"
        );
        reach.record_result(now, &first, false);
        let wake = reach.next_wake().expect("another probe");
        assert_eq!(wake, now + RETRY_WAIT_MIN);
        assert_eq!(reach.take_due_probes(now), []);
        assert_eq!(reach.take_due_probes(wake), std::slice::from_ref(&first));
        reach.record_result(wake, &first, true);
        assert!(!reach.is_unreached("a"));
        assert_eq!(reach.next_wake(), None);
        assert_eq!(reach.update_pod(now, &pod(RoutingPhase::Ready, false)), None, "reached once");
        reach.remove_pod("a");
        assert!(reach.update_pod(now, &pod(RoutingPhase::Ready, false)).is_some(), "another pod");
    }

    #[test]
    fn a_pod_that_the_kubelet_confirms_needs_no_probe() {
        let now = Instant::now();
        let mut reach = PodReachability::default();
        assert_eq!(reach.update_pod(now, &pod(RoutingPhase::Ready, true)), None);
        assert!(!reach.is_unreached("a"));
        let mut reach = PodReachability::default();
        reach.update_pod(now, &pod(RoutingPhase::Ready, false)).expect("a probe");
        reach.update_pod(now, &pod(RoutingPhase::Ready, true));
        assert!(!reach.is_unreached("a"));
    }

    #[test]
    fn a_pod_that_stays_ready_is_assumed_reachable_at_last() {
        let mut now = Instant::now();
        let begin = now;
        let mut reach = PodReachability::default();
        let probe = reach.update_pod(now, &pod(RoutingPhase::Ready, false)).expect("a probe");
        let mut probes = 1;
        loop {
            reach.record_result(now, &probe, false);
            let Some(wake) = reach.next_wake() else { break };
            now = wake;
            probes += reach.take_due_probes(now).len();
        }
        assert!(
            now - begin >= ASSUME_REACHED_AFTER
                && now - begin < ASSUME_REACHED_AFTER + RETRY_WAIT_MAX
        );
        assert!((20..60).contains(&probes), "{probes}");
        assert!(!reach.is_unreached("a"));
    }

    #[test]
    fn a_known_address_needs_no_probe() {
        let now = Instant::now();
        let mut reach = PodReachability::new(BTreeSet::from([([10, 244, 1, 2], 8080).into()]));
        assert_eq!(reach.update_pod(now, &pod(RoutingPhase::Ready, false)), None);
        reach.forget_known_addresses();
        let moved = PodEntry {
            address: Some(([10, 244, 1, 3], 8080).into()),
            ..pod(RoutingPhase::Ready, false)
        };
        assert!(reach.update_pod(now, &moved).is_some());
    }
}
