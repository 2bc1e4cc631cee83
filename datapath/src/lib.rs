//! Layouts and functions that the eBPF programs run or write, and that user space runs or reads, too.
//!
//! Everything here is `no_std`, allocates nothing and passes the kernel's verifier. Unit tests and reference
//! implementations judge it in user space. A type that no eBPF program uses belongs elsewhere.
//!
//! | module | used by | content |
//! |---|---|---|
//! | [`abi`] | eBPF programs, agent | map keys, values, capacities |
//! | [`load_balancing`] | eBPF programs, unit tests | choice of a backend, packing of map words |
//! | [`h1`] | eBPF programs, unit tests | HTTP/1.1 message boundaries |
//! | [`h2`] | eBPF programs, unit tests | HTTP/2 frames and streams |
//! | [`opaque_estimate`] | eBPF programs, unit tests | opaque estimate of requests |
//! | [`close_position`] | eBPF programs, unit tests | comparison of a client's socket with a reported position |
//! | [`words`] | eBPF programs, unit tests | unaligned words, and numbers of which the verifier knows nothing |
//!
//! Layers, lowest first: `words`, `load_balancing` and `opaque_estimate`; `h1`; `h2` and `abi`; `close_position`. A
//! module imports from its own layer and from lower ones.
#![cfg_attr(not(any(feature = "user", test)), no_std)]
#![warn(missing_docs)]

pub mod abi;
pub mod close_position;
pub mod h1;
pub mod h2;
pub mod load_balancing;
pub mod opaque_estimate;
pub mod words;
