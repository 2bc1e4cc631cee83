//! Shell: observations of one request: its log line, its spans, and its row of the request metrics.

use std::{net::SocketAddr, sync::Arc, time::Instant};

use common::wire::NamespacedName;
use http::{HeaderMap, Method, StatusCode, Version, request};
use opentelemetry_proto::tonic::trace::v1::{Span, span::SpanKind};
use smol_str::SmolStr;

use crate::{
    clients::{
        client_info::ClientInfo,
        connections::{ClientConnection, RecordBytesGuard},
    },
    clock::{now_ns, random_u64},
    edge::host::request_host,
    entrypoint::Entrypoint,
    pods::endpoint::PodEndpoint,
    requests::request_log::{CLIENT_CLOSED_REQUEST, RequestLogEntry},
    revisions::{revision::WaitCause, route_settings::RevisionOwnerNames},
    telemetry::{
        recorder::TelemetryRecorder,
        request_rows::{RequestFigures, RowLabels},
        span::{
            child_span, end_span, fail_span, number_attribute, server_span, span_bytes,
            text_attribute,
        },
        trace_context::{ParentSpan, SpanContext, TRACEPARENT, trace_state, traceparent},
    },
};

/// Maximum number of spans inside of one request's span. Ten dials and ten resends have fewer.
const MAX_CHILD_SPANS: usize = 48;

/// Most bytes of a host that any service can have (RFC 1035, section 2.3.4).
const MAX_HOST_BYTES: usize = 253;

/// Observers of one request, which note its end when they are dropped. Usually there is none.
#[derive(Debug, Default)]
pub struct RequestObservers {
    /// Entry of the request log.
    pub log: Option<Box<RequestLogEntry>>,
    /// Spans and metrics.
    pub telemetry: Option<Box<RequestObservation>>,
    /// Guard that counts the bytes of both for the client while the request waits.
    charge: Option<RecordBytesGuard>,
}

impl RequestObservers {
    /// Creates the observers of a request that has arrived.
    pub fn new(
        log: Option<Box<RequestLogEntry>>,
        telemetry: Option<Box<RequestObservation>>,
    ) -> Self {
        Self { log, telemetry, charge: None }
    }

    /// Returns true if nothing is recorded.
    pub fn is_empty(&self) -> bool {
        self.log.is_none() && self.telemetry.is_none()
    }

    /// Sets the Revision of the request, with its owners and the host by which it was found. `listed_host` is that of the
    /// RouteTable, which may have a wildcard; `None`: the service was found by a name of its own.
    pub fn set_revision(
        &mut self,
        name: &NamespacedName,
        owners: &RevisionOwnerNames,
        listed_host: Option<&str>,
        own_host: impl FnOnce() -> String,
    ) {
        if let Some(log) = &mut self.log {
            log.set_revision(name, owners);
        }
        if let Some(telemetry) = &mut self.telemetry {
            telemetry.set_revision(name, owners, listed_host, own_host);
        }
    }

    /// Sets the pod that has sent the response.
    pub fn set_pod(&mut self, pod: &Arc<PodEndpoint>) {
        if let Some(log) = &mut self.log {
            log.set_pod(pod);
        }
    }

    /// Sets the status code of the response, which has begun.
    pub fn set_status(&mut self, status: StatusCode) {
        self.charge = None;
        if let Some(log) = &mut self.log {
            log.set_status(status);
        }
        if let Some(telemetry) = &mut self.telemetry {
            telemetry.status = status.as_u16();
        }
    }

    /// Adds bytes of the response that were passed on.
    pub fn add_body_bytes(&mut self, bytes: usize) {
        if let Some(log) = &mut self.log {
            log.add_body_bytes(bytes);
        }
        if let Some(telemetry) = &mut self.telemetry {
            let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
            telemetry.response_bytes = telemetry.response_bytes.saturating_add(bytes);
        }
    }

    /// Returns true if spans of the request are recorded.
    pub fn is_traced(&self) -> bool {
        self.telemetry.as_ref().is_some_and(|it| it.trace.is_some())
    }

    /// Registers that the request waits for a pod from now on, if it has to. Until it has one, the bytes that are recorded
    /// of it count for its client, as those of its head do.
    pub fn start_wait(&mut self, connection: &Arc<ClientConnection>) {
        if let Some(trace) = self.trace() {
            trace.wait_started_ns = Some(now_ns());
        }
        let bytes = self.recorded_bytes();
        self.charge = (bytes > 0).then(|| connection.charge_record(bytes));
    }

    /// Returns the number of bytes that the log's entry and the spans hold. They have copies of the client's texts.
    fn recorded_bytes(&self) -> usize {
        let logged = self.log.as_ref().map_or(0, |it| it.held_bytes());
        let trace = self.telemetry.as_ref().and_then(|it| it.trace.as_ref());
        logged + trace.map_or(0, RequestTrace::held_bytes)
    }

