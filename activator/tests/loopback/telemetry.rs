//! Spans and request metrics reach a collector by either protocol, and a collector that fails harms no request.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use activator::telemetry::request_rows::RowLabels;
use common::{
    fixtures,
    wire::{
        HttpRule, OtlpCollector, OtlpProtocol, PathMatch, PathPrefix, RequestMetricsSettings,
        RouteBackend, SamplingRate, TelemetrySettings, TraceSettings,
    },
};
use opentelemetry_proto::tonic::{
    collector::{
        metrics::v1::{
            ExportMetricsPartialSuccess, ExportMetricsServiceRequest, ExportMetricsServiceResponse,
            metrics_service_server::{MetricsService, MetricsServiceServer},
        },
        trace::v1::{
            ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse,
            trace_service_server::{TraceService, TraceServiceServer},
        },
    },
    common::v1::{KeyValue, any_value::Value},
    metrics::v1::metric::Data,
    trace::v1::{Span, span::SpanKind, status::StatusCode},
};
use prost::Message as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};
use tonic::transport::{Server, server::TcpIncoming};

use crate::harness::{
    ActivatorFixture, FakeHttp1Pod, GET, LONG, OK, PausedClock, read_head, read_rest, read_until,
    service, start_pod, unused_port, wait_until,
};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";
const DROPPED: &str = "rouse_activator_spans_dropped_total";
const EXPORTED: &str = "rouse_activator_spans_exported_total";

/// Collector that keeps what it is sent.
#[derive(Clone, Default)]
struct FakeCollector {
    spans: Arc<Mutex<Vec<Span>>>,
    metrics: Arc<Mutex<Vec<ExportMetricsServiceRequest>>>,
    /// Number of spans or data points of each message that its response rejects.
    rejected: Arc<AtomicI64>,
}

impl FakeCollector {
    fn add_spans(&self, message: ExportTraceServiceRequest) {
        let scopes = message.resource_spans.into_iter().flat_map(|it| it.scope_spans);
        self.spans.lock().unwrap().extend(scopes.flat_map(|it| it.spans));
    }

    fn trace_response(&self) -> ExportTraceServiceResponse {
        let partial = ExportTracePartialSuccess {
            rejected_spans: self.rejected.load(Ordering::Relaxed),
            error_message: String::new(),
        };
        ExportTraceServiceResponse { partial_success: Some(partial) }
    }

    fn metrics_response(&self) -> ExportMetricsServiceResponse {
        let partial = ExportMetricsPartialSuccess {
            rejected_data_points: self.rejected.load(Ordering::Relaxed),
            error_message: String::new(),
        };
        ExportMetricsServiceResponse { partial_success: Some(partial) }
    }

    fn spans(&self) -> Vec<Span> {
        self.spans.lock().unwrap().clone()
    }

    /// Counts of the requests in the latest message, one for each row.
    fn request_counts(&self) -> Vec<u64> {
        let all = self.metrics.lock().unwrap();
        let Some(last) = all.last() else { return Vec::new() };
        let scopes = last.resource_metrics.iter().flat_map(|it| &it.scope_metrics);
        let named = scopes.flat_map(|it| &it.metrics);
        let named = named.filter(|it| it.name == "http.server.request.duration");
        let points = named.flat_map(|it| match &it.data {
            Some(Data::Histogram(it)) => it.data_points.as_slice(),
            _ => &[],
        });
        points.map(|it| it.count).collect()
    }

    /// Waits for this number of spans.
    async fn wait_for_spans(&self, count: usize) -> Vec<Span> {
        wait_until(|| self.spans().len() >= count).await;
        self.spans()
    }

    async fn serve_grpc(self, listener: TcpListener) {
        let incoming = TcpIncoming::from(listener);
        let server = Server::builder()
            .add_service(TraceServiceServer::new(self.clone()))
            .add_service(MetricsServiceServer::new(self));
        server.serve_with_incoming(incoming).await.ok();
    }

    async fn serve_http(self, listener: TcpListener) {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(self.clone().take_post(stream));
        }
    }

    async fn take_post(self, mut stream: TcpStream) {
        let head = read_head(&mut stream).await.to_ascii_lowercase();
        let length = head.split("content-length: ").nth(1).unwrap();
        let mut body = vec![0; length.lines().next().unwrap().parse().unwrap()];
        stream.read_exact(&mut body).await.unwrap();
        assert!(head.contains("content-type: application/x-protobuf"), "{head}");
        let response = match head.split(' ').nth(1).unwrap() {
            "/v1/traces" => {
                self.add_spans(ExportTraceServiceRequest::decode(body.as_slice()).unwrap());
                self.trace_response().encode_to_vec()
            }
            "/v1/metrics" => {
                let message = ExportMetricsServiceRequest::decode(body.as_slice()).unwrap();
                self.metrics.lock().unwrap().push(message);
                self.metrics_response().encode_to_vec()
            }
            path => panic!("{path}"),
        };
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: {}\r\n\r\n",
            response.len()
        );
        stream.write_all(&[head.into_bytes(), response].concat()).await.ok();
    }
}

