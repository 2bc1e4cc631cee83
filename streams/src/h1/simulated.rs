//! Pure: a simulated server that responds to the requests of [`super::reference`], early or late; all must be counted.
//!
//! Unlike hyper's server it responds before it has read a body, reads the body afterwards, and differs in the forms
//! that it accepts.

use super::{
    judge::{ServedRequests, judge, passes_for_foreign},
    reference::{self, ReferenceHead, ReferenceRequestKind, ReferenceStop, ServerProfile},
    responses::{self, GeneratedResponse, ResponseEnd},
};
use crate::{
    ConformanceTotals,
    dice::SeededRng,
    segments::{self, ReceivedRanges},
    tap::{EbpfModel, ModelEvent},
};

/// Responses by which a server refuses a request; the empty one is a bare close.
const REFUSALS: [&str; 3] = [
    "HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno",
    "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n400 Bad Request",
    "",
];

/// Plays the requests of `stream` to a server that `dice` chooses, cut by it. The error describes the difference
/// between model and server.
pub fn play(stream: &[u8], dice: &mut SeededRng) -> Result<ConformanceTotals, String> {
    let server = ServerProfile::ALL[dice.below(ServerProfile::ALL.len())];
    let requests = reference::requests(stream, server);
    let mut play = SimServerCase {
        stream,
        heads: requests.whole.iter().map(|(head, _)| *head).chain(requests.part).collect(),
        is_part: requests.part.is_some(),
        refuses_at: (requests.stop == ReferenceStop::Refused).then_some(requests.at),
        answers: Vec::new(),
        asked: 0,
        log: Vec::new(),
        served: Vec::new(),
        is_over: false,
        is_at_close: false,
        was_ahead: false,
        tap: EbpfModel::new(),
        received: ReceivedRanges::default(),
    };
    let outcome = play.run(dice);
    outcome.map_err(|what| {
        let (events, log) = (play.tap.events(), &play.log);
        let (heads, refuses) = (play.heads.len(), play.refuses_at);
        let answers = play.answers[..play.answers.len().min(800)].escape_ascii();
        format!(
            "{what}\n  server {server:?}: {heads} heads, refuses at {refuses:?}, odd {:?}\n  expected {log:?}\n  events   {events:?}\n  answers {answers}",
            requests.odd
        )
    })?;
    let refused = u64::from(play.refuses_at.is_some());
    Ok(ConformanceTotals {
        requests: play.served.len() as u64,
        refused,
        ..ConformanceTotals::default()
    })
}

struct SimServerCase<'a> {
    stream: &'a [u8],
    heads: Vec<ReferenceHead>,
    /// True if the last head has a body that did not arrive whole.
    is_part: bool,
    refuses_at: Option<usize>,
    /// Bytes of all responses so far.
    answers: Vec<u8>,
    /// Number of heads that have arrived whole.
    asked: usize,
    /// Events that the model must report.
    log: Vec<ModelEvent>,
    served: Vec<u16>,
    /// True if the server sends no further response.
    is_over: bool,
    /// True if the last response ends with the connection.
    is_at_close: bool,
    /// True if bytes behind a gap had arrived when the connection ended.
    was_ahead: bool,
    tap: EbpfModel,
    received: ReceivedRanges,
}