    /// Registers that the request has a connection to a pod. `cause` is that of its wait; `None`: it did not wait.
    pub fn end_wait(&mut self, cause: Option<WaitCause>) {
        self.charge = None;
        if let Some(trace) = self.trace() {
            trace.end_wait(cause);
        }
    }

    /// Registers a connection to a pod that could not be opened.
    pub fn record_failed_dial(&mut self, address: SocketAddr, since_ns: u64, error: &str) {
        if let Some(trace) = self.trace() {
            let mut span = trace.attempt_span(address, since_ns);
            fail_span(&mut span, "connect", error);
            trace.add_child(span);
        }
        let bytes = self.recorded_bytes();
        if let Some(charge) = &mut self.charge {
            charge.set_bytes(bytes);
        }
    }

    /// Registers that the request is sent to a pod, and makes the span of this attempt the parent of the pod's.
    pub fn start_attempt(&mut self, address: SocketAddr, pod: &str, headers: &mut HeaderMap) {
        let Some(trace) = self.trace() else { return };
        let mut span = trace.attempt_span(address, now_ns());
        span.attributes.push(text_attribute("k8s.pod.name", pod));
        let ids = (trace.context.trace_id, trace.attempt_id);
        if let Some(value) = traceparent(ids.0, ids.1) {
            headers.insert(TRACEPARENT, value);
        }
        trace.attempt = Some(span);
    }

    /// Registers the head of the pod's response to the attempt.
    pub fn on_response(&mut self, status: StatusCode) {
        if let Some(attempt) = self.trace().and_then(|it| it.attempt.as_mut()) {
            set_attempt_status(attempt, status);
        }
    }

    /// Registers that the attempt has failed.
    pub fn fail_attempt(&mut self, error: &str) {
        let Some(trace) = self.trace() else { return };
        if let Some(mut span) = trace.attempt.take() {
            fail_span(&mut span, "exchange", error);
            trace.add_child(span);
        }
    }

    /// Removes the observation of spans and metrics: the activator itself has answered a probe of the platform.
    pub fn discard_telemetry(&mut self) {
        if let Some(telemetry) = &mut self.telemetry {
            telemetry.is_discarded = true;
        }
        self.telemetry = None;
    }

    fn trace(&mut self) -> Option<&mut RequestTrace> {
        self.telemetry.as_mut()?.trace.as_mut()
    }
}

/// Revision that serves a request, for its spans and metrics.
#[derive(Debug)]
struct ObservedRevision {
    name: NamespacedName,
    owners: RevisionOwnerNames,
    host: SmolStr,
}

/// Spans and metrics of one request.
#[derive(Debug)]
pub struct RequestObservation {
    recorder: Arc<TelemetryRecorder>,
    started_at: Instant,
    entrypoint: Entrypoint,
    method: &'static str,
    scheme: &'static str,
    version: &'static str,
    /// Host that the request names, if it has come from outside. Once a service was found by it, the RouteTable has the
    /// host or a wildcard for it.
    outside_host: Option<String>,
    revision: Option<ObservedRevision>,
    status: u16,
    /// Bytes of the response's body that were passed on.
    response_bytes: u64,
    records_metrics: bool,
    /// True for a request that is not to be recorded.
    is_discarded: bool,
    trace: Option<RequestTrace>,
}

/// Spans of one sampled request.
#[derive(Debug)]
struct RequestTrace {
    context: SpanContext,
    /// Method of the request, which its own span and those of its attempts have.
    method: &'static str,
    span: Span,
    children: Vec<Span>,
    /// Time at which the request began to ask for a pod, until it has one.
    wait_started_ns: Option<u64>,
    /// Span of the attempt under way.
    attempt: Option<Span>,
    /// Id of the last attempt's span.
    attempt_id: u64,
}

impl RequestObservation {
    /// Starts the observation of a request that has arrived. `None`: nothing of it is recorded.
    pub fn start(
        recorder: &Arc<TelemetryRecorder>,
        head: &request::Parts,
        entrypoint: Entrypoint,
        client: ClientInfo,
    ) -> Option<Box<Self>> {
        // The usual case first: a request that nothing records must cost one load.
        if !recorder.is_on() {
            return None;
        }
        let records_metrics = recorder.records_metrics();
        // The decision is made once, at the start: spans of one request are recorded all or not at all.
        let context = recorder.sampling_rate().and_then(|rate| {
            SpanContext::sample(ParentSpan::from_headers(&head.headers), rate, random_u64)
        });
        if !records_metrics && context.is_none() {
            return None;
        }
        let mut it = Box::new(Self {
            recorder: Arc::clone(recorder),
            started_at: Instant::now(),
            entrypoint,
            method: method_name(&head.method),
            scheme: if client.is_tls { "https" } else { "http" },
            version: version_name(head.version),
            // Clients outside may name any mapped host. For others the label is the service's own name.
            outside_host: (entrypoint == Entrypoint::External)
                .then(|| request_host(head))
                .flatten()
                .filter(|host| host.len() <= MAX_HOST_BYTES),
            revision: None,
            // Stays if the observation is dropped before a response has begun: then the client has left.
            status: CLIENT_CLOSED_REQUEST,
            response_bytes: 0,
            records_metrics,
            is_discarded: false,
            trace: None,
        });
        it.trace = context.map(|context| it.start_trace(context, head, client));
        Some(it)
    }

