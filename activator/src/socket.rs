//! Shell: a client's socket: bytes for the HTTP library, and whether the client is still there.
//!
//! A client that has closed only its sending half still reads its answer, one that has closed wholly never
//! will; both have sent the same FIN. What tells them apart is a byte sent to them: the first answers it with
//! an ACK, the second with a reset. Every answer begins with the same byte, so that byte is sent ahead, and the
//! library's own is left out later: whoever reads sees one whole answer.

use std::{
    fmt,
    future::{pending, poll_fn},
    io::{self, IoSlice},
    os::fd::AsFd as _,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use bytes::{Buf as _, Bytes, BytesMut};
use futures::FutureExt as _;
use http::Uri;
use http_body::{Body, Frame, SizeHint};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, Interest, ReadBuf},
    net::TcpStream,
    time::{Sleep, sleep},
};
use tokio_util::io::poll_read_buf;

use crate::{
    frames::Frames,
    proxy_protocol::{self, Header, Step},
    reply::{CutOff, Reply},
    seats::Seat,
    targets::{Targets, Want},
};

/// What every answer begins with, a final one or not: `HTTP/1.…`.
const FIRST: &[u8] = b"H";
/// While bytes lie unread, a FIN behind them is watched for only in requests that last longer than this: it
/// takes a descriptor.
const UNREAD: Duration = Duration::from_millis(100);
/// An answer that was begun before the client's FIN goes on; the pod of one that says nothing for so long hears of it.
const SILENCE: Duration = Duration::from_secs(5);

/// Bytes read at once where their meaning is looked for.
const LOOK: usize = 8 << 10;
/// Bytes of a body over HTTP/1.1 read at once. The library doubles its buffer each time that one is filled and keeps it while
/// the connection is idle: one byte less than two fills of the first.
const PIECE: usize = (16 << 10) - 1;
/// The rest of a body that is worth larger pieces, for as long as the connection lasts: read in small ones, a large upload
/// takes nearly twice as long.
const LARGE: u64 = 128 << 10;
/// Bytes of answers before the final one that may wait for a client to read them.
const MAX_EARLY: usize = 64 << 10;
/// A client that was answered before it had sent everything is listened to until it is silent for so long, or for so long
/// in all: nginx's `lingering_timeout` and `lingering_time` are 5 s and 30 s.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_IN_ALL: Duration = Duration::from_secs(10);
/// While there is no room, it is looked again so often, and at most so many times before some is read all the same: 1 s.
const PAUSE: Duration = Duration::from_millis(20);
const MOST_PAUSES: u32 = 50;

/// What a client that speaks HTTP/2 without asking says first (RFC 9113 §3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A client's socket. Clones are the same socket: the library has one, whoever watches it another. All are
/// used by one task, so the lock is never waited for.
#[derive(Clone, Debug)]
pub struct Socket(Arc<Mutex<Inner>>);

/// Reads the header by which a proxy names its client, and not a byte more.
pub async fn proxy_header(stream: &mut TcpStream) -> io::Result<Header> {
    let mut bytes = Vec::new();
    loop {
        let more = match proxy_protocol::read(&bytes).map_err(io::Error::other)? {
            Step::Done(header) => return Ok(header),
            Step::Read(more) => more,
        };
        let from = bytes.len();
        bytes.resize(from + more, 0);
        stream.read_exact(&mut bytes[from..]).await?;
    }
}

/// The client has closed its connection for good.
#[derive(Debug, thiserror::Error)]
#[error("client has gone")]
pub struct Gone;

#[derive(Debug)]
struct Inner {
    stream: TcpStream,
    /// Whether the library has passed on all it had to say since the request came.
    is_settled: bool,
    /// Whether the first byte of the answer was sent ahead.
    is_ahead: bool,
    /// Waits for `is_settled`.
    waker: Option<Waker>,
    /// Whole answers before the final one, which go out between what the library says.
    early: BytesMut,
    /// What comes in.
    targets: Targets,
    /// Whether a body was given up that the client may still be sending.
    is_unread: bool,
    /// What the connection takes.
    seat: Arc<Seat>,
    /// How HTTP/2 is followed.
    frames: Option<Frames>,
    /// Bytes counted of a head that has not come whole.
    partial: usize,
    /// Bytes of room that the library has for what comes in.
    room: usize,
    /// Runs while nothing is read for want of room.
    pause: Option<Pin<Box<Sleep>>>,
    /// How often that was so, one after the other.
    pauses: u32,
}

/// A request's target as it came, where `http::Uri` cannot hold it.
#[derive(Clone, Debug)]
pub struct RawTarget(pub Bytes);

