//! Shell: pods, the connections to them, and the exchanges over these.
//!
//! A module belongs here if it speaks with a pod. The choice of the pod and the permit for it belong to `revisions/`.
//!
//! | module | subject |
//! |---|---|
//! | [`endpoint_key`] | pure: key of a pod in the wait queue |
//! | [`connection_pool`], [`dial`] | pure: one pod's connections and their requests; one dial, by up to 16 sockets |
//! | [`endpoint`] | one pod with its pool and its dials |
//! | [`connection`], [`exchange_error`] | one connection, in HTTP/1.1 or HTTP/2; errors of exchanges |
//! | [`http1_connection`], [`request_upload`] | an HTTP/1.1 connection; a request on its way over it |
//! | [`http2_connection`] | an HTTP/2 connection, shared by requests, and the use of one of its streams |
//! | [`request_body`] | a request's body on its way to a pod |
//! | [`standby_watch`] | standby watch of a pod, shared by its requests |
//! | [`upgraded_pod`] | the pod's side of an upgraded connection |

pub mod connection;
pub mod connection_pool;
pub mod dial;
pub mod endpoint;
pub mod endpoint_key;
pub mod exchange_error;
pub mod http1_connection;
pub mod http2_connection;
pub mod request_body;
pub mod request_upload;
pub mod standby_watch;
pub mod upgraded_pod;
