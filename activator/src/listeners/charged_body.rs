//! Shell: the body of a response, charged to its client connection while the client does not take it.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use crate::{
    budget::REQUEST_OVERHEAD_BYTES,
    clients::connections::{ActiveRequestGuard, ResponseBytesGuard},
};

/// Body of a response, whose request lasts until the body is dropped.
#[derive(Debug)]
pub struct ChargedResponseBody<B> {
    body: B,
    request_guard: ActiveRequestGuard,
    /// Bytes that the pod may have sent ahead while the body is not polled.
    max_buffered: usize,
    /// Guard that counts these bytes while the client takes nothing.
    buffered_guard: Option<ResponseBytesGuard>,
}

impl<B: Body> ChargedResponseBody<B> {
    /// Wraps the body of a response, whose pod may send `max_buffered` bytes while the client takes none.
    pub fn new(body: B, request_guard: ActiveRequestGuard, max_buffered: usize) -> Self {
        let mut charged_body = Self { body, request_guard, max_buffered, buffered_guard: None };
        // A body that has ended already holds nothing.
        charged_body.set_buffered_charged(!charged_body.body.is_end_stream());
        charged_body
    }

    /// Counts the bytes that the pod may send ahead, and the overhead of the request, if `is_unread`: the body is not
    /// being polled, so its data waits.
    fn set_buffered_charged(&mut self, is_unread: bool) {
        match &self.buffered_guard {
            None if is_unread => {
                self.buffered_guard = Some(
                    self.request_guard
                        .connection()
                        .charge_response_bytes(self.max_buffered + REQUEST_OVERHEAD_BYTES),
                );
            }
            Some(_) if !is_unread => self.buffered_guard = None,
            None | Some(_) => {}
        }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for ChargedResponseBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let next = Pin::new(&mut self.body).poll_frame(cx);
        // After a frame the pod may send more before the next poll. These bytes count until then. A pending body holds
        // none: its consumer waits for the pod.
        let is_unread = next.is_ready() && !self.body.is_end_stream();
        self.set_buffered_charged(is_unread);
        let next = ready!(next);
        let client_connection = self.request_guard.connection();
        Poll::Ready(next.map(|result| {
            result.map(|frame| frame.map_data(|data| client_connection.charge_response_data(data)))
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
