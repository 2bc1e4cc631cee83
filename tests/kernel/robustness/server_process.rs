//! Shell: servers in every arrangement: owner of the listener, acceptor, and namespace. Each is one process of a pod;
//! requests are logged in a file that all processes of a test share.
//!
//! | line | does |
//! |---|---|
//! | `listen ADDRESS [reuseport] [mptcp] [fastopen]` | makes the listener of later steps |
//! | `serve` | accepts and serves |
//! | `serve-in NETNS` | as `serve`, in a thread that has entered another namespace |
//! | `prefork N` | as `serve`, in N children that share the listener |
//! | `hand PATH` | sends the listener through a Unix socket |
//! | `hand-accepted PATH` | sends each accepted connection through a Unix socket |
//! | `take PATH` | receives a listener from a Unix socket |
//! | `take-accepted PATH` | receives connections from a Unix socket and serves them |
//! | `uring ADDRESS [sqpoll]` | listens, accepts and serves by io_uring alone; replies with its features |
//! | `close` | closes the listener; threads that accept keep it open |

use std::{
    io::{self, IoSlice, IoSliceMut},
    net::{SocketAddr, TcpListener, TcpStream},
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    process::{Child, Command, Stdio},
    thread,
};

use nix::{
    cmsg_space,
    sys::{
        prctl::set_pdeathsig,
        signal::Signal,
        socket::{ControlMessage, ControlMessageOwned, MsgFlags, UnixAddr, recvmsg, sendmsg},
    },
};
use socket2::{Domain, Protocol, Socket, Type};

use super::served_connection::{RequestLogAndGate, serve};
use crate::{
    fixture::enter_netns,
    scripted_process::{ScriptedProcess, run_steps},
    sys,
};

const FILES_VARIABLE: &str = "ROUSE_TEST_DESK";

/// Main function of this program as a server; not a test itself.
#[test]
#[ignore = "a role, run by the other tests"]
fn role() {
    let Some(files) = RequestLogAndGate::from_environment(FILES_VARIABLE) else { return };
    let mut state = ServerProcessState { files, listener: None, children: Vec::new() };
    run_steps(|words| {
        let result = state.run(words);
        result.inspect_err(|error| eprintln!("{words:?}: {error}"))
    });
}

/// Main function of a child that inherits a listener as its stdin; not a test itself.
#[test]
#[ignore = "a role, run by the other tests"]
fn worker() {
    let Some(files) = RequestLogAndGate::from_environment(FILES_VARIABLE) else { return };
    set_pdeathsig(Signal::SIGKILL).expect("a signal");
    let listener = io::stdin().as_fd().try_clone_to_owned().expect("it is open");
    accept_connections(&TcpListener::from(listener), &files);
}

/// Starts a server process in a cgroup and a namespace, killed on drop.
pub(super) fn start(log_file: &Path, cgroup: &Path, netns: &str) -> ScriptedProcess {
    ScriptedProcess::start_role(
        "robustness::server_process::role",
        (FILES_VARIABLE, log_file.as_os_str()),
        cgroup,
        netns,
    )
}

struct ServerProcessState {
    files: RequestLogAndGate,
    listener: Option<TcpListener>,
    children: Vec<Child>,
}

impl ServerProcessState {
    fn run(&mut self, words: &[&str]) -> io::Result<String> {
        match words {
            ["listen", address, options @ ..] => self.listener = Some(listen(address, options)?),
            ["serve"] => self.accept_on_thread(|| ())?,
            ["serve-in", netns] => {
                let netns = (*netns).to_owned();
                self.accept_on_thread(move || enter_netns(&netns))?;
            }
            ["prefork", count] => self.prefork(count.parse().map_err(io::Error::other)?)?,
            ["hand", path] => send_descriptor(&connect_unix(path)?, self.listener()?.as_raw_fd())?,
            ["hand-accepted", path] => {
                let (to, listener) = (connect_unix(path)?, self.listener()?.try_clone()?);
                thread::spawn(move || {
                    let result = listener
                        .incoming()
                        .flatten()
                        .map(|stream| send_descriptor(&to, stream.as_raw_fd()));
                    result.take_while(io::Result::is_ok).for_each(drop);
                });
            }
            ["take", path] => {
                self.listener = Some(TcpListener::from(receive_descriptor(&accept_unix(path)?)?));
            }
            ["take-accepted", path] => {
                let (from, files) = (UnixListener::bind(path)?, self.files.clone());
                thread::spawn(move || {
                    let (from, _) = from.accept().expect("a process connects");
                    while let Ok(received) = receive_descriptor(&from) {
                        serve_on_thread(TcpStream::from(received), &files);
                    }
                });
            }
            ["uring", address, options @ ..] => {
                let sqpoll = options.contains(&"sqpoll");
                return super::io_uring_server::start(address, sqpoll, &self.files);
            }
            ["close"] => self.listener = None,
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        }
        Ok(String::new())
    }

