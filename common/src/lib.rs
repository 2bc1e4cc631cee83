//! Types and functions that two components of Rouse must agree on.
//!
//! A type belongs to this crate when two components exchange it, and for no other reason. Only `link`, `log`, `probe`,
//! `tls` and `admin` (feature `shell`) do I/O; every component would otherwise repeat them.
//!
//! | module | between | content |
//! |---|---|---|
//! | [`abi`] | eBPF programs, agent | map keys, values, capacities |
//! | [`flow`] | eBPF programs, unit tests | choice of a backend, packing of map words |
//! | [`h1`] | eBPF programs, unit tests | HTTP/1.1 message boundaries |
//! | [`h2`] | eBPF programs, unit tests | HTTP/2 frames and streams |
//! | [`turns`] | eBPF programs, unit tests | opaque estimate of requests |
//! | [`wire`] | user-space components | the four messages |
//! | [`node`] | controller, local node | pods to run and their status |
//! | [`outbox`] | sender and stream | latest state by subject |
//! | [`probe`] | agent, local node | one attempt of a probe over the network |
//! | [`request_log`] | controller, activator | the line of a finished request |
//! | [`replicas`] | user-space components | addresses of a component's replicas, choice of the next one to try |
//! | [`link`] | user-space components | opening, keeping and serving of streams |
//! | [`log`] | components, the process that runs them | log levels |
//! | [`tls`] | user-space components | identities and encryption |
//! | [`admin`] | user-space components, operators | health, readiness, metrics |
#![cfg_attr(not(any(feature = "user", test)), no_std)]
#![warn(missing_docs)]

pub mod abi;
#[cfg(feature = "shell")]
pub mod admin;
pub mod flow;
pub mod h1;
pub mod h2;
#[cfg(feature = "shell")]
pub mod link;
#[cfg(feature = "shell")]
pub mod log;
#[cfg(feature = "user")]
pub mod node;
#[cfg(feature = "user")]
pub mod outbox;
#[cfg(feature = "shell")]
pub mod probe;
#[cfg(feature = "user")]
pub mod replicas;
#[cfg(feature = "user")]
pub mod request_log;
#[cfg(feature = "shell")]
pub mod tls;
pub mod turns;
#[cfg(feature = "user")]
pub mod wire;
