//! Pure: slots of a revision with a hard limit: the activators together keep the limit.
//!
//! A slot is room for one request at one pod. One activator owns the revision and grants its slots to the others, which
//! hold them. These rules keep the limit:
//!
//! - An owner grants only within a term of its own (an epoch). It acts only once every activator it knows follows that
//!   term and has reported the slots it holds. An activator that is the owner by its own table follows no other one.
//!   A new activator knows only of those that its first table lists. So it does not act until every older table is out
//!   of force.
//! - A holder gets more slots only by a grant with a higher number. What it gives back counts only if it is reported
//!   under the number of the latest grant. Under the same number the holder never uses more again. So the owner's count
//!   of a holder's slots is never below the number that the holder uses.
//! - A holder that changes to another term keeps only slots in use, and reports them to the new owner. An activator
//!   that stops being the owner reports to the next owner what it had granted.
//!
//! Each side sends its whole state of the revision with every change.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use common::wire::{NamespacedName, SlotClaim, SlotGrant, SlotsByPod};
use smol_str::SmolStr;

mod ledger;

use ledger::SlotLedger;

/// Name of an activator.
pub type ActivatorName = SmolStr;

/// Set of activators, as one of them sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerView {
    /// Name of the activator whose view it is.
    pub own: ActivatorName,
    /// Activators that the RouteTable lists, without those that have announced their end.
    pub listed: BTreeSet<ActivatorName>,
    /// Other activators that may be alive: listed, connected, or either of them until a moment ago.
    pub known: BTreeSet<ActivatorName>,
    /// Subset of `known` that has a stream to this activator.
    pub connected: BTreeSet<ActivatorName>,
    /// True if it follows the RouteTable only since lately. A table from before its first one may still be in force at
    /// another activator, and list activators that it cannot know of.
    pub is_new: bool,
}

impl PeerView {
    /// Owner of a revision by this view: the listed activator that comes first in an order of the revision's own. While
    /// none is listed, the owner is one of those that are alive.
    pub fn owner(&self, revision: &NamespacedName) -> &ActivatorName {
        let live = self.known.iter().chain([&self.own]).filter(|_| self.listed.is_empty());
        let all = self.listed.iter().chain(live);
        all.max_by_key(|peer| (rank(revision, peer), *peer)).unwrap_or(&self.own)
    }
}

/// Activators of the table that have not ended. If all have ended, it returns all of them. An activator that is not
/// listed itself then waits for the next table, as others in the same situation do.
pub fn lasting(
    listed: &BTreeSet<ActivatorName>,
    ended: &BTreeSet<ActivatorName>,
) -> BTreeSet<ActivatorName> {
    if listed.is_subset(ended) { listed.clone() } else { listed - ended }
}

