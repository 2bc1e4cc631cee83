//! Activators on loopback. They are one program, since each program would build HTTP and the harness again. Tests that
//! take a minute are programs of their own, which run at the same time.

mod agent_reports;
mod attacks;
mod client_close;
mod component_streams;
mod crowds;
mod debug_pages;
mod failure_responses;
mod fast_path;
mod faults;
mod forward;
mod gateway_api;
mod gateway_ports;
mod grpc;
#[path = "../h2c/mod.rs"]
mod h2c;
#[path = "../harness/mod.rs"]
mod harness;
mod hosts;
mod http2;
mod ingresses;
mod inputs;
mod limits;
mod local_tls;
mod long;
mod message_corpus;
mod messages;
mod proxies;
mod reference_servers;
mod request_log;
mod responses;
mod routes;
#[path = "../running_activator/mod.rs"]
mod running_activator;
mod scaled_ports;
mod standby;
mod stopping;
mod tcp;
mod tcp_components;
mod tcp_servers;
mod tcp_streams;
mod telemetry;
mod tls;
mod tls_choice;
#[path = "../tls_client/mod.rs"]
mod tls_client;
mod tls_matrix;
mod tls_policies;
mod tls_tcp;
mod websockets;
