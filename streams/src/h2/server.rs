//! Shell: plays requests, written frame by frame, to crate h2's server; its requests must be the counted ones.

use super::{EventComparison, application::SimHttp2Server, reference::Http2Reference};
use crate::{
    ConformanceTotals,
    dice::SeededRng,
    memory::MemoryIo,
    segments::{self, ReceivedRanges},
    tap::EbpfModel,
};

/// Plays a client's bytes to the server, cut by `dice`. The error describes the difference between model and server.
pub fn play(stream: &[u8], dice: &mut SeededRng) -> Result<ConformanceTotals, String> {
    let io = MemoryIo::default();
    let mut play = H2ServerCase {
        server: SimHttp2Server::new(io.clone(), dice),
        io,
        tap: EbpfModel::new(),
        reference: Http2Reference::default(),
        comparison: EventComparison::default(),
        received: ReceivedRanges::default(),
        sent: 0,
    };
    let outcome = play.run(stream, dice);
    outcome.map_err(|what| {
        let (events, log) = (play.tap.events(), &play.reference.log);
        format!("{what}\n  given {:?}\n  events {events:?}\n  reference {log:?}", play.server.said)
    })
}

struct H2ServerCase {
    server: SimHttp2Server,
    io: MemoryIo,
    tap: EbpfModel,
    reference: Http2Reference,
    comparison: EventComparison,
    received: ReceivedRanges,
    /// Number of bytes that the server has sent.
    sent: usize,
}

impl H2ServerCase {
    fn run(&mut self, stream: &[u8], dice: &mut SeededRng) -> Result<ConformanceTotals, String> {
        for segment in segments::arrivals(stream.len(), dice) {
            self.tap.request(segment.start, &stream[segment.clone()]);
            let now = &stream[self.received.take(&segment)];
            self.comparison.has_had_gap |= self.received.has_gap();
            self.reference.client(now);
            self.io.deliver(now);
            if dice.chance(70) {
                self.settle(dice)?;
            }
            while dice.chance(50) && self.server.step(dice) {
                self.settle(dice)?;
            }
        }
        self.settle(dice)?;
        self.server.finish();
        self.settle(dice)?;
        let is_over = self.server.is_over();
        let outcome = self.comparison.outcome(self.server.said.len() as u64, is_over);
        self.tap.close(is_over);
        self.io.end();
        self.server.settle();
        Ok(outcome)
    }

    fn settle(&mut self, dice: &mut SeededRng) -> Result<(), String> {
        self.server.settle();
        let answer = self.io.sent();
        for segment in segments::cut(0, answer.len(), dice) {
            self.tap.response(self.sent + segment.start, &answer[segment.clone()]);
            self.reference.server(&answer[segment]);
        }
        self.sent += answer.len();
        let is_over = self.server.is_over() || self.reference.is_broken;
        if is_over || self.received.has_gap() || !self.reference.has_begun() {
            return Ok(());
        }
        self.comparison.compare(&self.tap, &self.reference)?;
        // The server has read all bytes, so each request in flight was given to the application.
        match self.reference.open.iter().find(|id| !self.server.said.contains_key(id)) {
            None => Ok(()),
            Some(id) => Err(format!("{id} is in flight, but was not given to the application")),
        }
    }
}
