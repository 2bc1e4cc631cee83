//! What two parts of Rouse must agree on.
//!
//! A type enters this crate when two parts exchange it, and for no other reason. Nothing here does I/O
//! but `link`, `log`, `probe` and `admin` (feature `shell`), which every part would otherwise repeat.
//!
//! | module | between | what |
//! |---|---|---|
//! | [`abi`] | kernel half, agent | map keys, values, capacities |
//! | [`flow`] | kernel half, unit tests | packet and choice arithmetic |
//! | [`h1`] | kernel half, unit tests | HTTP/1.1 message boundaries |
//! | [`wire`] | user-space parts | the four messages |
//! | [`node`] | controller, local node | pods to run and how they fare |
//! | [`outbox`] | sender and stream | latest state by subject |
//! | [`probe`] | agent, local node | one try of a probe over the network |
//! | [`request_log`] | controller, activator | the line of a finished request |
//! | [`replicas`] | user-space parts | where the replicas of a part are, and which to try next |
//! | [`link`] | user-space parts | the one way a stream is opened, kept and served |
//! | [`log`] | parts, whoever runs them | how much is logged |
//! | [`tls`] | user-space parts | who is who, and that nobody listens in |
//! | [`admin`] | user-space parts, operators | health, readiness, metrics |
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
