//! Shell: sends requests over real sockets, on persistent and on new connections.

use std::{
    cell::{Cell, RefCell},
    net::SocketAddr,
    rc::Rc,
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty};
use hyper::{HeaderMap, Request, client::conn::http1::SendRequest, header::HOST};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, sync::mpsc};
use tokio_util::io::InspectWriter;

use super::{LoadArgs, LoadRecord};

/// Pause after a failed request, so that a refused connection causes no busy loop.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(100);

/// State that all workers of a run share.
#[derive(Debug)]
pub(super) struct LoadWorkerState {
    args: LoadArgs,
    started: Instant,
    sent: Cell<u64>,
    /// Idle connections for further requests of the open loop.
    idle: RefCell<Vec<LoadConnection>>,
}

/// An open connection to the server.
#[derive(Debug)]
struct LoadConnection {
    sender: SendRequest<Empty<Bytes>>,
    /// Local address of the connection.
    local_address: SocketAddr,
    /// Number of bytes that the kernel has accepted for sending.
    written_bytes: Rc<Cell<usize>>,
}

impl LoadWorkerState {
    pub(super) fn new(args: &LoadArgs, started: Instant) -> Self {
        let (sent, idle) = (Cell::new(0), RefCell::new(Vec::new()));
        Self { args: args.clone(), started, sent, idle }
    }

    /// Claims the next request, and returns its number; `None` if all are sent.
    fn claim_next(&self) -> Option<u64> {
        let sent = self.sent.get();
        if self.args.requests.is_some_and(|max| sent >= max) {
            return None;
        }
        self.sent.set(sent + 1);
        Some(sent)
    }

    /// Returns true if the request `number` opens a connection of its own. The share is spread evenly, not at random.
    fn is_fresh(&self, number: u64) -> bool {
        let share = u64::from(self.args.fresh_pct);
        (number + 1) * share / 100 > number * share / 100
    }
}

/// Runs one client of the closed loop, which sends a request when the previous one is complete.
pub(super) async fn run_closed_loop(
    state: Rc<LoadWorkerState>,
    index: u32,
    records: mpsc::Sender<LoadRecord>,
) {
    let mut pooled = None;
    // Each client is of one kind: by default half of them keep their connection, as pools do.
    let keeps_connection = !state.is_fresh(index.into());
    while let Some(wait) = state.args.stages.until_above(index, state.started.elapsed()) {
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        if state.claim_next().is_none() {
            return;
        }
        let (record, connection) = send(&state, pooled.take()).await;
        let failed = !record.error.is_empty();
        pooled = connection.filter(|_| keeps_connection);
        if records.send(record).await.is_err() {
            return;
        }
        if failed {
            tokio::time::sleep(PAUSE_AFTER_FAILURE).await;
        }
    }
}

/// Sends requests at the stage's rate. Each request is a task, so a slow response does not delay others.
pub(super) async fn run_open_loop(state: Rc<LoadWorkerState>, records: mpsc::Sender<LoadRecord>) {
    let mut due = Duration::ZERO;
    while let Some(rate) = state.args.stages.level_at(due) {
        tokio::time::sleep_until((state.started + due).into()).await;
        // Due times are absolute: a late wake-up does not lower the rate. A rate of 0 advances by one second.
        due += Duration::from_secs(1) / rate.max(1);
        if rate == 0 {
            continue;
        }
        let Some(number) = state.claim_next() else { return };
        tokio::task::spawn_local(send_in_open_loop(state.clone(), number, records.clone()));
    }
}

async fn send_in_open_loop(
    state: Rc<LoadWorkerState>,
    number: u64,
    records: mpsc::Sender<LoadRecord>,
) {
    let connection = match state.is_fresh(number) {
        true => None,
        false => state.idle.borrow_mut().pop(),
    };
    let (record, connection) = send(&state, connection).await;
    // Only requests that take idle connections return theirs, so that the pool does not grow.
    if !state.is_fresh(number) {
        state.idle.borrow_mut().extend(connection);
    }
    // The receiver is dropped only if the whole run ends early.
    let _ = records.send(record).await;
}

/// Sends one request. Returns the record, and the connection if it can carry another request.
async fn send(
    state: &LoadWorkerState,
    pooled: Option<LoadConnection>,
) -> (LoadRecord, Option<LoadConnection>) {
    let started = Instant::now();
    let mut record = LoadRecord {
        at_us: unix_us(),
        took_us: 0,
        first_byte_us: 0,
        status: 0,
        fresh: true,
        pod: String::new(),
        direct: false,
        listening_us: 0,
        error: String::new(),
    };
    let exchange = send_with_retry(&state.args, pooled, started, &mut record);
    // On a timeout the exchange is dropped with its connection, which may be in the middle of a response.
    let outcome = tokio::time::timeout(state.args.timeout(), exchange).await;
    record.took_us = micros(started.elapsed());
    match outcome {
        Ok(Ok(connection)) => (record, connection),
        Ok(Err(error)) => (LoadRecord { error, ..record }, None),
        Err(_) => {
            let error = format!("no response within {} s", state.args.timeout_s);
            (LoadRecord { error, ..record }, None)
        }
    }
}

