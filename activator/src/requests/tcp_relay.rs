//! Shell: bytes of a raw TCP connection, passed on between client and pod as if there were no activator.
//!
//! The end of one direction is passed on, and the other direction continues. If one side breaks off, all that has come
//! from it is passed on before the connection ends. The other side must take it in time. While nothing passes, a
//! connection holds neither buffer nor pipe.

use std::{
    io,
    pin::{Pin, pin},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use tokio::{
    net::TcpStream,
    task::coop::consume_budget,
    time::{Instant, sleep_until, timeout},
};

use crate::{
    requests::splice_pipes::{LentPipe, SplicePipes},
    tcp_socket,
};

/// Number of bytes that are copied at once. Both directions together hold less than the budget counts for a client
/// connection, which has three buffers of this size over HTTP.
pub(super) const COPY_BUFFER_BYTES: usize = 8 << 10;

/// Time for which the rest of what a broken side has sent is passed on. Otherwise a receiver that reads nothing would
/// keep the connection, and with it the pod, for as long as it likes.
const BROKEN_SIDE_TIMEOUT: Duration = Duration::from_secs(30);

/// Error because of which a connection ended before both sides had closed it.
#[derive(Debug, thiserror::Error)]
#[error("{} has broken off", .peer.label())]
pub(crate) struct TcpRelayError {
    peer: TcpRelayPeer,
    #[source]
    source: io::Error,
}

impl TcpRelayError {
    /// Error of the connection to the client.
    pub(super) fn of_client(source: io::Error) -> Self {
        Self { peer: TcpRelayPeer::Client, source }
    }

    /// Error of the connection to the pod.
    pub(super) fn of_pod(source: io::Error) -> Self {
        Self { peer: TcpRelayPeer::Pod, source }
    }
}

/// Time at which the last bytes of a connection have passed, in either direction.
#[derive(Debug)]
pub(crate) struct RelayActivity {
    begun: Instant,
    /// Milliseconds from `begun` to the last bytes.
    last_ms: AtomicU64,
}

impl RelayActivity {
    /// Begins with the present moment as the one of the last bytes.
    pub(crate) fn begin() -> Self {
        Self { begun: Instant::now(), last_ms: AtomicU64::new(0) }
    }

    /// Records that bytes have passed now.
    pub(super) fn record(&self) {
        let elapsed = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.store(elapsed, Ordering::Relaxed);
    }

    /// Waits until no bytes have passed for `most`; without end if there is no such bound.
    pub(crate) async fn wait_idle(&self, most: Option<Duration>) {
        let Some(most) = most else { return std::future::pending().await };
        loop {
            let last = Duration::from_millis(self.last_ms.load(Ordering::Relaxed));
            let idle_at = self.begun + last + most;
            if Instant::now() >= idle_at {
                return;
            }
            sleep_until(idle_at).await;
        }
    }
}

/// Side of a relayed connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TcpRelayPeer {
    Client,
    Pod,
}

impl TcpRelayPeer {
    fn label(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Pod => "pod",
        }
    }
}

/// One side, with the connection to it.
#[derive(Clone, Copy, Debug)]
struct RelaySide<'a> {
    peer: TcpRelayPeer,
    stream: &'a TcpStream,
}

impl RelaySide<'_> {
    fn broken(self, source: io::Error) -> TcpRelayError {
        TcpRelayError { peer: self.peer, source }
    }

    /// Passes on to the side that the other one has closed its half.
    fn close_sending_half(self) -> HalfResult {
        tcp_socket::close_sending_half(self.stream).map_err(|error| self.broken(error))
    }

    /// Waits until the side has reset its connection, or the kernel has found out that it is gone.
    async fn wait_broken(self) -> TcpRelayError {
        self.broken(tcp_socket::wait_broken(self.stream).await)
    }
}

/// Result of one direction. The error names the side that has broken off.
pub(super) type HalfResult = Result<(), TcpRelayError>;

/// Result of one step of a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CopyStep {
    /// Everything that had come was passed on.
    Drained,
    /// A whole buffer was passed on, and more may have come.
    HasMore,
    /// Everything was passed on, and the sender has closed its half.
    SenderClosed,
}

/// Passes bytes on, both ways, until both sides have closed their halves or one has broken off.
pub(crate) async fn relay_tcp(
    client: &TcpStream,
    pod: &TcpStream,
    pipes: &SplicePipes,
    activity: &RelayActivity,
) -> Result<(), TcpRelayError> {
    let client = RelaySide { peer: TcpRelayPeer::Client, stream: client };
    let pod = RelaySide { peer: TcpRelayPeer::Pod, stream: pod };
    let is_broken = AtomicBool::new(false);
    let up = pin!(relay_half(client, pod, pipes, activity, &is_broken));
    let down = pin!(relay_half(pod, client, pipes, activity, &is_broken));
    let wait_broken = pin!(async {
        tokio::select! {
            error = client.wait_broken() => error,
            error = pod.wait_broken() => error,
        }
    });
    run_directions(up, down, wait_broken, &is_broken).await
}

