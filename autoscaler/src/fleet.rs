//! Pure: all revisions: who reports on them, which are due, and what is decided.
//!
//! A sleeping revision has no timer and is in no list; it costs its entry here until news of it arrives.
//!
//! Usage and routes come on streams of their own, so a request may be reported before its revision is known.
//! What is reported is kept by revision until then: a sender says a thing once and not again until it changes.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use common::wire::{
    Decision, Name, PodPhase, Policies, Role, RouteKey, RouteTable, Sight, Subscriber, UsageKey,
    UsageSeen,
};

use crate::{
    revision::{Counts, Revision},
    usage::{GAP, LATE, Load, Stream},
};

/// How long what waited at an activator whose stream has ended is taken to wait on: longer than its way back takes.
const HELD: Duration = Duration::from_secs(10);

/// Every revision of the RouteTable and what is known of its load.
#[derive(Debug)]
pub struct Fleet {
    tick: Duration,
    /// Boxed, since there are many: half of a tree's slots are empty.
    revisions: BTreeMap<Name, Box<Revision>>,
    /// What streams that stand have reported of revisions not in the table; at most what those streams name.
    strangers: BTreeMap<Name, Load>,
    policies: Policies,
    pods: BTreeMap<String, Pod>,
    /// The pods of each revision that has any.
    pods_of: BTreeMap<Name, BTreeSet<String>>,
    /// By the number that their streams carry. One that will not be back is let go.
    senders: BTreeMap<u32, Sender>,
    next_sender: u32,
    /// The agent of each node.
    agents: BTreeMap<String, u32>,
    /// The activators that the RouteTable names: each may hold requests, whether or not it was ever heard.
    activators: BTreeSet<String>,
    due: BTreeSet<(Duration, Name)>,
    due_at: BTreeMap<Name, Duration>,
    /// Evaluations made.
    pub steps: u64,
}

#[derive(Debug)]
struct Pod {
    revision: Name,
    node: String,
    phase: PodPhase,
    has_address: bool,
}

#[derive(Debug)]
struct Sender {
    who: Subscriber,
    stream: Stream,
    is_online: bool,
    /// When it last said anything, or its stream ended. It speaks every second, also without news.
    heard: Duration,
}

/// What is said to the controller.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// What is wanted of a revision now.
    Decided(Box<Decision>),
    /// Nothing is wanted of the revision any more: it sleeps, or is no more.
    Gone(Name),
}

impl Fleet {
    /// No revisions. `tick`: how often the load of a revision that is awake is evaluated.
    pub fn new(tick: Duration) -> Self {
        Self {
            tick,
            revisions: BTreeMap::new(),
            strangers: BTreeMap::new(),
            policies: Policies::default(),
            pods: BTreeMap::new(),
            pods_of: BTreeMap::new(),
            senders: BTreeMap::new(),
            next_sender: 0,
            agents: BTreeMap::new(),
            activators: BTreeSet::new(),
            due: BTreeSet::new(),
            due_at: BTreeMap::new(),
            steps: 0,
        }
    }

    /// Takes in what a batch changed in the RouteTable. Returns the revisions that are gone.
    pub fn routes(
        &mut self,
        now: Duration,
        table: &RouteTable,
        changed: &BTreeSet<RouteKey>,
    ) -> Vec<Step> {
        let mut out = Vec::new();
        // Pods speak of revisions, so revisions come first, whatever the order of keys.
        for key in changed {
            if let RouteKey::Revision(name) = key {
                out.extend(self.revision(now, table, name));
            }
        }
        for key in changed {
            match key {
                RouteKey::Pod(uid) => self.pod(now, table, uid),
                RouteKey::Activator(name) if table.activators.contains_key(name) => {
                    self.activators.insert(name.clone());
                }
                RouteKey::Activator(name) => drop(self.activators.remove(name)),
                RouteKey::Service(_)
                | RouteKey::Revision(_)
                | RouteKey::Replicas(_)
                | RouteKey::Settings => {}
            }
        }
        out
    }

    /// Every subject of the RouteTable that is kept.
    pub fn keys(&self) -> BTreeSet<RouteKey> {
        let revisions = self.revisions.keys().cloned().map(RouteKey::Revision);
        let pods = self.pods.keys().cloned().map(RouteKey::Pod);
        let activators = self.activators.iter().cloned().map(RouteKey::Activator);
        revisions.chain(pods).chain(activators).collect()
    }

