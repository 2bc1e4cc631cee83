//! Fuzz target that compares HTTP/1 parsers, see `streams::targets::h1_differential`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| streams::targets::check("h1_differential", bytes));
