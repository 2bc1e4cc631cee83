//! Shell: the controller's contact with clock, disk, network, API server and registries.
//!
//! Tasks, locks and connections live here, with the pure cores that only they use, such as the write queue. All other
//! layers are pure and import nothing from this one.

pub mod admin;
pub mod api;
pub mod config;
pub mod grpc_services;
pub mod identity;
pub mod image_digests;
pub mod local_files;
pub mod local_node;
pub mod metrics;
pub mod platform;
pub mod runtime;
pub mod webhook;