    /// Starts the record of a sampled request: its own span, with the attributes that the head has.
    fn start_trace(
        &self,
        context: SpanContext,
        head: &request::Parts,
        client: ClientInfo,
    ) -> RequestTrace {
        // W3C Trace Context forbids to use `tracestate` without a valid `traceparent`.
        let state = context.parent_id.map(|_| trace_state(&head.headers)).unwrap_or_default();
        // By the conventions, an unknown method is not part of a name.
        let name = if self.method == OTHER_METHOD { "HTTP" } else { self.method };
        let mut span = server_span(context, name, &state, now_ns());
        let origin = match self.entrypoint {
            Entrypoint::Service(_) => "service",
            Entrypoint::Internal => "internal_gateway",
            Entrypoint::External => "gateway",
            Entrypoint::GatewayPort(_) => "gateway_port",
        };
        span.attributes = vec![
            text_attribute("http.request.method", self.method),
            text_attribute("url.path", head.uri.path()),
            text_attribute("url.scheme", self.scheme),
            text_attribute("network.protocol.version", self.version),
            text_attribute("client.address", &client.address.to_canonical().to_string()),
            text_attribute("rouse.entrypoint", origin),
        ];
        // The text of the client goes into the span only. In a metric it would be a label that clients can invent.
        if self.method == OTHER_METHOD {
            let original = text_attribute("http.request.method_original", head.method.as_str());
            span.attributes.push(original);
        }
        let agent = head.headers.get(http::header::USER_AGENT).and_then(|it| it.to_str().ok());
        span.attributes.extend(agent.map(|it| text_attribute("user_agent.original", it)));
        let named = request_host(head);
        span.attributes.extend(named.map(|it| text_attribute("server.address", &it)));
        RequestTrace {
            context,
            method: self.method,
            span,
            children: Vec::new(),
            wait_started_ns: None,
            attempt: None,
            attempt_id: 0,
        }
    }

    fn set_revision(
        &mut self,
        name: &NamespacedName,
        owners: &RevisionOwnerNames,
        listed_host: Option<&str>,
        own_host: impl FnOnce() -> String,
    ) {
        let host = match self.outside_host.take() {
            // Clients invent hosts below a wildcard, and each would be a label.
            Some(named) => listed_host.map_or(named, str::to_owned),
            None => own_host(),
        };
        let revision =
            ObservedRevision { name: name.clone(), owners: owners.clone(), host: host.into() };
        self.revision = Some(revision);
    }

    fn row_labels(&self) -> RowLabels {
        let of = |field: fn(&ObservedRevision) -> &SmolStr| {
            self.revision.as_ref().map(field).cloned().unwrap_or_default()
        };
        RowLabels {
            namespace: of(|it| &it.name.namespace),
            service: of(|it| &it.owners.service),
            configuration: of(|it| &it.owners.configuration),
            revision: of(|it| &it.name.name),
            host: of(|it| &it.host),
            method: self.method,
            scheme: self.scheme,
            version: self.version,
            status: self.status,
        }
    }
}

impl RequestTrace {
    /// Returns the number of bytes that the spans hold.
    fn held_bytes(&self) -> usize {
        let all = self.children.iter().chain(&self.attempt).chain([&self.span]);
        all.map(span_bytes).sum()
    }

    fn end_wait(&mut self, cause: Option<WaitCause>) {
        let since = self.wait_started_ns.take();
        if let Some((since, cause)) = since.zip(cause) {
            let mut span = self.wait_span(since);
            span.attributes.push(text_attribute("rouse.wait.cause", cause.label()));
            self.add_child(span);
        }
    }

    fn wait_span(&self, since_ns: u64) -> Span {
        child_span(&self.span, new_span_id(), "wait for pod", SpanKind::Internal, since_ns)
    }

