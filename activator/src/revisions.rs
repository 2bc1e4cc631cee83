//! Shell: Revisions at this activator: their wait queues, their pods and their permits.
//!
//! A module belongs here if it decides which request goes to which pod, and when. Requests themselves are above.
//!
//! | module | subject |
//! |---|---|
//! | [`route_settings`] | pure: settings and pods of a Revision in the RouteTable |
//! | [`wait_queue`], [`balance`] | pure: the wait queue; choice of the pod and of the Revision |
//! | [`revision`] | one Revision: its queue, its pods, its slots, and the permits of its requests |
//! | [`revision_snapshot`] | pure: a Revision at one moment, for pages |
//! | [`usage_reporter`] | reports of waiting requests to the autoscaler |

pub mod balance;
pub mod revision;
pub mod revision_snapshot;
pub mod route_settings;
pub mod usage_reporter;
pub mod wait_queue;
