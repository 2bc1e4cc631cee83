//! Shell: bytes that hyper reads from a client's socket, inspected and charged to the client connection.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead as _, ReadBuf},
    time::sleep,
};
use tokio_util::io::poll_read_buf;

use super::ClientSocketInner;
use crate::clients::request_targets::InspectorAction;

/// Number of bytes that are read at once while they have to be parsed.
const PARSE_READ_BYTES: usize = 8 << 10;
/// Number of bytes of a body over HTTP/1.1 that are read at once. hyper doubles its buffer each time that one is
/// filled, and keeps it while the connection is idle. This is one byte less than two fills of the first buffer.
const BODY_READ_BYTES: usize = (16 << 10) - 1;
/// Rest of a body that justifies larger pieces, whose buffer lasts as long as the connection. Read in small pieces, a
/// large upload takes nearly twice as long.
const LARGE_BODY_BYTES: u64 = 128 << 10;
/// Pause before a read while too many bytes are held.
const READ_PAUSE: Duration = Duration::from_millis(20);
/// Number of pauses after which bytes are read nevertheless: 1 s in all.
const MAX_READ_PAUSES: u32 = 50;

impl ClientSocketInner {
    /// Reads bytes for hyper. Requests are inspected on the way, and their bytes are charged to the connection.
    pub(super) fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            match self.targets.next_action() {
                InspectorAction::TakeReady => {
                    // The head is complete, so it is charged by the request from here on.
                    self.charge_partial_head(0);
                    let ready = self.targets.ready().len();
                    self.set_buffer_size(ready.max(self.buffer_size));
                    let count = ready.min(into.remaining());
                    into.put_slice(&self.targets.ready().split_to(count));
                    return Poll::Ready(Ok(()));
                }
                InspectorAction::PassThrough(u64::MAX) => {
                    if self.frames.is_some() {
                        // HTTP/2 only: an HTTP/1.1 connection has one request, which is refused by its own charge.
                        ready!(self.poll_read_pause(cx));
                    }
                    let before = into.filled().len();
                    ready!(Pin::new(&mut self.stream).poll_read(cx, into))?;
                    if let Some(frames) = &mut self.frames {
                        let bodies = frames.inspect(&into.filled()[before..]);
                        let held = frames.max_held_bytes();
                        self.charge_body(bodies);
                        self.set_buffer_size(held);
                    }
                    return Poll::Ready(Ok(()));
                }
                InspectorAction::PassThrough(left) => {
                    // Small pieces keep hyper's buffer small, which lasts as long as the connection.
                    let piece = if left > LARGE_BODY_BYTES { usize::MAX } else { BODY_READ_BYTES };
                    let left = usize::try_from(left).unwrap_or(usize::MAX);
                    let most = left.min(into.remaining()).min(piece);
                    self.set_buffer_size(into.remaining().max(self.buffer_size));
                    let mut part = ReadBuf::new(into.initialize_unfilled_to(most));
                    ready!(Pin::new(&mut self.stream).poll_read(cx, &mut part))?;
                    let count = part.filled().len();
                    into.advance(count);
                    self.targets.on_passed(count);
                    self.charge_body(count);
                    return Poll::Ready(Ok(()));
                }
                InspectorAction::ReadToParse => {
                    // A head that comes in one piece is not charged here.
                    let partial = self.targets.unread().len();
                    if !self.targets.is_in_chunks() {
                        self.charge_partial_head(partial);
                    }
                    // The buffer is allocated only once something has come, so that an idle connection has none.
                    ready!(self.stream.poll_read_ready(cx))?;
                    let unread = self.targets.unread();
                    unread.reserve(PARSE_READ_BYTES);
                    let count = ready!(poll_read_buf(Pin::new(&mut self.stream), cx, unread))?;
                    // A client that closes within a head: hyper gets the bytes unchanged, then the end.
                    if count == 0 {
                        self.targets.on_eof();
                    }
                    if self.targets.is_in_chunks() {
                        self.charge_body(count);
                    }
                }
            }
        }
    }

    /// Waits while too many bytes are held. A connection brings a hundred requests at once, and those that are refused
    /// end only when their tasks run. The wait is bounded, because other connections may be the cause.
    fn poll_read_pause(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.connection.connections().is_over_budget() && self.read_pauses < MAX_READ_PAUSES {
            let pause = self.read_pause.get_or_insert_with(|| Box::pin(sleep(READ_PAUSE)));
            ready!(pause.as_mut().poll(cx));
            self.read_pause = None;
            self.read_pauses += 1;
        }
        // The pauses are bounded for each read, not for the connection.
        (self.read_pause, self.read_pauses) = (None, 0);
        Poll::Ready(())
    }

    /// Registers the size of hyper's buffer, which hyper keeps after its bytes were read.
    fn set_buffer_size(&mut self, size: usize) {
        if size != self.buffer_size {
            self.buffer_size = size;
            self.connection.set_buffer_size(size);
        }
    }

    /// Registers received bytes of bodies, as many as the connection can hold.
    fn charge_body(&self, count: usize) {
        let is_http2 = self.frames.is_some();
        let most = self.connection.connections().budget.max_buffered_body(is_http2);
        self.connection.add_body_bytes(count, most);
    }

    /// Registers the number of bytes of an incomplete head that are buffered here.
    fn charge_partial_head(&mut self, partial: usize) {
        if partial != self.partial_head_bytes {
            self.connection.change_head_bytes(
                std::mem::replace(&mut self.partial_head_bytes, partial),
                partial,
            );
        }
    }
}
