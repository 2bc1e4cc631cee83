//! Shell: datagrams and their answers, from the present namespace and cgroup; and the server that answers them.

use std::{
    io::{self, IoSlice, IoSliceMut},
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket},
    os::fd::AsRawFd as _,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use nix::{
    libc,
    sys::socket::{
        ControlMessage, ControlMessageOwned, MsgFlags, SockaddrIn, recvmsg, sendmsg, setsockopt,
        sockopt,
    },
};

use super::{MeasuredTimes, cpu_us};

/// Content of each datagram: as long as a short DNS query.
const QUERY: [u8; 32] = [b'?'; 32];
/// Space for a received datagram, in bytes.
const DATAGRAM_BYTES: usize = 512;
/// Timeout of an answer that has to come.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Measurement of the hidden command `xtask measure datagrams`.
#[derive(Clone, Debug, clap::Subcommand)]
pub(crate) enum DatagramMeasureCommand {
    /// Send datagrams to the addresses in turn, each after the answer to the previous one
    Exchange {
        #[arg(long, value_delimiter = ',', required = true)]
        addr: Vec<SocketAddr>,
        #[arg(long)]
        count: usize,
        #[arg(long, value_enum)]
        socket: DatagramSocketKind,
        /// Send each datagram from a new socket; a time begins before its connect, if there is one
        #[arg(long)]
        new_sockets: bool,
    },
    /// Answer each datagram from the address that it was sent to, until killed
    Answer {
        #[arg(long)]
        addr: SocketAddrV4,
    },
}

/// Kind of a UDP socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum DatagramSocketKind {
    /// Connected: its datagrams name no address.
    Connected,
    /// Not connected: each datagram names its address.
    Unconnected,
}

/// Runs the hidden command `xtask measure datagrams`.
pub(crate) fn run(what: &DatagramMeasureCommand) -> Result<()> {
    match what {
        DatagramMeasureCommand::Exchange { addr, count, socket, new_sockets } => {
            let times = if *new_sockets {
                measure_new_sockets(addr, *count, *socket)?
            } else {
                measure_kept_sockets(addr, *count, *socket)?
            };
            println!("{}", serde_json::to_string(&times)?);
            Ok(())
        }
        DatagramMeasureCommand::Answer { addr } => answer_datagrams(*addr),
    }
}

/// Returns true if the address answers a datagram in time. An error of the network ends the wait.
pub(super) fn is_answered(addr: SocketAddr, timeout: Duration) -> bool {
    let ask = || -> io::Result<()> {
        let socket = open_socket(timeout)?;
        // Otherwise the socket ignores that a network or host is unreachable, and waits until the timeout.
        setsockopt(&socket, sockopt::Ipv4RecvErr, &true)?;
        socket.connect(addr)?;
        exchange(&socket, addr, DatagramSocketKind::Connected)
    };
    ask().is_ok()
}

/// Measures exchanges of sockets that stay open, one for each address.
fn measure_kept_sockets(
    addresses: &[SocketAddr],
    count: usize,
    kind: DatagramSocketKind,
) -> Result<MeasuredTimes> {
    let mut sockets = Vec::new();
    for addr in addresses {
        let socket = open_socket(ANSWER_TIMEOUT)?;
        // The first exchange of a socket is not measured: it chooses the endpoint.
        exchange_first(&socket, *addr, kind).with_context(|| format!("no answer of {addr}"))?;
        sockets.push((socket, *addr));
    }
    let (cpu, started, mut times) = (cpu_us(), Instant::now(), Vec::with_capacity(count));
    for (socket, addr) in sockets.iter().cycle().take(count) {
        let begin = Instant::now();
        exchange(socket, *addr, kind).with_context(|| format!("no answer of {addr}"))?;
        times.push(begin.elapsed());
    }
    Ok(MeasuredTimes::from_times(times, started.elapsed(), cpu_us() - cpu))
}

/// Measures the first exchange of one new socket after another, as resolvers send their queries.
fn measure_new_sockets(
    addresses: &[SocketAddr],
    count: usize,
    kind: DatagramSocketKind,
) -> Result<MeasuredTimes> {
    let (cpu, started, mut times) = (cpu_us(), Instant::now(), Vec::with_capacity(count));
    for addr in addresses.iter().cycle().take(count) {
        let socket = open_socket(ANSWER_TIMEOUT)?;
        let begin = Instant::now();
        exchange_first(&socket, *addr, kind).with_context(|| format!("no answer of {addr}"))?;
        times.push(begin.elapsed());
    }
    Ok(MeasuredTimes::from_times(times, started.elapsed(), cpu_us() - cpu))
}

