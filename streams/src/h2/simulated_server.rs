//! Shell: crate h2's server over memory, with a simulated application.

use std::{collections::BTreeMap, future::Future as _, pin::Pin};

use bytes::Bytes;
use h2::{
    Reason, RecvStream, SendStream,
    server::{self, Connection, Handshake, SendResponse},
};
use http::{
    HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, header::CONTENT_TYPE,
};

use crate::{
    memory_io::{ManualPoller, MemoryIo},
    rng::SeededRng,
};

const STATUSES: [u16; 9] = [200, 200, 200, 204, 304, 404, 429, 500, 503];

/// Status and outcome that the application has sent for a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SentOutcome {
    /// Status of the response; 0: none yet.
    pub(super) status: u16,
    /// Value of `grpc-status`, if the application has sent one.
    pub(super) grpc: Option<u16>,
}

/// Request that the application works on.
struct SimHttp2Call {
    id: u32,
    request: Option<RecvStream>,
    respond: Option<SendResponse<Bytes>>,
    send: Option<SendStream<Bytes>>,
}

enum SimHttp2State {
    Handshaking(Handshake<MemoryIo, Bytes>),
    Open(Connection<MemoryIo, Bytes>),
    Over,
}

/// Simulated server: crate h2's connection and the application's requests.
pub(super) struct SimHttp2Server {
    state: SimHttp2State,
    poller: ManualPoller,
    calls: Vec<SimHttp2Call>,
    /// All requests that were given to the application, by stream, with what it has sent for each.
    pub(super) given_requests: BTreeMap<u32, SentOutcome>,
}

impl SimHttp2Server {
    pub(super) fn new(io: MemoryIo, rng: &mut SeededRng) -> Self {
        let mut builder = server::Builder::new();
        builder.max_concurrent_streams(*rng.pick(&[&3, &100, &1_000, &10_000]));
        builder.initial_window_size(*rng.pick(&[&100, &65_535, &1_000_000]));
        builder.enable_connect_protocol();
        builder.max_concurrent_reset_streams(1_000).max_pending_accept_reset_streams(1_000);
        builder.max_local_error_reset_streams(Some(1_000));
        let state = SimHttp2State::Handshaking(builder.handshake(io));
        Self {
            state,
            poller: ManualPoller::default(),
            calls: Vec::new(),
            given_requests: BTreeMap::new(),
        }
    }

    /// Returns true if the server has ended the connection.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, SimHttp2State::Over)
    }

    /// Polls the server until it waits.
    pub(super) fn poll_until_idle(&mut self) {
        loop {
            match &mut self.state {
                SimHttp2State::Handshaking(shake) => {
                    match self.poller.poll_until_idle(|context| Pin::new(&mut *shake).poll(context))
                    {
                        Some(Ok(connection)) => self.state = SimHttp2State::Open(connection),
                        Some(Err(_)) => self.state = SimHttp2State::Over,
                        None => return,
                    }
                }
                SimHttp2State::Open(connection) => {
                    match self.poller.poll_until_idle(|context| connection.poll_accept(context)) {
                        Some(Some(Ok((request, respond)))) => self.accept(request, respond),
                        Some(Some(Err(_)) | None) => self.state = SimHttp2State::Over,
                        None => return,
                    }
                }
                SimHttp2State::Over => return,
            }
        }
    }

    fn accept(&mut self, request: Request<RecvStream>, respond: SendResponse<Bytes>) {
        let id = respond.stream_id().as_u32();
        self.given_requests.insert(id, SentOutcome::default());
        let request = Some(request.into_body());
        self.calls.push(SimHttp2Call { id, request, respond: Some(respond), send: None });
    }

    /// Takes a step with one of the open requests. Returns false if there are none.
    pub(super) fn step(&mut self, rng: &mut SeededRng) -> bool {
        if self.calls.is_empty() {
            return false;
        }
        let index = rng.next_below(self.calls.len());
        if rng.next_bool(30) {
            self.calls[index].read_body(rng.next_length(3_000), &self.poller);
        }
        let call = &mut self.calls[index];
        let sent = self.given_requests.get_mut(&call.id).expect("it was accepted");
        if call.step(sent, rng).is_none() {
            self.calls.swap_remove(index);
        }
        true
    }

    /// Ends all open requests.
    pub(super) fn finish_calls(&mut self) {
        for mut call in std::mem::take(&mut self.calls) {
            call.read_body(usize::MAX, &self.poller);
            let sent = self.given_requests.get_mut(&call.id).expect("it was accepted");
            if let Some(send) = &mut call.send {
                let _reset_meanwhile = send.send_data(Bytes::new(), true);
            } else if let Some(respond) = &mut call.respond {
                sent.status = 200;
                let _reset_meanwhile = respond.send_response(Response::new(()), true);
            }
        }
    }

    /// Shuts the connection down: without further requests, or with an immediate end of all.
    pub(super) fn shut_down(&mut self, is_abrupt: bool) {
        let SimHttp2State::Open(connection) = &mut self.state else { return };
        if is_abrupt {
            connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
        } else {
            connection.graceful_shutdown();
        }
    }
}

