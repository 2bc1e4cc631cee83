//! Shell: system calls of the kernel tests for which no library has a safe function.
//!
//! It is the only file of the tests with `unsafe`.

use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::{AsFd, AsRawFd as _, FromRawFd as _, OwnedFd, RawFd},
    sync::{Mutex, PoisonError},
};

use io_uring::{
    IoUring, Probe, cqueue,
    opcode::{Accept, Bind, Listen, Recv, Send, SendZc, Splice, Writev},
    squeue::{Entry, Flags},
    types::Fd,
};
use nix::{
    libc,
    sys::socket::{SockaddrLike as _, SockaddrStorage},
};

/// Creates a TUN device whose packets, beginning with the IP header, this program reads and writes. It is in the
/// namespace of the calling thread, and is removed with the file.
pub(crate) fn open_tun(name: &str) -> io::Result<File> {
    /// `struct ifreq` (linux/if.h): a name, and a union of which the flags are used.
    #[repr(C)]
    struct InterfaceRequest {
        name: [u8; libc::IFNAMSIZ],
        flags: libc::c_short,
        rest: [u8; 22],
    }
    let flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
    let mut request = InterfaceRequest { name: [0; libc::IFNAMSIZ], flags, rest: [0; 22] };
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    let file = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: `request` is a live `struct ifreq`, as this ioctl takes it.
    let result = unsafe {
        libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, std::ptr::from_mut(&mut request))
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(file) }
}

