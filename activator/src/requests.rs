//! Shell: requests, from their arrival to the end of their responses.
//!
//! A module belongs here if it handles one request with its client and its pod together.
//!
//! | module | subject |
//! |---|---|
//! | [`forwarder`] | one request, or raw TCP connection: its route, its way to a pod, and the response |
//! | `fast_route` | route of plain requests on the fast path |
//! | `pending_request` | stages of a request |
//! | `route_choice` | choice of the service and the Revision |
//! | [`request_timer`] | timeouts of a request |
//! | [`response_body`], [`watched_body`] | body of a response; the same, with a watch on its client |
//! | [`upgraded_connection`], [`upgraded_client`] | upgraded connections; their client's side |
//! | [`stream_tasks`] | tasks of the streams of clients' HTTP/2 connections |
//! | `tcp_relay`, `splice_pipes` | bytes of raw TCP connections; pipes through which many of them pass |
//! | `tls_relay` | bytes of raw TCP connections whose TLS the gateway ends |
//! | `tcp_failure_log` | pure: choice of the log lines about TCP connections that no pod took |
//! | [`request_log`] | a log line of each finished request |
//! | [`request_observers`] | what is recorded of one request: log line, spans, metrics |

pub(crate) mod fast_route;
pub mod forwarder;
pub(crate) mod pending_request;
pub mod request_log;
pub mod request_observers;
pub mod request_timer;
pub mod response_body;
pub(crate) mod route_choice;
pub(crate) mod splice_pipes;
pub mod stream_tasks;
pub(crate) mod tcp_failure_log;
pub(crate) mod tcp_relay;
pub(crate) mod tls_relay;
pub mod upgraded_client;
pub mod upgraded_connection;
pub mod watched_body;
