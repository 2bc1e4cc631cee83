//! Shell: sockets of the calling thread's network namespace, listed and closed by sock_diag: those of TCP, and
//! connected ones of UDP.

use std::{io, net::SocketAddr, time::Duration};

use netlink_packet_sock_diag::{
    SockDiagDestroy, SockDiagMessage,
    constants::{AF_INET, AF_INET6, IPPROTO_TCP, IPPROTO_UDP, TCP_CLOSE_WAIT, TCP_ESTABLISHED},
    inet::{ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags, nlas::Nla},
};
use netlink_sys::{Socket, protocols::NETLINK_SOCK_DIAG};

use self::tcp_dump::TcpDumpMessage;
use crate::net::netlink::NetlinkSocket;

mod socket_storage;
mod tcp_dump;

/// One connection of TCP in a state that was asked for, or one connected UDP socket, seen from one of its ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiagConnection {
    /// Address and port of this end.
    pub local: SocketAddr,
    /// Address and port of the other end.
    pub peer: SocketAddr,
    /// Activity of the connection so far.
    pub activity: TcpActivity,
    /// Number of the cgroup (v2) of the process that opened this socket, or the listener that accepted it: the inode of
    /// the cgroup's directory. `None` if the kernel does not tell (before Linux 5.8).
    pub cgroup_id: Option<u64>,
    id: SocketId,
    family: u8,
    protocol: u8,
}

/// Activity of a connection, seen from its own end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpActivity {
    /// Time since this end sent its last byte; if it never has, since the connection was established.
    pub since_sent: Duration,
    /// True if this end has sent any data.
    pub has_sent: bool,
    /// Time since the last byte was received; `None` if none ever was.
    pub since_received: Option<Duration>,
    /// Time since the last acknowledgement from the other end.
    pub since_acknowledged: Duration,
    /// Number of bytes that the other end has acknowledged, its first sequence number included.
    pub bytes_acked: u64,
    /// Number of bytes that this end has received.
    pub bytes_received: u64,
    /// Number of segments with data that this end has sent.
    pub sent_segments: u32,
}

impl DiagConnection {
    /// Returns the socket's cookie, which is unique until reboot.
    pub fn cookie(&self) -> u64 {
        let half = |at: usize| {
            let bytes = self.id.cookie;
            u64::from(u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]))
        };
        // The kernel gives the low half first, whatever the byte order.
        half(4) << 32 | half(0)
    }

    /// Returns the other end as a plain address: an IPv4 peer of an IPv6 socket is listed as `::ffff:a.b.c.d`.
    pub fn canonical_peer(&self) -> SocketAddr {
        unmap_ipv4(self.peer)
    }

    /// Returns this end as a plain address.
    pub fn canonical_local(&self) -> SocketAddr {
        unmap_ipv4(self.local)
    }

    /// Returns the identity of this socket, for requests about it alone.
    fn exact_id(&self) -> SocketId {
        // An IPv4-mapped peer stays an IPv6 address here, as it was listed.
        SocketId { interface_id: 0, ..self.id.clone() }
    }
}

#[cfg(test)]
impl DiagConnection {
    /// Makes a connection as a dump would list it. Its cookie is its local port.
    pub(crate) fn listed(local: SocketAddr, peer: SocketAddr, activity: TcpActivity) -> Self {
        let (family, protocol) = (AF_INET, IPPROTO_TCP);
        let mut id = SocketId::new_v4();
        id.cookie[..4].copy_from_slice(&u32::from(local.port()).to_ne_bytes());
        Self { local, peer, activity, cgroup_id: None, id, family, protocol }
    }
}

/// Sock_diag socket. It stays in the namespace in which it was opened.
#[derive(Debug)]
pub struct SockDiag {
    netlink: NetlinkSocket,
}

impl SockDiag {
    /// Opens a socket in the namespace of the calling thread.
    pub fn open() -> io::Result<Self> {
        Ok(Self { netlink: NetlinkSocket::open(NETLINK_SOCK_DIAG)? })
    }

    /// Returns the netlink socket, for queries about its namespace.
    pub(crate) fn socket(&self) -> &Socket {
        self.netlink.socket()
    }

    /// Returns the listeners, each with true if it is IPv6-only, as a program may ask of the wildcard `::`.
    pub fn listeners(&self) -> io::Result<Vec<(SocketAddr, bool)>> {
        let mut listeners = Vec::new();
        self.dump_sockets(StateFlags::LISTEN, ExtensionFlags::empty(), |socket| {
            let v6_only = socket.nlas.iter().any(|it| matches!(it, Nla::SkV6Only(true)));
            listeners.push((source_address(&socket.header.socket_id), v6_only));
        })?;
        listeners.sort_unstable();
        listeners.dedup();
        Ok(listeners)
    }

