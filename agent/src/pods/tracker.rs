//! Pure: state of each pod on this node, and the actions that follow from it.
//!
//! The RouteTable names a pod. The finder finds its cgroup and its network namespace, which the kernel's maps then
//! hold. The kernel sees the pod listen, its readiness probe runs, and each change is reported. Events of the kernel
//! are hints: the shell reads the maps again and passes the result in as [`PodTrackerEvent::KernelStateRead`].

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    net::SocketAddr,
    time::{Duration, Instant},
};

use common::wire::{self, PodObservation, RoutingPhase};

use self::{
    listeners::PortListeners,
    registration::{RegistrationFailure, RegistrationRetry},
    stopping::{PodDrain, PodPreStop},
};
use crate::{
    incompatible::Incompatibility,
    pods::{
        readiness::{self, ReadinessMachine},
        types::{
            NamespaceFacts, NamespaceSockets, PodKernelState, PodProbeAttempt, PodTrackerAction,
            PodTrackerEvent,
        },
    },
};

mod listeners;
mod registration;
mod stopping;

/// Shortest time between two reports that differ only in the requests in flight.
const IN_FLIGHT_REPORT_PERIOD: Duration = Duration::from_secs(1);

/// Period in which a pod's namespace is inspected if the kernel did not see its listener open.
const INSPECT_PERIOD: Duration = Duration::from_secs(1);

/// Inspection period of a pod that did not listen within its first minute, [`LATE_AFTER`].
const LATE_INSPECT_PERIOD: Duration = Duration::from_secs(10);
/// Age from which a pod without a listener is inspected less often.
const LATE_AFTER: Duration = Duration::from_secs(60);

/// All pods of this node. Pass every event to [`step`](Self::step) and perform the actions that it returns.
#[derive(Debug)]
pub struct PodTracker {
    pods: BTreeMap<String, TrackedPod>,
    /// True if a controller is connected: a pod that it does not name as draining is then not draining.
    controller_connected: bool,
    /// Time that a draining pod waits for its upgraded connections.
    upgraded_drain_time: Duration,
}

#[derive(Debug)]
struct TrackedPod {
    pod: wire::PodEntry,
    tracked_since: Instant,
    /// Facts of the pod's namespace; `None`: not found yet.
    facts: Option<NamespaceFacts>,
    /// Reason for which the pod has no namespace of its own.
    namespace_missing: Option<Incompatibility>,
    is_registered: bool,
    /// Next attempt to register the pod, if the last one failed.
    registration_retry: Option<RegistrationRetry>,
    kernel_state: PodKernelState,
    port_listeners: PortListeners,
    /// Result of the newest inspection of its namespace; `None`: not inspected yet.
    sockets: Option<NamespaceSockets>,
    next_inspection: Option<Instant>,
    listening_since_ns: u64,
    readiness: ReadinessMachine,
    /// True if the pod server of a pod that Rouse did not make was requested in the pod's namespace.
    is_server_requested: bool,
    drain: PodDrain,
    prestop: PodPreStop,
    last_report: Option<(Instant, PodObservation)>,
}

impl PodTracker {
    /// Starts without pods. `upgraded_drain_time` is the time that a draining pod waits for its upgraded connections.
    pub fn new(upgraded_drain_time: Duration) -> Self {
        Self { pods: BTreeMap::new(), controller_connected: false, upgraded_drain_time }
    }

    /// Sets the flag that a controller is connected.
    pub fn set_controller_connected(&mut self, is_connected: bool) {
        self.controller_connected = is_connected;
    }

    /// Begins the RouteTable of another stream, whose changed pods follow as events. It may be that of another replica of
    /// the controller, whose statements on pods may be older. Returns such events for the pods that it states as before:
    /// those that the table in force has and that `is_changed` does not name.
    pub fn begin_table(&mut self, is_changed: impl Fn(&str) -> bool) -> Vec<PodTrackerEvent> {
        self.pods.values_mut().for_each(|pod| pod.prestop.begin_table());
        let routed = self.pods.values().filter(|it| !it.drain.is_route_removed);
        let unchanged = routed.map(|it| &it.pod).filter(|pod| !is_changed(&pod.uid));
        unchanged.map(|pod| PodTrackerEvent::RouteUpdated(Box::new(pod.clone()))).collect()
    }

