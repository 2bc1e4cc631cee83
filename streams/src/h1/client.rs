//! Shell: hyper's HTTP/1.1 client over memory: where the client sees the end of a response, the model must see it too.
//!
//! A conversation is a text: for each request a byte for its kind, the bytes of its response, and [`END`]. The kinds are
//! `G` (GET), `P` (POST with a length), `U` (POST in chunks), `H` (HEAD) and `C` (CONNECT).

use std::{cell::Cell, convert::Infallible, future::poll_fn, pin::pin, rc::Rc, task::Poll};

use bytes::Bytes;
use http::{Method, Request, header};
use http_body::{Body, Frame};
use hyper::client::conn::http1::{self, SendRequest};

use super::{
    reference::{self, ReferenceRequestKind, UnusualForm},
    responses,
};
use crate::{
    ebpf_model::{EbpfModel, ModelEvent},
    memory_io::{MemoryIo, PolledTask},
    rng::SeededRng,
    segmentation,
    totals::ConformanceTotals,
};

/// Byte that ends the response to a request.
pub const END: u8 = 0xff;
/// Number of sendable pieces that lets a request's body pass whole: it has fewer than [`PIECES_BOUND`].
const ALL_PIECES: usize = PIECES_BOUND;
/// Bound of the number of pieces of a request's body.
const PIECES_BOUND: usize = 5;

/// Generates a conversation. In half of them something is unusual.
pub fn generate_conversation(rng: &mut SeededRng) -> Vec<u8> {
    let unusual_per_mille = *rng.pick(&[&0, &0, &0, &2, &2, &5, &15, &50, &200]);
    let mut text = Vec::new();
    for _ in 0..=rng.next_below(4) {
        let letter = *rng.pick(&[b"G", b"G", b"G", b"P", b"U", b"H", b"C"]);
        text.extend(letter);
        let closes = rng.next_bool(3);
        let response =
            responses::generate_response(kind_of(letter[0]), closes, unusual_per_mille, rng).bytes;
        text.extend(response.into_iter().filter(|byte| *byte != END));
        text.push(END);
    }
    text
}

fn kind_of(letter: u8) -> ReferenceRequestKind {
    match letter {
        b'H' => ReferenceRequestKind::Head,
        b'C' => ReferenceRequestKind::Connect,
        _ => ReferenceRequestKind::Plain,
    }
}

/// Parses a conversation: the kind of each request, and its response.
fn parse_conversation(conversation: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    let records = conversation.split(|byte| *byte == END);
    records.map_while(|record| record.split_first().map(|(letter, response)| (*letter, response)))
}

/// Returns true if hyper reads a response differently from other clients and RFC 9112. It continues in trailers behind
/// an empty line that ends with a bare line feed. It reads `chunked,` as another coding, `close` CRLF ` x` as no
/// `close`, and no list that has a byte outside ASCII. It refuses a carriage return inside a line of connection
/// options, where others end the line or read on. It also breaks off at a 101 that it did not request, where a SETTINGS
/// frame begins HTTP/2 for the model.
fn is_differing(letter: u8, response: &[u8]) -> bool {
    let differs = [
        UnusualForm::Trailer,
        UnusualForm::EmptyCoding,
        UnusualForm::FoldedClose,
        UnusualForm::ReturnInConnection,
        UnusualForm::NonAscii,
        UnusualForm::Http2Frame,
    ];
    reference::unusual_forms_of_response(response, kind_of(letter))
        .iter()
        .any(|form| differs.contains(form))
}

/// Body of a request, sent in pieces.
struct PiecewiseBody {
    /// Pieces that are not sent yet; the last is sent first.
    pieces: Vec<Bytes>,
    /// Number of pieces that may be sent now.
    sendable_pieces: Rc<Cell<usize>>,
}

