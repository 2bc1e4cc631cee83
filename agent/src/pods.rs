//! Pure: state of each pod on this node, and the actions that follow from it.
//!
//! The RouteTable names a pod. The finder finds its cgroup and its network namespace, which the kernel's maps then
//! hold. The kernel sees the pod listen, its readiness probe runs, and each change is reported. Events of the kernel
//! are hints: the shell reads the maps again and passes the result in as [`Event::Kernel`].

use std::{
    collections::BTreeMap,
    mem,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use common::{
    abi,
    wire::{self, PodPhase, PodSeen, Probe},
};

use crate::{
    kept,
    oddities::Oddity,
    probe::{self, Readiness},
};

pub mod find;
pub mod mark;
pub mod namespace;

/// Time that a draining pod must have been idle before it may stop (design: stopping a pod).
const DRAINED_AFTER: Duration = Duration::from_secs(1);

/// Time after a preStop request in which the RouteTable may name the pod as draining. After that no other node is told
/// of the draining, and only the pod's own idleness counts.
const UNTOLD: Duration = Duration::from_secs(2);

/// Time after a preStop request in which a connected controller may name the pod as draining. A pod that is not
/// draining by then has a container restarted: its liveness or startup probe has failed.
const RESTARTS_AFTER: Duration = Duration::from_secs(5);

/// Time for which such a pod gets no requests while its serving container still listens. Then another container
/// restarts, or the application ignores SIGTERM.
const RESTARTS_WITHIN: Duration = Duration::from_secs(30);

/// Period in which a draining pod's upgraded connections are counted, once they alone keep it.
const COUNT_EVERY: Duration = Duration::from_secs(1);

/// Shortest time between two reports that differ only in the requests in flight.
const IN_FLIGHT_EVERY: Duration = Duration::from_secs(1);

/// Period in which a pod's namespace is inspected if the kernel did not see its listener open.
const INSPECT_EVERY: Duration = Duration::from_secs(1);

/// Inspection period of a pod that did not listen within its first minute, [`LATE`].
const INSPECT_LATE: Duration = Duration::from_secs(10);
/// Age from which a pod without a listener is inspected less often.
const LATE: Duration = Duration::from_secs(60);

/// Period in which registration is tried again for a pod that found no room in the kernel's maps.
const REGISTER_EVERY: Duration = Duration::from_secs(1);

/// All pods of this node. Pass every event to [`step`](Self::step) and perform the actions that it returns.
#[derive(Debug)]
pub struct Pods {
    pods: BTreeMap<String, Tracked>,
    /// True if a controller is connected: a pod that it does not name as draining is then not draining.
    informed: bool,
    /// Time that a draining pod waits for its upgraded connections.
    tunnel_drain: Duration,
}

#[derive(Debug)]
struct Tracked {
    pod: wire::Pod,
    since: Instant,
    facts: Option<Facts>,
    /// Reason for which the pod has no namespace of its own.
    unfindable: Option<Oddity>,
    registered: bool,
    /// Time of the next attempt to register the pod, if the maps had no room for it.
    crowded: Option<Instant>,
    kernel: Kernel,
    /// Result of the newest inspection of its namespace; `None`: not inspected yet.
    sockets: Option<Sockets>,
    next_inspection: Option<Instant>,
    listening_since_ns: u64,
    readiness: Readiness,
    /// Time since which the RouteTable has named the pod as draining.
    draining: Option<Instant>,
    drained: bool,
    /// Time and number of the newest count of upgraded connections. The number holds while no request has ended since
    /// that time.
    upgraded: Option<(Instant, u64)>,
    /// Time of the next count of upgraded connections.
    next_count: Option<Instant>,
    /// Time of the preStop request, since which the kubelet waits to stop the pod.
    asked: Option<Instant>,
    /// True if the preStop request has got its response.
    released: bool,
    /// True if the RouteTable no longer names the pod, while the kubelet still waits.
    dropped: bool,
    /// True if the pod's first listener has opened since the preStop request.
    reopened: bool,
    sent: Option<(Instant, PodSeen)>,
}

/// Facts of a pod's network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Cookie of the namespace: the kernel's number for it, unique until reboot.
    pub cookie: u64,
    /// Global addresses of the namespace, IPv4 first.
    pub addresses: Vec<IpAddr>,
    /// Incompatibility of the pod, if it has one.
    pub oddity: Option<Oddity>,
}

