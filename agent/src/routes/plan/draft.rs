//! Pure: draft of a plan, which has every change that is due, and the plan of those changes that fit into the maps.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
};

use datapath::{
    abi::{self, FrontendKey},
    load_balancing::RoutingMode,
};

use super::{
    BackendListKey, BackendListUpdate, DesiredBackendList, MapCapacityError, MapPlan, RoutePlanner,
    UnfitService,
    map_plan::OrderedMapOps,
    pool::MapShare,
    service_number::ServiceNumber,
    switch::{BackendList, FreedParts, needs_order},
};
use crate::{
    kernel::map_op::{BackendTarget, KernelPodIds, MapOp},
    service_facts::ServiceSource,
};

/// Time for which a service that waits for a quarantine keeps its old lists: the quarantine, and the same time again.
pub(super) const QUARANTINE_WAIT_NS: u64 = 2 * abi::QUARANTINE_NS;

/// Changes of a plan, before it is known which of them fit.
#[derive(Default)]
pub(super) struct MapPlanDraft {
    activators: Vec<BackendListUpdate>,
    service_updates: Vec<ServiceListUpdate>,
    /// Owner of each frontend that this plan looks at.
    pub(super) frontend_owners: BTreeMap<FrontendKey, ServiceNumber>,
    /// Frontends that a service wants while another service owns them.
    pub(super) frontend_claims: BTreeSet<(FrontendKey, ServiceNumber)>,
    /// Frontends that no service wants any more.
    unwanted_frontends: Vec<FrontendKey>,
}

/// Changes that one service needs; a plan makes all of them or none.
struct ServiceListUpdate {
    service_number: ServiceNumber,
    updates: Vec<BackendListUpdate>,
}

impl ServiceListUpdate {
    fn backend_count(&self) -> usize {
        self.updates.iter().map(|update| update.next.backends.len()).sum()
    }
}

/// Parts of a plan that is being made.
#[derive(Default)]
struct MapPlanParts {
    plan: MapPlan,
    ops: OrderedMapOps,
    /// Parts of lists that the plan no longer uses.
    freed: Vec<FreedParts>,
    /// Services that do not fit, with those of earlier plans that are not due now.
    unfit: BTreeMap<ServiceNumber, UnfitService>,
}

impl RoutePlanner {
    /// Compares table and lists: returns the lists to switch, and the frontends to remove.
    pub(super) fn draft_plan(&self, locals: &BTreeMap<String, KernelPodIds>) -> MapPlanDraft {
        let mut draft = MapPlanDraft::default();
        // An unknown RouteTable is not one without activators.
        if self.is_route_table_known {
            for (list, next) in self.table.activator_lists() {
                self.push_update(BackendListKey::Activators(list), next, &mut draft.activators);
            }
        }
        for &service_number in &self.due_services {
            let mut updates = Vec::new();
            // A frontend has one owner at a time. Another service that wants it becomes a claimant, and is due when the
            // owner releases it. Services of the RouteTable are first in the order, and take frontends of others.
            for (key, next) in self.table.desired_lists(service_number, locals) {
                let present = draft.frontend_owners.get(&key).copied().or_else(|| {
                    self.lists.get(&BackendListKey::Frontend(key)).and_then(|list| list.owner)
                });
                let owner = present.filter(|&it| it != service_number);
                if owner.is_none_or(|owner| service_number.outranks(owner)) {
                    draft.frontend_claims.extend(owner.map(|owner| (key, owner)));
                    draft.frontend_owners.insert(key, service_number);
                    self.push_update(BackendListKey::Frontend(key), next, &mut updates);
                } else {
                    draft.frontend_claims.insert((key, service_number));
                }
            }
            // Also without updates: a service that did not fit may fit now, and is no longer unfit then.
            draft.service_updates.push(ServiceListUpdate { service_number, updates });
        }
        // Rouse's own services first, which kube-proxy cannot serve as well. Then the smallest: if not all fit, as many
        // as possible do.
        draft.service_updates.sort_by_key(|it| (it.service_number.source(), it.backend_count()));
        let is_unwanted = |key: &&FrontendKey| {
            !draft.frontend_owners.contains_key(*key) && self.is_removable(key)
        };
        draft.unwanted_frontends =
            self.ownerless_frontends.iter().filter(is_unwanted).copied().collect();
        draft
    }

