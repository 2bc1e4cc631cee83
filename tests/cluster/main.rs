//! The cluster tier: tests on a real Kubernetes. Needs root; run by `cargo xtask test --tier cluster`.
//!
//! Tests in `plain` run on any cluster, those in `kn` need Knative's client, and all others need a cluster that xtask
//! made.

mod again;
mod binding;
mod collected;
mod contract;
mod deleted;
mod examples;
mod families;
mod faults;
mod flooded;
mod install;
mod kn;
mod limits;
mod network_policies;
mod ours;
mod paths;
mod plain;
mod probes;
mod shapes;
mod sidecars;
mod stopping;
mod story;
mod trouble;
mod upgrade;