impl SimHttp2Call {
    /// Reads the request's body, and returns the flow-control window to the client.
    fn read_body(&mut self, max_count: usize, poller: &ManualPoller) {
        let mut left = max_count;
        while let Some(request) = self.request.as_mut().filter(|_| left > 0) {
            match poller.poll_until_idle(|context| request.poll_data(context)) {
                Some(Some(Ok(bytes))) => {
                    left = left.saturating_sub(bytes.len().max(1));
                    let _reset_meanwhile = request.flow_control().release_capacity(bytes.len());
                }
                Some(Some(Err(_)) | None) => self.request = None,
                None => return,
            }
        }
    }

    /// Takes a step with this request. `None`: there is nothing more to do.
    #[allow(clippy::too_many_lines, reason = "a list of what an application may do")]
    fn step(&mut self, sent: &mut SentOutcome, rng: &mut SeededRng) -> Option<()> {
        match (&mut self.send, &mut self.respond) {
            (Some(send), _) => match rng.next_below(20) {
                0 => {
                    send.send_reset(Reason::INTERNAL_ERROR);
                    None
                }
                // Dropped without an end: h2 resets the stream.
                1 => None,
                2..5 => {
                    let status = rng.next_below(3) as u16;
                    sent.grpc = Some(status);
                    let name = HeaderName::from_static("grpc-status");
                    let mut trailers = HeaderMap::new();
                    if rng.next_bool(15) {
                        trailers.insert("x-first", HeaderValue::from(rng.next_below(3)));
                    }
                    trailers.insert(name, HeaderValue::from(status));
                    send.send_trailers(trailers).ok()?;
                    None
                }
                _ => {
                    let is_end_stream = rng.next_bool(35);
                    let data = Bytes::from(vec![b'x'; rng.next_length(20_000)]);
                    send.send_data(data, is_end_stream).ok()?;
                    (!is_end_stream).then_some(())
                }
            },
            (None, Some(respond)) => match rng.next_below(20) {
                0 => {
                    respond.send_reset(Reason::REFUSED_STREAM);
                    None
                }
                1 => None,
                2 | 3 => {
                    let mut interim = Response::new(());
                    *interim.status_mut() = StatusCode::EARLY_HINTS;
                    respond.send_informational(interim).ok()
                }
                _ => {
                    let is_end_stream = rng.next_bool(30);
                    sent.status = STATUSES[rng.next_below(STATUSES.len())];
                    let mut response = Response::new(());
                    *response.status_mut() = StatusCode::from_u16(sent.status).unwrap_or_default();
                    let value = HeaderValue::from(rng.next_below(5));
                    let headers = response.headers_mut();
                    if sent.status == 200 && rng.next_bool(40) {
                        let value = HeaderValue::from_static("application/grpc");
                        headers.insert(CONTENT_TYPE, value);
                        if is_end_stream {
                            let status = rng.next_below(3) as u16;
                            sent.grpc = Some(status);
                            headers.insert("grpc-status", HeaderValue::from(status));
                        }
                    } else {
                        headers.insert("x-number", value);
                    }
                    self.send = Some(respond.send_response(response, is_end_stream).ok()?);
                    (!is_end_stream).then_some(())
                }
            },
            (None, None) => None,
        }
    }
}
