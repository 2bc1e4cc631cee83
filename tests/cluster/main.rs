//! The cluster tier: a real Kubernetes. Needs root; run by `cargo xtask test --tier cluster`.
//!
//! Tests below `install`, `ours` and `paths` need a cluster that xtask made; those below `kn` need Knative's client.

mod install;
mod kn;
mod ours;
mod paths;
mod plain;