impl Socket {
    /// A client's socket.
    pub fn new(stream: TcpStream, seat: Arc<Seat>) -> Self {
        let (early, waker) = (BytesMut::new(), None);
        let (is_settled, is_ahead, is_unread) = (false, false, false);
        let targets = Targets::off(0);
        let (frames, partial, room, pause, pauses) = (None, 0, 0, None, 0);
        Self(Arc::new(Mutex::new(Inner {
            stream,
            is_settled,
            is_ahead,
            waker,
            early,
            targets,
            is_unread,
            seat,
            frames,
            partial,
            room,
            pause,
            pauses,
        })))
    }

    /// Waits for the client's first words and tells whether they are HTTP/2's. Nothing is read.
    pub async fn speaks_http2(&self) -> io::Result<bool> {
        let mut before = 0;
        loop {
            let mut bytes = [0; PREFACE.len()];
            let mut into = ReadBuf::new(&mut bytes);
            let said = poll_fn(|cx| self.lock().stream.poll_peek(cx, &mut into)).await?;
            match said {
                // Nothing new: the client has closed its half. Or it says something else.
                _ if said == before || !PREFACE.starts_with(&bytes[..said]) => return Ok(false),
                _ if said == PREFACE.len() => return Ok(true),
                _ => before = said,
            }
            // What has come is not news any more: wait for the rest.
            let stream = &self.lock().stream;
            let _ = stream
                .try_io(Interest::READABLE, || Err::<(), _>(io::ErrorKind::WouldBlock.into()));
        }
    }

    /// The client speaks HTTP/1.1, and a head of it has at most `max_head` bytes.
    pub fn follow_targets(&self, max_head: usize) {
        self.lock().targets = Targets::new(max_head);
    }

    /// The client speaks HTTP/2.
    pub fn follow_frames(&self) {
        self.lock().frames = Some(Frames::after_preface(PREFACE.len()));
    }

    /// Tells an HTTP/2 client, in the library's place, why its connection ends (RFC 9113 §6.8), if it can be told at once.
    pub fn go_away(&self, reason: h2::Reason) {
        const FRAME: [u8; 9] = [0, 0, 8, 7, 0, 0, 0, 0, 0];
        let last = (u32::MAX >> 1).to_be_bytes();
        let frame = [&FRAME[..], &last, &u32::from(reason).to_be_bytes()].concat();
        let _ = self.lock().stream.try_write(&frame);
    }

    /// The target of the request that has come as `uri`, where the client wrote it in another way.
    pub fn raw_target(&self, uri: &Uri) -> Option<RawTarget> {
        self.lock().targets.came(uri.path_and_query()?.as_str()).map(RawTarget)
    }

    /// Waits until the client has closed its connection for good. To be called when a request has come, and
    /// dropped when its answer begins.
    pub async fn gone(&self) {
        self.lock().is_settled = false;
        // Costs no system call while nothing comes, which is the usual case.
        let _ = poll_fn(|cx| self.lock().stream.poll_read_ready(cx)).await;
        Box::pin(self.told()).await;
    }

    /// The same, once something has come.
    async fn told(&self) {
        if !self.is_closed() {
            tokio::time::sleep(UNREAD).await;
        }
        let Ok(watch) = self.watch() else { return pending().await };
        let _ = watch.ready(Interest::PRIORITY | Interest::ERROR).await;
        if poll_fn(|cx| self.poll_ask(cx)).await.is_ok() {
            let _ = watch.ready(Interest::ERROR).await;
        }
    }

    /// Says something before the final answer. A client that does not read has said enough itself.
    pub fn say_early(&self, answer: &[u8]) {
        let mut inner = self.lock();
        if inner.early.len() + answer.len() > MAX_EARLY {
            return;
        }
        let is_ahead = std::mem::take(&mut inner.is_ahead);
        inner.early.extend_from_slice(if is_ahead { &answer[FIRST.len()..] } else { answer });
        if inner.is_settled {
            inner.try_write_early();
        }
    }

    /// A body that came by it was given up.
    pub fn note_unread(&self) {
        self.lock().is_unread = true;
    }

    /// Lets a client that was answered before it had sent everything come to its end: if the connection just ended, the
    /// kernel would reset it, and the client might never see the answer (RFC 9112 §9.6).
    pub async fn linger(&self) {
        if !self.lock().is_unread {
            return;
        }
        let read = async {
            let mut unwanted = vec![0; 64 << 10];
            loop {
                let mut into = ReadBuf::new(&mut unwanted);
                let some = poll_fn(|cx| Pin::new(&mut self.lock().stream).poll_read(cx, &mut into));
                match tokio::time::timeout(LINGER, some).await {
                    Ok(Ok(())) if !into.filled().is_empty() => {}
                    _ => return,
                }
            }
        };
        let _ = tokio::time::timeout(LINGER_IN_ALL, read).await;
    }

