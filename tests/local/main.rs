//! The local tier: a node of the test's own. Needs root; run by `cargo xtask test local`.

mod node;
mod registry;
