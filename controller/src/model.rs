//! Pure: vocabulary of the controller, and everything that it has observed.
//!
//! Types, their parsers and small readers live here: kinds and keys of objects, Knative's objects, settings, and the
//! cluster state. Nothing here reads a whole object, decides, or builds a body; the other layers import this one.

pub mod cluster_state;
pub mod config_maps;
pub mod go_values;
pub mod knative;
pub mod network_policies;
pub mod object;
pub mod problem;
pub mod reporters;
pub mod rollout;
pub mod scale_policy;
pub mod standby_obstacle;
pub mod standby_policy;
pub mod zone_shares;