    fn revision(&mut self, now: Duration, table: &RouteTable, name: &Name) -> Option<Step> {
        let told = table.revisions.get(name).and_then(|it| Some((it, it.policy.clone()?)));
        let told = told.map(|(it, policy)| (it, self.policies.share(policy)));
        let Some((it, policy)) = told else {
            self.unschedule(name);
            let gone = self.revisions.remove(name)?;
            self.keep_load(name, gone.load);
            return Some(Step::Gone(name.clone()));
        };
        match self.revisions.get_mut(name) {
            Some(known) => {
                let (reachable, reached) = (it.reachable, it.initial_scale_reached);
                if known.policy != policy {
                    known.set_policy(now, policy);
                } else if (known.is_reachable, known.initial_scale_reached) == (reachable, reached)
                {
                    return None;
                }
                (known.is_reachable, known.initial_scale_reached) = (reachable, reached);
            }
            None => {
                let mut new = Revision::new(it, policy);
                new.pods = self.counts(name);
                new.load = self.strangers.remove(name).unwrap_or_default();
                self.revisions.insert(name.clone(), Box::new(new));
            }
        }
        self.schedule(name, now);
        None
    }

    /// Keeps what is reported of a revision that is not in the table.
    fn keep_load(&mut self, name: &Name, mut load: Load) {
        load.sleep();
        if !load.is_empty() {
            self.strangers.insert(name.clone(), load);
        }
    }

    /// What is known of the revision's load, whether or not it is in the table.
    fn load(&mut self, name: &Name) -> Option<&mut Load> {
        match self.revisions.get_mut(name) {
            Some(revision) => Some(&mut revision.load),
            None => self.strangers.get_mut(name),
        }
    }

    /// Every load, those of revisions not in the table too.
    fn each_load(&mut self, change: impl Fn(&mut Load)) {
        self.revisions.values_mut().for_each(|it| change(&mut it.load));
        self.strangers.retain(|_, load| {
            change(load);
            load.sleep();
            !load.is_empty()
        });
    }

    fn counts(&self, revision: &Name) -> Counts {
        let mut counts = Counts::default();
        self.pods_of(revision).for_each(|(_, pod)| *pod.place(&mut counts) += 1);
        counts
    }

    fn pods_of(&self, revision: &Name) -> impl Iterator<Item = (&String, &Pod)> {
        let uids = self.pods_of.get(revision).into_iter().flatten();
        uids.filter_map(|uid| self.pods.get_key_value(uid))
    }

    fn keep_pod(&mut self, uid: &str, pod: Pod) {
        self.pods_of.entry(pod.revision.clone()).or_default().insert(uid.to_owned());
        self.pods.insert(uid.to_owned(), pod);
    }

    fn drop_pod(&mut self, uid: &str) -> Option<Pod> {
        let pod = self.pods.remove(uid)?;
        if let Some(uids) = self.pods_of.get_mut(&pod.revision) {
            uids.remove(uid);
            if uids.is_empty() {
                self.pods_of.remove(&pod.revision);
            }
        }
        Some(pod)
    }

    fn pod(&mut self, now: Duration, table: &RouteTable, uid: &str) {
        let new = table.pods.get(uid).map(|it| Pod {
            revision: it.revision.clone(),
            node: it.node.clone(),
            phase: it.phase,
            has_address: it.address.is_some(),
        });
        if let Some(old) = self.drop_pod(uid) {
            if let Some(revision) = self.revisions.get_mut(&old.revision) {
                *old.place(&mut revision.pods) -= 1;
                self.schedule(&old.revision, now);
            }
            if let Some(load) = self.load(&old.revision) {
                load.count_pod(now, uid, false);
            }
        }
        if let Some(new) = new {
            // Its usage may have been told before it.
            if let Some(load) = self.load(&new.revision) {
                load.count_pod(now, uid, new.counts());
            }
            if let Some(revision) = self.revisions.get_mut(&new.revision) {
                *new.place(&mut revision.pods) += 1;
                self.schedule(&new.revision, now);
            }
            self.keep_pod(uid, new);
        }
    }

    /// A sender's stream has opened. An older one of the same sender has thereby ended; agents of one node follow each
    /// other and count in the same kernel, so they are one sender.
    pub fn open(&mut self, now: Duration, who: Subscriber) -> Stream {
        self.forget_lost_agents(now);
        let is_agent = who.role == Role::Agent;
        let same = |(_, it): &(&u32, &Sender)| {
            let is_of_node = is_agent && !who.node.is_empty() && it.who.node == who.node;
            it.who.role == who.role && (it.who.name == who.name || is_of_node)
        };
        let known = self.senders.iter().find(same).map(|(&at, it)| (at, it.stream));
        let stream = match known {
            Some((sender, stream)) => {
                self.close(now, stream);
                Stream { sender, number: stream.number + 1, synced: false }
            }
            None => {
                self.next_sender += 1;
                Stream { sender: self.next_sender, number: 0, synced: false }
            }
        };
        if is_agent {
            self.agents.retain(|_, sender| *sender != stream.sender);
            self.agents.insert(who.node.clone(), stream.sender);
        }
        let (heard, is_online) = (now, true);
        let sender = Sender { who, stream, is_online, heard };
        self.senders.insert(stream.sender, sender);
        stream
    }