/// Sets a socket option with an integer value.
pub(crate) fn set_option(socket: impl AsFd, level: i32, name: i32, value: i32) -> io::Result<()> {
    // SAFETY: the pointer is to a live number of the size given.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            name,
            std::ptr::from_ref(&value).cast(),
            size_of::<i32>() as libc::socklen_t,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns the sequence numbers of the next byte that a connected TCP socket sends, and of the next one that it expects.
pub(crate) fn next_sequence_numbers(socket: impl AsFd) -> io::Result<[u32; 2]> {
    /// Values of TCP_REPAIR_QUEUE for the two queues (linux/tcp.h).
    const SEND_AND_RECEIVE_QUEUES: [i32; 2] = [2, 1];
    /// Value of TCP_REPAIR that ends the repair without a packet.
    const OFF_WITHOUT_PROBE: i32 = -1;
    let set = |name, value| set_option(&socket, libc::IPPROTO_TCP, name, value);
    set(libc::TCP_REPAIR, 1)?;
    let mut numbers = [0; 2];
    for (number, queue) in numbers.iter_mut().zip(SEND_AND_RECEIVE_QUEUES) {
        set(libc::TCP_REPAIR_QUEUE, queue)?;
        let mut size = size_of::<u32>() as libc::socklen_t;
        // SAFETY: the pointers are to a live number, and to its size.
        let result = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_QUEUE_SEQ,
                std::ptr::from_mut(number).cast(),
                &raw mut size,
            )
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    set(libc::TCP_REPAIR, OFF_WITHOUT_PROBE)?;
    Ok(numbers)
}

/// Disconnects a socket, by connecting it to an address of family AF_UNSPEC.
pub(crate) fn disconnect(socket: impl AsFd) -> io::Result<()> {
    let none = libc::sockaddr { sa_family: libc::AF_UNSPEC as libc::sa_family_t, sa_data: [0; 14] };
    // SAFETY: the pointer is to a live address of the size given.
    let result = unsafe {
        libc::connect(
            socket.as_fd().as_raw_fd(),
            std::ptr::from_ref(&none),
            size_of::<libc::sockaddr>() as libc::socklen_t,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Registers a function to run at the regular end of the process, after all tests.
pub(crate) fn at_exit(job: fn()) {
    static JOBS: Mutex<Vec<fn()>> = Mutex::new(Vec::new());
    extern "C" fn run() {
        let jobs = std::mem::take(&mut *JOBS.lock().unwrap_or_else(PoisonError::into_inner));
        for job in jobs {
            // A panic must not unwind through C code.
            let _failed = std::panic::catch_unwind(job);
        }
    }
    let mut jobs = JOBS.lock().unwrap_or_else(PoisonError::into_inner);
    if jobs.is_empty() {
        // SAFETY: the function lives as long as the process.
        unsafe { libc::atexit(run) };
    }
    jobs.push(job);
}

/// Takes ownership of a descriptor that another process has just sent.
pub(crate) fn take_descriptor(descriptor: RawFd) -> OwnedFd {
    // SAFETY: the kernel has created the descriptor for this process, and no other code has its number.
    unsafe { OwnedFd::from_raw_fd(descriptor) }
}

/// An io_uring for one operation at a time: each call waits for its completions, so borrowed buffers live as long as
/// the kernel needs them.
pub(crate) struct SyncIoUring(IoUring);

impl SyncIoUring {
    /// Creates a ring, whose entries are submitted by a kernel thread or by the calling thread.
    pub(crate) fn new(kernel_thread: bool) -> io::Result<Self> {
        const ENTRIES: u32 = 8;
        let mut builder = IoUring::builder();
        if kernel_thread {
            builder.setup_sqpoll(1_000);
        }
        builder.build(ENTRIES).map(Self)
    }

    /// Features of the kernel: zero-copy send (6.0), and bind and listen (6.11).
    pub(crate) fn supported_features(&self) -> io::Result<[bool; 2]> {
        let mut probe = Probe::new();
        self.0.submitter().register_probe(&mut probe)?;
        Ok([SendZc::CODE, Listen::CODE].map(|code| probe.is_supported(code)))
    }

    pub(crate) fn bind(&mut self, socket: impl AsFd, to: &SockaddrStorage) -> io::Result<()> {
        let entry = Bind::new(fd(&socket), to.as_ptr(), to.len()).build();
        self.run(&[entry]).map(drop)
    }

    pub(crate) fn listen(&mut self, socket: impl AsFd, queue: i32) -> io::Result<()> {
        self.run(&[Listen::new(fd(&socket), queue).build()]).map(drop)
    }

    pub(crate) fn accept(&mut self, listener: impl AsFd) -> io::Result<OwnedFd> {
        let null = std::ptr::null_mut();
        let accepted = self.run(&[Accept::new(fd(&listener), null, null.cast()).build()])?;
        Ok(take_descriptor(accepted as RawFd))
    }

    pub(crate) fn recv(&mut self, socket: impl AsFd, into: &mut [u8]) -> io::Result<usize> {
        let entry = Recv::new(fd(&socket), into.as_mut_ptr(), into.len() as u32).build();
        self.run(&[entry])
    }

    pub(crate) fn send(&mut self, socket: impl AsFd, bytes: &[u8]) -> io::Result<usize> {
        self.run(&[Send::new(fd(&socket), bytes.as_ptr(), bytes.len() as u32).build()])
    }

    /// Sends both buffers with one submission, the second after the first. Returns the number of bytes sent of the
    /// second.
    pub(crate) fn send_linked(
        &mut self,
        socket: impl AsFd,
        [first, second]: [&[u8]; 2],
    ) -> io::Result<usize> {
        let send = |bytes: &[u8], flags| {
            let send = Send::new(fd(&socket), bytes.as_ptr(), bytes.len() as u32);
            send.flags(flags | libc::MSG_WAITALL).build()
        };
        let first = send(first, libc::MSG_MORE).flags(Flags::IO_LINK);
        self.run(&[first, send(second, 0)])
    }

    pub(crate) fn send_zerocopy(&mut self, socket: impl AsFd, bytes: &[u8]) -> io::Result<usize> {
        self.run(&[SendZc::new(fd(&socket), bytes.as_ptr(), bytes.len() as u32).build()])
    }

    pub(crate) fn writev(
        &mut self,
        socket: impl AsFd,
        pieces: &[io::IoSlice<'_>],
    ) -> io::Result<usize> {
        // `IoSlice` has the layout of `struct iovec`, as its documentation promises.
        let entry = Writev::new(fd(&socket), pieces.as_ptr().cast(), pieces.len() as u32).build();
        self.run(&[entry])
    }

    pub(crate) fn splice(
        &mut self,
        from: impl AsFd,
        to: impl AsFd,
        max_bytes: usize,
    ) -> io::Result<usize> {
        self.run(&[Splice::new(fd(&from), -1, fd(&to), -1, max_bytes as u32).build()])
    }

    /// Submits entries and waits until all are complete. Returns the result of the last one.
    fn run(&mut self, entries: &[Entry]) -> io::Result<usize> {
        let (mut remaining, mut last) = (entries.len(), Ok(0));
        let numbered = entries.iter().enumerate();
        let entries_by_number: Vec<_> =
            numbered.map(|(at, it)| it.clone().user_data(at as u64)).collect();
        // All entries become visible at once. A kernel thread that saw only the first of a chain would pass it to a
        // worker, and execute the second before it. SAFETY: the caller borrows the buffers of all entries, and this
        // function returns only after all are complete.
        unsafe { self.0.submission().push_multiple(&entries_by_number) }
            .map_err(io::Error::other)?;
        while remaining > 0 {
            match self.0.submit_and_wait(1) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    // The kernel may still use the submitted buffers, so returning an error would be unsound.
                    panic!("io_uring: {error}");
                }
                _ => {}
            }
            for completion in self.0.completion() {
                // A zero-copy send has a second completion, after which its buffer is no longer used.
                remaining -= usize::from(!cqueue::more(completion.flags()));
                if !cqueue::notif(completion.flags())
                    && completion.user_data() + 1 == entries.len() as u64
                {
                    last = match completion.result() {
                        error @ ..0 => Err(io::Error::from_raw_os_error(-error)),
                        result => Ok(result as usize),
                    };
                }
            }
        }
        last
    }
}

fn fd(socket: &impl AsFd) -> Fd {
    Fd(socket.as_fd().as_raw_fd())
}
