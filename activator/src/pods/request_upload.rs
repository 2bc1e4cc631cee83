//! Shell: a request on its way to a pod that speaks HTTP/1.1: its head, then its body as the client sends it.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, header, request};
use http_body::{Body as _, Frame};
use tokio::{io::AsyncWrite, net::tcp::OwnedWriteHalf};

use crate::{
    clients::socket::RawRequestTarget,
    edge::client_headers::describes_client,
    h1::{self, RequestBodyFraming, chunked},
    pods::request_body::PodRequestBody,
};

/// Request that is being sent.
#[derive(Debug)]
pub struct RequestUpload {
    /// Bytes to send before `data`: the head at first, later chunk sizes.
    bytes_before: BytesMut,
    /// Bytes of the client's body to send.
    data: Bytes,
    /// Framing bytes to send behind `data`.
    framing_after: &'static [u8],
    body: PodRequestBody,
    framing: RequestBodyFraming,
    phase: UploadPhase,
    /// Names of the trailer fields that may be sent: those that the head announced.
    announced_trailers: Vec<HeaderName>,
    /// Number of bytes sent so far.
    bytes_sent: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UploadPhase {
    /// The body is held back until the pod asks for it.
    AwaitingContinue,
    /// The body is sent as it comes.
    Sending,
    /// The whole request is in `bytes_before` or was sent.
    Finished,
}

/// Error because of which a request was not sent completely.
#[derive(Debug)]
pub enum RequestUploadError {
    /// The client's body broke off or was invalid.
    Client(hyper::Error),
    /// The pod takes no more bytes.
    Pod(io::Error),
}

impl RequestUpload {
    /// Prepares a request. If the client waits for `100 Continue`, its body waits for
    /// [`release_body`](Self::release_body).
    pub fn new(head: &request::Parts, body: PodRequestBody) -> Self {
        let framing = match (&body, body.size_hint().exact()) {
            (PodRequestBody::Empty, _) => RequestBodyFraming::NoBody,
            (PodRequestBody::Client(_), Some(length)) => RequestBodyFraming::Length(length),
            (PodRequestBody::Client(_), None) => RequestBodyFraming::Chunked,
        };
        let target = head.extensions.get::<RawRequestTarget>().map(|it| &*it.0);
        let mut bytes_before = BytesMut::new();
        h1::write_request(head, target, framing, &mut bytes_before);
        // A request without a body has nothing to hold back, whatever it expects.
        let phase = match framing {
            RequestBodyFraming::NoBody => UploadPhase::Finished,
            RequestBodyFraming::Length(_) | RequestBodyFraming::Chunked
                if expects_continue(&head.headers) =>
            {
                UploadPhase::AwaitingContinue
            }
            RequestBodyFraming::Length(_) | RequestBodyFraming::Chunked => UploadPhase::Sending,
        };
        let announced_trailers = if framing == RequestBodyFraming::Chunked {
            announced_trailers(&head.headers)
        } else {
            Vec::new()
        };
        let (data, framing_after) = (Bytes::new(), &b""[..]);
        Self {
            bytes_before,
            data,
            framing_after,
            body,
            framing,
            phase,
            announced_trailers,
            bytes_sent: 0,
        }
    }

    /// Releases a body that is held back.
    pub fn release_body(&mut self) {
        if self.phase == UploadPhase::AwaitingContinue {
            self.phase = UploadPhase::Sending;
        }
    }

    /// Returns true if the body waits for the pod's `100 Continue`.
    pub fn is_awaiting_continue(&self) -> bool {
        self.phase == UploadPhase::AwaitingContinue
    }

    /// Returns true if the whole request was sent.
    pub fn is_finished(&self) -> bool {
        self.phase == UploadPhase::Finished && !self.has_bytes()
    }

    /// Returns true if any byte was sent.
    pub fn is_started(&self) -> bool {
        self.bytes_sent > 0
    }

    /// Returns true if the request has no body.
    pub fn has_no_body(&self) -> bool {
        self.framing == RequestBodyFraming::NoBody
    }

    /// Body as it was before anything of it was sent; `None`: more was sent than is kept.
    pub fn into_body(self) -> Option<PodRequestBody> {
        self.body.into_unsent()
    }

