//! Tests that run with `cargo xtask test --long` only: they need large packages.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    net::SocketAddr,
    os::unix::process::CommandExt as _,
    process::{Child, Command, Stdio},
};

use activator::route_facts::ConnectionCounts;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use common::{
    certificates::load,
    fixtures::certificates::{TestAuthority, TestCertificate},
};
use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use ring::digest::{SHA256, digest};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::mpsc,
    time::timeout,
};

use crate::{
    harness::{ActivatorFixture, LONG, read_head, start_pod_with},
    tls_client::{HOST, set_default},
    websockets::switch_response,
};

/// Page that opens a WebSocket, and reports the protocol of the page and the first message.
const PAGE: &str = "<!doctype html><title>page</title><script>
const report = (...words) => fetch('/report', { method: 'POST', body: words.join(' ') })
const socket = new WebSocket(`wss://${location.host}/socket`)
socket.onopen = () => socket.send('hello')
socket.onerror = () => report('error')
socket.onmessage = (message) => {
  const [page] = performance.getEntriesByType('navigation')
  report(page.nextHopProtocol, isSecureContext, message.data)
}
</script>";
/// Programs of Chromium, of which one is started.
const CHROMIUM: [&str; 2] = ["chromium-headless-shell", "chromium"];
/// Opcodes of frames (RFC 6455 §5.2), with the flag of the last one of a message.
const TEXT: u8 = 0x81;
const CLOSE: u8 = 0x88;

/// Browser with a profile of its own, which is ended with all of its processes.
struct Browser {
    child: Child,
    /// Removed behind the browser.
    _profile: TempDir,
}

impl Browser {
    /// Opens a page at the gateway. The browser trusts the certificate by its key, and knows no other host.
    fn open(gateway: SocketAddr, certificate: &TestCertificate) -> Self {
        let profile = tempfile::tempdir().unwrap();
        let key = load(&certificate.material()).unwrap().key;
        let key_hash = digest(&SHA256, &key.key.public_key().unwrap());
        let start = |program: &str| {
            let mut command = Command::new(program);
            command.args(["--headless", "--disable-gpu", "--disable-dev-shm-usage"]);
            // As root, and in containers, there is no sandbox. The page is the test's own.
            command.args(["--no-sandbox", "--no-first-run", "--disable-background-networking"]);
            command.arg(format!("--user-data-dir={}", profile.path().display()));
            let rules = format!("MAP {HOST} {},MAP * ~NOTFOUND", gateway.ip());
            command.arg(format!("--host-resolver-rules={rules}"));
            let keys = STANDARD.encode(key_hash);
            command.arg(format!("--ignore-certificate-errors-spki-list={keys}"));
            // With a port for debuggers it stays once the page is loaded.
            command.arg("--remote-debugging-port=0");
            command.arg(format!("https://{HOST}:{}/", gateway.port()));
            command.env("HOME", profile.path()).process_group(0);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            command.spawn()
        };
        let child = CHROMIUM.iter().find_map(|program| start(program).ok());
        let child = child.expect("Chromium: apt-get install chromium-headless-shell");
        Self { child, _profile: profile }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let group = Pid::from_raw(self.child.id().try_into().unwrap());
        killpg(group, Signal::SIGKILL).ok();
        self.child.wait().ok();
    }
}

/// Serves the page, its WebSocket and its reports, each of which is sent to the test.
async fn serve_page(mut stream: TcpStream, reports: mpsc::Sender<String>) {
    loop {
        let head = read_head(&mut stream).await;
        if !head.ends_with("\r\n\r\n") {
            return;
        }
        if head.contains("upgrade: websocket\r\n") {
            stream.write_all(switch_response(&head, "").as_bytes()).await.ok();
            return echo_messages(stream).await;
        }
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let mut body = vec![0; length.map_or(0, |it| it.parse().unwrap())];
        if stream.read_exact(&mut body).await.is_err() {
            return;
        }
        let (status, page) = if head.starts_with("POST /report ") {
            reports.send(String::from_utf8(body).unwrap()).await.ok();
            ("200 OK", "")
        } else if head.starts_with("GET / ") {
            ("200 OK", PAGE)
        } else {
            ("404 Not Found", "")
        };
        let response = format!(
            "HTTP/1.1 {status}\r\ncontent-type: text/html\r\ncontent-length: {}\r\n\r\n{page}",
            page.len()
        );
        stream.write_all(response.as_bytes()).await.ok();
    }
}

/// Sends text messages of a client back, which mask their bytes (RFC 6455 §5.3), until the client closes.
async fn echo_messages(mut stream: TcpStream) {
    loop {
        let mut head = [0; 6];
        if stream.read_exact(&mut head).await.is_err() || head[0] == CLOSE {
            return;
        }
        let [opcode, length, mask @ ..] = head;
        let length = length & 0x7f;
        assert!(opcode == TEXT && length < 126, "a short message: {head:?}");
        let mut message = vec![0; length.into()];
        if stream.read_exact(&mut message).await.is_err() {
            return;
        }
        message.iter_mut().zip(mask.iter().cycle()).for_each(|(byte, mask)| *byte ^= mask);
        let echo = [&[TEXT, length][..], &message].concat();
        stream.write_all(&echo).await.ok();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "starts Chromium: --long"]
async fn chromium_opens_a_page_and_a_websocket_over_http2() {
    let mut fixture = ActivatorFixture::new().await;
    let certificate = TestAuthority::new().issue(&[HOST]);
    set_default(&mut fixture, &certificate);
    let browser = Browser::open(fixture.outside_tls, &certificate);
    fixture.wait_for_queued(1).await;
    let (reports, mut received) = mpsc::channel(8);
    let pod = start_pod_with(move |stream, _| serve_page(stream, reports.clone())).await;
    fixture.add_ready_pod("p", pod);
    let report = timeout(LONG, received.recv()).await.expect("reports in time");
    assert_eq!(report.as_deref(), Some("h2 true hello"));
    // The WebSocket is still open, and there is no connection that it could have for itself.
    let ConnectionCounts { http1, http2, tcp, .. } =
        fixture.activator.server.connections().count_by_kind();
    assert!(http2 >= 1 && (http1, tcp) == (0, 0), "{http1} of HTTP/1.1, {http2} of HTTP/2");
    drop(browser);
}