/// One pod's state in the kernel's maps at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kernel {
    /// Listeners on the serving port that other hosts can reach, if the eBPF programs saw them open.
    pub listeners: u32,
    /// Listeners on the serving port that only the pod itself can reach.
    pub loopback: u32,
    /// Address families of clients that the listeners serve, as `SERVES_*` bits; 0: not known.
    pub serves: u32,
    /// Time at which the newest listener opened, CLOCK_MONOTONIC in ns.
    pub since_ns: u64,
    /// Requests in flight in the pod.
    pub in_flight: u64,
    /// Open connections of the pod.
    pub connections: u64,
    /// Open connections that have not carried a request yet.
    pub fresh: u64,
    /// Time since a request ended or a connection was established.
    pub idle: Duration,
}

/// A listener that an inspection found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listener {
    /// Address and port of the listener.
    pub at: SocketAddr,
    /// True if the listener is IPv6-only, as its program asked for the wildcard `::`.
    pub v6_only: bool,
}

/// Result of one inspection of a pod's namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sockets {
    /// Listeners of the namespace's processes.
    pub listeners: Vec<Listener>,
    /// True if rules in the namespace redirect connections.
    pub redirects: bool,
}

/// Event that concerns the pods of this node.
#[derive(Clone, Debug)]
pub enum Event {
    /// The RouteTable names this pod, new or changed.
    Named(Box<wire::Pod>),
    /// The RouteTable no longer names this pod.
    Dropped(String),
    /// The pod's namespace was found, or changed.
    Found(String, Facts),
    /// The pod has no namespace of its own, for this reason. If it gets one later, that is found.
    Unfindable(String, Oddity),
    /// The kernel's maps hold the pod: its listeners are seen from now on.
    Registered(String),
    /// The kernel's maps have no room for the pod.
    Crowded(String),
    /// The maps were read for this pod.
    Kernel(String, Kernel),
    /// The pod's namespace was inspected at this time (CLOCK_MONOTONIC in ns).
    Inspected(String, Sockets, u64),
    /// Number of the pod's upgraded connections, counted by a scan that began at this time.
    Upgraded(String, u64, Instant),
    /// The kubelet sent a preStop request for the pod, and waits for the response.
    Asked(String),
    /// The pod's last process has ended.
    Emptied(String),
    /// The probe attempt with this number ended.
    Tried(String, u64, Result<(), String>),
    /// Time has passed; carries no other fact.
    Tick,
}

/// Action that the shell is to perform now.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Search for the pod's namespace until it is found, and again whenever its processes change.
    Find(String),
    /// Write the pod into the kernel's maps.
    Register(String, Facts),
    /// Delete the pod from the kernel's maps and stop the search for it.
    Forget(String),
    /// Inspect the pod's namespace for listeners.
    Inspect(String),
    /// Count the pod's upgraded connections.
    CountUpgraded(String),
    /// Make one attempt of the pod's readiness probe.
    Try(Attempt),
    /// Answer the preStop request: the kubelet may stop the pod.
    Release(String),
    /// End the pod's exclusion: a container was restarted, and the pod continues.
    GoOn(String),
    /// Report this state of the pod.
    Report(PodSeen),
    /// Report that the pod is gone.
    Gone(String),
}

/// One attempt of a pod's readiness probe.
#[derive(Clone, Debug, PartialEq)]
pub struct Attempt {
    /// Uid of the pod.
    pub uid: String,
    /// Number of the attempt, repeated in its result.
    pub seq: u64,
    /// Timeout of the attempt.
    pub timeout: Duration,
    /// Address and port to connect to.
    pub at: SocketAddr,
    /// Probe with its handler.
    pub probe: Probe,
}

impl Pods {
    /// Starts without pods. `tunnel_drain` is the time that a draining pod waits for its upgraded connections.
    pub fn new(tunnel_drain: Duration) -> Self {
        Self { pods: BTreeMap::new(), informed: false, tunnel_drain }
    }

    /// Sets the flag that a controller is connected.
    pub fn set_informed(&mut self, informed: bool) {
        self.informed = informed;
    }

