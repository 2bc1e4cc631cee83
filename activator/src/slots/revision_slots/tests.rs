use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::slots::peer_view::without_ended;

const PODS: [&str; 3] = ["p", "q", "r"];

fn revision() -> NamespacedName {
    NamespacedName::new("default", "hello-1")
}

/// RouteTable of a controller: the listed activators, the ready pods, and the pods with a standby order.
#[derive(Clone, Debug, Default)]
struct SimSlotRouteTable {
    listed: BTreeSet<ActivatorName>,
    ready: BTreeSet<SmolStr>,
    standby: BTreeSet<SmolStr>,
}

#[derive(Clone, Debug, PartialEq)]
enum SimSlotMessage {
    Claim(Option<SlotClaim>),
    Grant(Option<SlotGrant>),
}

/// Simulated activator with its state of the slots.
#[derive(Debug)]
struct SimActivator {
    slots: RevisionSlots,
    /// Version of the table that it follows.
    version: usize,
    /// Version of the first table that it followed, while an older one may still be in force elsewhere.
    first_table_version: Option<usize>,
    /// Activators that it has met.
    met_peers: BTreeSet<ActivatorName>,
    /// Activators that refused its connections last.
    refused_peers: BTreeSet<ActivatorName>,
    waiting: u32,
    /// Pods of its requests in flight.
    in_flight: Vec<SmolStr>,
    /// Pods that refuse its requests.
    paused_pods: BTreeSet<SmolStr>,
}

#[derive(Debug, Default)]
struct SimSlotCluster {
    limit: u32,
    tables: Vec<SimSlotRouteTable>,
    activators: BTreeMap<ActivatorName, SimActivator>,
    claims: BTreeMap<(ActivatorName, ActivatorName), SlotClaim>,
    grants: BTreeMap<(ActivatorName, ActivatorName), SlotGrant>,
    /// Messages on their way to the owner and to the holder, by holder and owner.
    links: BTreeMap<(ActivatorName, ActivatorName), [VecDeque<SimSlotMessage>; 2]>,
    /// Number of the latest term.
    last_term: u64,
    started: usize,
}

#[derive(Clone, Debug)]
enum SimSlotClusterOp {
    Request(usize),
    Leave(usize),
    Done(usize, usize),
    Refuse(usize, usize),
    Retry(usize),
    Pod(usize),
    /// A pod gets a standby order, or loses it.
    Standby(usize),
    List(usize),
    Unlist(usize),
    Start,
    End(usize),
    Crash(usize),
    /// An activator crashes, and another process takes its name and address.
    Restart(usize),
    /// An activator has followed tables for so long that no table from before its first one is in force.
    Age(usize),
    /// An activator dials all others. Where no process is, it is refused for so long that no older table is in force.
    Dial(usize),
    Expire,
    Advance(usize),
    Deliver(usize),
    Repeat(usize),
    Skip(usize),
    Break(usize),
}

fn ops() -> impl Strategy<Value = Vec<SimSlotClusterOp>> {
    let at = any::<usize>;
    let op = prop_oneof![
        8 => at().prop_map(SimSlotClusterOp::Request),
        1 => at().prop_map(SimSlotClusterOp::Leave),
        6 => (at(), at()).prop_map(|(at, request)| SimSlotClusterOp::Done(at, request)),
        1 => (at(), at()).prop_map(|(at, pod)| SimSlotClusterOp::Refuse(at, pod)),
        1 => at().prop_map(SimSlotClusterOp::Retry),
        2 => at().prop_map(SimSlotClusterOp::Pod),
        2 => at().prop_map(SimSlotClusterOp::Standby),
        2 => at().prop_map(SimSlotClusterOp::List),
        2 => at().prop_map(SimSlotClusterOp::Unlist),
        1 => Just(SimSlotClusterOp::Start),
        1 => at().prop_map(SimSlotClusterOp::End),
        1 => at().prop_map(SimSlotClusterOp::Crash),
        1 => at().prop_map(SimSlotClusterOp::Restart),
        2 => at().prop_map(SimSlotClusterOp::Age),
        1 => at().prop_map(SimSlotClusterOp::Dial),
        1 => Just(SimSlotClusterOp::Expire),
        8 => at().prop_map(SimSlotClusterOp::Advance),
        24 => at().prop_map(SimSlotClusterOp::Deliver),
        2 => at().prop_map(SimSlotClusterOp::Repeat),
        2 => at().prop_map(SimSlotClusterOp::Skip),
        1 => at().prop_map(SimSlotClusterOp::Break),
    ];
    proptest::collection::vec(op, 0..400)
}

