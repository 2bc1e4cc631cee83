//! The kernel tier: real programs in the running kernel, in namespaces and cgroups of their own. Needs root.

mod actor;
mod agent;
mod bed;
mod clients;
mod count;
mod ends;
mod listen;
mod lookup;
mod redirect;
mod robust;
mod servers;
mod sys;
mod verifier;
