//! Pure: an owner's ledger of the slots of a Revision and their holders.

use std::collections::{BTreeMap, BTreeSet};

use common::wire::{SlotClaim, SlotGrant, SlotsByPod};
use smol_str::SmolStr;

use crate::slots::{
    peer_view::{ActivatorName, PeerView},
    slot_counts::{add_slots, max_by_pod, remove_slot, total_slots},
};

/// Ledger of one term of an owner.
#[derive(Debug)]
pub(super) struct SlotLedger {
    /// Number of the term, drawn at random.
    term: u64,
    /// True once every known activator follows the term: only then the owner grants.
    is_acting: bool,
    holders: BTreeMap<ActivatorName, HolderAccount>,
    /// Slots that other activators hold, by pod.
    granted_slots: SlotsByPod,
    /// True if some request waits, here or at a holder, and slots that others hold could serve it.
    is_contended: bool,
    /// Number of slots beyond which each holder gives back idle ones, while the Revision is short of slots.
    fair_share: u32,
    /// Running number of the slots given: it orders activators by the time of their last slot.
    grant_sequence: u64,
    /// Value of `grant_sequence` when the owner itself used a slot last.
    own_sequence: u64,
}

/// State of one other activator, as a holder.
#[derive(Debug, Default)]
struct HolderAccount {
    /// Slots that it may be using, by pod: at most these.
    held_slots: SlotsByPod,
    /// Number of the latest grant to it.
    grant_number: u64,
    /// Slots that the latest grant states; empty: it keeps only those in use.
    granted: SlotsByPod,
    /// True if it has reported its slots since the latest grant, so that it may be granted more.
    is_confirmed: bool,
    /// True if it has reported its slots at all in this term.
    has_reported: bool,
    /// Value of the ledger's `grant_sequence` when it was given a slot last.
    last_granted: u64,
}

/// Slots that can be distributed, and the activators that need some.
#[derive(Debug)]
pub(super) struct SlotDemand<'a> {
    /// Hard limit of each pod.
    pub(super) limit: u32,
    pub(super) ready_pods: &'a BTreeSet<SmolStr>,
    /// Subset of `ready_pods` whose slots are given last: the pods are to stay frozen.
    pub(super) standby_pods: &'a BTreeSet<SmolStr>,
    /// Subset of `ready_pods` that takes requests of the owner.
    pub(super) open_pods: &'a BTreeSet<SmolStr>,
    /// Requests of the owner at pods, by pod.
    pub(super) in_use: &'a SlotsByPod,
    /// Number of requests that wait at the owner.
    pub(super) waiting: u32,
    /// Latest claim of each holder.
    pub(super) claims: &'a BTreeMap<ActivatorName, SlotClaim>,
}

/// Activator that could use a slot now.
struct SlotClaimant<'a> {
    /// Name of the holder; `None`: the owner itself.
    holder: Option<&'a ActivatorName>,
    /// Slots that it has already.
    held: u32,
    last_granted: u64,
    /// Further slots that it could use.
    needed: u32,
    /// Slots assigned to it in this distribution, by pod.
    assigned: SlotsByPod,
}

impl SlotLedger {
    /// Begins the term with this number, in which nothing is granted yet.
    pub(super) fn new(term: u64) -> Self {
        Self {
            term,
            is_acting: false,
            holders: BTreeMap::new(),
            granted_slots: SlotsByPod::new(),
            is_contended: false,
            fair_share: 0,
            grant_sequence: 0,
            own_sequence: 0,
        }
    }

    /// Returns true if every known activator follows this term, so that the owner may grant.
    pub(super) fn is_acting(&self) -> bool {
        self.is_acting
    }

    /// Returns true if the owner acts and there is no holder.
    pub(super) fn has_no_holders(&self) -> bool {
        self.is_acting && self.holders.is_empty()
    }

    /// Number of slots that others hold.
    pub(super) fn granted_total(&self) -> u32 {
        total_slots(&self.granted_slots)
    }