#[tonic::async_trait]
impl TraceService for FakeCollector {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        self.add_spans(request.into_inner());
        Ok(tonic::Response::new(self.trace_response()))
    }
}

#[tonic::async_trait]
impl MetricsService for FakeCollector {
    async fn export(
        &self,
        request: tonic::Request<ExportMetricsServiceRequest>,
    ) -> Result<tonic::Response<ExportMetricsServiceResponse>, tonic::Status> {
        self.metrics.lock().unwrap().push(request.into_inner());
        Ok(tonic::Response::new(self.metrics_response()))
    }
}

/// Starts a collector. Returns it with its settings.
async fn start_collector(protocol: OtlpProtocol) -> (FakeCollector, OtlpCollector) {
    let collector = FakeCollector::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    match protocol {
        OtlpProtocol::Grpc => tokio::spawn(collector.clone().serve_grpc(listener)),
        OtlpProtocol::HttpProtobuf => tokio::spawn(collector.clone().serve_http(listener)),
    };
    (collector, collector_at(protocol, address))
}

fn collector_at(protocol: OtlpProtocol, address: SocketAddr) -> OtlpCollector {
    OtlpCollector::parse(protocol, &format!("http://{address}")).unwrap()
}

/// Samples this share of the requests, or turns traces off.
fn set_traces(fixture: &mut ActivatorFixture, traces: Option<(OtlpCollector, f64)>) {
    let traces = traces.map(|(collector, rate)| TraceSettings {
        collector,
        sampling: SamplingRate::from_fraction(rate),
    });
    fixture.apply_change(|table| {
        table.settings.telemetry = TelemetrySettings { traces, metrics: None };
    });
}

async fn start_with_pod() -> (ActivatorFixture, FakeHttp1Pod) {
    let mut fixture = ActivatorFixture::new().await;
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    (fixture, pod)
}

/// Returns a request of a trace whose client has this flag.
fn traced_request(flags: &str) -> String {
    format!(
        "GET /a HTTP/1.1\r\nhost: a\r\ntraceparent: 00-{TRACE}-{PARENT}-{flags}\r\n\
         tracestate: k=v\r\nconnection: close\r\n\r\n"
    )
}

fn text_of(span: &Span, key: &str) -> Option<String> {
    let found = |it: &&KeyValue| it.key == key;
    match span.attributes.iter().find(found)?.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text.clone()),
        Value::IntValue(number) => Some(number.to_string()),
        _ => None,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|it| format!("{it:02x}")).collect()
}

fn of_kind(spans: &[Span], kind: SpanKind) -> Vec<Span> {
    spans.iter().filter(|it| it.kind == i32::from(kind)).cloned().collect()
}

#[tokio::test]
async fn the_spans_of_a_request_stand_between_its_client_and_the_pod() {
    for protocol in [OtlpProtocol::Grpc, OtlpProtocol::HttpProtobuf] {
        let (mut fixture, pod) = start_with_pod().await;
        let (collector, settings) = start_collector(protocol).await;
        set_traces(&mut fixture, Some((settings, 0.5)));
        assert!(fixture.exchange(&traced_request("01")).await.ends_with("hello"));
        let spans = collector.wait_for_spans(2).await;
        assert_eq!(spans.len(), 2, "{spans:?}");
        let (server, client) =
            (of_kind(&spans, SpanKind::Server), of_kind(&spans, SpanKind::Client));
        let ([server], [client]) = (&server[..], &client[..]) else { panic!("{spans:?}") };
        assert!(spans.iter().all(|it| hex(&it.trace_id) == TRACE && it.trace_state == "k=v"));
        assert_eq!(hex(&server.parent_span_id), PARENT);
        assert_eq!(client.parent_span_id, server.span_id);
        assert!(server.start_time_unix_nano <= client.start_time_unix_nano);
        assert!(client.end_time_unix_nano <= server.end_time_unix_nano);
        for (key, expected) in [
            ("http.request.method", "GET"),
            ("url.path", "/a"),
            ("server.address", "a"),
            ("http.response.status_code", "200"),
            ("kn.revision.name", "hello-1"),
            ("k8s.namespace.name", "default"),
        ] {
            assert_eq!(text_of(server, key).as_deref(), Some(expected), "{key}");
        }
        let port = pod.address.port().to_string();
        assert_eq!(text_of(client, "server.port"), Some(port));
        let header = format!("traceparent: 00-{TRACE}-{}-01\r\n", hex(&client.span_id));
        assert!(pod.heads().contains(&header), "{}", pod.heads());
        assert!(pod.heads().contains("tracestate: k=v\r\n"), "{}", pod.heads());
    }
}

