//! Shell: a TCP client in user space, whose segments and their content the test chooses.
//!
//! Its packets enter the pod's namespace through a TUN device that the test reads and writes. It implements only the
//! parts of TCP that a client with one connection needs, without retransmissions.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::{
    fixture::{NetnsFixture, SERVING_PORT, in_netns, run_ip},
    sys,
};

/// Addresses of the pod's end of the device, and of the client's.
const POD: [u8; 4] = [10, 98, 0, 1];
const CLIENT: [u8; 4] = [10, 98, 0, 2];
/// Timeout of every response.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);
const DEVICE: &str = "tun0";

pub(super) const FIN: u8 = 1;
pub(super) const SYN: u8 = 2;
pub(super) const RST: u8 = 4;
pub(super) const PSH: u8 = 8;
pub(super) const ACK: u8 = 16;

/// A TUN device in a pod's namespace, with this program at the other end.
pub(super) struct TunDevice {
    file: File,
}

impl TunDevice {
    pub(super) fn new(pod: &NetnsFixture) -> Self {
        let file =
            in_netns(&pod.netns, || sys::open_tun(DEVICE).expect("root may make one (CONFIG_TUN)"));
        let [pod_end, client_end] =
            [POD, CLIENT].map(|it| std::net::Ipv4Addr::from(it).to_string());
        let netns = &pod.netns;
        run_ip(&["-n", netns, "addr", "add", &pod_end, "peer", &client_end, "dev", DEVICE]);
        run_ip(&["-n", netns, "link", "set", DEVICE, "up"]);
        Self { file }
    }

    fn send(&self, packet: &[u8]) {
        let written = (&self.file).write(packet).expect("the device is up");
        assert_eq!(written, packet.len());
    }

    /// Reads the next packet; `None` after the timeout.
    fn receive(&self, timeout: Duration) -> Option<Vec<u8>> {
        let mut ready = [PollFd::new(self.file.as_fd(), PollFlags::POLLIN)];
        let timeout = PollTimeout::try_from(timeout).expect("short");
        if poll(&mut ready, timeout).expect("a device") == 0 {
            return None;
        }
        let mut packet = vec![0; 65_536];
        let count = (&self.file).read(&mut packet).expect("it is ready");
        packet.truncate(count);
        Some(packet)
    }
}

/// One segment of the client.
#[derive(Clone, Debug)]
pub(super) struct TcpSegment<'a> {
    pub(super) seq: u32,
    pub(super) ack: u32,
    pub(super) flags: u8,
    pub(super) window: u16,
    pub(super) data: &'a [u8],
    /// True if the checksum is to be wrong.
    pub(super) has_bad_checksum: bool,
}

impl TcpSegment<'_> {
    fn packet(&self, port: u16) -> Vec<u8> {
        let mut tcp = Vec::with_capacity(40 + self.data.len());
        tcp.extend([port, SERVING_PORT].map(u16::to_be_bytes).as_flattened());
        tcp.extend([self.seq, self.ack].map(u32::to_be_bytes).as_flattened());
        tcp.extend([5 << 4, self.flags]);
        tcp.extend(self.window.to_be_bytes());
        tcp.extend([0; 4]);
        tcp.extend(self.data);
        let length = tcp.len() as u16;
        let [high, low] = length.to_be_bytes();
        let pseudo = [&CLIENT[..], &POD, &[0, 6, high, low]].concat();
        let sum = checksum(&[&pseudo, &tcp]) ^ u16::from(self.has_bad_checksum);
        tcp[16..18].copy_from_slice(&sum.to_be_bytes());

        let mut packet = vec![0x45, 0];
        packet.extend((20 + length).to_be_bytes());
        packet.extend([0, 0, 0, 0, 64, 6, 0, 0]);
        packet.extend([CLIENT, POD].as_flattened());
        let sum = checksum(&[&packet]);
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
        packet.extend(tcp);
        packet
    }
}

/// Computes the Internet checksum (RFC 1071). Only the last part may have an odd length.
fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let sum: u32 =
        words.map(|word| u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0))).sum();
    let sum = (sum & 0xFFFF) + (sum >> 16);
    !((sum & 0xFFFF) + (sum >> 16)) as u16
}

/// Client's end of one connection.
pub(super) struct UserspaceTcpClient<'a> {
    tun: &'a TunDevice,
    port: u16,
    /// Sequence number of the first byte that the client sends.
    initial_seq: u32,
    /// Sequence number of the next expected byte.
    next_expected: u32,
    /// Number of bytes that the server has acknowledged, without the SYN.
    pub(super) acked: u32,
    /// Window that the server has offered last, in bytes.
    pub(super) server_window: u32,
    window_scale: u8,
    /// Window that the client offers.
    pub(super) window: u16,
    /// Bytes received in order so far.
    pub(super) received: Vec<u8>,
    /// End of the connection by the server; `None` while it is open.
    pub(super) closed_by: Option<ServerClose>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServerClose {
    Fin,
    Reset,
}

impl<'a> UserspaceTcpClient<'a> {
    /// Establishes a connection from `port`.
    pub(super) fn connect(tun: &'a TunDevice, port: u16) -> Self {
        let mut client = Self::prepare(tun, port);
        client.send_syn(b"");
        client.establish();
        client
    }