    /// Handles one event. Returns the actions to perform.
    pub fn step(&mut self, now: Instant, event: PodTrackerEvent) -> Vec<PodTrackerAction> {
        let mut out = Vec::new();
        match event {
            PodTrackerEvent::RouteUpdated(pod) => self.handle_route_update(now, *pod, &mut out),
            PodTrackerEvent::RouteRemoved(uid) => {
                self.with_pod(&uid, |pod| pod.handle_route_removed(now));
                self.forget_if_done(&uid, &mut out);
            }
            PodTrackerEvent::PreStopRequested(uid) => {
                self.with_pod(&uid, |pod| pod.handle_prestop(now, &mut out));
                self.forget_if_done(&uid, &mut out);
            }
            PodTrackerEvent::ProcessesEnded(uid) => {
                // Without a process nothing is in flight, and the preStop request needs no response.
                self.with_pod(&uid, |pod| pod.prestop.has_response = true);
                self.forget_if_done(&uid, &mut out);
            }
            PodTrackerEvent::NamespaceFound(uid, facts) => {
                self.with_pod(&uid, |pod| pod.handle_namespace(now, facts, &mut out))
            }
            PodTrackerEvent::NamespaceMissing(uid, incompatibility) => self.with_pod(&uid, |pod| {
                pod.namespace_missing = Some(incompatibility);
                pod.report(now, &mut out);
            }),
            PodTrackerEvent::Registered(uid) => {
                self.with_pod(&uid, |pod| pod.handle_registered(now, &mut out))
            }
            PodTrackerEvent::NoFreePodSlot(uid) => self.with_pod(&uid, |pod| {
                let failure = RegistrationFailure::NoFreePodSlot;
                pod.handle_registration_failure(now, failure, &mut out);
            }),
            PodTrackerEvent::RegistrationFailed(uid, error) => self.with_pod(&uid, |pod| {
                let failure = RegistrationFailure::NotWritten(error);
                pod.handle_registration_failure(now, failure, &mut out);
            }),
            PodTrackerEvent::RegistrationOutdated(uid) => {
                self.with_pod(&uid, |pod| pod.register_again(&mut out));
            }
            PodTrackerEvent::OpenPortsRead(uid, ports) => {
                self.with_pod(&uid, |pod| pod.handle_open_ports(now, ports, &mut out));
            }
            PodTrackerEvent::KernelStateRead(uid, state) => {
                self.handle_kernel_state(now, &uid, state, &mut out);
            }
            PodTrackerEvent::Inspected(uid, sockets, at_ns) => {
                self.with_pod(&uid, |pod| pod.handle_inspection(now, sockets, at_ns, &mut out));
            }
            // Stored until the next reading of the maps, which alone decides if the pod is drained.
            PodTrackerEvent::UpgradedCounted(uid, count, at) => {
                self.with_pod(&uid, |pod| pod.drain.upgraded_count = Some((at, count)));
            }
            PodTrackerEvent::ProbeEnded(uid, seq, result) => {
                let event = readiness::ReadinessEvent::AttemptEnded { seq, result };
                self.with_pod(&uid, |pod| pod.update_readiness(now, event, &mut out));
            }
            // For the pod's standby alone: a frozen pod has the state that it had.
            PodTrackerEvent::CgroupChanged(_) => {}
            PodTrackerEvent::Tick => {
                self.pods.values_mut().for_each(|pod| pod.handle_tick(now, &mut out))
            }
        }
        out
    }

    /// Returns the latest time for the next [`step`](Self::step) with [`PodTrackerEvent::Tick`].
    pub fn next_wake(&self) -> Option<Instant> {
        self.pods.values().filter_map(TrackedPod::next_wake).min()
    }