impl SimServerCase<'_> {
    fn run(&mut self, dice: &mut SeededRng) -> Result<(), &'static str> {
        let stream = self.stream;
        for segment in segments::arrivals(stream.len(), dice) {
            self.tap.request(segment.start, &stream[segment.clone()]);
            self.received.take(&segment);
            self.hear();
            self.compare()?;
            while !self.is_over && dice.chance(60) && self.answer(dice)? {}
        }
        while !self.is_over && self.answer(dice)? {}
        // Some requests stay without a response, when the client or the server has closed.
        self.close();
        self.conclude()
    }

    /// Records the heads that have arrived whole.
    fn hear(&mut self) {
        while self.heads.get(self.asked).is_some_and(|head| head.end <= self.received.whole()) {
            if !self.is_over && self.asked == self.served.len() {
                self.log.push(ModelEvent::Started);
            }
            self.asked += 1;
        }
    }

    /// Responds to the next request, or refuses it. Returns true if there may be another one.
    fn answer(&mut self, dice: &mut SeededRng) -> Result<bool, &'static str> {
        let index = self.served.len();
        let refuses = self.refuses_at.is_some_and(|at| at <= self.received.whole());
        // The body of the last request may be the refused part. A response to HEAD would have no body.
        let is_refused = self.is_part
            && index + 1 == self.heads.len()
            && self.heads[index].kind != ReferenceRequestKind::Head;
        if refuses && (index == self.heads.len() || is_refused && dice.chance(50)) {
            self.send(dice.pick(&REFUSALS).as_bytes(), dice)?;
            self.is_over = true;
            self.close();
            return Ok(false);
        }
        if index == self.asked || dice.chance(3) {
            return Ok(false);
        }
        let head = self.heads[index];
        let closes = dice.chance(if head.closes { 80 } else { 3 });
        let GeneratedResponse { bytes, status, ends } =
            responses::answer(head.kind, closes, 0, dice);
        self.send(&bytes, dice)?;
        self.is_over = head.closes || ends != ResponseEnd::Here;
        if ends == ResponseEnd::AtClose {
            self.is_at_close = true;
            return Ok(false);
        }
        self.served.push(status);
        self.log.push(ModelEvent::Finished(status));
        // The model cannot know that the server will close, so the client's next bytes begin a request.
        if self.asked > self.served.len() && ends == ResponseEnd::Here {
            self.log.push(ModelEvent::Started);
        }
        self.compare()?;
        if self.is_over {
            self.close();
        }
        Ok(!self.is_over)
    }

    /// Ends the connection, and with it the request in flight.
    fn close(&mut self) {
        self.tap.close(true);
        self.was_ahead |= self.received.has_gap();
        let started = self.log.iter().filter(|event| **event == ModelEvent::Started).count();
        let ended = self
            .log
            .iter()
            .filter(|event| {
                matches!(event, ModelEvent::Finished(_) | ModelEvent::Closed | ModelEvent::Cut)
            })
            .count();
        if started > ended {
            self.log.push(if self.is_at_close { ModelEvent::Closed } else { ModelEvent::Cut });
        }
    }

    /// Sends bytes of a response; the request stays in flight until the last one.
    fn send(&mut self, bytes: &[u8], dice: &mut SeededRng) -> Result<(), &'static str> {
        let from = self.answers.len();
        self.answers.extend(bytes);
        for segment in segments::cut(from, self.answers.len(), dice) {
            self.compare()?;
            let again = if dice.chance(10) { dice.below(segment.start + 1) } else { segment.start };
            self.tap.response(again, &self.answers[again..segment.end]);
        }
        Ok(())
    }

    /// Returns true if the refused bytes have arrived; the model may count them in more than one way.
    fn is_past_refusal(&self) -> bool {
        let seen = self.received.whole();
        self.refuses_at.is_some_and(|at| at <= seen)
            || self.received.has_gap() && self.refuses_at.is_some()
    }

    fn compare(&self) -> Result<(), &'static str> {
        if passes_for_foreign(self.stream, self.tap.events()) {
            return Ok(());
        }
        if self.is_past_refusal() {
            let is_open = self.asked.min(self.heads.len()) > self.served.len() && !self.is_over;
            return if is_open && !self.tap.is_busy() { Err("not in flight") } else { Ok(()) };
        }
        // The model has already read a head behind a gap in a body.
        if !self.received.has_gap() && !self.agrees() {
            return Err("other events");
        }
        Ok(())
    }

    /// Returns true if the model's events are the expected ones. A head behind a gap in the last body may have begun a
    /// request when the connection ended, even if the gap closes later.
    fn agrees(&self) -> bool {
        let (events, ahead) = (self.tap.events(), [ModelEvent::Started, ModelEvent::Cut]);
        let before = events.strip_suffix(&ahead).filter(|_| self.was_ahead);
        events == self.log || before == Some(&self.log)
    }

    fn conclude(&mut self) -> Result<(), &'static str> {
        if passes_for_foreign(self.stream, self.tap.events()) {
            return Ok(());
        }
        if self.refuses_at.is_some() {
            let served = ServedRequests {
                statuses: &self.served,
                may_refuse: true,
                is_tunnel: self.is_over,
            };
            return judge(self.tap.events(), served);
        }
        if self.agrees() { Ok(()) } else { Err("other events at the end") }
    }
}
