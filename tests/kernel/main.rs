//! The kernel tier: real programs in the running kernel, in namespaces and cgroups of their own. Needs root.

mod actor;
mod bed;
mod listen;
mod redirect;
