//! Shell: ten thousand client connections of HTTP/1.1: idle ones, waiting ones, and slow ones.

use std::{
    io::ErrorKind,
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use crate::http1::{get_request, parse_response};

/// Number of connections of a crowd.
pub(crate) const CROWD_SIZE: usize = 10_000;
/// Number of connections that are opened or used at once, below the accept queue of every proxy.
const AT_ONCE: usize = 64;
/// Timeout of each step of the crowd.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of slow clients that send a byte in each millisecond: each of them sends one every two seconds.
const BYTES_PER_MS: usize = CROWD_SIZE / 2_000;

/// Open connections to one proxy.
#[derive(Debug)]
pub(crate) struct ClientCrowd {
    streams: Vec<TcpStream>,
}

impl ClientCrowd {
    /// Opens all connections.
    pub(crate) async fn connect(to: SocketAddr) -> Result<Self> {
        let connects = stream::iter(0..CROWD_SIZE).map(|_| TcpStream::connect(to));
        let all = connects.buffer_unordered(AT_ONCE).try_collect::<Vec<TcpStream>>();
        let streams = within(STEP_TIMEOUT, all).await?.context("cannot connect")?;
        Ok(Self { streams })
    }

    /// Sends one request on each connection, and waits for its response.
    pub(crate) async fn exchange_each(&mut self, host: &str) -> Result<()> {
        let request = get_request(host);
        let exchanges = stream::iter(&mut self.streams).map(|stream| exchange(stream, &request));
        let all = exchanges.buffer_unordered(AT_ONCE).try_collect::<Vec<Instant>>();
        within(STEP_TIMEOUT, all).await??;
        Ok(())
    }

    /// Sends one request on each connection, without its response.
    pub(crate) async fn send_each(&mut self, host: &str) -> Result<()> {
        let request = get_request(host);
        for stream in &mut self.streams {
            stream.write_all(&request).await.context("cannot send a request")?;
        }
        Ok(())
    }

    /// Waits for one response on each connection, in a task for each. The result of a task is the moment of its
    /// response. Dropping the tasks closes the connections.
    pub(crate) fn receive_each(self) -> JoinSet<Result<Instant>> {
        let mut tasks = JoinSet::new();
        for mut stream in self.streams {
            tasks.spawn(async move { receive(&mut stream).await });
        }
        tasks
    }

    /// Sends the head of a request on each connection, one byte every two seconds, until `stop`. Returns the number of
    /// connections that the proxy has closed.
    pub(crate) async fn trickle(self, host: &str, stop: CancellationToken) -> Result<usize> {
        // A head that never ends: its last field grows.
        let head = format!("GET / HTTP/1.1\r\nhost: {host}\r\nx-slow: ");
        let mut sent = vec![0_usize; self.streams.len()];
        let mut tick = tokio::time::interval(Duration::from_millis(1));
        let mut next = 0;
        while !stop.is_cancelled() {
            tick.tick().await;
            for _ in 0..BYTES_PER_MS {
                let byte = head.as_bytes().get(sent[next]).copied().unwrap_or(b'a');
                // An error means that the other end is gone, which is counted below.
                if let Ok(length) = self.streams[next].try_write(&[byte]) {
                    sent[next] += length;
                }
                next = (next + 1) % self.streams.len();
            }
        }
        ensure!(sent.iter().any(|sent| *sent > 1), "the slow clients have sent nothing");
        // A proxy sends nothing before a head is complete, except an error or the end of the connection.
        let is_closed = |stream: &&TcpStream| !matches!(stream.try_read(&mut [0_u8; 1]), Err(error) if error.kind() == ErrorKind::WouldBlock);
        Ok(self.streams.iter().filter(is_closed).count())
    }
}

async fn exchange(stream: &mut TcpStream, request: &[u8]) -> Result<Instant> {
    stream.write_all(request).await.context("cannot send a request")?;
    receive(stream).await
}

/// Receives one response, and returns the moment at which it was complete.
async fn receive(stream: &mut TcpStream) -> Result<Instant> {
    let mut received = Vec::with_capacity(512);
    loop {
        let length = stream.read_buf(&mut received).await.context("cannot read a response")?;
        if length == 0 {
            bail!("a connection was closed");
        }
        if parse_response(&received)?.is_some() {
            return Ok(Instant::now());
        }
    }
}

/// Waits for a future, at most for a time.
pub(crate) async fn within<T>(time: Duration, future: impl Future<Output = T>) -> Result<T> {
    let waited = tokio::time::timeout(time, future).await;
    waited.with_context(|| format!("it takes longer than {time:?}"))
}
