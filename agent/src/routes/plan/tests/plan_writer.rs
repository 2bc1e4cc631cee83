//! Pure: the writer of plans in simulations, which checks after each store what connects may find.

use super::*;

/// Word that a connect has read, and not yet followed.
struct ReadWord {
    /// Time at which the word was last in force.
    until: u64,
    service_id: u32,
    state: SvcState,
    /// Backends of all lists of the service id since the word came into force.
    backends: BTreeSet<BackendTarget>,
}

/// Maps that plans are written to, with the connects that are on their way.
#[derive(Default)]
pub(super) struct PlanWriter {
    pub(super) kernel: FakeKernelMaps,
    words: Vec<ReadWord>,
}

impl PlanWriter {
    /// Plans, and writes the whole plan.
    pub(super) fn write_plan(
        &mut self,
        planner: &mut RoutePlanner,
        sim: &RouteSim,
    ) -> Result<(), TestCaseError> {
        self.write_stores(planner, sim, None)?;
        for (_, _, list) in self.kernel.in_force() {
            let different: BTreeSet<&BackendTarget> = list.iter().collect();
            prop_assert_eq!(different.len(), list.len(), "each backend once");
        }
        for (key, service_id) in &self.kernel.frontends {
            let (state, info) = (self.kernel.states[service_id], self.kernel.infos[service_id]);
            if needs_order(&BackendListKey::Frontend(*key), state.mode, &info) {
                prop_assert!(self.kernel.ids(&state).is_sorted());
            }
        }
        Ok(())
    }

    /// Plans, and writes a part of the plan, in 256ths.
    pub(super) fn write_part(
        &mut self,
        planner: &mut RoutePlanner,
        sim: &RouteSim,
        share: u8,
    ) -> Result<(), TestCaseError> {
        self.write_stores(planner, sim, Some(share))
    }

    fn write_stores(
        &mut self,
        planner: &mut RoutePlanner,
        sim: &RouteSim,
        share: Option<u8>,
    ) -> Result<(), TestCaseError> {
        let old = self.kernel.all();
        let ops = planner.plan(sim.now, &sim.locals).unwrap().ops;
        let mut after = self.kernel.clone();
        ops.iter().for_each(|op| after.write(op));
        let new = after.all();
        self.read_words(sim.now, &after);
        let stores: Vec<MapOp> = ops.iter().flat_map(stores_of).collect();
        let count = share.map_or(stores.len(), |share| stores.len() * usize::from(share) / 256);
        for store in &stores[..count] {
            if let MapOp::State { service_id, state } = store
                && self.kernel.frontends.values().any(|id| id == service_id)
            {
                let before = self.kernel.states.get(service_id);
                prop_assert_ne!(before, Some(state), "a connect could not tell them apart");
            }
            self.kernel.write(store);
            self.check_connects(&old, &new)?;
        }
        Ok(())
    }

    /// Lets a connect read each word in force, and forgets those of which the quarantine is over.
    fn read_words(&mut self, now: u64, after: &FakeKernelMaps) {
        self.words.retain(|word| now - word.until < abi::QUARANTINE_NS);
        let words = self.kernel.in_force().into_iter();
        self.words.extend(words.map(|(service_id, state, list)| ReadWord {
            until: now,
            service_id,
            state,
            backends: list.into_iter().collect(),
        }));
        for word in &mut self.words {
            let next = after.states.get(&word.service_id);
            word.backends.extend(next.into_iter().flat_map(|state| after.list(state)));
        }
    }

    /// Checks what connects find now, with the words in force and with those that they read before.
    fn check_connects(
        &self,
        old: &BTreeMap<FrontendKey, SimConnectResult>,
        new: &BTreeMap<FrontendKey, SimConnectResult>,
    ) -> Result<(), TestCaseError> {
        for (key, found) in self.kernel.all() {
            let sources: Vec<&SimConnectResult> =
                [old.get(&key), new.get(&key)].into_iter().flatten().collect();
            prop_assert!(sources.iter().any(|it| it.0 == found.0), "{:?} is {:?}", key, found);
            for at in &found.1 {
                let is_known = sources.iter().any(|source| source.1.contains(at));
                prop_assert!(is_known, "{:?} is {:?}", key, found);
            }
            for at in &sources[0].1 {
                let stays = sources.iter().all(|source| source.1.contains(at));
                prop_assert!(!stays || found.1.contains(at), "{:?} is {:?}", key, found);
            }
        }
        for word in &self.words {
            for at in self.kernel.list(&word.state) {
                prop_assert!(word.backends.contains(&at), "{:?} is of another service", at);
            }
        }
        Ok(())
    }
}

/// Returns the single stores of a map operation.
fn stores_of(op: &MapOp) -> Vec<MapOp> {
    let MapOp::ListEntries { offset, backends } = op else { return vec![op.clone()] };
    let store =
        |(offset, backend): (u32, &u32)| MapOp::ListEntries { offset, backends: vec![*backend] };
    (*offset..).zip(backends).map(store).collect()
}
