//! Pure: from the route table to ordered writes of the kernel's maps.
//!
//! [`Planner`] keeps a picture of what the kernel follows. A plan first fills backends and extents that nothing
//! refers to, then switches each service by one store, then adds addresses, then takes addresses away. What a
//! plan frees rests for [`abi::REST_NS`] before any later plan fills it again, so that a connect which has just
//! read the old word still finds the old list behind it.

mod pool;
#[cfg(test)]
mod tests;
mod wanted;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use common::{
    abi::{self, FrontendKey},
    flow::{Mode, SvcInfo, SvcState},
    wire::{Name, RouteKey, RouteTable},
};

use self::{
    pool::{Extents, Numbers},
    wanted::{Front, Index},
};

/// Backend 0 stays unused, so that a slot that was ever written is not 0.
const FIRST_BACKEND: u32 = 1;

/// One target of connects, without its gauge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Backend {
    /// Sixteen bytes as they stand in a packet; IPv4 as `::ffff:a.b.c.d`.
    pub address: [u8; 16],
    /// Netns cookie of a registered pod on this node; 0: elsewhere or unknown.
    pub cookie: u64,
    /// Slot of a registered pod on this node; 0: elsewhere or unknown.
    pub slot: u32,
    /// Port, network byte order; 0: the service's own port at the activators.
    pub port_be: u16,
}

/// One write of a kernel map. The order of a plan's writes is part of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapOp {
    /// Fills a backend that no list names.
    Backend {
        /// Its number.
        id: u32,
        /// What it becomes.
        backend: Backend,
    },
    /// Fills an extent that no list refers to.
    Slots {
        /// First slot.
        offset: u32,
        /// Backend numbers, one a slot.
        backends: Vec<u32>,
    },
    /// Says where a service's connects go without a pod.
    Info {
        /// The service.
        service: u32,
        /// The activator list and port.
        info: SvcInfo,
    },
    /// Switches a service, in one store.
    State {
        /// The service.
        service: u32,
        /// What it becomes.
        state: SvcState,
    },
    /// Leads an address to a service.
    Frontend {
        /// The address.
        key: FrontendKey,
        /// The service.
        service: u32,
    },
    /// Gives an address back to whoever else serves it.
    RemoveFrontend {
        /// The address.
        key: FrontendKey,
    },
}

/// What the kernel follows, as read back from its maps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelTable {
    /// Service by address.
    pub frontends: BTreeMap<FrontendKey, u32>,
    /// State, activators and list of each service that a frontend names, and of the two activator lists.
    pub services: BTreeMap<u32, (SvcState, SvcInfo, Vec<u32>)>,
    /// The backends those lists name.
    pub backends: BTreeMap<u32, Backend>,
    /// Nothing was ever written from here on.
    pub written: Written,
}

/// How far the maps were ever written: one more than the highest number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Backend numbers.
    pub backends: u32,
    /// Slots.
    pub slots: u32,
    /// Service numbers.
    pub services: u32,
}

/// A registered pod of this node, by the kernel's names for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    /// Its netns cookie.
    pub cookie: u64,
    /// Its slot.
    pub slot: u32,
}

/// What a plan looks at again.
#[derive(Clone, Copy, Debug)]
pub enum Changed<'a> {
    /// Everything: at start, after a new stream, from time to time to be sure.
    All,
    /// These subjects; gone ones included. A change of a [`Local`] is a change of its pod.
    Keys(&'a BTreeSet<RouteKey>),
}

/// A table that does not fit the kernel's maps. Nothing of it is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the route table needs {wanted} more of {map} and only {free} are free ({resting} more within a second): \
     use fewer services or pods on this node"
)]
pub struct TooBig {
    /// Where it does not fit.
    pub map: &'static str,
    /// How many are needed at once.
    pub wanted: usize,
    /// How many are free.
    pub free: usize,
    /// How many become free when they have rested: where that is enough, the same plan succeeds later.
    pub resting: usize,
}

/// One list in force.
#[derive(Clone, Debug, PartialEq, Eq)]
struct List {
    service: u32,
    state: SvcState,
    info: SvcInfo,
    backends: Vec<u32>,
}

/// A list that is to be in force next.
struct Step {
    target: ListKey,
    next: Front,
}

/// Which list: a frontend's, or one of the two of activators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum ListKey {
    Activators(u32),
    Front(FrontendKey),
}

