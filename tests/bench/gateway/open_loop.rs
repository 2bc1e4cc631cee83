//! Shell: requests over HTTP/1.1 at a constant rate, from one thread. A request's latency counts from the moment at
//! which it was due, so that a slow response does not hide those behind it.

use std::{
    collections::VecDeque,
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use nix::poll::{PollFd, PollFlags, ppoll};

use crate::http1::{get_request, parse_response};

/// Share of the run at its begin whose requests do not count: connections to the pod are opened then.
const WARM_UP_SHARE: u32 = 10;
/// Timeout of the last responses.
const LAST_TIMEOUT: Duration = Duration::from_secs(20);

/// Requests at a constant rate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenLoop {
    pub(crate) to: SocketAddr,
    pub(crate) host: &'static str,
    /// Number of connections, and so of requests in flight. A request that is due while all are busy waits.
    pub(crate) connections: usize,
    pub(crate) per_s: f64,
    pub(crate) length: Duration,
}

/// Latencies of a run in ascending order, in µs; never empty.
#[derive(Clone, Debug)]
pub(crate) struct SortedLatencies(Vec<f64>);

impl SortedLatencies {
    /// Latency below which 99 % of the requests were, by the nearest-rank method.
    pub(crate) fn p99_us(&self) -> f64 {
        let rank = (self.0.len() as f64 * 0.99).ceil() as usize;
        self.0[rank.clamp(1, self.0.len()) - 1]
    }

    /// Highest latency.
    pub(crate) fn max_us(&self) -> f64 {
        self.0[self.0.len() - 1]
    }
}

/// One connection, with the moment at which its request in flight was due.
struct OpenLoopConnection {
    stream: TcpStream,
    due: Option<Instant>,
    received: Vec<u8>,
}

impl OpenLoop {
    /// Sends the requests, and waits for all responses. A response other than 200 is an error.
    pub(crate) fn run(&self) -> Result<SortedLatencies> {
        ensure!(self.per_s > 0.0, "a rate of {} is none", self.per_s);
        let mut connections: Vec<OpenLoopConnection> = (0..self.connections)
            .map(|_| OpenLoopConnection::open(self.to))
            .collect::<Result<_>>()?;
        let request = get_request(self.host);
        let interval = Duration::from_secs_f64(1.0 / self.per_s);
        let begin = Instant::now();
        let (counted_from, end) = (begin + self.length / WARM_UP_SHARE, begin + self.length);
        let mut next_due = begin;
        let mut waiting = VecDeque::new();
        let mut latencies = Vec::new();
        loop {
            let now = Instant::now();
            ensure!(now < end + LAST_TIMEOUT, "the last responses do not come");
            while next_due <= now && next_due < end {
                waiting.push_back(next_due);
                next_due += interval;
            }
            for connection in connections.iter_mut().filter(|it| it.due.is_none()) {
                let Some(due) = waiting.pop_front() else { break };
                connection.send(&request, due)?;
            }
            let is_busy = connections.iter().any(|it| it.due.is_some());
            if !is_busy && waiting.is_empty() && next_due >= end {
                break;
            }
            // All requests that were due are sent or wait for a connection, so only later ones need a timer.
            let timer = if next_due < end { next_due } else { end + LAST_TIMEOUT };
            for index in wait_for_responses(&connections, timer)? {
                if let Some(due) = connections[index].receive()?
                    && due >= counted_from
                {
                    latencies.push(due.elapsed().as_secs_f64() * 1e6);
                }
            }
        }
        ensure!(!latencies.is_empty(), "no request was due in {:?}", self.length);
        latencies.sort_by(f64::total_cmp);
        Ok(SortedLatencies(latencies))
    }
}

impl OpenLoopConnection {
    fn open(to: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(to).with_context(|| format!("cannot connect to {to}"))?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream, due: None, received: Vec::with_capacity(4096) })
    }

    fn send(&mut self, request: &[u8], due: Instant) -> Result<()> {
        self.due = Some(due);
        // The socket's buffer is empty between requests, so it takes all of one.
        self.stream.write_all(request).context("cannot send a request")
    }

    /// Reads what has arrived. Returns the moment at which the request was due, once its response is complete.
    fn receive(&mut self) -> Result<Option<Instant>> {
        let mut buffer = [0_u8; 16 << 10];
        match self.stream.read(&mut buffer) {
            Ok(0) => bail!("a connection was closed"),
            Ok(length) => self.received.extend_from_slice(&buffer[..length]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error).context("cannot read a response"),
        }
        let Some(response) = parse_response(&self.received)? else { return Ok(None) };
        self.received.drain(..response.length);
        Ok(self.due.take())
    }
}

/// Waits until a response arrives, at most until `timer`. Returns the connections that have bytes to read.
fn wait_for_responses(connections: &[OpenLoopConnection], timer: Instant) -> Result<Vec<usize>> {
    let busy: Vec<usize> =
        (0..connections.len()).filter(|index| connections[*index].due.is_some()).collect();
    let mut polled: Vec<PollFd<'_>> = busy
        .iter()
        .map(|index| PollFd::new(connections[*index].stream.as_fd(), PollFlags::POLLIN))
        .collect();
    let wait = timer.saturating_duration_since(Instant::now());
    ppoll(&mut polled, Some(wait.into()), None).context("cannot wait for responses")?;
    let ready = polled.iter().zip(busy);
    Ok(ready.filter(|(polled, _)| polled.any().unwrap_or(false)).map(|(_, index)| index).collect())
}