    /// Returns the uids of the pods, each with true if the kernel's maps hold the pod.
    pub fn uids(&self) -> impl Iterator<Item = (&str, bool)> {
        self.pods.iter().map(|(uid, pod)| (uid.as_str(), pod.is_registered))
    }

    /// Returns the pod as the RouteTable names it.
    pub fn get(&self, uid: &str) -> Option<&wire::PodEntry> {
        self.pods.get(uid).map(|tracked| &tracked.pod)
    }

    /// Returns the pods that drain or wait to stop, and are therefore read more often.
    pub fn draining_uids(&self) -> Vec<String> {
        let is_draining = |pod: &&TrackedPod| pod.drain.since.is_some() || pod.is_waiting_to_stop();
        self.pods.values().filter(is_draining).map(TrackedPod::uid).collect()
    }

    /// Returns the requests in flight in the pod, as last read; 0 if there is no such pod.
    pub(crate) fn in_flight(&self, uid: &str) -> u64 {
        self.pods.get(uid).map_or(0, |pod| pod.kernel_state.in_flight)
    }

    /// Returns true if the kubelet has sent a preStop request for the pod, whatever its phase in the RouteTable is.
    pub fn is_stopping(&self, uid: &str) -> bool {
        self.pods.get(uid).is_some_and(|pod| pod.prestop.since.is_some())
    }

    /// Returns true if the pod ends: it drains, has left the RouteTable, or has a preStop request.
    pub(crate) fn is_ending(&self, uid: &str) -> bool {
        let is_ending = |pod: &TrackedPod| pod.drain.since.is_some() || pod.prestop.since.is_some();
        self.pods.get(uid).is_some_and(is_ending)
    }

    /// Returns true if the pod is ready for requests and the kernel's maps hold it.
    pub(crate) fn is_serving(&self, uid: &str) -> bool {
        self.pods.get(uid).is_some_and(|pod| pod.readiness.is_ready() && pod.is_registered)
    }

    /// Returns the ports at which a pod has a listener, but none that the eBPF programs saw open.
    pub fn unseen_ports(&self, uid: &str) -> BTreeSet<u16> {
        self.pods.get(uid).map(|pod| pod.unseen_ports().collect()).unwrap_or_default()
    }

    /// Returns true if every pod that the RouteTable names as ready is ready here. A new agent reports only then, or
    /// after a while. Otherwise serving pods would leave the table while it still searches for them.
    pub fn has_caught_up(&self) -> bool {
        let is_caught_up =
            |pod: &TrackedPod| pod.pod.phase != RoutingPhase::Ready || pod.readiness.is_ready();
        self.pods.values().all(is_caught_up)
    }

    /// Returns the cookies of the namespaces that were found for the pods, registered or not.
    pub(crate) fn namespace_cookies(&self) -> BTreeSet<u64> {
        self.pods.values().filter_map(|pod| Some(pod.facts.as_ref()?.cookie)).collect()
    }

    /// Returns the numbers of pods that are named, listen, are ready, have no pod slot, and cannot be written.
    pub fn counts(&self) -> PodStateCounts {
        let count = |is: fn(&TrackedPod) -> bool| self.pods.values().filter(|pod| is(pod)).count();
        PodStateCounts {
            in_table: self.pods.len(),
            listening: count(TrackedPod::is_listening),
            ready: count(|pod| pod.readiness.is_ready()),
            without_slot: count(TrackedPod::has_no_slot),
            unwritten: count(TrackedPod::is_unwritten),
        }
    }

    /// Handles a pod of the RouteTable that is new or has changed.
    fn handle_route_update(
        &mut self,
        now: Instant,
        pod: wire::PodEntry,
        out: &mut Vec<PodTrackerAction>,
    ) {
        if let Some(tracked) = self.pods.get_mut(&pod.uid) {
            tracked.handle_route_update(now, pod, out);
            return;
        }
        out.push(PodTrackerAction::FindNamespace(pod.uid.clone()));
        let mut tracked = TrackedPod::new(now, pod);
        tracked.update_draining(now);
        tracked.report(now, out);
        self.pods.insert(tracked.pod.uid.clone(), tracked);
    }

