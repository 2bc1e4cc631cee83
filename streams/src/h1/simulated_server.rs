//! Pure: a simulated server that responds to the requests of [`super::reference`], early or late; all must be counted.
//!
//! Unlike hyper's server it responds before it has read a body, reads the body afterwards, and differs in the forms
//! that it accepts.

use super::{
    event_check::{ServedRequests, check_events, is_uncounted_foreign},
    reference::{self, ReferenceHead, ReferenceRequestKind, ReferenceStop, ServerProfile},
    responses::{self, GeneratedResponse, ResponseEnd},
};
use crate::{
    ebpf_model::{EbpfModel, ModelEvent},
    rng::SeededRng,
    segmentation::{self, ReceivedRanges},
    totals::ConformanceTotals,
};

/// Responses by which a server refuses a request; the empty one is a bare close.
const REFUSALS: [&str; 3] = [
    "HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno",
    "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n400 Bad Request",
    "",
];

/// Plays the requests of `stream` to a server that `rng` chooses, cut by it. The error describes the difference
/// between model and server.
pub fn play(stream: &[u8], rng: &mut SeededRng) -> Result<ConformanceTotals, String> {
    let server = ServerProfile::ALL[rng.next_below(ServerProfile::ALL.len())];
    let requests = reference::read_requests(stream, server);
    let mut case = SimServerCase {
        stream,
        heads: requests.whole.iter().map(|(head, _)| *head).chain(requests.partial_head).collect(),
        is_part: requests.partial_head.is_some(),
        refuses_at: (requests.stop == ReferenceStop::Refused).then_some(requests.at),
        responses: Vec::new(),
        heads_arrived: 0,
        expected: Vec::new(),
        served: Vec::new(),
        is_over: false,
        is_at_close: false,
        had_gap_at_close: false,
        model: EbpfModel::new(),
        received: ReceivedRanges::default(),
    };
    let outcome = case.run(rng);
    outcome.map_err(|what| {
        let (events, log) = (case.model.events(), &case.expected);
        let (heads, refuses) = (case.heads.len(), case.refuses_at);
        let responses = case.responses[..case.responses.len().min(800)].escape_ascii();
        format!(
            "{what}\n  server {server:?}: {heads} heads, refuses at {refuses:?}, odd {:?}\n  expected {log:?}\n  events   {events:?}\n  sent {responses}",
            requests.unusual_forms
        )
    })?;
    let refused = u64::from(case.refuses_at.is_some());
    Ok(ConformanceTotals {
        requests: case.served.len() as u64,
        refused,
        ..ConformanceTotals::default()
    })
}

struct SimServerCase<'a> {
    stream: &'a [u8],
    heads: Vec<ReferenceHead>,
    /// True if the last head has a body that did not arrive whole.
    is_part: bool,
    /// Offset in `stream` at which the server refuses a request; `None`: it accepts all.
    refuses_at: Option<usize>,
    /// Bytes of all responses so far.
    responses: Vec<u8>,
    /// Number of heads that have arrived whole.
    heads_arrived: usize,
    /// Events that the model must report.
    expected: Vec<ModelEvent>,
    /// Statuses of the whole responses so far, one for each request.
    served: Vec<u16>,
    /// True if the server sends no further response.
    is_over: bool,
    /// True if the last response ends with the connection.
    is_at_close: bool,
    /// True if bytes behind a gap had arrived when the connection ended.
    had_gap_at_close: bool,
    model: EbpfModel,
    received: ReceivedRanges,
}

