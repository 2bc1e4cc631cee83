//! Shell: the agent's own system calls: bpf(2) commands that Aya lacks, memory shared with maps, the self-test's
//! fork.
//!
//! The only file of this crate with `unsafe`.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
    ptr::NonNull,
    sync::atomic::AtomicU64,
};

use tokio::io::{Interest, unix::AsyncFd};

/// Words of an mmapable array map, shared with the eBPF programs.
pub struct SharedWords {
    start: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: the memory is shared with the kernel anyway; every access is atomic.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl std::fmt::Debug for SharedWords {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Words({})", self.count)
    }
}

impl SharedWords {
    /// Maps the first `count` words of the array behind `map`, which must have been created mmapable.
    pub fn map(map: BorrowedFd<'_>, count: usize) -> io::Result<Self> {
        // SAFETY: a fresh shared mapping at an address of the kernel's choice; nothing else refers to it.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                count * 8,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                map.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { start, count })
    }

    /// Returns the words. They are page-aligned, so each is aligned.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: `map` made exactly this many words readable and writable, and they stay so until `drop`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `map`, whose borrows have ended.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.count * 8) };
    }
}

// Commands and layouts of bpf(2), from include/uapi/linux/bpf.h. Only what is used here.
const BPF_MAP_CREATE: i32 = 0;
const BPF_OBJ_PIN: i32 = 6;
const BPF_OBJ_GET: i32 = 7;
const BPF_MAP_GET_NEXT_ID: i32 = 12;
const BPF_PROG_GET_FD_BY_ID: i32 = 13;
const BPF_OBJ_GET_INFO_BY_FD: i32 = 15;
const BPF_PROG_QUERY: i32 = 16;
const BPF_MAP_UPDATE_BATCH: i32 = 26;
const BPF_LINK_CREATE: i32 = 28;
const BPF_LINK_UPDATE: i32 = 29;
const BPF_ITER_CREATE: i32 = 33;
const BPF_LINK_DETACH: i32 = 34;

fn bpf<T>(command: i32, attr: &mut T) -> io::Result<i32> {
    // SAFETY: `attr` is a live, writable `repr(C)` prefix of `union bpf_attr` of the size given; the kernel takes
    // missing fields as zero. Pointers inside it come from borrows that outlive this call (see each caller).
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
}

fn owned_fd(fd: i32) -> OwnedFd {
    // SAFETY: `fd` was just returned by bpf(2) and has no other owner.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Returns the ids of all maps, without opening any. Opening is not safe. A program array whose last user closes it is
/// emptied in the background. If that happens twice meanwhile, the kernel (6.18 at least) loses a reference, and with
/// it the map.
pub fn map_ids() -> impl Iterator<Item = u32> {
    #[repr(C)]
    struct MapGetNextIdAttr {
        after: u32,
        next: u32,
        flags: u32,
    }
    let next = |after: &u32| {
        let mut attr = MapGetNextIdAttr { after: *after, next: 0, flags: 0 };
        bpf(BPF_MAP_GET_NEXT_ID, &mut attr).ok().map(|_| attr.next)
    };
    std::iter::successors(next(&0), next)
}

/// Attaches a program to a cgroup by a link. Since 5.7.
pub fn link_create(
    program: BorrowedFd<'_>,
    cgroup: BorrowedFd<'_>,
    attach_type: u32,
) -> io::Result<OwnedFd> {
    create_link(program, cgroup.as_raw_fd() as u32, attach_type)
}

/// Returns true if the kernel accepts a program of this type, for this attach type. The program is checked and dropped.
pub fn accepts_program(kind: u32, attach_type: u32, code: &[u64]) -> bool {
    /// First part of `union bpf_attr`, as of 4.17.
    #[repr(C)]
    struct ProgLoadAttr {
        kind: u32,
        length: u32,
        code: u64,
        license: u64,
        log: [u32; 4],
        kernel: u32,
        flags: u32,
        name: [u8; 16],
        ifindex: u32,
        attach_type: u32,
    }
    const BPF_PROG_LOAD: i32 = 5;
    /// Number of attempts: the verifier gives up when a signal arrives, and libbpf tries as often.
    const ATTEMPTS_MAX: usize = 5;
    // Some helpers, such as probe_read_kernel, are only for programs under the GPL.
    let license = c"GPL";
    let mut attr = ProgLoadAttr {
        kind,
        length: code.len() as u32,
        code: code.as_ptr() as u64,
        license: license.as_ptr() as u64,
        log: [0; 4],
        kernel: 0,
        flags: 0,
        name: [0; 16],
        ifindex: 0,
        attach_type,
    };
    for _ in 0..ATTEMPTS_MAX {
        match bpf(BPF_PROG_LOAD, &mut attr).map(owned_fd) {
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
            result => return result.is_ok(),
        }
    }
    false
}

/// Links a program that iterates over the kernel's objects, for [`run_iterator`]. Since 5.8.
pub fn link_iterator(program: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const BPF_TRACE_ITER: u32 = 28;
    create_link(program, 0, BPF_TRACE_ITER)
}

fn create_link(program: BorrowedFd<'_>, target: u32, attach_type: u32) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct LinkCreateAttr {
        program: u32,
        target: u32,
        attach_type: u32,
        flags: u32,
    }
    let program = program.as_raw_fd() as u32;
    let mut attr = LinkCreateAttr { program, target, attach_type, flags: 0 };
    bpf(BPF_LINK_CREATE, &mut attr).map(owned_fd)
}