    /// Handles one event. Returns the actions to perform.
    pub fn step(&mut self, now: Instant, event: Event) -> Vec<Action> {
        let mut out = Vec::new();
        match event {
            Event::Named(pod) => self.named(now, *pod, &mut out),
            Event::Dropped(uid) => {
                self.with(&uid, |pod| pod.drop_out(now));
                self.sweep(&uid, &mut out);
            }
            Event::Asked(uid) => {
                self.with(&uid, |pod| pod.asked(now, &mut out));
                self.sweep(&uid, &mut out);
            }
            Event::Emptied(uid) => {
                // Without a process nothing is in flight, and the preStop request needs no response.
                self.with(&uid, |pod| pod.released = true);
                self.sweep(&uid, &mut out);
            }
            Event::Found(uid, facts) => self.with(&uid, |pod| pod.found(now, facts, &mut out)),
            Event::Unfindable(uid, oddity) => self.with(&uid, |pod| {
                pod.unfindable = Some(oddity);
                pod.report(now, &mut out);
            }),
            Event::Registered(uid) => self.with(&uid, |pod| pod.registered(now, &mut out)),
            Event::Crowded(uid) => self.with(&uid, |pod| {
                pod.crowded = Some(now + REGISTER_EVERY);
                pod.report(now, &mut out);
            }),
            Event::Kernel(uid, read) => {
                let (informed, patience) = (self.informed, self.tunnel_drain);
                self.with(&uid, |pod| pod.kernel(now, read, informed, patience, &mut out));
                self.sweep(&uid, &mut out);
            }
            Event::Inspected(uid, seen, at_ns) => {
                self.with(&uid, |pod| pod.inspected(now, seen, at_ns, &mut out));
            }
            // Stored until the next reading of the maps, which alone decides if the pod is drained.
            Event::Upgraded(uid, count, at) => {
                self.with(&uid, |pod| pod.upgraded = Some((at, count)));
            }
            Event::Tried(uid, seq, result) => {
                let event = probe::Event::Tried { seq, result };
                self.with(&uid, |pod| pod.settle(now, event, &mut out));
            }
            Event::Tick => self.pods.values_mut().for_each(|pod| pod.tick(now, &mut out)),
        }
        out
    }

    /// Returns the latest time for the next [`step`](Self::step) with [`Event::Tick`].
    pub fn next_wake(&self) -> Option<Instant> {
        self.pods.values().filter_map(Tracked::next_wake).min()
    }

    /// Returns the uids of the pods, each with true if the kernel's maps hold the pod.
    pub fn uids(&self) -> impl Iterator<Item = (&str, bool)> {
        self.pods.iter().map(|(uid, pod)| (uid.as_str(), pod.registered))
    }

    /// Returns the pod as the RouteTable names it.
    pub fn get(&self, uid: &str) -> Option<&wire::Pod> {
        self.pods.get(uid).map(|tracked| &tracked.pod)
    }

    /// Returns the pods that wait for their last requests, and are therefore read more often.
    pub fn draining(&self) -> Vec<String> {
        let leaves = |pod: &&Tracked| pod.draining.is_some() || pod.waits_to_stop();
        self.pods.values().filter(leaves).map(Tracked::uid).collect()
    }

    /// Returns true if the kubelet stops the pod, whatever the RouteTable states of it.
    pub fn is_stopping(&self, uid: &str) -> bool {
        self.pods.get(uid).is_some_and(|pod| pod.asked.is_some())
    }

    /// Returns true if a pod has a listener, but none that the eBPF programs saw open.
    pub fn is_unseen(&self, uid: &str) -> bool {
        let unseen = |pod: &Tracked| pod.is_listening() && pod.kernel.listeners == 0;
        self.pods.get(uid).is_some_and(unseen)
    }

    /// Returns true if every pod that the RouteTable names as ready is ready here. A new agent reports only then, or
    /// after a while. Otherwise serving pods would leave the table while it still searches for them.
    pub fn is_settled(&self) -> bool {
        let settled = |pod: &Tracked| pod.pod.phase != PodPhase::Ready || pod.readiness.is_ready();
        self.pods.values().all(settled)
    }

    /// Returns the numbers of pods that are named, listen, are ready, and found no room.
    pub fn counts(&self) -> Counts {
        let count = |is: fn(&Tracked) -> bool| self.pods.values().filter(|pod| is(pod)).count();
        Counts {
            named: self.pods.len(),
            listening: count(Tracked::is_listening),
            ready: count(|pod| pod.readiness.is_ready()),
            crowded: count(|pod| pod.crowded.is_some()),
        }
    }