    /// Passes a reading of the maps to the pod, and forgets a removed pod that has no requests left.
    fn handle_kernel_state(
        &mut self,
        now: Instant,
        uid: &str,
        state: PodKernelState,
        out: &mut Vec<PodTrackerAction>,
    ) {
        let (is_connected, upgraded_drain_time) =
            (self.controller_connected, self.upgraded_drain_time);
        self.with_pod(uid, |pod| {
            pod.handle_kernel_state(now, state, is_connected, upgraded_drain_time, out);
        });
        self.forget_if_done(uid, out);
    }

    /// Forgets a pod that the RouteTable has dropped, unless the kubelet still waits for its last requests.
    fn forget_if_done(&mut self, uid: &str, out: &mut Vec<PodTrackerAction>) {
        if self
            .pods
            .get(uid)
            .is_some_and(|pod| pod.drain.is_route_removed && !pod.is_waiting_to_stop())
        {
            self.pods.remove(uid);
            out.extend([
                PodTrackerAction::Unregister(uid.to_owned()),
                PodTrackerAction::ReportGone(uid.to_owned()),
            ]);
        }
    }

    /// Applies `each` to a pod, if it still exists: a pod that is gone needs nothing.
    fn with_pod(&mut self, uid: &str, each: impl FnOnce(&mut TrackedPod)) {
        if let Some(pod) = self.pods.get_mut(uid) {
            each(pod);
        }
    }
}

/// Numbers of this node's pods by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodStateCounts {
    /// Pods that the RouteTable names.
    pub in_table: usize,
    /// Pods that listen on their serving port.
    pub listening: usize,
    /// Pods that are ready for requests.
    pub ready: usize,
    /// Pods for which no pod slot is free.
    pub without_slot: usize,
    /// Pods that have a pod slot, and that the kernel's maps refuse.
    pub unwritten: usize,
}

impl PodStateCounts {
    /// Returns each state's name in metrics, and the number of pods in it.
    pub(crate) fn by_state(self) -> [(&'static str, usize); 4] {
        [
            ("named", self.in_table),
            ("listening", self.listening),
            ("ready", self.ready),
            ("crowded", self.without_slot),
        ]
    }

    /// Returns the reason for which the agent cannot register pods, if there are such pods.
    pub(crate) fn not_ready_reason(self) -> Option<String> {
        let without_slot = (self.without_slot > 0).then(|| {
            format!("{} without a pod slot: {}", self.without_slot, Incompatibility::NoFreePodSlot)
        });
        let unwritten = (self.unwritten > 0).then(|| {
            format!("{} not written to the kernel's maps: the log has the error", self.unwritten)
        });
        without_slot.into_iter().chain(unwritten).reduce(|first, then| format!("{first}; {then}"))
    }
}

impl TrackedPod {
    fn new(now: Instant, pod: wire::PodEntry) -> Self {
        Self {
            readiness: ReadinessMachine::new(pod.probe.clone()),
            pod,
            tracked_since: now,
            facts: None,
            namespace_missing: None,
            is_registered: false,
            registration_retry: None,
            kernel_state: PodKernelState::default(),
            port_listeners: PortListeners::default(),
            sockets: None,
            next_inspection: None,
            listening_since_ns: 0,
            is_server_requested: false,
            drain: PodDrain::default(),
            prestop: PodPreStop::default(),
            last_report: None,
        }
    }

    /// Handles a change of the pod's entry in the RouteTable.
    fn handle_route_update(
        &mut self,
        now: Instant,
        pod: wire::PodEntry,
        out: &mut Vec<PodTrackerAction>,
    ) {
        let old = mem::replace(&mut self.pod, pod);
        // A snapshot may name a pod that an earlier table had dropped.
        self.drain.is_route_removed = false;
        let is_port_changed = old.port != self.pod.port;
        let is_probed_anew = old.probe != self.pod.probe || is_port_changed;
        if is_probed_anew {
            self.readiness.restart(self.pod.probe.clone());
        }
        // The state of the old port does not apply to the new one. That of the same port does: without it, a pod that
        // serves would count as one without a listener until the maps are read again.
        if is_port_changed {
            self.kernel_state = PodKernelState::default();
        }
        if is_probed_anew || old.ports != self.pod.ports || old.keeps_binds != self.pod.keeps_binds
        {
            self.register_again(out);
        }
        self.update_draining(now);
        self.update_readiness(now, readiness::ReadinessEvent::Tick, out);
    }

