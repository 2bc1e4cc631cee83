//! See `activator::proxy_protocol::check`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| activator::proxy_protocol::check(bytes));
