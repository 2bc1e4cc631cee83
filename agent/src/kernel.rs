//! Shell: the eBPF programs of this node, their maps, and the system calls of the agent.
//!
//! A module belongs here if it loads eBPF programs, reads or writes their maps, or finds the cgroups that they are
//! attached to. The forms of the maps' content are here too. No module decides about a route, a pod or a connection:
//! those decisions belong to higher layers.
//!
//! | module | subject |
//! |---|---|
//! | [`programs`], `program_supervisor` | loads, attaches and replaces the programs; verifies that they work |
//! | `takeover_stage` | pure: stages of a takeover from another version's programs |
//! | [`maps`] | the programs' maps: routes, pods, counters, events |
//! | [`map_op`], [`pod_registration`], `totals_row`, `listener_counts`, `led_socket`, `recorded_connection` | pure: content of maps, and its changes |
//! | [`netns_cookies`] | cookies of network namespaces |
//! | [`locked_close`] | close of connections under their sockets' locks |
//! | [`features`], `btf` | features of the verifier; offsets of the fields of the kernel's sockets |
//! | [`cgroups`], `cgroup_search` | pure: layouts of the pods' cgroups; the layout of this node |
//! | [`freezer`] | freezes and thaws pods by their cgroups |
//! | [`sys`] | system calls that no dependency offers: the only file with `unsafe` |

mod btf;
pub(crate) mod cgroup_search;
pub mod cgroups;
pub mod features;
pub mod freezer;
pub(crate) mod led_socket;
pub(crate) mod listener_counts;
pub mod locked_close;
pub mod map_op;
pub mod maps;
pub mod netns_cookies;
pub mod pod_registration;
pub(crate) mod program_supervisor;
pub mod programs;
pub(crate) mod recorded_connection;
pub mod sys;
pub(crate) mod takeover_stage;
pub(crate) mod totals_row;
