//! Finished requests are logged, and writing the lines delays no request.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    io,
    sync::{Arc, Mutex, PoisonError, mpsc},
    time::Duration,
};

use common::{
    request_log::{DEFAULT_TEMPLATE, LogTemplate},
    wire::RequestLogSettings,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

use crate::{
    h2c::{self, Http2TestClient},
    harness::{
        ActivatorFixture, DATED, GET, LONG, OK, hello_revision, read_head, revision, start_pod,
        wait_until,
    },
    websockets::{WebSocketClient, start_echo_pod},
};

const LINES: &str = "rouse_activator_request_log_lines_total";
const DROPPED: &str = "rouse_activator_request_log_dropped_total";
/// Logged fields except for the latency, which no test can predict.
const SHORT: &str = r#"{{.Request.Method}} {{js .Request.RequestURI}} {{.Response.Code}} {{.Response.Size}} {{.Revision.Namespace}}/{{.Revision.Name}} {{.Revision.PodName}} {{.Revision.PodIP}}"#;

/// Text that was written to the log.
#[derive(Clone, Default)]
struct CapturedRequestLog(Arc<Mutex<Vec<u8>>>);

impl CapturedRequestLog {
    fn lines(&self) -> Vec<String> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8(all.clone()).unwrap().lines().map(str::to_owned).collect()
    }
}

impl io::Write for CapturedRequestLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Output that accepts nothing before it is released, and then fails.
struct StuckLogSink(mpsc::Receiver<()>);

