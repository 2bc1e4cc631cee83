//! Pure: reachability of the pods of other nodes from this node.
//!
//! A pod that its own node's agent has seen listen may still be unreachable here: routes, tunnels and policies follow a
//! new pod later. Until one connect from here has succeeded, or the kubelet reports the pod as ready, connects go by an
//! activator.
//!
//! Only a node with clients of the pod needs the result. If each node probed each new pod, a thousand nodes would send
//! it a thousand connects, and as many would leave each node as pods start in the cluster. So a pod is probed once a
//! client of this node has connected to one of its services, or may have. Before that no connect from here needs the
//! pod either.

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
/// Shortest wait between two checks for clients of a pod.
const CLIENT_CHECK_WAIT_MIN: Duration = Duration::from_millis(10);
/// Shortest pause after a check for clients, as a multiple of the time that the check took.
const CLIENT_CHECK_PAUSE: u32 = 20;
/// Time after which a pod counts as reached: a policy may block this node's agent and admit clients.
const ASSUME_REACHED_AFTER: Duration = Duration::from_secs(10);

/// Reachability of the pods of other nodes. Pass in pods, clients and results, and start the probes that it returns.
#[derive(Debug, Default)]
pub struct PodReachability {
    /// Addresses of the pods that count as reached, by uid. In a large cluster these are nearly all.
    reached: BTreeMap<String, SocketAddr>,
    /// All other ready pods, by uid.
    unreached: BTreeMap<String, UnreachedPod>,
    /// End of the pause after the last check for clients.
    pause_end: Option<Instant>,
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
struct UnreachedPod {
    at: SocketAddr,
    since: Instant,
    state: ProbeState,
}

#[derive(Debug, PartialEq, Eq)]
enum ProbeState {
    /// No client of this node was known to need the pod; the next check is due at this time.
    WithoutClients(Instant),
    Probing,
    /// The next probe is due at this time.
    Waiting(Instant),
}

impl UnreachedPod {
    fn is_without_clients(&self) -> bool {
        matches!(self.state, ProbeState::WithoutClients(_))
    }

    /// Returns the time of the next attempt, after at least `wait_min`; `None` if the pod counts as reached now.
    fn next_attempt(&self, now: Instant, wait_min: Duration) -> Option<Instant> {
        let elapsed = now.duration_since(self.since);
        let wait = (elapsed / 4).clamp(wait_min, RETRY_WAIT_MAX);
        (elapsed < ASSUME_REACHED_AFTER).then(|| now + wait)
    }
}

impl PodReachability {
    /// Starts with the addresses that an earlier agent reached.
    pub fn new(known_addresses: BTreeSet<SocketAddr>) -> Self {
        Self { known_addresses, ..Self::default() }
    }

    /// Adds or updates a pod of another node. Check then if [some pods](Self::pods_to_check) have clients.
    pub fn update_pod(&mut self, now: Instant, pod: &PodEntry) {
        let Some(at) = pod.address.filter(|_| pod.phase == RoutingPhase::Ready) else { return };
        // A new address is a new pod for the network: what was known of the old address proves nothing.
        let is_same = self.reached.get(&pod.uid) == Some(&at)
            || self.unreached.get(&pod.uid).is_some_and(|it| it.at == at);
        // Connects by a scaled Service may go to other ports of the pod than the one that is probed.
        let ports = pod.ports.iter().map(|it| it.port.get()).chain([at.port()]);
        let mut addresses = ports.map(|port| SocketAddr::new(at.ip(), port));
        let is_known = addresses.any(|it| self.known_addresses.contains(&it));
        if pod.kubelet_ready || !is_same && is_known {
            self.set_reached(&pod.uid, at);
        } else if !is_same {
            self.reached.remove(&pod.uid);
            let state = ProbeState::WithoutClients(now);
            self.unreached.insert(pod.uid.clone(), UnreachedPod { at, since: now, state });
        }
    }

    fn set_reached(&mut self, uid: &str, at: SocketAddr) {
        self.unreached.remove(uid);
        self.reached.insert(uid.to_owned(), at);
    }

    /// Removes a pod that the table does not name any more.
    pub fn remove_pod(&mut self, uid: &str) {
        self.unreached.remove(uid);
        self.reached.remove(uid);
    }

    /// Forgets the addresses of the earlier agent, once the pods of the first table are known.
    pub fn forget_known_addresses(&mut self) {
        self.known_addresses.clear();
    }