/// Plans the writes, and remembers what they led to.
///
/// When writing fails midway, read the maps back and make a new one: it finds its way from any prefix of a plan.
#[derive(Debug)]
pub struct Planner {
    index: Index,
    /// Whether the index has seen a whole table.
    indexed: bool,
    lists: HashMap<ListKey, List>,
    known: HashMap<Backend, (u32, u32)>,
    by_id: HashMap<u32, Backend>,
    ids: Numbers,
    services: Numbers,
    extents: Extents,
    /// Frontends of each service in force, to find those of a service that is gone.
    owned: BTreeMap<Name, BTreeSet<FrontendKey>>,
    owner: HashMap<FrontendKey, Name>,
    /// Whether IPv6 clients have activators of their own; every such service changes with it.
    six: bool,
    /// Services whose plan is due.
    due: BTreeSet<Name>,
    all_due: bool,
}

impl Planner {
    /// Begins with what the kernel follows now. `now_ns` is CLOCK_MONOTONIC, as in every call.
    pub fn resume(kernel: KernelTable, now_ns: u64) -> Self {
        let mut planner = Self {
            index: Index::default(),
            indexed: false,
            lists: HashMap::new(),
            known: HashMap::new(),
            by_id: HashMap::new(),
            ids: Numbers::new(FIRST_BACKEND, abi::BACKENDS_MAX),
            services: Numbers::new(abi::FIRST_SERVICE, abi::SERVICES_MAX),
            extents: Extents::new(abi::SLOTS_MAX),
            owned: BTreeMap::new(),
            owner: HashMap::new(),
            six: false,
            due: BTreeSet::new(),
            all_due: true,
        };
        for list in [abi::ACTIVATORS_V4, abi::ACTIVATORS_V6] {
            planner.adopt(ListKey::Activators(list), list, &kernel);
        }
        for (&key, &service) in &kernel.frontends {
            planner.adopt(ListKey::Front(key), service, &kernel);
        }
        // An earlier agent may have freed the rest of what it had written a moment ago.
        planner.ids.rest_free(kernel.written.backends, now_ns);
        planner.services.rest_free(kernel.written.services, now_ns);
        planner.extents.rest_free(kernel.written.slots, now_ns);
        planner
    }

    fn adopt(&mut self, key: ListKey, service: u32, kernel: &KernelTable) {
        let (state, info, backends) = kernel.services.get(&service).cloned().unwrap_or((
            SvcState { offset: 0, count: 0, generation: 0, mode: Mode::Pass },
            SvcInfo { activators: 0, port_be: 0 },
            Vec::new(),
        ));
        self.services.take_this(service);
        self.extents.take_this(state.offset, state.count);
        for &id in &backends {
            let Some(&backend) = kernel.backends.get(&id) else { continue };
            self.ids.take_this(id);
            self.by_id.insert(id, backend);
            self.known.entry(backend).or_insert((id, 0)).1 += 1;
        }
        self.lists.insert(key, List { service, state, info, backends });
    }

    /// The writes that put `table` in force on this node, given its registered pods by uid.
    ///
    /// Planning twice without a change gives nothing the second time. Work is proportional to what `changed` names.
    /// After an error nothing is forgotten: what was due stays due.
    pub fn plan(
        &mut self,
        now_ns: u64,
        table: &RouteTable,
        changed: Changed<'_>,
        locals: &BTreeMap<String, Local>,
    ) -> Result<Vec<MapOp>, TooBig> {
        self.ids.wake(now_ns);
        self.services.wake(now_ns);
        self.extents.wake(now_ns);
        self.note(table, changed);
        let (steps, stale) = self.compare(table, locals);
        let ops = self.carry_out(now_ns, steps, &stale)?;
        self.settle(table);
        Ok(ops)
    }

    /// Whether a refused plan, or part of one, still waits to be planned.
    pub fn is_due(&self) -> bool {
        self.all_due || !self.due.is_empty()
    }

    fn note(&mut self, table: &RouteTable, changed: Changed<'_>) {
        match changed {
            Changed::Keys(keys) if self.indexed => {
                for key in keys {
                    self.index.note(key, table, &mut self.due);
                }
            }
            Changed::All | Changed::Keys(_) => {
                self.index = Index::of(table);
                self.indexed = true;
                self.all_due = true;
            }
        }
        let six = wanted::has_six(table);
        if std::mem::replace(&mut self.six, six) != six {
            self.all_due = true;
        }
    }