fn pick_nth<T: Clone>(all: impl IntoIterator<Item = T>, at: usize) -> Option<T> {
    let all: Vec<T> = all.into_iter().collect();
    (!all.is_empty()).then(|| all[at % all.len()].clone())
}

fn toggle_pod(pods: &mut BTreeSet<SmolStr>, at: usize) {
    let pod = SmolStr::from(PODS[at % PODS.len()]);
    if !pods.remove(&pod) {
        pods.insert(pod);
    }
}

impl SimSlotCluster {
    fn new(limit: u32, activators: usize, pods: usize) -> Self {
        let mut cluster = Self { limit, ..Self::default() };
        let ready = PODS[..pods].iter().map(|pod| SmolStr::from(*pod)).collect();
        let listed = (0..activators).map(|at| SmolStr::from(format!("a{at}"))).collect();
        cluster.tables.push(SimSlotRouteTable { listed, ready, standby: BTreeSet::new() });
        (0..activators).for_each(|_| cluster.start());
        cluster.names().iter().for_each(|name| cluster.mark_old(name));
        cluster
    }

    fn table(&self) -> SimSlotRouteTable {
        self.tables.last().expect("the first is never taken away").clone()
    }

    fn names(&self) -> Vec<ActivatorName> {
        self.activators.keys().cloned().collect()
    }

    fn start(&mut self) {
        let name = SmolStr::from(format!("a{}", self.started));
        self.started += 1;
        self.start_as(name);
    }

    fn start_as(&mut self, name: ActivatorName) {
        let view = Arc::new(PeerView { own_name: name.clone(), ..PeerView::default() });
        let activator = SimActivator {
            slots: RevisionSlots::new(revision(), view),
            version: self.tables.len() - 1,
            first_table_version: Some(self.tables.len() - 1),
            met_peers: BTreeSet::new(),
            refused_peers: BTreeSet::new(),
            waiting: 0,
            in_flight: Vec::new(),
            paused_pods: BTreeSet::new(),
        };
        self.activators.insert(name.clone(), activator);
        self.read_table(&name);
    }

    /// Makes an activator read its table.
    fn read_table(&mut self, name: &ActivatorName) {
        let activator = self.activators.get_mut(name).expect("lives");
        let SimSlotRouteTable { listed, ready, standby } = self.tables[activator.version].clone();
        activator.met_peers.extend(listed.iter().filter(|it| *it != name).cloned());
        activator.paused_pods.retain(|pod| ready.contains(pod));
        activator.slots.on_standby(standby.intersection(&ready).cloned().collect());
        activator.slots.on_routes(self.limit, ready);
        let unlisted: Vec<_> = self
            .links
            .keys()
            .filter(|(from, to)| from == name && !listed.contains(to))
            .cloned()
            .collect();
        for key in unlisted {
            self.disconnect(&key);
            self.activators.get_mut(name).expect("lives").slots.on_grant(&key.1, None);
        }
        self.connect();
        self.reconcile(name);
    }

