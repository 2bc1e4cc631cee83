//! Shell: a process of a test, which acts on ordinary sockets. Each line on stdin is one step.
//!
//! | line | effect | reply |
//! |---|---|---|
//! | `listen ADDRESS NAME [reuseport] [v6only] [backlog1]` | binds, listens, greets each client with NAME | `ok ADDRESS` |
//! | `ports FROM COUNT` | listens on so many ports, one after the other, and closes each | `ok` |
//! | `prefork ADDRESS NAME N` | as `listen`, with N children that share one listener | `ok ADDRESS` |
//! | `rebind ADDRESS` | binds the listener that was opened last once more | `ok` |
//! | `close` | closes the listener that was opened last | `ok` |
//! | `connect ADDRESS` | connects, keeps the socket | `ok NAME PEER` |
//! | `pending ADDRESS` | connects without blocking, waits for the result, keeps the socket | `ok NAME PEER` |
//! | `peer` | reads the peer address of the socket that connected last | `ok PEER` |
//! | `only6 ADDRESS` | connects with a socket limited to IPv6, keeps it | `ok NAME PEER` |
//! | `bound PORT ADDRESS` | connects from this local port over IPv4, keeps the socket | `ok NAME PEER` |
//! | `from IP ADDRESS` | connects from this local address, keeps the socket | `ok NAME PEER` |
//! | `device NAME ADDRESS` | connects by this network device only, keeps the socket | `ok NAME PEER` |
//! | `retry BAD GOOD` | connects to GOOD with a socket whose connect to BAD was refused, keeps it | `ok NAME PEER` |
//! | `refused ADDRESS` | connects, is refused, keeps the socket | `ok` |
//! | `disconnect` | disconnects the socket that connected last, keeps it | `ok` |
//! | `reconnect ADDRESS` | connects the disconnected socket, keeps it, also if that fails | `ok NAME PEER` |
//! | `mptcp ADDRESS` | connects by MPTCP, keeps the socket | `ok NAME PEER` |
//! | `hammer ADDRESS N` | connects N times | `ok NAME=COUNT …` |
//! | `storm ADDRESS N` | as `hammer`, and counts errors as well | `ok NAME=COUNT … errERRNO=COUNT …` |
//! | `flood ADDRESS N` | as `storm`, and resets each connection, so that no port waits | `ok NAME=COUNT … errERRNO=COUNT …` |
//! | `drop` | closes every connection | `ok` |
//!
//! The reply to a failed step is `err ERRNO`. Replies begin with `> `, unlike output of the test runner.
#![allow(clippy::print_stdout, reason = "the test that started it reads replies from stdout")]

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::Duration,
};

use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, Backlog, Shutdown, SockFlag, SockType, SockaddrStorage, bind, connect,
        listen, setsockopt, shutdown, socket, sockopt,
    },
};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::{fixture::command_in, sys};

const IPPROTO_MPTCP: i32 = 262;
/// Timeout of a server's greeting. On a busy machine each of the server's threads may wait for seconds.
const GREETING_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout of a connect that does not block.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
const ROLE: &str = "ROUSE_TEST_ACTOR";

/// Main function of this program as a scripted process, which the tests start. It is not a test itself.
#[test]
#[ignore = "a role, run by the other tests"]
fn role() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let mut sockets = ScriptedSockets::default();
    run_steps(|words| sockets.run(words));
}

/// Executes steps until the test closes stdin.
pub(crate) fn run_steps(mut step: impl FnMut(&[&str]) -> io::Result<String>) {
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match step(&words) {
            Ok(reply) => println!("\n> ok {reply}"),
            Err(error) => println!("\n> err {}", error.raw_os_error().unwrap_or(0)),
        }
    }
}

/// A process in a cgroup and a network namespace, killed on drop.
#[derive(Debug)]
pub(crate) struct ScriptedProcess {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl ScriptedProcess {
    pub(crate) fn start(cgroup: &Path, netns: &str) -> Self {
        Self::start_role("scripted_process::role", (ROLE, OsStr::new("1")), cgroup, netns)
    }

