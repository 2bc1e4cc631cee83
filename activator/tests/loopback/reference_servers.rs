//! The same request gets the same response on every path: asleep, through an activator's port and through its gateway.
//! In both versions of HTTP it equals the pod's own response. The pods are real servers.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use common::wire::AppProtocol;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::{
    harness::{ActivatorFixture, LONG, revision, unused_port},
    inputs::{
        self, ComparedResponse, Http1RequestCase, Http2RequestCase, RequestBodyCase,
        encode_as_http1, encode_head, http1_cases, http2_cases, is_refused, parse_response,
    },
};

/// Server in a process of its own, which ends when its standard input does.
pub(crate) struct ReferenceServerProcess {
    child: Child,
    pub(crate) address: SocketAddr,
}

impl ReferenceServerProcess {
    pub(crate) fn start(command: &mut Command) -> Self {
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = piped.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let port: u16 = line.trim().parse().unwrap();
        Self { child, address: ([127, 0, 0, 1], port).into() }
    }
}

impl Drop for ReferenceServerProcess {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        self.child.wait().ok();
    }
}

pub(crate) fn pods() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/pods")
}

/// Builds Go's server for a test of this name, and returns the command that starts it.
pub(crate) fn go(test: &str) -> Command {
    let binary = std::env::temp_dir().join(format!("activator-{test}-{}", std::process::id()));
    let known = Path::new("/usr/local/go/bin/go");
    let go = if known.exists() { known } else { Path::new("go") };
    let mut build = Command::new(go);
    build.arg("build").arg("-o").arg(&binary).arg(pods().join("app.go")).env("CGO_ENABLED", "0");
    assert!(build.status().unwrap().success(), "go build");
    Command::new(binary)
}

/// Returns the command that starts nginx, which logs requests as `access_log` says. The response body names the request
/// as that of the other servers does.
pub(crate) fn nginx(folder: &Path, access_log: &str) -> Command {
    let free = SocketAddr::from(([127, 0, 0, 1], unused_port()));
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let temporary = temporary.map(|it| format!("{it}_temp_path {};\n", folder.display())).concat();
    let serve = "return 200 \"$request_method $request_uri $content_length\\n\";";
    let config = format!(
        "daemon off;\nmaster_process off;\npid {0}/pid;\nevents {{}}\nhttp {{\naccess_log {access_log};\n{temporary}\
         server {{ listen {free}; location / {{ {serve} }} }}\n}}\n",
        folder.display(),
    );
    std::fs::write(folder.join("nginx.conf"), config).unwrap();
    let mut command = probed_server("nginx", free.port());
    command.args(["-e", "stderr", "-c", "nginx.conf", "-p"]).arg(folder);
    command
}

/// Returns the command that starts a server, whose arguments are to be added. Like the other servers it prints the port,
/// once the server listens there, and ends when the standard input ends.
pub(crate) fn probed_server(program: &str, port: u16) -> Command {
    let script = "port=$1; shift; \"$@\" >&2 & \
        until (exec 3<>/dev/tcp/127.0.0.1/$port) 2>/dev/null; do kill -0 $! || exit; sleep 0.01; done; \
        echo $port; cat; kill $!; wait";
    let mut command = Command::new("bash");
    command.args(["-c", script, "bash", &port.to_string(), program]);
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    command
}

/// Sends raw bytes with a body behind them, and reads the response at the same time, as clients do.
async fn ask(at: SocketAddr, head: &[u8], body: usize) -> ComparedResponse {
    let mut client = TcpStream::connect(at).await.unwrap();
    let (mut from, mut to) = client.split();
    let (sent, mut response) = ([head, &vec![b'x'; body]].concat(), Vec::new());
    let read = from.read_to_end(&mut response);
    let both = async { tokio::join!(to.write_all(&sent), read) };
    let (_, read) = tokio::time::timeout(LONG, both).await.expect("responses in time");
    read.ok();
    parse_response(&response)
}

