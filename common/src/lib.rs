//! Types and functions that two components of Rouse must agree on.
//!
//! A type belongs to this crate when two components exchange it. The only exception is [`once_signal`]. Only `link`, `log`,
//! `probe`, `thaw_query`, `tls`, `enrollment`, `http_server`, `page_body` and `admin` do I/O; every component would
//! otherwise repeat them.
//!
//! | module | between | content |
//! |---|---|---|
//! | [`wire`] | user-space components | the messages |
//! | [`component`] | all | the components of Rouse |
//! | [`certificates`] | controller, activator | certificates of hosts: PEM and checks |
//! | [`local_node`] | controller, local node | pods to run and their status |
//! | [`outbox`] | sender and stream | latest state by subject |
//! | [`probe`] | agent, local node | one attempt of a probe over the network |
//! | [`decimal`] | all | numbers of digits only |
//! | [`quantity`] | controller, local node | amounts of CPU and memory, as Kubernetes writes them |
//! | [`request_log`] | controller, activator | the line of a finished request |
//! | [`standby_watch`], [`thaw_query`] | agent, activator | check that a pod was thawed for them; query of its agent |
//! | [`service_routing`] | agent, activator, controller | endpoints of a Kubernetes Service for one node; hints |
//! | [`replicas`] | user-space components | addresses of a component's replicas, choice of the next one to try |
//! | [`link`] | user-space components | opening, keeping and serving of streams |
//! | [`log`] | components, the process that runs them | log levels |
//! | [`once_signal`] | tasks of one component | an event that happens once |
//! | [`tls`] | user-space components | identities and encryption |
//! | [`enrollment`] | user-space components, controller | requests of a certificate |
//! | [`http_server`] | components, their HTTP clients | HTTP server with bounds on connections and time |
//! | [`page_body`] | agent, activator, their HTTP clients | bodies of large pages |
//! | [`url_query`] | agent, activator, their HTTP clients | values in the query of a URL |
//! | [`admin`] | user-space components, operators | health, readiness, metrics |
//! | `fixtures` | tests and benchmarks | entries of a RouteTable; certificates |
#![warn(missing_docs)]

pub mod admin;
pub mod certificates;
pub mod component;
pub mod decimal;
pub mod enrollment;
#[cfg(any(test, feature = "fixtures"))]
pub mod fixtures;
pub mod http_server;
pub mod link;
pub mod local_node;
pub mod log;
pub mod once_signal;
pub mod outbox;
pub mod page_body;
pub mod probe;
pub mod quantity;
pub mod replicas;
pub mod request_log;
pub mod service_routing;
pub mod standby_watch;
pub mod thaw_query;
pub mod tls;
pub mod url_query;
pub mod wire;