    /// Begins to act as soon as every other activator that is alive follows the term. Each holder keeps the slots that
    /// it reports, and those that a former owner had granted to it.
    pub(super) fn try_begin_acting(
        &mut self,
        view: &PeerView,
        claims: &BTreeMap<ActivatorName, SlotClaim>,
        former: &BTreeMap<ActivatorName, SlotsByPod>,
    ) {
        let follows =
            |peer: &ActivatorName| claims.get(peer).filter(|it| it.owner_term == self.term);
        let following = claims.iter().filter(|(_, claim)| claim.owner_term == self.term);
        // An activator that a holder names is alive too, even if this owner's table does not list it yet. Without it
        // the owner could grant slots that this activator still uses by a former owner's grant.
        let named_activators = following.clone().flat_map(|(_, claim)| &claim.live_activators);
        let needed: BTreeSet<&ActivatorName> = view
            .alive
            .iter()
            .chain(named_activators)
            .filter(|peer| **peer != view.own_name)
            .collect();
        if !needed.iter().all(|peer| follows(peer).is_some()) {
            return;
        }
        self.is_acting = true;
        for (peer, claim) in following.clone() {
            let held_slots = claim.held.clone();
            let entry = HolderAccount {
                held_slots,
                has_reported: true,
                is_confirmed: true,
                ..HolderAccount::default()
            };
            self.holders.insert(peer.clone(), entry);
        }
        // What former owners had granted may be more than the claim states: the grant can still be on its way. The
        // greater number counts, until the holder has reported again.
        for (peer, held) in following.flat_map(|(_, claim)| &claim.former_grants).chain(former) {
            let Some(entry) = self.holders.get_mut(peer) else { continue };
            let held_slots = max_by_pod(held.clone(), &entry.held_slots);
            if held_slots != entry.held_slots {
                entry.held_slots = held_slots;
                entry.request_report();
            }
        }
        self.recompute_granted();
    }

    /// Asks a holder for its slots again, because it may be a new process.
    pub(super) fn request_report(&mut self, peer: &str) {
        if let Some(entry) = self.holders.get_mut(peer) {
            entry.request_report();
        }
    }

    /// Applies the claims of holders, and removes holders that are gone.
    pub(super) fn apply_claims(
        &mut self,
        view: &PeerView,
        claims: &BTreeMap<ActivatorName, SlotClaim>,
    ) {
        self.holders.retain(|peer, _| view.alive.contains(peer));
        for (peer, claim) in claims {
            if claim.owner_term == self.term && view.alive.contains(peer) {
                self.holders.entry(peer.clone()).or_default().apply_claim(claim);
            }
        }
        self.recompute_granted();
    }

    fn recompute_granted(&mut self) {
        self.granted_slots.clear();
        for entry in self.holders.values() {
            entry
                .held_slots
                .iter()
                .for_each(|(pod, slots)| add_slots(&mut self.granted_slots, pod, *slots));
        }
    }

    /// Gives free slots to the activators that need some, one at a time to the one with the fewest. Returns the slots
    /// of the owner itself: its share, and those that no holder needs.
    pub(super) fn distribute(&mut self, demand: &SlotDemand<'_>) -> SlotsByPod {
        let mut free = self.free_slots(demand);
        let (mut claimants, has_unconfirmed) = self.claimants(demand);
        let mut sequence = self.grant_sequence;
        while let Some((at, pod)) = next_assignment(&claimants, &free, demand) {
            sequence += 1;
            remove_slot(&mut free, &pod);
            claimants[at].assign_slot(&pod, sequence);
        }
        // Without other holders no slot can come back, so waiting requests alone are no contention.
        let is_demand_left = claimants.iter().any(|it| it.needed > 0);
        let has_other_holders =
            claimants.iter().any(|it| it.holder.is_some()) || !self.granted_slots.is_empty();
        let assignments = claimants.into_iter().filter(|it| !it.assigned.is_empty());
        let assignments: Vec<_> =
            assignments.map(|it| (it.holder.cloned(), it.assigned, it.last_granted)).collect();
        let mut own_slots = free;
        for (holder, assignments, sequence) in assignments {
            let slots = assignments.iter();
            match holder.and_then(|peer| self.holders.get_mut(&peer)) {
                // A holder gets its slots by a grant, and the owner itself takes the rest directly.
                Some(entry) => entry.grant_slots(&assignments, sequence),
                None => slots.for_each(|(pod, slots)| add_slots(&mut own_slots, pod, *slots)),
            }
        }
        self.grant_sequence = sequence;
        self.is_contended = has_unconfirmed || (is_demand_left && has_other_holders);
        self.fair_share = self.max_min_share(demand);
        self.recompute_granted();
        own_slots
    }