    /// Returns the uids of all pods for which no client is known, if the check of one of them is due: one look at the
    /// clients answers for all.
    pub fn pods_to_check(&self, now: Instant) -> Vec<String> {
        if self.next_check().is_none_or(|at| at > now) {
            return Vec::new();
        }
        let pods = self.unreached.iter().filter(|(_, it)| it.is_without_clients());
        pods.map(|(uid, _)| uid.clone()).collect()
    }

    /// Records if clients of this node have connected to services of a pod. Returns the probe to start, if any.
    pub fn record_check(
        &mut self,
        now: Instant,
        uid: &str,
        has_clients: bool,
    ) -> Option<ReachabilityProbe> {
        let pod = self.unreached.get_mut(uid).filter(|it| it.is_without_clients())?;
        let at = pod.at;
        if has_clients {
            pod.state = ProbeState::Probing;
            return Some(ReachabilityProbe { uid: uid.to_owned(), at });
        }
        match pod.next_attempt(now, CLIENT_CHECK_WAIT_MIN) {
            Some(next) => pod.state = ProbeState::WithoutClients(next),
            // No later than a pod that no probe reaches.
            None => self.set_reached(uid, at),
        }
        None
    }

    /// Ends a check for clients that took so long: many pods that start must not make the agent check all the time.
    pub fn finish_check(&mut self, now: Instant, took: Duration) {
        let pause = (took * CLIENT_CHECK_PAUSE).clamp(CLIENT_CHECK_WAIT_MIN, RETRY_WAIT_MAX);
        self.pause_end = Some(now + pause);
    }

    /// Returns the time of the next check for clients, if some pod has none.
    fn next_check(&self) -> Option<Instant> {
        let due = self.unreached.values().filter_map(|pod| match pod.state {
            ProbeState::WithoutClients(at) => Some(at),
            ProbeState::Probing | ProbeState::Waiting(_) => None,
        });
        due.min().map(|at| self.pause_end.map_or(at, |pause_end| pause_end.max(at)))
    }

    /// Records the result of a probe.
    pub fn record_result(&mut self, now: Instant, probe: &ReachabilityProbe, reached: bool) {
        let Some(pod) = self.unreached.get_mut(&probe.uid) else { return };
        // A result for an earlier address changes nothing.
        if pod.at != probe.at || pod.state != ProbeState::Probing {
            return;
        }
        match pod.next_attempt(now, RETRY_WAIT_MIN).filter(|_| !reached) {
            Some(next) => pod.state = ProbeState::Waiting(next),
            None => self.set_reached(&probe.uid, probe.at),
        }
    }

    /// Returns the probes that are due now.
    pub fn take_due_probes(&mut self, now: Instant) -> Vec<ReachabilityProbe> {
        let mut probes = Vec::new();
        for (uid, pod) in &mut self.unreached {
            if let ProbeState::Waiting(until) = pod.state
                && until <= now
            {
                pod.state = ProbeState::Probing;
                probes.push(ReachabilityProbe { uid: uid.clone(), at: pod.at });
            }
        }
        probes
    }

    /// Returns the time at which [`take_due_probes`](Self::take_due_probes) or [`pods_to_check`](Self::pods_to_check)
    /// has something next.
    pub fn next_wake(&self) -> Option<Instant> {
        let waiting = self.unreached.values().filter_map(|pod| match pod.state {
            ProbeState::Waiting(until) => Some(until),
            ProbeState::WithoutClients(_) | ProbeState::Probing => None,
        });
        waiting.chain(self.next_check()).min()
    }

    /// Returns true if connects may not go to this pod yet.
    pub fn is_unreached(&self, uid: &str) -> bool {
        self.unreached.contains_key(uid)
    }
}

#[cfg(test)]
mod tests {
    use common::{
        fixtures,
        wire::{AppProtocol, NamespacedName},
    };
    use proptest::prelude::*;

    use super::*;

    fn pod(phase: RoutingPhase, kubelet_ready: bool) -> PodEntry {
        let revision = NamespacedName::new("default", "hello-00001");
        PodEntry {
            node: "other".into(),
            kubelet_ready,
            ..fixtures::pod_at("a", &revision, phase, ([10, 244, 1, 2], 8080).into())
        }
    }

    /// Checks all pods that are due, which have clients or not. Returns the probes to start.
    fn check(
        reach: &mut PodReachability,
        now: Instant,
        has_clients: bool,
    ) -> Vec<ReachabilityProbe> {
        let due = reach.pods_to_check(now);
        due.iter().filter_map(|uid| reach.record_check(now, uid, has_clients)).collect()
    }