/// Runs both directions of a relay until both have ended or one side has broken off. Each passes on the end of its bytes
/// itself, unless `is_broken` is true by then. `wait_broken` returns once a side has broken off, whatever is read.
pub(super) async fn run_directions(
    mut up: Pin<&mut impl Future<Output = HalfResult>>,
    mut down: Pin<&mut impl Future<Output = HalfResult>>,
    mut wait_broken: Pin<&mut impl Future<Output = TcpRelayError>>,
    is_broken: &AtomicBool,
) -> HalfResult {
    // A completed future must not be polled again, so each branch is switched off once its direction has ended.
    let (mut up_ended, mut down_ended) = (false, false);
    let error = loop {
        // Both run in this task. Neither waits for the other, or a full buffer on one side would stop both.
        let end = tokio::select! {
            end = up.as_mut(), if !up_ended => {
                up_ended = true;
                end
            }
            end = down.as_mut(), if !down_ended => {
                down_ended = true;
                end
            }
            // A side from which nothing is read may be gone: it has closed its half, or the other side takes no more
            // bytes. No read would find that out.
            error = wait_broken.as_mut() => Err(error),
        };
        match end {
            Ok(()) if up_ended && down_ended => return Ok(()),
            Ok(()) => {}
            Err(error) => break error,
        }
    };
    is_broken.store(true, Ordering::Relaxed);
    // What the broken side has sent before is passed on.
    let _end_is_no_news = match error.peer {
        TcpRelayPeer::Client if !up_ended => timeout(BROKEN_SIDE_TIMEOUT, up).await,
        TcpRelayPeer::Pod if !down_ended => timeout(BROKEN_SIDE_TIMEOUT, down).await,
        TcpRelayPeer::Client | TcpRelayPeer::Pod => return Err(error),
    };
    Err(error)
}

/// Passes on in one direction the bytes and then their end.
async fn relay_half(
    from: RelaySide<'_>,
    to: RelaySide<'_>,
    pipes: &SplicePipes,
    activity: &RelayActivity,
    is_broken: &AtomicBool,
) -> HalfResult {
    copy_half(from, to, pipes, activity).await?;
    // The kernel reports a reset once. Reads end then as if the sender had closed its half, which is not passed on.
    if is_broken.load(Ordering::Relaxed) {
        return Ok(());
    }
    to.close_sending_half()
}

/// Passes bytes on in one direction until the sender closes its half.
async fn copy_half(
    from: RelaySide<'_>,
    to: RelaySide<'_>,
    pipes: &SplicePipes,
    activity: &RelayActivity,
) -> HalfResult {
    let mut has_more = false;
    loop {
        // Buffer and pipe are there only between this wait and the next one.
        from.stream.readable().await.map_err(|error| from.broken(error))?;
        consume_budget().await;
        let pipe = if has_more { pipes.lend() } else { None };
        let step = match pipe {
            Some(pipe) => splice_bytes(from, to, pipe, activity).await?,
            None => copy_bytes(from, to, activity).await?,
        };
        has_more = step == CopyStep::HasMore;
        if step == CopyStep::SenderClosed {
            return Ok(());
        }
    }
}

/// Copies what has come, up to the first full buffer.
async fn copy_bytes(
    from: RelaySide<'_>,
    to: RelaySide<'_>,
    activity: &RelayActivity,
) -> Result<CopyStep, TcpRelayError> {
    let mut buffer = vec![0; COPY_BUFFER_BYTES];
    loop {
        let count = match from.stream.try_read(&mut buffer) {
            Ok(0) => return Ok(CopyStep::SenderClosed),
            Ok(count) => count,
            // Ends the step, so that no buffer is held while nothing comes.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Ok(CopyStep::Drained);
            }
            Err(error) => return Err(from.broken(error)),
        };
        let written = write_all(to.stream, &buffer[..count], activity).await;
        written.map_err(|error| to.broken(error))?;
        if count == buffer.len() {
            return Ok(CopyStep::HasMore);
        }
        // `try_read` and `try_write` use no budget of the task, so a busy relay would never let other tasks run.
        consume_budget().await;
    }
}

/// Writes all bytes, and records each part.
pub(super) async fn write_all(
    to: &TcpStream,
    mut bytes: &[u8],
    activity: &RelayActivity,
) -> io::Result<()> {
    while !bytes.is_empty() {
        match to.try_write(bytes) {
            Ok(count) => {
                activity.record();
                bytes = &bytes[count..];
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => to.writable().await?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Passes on through a pipe what has come. The end of the sender's bytes is left to a read: the kernel also moves
/// nothing at an urgent byte.
async fn splice_bytes(
    from: RelaySide<'_>,
    to: RelaySide<'_>,
    mut pipe: LentPipe<'_>,
    activity: &RelayActivity,
) -> Result<CopyStep, TcpRelayError> {
    while pipe.try_fill(from.stream).map_err(|error| from.broken(error))? {
        while !pipe.is_empty() {
            match pipe.try_drain(to.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    to.stream.writable().await.map_err(|error| to.broken(error))?;
                }
                drained => {
                    drained.map_err(|error| to.broken(error))?;
                    activity.record();
                }
            }
        }
        // Moves through a pipe use no budget of the task, so a busy relay would never let other tasks run.
        consume_budget().await;
    }
    Ok(CopyStep::Drained)
}

#[cfg(test)]
mod tests;
