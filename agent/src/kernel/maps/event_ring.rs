//! Shell: ring of the eBPF programs' events.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    path::Path,
};

use aya::maps::{Map, MapData, RingBuf};
use datapath::abi::{self, maps};

use super::{KernelMapError, open_error, open_map, word};

/// The event ring. Wrap it in `AsyncFd` and call [`next`](Self::next) until `None` when readable.
pub struct KernelEventRing {
    ring: RingBuf<MapData>,
    /// Events of idle connections that were read and not taken yet.
    idle: Vec<abi::IdleEvent>,
}

impl std::fmt::Debug for KernelEventRing {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("KernelEventRing")
    }
}

impl KernelEventRing {
    /// Opens the ring that is pinned in `pins`. Only one reader may exist.
    pub fn open(pins: &Path) -> Result<Self, KernelMapError> {
        let map = Map::RingBuf(open_map(pins, maps::EVENTS)?);
        let ring = RingBuf::try_from(map);
        let ring = ring.map(|ring| Self { ring, idle: Vec::new() });
        ring.map_err(|source| open_error(pins, maps::EVENTS, source))
    }

    /// Returns the next event, if there is one. One of an idle connection has only kind, port and namespace here. As a
    /// whole it can be [taken](Self::take_idle) afterwards. Bytes of another size are skipped, as events are hints.
    ///
    /// One event a call, so that a caller can bound the time that it spends on busy pods.
    #[allow(
        clippy::should_implement_trait,
        reason = "an iterator would seem to end; this one goes on when the ring fills again"
    )]
    pub fn next(&mut self) -> Option<abi::KernelEvent> {
        while let Some(item) = self.ring.next() {
            if let Some(event) = decode_event(&item) {
                return Some(event);
            }
            if let Some(event) = decode_idle_event(&item) {
                self.idle.push(event);
                return Some(summarize_idle_event(&event));
            }
        }
        None
    }

    /// Returns the events of idle connections that were read since the last call, the oldest first.
    pub fn take_idle(&mut self) -> Vec<abi::IdleEvent> {
        std::mem::take(&mut self.idle)
    }
}

impl AsFd for KernelEventRing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}

impl AsRawFd for KernelEventRing {
    fn as_raw_fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }
}

/// Decodes an event from its bytes; `None` if they have another length.
pub fn decode_event(bytes: &[u8]) -> Option<abi::KernelEvent> {
    let bytes: &[u8; 24] = bytes.try_into().ok()?;
    Some(abi::KernelEvent {
        kind: half_word(bytes, 0),
        port_or_slot: half_word(bytes, 4),
        netns_cookie: word(&bytes[8..16]),
        at_ns: word(&bytes[16..24]),
    })
}

/// Decodes an event of an idle connection from its bytes; `None` if they have another length or kind.
fn decode_idle_event(bytes: &[u8]) -> Option<abi::IdleEvent> {
    let bytes: &[u8; 48] = bytes.try_into().ok()?;
    let kind = half_word(bytes, 0);
    (kind == abi::EVENT_IDLE).then(|| abi::IdleEvent {
        kind,
        client_port: half_word(bytes, 4),
        netns_cookie: word(&bytes[8..16]),
        client: [16, 20, 24, 28].map(|at| half_word(bytes, at)),
        pod_port: half_word(bytes, 32),
        client_seq: half_word(bytes, 36),
        pod_seq: half_word(bytes, 40),
        reserved: 0,
    })
}

/// Returns the part of an event of an idle connection that other events have as well.
fn summarize_idle_event(event: &abi::IdleEvent) -> abi::KernelEvent {
    abi::KernelEvent {
        kind: event.kind,
        port_or_slot: event.pod_port,
        netns_cookie: event.netns_cookie,
        at_ns: 0,
    }
}

/// Returns four bytes as the number that they are in memory.
fn half_word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_decoded_by_its_length_and_kind() {
        let mut bytes = [0; 48];
        bytes[..4].copy_from_slice(&abi::EVENT_IDLE.to_ne_bytes());
        bytes[4..8].copy_from_slice(&4_711_u32.to_ne_bytes());
        bytes[8..16].copy_from_slice(&7_u64.to_ne_bytes());
        bytes[28..32].copy_from_slice(&[10, 0, 0, 9]);
        bytes[32..36].copy_from_slice(&80_u32.to_ne_bytes());
        bytes[36..40].copy_from_slice(&u32::MAX.to_ne_bytes());
        bytes[40..44].copy_from_slice(&5_u32.to_ne_bytes());
        let expected = abi::IdleEvent {
            kind: abi::EVENT_IDLE,
            client_port: 4_711,
            netns_cookie: 7,
            client: [0, 0, 0, u32::from_ne_bytes([10, 0, 0, 9])],
            pod_port: 80,
            client_seq: u32::MAX,
            pod_seq: 5,
            reserved: 0,
        };
        assert_eq!(decode_idle_event(&bytes), Some(expected));
        assert_eq!(decode_event(&bytes), None, "another length");
        let summary = summarize_idle_event(&expected);
        assert_eq!((summary.kind, summary.port_or_slot), (abi::EVENT_IDLE, 80));
        assert_eq!(decode_idle_event(&bytes[..24]), None, "another length");
        bytes[0] ^= 0xFF;
        assert_eq!(decode_idle_event(&bytes), None, "another kind");
    }
}
