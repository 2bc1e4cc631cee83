//! Fuzz target of the PROXY protocol's headers, see `activator::edge::proxy_protocol::check`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| activator::edge::proxy_protocol::check(bytes));
