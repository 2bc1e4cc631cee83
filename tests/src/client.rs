//! A plain HTTP/1.1 client over ordinary sockets, and load of many such clients.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::node::LIMIT;
use crate::rouse::RouseNode;

/// Response to one request.
#[derive(Clone, Debug, Default)]
pub struct ClientResponse {
    /// Status code of the response.
    pub status: u16,
    /// Headers, with names in lower case.
    pub headers: Vec<(String, String)>,
    /// Body of the response as text.
    pub body: String,
}

impl ClientResponse {
    /// Value of a header; empty if there is none.
    pub fn header(&self, name: &str) -> &str {
        let found = self.headers.iter().find(|(have, _)| have == name);
        found.map(|(_, value)| value.as_str()).unwrap_or_default()
    }
}

/// A connection that can carry several requests.
#[derive(Debug)]
pub struct PlainHttpClient {
    stream: TcpStream,
    rest: Vec<u8>,
}

impl PlainHttpClient {
    /// Connects to an address, with a timeout for each later read.
    pub fn connect(to: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&to, LIMIT)?;
        stream.set_read_timeout(Some(LIMIT))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, rest: Vec::new() })
    }

    /// Local address of the connection, as the kernel chose it.
    pub fn local_ip(&self) -> String {
        self.stream.local_addr().map(|own| own.ip().to_string()).unwrap_or_default()
    }

    /// Local and remote address of the connection, as text.
    pub fn ends(&self) -> String {
        let text = |it: io::Result<SocketAddr>| it.map(|it| it.to_string()).unwrap_or_default();
        format!("{} to {}", text(self.stream.local_addr()), text(self.stream.peer_addr()))
    }

    /// Sends raw bytes on the connection.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Sends one request without a body and reads the response.
    pub fn get(&mut self, host: &str, path: &str) -> io::Result<ClientResponse> {
        self.send(format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes())?;
        self.answer()
    }

    /// Returns true if the peer has closed or reset the connection, a check that pools make before they use one
    /// again.
    pub fn is_over(&self) -> bool {
        let looked = self.stream.set_nonblocking(true).and_then(|()| self.stream.peek(&mut [0]));
        let waits = looked.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        !waits || self.stream.set_nonblocking(false).is_err()
    }

    /// Reads one response from the connection.
    pub fn answer(&mut self) -> io::Result<ClientResponse> {
        let bad = || io::Error::new(io::ErrorKind::InvalidData, "not an HTTP/1.1 answer");
        let head = loop {
            let end = self.rest.windows(4).position(|four| four == b"\r\n\r\n");
            match end {
                Some(end) => break self.rest.drain(..end + 4).collect::<Vec<u8>>(),
                None => self.more()?,
            }
        };
        let head = String::from_utf8(head).map_err(|_text| bad())?;
        let mut lines = head.lines();
        let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok());
        let header = |line: &str| {
            let (name, value) = line.split_once(':')?;
            Some((name.to_ascii_lowercase(), value.trim().to_owned()))
        };
        let headers = lines.filter_map(header).collect();
        let mut answer =
            ClientResponse { status: status.ok_or_else(bad)?, headers, body: String::new() };
        let body = match answer.header("content-length").parse::<usize>() {
            Ok(length) => {
                while self.rest.len() < length {
                    self.more()?;
                }
                self.rest.drain(..length).collect()
            }
            // The test applications send no chunked responses; one without a length lasts until the close.
            Err(_) => {
                self.stream.read_to_end(&mut self.rest)?;
                std::mem::take(&mut self.rest)
            }
        };
        answer.body = String::from_utf8_lossy(&body).into_owned();
        Ok(answer)
    }

    fn more(&mut self) -> io::Result<()> {
        let mut bytes = [0; 4096];
        match self.stream.read(&mut bytes)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                self.rest.extend_from_slice(&bytes[..count]);
                Ok(())
            }
        }
    }
}

/// Sends one request on a new connection.
pub fn get(to: SocketAddr, host: &str, path: &str) -> io::Result<ClientResponse> {
    PlainHttpClient::connect(to)?.get(host, path)
}

