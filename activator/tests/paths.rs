//! The same request gets the same answer on every path: asleep, through an activator's port and by its gateway, in
//! HTTP/1.1 and HTTP/2, as from the pod when nothing stands before it. The pods are real servers.
#![allow(clippy::unwrap_used, reason = "tests")]

mod h2c;
mod harness;

use std::{
    collections::BTreeSet,
    io::{BufRead as _, BufReader},
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use h2c::Client;
use harness::{LONG, World};
use http::Request;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

/// A server of its own process. It ends when its input does.
struct Server {
    child: Child,
    address: SocketAddr,
}

impl Server {
    fn start(command: &mut Command) -> Self {
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = piped.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let port: u16 = line.trim().parse().unwrap();
        Self { child, address: ([127, 0, 0, 1], port).into() }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        self.child.wait().ok();
    }
}

fn pods() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pods")
}

/// Go's server, built for the test.
fn go() -> Command {
    let binary = std::env::temp_dir().join(format!("activator-paths-{}", std::process::id()));
    let known = Path::new("/usr/local/go/bin/go");
    let go = if known.exists() { known } else { Path::new("go") };
    let mut build = Command::new(go);
    build.arg("build").arg("-o").arg(&binary).arg(pods().join("app.go")).env("CGO_ENABLED", "0");
    assert!(build.status().unwrap().success(), "go build");
    Command::new(binary)
}

/// nginx, whose body of an answer names the request as the other servers' do.
fn nginx(folder: &Path) -> Command {
    let free = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).unwrap();
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let temporary = temporary.map(|it| format!("{it}_temp_path {};\n", folder.display())).concat();
    let serve = "return 200 \"$request_method $request_uri $content_length\\n\";";
    let config = format!(
        "daemon off;\nmaster_process off;\npid {0}/pid;\nevents {{}}\nhttp {{\naccess_log off;\n{temporary}\
         server {{ listen {free}; location / {{ {serve} }} }}\n}}\n",
        folder.display(),
    );
    std::fs::write(folder.join("nginx.conf"), config).unwrap();
    let script = "nginx -e stderr -p \"$1\" -c nginx.conf & \
        until (exec 3<>/dev/tcp/127.0.0.1/$2) 2>/dev/null; do sleep 0.01; done; \
        echo $2; cat; kill $!; wait";
    let mut command = Command::new("bash");
    command.args(["-c", script, "bash"]).arg(folder).arg(free.port().to_string());
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    command
}

/// What a client gets, without what each hop says for itself.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    status: String,
    fields: BTreeSet<String>,
    body: String,
}

/// Sends raw bytes, a body behind them, and reads the answer at the same time, as clients do.
async fn ask(at: SocketAddr, head: &[u8], body: usize) -> Told {
    let mut client = TcpStream::connect(at).await.unwrap();
    client.write_all(head).await.unwrap();
    let (mut from, mut to) = client.split();
    let (body, mut answer) = (vec![b'x'; body], Vec::new());
    let read = from.read_to_end(&mut answer);
    let both = async { tokio::join!(to.write_all(&body), read) };
    let (_, read) = tokio::time::timeout(LONG, both).await.expect("answers in time");
    read.ok();
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let answer = answer.strip_prefix("HTTP/1.1 100 Continue\r\n\r\n").unwrap_or(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer, ""));
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.get(9..12)).unwrap_or_default().to_owned();
    let own = ["date", "connection", "keep-alive", "content-length", "transfer-encoding"];
    let names = lines.filter_map(|line| Some(line.split_once(':')?.0.to_ascii_lowercase()));
    let fields = names.filter(|name| !own.contains(&name.as_str())).collect();
    Told { status, fields, body: unchunked(body) }
}

/// A body whose chunks, if it has any, are joined.
fn unchunked(body: &str) -> String {
    let joined = (|| {
        let (mut rest, mut joined) = (body, String::new());
        loop {
            let (size, behind) = rest.split_once("\r\n")?;
            let size = usize::from_str_radix(size, 16).ok()?;
            if size == 0 {
                return Some(joined);
            }
            joined.push_str(behind.get(..size)?);
            rest = behind.get(size + 2..)?;
        }
    })();
    joined.unwrap_or_else(|| body.to_owned())
}