/// Sends a request, once more over a new connection if a pooled one has just been closed.
async fn send_with_retry(
    args: &LoadArgs,
    pooled: Option<LoadConnection>,
    started: Instant,
    record: &mut LoadRecord,
) -> Result<Option<LoadConnection>, String> {
    if let Some(mut connection) = pooled {
        record.fresh = false;
        // Like any connection pool: a connection that the server closed while it was idle is not used.
        if connection.sender.ready().await.is_ok() {
            match send_and_read(args, &mut connection, started, record).await {
                // No byte of the request was sent, so sending it again on a new connection is safe.
                Err(LoadFailure::NotSent) => {}
                Err(LoadFailure::Lost(error)) => return Err(error),
                Ok(keep) => return Ok(keep.then_some(connection)),
            }
        }
        record.fresh = true;
    }
    let mut connection = connect(args.addr).await?;
    match send_and_read(args, &mut connection, started, record).await {
        Ok(keep) => Ok(keep.then_some(connection)),
        Err(LoadFailure::NotSent) => Err("the connection ended before the request was sent".into()),
        Err(LoadFailure::Lost(error)) => Err(error),
    }
}

/// Reason why a request has no response.
#[derive(Debug)]
enum LoadFailure {
    /// No byte of it was sent, so that a client may send it again.
    NotSent,
    /// The server may have served it. Contains the error as text.
    Lost(String),
}

async fn connect(addr: SocketAddr) -> Result<LoadConnection, String> {
    let stream = TcpStream::connect(addr).await.map_err(|error| format!("connect: {error}"))?;
    // Small requests on a persistent connection must not wait for the previous acknowledgement (Nagle's algorithm).
    let _ = stream.set_nodelay(true);
    let local_address = stream.local_addr().map_err(|error| format!("connect: {error}"))?;
    let written_bytes = Rc::new(Cell::new(0));
    let count = written_bytes.clone();
    let stream =
        InspectWriter::new(stream, move |bytes: &[u8]| count.set(count.get() + bytes.len()));
    let (sender, driver) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| format!("connect: {error}"))?;
    tokio::task::spawn_local(async move {
        // The same error reaches the request, which reports it.
        let _ = driver.await;
    });
    Ok(LoadConnection { sender, local_address, written_bytes })
}

/// Sends one request and reads the whole response. Returns true if the connection can carry another request.
async fn send_and_read(
    args: &LoadArgs,
    connection: &mut LoadConnection,
    started: Instant,
    record: &mut LoadRecord,
) -> Result<bool, LoadFailure> {
    let request = Request::get(&args.path)
        .header(HOST, &args.host)
        .body(Empty::new())
        .map_err(|error| LoadFailure::Lost(format!("cannot make the request: {error}")))?;
    let bytes_before = connection.written_bytes.get();
    let response = connection.sender.send_request(request).await.map_err(|error| {
        // On a connection that ended after the check above no byte is sent; hyper reports a failed write.
        let is_unsent = error.is_canceled() || connection.written_bytes.get() == bytes_before;
        if is_unsent { LoadFailure::NotSent } else { LoadFailure::Lost(error_chain(&error)) }
    })?;
    // hyper returns the response when its head is complete; the heads here fit into one packet.
    record.first_byte_us = micros(started.elapsed());
    record.status = response.status().as_u16();
    read_signature(response.headers(), connection.local_address, record);
    response.into_body().collect().await.map_err(|error| LoadFailure::Lost(error_chain(&error)))?;
    Ok(connection.sender.ready().await.is_ok())
}

/// Reads the headers with which the `hello` application identifies itself.
fn read_signature(headers: &HeaderMap, local: SocketAddr, record: &mut LoadRecord) {
    let text = |name: &str| {
        headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
    };
    record.pod = text("x-pod");
    record.direct = text("x-peer").parse() == Ok(local.ip().to_canonical());
    record.listening_us = text("x-listening-us").parse().unwrap_or(0);
}

fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

pub(crate) fn unix_us() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, micros)
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        net::TcpListener,
        sync::mpsc,
    };

    use clap::Parser as _;
    use tokio::task::LocalSet;

    use super::*;

    #[derive(clap::Parser)]
    struct LoadTestCli {
        #[command(flatten)]
        args: LoadArgs,
    }

    /// Answers the first request on each of two connections, and resets the first connection when `reset` fires.
    fn serve(listener: &TcpListener, reset: &mpsc::Receiver<()>, done_tx: &mpsc::Sender<()>) {
        let accept = || listener.accept().expect("a connection").0;
        let serve_one = |stream: &mut std::net::TcpStream| {
            let read = stream.read(&mut [0; 1024]).expect("a request");
            assert!(read > 0, "a connection without a request");
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").expect("written");
        };
        let mut first = accept();
        serve_one(&mut first);
        reset.recv().expect("a signal of the test");
        nix::sys::socket::setsockopt(
            &first,
            nix::sys::socket::sockopt::Linger,
            &nix::libc::linger { l_onoff: 1, l_linger: 0 },
        )
        .expect("an option of TCP's");
        drop(first);
        done_tx.send(()).expect("the client waits");
        serve_one(&mut accept());
    }

    /// Go's and curl's connection pools behave the same: they know if any byte was written.
    #[test]
    fn a_request_of_which_no_byte_was_sent_is_sent_again() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("an address");
        let address = listener.local_addr().expect("an address").to_string();
        let (resets, reset) = mpsc::channel();
        let (result, is_done) = mpsc::channel();
        let server = std::thread::spawn(move || serve(&listener, &reset, &result));
        let args = ["load", "--addr", &address, "--host", "it", "--stages", "1x1s"];
        let state = LoadWorkerState::new(&LoadTestCli::parse_from(args).args, Instant::now());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        LocalSet::new().block_on(&runtime.expect("a runtime"), async {
            let (first, connection) = send(&state, None).await;
            assert!(first.is_answered() && connection.is_some(), "{first:?}");
            // This thread blocks, so the client's driver cannot notice the reset meanwhile.
            resets.send(()).expect("the server waits");
            is_done.recv().expect("it resets");
            let (second, _) = send(&state, connection).await;
            assert!(second.is_answered() && second.fresh, "{second:?}");
        });
        server.join().expect("it served both");
    }
}
