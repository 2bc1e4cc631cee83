//! Shell: one exchange over a pod's HTTP/1.1 connection whose request is complete, as bytes.

use std::{
    io::{self, IoSlice},
    time::Instant,
};

use bytes::BytesMut;
use http::Method;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{Http1PodConnection, Http1ResponseBody, READ_CHUNK_BYTES};
use crate::{
    h1::{self, Http1ParseError, Http1ResponseHead, ResponseBodyFraming},
    pods::exchange_error::PodError,
};

/// Request that is complete in memory.
#[derive(Clone, Copy, Debug)]
pub struct ByteRequest<'a> {
    /// Head for the pod.
    pub head: &'a [u8],
    /// Body, with the length that the head states. Head and body together are small: the pod's kernel takes them even if
    /// its process reads nothing before it has responded.
    pub body: &'a [u8],
    /// True if a repetition changes nothing.
    pub is_safe: bool,
}

impl Http1PodConnection {
    /// Sends a request. Returns true if it may be sent again in case that no byte of a response comes. After an error no
    /// byte of it was sent. Dropping the future breaks the exchange off: the connection carries no other request.
    pub async fn send_bytes(&mut self, request: ByteRequest<'_>) -> Result<bool, PodError> {
        if !self.is_silent() {
            return Err(PodError::Closed);
        }
        let Some(write) = &mut self.write else { return Err(PodError::Closed) };
        // The same rule as for all other requests: see `send`.
        let is_reused = std::mem::replace(&mut self.has_served_request, true);
        let may_repeat = is_reused && request.body.is_empty() && request.is_safe;
        let (mut head, mut body) = (request.head, request.body);
        let mut is_started = false;
        while !head.is_empty() || !body.is_empty() {
            match write.write_vectored(&[IoSlice::new(head), IoSlice::new(body)]).await {
                Ok(0) if !is_started => return Err(PodError::Io(io::ErrorKind::WriteZero.into())),
                Err(error) if !is_started => return Err(PodError::Io(error)),
                // A response that the pod has sent before may still be read.
                Ok(0) | Err(_) => break,
                Ok(count) => {
                    is_started = true;
                    let from_head = count.min(head.len());
                    head = &head[from_head..];
                    body = &body[count - from_head..];
                }
            }
        }
        Ok(may_repeat)
    }

    /// Reads more bytes of the response into the buffer. The end of the connection is an error. Nothing is lost if the
    /// future is dropped.
    pub async fn receive(&mut self) -> Result<(), PodError> {
        self.buffer.reserve(READ_CHUNK_BYTES);
        match self.read.read_buf(&mut self.buffer).await {
            Ok(0) => Err(PodError::Closed),
            Ok(_) => Ok(()),
            Err(error) => Err(PodError::Io(error)),
        }
    }

    /// Bytes of the response that were received and not taken out.
    pub fn received(&mut self) -> &mut BytesMut {
        &mut self.buffer
    }

    /// Removes the head of a response from the front of the received bytes, once it is complete. The request is not a
    /// HEAD.
    pub fn parse_received_head(&mut self) -> Result<Option<Http1ResponseHead>, Http1ParseError> {
        h1::parse_response_head(&mut self.buffer, &mut self.scanned_bytes, &Method::GET)
    }

    /// Returns the body of the response whose head was taken out.
    pub fn into_response_body(
        self,
        framing: ResponseBodyFraming,
        is_reusable: bool,
    ) -> Http1ResponseBody {
        Http1ResponseBody { connection: self, framing, is_reusable, upload_task: None }
    }

    /// Ends an exchange whose response was taken out whole. Returns false if the connection can carry no other request,
    /// because the pod has sent more than the response.
    pub fn finish_exchange(&mut self) -> bool {
        self.last_used = Instant::now();
        self.write.is_some() && self.buffer.is_empty()
    }
}