/// Rank of an activator in a revision's order: rendezvous hashing, the same in every process.
fn rank(revision: &NamespacedName, peer: &str) -> u64 {
    let parts = [&*revision.namespace, "/", &*revision.name, "\0", peer];
    let bytes = parts.into_iter().flat_map(str::bytes);
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let mixed = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Slots of one revision at one activator, as holder or as owner.
#[derive(Debug)]
pub struct RevisionSlots {
    revision: NamespacedName,
    view: Arc<PeerView>,
    /// Hard limit of each pod (containerConcurrency); 0 while it is not known.
    limit: u32,
    /// Pods that the RouteTable lists as ready.
    ready: BTreeSet<SmolStr>,
    /// Subset of `ready` that takes requests of this activator.
    open: BTreeSet<SmolStr>,
    /// Requests of this activator at pods, by pod.
    busy: SlotsByPod,
    /// Number of requests that wait at this activator.
    waiting: u32,
    /// Further requests that each pod may get from this activator now.
    spare: SlotsByPod,
    holder: SlotHolder,
    /// Latest grant of each owner on its open stream.
    offers: BTreeMap<ActivatorName, SlotGrant>,
    /// Latest claim of each holder on its open stream.
    claims: BTreeMap<ActivatorName, SlotClaim>,
    /// Ledger of the current term, while this activator is the owner by its own table.
    ledger: Option<SlotLedger>,
    /// Slots that it had granted when it stopped being the owner, kept until another owner acts.
    former: BTreeMap<ActivatorName, SlotsByPod>,
    /// Holders that were sent a grant which is not withdrawn.
    told: BTreeSet<ActivatorName>,
    /// Owner that was sent a claim which is not withdrawn.
    claimed: Option<ActivatorName>,
}

/// Slots that this activator holds of another owner.
#[derive(Debug, Default)]
struct SlotHolder {
    follows: Option<FollowedTerm>,
    /// Slots that it may use, including those in use.
    held: SlotsByPod,
    /// Subset of `held` that was granted lately and not used yet: each may serve one request even when `keep` is lower.
    fresh: u32,
    /// Number of slots beyond which the owner asks for idle ones back; `None`: all may be kept.
    keep: Option<u32>,
    /// Pods of which it does not want slots, because they take no requests of this activator.
    avoid: BTreeSet<SmolStr>,
}

#[derive(Debug)]
struct FollowedTerm {
    /// Owner whose term the holder follows.
    owner: ActivatorName,
    epoch: u64,
    /// Number of the latest grant that was applied.
    seen: u64,
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
    /// Creates the state of a revision without pods, claims or grants.
    pub fn new(revision: NamespacedName, view: Arc<PeerView>) -> Self {
        Self {
            revision,
            view,
            limit: 0,
            ready: BTreeSet::new(),
            open: BTreeSet::new(),
            busy: SlotsByPod::new(),
            waiting: 0,
            spare: SlotsByPod::new(),
            holder: SlotHolder::default(),
            offers: BTreeMap::new(),
            claims: BTreeMap::new(),
            ledger: None,
            former: BTreeMap::new(),
            told: BTreeSet::new(),
            claimed: None,
        }
    }

    // Events. The caller runs `settle` after any of them.

    /// Sets the view of the other activators.
    pub fn on_view(&mut self, view: Arc<PeerView>) {
        self.view = view;
    }

    /// Sets the hard limit and the ready pods from the RouteTable.
    pub fn on_table(&mut self, limit: u32, ready: BTreeSet<SmolStr>) {
        (self.limit, self.ready) = (limit, ready);
    }

    /// Sets the number of waiting requests and the pods that take requests.
    pub fn on_queue(&mut self, waiting: u32, open: BTreeSet<SmolStr>) {
        (self.waiting, self.open) = (waiting, open);
    }

    /// Sets the number of waiting requests.
    pub fn on_waiting(&mut self, waiting: u32) {
        self.waiting = waiting;
    }

    /// Sets the requests that were at pods before there was a hard limit.
    pub fn set_in_use(&mut self, busy: SlotsByPod) {
        self.busy = busy;
    }

    /// Stores the latest claim of a holder; `None`: the holder has withdrawn it.
    pub fn on_claim(&mut self, from: &ActivatorName, claim: Option<SlotClaim>) {
        match claim {
            Some(claim) => drop(self.claims.insert(from.clone(), claim)),
            None => drop(self.claims.remove(from)),
        }
    }

    /// Stores the latest grant of an owner; `None`: the owner has withdrawn it.
    pub fn on_grant(&mut self, from: &ActivatorName, grant: Option<SlotGrant>) {
        match grant {
            Some(grant) => drop(self.offers.insert(from.clone(), grant)),
            None => drop(self.offers.remove(from)),
        }
    }

    /// Registers that a holder's stream has begun or ended. The holder may be a new process, and sends its state again.
    pub fn on_stream(&mut self, from: &ActivatorName) {
        self.claims.remove(from);
        if let Some(ledger) = &mut self.ledger {
            ledger.recount(from);
        }
    }

    /// Registers that a request is sent to a pod that had a spare slot.
    pub fn took(&mut self, pod: &str) {
        add(&mut self.busy, pod, 1);
        subtract(&mut self.spare, pod);
        match &mut self.ledger {
            Some(ledger) => ledger.on_own_slot_used(),
            None => self.holder.fresh = self.holder.fresh.saturating_sub(1),
        }
    }

    /// Registers the end of a request at a pod. Returns true if its slot is spare again, so that `settle` is not
    /// needed.
    pub fn ended(&mut self, pod: &str) -> bool {
        subtract(&mut self.busy, pod);
        let is_ours = match &self.ledger {
            Some(ledger) => ledger.is_free(pod, self.limit, &self.busy, &self.spare),
            None => self.holder.follows.is_some() && self.holder.keep.is_none(),
        };
        let again = is_ours && self.open.contains(pod);
        if again {
            add(&mut self.spare, pod, 1);
        }
        again
    }

    /// Number of requests that the pod may get from this activator now.
    pub fn spare(&self, pod: &str) -> u32 {
        self.spare.get(pod).copied().unwrap_or(0)
    }

    /// Returns true if no other activator holds or may claim slots of this revision.
    pub fn is_alone(&self) -> bool {
        self.view.known.is_empty() && self.ledger.as_ref().is_some_and(SlotLedger::is_alone)
    }

    /// Returns true if there is no state to keep.
    pub fn is_void(&self) -> bool {
        let nothing = self.offers.is_empty() && self.claims.is_empty() && self.former.is_empty();
        let silent = self.told.is_empty() && self.claimed.is_none();
        nothing && silent && self.ledger.is_none() && self.busy.is_empty() && self.waiting == 0
    }

    /// Updates the state after an event. `chance` is a random number that names a new term: no two terms are alike.
    pub fn settle(&mut self, chance: impl FnOnce() -> u64) {
        let owner = self.view.owner(&self.revision).clone();
        if owner == self.view.own {
            self.own(chance);
        } else {
            self.follow(&owner);
        }
    }

    // --- as owner

    fn own(&mut self, chance: impl FnOnce() -> u64) {
        // An owner holds nothing of another owner: its requests in flight stay in `busy`.
        self.holder = SlotHolder::default();
        let is_wanted = self.waiting > 0
            || !self.ready.is_empty()
            || self.claims.values().any(|claim| claim.need > 0);
        if self.ledger.is_none() && is_wanted {
            // Epoch 0 means that a claim follows no term.
            self.ledger = Some(SlotLedger::new(chance() | 1));
        }
        self.spare.clear();
        let Some(mut ledger) = self.ledger.take() else { return };
        // A term begins to act once, when all known holders follow it. From then on `hear` applies their claims.
        if !ledger.acts() && !self.view.is_new {
            ledger.gather(&self.view, &self.claims, &self.former);
        }
        if ledger.acts() {
            self.former.clear();
            ledger.hear(&self.view, &self.claims);
            self.spare = ledger.distribute(&ledger::SlotDemand {
                limit: self.limit,
                ready: &self.ready,
                open: &self.open,
                busy: &self.busy,
                waiting: self.waiting,
                claims: &self.claims,
            });
        }
        // A term ends only when nothing is granted: a new term would not know what holders still use.
        let is_over = ledger.acts() && !is_wanted && ledger.granted() == 0;
        self.ledger = (!is_over).then_some(ledger);
    }

    // --- as holder

    fn follow(&mut self, owner: &ActivatorName) {
        // The next owner reads from `former`, in this activator's claim, what was granted before its term.
        if let Some(ledger) = self.ledger.take() {
            ledger.hand_over(&mut self.former);
            self.rest();
        }
        if self.holder.follows.as_ref().is_some_and(|it| it.owner != *owner) {
            self.rest();
        }
        if let Some(offer) = self.offers.get(owner).cloned() {
            self.apply_grant(owner, offer);
        } else {
            self.rest();
        }
        self.give_back();
        self.spare = idle(&self.holder.held, &self.busy);
    }

    /// Stops following any term: only slots in use are kept.
    fn rest(&mut self) {
        self.holder = SlotHolder { held: self.busy.clone(), ..SlotHolder::default() };
    }

    fn apply_grant(&mut self, owner: &ActivatorName, offer: SlotGrant) {
        let SlotGrant { epoch, number, held, keep, acts } = offer;
        match &mut self.holder.follows {
            Some(it) if it.epoch == epoch => {
                if number > it.seen {
                    it.seen = number;
                    self.holder.held = most(held, &self.busy);
                    self.holder.fresh = sum(&self.holder.held) - sum(&self.busy);
                }
            }
            // Slots of an earlier grant are not used again: they may have been given back.
            Some(_) | None => {
                self.rest();
                self.holder.follows =
                    Some(FollowedTerm { owner: owner.clone(), epoch, seen: number });
            }
        }
        self.holder.keep = keep;
        if acts {
            self.former.clear();
        }
    }

    /// Gives back idle slots of pods that take no requests here, and those beyond what the owner lets it keep.
    fn give_back(&mut self) {
        let Self { holder, busy, open, waiting, .. } = self;
        holder.avoid.retain(|pod| !open.contains(pod));
        // Idle slots of a pod that takes no requests here are useless: they go back, and `avoid` asks the owner for no
        // more.
        for pod in idle(&holder.held, busy).into_keys() {
            if !open.contains(&pod) {
                holder.held.remove(&pod);
                if let Some(slots) = busy.get(&pod) {
                    holder.held.insert(pod.clone(), *slots);
                }
                holder.avoid.insert(pod);
            }
        }
        // Slots in use are never given back. Fresh ones may serve one request each first: otherwise a slot could be
        // passed from activator to activator without serving any.
        let Some(keep) = holder.keep else { return };
        let used = sum(busy);
        let most = keep.max(used.saturating_add(holder.fresh)).min(used.saturating_add(*waiting));
        let mut over = sum(&holder.held).saturating_sub(most.max(used));
        for (pod, idle) in idle(&holder.held, busy) {
            for _ in 0..idle.min(over) {
                subtract(&mut holder.held, &pod);
            }
            over -= idle.min(over);
        }
    }

    // --- messages to other activators

    /// Messages that other activators have to get now. The caller runs it after each [`settle`](Self::settle).
    pub fn said(&mut self) -> SlotMessages {
        let mut said = SlotMessages::default();
        if let Some(ledger) = &self.ledger {
            // A known activator gets a grant even without slots: the grant carries the term that it has to follow.
            for peer in &self.view.known {
                said.grants.push((peer.clone(), Some(ledger.grant(peer))));
            }
        }
        let told: BTreeSet<ActivatorName> =
            said.grants.iter().map(|(peer, _)| peer.clone()).collect();
        let gone = self.told.difference(&told).map(|peer| (peer.clone(), None));
        said.grants.extend(gone.collect::<Vec<_>>());
        self.told = told;

        // A claim goes to one owner only: one that was sent to another owner before is withdrawn.
        let claim = self.claim();
        let now = claim.as_ref().map(|(owner, _)| owner.clone());
        if let Some(before) = self.claimed.take().filter(|it| Some(it) != now.as_ref()) {
            said.claims.push((before, None));
        }
        said.claims.extend(claim.map(|(owner, claim)| (owner, Some(claim))));
        self.claimed = now;
        said
    }

    fn claim(&self) -> Option<(ActivatorName, SlotClaim)> {
        let owner = self.view.owner(&self.revision);
        if *owner == self.view.own {
            return None;
        }
        let SlotHolder { follows, held, avoid, .. } = &self.holder;
        let (epoch, seen) = follows.as_ref().map_or((0, 0), |it| (it.epoch, it.seen));
        let need = sum(held).saturating_add(self.waiting);
        if epoch == 0 && need == 0 && self.former.is_empty() {
            return None;
        }
        // Until the owner acts, the claim names the activators connected here: the owner may not know one of them yet.
        let acts = self.offers.get(owner).is_some_and(|it| it.acts);
        let known = if acts { BTreeSet::new() } else { self.view.connected.clone() };
        let (held, avoid, former) = (held.clone(), avoid.clone(), self.former.clone());
        Some((owner.clone(), SlotClaim { epoch, seen, held, need, avoid, former, known }))
    }
}

fn sum(all: &SlotsByPod) -> u32 {
    all.values().fold(0, |sum, slots| sum.saturating_add(*slots))
}

fn add(all: &mut SlotsByPod, pod: &str, slots: u32) {
    match all.get_mut(pod) {
        Some(it) => *it += slots,
        None => drop(all.insert(pod.into(), slots)),
    }
}

fn subtract(all: &mut SlotsByPod, pod: &str) {
    if let Some(slots) = all.get_mut(pod) {
        *slots -= 1;
        if *slots == 0 {
            all.remove(pod);
        }
    }
}

/// Greater number of both maps for each pod.
fn most(mut one: SlotsByPod, other: &SlotsByPod) -> SlotsByPod {
    for (pod, slots) in other {
        let it = one.entry(pod.clone()).or_default();
        *it = (*it).max(*slots);
    }
    one
}

/// Slots that are held and not in use, by pod.
fn idle(held: &SlotsByPod, busy: &SlotsByPod) -> SlotsByPod {
    let of = |(pod, slots): (&SmolStr, &u32)| {
        let idle = slots.saturating_sub(busy.get(pod).copied().unwrap_or(0));
        (idle > 0).then(|| (pod.clone(), idle))
    };
    held.iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests;
