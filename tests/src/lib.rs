//! Helpers that the test tiers share: clients, load, clusters, local nodes and images.

pub mod client;
pub mod clock;
pub mod cluster;
pub mod exchange;
pub mod features;
pub mod flood;
pub mod folder;
pub mod installed;
pub mod left;
pub mod mounted;
pub mod node;
pub mod node_load;
pub mod parts;
pub mod requests;
pub mod rouse;
pub mod tunnel;
pub mod wait;
