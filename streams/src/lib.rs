//! Generated streams of HTTP, and a comparison of the eBPF parsers with other implementations.
//!
//! Tests only; nothing that is shipped links this crate. Its tests play hundreds of thousands of streams, different
//! ones in each run. The targets of `fuzz/` play the inputs of a fuzzer. A stream that ever failed stays in
//! `fuzz/corpus`, from where the tests play it again.
//!
//! | module | what |
//! |---|---|
//! | [`rng`] | random numbers from a seed |
//! | [`segmentation`] | cuts a stream; pieces arrive late, twice, or in another order |
//! | [`ebpf_model`] | model of the eBPF programs: the one file that drives the parsers |
//! | [`memory_io`] | one end of a connection over memory |
//! | [`h1`] | HTTP/1.1: streams, hyper's server and client, a reference written from RFC 9112 |
//! | [`h2`] | HTTP/2: frames, crate h2's server and client, a reference written from RFC 9113 |
//! | [`totals`] | counts over the streams played: responses, refused, not compared, crowded |
//! | [`targets`] | functions that `fuzz/` and the tests call |
//! | [`bulk_runs`], [`shrink`] | a hundred thousand streams, and the shortest form of one that fails |
#![warn(missing_docs)]
#![forbid(unsafe_code)]

pub mod bulk_runs;
pub mod ebpf_model;
pub mod h1;
pub mod h2;
pub mod memory_io;
pub mod rng;
pub mod segmentation;
pub mod shrink;
pub mod targets;
pub mod totals;
