//! Pure: an owner's book of who holds which slots of a revision.

use std::collections::{BTreeMap, BTreeSet};

use common::wire::{Claim, Grant, Held};
use smol_str::SmolStr;

use super::{Peer, View, add, most, subtract, sum};

/// The book of one term.
#[derive(Debug)]
pub(super) struct Ledger {
    epoch: u64,
    acts: bool,
    others: BTreeMap<Peer, Entry>,
    /// What others hold, by pod.
    lent: Held,
    /// Some request waits, here or elsewhere, and slots that others hold could serve it.
    is_short: bool,
    /// Beyond so many slots each, holders give back.
    level: u32,
    /// Grows with each slot that is given.
    turn: u64,
    own_turn: u64,
}

/// What one other activator holds.
#[derive(Debug, Default)]
struct Entry {
    /// At most this.
    counts: Held,
    /// Of the latest grant, and what it says.
    number: u64,
    given: Held,
    /// It has said what it holds since the latest grant, so that it may be granted more.
    is_exact: bool,
    /// It has said what it holds at all.
    is_heard: bool,
    /// When it was given a slot last, in turns.
    turn: u64,
}

/// What there is to distribute, and among whom.
#[derive(Debug)]
pub(super) struct Demand<'a> {
    pub(super) limit: u32,
    pub(super) ready: &'a BTreeSet<SmolStr>,
    pub(super) open: &'a BTreeSet<SmolStr>,
    pub(super) busy: &'a Held,
    pub(super) waiting: u32,
    pub(super) claims: &'a BTreeMap<Peer, Claim>,
}

/// One that could use a slot.
struct Wanting<'a> {
    /// `None`: the owner itself.
    who: Option<&'a Peer>,
    holds: u32,
    turn: u64,
    left: u32,
    given: Held,
}

impl Ledger {
    /// Begins a term.
    pub(super) fn new(epoch: u64) -> Self {
        Self {
            epoch,
            acts: false,
            others: BTreeMap::new(),
            lent: Held::new(),
            is_short: false,
            level: 0,
            turn: 0,
            own_turn: 0,
        }
    }

    /// Whether everybody follows this term.
    pub(super) fn acts(&self) -> bool {
        self.acts
    }

    /// Whether no other one has a part in it.
    pub(super) fn is_alone(&self) -> bool {
        self.acts && self.others.is_empty()
    }

    /// Slots that others hold.
    pub(super) fn granted(&self) -> u32 {
        sum(&self.lent)
    }

