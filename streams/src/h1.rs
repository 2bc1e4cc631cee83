//! Pure: HTTP/1.1: generated streams, and their reading by other implementations.

pub mod client;
pub mod judge;
mod message;
pub mod reference;
pub mod requests;
pub mod responses;
pub mod server;
pub mod service;
pub mod simulated;
