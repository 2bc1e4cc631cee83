//! Shell: the edge: heads of requests and responses, and whose information about a client is trusted.
//!
//! A module belongs here if it reads or writes a head, or what a proxy sends before it. No module here knows a
//! connection, a Revision or a pod.
//!
//! | module | subject |
//! |---|---|
//! | [`host`] | pure: host of a request, and the service that it means within the cluster |
//! | [`headers`] | pure: changes of a head on its way to a pod and back |
//! | [`client_certificate`] | pure: rules for certificates of clients, and the header for pods |
//! | [`client_headers`], [`forwarded_header`] | pure: headers that describe the client; the header `Forwarded` |
//! | `header_edits` | pure: changes of headers that a rule of the Gateway API asks for |
//! | [`plain_request`], [`plain_response`] | pure: heads of the fast path, judged and rewritten as bytes |
//! | [`platform_probe`] | pure: requests to the platform itself, and their responses |
//! | [`proxy_protocol`] | pure: the header by which a proxy names its client |
//! | [`websocket`] | pure: WebSocket handshakes of HTTP/2 |
//! | [`policy`] | policy of operators for proxies and upgrades, as it is now |

pub mod client_certificate;
pub mod client_headers;
pub mod forwarded_header;
pub(crate) mod header_edits;
pub mod headers;
pub mod host;
pub mod plain_request;
pub mod plain_response;
pub mod platform_probe;
pub mod policy;
pub mod proxy_protocol;
pub mod websocket;