    /// Connects every activator to all others that its table lists.
    fn connect(&mut self) {
        for from in self.names() {
            let listed = self.tables[self.activators[&from].version].listed.clone();
            for to in listed {
                let key = (from.clone(), to.clone());
                if from == to || self.links.contains_key(&key) || !self.activators.contains_key(&to)
                {
                    continue;
                }
                let claim =
                    self.claims.get(&key).cloned().map(|it| SimSlotMessage::Claim(Some(it)));
                let back = (to.clone(), from.clone());
                let grant = SimSlotMessage::Grant(self.grants.get(&back).cloned());
                self.links.insert(key, [claim.into_iter().collect(), [grant].into()]);
                self.activators.get_mut(&from).expect("lives").refused_peers.remove(&to);
                let activator = self.activators.get_mut(&to).expect("lives");
                activator.met_peers.insert(from.clone());
                activator.refused_peers.remove(&from);
                activator.slots.on_holder_stream(&from);
                self.reconcile(&to);
            }
        }
    }

    fn mark_old(&mut self, name: &ActivatorName) {
        let oldest = self.activators.values().map(|activator| activator.version).min();
        let activator = self.activators.get_mut(name).expect("lives");
        if activator.first_table_version <= oldest {
            activator.first_table_version = None;
            self.reconcile(name);
        }
    }

    fn dial(&mut self, name: &ActivatorName) {
        let listed = &self.tables[self.activators[name].version].listed;
        let ended = listed.iter().filter(|it| !self.activators.contains_key(*it));
        let ended: Vec<_> = ended.cloned().collect();
        let activator = self.activators.get_mut(name).expect("lives");
        ended.iter().for_each(|it| activator.slots.on_grant(it, None));
        activator.refused_peers.extend(ended);
        self.reconcile(name);
    }

    fn disconnect(&mut self, key: &(ActivatorName, ActivatorName)) {
        self.links.remove(key);
        if let Some(activator) = self.activators.get_mut(&key.1) {
            activator.slots.on_holder_stream(&key.0);
            self.reconcile(&key.1);
        }
    }

    /// Runs an activator's reaction to any event.
    fn reconcile(&mut self, name: &ActivatorName) {
        let listed = &self.tables[self.activators[name].version].listed;
        let activator = self.activators.get_mut(name).expect("lives");
        let listed = without_ended(listed, &activator.refused_peers);
        let alive = activator.met_peers.difference(&activator.refused_peers).cloned().collect();
        let from = self.links.keys().filter(|(_, to)| to == name).map(|(from, _)| from);
        let connected = from.cloned().collect();
        let is_new_activator = activator.first_table_version.is_some();
        let view = PeerView { own_name: name.clone(), listed, alive, connected, is_new_activator };
        activator.slots.on_peer_view(Arc::new(view));
        loop {
            let open: BTreeSet<_> =
                activator.slots.ready_pods.difference(&activator.paused_pods).cloned().collect();
            activator.slots.on_queue(activator.waiting, open.clone());
            self.last_term += 2;
            let term = self.last_term;
            activator.slots.reconcile(|| term);
            let mut has_changed = false;
            for pod in &open {
                while activator.waiting > 0 && activator.slots.free_slots(pod) > 0 {
                    activator.slots.on_dispatched(pod);
                    activator.in_flight.push(pod.clone());
                    activator.waiting -= 1;
                    has_changed = true;
                }
            }
            if !has_changed {
                break;
            }
        }
        let messages = activator.slots.take_messages();
        self.send_messages(name, messages);
    }

    /// Puts an activator's messages on their links, if they differ from those sent before.
    fn send_messages(&mut self, name: &ActivatorName, messages: SlotMessages) {
        let SlotMessages { claims, grants } = messages;
        for (to, claim) in claims {
            let key = (name.clone(), to);
            if self.claims.get(&key) == claim.as_ref() {
                continue;
            }
            match claim.clone() {
                Some(claim) => drop(self.claims.insert(key.clone(), claim)),
                None => drop(self.claims.remove(&key)),
            }
            if let Some([there, _]) = self.links.get_mut(&key) {
                there.push_back(SimSlotMessage::Claim(claim));
            }
        }
        for (to, grant) in grants {
            let key = (name.clone(), to.clone());
            if self.grants.get(&key) == grant.as_ref() {
                continue;
            }
            match grant.clone() {
                Some(grant) => drop(self.grants.insert(key, grant)),
                None => drop(self.grants.remove(&key)),
            }
            if let Some([_, back]) = self.links.get_mut(&(to, name.clone())) {
                back.push_back(SimSlotMessage::Grant(grant));
            }
        }
    }

