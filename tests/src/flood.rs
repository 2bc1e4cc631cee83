//! Requests of many kinds at once, each with a unique id, until stopped, with the result of every one of them.
//!
//! The executable `flood` runs this inside a client's pod; [`FloodProcess`] is the test's side.
#![allow(clippy::print_stdout, reason = "the program's output is what the test reads")]

use std::collections::BTreeMap;
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::http_client::{ClientResponse, PlainHttpClient};

/// Time between two progress lines of the program.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// Pause after a lost request, so that refusals cause no busy loop.
const PAUSE_AFTER_LOSS: Duration = Duration::from_millis(100);
/// Pause before each new connection, because the ports of one address are soon used up.
const NEW_CONNECTION_PAUSE: Duration = Duration::from_millis(15);
/// Shortest and longest pause on an idle persistent connection, in ms.
const IDLE_MS: (u64, u64) = (200, 4_000);
/// Shortest and longest pause on a busy persistent connection, in ms.
const BUSY_MS: (u64, u64) = (50, 250);
/// Duration of a slow request, in ms.
const SLOW_MS: u64 = 1_000;
/// Duration of a long request, in seconds, and the variable that overrides it.
const LONG_S: u64 = 10;
const LONG_VARIABLE: &str = "ROUSE_LONG_REQUEST_S";
/// Number of bits of a request's number in its id; the bits above are the client's number.
const ID_BITS: u32 = 40;

/// Behaviour of one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FloodKind {
    /// True if it sends a body.
    pub has_body: bool,
    /// Use of its connections.
    pub connection_use: ConnectionUse,
}

/// Use of a worker's connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConnectionUse {
    /// A new connection for each request.
    New,
    /// A persistent connection with long pauses between requests.
    Idle,
    /// A persistent connection with several requests a second.
    Busy,
    /// A persistent connection with one request right after the other.
    BackToBack,
    /// A persistent connection with requests that take a second.
    Slow,
    /// A persistent connection with requests that take 10 s, or as long as `ROUSE_LONG_REQUEST_S` sets.
    Long,
}

impl FloodKind {
    fn parse(text: &str) -> Option<Self> {
        let (connection_use, method) = text.split_once('-')?;
        let connection_use = match connection_use {
            "new" => ConnectionUse::New,
            "idle" => ConnectionUse::Idle,
            "busy" => ConnectionUse::Busy,
            "full" => ConnectionUse::BackToBack,
            "slow" => ConnectionUse::Slow,
            "long" => ConnectionUse::Long,
            _ => return None,
        };
        Some(Self { has_body: method == "post", connection_use })
    }
}

/// State that all workers of the program share.
struct FloodState {
    target: SocketAddr,
    host: String,
    first_id: u64,
    long_s: u64,
    started: Instant,
    stop: AtomicBool,
    issued: AtomicU64,
    answered: AtomicU64,
    direct: AtomicU64,
    /// Number of persistent connections that accepted no byte of their next request.
    stale_connections: AtomicU64,
    lost: Mutex<Vec<Value>>,
}

/// Runs the program `flood ADDRESS HOST CLIENT KIND=WORKERS…` until its input ends. The last line has all results.
pub fn main(args: &[String]) -> Result<(), String> {
    let [address, host, client_number, kinds @ ..] = args else {
        return Err("usage: flood ADDRESS HOST CLIENT KIND=WORKERS…".into());
    };
    let client_number: u64 =
        client_number.parse().map_err(|error| format!("{client_number}: {error}"))?;
    let state = FloodState {
        target: address.parse().map_err(|error| format!("{address}: {error}"))?,
        host: host.clone(),
        first_id: client_number << ID_BITS,
        long_s: long_request_seconds()?,
        started: Instant::now(),
        stop: AtomicBool::new(false),
        issued: AtomicU64::new(0),
        answered: AtomicU64::new(0),
        direct: AtomicU64::new(0),
        stale_connections: AtomicU64::new(0),
        lost: Mutex::new(Vec::new()),
    };
    let mut workers = Vec::new();
    for text in kinds {
        let (kind, count) = text.split_once('=').ok_or_else(|| format!("{text}: KIND=WORKERS"))?;
        let parsed = FloodKind::parse(kind).ok_or_else(|| format!("{kind}: no such kind"))?;
        let count: usize = count.parse().map_err(|error| format!("{text}: {error}"))?;
        workers.extend(std::iter::repeat_n((parsed, kind), count));
    }
    thread::scope(|scope| {
        for (seed, (kind, name)) in (1..).zip(&workers) {
            let state = &state;
            scope.spawn(move || state.run_worker(*kind, name, seed));
        }
        scope.spawn(|| state.print_progress());
        let _end = io::stdin().read_to_end(&mut Vec::new());
        state.stop.store(true, Ordering::Relaxed);
    });
    println!("{}", state.results());
    Ok(())
}

