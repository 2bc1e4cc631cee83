//! Pure: the activators as one of them sees them, and the owner of each Revision by that view.

use std::collections::BTreeSet;

use common::wire::NamespacedName;
use smol_str::SmolStr;

/// Name of an activator.
pub type ActivatorName = SmolStr;

/// Set of activators, as one of them sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerView {
    /// Name of the activator whose view it is.
    pub own_name: ActivatorName,
    /// Activators that the RouteTable lists, without those that have announced their end.
    pub listed: BTreeSet<ActivatorName>,
    /// Other activators that may be alive: listed, connected, or either of them until a moment ago.
    pub alive: BTreeSet<ActivatorName>,
    /// Subset of `alive` that has a stream to this activator.
    pub connected: BTreeSet<ActivatorName>,
    /// True for some time after this activator has received its first RouteTable. An older table may still be in force
    /// at another activator, and list activators that this one cannot know.
    pub is_new_activator: bool,
}

impl PeerView {
    /// Owner of a Revision by this view: the listed activator with the highest rank for this Revision. While none is
    /// listed, the owner is one of those that are alive.
    pub fn owner(&self, revision: &NamespacedName) -> &ActivatorName {
        let candidates =
            self.alive.iter().chain([&self.own_name]).filter(|_| self.listed.is_empty());
        let all = self.listed.iter().chain(candidates);
        all.max_by_key(|peer| (owner_rank(revision, peer), *peer)).unwrap_or(&self.own_name)
    }
}

/// Returns the activators of the table that have not ended; or all of them, if all have ended. An activator that is not
/// listed itself then waits for the next table, as others in the same situation do.
pub fn without_ended(
    listed: &BTreeSet<ActivatorName>,
    ended: &BTreeSet<ActivatorName>,
) -> BTreeSet<ActivatorName> {
    if listed.is_subset(ended) { listed.clone() } else { listed - ended }
}

/// Rank of an activator for a Revision, by rendezvous hashing. It is the same in every process.
fn owner_rank(revision: &NamespacedName, peer: &str) -> u64 {
    let parts = [&*revision.namespace, "/", &*revision.name, "\0", peer];
    let bytes = parts.into_iter().flat_map(str::bytes);
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let mixed = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