    /// Starts a process in another role that executes steps in the same way: the ignored test of that name, with a
    /// variable in its environment.
    pub(crate) fn start_role(
        role: &str,
        (name, value): (&str, &OsStr),
        cgroup: &Path,
        netns: &str,
    ) -> Self {
        let program = std::env::current_exe().expect("this program has a file");
        let mut child = command_in(cgroup, netns)
            .arg(program)
            .args([role, "--exact", "--ignored", "--nocapture"])
            .env(name, value)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("sh starts");
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().expect("stdout is piped"));
        Self { child, stdin, stdout }
    }

    /// Executes one step. Returns its reply, or the errno.
    pub(crate) fn run_step(&mut self, step: &str) -> Result<String, i32> {
        self.send_step(step);
        self.read_reply()
    }

    /// Process id of the scripted process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a step without waiting for its reply.
    pub(crate) fn send_step(&mut self, step: &str) {
        let stdin = self.stdin.as_mut().expect("it is open until drop");
        writeln!(stdin, "{step}").expect("the process runs");
    }

    /// Waits for the reply to the step that was sent.
    pub(crate) fn read_reply(&mut self) -> Result<String, i32> {
        loop {
            let mut line = String::new();
            assert_ne!(self.stdout.read_line(&mut line).expect("readable"), 0, "the process ended");
            let Some(reply) = line.trim_end().strip_prefix("> ") else { continue };
            return match reply.split_once(' ') {
                // The blank of a reply without a result was trimmed.
                None if reply == "ok" => Ok(String::new()),
                Some(("ok", rest)) => Ok(rest.to_owned()),
                Some(("err", errno)) => Err(errno.parse().expect("a number")),
                _ => panic!("`{reply}` is no reply"),
            };
        }
    }

    /// Executes one step and returns its reply; panics if it failed.
    #[track_caller]
    pub(crate) fn expect_step(&mut self, step: &str) -> String {
        self.run_step(step).unwrap_or_else(|errno| panic!("`{step}` failed with errno {errno}"))
    }
}

impl Drop for ScriptedProcess {
    fn drop(&mut self) {
        let _dead_already = self.child.kill();
        let _waited_already = self.child.wait();
    }
}

/// Parses the reply to a step that counts: `NAME=COUNT …`.
pub(crate) fn parse_counts(reply: &str) -> BTreeMap<&str, u32> {
    let counts = reply.split_whitespace().map(|word| {
        let (name, count) = word.split_once('=')?;
        Some((name, count.parse().ok()?))
    });
    counts.collect::<Option<_>>().unwrap_or_else(|| panic!("`{reply}` has no counts"))
}

#[derive(Default)]
struct ScriptedSockets {
    listeners: Vec<TcpListener>,
    connections: Vec<TcpStream>,
    children: Vec<Child>,
}

impl ScriptedSockets {
    fn run(&mut self, words: &[&str]) -> io::Result<String> {
        match words {
            ["listen" | "ports" | "prefork" | "rebind" | "close", ..] => {
                self.run_server_step(words)
            }
            _ => self.run_client_step(words),
        }
    }

