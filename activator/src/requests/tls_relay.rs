//! Shell: bytes of a raw TCP connection whose TLS the gateway ends, passed on between client and pod.
//!
//! As without TLS, the end of one direction is passed on, and the other direction continues. What a client sends ends by
//! `close_notify`. An end of TCP without it may be the work of an attacker on the way, so it breaks the connection.

use std::{
    future::poll_fn,
    io,
    pin::{Pin, pin},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncWrite as _, ReadBuf},
    net::TcpStream,
    task::coop::consume_budget,
    time::sleep,
};

use crate::{
    clients::client_stream::AcceptedStream,
    requests::tcp_relay::{
        COPY_BUFFER_BYTES, HalfResult, RelayActivity, TcpRelayError, run_directions, write_all,
    },
    tcp_socket,
};

/// Interval of looks at a client from which nothing may be read any more.
const BROKEN_CLIENT_INTERVAL: Duration = Duration::from_secs(15);

/// Client within TLS, which both directions use. They are polled by one task, so the lock is always free.
struct TlsRelayClient(Mutex<AcceptedStream>);

impl TlsRelayClient {
    fn stream(&self) -> MutexGuard<'_, AcceptedStream> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a read returns bytes, the end, or an error.
    async fn readable(&self) -> io::Result<()> {
        poll_fn(|cx| self.stream().poll_read_ready(cx)).await
    }

    /// Reads bytes; 0 is the end that the client has announced.
    async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        poll_fn(|cx| {
            let mut into = ReadBuf::new(&mut *buffer);
            let read = self.stream().poll_read_whole(cx, &mut into);
            read.map_ok(|()| into.filled().len())
        })
        .await
    }

    async fn write_all(&self, mut bytes: &[u8], activity: &RelayActivity) -> io::Result<()> {
        while !bytes.is_empty() {
            let write = poll_fn(|cx| Pin::new(&mut *self.stream()).poll_write(cx, bytes));
            let count = write.await?;
            if count == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            activity.record();
            bytes = &bytes[count..];
        }
        poll_fn(|cx| Pin::new(&mut *self.stream()).poll_flush(cx)).await
    }

    /// Announces the end of the pod's bytes.
    async fn close_sending_half(&self) -> io::Result<()> {
        poll_fn(|cx| Pin::new(&mut *self.stream()).poll_shutdown(cx)).await
    }

    /// Waits until the kernel has found out that the client is gone. Reads find it out earlier, while there are any.
    async fn wait_broken(&self) -> io::Error {
        loop {
            sleep(BROKEN_CLIENT_INTERVAL).await;
            if let Ok(Some(error)) | Err(error) = self.stream().tcp().take_error() {
                return error;
            }
        }
    }
}

/// Passes bytes on, both ways, until both sides have ended theirs or one has broken off. Unless both have ended, the
/// connection to the client is dropped as it is, and the caller has set that it is reset then.
pub(crate) async fn relay_tls(
    client: AcceptedStream,
    pod: &TcpStream,
    activity: &RelayActivity,
) -> HalfResult {
    let client = TlsRelayClient(Mutex::new(client));
    let is_broken = AtomicBool::new(false);
    let up = pin!(async {
        copy_to_pod(&client, pod, activity).await?;
        if is_broken.load(Ordering::Relaxed) {
            return Ok(());
        }
        // The client's `close_notify` ends only its own bytes (RFC 8446 §6.1). It becomes a FIN for the pod.
        tcp_socket::close_sending_half(pod).map_err(TcpRelayError::of_pod)
    });
    let down = pin!(async {
        copy_to_client(pod, &client, activity).await?;
        // Once the error of a pod has been read, its bytes end as if it had closed its half.
        if is_broken.load(Ordering::Relaxed) {
            return Ok(());
        }
        client.close_sending_half().await.map_err(TcpRelayError::of_client)
    });
    let wait_broken = pin!(async {
        tokio::select! {
            error = tcp_socket::wait_broken(pod) => TcpRelayError::of_pod(error),
            error = client.wait_broken() => TcpRelayError::of_client(error),
        }
    });
    run_directions(up, down, wait_broken, &is_broken).await?;
    // The connection is reset if even this fails.
    let _ = tcp_socket::set_reset_on_close(client.stream().tcp(), false);
    Ok(())
}

/// Passes the client's bytes on until it ends them.
async fn copy_to_pod(
    client: &TlsRelayClient,
    pod: &TcpStream,
    activity: &RelayActivity,
) -> HalfResult {
    loop {
        // The buffer is there only between this wait and the next one.
        client.readable().await.map_err(TcpRelayError::of_client)?;
        let mut buffer = vec![0; COPY_BUFFER_BYTES];
        let count = client.read(&mut buffer).await.map_err(TcpRelayError::of_client)?;
        if count == 0 {
            return Ok(());
        }
        let written = write_all(pod, &buffer[..count], activity).await;
        written.map_err(TcpRelayError::of_pod)?;
        // If both ends are fast, no wait above would let other tasks run.
        consume_budget().await;
    }
}

/// Passes the pod's bytes on until it closes its half.
async fn copy_to_client(
    pod: &TcpStream,
    client: &TlsRelayClient,
    activity: &RelayActivity,
) -> HalfResult {
    loop {
        pod.readable().await.map_err(TcpRelayError::of_pod)?;
        // Allocated only once bytes are there: most connections are idle.
        let mut buffer = vec![0; COPY_BUFFER_BYTES];
        let count = match pod.try_read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(TcpRelayError::of_pod(error)),
        };
        let written = client.write_all(&buffer[..count], activity).await;
        written.map_err(TcpRelayError::of_client)?;
        consume_budget().await;
    }
}
