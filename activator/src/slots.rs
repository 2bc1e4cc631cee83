//! Shell: slots of Revisions with a hard limit, which the activators share.
//!
//! A module belongs here if it decides about slots, or keeps messages for the other activators. The streams to
//! them are in [`peer_streams`](crate::peer_streams).
//!
//! | module | subject |
//! |---|---|
//! | [`revision_slots`] | pure: slots of one Revision at one activator, as holder or as owner |
//! | `ledger`, `slot_counts` | pure: an owner's ledger of slots and holders; arithmetic on numbers of slots |
//! | [`peer_view`] | pure: activators as one of them sees them, and the owner of each Revision |
//! | [`peers`] | the other activators, and the claims and grants for them |

pub(crate) mod ledger;
pub mod peer_view;
pub mod peers;
pub mod revision_slots;
pub(crate) mod slot_counts;