    /// What differs: lists to switch, and frontends nobody wants any more.
    fn compare(
        &self,
        table: &RouteTable,
        locals: &BTreeMap<String, Local>,
    ) -> (Vec<Step>, Vec<FrontendKey>) {
        let mut steps = Vec::new();
        for (list, next) in wanted::activators(table) {
            self.step(ListKey::Activators(list), next, &mut steps);
        }
        let due: Vec<&Name> = if self.all_due {
            table.services.keys().collect()
        } else {
            self.due.iter().filter(|name| table.services.contains_key(*name)).collect()
        };
        let mut wanted_keys = BTreeSet::new();
        for service in due.iter().filter_map(|name| table.services.get(*name)) {
            for (key, next) in wanted::fronts(service, table, &self.index, locals) {
                // Two services with one address: the first by name keeps it, as a ClusterIP has one owner.
                if wanted_keys.insert(key) && self.may_own(&service.name, key, table) {
                    self.step(ListKey::Front(key), next, &mut steps);
                }
            }
        }
        (steps, self.stale(&wanted_keys))
    }

    /// Whether a frontend is free for a service: nobody's, its own, or of a service that has left it.
    fn may_own(&self, name: &Name, key: FrontendKey, table: &RouteTable) -> bool {
        match self.owner.get(&key) {
            Some(owner) if owner != name => {
                let held = table.services.get(owner);
                !held.is_some_and(|service| wanted::keys(service).any(|held| held == key))
            }
            _ => true,
        }
    }

    fn step(&self, target: ListKey, next: Front, steps: &mut Vec<Step>) {
        let same = self.lists.get(&target).is_some_and(|list| {
            let mut now: Vec<&Backend> =
                list.backends.iter().filter_map(|id| self.by_id.get(id)).collect();
            now.sort_unstable();
            list.state.mode == next.mode
                && (matches!(target, ListKey::Activators(_)) || list.info == next.info)
                && now.iter().copied().eq(&next.backends)
        });
        if !same {
            steps.push(Step { target, next });
        }
    }

    fn stale(&self, wanted: &BTreeSet<FrontendKey>) -> Vec<FrontendKey> {
        if self.all_due {
            let fronts = self.lists.keys().filter_map(|key| match key {
                ListKey::Front(key) => Some(*key),
                ListKey::Activators(_) => None,
            });
            let mut stale: Vec<_> = fronts.filter(|key| !wanted.contains(key)).collect();
            stale.sort_unstable();
            return stale;
        }
        let owned = self.due.iter().filter_map(|name| self.owned.get(name)).flatten();
        owned.filter(|key| !wanted.contains(key)).copied().collect()
    }

    /// Takes what the steps need, or nothing at all.
    fn carry_out(
        &mut self,
        now_ns: u64,
        steps: Vec<Step>,
        stale: &[FrontendKey],
    ) -> Result<Vec<MapOp>, TooBig> {
        self.check_room(&steps)?;
        let mut taken: Vec<(u32, u32)> = Vec::with_capacity(steps.len());
        for step in &steps {
            let count = step.next.backends.len() as u32;
            match self.extents.take(count) {
                Some(offset) => taken.push((offset, count)),
                None => {
                    let refusal = self.extents.refusal(count);
                    taken
                        .into_iter()
                        .for_each(|(offset, count)| self.extents.give_back(offset, count));
                    return Err(refusal);
                }
            }
        }
        let mut ops = Ops::default();
        let mut freed = Vec::new();
        for (step, (offset, _)) in steps.into_iter().zip(taken) {
            freed.extend(self.switch(step, offset, &mut ops));
        }
        for &key in stale {
            freed.extend(self.lists.remove(&ListKey::Front(key)).inspect(|list| {
                ops.removals.push(MapOp::RemoveFrontend { key });
                self.services.free(list.service, now_ns);
            }));
        }
        freed.iter().for_each(|list| self.release(list, now_ns));
        Ok(ops.in_order())
    }