    /// Waits until the client's kernel has said that the client is gone.
    async fn reset(&self) {
        let Ok(watch) = self.watch() else { return pending().await };
        let _ = watch.ready(Interest::ERROR).await;
    }

    /// Another view of the stream: its own readiness stays "closed" from the FIN on and cannot tell of the reset.
    fn watch(&self) -> io::Result<TcpStream> {
        let copy = self.lock().stream.as_fd().try_clone_to_owned()?;
        TcpStream::from_std(copy.into())
    }

    /// Whether the client has closed its sending half, or more.
    fn is_closed(&self) -> bool {
        // The kernel's closing is told along with "priority" data, which nobody sends.
        self.lock().stream.ready(Interest::PRIORITY).now_or_never().is_some()
    }

    /// Whether the client's kernel has said that the client is gone.
    fn is_reset(&self) -> bool {
        self.lock().stream.ready(Interest::ERROR).now_or_never().is_some()
    }

    /// Sends the first byte of the answer once nothing of another answer can come after it.
    fn poll_ask(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = self.lock();
        if !inner.is_settled {
            inner.waker = Some(cx.waker().clone());
            return Poll::Pending;
        }
        if inner.is_ahead {
            return Poll::Ready(Ok(()));
        }
        match inner.stream.try_write(FIRST) {
            Ok(sent) => inner.is_ahead = sent == FIRST.len(),
            // What is on its way already asks the same.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Poll::Ready(Err(error)),
        }
        Poll::Ready(Ok(()))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing that runs under the lock leaves a socket half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.lock().poll_read(cx, into)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut inner = self.lock();
        ready!(inner.poll_early(cx))?;
        inner.is_settled = false;
        match from {
            [_sent, rest @ ..] if inner.is_ahead => inner.poll_write_rest(cx, rest),
            _ => Pin::new(&mut inner.stream).poll_write(cx, from),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut inner = self.lock();
        ready!(inner.poll_early(cx))?;
        inner.is_settled = false;
        match from.iter().find(|slice| !slice.is_empty()).map(|slice| &**slice) {
            Some([_sent, rest @ ..]) if inner.is_ahead => inner.poll_write_rest(cx, rest),
            _ => Pin::new(&mut inner.stream).poll_write_vectored(cx, from),
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.lock().stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = self.lock();
        ready!(inner.poll_early(cx))?;
        ready!(Pin::new(&mut inner.stream).poll_flush(cx))?;
        inner.is_settled = true;
        inner.waker.take().into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.lock().stream).poll_shutdown(cx)
    }
}

impl Inner {
    fn poll_read(&mut self, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            match self.targets.want() {
                Want::Take => {
                    self.count_partial(0);
                    let ready = self.targets.ready().len();
                    self.keeps(ready.max(self.room));
                    let some = self.targets.ready().len().min(into.remaining());
                    into.put_slice(&self.targets.ready().split_to(some));
                    return Poll::Ready(Ok(()));
                }
                Want::Pass(u64::MAX) => {
                    if self.frames.is_some() {
                        ready!(self.poll_room(cx));
                    }
                    let before = into.filled().len();
                    ready!(Pin::new(&mut self.stream).poll_read(cx, into))?;
                    if let Some(frames) = &mut self.frames {
                        let bodies = frames.count(&into.filled()[before..]);
                        self.seat.came(bodies, self.seat.seats().budget.ahead(true));
                        let held = frames.held();
                        self.keeps(held);
                    }
                    return Poll::Ready(Ok(()));
                }
                Want::Pass(most) => {
                    let piece = if most > LARGE { usize::MAX } else { PIECE };
                    let most = usize::try_from(most).unwrap_or(usize::MAX);
                    let most = most.min(into.remaining()).min(piece);
                    self.keeps(into.remaining().max(self.room));
                    let mut part = ReadBuf::new(into.initialize_unfilled_to(most));
                    ready!(Pin::new(&mut self.stream).poll_read(cx, &mut part))?;
                    let count = part.filled().len();
                    into.advance(count);
                    self.targets.passed(count);
                    self.seat.came(count, self.seat.seats().budget.ahead(false));
                    return Poll::Ready(Ok(()));
                }
                Want::Look => {
                    // What comes whole at once costs no count.
                    let partial = self.targets.unread().len();
                    if !self.targets.is_in_chunks() {
                        self.count_partial(partial);
                    }
                    // Room is made only once something has come: an idle connection has none.
                    ready!(self.stream.poll_read_ready(cx))?;
                    let unread = self.targets.unread();
                    unread.reserve(LOOK);
                    let count = ready!(poll_read_buf(Pin::new(&mut self.stream), cx, unread))?;
                    if count == 0 {
                        self.targets.end();
                    }
                    if self.targets.is_in_chunks() {
                        self.seat.came(count, self.seat.seats().budget.ahead(false));
                    }
                }
            }
        }
    }

