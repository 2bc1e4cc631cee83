//! Pure: layout of the requests to close clients' connections under their sockets' locks.

use core::mem::size_of;

/// Client connection to close if it still matches these numbers: value of `ENDING`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CloseRequest {
    /// Client's bytes that the other end had acknowledged (`tcpi_bytes_acked`). With [`CLOSE_AT_POSITION`], the sequence
    /// number of the client's next byte.
    pub bytes_acked: u64,
    /// Bytes that had come from the other end (`tcpi_bytes_received`). With [`CLOSE_AT_POSITION`], the sequence number of
    /// the other end's next byte.
    pub bytes_received: u64,
    /// Result: one of `CLOSE_*`, written by the eBPF programs.
    pub result: u64,
}
const _: () = assert!(size_of::<CloseRequest>() == 24);

/// Result: the walk has not found the connection, which has closed by itself.
pub const CLOSE_NOT_FOUND: u64 = 0;
/// Result: the eBPF program has closed the connection.
pub const CLOSE_DONE: u64 = 1;
/// Result: the connection stays open, since it is in use or has been used since.
pub const CLOSE_SKIPPED: u64 = 2;
/// Initial value instead of [`CLOSE_NOT_FOUND`]: close the connection if it stands at these two sequence numbers.
/// Programs that do not know the value close nothing.
pub const CLOSE_AT_POSITION: u64 = 3;
/// Result: the connection has not come to its position yet. Its last bytes are under way or unread.
pub const CLOSE_NOT_REACHED: u64 = 4;
