//! Shell: one connection to a pod in HTTP/1.1, and one exchange after another over it.
//!
//! No task drives the connection: the task that waits for the response does. The response is polled before more of the
//! request is sent, because a pod may respond before it has read the body, and close. Its final response ends the
//! upload.

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
    h1::{self, Http1ParseError, Http1ResponseHead, ResponseBodyFraming, chunked::ChunkedPiece},
    pods::{
        exchange_error::{ExchangeError, PodError, PodSendError},
        request_body::PodRequestBody,
        request_upload::{RequestUpload, RequestUploadError},
    },
};

mod byte_exchange;

pub use byte_exchange::ByteRequest;

/// Time after which a body is sent that waits for the pod's `100 Continue`: that of Go's client.
const CONTINUE_TIMEOUT: Duration = Duration::from_secs(1);
/// Number of bytes that are read at once.
pub const READ_CHUNK_BYTES: usize = 16 << 10;

/// Sink of interim responses of a pod.
pub trait InterimResponseSink {
    /// Called for each interim response, before the final one.
    fn on_interim_response(&mut self, status: StatusCode, headers: &HeaderMap);
}

/// One HTTP/1.1 connection to a pod.
#[derive(Debug)]
pub struct Http1PodConnection {
    read: OwnedReadHalf,
    /// Sending half; `None` while a body is sent by a task of its own.
    write: Option<OwnedWriteHalf>,
    buffer: BytesMut,
    /// Number of bytes at the front of `buffer` in which no end of a head was found.
    scanned_bytes: usize,
    last_used: Instant,
    max_idle: Duration,
    /// True once it has served a request.
    has_served_request: bool,
}

/// Body of a response that is being read, on its connection.
#[derive(Debug)]
pub struct Http1ResponseBody {
    connection: Http1PodConnection,
    framing: ResponseBodyFraming,
    is_reusable: bool,
    upload_task: Option<UploadTask>,
}

/// Task that sends the rest of a body while the response is read. Dropping it ends the task.
#[derive(Debug)]
struct UploadTask {
    write_half: oneshot::Receiver<OwnedWriteHalf>,
    _task: AbortOnDropHandle<()>,
}

/// Connection that has left HTTP after a switch of protocols.
#[derive(Debug)]
pub struct UpgradedPodStream {
    /// Bytes that the pod has sent behind its response head.
    pub buffered: Bytes,
    /// TCP connection to the pod.
    pub stream: TcpStream,
}

impl Http1PodConnection {
    /// Wraps a connection that was just opened.
    pub fn new(stream: TcpStream, max_idle: Duration) -> Self {
        let (read, write) = stream.into_split();
        let (write, last_used) = (Some(write), Instant::now());
        let (buffer, scanned_bytes, has_served_request) = (BytesMut::new(), 0, false);
        Self { read, write, buffer, scanned_bytes, last_used, max_idle, has_served_request }
    }

    /// Returns true if it may serve a request: it is open, silent, and has not been idle for too long.
    pub fn is_reusable(&self) -> bool {
        self.last_used.elapsed() < self.max_idle && self.is_silent()
    }