    /// Returns the established connections of the namespace.
    pub fn connections(&self) -> io::Result<Vec<DiagConnection>> {
        let mut connections = Vec::new();
        self.dump_sockets(StateFlags::ESTABLISHED, ExtensionFlags::INFO, |socket| {
            connections.push(connection(&socket, IPPROTO_TCP));
        })?;
        Ok(connections)
    }

    /// Returns the TCP connections of the namespace that can still send, without their activity. These are established,
    /// or only their peer has closed. They need not be accepted yet.
    pub fn sendable_connections(&self) -> io::Result<Vec<DiagConnection>> {
        let states = StateFlags::ESTABLISHED | StateFlags::CLOSE_WAIT;
        let mut connections = Vec::new();
        self.dump_sockets(states, ExtensionFlags::empty(), |socket| {
            connections.push(connection(&socket, IPPROTO_TCP));
        })?;
        Ok(connections)
    }

    /// Returns the TCP connections of the namespace that a program may still use, without their activity. These are
    /// established, being established, or have one closed direction.
    pub fn usable_connections(&self) -> io::Result<Vec<DiagConnection>> {
        let half_closed = StateFlags::FIN_WAIT1 | StateFlags::FIN_WAIT2 | StateFlags::CLOSE_WAIT;
        let states = StateFlags::SYN_SENT | StateFlags::ESTABLISHED | half_closed;
        let mut connections = Vec::new();
        self.dump_sockets(states, ExtensionFlags::empty(), |socket| {
            connections.push(connection(&socket, IPPROTO_TCP));
        })?;
        Ok(connections)
    }

    /// Returns the connected UDP sockets of the namespace, without activity. `NotFound` if the kernel lists none
    /// (INET_UDP_DIAG).
    pub fn connected_udp_sockets(&self) -> io::Result<Vec<DiagConnection>> {
        let mut sockets = Vec::new();
        let (states, extensions) = (StateFlags::ESTABLISHED, ExtensionFlags::empty());
        for request in requests_for_both_families(&states, &extensions) {
            let request = InetRequest { protocol: IPPROTO_UDP, ..request };
            self.netlink.dump(SockDiagMessage::InetRequest(request), |response| {
                if let SockDiagMessage::InetResponse(socket) = response {
                    sockets.push(connection(&socket, IPPROTO_UDP));
                }
            })?;
        }
        Ok(sockets)
    }