#[tokio::test]
async fn a_request_that_its_client_does_not_sample_passes_unchanged() {
    let (mut fixture, pod) = start_with_pod().await;
    let (collector, settings) = start_collector(OtlpProtocol::HttpProtobuf).await;
    set_traces(&mut fixture, Some((settings, 0.5)));
    fixture.exchange(&traced_request("00")).await;
    let header = format!("traceparent: 00-{TRACE}-{PARENT}-00\r\n");
    assert!(pod.heads().contains(&header), "{}", pod.heads());
    // Spans are sent in the order of the requests, so none of the first one follows.
    fixture.exchange(&traced_request("01")).await;
    assert_eq!(collector.wait_for_spans(2).await.len(), 2);
}

#[tokio::test]
async fn a_wait_and_a_failure_are_in_the_spans() {
    let mut fixture = ActivatorFixture::new().await;
    let (collector, settings) = start_collector(OtlpProtocol::Grpc).await;
    set_traces(&mut fixture, Some((settings, 1.0)));
    let mut stream = fixture.connect().await;
    stream.write_all(GET.as_bytes()).await.unwrap();
    fixture.wait_for_queued(1).await;
    let pod = start_pod("HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n", Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    read_rest(&mut stream).await;
    let spans = collector.wait_for_spans(3).await;
    let waits = of_kind(&spans, SpanKind::Internal);
    let causes: Vec<_> = waits.iter().map(|it| text_of(it, "rouse.wait.cause")).collect();
    assert_eq!(causes, [Some("no_ready_pod".to_owned())]);
    for kind in [SpanKind::Server, SpanKind::Client] {
        let found = of_kind(&spans, kind);
        let [span] = &found[..] else { panic!("{spans:?}") };
        assert_eq!(span.status.as_ref().map(|it| it.code), Some(i32::from(StatusCode::Error)));
        assert_eq!(text_of(span, "error.type").as_deref(), Some("503"));
    }
}

/// The spans have copies of what the client has sent, which count as bytes of its requests.
#[tokio::test]
async fn the_spans_of_a_waiting_request_count_for_its_client() {
    let mut fixture = ActivatorFixture::new().await;
    let (_collector, settings) = start_collector(OtlpProtocol::Grpc).await;
    let (path, agent) = ("p".repeat(400), "u".repeat(400));
    let request = format!("GET /{path} HTTP/1.1\r\nhost: a\r\nuser-agent: {agent}\r\n\r\n");
    let counted =
        |fixture: &ActivatorFixture| fixture.activator.server.connections().request_bytes();
    let mut clients = Vec::new();
    let mut totals = Vec::new();
    for waiting in 1..=2 {
        let mut client = fixture.connect().await;
        client.write_all(request.as_bytes()).await.unwrap();
        fixture.wait_for_queued(waiting).await;
        clients.push(client);
        totals.push(counted(&fixture));
        set_traces(&mut fixture, Some((settings.clone(), 1.0)));
    }
    let (head, traced) = (totals[0], totals[1] - totals[0]);
    assert!(traced > head + 800, "{totals:?}");
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    for client in &mut clients {
        read_until(client, "hello").await;
    }
    assert_eq!(counted(&fixture), 0);
}

#[tokio::test]
async fn a_dead_collector_fails_no_request_and_lost_spans_are_counted() {
    for protocol in [OtlpProtocol::Grpc, OtlpProtocol::HttpProtobuf] {
        let (mut fixture, _pod) = start_with_pod().await;
        let address = SocketAddr::from(([127, 0, 0, 1], unused_port()));
        set_traces(&mut fixture, Some((collector_at(protocol, address), 1.0)));
        for _ in 0..20 {
            assert!(fixture.exchange(GET).await.ends_with("hello"));
        }
        // Each has its own span and that of its attempt.
        wait_until(|| fixture.metric(DROPPED) >= 40.0).await;
        assert_eq!(fixture.metric(DROPPED), 40.0);
    }
}

#[tokio::test]
async fn what_a_collector_rejects_counts_as_lost() {
    const SENT: &str = "rouse_activator_metric_exports_total";
    const FAILED: &str = "rouse_activator_metric_export_failures_total";
    for protocol in [OtlpProtocol::Grpc, OtlpProtocol::HttpProtobuf] {
        let (mut fixture, _pod) = start_with_pod().await;
        let (collector, settings) = start_collector(protocol).await;
        collector.rejected.store(1, Ordering::Relaxed);
        set_traces(&mut fixture, Some((settings.clone(), 1.0)));
        // Two spans in one message.
        fixture.exchange(GET).await;
        wait_until(|| fixture.metric(EXPORTED) + fixture.metric(DROPPED) >= 2.0).await;
        assert_eq!((fixture.metric(EXPORTED), fixture.metric(DROPPED)), (1.0, 1.0));
        let interval = Duration::from_millis(20);
        let metrics = RequestMetricsSettings { collector: Some(settings), interval };
        fixture.apply_change(|table| {
            table.settings.telemetry = TelemetrySettings { traces: None, metrics: Some(metrics) };
        });
        wait_until(|| fixture.metric(SENT) + fixture.metric(FAILED) >= 1.0).await;
        assert_eq!(fixture.metric(SENT), 0.0);
    }
}

#[tokio::test]
async fn the_queue_of_a_silent_collector_is_bounded() {
    let (mut fixture, _pod) = start_with_pod().await;
    // It accepts connections and never responds.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = silent.local_addr().unwrap();
    let settings = collector_at(OtlpProtocol::HttpProtobuf, address);
    set_traces(&mut fixture, Some((settings, 1.0)));
    let recorder = &fixture.activator.forwarder.telemetry;
    // More than the queue, a batch under way and one being collected hold.
    for _ in 0..10_000 {
        recorder.enqueue_spans(vec![Span::default()]);
    }
    assert!(fixture.metric(DROPPED) >= 5_000.0, "{}", fixture.metric(DROPPED));
    assert!(fixture.exchange(GET).await.ends_with("hello"));
}

#[tokio::test]
async fn settings_of_traces_are_followed_without_a_restart() {
    let (mut fixture, pod) = start_with_pod().await;
    let [(first, first_settings), (second, second_settings)] = [
        start_collector(OtlpProtocol::Grpc).await,
        start_collector(OtlpProtocol::HttpProtobuf).await,
    ];
    // Off: the headers of the trace pass as they are.
    fixture.exchange(&traced_request("01")).await;
    let header = format!("traceparent: 00-{TRACE}-{PARENT}-01\r\n");
    assert!(pod.heads().contains(&header), "{}", pod.heads());
    set_traces(&mut fixture, Some((first_settings, 1.0)));
    fixture.exchange(GET).await;
    first.wait_for_spans(2).await;
    set_traces(&mut fixture, Some((second_settings.clone(), 1.0)));
    fixture.exchange(GET).await;
    second.wait_for_spans(2).await;
    set_traces(&mut fixture, None);
    fixture.exchange(GET).await;
    set_traces(&mut fixture, Some((second_settings, 1.0)));
    fixture.exchange(GET).await;
    let spans = second.wait_for_spans(4).await;
    assert_eq!((first.spans().len(), spans.len()), (2, 4));
    assert_eq!(fixture.metric(DROPPED), 0.0);
}

#[tokio::test]
async fn request_metrics_are_on_the_page_and_at_the_collector() {
    const LABELS: &str = r#"{k8s_namespace_name="default",kn_service_name="hello",kn_configuration_name="hello",kn_revision_name="hello-1",server_address="hello.default.svc",http_request_method="GET",http_response_status_code="200",network_protocol_name="http",network_protocol_version="1.1",url_scheme="http"}"#;
    for protocol in [OtlpProtocol::Grpc, OtlpProtocol::HttpProtobuf] {
        let (mut fixture, _pod) = start_with_pod().await;
        // Not recorded: they are off.
        fixture.exchange(GET).await;
        let (collector, settings) = start_collector(protocol).await;
        let metrics = RequestMetricsSettings {
            collector: Some(settings),
            interval: Duration::from_millis(20),
        };
        fixture.apply_change(|table| {
            table.settings.telemetry = TelemetrySettings { traces: None, metrics: Some(metrics) };
        });
        for _ in 0..3 {
            fixture.exchange(GET).await;
        }
        wait_until(|| collector.request_counts() == [3]).await;
        let series = format!("http_server_request_duration_seconds_count{LABELS}");
        assert_eq!(fixture.metric(&series), 3.0);
        let bytes = format!("http_server_response_body_size_bytes_sum{LABELS}");
        assert_eq!(fixture.metric(&bytes), 15.0);
    }
}

#[tokio::test]
async fn a_change_of_traces_does_not_put_off_the_metrics() {
    let (mut fixture, _pod) = start_with_pod().await;
    let (collector, settings) = start_collector(OtlpProtocol::HttpProtobuf).await;
    let interval = Duration::from_secs(3600);
    let metrics = RequestMetricsSettings { collector: Some(settings.clone()), interval };
    let set_sampling = |fixture: &mut ActivatorFixture, rate: f64| {
        let sampling = SamplingRate::from_fraction(rate);
        let traces = Some(TraceSettings { collector: settings.clone(), sampling });
        let metrics = Some(metrics.clone());
        fixture.apply_change(|table| {
            table.settings.telemetry = TelemetrySettings { traces, metrics };
        });
    };
    set_sampling(&mut fixture, 0.0);
    fixture.exchange(GET).await;
    let recorder = Arc::clone(&fixture.activator.forwarder.telemetry);
    wait_until(|| recorder.request_rows().rows().count() == 1).await;
    let clock = PausedClock::start_paused();
    // Only the last step reaches the end of the interval: a later one could end the export itself.
    for rate in [0.1, 0.2, 0.3, 0.4] {
        clock.advance(interval * 3 / 10).await;
        set_sampling(&mut fixture, rate);
    }
    clock.until(|| collector.request_counts() == [1]).await;
}

/// Each host would be a label otherwise, and clients would fill the table of rows.
#[tokio::test]
async fn requests_below_a_wildcard_share_the_row_of_the_wildcard() {
    let (mut fixture, _pod) = start_with_pod().await;
    fixture.set_mapped_domains(vec![fixtures::ruled_domain("*.shop.example", "/")]);
    // A listener of the Gateway API that takes all hosts.
    let backends = vec![fixtures::backend(RouteBackend::Service(service()))];
    let rule = fixtures::http_rule(PathMatch::Prefix(PathPrefix::ALL));
    let entry = fixtures::gateway_host("http://*", vec![HttpRule { backends, ..rule }]);
    let interval = RequestMetricsSettings::DEFAULT_INTERVAL;
    let metrics = RequestMetricsSettings { collector: None, interval };
    fixture.apply_change(|table| {
        table.settings.telemetry = TelemetrySettings { traces: None, metrics: Some(metrics) };
        table.gateway_hosts.insert(entry.key.clone(), entry);
    });
    for host in ["a.shop.example", "b.shop.example", "c.shop.example", "d.example", "e.test"] {
        let request = format!("GET / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        let response = fixture.exchange_at(fixture.outside, &request).await;
        assert!(response.ends_with("hello"), "{response}");
    }
    let recorder = &fixture.activator.forwarder.telemetry;
    let counts = || -> Vec<(String, u64)> {
        let rows = recorder.request_rows();
        let host = |it: &RowLabels| it.host.to_string();
        rows.rows()
            .map(|(it, row)| (it.map_or_else(|| "other".into(), host), row.durations.count))
            .collect()
    };
    wait_until(|| counts().iter().map(|(_, count)| count).sum::<u64>() == 5).await;
    let rows: BTreeSet<(String, u64)> = counts().into_iter().collect();
    assert_eq!(rows, BTreeSet::from([("*".to_owned(), 2), ("*.shop.example".to_owned(), 3)]));
}

#[tokio::test]
async fn an_activator_that_stops_sends_what_it_has() {
    let (mut fixture, _pod) = start_with_pod().await;
    let (collector, settings) = start_collector(OtlpProtocol::Grpc).await;
    let traces =
        TraceSettings { collector: settings.clone(), sampling: SamplingRate::from_fraction(1.0) };
    // Longer than the test.
    let interval = Duration::from_secs(3600);
    let metrics = RequestMetricsSettings { collector: Some(settings), interval };
    fixture.apply_change(|table| {
        table.settings.telemetry =
            TelemetrySettings { traces: Some(traces), metrics: Some(metrics) };
    });
    fixture.exchange(GET).await;
    let recorder = &fixture.activator.forwarder.telemetry;
    wait_until(|| recorder.request_rows().rows().count() == 1).await;
    recorder.flush(LONG).await;
    assert_eq!((collector.spans().len(), collector.request_counts()), (2, vec![1]));
}