    /// Starts the span of an attempt at a pod.
    fn attempt_span(&mut self, address: SocketAddr, since_ns: u64) -> Span {
        self.attempt_id = new_span_id();
        let name = self.span.name.clone();
        let mut span = child_span(&self.span, self.attempt_id, &name, SpanKind::Client, since_ns);
        span.attributes.push(text_attribute("http.request.method", self.method));
        span.attributes.push(text_attribute("server.address", &address.ip().to_string()));
        span.attributes.push(number_attribute("server.port", address.port()));
        span
    }

    /// Ends a span and keeps it. Spans beyond the bound are left out.
    fn add_child(&mut self, mut span: Span) {
        end_span(&mut span, now_ns());
        if self.children.len() < MAX_CHILD_SPANS {
            self.children.push(span);
        }
    }

    /// All spans of the request, which has ended with this status.
    fn into_spans(mut self, status: u16, revision: Option<&ObservedRevision>) -> Vec<Span> {
        // A request that ends while it waits has no pod.
        if let Some(since) = self.wait_started_ns.take() {
            let mut span = self.wait_span(since);
            fail_span(&mut span, "no_pod", "the request ended before it had a pod");
            self.add_child(span);
        }
        // The attempt that was answered, or that was under way when the client left.
        if let Some(span) = self.attempt.take() {
            self.add_child(span);
        }
        let mut span = self.span;
        if let Some(ObservedRevision { name, owners, host: _ }) = revision {
            span.attributes.extend([
                text_attribute("k8s.namespace.name", &name.namespace),
                text_attribute("kn.revision.name", &name.name),
                text_attribute("kn.service.name", &owners.service),
                text_attribute("kn.configuration.name", &owners.configuration),
            ]);
        }
        // 499 was never sent. As a code it would look like an error that the server has reported.
        if status == CLIENT_CLOSED_REQUEST {
            span.attributes.push(text_attribute("error.type", "client_closed"));
        } else {
            span.attributes.push(number_attribute("http.response.status_code", status));
        }
        // By the conventions, only failures of the server are errors of its span.
        if (500..600).contains(&status) {
            fail_span(&mut span, &status.to_string(), "");
        }
        end_span(&mut span, now_ns());
        // Behind its children, so that the bound on these never drops the span of the request itself.
        let mut all = self.children;
        all.push(span);
        all
    }
}

impl Drop for RequestObservation {
    fn drop(&mut self) {
        if self.is_discarded {
            return;
        }
        if self.records_metrics {
            let figures = RequestFigures {
                duration_s: self.started_at.elapsed().as_secs_f64(),
                response_bytes: self.response_bytes,
            };
            self.recorder.observe_request(self.row_labels(), figures);
        }
        // Spans are sent at the end only, because the root span has the status of the response.
        if let Some(trace) = self.trace.take() {
            self.recorder.enqueue_spans(trace.into_spans(self.status, self.revision.as_ref()));
        }
    }
}

/// Sets the status of a pod's response. For a client, each code from 400 on is an error.
fn set_attempt_status(span: &mut Span, status: StatusCode) {
    span.attributes.push(number_attribute("http.response.status_code", status.as_u16()));
    if status.as_u16() >= 400 {
        fail_span(span, status.as_str(), "");
    }
}

/// Id of a new span, which is not 0.
fn new_span_id() -> u64 {
    random_u64().max(1)
}

/// Value of `http.request.method` for unknown methods.
const OTHER_METHOD: &str = "_OTHER";

/// Method by OpenTelemetry's conventions, so that clients cannot invent labels. CONNECT is left of WebSockets only,
/// whose handshake is a GET otherwise.
fn method_name(method: &Method) -> &'static str {
    match method.as_str() {
        "GET" | "CONNECT" => "GET",
        "HEAD" => "HEAD",
        "POST" => "POST",
        "PUT" => "PUT",
        "DELETE" => "DELETE",
        "OPTIONS" => "OPTIONS",
        "TRACE" => "TRACE",
        "PATCH" => "PATCH",
        _ => OTHER_METHOD,
    }
}

fn version_name(version: Version) -> &'static str {
    match version {
        Version::HTTP_10 => "1.0",
        Version::HTTP_2 => "2",
        _ => "1.1",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_span_of_an_attempt_has_the_method_whatever_the_server_span_has() {
        let context = SpanContext { trace_id: 1, span_id: 2, parent_id: None };
        let mut span = server_span(context, "GET", "", 0);
        span.attributes = vec![text_attribute("url.path", "/a")];
        let mut trace = RequestTrace {
            context,
            method: "GET",
            span,
            children: Vec::new(),
            wait_started_ns: None,
            attempt: None,
            attempt_id: 0,
        };
        let attempt = trace.attempt_span(([10, 0, 0, 1], 80).into(), 0);
        let expected = [
            text_attribute("http.request.method", "GET"),
            text_attribute("server.address", "10.0.0.1"),
            number_attribute("server.port", 80_u16),
        ];
        assert_eq!(attempt.attributes, expected);
    }
}
