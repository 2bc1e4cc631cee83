//! Shell: the routes of this node: the RouteTable's stream, watches of the cluster's Services, and the plans that put
//! both in force.
//!
//! A module belongs here if it holds the RouteTable or these Services, or decides what the kernel's maps should hold
//! because of them. The loop writes the maps, from the operations of a plan.
//!
//! | module | subject |
//! |---|---|
//! | `route_stream` | shell: the streams with the controller: batches of the RouteTable in, pod reports out |
//! | `activator_reports` | shell: reports of ready pods to activators |
//! | [`plan`] | from the RouteTable to ordered writes of the kernel's maps |
//! | `node_routes` | the table as the planner has it, and the extent to which the maps follow it |
//! | `cluster_watch` | shell: watches of the cluster's Services, if the node serves them |
//! | `api_client` | shell: the client of these watches, which asks the next API server when one fails |
//! | [`kubelet_kubeconfig`] | shell: the API server that the node's kubelet asks |
//! | [`bootstrap`], `bootstrap_file` | the file that a node starts from after a reboot; shell: its reads and writes |
//! | `service_ranges`, `range_routes` | ranges of ClusterIPs; shell: routes for them, without kube-proxy |
//! | `service_events`, `event_writer` | Events on Services that the node does not serve; shell: their writes |

pub(crate) mod activator_reports;
pub(crate) mod api_client;
pub mod bootstrap;
pub(crate) mod bootstrap_file;
pub mod cluster_watch;
pub(crate) mod event_writer;
pub mod kubelet_kubeconfig;
pub(crate) mod node_routes;
pub mod plan;
pub(crate) mod range_routes;
pub(crate) mod route_stream;
pub(crate) mod service_events;
pub(crate) mod service_ranges;
