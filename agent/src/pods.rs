//! Pure: what is known of each pod on this node, and what follows from it.
//!
//! A pod is named by the RouteTable, found by its cgroup, told to the kernel by its network namespace, seen
//! to listen, asked by its own probe, and reported whenever something about it changes. Events of the kernel
//! are hints: the shell reads the maps again and feeds what they say as [`Event::Kernel`].

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

/// How long a draining pod must have had nothing to do before it may stop (design: stopping a pod).
const DRAINED_AFTER: Duration = Duration::from_secs(1);

/// How long after the kubelet's question the RouteTable may take to say that the pod drains. Without that word nobody
/// tells the others, and there is nothing to wait for but quiet.
const UNTOLD: Duration = Duration::from_secs(2);

/// How long after the kubelet's question a controller that is heard may take to say that the pod drains. A pod that goes
/// on by then has one of its containers ended only to be started again: its liveness or startup probe has failed.
const RESTARTS_AFTER: Duration = Duration::from_secs(5);

/// How long such a pod gets no requests where its serving container listens on: another container restarts then, or the
/// application ignores SIGTERM.
const RESTARTS_WITHIN: Duration = Duration::from_secs(30);

/// How often a pod that leaves is looked into for connections that have switched protocols, once these alone keep it.
const COUNT_EVERY: Duration = Duration::from_secs(1);

/// Shortest time between two reports that differ in the requests in flight alone.
const IN_FLIGHT_EVERY: Duration = Duration::from_secs(1);

/// How often the namespace of a pod whose listener the kernel did not see is looked into.
const INSPECT_EVERY: Duration = Duration::from_secs(1);

/// The same for a pod that did not listen within its first minute.
const INSPECT_LATE: Duration = Duration::from_secs(10);
const LATE: Duration = Duration::from_secs(60);

/// How often room in the kernel's maps is looked for, for a pod that found none.
const REGISTER_EVERY: Duration = Duration::from_secs(1);

/// All pods of this node. Feed every event to [`step`](Self::step) and carry out what it returns.
#[derive(Debug)]
pub struct Pods {
    pods: BTreeMap<String, Tracked>,
    /// Whether a controller is heard now: what it does not say of a pod is then known not to be so.
    informed: bool,
    /// How long a pod that leaves waits for connections that have switched protocols.
    tunnel_drain: Duration,
}

#[derive(Debug)]
struct Tracked {
    pod: wire::Pod,
    since: Instant,
    facts: Option<Facts>,
    /// Why it has no namespace of its own.
    unfindable: Option<Oddity>,
    registered: bool,
    /// The maps had no room for it; when they are tried again.
    crowded: Option<Instant>,
    kernel: Kernel,
    /// What the newest look into its namespace found; `None`: not looked yet.
    sockets: Option<Sockets>,
    next_inspection: Option<Instant>,
    listening_since_ns: u64,
    readiness: Readiness,
    /// Since when the RouteTable has called it draining.
    draining: Option<Instant>,
    drained: bool,
    /// Connections that have switched protocols, and since when that was so for all that has been read later.
    upgraded: Option<(Instant, u64)>,
    /// When they are counted next.
    next_count: Option<Instant>,
    /// Since when the kubelet waits to stop it.
    asked: Option<Instant>,
    /// Whether the kubelet was told to go on.
    released: bool,
    /// Whether the RouteTable does not name it any more, while the kubelet still waits.
    dropped: bool,
    /// Whether its first listener has opened since the kubelet asked.
    reopened: bool,
    sent: Option<(Instant, PodSeen)>,
}

/// What a pod's network namespace says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The kernel's name of the namespace, unique until reboot.
    pub cookie: u64,
    /// Its global addresses, IPv4 first.
    pub addresses: Vec<IpAddr>,
    /// What is unusual about it.
    pub oddity: Option<Oddity>,
}

/// What the kernel's maps say of one pod at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kernel {
    /// Listeners on the serving port that others can reach, as far as the kernel half saw them opening.
    pub listeners: u32,
    /// Those that only the pod itself can reach.
    pub loopback: u32,
    /// The families of clients that they serve, as `SERVES_*` bits; 0: not known.
    pub serves: u32,
    /// When the newest of them opened, CLOCK_MONOTONIC in ns.
    pub since_ns: u64,
    /// Requests in flight.
    pub in_flight: u64,
    /// Open connections.
    pub connections: u64,
    /// Those of them that have not brought a request yet.
    pub fresh: u64,
    /// Time since a request ended or a connection came.
    pub idle: Duration,
}