    /// Returns a listed connection as it is now. `NotFound` if it is not established any more.
    pub fn refresh(&self, connection: &DiagConnection) -> io::Result<DiagConnection> {
        let (state, activity) = self.query(connection)?;
        let is_established = state == TCP_ESTABLISHED;
        is_established
            .then(|| DiagConnection { activity, ..connection.clone() })
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Returns the number of segments with data that this end has sent. `NotFound` if it cannot send any more, or its
    /// other end is gone.
    pub fn sent_segments(&self, connection: &DiagConnection) -> io::Result<u32> {
        match self.query(connection)? {
            // In CLOSE_WAIT the other end has finished sending, but this end may still send.
            (TCP_ESTABLISHED | TCP_CLOSE_WAIT, activity) => Ok(activity.sent_segments),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Returns a connection's state and activity.
    fn query(&self, connection: &DiagConnection) -> io::Result<(u8, TcpActivity)> {
        let mut found = None;
        let states = StateFlags::ESTABLISHED;
        let request =
            request(connection.family, states, ExtensionFlags::INFO, connection.exact_id());
        self.netlink.get(SockDiagMessage::InetRequest(request), |response| {
            if let SockDiagMessage::InetResponse(socket) = response {
                found = Some((socket.header.state, tcp_activity(&socket)));
            }
        })?;
        found.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Checks that this kernel can close connections (INET_DIAG_DESTROY) and permits it. Returns `Unsupported` or the
    /// like if not.
    pub fn can_destroy(&self) -> io::Result<()> {
        // Port 0 names no connection: `NotFound` proves that the kernel handles the request.
        let none = SocketId::new_v4();
        let (states, extensions) = (StateFlags::all(), ExtensionFlags::empty());
        let request = SockDiagMessage::InetRequest(request(AF_INET, states, extensions, none));
        match self.netlink.command(SockDiagDestroy::new(request)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// Closes a connection from this side: its owner reads ECONNABORTED, the peer gets a reset. A UDP socket is
    /// disconnected.
    ///
    /// `NotFound` if it has closed by itself, or has another peer. Needs CAP_NET_ADMIN and a kernel with
    /// INET_DIAG_DESTROY; `Unsupported` without.
    pub fn destroy(&self, connection: &DiagConnection) -> io::Result<()> {
        let (states, extensions) = (StateFlags::all(), ExtensionFlags::empty());
        let request = request(connection.family, states, extensions, connection.exact_id());
        let request = InetRequest { protocol: connection.protocol, ..request };
        self.netlink.command(SockDiagDestroy::new(SockDiagMessage::InetRequest(request)))
    }

    /// Passes each TCP socket in these states to `each`, of both address families in one walk.
    fn dump_sockets(
        &self,
        states: StateFlags,
        extensions: ExtensionFlags,
        mut each: impl FnMut(InetResponse),
    ) -> io::Result<()> {
        self.netlink.dump(TcpDumpMessage::Request(states, extensions), |response| {
            if let TcpDumpMessage::Response(socket) = response {
                each(*socket);
            }
        })
    }
}

/// Converts a listed socket of a protocol to a connection.
fn connection(socket: &InetResponse, protocol: u8) -> DiagConnection {
    let id = socket.header.socket_id.clone();
    DiagConnection {
        local: source_address(&id),
        peer: SocketAddr::new(id.destination_address, id.destination_port),
        activity: tcp_activity(socket),
        cgroup_id: socket_storage::cgroup_id(socket),
        family: socket.header.family,
        protocol,
        id,
    }
}

/// Returns one request for each address family.
fn requests_for_both_families(
    states: &StateFlags,
    extensions: &ExtensionFlags,
) -> [InetRequest; 2] {
    let families = [(AF_INET, SocketId::new_v4()), (AF_INET6, SocketId::new_v6())];
    families.map(|(family, id)| request(family, states.clone(), extensions.clone(), id))
}

fn request(
    family: u8,
    states: StateFlags,
    extensions: ExtensionFlags,
    socket_id: SocketId,
) -> InetRequest {
    InetRequest { family, protocol: IPPROTO_TCP, extensions, states, socket_id }
}

fn source_address(id: &SocketId) -> SocketAddr {
    SocketAddr::new(id.source_address, id.source_port)
}

/// Returns an IPv4 address that is mapped into IPv6 as a plain one.
fn unmap_ipv4(at: SocketAddr) -> SocketAddr {
    SocketAddr::new(at.ip().to_canonical(), at.port())
}

/// Reads `struct tcp_info` (include/uapi/linux/tcp.h). In ms: `tcpi_last_data_sent` (byte 44), `tcpi_last_data_recv`
/// (52), `tcpi_last_ack_recv` (56). In bytes: `tcpi_bytes_acked` (120), `tcpi_bytes_received` (128). Segments:
/// `tcpi_data_segs_in` (152), `tcpi_data_segs_out` (156). Zero, as if just used, if the kernel gives no value.
fn tcp_activity(socket: &InetResponse) -> TcpActivity {
    let info = socket.nlas.iter().find_map(|nla| match nla {
        Nla::TcpInfo(bytes) => Some(bytes.as_slice()),
        _ => None,
    });
    let word = |at: usize| -> u32 {
        let bytes = info.and_then(|info| info.get(at..at + 4)?.try_into().ok());
        bytes.map_or(0, u32::from_ne_bytes)
    };
    let long = |at: usize| -> u64 {
        let bytes = info.and_then(|info| info.get(at..at + 8)?.try_into().ok());
        bytes.map_or(0, u64::from_ne_bytes)
    };
    let ms = |at| Duration::from_millis(word(at).into());
    // Without a segment the kernel counts this time from the connection's start.
    let since_received = (word(152) > 0).then(|| ms(52));
    TcpActivity {
        since_sent: ms(44),
        has_sent: word(156) > 0,
        since_received,
        since_acknowledged: ms(56),
        bytes_acked: long(120),
        bytes_received: long(128),
        sent_segments: word(156),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write as _,
        net::{Ipv6Addr, Shutdown, SocketAddrV6, TcpListener, TcpStream},
    };

    use super::*;

    /// Waits for what follows a packet of the other end: a busy kernel handles it after the call that has sent it.
    fn wait_until(holds: impl Fn() -> bool) {
        let begun = std::time::Instant::now();
        while !holds() {
            assert!(begun.elapsed().as_secs() < 60, "it holds in time");
            std::thread::yield_now();
        }
    }

    #[test]
    fn it_sees_listeners_of_both_families_until_they_close() {
        let v4 = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let v6 = TcpListener::bind("[::1]:0").expect("a free port");
        let at = [v4.local_addr().expect("bound"), v6.local_addr().expect("bound")];
        let diag = SockDiag::open().expect("netlink");
        let listeners = diag.listeners().expect("a dump");
        let has = |listeners: &[(SocketAddr, bool)], at| listeners.iter().any(|it| it.0 == at);
        assert!(at.iter().all(|at| has(&listeners, *at)), "{at:?} in {listeners:?}");
        drop(v4);
        let listeners = diag.listeners().expect("a dump");
        assert!(!has(&listeners, at[0]) && has(&listeners, at[1]), "{listeners:?}");
    }

    #[test]
    fn an_ipv6_only_wildcard_is_distinguished_from_one_of_both_families() {
        use nix::sys::socket::{
            AddressFamily, Backlog, SockFlag, SockType, SockaddrIn6, bind, getsockname, listen,
            setsockopt, socket, sockopt::Ipv6V6Only,
        };
        use std::os::fd::AsRawFd as _;
        for v6_only in [false, true] {
            let fd = socket(AddressFamily::Inet6, SockType::Stream, SockFlag::empty(), None);
            let fd = fd.expect("IPv6");
            setsockopt(&fd, Ipv6V6Only, &v6_only).expect("not bound yet");
            let any = SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, 0, 0, 0);
            bind(fd.as_raw_fd(), &SockaddrIn6::from(any)).expect("a free port");
            listen(&fd, Backlog::new(1).expect("a number")).expect("it listens");
            let at: SockaddrIn6 = getsockname(fd.as_raw_fd()).expect("bound");
            let listeners = SockDiag::open().and_then(|diag| diag.listeners()).expect("a dump");
            let mut found =
                listeners.iter().filter(|(it, _)| it.is_ipv6() && it.port() == at.port());
            assert_eq!(found.next().map(|it| it.1), Some(v6_only), "{listeners:?}");
        }
    }

    #[test]
    fn it_lists_both_ends_of_a_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let client = TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
        let _accepted = listener.accept().expect("it came");
        let (client_address, server_address) =
            (client.local_addr().expect("bound"), listener.local_addr().expect("bound"));
        let connections = SockDiag::open().and_then(|diag| diag.connections()).expect("a dump");
        let is_listed =
            |local, peer| connections.iter().any(|it| it.local == local && it.peer == peer);
        assert!(
            is_listed(client_address, server_address) && is_listed(server_address, client_address)
        );
    }

    #[test]
    fn one_dump_lists_the_connections_of_both_families() {
        let listeners = ["127.0.0.1:0", "[::1]:0"].map(|it| TcpListener::bind(it).expect("a port"));
        let at = listeners.each_ref().map(|it| it.local_addr().expect("bound"));
        let clients = at.map(|it| TcpStream::connect(it).expect("connects"));
        let locals = clients.each_ref().map(|it| it.local_addr().expect("bound"));
        let diag = SockDiag::open().expect("netlink");
        let mut dumped = Vec::new();
        let request = TcpDumpMessage::Request(StateFlags::ESTABLISHED, ExtensionFlags::INFO);
        let dump = diag.netlink.dump(request, |response| {
            if let TcpDumpMessage::Response(socket) = response {
                dumped.push(connection(&socket, IPPROTO_TCP));
            }
        });
        dump.expect("the kernel knows the request");
        // The kernel answers a request about one connection by the newer message.
        let families = [AF_INET, AF_INET6];
        for ((local, peer), family) in locals.into_iter().zip(at).zip(families) {
            // By both ends: a connection of another program to another address may have the same local port.
            let is_client = |it: &&DiagConnection| (it.local, it.peer) == (local, peer);
            let found = dumped.iter().find(is_client).expect("it is listed");
            assert_eq!(found.family, family);
            let again = diag.refresh(found).expect("the same socket");
            assert_eq!(again.cookie(), found.cookie());
            assert!(!found.activity.has_sent && found.activity.since_received.is_none());
        }
    }

    #[test]
    fn a_connection_can_send_until_its_own_end_has_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let at = listener.local_addr().expect("bound");
        let client = TcpStream::connect(at).expect("connects");
        let from = client.local_addr().expect("bound");
        let is_listed = |local: SocketAddr, peer: SocketAddr| {
            let all = SockDiag::open().and_then(|diag| diag.sendable_connections());
            all.expect("a dump").iter().any(|it| it.local == local && it.peer == peer)
        };
        assert!(is_listed(from, at));
        wait_until(|| is_listed(at, from));
        client.shutdown(Shutdown::Write).expect("it is open");
        assert!(!is_listed(from, at));
        assert!(is_listed(at, from), "although no program has accepted it");
        let (accepted, _) = listener.accept().expect("it waits");
        assert!(is_listed(at, from), "its response may be under way");
        drop(accepted);
        assert!(!is_listed(at, from));
    }

    #[test]
    fn a_connection_is_usable_until_both_ends_have_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let client = TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
        let (server, client_address) = listener.accept().expect("it came");
        let is_usable = || {
            let diag = SockDiag::open().expect("netlink");
            let connections = diag.usable_connections().expect("a dump");
            connections.iter().any(|it| it.local == client_address)
        };
        assert!(is_usable());
        client.shutdown(Shutdown::Write).expect("still open");
        assert!(is_usable(), "a response may come");
        drop(server);
        drop(client);
        wait_until(|| !is_usable());
    }

    #[test]
    fn it_lists_connected_udp_sockets_alone() {
        use std::net::UdpSocket;
        let server = UdpSocket::bind("127.0.0.1:0").expect("a free port");
        let client = UdpSocket::bind("127.0.0.1:0").expect("a free port");
        client.connect(server.local_addr().expect("bound")).expect("it is local");
        let sockets = match SockDiag::open().and_then(|diag| diag.connected_udp_sockets()) {
            // This kernel does not list them.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            sockets => sockets.expect("a dump"),
        };
        let at = |socket: &UdpSocket| socket.local_addr().expect("bound");
        let peer_of = |socket| sockets.iter().find(|it| it.local == at(socket)).map(|it| it.peer);
        assert_eq!((peer_of(&client), peer_of(&server)), (Some(at(&server)), None));
    }

    #[test]
    fn the_check_for_support_closes_none() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let at = listener.local_addr().expect("bound");
        let mut client = TcpStream::connect(at).expect("connects");
        let result = SockDiag::open().and_then(|diag| diag.can_destroy());
        if let Err(error) = result {
            use io::ErrorKind::{PermissionDenied, Unsupported};
            assert!(matches!(error.kind(), Unsupported | PermissionDenied), "{error}");
        }
        client.write_all(b"x").expect("still open");
    }

    #[test]
    fn what_was_sent_is_counted_also_after_the_other_end_has_finished() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let client = TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
        let (mut server, client_address) = listener.accept().expect("it came");
        let diag = SockDiag::open().expect("netlink");
        let connections = diag.connections().expect("a dump");
        let connection =
            connections.iter().find(|it| it.peer == client_address).expect("it is listed").clone();
        assert_eq!(diag.sent_segments(&connection).expect("still open"), 0);
        client.shutdown(Shutdown::Write).expect("still open");
        assert_eq!(std::io::Read::read(&mut server, &mut [0]).expect("the end"), 0);
        server.write_all(b"x").expect("still open");
        assert_eq!(diag.sent_segments(&connection).expect("half open"), 1);
        drop((client, server));
        let error = diag.sent_segments(&connection).expect_err("it has ended");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn one_connection_is_refreshed_until_it_has_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let at = listener.local_addr().expect("bound");
        let mut client = TcpStream::connect(at).expect("connects");
        let client_address = client.local_addr().expect("bound");
        let diag = SockDiag::open().expect("netlink");
        let seen = diag.connections().expect("a dump");
        let connection =
            seen.iter().find(|it| it.local == client_address).expect("it is listed").clone();
        assert_eq!(
            (connection.activity.since_received, connection.activity.has_sent),
            (None, false)
        );
        let (mut server, _) = listener.accept().expect("it came");
        server.write_all(b"x").expect("sent");
        client.peek(&mut [0]).expect("it came");
        client.write_all(b"y").expect("sent");
        let seen = diag.refresh(&connection).expect("still open").activity;
        assert!(seen.since_received.is_some() && seen.has_sent, "{seen:?}");
        client.shutdown(Shutdown::Write).expect("still open");
        let half = diag.refresh(&connection).expect_err("no request can come of it any more");
        assert_eq!(half.kind(), io::ErrorKind::NotFound);
        drop((client, server, listener));
        let error = diag.refresh(&connection).expect_err("it has ended");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
