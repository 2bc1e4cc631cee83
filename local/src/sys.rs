//! Shell: the system calls no safe library offers: clone3 into a cgroup and pidfds.
//!
//! The only file of this crate with `unsafe`.

use std::ffi::{CString, NulError};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::Arc;

use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The child starts inside the cgroup of `clone_args.cgroup` (Linux 5.7, `linux/sched.h`).
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
/// `PIDFD_GET_INFO`, `_IOWR(0xFF, 11, struct pidfd_info)` with its first, 64-byte layout (Linux 6.13).
const PIDFD_GET_INFO: libc::c_ulong = 0xC040_FF0B;
/// Exit code asked for, and given (Linux 6.15).
const PIDFD_INFO_EXIT: u64 = 1 << 3;

/// Kernel's `struct clone_args`, version 2 (with cgroup).
#[repr(C)]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// Kernel's `struct pidfd_info`, first published layout.
#[repr(C)]
#[derive(Default)]
struct PidfdInfo {
    mask: u64,
    cgroup_id: u64,
    ids: [u32; 11],
    exit_code: i32,
}
const _: () = assert!(size_of::<PidfdInfo>() == 64);

/// A program to run inside a cgroup.
#[derive(Debug)]
pub struct Command {
    argv: Vec<CString>,
    env: Vec<CString>,
}

impl Command {
    /// The program at path `argv[0]` with these arguments and this environment (`KEY=value`).
    pub fn new(argv: &[String], env: &[String]) -> Result<Self, NulError> {
        let owned = |texts: &[String]| -> Result<Vec<CString>, NulError> {
            texts.iter().map(|text| CString::new(text.as_str())).collect()
        };
        Ok(Self { argv: owned(argv)?, env: owned(env)? })
    }

    /// Starts it as a child in the v2 cgroup of directory `cgroup`, and in the v1 groups of the `tasks` files.
    ///
    /// Moving a process by `cgroup.procs` waits for an RCU grace period (7 to 16 ms measured); being born in a cgroup,
    /// and moving a lone thread by v1's `tasks`, does not. Returns the child's pid and pidfd. When the program cannot be
    /// executed the child exits with 127.
    pub fn spawn(
        &self,
        cgroup: BorrowedFd<'_>,
        tasks: &[BorrowedFd<'_>],
        stdio: [BorrowedFd<'_>; 3],
    ) -> io::Result<(Pid, OwnedFd)> {
        let argv = pointers(&self.argv);
        let env = pointers(&self.env);
        let tasks: Vec<RawFd> = tasks.iter().map(AsRawFd::as_raw_fd).collect();
        let stdio = stdio.map(|fd| fd.as_raw_fd());
        let mut pidfd: RawFd = -1;
        let args = CloneArgs {
            flags: libc::CLONE_PIDFD as u64 | CLONE_INTO_CGROUP,
            pidfd: ptr::from_mut(&mut pidfd) as u64,
            exit_signal: libc::SIGCHLD as u64,
            cgroup: cgroup.as_raw_fd() as u64,
            ..CloneArgs::default()
        };
        // SAFETY: without CLONE_VM the child has its own copy of memory, as after fork; until execve it makes only
        // system calls on data prepared before, so locks held by other threads do not matter.
        let pid = unsafe { libc::syscall(libc::SYS_clone3, &args, size_of::<CloneArgs>()) };
        match pid {
            0 => run_child(&argv, &env, &tasks, stdio),
            1.. => {
                // SAFETY: the kernel stored a fresh descriptor there, which nobody else owns.
                let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
                Ok((Pid::from_raw(pid as i32), pidfd))
            }
            _ => Err(io::Error::last_os_error()),
        }
    }
}

fn pointers(texts: &[CString]) -> Vec<*const libc::c_char> {
    texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
}

/// What the child does between clone3 and execve.
fn run_child(
    argv: &[*const libc::c_char],
    env: &[*const libc::c_char],
    tasks: &[RawFd],
    stdio: [RawFd; 3],
) -> ! {
    // SAFETY: only async-signal-safe system calls, on descriptors and NUL-terminated arrays the parent prepared.
    unsafe {
        for &fd in tasks {
            libc::write(fd, c"0".as_ptr().cast(), 1);
        }
        for (target, fd) in stdio.into_iter().enumerate() {
            libc::dup2(fd, target as RawFd);
        }
        // Rust ignores SIGPIPE and tokio may block signals; a new program expects neither.
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, ptr::null_mut());
        libc::execve(argv[0], argv.as_ptr(), env.as_ptr());
        libc::_exit(127)
    }
}

/// A descriptor that names process `pid` for as long as it is open, whatever becomes of the number.
pub fn pidfd_open(pid: Pid) -> io::Result<OwnedFd> {
    // SAFETY: plain system call without pointers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid.as_raw(), 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just returned this descriptor, which nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// A descriptor shared with others, for waiting.
#[derive(Debug)]
pub struct Watched(Arc<OwnedFd>);

impl AsRawFd for Watched {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Lets tasks wait until `fd` is readable: for a pidfd, until its process has ended.
pub fn watch(fd: Arc<OwnedFd>) -> io::Result<AsyncFd<Watched>> {
    // SAFETY: the wrapper keeps the descriptor open, and always answers with the same one.
    let registered = unsafe { AsyncFd::register_with_interest(Watched(fd), Interest::READABLE) };
    registered.map_err(io::Error::from)
}

/// Sends a signal to the process of `pidfd`. Number 0 to 64, so that real-time stop signals work too.
pub fn pidfd_signal(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    let none = ptr::null::<libc::siginfo_t>();
    // SAFETY: a null siginfo is allowed and means what kill(2) would send.
    let sent =
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, none, 0) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Exit code (128 + signal for a signal) of a process that was not our child. Needs Linux 6.15; `None` before.
pub fn pidfd_exit_code(pidfd: BorrowedFd<'_>) -> Option<i32> {
    let mut info = PidfdInfo { mask: PIDFD_INFO_EXIT, ..PidfdInfo::default() };
    // SAFETY: the kernel writes at most the 64 bytes the request number states.
    let done = unsafe { libc::ioctl(pidfd.as_raw_fd(), PIDFD_GET_INFO, &mut info) };
    if done < 0 || info.mask & PIDFD_INFO_EXIT == 0 {
        return None;
    }
    let status = info.exit_code;
    if libc::WIFEXITED(status) {
        return Some(libc::WEXITSTATUS(status));
    }
    libc::WIFSIGNALED(status).then(|| 128 + libc::WTERMSIG(status))
}

/// The number of a signal given by name (`SIGTERM`, `TERM`, `15`, `SIGRTMIN+3`), as image configurations name it.
pub fn signal_number(name: &str) -> Option<i32> {
    if let Ok(number) = name.parse::<i32>() {
        return (1..=64).contains(&number).then_some(number);
    }
    let full = if name.starts_with("SIG") { name.to_owned() } else { format!("SIG{name}") };
    if let Some(offset) = full.strip_prefix("SIGRTMIN") {
        let offset = offset.strip_prefix('+').unwrap_or("0").parse::<i32>().ok()?;
        return Some(libc::SIGRTMIN() + offset);
    }
    full.parse::<Signal>().ok().map(|signal| signal as i32)
}