/// A listener that a look found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listener {
    /// Where it listens.
    pub at: SocketAddr,
    /// Whether it takes IPv6 alone, as its program asked of the wildcard `::`.
    pub v6_only: bool,
}

/// What a look into a pod's namespace found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sockets {
    /// Where processes listen.
    pub listeners: Vec<Listener>,
    /// Whether something there redirects connections.
    pub redirects: bool,
}

/// What happens to the pods of this node.
#[derive(Clone, Debug)]
pub enum Event {
    /// The RouteTable names this pod, new or changed.
    Named(Box<wire::Pod>),
    /// The RouteTable names this pod no more.
    Dropped(String),
    /// Its namespace was found, or changed.
    Found(String, Facts),
    /// It has no namespace of its own, and why. Should it get one, that is found.
    Unfindable(String, Oddity),
    /// The kernel's maps know it: from now on its listeners are seen.
    Registered(String),
    /// The kernel's maps have no room for it.
    Crowded(String),
    /// The maps were read.
    Kernel(String, Kernel),
    /// Its namespace was looked into; the time is CLOCK_MONOTONIC in ns.
    Inspected(String, Sockets, u64),
    /// So many of its connections had switched protocols when this look into its namespace began.
    Upgraded(String, u64, Instant),
    /// The kubelet is about to stop it, and waits until it may.
    Asked(String),
    /// Its last process has gone.
    Emptied(String),
    /// A try of its probe ended.
    Tried(String, u64, Result<(), String>),
    /// Time has passed.
    Tick,
}

/// What to do now.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Look for its namespace until it is found, and again whenever its processes change.
    Find(String),
    /// Tell the kernel's maps.
    Register(String, Facts),
    /// Take it out of the kernel's maps and stop looking for it.
    Forget(String),
    /// Look for listeners in its namespace.
    Inspect(String),
    /// Count its connections that have switched protocols.
    CountUpgraded(String),
    /// Make one try of its probe.
    Try(Attempt),
    /// Let the kubelet stop it.
    Release(String),
    /// It goes on: what the kubelet asked for is over.
    GoOn(String),
    /// Report what is seen.
    Report(PodSeen),
    /// Report that it is gone.
    Gone(String),
}

/// One try of a pod's probe.
#[derive(Clone, Debug, PartialEq)]
pub struct Attempt {
    /// The pod.
    pub uid: String,
    /// To be named in the result.
    pub seq: u64,
    /// When to give up.
    pub timeout: Duration,
    /// Where.
    pub at: SocketAddr,
    /// What.
    pub probe: Probe,
}

impl Pods {
    /// No pods yet. One that leaves waits as long as `tunnel_drain` for connections that have switched protocols.
    pub fn new(tunnel_drain: Duration) -> Self {
        Self { pods: BTreeMap::new(), informed: false, tunnel_drain }
    }

    /// Sets whether a controller is heard.
    pub fn set_informed(&mut self, informed: bool) {
        self.informed = informed;
    }

    /// Takes in one event.
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

    /// When to call [`step`](Self::step) with [`Event::Tick`] at the latest.
    pub fn next_wake(&self) -> Option<Instant> {
        self.pods.values().filter_map(Tracked::next_wake).min()
    }

    /// The pods, with whether the kernel's maps know them.
    pub fn uids(&self) -> impl Iterator<Item = (&str, bool)> {
        self.pods.iter().map(|(uid, pod)| (uid.as_str(), pod.registered))
    }

    /// What the RouteTable says of a pod.
    pub fn get(&self, uid: &str) -> Option<&wire::Pod> {
        self.pods.get(uid).map(|tracked| &tracked.pod)
    }

    /// Pods that wait for their last requests, so that a close eye is kept on them.
    pub fn draining(&self) -> Vec<String> {
        let leaves = |pod: &&Tracked| pod.draining.is_some() || pod.waits_to_stop();
        self.pods.values().filter(leaves).map(Tracked::uid).collect()
    }

    /// Whether the kubelet stops the pod, whatever the RouteTable says of it.
    pub fn is_stopping(&self, uid: &str) -> bool {
        self.pods.get(uid).is_some_and(|pod| pod.asked.is_some())
    }