    fn listener(&self) -> io::Result<&TcpListener> {
        self.listener.as_ref().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Accepts on a thread of its own, after `ready` has run on it.
    fn accept_on_thread(&self, ready: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let (listener, files) = (self.listener()?.try_clone()?, self.files.clone());
        thread::spawn(move || {
            ready();
            accept_connections(&listener, &files);
        });
        Ok(())
    }

    fn prefork(&mut self, count: u32) -> io::Result<()> {
        for _ in 0..count {
            let inherited = Stdio::from(OwnedFd::from(self.listener()?.try_clone()?));
            let worker =
                ["robustness::server_process::worker", "--exact", "--ignored", "--nocapture"];
            let mut command = Command::new(std::env::current_exe()?);
            command
                .args(worker)
                .env(FILES_VARIABLE, self.files.path())
                .stdin(inherited)
                .stdout(Stdio::null());
            self.children.push(command.spawn()?);
        }
        Ok(())
    }
}

fn accept_connections(listener: &TcpListener, files: &RequestLogAndGate) {
    listener.incoming().flatten().for_each(|stream| serve_on_thread(stream, files));
}

fn serve_on_thread(stream: TcpStream, files: &RequestLogAndGate) {
    let files = files.clone();
    thread::spawn(move || {
        let _client_gone = serve(stream, &files);
    });
}

/// Length of the accept queue.
pub(super) const ACCEPT_QUEUE: i32 = 1_024;

fn listen(address: &str, options: &[&str]) -> io::Result<TcpListener> {
    let address: SocketAddr = address.parse().map_err(io::Error::other)?;
    let protocol = if options.contains(&"mptcp") { Protocol::MPTCP } else { Protocol::TCP };
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(protocol))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(options.contains(&"reuseport"))?;
    socket.bind(&address.into())?;
    if options.contains(&"fastopen") {
        let tcp = nix::libc::IPPROTO_TCP;
        sys::set_option(&socket, tcp, nix::libc::TCP_FASTOPEN, ACCEPT_QUEUE)?;
    }
    socket.listen(ACCEPT_QUEUE)?;
    Ok(socket.into())
}

/// Connects to the Unix socket at `path`, which exists.
fn connect_unix(path: &str) -> io::Result<UnixStream> {
    loop {
        match UnixStream::connect(path) {
            // The path appears when the socket is bound, a moment before it listens.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => thread::yield_now(),
            connected => return connected,
        }
    }
}

/// Waits for a connection to a Unix socket at `path`.
fn accept_unix(path: &str) -> io::Result<UnixStream> {
    Ok(UnixListener::bind(path)?.accept()?.0)
}

/// Sends a descriptor through a Unix socket.
fn send_descriptor(stream: &UnixStream, descriptor: RawFd) -> io::Result<()> {
    let rights = [ControlMessage::ScmRights(&[descriptor])];
    let bytes = [IoSlice::new(b".")];
    sendmsg::<UnixAddr>(stream.as_raw_fd(), &bytes, &rights, MsgFlags::empty(), None)?;
    Ok(())
}

/// Receives a descriptor from a Unix socket.
pub(super) fn receive_descriptor(from: &UnixStream) -> io::Result<OwnedFd> {
    let (mut byte, mut buffer) = ([0], cmsg_space!([RawFd; 1]));
    let (mut bytes, flags) = ([IoSliceMut::new(&mut byte)], MsgFlags::MSG_CMSG_CLOEXEC);
    let message = recvmsg::<UnixAddr>(from.as_raw_fd(), &mut bytes, Some(&mut buffer), flags)?;
    let descriptor = message.cmsgs()?.find_map(|it| match it {
        ControlMessageOwned::ScmRights(descriptors) => descriptors.first().copied(),
        _ => None,
    });
    descriptor.map(sys::take_descriptor).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}
