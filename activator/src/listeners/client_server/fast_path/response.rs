//! Shell: the response to a plain request, from the pod to the client.
//!
//! A body that has come with its head leaves in the same system call. Any other body passes as on the general path.

use std::{
    future::poll_fn,
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::Poll,
};

use bytes::{Buf as _, Bytes};
use http::header;
use http_body::{Body, Frame};
use tokio::{
    io::{AsyncWrite as _, AsyncWriteExt as _},
    time::Instant,
};

use super::{
    FastPathBuffers, FastPathConnection, PathEnd, PreparedRequest,
    exchange::{PodExchange, ReceivedHead},
};
use crate::{
    clients::{
        connections::{ActiveRequestGuard, ClientConnection},
        socket::ClientSocket,
    },
    clock::unix_s,
    edge::plain_response::{finish_response_head, write_own_response},
    h1::{
        ResponseBodyFraming, chunked,
        date::{DATE_BYTES, format_date},
    },
    listeners::charged_body::ChargedResponseBody,
    pods::{
        connection::{PodConnection, PodResponseBody},
        http1_connection::Http1PodConnection,
    },
    request_error::ProxyRequestError,
    requests::{
        forwarder::log_failure, request_timer::RequestTimer, response_body::ClientResponseBody,
        watched_body::ClientWatchedBody,
    },
    revisions::revision::PodPermit,
};

/// End of a chunk that is not the last one with data, and of one that is.
const CHUNK_ENDS: [&[u8]; 2] = [b"\r\n", b"\r\n0\r\n\r\n"];
/// Last chunk of a body.
const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// Date of the present second.
#[derive(Debug)]
pub(super) struct CachedDate {
    unix_s: u64,
    text: [u8; DATE_BYTES],
}

impl Default for CachedDate {
    fn default() -> Self {
        Self { unix_s: 0, text: format_date(0) }
    }
}

impl CachedDate {
    fn current(&mut self) -> &[u8; DATE_BYTES] {
        let now = unix_s();
        if now != self.unix_s {
            *self = Self { unix_s: now, text: format_date(now) };
        }
        &self.text
    }
}

impl FastPathConnection<'_> {
    /// Passes a pod's response on. From here on the request is no longer in the buffer.
    pub(super) async fn send_response(
        &mut self,
        exchange: PodExchange,
        request: &PreparedRequest,
        started: Instant,
        request_guard: ActiveRequestGuard,
    ) -> Result<(), PathEnd> {
        let PodExchange { permit, mut pod, head } = exchange;
        self.buffers.inbound.advance(request.head_length + request.body_length);
        self.forwarder.metrics.count_response(head.status);
        self.forwarder.metrics.fast_path_requests.inc();
        let route = &request.route;
        let (entrypoint, client) = (self.entrypoint, self.client);
        let reconnects =
            self.forwarder.must_reconnect(entrypoint, client, &route.service, &route.revision);
        let is_last = self.is_stopping() || reconnects;
        self.finish_head(head.has_date, is_last);
        let sent = match whole_length(&head.framing, pod.received().len()) {
            Some(length) => self.send_whole(permit, pod, length, head.is_reusable).await,
            None => {
                let timer = RequestTimer::started_at(route.timeouts, started);
                let body = stream_body(permit, *pod, head, timer);
                let max_buffered = body.max_buffered();
                let watched = ClientWatchedBody::new(body, self.socket.clone());
                let charged = ChargedResponseBody::new(watched, request_guard, max_buffered);
                // Boxed, because it is rarer and would enlarge the future of every request.
                Box::pin(self.send_stream(charged)).await
            }
        };
        sent.map_err(|_gone| PathEnd::Break)?;
        if is_last { Err(PathEnd::Close) } else { Ok(()) }
    }

    /// Sends the response of the activator itself to a request that got none of a pod.
    pub(super) async fn send_failure(
        &mut self,
        request: &PreparedRequest,
        failure: &ProxyRequestError,
    ) -> Result<(), PathEnd> {
        log_failure(self.entrypoint, self.client.address, failure);
        self.buffers.inbound.advance(request.head_length + request.body_length);
        // No call of gRPC comes here, as its head is not plain.
        let response = failure.response(None, Bytes::from);
        self.forwarder.metrics.count_response(response.status());
        self.forwarder.metrics.fast_path_requests.inc();
        let is_last = self.is_stopping() || response.headers().contains_key(header::CONNECTION);
        self.buffers.response.clear();
        write_own_response(&response, &mut self.buffers.response);
        self.finish_head(false, is_last);
        let slices = [&self.buffers.response[..], &response.body()[..]];
        let sent = write_all(&mut self.socket, slices, 0).await;
        sent.map_err(|_gone| PathEnd::Break)?;
        if is_last { Err(PathEnd::Close) } else { Ok(()) }
    }

    /// Writes the last lines of the head for the client.
    fn finish_head(&mut self, has_date: bool, is_last: bool) {
        let date = if has_date { None } else { Some(self.date.current()) };
        finish_response_head(date, is_last, &mut self.buffers.response);
    }

    /// Sends a response whose body of `length` bytes was received. The pod is free for another request before the client
    /// has taken everything.
    async fn send_whole(
        &mut self,
        permit: PodPermit,
        mut pod: Box<Http1PodConnection>,
        length: usize,
        is_reusable: bool,
    ) -> io::Result<()> {
        let Self { socket, buffers, client_connection, .. } = self;
        let head = &buffers.response[..];
        let written = write_once(socket, [head, &pod.received()[..length]]).await;
        let total = head.len() + length;
        if matches!(written, Ok(count) if count < total) {
            let body = pod.received().split_to(length).freeze();
            release_pod(permit, pod, is_reusable);
            return send_rest(socket, client_connection, [head, &body[..]], written?).await;
        }
        pod.received().advance(length);
        release_pod(permit, pod, is_reusable);
        written?;
        socket.flush().await
    }

    /// Sends a response whose body comes from the pod bit by bit.
    async fn send_stream(
        &mut self,
        mut body: ChargedResponseBody<ClientWatchedBody>,
    ) -> io::Result<()> {
        let Self {
            socket,
            buffers: FastPathBuffers { request: size_line, response: head, .. },
            ..
        } = self;
        let is_chunked = body.size_hint().exact().is_none();
        let mut unsent_head = &head[..];
        let mut next = poll_once(&mut body).await;
        if next.is_pending() {
            write_all(socket, [unsent_head], 0).await?;
            unsent_head = &[];
        }
        loop {
            let frame = match next {
                Poll::Ready(frame) => frame,
                Poll::Pending => poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await,
            };
            let Some(frame) = frame else { break };
            // Trailers are for clients that ask for them, which is unusual.
            let data = frame.map_err(io::Error::other)?.into_data().unwrap_or_default();
            // Seen before the data is written, so that the end goes out together with it.
            next = poll_once(&mut body).await;
            if data.is_empty() {
                continue;
            }
            let is_end = matches!(next, Poll::Ready(None));
            size_line.clear();
            if is_chunked {
                chunked::write_chunk_size(data.len(), size_line);
            }
            let chunk_end = if is_chunked { CHUNK_ENDS[usize::from(is_end)] } else { &[] };
            write_all(socket, [unsent_head, &size_line[..], &data[..], chunk_end], 0).await?;
            unsent_head = &[];
            if is_end {
                return Ok(());
            }
        }
        let last = if is_chunked { LAST_CHUNK } else { &[] };
        write_all(socket, [unsent_head, last], 0).await
    }
}

