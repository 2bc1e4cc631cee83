//! Shell: metrics of the activator.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};

use crate::budget::ClientBound;

/// Metrics of the activator, kept as handles, so that counting takes no lock.
#[derive(Debug, Clone)]
pub struct ActivatorMetrics {
    /// Requests that got a response, by the first digit of the code (1 to 5).
    pub responses_by_class: [Counter; 5],
    /// Requests whose client was gone before the response began.
    pub cancelled: Counter,
    /// Requests that wait for a pod now.
    pub waiting_requests: Gauge,
    /// Time that requests waited for a pod; requests that did not wait are not observed.
    pub wait_seconds: Histogram,
    /// Dials of pods that were begun.
    pub dials: Counter,
    /// Further sockets of dials, opened because the first one got no SYN-ACK soon.
    pub dial_repeats: Counter,
    /// Dials of pods that brought no connection.
    pub dial_failures: Counter,
    /// Requests sent again, because a pod refused the connection, or because it ended before the pod handled the
    /// request.
    pub retries: Counter,
    /// Requests that took the fast path and got a response.
    pub fast_path_requests: Counter,
    /// Pods that agents have reported as ready before the RouteTable listed them so.
    pub early_ready_pods: Counter,
    /// Frozen pods that requests pass over now.
    pub pods_passed_over: Gauge,
    /// Client connections asked to close because their service is on the direct path.
    pub direct_closed_connections: Counter,
    /// Open sockets of single service ports, one for each address; 0 while one listener serves all ports.
    pub service_ports: Gauge,
    /// Sockets of single service ports that cannot be opened.
    pub service_ports_failed: Gauge,
    /// Open sockets of gateway ports, one for each address.
    pub gateway_ports: Gauge,
    /// Sockets of gateway ports that cannot be opened.
    pub gateway_ports_failed: Gauge,
    /// Client connections that are open now.
    pub client_connections: Gauge,
    /// Version of the RouteTable in force.
    pub routes_version: Gauge,
    /// Number of other activators that have no stream to this one.
    pub disconnected_peers: Gauge,
    /// Lines of the request log, by outcome.
    pub request_log: RequestLogCounters,
    /// Clients refused, by the bound that they reached.
    pub refusals: RefusalCounters,
    /// Raw TCP connections that have ended, by their end.
    pub tcp_connections: TcpConnectionCounters,
    /// TLS handshakes of clients, and the certificates for them.
    pub tls: TlsMetrics,
    /// Spans for the collector, by outcome.
    pub spans: ExportCounters,
    /// Messages with request metrics for the collector, by outcome.
    pub metric_messages: ExportCounters,
}

/// Counters of what was to be exported to a collector, by outcome.
#[derive(Clone, Debug, Default)]
pub struct ExportCounters {
    /// Number that the collector has taken.
    pub exported: Counter,
    /// Number that was lost: the queue was full, the collector did not take it or rejected it, or the export was turned
    /// off.
    pub dropped: Counter,
}

/// Counters of lines, by outcome.
#[derive(Clone, Debug, Default)]
pub struct RequestLogCounters {
    /// Number of lines written.
    pub written: Counter,
    /// Number of lines that were lost: the buffer was full, the write failed, or no thread writes them.
    pub dropped: Counter,
}

/// Counters of clients that reached a bound, in the order of [`ClientBound::ALL`].
#[derive(Debug, Clone)]
pub struct RefusalCounters([Counter; ClientBound::ALL.len()]);

impl RefusalCounters {
    /// Counts one client that reached `bound`.
    pub fn count_refusal(&self, bound: ClientBound) {
        self.0[bound as usize].inc();
    }
}

/// End of a raw TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpConnectionEnd {
    /// Client and pod have closed it.
    Complete,
    /// Client or pod has broken it off.
    Reset,
    /// No pod took it, for example because none was ready in time, or because the protocol of its port was not known.
    Failed,
    /// The client was gone before a pod took it.
    Cancelled,
    /// The activator ended it: it is being stopped, or a bound was exceeded.
    CutOff,
    /// The connection came from outside, and no byte passed for the time of the idle deadline.
    Idle,
}

impl TcpConnectionEnd {
    /// All ends, in the order of their declaration.
    pub const ALL: [Self; 6] =
        [Self::Complete, Self::Reset, Self::Failed, Self::Cancelled, Self::CutOff, Self::Idle];

    fn label(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Reset => "reset",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::CutOff => "cut_off",
            Self::Idle => "idle",
        }
    }
}

