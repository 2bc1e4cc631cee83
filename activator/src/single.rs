//! Shell: one connection to a pod in HTTP/1.1, and one exchange after another over it.
//!
//! Nothing of it runs by itself: the task that waits for the answer drives it. The answer is looked for before the request is
//! sent on: a pod may give it before it has read the body, and close. Its final answer ends the upload.

use std::{
    future::poll_fn,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body::{Frame, SizeHint};
use hyper::ext::ReasonPhrase;
use tokio::{
    io::AsyncWrite as _,
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::oneshot,
    time::Sleep,
};
use tokio_util::{io::poll_read_buf, task::AbortOnDropHandle};
use tracing::debug;

use crate::{
    ask::Ask,
    connection::{PodError, SendError, SendFault},
    h1::{self, Answer, Ends, Malformed, chunked::Piece},
    upload::{Upload, UploadError},
};

/// A client that waits for the pod's word before it sends the body is asked for it after this time: Go's client's.
const PATIENCE: Duration = Duration::from_secs(1);
/// Bytes read at once.
pub const READ: usize = 16 << 10;

/// Hears of answers before the final one.
pub trait HearEarly {
    /// The pod has said this ahead of its answer.
    fn hear(&mut self, status: StatusCode, headers: &HeaderMap);
}

/// A connection.
#[derive(Debug)]
pub struct Single {
    read: OwnedReadHalf,
    /// `None` while a body is sent by a task of its own.
    write: Option<OwnedWriteHalf>,
    buffer: BytesMut,
    /// Bytes of a head that were looked at.
    seen: usize,
    used: Instant,
    max_idle: Duration,
    /// Whether it has served a request.
    is_kept: bool,
}

/// An answer that is being read, on its connection.
#[derive(Debug)]
pub struct Reading {
    single: Single,
    ends: Ends,
    keeps: bool,
    upload: Option<Rest>,
}

/// The rest of a body that is sent while the answer is read. Dropping it ends that.
#[derive(Debug)]
struct Rest {
    sent: oneshot::Receiver<OwnedWriteHalf>,
    _task: AbortOnDropHandle<()>,
}

/// What an exchange leaves for one that goes on beyond HTTP.
#[derive(Debug)]
pub struct Raw {
    /// What the pod has said already.
    pub said: Bytes,
    /// The connection.
    pub stream: TcpStream,
}

impl Single {
    /// A connection that was just made.
    pub fn new(stream: TcpStream, max_idle: Duration) -> Self {
        let (read, write) = stream.into_split();
        let (write, used) = (Some(write), Instant::now());
        let (buffer, seen, is_kept) = (BytesMut::new(), 0, false);
        Self { read, write, buffer, seen, used, max_idle, is_kept }
    }

    /// Whether it may serve a request: it is open, silent, and has not been idle for too long.
    pub fn is_good(&self) -> bool {
        self.used.elapsed() < self.max_idle && self.is_silent()
    }

    /// Whether the pod has neither closed it nor said anything unasked. Costs a system call only if it has.
    fn is_silent(&self) -> bool {
        let mut byte = [0];
        let said = self.read.try_read(&mut byte);
        self.buffer.is_empty() && said.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Sends a request and waits for the head of its answer. Dropping the future breaks the exchange off.
    pub async fn send(
        mut self,
        request: Request<Ask>,
        early: &mut (dyn HearEarly + Send),
    ) -> Result<Response<Reading>, SendError> {
        if !self.is_silent() {
            return Err(SendError { unseen: Some(request), fault: PodError::Closed.into() });
        }
        let is_kept = std::mem::replace(&mut self.is_kept, true);
        let (head, body) = request.into_parts();
        let mut upload = Upload::new(&head, body);
        let fault = match self.answer(&head.method, &mut upload, early).await {
            Ok(answer) => return Ok(self.reading(answer, upload)),
            Err(fault) => fault,
        };
        let is_broken_off = matches!(fault, SendFault::Pod(PodError::Closed | PodError::Io(_)));
        let may_be_seen_twice = is_kept && upload.is_bare() && is_safe(&head.method);
        let is_unseen =
            is_broken_off && self.buffer.is_empty() && (!upload.is_begun() || may_be_seen_twice);
        let body = if is_unseen { upload.into_body() } else { None };
        Err(SendError { unseen: body.map(|body| Request::from_parts(head, body)), fault })
    }

    async fn answer(
        &mut self,
        method: &Method,
        upload: &mut Upload,
        early: &mut (dyn HearEarly + Send),
    ) -> Result<Answer, SendFault> {
        let patience = upload.is_held().then(|| Box::pin(tokio::time::sleep(PATIENCE)));
        let mut asking = Asking { single: self, method, upload, early, patience, is_stuck: false };
        poll_fn(|cx| asking.poll(cx)).await
    }

    fn poll_upload(
        &mut self,
        cx: &mut Context<'_>,
        upload: &mut Upload,
    ) -> Poll<Result<(), UploadError>> {
        match &mut self.write {
            Some(write) => upload.poll(cx, write),
            None => Poll::Ready(Err(UploadError::Pod(io::ErrorKind::BrokenPipe.into()))),
        }
    }

    fn poll_head(
        &mut self,
        cx: &mut Context<'_>,
        method: &Method,
    ) -> Poll<Result<Answer, SendFault>> {
        loop {
            let head = h1::read_answer(&mut self.buffer, &mut self.seen, method);
            if let Some(head) = head.map_err(PodError::from)? {
                return Poll::Ready(Ok(head));
            }
            if ready!(self.poll_read(cx)).map_err(PodError::Io)? == 0 {
                return Poll::Ready(Err(PodError::Closed.into()));
            }
        }
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.buffer.reserve(READ);
        poll_read_buf(Pin::new(&mut self.read), cx, &mut self.buffer)
    }

    /// The answer's head is there; what is left of the upload goes on by itself.
    fn reading(mut self, answer: Answer, mut upload: Upload) -> Response<Reading> {
        let Answer { status, reason, headers, ends, keeps } = answer;
        // The pod has decided without the body: it gets none, and the connection is of no further use.
        let keeps = keeps && !upload.is_held();
        let rest = if upload.is_over() || upload.is_held() { None } else { self.write.take() };
        let upload = rest.map(|mut write| {
            let (give, sent) = oneshot::channel();
            let task = tokio::spawn(async move {
                match poll_fn(|cx| upload.poll(cx, &mut write)).await {
                    Ok(()) => drop(give.send(write)),
                    Err(error) => debug!(?error, "the rest of a body was not sent"),
                }
            });
            Rest { sent, _task: AbortOnDropHandle::new(task) }
        });
        let mut response = Response::new(Reading { single: self, ends, keeps, upload });
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        if let Some(reason) = reason.and_then(|it| ReasonPhrase::try_from(it).ok()) {
            response.extensions_mut().insert(reason);
        }
        response
    }
}

/// A request on its way, whose answer is awaited.
struct Asking<'a> {
    single: &'a mut Single,
    method: &'a Method,
    upload: &'a mut Upload,
    early: &'a mut (dyn HearEarly + Send),
    /// Runs while the body is held back.
    patience: Option<Pin<Box<Sleep>>>,
    /// The pod takes no more of the request.
    is_stuck: bool,
}

impl Asking<'_> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Answer, SendFault>> {
        loop {
            // The first words of an exchange are ours.
            let was_begun = self.upload.is_begun();
            if was_begun && let Poll::Ready(answer) = self.poll_answer(cx) {
                return Poll::Ready(answer);
            }
            if self.patience.as_mut().is_some_and(|it| it.as_mut().poll(cx).is_ready()) {
                self.let_flow();
            }
            if !self.is_stuck
                && let Poll::Ready(Err(error)) = self.single.poll_upload(cx, self.upload)
            {
                match error {
                    UploadError::Client(error) => {
                        return Poll::Ready(Err(SendFault::Client(error)));
                    }
                    UploadError::Pod(error) if !self.upload.is_begun() => {
                        return Poll::Ready(Err(PodError::Io(error).into()));
                    }
                    // What the pod had to say before may still be read, even if all of that was in this one go.
                    UploadError::Pod(_) => self.is_stuck = true,
                }
            }
            if was_begun || !self.upload.is_begun() {
                return Poll::Pending;
            }
        }
    }

    /// Reads on to the final answer.
    fn poll_answer(&mut self, cx: &mut Context<'_>) -> Poll<Result<Answer, SendFault>> {
        loop {
            let answer = ready!(self.single.poll_head(cx, self.method))?;
            match answer.status {
                StatusCode::CONTINUE => self.let_flow(),
                StatusCode::SWITCHING_PROTOCOLS => return Poll::Ready(Ok(answer)),
                status if status.is_informational() => self.early.hear(status, &answer.headers),
                _ => return Poll::Ready(Ok(answer)),
            }
        }
    }

    fn let_flow(&mut self) {
        self.patience = None;
        self.upload.flow();
    }
}

