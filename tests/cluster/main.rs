//! The cluster tier: tests on a real Kubernetes. Needs root; run by `cargo xtask test --tier cluster`.
//!
//! Tests in `baseline` run on any cluster, those in `kn` need Knative's client and those in `gateway_conformance`
//! upstream's suite. All but the first need a cluster that xtask made.

mod api_client;
mod baseline;
mod clusterip;
mod concurrency_limit;
mod deletion;
mod error_conditions;
mod examples;
mod faults;
mod gateway_api;
mod gateway_conformance;
mod gateway_ports;
mod install;
mod installation_rounds;
mod ip_families;
mod kn;
mod kube_proxy_comparison;
mod local_tls;
mod mixed_load;
mod network_paths;
mod network_policies;
mod other_ingresses;
mod path_rules;
mod pod_binding;
mod pod_termination;
mod probes;
mod requested_certificates;
mod revision_gc;
mod runtime_contract;
mod scaled_services;
mod service_lifecycle;
mod sidecars;
mod standby;
mod third_party_manifests;
mod tls;
mod upgrade;
mod wake_zone;
mod without_kube_proxy;
mod xtask_cluster;
mod zoned_nodes;