    /// Returns true if the pod has neither closed it nor sent anything unasked. A system call is needed only if it has.
    fn is_silent(&self) -> bool {
        let mut byte = [0];
        let result = self.read.try_read(&mut byte);
        self.buffer.is_empty()
            && result.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Sends a request and waits for the head of its final response. Dropping the future ends the exchange.
    pub async fn send(
        mut self,
        request: Request<PodRequestBody>,
        interim_sink: &mut (dyn InterimResponseSink + Send),
    ) -> Result<Response<Http1ResponseBody>, PodSendError> {
        if !self.is_silent() {
            return Err(PodSendError { resendable: Some(request), cause: PodError::Closed.into() });
        }
        // A pod may have closed an idle connection just as the request was sent. That is likely only for one that has
        // served a request before. A repetition is safe only without a body and for safe methods.
        let is_reused = std::mem::replace(&mut self.has_served_request, true);
        let (head, body) = request.into_parts();
        let mut upload = RequestUpload::new(&head, body);
        let cause = match self.exchange(&head.method, &mut upload, interim_sink).await {
            Ok(response) => return Ok(self.into_response(response, upload)),
            Err(cause) => cause,
        };
        let is_broken_off = matches!(cause, ExchangeError::Pod(PodError::Closed | PodError::Io(_)));
        let may_be_seen_twice = is_reused && upload.has_no_body() && is_safe_method(&head.method);
        // Any byte of a response means that the pod has seen the request.
        let is_unseen =
            is_broken_off && self.buffer.is_empty() && (!upload.is_started() || may_be_seen_twice);
        let body = if is_unseen { upload.into_body() } else { None };
        Err(PodSendError { resendable: body.map(|body| Request::from_parts(head, body)), cause })
    }

    async fn exchange(
        &mut self,
        method: &Method,
        upload: &mut RequestUpload,
        interim_sink: &mut (dyn InterimResponseSink + Send),
    ) -> Result<Http1ResponseHead, ExchangeError> {
        let continue_timer =
            upload.is_awaiting_continue().then(|| Box::pin(tokio::time::sleep(CONTINUE_TIMEOUT)));
        let mut exchange = Http1Exchange {
            connection: self,
            method,
            upload,
            interim_sink,
            continue_timer,
            is_upload_broken: false,
        };
        poll_fn(|cx| exchange.poll(cx)).await
    }

    fn poll_upload(
        &mut self,
        cx: &mut Context<'_>,
        upload: &mut RequestUpload,
    ) -> Poll<Result<(), RequestUploadError>> {
        match &mut self.write {
            Some(write) => upload.poll(cx, write),
            None => Poll::Ready(Err(RequestUploadError::Pod(io::ErrorKind::BrokenPipe.into()))),
        }
    }

    fn poll_head(
        &mut self,
        cx: &mut Context<'_>,
        method: &Method,
    ) -> Poll<Result<Http1ResponseHead, ExchangeError>> {
        loop {
            // The buffer may hold a whole head already, behind an interim response.
            let head = h1::parse_response_head(&mut self.buffer, &mut self.scanned_bytes, method);
            if let Some(head) = head.map_err(PodError::from)? {
                return Poll::Ready(Ok(head));
            }
            if ready!(self.poll_read(cx)).map_err(PodError::Io)? == 0 {
                return Poll::Ready(Err(PodError::Closed.into()));
            }
        }
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.buffer.reserve(READ_CHUNK_BYTES);
        poll_read_buf(Pin::new(&mut self.read), cx, &mut self.buffer)
    }

    /// Builds the response from its head. The rest of the upload goes on in a task of its own.
    fn into_response(
        mut self,
        response: Http1ResponseHead,
        mut upload: RequestUpload,
    ) -> Response<Http1ResponseBody> {
        let Http1ResponseHead { status, reason, headers, framing, is_reusable } = response;
        // The pod has responded without the body. It gets none, and the connection cannot be used again.
        let is_reusable = is_reusable && !upload.is_awaiting_continue();
        // The pod may send its response while it still reads the body: both go on at the same time.
        let write_half_left = if upload.is_finished() || upload.is_awaiting_continue() {
            None
        } else {
            self.write.take()
        };
        let upload_task = write_half_left.map(|mut write| {
            let (write_half_tx, write_half) = oneshot::channel();
            let task = tokio::spawn(async move {
                match poll_fn(|cx| upload.poll(cx, &mut write)).await {
                    // The sending half comes back only if the whole body was sent: otherwise the connection is lost.
                    Ok(()) => drop(write_half_tx.send(write)),
                    Err(error) => debug!(?error, "the rest of a body was not sent"),
                }
            });
            UploadTask { write_half, _task: AbortOnDropHandle::new(task) }
        });
        let mut response = Response::new(Http1ResponseBody {
            connection: self,
            framing,
            is_reusable,
            upload_task,
        });
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        if let Some(reason) = reason.and_then(|it| ReasonPhrase::try_from(it).ok()) {
            response.extensions_mut().insert(reason);
        }
        response
    }
}

/// Exchange whose request is being sent and whose response is awaited.
struct Http1Exchange<'a> {
    connection: &'a mut Http1PodConnection,
    method: &'a Method,
    upload: &'a mut RequestUpload,
    interim_sink: &'a mut (dyn InterimResponseSink + Send),
    /// Timer that runs while the body is held back.
    continue_timer: Option<Pin<Box<Sleep>>>,
    /// True once the pod takes no more of the request.
    is_upload_broken: bool,
}

impl Http1Exchange<'_> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Http1ResponseHead, ExchangeError>> {
        loop {
            // Before the first bytes of the request the pod has nothing to respond to.
            let was_started = self.upload.is_started();
            if was_started && let Poll::Ready(response) = self.poll_response_head(cx) {
                return Poll::Ready(response);
            }
            if self.continue_timer.as_mut().is_some_and(|it| it.as_mut().poll(cx).is_ready()) {
                self.release_body();
            }
            if !self.is_upload_broken
                && let Poll::Ready(Err(error)) = self.connection.poll_upload(cx, self.upload)
            {
                match error {
                    RequestUploadError::Client(error) => {
                        return Poll::Ready(Err(ExchangeError::Client(error)));
                    }
                    RequestUploadError::Pod(error) if !self.upload.is_started() => {
                        return Poll::Ready(Err(PodError::Io(error).into()));
                    }
                    // A response that the pod has sent before may still be read, even if the whole request was one
                    // write.
                    RequestUploadError::Pod(_) => self.is_upload_broken = true,
                }
            }
            // If the first bytes were sent in this poll, the response is polled once more, which registers its waker.
            if was_started || !self.upload.is_started() {
                return Poll::Pending;
            }
        }
    }

    /// Reads until the final response, or until the switch of protocols.
    fn poll_response_head(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Http1ResponseHead, ExchangeError>> {
        loop {
            let response = ready!(self.connection.poll_head(cx, self.method))?;
            match response.status {
                StatusCode::CONTINUE => self.release_body(),
                StatusCode::SWITCHING_PROTOCOLS => return Poll::Ready(Ok(response)),
                status if status.is_informational() => {
                    self.interim_sink.on_interim_response(status, &response.headers)
                }
                _ => return Poll::Ready(Ok(response)),
            }
        }
    }

    fn release_body(&mut self) {
        self.continue_timer = None;
        self.upload.release_body();
    }
}