/// Runs a program from [`link_iterator`] on every object: for sockets, on those of the calling thread's network
/// namespace. The program must print nothing.
pub fn run_iterator(link: BorrowedFd<'_>) -> io::Result<()> {
    use io::ErrorKind::{Interrupted, WouldBlock};
    #[repr(C)]
    struct IterCreateAttr {
        link: u32,
        flags: u32,
    }
    let mut attr = IterCreateAttr { link: link.as_raw_fd() as u32, flags: 0 };
    let mut walk = std::fs::File::from(bpf(BPF_ITER_CREATE, &mut attr).map(owned_fd)?);
    loop {
        match io::Read::read(&mut walk, &mut [0; 64]) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            // After a million objects the kernel returns EAGAIN and wants to be called again.
            Err(error) if matches!(error.kind(), WouldBlock | Interrupted) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Replaces the link's program by `program`, with no moment without one. Since 5.7.
pub fn link_update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    #[repr(C)]
    struct LinkUpdateAttr {
        link: u32,
        program: u32,
        flags: u32,
        old_program: u32,
    }
    let mut attr = LinkUpdateAttr {
        link: link.as_raw_fd() as u32,
        program: program.as_raw_fd() as u32,
        flags: 0,
        // Must be 0 without the flag `BPF_F_REPLACE`, which would demand a certain old program.
        old_program: 0,
    };
    bpf(BPF_LINK_UPDATE, &mut attr).map(drop)
}

/// Detaches the link's program at once; the link stays, without an effect. Since 5.9. Fails with `EOPNOTSUPP` for links
/// of a kind that cannot be detached.
pub fn link_detach(link: BorrowedFd<'_>) -> io::Result<()> {
    let mut link = link.as_raw_fd() as u32;
    bpf(BPF_LINK_DETACH, &mut link).map(drop)
}

#[repr(C)]
struct ObjPinAttr {
    path: u64,
    fd: u32,
    flags: u32,
}

/// Pins a link, map or program under a path in a bpf filesystem.
pub fn pin(fd: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    let mut attr = ObjPinAttr { path: path.as_ptr() as u64, fd: fd.as_raw_fd() as u32, flags: 0 };
    bpf(BPF_OBJ_PIN, &mut attr).map(drop)
}

/// Writes entries of a map in one system call (5.6). After an error, a part of them may be written.
pub fn update_batch<K: aya::Pod, V: aya::Pod>(
    map: BorrowedFd<'_>,
    entries: &[(K, V)],
) -> io::Result<()> {
    #[repr(C)]
    struct MapBatchAttr {
        in_batch: u64,
        out_batch: u64,
        keys: u64,
        values: u64,
        count: u32,
        map: u32,
        entry_flags: u64,
        flags: u64,
    }
    // They outlive the call, which reads that many keys and values.
    let (keys, values): (Vec<K>, Vec<V>) = entries.iter().copied().unzip();
    let mut attr = MapBatchAttr {
        in_batch: 0,
        out_batch: 0,
        keys: keys.as_ptr() as u64,
        values: values.as_ptr() as u64,
        count: entries.len() as u32,
        map: map.as_raw_fd() as u32,
        entry_flags: 0,
        flags: 0,
    };
    bpf(BPF_MAP_UPDATE_BATCH, &mut attr).map(drop)
}

/// Creates a hash map with keys and values of these sizes in bytes. An entry takes memory only while it exists.
pub fn create_hash_map(key: u32, value: u32, entries: u32) -> io::Result<OwnedFd> {
    const BPF_MAP_TYPE_HASH: u32 = 1;
    const BPF_F_NO_PREALLOC: u32 = 1;
    #[repr(C)]
    struct MapCreateAttr {
        kind: u32,
        key: u32,
        value: u32,
        entries: u32,
        flags: u32,
    }
    let mut attr =
        MapCreateAttr { kind: BPF_MAP_TYPE_HASH, key, value, entries, flags: BPF_F_NO_PREALLOC };
    bpf(BPF_MAP_CREATE, &mut attr).map(owned_fd)
}

/// Opens the object that is pinned under a path in a bpf filesystem.
pub fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let mut attr = ObjPinAttr { path: path.as_ptr() as u64, fd: 0, flags: 0 };
    bpf(BPF_OBJ_GET, &mut attr).map(owned_fd)
}

