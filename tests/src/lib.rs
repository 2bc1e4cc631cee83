//! What the tiers share.

pub mod node;