impl Http1ResponseBody {
    /// Polls for the next frame of the body.
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
            match ready!(self.connection.poll_read(cx)) {
                // Only a body without framing may end with the connection; any other one is incomplete.
                Ok(0) if matches!(self.framing, ResponseBodyFraming::UntilClose) => {
                    self.framing = ResponseBodyFraming::NoBody
                }
                Ok(0) => return Poll::Ready(Some(Err(PodError::Closed))),
                Ok(_) => {}
                Err(error) => return Poll::Ready(Some(Err(PodError::Io(error)))),
            }
        }
    }

    /// Frame of the bytes that were read. The inner `None` is the end of the body; the outer one asks for more bytes.
    fn next_frame(&mut self) -> Result<Option<Option<Frame<Bytes>>>, Http1ParseError> {
        let from = &mut self.connection.buffer;
        match &mut self.framing {
            ResponseBodyFraming::NoBody | ResponseBodyFraming::Length(0) => Ok(Some(None)),
            ResponseBodyFraming::Chunked(chunks) => {
                Ok(chunks.next_piece(from)?.map(|piece| match piece {
                    ChunkedPiece::Data(data) => Some(Frame::data(data)),
                    ChunkedPiece::Trailers(trailers) => Some(Frame::trailers(trailers)),
                    ChunkedPiece::End => None,
                }))
            }
            ResponseBodyFraming::Length(_) | ResponseBodyFraming::UntilClose if from.is_empty() => {
                Ok(None)
            }
            ResponseBodyFraming::Length(left) => {
                let count = usize::try_from(*left).unwrap_or(usize::MAX).min(from.len());
                *left -= count as u64;
                Ok(Some(Some(Frame::data(from.split_to(count).freeze()))))
            }
            ResponseBodyFraming::UntilClose => Ok(Some(Some(Frame::data(from.split().freeze())))),
        }
    }

    /// Returns true if the whole body was read.
    pub fn is_end(&self) -> bool {
        match &self.framing {
            ResponseBodyFraming::NoBody | ResponseBodyFraming::Length(0) => true,
            ResponseBodyFraming::Chunked(chunks) => chunks.is_finished(),
            ResponseBodyFraming::Length(_) | ResponseBodyFraming::UntilClose => false,
        }
    }

    /// Size of the rest of the body, as far as it is known.
    pub fn size_hint(&self) -> SizeHint {
        match self.framing {
            ResponseBodyFraming::NoBody => SizeHint::with_exact(0),
            ResponseBodyFraming::Length(left) => SizeHint::with_exact(left),
            ResponseBodyFraming::Chunked(_) | ResponseBodyFraming::UntilClose => {
                SizeHint::default()
            }
        }
    }

    /// Connection, if it may serve another request: the request and its response are complete, and nothing follows.
    pub fn into_reusable(mut self) -> Option<Http1PodConnection> {
        // A body that is still being sent makes the connection unusable: its end is not known here.
        if let Some(mut upload_task) = self.upload_task.take() {
            self.connection.write = upload_task.write_half.try_recv().ok();
        }
        self.connection.last_used = Instant::now();
        let is_clean = self.connection.write.is_some() && self.connection.buffer.is_empty();
        (self.is_reusable && self.is_end() && is_clean).then_some(self.connection)
    }

    /// Closes the sending half. Returns false if the request is still being sent.
    pub fn forward_fin(&mut self, cx: &mut Context<'_>) -> bool {
        // A half-closed connection cannot carry another request.
        self.is_reusable = false;
        let write = self.connection.write.as_mut();
        write.is_some_and(|write| Pin::new(write).poll_shutdown(cx).is_ready())
    }

    /// Leaves HTTP, because the pod has switched to another protocol.
    pub fn into_upgraded(mut self) -> Option<UpgradedPodStream> {
        let write = self.connection.write.take()?;
        let stream = self.connection.read.reunite(write).ok()?;
        Some(UpgradedPodStream { buffered: self.connection.buffer.freeze(), stream })
    }
}

/// Returns true if a request may be sent again although a pod may have seen it (RFC 9110 §9.2.1), as in Go's client.
fn is_safe_method(method: &Method) -> bool {
    [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE].contains(method)
}

#[cfg(test)]
mod tests;