fn long_request_seconds() -> Result<u64, String> {
    let value = std::env::var(LONG_VARIABLE).ok();
    value.map_or(Ok(LONG_S), |text| {
        text.parse().map_err(|error| format!("{LONG_VARIABLE}={text}: {error}"))
    })
}

impl FloodState {
    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn print_progress(&self) {
        while !self.is_stopped() {
            println!("{}", self.results());
            sleep(PROGRESS_INTERVAL);
        }
    }

    fn results(&self) -> Value {
        let number = |it: &AtomicU64| it.load(Ordering::Relaxed);
        json!({
            "issued": number(&self.issued),
            "answered": number(&self.answered),
            "direct": number(&self.direct),
            "moved": number(&self.stale_connections),
            "lost": *self.lost.lock().unwrap_or_else(PoisonError::into_inner),
        })
    }

    fn run_worker(&self, kind: FloodKind, name: &str, seed: u64) {
        let mut pooled = None;
        let mut random = seed;
        while !self.is_stopped() {
            // Knuth's generator: any distribution of the pauses suffices.
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let sleep_between = |(min_ms, max_ms): (u64, u64)| {
                sleep(Duration::from_millis(min_ms + (random >> 33) % (max_ms - min_ms)));
            };
            match kind.connection_use {
                ConnectionUse::New => sleep(NEW_CONNECTION_PAUSE),
                ConnectionUse::Idle => sleep_between(IDLE_MS),
                ConnectionUse::Busy | ConnectionUse::Slow | ConnectionUse::Long => {
                    sleep_between(BUSY_MS);
                }
                ConnectionUse::BackToBack => {}
            }
            let id = self.first_id + self.issued.fetch_add(1, Ordering::Relaxed);
            let (sent_ms, was_kept) = (self.started.elapsed().as_millis(), pooled.is_some());
            match self.send_request(kind, id, pooled.take()) {
                Ok(client) => {
                    self.answered.fetch_add(1, Ordering::Relaxed);
                    pooled = client;
                }
                Err(error) => {
                    let lost_ms = self.started.elapsed().as_millis();
                    let lost = json!({
                        "kind": name, "id": id, "kept": was_kept, "why": error,
                        "lost_at": utc_time_of_day(SystemTime::now()),
                        "sent_ms": u64::try_from(sent_ms).unwrap_or(u64::MAX),
                        "lost_ms": u64::try_from(lost_ms).unwrap_or(u64::MAX),
                    });
                    self.lost.lock().unwrap_or_else(PoisonError::into_inner).push(lost);
                    sleep(PAUSE_AFTER_LOSS);
                }
            }
        }
    }

    /// Sends one request. Returns the connection if it can carry another request.
    fn send_request(
        &self,
        kind: FloodKind,
        id: u64,
        client: Option<PlainHttpClient>,
    ) -> Result<Option<PlainHttpClient>, String> {
        let path = match kind.connection_use {
            ConnectionUse::Slow => format!("/echo?id={id}&sleep={SLOW_MS}"),
            ConnectionUse::Long => format!("/echo?id={id}&sleep={}", self.long_s * 1000),
            _ => format!("/echo?id={id}"),
        };
        let body = kind.has_body.then(|| format!("body of {id}"));
        let close = kind.connection_use == ConnectionUse::New;
        let bytes = encode_request(&self.host, &path, body.as_deref(), close);
        let mut client = match client.map(|it| try_reuse(it, &bytes)) {
            Some(Some(client)) => client,
            // The connection was closed, and it accepted no byte of the request: any pool would use another one.
            Some(None) => {
                self.stale_connections.fetch_add(1, Ordering::Relaxed);
                self.send_on_new_connection(&bytes)?
            }
            None => self.send_on_new_connection(&bytes)?,
        };
        let response =
            client.read_response().map_err(|error| format!("{error} ({})", client.addresses()))?;
        self.check_response(&response, body.as_deref().unwrap_or_default())?;
        if response.header("x-peer") == client.local_ip() {
            self.direct.fetch_add(1, Ordering::Relaxed);
        }
        let keeps = !close && !response.header("connection").eq_ignore_ascii_case("close");
        Ok(Some(client).filter(|_| keeps))
    }

