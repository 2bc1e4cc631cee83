//! Pure: places of fields and flags in the running kernel's own structures, which the agent reads from its BTF.

use core::mem::size_of;

/// Offsets of fields in the kernel's sockets, in bytes from the socket's begin. Kernels differ; the agent reads them
/// from the running kernel's BTF.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SockFieldOffsets {
    /// Offset of the TCP state (`u8`).
    pub state: u16,
    /// Offset of the length of the backlog: segments that came while the socket was locked (`i32`).
    pub backlog: u16,
    /// Offset of the sequence number behind the last byte that the application wrote (`u32`).
    pub write_seq: u16,
    /// Offset of the first sequence number that is not acknowledged (`u32`).
    pub snd_una: u16,
    /// Offset of the sequence number that is expected next (`u32`).
    pub rcv_nxt: u16,
    /// Offset of the first sequence number that the application has not read (`u32`).
    pub copied_seq: u16,
    /// Offset of the sequence number of the last segment that acknowledged or carried anything (`u32`).
    pub snd_wl1: u16,
    /// Offset of the number of bytes acknowledged (`u64`).
    pub bytes_acked: u16,
    /// Offset of the number of bytes received (`u64`).
    pub bytes_received: u16,
}
const _: () = assert!(size_of::<SockFieldOffsets>() == 18);

/// Bytes from a socket's begin that hold all the fields that the programs read there.
pub const SOCK_HEAD_BYTES: usize = 32;

/// Position of a single bit among the first bytes of a socket.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketBit {
    /// Index of the byte, below [`SOCK_HEAD_BYTES`].
    pub byte_index: u8,
    /// Mask of the bit in that byte; 0: there is none.
    pub mask: u8,
}
const _: () = assert!(size_of::<SocketBit>() == 2);

/// Flag of a task, and the place of its flags.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TaskFlag {
    /// Mask of the flag; 0: it is not known.
    pub mask: u32,
    /// Offset of the flags (`u32`) from the begin of the kernel's `task_struct`, in bytes.
    pub offset: u16,
    /// Padding that is always zero.
    pub reserved: u16,
}
const _: () = assert!(size_of::<TaskFlag>() == 8);

/// Flag of kernel threads among a task's flags (`PF_KTHREAD`).
pub const KERNEL_THREAD_FLAG: u32 = 0x0020_0000;
