//! Shell: the TCP sockets of the calling thread's network namespace: listed and ended by sock_diag.

use std::{io, net::SocketAddr, time::Duration};

use netlink_packet_sock_diag::{
    SockDiagDestroy, SockDiagMessage,
    constants::{AF_INET, AF_INET6, IPPROTO_TCP},
    inet::{ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags, nlas::Nla},
};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;

use crate::netlink::Netlink;

/// One established connection, seen from its own end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// This end.
    pub local: SocketAddr,
    /// The other end.
    pub peer: SocketAddr,
    /// Since the last byte went either way.
    pub idle: Duration,
    id: SocketId,
    family: u8,
}

#[cfg(test)]
impl Connection {
    /// A connection as it would be listed.
    pub(crate) fn seen(local: SocketAddr, peer: SocketAddr, idle: Duration) -> Self {
        Self { local, peer, idle, id: SocketId::new_v4(), family: AF_INET }
    }
}

/// A sock_diag socket. It stays in the namespace it was opened in.
#[derive(Debug)]
pub struct SockDiag {
    netlink: Netlink,
}

impl SockDiag {
    /// Opens one in the namespace of the calling thread.
    pub fn open() -> io::Result<Self> {
        Ok(Self { netlink: Netlink::open(NETLINK_SOCK_DIAG)? })
    }

    /// Where processes listen.
    pub fn listeners(&self) -> io::Result<Vec<SocketAddr>> {
        let mut found = Vec::new();
        self.each(StateFlags::LISTEN, ExtensionFlags::empty(), |socket| {
            found.push(local(&socket.header.socket_id));
        })?;
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    /// Established connections. `idle` is zero where the kernel does not say.
    pub fn connections(&self) -> io::Result<Vec<Connection>> {
        let mut found = Vec::new();
        self.each(StateFlags::ESTABLISHED, ExtensionFlags::INFO, |socket| {
            let id = socket.header.socket_id.clone();
            found.push(Connection {
                local: local(&id),
                peer: SocketAddr::new(id.destination_address, id.destination_port),
                idle: idle(&socket),
                family: socket.header.family,
                id,
            });
        })?;
        Ok(found)
    }

    /// Ends a connection from this side: its owner reads ECONNABORTED, the peer gets a reset.
    ///
    /// `NotFound` when it has ended by itself. Needs CAP_NET_ADMIN and a kernel with INET_DIAG_DESTROY;
    /// `Unsupported` without.
    pub fn destroy(&self, connection: &Connection) -> io::Result<()> {
        let mut socket_id = connection.id.clone();
        // A v4-mapped peer stands as IPv6 here, which is how it was listed.
        socket_id.interface_id = 0;
        let request =
            request(connection.family, StateFlags::all(), ExtensionFlags::empty(), socket_id);
        let request = SockDiagMessage::InetRequest(request);
        self.netlink.command(SockDiagDestroy::new(request))
    }

    fn each(
        &self,
        states: StateFlags,
        extensions: ExtensionFlags,
        mut each: impl FnMut(InetResponse),
    ) -> io::Result<()> {
        for (family, id) in [(AF_INET, SocketId::new_v4()), (AF_INET6, SocketId::new_v6())] {
            let request = request(family, states.clone(), extensions.clone(), id);
            self.netlink.dump(SockDiagMessage::InetRequest(request), |answer| {
                if let SockDiagMessage::InetResponse(socket) = answer {
                    each(*socket);
                }
            })?;
        }
        Ok(())
    }
}

fn request(
    family: u8,
    states: StateFlags,
    extensions: ExtensionFlags,
    socket_id: SocketId,
) -> InetRequest {
    InetRequest { family, protocol: IPPROTO_TCP, extensions, states, socket_id }
}

fn local(id: &SocketId) -> SocketAddr {
    SocketAddr::new(id.source_address, id.source_port)
}

/// Time since the last byte, from `struct tcp_info`: the smaller of `tcpi_last_data_sent` (byte 44) and
/// `tcpi_last_data_recv` (byte 52), both in ms (include/uapi/linux/tcp.h).
fn idle(socket: &InetResponse) -> Duration {
    let info = socket.nlas.iter().find_map(|nla| match nla {
        Nla::TcpInfo(bytes) => Some(bytes.as_slice()),
        _ => None,
    });
    let word = |at: usize| -> Option<u32> {
        let bytes = info?.get(at..at + 4)?;
        bytes.try_into().map(u32::from_ne_bytes).ok()
    };
    let ms = word(44).zip(word(52)).map_or(0, |(sent, received)| sent.min(received));
    Duration::from_millis(ms.into())
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn it_sees_listeners_of_both_families_until_they_close() {
        let v4 = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let v6 = TcpListener::bind("[::1]:0").expect("a free port");
        let at = [v4.local_addr().expect("bound"), v6.local_addr().expect("bound")];
        let diag = SockDiag::open().expect("netlink");
        let seen = diag.listeners().expect("a dump");
        assert!(at.iter().all(|at| seen.contains(at)), "{at:?} in {seen:?}");
        drop(v4);
        let seen = diag.listeners().expect("a dump");
        assert!(!seen.contains(&at[0]) && seen.contains(&at[1]), "{seen:?}");
    }

    #[test]
    fn it_lists_both_ends_of_a_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let client = TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
        let (here, there) =
            (client.local_addr().expect("bound"), listener.local_addr().expect("bound"));
        let seen = SockDiag::open().and_then(|diag| diag.connections()).expect("a dump");
        let ends = |local, peer| seen.iter().any(|it| it.local == local && it.peer == peer);
        assert!(ends(here, there) && ends(there, here));
    }
}