    fn send_on_new_connection(&self, bytes: &[u8]) -> Result<PlainHttpClient, String> {
        let mut client =
            PlainHttpClient::connect(self.target).map_err(|error| format!("connect: {error}"))?;
        client.send(bytes).map_err(|error| format!("send: {error} ({})", client.addresses()))?;
        Ok(client)
    }

    fn check_response(&self, response: &ClientResponse, body: &str) -> Result<(), String> {
        match response.status {
            200 if response.body == body => Ok(()),
            200 => Err(format!("response to another request: {}", response.body)),
            status => Err(format!("{status}: {}", response.body)),
        }
    }
}

/// Returns the time of day in UTC as `HH:MM:SS.mmm`, as in the logs of the components.
fn utc_time_of_day(now: SystemTime) -> String {
    let since_epoch = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = since_epoch.as_secs() % 86_400;
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("{hours:02}:{minutes:02}:{:02}.{:03}", seconds % 60, since_epoch.subsec_millis())
}

/// Sends a request on a persistent connection; `None` if it was closed, and so no byte was accepted.
fn try_reuse(mut client: PlainHttpClient, bytes: &[u8]) -> Option<PlainHttpClient> {
    (!client.is_closed() && client.send(bytes).is_ok()).then_some(client)
}

fn encode_request(host: &str, path: &str, body: Option<&str>, close: bool) -> Vec<u8> {
    let method = if body.is_some() { "POST" } else { "GET" };
    let close = if close { "Connection: close\r\n" } else { "" };
    let length = body.map(|it| format!("Content-Length: {}\r\n", it.len())).unwrap_or_default();
    let body = body.unwrap_or_default();
    format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\n{close}{length}\r\n{body}").into_bytes()
}

#[allow(clippy::disallowed_methods, reason = "a client of real sockets waits in real time")]
fn sleep(time: Duration) {
    thread::sleep(time);
}

/// A running program `flood`, as the test sees it.
#[derive(Debug)]
pub struct FloodProcess {
    child: Child,
    output_lines: thread::JoinHandle<Vec<String>>,
    answered: Arc<AtomicU64>,
    lost: Arc<AtomicU64>,
    last_loss: Arc<Mutex<Option<String>>>,
    client_number: u64,
}

/// Results of the requests of a flood.
#[derive(Clone, Debug, Default)]
pub struct FloodOutcome {
    /// Number of requests that were sent.
    pub issued: u64,
    /// Number of requests with a correct response.
    pub answered: u64,
    /// Number of correct responses from a pod that saw the client as its peer.
    pub direct: u64,
    /// Number of persistent connections that accepted no byte of their next request.
    pub stale_connections: u64,
    /// Description of each request without a correct response.
    pub lost: Vec<Value>,
    /// Id of the first request; those of the others follow.
    pub first_id: u64,
}

