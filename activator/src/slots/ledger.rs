//! Pure: an owner's ledger of the slots of a revision and their holders.

use std::collections::{BTreeMap, BTreeSet};

use common::wire::{SlotClaim, SlotGrant, SlotsByPod};
use smol_str::SmolStr;

use super::{ActivatorName, PeerView, add, most, subtract, sum};

/// Ledger of one term of an owner.
#[derive(Debug)]
pub(super) struct SlotLedger {
    /// Number of the term, drawn at random.
    epoch: u64,
    /// True once every known activator follows the term: only then the owner grants.
    acts: bool,
    others: BTreeMap<ActivatorName, HolderAccount>,
    /// Slots that other activators hold, by pod.
    lent: SlotsByPod,
    /// True if some request waits, here or at a holder, and slots that others hold could serve it.
    is_short: bool,
    /// Number of slots beyond which each holder gives back idle ones, while the revision is short of slots.
    level: u32,
    /// Running number of the slots given: it orders activators by the time of their last slot.
    turn: u64,
    /// Value of `turn` when the owner itself used a slot last.
    own_turn: u64,
}

/// State of one other activator, as a holder.
#[derive(Debug, Default)]
struct HolderAccount {
    /// Slots that it may be using, by pod: at most these.
    counts: SlotsByPod,
    /// Number of the latest grant to it.
    number: u64,
    /// Slots that the latest grant states; empty: it keeps only those in use.
    given: SlotsByPod,
    /// True if it has reported its slots since the latest grant, so that it may be granted more.
    is_exact: bool,
    /// True if it has reported its slots at all in this term.
    is_heard: bool,
    /// Value of the ledger's `turn` when it was given a slot last.
    turn: u64,
}

/// Slots that can be distributed, and the activators that need some.
#[derive(Debug)]
pub(super) struct SlotDemand<'a> {
    pub(super) limit: u32,
    pub(super) ready: &'a BTreeSet<SmolStr>,
    pub(super) open: &'a BTreeSet<SmolStr>,
    pub(super) busy: &'a SlotsByPod,
    pub(super) waiting: u32,
    pub(super) claims: &'a BTreeMap<ActivatorName, SlotClaim>,
}

/// Activator that could use a slot now.
struct SlotClaimant<'a> {
    /// Name of the holder; `None`: the owner itself.
    who: Option<&'a ActivatorName>,
    /// Slots that it has already.
    holds: u32,
    turn: u64,
    /// Further slots that it could use.
    left: u32,
    /// Slots assigned to it in this distribution, by pod.
    given: SlotsByPod,
}

impl SlotLedger {
    /// Begins the term numbered `epoch`, in which nothing is granted yet.
    pub(super) fn new(epoch: u64) -> Self {
        Self {
            epoch,
            acts: false,
            others: BTreeMap::new(),
            lent: SlotsByPod::new(),
            is_short: false,
            level: 0,
            turn: 0,
            own_turn: 0,
        }
    }

    /// Returns true if every known activator follows this term, so that the owner may grant.
    pub(super) fn acts(&self) -> bool {
        self.acts
    }

    /// Returns true if the owner acts and there is no holder.
    pub(super) fn is_alone(&self) -> bool {
        self.acts && self.others.is_empty()
    }

    /// Number of slots that others hold.
    pub(super) fn granted(&self) -> u32 {
        sum(&self.lent)
    }

    /// Begins to act as soon as every other activator that is alive follows the term. Each holder keeps the slots that
    /// it reports, and those that a former owner had granted to it.
    pub(super) fn gather(
        &mut self,
        view: &PeerView,
        claims: &BTreeMap<ActivatorName, SlotClaim>,
        former: &BTreeMap<ActivatorName, SlotsByPod>,
    ) {
        let follows = |peer: &ActivatorName| claims.get(peer).filter(|it| it.epoch == self.epoch);
        let following = claims.iter().filter(|(_, claim)| claim.epoch == self.epoch);
        // An activator that a holder names is alive too, even if this owner's table does not list it yet. Without it
        // the owner could grant slots that this activator still uses by a former owner's grant.
        let known = following.clone().flat_map(|(_, claim)| &claim.known);
        let needed: BTreeSet<&ActivatorName> =
            view.known.iter().chain(known).filter(|peer| **peer != view.own).collect();
        if !needed.iter().all(|peer| follows(peer).is_some()) {
            return;
        }
        self.acts = true;
        for (peer, claim) in following.clone() {
            let counts = claim.held.clone();
            let entry = HolderAccount {
                counts,
                is_heard: true,
                is_exact: true,
                ..HolderAccount::default()
            };
            self.others.insert(peer.clone(), entry);
        }
        // What former owners had granted may be more than the claim states: the grant can still be on its way. The
        // greater number counts, until the holder has reported again.
        for (peer, held) in following.flat_map(|(_, claim)| &claim.former).chain(former) {
            let Some(entry) = self.others.get_mut(peer) else { continue };
            let counts = most(held.clone(), &entry.counts);
            if counts != entry.counts {
                entry.counts = counts;
                entry.recount();
            }
        }
        self.lend();
    }

