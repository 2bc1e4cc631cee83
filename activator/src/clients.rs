//! Shell: client connections: their sockets, and the memory that they use.
//!
//! A module belongs here if it knows bytes of a client or counts them. Routes, pods and responses belong to higher
//! layers.
//!
//! | module | subject |
//! |---|---|
//! | [`client_info`], [`reconnect_jitter`] | pure: a connection as its requests know it; order of reconnects |
//! | [`client_auth_result`] | pure: result of a handshake that asked for the client's certificate |
//! | [`request_line`] | pure: recognition of HTTP by its first line |
//! | [`request_targets`] | pure: request targets that hyper refuses |
//! | [`http2_frames`] | pure: memory that a client's HTTP/2 frames make h2 hold |
//! | [`connections`], [`head_charge`] | memory of each connection, and the requests to refuse; charge of a head |
//! | [`bounded_tcp`] | TCP below TLS, with a bound on what TLS holds of it |
//! | [`client_stream`] | bytes of a client, by TCP alone or by TLS |
//! | [`socket`] | a client's socket, and detection of a client that is gone |

pub mod bounded_tcp;
pub mod client_auth_result;
pub mod client_info;
pub mod client_stream;
pub mod connections;
pub mod head_charge;
pub mod http2_frames;
pub mod reconnect_jitter;
pub mod request_line;
pub mod request_targets;
pub mod socket;