    /// Handles the first message in this direction of a link. It `stays_queued` if it is to come a second time.
    fn deliver(
        &mut self,
        key: &(ActivatorName, ActivatorName),
        direction: usize,
        stays_queued: bool,
    ) {
        let Some(link) = self.links.get_mut(key) else { return };
        let front = link[direction].front().cloned();
        if !stays_queued {
            link[direction].pop_front();
        }
        let (holder, owner) = key.clone();
        match front {
            Some(SimSlotMessage::Claim(claim)) => {
                let activator = self.activators.get_mut(&owner).expect("lives");
                activator.slots.on_claim(&holder, claim);
                self.reconcile(&owner);
            }
            Some(SimSlotMessage::Grant(grant)) => {
                let activator = self.activators.get_mut(&holder).expect("lives");
                activator.slots.on_grant(&owner, grant);
                self.reconcile(&holder);
            }
            None => {}
        }
    }

    fn pending_messages(&self) -> Vec<((ActivatorName, ActivatorName), usize)> {
        let ways =
            |(key, link): (&(ActivatorName, ActivatorName), &[VecDeque<SimSlotMessage>; 2])| {
                let full = (0..2).filter(|direction| !link[*direction].is_empty());
                full.map(|direction| (key.clone(), direction)).collect::<Vec<_>>()
            };
        self.links.iter().flat_map(ways).collect()
    }

    /// Delivers all messages. Returns true if there are none left.
    fn deliver_all(&mut self) -> bool {
        for _ in 0..20_000 {
            match self.pending_messages().first().cloned() {
                Some((key, direction)) => self.deliver(&key, direction, false),
                None => return true,
            }
        }
        false
    }

    fn stop(&mut self, name: &ActivatorName) {
        self.activators.remove(name);
        let keys: Vec<_> = self.links.keys().cloned().collect();
        for key in keys.into_iter().filter(|(from, to)| from == name || to == name) {
            self.disconnect(&key);
        }
        self.claims.retain(|(from, _), _| from != name);
        self.grants.retain(|(from, _), _| from != name);
    }

    /// Lets the time pass after which an activator that is neither listed nor there counts as gone.
    fn forget_gone_peers(&mut self) {
        self.deliver_all();
        let names = self.names();
        for name in &names {
            let listed = self.tables[self.activators[name].version].listed.clone();
            let activator = self.activators.get_mut(name).expect("lives");
            activator.met_peers.retain(|it| names.contains(it) || listed.contains(it));
            self.reconcile(name);
        }
    }

    /// Advances activators until none is more than two tables behind.
    fn advance_all(&mut self) {
        let oldest = self.tables.len().saturating_sub(3);
        for name in self.names() {
            while self.activators[&name].version < oldest {
                self.advance(&name);
            }
        }
    }

    fn advance(&mut self, name: &ActivatorName) {
        let last = self.tables.len() - 1;
        let activator = self.activators.get_mut(name).expect("lives");
        if activator.version < last {
            activator.version += 1;
            self.read_table(name);
        }
    }

    fn change(&mut self, change: impl FnOnce(&mut SimSlotRouteTable)) {
        let mut table = self.table();
        change(&mut table);
        self.tables.push(table);
        self.advance_all();
    }

    fn pick(&self, at: usize) -> Option<ActivatorName> {
        pick_nth(self.names(), at)
    }

