//! Shell: a request that crate h2's client has sent, and the actions of the application that waits for its response.

use std::{future::Future as _, pin::Pin, task::Poll};

use bytes::Bytes;
use h2::{Reason, RecvStream, SendStream, client::ResponseFuture};
use http::{HeaderMap, HeaderValue, header};

use crate::{memory_io::ManualPoller, rng::SeededRng};

/// State of a request as the client sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientStreamState {
    Open,
    Whole,
    Broken,
    /// The client has dropped the response. Its RST_STREAM follows a body for which the server has not opened a
    /// window yet.
    Dropped,
}

/// Request that the client has sent.
pub(super) struct ClientStream {
    pub(super) id: u32,
    pub(super) response: Option<ResponseFuture>,
    pub(super) body: Option<RecvStream>,
    pub(super) send: Option<SendStream<Bytes>>,
    pub(super) state: ClientStreamState,
}

impl ClientStream {
    /// Reads the response as far as it has arrived, at most `max_count` bytes of its body.
    pub(super) fn read_response(&mut self, max_count: usize, poller: &ManualPoller) {
        if let Some(response) = &mut self.response {
            match poller.poll_until_idle(|context| Pin::new(&mut *response).poll(context)) {
                Some(Ok(response)) => self.body = Some(response.into_body()),
                Some(Err(_)) => self.state = ClientStreamState::Broken,
                None => return,
            }
            self.response = None;
        }
        let mut left = max_count;
        while let Some(body) =
            self.body.as_mut().filter(|_| left > 0 && self.state == ClientStreamState::Open)
        {
            // `Ok`: bytes. `Err`: the end of the body, with an error if the stream was reset.
            let heard = poller.poll_until_idle(|context| match body.poll_data(context) {
                Poll::Ready(None) => body.poll_trailers(context).map(|end| Err(end.map(drop))),
                Poll::Ready(Some(Ok(bytes))) => Poll::Ready(Ok(bytes)),
                Poll::Ready(Some(Err(error))) => Poll::Ready(Err(Err(error))),
                Poll::Pending => Poll::Pending,
            });
            match heard {
                Some(Ok(bytes)) => {
                    left = left.saturating_sub(bytes.len().max(1));
                    let _reset_meanwhile = body.flow_control().release_capacity(bytes.len());
                }
                Some(Err(Ok(()))) => self.state = ClientStreamState::Whole,
                Some(Err(Err(_))) => self.state = ClientStreamState::Broken,
                None => return,
            }
        }
    }

    /// Sends a part of the request's body.
    pub(super) fn send_body(&mut self, rng: &mut SeededRng) {
        let Some(send) = &mut self.send else { return };
        let is_end_stream = rng.next_bool(40);
        let result = if is_end_stream && rng.next_bool(30) {
            let trailers = [(header::ETAG, HeaderValue::from_static("x"))];
            send.send_trailers(HeaderMap::from_iter(trailers))
        } else {
            send.send_data(Bytes::from(vec![b'y'; rng.next_length(9_000)]), is_end_stream)
        };
        if is_end_stream || result.is_err() {
            self.send = None;
        }
    }

    /// Drops the response; `sends_reset` resets the stream explicitly.
    pub(super) fn drop_response(&mut self, sends_reset: bool) {
        if let (true, Some(send)) = (sends_reset, &mut self.send) {
            send.send_reset(Reason::CANCEL);
        }
        // h2 resets the stream of dropped handles.
        (self.response, self.body, self.send) = (None, None, None);
        if self.state == ClientStreamState::Open {
            self.state = ClientStreamState::Dropped;
        }
    }
}