    /// Waits while too many bytes are held: a connection brings a hundred requests at once, and those that are refused go
    /// only when their tasks run. Not for ever, since others' are not this one's fault.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.seat.seats().is_full() && self.pauses < MOST_PAUSES {
            let pause = self.pause.get_or_insert_with(|| Box::pin(sleep(PAUSE)));
            ready!(pause.as_mut().poll(cx));
            self.pause = None;
            self.pauses += 1;
        }
        (self.pause, self.pauses) = (None, 0);
        Poll::Ready(())
    }

    /// The library has room for so many bytes, and keeps it when they have gone.
    fn keeps(&mut self, room: usize) {
        if room != self.room {
            self.room = room;
            self.seat.keeps(room);
        }
    }

    /// So much lies here of a head.
    fn count_partial(&mut self, partial: usize) {
        if partial != self.partial {
            self.seat.holds_head(std::mem::replace(&mut self.partial, partial), partial);
        }
    }

    /// Writes what is said early as far as that is possible at once; the rest goes before the library's next words.
    fn try_write_early(&mut self) {
        while let Ok(sent) = self.stream.try_write(&self.early) {
            self.early.advance(sent);
            if self.early.is_empty() {
                return;
            }
        }
    }

    fn poll_early(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.early.is_empty() {
            let sent = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.early))?;
            self.early.advance(sent);
        }
        Poll::Ready(Ok(()))
    }

    /// Writes what follows the byte that was sent ahead, and counts that byte.
    fn poll_write_rest(&mut self, cx: &mut Context<'_>, rest: &[u8]) -> Poll<io::Result<usize>> {
        let sent = match rest {
            [] => 0,
            rest => ready!(Pin::new(&mut self.stream).poll_write(cx, rest))?,
        };
        self.is_ahead = false;
        Poll::Ready(Ok(sent + FIRST.len()))
    }
}

/// The body of an answer, with an eye on its client: a silent answer would never learn that nobody listens.
#[derive(Debug)]
pub struct Watched {
    body: Reply,
    socket: Socket,
    /// The client had closed its sending half before, and was there: it waits for the whole answer.
    is_awaited: bool,
    /// Runs since the client's FIN, while the answer is silent.
    silence: Option<Pin<Box<Sleep>>>,
    /// Waits for a reset, once the pod knows of the FIN.
    reset: Option<Reset>,
}

/// Resolves once the client's kernel has said that the client is gone.
struct Reset(Pin<Box<dyn Future<Output = ()> + Send>>);

impl fmt::Debug for Reset {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("Reset")
    }
}

impl Watched {
    /// The body of an answer to the client at `socket`.
    pub fn new(body: Reply, socket: Socket) -> Self {
        let is_awaited = !body.is_end_stream() && socket.is_closed();
        Self { body, socket, is_awaited, silence: None, reset: None }
    }

    /// Resolves when the client has closed its half, nothing was said to it for a while, and the pod cannot be asked what
    /// to make of that: HTTP/1.1's FIN is passed on to it, as if there were no activator. Whether the client is still there
    /// is then for the kernel to find out.
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(Reset(reset)) = &mut self.reset {
            return reset.as_mut().poll(cx);
        }
        if self.is_awaited {
            return Poll::Pending;
        }
        // Only asks to be woken; an error shows as a closed half.
        let _ = ready!(self.socket.lock().stream.poll_read_ready(cx));
        if !self.socket.is_closed() {
            return Poll::Pending;
        }
        if self.socket.is_reset() {
            return Poll::Ready(());
        }
        let silence = || Box::pin(tokio::time::sleep(SILENCE));
        ready!(self.silence.get_or_insert_with(silence).as_mut().poll(cx));
        if !self.body.pass_fin(cx) {
            return Poll::Ready(());
        }
        let socket = self.socket.clone();
        let reset = self.reset.insert(Reset(Box::pin(async move { socket.reset().await })));
        reset.0.as_mut().poll(cx)
    }
}

impl Body for Watched {
    type Data = Bytes;
    type Error = CutOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, CutOff>>> {
        if let Poll::Ready(next) = Pin::new(&mut self.body).poll_frame(cx) {
            self.silence = None;
            return Poll::Ready(next);
        }
        ready!(self.poll_gone(cx));
        Poll::Ready(Some(Err(CutOff::Client)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
