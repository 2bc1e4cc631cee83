//! Shell: crate h2's client and server with each other; the test plays the network between them.
//!
//! A script of bytes decides the actions of both; see `H2PairCase::run_step`. Whenever all sent bytes have arrived and
//! both sides wait, a request must be in flight if two conditions hold: the server was given it, and the client has
//! received neither the whole response nor an error.

use bytes::Bytes;
use datapath::h2::grpc;
use h2::{
    client::{self, Connection, SendRequest},
    ext::Protocol,
};
use http::{Method, Request, Uri};

use super::{
    EventComparison,
    client_stream::{ClientStream, ClientStreamState},
    reference::{Http2Reference, ReferenceEvent},
    simulated_server::{SentOutcome, SimHttp2Server},
};
use crate::{
    ebpf_model::{EbpfModel, ModelEvent},
    memory_io::{ManualPoller, MemoryIo, PolledTask},
    rng::SeededRng,
    segmentation::{self, ReceivedRanges},
    totals::ConformanceTotals,
};

/// Generates a script. A few scripts start with hundreds of requests before anything else happens.
pub fn generate_script(rng: &mut SeededRng) -> Vec<u8> {
    let is_crowd = rng.next_bool(1);
    let begin = if is_crowd { generate_crowd(rng) } else { Vec::new() };
    let len = 40 + if is_crowd { 2_500 } else { rng.next_length(1_500) };
    begin.into_iter().chain((0..len).map(|_| rng.next_u64() as u8)).collect()
}

/// Generates the begin of a script that sends about as many requests at once as the limits permit.
fn generate_crowd(rng: &mut SeededRng) -> Vec<u8> {
    // Bytes that draw the last element, which is the highest limit.
    let last = |bound| {
        (0..=255).rev().find(|byte| SeededRng::from_script(&[*byte]).next_below(bound) == bound - 1)
    };
    let (client, server) = ([last(3), last(3)], [last(4), last(3)]);
    let mut script: Vec<u8> = client.into_iter().chain(server).chain([last(5)]).flatten().collect();
    // Bytes that draw a step of `H2PairCase::run_step`.
    let step =
        |value| (0..=255).find(|byte| SeededRng::from_script(&[*byte]).next_below(32) == value);
    let (send_request, deliver_all) = (step(0), step(24));
    // The client must know the server's settings first.
    script.extend(deliver_all);
    let more = if rng.next_bool(60) { 30 } else { 300 };
    for _ in 0..210 + rng.next_below(more) {
        script.extend(send_request);
        // Draws the end of the request with its head, without a body.
        script.push(0);
    }
    script.extend(deliver_all);
    script
}

/// Client, server and the network between them.
struct H2PairCase {
    client_io: MemoryIo,
    server_io: MemoryIo,
    connection: PolledTask<Connection<MemoryIo, Bytes>>,
    sender: SendRequest<Bytes>,
    requests: Vec<ClientStream>,
    server: SimHttp2Server,
    poller: ManualPoller,
    model: EbpfModel,
    reference: Http2Reference,
    comparison: EventComparison,
    /// Numbers of bytes that the client and the server have sent.
    sent: [usize; 2],
    /// Bytes of the server that the client has not received yet.
    in_transit: Vec<u8>,
    /// Maximum number of requests that the client has open at once.
    max_open: usize,
}

/// Plays a script, with the network cut by `rng`. The error describes the difference between model and h2.
pub fn play(script: &[u8], rng: &mut SeededRng) -> Result<ConformanceTotals, String> {
    let mut script = SeededRng::from_script(script);
    let (client_io, server_io) = (MemoryIo::default(), MemoryIo::default());
    let mut builder = client::Builder::new();
    builder.initial_window_size(*script.pick(&[&50, &65_535, &1_000_000]));
    builder.max_concurrent_reset_streams(1_000).max_local_error_reset_streams(Some(1_000));
    builder.header_table_size(*script.pick(&[&0, &200, &4_096]));
    builder.enable_push(false).initial_max_send_streams(2_000);
    let mut handshake = PolledTask::new(builder.handshake(client_io.clone()));
    handshake.poll_until_idle();
    let Some(Ok((sender, connection))) = handshake.output else {
        return Err("the client cannot begin".to_owned());
    };
    let server = SimHttp2Server::new(server_io.clone(), &mut script);
    let max_open = *script.pick(&[&1, &5, &30, &100, &400]);
    let mut pair = H2PairCase {
        client_io,
        server_io,
        connection: PolledTask::new(connection),
        sender,
        requests: Vec::new(),
        server,
        poller: ManualPoller::default(),
        model: EbpfModel::new(),
        reference: Http2Reference::default(),
        comparison: EventComparison::default(),
        sent: [0; 2],
        in_transit: Vec::new(),
        max_open,
    };
    let outcome = pair.run(&mut script, rng);
    outcome.map_err(|what| {
        let asked: Vec<_> = pair.requests.iter().map(|it| (it.id, it.state)).collect();
        let (given, events, log) =
            (&pair.server.given_requests, pair.model.events(), &pair.reference.events);
        format!(
            "{what}\n  asked {asked:?}\n  given {given:?}\n  events {events:?}\n  reference {log:?}"
        )
    })
}

