//! Shell: listeners, and the client connections that they accept.
//!
//! A module belongs here if it opens ports, accepts connections, or hands them to hyper.
//!
//! | module | subject |
//! |---|---|
//! | [`service_ports`], [`port_range`] | listeners of the services' own ports: one each, or one for all |
//! | [`gateway_ports`] | listeners of gateway ports, for raw TCP from outside |
//! | [`port_listeners`] | listeners of single ports, which open and close as the RouteTable changes |
//! | [`client_server`] | client connections, from their acceptance to their end |
//! | [`charged_body`], [`stream_resets`] | body of a response, charged to its connection; requests that clients reset |

pub mod charged_body;
pub mod client_server;
pub mod gateway_ports;
pub mod port_listeners;
pub mod port_range;
pub mod service_ports;
pub mod stream_resets;
