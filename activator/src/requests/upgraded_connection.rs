//! Shell: upgraded connections (RFC 9110 §7.8), for example of WebSocket.

use std::{
    error::Error,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf},
    time::{Instant, sleep_until},
};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{debug, info};

use crate::{
    pods::upgraded_pod::UpgradedPod,
    requests::{
        request_timer::RequestTimer,
        upgraded_client::{UpgradedClient, UpgradedStream},
    },
    revisions::revision::PodPermit,
};

/// Copies bytes both ways until both ends have closed, a timeout of the request is over, or the activator stops.
///
/// Knative ends upgraded connections by `timeoutSeconds` too, and by the other timeouts even while bytes pass. Here
/// bytes that pass count as bytes of a response: the first ones end the response start timeout, and all of them restart
/// the idle timeout.
///
/// Unless both ends have closed, a client's stream of HTTP/2 is reset, and a pod's connection closes at once. A client's
/// connection of HTTP/1.1 just closes.
pub async fn relay_upgraded_connection(
    client: UpgradedClient,
    pod: UpgradedPod,
    permit: Arc<PodPermit>,
    timer: RequestTimer,
    stop: CancellationToken,
) {
    // Bytes that the pod has sent behind its head count as its first ones.
    let activity = Arc::new(UpgradeActivity::new(pod.has_buffered_bytes()));
    let stream = client.stream.clone();
    let pod_guard = pod.cut_off_guard();
    let mut client_io = None;
    let relay = async {
        let (buffered, pod) = pod.complete().await?;
        // hyper completes the client's upgrade only after it has sent the head of the response.
        let client = client_io.insert(client.complete().await?);
        let mut client = ActivityTrackedIo(client, Arc::clone(&activity));
        client.write_all(&buffered).await?;
        // Over TLS, written bytes may still be here.
        client.flush().await?;
        let mut pod = ActivityTrackedIo(pod, Arc::clone(&activity));
        let byte_counts = tokio::io::copy_bidirectional(&mut client, &mut pod).await?;
        debug!(pod = %permit.pod.uid, carried = ?byte_counts, "upgraded connection ended");
        Ok::<_, Box<dyn Error + Send + Sync>>(())
    };
    let is_complete = tokio::select! {
        ended = relay => match ended {
            Ok(()) => true,
            Err(error) => {
                debug!(pod = %permit.pod.uid, %error, "upgraded connection broke");
                false
            }
        },
        () = activity.wait_timeout(&timer) => {
            info!(pod = %permit.pod.uid, "upgraded connection ended: request timeout");
            false
        }
        () = wait_given_up(stream.as_deref()) => false,
        () = stop.cancelled() => false,
    };
    if is_complete {
        // The pod may still have to take the last bytes.
        drop(pod_guard.map(DropGuard::disarm));
        return;
    }
    drop(pod_guard);
    if let (Some(stream), Some(client)) = (stream, client_io) {
        stream.reset(client).await;
    }
}

/// Waits until the client's stream cannot go on. A client's whole connection notices that by itself.
async fn wait_given_up(stream: Option<&UpgradedStream>) {
    match stream {
        Some(stream) => stream.wait_given_up().await,
        None => std::future::pending().await,
    }
}

/// Time of the last bytes from the client or the pod.
#[derive(Debug)]
struct UpgradeActivity {
    started_at: Instant,
    /// Time of the last bytes, in ms after `started_at`.
    last_activity_ms: AtomicU64,
    /// True once any bytes were sent.
    has_activity: AtomicBool,
}

impl UpgradeActivity {
    fn new(has_activity: bool) -> Self {
        Self {
            started_at: Instant::now(),
            last_activity_ms: AtomicU64::new(0),
            has_activity: AtomicBool::new(has_activity),
        }
    }

    fn record(&self) {
        let elapsed_ms = u64::try_from(self.started_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_activity_ms.store(elapsed_ms, Ordering::Relaxed);
        self.has_activity.store(true, Ordering::Relaxed);
    }

    /// Waits until a timeout is over.
    async fn wait_timeout(&self, timer: &RequestTimer) {
        loop {
            // Each timeout is computed again after the sleep, since bytes may have passed meanwhile.
            let last = self.started_at
                + Duration::from_millis(self.last_activity_ms.load(Ordering::Relaxed));
            let idle = timer.idle_timeout().map(|it| last + it);
            let start =
                timer.start_deadline().filter(|_| !self.has_activity.load(Ordering::Relaxed));
            let first = [Some(timer.deadline()), idle, start].into_iter().flatten().min();
            let until = first.unwrap_or_else(|| timer.deadline());
            if until <= Instant::now() {
                return;
            }
            sleep_until(until).await;
        }
    }
}

/// One end of the connection, which registers the bytes read from it.
#[derive(Debug)]
struct ActivityTrackedIo<T>(T, Arc<UpgradeActivity>);

impl<T: AsyncRead + Unpin> AsyncRead for ActivityTrackedIo<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let read = Pin::new(&mut self.0).poll_read(cx, into);
        if into.filled().len() > before {
            self.1.record();
        }
        read
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for ActivityTrackedIo<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, from)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