impl io::Write for StuckLogSink {
    fn write(&mut self, _bytes: &[u8]) -> io::Result<usize> {
        let _ = self.0.recv();
        Err(io::ErrorKind::BrokenPipe.into())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Turns the log on with this template, without probes, or off.
fn set_template(fixture: &mut ActivatorFixture, template: Option<&str>) {
    let settings = template.map(|source| RequestLogSettings {
        template: LogTemplate::parse(source).unwrap(),
        logs_probes: false,
    });
    fixture.apply_change(|table| table.settings.request_log = settings);
}

/// Makes a log that is on contain probes, too.
fn log_probes(fixture: &mut ActivatorFixture) {
    fixture.apply_change(|table| table.settings.request_log.as_mut().unwrap().logs_probes = true);
}

/// Creates an activator that logs by this template.
async fn start_logging(template: &str) -> (ActivatorFixture, CapturedRequestLog) {
    let (mut fixture, written) = (ActivatorFixture::new().await, CapturedRequestLog::default());
    fixture.activator.forwarder.request_log.set_sink(Box::new(written.clone()));
    set_template(&mut fixture, Some(template));
    (fixture, written)
}

#[tokio::test]
async fn a_request_leaves_knatives_line_with_status_size_and_latency() {
    let (mut fixture, written) = start_logging(DEFAULT_TEMPLATE).await;
    let pod = start_pod(OK, Duration::from_millis(20)).await;
    fixture.add_ready_pod("p", pod.address);
    let request = "POST /a'\"?b=c HTTP/1.1\r\nhost: a\r\nuser-agent: it's \"x\\\u{1F600}\r\n\
                   referer: r\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    assert!(fixture.exchange(request).await.ends_with("hello"));
    wait_until(|| written.lines().len() == 1).await;
    let line: serde_json::Value = serde_json::from_str(&written.lines()[0]).unwrap();
    let http = &line["httpRequest"];
    let text_of = |key: &str| http[key].as_str().unwrap().to_owned();
    assert_eq!(http["status"], 200);
    assert_eq!(
        ["requestMethod", "requestUrl", "requestSize", "responseSize", "userAgent"].map(text_of),
        ["POST", "/a'\"?b=c", "0", "5", "it's \"x\\\u{1F600}"]
    );
    assert_eq!(["serverIp", "referer", "protocol"].map(text_of), ["127.0.0.1", "r", "HTTP/1.1"]);
    assert!(text_of("remoteIp").starts_with("127.0.0.1:"), "{line}");
    let latency: f64 = text_of("latency").strip_suffix('s').unwrap().parse().unwrap();
    assert!(latency >= 0.02, "not shorter than the pod took: {latency}");
    assert_eq!((fixture.metric(LINES), fixture.metric(DROPPED)), (1.0, 0.0));
}

#[tokio::test]
async fn nothing_is_written_while_it_is_off_and_the_setting_is_followed_live() {
    let (mut fixture, written) = (ActivatorFixture::new().await, CapturedRequestLog::default());
    fixture.activator.forwarder.request_log.set_sink(Box::new(written.clone()));
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    fixture.exchange(GET).await;
    set_template(&mut fixture, Some("one {{.Response.Code}}"));
    fixture.exchange(GET).await;
    set_template(&mut fixture, Some("two {{.Response.Code}}"));
    fixture.exchange(GET).await;
    set_template(&mut fixture, None);
    fixture.exchange(GET).await;
    set_template(&mut fixture, Some("three {{.Response.Code}}"));
    fixture.exchange(GET).await;
    let want = ["one 200", "two 200", "three 200"];
    wait_until(|| written.lines() == want).await;
    assert_eq!(pod.requests(), 5);
}

#[tokio::test]
async fn every_end_of_a_request_leaves_one_line() {
    let (mut fixture, written) = start_logging(SHORT).await;
    // The client leaves while its request waits.
    let mut gone = fixture.connect().await;
    gone.write_all(b"GET /gone HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    fixture.wait_for_queued(1).await;
    drop(gone);
    wait_until(|| written.lines().len() == 1).await;
    // The timeout is over before there is a pod.
    let short = Duration::from_millis(20);
    fixture.apply_change(|table| {
        table
            .revisions
            .insert(revision(), common::wire::RevisionEntry { timeout: short, ..hello_revision() });
    });
    fixture.exchange(&GET.replace("GET /", "GET /late")).await;
    wait_until(|| written.lines().len() == 2).await;
    // The response has no body.
    fixture.apply_change(|table| drop(table.revisions.insert(revision(), hello_revision())));
    let pod = start_pod("HTTP/1.1 204 No Content\r\n\r\n", Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    fixture.exchange(&GET.replace("GET /", "DELETE /it")).await;
    wait_until(|| written.lines().len() == 3).await;
    // A request without a service and one to the platform itself are not logged.
    let nobody = "GET / HTTP/1.1\r\nhost: nobody\r\nconnection: close\r\n\r\n";
    fixture.exchange_at(fixture.outside, nobody).await;
    let probe = GET.replace("host: a", "host: a\r\nk-network-probe: activator");
    assert!(fixture.exchange(&probe).await.ends_with("activator"));
    log_probes(&mut fixture);
    assert!(fixture.exchange(&probe).await.ends_with("activator"));
    let want = [
        "GET /gone 499 0 default/hello-1  ",
        "GET /late 504 25 default/hello-1  ",
        "DELETE /it 204 0 default/hello-1 p 127.0.0.1",
        "GET / 200 9 /  ",
    ];
    wait_until(|| written.lines().len() == want.len()).await;
    assert_eq!(written.lines(), want);
}

#[tokio::test]
async fn a_connection_that_switches_protocols_leaves_its_line_at_its_end() {
    let (mut fixture, written) = start_logging("{{.Response.Code}} {{.Revision.PodName}}").await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    fixture.add_ready_pod("p", listener.local_addr().unwrap());
    let pod = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        read_head(&mut stream).await;
        let switch =
            "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
        stream.write_all(switch.as_bytes()).await.unwrap();
        let _ = stream.read_u8().await;
    });
    let mut client = fixture.connect().await;
    let ask = "GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
    client.write_all(ask.as_bytes()).await.unwrap();
    assert!(read_head(&mut client).await.starts_with("HTTP/1.1 101"));
    assert_eq!(written.lines(), [] as [&str; 0], "it has not ended");
    drop(client);
    wait_until(|| written.lines() == ["101 p"]).await;
    pod.await.unwrap();
}

/// Over HTTP/2 it is a CONNECT with status 200. It has the line that it would have over HTTP/1.1, as with Envoy.
#[tokio::test]
async fn a_websocket_over_http2_leaves_the_line_of_one_over_http1() {
    let template = "{{.Request.Method}} {{.Response.Code}} {{.Revision.PodName}}";
    let (mut fixture, written) = start_logging(template).await;
    fixture.add_ready_pod("p", start_echo_pod().await);
    let client = WebSocketClient::connect(fixture.port).await;
    let mut socket = client.open().await;
    assert_eq!(written.lines(), [] as [&str; 0], "it has not ended");
    socket.send("hello");
    socket.finish();
    assert_eq!(socket.read_rest().await, "hellobye");
    wait_until(|| written.lines().len() == 1).await;
    assert_eq!(written.lines(), ["GET 101 p"]);
}

/// Its client gets the code of HTTP 200, and the failure as a status of gRPC.
#[tokio::test]
async fn a_call_of_grpc_that_fails_leaves_the_line_and_the_count_of_another_request() {
    let (mut fixture, written) = start_logging("{{.Response.Code}} {{.Response.Size}}").await;
    fixture.apply_change(|table| {
        table.revisions.get_mut(&revision()).unwrap().timeout = Duration::from_millis(20);
    });
    let call = h2c::get("/").method("POST").header("content-type", "application/grpc");
    let client = Http2TestClient::connect(fixture.port).await;
    let response = client.send_request(call, &[]).await.unwrap();
    assert_eq!(response.head.headers()["grpc-status"], "4");
    wait_until(|| written.lines().len() == 1).await;
    assert_eq!(written.lines(), ["504 0"]);
    let count = |class: &str| {
        fixture.metric(&format!("rouse_activator_requests_total{{code=\"{class}\"}}"))
    };
    assert_eq!(["2xx", "5xx"].map(count), [0.0, 1.0]);
}

#[tokio::test]
async fn an_output_that_takes_nothing_holds_no_request_up_and_what_is_lost_is_counted() {
    let mut fixture = ActivatorFixture::new().await;
    let (go_on, wait) = mpsc::channel();
    fixture.activator.forwarder.request_log.set_sink(Box::new(StuckLogSink(wait)));
    // Lines of 64 KiB each; at most eight megabytes of them wait.
    set_template(&mut fixture, Some(&"{{.Request.RequestURI}}".repeat(32)));
    let pod = start_pod(DATED, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    let mut client = fixture.connect().await;
    let request = format!("GET /{} HTTP/1.1\r\nhost: a\r\n\r\n", "x".repeat(2047));
    for _ in 0..160 {
        client.write_all(request.as_bytes()).await.unwrap();
        let mut response = [0; DATED.len()];
        let read = tokio::time::timeout(LONG, client.read_exact(&mut response)).await;
        read.expect("nothing holds it up").unwrap();
        assert_eq!(response, *DATED.as_bytes());
    }
    wait_until(|| fixture.metric(DROPPED) > 0.0).await;
    drop(go_on);
    wait_until(|| fixture.metric(DROPPED) == 160.0).await;
    assert_eq!(fixture.metric(LINES), 0.0);
}
