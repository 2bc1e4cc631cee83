//! Shell: charge of a request's head for its memory, from its arrival until a pod's connection has it.
//!
//! The charge is among the request's extensions, so that it ends with the request, whatever ends that.

use std::sync::Arc;

use http::Request;

use crate::{
    clients::connections::{ClientConnection, HeadBytesGuard},
    edge::headers::estimate_head_bytes,
    grpc::GrpcProtocol,
};

/// Refusal of a request whose head was not charged. Only what its response depends on is kept.
#[derive(Debug)]
pub struct RefusedHead {
    /// Protocol of the call of gRPC that it was; `None`: it was none.
    pub grpc_protocol: Option<GrpcProtocol>,
}

/// Charges the head of a request.
///
/// The caller runs it as soon as the head has come: over HTTP/2 a hundred heads may come before the first one's task
/// runs.
pub fn charge_head<B>(
    mut request: Request<B>,
    client_connection: &Arc<ClientConnection>,
) -> Result<Request<B>, RefusedHead> {
    let Some(guard) = client_connection.try_charge_head(estimate_head_bytes(&request)) else {
        let (method, version) = (request.method(), request.version());
        let grpc_protocol = GrpcProtocol::of_request(method, version, request.headers());
        return Err(RefusedHead { grpc_protocol });
    };
    request.extensions_mut().insert(Arc::new(guard));
    Ok(request)
}

/// Number of bytes that the head is charged with.
pub fn charged_bytes<B>(request: &Request<B>) -> usize {
    request.extensions().get::<Arc<HeadBytesGuard>>().map_or(0, |guard| guard.bytes())
}

/// Charges the head again, because no pod got the request and it waits again.
pub fn recharge_head<B>(request: &mut Request<B>, client_connection: &Arc<ClientConnection>) {
    let guard = client_connection.charge_head(estimate_head_bytes(request));
    request.extensions_mut().insert(Arc::new(guard));
}

/// Ends the charge, because a pod's connection has the request from here on.
pub fn release_head<B>(request: &mut Request<B>) {
    request.extensions_mut().remove::<Arc<HeadBytesGuard>>();
}
