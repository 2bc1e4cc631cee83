//! Shell: the pods of this node: search, registration, readiness and end.
//!
//! A module belongs here if it finds a pod, decides about its state, or serves requests in its network namespace.
//! Scans of many sockets for one purpose belong to `connections/`.
//!
//! | module | subject |
//! |---|---|
//! | [`types`] | pure: facts, events and actions of the pods' state machine |
//! | [`tracker`], [`readiness`] | pure: state of each pod and the actions that follow from it; readiness of one pod |
//! | [`standby`] | pure: freezes and thaws of one pod with a standby order |
//! | `registry`, `pod_slots` | pure: pods that the kernel's maps hold; row of each in the kernel's counters |
//! | `pod_ports` | pure: ports of a pod at which connections count |
//! | [`finder`], `finder_queue` | search by cgroups; the queue of commands to it |
//! | `idle_positions`, [`idle_connections`] | pure: positions of idle connections; their way to clients' nodes |
//! | `processes` | processes of a cgroup, their network namespaces, and sessions among them |
//! | `standby_facts` | facts about a pod with a standby order that the kernel's maps do not have |
//! | [`namespace`], `upgraded_connections` | facts of a network namespace; count of upgraded connections in it |
//! | [`pod_server`] | pod server: the port in each pod's namespace that the kubelet and other nodes' agents call |
//! | [`probe_marks`] | marks of probes in the kernel, by which they count as no requests |

pub mod finder;
pub(crate) mod finder_queue;
pub mod idle_connections;
pub(crate) mod idle_positions;
pub mod namespace;
pub(crate) mod pod_ports;
pub mod pod_server;
pub(crate) mod pod_slots;
pub mod probe_marks;
pub(crate) mod processes;
pub mod readiness;
pub(crate) mod registry;
pub mod standby;
pub(crate) mod standby_facts;
pub mod tracker;
pub mod types;
pub(crate) mod upgraded_connections;