    /// Adds the update of a list to `updates`, unless the list in force is like the next one.
    fn push_update(
        &self,
        target: BackendListKey,
        next: DesiredBackendList,
        updates: &mut Vec<BackendListUpdate>,
    ) {
        // Order is without meaning in most lists, and `next` is sorted already. Backends are compared, and not their
        // numbers. The eBPF programs read no info of the activators' lists.
        let is_in_force = self.lists.get(&target).is_some_and(|list| {
            let mut current: Vec<&BackendTarget> =
                list.backends.iter().filter_map(|&id| self.backends.get(id)).collect();
            current.sort_unstable();
            list.state.mode == next.mode
                && (matches!(target, BackendListKey::Activators(_)) || list.info == next.info)
                && current.iter().copied().eq(&next.backends)
                && (list.backends.is_sorted() || !needs_order(&target, next.mode, &next.info))
        });
        if !is_in_force {
            updates.push(BackendListUpdate { target, next });
        }
    }

    /// Makes the plan of a draft: all changes of the services that fit, and fallbacks for the others. Returns an error
    /// if the activators' lists do not fit.
    pub(super) fn build_plan(
        &mut self,
        now_ns: u64,
        mut draft: MapPlanDraft,
    ) -> Result<MapPlan, MapCapacityError> {
        let mut parts = MapPlanParts::default();
        // Activators first: every other list falls back on theirs, so nothing is planned if they do not fit.
        let activators = mem::take(&mut draft.activators);
        self.switch_lists(&activators, ServiceSource::Route, &mut parts.ops, &mut parts.freed)?;
        // Those that are not due now stay unfit.
        parts.unfit = mem::take(&mut self.unfit_services);
        for update in mem::take(&mut draft.service_updates) {
            self.plan_service(now_ns, update, &mut parts);
        }
        let MapPlanParts { mut plan, mut ops, mut freed, unfit } = parts;
        for &key in &draft.unwanted_frontends {
            let removed = self.lists.remove(&BackendListKey::Frontend(key)).inspect(|list| {
                ops.removals.push(MapOp::RemoveFrontend { key });
                self.service_id_pool.quarantine(list.service_id, now_ns);
            });
            freed.extend(removed.map(BackendList::into_freed));
        }
        // After all switches: a backend that moves from one list to another keeps its number.
        freed.iter().for_each(|parts| self.release_parts(parts, now_ns, &mut ops));
        plan.newly_outranked = self.newly_outranked(&draft);
        self.commit_draft(draft, unfit);
        ops.finish(&mut plan);
        Ok(plan)
    }

    /// Plans the changes of one service. If they do not fit, the service keeps its old lists while waiting helps. After
    /// that it is refused.
    fn plan_service(&mut self, now_ns: u64, update: ServiceListUpdate, parts: &mut MapPlanParts) {
        let ServiceListUpdate { service_number, updates } = update;
        let source = service_number.source();
        let switched = self.switch_lists(&updates, source, &mut parts.ops, &mut parts.freed);
        let Err(error) = switched else {
            parts.unfit.remove(&service_number);
            return;
        };
        let service = parts.unfit.entry(service_number).or_insert(UnfitService {
            since_ns: now_ns,
            is_refused: false,
            keeps_routed_list: false,
            error,
        });
        service.error = error;
        let is_recent = now_ns.saturating_sub(service.since_ns) < QUARANTINE_WAIT_NS;
        let is_waiting = is_recent && self.fits_after_quarantine(&error, &updates, source);
        service.keeps_routed_list = is_waiting && self.are_any_routed(&updates);
        if is_waiting {
            // A Service of the cluster that waits holds up reports about the RouteTable only while it keeps such a
            // list.
            parts.plan.is_partial |= source == ServiceSource::Route || service.keeps_routed_list;
            return;
        }
        let was_refused = mem::replace(&mut service.is_refused, true);
        self.refuse_service(service_number, error, was_refused, updates, parts);
    }

