//! Shell: a server with every form of HTTP/1.1 response, chosen by the path, which counts its requests.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics and waits on plain threads"
)]

use std::{
    io::{self, BufRead as _, BufReader, Read, Write as _},
    net::{TcpListener, TcpStream},
    process::{Child, ChildStdin, ChildStdout, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use crate::fixture::{NetnsFixture, command_in};

const ROLE: &str = "ROUSE_TEST_SERVER";
/// Number of request heads that the server has read.
static REQUEST_COUNT: AtomicU64 = AtomicU64::new(0);
/// Gate of the path `/wait`: locked until the test opens it.
static GATE: Mutex<()> = Mutex::new(());

/// Process of the server, in a pod's cgroup and namespace, killed on drop.
pub(crate) struct CountingServer {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl CountingServer {
    pub(crate) fn start(pod: &NetnsFixture, port: u16) -> Self {
        let program = std::env::current_exe().expect("this program has a file");
        let mut child = command_in(&pod.cgroup, &pod.netns)
            .arg(program)
            .args(["request_counts::counting_server::role", "--exact", "--ignored", "--nocapture"])
            .env(ROLE, port.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("sh starts");
        let stdin = child.stdin.take().expect("piped");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut server = Self { child, stdin, stdout };
        // The server replies only once it listens.
        server.request_count();
        server
    }

    /// Number of request heads read so far.
    pub(crate) fn request_count(&mut self) -> u64 {
        self.send_command("count")
    }

    /// Number of request heads, once it no longer grows.
    pub(super) fn settled_request_count(&mut self) -> u64 {
        let mut last = self.request_count();
        loop {
            thread::sleep(Duration::from_millis(1_000));
            let now = self.request_count();
            if now == last {
                return now;
            }
            last = now;
        }
    }

    /// Waits until the server has read at least `count` request heads.
    pub(super) fn wait_request_count(&mut self, count: u64) {
        while self.request_count() < count {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Lets `/wait` respond to its requests.
    pub(super) fn open_gate(&mut self) {
        self.send_command("open-gate");
    }

    /// Sends a command and returns the number of request heads, with which the server replies to each.
    fn send_command(&mut self, command: &str) -> u64 {
        writeln!(self.stdin, "{command}").expect("the server runs");
        loop {
            let mut line = String::new();
            assert_ne!(self.stdout.read_line(&mut line).expect("readable"), 0, "the server ended");
            if let Some(reply) = line.trim_end().strip_prefix("> ") {
                return reply.parse().expect("a number");
            }
        }
    }
}

impl Drop for CountingServer {
    fn drop(&mut self) {
        let _dead_already = self.child.kill();
        let _waited_already = self.child.wait();
    }
}

/// Main function of this program as the server; not a test itself.
#[test]
#[ignore = "a role, run by the other tests"]
#[allow(clippy::print_stdout, reason = "the test that started it reads replies from stdout")]
fn role() {
    let Ok(port) = std::env::var(ROLE) else { return };
    let listener = TcpListener::bind(("0.0.0.0", port.parse().expect("a number"))).expect("free");
    let mut gate_guard = Some(GATE.lock().expect("no panic"));
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let _client_gone = serve(stream);
            });
        }
    });
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        if line == "open-gate" {
            gate_guard = None;
        }
        println!("\n> {}", REQUEST_COUNT.load(Ordering::SeqCst));
    }
    drop(gate_guard);
}

/// Bytes of a connection, with those read beyond the last message.
pub(crate) struct ConnectionInput {
    pub(crate) stream: TcpStream,
    /// Pause before each read, to make a slow reader.
    pub(crate) pause: Duration,
    buffered: Vec<u8>,
}

