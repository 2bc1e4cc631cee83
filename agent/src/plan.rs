//! Pure: from the route table to ordered writes of the kernel's maps.
//!
//! [`Planner`] keeps a picture of what the kernel follows. A plan first fills backends and extents that nothing refers
//! to. Then it switches each service by one store, adds frontends, and at last removes frontends. What a plan frees is
//! in quarantine for [`abi::REST_NS`] before a later plan fills it again. So a connect that has just read the old word
//! still finds the old list behind it.

mod op;
mod pool;
mod table;
mod terms;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
};

use common::{
    abi::{self, FrontendKey},
    flow::{Mode, SvcInfo, SvcState},
    wire::{Name, RouteChange, RouteKey, Service},
};

pub(crate) use self::op::sixteen;
use self::{
    op::Ops,
    pool::{Extents, Numbers},
};
pub use self::{
    op::{Backend, KernelTable, Local, MapOp, Plan, Written},
    table::Table,
    terms::Terms,
};

/// Lowest backend number in use. Number 0 stays unused, so that an entry of `SLOTS` that was ever written is not 0.
const FIRST_BACKEND: u32 = 1;

/// Error: a change that does not fit the kernel's maps. No part of it is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{wanted} more of map {map} are needed and only {free} are free ({resting} more within a second): \
     use fewer services, or fewer pods behind them"
)]
pub struct TooBig {
    /// Name of the map without room.
    pub map: &'static str,
    /// Number of entries that are needed at once.
    pub wanted: usize,
    /// Number of entries that are free.
    pub free: usize,
    /// Number of entries in quarantine. If they are enough, the same plan succeeds later.
    pub resting: usize,
}

impl TooBig {
    /// Returns true if the change may fit once every quarantine is over.
    fn may_pass(&self) -> bool {
        self.wanted <= self.free + self.resting
    }
}

/// Time for which a service that waits for a quarantine keeps its old lists: the quarantine, and the same time again.
const PATIENCE_NS: u64 = 2 * abi::REST_NS;

/// One list in force: the backends of a frontend, or of the activators.
#[derive(Clone, Debug, PartialEq, Eq)]
struct List {
    service: u32,
    /// Service of the [`Table`] that the frontend belongs to, or [`NO_SERVICE`].
    owner: u32,
    state: SvcState,
    info: SvcInfo,
    backends: Box<[u32]>,
}

/// Owner of a list without an owner.
const NO_SERVICE: u32 = u32::MAX;

/// One list as it should be. Backends are sorted and without duplicates.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Front {
    mode: Mode,
    info: SvcInfo,
    backends: Vec<Backend>,
}

/// Change of one list to its next content.
struct Step {
    target: ListKey,
    next: Front,
}

/// Changes that one service needs; a plan makes all of them or none.
struct Change {
    service: u32,
    steps: Vec<Step>,
}

impl Change {
    fn backends(&self) -> usize {
        self.steps.iter().map(|step| step.next.backends.len()).sum()
    }
}

/// Changes of a plan, before it is known which of them fit.
#[derive(Default)]
struct Draft {
    activators: Vec<Step>,
    changes: Vec<Change>,
    /// Owner of each frontend that this plan looks at, by service.
    held: BTreeMap<FrontendKey, u32>,
    /// Frontends that a service wants while another service owns them.
    claims: BTreeSet<(FrontendKey, u32)>,
    /// Frontends that no service wants any more.
    stale: Vec<FrontendKey>,
}

/// Key of a list: a frontend, or one of the two lists of activators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum ListKey {
    Activators(u32),
    Front(FrontendKey),
}

/// Plans map operations, and remembers the state that they produce.
///
/// [`set`](Self::set) and [`touch`](Self::touch) pass changes in; the work of a [`plan`](Self::plan) is proportional to
/// them. After a write that fails midway, read the maps back and call [`restart`](Self::restart): it continues from any
/// prefix of a plan.
#[derive(Debug)]
pub struct Planner {
    table: Table,
    lists: HashMap<ListKey, List>,
    known: HashMap<Backend, (u32, u32)>,
    by_id: HashMap<u32, Backend>,
    ids: Numbers,
    services: Numbers,
    extents: Extents,
    /// True if an activator has an IPv6 address; every service with an IPv6 address depends on it.
    six: bool,
    /// Services of the table that the next plan looks at.
    due: BTreeSet<u32>,
    /// Services among them that did not fit, each with the time of the first refusal.
    unfit: BTreeMap<u32, u64>,
    /// Frontends in force without an owner, until a plan assigns or removes them.
    left: BTreeSet<FrontendKey>,
    /// Services that want a frontend which another service owns. A ClusterIP has one owner; these are next.
    claims: BTreeSet<(FrontendKey, u32)>,
}

