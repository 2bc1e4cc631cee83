//! Shell: the head of a request counts for what it takes, from when it has come until a pod's connection has it.
//!
//! The count lies among the request's extensions, so it ends with the request, however that ends.

use std::sync::Arc;

use http::Request;

use crate::{
    headers::weight,
    seats::{Held, Seat},
};

/// The request with its head counted; `None`: it is refused, and nothing of it is kept.
///
/// To be called when the head has come: over HTTP/2 a hundred may have come before the task of the first one runs.
pub fn taken<B>(mut request: Request<B>, seat: &Arc<Seat>) -> Option<Request<B>> {
    let held = seat.takes_head(weight(&request))?;
    request.extensions_mut().insert(Arc::new(held));
    Some(request)
}

/// Bytes that its head counts for.
pub fn bytes<B>(request: &Request<B>) -> usize {
    request.extensions().get::<Arc<Held>>().map_or(0, |held| held.bytes())
}

/// A pod did not get it after all, and it waits here again.
pub fn put_back<B>(request: &mut Request<B>, seat: &Arc<Seat>) {
    let held = seat.holds(weight(request));
    request.extensions_mut().insert(Arc::new(held));
}

/// A pod's connection has it from here on.
pub fn let_go<B>(request: &mut Request<B>) {
    request.extensions_mut().remove::<Arc<Held>>();
}