impl H2PairCase {
    fn run(
        &mut self,
        script: &mut SeededRng,
        rng: &mut SeededRng,
    ) -> Result<ConformanceTotals, String> {
        self.deliver_all_and_compare(rng)?;
        while !script.is_exhausted() {
            self.run_step(script, rng)?;
        }
        self.server.finish_calls();
        // The server's windows open as the client reads more.
        for _ in 0..100 {
            self.requests
                .iter_mut()
                .for_each(|request| request.read_response(usize::MAX, &self.poller));
            self.deliver_all_and_compare(rng)?;
        }
        self.check_waiting_requests()?;
        let given = self.server.given_requests.len() as u64;
        let outcome = self.comparison.totals(given, self.is_over());
        self.model.close(false);
        self.server_io.close_incoming();
        self.server.poll_until_idle();
        self.client_io.close_incoming();
        self.connection.poll_until_idle();
        Ok(outcome)
    }

    /// Takes one step of the script.
    fn run_step(&mut self, script: &mut SeededRng, rng: &mut SeededRng) -> Result<(), String> {
        let any_index = |script: &mut SeededRng, requests: &[ClientStream]| {
            script.next_below(requests.len().max(1))
        };
        match script.next_below(32) {
            0..8 => self.send_request(script),
            8..12 => {
                let index = any_index(script, &self.requests);
                self.requests
                    .get_mut(index)
                    .into_iter()
                    .for_each(|request| request.send_body(script));
            }
            12..20 => _ = self.server.step(script),
            20..23 => {
                let index = any_index(script, &self.requests);
                let most =
                    if script.next_bool(50) { usize::MAX } else { script.next_length(2_000) };
                self.requests
                    .get_mut(index)
                    .into_iter()
                    .for_each(|request| request.read_response(most, &self.poller));
            }
            23 => {
                let index = any_index(script, &self.requests);
                let sends_reset = script.next_bool(50);
                self.requests
                    .get_mut(index)
                    .into_iter()
                    .for_each(|request| request.drop_response(sends_reset));
            }
            24..27 => return self.deliver_all_and_compare(rng),
            27..29 => self.deliver_to_server(rng),
            29 | 30 => {
                let len = script.next_length(self.in_transit.len());
                self.deliver_to_client(len);
            }
            _ => {
                if script.next_bool(10) {
                    self.server.shut_down(script.next_bool(30));
                }
            }
        }
        Ok(())
    }

    fn send_request(&mut self, script: &mut SeededRng) {
        let open = self.requests.iter().filter(|it| it.state == ClientStreamState::Open).count();
        let is_ready = self.poller.poll_until_idle(|context| self.sender.poll_ready(context));
        if open >= self.max_open || !matches!(is_ready, Some(Ok(()))) {
            return;
        }
        let is_end_stream = script.next_bool(60);
        let mut request = Request::new(());
        *request.method_mut() = if is_end_stream { Method::GET } else { Method::POST };
        *request.uri_mut() = Uri::from_static("http://a/");
        if !is_end_stream
            && script.next_bool(10)
            && self.sender.is_extended_connect_protocol_enabled()
        {
            *request.method_mut() = Method::CONNECT;
            request.extensions_mut().insert(Protocol::from_static("websocket"));
        }
        if let Ok((response, send)) = self.sender.send_request(request, is_end_stream) {
            let id = response.stream_id().as_u32();
            let (response, send) = (Some(response), (!is_end_stream).then_some(send));
            self.requests.push(ClientStream {
                id,
                response,
                body: None,
                send,
                state: ClientStreamState::Open,
            });
        }
    }