impl Planner {
    /// Starts with the kernel's present state and an empty table. `now_ns` is CLOCK_MONOTONIC, as in every call.
    pub fn resume(kernel: KernelTable, now_ns: u64) -> Self {
        Self::with(Table::default(), kernel, now_ns)
    }

    /// Restarts with the same table from the kernel's present state.
    pub fn restart(&mut self, kernel: KernelTable, now_ns: u64) {
        *self = Self::with(std::mem::take(&mut self.table), kernel, now_ns);
    }

    fn with(table: Table, kernel: KernelTable, now_ns: u64) -> Self {
        let mut planner = Self {
            lists: HashMap::with_capacity(kernel.frontends.len() + 2),
            known: HashMap::new(),
            by_id: HashMap::new(),
            ids: Numbers::new(FIRST_BACKEND, abi::BACKENDS_MAX),
            services: Numbers::new(abi::FIRST_SERVICE, abi::SERVICES_MAX),
            extents: Extents::new(abi::SLOTS_MAX),
            six: table.has_six(),
            due: table.all().collect(),
            unfit: BTreeMap::new(),
            left: kernel.frontends.keys().copied().collect(),
            claims: BTreeSet::new(),
            table,
        };
        for list in [abi::ACTIVATORS_V4, abi::ACTIVATORS_V6] {
            planner.adopt(ListKey::Activators(list), list, &kernel);
        }
        for (&key, &service) in &kernel.frontends {
            planner.adopt(ListKey::Front(key), service, &kernel);
        }
        // An earlier agent may have freed the rest a moment ago, and its quarantine is not known.
        planner.ids.rest_free(kernel.written.backends, now_ns);
        planner.services.rest_free(kernel.written.services, now_ns);
        planner.extents.rest_free(kernel.written.slots, now_ns);
        planner
    }

    fn adopt(&mut self, key: ListKey, service: u32, kernel: &KernelTable) {
        // A service without a readable state still owns its number: it counts as an empty list.
        let none = (
            SvcState { offset: 0, count: 0, generation: 0, mode: Mode::Pass },
            SvcInfo { activators: 0, port_be: 0 },
            Vec::new(),
        );
        let (state, info, backends) = kernel.services.get(&service).unwrap_or(&none);
        self.services.take_this(service);
        self.extents.take_this(state.offset, state.count);
        for &id in backends {
            let Some(&backend) = kernel.backends.get(&id) else { continue };
            self.ids.take_this(id);
            self.by_id.insert(id, backend);
            self.known.entry(backend).or_insert((id, 0)).1 += 1;
        }
        let backends = backends.as_slice().into();
        let list = List { service, owner: NO_SERVICE, state: *state, info: *info, backends };
        self.lists.insert(key, list);
    }

    /// Returns the table as it was set.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Applies one change of the RouteTable to the table. The next plan puts it in force.
    pub fn set(&mut self, change: RouteChange) {
        match change {
            RouteChange::Service(it) => self.set_service(&it.name, Some(&it)),
            RouteChange::Revision(it) => self.table.set_revision(&it.name, Some(&it)),
            RouteChange::Pod(it) => self.due.extend(self.table.set_pod(&it.uid, Some(&it))),
            RouteChange::Activator(it) => self.set_activator(&it.name, Some(it.addresses)),
            RouteChange::Gone(RouteKey::Service(name)) => self.set_service(&name, None),
            RouteChange::Gone(RouteKey::Revision(name)) => self.table.set_revision(&name, None),
            RouteChange::Gone(RouteKey::Pod(uid)) => {
                self.due.extend(self.table.set_pod(&uid, None))
            }
            RouteChange::Gone(RouteKey::Activator(name)) => self.set_activator(&name, None),
            RouteChange::Replicas(_)
            | RouteChange::Settings(_)
            | RouteChange::Gone(RouteKey::Replicas(_) | RouteKey::Settings)
            | RouteChange::Synced => {}
        }
    }

    /// Marks a pod of this node that was registered or forgotten: the next plan looks at it again.
    pub fn touch(&mut self, uid: &str) {
        self.due.extend(self.table.concerned(uid));
    }

    /// Excludes a pod from connects, or ends that, whatever the RouteTable states of it.
    pub fn hold(&mut self, uid: &str, held: bool) {
        self.due.extend(self.table.hold(uid, held));
    }

    fn set_activator(&mut self, name: &str, addresses: Option<Vec<IpAddr>>) {
        self.table.set_activator(name, addresses);
        let six = self.table.has_six();
        if std::mem::replace(&mut self.six, six) != six {
            self.due.extend(self.table.all());
        }
    }

