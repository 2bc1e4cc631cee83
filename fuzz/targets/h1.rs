//! Fuzz target of arbitrary HTTP/1 segments, see `streams::targets::h1`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| streams::targets::check("h1", bytes));