impl Reading {
    /// The next frame of the answer.
    pub fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, PodError>>> {
        loop {
            match self.next_frame() {
                Ok(Some(frame)) => return Poll::Ready(frame.map(Ok)),
                Ok(None) => {}
                Err(error) => return Poll::Ready(Some(Err(error.into()))),
            }
            match ready!(self.single.poll_read(cx)) {
                Ok(0) if matches!(self.ends, Ends::AtClose) => self.ends = Ends::Empty,
                Ok(0) => return Poll::Ready(Some(Err(PodError::Closed))),
                Ok(_) => {}
                Err(error) => return Poll::Ready(Some(Err(PodError::Io(error)))),
            }
        }
    }

    /// A frame of what was read; `None` inside if there is none any more, outside if more has to come first.
    fn next_frame(&mut self) -> Result<Option<Option<Frame<Bytes>>>, Malformed> {
        let from = &mut self.single.buffer;
        match &mut self.ends {
            Ends::Empty | Ends::After(0) => Ok(Some(None)),
            Ends::Chunks(chunks) => Ok(chunks.read(from)?.map(|piece| match piece {
                Piece::Data(data) => Some(Frame::data(data)),
                Piece::Trailers(trailers) => Some(Frame::trailers(trailers)),
                Piece::End => None,
            })),
            Ends::After(_) | Ends::AtClose if from.is_empty() => Ok(None),
            Ends::After(left) => {
                let some = usize::try_from(*left).unwrap_or(usize::MAX).min(from.len());
                *left -= some as u64;
                Ok(Some(Some(Frame::data(from.split_to(some).freeze()))))
            }
            Ends::AtClose => Ok(Some(Some(Frame::data(from.split().freeze())))),
        }
    }