    fn named(&mut self, now: Instant, pod: wire::Pod, out: &mut Vec<Action>) {
        if let Some(tracked) = self.pods.get_mut(&pod.uid) {
            tracked.renamed(now, pod, out);
            return;
        }
        out.push(Action::Find(pod.uid.clone()));
        let mut tracked = Tracked::new(now, pod);
        tracked.mark_draining(now);
        tracked.report(now, out);
        self.pods.insert(tracked.pod.uid.clone(), tracked);
    }

    /// Forgets a pod that the RouteTable has dropped, unless the kubelet still waits for its last requests.
    fn sweep(&mut self, uid: &str, out: &mut Vec<Action>) {
        if self.pods.get(uid).is_some_and(|pod| pod.dropped && !pod.waits_to_stop()) {
            self.pods.remove(uid);
            out.extend([Action::Forget(uid.to_owned()), Action::Gone(uid.to_owned())]);
        }
    }

    /// Applies `each` to a pod, if it still exists: a pod that is gone needs nothing.
    fn with(&mut self, uid: &str, each: impl FnOnce(&mut Tracked)) {
        if let Some(pod) = self.pods.get_mut(uid) {
            each(pod);
        }
    }
}

/// Numbers of this node's pods by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pods that the RouteTable names.
    pub named: usize,
    /// Pods that listen on their serving port.
    pub listening: usize,
    /// Pods that are ready for requests.
    pub ready: usize,
    /// Pods without room in the kernel's maps.
    pub crowded: usize,
}

impl Tracked {
    fn new(now: Instant, pod: wire::Pod) -> Self {
        Self {
            readiness: Readiness::new(pod.probe.clone()),
            pod,
            since: now,
            facts: None,
            unfindable: None,
            registered: false,
            crowded: None,
            kernel: Kernel::default(),
            sockets: None,
            next_inspection: None,
            listening_since_ns: 0,
            draining: None,
            drained: false,
            upgraded: None,
            next_count: None,
            asked: None,
            released: false,
            dropped: false,
            reopened: false,
            sent: None,
        }
    }

    fn renamed(&mut self, now: Instant, pod: wire::Pod, out: &mut Vec<Action>) {
        let old = mem::replace(&mut self.pod, pod);
        // A snapshot may name a pod that an earlier table had dropped.
        self.dropped = false;
        // Another port or probe makes a new pod of it: what is known of the old port proves nothing.
        if old.probe != self.pod.probe || old.port != self.pod.port {
            self.readiness = Readiness::new(self.pod.probe.clone());
            self.registered = false;
            self.kernel = Kernel::default();
            out.extend(self.facts.clone().map(|facts| Action::Register(self.uid(), facts)));
        }
        self.mark_draining(now);
        self.settle(now, probe::Event::Tick, out);
    }

    fn found(&mut self, now: Instant, facts: Facts, out: &mut Vec<Action>) {
        if self.facts.as_ref() == Some(&facts) {
            return;
        }
        // A new sandbox: readings and inspections of the old namespace prove nothing.
        if self.facts.as_ref().is_some_and(|old| old.cookie != facts.cookie) {
            self.registered = false;
            self.kernel = Kernel::default();
            self.sockets = None;
        }
        self.facts = Some(facts.clone());
        out.push(Action::Register(self.uid(), facts));
        self.settle(now, probe::Event::Tick, out);
    }

    /// Handles the registration. A listener may have opened before the maps held the pod, so its namespace is inspected
    /// once.
    fn registered(&mut self, now: Instant, out: &mut Vec<Action>) {
        self.crowded = None;
        if !mem::replace(&mut self.registered, true) {
            self.inspect(now, out);
        }
    }

    fn inspect(&mut self, now: Instant, out: &mut Vec<Action>) {
        out.push(Action::Inspect(self.uid()));
        let late = now.duration_since(self.since) >= LATE && !self.is_listening();
        self.next_inspection = Some(now + if late { INSPECT_LATE } else { INSPECT_EVERY });
    }

    fn kernel(
        &mut self,
        now: Instant,
        read: Kernel,
        informed: bool,
        patience: Duration,
        out: &mut Vec<Action>,
    ) {
        let was_listening = self.is_listening();
        let before = mem::replace(&mut self.kernel, read);
        let opened = before.listeners == 0 && read.listeners > 0;
        // An inspection may have found this listener before; then it is not a new one.
        if opened && !was_listening {
            self.listening_since_ns = read.since_ns;
            self.go_on(now, out);
        }
        let closed = before.listeners > 0 && read.listeners == 0;
        if closed && self.sockets.take().is_some() {
            // The newest inspection is older than the close: only another one can find other listeners.
            self.inspect(now, out);
        }
        self.watch_drain(now, patience, out);
        self.watch_restart(now, informed, out);
        self.settle(now, probe::Event::Tick, out);
    }

