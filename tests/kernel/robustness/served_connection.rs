//! Shell: one connection of a server: it reads requests, logs each, and responds by every system call that sends.

use std::{
    fs::File,
    io::{self, IoSlice, Write as _},
    net::TcpStream,
    path::{Path, PathBuf},
    sync::{Arc, LazyLock},
    thread,
    time::Duration,
};

use nix::{
    fcntl::{SpliceFFlags, splice},
    libc,
    sys::sendfile::sendfile,
};
use socket2::{SockRef, TcpKeepalive};

use crate::{
    request_counts::counting_server::{ConnectionInput, respond},
    sys,
};

/// Size of the buffer that long responses are taken from.
const BUFFER_BYTES: usize = 16 << 20;
pub(super) static BODY: LazyLock<Vec<u8>> = LazyLock::new(|| vec![b'x'; BUFFER_BYTES]);

/// Files that the servers of a test share: a log with one byte for each request, and a gate.
#[derive(Clone, Debug)]
pub(super) struct RequestLogAndGate {
    log: Arc<File>,
    path: PathBuf,
}

impl RequestLogAndGate {
    /// Opens the files at the path in the environment variable; `None` if it is not set.
    pub(super) fn from_environment(variable: &str) -> Option<Self> {
        let path = PathBuf::from(std::env::var_os(variable)?);
        let log = File::options().append(true).create(true).open(&path).expect("a folder");
        Some(Self { log: Arc::new(log), path })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Logs a request whose head was read.
    pub(super) fn log_request(&self) {
        (&*self.log).write_all(b".").expect("room");
    }

    /// Path of the file that exists while the gate is open.
    pub(super) fn gate_path(path: &Path) -> PathBuf {
        path.with_extension("open")
    }

    fn wait_for_gate(&self) {
        while !Self::gate_path(&self.path).exists() {
            thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Serves a connection until it ends.
pub(super) fn serve(stream: TcpStream, files: &RequestLogAndGate) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut input = ConnectionInput::new(stream);
    loop {
        let head = String::from_utf8(input.read_until(b"\r\n\r\n")?).map_err(io::Error::other)?;
        let Some((_, after_method)) = head.split_once(" /") else { return Ok(()) };
        files.log_request();
        let path = after_method.split(' ').next().unwrap_or_default().to_owned();
        let (method_name, argument) = path.split_once('/').unwrap_or((&path, ""));
        let number = argument.parse::<u64>().unwrap_or_default();
        match method_name {
            // Closes with the body unread.
            "quit" => return Ok(()),
            "slow" => input.pause = Duration::from_micros(number),
            // Sets timeouts after which the server gives up on a silent client.
            "watch" => set_timeouts(&input.stream, number)?,
            "hold" => files.wait_for_gate(),
            "early" => drop(respond(&mut input, "length/5")?),
            _ => {}
        }
        input.skip_body(&head)?;
        input.pause = Duration::ZERO;
        let goes_on = match method_name {
            "early" => true,
            "slow" | "watch" | "hold" => respond(&mut input, "length/5")?,
            _ => match SendMethod::parse(method_name) {
                Some(method) => method.send_response(&mut input.stream, number as usize)?,
                None => respond(&mut input, &path)?,
            },
        };
        if !goes_on {
            return Ok(());
        }
    }
}

/// Sets the timeouts for a silent peer: `ms` while data is unacknowledged, and a second otherwise.
fn set_timeouts(stream: &TcpStream, ms: u64) -> io::Result<()> {
    let second = Duration::from_secs(1);
    let keep_alive = TcpKeepalive::new().with_time(second).with_interval(second).with_retries(1);
    let socket = SockRef::from(stream);
    socket.set_tcp_keepalive(&keep_alive)?;
    socket.set_tcp_user_timeout(Some(Duration::from_millis(ms)))
}

/// System call or option by which a response is sent.
#[derive(Clone, Copy, Debug)]
pub(super) enum SendMethod {
    /// Sent by sendfile(2), after a head with MSG_MORE.
    Sendfile,
    /// Sent by sendfile(2), in chunks of 10,000 bytes whose heads are sent with MSG_MORE.
    Chunks,
    /// Sent by splice(2) from a pipe.
    Splice,
    /// Sent by send(2) with MSG_ZEROCOPY.
    Zerocopy,
    /// Sent by writev(2), in pieces of 1, 2, 3 … bytes.
    Pieces,
    /// Sent by send(2) with MSG_MORE, in pieces.
    More,
    /// Sent by small writes within TCP_CORK.
    Cork,
}

impl SendMethod {
    pub(super) const ALL: [(&'static str, Self); 7] = [
        ("sendfile", Self::Sendfile),
        ("chunked-file", Self::Chunks),
        ("splice", Self::Splice),
        ("zerocopy", Self::Zerocopy),
        ("pieces", Self::Pieces),
        ("more", Self::More),
        ("cork", Self::Cork),
    ];

    fn parse(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(it, _)| *it == name).map(|(_, method)| *method)
    }

    /// Answers with `count` letters and a newline. Returns true: the connection stays open.
    fn send_response(self, out: &mut TcpStream, count: usize) -> io::Result<bool> {
        let sized = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", count + 1);
        let response = || [sized.as_bytes(), &BODY[..count], b"\n"].concat();
        match self {
            Self::Sendfile => {
                send_more(out, sized.as_bytes())?;
                send_file(out, count)?;
                out.write_all(b"\n")?;
            }
            Self::Chunks => send_chunks(out, count)?,
            Self::Splice => {
                send_more(out, sized.as_bytes())?;
                send_spliced(out, count)?;
                out.write_all(b"\n")?;
            }
            Self::Zerocopy => {
                sys::set_option(&*out, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1)?;
                send_more(out, sized.as_bytes())?;
                send_all(out, &BODY[..count], libc::MSG_ZEROCOPY)?;
                out.write_all(b"\n")?;
            }
            Self::Pieces => send_pieces(out, &response())?,
            Self::More => {
                let response = response();
                let (last, first) = response.split_last().ok_or(io::ErrorKind::InvalidInput)?;
                for piece in first.chunks(700) {
                    send_more(out, piece)?;
                }
                out.write_all(&[*last])?;
            }
            Self::Cork => {
                SockRef::from(&*out).set_tcp_cork(true)?;
                for piece in response().chunks(997) {
                    out.write_all(piece)?;
                }
                SockRef::from(&*out).set_tcp_cork(false)?;
            }
        }
        Ok(true)
    }
}

fn send_more(out: &TcpStream, bytes: &[u8]) -> io::Result<()> {
    send_all(out, bytes, libc::MSG_MORE)
}

fn send_all(out: &TcpStream, mut bytes: &[u8], flags: i32) -> io::Result<()> {
    while !bytes.is_empty() {
        let count = SockRef::from(out).send_with_flags(bytes, flags)?;
        bytes = &bytes[count..];
    }
    Ok(())
}

/// Sends `count` letters from a file.
fn send_file(out: &TcpStream, count: usize) -> io::Result<()> {
    let from = response_file()?;
    let (mut offset, end) = (0, count as libc::off_t);
    while offset < end {
        let remaining = (end - offset) as usize;
        sendfile(out, &from, Some(&mut offset), remaining)?;
    }
    Ok(())
}

/// Opens a file with as many letters as the longest response.
fn response_file() -> io::Result<File> {
    static FILE: LazyLock<io::Result<File>> = LazyLock::new(|| {
        let mut file = tempfile::tempfile()?;
        file.write_all(&BODY)?;
        Ok(file)
    });
    FILE.as_ref().map_err(|error| error.kind())?.try_clone()
}

fn send_chunks(out: &mut TcpStream, mut count: usize) -> io::Result<()> {
    const CHUNK: usize = 10_000;
    send_more(out, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")?;
    while count > 0 {
        let chunk = count.min(CHUNK);
        send_more(out, format!("{chunk:x}\r\n").as_bytes())?;
        send_file(out, chunk)?;
        send_more(out, b"\r\n")?;
        count -= chunk;
    }
    out.write_all(b"1\r\n\n\r\n0\r\n\r\n")
}

fn send_spliced(out: &TcpStream, mut count: usize) -> io::Result<()> {
    const PIPE: usize = 50_000;
    let (from, mut into) = io::pipe()?;
    while count > 0 {
        let mut piped = count.min(PIPE);
        into.write_all(&BODY[..piped])?;
        count -= piped;
        while piped > 0 {
            piped -= splice(&from, None, out, None, piped, SpliceFFlags::SPLICE_F_MORE)?;
        }
    }
    Ok(())
}

/// Sends up to 1,000 pieces of 1 to 1,000 bytes in each call.
fn send_pieces(out: &mut TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    const MOST: usize = 1_000;
    while !bytes.is_empty() {
        let mut rest = bytes;
        let pieces = (1..=MOST).map_while(|length| {
            let (piece, behind) = rest.split_at(length.min(rest.len()));
            rest = behind;
            (!piece.is_empty()).then(|| IoSlice::new(piece))
        });
        let pieces: Vec<_> = pieces.collect();
        bytes = &bytes[out.write_vectored(&pieces)?..];
    }
    Ok(())
}
