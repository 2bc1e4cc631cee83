//! The local tier: a node of the test's own. Needs root; run by `cargo xtask test --tier local`.

mod bad_input;
mod client_pools;
mod clock_changes;
mod component_restarts;
mod container_logs;
mod digests;
mod gateway;
mod h2spec;
mod image_layers;
mod misbehaving_clients;
mod namespaces;
mod node_restarts;
mod pods;
mod raw_tcp;
mod registry;
mod service_lifecycle;
mod standby;
mod tls;
