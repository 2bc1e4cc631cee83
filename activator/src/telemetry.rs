//! Shell: spans and metrics of requests, and their export to collectors of OpenTelemetry.
//!
//! A module belongs here if it knows the form of spans or of request metrics, or sends them. It decides nothing about a
//! request.
//!
//! | module | subject |
//! |---|---|
//! | [`trace_context`] | pure: place of a request in its trace, by W3C Trace Context |
//! | [`span`] | pure: spans in the form of OTLP |
//! | [`request_rows`] | pure: request metrics by host and Revision, with a bound on the rows |
//! | [`otlp_metrics`] | pure: these rows in the form of OTLP |
//! | [`collector_client`] | one message to a collector, by either protocol |
//! | [`recorder`] | settings in force, the queue of spans, and the tasks that export |
//! | [`request_metrics`] | the rows on the page `/metrics` |

pub mod collector_client;
pub mod otlp_metrics;
pub mod recorder;
pub mod request_metrics;
pub mod request_rows;
pub mod span;
pub mod trace_context;