    fn set_service(&mut self, name: &Name, told: Option<&Service>) {
        let before = self.table.find(name).map(|number| (number, self.table.keys(number)));
        let mut keys = Vec::new();
        match (told, &before) {
            (Some(told), _) => {
                let number = self.table.set_service(told);
                keys = self.table.keys(number);
                self.due.insert(number);
            }
            (None, Some((number, _))) => {
                self.table.remove_service(*number);
                self.due.remove(number);
                self.unfit.remove(number);
            }
            (None, None) => {}
        }
        let Some((number, before)) = before else { return };
        before.iter().filter(|key| !keys.contains(key)).for_each(|&key| self.leave(number, key));
    }

    /// Releases a frontend that a service no longer wants: another service that wants it may own it.
    fn leave(&mut self, service: u32, key: FrontendKey) {
        self.claims.remove(&(key, service));
        let Some(list) = self.lists.get_mut(&ListKey::Front(key)) else { return };
        if list.owner == service {
            list.owner = NO_SERVICE;
            self.left.insert(key);
            let next = self.claims.range((key, 0)..=(key, NO_SERVICE)).next();
            self.due.extend(next.map(|&(_, service)| service));
        }
    }

    /// Returns the plan that puts the table in force on this node, given its registered pods by uid.
    ///
    /// A second plan without a change is empty. A service that does not fit stays due, and delays no other service. Its
    /// old lists stay while waiting helps; after that its connects go to the activators. Only the activators' lists
    /// cause an error, after which everything stays due.
    pub fn plan(&mut self, now_ns: u64, locals: &BTreeMap<String, Local>) -> Result<Plan, TooBig> {
        self.ids.wake(now_ns);
        self.services.wake(now_ns);
        self.extents.wake(now_ns);
        let draft = self.compare(locals);
        self.carry_out(now_ns, draft)
    }

    /// Returns true if a refused plan, or part of one, still waits to be planned.
    pub fn is_due(&self) -> bool {
        !self.due.is_empty() || !self.left.is_empty()
    }

    /// Compares table and lists: returns the lists to switch, and the frontends to remove.
    fn compare(&self, locals: &BTreeMap<String, Local>) -> Draft {
        let mut draft = Draft::default();
        for (list, next) in self.table.activators() {
            self.step(ListKey::Activators(list), next, &mut draft.activators);
        }
        for &service in &self.due {
            let mut steps = Vec::new();
            // A frontend has one owner at a time. Another service that wants it becomes a claimant, and is due when the
            // owner releases it.
            for (key, next) in self.table.fronts(service, locals) {
                let owner = self.lists.get(&ListKey::Front(key)).map_or(NO_SERVICE, |it| it.owner);
                let is_free = owner == NO_SERVICE && !draft.held.contains_key(&key);
                if is_free || owner == service {
                    draft.held.insert(key, service);
                    self.step(ListKey::Front(key), next, &mut steps);
                } else {
                    draft.claims.insert((key, service));
                }
            }
            draft.changes.push(Change { service, steps });
        }
        // Smallest first: if not all fit, as many as possible do.
        draft.changes.sort_by_key(Change::backends);
        draft.stale =
            self.left.iter().filter(|key| !draft.held.contains_key(key)).copied().collect();
        draft
    }

