//! Shell: TCP sockets: listeners, and keep-alive, by which the kernel detects peers that have vanished.

use std::{io, net::SocketAddr, time::Duration};

use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

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

#[cfg(test)]
mod tests {
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
}