    /// Requests a registration with other content. Listeners of new ports may be open already, so that the next
    /// [registration](Self::handle_registered) inspects them.
    fn register_again(&mut self, out: &mut Vec<PodTrackerAction>) {
        self.is_registered = false;
        out.extend(self.facts.clone().map(|facts| PodTrackerAction::Register(self.uid(), facts)));
    }

    fn handle_namespace(
        &mut self,
        now: Instant,
        facts: NamespaceFacts,
        out: &mut Vec<PodTrackerAction>,
    ) {
        if self.facts.as_ref() == Some(&facts) {
            return;
        }
        // A new sandbox: readings and inspections of the old namespace prove nothing.
        if self.facts.as_ref().is_some_and(|old| old.cookie != facts.cookie) {
            self.is_registered = false;
            self.kernel_state = PodKernelState::default();
            self.port_listeners = PortListeners::default();
            self.sockets = None;
            self.is_server_requested = false;
        }
        self.facts = Some(facts.clone());
        out.push(PodTrackerAction::Register(self.uid(), facts));
        self.update_readiness(now, readiness::ReadinessEvent::Tick, out);
    }

    /// Handles the registration. A listener may have opened before the maps held the pod, so its namespace is inspected
    /// once.
    fn handle_registered(&mut self, now: Instant, out: &mut Vec<PodTrackerAction>) {
        self.registration_retry = None;
        if !mem::replace(&mut self.is_registered, true) {
            self.request_inspection(now, out);
        }
    }

    fn request_inspection(&mut self, now: Instant, out: &mut Vec<PodTrackerAction>) {
        out.push(PodTrackerAction::Inspect(self.uid()));
        let late = now.duration_since(self.tracked_since) >= LATE_AFTER && !self.is_listening();
        self.next_inspection = Some(now + if late { LATE_INSPECT_PERIOD } else { INSPECT_PERIOD });
    }

    /// Handles a reading of the pod's entries in the maps: listeners that have opened or closed, and counts.
    fn handle_kernel_state(
        &mut self,
        now: Instant,
        state: PodKernelState,
        is_connected: bool,
        upgraded_drain_time: Duration,
        out: &mut Vec<PodTrackerAction>,
    ) {
        let was_listening = self.is_listening();
        let before = mem::replace(&mut self.kernel_state, state);
        let opened = before.listeners == 0 && state.listeners > 0;
        // An inspection may have found this listener before; then it is not a new one.
        if opened && !was_listening {
            self.listening_since_ns = state.listener_opened_ns;
            self.handle_reopened(now, out);
        }
        let closed = before.listeners > 0 && state.listeners == 0;
        if closed && self.sockets.take().is_some() {
            // The newest inspection is older than the close: only another one can find other listeners.
            self.request_inspection(now, out);
        }
        self.update_drained(now, upgraded_drain_time, out);
        self.update_restart(now, is_connected, out);
        self.update_readiness(now, readiness::ReadinessEvent::Tick, out);
    }

    fn handle_inspection(
        &mut self,
        now: Instant,
        sockets: NamespaceSockets,
        at_ns: u64,
        out: &mut Vec<PodTrackerAction>,
    ) {
        let was_listening = self.is_listening();
        self.track_unseen_ports(out, |pod| {
            pod.sockets = Some(sockets);
            pod.port_listeners.closed.clear();
        });
        if !was_listening && self.is_listening() {
            self.listening_since_ns = at_ns;
            self.handle_reopened(now, out);
        }
        self.update_readiness(now, readiness::ReadinessEvent::Tick, out);
    }

