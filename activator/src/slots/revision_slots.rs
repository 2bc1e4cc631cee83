//! Pure: slots of a Revision with a hard limit: the activators together keep the limit.
//!
//! A slot is capacity for one request at one pod. One activator owns the Revision and grants its slots to the others,
//! which hold them. These rules keep the limit:
//!
//! - An owner grants only within a term of its own, which has a random number. It acts only once every activator it
//!   knows follows that term and has reported the slots it holds. An activator that is the owner by its own table
//!   follows no other one. A new activator knows only of those that its first table lists. So it does not act until
//!   every older table is out of force.
//! - A holder gets more slots only by a grant with a higher number. What it gives back counts only if it is reported
//!   under the number of the latest grant. Under the same number the holder never uses more again. So the owner's count
//!   of a holder's slots is never below the number that the holder uses.
//! - A holder that changes to another term keeps only slots in use, and reports them to the new owner. An activator
//!   that stops being the owner reports to the next owner what it had granted.
//!
//! Each side sends its whole state of the Revision with every change.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use common::wire::{NamespacedName, SlotClaim, SlotGrant, SlotsByPod};
use smol_str::SmolStr;

use crate::slots::{
    ledger::{SlotDemand, SlotLedger},
    peer_view::{ActivatorName, PeerView},
    slot_counts::{add_slots, idle_slots, max_by_pod, remove_slot, total_slots},
};

/// Slots of one Revision at one activator, as holder or as owner.
#[derive(Debug)]
pub struct RevisionSlots {
    revision: NamespacedName,
    view: Arc<PeerView>,
    /// Hard limit of each pod (containerConcurrency); 0 while it is not known.
    limit: u32,
    /// Pods that the RouteTable lists as ready.
    ready_pods: BTreeSet<SmolStr>,
    /// Subset of `ready_pods` that is to stay frozen, by standby orders: its slots are given last.
    standby_pods: BTreeSet<SmolStr>,
    /// Subset of `ready_pods` that takes requests of this activator.
    open_pods: BTreeSet<SmolStr>,
    /// Requests of this activator at pods, by pod.
    in_use: SlotsByPod,
    /// Number of requests that wait at this activator.
    waiting: u32,
    /// Further requests that each pod may get from this activator now.
    free_slots: SlotsByPod,
    holder: SlotHolder,
    /// Latest grant of each owner on its open stream.
    received_grants: BTreeMap<ActivatorName, SlotGrant>,
    /// Latest claim of each holder on its open stream.
    received_claims: BTreeMap<ActivatorName, SlotClaim>,
    /// Ledger of the current term, while this activator is the owner by its own table.
    ledger: Option<SlotLedger>,
    /// Slots that this activator had granted when it stopped being the owner, kept until another owner acts.
    former_grants: BTreeMap<ActivatorName, SlotsByPod>,
    /// Holders that were sent a grant which is not withdrawn.
    granted_to: BTreeSet<ActivatorName>,
    /// Owner that was sent a claim which is not withdrawn.
    claimed_owner: Option<ActivatorName>,
}

/// Slots that this activator holds of another owner.
#[derive(Debug, Default)]
struct SlotHolder {
    followed_term: Option<FollowedTerm>,
    /// Slots that the holder may use, including those in use.
    held: SlotsByPod,
    /// Subset of `held` that was granted lately and not used yet: each may serve one request even if `keep_limit`
    /// is lower.
    fresh_slots: u32,
    /// Number of held slots beyond which the owner asks for idle ones back; `None`: all may be kept.
    keep_limit: Option<u32>,
    /// Pods of which the holder wants no slots, because they take no requests of this activator.
    unusable_pods: BTreeSet<SmolStr>,
}

#[derive(Debug)]
struct FollowedTerm {
    /// Owner whose term the holder follows.
    owner: ActivatorName,
    /// Number of the term.
    number: u64,
    /// Number of the latest grant that was applied.
    last_grant: u64,
}

impl SlotHolder {
    /// Gives back the slots of a pod that are not in use.
    fn return_idle(&mut self, pod: &SmolStr, in_use: &SlotsByPod) {
        match in_use.get(pod) {
            Some(slots) => drop(self.held.insert(pod.clone(), *slots)),
            None => drop(self.held.remove(pod)),
        }
    }
}