/// Compares the responses to the requests for every server, and to those in `more`, in HTTP/1.1.
async fn compare_http1(server: &ReferenceServerProcess, more: &[Http1RequestCase]) {
    for input in http1_cases().iter().chain(more) {
        let &(_, _, _, body) = input;
        let head = encode_head(input);
        let what = format!("{}", head[..head.len().min(60)].escape_ascii());
        let direct = ask(server.address, &head, body).await;
        let mut fixture = ActivatorFixture::new().await;
        let port = ([127, 0, 0, 1], fixture.port).into();
        if is_refused(input) {
            fixture.add_ready_pod("p", server.address);
            for at in [port, fixture.outside] {
                assert_eq!(ask(at, &head, body).await.status, "400", "{what}");
            }
            continue;
        }
        let asleep = tokio::spawn({
            let head = head.clone();
            async move { ask(port, &head, body).await }
        });
        fixture.wait_for_queued(1).await;
        fixture.add_ready_pod("p", server.address);
        assert_eq!(asleep.await.unwrap(), direct, "asleep: {what}");
        assert_eq!(ask(port, &head, body).await, direct, "through: {what}");
        assert_eq!(ask(fixture.outside, &head, body).await, direct, "gateway: {what}");
    }
}

/// Compares the responses to requests over HTTP/2. A pod that speaks HTTP/2 gets them in HTTP/2 directly, others in
/// HTTP/1.1.
async fn compare_http2(
    server: &ReferenceServerProcess,
    protocol: AppProtocol,
    inputs: &[Http2RequestCase],
) {
    for input in inputs {
        let (method, target, _, body) = input;
        let what = format!("{protocol:?} {method} {target} {body:?}");
        let direct = match protocol {
            AppProtocol::H2c => over_http2(server.address, input.clone()).await,
            AppProtocol::Tcp => unreachable!("the cases are HTTP requests"),
            AppProtocol::Http1 => {
                let (head, body) = encode_as_http1(input);
                ask(server.address, &head, body).await
            }
        };
        let mut fixture = ActivatorFixture::new().await;
        fixture.apply_change(|table| {
            table.revisions.get_mut(&revision()).unwrap().protocol = protocol
        });
        let port: SocketAddr = ([127, 0, 0, 1], fixture.port).into();
        let asleep = tokio::spawn(over_http2(port, input.clone()));
        fixture.wait_for_queued(1).await;
        fixture.add_ready_pod("p", server.address);
        assert_eq!(asleep.await.unwrap(), direct, "asleep: {what}");
        assert_eq!(over_http2(port, input.clone()).await, direct, "through: {what}");
        assert_eq!(over_http2(fixture.outside, input.clone()).await, direct, "gateway: {what}");
    }
}

async fn over_http2(at: SocketAddr, input: Http2RequestCase) -> ComparedResponse {
    let exchange = inputs::over_http2(at, &input);
    tokio::time::timeout(LONG, exchange).await.expect("responses in time").unwrap()
}

#[tokio::test]
async fn python_responds_the_same_on_every_path() {
    let server = ReferenceServerProcess::start(Command::new("python3").arg(pods().join("app.py")));
    let expects = "expect: 100-continue\r\ncontent-length: 5\r\n".to_owned();
    let both = ("GET", b"/both".to_vec(), String::new(), 0);
    compare_http1(&server, &[("PUT", b"/reject".to_vec(), expects, 0), both]).await;
    compare_http2(&server, AppProtocol::Http1, &http2_cases()).await;
}

#[tokio::test]
async fn node_responds_the_same_on_every_path() {
    let server = ReferenceServerProcess::start(Command::new("node").arg(pods().join("app.mjs")));
    compare_http1(&server, &[]).await;
    compare_http2(&server, AppProtocol::Http1, &http2_cases()).await;
}

#[tokio::test]
async fn go_responds_the_same_on_every_path() {
    let mut app = go("paths");
    let server = ReferenceServerProcess::start(&mut app);
    // The server runs, and needs its file no more.
    std::fs::remove_file(app.get_program()).unwrap();
    compare_http1(&server, &[]).await;
    compare_http2(&server, AppProtocol::Http1, &http2_cases()).await;
    let hints = ("GET", "/hints", Vec::new(), RequestBodyCase::Nothing);
    let more = [http2_cases(), vec![hints]].concat();
    compare_http2(&server, AppProtocol::H2c, &more).await;
}

#[tokio::test]
async fn nginx_responds_the_same_on_every_path() {
    let folder = std::env::temp_dir().join(format!("activator-paths-nginx-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let server = ReferenceServerProcess::start(&mut nginx(&folder, "off"));
    compare_http1(&server, &[]).await;
    // The server reports the length of a body in chunks differently each time.
    let states_length =
        |(_, _, _, body): &Http2RequestCase| !matches!(body, RequestBodyCase::Unsized(_));
    let inputs: Vec<_> = http2_cases().into_iter().filter(states_length).collect();
    compare_http2(&server, AppProtocol::Http1, &inputs).await;
    drop(server);
    std::fs::remove_dir_all(folder).unwrap();
}
