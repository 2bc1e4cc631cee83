//! Shell: TCP sockets: listeners, resets, and keep-alive, by which the kernel detects peers that have vanished.

use std::{
    io,
    net::{Shutdown, SocketAddr},
    time::Duration,
};

use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::Interest,
    net::{TcpListener, TcpSocket, TcpStream},
};

/// Connections that the kernel queues until they are accepted; net.core.somaxconn limits it further.
const LISTEN_BACKLOG: u32 = 4_096;
/// Time of silence after which the kernel probes the peer, up to [`KEEPALIVE_RETRIES`] times, every
/// [`KEEPALIVE_INTERVAL`]. Go's servers and clients use 15 s too.
const KEEPALIVE_TIME: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
const KEEPALIVE_RETRIES: u32 = 3;

/// Opens one listener on an address.
pub fn bind_listener(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(LISTEN_BACKLOG)
}

/// Enables keep-alive, by which the kernel finds out that a peer has vanished: its node died, or no process is behind
/// its half-closed connection.
///
/// `TCP_USER_TIMEOUT` is not set: it would also end a connection whose peer is there and reads slowly. A request that
/// waits for data sent to a vanished peer ends with `timeoutSeconds`.
pub fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    let socket = SockRef::from(stream);
    let often = TcpKeepalive::new()
        .with_time(KEEPALIVE_TIME)
        .with_interval(KEEPALIVE_INTERVAL)
        .with_retries(KEEPALIVE_RETRIES);
    socket.set_tcp_keepalive(&often)
}

/// Keeps urgent data (RFC 6093) in place among the other bytes. Otherwise the kernel takes the urgent byte out of the
/// stream, and a copy of the stream lacks it.
pub fn keep_urgent_inline(stream: &TcpStream) -> io::Result<()> {
    SockRef::from(stream).set_out_of_band_inline(true)
}

/// Sets if a close of the connection resets it, or (`false`) ends it in order.
pub fn set_reset_on_close(stream: &TcpStream, is_reset: bool) -> io::Result<()> {
    SockRef::from(stream).set_linger(is_reset.then_some(Duration::ZERO))
}

/// Closes the sending half of a connection.
pub fn close_sending_half(stream: &TcpStream) -> io::Result<()> {
    SockRef::from(stream).shutdown(Shutdown::Write)
}

/// Waits until the peer has reset the connection, or the kernel has found out that the peer is gone. Returns the error.
/// Unread bytes and a closed half do not end the wait.
pub async fn wait_broken(stream: &TcpStream) -> io::Error {
    let broken = stream.ready(Interest::ERROR).await.and_then(|_| stream.take_error());
    match broken {
        Ok(Some(error)) | Err(error) => error,
        // A read or a write has got it before.
        Ok(None) => io::ErrorKind::ConnectionReset.into(),
    }
}

/// Raw TCP connection that is reset when it is dropped: an end in the middle would look like the end of the stream.
#[derive(Debug)]
pub struct ResettingStream {
    stream: TcpStream,
    is_complete: bool,
}

impl ResettingStream {
    /// Wraps a connection.
    pub fn new(stream: TcpStream) -> Self {
        Self { stream, is_complete: false }
    }

    /// TCP connection itself.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Closes the connection without a reset, because both of its sides have sent all that they had to.
    pub fn close(mut self) {
        self.is_complete = true;
    }
}

impl Drop for ResettingStream {
    fn drop(&mut self) {
        if !self.is_complete {
            // Without the option the connection is closed in order. Nothing better is left to do then.
            let _ = self.stream.set_zero_linger();
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;

    use super::*;

    #[tokio::test]
    async fn the_kernel_gets_the_keepalive_settings() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        keep_alive(&stream).unwrap();
        let socket = SockRef::from(&stream);
        let often = (
            socket.tcp_keepalive_time().unwrap(),
            socket.tcp_keepalive_interval().unwrap(),
            socket.tcp_keepalive_retries().unwrap(),
        );
        assert!(socket.keepalive().unwrap());
        assert_eq!(often, (Duration::from_secs(15), Duration::from_secs(15), 3));
    }

    #[tokio::test]
    async fn a_dropped_stream_is_reset_and_a_closed_one_ends() {
        for is_closed in [false, true] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let mut peer = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let stream = ResettingStream::new(listener.accept().await.unwrap().0);
            stream.stream().writable().await.unwrap();
            assert_eq!(stream.stream().try_write(b"part").unwrap(), 4);
            peer.read_exact(&mut [0; 4]).await.unwrap();
            if is_closed {
                stream.close()
            } else {
                drop(stream)
            }
            let end = peer.read(&mut [0]).await.map_err(|error| error.kind());
            assert_eq!(end, if is_closed { Ok(0) } else { Err(io::ErrorKind::ConnectionReset) });
        }
    }
}
