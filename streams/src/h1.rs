//! Pure: HTTP/1.1: generated streams, and their reading by other implementations.

pub mod client;
pub mod event_check;
mod message;
pub mod reference;
pub mod requests;
pub mod responses;
pub mod server;
pub mod simulated_app;
pub mod simulated_server;
