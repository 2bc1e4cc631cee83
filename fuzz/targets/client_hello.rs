//! Fuzz target of the reader of ClientHellos, see `activator::tls::client_hello::check`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| activator::tls::client_hello::check(bytes));
