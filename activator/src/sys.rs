//! Shell: what only the system's own calls tell.

use std::{io, os::fd::AsRawFd as _};

use tokio::net::TcpStream;

/// Bytes that the peer's kernel has taken (`tcpi_bytes_acked`, `include/uapi/linux/tcp.h`).
pub(crate) fn acked(stream: &TcpStream) -> io::Result<u64> {
    const AT: usize = 120;
    let mut info = [0_u64; 32];
    let mut length = libc::socklen_t::try_from(size_of_val(&info)).map_err(io::Error::other)?;
    // SAFETY: the kernel writes at most `length` bytes to `info`, which has as many.
    let failed = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if failed != 0 {
        return Err(io::Error::last_os_error());
    }
    let known = usize::try_from(length).unwrap_or(0);
    info.get(AT / 8).copied().filter(|_| known >= AT + 8).ok_or(io::ErrorKind::Unsupported.into())
}
