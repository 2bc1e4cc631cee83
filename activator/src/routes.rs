//! Shell: the RouteTable, as requests look it up.
//!
//! A module belongs here if it searches services or Revisions, or goes through all of them.
//!
//! | module | subject |
//! |---|---|
//! | [`agent_reports`] | pure: pods that agents report as ready |
//! | [`index`], `index_entries` | indexes by port, host and name; keys of their entries |
//! | `gateway_rules` | pure: rules of the Gateway API for the requests of one host |
//! | [`match_rules`] | pure: rules by which a request finds its service |
//! | `path_replacement` | pure: the path that such a rule puts in place of a request's |
//! | [`path_match`], `ruled_hosts` | pure: choice among the path prefixes of a host; hosts with path rules or wildcards |
//! | [`service`], [`service_match`] | a service; the match of a request to it |
//! | [`revision_metrics`] | gauges of the Revisions, computed for each scrape |

pub mod agent_reports;
pub(crate) mod gateway_rules;
pub mod index;
pub(crate) mod index_entries;
pub mod match_rules;
pub mod path_match;
pub(crate) mod path_replacement;
pub mod revision_metrics;
pub(crate) mod ruled_hosts;
pub mod service;
pub mod service_match;
