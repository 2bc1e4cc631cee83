//! Shell: checks of one node for `rouse check`: facts of the machine and, from a running agent, of its network.
//!
//! A module belongs here if it collects such facts or judges them. It changes nothing on the node.
//!
//! | module | subject |
//! |---|---|
//! | [`rules`] | pure: facts of a node → lines, each fine or with what to do |
//! | [`facts`] | shell: facts of the machine: kernel, cgroups, capabilities, other proxies, connection tables |
//! | `canary` | shell: DNS and connects to a ClusterIP, from the node and from pods |
//! | `page` | shell: the page of the admin port with the lines of a node |

mod canary;
pub mod facts;
pub(crate) mod page;
pub mod rules;
