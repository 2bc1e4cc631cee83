//! The local tier: a node of the test's own. Needs root; run by `cargo xtask test local`.

mod bad_input;
mod bad_input_http;
mod clock;
mod digests;
mod gateway;
mod images;
mod logs;
mod node;
mod registry;
mod restarts;
mod story;