    fn inspected(&mut self, now: Instant, seen: Sockets, at_ns: u64, out: &mut Vec<Action>) {
        let was_listening = self.is_listening();
        self.sockets = Some(seen);
        if !was_listening && self.is_listening() {
            self.listening_since_ns = at_ns;
            self.go_on(now, out);
        }
        self.settle(now, probe::Event::Tick, out);
    }

    fn tick(&mut self, now: Instant, out: &mut Vec<Action>) {
        let due = self.next_inspection.is_some_and(|at| at <= now);
        if due && self.wants_inspection() {
            self.inspect(now, out);
        }
        if let Some(at) = self.crowded.as_mut().filter(|at| **at <= now) {
            *at = now + REGISTER_EVERY;
            out.extend(self.facts.clone().map(|facts| Action::Register(self.uid(), facts)));
        }
        self.settle(now, probe::Event::Tick, out);
    }

    /// Returns true if the pod needs inspections: the kernel reports its own listeners, but not those that opened
    /// earlier.
    fn wants_inspection(&self) -> bool {
        self.registered && self.kernel.listeners == 0
    }

    /// Updates readiness by the listeners, then by `event`, and reports.
    fn settle(&mut self, now: Instant, event: probe::Event, out: &mut Vec<Action>) {
        // A probe needs an address to connect to.
        let listening = self.is_listening() && self.address().is_some() && self.serves_clients();
        let first = self.readiness.step(now, probe::Event::Listening(listening));
        let then = self.readiness.step(now, event);
        if let (Some(attempt), Some(at)) = (then.or(first), self.address()) {
            let probe = self.readiness.probe().clone();
            let at = SocketAddr::new(at.ip(), probe.port.unwrap_or(self.pod.port).get());
            let probe::Try { seq, timeout } = attempt;
            out.push(Action::Try(Attempt { uid: self.uid(), seq, timeout, at, probe }));
        }
        if !self.is_listening() {
            self.listening_since_ns = 0;
        }
        self.report(now, out);
    }

    fn mark_draining(&mut self, now: Instant) {
        self.draining = match self.pod.phase {
            PodPhase::Draining => self.draining.or(Some(now)),
            PodPhase::Starting | PodPhase::Ready => None,
        };
        self.drained &= self.draining.is_some();
    }

    /// Decides from a reading of the maps if the pod is drained. Time that passes between two readings proves nothing.
    fn watch_drain(&mut self, now: Instant, patience: Duration, out: &mut Vec<Action>) {
        let Kernel { connections, fresh, idle, .. } = self.kernel;
        // If the RouteTable never names it as draining, the pod counts as such a moment after the preStop request.
        let told = self.draining.or_else(|| self.asked.map(|at| at + UNTOLD));
        let in_flight = self.in_flight(now, told.is_some_and(|at| now >= at + patience), out);
        // Clients' agents are closing the idle connections: a pod that stopped with one open would lose a request that
        // arrives at the same moment.
        let enough = if connections > 0 { kept::STAYS } else { DRAINED_AFTER };
        let quiet = in_flight == 0 && fresh == 0 && idle >= enough;
        let long = |since: Instant| now.saturating_duration_since(since) >= DRAINED_AFTER;
        self.drained = quiet && self.draining.is_some_and(long);
        if quiet && self.waits_to_stop() && told.is_some_and(long) {
            self.released = true;
            out.push(Action::Release(self.uid()));
        }
    }

    /// Returns the requests in flight that the pod must wait for. If it is `late`, upgraded connections do not count:
    /// the application closes them best itself, and learns from its SIGTERM that it is time.
    fn in_flight(&mut self, now: Instant, late: bool, out: &mut Vec<Action>) -> u64 {
        let Kernel { in_flight, idle, .. } = self.kernel;
        if !late || in_flight == 0 {
            return in_flight;
        }
        if self.next_count.is_none_or(|at| now >= at) {
            self.next_count = Some(now + COUNT_EVERY);
            out.push(Action::CountUpgraded(self.uid()));
        }
        // As no request has ended since the count, all counted connections are among those in flight.
        let counted = self.upgraded.filter(|(at, _)| now.saturating_duration_since(*at) <= idle);
        in_flight.saturating_sub(counted.map_or(0, |(_, count)| count))
    }