/// Counters of raw TCP connections that have ended, in the order of [`TcpConnectionEnd::ALL`].
#[derive(Debug, Clone)]
pub struct TcpConnectionCounters([Counter; TcpConnectionEnd::ALL.len()]);

impl TcpConnectionCounters {
    /// Counts one connection that has ended.
    pub fn count_end(&self, end: TcpConnectionEnd) {
        self.0[end as usize].inc();
    }
}

/// Result of a client's TLS handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeResult {
    /// The connection can carry requests.
    Complete,
    /// No certificate is for the name, and no default one is presented.
    NoCertificate,
    /// The host asks for certificates of clients, and the authorities of these are not known.
    NoClientCa,
    /// Client or activator refused it, because of an alert or an error of the protocol.
    Refused,
    /// The handshake took too long.
    Timeout,
    /// The client sent HTTP without TLS.
    PlainHttp,
    /// The client closed the connection before the end of the handshake.
    Closed,
}

impl HandshakeResult {
    /// All results, in the order of their declaration.
    pub const ALL: [Self; 7] = [
        Self::Complete,
        Self::NoCertificate,
        Self::NoClientCa,
        Self::Refused,
        Self::Timeout,
        Self::PlainHttp,
        Self::Closed,
    ];

    fn label(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::NoCertificate => "no_certificate",
            Self::NoClientCa => "no_client_ca",
            Self::Refused => "refused",
            Self::Timeout => "timeout",
            Self::PlainHttp => "plain_http",
            Self::Closed => "closed",
        }
    }
}

/// Metrics of TLS at the gateway.
#[derive(Debug, Clone)]
pub struct TlsMetrics {
    /// Handshakes that have ended, in the order of [`HandshakeResult::ALL`].
    handshakes: [Counter; HandshakeResult::ALL.len()],
    certificates: Gauge,
    certificate_expiry_s: Gauge,
}

impl TlsMetrics {
    fn register(registry: &mut Registry) -> Self {
        let handshakes = Family::<HandshakeResultLabel, Counter>::default();
        // Each result has its series from the start, so that alerts find its 0.
        let ended = |it: HandshakeResult| {
            handshakes.get_or_create(&HandshakeResultLabel { result: it.label() }).clone()
        };
        let all = Self {
            handshakes: HandshakeResult::ALL.map(ended),
            certificates: Gauge::default(),
            certificate_expiry_s: Gauge::default(),
        };
        let results = "TLS handshakes of clients that have ended, by their result";
        registry.register("tls_handshakes", results, handshakes);
        let mut gauge = |name, help, it: &Gauge| registry.register(name, help, it.clone());
        gauge("certificates", "Certificates of hosts in force", &all.certificates);
        let expiry = "Earliest end of the certificates in force, in seconds since 1970; 0: none";
        gauge("certificate_expiry_timestamp_seconds", expiry, &all.certificate_expiry_s);
        all
    }

    /// Counts one handshake that has ended.
    pub fn count_handshake(&self, result: HandshakeResult) {
        self.handshakes[result as usize].inc();
    }

