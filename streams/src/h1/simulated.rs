//! Pure: a server made of [`super::reference`]: it answers what that one reads, early or late, and must be counted so.
//!
//! Unlike hyper's it answers before it has read a body, goes on reading that afterwards, and differs in what it takes.

use super::{
    judge::{Served, judge, passes_for_foreign},
    reference::{self, Head, Kind, Server, Stop},
    responses::{self, Answer, Ends},
};
use crate::{
    Outcome,
    dice::Dice,
    segments::{self, Received},
    tap::{Event, Tap},
};

/// How a server turns somebody away.
const REFUSALS: [&str; 3] = [
    "HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno",
    "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n400 Bad Request",
    "",
];

/// Plays the requests of `stream` to a server that `dice` chooses, cut by it. An error says on what counts and server
/// disagree.
pub fn play(stream: &[u8], dice: &mut Dice) -> Result<Outcome, String> {
    let server = Server::ALL[dice.below(Server::ALL.len())];
    let requests = reference::requests(stream, server);
    let mut play = Play {
        stream,
        heads: requests.whole.iter().map(|(head, _)| *head).chain(requests.part).collect(),
        is_part: requests.part.is_some(),
        refuses_at: (requests.stop == Stop::Refused).then_some(requests.at),
        answers: Vec::new(),
        asked: 0,
        log: Vec::new(),
        served: Vec::new(),
        is_over: false,
        is_at_close: false,
        was_ahead: false,
        tap: Tap::new(),
        received: Received::default(),
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
    Ok(Outcome { requests: play.served.len() as u64, refused, ..Outcome::default() })
}

struct Play<'a> {
    stream: &'a [u8],
    heads: Vec<Head>,
    /// The last of them has a body that did not come whole.
    is_part: bool,
    refuses_at: Option<usize>,
    /// All that was answered.
    answers: Vec<u8>,
    /// Heads that have come.
    asked: usize,
    /// What must have been seen.
    log: Vec<Event>,
    served: Vec<u16>,
    /// The server answers nothing more.
    is_over: bool,
    /// Its last answer ends with the connection.
    is_at_close: bool,
    /// When the connection went, something had come behind a gap.
    was_ahead: bool,
    tap: Tap,
    received: Received,
}

impl Play<'_> {
    fn run(&mut self, dice: &mut Dice) -> Result<(), &'static str> {
        let stream = self.stream;
        for segment in segments::arrivals(stream.len(), dice) {
            self.tap.request(segment.start, &stream[segment.clone()]);
            self.received.take(&segment);
            self.hear();
            self.compare()?;
            while !self.is_over && dice.chance(60) && self.answer(dice)? {}
        }
        while !self.is_over && self.answer(dice)? {}
        // Some are left without an answer, when the client or the server has gone.
        self.close();
        self.conclude()
    }

    /// Takes note of the heads that have come whole.
    fn hear(&mut self) {
        while self.heads.get(self.asked).is_some_and(|head| head.end <= self.received.whole()) {
            if !self.is_over && self.asked == self.served.len() {
                self.log.push(Event::Started);
            }
            self.asked += 1;
        }
    }

    /// Answers the next request, or turns it away. Returns whether there was one to answer.
    fn answer(&mut self, dice: &mut Dice) -> Result<bool, &'static str> {
        let index = self.served.len();
        let refuses = self.refuses_at.is_some_and(|at| at <= self.received.whole());
        // Of the last one, the body may be what is refused. An answer to HEAD would have none.
        let is_refused =
            self.is_part && index + 1 == self.heads.len() && self.heads[index].kind != Kind::Head;
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
        let Answer { bytes, status, ends } = responses::answer(head.kind, closes, 0, dice);
        self.send(&bytes, dice)?;
        self.is_over = head.closes || ends != Ends::Here;
        if ends == Ends::AtClose {
            self.is_at_close = true;
            return Ok(false);
        }
        self.served.push(status);
        self.log.push(Event::Finished(status));
        // Of a server that will close without a word, what the client has sent behind seems to be begun.
        if self.asked > self.served.len() && ends == Ends::Here {
            self.log.push(Event::Started);
        }
        self.compare()?;
        if self.is_over {
            self.close();
        }
        Ok(!self.is_over)
    }

    /// The connection is gone.
    fn close(&mut self) {
        self.tap.close(true);
        self.was_ahead |= self.received.has_gap();
        let started = self.log.iter().filter(|event| **event == Event::Started).count();
        let ended = self
            .log
            .iter()
            .filter(|event| matches!(event, Event::Finished(_) | Event::Closed | Event::Cut))
            .count();
        if started > ended {
            self.log.push(if self.is_at_close { Event::Closed } else { Event::Cut });
        }
    }

    /// Sends bytes; the request they answer is in flight until the last.
    fn send(&mut self, bytes: &[u8], dice: &mut Dice) -> Result<(), &'static str> {
        let from = self.answers.len();
        self.answers.extend(bytes);
        for segment in segments::cut(from, self.answers.len(), dice) {
            self.compare()?;
            let again = if dice.chance(10) { dice.below(segment.start + 1) } else { segment.start };
            self.tap.response(again, &self.answers[again..segment.end]);
        }
        Ok(())
    }

    /// Whether what the server refuses has come, so that the counts may have taken it one way or another.
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
        // A head that has come behind a gap in a body is seen already.
        if !self.received.has_gap() && !self.agrees() {
            return Err("other events");
        }
        Ok(())
    }

    /// Whether the events are those that must have been seen. What had come behind a gap in the last body when the
    /// connection went seemed to begin, also if the gap closes after that.
    fn agrees(&self) -> bool {
        let (events, ahead) = (self.tap.events(), [Event::Started, Event::Cut]);
        let before = events.strip_suffix(&ahead).filter(|_| self.was_ahead);
        events == self.log || before == Some(&self.log)
    }

    fn conclude(&mut self) -> Result<(), &'static str> {
        if passes_for_foreign(self.stream, self.tap.events()) {
            return Ok(());
        }
        if self.refuses_at.is_some() {
            let served =
                Served { statuses: &self.served, may_refuse: true, is_tunnel: self.is_over };
            return judge(self.tap.events(), served);
        }
        if self.agrees() { Ok(()) } else { Err("other events at the end") }
    }
}
