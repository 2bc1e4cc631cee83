//! Shell: one end of a connection over memory, and a task that the test polls by hand.

use std::{
    cell::RefCell,
    collections::VecDeque,
    future::Future,
    io,
    pin::Pin,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

use hyper::rt::ReadBufCursor;

/// Buffers between one end of a connection and the test, which plays the network.
#[derive(Debug, Default)]
struct MemoryPipe {
    incoming: VecDeque<u8>,
    is_ended: bool,
    outgoing: Vec<u8>,
}

/// One end of a connection. Its clones share the same buffers.
#[derive(Clone, Debug, Default)]
pub struct MemoryIo(Rc<RefCell<MemoryPipe>>);

impl MemoryIo {
    /// Adds bytes for this end to read.
    pub fn push_incoming(&self, bytes: &[u8]) {
        self.0.borrow_mut().incoming.extend(bytes);
    }

    /// Marks the end of the bytes for this end.
    pub fn close_incoming(&self) {
        self.0.borrow_mut().is_ended = true;
    }

    /// Passes readable bytes to `put`, at most `max_count` of them.
    fn receive(&self, max_count: usize, put: impl FnOnce(&[u8])) -> Poll<io::Result<()>> {
        let MemoryPipe { incoming, is_ended, .. } = &mut *self.0.borrow_mut();
        if incoming.is_empty() && !*is_ended {
            return Poll::Pending;
        }
        let count = max_count.min(incoming.len());
        put(&incoming.make_contiguous()[..count]);
        incoming.drain(..count);
        Poll::Ready(Ok(()))
    }

    /// Returns the bytes that this end has sent since the last call.
    pub fn take_outgoing(&self) -> Vec<u8> {
        std::mem::take(&mut self.0.borrow_mut().outgoing)
    }
}

impl hyper::rt::Read for MemoryIo {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        mut buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        self.receive(buffer.remaining(), |bytes| buffer.put_slice(bytes))
    }
}

impl hyper::rt::Write for MemoryIo {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.0.borrow_mut().outgoing.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl tokio::io::AsyncRead for MemoryIo {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut tokio::io::ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.receive(buffer.remaining(), |bytes| buffer.put_slice(bytes))
    }
}

impl tokio::io::AsyncWrite for MemoryIo {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        hyper::rt::Write::poll_write(self, context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Polls by hand, and records wake-ups.
#[derive(Clone, Debug, Default)]
pub struct ManualPoller(Arc<WakeFlag>);

#[derive(Debug, Default)]
struct WakeFlag(AtomicBool);

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl ManualPoller {
    /// Returns true if there was a wake-up since the last poll.
    pub fn is_woken(&self) -> bool {
        self.0.0.load(Ordering::Relaxed)
    }

    /// Polls until the result is ready, or no wake-up is left.
    pub fn poll_until_idle<T>(
        &self,
        mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Option<T> {
        let waker = Waker::from(Arc::clone(&self.0));
        let mut context = Context::from_waker(&waker);
        loop {
            self.0.0.store(false, Ordering::Relaxed);
            match poll(&mut context) {
                Poll::Ready(output) => return Some(output),
                Poll::Pending if self.is_woken() => {}
                Poll::Pending => return None,
            }
        }
    }
}

/// Future that is polled by hand until it makes no more progress.
#[allow(missing_debug_implementations, reason = "futures have none")]
pub struct PolledTask<F: Future> {
    future: Pin<Box<F>>,
    poller: ManualPoller,
    /// Output of the future, once it has ended.
    pub output: Option<F::Output>,
}

impl<F: Future> PolledTask<F> {
    /// A task that has not been polled yet.
    pub fn new(future: F) -> Self {
        Self { future: Box::pin(future), poller: ManualPoller::default(), output: None }
    }

    /// Returns true if the task was woken since it was last polled and has not ended.
    pub fn is_woken(&self) -> bool {
        self.output.is_none() && self.poller.is_woken()
    }

    /// Polls the task until it waits without a wake-up.
    pub fn poll_until_idle(&mut self) {
        if self.output.is_none() {
            self.output = self.poller.poll_until_idle(|context| self.future.as_mut().poll(context));
        }
    }
}