    fn run(&mut self, op: SimSlotClusterOp) {
        match op {
            SimSlotClusterOp::Request(at) => {
                self.change_one(at, |activator| activator.waiting += 1)
            }
            SimSlotClusterOp::Leave(at) => self.change_one(at, |activator| {
                activator.waiting = activator.waiting.saturating_sub(1)
            }),
            SimSlotClusterOp::Done(at, request) => self.change_one(at, |activator| {
                if let Some(at) = pick_nth(0..activator.in_flight.len(), request) {
                    let pod = activator.in_flight.swap_remove(at);
                    activator.slots.on_request_done(&pod);
                }
            }),
            SimSlotClusterOp::Refuse(at, pod) => {
                self.change_one(at, |activator| {
                    activator.paused_pods.extend(pick_nth(activator.slots.ready_pods.clone(), pod))
                });
            }
            SimSlotClusterOp::Retry(at) => {
                self.change_one(at, |activator| activator.paused_pods.clear())
            }
            SimSlotClusterOp::Pod(at) => self.change(|table| toggle_pod(&mut table.ready, at)),
            SimSlotClusterOp::Standby(at) => {
                self.change(|table| toggle_pod(&mut table.standby, at));
            }
            SimSlotClusterOp::List(at) => {
                let one = self.pick(at);
                self.change(|table| table.listed.extend(one));
            }
            SimSlotClusterOp::Unlist(at) => self.unlist(at),
            SimSlotClusterOp::Expire => self.forget_gone_peers(),
            SimSlotClusterOp::Advance(at) => {
                self.pick(at).iter().for_each(|name| self.advance(name))
            }
            SimSlotClusterOp::Age(at) => self.pick(at).iter().for_each(|name| self.mark_old(name)),
            SimSlotClusterOp::Dial(at) => {
                let last = self.tables.len() - 1;
                if self.activators.values().all(|activator| activator.version == last) {
                    self.pick(at).iter().for_each(|name| self.dial(name));
                }
            }
            SimSlotClusterOp::Start
            | SimSlotClusterOp::End(_)
            | SimSlotClusterOp::Crash(_)
            | SimSlotClusterOp::Restart(_) => self.run_process(op),
            SimSlotClusterOp::Deliver(_)
            | SimSlotClusterOp::Repeat(_)
            | SimSlotClusterOp::Skip(_)
            | SimSlotClusterOp::Break(_) => self.run_link(op),
        }
    }

    fn change_one(&mut self, at: usize, change: impl FnOnce(&mut SimActivator)) {
        if let Some(name) = self.pick(at) {
            change(self.activators.get_mut(&name).expect("lives"));
            self.reconcile(&name);
        }
    }

    fn unlist(&mut self, at: usize) {
        let Some(name) = pick_nth(self.table().listed, at) else { return };
        let knows_itself = |it: &ActivatorName| {
            let activator = self.activators.get(it);
            activator.is_some_and(|activator| self.tables[activator.version].listed.contains(it))
        };
        if self.table().listed.iter().any(|it| *it != name && knows_itself(it)) {
            self.change(|table| _ = table.listed.remove(&name));
        }
    }

    /// Starts or ends a process.
    fn run_process(&mut self, op: SimSlotClusterOp) {
        match op {
            SimSlotClusterOp::Start if self.activators.len() < 5 => {
                self.advance_all();
                self.start();
            }
            SimSlotClusterOp::End(at) => {
                self.pick(at).iter().for_each(|name| self.end_with_goodbye(name))
            }
            SimSlotClusterOp::Crash(at) if self.activators.len() > 1 => {
                self.pick(at).iter().for_each(|name| self.stop(name));
            }
            SimSlotClusterOp::Restart(at) => {
                if let Some(name) = self.pick(at) {
                    self.stop(&name);
                    self.start_as(name);
                }
            }
            _ => {}
        }
    }

