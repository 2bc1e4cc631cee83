//! Shell: hyper's HTTP/1.1 server over memory: the requests that it serves must be the ones that the model counts.
//!
//! The test polls everything by hand, including the server's task, so that a seed determines all that happens.
//!
//! Invariants whenever the server waits:
//!
//! - A request is in flight if the server has given one to the application whose response is not written.
//! - Requests that have ended are those whose responses are written, in order and with their statuses.
//!
//! After the close nothing is in flight. Beyond the served requests, at most one refusal was counted (400, 431). At
//! most one request that arrived whole behind the last response began and was ended by the close.

use std::{future::Future, rc::Rc};

use hyper::{server::conn::http1, service::service_fn};

use super::{
    event_check::{ServedRequests, check_events, is_uncounted_foreign},
    reference::{self, UnusualForm},
    simulated_app::{SimHttp1App, SimHttp1Call},
};
use crate::{
    ebpf_model::EbpfModel,
    memory_io::{MemoryIo, PolledTask},
    rng::SeededRng,
    segmentation::{self, ReceivedRanges},
    totals::ConformanceTotals,
};

/// Plays the requests of `stream` to the server, cut by `rng`. The error describes the difference between model and
/// server.
pub fn play(stream: &[u8], rng: &mut SeededRng) -> Result<ConformanceTotals, String> {
    if is_differing(stream) {
        return Ok(ConformanceTotals { not_compared: 1, ..ConformanceTotals::default() });
    }
    let application = SimHttp1App::new(rng);
    let io = MemoryIo::default();
    let service = service_fn({
        let application = Rc::clone(&application);
        move |request| Rc::clone(&application).respond(request)
    });
    let mut builder = http1::Builder::new();
    builder.auto_date_header(false).half_close(rng.next_bool(50)).keep_alive(rng.next_bool(95));
    let task = PolledTask::new(builder.serve_connection(io.clone(), service));
    let mut case = HyperServerCase {
        stream,
        task,
        io,
        application,
        model: EbpfModel::new(),
        received: ReceivedRanges::default(),
        sent: Vec::new(),
    };
    case.play_requests(rng)?;
    case.finish(rng)
}

/// Returns true if hyper reads something differently from other servers, or accepts forms that no client sends. It
/// continues in trailers behind an empty line that ends with a bare line feed, accepts methods that begin with no letter,
/// and reads no list of connection options that has a byte outside ASCII: nginx and Go find `close` in it.
fn is_differing(stream: &[u8]) -> bool {
    let unusual_forms =
        reference::read_requests(stream, reference::ServerProfile::Lax).unusual_forms;
    // HTTP/2's preface counts as such a method; bytes behind it are not for this server.
    let differs = [UnusualForm::Trailer, UnusualForm::Symbol, UnusualForm::NonAscii];
    unusual_forms.iter().any(|form| differs.contains(form))
}

/// A connection with its server and its model.
struct HyperServerCase<'a, F: Future> {
    stream: &'a [u8],
    task: PolledTask<F>,
    io: MemoryIo,
    application: Rc<SimHttp1App>,
    model: EbpfModel,
    received: ReceivedRanges,
    /// Bytes that the server has sent.
    sent: Vec<u8>,
}

impl<F: Future<Output = hyper::Result<()>>> HyperServerCase<'_, F> {
    fn play_requests(&mut self, rng: &mut SeededRng) -> Result<(), String> {
        let stream = self.stream;
        for segment in segmentation::arrival_order(stream.len(), rng) {
            self.model.request_segment(segment.start, &stream[segment.clone()]);
            let now = self.received.add_segment(&segment);
            self.io.push_incoming(&stream[now]);
            // More segments may arrive before the server is polled.
            if rng.next_bool(70) {
                self.poll_and_compare(rng)?;
            }
            while rng.next_bool(30) && self.application.allow_step() {
                self.poll_and_compare(rng)?;
            }
        }
        self.poll_and_compare(rng)
    }

    /// Allows all remaining steps, closes the connection, and compares.
    fn finish(mut self, rng: &mut SeededRng) -> Result<ConformanceTotals, String> {
        while self.application.allow_step() {
            self.poll_and_compare(rng)?;
        }
        if rng.next_bool(30) {
            self.io.close_incoming();
            self.poll_and_compare(rng)?;
        }
        let calls = self.application.calls();
        let refused = u64::from(matches!(self.task.output, Some(Err(_))));
        self.model.close(self.task.output.is_some());
        if !is_uncounted_foreign(self.stream, self.model.events()) {
            self.check_calls(&calls)?;
        }
        let requests = calls.iter().filter(|it| it.is_done).count() as u64;
        Ok(ConformanceTotals { requests, refused, ..ConformanceTotals::default() })
    }

    /// Polls the server until it waits, and compares the model with it.
    fn poll_and_compare(&mut self, rng: &mut SeededRng) -> Result<(), String> {
        let was_open = self.task.output.is_none();
        self.task.poll_until_idle();
        let from = self.sent.len();
        self.sent.extend(self.io.take_outgoing());
        for segment in segmentation::split(from, self.sent.len(), rng) {
            let start =
                if rng.next_bool(10) { rng.next_below(segment.start + 1) } else { segment.start };
            self.model.response_segment(start, &self.sent[start..segment.end]);
        }
        if is_uncounted_foreign(self.stream, self.model.events()) {
            return Ok(());
        }
        let calls = self.application.calls();
        let is_upgraded = calls.last().is_some_and(|it| it.is_upgraded && it.is_done);
        let is_open = calls.last().is_some_and(|it| !it.is_done) || is_upgraded;
        if was_open && self.task.output.is_some() && !is_upgraded {
            self.model.close(true);
        } else if self.task.output.is_none()
            && self.model.is_busy() != is_open
            // The model has already read segments behind the gap, the server has not.
            && !self.received.has_gap()
        {
            return Err(self.describe(&format!("in flight for the server: {is_open}")));
        }
        self.check_calls(&calls)
    }

    /// Compares the model's events with the served requests.
    fn check_calls(&self, calls: &[SimHttp1Call]) -> Result<(), String> {
        let done = calls.iter().filter(|it| it.is_done);
        let statuses: Vec<u16> = done.filter(|it| !it.is_upgraded).map(|it| it.status).collect();
        let served = ServedRequests {
            statuses: &statuses,
            may_refuse: self.task.output.is_some(),
            is_upgraded: calls.last().is_some_and(|it| it.is_upgraded),
        };
        check_events(self.model.events(), served).map_err(|what| self.describe(what))
    }

    fn describe(&self, what: &str) -> String {
        let (calls, events) = (self.application.calls(), self.model.events());
        let end = match &self.task.output {
            None => "open".to_owned(),
            Some(Ok(())) => "closed".to_owned(),
            Some(Err(error)) => format!("broken: {error:?}"),
        };
        let sent = self.sent[..self.sent.len().min(600)].escape_ascii();
        format!("{what}\n  calls {calls:?}\n  server {end}\n  events {events:?}\n  sent {sent}")
    }
}