    /// Executes a step of a server.
    fn run_server_step(&mut self, words: &[&str]) -> io::Result<String> {
        match words {
            ["listen", address, name, rest @ ..] => {
                let listener = open_listener(address, rest)?;
                self.start_server(listener, name)
            }
            ["prefork", address, name, count] => {
                let listener = open_listener(address, &[])?;
                self.inherit_listener(&listener, count.parse().map_err(io::Error::other)?)?;
                self.start_server(listener, name)
            }
            ["ports", from, count] => {
                let [from, count] = [from, count].map(|text| text.parse::<u16>());
                let (from, count) =
                    (from.map_err(io::Error::other)?, count.map_err(io::Error::other)?);
                for port in from..from + count {
                    open_listener(&format!("0.0.0.0:{port}"), &[])?;
                }
                Ok(String::new())
            }
            ["rebind", address] => {
                let listener = self.listeners.last().ok_or(io::ErrorKind::NotFound)?;
                let address = SockaddrStorage::from(parse_address(address)?);
                bind(listener.as_raw_fd(), &address)?;
                Ok(String::new())
            }
            ["close"] => {
                if let Some(listener) = self.listeners.pop() {
                    // The accepting thread holds a copy; shutdown ends the listener as such.
                    shutdown(listener.as_raw_fd(), Shutdown::Both)?;
                }
                Ok(String::new())
            }
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Executes a step of a client.
    fn run_client_step(&mut self, words: &[&str]) -> io::Result<String> {
        match words {
            ["connect" | "pending" | "mptcp" | "only6" | "bound" | "from" | "device", ..] => {
                let stream = open_connection(words)?;
                self.store_connection(stream)
            }
            ["peer"] => Ok(self.last_connection()?.peer_addr()?.to_string()),
            ["refused", address] => {
                self.connections.push(refused_socket(parse_address(address)?)?.into());
                Ok(String::new())
            }
            ["disconnect"] => {
                sys::disconnect(self.last_connection()?)?;
                Ok(String::new())
            }
            ["reconnect", address] => {
                let stream = self.connections.pop().ok_or(io::ErrorKind::NotConnected)?;
                let address = SockaddrStorage::from(parse_address(address)?);
                if let Err(errno) = connect(stream.as_raw_fd(), &address) {
                    self.connections.push(stream);
                    return Err(errno.into());
                }
                self.store_connection(stream)
            }
            ["retry", refused, good] => {
                let stream = connect_after_refusal(parse_address(refused)?, parse_address(good)?)?;
                self.store_connection(stream)
            }
            ["hammer", address, count] => {
                let mut counts = BTreeMap::new();
                for _ in 0..count.parse().map_err(io::Error::other)? {
                    *counts.entry(connect_once(parse_address(address)?)?).or_default() += 1;
                }
                Ok(format_counts(&counts))
            }
            ["storm", address, count] => count_outcomes(address, count, connect_once),
            ["flood", address, count] => count_outcomes(address, count, connect_and_reset),
            ["drop"] => {
                self.connections.clear();
                Ok(String::new())
            }
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Starts children that inherit the listener and keep it open, like worker processes.
    fn inherit_listener(&mut self, listener: &TcpListener, children: u32) -> io::Result<()> {
        for _ in 0..children {
            let inherited = Stdio::from(OwnedFd::from(listener.try_clone()?));
            let hold =
                Command::new("sleep").arg("60").stdin(inherited).stdout(Stdio::null()).spawn();
            self.children.push(hold?);
        }
        Ok(())
    }

    fn last_connection(&self) -> io::Result<&TcpStream> {
        self.connections.last().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn store_connection(&mut self, mut stream: TcpStream) -> io::Result<String> {
        let (name, peer) = (read_greeting(&mut stream)?, stream.peer_addr()?);
        self.connections.push(stream);
        Ok(format!("{name} {peer}"))
    }

    fn start_server(&mut self, listener: TcpListener, name: &str) -> io::Result<String> {
        let address = listener.local_addr()?;
        serve_greetings(listener.try_clone()?, name.to_owned());
        self.listeners.push(listener);
        Ok(address.to_string())
    }
}

/// Connects a new socket, in the way that the step names.
fn open_connection(words: &[&str]) -> io::Result<TcpStream> {
    match words {
        ["connect", address] => TcpStream::connect(parse_address(address)?),
        ["pending", address] => {
            TcpStream::connect_timeout(&parse_address(address)?, CONNECT_TIMEOUT)
        }
        ["mptcp", address] => connect_mptcp(parse_address(address)?),
        ["only6", address] => connect_prepared(address, |socket| socket.set_only_v6(true)),
        ["bound", port, address] => {
            let port: u16 = port.parse().map_err(io::Error::other)?;
            connect_prepared(address, |socket| {
                // Sockets that connect may share a local port.
                socket.set_reuse_address(true)?;
                socket.bind(&SocketAddr::from(([0, 0, 0, 0], port)).into())
            })
        }
        ["from", local, address] => {
            let local: IpAddr = local.parse().map_err(io::Error::other)?;
            connect_prepared(address, |socket| socket.bind(&SocketAddr::new(local, 0).into()))
        }
        ["device", name, address] => {
            connect_prepared(address, |socket| socket.bind_device(Some(name.as_bytes())))
        }
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// Connects a new socket that was prepared before.
fn connect_prepared(
    address: &str,
    prepare: impl FnOnce(&Socket) -> io::Result<()>,
) -> io::Result<TcpStream> {
    let address = parse_address(address)?;
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    prepare(&socket)?;
    socket.connect(&address.into())?;
    Ok(socket.into())
}

/// Connects once and returns the name of the server.
fn connect_once(address: SocketAddr) -> io::Result<String> {
    read_greeting(&mut TcpStream::connect(address)?)
}

/// Connects once, resets the connection, and returns the name of the server.
fn connect_and_reset(address: SocketAddr) -> io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    read_greeting(&mut stream)
}

/// Connects so many times. Returns the numbers of connects by the name of the server, or by the error.
fn count_outcomes(
    address: &str,
    count: &str,
    connect: impl Fn(SocketAddr) -> io::Result<String>,
) -> io::Result<String> {
    let mut counts = BTreeMap::new();
    for _ in 0..count.parse().map_err(io::Error::other)? {
        let name = connect(parse_address(address)?)
            .unwrap_or_else(|error| format!("err{}", error.raw_os_error().unwrap_or_default()));
        *counts.entry(name).or_default() += 1;
    }
    Ok(format_counts(&counts))
}

fn format_counts(counts: &BTreeMap<String, u32>) -> String {
    let counts: Vec<_> = counts.iter().map(|(name, count)| format!("{name}={count}")).collect();
    counts.join(" ")
}

fn parse_address(address: &str) -> io::Result<SocketAddr> {
    address.parse().map_err(io::Error::other)
}

fn open_listener(address: &str, options: &[&str]) -> io::Result<TcpListener> {
    let address = parse_address(address)?;
    let fd = tcp_socket(address)?;
    setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    setsockopt(&fd, sockopt::ReusePort, &options.contains(&"reuseport"))?;
    if options.contains(&"v6only") {
        setsockopt(&fd, sockopt::Ipv6V6Only, &true)?;
    }
    bind(fd.as_raw_fd(), &SockaddrStorage::from(address))?;
    let backlog = if options.contains(&"backlog1") { 1 } else { 128 };
    listen(&fd, Backlog::new(backlog)?)?;
    Ok(TcpListener::from(fd))
}

fn tcp_socket(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    Ok(socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?)
}

fn connect_mptcp(address: SocketAddr) -> io::Result<TcpStream> {
    let protocol = Some(Protocol::from(IPPROTO_MPTCP));
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, protocol)?;
    socket.connect(&address.into())?;
    Ok(socket.into())
}

fn connect_after_refusal(refused_address: SocketAddr, good: SocketAddr) -> io::Result<TcpStream> {
    let fd = refused_socket(refused_address)?;
    connect(fd.as_raw_fd(), &SockaddrStorage::from(good))?;
    Ok(TcpStream::from(fd))
}

/// Returns a socket whose connect was refused.
fn refused_socket(address: SocketAddr) -> io::Result<OwnedFd> {
    let fd = tcp_socket(address)?;
    let result = connect(fd.as_raw_fd(), &SockaddrStorage::from(address));
    if result != Err(Errno::ECONNREFUSED) {
        return Err(io::Error::other(format!("{result:?} instead of a refusal")));
    }
    Ok(fd)
}

fn serve_greetings(listener: TcpListener, name: String) {
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { break };
            let name = name.clone();
            // Keeps the connection open until the client closes it.
            std::thread::spawn(move || {
                let _client_left = writeln!(stream, "{name}");
                let _end = stream.read(&mut [0]);
            });
        }
    });
}

/// Reads the name that the server sends as its greeting.
pub(crate) fn read_greeting(stream: &mut TcpStream) -> io::Result<String> {
    stream.set_read_timeout(Some(GREETING_TIMEOUT))?;
    let mut name = Vec::new();
    let mut byte = [0];
    loop {
        stream.read_exact(&mut byte)?;
        if byte[0] == b'\n' {
            return Ok(String::from_utf8_lossy(&name).into_owned());
        }
        name.push(byte[0]);
    }
}
