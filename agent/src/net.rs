//! Shell: sockets, addresses and rules of a network namespace, and connects to pods of other nodes.
//!
//! A module belongs here if it asks the kernel's network stack: by netlink, by `/proc/net`, or by a connect. It knows
//! neither the eBPF programs nor the pods of this node, so it imports modules of the base layer and of `net` only.
//!
//! | module | subject |
//! |---|---|
//! | `netlink` | sockets of netlink: requests and dumps |
//! | [`sockdiag`] | the TCP sockets and connected UDP sockets of a namespace: lists and closes them |
//! | `netfilter` | rules of a namespace that redirect connections |
//! | [`unreachable_routes`] | routes that end connects to ranges of ClusterIPs |
//! | [`reachability`], `remote_prober` | pure: reachability of the pods of other nodes; the probes of these pods |
//! | `standby_watcher` | queries of the agents of other nodes: have they thawed the pods that connects went to? |

pub(crate) mod netfilter;
pub(crate) mod netlink;
pub mod reachability;
pub(crate) mod remote_prober;
pub mod sockdiag;
pub(crate) mod standby_watcher;
pub mod unreachable_routes;