impl SimServerCase<'_> {
    fn run(&mut self, rng: &mut SeededRng) -> Result<(), &'static str> {
        let stream = self.stream;
        for segment in segmentation::arrival_order(stream.len(), rng) {
            self.model.request_segment(segment.start, &stream[segment.clone()]);
            self.received.add_segment(&segment);
            self.record_heads();
            self.compare()?;
            while !self.is_over && rng.next_bool(60) && self.respond(rng)? {}
        }
        while !self.is_over && self.respond(rng)? {}
        // Some requests stay without a response, when the client or the server has closed.
        self.close();
        self.finish()
    }

    /// Records the heads that have arrived whole.
    fn record_heads(&mut self) {
        while self
            .heads
            .get(self.heads_arrived)
            .is_some_and(|head| head.end <= self.received.contiguous_len())
        {
            if !self.is_over && self.heads_arrived == self.served.len() {
                self.expected.push(ModelEvent::Started);
            }
            self.heads_arrived += 1;
        }
    }

    /// Responds to the next request, or refuses it. Returns true if there may be another one.
    fn respond(&mut self, rng: &mut SeededRng) -> Result<bool, &'static str> {
        let index = self.served.len();
        let has_refused_bytes =
            self.refuses_at.is_some_and(|at| at <= self.received.contiguous_len());
        // The body of the last request may be the refused part. A response to HEAD would have no body.
        let may_refuse_body = self.is_part
            && index + 1 == self.heads.len()
            && self.heads[index].kind != ReferenceRequestKind::Head;
        if has_refused_bytes && (index == self.heads.len() || may_refuse_body && rng.next_bool(50))
        {
            self.send(rng.pick(&REFUSALS).as_bytes(), rng)?;
            self.is_over = true;
            self.close();
            return Ok(false);
        }
        if index == self.heads_arrived || rng.next_bool(3) {
            return Ok(false);
        }
        let head = self.heads[index];
        let closes = rng.next_bool(if head.closes { 80 } else { 3 });
        let GeneratedResponse { bytes, status, end } =
            responses::generate_response(head.kind, closes, 0, rng);
        self.send(&bytes, rng)?;
        self.is_over = head.closes || end != ResponseEnd::AtLastByte;
        if end == ResponseEnd::AtClose {
            self.is_at_close = true;
            return Ok(false);
        }
        self.served.push(status);
        self.expected.push(ModelEvent::Finished(status));
        // The model cannot know that the server will close, so the client's next bytes begin a request.
        if self.heads_arrived > self.served.len() && end == ResponseEnd::AtLastByte {
            self.expected.push(ModelEvent::Started);
        }
        self.compare()?;
        if self.is_over {
            self.close();
        }
        Ok(!self.is_over)
    }

    /// Ends the connection, and with it the request in flight.
    fn close(&mut self) {
        self.model.close(true);
        self.had_gap_at_close |= self.received.has_gap();
        let started = self.expected.iter().filter(|event| **event == ModelEvent::Started).count();
        let ended = self
            .expected
            .iter()
            .filter(|event| {
                matches!(event, ModelEvent::Finished(_) | ModelEvent::Closed | ModelEvent::Aborted)
            })
            .count();
        if started > ended {
            self.expected.push(if self.is_at_close {
                ModelEvent::Closed
            } else {
                ModelEvent::Aborted
            });
        }
    }

    /// Sends bytes of a response; the request stays in flight until the last one.
    fn send(&mut self, bytes: &[u8], rng: &mut SeededRng) -> Result<(), &'static str> {
        let from = self.responses.len();
        self.responses.extend(bytes);
        for segment in segmentation::split(from, self.responses.len(), rng) {
            self.compare()?;
            let start =
                if rng.next_bool(10) { rng.next_below(segment.start + 1) } else { segment.start };
            self.model.response_segment(start, &self.responses[start..segment.end]);
        }
        Ok(())
    }

    /// Returns true if the refused bytes have arrived; the model may count them in more than one way.
    fn is_past_refusal(&self) -> bool {
        let received_len = self.received.contiguous_len();
        self.refuses_at.is_some_and(|at| at <= received_len)
            || self.received.has_gap() && self.refuses_at.is_some()
    }

    fn compare(&self) -> Result<(), &'static str> {
        if is_uncounted_foreign(self.stream, self.model.events()) {
            return Ok(());
        }
        if self.is_past_refusal() {
            let is_open =
                self.heads_arrived.min(self.heads.len()) > self.served.len() && !self.is_over;
            return if is_open && !self.model.is_busy() { Err("not in flight") } else { Ok(()) };
        }
        // The model has already read a head behind a gap in a body.
        if !self.received.has_gap() && !self.matches_expected() {
            return Err("other events");
        }
        Ok(())
    }

    /// Returns true if the model's events are the expected ones. A head behind a gap in the last body may have begun a
    /// request when the connection ended, even if the gap closes later.
    fn matches_expected(&self) -> bool {
        let (events, ahead) = (self.model.events(), [ModelEvent::Started, ModelEvent::Aborted]);
        let earlier = events.strip_suffix(&ahead).filter(|_| self.had_gap_at_close);
        events == self.expected || earlier == Some(&self.expected)
    }

    fn finish(&mut self) -> Result<(), &'static str> {
        if is_uncounted_foreign(self.stream, self.model.events()) {
            return Ok(());
        }
        if self.refuses_at.is_some() {
            let served = ServedRequests {
                statuses: &self.served,
                may_refuse: true,
                is_upgraded: self.is_over,
            };
            return check_events(self.model.events(), served);
        }
        if self.matches_expected() { Ok(()) } else { Err("other events at the end") }
    }
}
