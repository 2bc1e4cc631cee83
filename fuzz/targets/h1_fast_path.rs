//! Fuzz target of the fast path of HTTP/1.1: what it takes is the same on the general path, see
//! `activator::edge::plain_request::check` and `activator::edge::plain_response::check`.
#![no_main]

use activator::edge::{plain_request, plain_response};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    plain_request::check(bytes);
    plain_response::check(bytes);
});
