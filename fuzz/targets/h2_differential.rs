//! Fuzz target that compares HTTP/2 parsers, see `streams::targets::h2_differential`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| streams::targets::check("h2_differential", bytes));