    /// Handles a container's restart. The kubelet may restart it without waiting for requests that it may never answer,
    /// and the pod returns to service afterwards. Without a controller nothing happens here, because the pod may as
    /// well be one that stops.
    fn watch_restart(&mut self, now: Instant, informed: bool, out: &mut Vec<Action>) {
        let Some(asked) = self.asked.filter(|_| informed && self.draining.is_none()) else {
            return;
        };
        let since = now.saturating_duration_since(asked);
        if since >= RESTARTS_AFTER && self.waits_to_stop() {
            self.released = true;
            out.push(Action::Release(self.uid()));
        }
        // Reopened: the new container listens. Otherwise the serving container never closed, and another one restarted.
        let is_over =
            (self.reopened && since >= UNTOLD) || since >= RESTARTS_AFTER + RESTARTS_WITHIN;
        if is_over && self.is_listening() {
            self.end_restart(out);
        }
    }

    /// Handles a preStop request. The kubelet sends one for each container, and each gets the same response.
    fn asked(&mut self, now: Instant, out: &mut Vec<Action>) {
        if self.asked.is_none() {
            self.asked = Some(now);
            self.reopened = false;
        }
        if self.released {
            out.push(Action::Release(self.uid()));
        }
        // Reports the pod as not ready: no new request may come from here on.
        self.report(now, out);
    }

    /// Handles the opening of the first listener. The kubelet also sends a preStop request before it restarts a
    /// container whose liveness probe failed. A later preStop request then counts as the first one. A pod that really
    /// stops is draining by now.
    fn go_on(&mut self, now: Instant, out: &mut Vec<Action>) {
        self.reopened = self.asked.is_some();
        let early = |asked| now.saturating_duration_since(asked) < UNTOLD;
        if self.draining.is_some() || self.asked.is_some_and(early) {
            return;
        }
        self.end_restart(out);
    }

    /// Ends the restart: the container that the preStop request was for runs again.
    fn end_restart(&mut self, out: &mut Vec<Action>) {
        let was_asked = self.asked.take().is_some();
        if mem::take(&mut self.released) || was_asked {
            out.push(Action::GoOn(self.uid()));
        }
    }

    /// Marks the pod as dropped from the RouteTable: no client is routed to it.
    fn drop_out(&mut self, now: Instant) {
        self.dropped = true;
        self.draining.get_or_insert(now);
    }

    fn waits_to_stop(&self) -> bool {
        self.asked.is_some() && !self.released
    }

    fn report(&mut self, now: Instant, out: &mut Vec<Action>) {
        // Requests in flight change all the time: a report for them alone waits for its turn.
        let seen = self.seen();
        if let Some((at, old)) = &self.sent {
            let early = now.duration_since(*at) < IN_FLIGHT_EVERY;
            let minor = PodSeen { in_flight: old.in_flight, ..seen.clone() } == *old;
            if *old == seen || (minor && early) {
                return;
            }
        }
        self.sent = Some((now, seen.clone()));
        out.push(Action::Report(seen));
    }

    fn seen(&self) -> PodSeen {
        PodSeen {
            uid: self.uid(),
            address: self.address(),
            also: self.also(),
            listening: self.is_listening(),
            // A container that is about to end gets no further request, even if its pod continues.
            ready: self.readiness.is_ready() && self.asked.is_none(),
            drained: self.drained,
            in_flight: self.kernel.in_flight,
            listening_since_ns: self.listening_since_ns,
            trouble: self.trouble(),
        }
    }

    fn next_wake(&self) -> Option<Instant> {
        let inspection = self.next_inspection.filter(|_| self.wants_inspection());
        [self.readiness.next_wake(), inspection, self.crowded].into_iter().flatten().min()
    }

    fn uid(&self) -> String {
        self.pod.uid.clone()
    }

    /// Returns the serving address: an address of the pod's own namespace, in its listener's family if that is known.
    fn address(&self) -> Option<SocketAddr> {
        let addresses = &self.facts.as_ref()?.addresses;
        let serves = self.serves();
        let wanted = |ip: &&IpAddr| serves & family(**ip) != 0;
        let ip = addresses.iter().find(wanted).or_else(|| addresses.first())?;
        Some(SocketAddr::new(*ip, self.pod.port.get()))
    }

