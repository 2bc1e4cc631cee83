//! Pure: HTTP/1.1: made-up streams, and others' views of them.

pub mod client;
pub mod judge;
mod message;
pub mod reference;
pub mod requests;
pub mod responses;
pub mod server;
pub mod service;
pub mod simulated;
