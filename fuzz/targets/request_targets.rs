//! Fuzz target of requests on their way to hyper, see `activator::clients::request_targets::check`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| activator::clients::request_targets::check(bytes));