/// Returns the id of the cgroup that a link is attached to; 0 once that cgroup is gone.
pub fn link_cgroup(link: BorrowedFd<'_>) -> io::Result<u64> {
    // struct bpf_link_info: type, id, program id, (padding), cgroup id, attach type.
    let mut info = [0u64; 16];
    object_info(link, &mut info)?;
    Ok(info[2])
}

/// Returns the inode of the network namespace that a link is attached to; 0 once that namespace is gone.
pub fn link_netns(link: BorrowedFd<'_>) -> io::Result<u64> {
    // struct bpf_link_info has the inode (32 bits) where a cgroup's link has the cgroup id (64 bits).
    link_cgroup(link).map(|word| word & u64::from(u32::MAX))
}

/// Returns the names of the programs that are attached to a cgroup itself, at one hook. Needs CAP_NET_ADMIN. Without
/// CAP_SYS_ADMIN the names are empty.
pub fn attached_programs(cgroup: BorrowedFd<'_>, attach_type: u32) -> io::Result<Vec<String>> {
    /// Highest number of programs that are read.
    const PROGRAMS_MAX: usize = 64;
    #[repr(C)]
    struct ProgQueryAttr {
        target: u32,
        attach_type: u32,
        query_flags: u32,
        attach_flags: u32,
        ids: u64,
        count: u32,
        reserved: u32,
    }
    let mut ids = [0u32; PROGRAMS_MAX];
    let mut query = ProgQueryAttr {
        target: cgroup.as_raw_fd() as u32,
        attach_type,
        query_flags: 0,
        attach_flags: 0,
        ids: ids.as_mut_ptr() as u64,
        count: PROGRAMS_MAX as u32,
        reserved: 0,
    };
    // With more programs than fit, the kernel returns ENOSPC, and the hook counts as empty.
    bpf(BPF_PROG_QUERY, &mut query)?;
    let count = (query.count as usize).min(PROGRAMS_MAX);
    Ok(ids[..count].iter().map(|&id| program_name(id).unwrap_or_default()).collect())
}

