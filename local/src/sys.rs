//! Shell: system calls that no safe library offers: clone3 into a cgroup, and pidfds.
//!
//! The only file of this crate with `unsafe`.

use std::ffi::{CString, NulError};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::Arc;

use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::unistd::Pid;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// `clone_args.cgroup` names the cgroup in which the child starts (Linux 5.7, `linux/sched.h`).
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
/// `PIDFD_GET_INFO`, `_IOWR(0xFF, 11, struct pidfd_info)` with its first, 64-byte layout (Linux 6.13).
const PIDFD_GET_INFO: libc::c_ulong = 0xC040_FF0B;
/// Bit of `pidfd_info.mask` that requests the exit code, and in the reply shows that it is there (Linux 6.15).
const PIDFD_INFO_EXIT: u64 = 1 << 3;

/// The kernel's `struct clone_args`, version 2 (with `cgroup`).
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

/// The kernel's `struct pidfd_info`, first published layout.
#[repr(C)]
#[derive(Default)]
struct PidfdInfo {
    mask: u64,
    cgroup_id: u64,
    ids: [u32; 11],
    exit_code: i32,
}
const _: () = assert!(size_of::<PidfdInfo>() == 64);

/// A program to be run inside a cgroup.
#[derive(Debug)]
pub struct CgroupCommand {
    argv: Vec<CString>,
    env: Vec<CString>,
}

impl CgroupCommand {
    /// Prepares the program at path `argv[0]` with these arguments and this environment (`KEY=value`).
    pub fn new(argv: &[String], env: &[String]) -> Result<Self, NulError> {
        let owned = |texts: &[String]| -> Result<Vec<CString>, NulError> {
            texts.iter().map(|text| CString::new(text.as_str())).collect()
        };
        Ok(Self { argv: owned(argv)?, env: owned(env)? })
    }

    /// Starts the program as a child in the v2 cgroup of directory `cgroup`, and in the v1 groups of the `tasks` files.
    ///
    /// Moving a process by `cgroup.procs` waits for an RCU grace period (7 to 16 ms measured). A process created in a
    /// cgroup does not wait, nor does a lone thread that moves by v1's `tasks`. Returns the child's pid and pidfd. If
    /// the program cannot be executed, the child exits with 127.
    pub fn spawn(
        &self,
        cgroup: BorrowedFd<'_>,
        tasks: &[BorrowedFd<'_>],
        stdio: [BorrowedFd<'_>; 3],
    ) -> io::Result<(Pid, OwnedFd)> {
        let (argv, env) = (null_terminated(&self.argv), null_terminated(&self.env));
        let tasks: Vec<RawFd> = tasks.iter().map(AsRawFd::as_raw_fd).collect();
        let stdio = stdio.map(|fd| fd.as_raw_fd());
        let child = ChildArgs { argv: &argv, env: &env, tasks: &tasks, stdio };
        let mut pidfd: RawFd = -1;
        let args = CloneArgs {
            flags: (libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD) as u64
                | CLONE_INTO_CGROUP,
            pidfd: ptr::from_mut(&mut pidfd) as u64,
            exit_signal: libc::SIGCHLD as u64,
            cgroup: cgroup.as_raw_fd() as u64,
            ..CloneArgs::default()
        };
        // A signal handler that ran in the child would run on the parent's memory.
        let mask = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
        // SAFETY: the child makes only system calls, on data prepared before, and this thread stands still until it has
        // executed its program or ended.
        let pid = unsafe { clone3(&args, &child) };
        // The mask is restored before any return, or this thread would never see a signal again.
        let restored = mask.thread_set_mask();
        if pid < 0 {
            return Err(io::Error::from_raw_os_error(-pid as i32));
        }
        // SAFETY: the kernel stored a new descriptor there, and nothing else owns it.
        let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
        restored?;
        Ok((Pid::from_raw(pid as i32), pidfd))
    }
}

/// Returns a NULL-terminated array of pointers to the texts, for execve.
fn null_terminated(texts: &[CString]) -> Vec<*const libc::c_char> {
    texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
}

/// Data that a child needs between clone3 and execve.
struct ChildArgs<'a> {
    argv: &'a [*const libc::c_char],
    env: &'a [*const libc::c_char],
    tasks: &'a [RawFd],
    stdio: [RawFd; 3],
}

/// Calls clone3 and, in the child, [`run_child`]. Returns the child's pid, or a negative error number.
///
/// With CLONE_VM and CLONE_VFORK the child uses the parent's memory and stack until it executes a program. A copy, as
/// fork makes it, would cost every other thread of this process a page fault at each page it next writes to: 0.1 ms in
/// the middle of a cold start. On the shared stack the child must not return from this function, so the same assembly
/// block calls `run_child`.
///
/// # Safety
/// `args` has CLONE_VM, CLONE_VFORK and no stack of its own, and all signals are blocked.
unsafe fn clone3(args: &CloneArgs, child: &ChildArgs<'_>) -> i64 {
    let pid;
    // SAFETY: by the contract; the child writes only below the stack pointer.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "mov rdi, {child}",
            "call {run}",
            "2:",
            child = in(reg) child,
            run = sym run_child,
            inlateout("rax") libc::SYS_clone3 => pid,
            in("rdi") args,
            in("rsi") size_of::<CloneArgs>(),
            out("rcx") _,
            out("r11") _,
        );
    }
    // SAFETY: by the contract; the child writes only below the stack pointer.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        core::arch::asm!(
            "svc #0",
            "cbnz x0, 2f",
            "mov x0, {child}",
            "bl {run}",
            "2:",
            child = in(reg) child,
            run = sym run_child,
            inlateout("x0") args => pid,
            in("x1") size_of::<CloneArgs>(),
            in("x8") libc::SYS_clone3,
            out("x30") _,
        );
    }
    pid
}