    /// Whether all was read.
    pub fn is_end(&self) -> bool {
        match &self.ends {
            Ends::Empty | Ends::After(0) => true,
            Ends::Chunks(chunks) => chunks.is_over(),
            Ends::After(_) | Ends::AtClose => false,
        }
    }

    /// What is known of the answer's length.
    pub fn size_hint(&self) -> SizeHint {
        match self.ends {
            Ends::Empty => SizeHint::with_exact(0),
            Ends::After(left) => SizeHint::with_exact(left),
            Ends::Chunks(_) | Ends::AtClose => SizeHint::default(),
        }
    }

    /// The connection, if it may serve another request: both this one and its answer are over, in order.
    pub fn end(mut self) -> Option<Single> {
        if let Some(mut rest) = self.upload.take() {
            self.single.write = rest.sent.try_recv().ok();
        }
        self.single.used = Instant::now();
        let is_clean = self.single.write.is_some() && self.single.buffer.is_empty();
        (self.keeps && self.is_end() && is_clean).then_some(self.single)
    }

    /// Closes the sending half. `false`: the request is still being sent.
    pub fn pass_fin(&mut self, cx: &mut Context<'_>) -> bool {
        self.keeps = false;
        let write = self.single.write.as_mut();
        write.is_some_and(|write| Pin::new(write).poll_shutdown(cx).is_ready())
    }

    /// Leaves HTTP: the pod has switched to another protocol.
    pub fn into_raw(mut self) -> Option<Raw> {
        let write = self.single.write.take()?;
        let stream = self.single.read.reunite(write).ok()?;
        Some(Raw { said: self.single.buffer.freeze(), stream })
    }
}

/// Whether a request may be sent again although a pod may have seen it (RFC 9110 §9.2.1): Go's client takes these.
fn is_safe(method: &Method) -> bool {
    [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE].contains(method)
}

#[cfg(test)]
mod tests;
