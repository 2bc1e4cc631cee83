//! Shell: a client of TCP in user space: which segments it sends, and what stands in them, is up to the test.
//!
//! Its packets enter the pod's namespace through a device that the test reads and writes. Of TCP it knows only what a
//! client of one connection at a time needs; nothing is sent again by itself.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::{
    bed::{Place, SERVING, inside, ip},
    sys,
};

/// The pod's end of the device, and the client's.
const POD: [u8; 4] = [10, 98, 0, 1];
const CLIENT: [u8; 4] = [10, 98, 0, 2];
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(20);
const NAME: &str = "wire";

pub(super) const FIN: u8 = 1;
pub(super) const SYN: u8 = 2;
pub(super) const RST: u8 = 4;
pub(super) const PSH: u8 = 8;
pub(super) const ACK: u8 = 16;

/// A device in a pod's namespace, at whose other end is this program.
pub(super) struct Wire {
    file: File,
}

impl Wire {
    pub(super) fn new(pod: &Place) -> Self {
        let file = inside(&pod.netns, || sys::tun(NAME).expect("root may make one (CONFIG_TUN)"));
        let [pod_end, client_end] =
            [POD, CLIENT].map(|it| std::net::Ipv4Addr::from(it).to_string());
        let netns = &pod.netns;
        ip(&["-n", netns, "addr", "add", &pod_end, "peer", &client_end, "dev", NAME]);
        ip(&["-n", netns, "link", "set", NAME, "up"]);
        Self { file }
    }

    fn send(&self, packet: &[u8]) {
        let written = (&self.file).write(packet).expect("the device is up");
        assert_eq!(written, packet.len());
    }

    /// The next packet, if one comes in time.
    fn next(&self, patience: Duration) -> Option<Vec<u8>> {
        let mut ready = [PollFd::new(self.file.as_fd(), PollFlags::POLLIN)];
        let patience = PollTimeout::try_from(patience).expect("short");
        if poll(&mut ready, patience).expect("a device") == 0 {
            return None;
        }
        let mut packet = vec![0; 65_536];
        let count = (&self.file).read(&mut packet).expect("it is ready");
        packet.truncate(count);
        Some(packet)
    }
}

/// One segment of the client's.
#[derive(Clone, Debug)]
pub(super) struct Segment<'a> {
    pub(super) seq: u32,
    pub(super) ack: u32,
    pub(super) flags: u8,
    pub(super) window: u16,
    pub(super) data: &'a [u8],
    /// Whether its checksum is wrong.
    pub(super) is_spoilt: bool,
}

impl Segment<'_> {
    fn packet(&self, port: u16) -> Vec<u8> {
        let mut tcp = Vec::with_capacity(40 + self.data.len());
        tcp.extend([port, SERVING].map(u16::to_be_bytes).as_flattened());
        tcp.extend([self.seq, self.ack].map(u32::to_be_bytes).as_flattened());
        tcp.extend([5 << 4, self.flags]);
        tcp.extend(self.window.to_be_bytes());
        tcp.extend([0; 4]);
        tcp.extend(self.data);
        let length = tcp.len() as u16;
        let [high, low] = length.to_be_bytes();
        let pseudo = [&CLIENT[..], &POD, &[0, 6, high, low]].concat();
        let sum = checksum(&[&pseudo, &tcp]) ^ u16::from(self.is_spoilt);
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

/// The Internet's checksum (RFC 1071). Only the last part may have an odd length.
fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let sum: u32 =
        words.map(|word| u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0))).sum();
    let sum = (sum & 0xFFFF) + (sum >> 16);
    !((sum & 0xFFFF) + (sum >> 16)) as u16
}

/// The client's end of one connection.
pub(super) struct Peer<'a> {
    wire: &'a Wire,
    port: u16,
    /// Sequence number of the first byte that the client sends.
    begin: u32,
    /// Of the next byte that is expected.
    expected: u32,
    /// Bytes that the other end has acknowledged, without the one of the SYN.
    pub(super) acked: u32,
    /// The window that it has offered last, in bytes.
    pub(super) offered: u32,
    scale: u8,
    /// The window that we offer.
    pub(super) window: u16,
    /// What has come in order.
    pub(super) received: Vec<u8>,
    /// How the other end has ended it.
    pub(super) ended: Option<Ended>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Fin,
    Reset,
}

impl<'a> Peer<'a> {
    /// Establishes a connection from `port`.
    pub(super) fn connect(wire: &'a Wire, port: u16) -> Self {
        let mut peer = Self::begin(wire, port);
        peer.syn(b"");
        peer.establish();
        peer
    }

