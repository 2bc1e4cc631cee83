//! Fuzz target of arbitrary HTTP/2 segments, see `streams::targets::h2`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| streams::targets::check("h2", bytes));
