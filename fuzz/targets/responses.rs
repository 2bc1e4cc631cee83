//! Fuzz target of HTTP/1 responses at the activator, see `activator::h1::check`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| activator::h1::check(bytes));