fn program_name(id: u32) -> io::Result<String> {
    #[repr(C)]
    struct ProgGetFdAttr {
        id: u32,
        next: u32,
        flags: u32,
    }
    let program =
        owned_fd(bpf(BPF_PROG_GET_FD_BY_ID, &mut ProgGetFdAttr { id, next: 0, flags: 0 })?);
    let mut info = [0u64; 16];
    object_info(program.as_fd(), &mut info)?;
    // struct bpf_prog_info has its name, of 16 bytes, at byte 64.
    let bytes: Vec<u8> = info[8..10].iter().flat_map(|word| word.to_ne_bytes()).collect();
    let name = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// Returns type, key size, value size and capacity of a map.
pub fn map_shape(map: BorrowedFd<'_>) -> io::Result<[u32; 4]> {
    // struct bpf_map_info: type, id, key size, value size, max entries, flags, …
    let mut info = [0u64; 16];
    object_info(map, &mut info)?;
    let (kind, key, value) = (info[0] as u32, info[1] as u32, (info[1] >> 32) as u32);
    Ok([kind, key, value, info[2] as u32])
}

fn object_info(fd: BorrowedFd<'_>, info: &mut [u64; 16]) -> io::Result<()> {
    #[repr(C)]
    struct ObjInfoAttr {
        fd: u32,
        length: u32,
        info: u64,
    }
    let mut attr = ObjInfoAttr {
        fd: fd.as_raw_fd() as u32,
        length: size_of_val(info) as u32,
        info: info.as_mut_ptr() as u64,
    };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr).map(drop)
}

/// Returns the cookie of a socket's network namespace, which is unique until reboot. Since 5.14.
pub fn netns_cookie(socket: impl AsFd) -> io::Result<u64> {
    const SO_NETNS_COOKIE: i32 = 71;
    socket_number(socket.as_fd(), SO_NETNS_COOKIE)
}

/// Returns the cookie of a socket, which is unique until reboot.
pub fn socket_cookie(socket: impl AsFd) -> io::Result<u64> {
    socket_number(socket.as_fd(), libc::SO_COOKIE)
}

/// Returns an option of the level `SOL_SOCKET` that is a 64-bit number.
fn socket_number(socket: BorrowedFd<'_>, option: i32) -> io::Result<u64> {
    let mut number = 0u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    // SAFETY: both pointers are to live locals of the sizes given.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            std::ptr::from_mut(&mut number).cast(),
            &mut length,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(number) }
}

/// Registers `inner` with the runtime, so that tasks can wait until it is readable.
pub(crate) fn register_readable<T: AsFd + AsRawFd>(inner: T) -> io::Result<AsyncFd<T>> {
    // SAFETY: `AsFd` proves that `inner` owns or borrows an open descriptor. Every type used here returns the same one
    // for as long as it lives, and `AsyncFd` owns it from now on.
    let registered = unsafe { AsyncFd::register_with_interest(inner, Interest::READABLE) };
    Ok(registered?)
}

/// Results of the self-test's system calls.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SelfTestReport {
    /// Errno of its IPv4 connect, which should fail.
    pub connect_errno: i32,
    /// Errno of its listen; 0 if it listens.
    pub listen_errno: i32,
    /// Errno of entering the cgroup or the namespace; 0 if it entered. If a cgroup namespace blocks it, it stays in the
    /// agent's cgroup. That is as good if the agent's cgroup is below the pods' cgroup.
    pub enter_errno: i32,
    /// Number of connects that it tried: one for each address family that the kernel has.
    pub connects: u32,
    /// Cookie of its network namespace; 0 if the kernel does not give it.
    pub cookie: u64,
    /// Port on which it listens on loopback; 0 if it could not.
    pub port: u16,
    /// Errno of its datagram over IPv4, which should fail; 0 if it was sent.
    pub send_errno: i32,
}

/// A process that runs in a given cgroup, makes the calls that the eBPF programs should see, and listens until dropped.
#[derive(Debug)]
pub struct SelfTestProcess {
    pid: libc::pid_t,
    report: SelfTestReport,
}

