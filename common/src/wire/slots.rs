//! Pure: what activators say to each other of the slots of a revision with a hard limit.
//!
//! A slot is room for one request at one pod. Each revision has one owner among the activators, which grants its slots;
//! the others hold what they were granted. Either side always says its whole state of a revision, so that a
//! message that is lost, repeated or late changes nothing.

use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;

use super::{Name, Subscriber};

/// Slots by the uid of their pod; never 0.
pub type Held = BTreeMap<SmolStr, u32>;

/// What a holder says to the owner of a revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// The owner's term that it follows: it grants nothing of the revision itself, and uses no slot beyond `held` but
    /// what is granted in that term. 0: it follows none yet.
    pub epoch: u64,
    /// The latest grant of that term it has taken in.
    pub seen: u64,
    /// Slots it may use since that grant: those in use, and what it keeps besides.
    pub held: Held,
    /// Slots it could use: those held, and one for each request that waits.
    pub need: u32,
    /// Pods it can do nothing with: it does not know them as ready, or they refuse it.
    pub avoid: BTreeSet<SmolStr>,
    /// What it had granted to others when it last was the owner itself; empty once another owner acts.
    pub former: BTreeMap<SmolStr, Held>,
    /// Activators that have a stream to it, while its owner does not act yet: these live.
    pub known: BTreeSet<SmolStr>,
}

/// What an owner says to a holder of a revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// Its term as owner.
    pub epoch: u64,
    /// Grows with each grant to this holder within the term.
    pub number: u64,
    /// Slots the holder has by this grant, all in all. Of those that it has in use it loses none.
    pub held: Held,
    /// Others wait: the holder gives back what is idle, and beyond so many slots each as its request ends.
    pub keep: Option<u32>,
    /// Everybody follows the owner: what was granted before its term is known to it.
    pub acts: bool,
}

/// One step of a stream from a holder. The first names the sender.
#[derive(Clone, Debug, PartialEq)]
pub enum ClaimItem {
    /// Who holds.
    Sender(Subscriber),
    /// Its state of a revision.
    Claim(Name, Claim),
    /// It has nothing to say of the revision any more.
    Gone(Name),
    /// Every revision has been named.
    Synced,
    /// It ends, and no request of its own is at any pod.
    Bye,
}

/// One step of a stream to a holder.
#[derive(Clone, Debug, PartialEq)]
pub enum GrantItem {
    /// The owner's state of a revision.
    Grant(Name, Grant),
    /// The owner has nothing to say of the revision any more.
    Gone(Name),
    /// Every revision has been named.
    Synced,
}
