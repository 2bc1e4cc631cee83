//! Activators on loopback. They are one program, since each program would build HTTP and the harness again. Tests that
//! take a minute are programs of their own, which run at the same time.

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