    /// Asks a holder for its slots again, because it may be a new process.
    pub(super) fn recount(&mut self, peer: &str) {
        if let Some(entry) = self.others.get_mut(peer) {
            entry.recount();
        }
    }

    /// Applies the claims of holders, and removes holders that are gone.
    pub(super) fn hear(&mut self, view: &PeerView, claims: &BTreeMap<ActivatorName, SlotClaim>) {
        self.others.retain(|peer, _| view.known.contains(peer));
        for (peer, claim) in claims {
            if claim.epoch == self.epoch && view.known.contains(peer) {
                self.others.entry(peer.clone()).or_default().hear(claim);
            }
        }
        self.lend();
    }

    fn lend(&mut self) {
        self.lent.clear();
        for entry in self.others.values() {
            entry.counts.iter().for_each(|(pod, slots)| add(&mut self.lent, pod, *slots));
        }
    }

    /// Gives free slots to the activators that need some, one at a time to the one with the fewest. Returns the slots
    /// of the owner itself: its share, and those that no holder needs.
    pub(super) fn distribute(&mut self, demand: &SlotDemand<'_>) -> SlotsByPod {
        let mut free = self.free(demand);
        let (mut wanting, is_unheard) = self.wanting(demand);
        let mut turn = self.turn;
        while let Some((at, pod)) = next(&wanting, &free, demand) {
            turn += 1;
            subtract(&mut free, &pod);
            wanting[at].take(&pod, turn);
        }
        // Without other activators there is nothing to get back: waiting alone does not make the revision short.
        let is_left = wanting.iter().any(|it| it.left > 0);
        let others_matter = wanting.iter().any(|it| it.who.is_some()) || !self.lent.is_empty();
        let given = wanting.into_iter().filter(|it| !it.given.is_empty());
        let given: Vec<_> = given.map(|it| (it.who.cloned(), it.given, it.turn)).collect();
        let mut own = free;
        for (who, given, turn) in given {
            let slots = given.iter();
            match who.and_then(|peer| self.others.get_mut(&peer)) {
                Some(entry) => entry.give(&given, turn),
                None => slots.for_each(|(pod, slots)| add(&mut own, pod, *slots)),
            }
        }
        self.turn = turn;
        self.is_short = is_unheard || (is_left && others_matter);
        self.level = self.level(demand);
        self.lend();
        own
    }

    /// Registers that the owner has used a slot.
    pub(super) fn on_own_slot_used(&mut self) {
        self.turn += 1;
        self.own_turn = self.turn;
    }

    /// Returns true if the owner may use a slot of this pod again without a new distribution.
    pub(super) fn is_free(
        &self,
        pod: &str,
        limit: u32,
        busy: &SlotsByPod,
        spare: &SlotsByPod,
    ) -> bool {
        let taken: u32 = [busy, spare, &self.lent].iter().filter_map(|it| it.get(pod)).sum();
        self.acts && !self.is_short && taken < limit
    }

    fn free(&self, demand: &SlotDemand<'_>) -> SlotsByPod {
        let of = |pod: &SmolStr| {
            let taken: u32 = [demand.busy, &self.lent].iter().filter_map(|it| it.get(pod)).sum();
            let free = demand.limit.saturating_sub(taken);
            (free > 0).then(|| (pod.clone(), free))
        };
        demand.ready.iter().filter_map(of).collect()
    }

