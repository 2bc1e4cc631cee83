//! Activators on loopback. One program, since each would build HTTP and the harness once more; those that take a minute are
//! programs of their own, which run beside it.

mod answers;
mod attacks;
mod faults;
mod forward;
#[path = "../h2c/mod.rs"]
mod h2c;
#[path = "../harness/mod.rs"]
mod harness;
mod hosts;
mod http2;
mod inputs;
mod limits;
mod links;
mod matrix;
mod messages;
#[path = "../parts/mod.rs"]
mod parts;
mod paths;
mod proxies;
mod request_log;
mod routes;
mod stopping;
