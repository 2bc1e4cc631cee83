//! Pure: who may use which slots of a revision with a hard limit, so that all activators together keep it.
//!
//! A slot is room for one request at one pod. One activator owns the revision and grants its slots to the others, which
//! hold them. What keeps the limit:
//!
//! - An owner acts in a term of its own (an epoch), and only once every activator it knows follows that term, and has
//!   said what it holds. Who is an owner by its own table follows none. One that is new knows only of those that its first
//!   table lists, so it does not act until no table from before that one is in force.
//! - A holder gets more only by a grant with a higher number. What it gives back counts only if it says so under
//!   the number of the latest grant, and it never takes more under the same number. So the owner's count of a
//!   holder's slots is never below what the holder uses.
//! - Who follows another term keeps only slots in use, and tells the new owner of them. Who stops being the owner tells
//!   the next one what it had granted.
//!
//! Each side says its whole state of the revision with every change.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use common::wire::{Claim, Grant, Held, Name};
use smol_str::SmolStr;

mod ledger;

use ledger::Ledger;

/// An activator's name.
pub type Peer = SmolStr;

/// The activators, as one of them sees them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Itself.
    pub own: Peer,
    /// Those that the table lists, but for those that have said that they end.
    pub listed: BTreeSet<Peer>,
    /// Others that may live: listed, connected, or either of them until a moment ago.
    pub known: BTreeSet<Peer>,
    /// Of these, those that have a stream to it.
    pub connected: BTreeSet<Peer>,
    /// It follows tables only since lately: some from before its first one may still be in force elsewhere, and list others
    /// that it cannot know of.
    pub is_new: bool,
}

impl View {
    /// The owner of a revision by this view: the listed one that comes first in an order of the revision's own. While
    /// none is listed it is one of those that live.
    pub fn owner(&self, revision: &Name) -> &Peer {
        let live = self.known.iter().chain([&self.own]).filter(|_| self.listed.is_empty());
        let all = self.listed.iter().chain(live);
        all.max_by_key(|peer| (rank(revision, peer), *peer)).unwrap_or(&self.own)
    }
}

/// Those of the table that have not ended. Where all have, it is all: one that is not listed itself then waits for the next
/// table, as others like it do.
pub fn lasting(listed: &BTreeSet<Peer>, ended: &BTreeSet<Peer>) -> BTreeSet<Peer> {
    if listed.is_subset(ended) { listed.clone() } else { listed - ended }
}

/// Where an activator stands in a revision's order: rendezvous hashing, the same in every process.
fn rank(revision: &Name, peer: &str) -> u64 {
    let parts = [&*revision.namespace, "/", &*revision.name, "\0", peer];
    let bytes = parts.into_iter().flat_map(str::bytes);
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let mixed = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// One revision's slots at one activator, be it holder or owner.
#[derive(Debug)]
pub struct Slots {
    revision: Name,
    view: Arc<View>,
    /// containerConcurrency; 0 while it is not known.
    limit: u32,
    /// Pods that the table calls ready.
    ready: BTreeSet<SmolStr>,
    /// Of these, those that take requests from here.
    open: BTreeSet<SmolStr>,
    /// Requests of this activator's at pods.
    busy: Held,
    /// Requests that wait here.
    waiting: u32,
    /// Further requests that pods may get from here now.
    spare: Held,
    holder: Holder,
    /// What owners have said last, each on the stream that stands.
    offers: BTreeMap<Peer, Grant>,
    /// What holders have said last, likewise.
    claims: BTreeMap<Peer, Claim>,
    /// While it is the owner, by its own table.
    ledger: Option<Ledger>,
    /// What it had granted when it stopped being the owner, until another one acts.
    former: BTreeMap<Peer, Held>,
    /// Who was sent grants, and a claim.
    told: BTreeSet<Peer>,
    claimed: Option<Peer>,
}

/// What it holds of another owner.
#[derive(Debug, Default)]
struct Holder {
    follows: Option<Follows>,
    /// Slots it may use, those in use among them.
    held: Held,
    /// Of these, granted lately and not used yet: each may serve one request, however many others wait.
    fresh: u32,
    keep: Option<u32>,
    avoid: BTreeSet<SmolStr>,
}

#[derive(Debug)]
struct Follows {
    owner: Peer,
    epoch: u64,
    seen: u64,
}

/// What is to be said to others: the latest state, or `None` where there is nothing to say any more.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// To owners.
    pub claims: Vec<(Peer, Option<Claim>)>,
    /// To holders.
    pub grants: Vec<(Peer, Option<Grant>)>,
}