impl Body for PiecewiseBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.pieces.is_empty() {
            true => Poll::Ready(None),
            false if self.sendable_pieces.get() == 0 => Poll::Pending,
            false => {
                self.sendable_pieces.set(self.sendable_pieces.get() - 1);
                Poll::Ready(self.pieces.pop().map(|piece| Ok(Frame::data(piece))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.pieces.is_empty()
    }
}

fn build_request(
    letter: u8,
    sendable_pieces: &Rc<Cell<usize>>,
    rng: &mut SeededRng,
) -> Request<PiecewiseBody> {
    let (method, uri) = match letter {
        b'H' => (Method::HEAD, "/"),
        b'C' => (Method::CONNECT, "example.com:443"),
        b'P' | b'U' => (Method::POST, "/"),
        _ => (Method::GET, "/"),
    };
    let has_body = method == Method::POST;
    let count = rng.next_below(PIECES_BOUND);
    let pieces = (0..count).map(|_| Bytes::from(vec![b'x'; 1 + rng.next_length(900)]));
    let pieces: Vec<Bytes> = if has_body { pieces.collect() } else { Vec::new() };
    let length: usize = pieces.iter().map(Bytes::len).sum();
    let sendable_pieces = Rc::clone(sendable_pieces);
    let mut request = Request::new(PiecewiseBody { pieces, sendable_pieces });
    if letter == b'P' {
        request.headers_mut().insert(header::CONTENT_LENGTH, length.into());
    }
    *request.method_mut() = method;
    *request.uri_mut() = uri.parse().unwrap_or_default();
    request
}

/// Progress of the response to the present request, with its status once it has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientExchangeState {
    Waiting,
    Begun(u16),
    Whole(u16),
    Upgraded,
    Broken,
}

/// Sends a request and reads its response to the end.
async fn exchange(
    mut sender: SendRequest<PiecewiseBody>,
    request: Request<PiecewiseBody>,
    state: Rc<Cell<ClientExchangeState>>,
) -> Option<SendRequest<PiecewiseBody>> {
    let connects = request.method() == Method::CONNECT;
    let response = match sender.send_request(request).await {
        Ok(response) => response,
        Err(_) => {
            state.set(ClientExchangeState::Broken);
            return None;
        }
    };
    let status = response.status();
    if status == 101 || connects && status.is_success() {
        state.set(ClientExchangeState::Upgraded);
        return None;
    }
    state.set(ClientExchangeState::Begun(status.as_u16()));
    let mut body = pin!(response.into_body());
    while let Some(frame) = poll_fn(|context| body.as_mut().poll_frame(context)).await {
        if frame.is_err() {
            state.set(ClientExchangeState::Broken);
            return None;
        }
    }
    state.set(ClientExchangeState::Whole(status.as_u16()));
    Some(sender)
}

/// Plays a conversation, cut by `rng`. The error describes the difference between model and client.
pub fn play(conversation: &[u8], rng: &mut SeededRng) -> Result<ConformanceTotals, String> {
    if parse_conversation(conversation).any(|(letter, response)| is_differing(letter, response)) {
        return Ok(ConformanceTotals { not_compared: 1, ..ConformanceTotals::default() });
    }
    let io = MemoryIo::default();
    let mut builder = http1::Builder::new();
    builder.allow_obsolete_multiline_headers_in_responses(rng.next_bool(50));
    let mut handshake = PolledTask::new(builder.handshake::<MemoryIo, PiecewiseBody>(io.clone()));
    handshake.poll_until_idle();
    let Some(Ok((sender, connection))) = handshake.output else {
        return Err("the client cannot begin".to_owned());
    };
    let mut case = HyperClientCase {
        connection: PolledTask::new(connection),
        io,
        model: EbpfModel::new(),
        sendable_pieces: Rc::default(),
        sent: Vec::new(),
        received: Vec::new(),
        whole_statuses: Vec::new(),
        state: ClientExchangeState::Waiting,
    };
    let outcome = case.run(conversation, sender, rng);
    outcome.map_err(|what| {
        let (state, whole, events) = (case.state, &case.whole_statuses, case.model.events());
        let client = &case.connection.output;
        format!("{what}\n  client {state:?} {client:?}\n  whole {whole:?}\n  events {events:?}")
    })
}

struct HyperClientCase<F: Future> {
    connection: PolledTask<F>,
    io: MemoryIo,
    model: EbpfModel,
    /// Number of pieces of the request's body that may be sent.
    sendable_pieces: Rc<Cell<usize>>,
    sent: Vec<u8>,
    received: Vec<u8>,
    /// Statuses of the responses that arrived whole.
    whole_statuses: Vec<u16>,
    state: ClientExchangeState,
}

impl<F: Future<Output = hyper::Result<()>>> HyperClientCase<F> {
    fn run(
        &mut self,
        conversation: &[u8],
        mut sender: SendRequest<PiecewiseBody>,
        rng: &mut SeededRng,
    ) -> Result<ConformanceTotals, String> {
        for (letter, response) in parse_conversation(conversation) {
            let state = Rc::new(Cell::new(ClientExchangeState::Waiting));
            self.sendable_pieces.set(rng.next_below(4));
            let request = build_request(letter, &self.sendable_pieces, rng);
            let mut task = PolledTask::new(exchange(sender, request, Rc::clone(&state)));
            self.poll_and_compare(&mut task, &state, rng)?;
            for segment in segmentation::split(0, response.len(), rng) {
                if matches!(self.state, ClientExchangeState::Whole(_) | ClientExchangeState::Broken)
                {
                    break;
                }
                self.deliver_response(&response[segment], rng);
                self.poll_and_compare(&mut task, &state, rng)?;
                self.sendable_pieces.set(self.sendable_pieces.get() + rng.next_below(2));
            }
            self.sendable_pieces.set(ALL_PIECES);
            self.poll_and_compare(&mut task, &state, rng)?;
            match (self.state, task.output.take().flatten()) {
                (ClientExchangeState::Whole(_), Some(back)) if self.connection.output.is_none() => {
                    sender = back
                }
                _ => break,
            }
            if !sender.is_ready() {
                break;
            }
        }
        self.finish()
    }