    /// A stream has ended. What it said is kept for its return; what it does not say is not taken for zero.
    pub fn close(&mut self, now: Duration, stream: Stream) {
        let Some(sender) = self.sender(stream) else { return };
        (sender.is_online, sender.heard) = (false, now);
        self.each_load(|load| load.lost(now, stream.sender));
    }

    /// Lets go of agents whose node has no pods any more.
    fn forget_lost_agents(&mut self, now: Duration) {
        let is_lost = |it: &Sender| !it.is_online && it.who.role == Role::Agent;
        if !self.senders.values().any(is_lost) {
            return;
        }
        let nodes: BTreeSet<&str> = self.pods.values().map(|pod| pod.node.as_str()).collect();
        let gone = |it: &Sender| is_lost(it) && !nodes.contains(it.who.node.as_str());
        let gone = self.senders.iter().filter(|(_, it)| gone(it)).map(|(&at, _)| at);
        self.forget(now, gone.collect());
    }

    /// Lets go of activators that the RouteTable names no more, and that have been away for so long that nothing waits
    /// with them.
    fn forget_lost_activators(&mut self, now: Duration) {
        let gone = |it: &Sender| {
            let is_away = !it.is_online && it.who.role == Role::Activator;
            is_away && now >= it.heard + HELD && !self.activators.contains(&it.who.name)
        };
        let gone = self.senders.iter().filter(|(_, it)| gone(it)).map(|(&at, _)| at);
        self.forget(now, gone.collect());
    }

    fn forget(&mut self, now: Duration, gone: BTreeSet<u32>) {
        if gone.is_empty() {
            return;
        }
        self.senders.retain(|sender, _| !gone.contains(sender));
        self.agents.retain(|_, sender| !gone.contains(sender));
        self.each_load(|load| gone.iter().for_each(|&sender| load.forget(now, sender)));
    }

    /// The stream has named every subject of a batch; after the first, what it did not name is gone. A batch of nothing
    /// says that there is no news.
    pub fn synced(&mut self, now: Duration, stream: Stream) -> Stream {
        if self.hear(now, stream)
            && let Some(sender) = self.sender(stream)
            && !std::mem::replace(&mut sender.stream.synced, true)
        {
            self.each_load(|load| load.synced(now, stream));
        }
        Stream { synced: true, ..stream }
    }

    /// Whether the pod is known to run on another node.
    pub fn is_elsewhere(&self, uid: &str, node: &str) -> bool {
        self.pods.get(uid).is_some_and(|pod| pod.node != node)
    }

    /// Takes in one subject's totals.
    pub fn seen(&mut self, now: Duration, stream: Stream, seen: &UsageSeen) {
        if !self.hear(now, stream) {
            return;
        }
        let pod = seen.key.pod.as_deref().and_then(|uid| self.pods.get(uid));
        let counts = pod.is_none_or(Pod::counts);
        let name = &seen.key.revision;
        let Some(revision) = self.revisions.get_mut(name) else {
            let load = self.strangers.entry(name.clone()).or_default();
            return load.seen(now, stream, counts, seen);
        };
        if counts && revision.load.is_news(stream, seen) {
            revision.wake(now);
        }
        revision.load.seen(now, stream, counts, seen);
        if revision.is_awake() && revision.is_urgent(now) {
            revision.hurry(now);
            self.schedule(name, now);
        }
    }

    /// A subject is gone from its sender.
    pub fn gone(&mut self, now: Duration, stream: Stream, key: &UsageKey) {
        if !self.hear(now, stream) {
            return;
        }
        let Some(load) = self.load(&key.revision) else { return };
        load.gone(now, stream.sender, key.pod.as_deref());
        if load.is_empty() {
            self.strangers.remove(&key.revision);
        }
    }

    /// Notes that the sender speaks now; `false`: it may not. One that was silent for too long has told nothing of some
    /// second.
    fn hear(&mut self, now: Duration, stream: Stream) -> bool {
        let Some(sender) = self.sender(stream) else { return false };
        let was_silent = sender.stream.synced && now > sender.heard + GAP;
        sender.heard = now;
        if was_silent {
            self.miss(stream.sender);
        }
        true
    }

    /// Some second may have held requests of which the sender told nothing: at an activator, of any revision; at an agent,
    /// of those that have pods on its node. One node among many that stalls must not hold up all.
    fn miss(&mut self, sender: u32) {
        let Some(who) = self.senders.get(&sender).map(|it| &it.who) else { return };
        if who.role == Role::Activator {
            return self.each_load(Load::miss);
        }
        let there = self.pods.values().filter(|pod| pod.node == who.node);
        let there: BTreeSet<Name> = there.map(|pod| pod.revision.clone()).collect();
        for name in there {
            self.load(&name).into_iter().for_each(Load::miss);
        }
        self.each_load(|load| {
            if load.hears_from(sender) {
                load.miss();
            }
        });
    }