/// Length of a body that was received as a whole; `None`: more of it has to come.
fn whole_length(framing: &ResponseBodyFraming, received: usize) -> Option<usize> {
    match framing {
        ResponseBodyFraming::NoBody => Some(0),
        ResponseBodyFraming::Length(length) => {
            usize::try_from(*length).ok().filter(|length| *length <= received)
        }
        ResponseBodyFraming::Chunked(_) | ResponseBodyFraming::UntilClose => None,
    }
}

/// Body of a response that comes bit by bit, with the timeouts of its request.
fn stream_body(
    permit: PodPermit,
    pod: Http1PodConnection,
    head: ReceivedHead,
    timer: RequestTimer,
) -> ClientResponseBody {
    let body = pod.into_response_body(head.framing, head.is_reusable);
    let body = PodResponseBody::Http1(Box::new(body));
    ClientResponseBody::from_pod(body, timer, Arc::new(permit), None)
}

/// Ends an exchange that is complete. The connection serves another request, if it may.
fn release_pod(permit: PodPermit, mut pod: Box<Http1PodConnection>, is_reusable: bool) {
    if pod.finish_exchange() && is_reusable {
        permit.pod.return_connection(PodConnection::Http1(pod));
    }
}

/// Sends the bytes behind the first `written` ones, which count for the client until it has taken them.
async fn send_rest(
    socket: &mut ClientSocket,
    client_connection: &Arc<ClientConnection>,
    slices: [&[u8]; 2],
    written: usize,
) -> io::Result<()> {
    let total: usize = slices.iter().map(|slice| slice.len()).sum();
    let _charge = client_connection.charge_response_bytes(total - written);
    write_all(socket, slices, written).await
}

/// Polls a body once. Its frame is there already, or it comes later.
async fn poll_once<B: Body + Unpin>(
    body: &mut B,
) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
    poll_fn(|cx| Poll::Ready(Pin::new(&mut *body).poll_frame(cx))).await
}

/// Writes as much as possible at once. Returns the number of bytes.
async fn write_once(socket: &mut ClientSocket, slices: [&[u8]; 2]) -> io::Result<usize> {
    let slices = slices.map(IoSlice::new);
    poll_fn(|cx| match Pin::new(&mut *socket).poll_write_vectored(cx, &slices) {
        Poll::Ready(written) => Poll::Ready(written),
        Poll::Pending => Poll::Ready(Ok(0)),
    })
    .await
}

/// Writes all bytes behind the first `written` ones, and flushes them.
async fn write_all<const N: usize>(
    socket: &mut ClientSocket,
    slices: [&[u8]; N],
    mut written: usize,
) -> io::Result<()> {
    let total: usize = slices.iter().map(|slice| slice.len()).sum();
    while written < total {
        let mut skipped = written;
        let rest = slices.map(|slice| {
            let from = skipped.min(slice.len());
            skipped -= from;
            IoSlice::new(&slice[from..])
        });
        match poll_fn(|cx| Pin::new(&mut *socket).poll_write_vectored(cx, &rest)).await? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            count => written += count,
        }
    }
    socket.flush().await
}