    /// Sends bytes of a response to the model and the client. The model also gets retransmissions, which repeat earlier
    /// bytes. The client gets each byte once, as TCP delivers it.
    fn deliver_response(&mut self, bytes: &[u8], rng: &mut SeededRng) {
        let from = self.received.len();
        self.received.extend(bytes);
        let start = if rng.next_bool(10) { rng.next_below(from + 1) } else { from };
        self.model.response_segment(start, &self.received[start..]);
        self.io.push_incoming(bytes);
    }

    /// Polls client and exchange until both wait, and compares the model with the client.
    fn poll_and_compare<E>(
        &mut self,
        task: &mut PolledTask<impl Future<Output = E>>,
        state: &Cell<ClientExchangeState>,
        rng: &mut SeededRng,
    ) -> Result<(), String> {
        loop {
            self.connection.poll_until_idle();
            task.poll_until_idle();
            if !self.connection.is_woken() {
                break;
            }
        }
        let from = self.sent.len();
        self.sent.extend(self.io.take_outgoing());
        for segment in segmentation::split(from, self.sent.len(), rng) {
            self.model.request_segment(segment.start, &self.sent[segment]);
        }
        if self.state != state.get() {
            self.state = state.get();
            if let ClientExchangeState::Whole(status) = self.state {
                self.whole_statuses.push(status);
            }
        }
        let is_in_flight = match self.state {
            ClientExchangeState::Broken => return Ok(()),
            ClientExchangeState::Whole(_) => false,
            ClientExchangeState::Waiting
            | ClientExchangeState::Begun(_)
            | ClientExchangeState::Upgraded => true,
        };
        match self.model.is_busy() == is_in_flight {
            true => Ok(()),
            false => Err(format!("in flight for the client: {is_in_flight}")),
        }
    }

    /// Closes the connection in the model only, and compares the responses that hyper has read whole. A response that
    /// ends with the connection is not among them.
    fn finish(&mut self) -> Result<ConformanceTotals, String> {
        self.model.close(true);
        let refused = usize::from(self.state == ClientExchangeState::Broken);
        let (responses, mut ended) = (self.whole_statuses.len(), Vec::new());
        for event in self.model.events() {
            match event {
                ModelEvent::Finished(status) => ended.push(*status),
                ModelEvent::Missed(_) => return Err("a request was missed".to_owned()),
                ModelEvent::Opaque => return Err("HTTP/1.1 passes for something else".to_owned()),
                ModelEvent::Desync | ModelEvent::Stray if ended.len() < responses => {
                    return Err("boundaries lost".to_owned());
                }
                ModelEvent::Http2 | ModelEvent::Responded(..) => {
                    return Err("HTTP/1.1 passes for HTTP/2".to_owned());
                }
                ModelEvent::Started
                | ModelEvent::Closed
                | ModelEvent::Aborted
                | ModelEvent::Stray
                | ModelEvent::Desync => {}
            }
        }
        // A response that the client broke off may have looked whole to the model.
        let has_same_responses =
            ended.len() <= responses + refused && ended.starts_with(&self.whole_statuses);
        if !has_same_responses {
            return Err("other responses".to_owned());
        }
        Ok(ConformanceTotals {
            requests: responses as u64,
            refused: refused as u64,
            ..ConformanceTotals::default()
        })
    }
}