/// Messages to other activators: the latest state for each, or `None` to withdraw the state sent before.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct SlotMessages {
    /// Claims, by the owner that gets them.
    pub claims: Vec<(ActivatorName, Option<SlotClaim>)>,
    /// Grants, by the holder that gets them.
    pub grants: Vec<(ActivatorName, Option<SlotGrant>)>,
}

impl RevisionSlots {
    /// Creates the state of a Revision without pods, claims or grants.
    pub fn new(revision: NamespacedName, view: Arc<PeerView>) -> Self {
        Self {
            revision,
            view,
            limit: 0,
            ready_pods: BTreeSet::new(),
            standby_pods: BTreeSet::new(),
            open_pods: BTreeSet::new(),
            in_use: SlotsByPod::new(),
            waiting: 0,
            free_slots: SlotsByPod::new(),
            holder: SlotHolder::default(),
            received_grants: BTreeMap::new(),
            received_claims: BTreeMap::new(),
            ledger: None,
            former_grants: BTreeMap::new(),
            granted_to: BTreeSet::new(),
            claimed_owner: None,
        }
    }

    // Events. The caller runs `reconcile` after any of them.

    /// Sets the view of the other activators.
    pub fn on_peer_view(&mut self, view: Arc<PeerView>) {
        self.view = view;
    }

    /// Sets the hard limit and the ready pods from the RouteTable.
    pub fn on_routes(&mut self, limit: u32, ready: BTreeSet<SmolStr>) {
        (self.limit, self.ready_pods) = (limit, ready);
    }

    /// Sets the ready pods that come last because of their standby orders.
    pub fn on_standby(&mut self, standby: BTreeSet<SmolStr>) {
        self.standby_pods = standby;
    }

    /// Sets the number of waiting requests and the pods that take requests.
    pub fn on_queue(&mut self, waiting: u32, open: BTreeSet<SmolStr>) {
        (self.waiting, self.open_pods) = (waiting, open);
    }

    /// Sets the requests that were at pods before this state was created.
    pub fn set_in_use(&mut self, in_use: SlotsByPod) {
        self.in_use = in_use;
    }

    /// Stores the latest claim of a holder; `None`: the holder has withdrawn it.
    pub fn on_claim(&mut self, from: &ActivatorName, claim: Option<SlotClaim>) {
        match claim {
            Some(claim) => drop(self.received_claims.insert(from.clone(), claim)),
            None => drop(self.received_claims.remove(from)),
        }
    }

    /// Stores the latest grant of an owner; `None`: the owner has withdrawn it.
    pub fn on_grant(&mut self, from: &ActivatorName, grant: Option<SlotGrant>) {
        match grant {
            Some(grant) => drop(self.received_grants.insert(from.clone(), grant)),
            None => drop(self.received_grants.remove(from)),
        }
    }

    /// Registers that a holder's stream has begun or ended. The holder may be a new process, and sends its state again.
    pub fn on_holder_stream(&mut self, from: &ActivatorName) {
        self.received_claims.remove(from);
        if let Some(ledger) = &mut self.ledger {
            ledger.request_report(from);
        }
    }

    /// Registers that a request is sent to a pod that had a free slot.
    pub fn on_dispatched(&mut self, pod: &str) {
        add_slots(&mut self.in_use, pod, 1);
        remove_slot(&mut self.free_slots, pod);
        match &mut self.ledger {
            Some(ledger) => ledger.on_own_slot_used(),
            None => self.holder.fresh_slots = self.holder.fresh_slots.saturating_sub(1),
        }
    }

    /// Registers the end of a request at a pod. Returns true if its slot is free again, so that `reconcile` is not
    /// needed.
    pub fn on_request_done(&mut self, pod: &str) -> bool {
        remove_slot(&mut self.in_use, pod);
        let may_be_used_again = match &self.ledger {
            Some(ledger) => ledger.has_free_slot(pod, self.limit, &self.in_use, &self.free_slots),
            None => self.holder.followed_term.is_some() && self.holder.keep_limit.is_none(),
        };
        // A slot of a pod that is to stay frozen may go back to the owner.
        let is_free_again =
            may_be_used_again && self.open_pods.contains(pod) && !self.standby_pods.contains(pod);
        if is_free_again {
            add_slots(&mut self.free_slots, pod, 1);
        }
        is_free_again
    }

    /// Number of requests that the pod may get from this activator now.
    pub fn free_slots(&self, pod: &str) -> u32 {
        self.free_slots.get(pod).copied().unwrap_or(0)
    }

