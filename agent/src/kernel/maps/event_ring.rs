//! Shell: ring of the eBPF programs' events.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    path::Path,
};

use aya::maps::{Map, MapData, RingBuf};
use datapath::abi::{self, maps};

use super::{KernelMapError, open_error, open_map, word};

/// The event ring. Wrap it in `AsyncFd` and call [`next`](Self::next) until `None` when readable.
pub struct KernelEventRing(RingBuf<MapData>);

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
        ring.map(Self).map_err(|source| open_error(pins, maps::EVENTS, source))
    }

    /// Returns the next event, if there is one. Bytes of another size are skipped, as events are hints.
    #[allow(
        clippy::should_implement_trait,
        reason = "an iterator would seem to end; this one goes on when the ring fills again"
    )]
    pub fn next(&mut self) -> Option<abi::KernelEvent> {
        while let Some(item) = self.0.next() {
            if let Some(event) = decode_event(&item) {
                return Some(event);
            }
        }
        None
    }
}

impl AsFd for KernelEventRing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for KernelEventRing {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Decodes an event from its bytes; `None` if they have another length.
pub fn decode_event(bytes: &[u8]) -> Option<abi::KernelEvent> {
    let bytes: &[u8; 24] = bytes.try_into().ok()?;
    let u32_at =
        |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    Some(abi::KernelEvent {
        kind: u32_at(0),
        port_or_slot: u32_at(4),
        netns_cookie: word(&bytes[8..16]),
        at_ns: word(&bytes[16..24]),
    })
}