/// A request: its line's beginning, its fields, and bytes of a body that follow.
type Input = (&'static str, Vec<u8>, String, usize);

fn inputs() -> Vec<Input> {
    let plain = |method, target: &[u8]| (method, target.to_vec(), String::new(), 0);
    let sized = |method, target: &str, size: usize| {
        (method, target.as_bytes().to_vec(), format!("content-length: {size}\r\n"), size)
    };
    let mut inputs = vec![
        plain("GET", b"/"),
        plain("HEAD", b"/"),
        sized("POST", "/", 100_000),
        sized("GET", "/", 10),
        sized("DELETE", "/", 10),
        sized("PUT", "/early", 20 << 20),
        plain("GET", b"/many?n=99"),
        plain("GET", b"/many?n=101"),
        plain("GET", b"/many?n=150"),
    ];
    for target in ["/?q=\"x\"", "/?f={\"a\":1}", "/?q=<b>", "/a<b>", "/?q=a|b^c", "/a%zz"] {
        inputs.push(plain("GET", target.as_bytes()));
    }
    for target in [&b"/caf\xc3\xa9"[..], b"/caf\xe9", b"/a b", b"/\x01", b"/\0", b"/\x7f"] {
        inputs.push(plain("GET", target));
    }
    let expects = "expect: 100-continue\r\ncontent-length: 5\r\n".to_owned();
    inputs.push(("PUT", b"/".to_vec(), expects, 5));
    let lines: String = (0..120).map(|at| format!("x-line-{at}: v\r\n")).collect();
    inputs.push(("GET", b"/".to_vec(), lines, 0));
    inputs
}

fn head((method, target, fields, _): &Input) -> Vec<u8> {
    let host = "host: hello.default.example.com\r\nconnection: close\r\n";
    let behind = format!(" HTTP/1.1\r\n{host}{fields}\r\n");
    [method.as_bytes(), b" ", target, behind.as_bytes()].concat()
}

/// Whether an input is one that no server may take: it is refused on every path, whatever a pod makes of it.
fn is_refused((_, target, ..): &Input) -> bool {
    target.iter().any(|byte| *byte == b' ' || byte.is_ascii_control())
}

async fn compare(server: &Server, more: &[Input]) {
    for input in inputs().iter().chain(more) {
        let (head, body) = (head(input), input.3);
        let what = format!("{}", head[..head.len().min(60)].escape_ascii());
        let direct = ask(server.address, &head, body).await;
        let mut world = World::new().await;
        let port = ([127, 0, 0, 1], world.port).into();
        if is_refused(input) {
            world.ready("p", server.address);
            for at in [port, world.outside] {
                assert_eq!(ask(at, &head, body).await.status, "400", "{what}");
            }
            continue;
        }
        let asleep = tokio::spawn({
            let head = head.clone();
            async move { ask(port, &head, body).await }
        });
        world.waiting(1).await;
        world.ready("p", server.address);
        assert_eq!(asleep.await.unwrap(), direct, "asleep: {what}");
        assert_eq!(ask(port, &head, body).await, direct, "through: {what}");
        assert_eq!(ask(world.outside, &head, body).await, direct, "gateway: {what}");
    }
}

/// What HTTP/2 can say.
async fn compare_http2(server: &Server) {
    for (method, path, parts, status, end) in [
        ("GET", "/", &[][..], 200, "GET / 0\n"),
        ("GET", "/", &["ten ", "bytes."], 200, "GET / 10\n"),
        ("POST", "/a", &["ten bytes."], 200, "POST /a 10\n"),
        ("DELETE", "/a", &["ten bytes."], 200, "DELETE /a 10\n"),
        ("GET", "/many?n=150", &[], 200, "GET /many?n=150 0\n"),
        ("POST", "/early", &["x"], 413, "big\n"),
    ] {
        let mut world = World::new().await;
        let port: SocketAddr = ([127, 0, 0, 1], world.port).into();
        let asleep = tokio::spawn(over_http2(port, method, path, parts));
        world.waiting(1).await;
        world.ready("p", server.address);
        let right = (status, end.to_owned());
        assert_eq!(asleep.await.unwrap(), right, "asleep: {method} {path}");
        for at in [port, world.outside] {
            assert_eq!(over_http2(at, method, path, parts).await, right, "{method} {path}");
        }
    }
}

/// Status and body of an answer.
async fn over_http2(
    at: SocketAddr,
    method: &'static str,
    path: &'static str,
    parts: &'static [&'static str],
) -> (u16, String) {
    let client = Client::at(at).await;
    let uri = format!("http://hello.default.example.com{path}");
    let asked = client.ask(Request::builder().method(method).uri(uri), parts);
    let answer = asked.await.unwrap();
    (answer.head.status().as_u16(), answer.body)
}

#[tokio::test]
async fn python_answers_the_same_on_every_path() {
    let server = Server::start(Command::new("python3").arg(pods().join("app.py")));
    let expects = "expect: 100-continue\r\ncontent-length: 5\r\n".to_owned();
    let both = ("GET", b"/both".to_vec(), String::new(), 0);
    compare(&server, &[("PUT", b"/reject".to_vec(), expects, 0), both]).await;
    compare_http2(&server).await;
}

#[tokio::test]
async fn node_answers_the_same_on_every_path() {
    let server = Server::start(Command::new("node").arg(pods().join("app.mjs")));
    compare(&server, &[]).await;
    compare_http2(&server).await;
}

#[tokio::test]
async fn go_answers_the_same_on_every_path() {
    let mut app = go();
    let server = Server::start(&mut app);
    // It runs, and needs its file no more.
    std::fs::remove_file(app.get_program()).unwrap();
    compare(&server, &[]).await;
    compare_http2(&server).await;
}

#[tokio::test]
async fn nginx_answers_the_same_on_every_path() {
    let folder = std::env::temp_dir().join(format!("activator-paths-nginx-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let server = Server::start(&mut nginx(&folder));
    compare(&server, &[]).await;
    drop(server);
    std::fs::remove_dir_all(folder).unwrap();
}