    /// Registers that the owner has used a slot.
    pub(super) fn on_own_slot_used(&mut self) {
        self.grant_sequence += 1;
        self.own_sequence = self.grant_sequence;
    }

    /// Returns true if the owner may use a slot of this pod again without a new distribution.
    pub(super) fn has_free_slot(
        &self,
        pod: &str,
        limit: u32,
        in_use: &SlotsByPod,
        own_free_slots: &SlotsByPod,
    ) -> bool {
        let used: u32 =
            [in_use, own_free_slots, &self.granted_slots].iter().filter_map(|it| it.get(pod)).sum();
        self.is_acting && !self.is_contended && used < limit
    }

    fn free_slots(&self, demand: &SlotDemand<'_>) -> SlotsByPod {
        let of = |pod: &SmolStr| {
            let used: u32 =
                [demand.in_use, &self.granted_slots].iter().filter_map(|it| it.get(pod)).sum();
            let free = demand.limit.saturating_sub(used);
            (free > 0).then(|| (pod.clone(), free))
        };
        demand.ready_pods.iter().filter_map(of).collect()
    }

    /// Returns the activators that could use a slot now; and true if others need slots, but have not confirmed the
    /// latest grant.
    fn claimants<'a>(&self, demand: &SlotDemand<'a>) -> (Vec<SlotClaimant<'a>>, bool) {
        let (mut all, mut has_unconfirmed) = (Vec::new(), false);
        for (holder, claim) in demand.claims {
            let Some(entry) = self.holders.get(holder) else { continue };
            let held = total_slots(&entry.held_slots);
            let needed = claim.needed.saturating_sub(held);
            if needed == 0 || claim.owner_term != self.term {
                continue;
            }
            // A holder without a report since the latest grant may use fewer slots than counted, so it gets no more for
            // now.
            if entry.is_confirmed {
                let (holder, last_granted, assigned) =
                    (Some(holder), entry.last_granted, SlotsByPod::new());
                all.push(SlotClaimant { holder, held, last_granted, needed, assigned });
            } else {
                has_unconfirmed = true;
            }
        }
        if demand.waiting > 0 {
            let (held, last_granted) = (total_slots(demand.in_use), self.own_sequence);
            let (needed, assigned) = (demand.waiting, SlotsByPod::new());
            all.push(SlotClaimant { holder: None, held, last_granted, needed, assigned });
        }
        (all, has_unconfirmed)
    }

    /// Greatest number of slots that every activator which needs as many can have: max-min fairness over all slots.
    fn max_min_share(&self, demand: &SlotDemand<'_>) -> u32 {
        let pods = u32::try_from(demand.ready_pods.len()).unwrap_or(u32::MAX);
        let others = self.holders.iter().map(|(peer, entry)| {
            let need = demand.claims.get(peer).map_or(0, |claim| claim.needed);
            need.max(total_slots(&entry.held_slots))
        });
        let own_need = total_slots(demand.in_use).saturating_add(demand.waiting);
        let mut needs: Vec<u32> = others.chain([own_need]).collect();
        needs.sort_unstable();
        // The smallest need is served first; what it leaves is shared by the others.
        let mut left = demand.limit.saturating_mul(pods);
        for (claimants, next_need) in (1..=u32::try_from(needs.len()).unwrap_or(1)).rev().zip(needs)
        {
            if next_need > left / claimants {
                return left / claimants;
            }
            left -= next_need;
        }
        u32::MAX
    }

    /// Grant for one of the other activators, as it is now.
    pub(super) fn grant_for(&self, peer: &ActivatorName) -> SlotGrant {
        let entry = self.holders.get(peer);
        let (grant_number, held) =
            entry.map_or_else(Default::default, |it| (it.grant_number, it.granted.clone()));
        let keep_limit = self.is_contended.then_some(self.fair_share);
        SlotGrant {
            owner_term: self.term,
            grant_number,
            held,
            keep_limit,
            is_acting: self.is_acting,
        }
    }

    /// Adds the granted slots to the former grants, which the next owner gets in a claim.
    pub(super) fn export_grants(self, former: &mut BTreeMap<ActivatorName, SlotsByPod>) {
        if self.is_acting {
            former.clear();
        }
        for (peer, HolderAccount { held_slots, .. }) in self.holders {
            if !held_slots.is_empty() {
                former.insert(peer, held_slots);
            }
        }
    }
}