/// Code of the child between clone3 and execve: cgroups, descriptors, signals, program.
extern "C" fn run_child(child: &ChildArgs<'_>) -> ! {
    // SAFETY: only async-signal-safe system calls, on descriptors and NUL-terminated arrays the parent prepared.
    unsafe {
        // "0" means the calling thread.
        for &fd in child.tasks {
            libc::write(fd, c"0".as_ptr().cast(), 1);
        }
        for (target, fd) in child.stdio.into_iter().enumerate() {
            libc::dup2(fd, target as RawFd);
        }
        // Rust ignores SIGPIPE and tokio may block signals; a new program expects neither.
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, ptr::null_mut());
        libc::execve(child.argv[0], child.argv.as_ptr(), child.env.as_ptr());
        libc::_exit(127)
    }
}

/// Opens a descriptor that names process `pid` for as long as it is open, even if the number is used again.
pub fn pidfd_open(pid: Pid) -> io::Result<OwnedFd> {
    // SAFETY: plain system call without pointers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid.as_raw(), 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// A descriptor that several owners share, for waiting.
#[derive(Debug)]
pub struct SharedFd(Arc<OwnedFd>);

impl AsRawFd for SharedFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Registers `fd`, so that tasks can wait until it is readable: for a pidfd, until its process has ended.
pub fn watch_readable(fd: Arc<OwnedFd>) -> io::Result<AsyncFd<SharedFd>> {
    // SAFETY: the wrapper keeps the descriptor open, and always returns the same one.
    let registered = unsafe { AsyncFd::register_with_interest(SharedFd(fd), Interest::READABLE) };
    registered.map_err(io::Error::from)
}

/// Sends signal 0 to 64 to the process of `pidfd`; real-time stop signals are among them.
pub fn pidfd_signal(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    let none = ptr::null::<libc::siginfo_t>();
    // SAFETY: a null siginfo is allowed and means the values of kill(2).
    let sent =
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, none, 0) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns the exit code (128 + signal after a signal) of a process that is not our child; `None` before Linux 6.15.
pub fn pidfd_exit_code(pidfd: BorrowedFd<'_>) -> Option<i32> {
    let mut info = PidfdInfo { mask: PIDFD_INFO_EXIT, ..PidfdInfo::default() };
    // SAFETY: the kernel writes at most the 64 bytes the request number states.
    let result = unsafe { libc::ioctl(pidfd.as_raw_fd(), PIDFD_GET_INFO, &mut info) };
    if result < 0 || info.mask & PIDFD_INFO_EXIT == 0 {
        return None;
    }
    let status = info.exit_code;
    if libc::WIFEXITED(status) {
        return Some(libc::WEXITSTATUS(status));
    }
    libc::WIFSIGNALED(status).then(|| 128 + libc::WTERMSIG(status))
}

/// Parses a signal as image configurations name it: `SIGTERM`, `TERM`, `15`, `SIGRTMIN+3`, `SIGRTMAX-2`.
pub fn signal_number(name: &str) -> Option<i32> {
    if let Ok(number) = name.parse::<i32>() {
        return (1..=64).contains(&number).then_some(number);
    }
    let full_name = if name.starts_with("SIG") { name.to_owned() } else { format!("SIG{name}") };
    if let Some(distance) = full_name.strip_prefix("SIGRTMIN") {
        return real_time_signal(libc::SIGRTMIN(), distance, '+');
    }
    if let Some(distance) = full_name.strip_prefix("SIGRTMAX") {
        return real_time_signal(libc::SIGRTMAX(), distance, '-');
    }
    full_name.parse::<Signal>().ok().map(|signal| signal as i32)
}

/// Returns the real-time signal at this signed distance from `base`; an empty text is no distance. `None`: the text is
/// invalid, or there is no such signal.
fn real_time_signal(base: i32, distance: &str, sign: char) -> Option<i32> {
    let distance = match distance {
        "" => 0,
        _ if distance.starts_with(sign) => distance.parse::<i32>().ok()?,
        _ => return None,
    };
    let signal = base.checked_add(distance)?;
    (libc::SIGRTMIN()..=libc::SIGRTMAX()).contains(&signal).then_some(signal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_found_by_the_names_of_image_configurations() {
        let (first, last) = (libc::SIGRTMIN(), libc::SIGRTMAX());
        for (name, signal) in [
            ("SIGTERM", Some(libc::SIGTERM)),
            ("TERM", Some(libc::SIGTERM)),
            ("15", Some(15)),
            ("SIGRTMIN", Some(first)),
            ("SIGRTMIN+3", Some(first + 3)),
            ("RTMAX-2", Some(last - 2)),
            ("0", None),
            ("65", None),
            ("SIGRTMIN+99", None),
            ("SIGRTMIN-1", None),
            ("SIGRTMIN3", None),
            ("SIGRTMAX+1", None),
            ("SIGNONE", None),
            ("", None),
        ] {
            assert_eq!(signal_number(name), signal, "{name:?}");
        }
    }
}