    /// Ends an activator that has nothing more to do, and announces that to the others.
    fn end_with_goodbye(&mut self, name: &ActivatorName) {
        let activator = &self.activators[name];
        let is_done =
            activator.in_flight.is_empty() && activator.waiting == 0 && self.activators.len() > 1;
        let mut tables = [self.tables[activator.version].clone(), self.table()].into_iter();
        if is_done && !tables.any(|it| it.listed.contains(name)) {
            self.stop(name);
            for other in self.names() {
                self.activators.get_mut(&other).expect("lives").met_peers.remove(name);
                self.reconcile(&other);
            }
        }
    }

    /// Delivers, repeats or skips a message, or breaks a stream.
    fn run_link(&mut self, op: SimSlotClusterOp) {
        match op {
            SimSlotClusterOp::Deliver(at) => {
                pick_nth(self.pending_messages(), at)
                    .iter()
                    .for_each(|(key, direction)| self.deliver(key, *direction, false));
            }
            SimSlotClusterOp::Repeat(at) => {
                pick_nth(self.pending_messages(), at)
                    .iter()
                    .for_each(|(key, direction)| self.deliver(key, *direction, true));
            }
            SimSlotClusterOp::Skip(at) => {
                // A later state replaces an earlier one.
                let later = |(key, direction): &(_, usize)| self.links[key][*direction].len() > 1;
                if let Some((key, direction)) =
                    pick_nth(self.pending_messages().into_iter().filter(later), at)
                {
                    self.links.get_mut(&key).expect("stands")[direction].pop_front();
                }
            }
            SimSlotClusterOp::Break(at) => {
                if let Some(key) = pick_nth(self.links.keys().cloned().collect::<Vec<_>>(), at) {
                    self.disconnect(&key);
                    self.connect();
                }
            }
            _ => {}
        }
    }

    fn in_use(&self) -> SlotsByPod {
        let mut all = SlotsByPod::new();
        let flying = self.activators.values().flat_map(|activator| &activator.in_flight);
        flying.for_each(|pod| add_slots(&mut all, pod, 1));
        all
    }

    fn waiting(&self) -> u32 {
        self.activators.values().map(|activator| activator.waiting).sum()
    }

    /// Brings the latest table to all activators, with those that are alive, and delivers all messages.
    fn settle_all(&mut self) {
        let names = self.names();
        let first = names[0].clone();
        self.change(|table| {
            table.listed.retain(|it| names.contains(it));
            if table.listed.is_empty() {
                table.listed.insert(first);
            }
        });
        for name in names {
            while self.activators[&name].version + 1 < self.tables.len() {
                self.advance(&name);
            }
            let activator = self.activators.get_mut(&name).expect("lives");
            activator.paused_pods.clear();
            self.reconcile(&name);
        }
        self.names().iter().for_each(|name| self.mark_old(name));
        self.forget_gone_peers();
        assert!(self.deliver_all(), "messages come to an end");
    }
}

/// The table of the new activator lists only itself, while another one still owns the Revision by an older table.
#[test]
fn a_new_activator_grants_nothing_while_an_earlier_owner_may() {
    let mut cluster = SimSlotCluster::new(1, 1, 1);
    let one_to_another = [
        SimSlotClusterOp::Start,
        SimSlotClusterOp::List(1),
        SimSlotClusterOp::Advance(1),
        SimSlotClusterOp::Unlist(0),
        SimSlotClusterOp::Restart(1),
    ];
    let all = [
        &[SimSlotClusterOp::Request(0)],
        &one_to_another[..],
        &[SimSlotClusterOp::Request(1), SimSlotClusterOp::Age(1)],
    ]
    .concat();
    all.into_iter().for_each(|op| cluster.run(op));
    assert_eq!(cluster.activators["a1"].slots.view.alive, BTreeSet::new(), "it cannot know");
    assert_eq!((cluster.in_use(), cluster.waiting()), ([("p".into(), 1)].into(), 1));
    cluster.settle_all();
    cluster.run(SimSlotClusterOp::Done(0, 0));
    assert!(cluster.deliver_all());
    assert_eq!(
        (cluster.in_use(), cluster.waiting()),
        ([("p".into(), 1)].into(), 0),
        "it gets the free slot"
    );
}

