//! The kernel tier: real programs in the running kernel, in namespaces and cgroups of their own. Needs root.

mod agent;
mod cluster_ip;
mod cluster_udp;
mod connect_records;
mod endpoint_churn;
mod fixture;
mod large_service;
mod listening_sockets;
mod locked_close;
mod map_sizes;
mod pod_ports;
mod program_replacement;
mod redirect;
mod refusal;
mod request_counts;
mod robustness;
mod scaled_services;
mod scripted_process;
mod servers;
mod sk_lookup;
mod socket_lists;
mod standby;
mod sys;
mod udp_process;
mod verifier;