    /// The sender, if `stream` is its latest and stands.
    fn sender(&mut self, stream: Stream) -> Option<&mut Sender> {
        let sender = self.senders.get_mut(&stream.sender)?;
        (sender.is_online && sender.stream.number == stream.number).then_some(sender)
    }

    /// Evaluates every revision that is due, and returns what is decided anew.
    pub fn run(&mut self, now: Duration) -> Vec<Step> {
        let mut out = Vec::new();
        if self.next_due().is_none_or(|at| at > now) {
            return out;
        }
        self.forget_lost_activators(now);
        let lines_are_known = self.lines_are_known(now);
        while let Some((_, name)) = self.due.first().filter(|(at, _)| *at <= now).cloned() {
            self.unschedule(&name);
            let sight = self.sight(now, &name, lines_are_known);
            let Some(revision) = self.revisions.get_mut(&name) else { continue };
            self.steps += 1;
            let outcome = revision.step(now, self.tick, sight, &name);
            out.extend(outcome.decision.map(|decision| Step::Decided(Box::new(decision))));
            out.extend(outcome.is_withdrawn.then(|| Step::Gone(name.clone())));
            if let Some(at) = outcome.again_at {
                self.schedule(&name, at);
            }
        }
        out
    }

    /// When [`run`](Self::run) has something to do next.
    pub fn next_due(&self) -> Option<Duration> {
        self.due.first().map(|(at, _)| *at)
    }

    /// All revisions, for metrics.
    pub fn revisions(&self) -> impl Iterator<Item = (&Name, &Revision)> {
        self.revisions.iter().map(|(name, it)| (name, &**it))
    }

    /// Senders whose streams stand, by role.
    pub fn online(&self, role: Role) -> usize {
        self.senders.values().filter(|it| it.is_online && it.who.role == role).count()
    }

    /// Whether every activator tells what waits with it.
    fn lines_are_known(&self, now: Duration) -> bool {
        let of_role = |it: &&Sender| it.who.role == Role::Activator;
        let mut named = self.activators.clone();
        let mut all = self.senders.values().filter(of_role);
        all.all(|it| {
            named.remove(&it.who.name);
            it.is_current(now)
        }) && named.is_empty()
    }

    /// How much of the load can be seen: every ready pod is on a node whose agent reports, every pod that was told of is
    /// reported still, and every activator tells what waits. A pod that is not ready gets no requests.
    fn sight(&self, now: Duration, name: &Name, lines_are_known: bool) -> Sight {
        let Some(revision) = self.revisions.get(name) else { return Sight::Blind };
        let (mut ready, mut seen) = (0, 0);
        for (uid, pod) in self.pods_of(name).filter(|(_, pod)| pod.phase == PodPhase::Ready) {
            let agent = self.agents.get(&pod.node).and_then(|it| self.senders.get(it));
            let is_seen = agent.is_some_and(|it| it.is_current(now)) || revision.load.hears_of(uid);
            (ready, seen) = (ready + 1, seen + u32::from(is_seen));
        }
        if ready > 0 && seen == 0 {
            Sight::Blind
        } else if seen == ready && lines_are_known && revision.load.is_current(now) {
            Sight::Whole
        } else {
            Sight::Partial
        }
    }

    /// Lets the revision be looked at no later than `at`.
    fn schedule(&mut self, name: &Name, at: Duration) {
        match self.due_at.get(name) {
            Some(&earlier) if earlier <= at => return,
            Some(_) => self.unschedule(name),
            None => {}
        }
        self.due.insert((at, name.clone()));
        self.due_at.insert(name.clone(), at);
    }

    fn unschedule(&mut self, name: &Name) {
        if let Some(at) = self.due_at.remove(name) {
            self.due.remove(&(at, name.clone()));
        }
    }
}

impl Sender {
    /// Whether it stands, has named all it knows, and has not fallen silent.
    fn is_current(&self, now: Duration) -> bool {
        self.is_online && self.stream.synced && now < self.heard + LATE
    }
}

impl Pod {
    fn counts(&self) -> bool {
        self.phase != PodPhase::Draining
    }

    fn place<'a>(&self, counts: &'a mut Counts) -> &'a mut u32 {
        match self.phase {
            PodPhase::Starting if self.has_address => &mut counts.starting,
            PodPhase::Starting => &mut counts.pending,
            PodPhase::Ready => &mut counts.ready,
            PodPhase::Draining => &mut counts.draining,
        }
    }
}

#[cfg(test)]
mod tests;