impl Slots {
    /// Knows of no pod and no other activator's word yet.
    pub fn new(revision: Name, view: Arc<View>) -> Self {
        Self {
            revision,
            view,
            limit: 0,
            ready: BTreeSet::new(),
            open: BTreeSet::new(),
            busy: Held::new(),
            waiting: 0,
            spare: Held::new(),
            holder: Holder::default(),
            offers: BTreeMap::new(),
            claims: BTreeMap::new(),
            ledger: None,
            former: BTreeMap::new(),
            told: BTreeSet::new(),
            claimed: None,
        }
    }

    // Events. After any of them: `settle`.

    /// Other activators are known now.
    pub fn on_view(&mut self, view: Arc<View>) {
        self.view = view;
    }

    /// The table says this of the revision.
    pub fn on_table(&mut self, limit: u32, ready: BTreeSet<SmolStr>) {
        (self.limit, self.ready) = (limit, ready);
    }

    /// So many requests wait, and these pods take requests.
    pub fn on_line(&mut self, waiting: u32, open: BTreeSet<SmolStr>) {
        (self.waiting, self.open) = (waiting, open);
    }

    /// So many requests wait.
    pub fn on_waiting(&mut self, waiting: u32) {
        self.waiting = waiting;
    }

    /// Requests that were at pods before there was a limit.
    pub fn on_busy(&mut self, busy: Held) {
        self.busy = busy;
    }

    /// A holder has said this; `None`: it has nothing to say any more.
    pub fn on_claim(&mut self, from: &Peer, claim: Option<Claim>) {
        match claim {
            Some(claim) => drop(self.claims.insert(from.clone(), claim)),
            None => drop(self.claims.remove(from)),
        }
    }

    /// An owner has said this; `None`: it has nothing to say any more.
    pub fn on_grant(&mut self, from: &Peer, grant: Option<Grant>) {
        match grant {
            Some(grant) => drop(self.offers.insert(from.clone(), grant)),
            None => drop(self.offers.remove(from)),
        }
    }

    /// A holder's stream has begun or ended: it may be another process by now, and says everything again.
    pub fn on_stream(&mut self, from: &Peer) {
        self.claims.remove(from);
        if let Some(ledger) = &mut self.ledger {
            ledger.recount(from);
        }
    }

    /// A request went to a pod that had a spare slot.
    pub fn took(&mut self, pod: &str) {
        add(&mut self.busy, pod, 1);
        subtract(&mut self.spare, pod);
        match &mut self.ledger {
            Some(ledger) => ledger.serve_own(),
            None => self.holder.fresh = self.holder.fresh.saturating_sub(1),
        }
    }

    /// A request has ended at a pod. Returns whether its slot is spare again, so that there is nothing to settle.
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

    /// Requests that the pod may get from here now.
    pub fn spare(&self, pod: &str) -> u32 {
        self.spare.get(pod).copied().unwrap_or(0)
    }

    /// Whether no other activator has a part in this.
    pub fn is_alone(&self) -> bool {
        self.view.known.is_empty() && self.ledger.as_ref().is_some_and(Ledger::is_alone)
    }

    /// Whether there is nothing to remember.
    pub fn is_void(&self) -> bool {
        let nothing = self.offers.is_empty() && self.claims.is_empty() && self.former.is_empty();
        let silent = self.told.is_empty() && self.claimed.is_none();
        nothing && silent && self.ledger.is_none() && self.busy.is_empty() && self.waiting == 0
    }

