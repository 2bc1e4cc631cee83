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
    ask::Ask,
    h1::{self, Sends, chunked},
    socket::RawTarget,
};

/// A request that is being sent.
#[derive(Debug)]
pub struct Upload {
    /// Bytes of ours, before `data`.
    out: BytesMut,
    /// Bytes of the client's.
    data: Bytes,
    /// Bytes of ours, behind `data`.
    after: &'static [u8],
    body: Ask,
    sends: Sends,
    phase: Phase,
    /// Names of the fields that may follow the body: those that the head announced.
    announced: Vec<HeaderName>,
    written: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The body is held back until the pod asks for it.
    Held,
    /// The body goes as it comes.
    Flows,
    /// All is in `out` or gone.
    Over,
}

/// Why a request could not be sent to its end.
#[derive(Debug)]
pub enum UploadError {
    /// Its body broke off or made no sense.
    Client(hyper::Error),
    /// The pod takes no more.
    Pod(io::Error),
}

impl Upload {
    /// A request to be sent. Its body waits for [`flow`](Self::flow) where the client waits for the pod's word.
    pub fn new(head: &request::Parts, body: Ask) -> Self {
        let sends = match (&body, body.size_hint().exact()) {
            (Ask::Empty, _) => Sends::Nothing,
            (Ask::Client(_), Some(length)) => Sends::Exactly(length),
            (Ask::Client(_), None) => Sends::Chunks,
        };
        let target = head.extensions.get::<RawTarget>().map(|it| &*it.0);
        let mut out = BytesMut::new();
        h1::write_request(head, target, sends, &mut out);
        let phase = match sends {
            Sends::Nothing => Phase::Over,
            Sends::Exactly(_) | Sends::Chunks if expects(&head.headers) => Phase::Held,
            Sends::Exactly(_) | Sends::Chunks => Phase::Flows,
        };
        let announced = if sends == Sends::Chunks { announced(&head.headers) } else { Vec::new() };
        let (data, after) = (Bytes::new(), &b""[..]);
        Self { out, data, after, body, sends, phase, announced, written: 0 }
    }

    /// Lets the body go.
    pub fn flow(&mut self) {
        if self.phase == Phase::Held {
            self.phase = Phase::Flows;
        }
    }

    /// Whether the body waits for the pod's word.
    pub fn is_held(&self) -> bool {
        self.phase == Phase::Held
    }

    /// Whether everything was sent.
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Over && !self.has_bytes()
    }

    /// Whether any byte was sent.
    pub fn is_begun(&self) -> bool {
        self.written > 0
    }

    /// Whether there is no body.
    pub fn is_bare(&self) -> bool {
        self.sends == Sends::Nothing
    }

    /// The body, as it was before anything of it was sent; `None` if that is not known any more.
    pub fn into_body(self) -> Option<Ask> {
        self.body.whole()
    }

    /// Sends what there is to send. Ready once that is all, or if it cannot be.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        pod: &mut OwnedWriteHalf,
    ) -> Poll<Result<(), UploadError>> {
        loop {
            let is_starved = self.phase == Phase::Flows
                && self.data.is_empty()
                && self.after.is_empty()
                && self.poll_fill(cx).map_err(UploadError::Client)?.is_pending();
            if self.has_bytes() {
                ready!(self.poll_write(cx, pod)).map_err(UploadError::Pod)?;
            } else if is_starved || self.phase == Phase::Held {
                return Poll::Pending;
            } else if self.phase == Phase::Over {
                return Poll::Ready(Ok(()));
            }
        }
    }

    fn has_bytes(&self) -> bool {
        !self.out.is_empty() || !self.data.is_empty() || !self.after.is_empty()
    }

    /// Takes the next frame of the body.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        match ready!(Pin::new(&mut self.body).poll_frame(cx)).transpose()? {
            Some(frame) => self.take(frame),
            None => self.end(None),
        }
        Poll::Ready(Ok(()))
    }

    fn take(&mut self, frame: Frame<Bytes>) {
        match frame.into_data() {
            // A chunk without bytes would be the last.
            Ok(data) if data.is_empty() => {}
            Ok(data) => {
                if self.sends == Sends::Chunks {
                    chunked::write_size(data.len(), &mut self.out);
                    self.after = chunked::AFTER_CHUNK;
                }
                self.data = data;
            }
            Err(frame) => {
                let announced = std::mem::take(&mut self.announced);
                let trailers = frame.into_trailers().ok().map(|mut trailers| {
                    let others = |name: &&HeaderName| !announced.contains(name);
                    let others: Vec<_> = trailers.keys().filter(others).cloned().collect();
                    others.into_iter().for_each(|name| drop(trailers.remove(name)));
                    trailers
                });
                self.end(trailers.as_ref());
            }
        }
    }

    fn end(&mut self, trailers: Option<&HeaderMap>) {
        if self.sends == Sends::Chunks {
            chunked::write_end(trailers, &mut self.out);
        }
        self.phase = Phase::Over;
    }

    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        pod: &mut OwnedWriteHalf,
    ) -> Poll<io::Result<()>> {
        let slices = [&self.out[..], &self.data[..], self.after].map(IoSlice::new);
        let mut count = ready!(Pin::new(pod).poll_write_vectored(cx, &slices))?;
        if count == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        self.written += count as u64;
        let ours = count.min(self.out.len());
        self.out.advance(ours);
        count -= ours;
        let theirs = count.min(self.data.len());
        self.data.advance(theirs);
        self.after = &self.after[count - theirs..];
        Poll::Ready(Ok(()))
    }
}

/// Whether the client waits for the pod's word before it sends the body.
fn expects(headers: &HeaderMap) -> bool {
    headers
        .get(header::EXPECT)
        .is_some_and(|it| it.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

/// Fields that may be sent behind the body (RFC 9110 §6.5.1): never any that frames, routes or explains the message.
fn announced(headers: &HeaderMap) -> Vec<HeaderName> {
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
    names.filter(|name| !NEVER.contains(name)).collect()
}
