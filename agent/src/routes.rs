//! Shell: the RouteTable on this node: its stream, and the plans that put it in force.
//!
//! A module belongs here if it holds the RouteTable, or decides what the kernel's maps should hold because of it. The
//! loop writes the maps, from the operations of a plan.
//!
//! | module | subject |
//! |---|---|
//! | `route_stream` | shell: the streams with the controller: batches of the RouteTable in, pod reports out |
//! | [`plan`] | from the RouteTable to ordered writes of the kernel's maps |
//! | `node_routes` | the table as the planner has it, and the extent to which the maps follow it |

pub(crate) mod node_routes;
pub mod plan;
pub(crate) mod route_stream;