impl SelfTestProcess {
    /// Starts the process in `cgroup`, and in the network namespace `netns` or the agent's own.
    pub fn start(cgroup: &Path, netns: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        use std::io::Read as _;
        let procs = std::fs::OpenOptions::new().write(true).open(cgroup.join("cgroup.procs"))?;
        let (mut from, into) = io::pipe()?;
        let parent = std::process::id();
        let netns = netns.map(|netns| netns.as_raw_fd());
        // SAFETY: the child calls only async-signal-safe functions (`run_self_test` below) before it exits.
        let pid = unsafe { libc::fork() };
        match pid {
            -1 => return Err(io::Error::last_os_error()),
            // SAFETY: in the child; see `run_self_test`.
            0 => unsafe { run_self_test(parent, procs.as_raw_fd(), netns, into.as_raw_fd()) },
            _ => {}
        }
        let mut process = Self { pid, report: SelfTestReport::default() };
        // The child has its own copy. With this one closed, a child that dies early ends the read below.
        drop(into);
        let mut bytes = [0; REPORT_BYTES];
        from.read_exact(&mut bytes)?;
        let i32_at = |at: usize| {
            i32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let mut cookie = [0; 8];
        cookie.copy_from_slice(&bytes[16..24]);
        process.report = SelfTestReport {
            connect_errno: i32_at(0),
            listen_errno: i32_at(4),
            enter_errno: i32_at(8),
            connects: i32_at(12).unsigned_abs(),
            cookie: u64::from_ne_bytes(cookie),
            port: u16::from_ne_bytes([bytes[24], bytes[25]]),
            send_errno: i32_at(28),
        };
        Ok(process)
    }

    /// Returns the results of the self-test's system calls.
    pub fn report(&self) -> SelfTestReport {
        self.report
    }
}

impl Drop for SelfTestProcess {
    fn drop(&mut self) {
        // SAFETY: our own child, not waited for yet, so the number is still its own.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            // Again after a signal that this thread handled: the child would stay as a zombie.
            while libc::waitpid(self.pid, std::ptr::null_mut(), 0) < 0
                && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
            {}
        }
    }
}

const REPORT_BYTES: usize = size_of::<SelfTestReport>();

/// Closes every descriptor but these two. A child that outlives its parent for a moment would otherwise keep the
/// parent's ports bound, and the next agent could not listen on them. Since 5.9; before, all stay open.
///
/// # Safety
///
/// Only if no other code uses the descriptors any more: in a child of fork.
unsafe fn close_all_but(one: i32, other: i32) {
    let (low, high) = (one.min(other).unsigned_abs(), one.max(other).unsigned_abs());
    let close = |first: u32, last: u32| {
        if first <= last {
            // SAFETY: takes three numbers; the caller promises that the descriptors have no other user.
            unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        }
    };
    if low > 0 {
        close(0, low - 1);
    }
    close(low + 1, high.saturating_sub(1));
    close(high + 1, u32::MAX);
}