    /// Whether a pod has a listener, but none that the kernel half saw opening.
    pub fn is_unseen(&self, uid: &str) -> bool {
        let unseen = |pod: &Tracked| pod.is_listening() && pod.kernel.listeners == 0;
        self.pods.get(uid).is_some_and(unseen)
    }

    /// Whether every pod the RouteTable calls ready is seen to be so. A new agent reports only then (or
    /// after a while), lest pods that serve leave the table while it still looks for them.
    pub fn is_settled(&self) -> bool {
        let settled = |pod: &Tracked| pod.pod.phase != PodPhase::Ready || pod.readiness.is_ready();
        self.pods.values().all(settled)
    }

    /// How many pods are named, listen and are ready.
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

    /// A pod that left meanwhile needs nothing.
    fn with(&mut self, uid: &str, each: impl FnOnce(&mut Tracked)) {
        if let Some(pod) = self.pods.get_mut(uid) {
            each(pod);
        }
    }
}

/// How many pods of this node are in which state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Named by the RouteTable.
    pub named: usize,
    /// Seen to listen.
    pub listening: usize,
    /// Ready for requests.
    pub ready: usize,
    /// Without room in the kernel's maps.
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
        self.dropped = false;
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
        if self.facts.as_ref().is_some_and(|old| old.cookie != facts.cookie) {
            self.registered = false;
            self.kernel = Kernel::default();
            self.sockets = None;
        }
        self.facts = Some(facts.clone());
        out.push(Action::Register(self.uid(), facts));
        self.settle(now, probe::Event::Tick, out);
    }

    /// A listener may have opened before the maps knew the pod, so its namespace is looked into once.
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
        if opened && !was_listening {
            self.listening_since_ns = read.since_ns;
            self.go_on(now, out);
        }
        let closed = before.listeners > 0 && read.listeners == 0;
        if closed && self.sockets.take().is_some() {
            // The newest look is older than the close: only another one tells.
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

    /// The kernel speaks for its own listeners; only those it did not see opening must be looked for.
    fn wants_inspection(&self) -> bool {
        self.registered && self.kernel.listeners == 0
    }

    /// Brings readiness up to date with the listeners, then with `event`, and reports.
    fn settle(&mut self, now: Instant, event: probe::Event, out: &mut Vec<Action>) {
        // A probe needs to know where to ask.
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

    /// Only a reading of the maps proves quiet: time that passes between two readings does not.
    fn watch_drain(&mut self, now: Instant, patience: Duration, out: &mut Vec<Action>) {
        let Kernel { connections, fresh, idle, .. } = self.kernel;
        let told = self.draining.or_else(|| self.asked.map(|at| at + UNTOLD));
        let in_flight = self.in_flight(now, told.is_some_and(|at| now >= at + patience), out);
        // Idle connections are being ended on the clients' side: a pod that stopped under them would lose the
        // request that comes in the same moment.
        let enough = if connections > 0 { kept::STAYS } else { DRAINED_AFTER };
        let quiet = in_flight == 0 && fresh == 0 && idle >= enough;
        let long = |since: Instant| now.saturating_duration_since(since) >= DRAINED_AFTER;
        self.drained = quiet && self.draining.is_some_and(long);
        if quiet && self.waits_to_stop() && told.is_some_and(long) {
            self.released = true;
            out.push(Action::Release(self.uid()));
        }
    }

    /// Requests in flight that a pod is kept for. Where it is `late`, not those that have switched protocols: of them the
    /// application knows best how to close them, and learns by its SIGTERM that it is time to.
    fn in_flight(&mut self, now: Instant, late: bool, out: &mut Vec<Action>) -> u64 {
        let Kernel { in_flight, idle, .. } = self.kernel;
        if !late || in_flight == 0 {
            return in_flight;
        }
        if self.next_count.is_none_or(|at| now >= at) {
            self.next_count = Some(now + COUNT_EVERY);
            out.push(Action::CountUpgraded(self.uid()));
        }
        // As none has ended since they were counted, all of them are among those in flight.
        let counted = self.upgraded.filter(|(at, _)| now.saturating_duration_since(*at) <= idle);
        in_flight.saturating_sub(counted.map_or(0, |(_, count)| count))
    }

    /// Lets the kubelet restart a container without waiting for requests that it may never answer, and takes the pod back
    /// into service afterwards. While no controller is heard, the pod may as well be one that stops: nothing happens here.
    fn watch_restart(&mut self, now: Instant, informed: bool, out: &mut Vec<Action>) {
        let Some(asked) = self.asked.filter(|_| informed && self.draining.is_none()) else {
            return;
        };
        let since = now.saturating_duration_since(asked);
        if since >= RESTARTS_AFTER && self.waits_to_stop() {
            self.released = true;
            out.push(Action::Release(self.uid()));
        }
        let is_over =
            (self.reopened && since >= UNTOLD) || since >= RESTARTS_AFTER + RESTARTS_WITHIN;
        if is_over && self.is_listening() {
            self.end_restart(out);
        }
    }

    /// The kubelet asks once for each container, and each time gets the same answer.
    fn asked(&mut self, now: Instant, out: &mut Vec<Action>) {
        if self.asked.is_none() {
            self.asked = Some(now);
            self.reopened = false;
        }
        if self.released {
            out.push(Action::Release(self.uid()));
        }
        // From here on no request is to come.
        self.report(now, out);
    }

    /// Its first listener has opened. The kubelet also asks before it ends a container only to start it again, when a
    /// liveness probe fails: the next time that it asks is the first one then. A pod that really stops drains by now.
    fn go_on(&mut self, now: Instant, out: &mut Vec<Action>) {
        self.reopened = self.asked.is_some();
        let early = |asked| now.saturating_duration_since(asked) < UNTOLD;
        if self.draining.is_some() || self.asked.is_some_and(early) {
            return;
        }
        self.end_restart(out);
    }

    /// The container that the kubelet asked for runs again.
    fn end_restart(&mut self, out: &mut Vec<Action>) {
        let was_asked = self.asked.take().is_some();
        if mem::take(&mut self.released) || was_asked {
            out.push(Action::GoOn(self.uid()));
        }
    }

    /// The RouteTable names it no more: nobody is led to it.
    fn drop_out(&mut self, now: Instant) {
        self.dropped = true;
        self.draining.get_or_insert(now);
    }

    fn waits_to_stop(&self) -> bool {
        self.asked.is_some() && !self.released
    }

    fn report(&mut self, now: Instant, out: &mut Vec<Action>) {
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
            // A container that the kubelet is about to end gets no request more, also where its pod goes on.
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

    /// Where it serves: at an address of its own namespace, the family of its listener where that matters.
    fn address(&self) -> Option<SocketAddr> {
        let addresses = &self.facts.as_ref()?.addresses;
        let serves = self.serves();
        let wanted = |ip: &&IpAddr| serves & family(**ip) != 0;
        let ip = addresses.iter().find(wanted).or_else(|| addresses.first())?;
        Some(SocketAddr::new(*ip, self.pod.port.get()))
    }

    /// Its address of the other family, if it serves there too.
    fn also(&self) -> Option<IpAddr> {
        let others = self.serves() & !family(self.address()?.ip());
        let addresses = &self.facts.as_ref()?.addresses;
        addresses.iter().find(|ip| others & family(**ip) != 0).copied()
    }

    /// The families of clients that it serves, as `SERVES_*` bits; 0: not known.
    fn serves(&self) -> u32 {
        if self.kernel.listeners > 0 {
            return self.kernel.serves;
        }
        self.serving().fold(0, |all, it| all | families(it))
    }

    /// Whether it serves the family of its first address, by which clients come; true while the families are not known.
    ///
    /// Knative's sidecar asks the application at 127.0.0.1 and calls it ready by that alone.
    fn serves_clients(&self) -> bool {
        let first = self.facts.as_ref().and_then(|facts| facts.addresses.first());
        self.serves() == 0 || first.is_none_or(|ip| self.serves() & family(*ip) != 0)
    }

    /// Listeners on the serving port that others can reach, by the newest look.
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

    /// Why a pod that listens for one family of addresses only does not serve.
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

    /// Why a pod whose namespace was looked into does not serve.
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

/// The bit of an address's own family.
fn family(ip: IpAddr) -> u32 {
    if ip.is_ipv4() { abi::SERVES_V4 } else { abi::SERVES_V6 }
}

/// The families of clients that reach a listener. The wildcard `::` takes both, unless its program asked otherwise.
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