    /// Counts what the steps need against what is free, so that nothing has to be undone but extents.
    fn check_room(&self, steps: &[Step]) -> Result<(), TooBig> {
        let fresh: BTreeSet<&Backend> = steps
            .iter()
            .flat_map(|step| &step.next.backends)
            .filter(|backend| !self.known.contains_key(*backend))
            .collect();
        self.ids.check(abi::maps::BACKENDS, fresh.len())?;
        let new = |step: &&Step| !self.lists.contains_key(&step.target);
        let services = steps.iter().filter(new).count();
        self.services.check(abi::maps::SVC_STATE, services)?;
        let fronts = self.lists.len() + services;
        let room = abi::FRONTENDS_MAX as usize + 1;
        if fronts > room {
            let free = room.saturating_sub(self.lists.len());
            return Err(TooBig { map: abi::maps::FRONTENDS, wanted: services, free, resting: 0 });
        }
        Ok(())
    }

    /// Puts one list in force. Returns the one it replaces, whose parts may rest once the plan is out.
    fn switch(&mut self, step: Step, offset: u32, ops: &mut Ops) -> Option<List> {
        let Front { mode, info, backends } = step.next;
        let backends: Vec<u32> =
            backends.into_iter().map(|backend| self.refer(backend, ops)).collect();
        let count = backends.len() as u32;
        if count > 0 {
            ops.slots.push(MapOp::Slots { offset, backends: backends.clone() });
        }
        let old = self.lists.remove(&step.target);
        let service = match (&step.target, &old) {
            (_, Some(list)) => list.service,
            (ListKey::Activators(list), None) => *list,
            (ListKey::Front(_), None) => self.services.take().expect("counted in check_room"),
        };
        let generation = old.as_ref().map_or(1, |list| list.state.generation.wrapping_add(1));
        let state = SvcState { offset, count, generation, mode };
        if old.as_ref().is_none_or(|list| list.info != info) {
            ops.infos.push(MapOp::Info { service, info });
        }
        ops.states.push(MapOp::State { service, state });
        if let (ListKey::Front(key), None) = (step.target, &old) {
            ops.frontends.push(MapOp::Frontend { key, service });
        }
        self.lists.insert(step.target, List { service, state, info, backends });
        old
    }

    fn refer(&mut self, backend: Backend, ops: &mut Ops) -> u32 {
        if let Some((id, uses)) = self.known.get_mut(&backend) {
            *uses += 1;
            return *id;
        }
        let id = self.ids.take().expect("counted in check_room");
        self.known.insert(backend, (id, 1));
        self.by_id.insert(id, backend);
        ops.backends.push(MapOp::Backend { id, backend });
        id
    }

    fn release(&mut self, list: &List, now_ns: u64) {
        self.extents.free(list.state.offset, list.state.count, now_ns);
        for id in &list.backends {
            let Some(&backend) = self.by_id.get(id) else { continue };
            let Some((_, uses)) = self.known.get_mut(&backend) else { continue };
            *uses -= 1;
            if *uses == 0 {
                self.known.remove(&backend);
                self.by_id.remove(id);
                self.ids.free(*id, now_ns);
            }
        }
    }

    /// Everything due is in force: remembers who owns which frontend.
    fn settle(&mut self, table: &RouteTable) {
        let all = std::mem::take(&mut self.all_due);
        let due = std::mem::take(&mut self.due);
        if all {
            self.owned.clear();
            self.owner.clear();
        }
        let names: Vec<Name> =
            if all { table.services.keys().cloned().collect() } else { due.into_iter().collect() };
        for name in &names {
            for key in self.owned.remove(name).unwrap_or_default() {
                self.owner.remove(&key);
            }
        }
        for service in names.iter().filter_map(|name| table.services.get(name)) {
            for key in wanted::keys(service) {
                let free =
                    self.lists.contains_key(&ListKey::Front(key)) && !self.owner.contains_key(&key);
                if free {
                    self.owner.insert(key, service.name.clone());
                    self.owned.entry(service.name.clone()).or_default().insert(key);
                }
            }
        }
    }
}

/// A plan's writes, by the order in which they are safe.
#[derive(Debug, Default)]
struct Ops {
    backends: Vec<MapOp>,
    slots: Vec<MapOp>,
    infos: Vec<MapOp>,
    states: Vec<MapOp>,
    frontends: Vec<MapOp>,
    removals: Vec<MapOp>,
}

impl Ops {
    fn in_order(self) -> Vec<MapOp> {
        let groups =
            [self.backends, self.slots, self.infos, self.states, self.frontends, self.removals];
        groups.into_iter().flatten().collect()
    }
}