    /// Delivers the client's bytes to the server.
    fn deliver_to_server(&mut self, rng: &mut SeededRng) {
        self.connection.poll_until_idle();
        let bytes = self.client_io.take_outgoing();
        let mut received = ReceivedRanges::default();
        for segment in segmentation::arrival_order(bytes.len(), rng) {
            self.model.request_segment(self.sent[0] + segment.start, &bytes[segment.clone()]);
            let now = &bytes[received.add_segment(&segment)];
            self.comparison.has_had_gap |= received.has_gap();
            self.reference.receive_client(now);
            self.server_io.push_incoming(now);
            if rng.next_bool(30) {
                self.collect_server_bytes(rng);
            }
        }
        self.sent[0] += bytes.len();
        self.collect_server_bytes(rng);
    }

    fn collect_server_bytes(&mut self, rng: &mut SeededRng) {
        self.server.poll_until_idle();
        let bytes = self.server_io.take_outgoing();
        for segment in segmentation::split(0, bytes.len(), rng) {
            self.model.response_segment(self.sent[1] + segment.start, &bytes[segment.clone()]);
            self.reference.receive_server(&bytes[segment]);
        }
        self.sent[1] += bytes.len();
        self.in_transit.extend(bytes);
    }

    /// Delivers some of the server's bytes to the client.
    fn deliver_to_client(&mut self, len: usize) {
        let bytes: Vec<u8> = self.in_transit.drain(..len.min(self.in_transit.len())).collect();
        self.client_io.push_incoming(&bytes);
        self.connection.poll_until_idle();
    }

    /// Delivers all bytes until both sides wait; then client, server, model and reference must agree.
    fn deliver_all_and_compare(&mut self, rng: &mut SeededRng) -> Result<(), String> {
        loop {
            let before = self.sent;
            self.deliver_to_server(rng);
            self.deliver_to_client(usize::MAX);
            // The end of a response is visible without reading its body.
            self.requests.iter_mut().for_each(|request| request.read_response(1, &self.poller));
            if self.sent == before && !self.connection.is_woken() {
                break;
            }
        }
        if self.is_over() {
            return Ok(());
        }
        self.comparison.compare(&self.model, &self.reference)?;
        self.check_statuses()?;
        for ClientStream { id, state, .. } in &self.requests {
            let is_given = self.server.given_requests.contains_key(id);
            let is_open = self.reference.in_flight.contains(id);
            // The client may not have read the rest of a response that has already arrived.
            let is_wanted = matches!(state, ClientStreamState::Open | ClientStreamState::Dropped);
            if is_open && !(is_given && is_wanted) {
                return Err(format!(
                    "{id} is in flight: given {is_given}, for the client {state:?}"
                ));
            }
        }
        Ok(())
    }

    /// Returns true if one side has ended the connection, or must: crate h2's client may reset a stream it never
    /// opened.
    fn is_over(&self) -> bool {
        let has_ended = self.server.is_over() || self.connection.output.is_some();
        has_ended || self.reference.is_broken
    }

    /// Checks that each request the client still waits for, and that the server was given, is in flight.
    fn check_waiting_requests(&self) -> Result<(), String> {
        if self.is_over() {
            return Ok(());
        }
        let given =
            self.requests.iter().filter(|it| self.server.given_requests.contains_key(&it.id));
        match given
            .filter(|it| it.state == ClientStreamState::Open)
            .find(|it| !self.reference.in_flight.contains(&it.id))
        {
            None => Ok(()),
            Some(ClientStream { id, .. }) => {
                Err(format!("the client waits for {id}, which is not in flight"))
            }
        }
    }

    /// Checks that each reported status and outcome is the one that the application sent.
    fn check_statuses(&self) -> Result<(), String> {
        if !self.comparison.is_exact() {
            return Ok(());
        }
        let ids = self.reference.events.iter().filter_map(|what| match what {
            ReferenceEvent::Responded(id) => Some(id),
            ReferenceEvent::Started(_) | ReferenceEvent::Aborted(_) => None,
        });
        let seen_statuses = self.model.events().iter().filter_map(|event| match event {
            ModelEvent::Responded(class, grpc) => Some((*class, *grpc as u8)),
            _ => None,
        });
        for (id, (class, outcome)) in ids.zip(seen_statuses) {
            let sent = self.server.given_requests.get(id).copied().unwrap_or_default();
            let SentOutcome { status, grpc: grpc_status } = sent;
            let is_right = match outcome {
                grpc::UNSEEN => true,
                grpc::OK => grpc_status == Some(0),
                _ => grpc_status.is_some_and(|status| status != 0),
            };
            if class != 0 && class != status / 100 || !is_right {
                return Err(format!("{id}: {sent:?} was seen as {class}, {outcome}"));
            }
        }
        Ok(())
    }
}