    fn step(&self, target: ListKey, next: Front, steps: &mut Vec<Step>) {
        // Order is without meaning in a list, and `next` is sorted already; numbers are compared by what they stand
        // for.
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

    fn carry_out(&mut self, now_ns: u64, mut draft: Draft) -> Result<Plan, TooBig> {
        let (mut ops, mut freed) = (Ops::default(), Vec::new());
        let mut plan = Plan::default();
        // Activators first: every other list falls back on theirs, so nothing is planned if they do not fit.
        self.put(std::mem::take(&mut draft.activators), &mut ops, &mut freed)?;
        let mut unfit = BTreeMap::new();
        for Change { service, steps } in std::mem::take(&mut draft.changes) {
            let targets: Vec<_> = steps.iter().map(|it| (it.target, it.next.info)).collect();
            let Err(why) = self.put(steps, &mut ops, &mut freed) else { continue };
            let since = self.unfit.get(&service).copied().unwrap_or(now_ns);
            unfit.insert(service, since);
            if why.may_pass() && now_ns.saturating_sub(since) < PATIENCE_NS {
                plan.waits = true;
                continue;
            }
            plan.refused.extend(self.table.name(service).map(|name| (name, why)));
            let mut less = Vec::new();
            for (target, info) in targets {
                let none = Front { mode: Mode::Activator, info, backends: Vec::new() };
                self.step(target, none, &mut less);
            }
            // If its addresses find no room either, its connects pass unchanged.
            let _nothing = self.put(less, &mut ops, &mut freed);
        }
        for &key in &draft.stale {
            freed.extend(self.lists.remove(&ListKey::Front(key)).inspect(|list| {
                ops.removals.push(MapOp::RemoveFrontend { key });
                self.services.free(list.service, now_ns);
            }));
        }
        // After all switches: a backend that moves from one list to another keeps its number.
        freed.iter().for_each(|list| self.release(list, now_ns, &mut ops));
        self.settle(draft, unfit);
        ops.complete(&mut plan);
        Ok(plan)
    }

    /// Allocates what the steps need and switches their lists, or changes nothing at all.
    fn put(
        &mut self,
        steps: Vec<Step>,
        ops: &mut Ops,
        freed: &mut Vec<List>,
    ) -> Result<(), TooBig> {
        self.check_room(&steps)?;
        // Best fit can fail by fragmentation even if the count is free, so all extents are taken before any list is
        // switched.
        let mut taken: Vec<(u32, u32)> = Vec::with_capacity(steps.len());
        for step in &steps {
            let count = step.next.backends.len() as u32;
            let Some(offset) = self.extents.take(count) else {
                let refusal = self.extents.refusal(count);
                let back = |(offset, count)| self.extents.give_back(offset, count);
                taken.into_iter().for_each(back);
                return Err(refusal);
            };
            taken.push((offset, count));
        }
        for (step, (offset, _)) in steps.into_iter().zip(taken) {
            freed.extend(self.switch(step, offset, ops));
        }
        Ok(())
    }

    /// Compares the needs of one service's steps with what is free, so that only extents may have to be undone.
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
        // `lists` has the activators' two besides the frontends, and the map has the canary's frontend: two more, one
        // less.
        let fronts = self.lists.len() + services;
        let room = abi::FRONTENDS_MAX as usize + 1;
        if fronts > room {
            let free = room.saturating_sub(self.lists.len());
            return Err(TooBig { map: abi::maps::FRONTENDS, wanted: services, free, resting: 0 });
        }
        Ok(())
    }

    /// Puts one list in force. Returns the list that it replaces, whose parts go into quarantine with the plan.
    fn switch(&mut self, step: Step, offset: u32, ops: &mut Ops) -> Option<List> {
        let Front { mode, info, backends } = step.next;
        let backends: Vec<u32> =
            backends.into_iter().map(|backend| self.refer(backend, ops)).collect();
        let count = backends.len() as u32;
        if count > 0 {
            ops.slots.push(MapOp::Slots { offset, backends: backends.clone() });
        }
        let backends = backends.into_boxed_slice();
        let old = self.lists.remove(&step.target);
        let service = match (&step.target, &old) {
            (_, Some(list)) => list.service,
            (ListKey::Activators(list), None) => *list,
            (ListKey::Front(_), None) => self.services.take().expect("counted in check_room"),
        };
        let owner = old.as_ref().map_or(NO_SERVICE, |list| list.owner);
        // The generation changes with each list: a connect that reads the word twice notices the switch.
        let generation = old.as_ref().map_or(1, |list| list.state.generation.wrapping_add(1));
        let state = SvcState { offset, count, generation, mode };
        if old.as_ref().is_none_or(|list| list.info != info) {
            ops.infos.push(MapOp::Info { service, info });
        }
        ops.states.push(MapOp::State { service, state });
        if let (ListKey::Front(key), None) = (step.target, &old) {
            ops.frontends.push(MapOp::Frontend { key, service });
        }
        self.lists.insert(step.target, List { service, owner, state, info, backends });
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
        ops.joined.extend(backend.pod());
        ops.backends.push(MapOp::Backend { id, backend });
        id
    }

    fn release(&mut self, list: &List, now_ns: u64, ops: &mut Ops) {
        self.extents.free(list.state.offset, list.state.count, now_ns);
        for id in &list.backends {
            let Some(&backend) = self.by_id.get(id) else { continue };
            let Some((_, uses)) = self.known.get_mut(&backend) else { continue };
            *uses -= 1;
            if *uses == 0 {
                self.known.remove(&backend);
                self.by_id.remove(id);
                ops.left.extend(backend.pod());
                self.ids.free(*id, now_ns);
            }
        }
    }

    /// Records the planned state: the owner of each frontend, the claimants, and the services that did not fit.
    fn settle(&mut self, draft: Draft, unfit: BTreeMap<u32, u64>) {
        for (key, service) in draft.held {
            // A frontend without a list found no room.
            if let Some(list) = self.lists.get_mut(&ListKey::Front(key)) {
                list.owner = service;
                self.claims.remove(&(key, service));
            }
        }
        self.claims.extend(draft.claims);
        self.due = unfit.keys().copied().collect();
        self.unfit = unfit;
        self.left.clear();
    }
}