    /// Plans the fallback of a service that does not fit: its connects go to the activators, or on unchanged.
    fn refuse_service(
        &mut self,
        service_number: ServiceNumber,
        error: MapCapacityError,
        was_refused: bool,
        updates: Vec<BackendListUpdate>,
        parts: &mut MapPlanParts,
    ) {
        let source = service_number.source();
        let refusal = self.table.service_name(service_number).map(|name| (name, error));
        let mode = match source {
            // Reported with each plan, since the report of a plan replaces that of the plan before.
            ServiceSource::Route => {
                parts.plan.refused.extend(refusal);
                RoutingMode::Activator
            }
            // Connects go on to kube-proxy's rules.
            ServiceSource::Service => {
                parts.plan.newly_refused.extend(refusal.filter(|_| !was_refused));
                RoutingMode::Pass
            }
        };
        for BackendListUpdate { target, next } in updates {
            let fallback = DesiredBackendList { mode, info: next.info, backends: Vec::new() };
            let mut fallbacks = Vec::new();
            self.push_update(target, fallback, &mut fallbacks);
            // List by list: one in force always fits, and must not keep its old pods because a new one does not.
            // A new address that does not fit gets no frontend: its connects pass unchanged.
            let _no_frontend =
                self.switch_lists(&fallbacks, source, &mut parts.ops, &mut parts.freed);
        }
    }

    /// Returns true if any list that these updates are to replace is of the RouteTable.
    fn are_any_routed(&self, updates: &[BackendListUpdate]) -> bool {
        let lists = updates.iter().filter_map(|update| self.lists.get(&update.target));
        lists.map(|list| list.source).any(|source| source == ServiceSource::Route)
    }

    /// Returns true if these updates, which fail with `error`, fit once every quarantine is over.
    fn fits_after_quarantine(
        &self,
        error: &MapCapacityError,
        updates: &[BackendListUpdate],
        source: ServiceSource,
    ) -> bool {
        // Free entries of lists may be divided among extents that are too short, so their sum proves nothing.
        if error.map == abi::maps::SLOTS {
            let lengths = self.moved_lengths(updates, source);
            return self.list_entry_pool.fits_after_quarantine(&lengths, MapShare::of(source));
        }
        error.wanted <= error.free + error.quarantined
    }

    /// Records the planned state: the owner of each frontend, the claimants, and the services that did not fit.
    fn commit_draft(&mut self, draft: MapPlanDraft, unfit: BTreeMap<ServiceNumber, UnfitService>) {
        for (key, service_number) in draft.frontend_owners {
            self.ownerless_frontends.remove(&key);
            // A frontend without a list did not fit.
            if let Some(list) = self.lists.get_mut(&BackendListKey::Frontend(key)) {
                list.owner = Some(service_number);
                self.frontend_claims.remove(&(key, service_number));
            }
        }
        self.frontend_claims.extend(draft.frontend_claims);
        // These are tried with each plan, so that no plan is whole while such a service waits.
        let is_due = |(number, service): &(&ServiceNumber, &UnfitService)| {
            number.is_routed() || service.keeps_routed_list
        };
        self.due_services = unfit.iter().filter(is_due).map(|(number, _)| *number).collect();
        self.unfit_services = unfit;
        for key in &draft.unwanted_frontends {
            self.ownerless_frontends.remove(key);
        }
    }
}