    /// Acts as soon as every other activator that lives follows. Whatever any of them says that it holds, or that a former
    /// owner had granted to it, is its.
    pub(super) fn gather(
        &mut self,
        view: &View,
        claims: &BTreeMap<Peer, Claim>,
        former: &BTreeMap<Peer, Held>,
    ) {
        let follows = |peer: &Peer| claims.get(peer).filter(|it| it.epoch == self.epoch);
        let following = claims.iter().filter(|(_, claim)| claim.epoch == self.epoch);
        let known = following.clone().flat_map(|(_, claim)| &claim.known);
        let needed: BTreeSet<&Peer> =
            view.known.iter().chain(known).filter(|peer| **peer != view.own).collect();
        if !needed.iter().all(|peer| follows(peer).is_some()) {
            return;
        }
        self.acts = true;
        for (peer, claim) in following.clone() {
            let counts = claim.held.clone();
            let entry = Entry { counts, is_heard: true, is_exact: true, ..Entry::default() };
            self.others.insert(peer.clone(), entry);
        }
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

    /// A holder may be another process by now.
    pub(super) fn recount(&mut self, peer: &str) {
        if let Some(entry) = self.others.get_mut(peer) {
            entry.recount();
        }
    }

    /// Takes in what holders say, and that some have gone.
    pub(super) fn hear(&mut self, view: &View, claims: &BTreeMap<Peer, Claim>) {
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

    /// Gives free slots to those that want some, one at a time to the one that holds the fewest. Returns what the owner itself
    /// may use: its share, and what is left.
    pub(super) fn distribute(&mut self, demand: &Demand<'_>) -> Held {
        let mut free = self.free(demand);
        let (mut wanting, is_unheard) = self.wanting(demand);
        let mut turn = self.turn;
        while let Some((at, pod)) = next(&wanting, &free, demand) {
            turn += 1;
            subtract(&mut free, &pod);
            wanting[at].take(&pod, turn);
        }
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

    /// The owner has used a slot.
    pub(super) fn serve_own(&mut self) {
        self.turn += 1;
        self.own_turn = self.turn;
    }

    /// Whether the owner may use a slot of this pod once more without asking who else wants it.
    pub(super) fn is_free(&self, pod: &str, limit: u32, busy: &Held, spare: &Held) -> bool {
        let taken: u32 = [busy, spare, &self.lent].iter().filter_map(|it| it.get(pod)).sum();
        self.acts && !self.is_short && taken < limit
    }

    fn free(&self, demand: &Demand<'_>) -> Held {
        let of = |pod: &SmolStr| {
            let taken: u32 = [demand.busy, &self.lent].iter().filter_map(|it| it.get(pod)).sum();
            let free = demand.limit.saturating_sub(taken);
            (free > 0).then(|| (pod.clone(), free))
        };
        demand.ready.iter().filter_map(of).collect()
    }

    /// Those that could use a slot now; and whether others could once they have said what they hold.
    fn wanting<'a>(&self, demand: &Demand<'a>) -> (Vec<Wanting<'a>>, bool) {
        let (mut all, mut is_unheard) = (Vec::new(), false);
        for (who, claim) in demand.claims {
            let Some(entry) = self.others.get(who) else { continue };
            let holds = sum(&entry.counts);
            let left = claim.need.saturating_sub(holds);
            if left == 0 || claim.epoch != self.epoch {
                continue;
            }
            if entry.is_exact {
                let (who, turn, given) = (Some(who), entry.turn, Held::new());
                all.push(Wanting { who, holds, turn, left, given });
            } else {
                is_unheard = true;
            }
        }
        if demand.waiting > 0 {
            let (holds, turn) = (sum(demand.busy), self.own_turn);
            let (left, given) = (demand.waiting, Held::new());
            all.push(Wanting { who: None, holds, turn, left, given });
        }
        (all, is_unheard)
    }

    /// The greatest number of slots that everybody could have who could use so many.
    fn level(&self, demand: &Demand<'_>) -> u32 {
        let pods = u32::try_from(demand.ready.len()).unwrap_or(u32::MAX);
        let others = self.others.iter().map(|(peer, entry)| {
            let need = demand.claims.get(peer).map_or(0, |claim| claim.need);
            need.max(sum(&entry.counts))
        });
        let own = sum(demand.busy).saturating_add(demand.waiting);
        let mut wishes: Vec<u32> = others.chain([own]).collect();
        wishes.sort_unstable();
        let mut left = demand.limit.saturating_mul(pods);
        for (sharers, wish) in (1..=u32::try_from(wishes.len()).unwrap_or(1)).rev().zip(wishes) {
            if wish > left / sharers {
                return left / sharers;
            }
            left -= wish;
        }
        u32::MAX
    }

    /// What one of the others is told.
    pub(super) fn grant(&self, peer: &Peer) -> Grant {
        let entry = self.others.get(peer);
        let (number, held) =
            entry.map_or_else(Default::default, |it| (it.number, it.given.clone()));
        let keep = self.is_short.then_some(self.level);
        Grant { epoch: self.epoch, number, held, keep, acts: self.acts }
    }

    /// What the next owner has to be told.
    pub(super) fn hand_over(self, former: &mut BTreeMap<Peer, Held>) {
        if self.acts {
            former.clear();
        }
        for (peer, Entry { counts, .. }) in self.others {
            if !counts.is_empty() {
                former.insert(peer, counts);
            }
        }
    }
}

/// Who is next, and with which pod: the one with the most free slots.
fn next(wanting: &[Wanting<'_>], free: &Held, demand: &Demand<'_>) -> Option<(usize, SmolStr)> {
    let mut order: Vec<usize> = (0..wanting.len()).filter(|at| wanting[*at].left > 0).collect();
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

impl Wanting<'_> {
    fn take(&mut self, pod: &str, turn: u64) {
        add(&mut self.given, pod, 1);
        self.holds += 1;
        self.left -= 1;
        self.turn = turn;
    }
}

impl Entry {
    fn hear(&mut self, claim: &Claim) {
        if !self.is_heard {
            self.is_heard = true;
            self.counts = most(claim.held.clone(), &self.counts);
            self.number = self.number.max(claim.seen);
            self.recount();
        } else if claim.seen == self.number {
            // What it said earlier under this number may come later: it never holds more than at any time since.
            self.counts.retain(|pod, slots| {
                *slots = (*slots).min(claim.held.get(pod).copied().unwrap_or(0));
                *slots > 0
            });
            self.is_exact = true;
        }
    }

    /// Asks it to keep what is in use, and to say what that is.
    fn recount(&mut self) {
        (self.number, self.is_exact) = (self.number + 1, false);
        self.given.clear();
    }

    fn give(&mut self, slots: &Held, turn: u64) {
        slots.iter().for_each(|(pod, slots)| add(&mut self.counts, pod, *slots));
        (self.number, self.is_exact, self.turn) = (self.number + 1, false, turn);
        self.given.clone_from(&self.counts);
    }
}