    /// Returns the pod's address of the other family, if it serves that family too.
    fn also(&self) -> Option<IpAddr> {
        let others = self.serves() & !family(self.address()?.ip());
        let addresses = &self.facts.as_ref()?.addresses;
        addresses.iter().find(|ip| others & family(**ip) != 0).copied()
    }

    /// Returns the families of clients that the pod serves, as `SERVES_*` bits; 0: not known.
    fn serves(&self) -> u32 {
        if self.kernel.listeners > 0 {
            return self.kernel.serves;
        }
        self.serving().fold(0, |all, it| all | families(it))
    }

    /// Returns true if the pod serves the family of its first address, which clients use. Also true while the families
    /// are not known.
    ///
    /// Knative's sidecar probes the application at 127.0.0.1 and calls it ready by that alone.
    fn serves_clients(&self) -> bool {
        let first = self.facts.as_ref().and_then(|facts| facts.addresses.first());
        self.serves() == 0 || first.is_none_or(|ip| self.serves() & family(*ip) != 0)
    }

    /// Returns the listeners on the serving port that other hosts can reach, by the newest inspection.
    fn serving(&self) -> impl Iterator<Item = &Listener> {
        let port = self.pod.port.get();
        let all = self.listeners().iter();
        all.filter(move |it| it.at.port() == port && !is_loopback(it.at.ip()))
    }

    fn listeners(&self) -> &[Listener] {
        self.sockets.as_ref().map_or(&[], |sockets| &sockets.listeners)
    }

    fn is_listening(&self) -> bool {
        self.kernel.listeners > 0 || self.serving().next().is_some()
    }

    fn trouble(&self) -> String {
        if let Some(oddity) = self.oddity() {
            return oddity.to_string();
        }
        if !self.is_listening() {
            return self.not_listening();
        }
        if !self.serves_clients() {
            return self.wrong_family();
        }
        match self.readiness.trouble() {
            "" => String::new(),
            failed => format!("readiness probe failed: {failed}"),
        }
    }

    /// Returns the reason for which a pod that listens for one address family does not serve.
    fn wrong_family(&self) -> String {
        let port = self.pod.port;
        let (have, want, any) = match self.serves() & abi::SERVES_V4 {
            0 => ("IPv6", "IPv4", "0.0.0.0, or on :: without IPV6_V6ONLY"),
            _ => ("IPv4", "IPv6", "::"),
        };
        format!("port {port} is open for {have} only, and clients come by {want}: listen on {any}")
    }

    fn oddity(&self) -> Option<Oddity> {
        let redirects = self.sockets.as_ref().is_some_and(|sockets| sockets.redirects);
        let found = self.facts.as_ref().map_or(self.unfindable, |facts| facts.oddity);
        let crowded = self.crowded.map(|_| Oddity::Crowded);
        found.or(crowded).or_else(|| redirects.then_some(Oddity::Redirected))
    }

    /// Returns the reason for which an inspected pod does not serve; empty before an inspection.
    fn not_listening(&self) -> String {
        let port = self.pod.port;
        let seen_on_loopback = self.kernel.loopback > 0;
        if self.sockets.is_none() && !seen_on_loopback {
            return String::new();
        }
        if seen_on_loopback || self.listeners().iter().any(|it| it.at.port() == port.get()) {
            return format!("port {port} is open on a loopback address only: listen on 0.0.0.0");
        }
        let elsewhere: Vec<String> = self.listeners().iter().map(|it| it.at.to_string()).collect();
        match elsewhere.join(", ") {
            at if at.is_empty() => format!("nothing listens on port {port} yet"),
            at => {
                format!("nothing listens on port {port}, but on {at}: listen on the port in $PORT")
            }
        }
    }
}

fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

/// Returns the `SERVES_*` bit of an address's own family.
fn family(ip: IpAddr) -> u32 {
    if ip.is_ipv4() { abi::SERVES_V4 } else { abi::SERVES_V6 }
}

/// Returns the families of clients that reach a listener. The wildcard `::` serves both, unless it is IPv6-only.
fn families(listener: &Listener) -> u32 {
    match listener.at.ip().to_canonical() {
        IpAddr::V6(ip) if ip.is_unspecified() && !listener.v6_only => {
            abi::SERVES_V4 | abi::SERVES_V6
        }
        ip => family(ip),
    }
}

#[cfg(test)]
mod tests;