impl FloodProcess {
    /// Starts the program by this command, which ends with the program's path; each client has a number of its
    /// own, which makes its request ids unique.
    pub fn start(
        mut command: Command,
        address: SocketAddr,
        host: &str,
        client_number: u64,
        kinds: &[&str],
    ) -> Self {
        command.args([&address.to_string(), host, &client_number.to_string()]).args(kinds);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let lines = BufReader::new(child.stdout.take().expect("piped"));
        let (answered, lost) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let counts = [Arc::clone(&answered), Arc::clone(&lost)];
        let last_loss = Arc::new(Mutex::new(None));
        let shared_last_loss = Arc::clone(&last_loss);
        let output_lines = thread::spawn(move || {
            let mut last = Vec::new();
            for line in lines.lines().map_while(Result::ok) {
                let now: Value = serde_json::from_str(&line).unwrap_or_default();
                let losses = now["lost"].as_array();
                let lost = losses.map_or(0, Vec::len);
                *shared_last_loss.lock().unwrap_or_else(PoisonError::into_inner) =
                    losses.and_then(|all| Some(all.last()?.to_string()));
                counts[0].store(now["answered"].as_u64().unwrap_or_default(), Ordering::Relaxed);
                counts[1].store(u64::try_from(lost).unwrap_or(u64::MAX), Ordering::Relaxed);
                last = vec![line];
            }
            last
        });
        Self { child, output_lines, answered, lost, last_loss, client_number }
    }

    /// Number of requests that got a response so far.
    pub fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    /// Number of requests that were lost so far.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Description of the last lost request; `None` if none was lost.
    pub fn last_loss(&self) -> Option<String> {
        self.last_loss.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lets every worker end after its request, and returns all results.
    pub fn stop(mut self) -> FloodOutcome {
        drop(self.child.stdin.take());
        let last = self.output_lines.join().expect("the reader does not panic");
        let status = self.child.wait().expect("it was started");
        assert!(status.success(), "flood: {status}");
        let last: Value = serde_json::from_str(&last.concat()).expect("the last line is JSON");
        let number = |key: &str| last[key].as_u64().unwrap_or_default();
        FloodOutcome {
            issued: number("issued"),
            answered: number("answered"),
            direct: number("direct"),
            stale_connections: number("moved"),
            lost: last["lost"].as_array().cloned().unwrap_or_default(),
            first_id: self.client_number << ID_BITS,
        }
    }
}

/// Requests that were not served exactly once, by the ids that pods have written (one a line), with their counts.
pub fn not_served_once(outcome: &FloodOutcome, served: &str) -> BTreeMap<u64, u32> {
    let mut counts = vec![0_u32; usize::try_from(outcome.issued).unwrap_or(0)];
    for id in served.lines().filter_map(|line| line.parse::<u64>().ok()) {
        let index = id.checked_sub(outcome.first_id).and_then(|index| usize::try_from(index).ok());
        if let Some(count) = index.and_then(|at| counts.get_mut(at)) {
            *count += 1;
        }
    }
    let counts_by_id = (outcome.first_id..).zip(counts);
    counts_by_id.filter(|(_, count)| *count != 1).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::TcpListener;

    use super::*;
    use crate::wait::wait_for;

    #[test]
    fn a_time_of_day_compares_with_those_of_logs() {
        let time = UNIX_EPOCH + Duration::from_millis(86_400_000 * 3 + 47_106_007);
        assert_eq!(utc_time_of_day(time), "13:05:06.007");
    }

    #[test]
    fn a_kept_connection_that_was_closed_meanwhile_is_counted_as_stale() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let flood = FloodState {
            target: listener.local_addr().unwrap(),
            host: "h".to_owned(),
            first_id: 0,
            long_s: LONG_S,
            started: Instant::now(),
            stop: AtomicBool::new(false),
            issued: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            direct: AtomicU64::new(0),
            stale_connections: AtomicU64::new(0),
            lost: Mutex::new(Vec::new()),
        };
        let kind = FloodKind::parse("idle-get").unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                for stream in listener.incoming().take(2) {
                    let mut stream = stream.unwrap();
                    let mut lines = BufReader::new(&stream).lines();
                    while lines.next().is_some_and(|line| !line.unwrap().is_empty()) {}
                    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
                }
            });
            let client = flood.send_request(kind, 0, None).unwrap().unwrap();
            assert_eq!(flood.stale_connections.load(Ordering::Relaxed), 0);
            wait_for("the close of the connection", || client.is_closed().then_some(()));
            flood.send_request(kind, 1, Some(client)).unwrap();
        });
        assert_eq!(flood.stale_connections.load(Ordering::Relaxed), 1);
    }
}
