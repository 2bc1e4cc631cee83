//! Pure: messages between activators about the slots of a Revision with a hard limit.
//!
//! A slot is a permit for one request at one pod. Each Revision has one owner among the activators, which grants its
//! slots; the holders use those that they were granted. Either side always sends its whole state of a Revision, so a
//! message that is lost, repeated or late changes nothing.

use std::collections::{BTreeMap, BTreeSet};

use smol_str::SmolStr;

use super::{ComponentReplica, NamespacedName};

/// Number of slots by the uid of their pod; never 0.
pub type SlotsByPod = BTreeMap<SmolStr, u32>;

/// State of a holder for one Revision, sent to the owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotClaim {
    /// Term of the owner that the holder follows; 0: none yet. In that term it grants nothing of the Revision itself,
    /// and uses no slot beyond `held` except those granted in the term.
    pub owner_term: u64,
    /// Number of the latest grant of that term that the holder has applied.
    pub applied_grant: u64,
    /// Slots that the holder may use since that grant: those in use, and those it keeps idle.
    pub held: SlotsByPod,
    /// Slots that the holder could use: those held, and one for each request that waits.
    pub needed: u32,
    /// Pods that the holder cannot use: it does not know them as ready, or they refuse it.
    pub unusable_pods: BTreeSet<SmolStr>,
    /// Slots that the holder had granted to others when it last was the owner; empty once another owner acts.
    pub former_grants: BTreeMap<SmolStr, SlotsByPod>,
    /// Activators that have a stream to the holder, and therefore live. Sent while its owner does not act yet.
    pub live_activators: BTreeSet<SmolStr>,
}

/// State of an owner for one Revision and one holder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotGrant {
    /// Term of the owner, which orders successive owners.
    pub owner_term: u64,
    /// Number of the grant, which grows with each grant to this holder within the term.
    pub grant_number: u64,
    /// Total slots of the holder by this grant. It loses none of those that are in use.
    pub held: SlotsByPod,
    /// Set while other holders wait: the holder returns idle slots, and those beyond this number as their requests end.
    pub keep_limit: Option<u32>,
    /// True if every known activator follows the owner, which therefore knows what was granted before its term.
    pub is_acting: bool,
}

/// One item of a stream from a holder. The first names the sender.
#[derive(Clone, Debug, PartialEq)]
pub enum SlotClaimItem {
    /// Activator that sends the claims.
    Sender(ComponentReplica),
    /// State of the holder for a Revision.
    Claim(NamespacedName, SlotClaim),
    /// The holder has no state for the Revision any more.
    Removed(NamespacedName),
    /// The holder has named every Revision.
    Synced,
    /// The holder ends, and has no request at any pod.
    Goodbye,
}

/// One item of a stream to a holder.
#[derive(Clone, Debug, PartialEq)]
pub enum SlotGrantItem {
    /// State of the owner for a Revision.
    Grant(NamespacedName, SlotGrant),
    /// The owner has no state for the Revision any more.
    Removed(NamespacedName),
    /// The owner has named every Revision.
    Synced,
}