/// Returns the next activator that gets a slot, and the pod of the slot: the one with the most free slots. A pod that
/// is to stay frozen, by its standby order, comes last.
fn next_assignment(
    claimants: &[SlotClaimant<'_>],
    free: &SlotsByPod,
    demand: &SlotDemand<'_>,
) -> Option<(usize, SmolStr)> {
    let mut order: Vec<usize> =
        (0..claimants.len()).filter(|at| claimants[*at].needed > 0).collect();
    // The activator with the fewest slots comes first; of equal ones, the one whose last slot is the longest ago.
    order.sort_by_key(|at| (claimants[*at].held, claimants[*at].last_granted));
    order.into_iter().find_map(|at| {
        let can_use = |pod: &SmolStr| match claimants[at].holder {
            Some(holder) => {
                demand.claims.get(holder).is_some_and(|it| !it.unusable_pods.contains(pod))
            }
            None => demand.open_pods.contains(pod),
        };
        let usable_slots = free.iter().filter(|(pod, _)| can_use(pod));
        let value =
            |(pod, slots): &(&SmolStr, &u32)| (!demand.standby_pods.contains(*pod), **slots);
        let (pod, _) = usable_slots.max_by_key(value)?;
        Some((at, pod.clone()))
    })
}

impl SlotClaimant<'_> {
    fn assign_slot(&mut self, pod: &str, sequence: u64) {
        add_slots(&mut self.assigned, pod, 1);
        self.held += 1;
        self.needed -= 1;
        self.last_granted = sequence;
    }
}

impl HolderAccount {
    fn apply_claim(&mut self, claim: &SlotClaim) {
        if !self.has_reported {
            self.has_reported = true;
            self.held_slots = max_by_pod(claim.held.clone(), &self.held_slots);
            self.grant_number = self.grant_number.max(claim.applied_grant);
            self.request_report();
        } else if claim.applied_grant == self.grant_number {
            // A report sent earlier under this number may arrive later. The holder never uses more than any of them
            // states.
            self.held_slots.retain(|pod, slots| {
                *slots = (*slots).min(claim.held.get(pod).copied().unwrap_or(0));
                *slots > 0
            });
            self.is_confirmed = true;
        }
    }

    /// Asks the holder to keep only the slots in use, and to report them.
    fn request_report(&mut self) {
        (self.grant_number, self.is_confirmed) = (self.grant_number + 1, false);
        self.granted.clear();
    }

    fn grant_slots(&mut self, slots: &SlotsByPod, sequence: u64) {
        slots.iter().for_each(|(pod, slots)| add_slots(&mut self.held_slots, pod, *slots));
        (self.grant_number, self.is_confirmed, self.last_granted) =
            (self.grant_number + 1, false, sequence);
        self.granted.clone_from(&self.held_slots);
    }
}