impl ConnectionInput {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self { stream, pause: Duration::ZERO, buffered: Vec::new() }
    }

    /// Reads up to and including `terminator`.
    pub(crate) fn read_until(&mut self, terminator: &[u8]) -> io::Result<Vec<u8>> {
        loop {
            if let Some(end_offset) =
                self.buffered.windows(terminator.len()).position(|it| it == terminator)
            {
                return Ok(self.buffered.drain(..end_offset + terminator.len()).collect());
            }
            self.read_more()?;
        }
    }

    fn skip(&mut self, mut count: usize) -> io::Result<()> {
        loop {
            let from_buffer = count.min(self.buffered.len());
            self.buffered.drain(..from_buffer);
            count -= from_buffer;
            if count == 0 {
                return Ok(());
            }
            self.read_more()?;
        }
    }

    fn read_more(&mut self) -> io::Result<()> {
        thread::sleep(self.pause);
        let mut buffer = [0; 65_536];
        let count = self.stream.read(&mut buffer)?;
        self.buffered.extend_from_slice(&buffer[..count]);
        if count == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }

    pub(crate) fn skip_body(&mut self, head: &str) -> io::Result<()> {
        if let Some((_, rest)) = head.split_once("Content-Length: ") {
            let digits = rest.split("\r\n").next().unwrap_or_default();
            return self.skip(digits.parse().map_err(io::Error::other)?);
        }
        if !head.contains("Transfer-Encoding: chunked") {
            return Ok(());
        }
        loop {
            let line = String::from_utf8(self.read_until(b"\r\n")?).map_err(io::Error::other)?;
            let digits = line.split([';', '\r']).next().unwrap_or_default();
            match usize::from_str_radix(digits, 16).map_err(io::Error::other)? {
                0 => break,
                size => self.skip(size + 2)?,
            }
        }
        while self.read_until(b"\r\n")? != b"\r\n" {}
        Ok(())
    }
}

fn serve(stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut input = ConnectionInput::new(stream);
    loop {
        let head = String::from_utf8(input.read_until(b"\r\n\r\n")?).map_err(io::Error::other)?;
        let Some((_, after_method)) = head.split_once(" /") else { return Ok(()) };
        REQUEST_COUNT.fetch_add(1, Ordering::SeqCst);
        let path = after_method.split(' ').next().unwrap_or_default().to_owned();
        input.skip_body(&head)?;
        if !respond(&mut input, &path)? {
            return Ok(());
        }
    }
}

/// Answers one request. Returns true if the connection stays open.
pub(crate) fn respond(input: &mut ConnectionInput, path: &str) -> io::Result<bool> {
    let out = &mut input.stream;
    match path.split_once('/').unwrap_or((path, "")) {
        ("length", count) => {
            let count: usize = count.parse().map_err(io::Error::other)?;
            // A long body comes in several reads, so the client needs a last byte that differs.
            let end = if count > 1_000 { "\n" } else { "" };
            let body = "x".repeat(count) + end;
            write!(out, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())?;
        }
        ("chunks", count) => {
            write!(out, "HTTP/1.1 200 OK\r\nServer: test\r\nTransfer-Encoding: chunked\r\n\r\n")?;
            let count = count.parse().map_err(io::Error::other)?;
            let chunks = "1;x\r\nz\r\n".repeat(count);
            write!(out, "{chunks}0\r\nTrailer: x\r\n\r\n")?;
        }
        // For 204 and 304, whose responses have no body although this one names a length.
        ("status", code) => write!(out, "HTTP/1.1 {code} Text\r\nContent-Length: 9\r\n\r\n")?,
        ("interim", _) => {
            write!(out, "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")?;
            write!(out, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone")?;
        }
        // For HEAD, whose response has no body either.
        ("head", _) => write!(out, "HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n")?,
        ("split", _) => {
            for byte in b"HTTP/1.1 200 OK\r\nX: y\r\nContent-Length: 5\r\n\r\nsplit" {
                out.write_all(&[*byte])?;
            }
        }
        ("wait", _) => {
            drop(GATE.lock());
            write!(out, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nwait")?;
        }
        ("close", _) => {
            write!(out, "HTTP/1.0 200 OK\r\n\r\nall of it")?;
            return Ok(false);
        }
        ("upgrade", _) => {
            write!(out, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: echo\r\n\r\n")?;
            loop {
                let bytes: Vec<u8> = input.buffered.drain(..).collect();
                input.stream.write_all(&bytes)?;
                input.read_more()?;
            }
        }
        _ => write!(out, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")?,
    }
    Ok(true)
}