fn open_socket(timeout: Duration) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.set_read_timeout(Some(timeout))?;
    Ok(socket)
}

/// Connects the socket if it is of that kind, then sends a datagram and waits for its answer.
fn exchange_first(
    socket: &UdpSocket,
    addr: SocketAddr,
    kind: DatagramSocketKind,
) -> io::Result<()> {
    if kind == DatagramSocketKind::Connected {
        socket.connect(addr)?;
    }
    exchange(socket, addr, kind)
}

/// Sends a datagram and waits for its answer, which must come from the same address.
fn exchange(socket: &UdpSocket, addr: SocketAddr, kind: DatagramSocketKind) -> io::Result<()> {
    match kind {
        DatagramSocketKind::Connected => socket.send(&QUERY)?,
        DatagramSocketKind::Unconnected => socket.send_to(&QUERY, addr)?,
    };
    let mut answer = [0; DATAGRAM_BYTES];
    let (_length, source) = socket.recv_from(&mut answer)?;
    if source != addr {
        return Err(io::Error::other(format!("the answer came from {source}")));
    }
    Ok(())
}

/// Returns each datagram to its sender, from the address that it was sent to.
fn answer_datagrams(addr: SocketAddrV4) -> Result<()> {
    let socket = UdpSocket::bind(addr).with_context(|| format!("cannot listen on {addr}"))?;
    setsockopt(&socket, sockopt::Ipv4PacketInfo, &true).context("cannot ask for addresses")?;
    let mut control = nix::cmsg_space!(libc::in_pktinfo);
    loop {
        answer_next(&socket, &mut control).context("cannot receive datagrams")?;
    }
}

/// Answers the next datagram.
fn answer_next(socket: &UdpSocket, control: &mut [u8]) -> io::Result<()> {
    let mut datagram = [0; DATAGRAM_BYTES];
    let (length, client, asked) = {
        let mut parts = [IoSliceMut::new(&mut datagram)];
        let flags = MsgFlags::empty();
        let received = recvmsg::<SockaddrIn>(socket.as_raw_fd(), &mut parts, Some(control), flags)?;
        let asked = received.cmsgs()?.find_map(|message| match message {
            ControlMessageOwned::Ipv4PacketInfo(info) => Some(info.ipi_addr),
            _ => None,
        });
        (received.bytes, received.address, asked)
    };
    let (Some(client), Some(asked)) = (client, asked) else { return Ok(()) };
    // The socket is bound to all addresses, so without this the kernel would choose the source of the answer.
    let info = libc::in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: asked, ipi_addr: asked };
    let (content, source) =
        ([IoSlice::new(&datagram[..length])], [ControlMessage::Ipv4PacketInfo(&info)]);
    // A client that has left needs no answer.
    let _client_left =
        sendmsg(socket.as_raw_fd(), &content, &source, MsgFlags::empty(), Some(&client));
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Starts a server of all loopback addresses, and returns its port.
    fn start_server() -> u16 {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        setsockopt(&socket, sockopt::Ipv4PacketInfo, &true).unwrap();
        let port = socket.local_addr().unwrap().port();
        thread::spawn(move || {
            let mut control = nix::cmsg_space!(libc::in_pktinfo);
            while answer_next(&socket, &mut control).is_ok() {}
        });
        port
    }

    #[test]
    fn answers_come_from_the_address_that_was_asked() {
        let port = start_server();
        let addresses = [[127, 0, 0, 2], [127, 0, 0, 3]].map(|ip| SocketAddr::from((ip, port)));
        for kind in [DatagramSocketKind::Connected, DatagramSocketKind::Unconnected] {
            let kept = measure_kept_sockets(&addresses, 6, kind).unwrap();
            let new = measure_new_sockets(&addresses, 5, kind).unwrap();
            assert_eq!((kept.count, new.count), (6, 5));
        }
        assert!(is_answered(addresses[1], ANSWER_TIMEOUT));
    }

    #[test]
    fn an_answer_of_another_address_is_an_error() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        let other = UdpSocket::bind("127.0.0.1:0").unwrap();
        other.send_to(b"!", client.local_addr().unwrap()).unwrap();
        let kind = DatagramSocketKind::Unconnected;
        let error = exchange(&client, server.local_addr().unwrap(), kind).unwrap_err();
        assert!(error.to_string().contains("the answer came from"), "{error}");
    }

    #[test]
    fn a_closed_port_answers_nothing() {
        let closed = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert!(!is_answered(closed, ANSWER_TIMEOUT));
    }
}
