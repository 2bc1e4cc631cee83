//! Shell: the kernel tests' own system calls, for which no library has a safe word.
//!
//! The only file of the tests with `unsafe`.

use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::{AsFd, AsRawFd as _, FromRawFd as _, OwnedFd, RawFd},
};

use nix::libc;

/// Makes a network device whose packets, IP header first, this program reads and writes. It is in the namespace of the
/// calling thread, and goes with the file.
pub(crate) fn tun(name: &str) -> io::Result<File> {
    /// `struct ifreq` (linux/if.h): a name, and a union of which the flags are used.
    #[repr(C)]
    struct Request {
        name: [u8; libc::IFNAMSIZ],
        flags: libc::c_short,
        rest: [u8; 22],
    }
    let flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
    let mut request = Request { name: [0; libc::IFNAMSIZ], flags, rest: [0; 22] };
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    let file = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: `request` is a live `struct ifreq`, as this ioctl takes it.
    let done = unsafe {
        libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, std::ptr::from_mut(&mut request))
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(file) }
}

/// Sets a socket's option, of the kind that takes a number.
pub(crate) fn set_option(socket: impl AsFd, level: i32, name: i32, value: i32) -> io::Result<()> {
    // SAFETY: the pointer is to a live number of the size given.
    let done = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            name,
            std::ptr::from_ref(&value).cast(),
            size_of::<i32>() as libc::socklen_t,
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A descriptor that another process has given to this one just now.
pub(crate) fn own(given: RawFd) -> OwnedFd {
    // SAFETY: the kernel has made it for us, and nobody else here has seen its number.
    unsafe { OwnedFd::from_raw_fd(given) }
}