    /// Activators that could use a slot now; and true if others could once they have reported their slots.
    fn wanting<'a>(&self, demand: &SlotDemand<'a>) -> (Vec<SlotClaimant<'a>>, bool) {
        let (mut all, mut is_unheard) = (Vec::new(), false);
        for (who, claim) in demand.claims {
            let Some(entry) = self.others.get(who) else { continue };
            let holds = sum(&entry.counts);
            let left = claim.need.saturating_sub(holds);
            if left == 0 || claim.epoch != self.epoch {
                continue;
            }
            // A holder without a report since the latest grant may use fewer slots than counted, so it gets no more for
            // now.
            if entry.is_exact {
                let (who, turn, given) = (Some(who), entry.turn, SlotsByPod::new());
                all.push(SlotClaimant { who, holds, turn, left, given });
            } else {
                is_unheard = true;
            }
        }
        if demand.waiting > 0 {
            let (holds, turn) = (sum(demand.busy), self.own_turn);
            let (left, given) = (demand.waiting, SlotsByPod::new());
            all.push(SlotClaimant { who: None, holds, turn, left, given });
        }
        (all, is_unheard)
    }

    /// Greatest number of slots that every activator which needs as many can have: max-min fairness over all slots.
    fn level(&self, demand: &SlotDemand<'_>) -> u32 {
        let pods = u32::try_from(demand.ready.len()).unwrap_or(u32::MAX);
        let others = self.others.iter().map(|(peer, entry)| {
            let need = demand.claims.get(peer).map_or(0, |claim| claim.need);
            need.max(sum(&entry.counts))
        });
        let own = sum(demand.busy).saturating_add(demand.waiting);
        let mut wishes: Vec<u32> = others.chain([own]).collect();
        wishes.sort_unstable();
        // The smallest need is served first; what it leaves is shared by the others.
        let mut left = demand.limit.saturating_mul(pods);
        for (sharers, wish) in (1..=u32::try_from(wishes.len()).unwrap_or(1)).rev().zip(wishes) {
            if wish > left / sharers {
                return left / sharers;
            }
            left -= wish;
        }
        u32::MAX
    }

    /// Grant for one of the other activators, as it is now.
    pub(super) fn grant(&self, peer: &ActivatorName) -> SlotGrant {
        let entry = self.others.get(peer);
        let (number, held) =
            entry.map_or_else(Default::default, |it| (it.number, it.given.clone()));
        let keep = self.is_short.then_some(self.level);
        SlotGrant { epoch: self.epoch, number, held, keep, acts: self.acts }
    }

    /// Adds the granted slots to `former`, which the next owner gets in a claim.
    pub(super) fn hand_over(self, former: &mut BTreeMap<ActivatorName, SlotsByPod>) {
        if self.acts {
            former.clear();
        }
        for (peer, HolderAccount { counts, .. }) in self.others {
            if !counts.is_empty() {
                former.insert(peer, counts);
            }
        }
    }
}

/// Next activator that gets a slot, with the pod of it: the pod with the most free slots.
fn next(
    wanting: &[SlotClaimant<'_>],
    free: &SlotsByPod,
    demand: &SlotDemand<'_>,
) -> Option<(usize, SmolStr)> {
    let mut order: Vec<usize> = (0..wanting.len()).filter(|at| wanting[*at].left > 0).collect();
    // The activator with the fewest slots comes first; of equal ones, the one whose last slot is the longest ago.
    order.sort_by_key(|at| (wanting[*at].holds, wanting[*at].turn));
    order.into_iter().find_map(|at| {
        let suits = |pod: &SmolStr| match wanting[at].who {
            Some(who) => demand.claims.get(who).is_some_and(|it| !it.avoid.contains(pod)),
            None => demand.open.contains(pod),
        };
        let suiting = free.iter().filter(|(pod, _)| suits(pod));
        let (pod, _) = suiting.max_by_key(|(_, slots)| **slots)?;
        Some((at, pod.clone()))
    })
}

impl SlotClaimant<'_> {
    fn take(&mut self, pod: &str, turn: u64) {
        add(&mut self.given, pod, 1);
        self.holds += 1;
        self.left -= 1;
        self.turn = turn;
    }
}

impl HolderAccount {
    fn hear(&mut self, claim: &SlotClaim) {
        if !self.is_heard {
            self.is_heard = true;
            self.counts = most(claim.held.clone(), &self.counts);
            self.number = self.number.max(claim.seen);
            self.recount();
        } else if claim.seen == self.number {
            // A report sent earlier under this number may arrive later. The holder never uses more than any of them
            // states.
            self.counts.retain(|pod, slots| {
                *slots = (*slots).min(claim.held.get(pod).copied().unwrap_or(0));
                *slots > 0
            });
            self.is_exact = true;
        }
    }

    /// Asks the holder to keep only the slots in use, and to report them.
    fn recount(&mut self) {
        (self.number, self.is_exact) = (self.number + 1, false);
        self.given.clear();
    }

    fn give(&mut self, slots: &SlotsByPod, turn: u64) {
        slots.iter().for_each(|(pod, slots)| add(&mut self.counts, pod, *slots));
        (self.number, self.is_exact, self.turn) = (self.number + 1, false, turn);
        self.given.clone_from(&self.counts);
    }
}
