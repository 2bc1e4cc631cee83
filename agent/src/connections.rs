//! Shell: scans of the connections of pods and clients, in tasks beside the loop.
//!
//! A module belongs here if it lists the sockets or rules of network namespaces and acts on the result. Its pure file
//! decides when to scan, and what follows. Its file `scan` or `close` enters the namespaces.
//!
//! | module | subject |
//! |---|---|
//! | [`stale_connections`] | stale connections of this node's clients, which are closed while they are idle |
//! | [`meshed_namespaces`] | namespaces that redirect connections, whose connects go on unchanged |
//! | [`stale_sockets`] | sockets of this node whose endpoint has left its Service, which are ended |
//! | [`deadlines`] | overdue requests of this node's pods, whose connections are closed |
//! | [`audit`] | drift of pods' gauges from their sockets, which is corrected |

pub(crate) mod audit;
pub(crate) mod deadlines;
pub(crate) mod meshed_namespaces;
pub(crate) mod stale_connections;
pub(crate) mod stale_sockets;
