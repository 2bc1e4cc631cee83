//! Shell: requests that this node's pods have served: reports to the autoscaler, and totals of Revisions.
//!
//! A module belongs here if it turns the counters of the eBPF programs into reports or metrics. Counters that decide
//! about one pod, such as its requests in flight before it stops, are read by the loop for `pods/`.
//!
//! | module | subject |
//! |---|---|
//! | [`usage_reporter`], [`growth_throttle`] | usage report of each pod; pure: pace of reports of growth |
//! | [`revision_totals`] | pure: totals of each Revision over its pods, also over those that are gone |
//! | [`revision_totals_store`] | reads pods' rows, and stores what has to outlive the agent |
//! | [`revision_metrics`] | the totals as Prometheus metrics |

pub(crate) mod growth_throttle;
pub(crate) mod revision_metrics;
pub(crate) mod revision_totals;
pub(crate) mod revision_totals_store;
pub(crate) mod usage_reporter;