    /// Sets the number of certificates in force, and the earliest end of their validity in seconds since 1970; `None`:
    /// there is no certificate.
    pub fn set_certificates(&self, count: usize, earliest_end_s: Option<i64>) {
        self.certificates.set(i64::try_from(count).unwrap_or(i64::MAX));
        self.certificate_expiry_s.set(earliest_end_s.unwrap_or(0));
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct HandshakeResultLabel {
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ClientBoundLabel {
    bound: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TcpConnectionEndLabel {
    end: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StatusClassLabel {
    code: &'static str,
}

impl ActivatorMetrics {
    /// Creates the metrics and registers all of them under `rouse_activator`.
    pub fn register(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("rouse_activator");
        let requests = Family::<StatusClassLabel, Counter>::default();
        let class = |code| requests.get_or_create(&StatusClassLabel { code }).clone();
        let refusals = Family::<ClientBoundLabel, Counter>::default();
        let at = |it: ClientBound| {
            refusals.get_or_create(&ClientBoundLabel { bound: it.label() }).clone()
        };
        let tcp_connections = Family::<TcpConnectionEndLabel, Counter>::default();
        let ended = |it: TcpConnectionEnd| {
            tcp_connections.get_or_create(&TcpConnectionEndLabel { end: it.label() }).clone()
        };
        // Buckets from 0.1 ms to 105 s: from a slot that is free at once to a pod whose image is pulled.
        let wait_seconds = Histogram::new(exponential_buckets(0.0001, 4.0, 11));
        let all = Self {
            responses_by_class: ["1xx", "2xx", "3xx", "4xx", "5xx"].map(class),
            cancelled: requests.get_or_create(&StatusClassLabel { code: "cancelled" }).clone(),
            waiting_requests: Gauge::default(),
            wait_seconds,
            dials: Counter::default(),
            dial_repeats: Counter::default(),
            dial_failures: Counter::default(),
            retries: Counter::default(),
            fast_path_requests: Counter::default(),
            early_ready_pods: Counter::default(),
            pods_passed_over: Gauge::default(),
            direct_closed_connections: Counter::default(),
            service_ports: Gauge::default(),
            service_ports_failed: Gauge::default(),
            gateway_ports: Gauge::default(),
            gateway_ports_failed: Gauge::default(),
            client_connections: Gauge::default(),
            routes_version: Gauge::default(),
            disconnected_peers: Gauge::default(),
            request_log: RequestLogCounters::default(),
            refusals: RefusalCounters(ClientBound::ALL.map(at)),
            tcp_connections: TcpConnectionCounters(TcpConnectionEnd::ALL.map(ended)),
            tls: TlsMetrics::register(registry),
            spans: ExportCounters::default(),
            metric_messages: ExportCounters::default(),
        };
        registry.register("requests", "Requests by class of their code", requests);
        registry.register("refused", "Clients that came to a bound", refusals);
        let tcp = "Raw TCP connections that have ended, by their end";
        registry.register("tcp_connections", tcp, tcp_connections);
        all.register_gauges_and_counters(registry);
        all
    }

    /// Registers the metrics that have no labels.
    fn register_gauges_and_counters(&self, registry: &mut Registry) {
        // Clones share the value, so that the fields count what is exported.
        let mut gauge = |name, help, it: &Gauge| registry.register(name, help, it.clone());
        gauge("waiting_requests", "Requests waiting for a pod", &self.waiting_requests);
        let passed_over = "Frozen pods that requests pass over, as no agent thaws them";
        gauge("pods_passed_over", passed_over, &self.pods_passed_over);
        gauge("service_ports", "Service ports open", &self.service_ports);
        gauge(
            "service_ports_failed",
            "Service ports that cannot be opened",
            &self.service_ports_failed,
        );
        gauge("gateway_ports", "Gateway ports open", &self.gateway_ports);
        gauge(
            "gateway_ports_failed",
            "Gateway ports that cannot be opened",
            &self.gateway_ports_failed,
        );
        gauge("client_connections", "Client connections open", &self.client_connections);
        gauge(
            "peers_away",
            "Other activators without a stream to this one",
            &self.disconnected_peers,
        );
        gauge("routes_version", "RouteTable version in force", &self.routes_version);
        let mut counter = |name, help, it: &Counter| registry.register(name, help, it.clone());
        counter("dials", "Connections to pods begun", &self.dials);
        counter("dial_repeats", "Further sockets of unanswered dials", &self.dial_repeats);
        counter("dial_failures", "Dials that brought no connection", &self.dial_failures);
        counter("retries", "Requests sent again, unseen by any pod", &self.retries);
        let fast = "Requests that took the fast path and got a response";
        counter("fast_path_requests", fast, &self.fast_path_requests);
        let early = "Pods reported ready before the RouteTable listed them so";
        counter("early_ready_pods", early, &self.early_ready_pods);
        let ended = "Kept connections ended because their service is direct";
        counter("direct_closed_connections", ended, &self.direct_closed_connections);
        let RequestLogCounters { written, dropped } = &self.request_log;
        counter("request_log_lines", "Lines of the request log written", written);
        let lost = "Lines of the request log that were lost: buffer full, or write failed";
        counter("request_log_dropped", lost, dropped);
        let ExportCounters { exported, dropped } = &self.spans;
        counter("spans_exported", "Spans that the collector has taken", exported);
        let lost = "Spans that were lost: queue full, or not taken by the collector";
        counter("spans_dropped", lost, dropped);
        let ExportCounters { exported, dropped } = &self.metric_messages;
        let taken = "Messages with request metrics that the collector has taken";
        counter("metric_exports", taken, exported);
        let lost = "Messages with request metrics that the collector has not taken";
        counter("metric_export_failures", lost, dropped);
        let wait = "Time requests waited for a pod";
        registry.register("wait_seconds", wait, self.wait_seconds.clone());
    }

    /// Counts one response by the class of its code.
    pub fn count_response(&self, status: http::StatusCode) {
        let digit = usize::from(status.as_u16() / 100).clamp(1, 5);
        self.responses_by_class[digit - 1].inc();
    }
}