    /// Sends as much as possible. Ready once the whole request was sent, or if that is impossible.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        pod: &mut OwnedWriteHalf,
    ) -> Poll<Result<(), RequestUploadError>> {
        loop {
            // The next frame is fetched only when the last one was sent, so that at most one is buffered here.
            let is_waiting_for_client = self.phase == UploadPhase::Sending
                && self.data.is_empty()
                && self.framing_after.is_empty()
                && self.poll_next_frame(cx).map_err(RequestUploadError::Client)?.is_pending();
            if self.has_bytes() {
                ready!(self.poll_write(cx, pod)).map_err(RequestUploadError::Pod)?;
            } else if is_waiting_for_client || self.phase == UploadPhase::AwaitingContinue {
                return Poll::Pending;
            } else if self.phase == UploadPhase::Finished {
                return Poll::Ready(Ok(()));
            }
        }
    }

    fn has_bytes(&self) -> bool {
        !self.bytes_before.is_empty() || !self.data.is_empty() || !self.framing_after.is_empty()
    }

    /// Fetches the next frame of the body into the buffers.
    fn poll_next_frame(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        match ready!(Pin::new(&mut self.body).poll_frame(cx)).transpose()? {
            Some(frame) => self.buffer_frame(frame),
            None => self.finish(None),
        }
        Poll::Ready(Ok(()))
    }

    fn buffer_frame(&mut self, frame: Frame<Bytes>) {
        match frame.into_data() {
            // A chunk without bytes would end the body.
            Ok(data) if data.is_empty() => {}
            Ok(data) => {
                if self.framing == RequestBodyFraming::Chunked {
                    chunked::write_chunk_size(data.len(), &mut self.bytes_before);
                    self.framing_after = chunked::CHUNK_END;
                }
                self.data = data;
            }
            Err(frame) => {
                // A pod may use a trailer field like one of the head. So only fields pass that the head has announced,
                // and that no component on the way has to check.
                let announced = std::mem::take(&mut self.announced_trailers);
                let trailers = frame.into_trailers().ok().map(|mut trailers| {
                    let others = |name: &&HeaderName| !announced.contains(name);
                    let others: Vec<_> = trailers.keys().filter(others).cloned().collect();
                    others.into_iter().for_each(|name| drop(trailers.remove(name)));
                    trailers
                });
                self.finish(trailers.as_ref());
            }
        }
    }

    fn finish(&mut self, trailers: Option<&HeaderMap>) {
        if self.framing == RequestBodyFraming::Chunked {
            chunked::write_last_chunk(trailers, &mut self.bytes_before);
        }
        self.phase = UploadPhase::Finished;
    }

    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        pod: &mut OwnedWriteHalf,
    ) -> Poll<io::Result<()>> {
        // One system call for the framing and the data of a chunk.
        let slices = [&self.bytes_before[..], &self.data[..], self.framing_after].map(IoSlice::new);
        let mut count = ready!(Pin::new(pod).poll_write_vectored(cx, &slices))?;
        if count == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        self.bytes_sent += count as u64;
        // The bytes go in this order: framing before the data, the data, framing behind it.
        let from_head = count.min(self.bytes_before.len());
        self.bytes_before.advance(from_head);
        count -= from_head;
        let from_data = count.min(self.data.len());
        self.data.advance(from_data);
        self.framing_after = &self.framing_after[count - from_data..];
        Poll::Ready(Ok(()))
    }
}

/// Returns true if the client waits for `100 Continue` before it sends the body.
fn expects_continue(headers: &HeaderMap) -> bool {
    headers
        .get(header::EXPECT)
        .is_some_and(|it| it.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

/// Trailer fields that the head announces (RFC 9110 §6.5.1), without those that frame, route or describe the message, and
/// without those that describe its client: any client could write them, and only the head has the activator's own.
fn announced_trailers(headers: &HeaderMap) -> Vec<HeaderName> {
    const NEVER: [HeaderName; 9] = [
        header::TRANSFER_ENCODING,
        header::CONTENT_LENGTH,
        header::HOST,
        header::TE,
        header::TRAILER,
        header::CONNECTION,
        header::AUTHORIZATION,
        header::CONTENT_ENCODING,
        header::CONTENT_TYPE,
    ];
    let values = headers.get_all(header::TRAILER).iter();
    let names = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    let names = names.filter_map(|it| HeaderName::from_bytes(it.trim_ascii()).ok());
    names.filter(|name| !NEVER.contains(name) && !describes_client(name)).collect()
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn no_trailer_frames_the_message_or_describes_the_client() {
        let mut headers = HeaderMap::new();
        for names in [
            "X-Sum, Content-Length",
            "X-Forwarded-Client-Cert, x_forwarded_client_cert,X-Forwarded-For, Forwarded",
            "x-real-ip, x_last",
        ] {
            headers.append(header::TRAILER, HeaderValue::from_static(names));
        }
        assert_eq!(announced_trailers(&headers), ["x-sum", "x_last"]);
    }
}