    /// Returns true if no other activator holds or may claim slots of this Revision.
    pub fn is_sole_activator(&self) -> bool {
        self.view.alive.is_empty() && self.ledger.as_ref().is_some_and(SlotLedger::has_no_holders)
    }

    /// Returns true if there is no state to keep.
    pub fn is_unused(&self) -> bool {
        let has_received_nothing = self.received_grants.is_empty()
            && self.received_claims.is_empty()
            && self.former_grants.is_empty();
        let has_sent_nothing = self.granted_to.is_empty() && self.claimed_owner.is_none();
        has_received_nothing
            && has_sent_nothing
            && self.ledger.is_none()
            && self.in_use.is_empty()
            && self.waiting == 0
    }

    /// Updates the state after an event. `random` is a random number, which distinguishes a new term from all others.
    pub fn reconcile(&mut self, random: impl FnOnce() -> u64) {
        let owner = self.view.owner(&self.revision).clone();
        if owner == self.view.own_name {
            self.reconcile_as_owner(random);
        } else {
            self.reconcile_as_holder(&owner);
        }
    }

    // --- as owner

    /// Brings the state up to date for the owner: begins or ends its term, and distributes the slots.
    fn reconcile_as_owner(&mut self, random: impl FnOnce() -> u64) {
        // An owner holds nothing of another owner: its requests in flight stay in `in_use`.
        self.holder = SlotHolder::default();
        let is_wanted = self.waiting > 0
            || !self.ready_pods.is_empty()
            || self.received_claims.values().any(|claim| claim.needed > 0);
        if self.ledger.is_none() && is_wanted {
            // In a claim the number 0 means that the holder follows no term.
            self.ledger = Some(SlotLedger::new(random() | 1));
        }
        self.free_slots.clear();
        let Some(mut ledger) = self.ledger.take() else { return };
        // A term begins to act once, when all known holders follow it. From then on `apply_claims` applies their
        // claims.
        if !ledger.is_acting() && !self.view.is_new_activator {
            ledger.try_begin_acting(&self.view, &self.received_claims, &self.former_grants);
        }
        if ledger.is_acting() {
            self.former_grants.clear();
            ledger.apply_claims(&self.view, &self.received_claims);
            self.free_slots = ledger.distribute(&SlotDemand {
                limit: self.limit,
                ready_pods: &self.ready_pods,
                standby_pods: &self.standby_pods,
                open_pods: &self.open_pods,
                in_use: &self.in_use,
                waiting: self.waiting,
                claims: &self.received_claims,
            });
        }
        // A term ends only when nothing is granted: a new term would not know what holders still use.
        let is_over = ledger.is_acting() && !is_wanted && ledger.granted_total() == 0;
        self.ledger = (!is_over).then_some(ledger);
    }

    // --- as holder

    fn reconcile_as_holder(&mut self, owner: &ActivatorName) {
        // The next owner reads from `former_grants`, in this activator's claim, what was granted before its term.
        if let Some(ledger) = self.ledger.take() {
            ledger.export_grants(&mut self.former_grants);
            self.stop_following();
        }
        if self.holder.followed_term.as_ref().is_some_and(|it| it.owner != *owner) {
            self.stop_following();
        }
        if let Some(grant) = self.received_grants.get(owner).cloned() {
            self.apply_grant(owner, grant);
        } else {
            self.stop_following();
        }
        self.return_idle_slots();
        self.free_slots = idle_slots(&self.holder.held, &self.in_use);
    }

    /// Stops following any term: only slots in use are kept.
    fn stop_following(&mut self) {
        self.holder = SlotHolder { held: self.in_use.clone(), ..SlotHolder::default() };
    }

    /// Applies a grant of the owner. A grant of another term ends what was held of the term before.
    fn apply_grant(&mut self, owner: &ActivatorName, grant: SlotGrant) {
        let SlotGrant { owner_term, grant_number, held, keep_limit, is_acting } = grant;
        match &mut self.holder.followed_term {
            Some(it) if it.number == owner_term => {
                if grant_number > it.last_grant {
                    it.last_grant = grant_number;
                    self.holder.held = max_by_pod(held, &self.in_use);
                    self.holder.fresh_slots =
                        total_slots(&self.holder.held) - total_slots(&self.in_use);
                }
            }
            // Slots of an earlier grant are not used again: they may have been given back.
            Some(_) | None => {
                self.stop_following();
                self.holder.followed_term = Some(FollowedTerm {
                    owner: owner.clone(),
                    number: owner_term,
                    last_grant: grant_number,
                });
            }
        }
        self.holder.keep_limit = keep_limit;
        if is_acting {
            self.former_grants.clear();
        }
    }