/// Sends raw bytes on a new connection and returns all data up to its end.
pub fn exchange(to: SocketAddr, bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut client = PlainHttpClient::connect(to)?;
    client.stream.write_all(bytes)?;
    let mut back = Vec::new();
    client.stream.read_to_end(&mut back)?;
    Ok(back)
}

/// Load of one test: target, request and number of clients.
#[derive(Clone, Debug)]
pub struct LoadPlan {
    /// Address to connect to.
    pub to: SocketAddr,
    /// Value of the Host header.
    pub host: String,
    /// Path and query of the requests.
    pub path: String,
    /// Number of clients at once.
    pub clients: usize,
    /// True if each client keeps its connection.
    pub keep: bool,
}

impl LoadPlan {
    /// Sends one request, over `kept` if it is still open. Returns the connection if it can carry another request.
    pub fn send(&self, kept: Option<PlainHttpClient>) -> (SentRequest, Option<PlainHttpClient>) {
        let kept = kept.filter(|client| !client.is_over());
        let fresh = kept.is_none();
        let lost = |why: io::Error| {
            (
                SentRequest {
                    fresh,
                    direct: false,
                    pod: String::new(),
                    lost: Some(why.to_string()),
                },
                None,
            )
        };
        let mut client = match kept.map_or_else(|| PlainHttpClient::connect(self.to), Ok) {
            Ok(client) => client,
            Err(why) => return lost(why),
        };
        let answer = match client.get(&self.host, &self.path) {
            Ok(answer) => answer,
            Err(why) => return lost(why),
        };
        let code = (answer.status != 200).then(|| format!("{}: {}", answer.status, answer.body));
        let direct = answer.header("x-peer") == client.local_ip();
        let sent =
            SentRequest { fresh, direct, pod: answer.header("x-pod").to_owned(), lost: code };
        let keeps = !answer.header("connection").eq_ignore_ascii_case("close");
        (sent, Some(client).filter(|_| keeps))
    }
}

/// Result of one request of a load.
#[derive(Clone, Debug)]
pub struct SentRequest {
    /// True if the request opened its connection.
    pub fresh: bool,
    /// True if the pod saw this client as its peer, and not the activator.
    pub direct: bool,
    /// Name of the pod that answered.
    pub pod: String,
    /// Reason that the request was lost; `None` if the application answered 200.
    pub lost: Option<String>,
}

/// A load that runs until it is stopped.
#[derive(Debug)]
pub struct RunningLoad<'a> {
    stop: &'a AtomicBool,
    sent: &'a Mutex<Vec<SentRequest>>,
}

impl RunningLoad<'_> {
    /// Number of requests that have ended so far.
    pub fn count(&self) -> usize {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Lets each client end after its current request.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Runs load while `meanwhile` runs. Returns all requests, in the order of their ends, and the result of `meanwhile`.
pub fn load<T>(
    node: &RouseNode,
    plan: &LoadPlan,
    meanwhile: impl FnOnce(&RunningLoad<'_>) -> T,
) -> (Vec<SentRequest>, T) {
    let (stop, sent) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let done = thread::scope(|scope| {
        for _ in 0..plan.clients {
            scope.spawn(|| one_client(node, plan, &stop, &sent));
        }
        let load = RunningLoad { stop: &stop, sent: &sent };
        // A panic must not leave the clients running, because the scope would wait for them.
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| meanwhile(&load)));
        load.stop();
        done
    });
    let sent = sent.into_inner().unwrap_or_else(PoisonError::into_inner);
    (sent, done.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

fn one_client(
    node: &RouseNode,
    plan: &LoadPlan,
    stop: &AtomicBool,
    sent: &Mutex<Vec<SentRequest>>,
) {
    node.enter();
    let mut kept = None;
    while !stop.load(Ordering::Relaxed) {
        let (one, client) = plan.send(kept.take());
        kept = client.filter(|_| plan.keep);
        let failed = one.lost.is_some();
        sent.lock().unwrap_or_else(PoisonError::into_inner).push(one);
        if failed {
            // Immediate refusals must not cause a busy loop.
            crate::rouse::pause(Duration::from_millis(50));
        }
    }
}

/// Requests of `sent` that were lost.
pub fn lost(sent: &[SentRequest]) -> Vec<&SentRequest> {
    sent.iter().filter(|one| one.lost.is_some()).collect()
}