    /// Adds the pod of [`pod`] to a node with clients, and returns its first probe.
    fn first_probe(reach: &mut PodReachability, now: Instant) -> ReachabilityProbe {
        reach.update_pod(now, &pod(RoutingPhase::Ready, false));
        check(reach, now, true).pop().expect("a probe")
    }

    #[test]
    fn one_successful_connect_makes_a_pod_reachable() {
        let now = Instant::now();
        let mut reach = PodReachability::default();
        reach.update_pod(now, &pod(RoutingPhase::Starting, false));
        assert_eq!(reach.next_wake(), None);
        let first = first_probe(&mut reach, now);
        assert!(reach.is_unreached("a"));
        reach.update_pod(now, &pod(RoutingPhase::Ready, false));
        assert_eq!(check(&mut reach, now, true), [], "one probe at a time");
        reach.record_result(now, &first, false);
        let wake = reach.next_wake().expect("another probe");
        assert_eq!(wake, now + RETRY_WAIT_MIN);
        assert_eq!(reach.take_due_probes(now), []);
        assert_eq!(reach.take_due_probes(wake), std::slice::from_ref(&first));
        reach.record_result(wake, &first, true);
        assert!(!reach.is_unreached("a"));
        assert_eq!(reach.next_wake(), None);
        reach.update_pod(now, &pod(RoutingPhase::Ready, false));
        assert_eq!(check(&mut reach, now, true), [], "reached once");
        reach.remove_pod("a");
        assert_eq!(first_probe(&mut reach, now), first, "another pod");
    }

    #[test]
    fn a_pod_that_the_kubelet_confirms_needs_no_probe() {
        let now = Instant::now();
        let mut reach = PodReachability::default();
        reach.update_pod(now, &pod(RoutingPhase::Ready, true));
        assert_eq!(check(&mut reach, now, true), []);
        assert!(!reach.is_unreached("a"));
        for has_clients in [false, true] {
            let mut reach = PodReachability::default();
            reach.update_pod(now, &pod(RoutingPhase::Ready, false));
            assert_eq!(check(&mut reach, now, has_clients).len(), usize::from(has_clients));
            assert!(reach.is_unreached("a"));
            reach.update_pod(now, &pod(RoutingPhase::Ready, true));
            assert!(!reach.is_unreached("a"));
            assert_eq!(reach.next_wake(), None);
        }
    }