/// The holder's second request uses up the running pod, although the pod with a standby order has more free slots.
#[test]
fn slots_of_a_standby_pod_are_given_last() {
    let mut cluster = SimSlotCluster::new(2, 2, 2);
    cluster.run(SimSlotClusterOp::Standby(0));
    cluster.settle_all();
    let is_holder = |it: &SimActivator| it.slots.ledger.is_none();
    let holder = cluster.activators.values().position(is_holder).expect("one owns the Revision");
    let mut used = Vec::new();
    for _ in 0..4 {
        cluster.run(SimSlotClusterOp::Request(holder));
        assert!(cluster.deliver_all(), "messages come to an end");
        let in_use = cluster.in_use();
        used.push(["p", "q"].map(|pod| in_use.get(pod).copied().unwrap_or(0)));
    }
    assert_eq!(used, [[0, 1], [0, 2], [1, 2], [2, 2]]);
}

/// Otherwise each request of a holder that once used the pod would thaw it again, beside a running pod with free slots.
#[test]
fn a_holder_keeps_no_idle_slot_of_a_standby_pod() {
    let mut cluster = SimSlotCluster::new(2, 2, 2);
    cluster.run(SimSlotClusterOp::Standby(1));
    cluster.settle_all();
    let is_holder = |it: &SimActivator| it.slots.ledger.is_none();
    let holder = cluster.activators.values().position(is_holder).expect("one owns the Revision");
    cluster.run(SimSlotClusterOp::Request(holder));
    assert!(cluster.deliver_all(), "messages come to an end");
    assert_eq!(cluster.in_use(), [(SmolStr::from("p"), 1)].into());
    // The orders change over while its request is in flight.
    cluster.run(SimSlotClusterOp::Standby(0));
    cluster.run(SimSlotClusterOp::Standby(1));
    cluster.settle_all();
    cluster.run(SimSlotClusterOp::Done(holder, 0));
    assert!(cluster.deliver_all(), "messages come to an end");
    cluster.run(SimSlotClusterOp::Request(holder));
    assert!(cluster.deliver_all(), "messages come to an end");
    assert_eq!(cluster.in_use(), [(SmolStr::from("q"), 1)].into());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// However late tables are, and whatever happens to messages and activators: no pod has more requests than its
    /// limit. Once all messages are delivered, no request waits while a slot is free, and all are served in the end.
    #[test]
    fn the_limit_holds_and_none_starves(
        limit in 1..4u32, activators in 1..4usize, pods in 1..3usize, ops in ops(),
    ) {
        let mut cluster = SimSlotCluster::new(limit, activators, pods);
        for (at, op) in ops.into_iter().enumerate() {
            cluster.run(op.clone());
            let over = cluster.in_use().into_iter().find(|(_, slots)| *slots > limit);
            prop_assert!(over.is_none(), "{over:?} after step {at}, {op:?}: {cluster:#?}");
        }
        cluster.settle_all();
        let ready = cluster.table().ready;
        for _ in 0..1_000 {
            let in_use = cluster.in_use();
            prop_assert!(in_use.values().all(|slots| *slots <= limit));
            let free = ready.iter().any(|pod| in_use.get(pod).is_none_or(|it| *it < limit));
            prop_assert!(cluster.waiting() == 0 || !free, "one waits: {cluster:#?}");
            let Some(name) = cluster.activators.iter().find(|it| !it.1.in_flight.is_empty()).map(|it| it.0.clone()) else { break };
            cluster.run(SimSlotClusterOp::Done(cluster.names().iter().position(|it| *it == name).expect("lives"), 0));
            prop_assert!(cluster.deliver_all(), "messages come to an end");
        }
        prop_assert!(ready.is_empty() || cluster.waiting() == 0);
    }
}
