//! Pure: cluster state → plans, routes, and keys of the objects that may have to be written.
//!
//! Decisions live here, with time and random values as arguments. The bodies of objects are built in
//! [`write`](crate::write), with one exception: the conditions of a Service depend on the hash of its children, so
//! [`service_children`] builds and hashes them.

pub mod active_autoscaler;
pub mod host_names;
pub mod machine;
pub mod node_binding;
pub mod part_keys;
pub mod plan;
pub mod pod_placement;
pub mod retention;
pub mod service_children;
pub mod topology_hints;
pub mod wake_zone;