    /// Gives back idle slots of pods that take no requests here or are to stay frozen, and those beyond what the owner
    /// lets it keep.
    fn return_idle_slots(&mut self) {
        let Self { holder, in_use, open_pods, standby_pods, waiting, .. } = self;
        holder.unusable_pods.retain(|pod| !open_pods.contains(pod));
        let has_no_request = *waiting == 0 && holder.fresh_slots == 0;
        for pod in idle_slots(&holder.held, in_use).into_keys() {
            // Idle slots of a pod that takes no requests here are useless: they go back, and `unusable_pods` asks the
            // owner for no more. For the next request, the owner may have a slot of a pod that runs.
            if !open_pods.contains(&pod) {
                holder.return_idle(&pod, in_use);
                holder.unusable_pods.insert(pod);
            } else if has_no_request && standby_pods.contains(&pod) {
                holder.return_idle(&pod, in_use);
            }
        }
        // Slots in use are never given back. Fresh ones may serve one request each first: otherwise a slot could be
        // passed from activator to activator without serving any.
        let Some(keep_limit) = holder.keep_limit else { return };
        let used = total_slots(in_use);
        let max_held = keep_limit
            .max(used.saturating_add(holder.fresh_slots))
            .min(used.saturating_add(*waiting));
        let mut excess = total_slots(&holder.held).saturating_sub(max_held.max(used));
        for (pod, idle) in idle_slots(&holder.held, in_use) {
            for _ in 0..idle.min(excess) {
                remove_slot(&mut holder.held, &pod);
            }
            excess -= idle.min(excess);
        }
    }

    // --- messages to other activators

    /// Messages that other activators have to get now. The caller runs it after each [`reconcile`](Self::reconcile).
    pub fn take_messages(&mut self) -> SlotMessages {
        let mut messages = SlotMessages::default();
        if let Some(ledger) = &self.ledger {
            // A known activator gets a grant even without slots: the grant carries the term that it has to follow.
            for peer in &self.view.alive {
                messages.grants.push((peer.clone(), Some(ledger.grant_for(peer))));
            }
        }
        let peers: BTreeSet<ActivatorName> =
            messages.grants.iter().map(|(peer, _)| peer.clone()).collect();
        let removed = self.granted_to.difference(&peers).map(|peer| (peer.clone(), None));
        messages.grants.extend(removed.collect::<Vec<_>>());
        self.granted_to = peers;

        // A claim goes to one owner only: one that was sent to another owner before is withdrawn.
        let claim = self.build_claim();
        let owner_now = claim.as_ref().map(|(owner, _)| owner.clone());
        if let Some(before) = self.claimed_owner.take().filter(|it| Some(it) != owner_now.as_ref())
        {
            messages.claims.push((before, None));
        }
        messages.claims.extend(claim.map(|(owner, claim)| (owner, Some(claim))));
        self.claimed_owner = owner_now;
        messages
    }

    /// Returns the claim to send, and its owner. `None` if this activator is the owner, or has nothing to claim.
    fn build_claim(&self) -> Option<(ActivatorName, SlotClaim)> {
        let owner = self.view.owner(&self.revision);
        if *owner == self.view.own_name {
            return None;
        }
        let SlotHolder { followed_term, held, unusable_pods, .. } = &self.holder;
        let (owner_term, applied_grant) =
            followed_term.as_ref().map_or((0, 0), |it| (it.number, it.last_grant));
        let needed = total_slots(held).saturating_add(self.waiting);
        // An owner that knows nothing of this activator need not hear that it wants nothing.
        if owner_term == 0 && needed == 0 && self.former_grants.is_empty() {
            return None;
        }
        // Until the owner acts, the claim names the activators connected here: the owner may not know one of them yet.
        let is_owner_acting = self.received_grants.get(owner).is_some_and(|it| it.is_acting);
        let live_activators =
            if is_owner_acting { BTreeSet::new() } else { self.view.connected.clone() };
        let (held, unusable_pods, former_grants) =
            (held.clone(), unusable_pods.clone(), self.former_grants.clone());
        Some((
            owner.clone(),
            SlotClaim {
                owner_term,
                applied_grant,
                held,
                needed,
                unusable_pods,
                former_grants,
                live_activators,
            },
        ))
    }
}

#[cfg(test)]
mod tests;