    fn handle_tick(&mut self, now: Instant, out: &mut Vec<PodTrackerAction>) {
        let due = self.next_inspection.is_some_and(|at| at <= now);
        if due && self.needs_inspection() {
            self.request_inspection(now, out);
        }
        self.retry_registration_if_due(now, out);
        self.update_readiness(now, readiness::ReadinessEvent::Tick, out);
    }

    /// Returns true if the pod needs inspections. The eBPF programs report listeners that open after the registration,
    /// and not those that opened earlier.
    fn needs_inspection(&self) -> bool {
        let has_unseen_port = || self.unseen_ports().next().is_some();
        self.is_registered && (self.kernel_state.listeners == 0 || has_unseen_port())
    }

    /// Updates readiness by the listeners, then by `event`, and reports.
    fn update_readiness(
        &mut self,
        now: Instant,
        event: readiness::ReadinessEvent,
        out: &mut Vec<PodTrackerAction>,
    ) {
        // A probe needs an address to connect to.
        let listening = self.is_listening() && self.address().is_some() && self.serves_clients();
        let first = self.readiness.step(now, readiness::ReadinessEvent::Listening(listening));
        let then = self.readiness.step(now, event);
        if let (Some(attempt), Some(at)) = (then.or(first), self.address()) {
            let probe = self.readiness.probe().clone();
            let at = SocketAddr::new(at.ip(), probe.port.unwrap_or(self.pod.port).get());
            let readiness::ReadinessAttempt { seq, timeout } = attempt;
            out.push(PodTrackerAction::StartProbe(PodProbeAttempt {
                uid: self.uid(),
                seq,
                timeout,
                at,
                probe,
            }));
        }
        if !self.is_listening() {
            self.listening_since_ns = 0;
        }
        // Its processes may have the server's port themselves, and have opened it by now.
        if self.pod.keeps_binds
            && self.readiness.is_ready()
            && !mem::replace(&mut self.is_server_requested, true)
        {
            out.push(PodTrackerAction::OpenPodServer(self.uid()));
        }
        self.report(now, out);
    }

    fn report(&mut self, now: Instant, out: &mut Vec<PodTrackerAction>) {
        // Requests in flight change all the time: a report for them alone waits for `IN_FLIGHT_REPORT_PERIOD`.
        let observation = self.to_report();
        if let Some((at, old)) = &self.last_report {
            let is_early = now.duration_since(*at) < IN_FLIGHT_REPORT_PERIOD;
            let differs_in_flight_only =
                PodObservation { in_flight: old.in_flight, ..observation.clone() } == *old;
            if *old == observation || (differs_in_flight_only && is_early) {
                return;
            }
        }
        self.last_report = Some((now, observation.clone()));
        out.push(PodTrackerAction::Report(observation));
    }

    fn to_report(&self) -> PodObservation {
        PodObservation {
            uid: self.uid(),
            address: self.address(),
            other_family_address: self.other_family_address(),
            listening: self.is_listening(),
            // A container that is about to end gets no further request, even if its pod continues.
            ready: self.readiness.is_ready() && self.prestop.since.is_none(),
            drained: self.drain.is_drained,
            in_flight: self.kernel_state.in_flight,
            listening_since_ns: self.listening_since_ns,
            not_ready_reason: self.not_ready_reason(),
            // The counts of a pod with one port are complete as soon as there are any.
            counts_all_ports: self.pod.ports.is_empty() || self.is_registered,
            standby: None,
            awaits_stop: self.prestop.asks_controller(),
        }
    }

    fn next_wake(&self) -> Option<Instant> {
        let inspection = self.next_inspection.filter(|_| self.needs_inspection());
        let registration = self.registration_retry.as_ref().map(RegistrationRetry::at);
        [self.readiness.next_wake(), inspection, registration].into_iter().flatten().min()
    }

    fn uid(&self) -> String {
        self.pod.uid.clone()
    }
}

#[cfg(test)]
mod tests;
