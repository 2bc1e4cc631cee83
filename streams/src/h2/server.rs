//! Shell: plays requests, written frame by frame, to crate h2's server; its requests must be the counted ones.

use super::{EventComparison, reference::Http2Reference, simulated_server::SimHttp2Server};
use crate::{
    ebpf_model::EbpfModel,
    memory_io::MemoryIo,
    rng::SeededRng,
    segmentation::{self, ReceivedRanges},
    totals::ConformanceTotals,
};

/// Plays a client's bytes to the server, cut by `rng`. The error describes the difference between model and server.
pub fn play(stream: &[u8], rng: &mut SeededRng) -> Result<ConformanceTotals, String> {
    let io = MemoryIo::default();
    let mut case = H2ServerCase {
        server: SimHttp2Server::new(io.clone(), rng),
        io,
        model: EbpfModel::new(),
        reference: Http2Reference::default(),
        comparison: EventComparison::default(),
        received: ReceivedRanges::default(),
        sent: 0,
    };
    let outcome = case.run(stream, rng);
    outcome.map_err(|what| {
        let (events, log) = (case.model.events(), &case.reference.events);
        format!(
            "{what}\n  given {:?}\n  events {events:?}\n  reference {log:?}",
            case.server.given_requests
        )
    })
}

struct H2ServerCase {
    server: SimHttp2Server,
    io: MemoryIo,
    model: EbpfModel,
    reference: Http2Reference,
    comparison: EventComparison,
    received: ReceivedRanges,
    /// Number of bytes that the server has sent.
    sent: usize,
}

impl H2ServerCase {
    fn run(&mut self, stream: &[u8], rng: &mut SeededRng) -> Result<ConformanceTotals, String> {
        for segment in segmentation::arrival_order(stream.len(), rng) {
            self.model.request_segment(segment.start, &stream[segment.clone()]);
            let now = &stream[self.received.add_segment(&segment)];
            self.comparison.has_had_gap |= self.received.has_gap();
            self.reference.receive_client(now);
            self.io.push_incoming(now);
            if rng.next_bool(70) {
                self.poll_and_compare(rng)?;
            }
            while rng.next_bool(50) && self.server.step(rng) {
                self.poll_and_compare(rng)?;
            }
        }
        self.poll_and_compare(rng)?;
        self.server.finish_calls();
        self.poll_and_compare(rng)?;
        let is_over = self.server.is_over();
        let outcome = self.comparison.totals(self.server.given_requests.len() as u64, is_over);
        self.model.close(is_over);
        self.io.close_incoming();
        self.server.poll_until_idle();
        Ok(outcome)
    }

    fn poll_and_compare(&mut self, rng: &mut SeededRng) -> Result<(), String> {
        self.server.poll_until_idle();
        let response = self.io.take_outgoing();
        for segment in segmentation::split(0, response.len(), rng) {
            self.model.response_segment(self.sent + segment.start, &response[segment.clone()]);
            self.reference.receive_server(&response[segment]);
        }
        self.sent += response.len();
        let is_over = self.server.is_over() || self.reference.is_broken;
        if is_over || self.received.has_gap() || !self.reference.has_begun() {
            return Ok(());
        }
        self.comparison.compare(&self.model, &self.reference)?;
        // The server has read all bytes, so each request in flight was given to the application.
        let given = &self.server.given_requests;
        match self.reference.in_flight.iter().find(|id| !given.contains_key(id)) {
            None => Ok(()),
            Some(id) => Err(format!("{id} is in flight, but was not given to the application")),
        }
    }
}