    #[test]
    fn a_pod_that_stays_ready_is_assumed_reachable_at_last() {
        let mut now = Instant::now();
        let begin = now;
        let mut reach = PodReachability::default();
        let probe = first_probe(&mut reach, now);
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
    fn without_clients_a_pod_is_not_probed_and_not_used_before_it_is_assumed_reachable() {
        let mut now = Instant::now();
        let begin = now;
        let mut reach = PodReachability::default();
        reach.update_pod(now, &pod(RoutingPhase::Ready, false));
        let mut checks = 0;
        while let Some(wake) = reach.next_wake() {
            assert!(reach.is_unreached("a"));
            now = wake;
            assert_eq!(reach.pods_to_check(now), ["a"]);
            assert_eq!(check(&mut reach, now, false), []);
            checks += 1;
        }
        assert!(
            now - begin >= ASSUME_REACHED_AFTER
                && now - begin < ASSUME_REACHED_AFTER + RETRY_WAIT_MAX
        );
        assert!((20..60).contains(&checks), "{checks}");
        assert!(!reach.is_unreached("a"));
    }

    #[test]
    fn a_pod_is_probed_at_the_first_check_after_a_client_has_connected() {
        let now = Instant::now();
        let mut reach = PodReachability::default();
        reach.update_pod(now, &pod(RoutingPhase::Ready, false));
        assert_eq!(check(&mut reach, now, false), []);
        assert_eq!(check(&mut reach, now, true), [], "no check is due");
        let wake = reach.next_wake().expect("another check");
        assert_eq!(wake, now + CLIENT_CHECK_WAIT_MIN);
        let probe = check(&mut reach, wake, true).pop().expect("a probe");
        // Clients that have gone do not end the probes: the next one may come at any time.
        reach.record_result(wake, &probe, false);
        assert_eq!(reach.pods_to_check(wake), [""; 0]);
        let wake = reach.next_wake().expect("another probe");
        assert_eq!(reach.take_due_probes(wake), [probe]);
    }

    #[test]
    fn one_check_answers_for_all_pods_and_long_checks_are_rare() {
        let now = Instant::now();
        let mut reach = PodReachability::default();
        let other = PodEntry { uid: "b".into(), ..pod(RoutingPhase::Ready, false) };
        reach.update_pod(now, &pod(RoutingPhase::Ready, false));
        assert_eq!(check(&mut reach, now, false), []);
        reach.update_pod(now, &other);
        assert_eq!(reach.pods_to_check(now), ["a", "b"], "the first one is not due");
        assert_eq!(check(&mut reach, now, false), []);
        let took = Duration::from_millis(3);
        reach.finish_check(now, took);
        reach.update_pod(now, &PodEntry { uid: "c".into(), ..other });
        let pause_end = now + took * CLIENT_CHECK_PAUSE;
        assert_eq!(reach.next_wake(), Some(pause_end));
        assert_eq!(reach.pods_to_check(now + took), [""; 0]);
        assert_eq!(reach.pods_to_check(pause_end), ["a", "b", "c"]);
    }

    #[test]
    fn a_pod_that_is_known_by_a_port_of_a_scaled_service_needs_no_probe() {
        let now = Instant::now();
        let mut reach = PodReachability::new(BTreeSet::from([([10, 244, 1, 2], 5432).into()]));
        let other = PodEntry { uid: "b".into(), ..pod(RoutingPhase::Ready, false) };
        reach.update_pod(now, &other);
        let database = fixtures::pod_port(5432, 5432, AppProtocol::Tcp);
        let known = PodEntry { ports: vec![database], ..pod(RoutingPhase::Ready, false) };
        reach.update_pod(now, &known);
        assert_eq!([reach.is_unreached("a"), reach.is_unreached("b")], [false, true]);
    }

    #[test]
    fn a_known_address_needs_no_probe() {
        let now = Instant::now();
        let mut reach = PodReachability::new(BTreeSet::from([([10, 244, 1, 2], 8080).into()]));
        reach.update_pod(now, &pod(RoutingPhase::Ready, false));
        assert_eq!(check(&mut reach, now, true), []);
        reach.forget_known_addresses();
        let moved = PodEntry {
            address: Some(([10, 244, 1, 3], 8080).into()),
            ..pod(RoutingPhase::Ready, false)
        };
        reach.update_pod(now, &moved);
        assert_eq!(check(&mut reach, now, true).len(), 1);
    }

    proptest! {
        /// Connects go to a pod only if this node has reached its present address, the kubelet has reported the pod
        /// ready, or it has been ready for long. A pod is probed only if it has had clients.
        #[test]
        fn a_pod_is_used_only_if_it_is_known_to_be_reachable(
            ops in prop::collection::vec((0_u8..8, 0_u64..4_000), 0..80),
        ) {
            let mut now = Instant::now();
            let mut reach = PodReachability::default();
            let mut ready = pod(RoutingPhase::Ready, false);
            // Since when the pod is ready at its address; proof that it is reachable there; clients since then.
            let (mut since, mut is_proven) = (None, false);
            let (mut had_clients, mut has_clients) = (false, false);
            let mut running = None::<ReachabilityProbe>;
            for (kind, argument) in ops {
                match kind {
                    0 => now += Duration::from_millis(argument),
                    1 | 2 => {
                        let address = Some(([10, 244, 1, kind], 8080).into());
                        if since.is_none() || ready.address != address {
                            (since, is_proven, had_clients) = (Some(now), false, false);
                        }
                        ready.kubelet_ready = argument.is_multiple_of(8);
                        ready.address = address;
                        is_proven |= ready.kubelet_ready;
                        reach.update_pod(now, &ready);
                    }
                    3 => has_clients = argument.is_multiple_of(2),
                    4 => {
                        reach.remove_pod("a");
                        since = None;
                    }
                    _ => {
                        if let Some(probe) = running.take() {
                            let reached = argument.is_multiple_of(3);
                            let is_current = since.is_some() && ready.address == Some(probe.at);
                            is_proven |= reached && is_current;
                            reach.record_result(now, &probe, reached);
                        }
                    }
                }
                let due = reach.pods_to_check(now);
                had_clients |= has_clients && !due.is_empty();
                let mut started = reach.take_due_probes(now);
                for uid in due {
                    started.extend(reach.record_check(now, &uid, has_clients));
                }
                for probe in started {
                    prop_assert!(had_clients);
                    prop_assert_eq!(Some(probe.at), ready.address);
                    running = Some(probe);
                }
                let is_old = since.is_some_and(|it| now.duration_since(it) >= ASSUME_REACHED_AFTER);
                if since.is_some() && !reach.is_unreached("a") {
                    prop_assert!(is_proven || is_old);
                }
            }
        }
    }
}