    /// Draws the consequences. `chance` names a new term: no two are alike.
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
        self.holder = Holder::default();
        let is_wanted = self.waiting > 0
            || !self.ready.is_empty()
            || self.claims.values().any(|claim| claim.need > 0);
        if self.ledger.is_none() && is_wanted {
            self.ledger = Some(Ledger::new(chance() | 1));
        }
        self.spare.clear();
        let Some(mut ledger) = self.ledger.take() else { return };
        if !ledger.acts() && !self.view.is_new {
            ledger.gather(&self.view, &self.claims, &self.former);
        }
        if ledger.acts() {
            self.former.clear();
            ledger.hear(&self.view, &self.claims);
            self.spare = ledger.distribute(&ledger::Demand {
                limit: self.limit,
                ready: &self.ready,
                open: &self.open,
                busy: &self.busy,
                waiting: self.waiting,
                claims: &self.claims,
            });
        }
        let is_over = ledger.acts() && !is_wanted && ledger.granted() == 0;
        self.ledger = (!is_over).then_some(ledger);
    }

    // --- as holder

    fn follow(&mut self, owner: &Peer) {
        if let Some(ledger) = self.ledger.take() {
            ledger.hand_over(&mut self.former);
            self.rest();
        }
        if self.holder.follows.as_ref().is_some_and(|it| it.owner != *owner) {
            self.rest();
        }
        if let Some(offer) = self.offers.get(owner).cloned() {
            self.take_in(owner, offer);
        } else {
            self.rest();
        }
        self.give_back();
        self.spare = idle(&self.holder.held, &self.busy);
    }

    /// Follows none: only what is in use is kept.
    fn rest(&mut self) {
        self.holder = Holder { held: self.busy.clone(), ..Holder::default() };
    }

    fn take_in(&mut self, owner: &Peer, offer: Grant) {
        let Grant { epoch, number, held, keep, acts } = offer;
        match &mut self.holder.follows {
            Some(it) if it.epoch == epoch => {
                if number > it.seen {
                    it.seen = number;
                    self.holder.held = most(held, &self.busy);
                    self.holder.fresh = sum(&self.holder.held) - sum(&self.busy);
                }
            }
            // Nothing of an earlier grant is taken up again: it may have been given back.
            Some(_) | None => {
                self.rest();
                self.holder.follows = Some(Follows { owner: owner.clone(), epoch, seen: number });
            }
        }
        self.holder.keep = keep;
        if acts {
            self.former.clear();
        }
    }

    /// Gives back what is idle and of no use here, or wanted elsewhere.
    fn give_back(&mut self) {
        let Self { holder, busy, open, waiting, .. } = self;
        holder.avoid.retain(|pod| !open.contains(pod));
        for pod in idle(&holder.held, busy).into_keys() {
            if !open.contains(&pod) {
                holder.held.remove(&pod);
                if let Some(slots) = busy.get(&pod) {
                    holder.held.insert(pod.clone(), *slots);
                }
                holder.avoid.insert(pod);
            }
        }
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

    // --- what is said

    /// What others are to be told now. Call it after each [`settle`](Self::settle).
    pub fn said(&mut self) -> Said {
        let mut said = Said::default();
        if let Some(ledger) = &self.ledger {
            for peer in &self.view.known {
                said.grants.push((peer.clone(), Some(ledger.grant(peer))));
            }
        }
        let told: BTreeSet<Peer> = said.grants.iter().map(|(peer, _)| peer.clone()).collect();
        let gone = self.told.difference(&told).map(|peer| (peer.clone(), None));
        said.grants.extend(gone.collect::<Vec<_>>());
        self.told = told;

        let claim = self.claim();
        let now = claim.as_ref().map(|(owner, _)| owner.clone());
        if let Some(before) = self.claimed.take().filter(|it| Some(it) != now.as_ref()) {
            said.claims.push((before, None));
        }
        said.claims.extend(claim.map(|(owner, claim)| (owner, Some(claim))));
        self.claimed = now;
        said
    }

    fn claim(&self) -> Option<(Peer, Claim)> {
        let owner = self.view.owner(&self.revision);
        if *owner == self.view.own {
            return None;
        }
        let Holder { follows, held, avoid, .. } = &self.holder;
        let (epoch, seen) = follows.as_ref().map_or((0, 0), |it| (it.epoch, it.seen));
        let need = sum(held).saturating_add(self.waiting);
        if epoch == 0 && need == 0 && self.former.is_empty() {
            return None;
        }
        let acts = self.offers.get(owner).is_some_and(|it| it.acts);
        let known = if acts { BTreeSet::new() } else { self.view.connected.clone() };
        let (held, avoid, former) = (held.clone(), avoid.clone(), self.former.clone());
        Some((owner.clone(), Claim { epoch, seen, held, need, avoid, former, known }))
    }
}

fn sum(all: &Held) -> u32 {
    all.values().fold(0, |sum, slots| sum.saturating_add(*slots))
}

fn add(all: &mut Held, pod: &str, slots: u32) {
    match all.get_mut(pod) {
        Some(it) => *it += slots,
        None => drop(all.insert(pod.into(), slots)),
    }
}

fn subtract(all: &mut Held, pod: &str) {
    if let Some(slots) = all.get_mut(pod) {
        *slots -= 1;
        if *slots == 0 {
            all.remove(pod);
        }
    }
}

/// The greater of both for each pod.
fn most(mut one: Held, other: &Held) -> Held {
    for (pod, slots) in other {
        let it = one.entry(pod.clone()).or_default();
        *it = (*it).max(*slots);
    }
    one
}

/// What is held and not in use.
fn idle(held: &Held, busy: &Held) -> Held {
    let of = |(pod, slots): (&SmolStr, &u32)| {
        let idle = slots.saturating_sub(busy.get(pod).copied().unwrap_or(0));
        (idle > 0).then(|| (pod.clone(), idle))
    };
    held.iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests;
