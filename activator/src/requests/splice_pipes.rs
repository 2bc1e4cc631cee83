//! Shell: pipes of the kernel, through which bytes go from one socket to another without a copy in user space.
//!
//! A pipe costs two file descriptors, so there are few of them. A connection uses one only while many bytes pass, and
//! otherwise copies.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, SpliceFFlags, splice},
    unistd::pipe2,
};
use tokio::{io::Interest, net::TcpStream};
use tracing::info;

/// Maximum number of pipes. With their two file descriptors each, they leave half of the reserve for other files.
const MAX_PIPES: usize = 64;
/// Number of bytes that are moved at once: the size of a pipe.
const PIPE_BYTES: usize = 64 << 10;

/// Pipes of all connections.
#[derive(Debug, Default)]
pub(crate) struct SplicePipes {
    state: Mutex<SplicePipesState>,
    /// True once the kernel has refused to move bytes between a socket and a pipe.
    is_unsupported: AtomicBool,
}

#[derive(Debug, Default)]
struct SplicePipesState {
    /// Empty pipes that no connection uses.
    idle: Vec<PipeEnds>,
    /// Number of pipes that are open, idle or in use.
    open: usize,
}

#[derive(Debug)]
struct PipeEnds {
    read: OwnedFd,
    write: OwnedFd,
}

impl SplicePipes {
    /// Lends a pipe for a while. `None`: all are in use, no further one can be opened, or the kernel supports none.
    pub(crate) fn lend(&self) -> Option<LentPipe<'_>> {
        if self.is_unsupported.load(Ordering::Relaxed) {
            return None;
        }
        let mut state = self.lock();
        let ends = match state.idle.pop() {
            Some(ends) => ends,
            None if state.open == MAX_PIPES => return None,
            None => {
                // Non-blocking, since a task must never wait in the kernel.
                let (read, write) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).ok()?;
                state.open += 1;
                PipeEnds { read, write }
            }
        };
        Some(LentPipe { pipes: self, ends: Some(ends), held: 0 })
    }

    fn lock(&self) -> MutexGuard<'_, SplicePipesState> {
        // A panic cannot leave the state inconsistent: each change of it completes.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark_unsupported(&self) {
        if !self.is_unsupported.swap(true, Ordering::Relaxed) {
            info!("no splice between socket and pipe: bytes of TCP connections are copied");
        }
    }
}

/// Pipe that one direction of one connection uses. Dropping it gives it back, if it is empty.
#[derive(Debug)]
pub(crate) struct LentPipe<'a> {
    pipes: &'a SplicePipes,
    /// Both ends, until they are given back.
    ends: Option<PipeEnds>,
    /// Number of bytes in the pipe.
    held: usize,
}

impl LentPipe<'_> {
    /// Returns true if all bytes have left the pipe.
    pub(crate) fn is_empty(&self) -> bool {
        self.held == 0
    }

    /// Moves bytes from a socket into the pipe, which must be empty. Returns false if none can be moved. Only a read
    /// finds out then if there are none, or an urgent byte is next, or the end.
    pub(crate) fn try_fill(&mut self, from: &TcpStream) -> io::Result<bool> {
        let Some(ends) = &self.ends else { return Ok(false) };
        let (flags, most) = (SpliceFFlags::SPLICE_F_NONBLOCK, PIPE_BYTES);
        // Not by `try_io`: before an urgent byte the socket stays readable, although nothing is moved.
        match splice(from, None, &ends.write, None, most, flags) {
            Ok(count) => self.held = count,
            Err(Errno::EAGAIN) => {}
            Err(Errno::EINVAL) => self.pipes.mark_unsupported(),
            Err(error) => return Err(error.into()),
        }
        Ok(!self.is_empty())
    }

    /// Moves bytes from the pipe into a socket. Fails with `WouldBlock` while the socket takes none.
    pub(crate) fn try_drain(&mut self, to: &TcpStream) -> io::Result<()> {
        let Some(ends) = &self.ends else { return Ok(()) };
        let (flags, held) = (SpliceFFlags::SPLICE_F_NONBLOCK, self.held);
        let moved = to.try_io(Interest::WRITABLE, || {
            splice(&ends.read, None, to, None, held, flags).map_err(io::Error::from)
        })?;
        if moved == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        self.held -= moved;
        Ok(())
    }
}

impl Drop for LentPipe<'_> {
    fn drop(&mut self) {
        let Some(ends) = self.ends.take() else { return };
        let mut state = self.pipes.lock();
        // Bytes of a connection that has broken off must not reach another one.
        if self.held == 0 {
            state.idle.push(ends);
        } else {
            state.open -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;

    /// Number of pipes that are open, and of those that no connection uses.
    fn open_and_idle(pipes: &SplicePipes) -> (usize, usize) {
        let state = pipes.lock();
        (state.open, state.idle.len())
    }

    async fn connect() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (client, listener.accept().await.unwrap().0)
    }

    #[tokio::test]
    async fn bytes_pass_through_a_pipe_which_is_then_used_again() {
        let (pipes, (mut client, from)) = (SplicePipes::default(), connect().await);
        let (to, mut pod) = connect().await;
        for text in [b"first", b"again"] {
            let mut pipe = pipes.lend().unwrap();
            client.write_all(text).await.unwrap();
            from.readable().await.unwrap();
            assert!(pipe.try_fill(&from).unwrap());
            to.writable().await.unwrap();
            pipe.try_drain(&to).unwrap();
            assert!(pipe.is_empty());
            assert!(!pipe.try_fill(&from).unwrap(), "nothing has come");
            assert!(from.try_read(&mut [0]).is_err(), "the next wait is for more bytes");
            let mut got = [0; 5];
            pod.read_exact(&mut got).await.unwrap();
            assert_eq!(&got, text);
        }
        assert_eq!(open_and_idle(&pipes), (1, 1));
    }

    #[tokio::test]
    async fn a_pipe_with_bytes_of_a_broken_connection_is_not_used_again() {
        let (pipes, (mut client, from)) = (SplicePipes::default(), connect().await);
        client.write_all(b"secret").await.unwrap();
        from.readable().await.unwrap();
        let mut pipe = pipes.lend().unwrap();
        assert!(pipe.try_fill(&from).unwrap());
        drop(pipe);
        assert_eq!(open_and_idle(&pipes), (0, 0));
    }

    #[test]
    fn pipes_are_bounded() {
        let pipes = SplicePipes::default();
        let lent: Vec<_> = std::iter::from_fn(|| pipes.lend()).take(MAX_PIPES + 1).collect();
        assert_eq!(lent.len(), MAX_PIPES);
        drop(lent);
        assert_eq!(open_and_idle(&pipes), (MAX_PIPES, MAX_PIPES));
        assert!(pipes.lend().is_some());
    }
}