/// Runs the self-test: enters the namespace and the cgroup, connects to [`datapath::abi::SELF_TEST_FRONTEND`] in both
/// families, sends it a datagram, listens on loopback, reports, and waits for the kill.
///
/// # Safety
///
/// Only for a child of fork: system calls only, no memory is allocated and no lock taken, and it never returns.
unsafe fn run_self_test(parent: u32, procs: i32, netns: Option<i32>, report_to: i32) -> ! {
    /// Time after which the process ends by itself, in seconds.
    const LIFETIME_MAX_S: u32 = 10;
    let mut report = SelfTestReport::default();
    // SAFETY: pointers are to live locals with their sizes; file descriptors are the child's own copies.
    unsafe {
        if let Some(netns) = netns
            && libc::setns(netns, libc::CLONE_NEWNET) != 0
        {
            report.enter_errno = *libc::__errno_location();
        }
        close_all_but(procs, report_to);
        // Without a parent to kill it, it ends by the alarm.
        libc::alarm(LIFETIME_MAX_S);
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        if libc::getppid().unsigned_abs() != parent {
            // The parent had ended before PR_SET_PDEATHSIG took effect.
            libc::_exit(0);
        }
        if libc::write(procs, c"0".as_ptr().cast(), 1) != 1 {
            report.enter_errno = *libc::__errno_location();
        }
        let client = libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        let key = datapath::abi::SELF_TEST_FRONTEND;
        let octets = [key.address[12], key.address[13], key.address[14], key.address[15]];
        let to = ipv4(octets, key.port_be);
        let length = size_of_val(&to) as libc::socklen_t;
        // If the programs are not in force, a blocking connect to an unused address would wait for minutes.
        libc::fcntl(client, libc::F_SETFL, libc::O_NONBLOCK);
        if libc::connect(client, std::ptr::from_ref(&to).cast(), length) != 0 {
            report.connect_errno = *libc::__errno_location();
        }
        report.connects = 1;
        report.send_errno = send_empty_datagram(&to);
        // The same address in the form that IPv6 programs use.
        let client = libc::socket(libc::AF_INET6, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        if client >= 0 {
            let mut to: libc::sockaddr_in6 = std::mem::zeroed();
            to.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            to.sin6_port = key.port_be;
            to.sin6_addr.s6_addr = key.address;
            let length = size_of_val(&to) as libc::socklen_t;
            libc::fcntl(client, libc::F_SETFL, libc::O_NONBLOCK);
            libc::connect(client, std::ptr::from_ref(&to).cast(), length);
            report.connects = 2;
        }
        let listener = libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        let mut at = ipv4([127, 0, 0, 1], 0);
        let mut length = size_of_val(&at) as libc::socklen_t;
        let address = std::ptr::from_mut(&mut at).cast();
        if libc::bind(listener, address, length) != 0
            || libc::listen(listener, 1) != 0
            || libc::getsockname(listener, address, &mut length) != 0
        {
            report.listen_errno = *libc::__errno_location();
        } else {
            report.port = u16::from_be(at.sin_port);
            report.cookie = netns_cookie(BorrowedFd::borrow_raw(listener)).unwrap_or(0);
        }
        libc::write(report_to, std::ptr::from_ref(&report).cast(), REPORT_BYTES);
        loop {
            libc::pause();
        }
    }
}

/// Sends an empty datagram, by system calls only. Returns the errno; 0 if it was sent.
fn send_empty_datagram(to: &libc::sockaddr_in) -> i32 {
    let length = size_of_val(to) as libc::socklen_t;
    // SAFETY: the address is live and of the size given; no byte is read from the null pointer.
    unsafe {
        let sender = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        let (empty, address) = (std::ptr::null(), std::ptr::from_ref(to).cast());
        match libc::sendto(sender, empty, 0, libc::MSG_DONTWAIT, address, length) {
            0.. => 0,
            _ => *libc::__errno_location(),
        }
    }
}

fn ipv4(octets: [u8; 4], port_be: u16) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: port_be,
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(octets) },
        sin_zero: [0; 8],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_keeps_no_descriptor_but_the_two_it_is_given() {
        use std::io::Read as _;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (_unused, given) = io::pipe().unwrap();
        let (mut from, into) = io::pipe().unwrap();
        let (given, into) = (given.as_raw_fd(), into.as_raw_fd());
        let fds = [listener.as_raw_fd(), 0, 1, 2, given, into];
        // SAFETY: the child makes system calls only, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above; the buffer is a live local.
            unsafe {
                close_all_but(given, into);
                let open = fds.map(|fd| u8::from(libc::fcntl(fd, libc::F_GETFD) >= 0));
                libc::write(into, open.as_ptr().cast(), open.len());
                libc::_exit(0);
            }
        }
        let mut open = [9; 6];
        from.read_exact(&mut open).unwrap();
        // SAFETY: our own child, waited for once.
        unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
        assert_eq!(open, [0, 0, 0, 0, 1, 1]);
    }
}
