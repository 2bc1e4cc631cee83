//! Shell: a server that works by io_uring alone: it listens, accepts, receives, and sends in all supported ways.

use std::{
    io::{self, IoSlice, Write as _},
    net::SocketAddr,
    os::fd::{AsFd as _, OwnedFd},
    thread,
};

use nix::sys::socket::SockaddrStorage;
use socket2::{Domain, Socket, Type};

use super::{
    served_connection::{BODY, RequestLogAndGate},
    server_process::ACCEPT_QUEUE,
};
use crate::sys::SyncIoUring;

/// Ways to send responses, chosen by the path. `zerocopy` is last, because kernels before 6.0 lack it.
pub(super) const SEND_METHODS: [&str; 5] = ["send", "linked", "writev", "splice", "zerocopy"];

/// Listens and serves on threads of its own. Returns the ways that the kernel supports, and `listen` if it supports
/// that.
pub(super) fn start(address: &str, sqpoll: bool, files: &RequestLogAndGate) -> io::Result<String> {
    let address: SocketAddr = address.parse().map_err(io::Error::other)?;
    let mut ring = SyncIoUring::new(sqpoll)?;
    let [zerocopy, listens] = ring.supported_features()?;
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    if listens {
        ring.bind(&socket, &SockaddrStorage::from(address))?;
        ring.listen(&socket, ACCEPT_QUEUE)?;
    } else {
        socket.bind(&address.into())?;
        socket.listen(ACCEPT_QUEUE)?;
    }
    let files = files.clone();
    thread::spawn(move || {
        while let Ok(accepted) = ring.accept(&socket) {
            let files = files.clone();
            thread::spawn(move || {
                SyncIoUring::new(sqpoll).and_then(|ring| serve(ring, &accepted, &files))
            });
        }
    });
    let methods = if zerocopy { &SEND_METHODS[..] } else { &SEND_METHODS[..4] };
    Ok(methods.join(" ") + if listens { " listen" } else { "" })
}

fn serve(mut ring: SyncIoUring, stream: &OwnedFd, files: &RequestLogAndGate) -> io::Result<()> {
    let (mut received, mut buffer) = (Vec::new(), vec![0; 65_536]);
    loop {
        while let Some(head_end) = received.windows(4).position(|it| it == b"\r\n\r\n") {
            let head: Vec<u8> = received.drain(..head_end + 4).collect();
            files.log_request();
            let head = String::from_utf8(head).map_err(io::Error::other)?;
            let path = head.split(' ').nth(1).and_then(|path| path[1..].split_once('/'));
            let (method, count) = path.ok_or(io::ErrorKind::InvalidData)?;
            send_response(&mut ring, stream, method, count.parse().map_err(io::Error::other)?)?;
        }
        let count = ring.recv(stream, &mut buffer)?;
        if count == 0 {
            return Ok(());
        }
        received.extend_from_slice(&buffer[..count]);
    }
}

/// Answers with `count` letters and a newline.
fn send_response(
    ring: &mut SyncIoUring,
    stream: &OwnedFd,
    method: &str,
    count: usize,
) -> io::Result<()> {
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", count + 1);
    let body = &BODY[..count];
    match method {
        "send" => {
            let response = [head.as_bytes(), body].concat();
            send_all(response.len(), |at| ring.send(stream, &response[at..]))?;
        }
        "linked" => {
            let sent = ring.send_linked(stream, [head.as_bytes(), body])?;
            send_all(count - sent, |at| ring.send(stream, &body[sent + at..]))?;
        }
        "writev" => {
            let response = [head.as_bytes(), body].concat();
            send_all(response.len(), |at| {
                // Many odd pieces, below the limit of writev(2) (IOV_MAX is 1,024).
                let pieces: Vec<_> =
                    response[at..].chunks(701).take(900).map(IoSlice::new).collect();
                ring.writev(stream, &pieces)
            })?;
        }
        "splice" => {
            let response = [head.as_bytes(), body].concat();
            // A pipe holds 64 KiB: a larger write would block, because nothing reads the pipe yet.
            for piece in response.chunks(50_000) {
                let (from, mut into) = io::pipe()?;
                into.write_all(piece)?;
                send_all(piece.len(), |at| ring.splice(&from, stream, piece.len() - at))?;
            }
        }
        "zerocopy" => {
            send_all(head.len(), |at| ring.send(stream, &head.as_bytes()[at..]))?;
            send_all(count, |at| ring.send_zerocopy(stream, &body[at..]))?;
        }
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    }
    ring.send(stream.as_fd(), b"\n").map(drop)
}

/// Calls `send` with the number of bytes sent so far, until all are sent.
fn send_all(count: usize, mut send: impl FnMut(usize) -> io::Result<usize>) -> io::Result<()> {
    let mut sent = 0;
    while sent < count {
        sent += send(sent)?;
    }
    Ok(())
}