    /// Prepares a connection without sending its first packet.
    pub(super) fn prepare(tun: &'a TunDevice, port: u16) -> Self {
        // Near the end of the sequence space for some ports, so that numbers wrap around.
        let initial_seq =
            u32::from(port).wrapping_mul(0x9E37_79B1) | 0xFFFF_0000 & u32::from(port) << 31;
        Self {
            tun,
            port,
            initial_seq,
            next_expected: 0,
            acked: 0,
            server_window: 0,
            window_scale: 0,
            window: u16::MAX,
            received: Vec::new(),
            closed_by: None,
        }
    }

    /// Sends the first packet, with or without data.
    pub(super) fn send_syn(&self, data: &[u8]) {
        let seq = self.initial_seq.wrapping_sub(1);
        self.send(&TcpSegment { seq, ack: 0, flags: SYN, ..self.segment(0, data) });
    }

    /// Waits for the response to the first packet.
    pub(super) fn wait_syn_ack(&mut self) {
        let until = Instant::now() + RESPONSE_TIMEOUT;
        while self.next_expected == 0 {
            assert!(Instant::now() < until, "no reply");
            self.receive_packet(RESPONSE_TIMEOUT);
        }
    }

    /// Waits for the response to the first packet, and acknowledges it.
    pub(super) fn establish(&mut self) {
        self.wait_syn_ack();
        self.send_data(0, b"");
    }

    /// Valid segment with the data that begins at byte `offset`.
    pub(super) fn segment<'b>(&self, offset: usize, data: &'b [u8]) -> TcpSegment<'b> {
        let flags = if data.is_empty() { ACK } else { ACK | PSH };
        let seq = self.initial_seq.wrapping_add(offset as u32);
        TcpSegment {
            seq,
            ack: self.next_expected,
            flags,
            window: self.window,
            data,
            has_bad_checksum: false,
        }
    }

    pub(super) fn send(&self, segment: &TcpSegment<'_>) {
        self.tun.send(&segment.packet(self.port));
    }

    /// Sends `data` as the bytes from `offset` on.
    pub(super) fn send_data(&self, offset: usize, data: &[u8]) {
        self.send(&self.segment(offset, data));
    }

    /// Sends FIN after `offset` bytes, of which the last are `data`.
    pub(super) fn send_fin(&self, offset: usize, data: &[u8]) {
        let segment = self.segment(offset - data.len(), data);
        self.send(&TcpSegment { flags: segment.flags | FIN, ..segment });
    }

    /// Receives and acknowledges packets until `expected` has occurred `times` times.
    #[track_caller]
    pub(super) fn receive_until(&mut self, times: u64, expected: &str) {
        let until = Instant::now() + RESPONSE_TIMEOUT;
        let occurrences =
            |it: &[u8]| it.windows(expected.len()).filter(|it| *it == expected.as_bytes()).count();
        while (occurrences(&self.received) as u64) < times {
            let received = self.received.escape_ascii();
            assert!(
                Instant::now() < until && self.closed_by.is_none(),
                "{:?}: {received}",
                self.closed_by
            );
            self.receive_packet(RESPONSE_TIMEOUT);
        }
    }

    /// Receives packets until the server has ended the connection.
    #[track_caller]
    pub(super) fn receive_until_closed(&mut self) -> ServerClose {
        let until = Instant::now() + RESPONSE_TIMEOUT;
        loop {
            if let Some(ended) = self.closed_by {
                return ended;
            }
            assert!(Instant::now() < until, "the connection is not established");
            self.receive_packet(RESPONSE_TIMEOUT);
        }
    }

    /// Receives packets until none arrives for as long as `timeout`.
    pub(super) fn receive_until_quiet(&mut self, timeout: Duration) {
        while self.receive_packet(timeout) {}
    }

    /// Receives one packet. Returns false if none arrives in time.
    fn receive_packet(&mut self, timeout: Duration) -> bool {
        let Some(packet) = self.tun.receive(timeout) else { return false };
        let is_ours = packet[0] >> 4 == 4 && packet[9] == 6;
        if is_ours && packet.get(22..24) == Some(&self.port.to_be_bytes()) {
            self.handle_segment(&packet[20..]);
        }
        true
    }

    fn handle_segment(&mut self, tcp: &[u8]) {
        let word = |offset: usize| {
            u32::from_be_bytes([tcp[offset], tcp[offset + 1], tcp[offset + 2], tcp[offset + 3]])
        };
        let (seq, ack, flags) = (word(4), word(8), tcp[13]);
        let (header, window) = (usize::from(tcp[12] >> 4) * 4, word(12) & 0xFFFF);
        if flags & RST != 0 {
            self.closed_by = Some(ServerClose::Reset);
            return;
        }
        self.server_window = window << self.window_scale;
        let acked = ack.wrapping_sub(self.initial_seq);
        if flags & ACK != 0 && acked.wrapping_sub(self.acked) as i32 > 0 {
            self.acked = acked;
        }
        if flags & SYN != 0 {
            self.next_expected = seq.wrapping_add(1);
            return;
        }
        let data = &tcp[header..];
        if seq == self.next_expected {
            self.received.extend_from_slice(data);
            self.next_expected = self.next_expected.wrapping_add(data.len() as u32);
            if flags & FIN != 0 {
                self.next_expected = self.next_expected.wrapping_add(1);
                self.closed_by = Some(ServerClose::Fin);
            }
        }
        if !data.is_empty() || flags & FIN != 0 {
            self.send_data(self.acked as usize, b"");
        }
    }
}