    /// One whose first packet is still to be sent.
    pub(super) fn begin(wire: &'a Wire, port: u16) -> Self {
        // Near the end of the numbers for some, which then begin anew.
        let begin = u32::from(port).wrapping_mul(0x9E37_79B1) | 0xFFFF_0000 & u32::from(port) << 31;
        Self {
            wire,
            port,
            begin,
            expected: 0,
            acked: 0,
            offered: 0,
            scale: 0,
            window: u16::MAX,
            received: Vec::new(),
            ended: None,
        }
    }

    /// Sends the first packet, with data in it or not.
    pub(super) fn syn(&self, data: &[u8]) {
        let seq = self.begin.wrapping_sub(1);
        self.send(&Segment { seq, ack: 0, flags: SYN, ..self.segment(0, data) });
    }

    /// Waits for the answer to the first packet.
    pub(super) fn answered(&mut self) {
        let until = Instant::now() + PATIENCE;
        while self.expected == 0 {
            assert!(Instant::now() < until, "no answer");
            self.take(PATIENCE);
        }
    }

    /// The same, and acknowledges it.
    pub(super) fn establish(&mut self) {
        self.answered();
        self.put(0, b"");
    }

    /// A segment of the data that begins with byte `at`, as it should be.
    pub(super) fn segment<'b>(&self, at: usize, data: &'b [u8]) -> Segment<'b> {
        let flags = if data.is_empty() { ACK } else { ACK | PSH };
        let seq = self.begin.wrapping_add(at as u32);
        Segment { seq, ack: self.expected, flags, window: self.window, data, is_spoilt: false }
    }

    pub(super) fn send(&self, segment: &Segment<'_>) {
        self.wire.send(&segment.packet(self.port));
    }

    /// Sends bytes from `at` on.
    pub(super) fn put(&self, at: usize, data: &[u8]) {
        self.send(&self.segment(at, data));
    }

    /// Ends this side, behind `at` bytes, the last of which are `data`.
    pub(super) fn finish(&self, at: usize, data: &[u8]) {
        let segment = self.segment(at - data.len(), data);
        self.send(&Segment { flags: segment.flags | FIN, ..segment });
    }

    /// Takes in what comes until `what` has come so many times, and acknowledges it.
    #[track_caller]
    pub(super) fn until(&mut self, times: u64, what: &str) {
        let until = Instant::now() + PATIENCE;
        let came = |it: &[u8]| it.windows(what.len()).filter(|it| *it == what.as_bytes()).count();
        while (came(&self.received) as u64) < times {
            let seen = self.received.escape_ascii();
            assert!(Instant::now() < until && self.ended.is_none(), "{:?}: {seen}", self.ended);
            self.take(PATIENCE);
        }
    }

    /// Takes in what comes until the other end ends it.
    #[track_caller]
    pub(super) fn until_ended(&mut self) -> Ended {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(ended) = self.ended {
                return ended;
            }
            assert!(Instant::now() < until, "it stands");
            self.take(PATIENCE);
        }
    }

    /// Takes in what comes until nothing more does for as long as `patience`.
    pub(super) fn settle(&mut self, patience: Duration) {
        while self.take(patience) {}
    }

    /// Takes in one packet. Returns whether one came.
    fn take(&mut self, patience: Duration) -> bool {
        let Some(packet) = self.wire.next(patience) else { return false };
        let is_ours = packet[0] >> 4 == 4 && packet[9] == 6;
        if is_ours && packet.get(22..24) == Some(&self.port.to_be_bytes()) {
            self.follow(&packet[20..]);
        }
        true
    }

    fn follow(&mut self, tcp: &[u8]) {
        let word = |at: usize| u32::from_be_bytes([tcp[at], tcp[at + 1], tcp[at + 2], tcp[at + 3]]);
        let (seq, ack, flags) = (word(4), word(8), tcp[13]);
        let (header, window) = (usize::from(tcp[12] >> 4) * 4, word(12) & 0xFFFF);
        if flags & RST != 0 {
            self.ended = Some(Ended::Reset);
            return;
        }
        self.offered = window << self.scale;
        let acked = ack.wrapping_sub(self.begin);
        if flags & ACK != 0 && acked.wrapping_sub(self.acked) as i32 > 0 {
            self.acked = acked;
        }
        if flags & SYN != 0 {
            self.expected = seq.wrapping_add(1);
            return;
        }
        let data = &tcp[header..];
        if seq == self.expected {
            self.received.extend_from_slice(data);
            self.expected = self.expected.wrapping_add(data.len() as u32);
            if flags & FIN != 0 {
                self.expected = self.expected.wrapping_add(1);
                self.ended = Some(Ended::Fin);
            }
        }
        if !data.is_empty() || flags & FIN != 0 {
            self.put(self.acked as usize, b"");
        }
    }
}
