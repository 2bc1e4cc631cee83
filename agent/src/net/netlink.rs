//! Shell: one netlink request and all its responses, in the network namespace of the calling thread.

use std::{
    io,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REQUEST, NetlinkDeserializable,
    NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};
use netlink_sys::{Socket, SocketAddr};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

/// Timeout of a response. The kernel responds by itself, so a later response will not come.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Size of one read in bytes. The kernel fills dumps up to 32 KiB.
const READ_BYTES: usize = 64 * 1024;

/// Socket of one netlink family. It stays in the namespace in which it was opened.
#[derive(Debug)]
pub(crate) struct NetlinkSocket {
    socket: Socket,
}

impl NetlinkSocket {
    /// Opens a socket of `family` (`NETLINK_ROUTE`, `NETLINK_SOCK_DIAG`).
    pub(crate) fn open(family: isize) -> io::Result<Self> {
        let mut socket = Socket::new(family)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self { socket })
    }

    /// Returns the socket, for queries about its namespace.
    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Requests a dump and passes each response to `each`. Returns an error if the kernel could not list all.
    pub(crate) fn dump<T>(&self, request: T, mut each: impl FnMut(T)) -> io::Result<()>
    where
        T: NetlinkSerializable + NetlinkDeserializable + Into<NetlinkPayload<T>>,
    {
        self.send(request, NLM_F_REQUEST | NLM_F_DUMP)?;
        self.receive_responses(&mut each)
    }

    /// Requests one object and passes the response to `each`. Returns an error if there is no such object.
    pub(crate) fn get<T>(&self, request: T, mut each: impl FnMut(T)) -> io::Result<()>
    where
        T: NetlinkSerializable + NetlinkDeserializable + Into<NetlinkPayload<T>>,
    {
        // Acknowledged, so that the end of the response is known.
        self.send(request, NLM_F_REQUEST | NLM_F_ACK)?;
        self.receive_responses(&mut each)
    }

    /// Sends a command and waits for its acknowledgement.
    pub(crate) fn command<T>(&self, command: T) -> io::Result<()>
    where
        T: NetlinkSerializable + NetlinkDeserializable + Into<NetlinkPayload<T>>,
    {
        self.send(command, NLM_F_REQUEST | NLM_F_ACK)?;
        self.receive_responses(&mut |_: T| ())
    }

    /// Sends a command that makes an object, and waits for its acknowledgement. Returns an error if the object exists.
    pub(crate) fn create<T>(&self, command: T) -> io::Result<()>
    where
        T: NetlinkSerializable + NetlinkDeserializable + Into<NetlinkPayload<T>>,
    {
        self.send(command, NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL)?;
        self.receive_responses(&mut |_: T| ())
    }

    fn send<T>(&self, payload: T, flags: u16) -> io::Result<()>
    where
        T: NetlinkSerializable + Into<NetlinkPayload<T>>,
    {
        let mut message = NetlinkMessage::from(payload);
        message.header.flags = flags;
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.socket.send(&bytes, 0).map(drop)
    }

    fn receive_responses<T: NetlinkDeserializable>(
        &self,
        each: &mut impl FnMut(T),
    ) -> io::Result<()> {
        let mut buffer = Vec::with_capacity(READ_BYTES);
        loop {
            wait_for_response(&self.socket, RESPONSE_TIMEOUT)?;
            buffer.clear();
            self.socket.recv(&mut buffer, 0)?;
            if handle_datagram(&buffer, each)? {
                return Ok(());
            }
        }
    }
}

/// Waits until a socket has a response to read; the error after `limit` is of the kind `TimedOut`.
pub(super) fn wait_for_response(socket: impl AsFd, limit: Duration) -> io::Result<()> {
    let started = Instant::now();
    loop {
        let mut ready = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
        let remaining = limit.saturating_sub(started.elapsed());
        let timeout = PollTimeout::try_from(remaining).unwrap_or(PollTimeout::MAX);
        match poll(&mut ready, timeout) {
            // A signal that this thread handled says nothing about the response.
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
        }
    }
}

/// Handles one datagram of responses. Returns true if it was the last.
fn handle_datagram<T: NetlinkDeserializable>(
    mut bytes: &[u8],
    each: &mut impl FnMut(T),
) -> io::Result<bool> {
    let bad = |error| io::Error::new(io::ErrorKind::InvalidData, error);
    while !bytes.is_empty() {
        let message = NetlinkMessage::<T>::deserialize(bytes).map_err(bad)?;
        // Messages are aligned to four bytes within a datagram. At least four, so that a length of 0 cannot loop.
        let length = (message.header.length as usize).next_multiple_of(4).max(4);
        bytes = bytes.get(length..).unwrap_or_default();
        match message.payload {
            NetlinkPayload::InnerMessage(response) => each(response),
            // A dump that fails also ends so, as one of a protocol that the kernel cannot list.
            NetlinkPayload::Done(end) if end.code < 0 => {
                return Err(io::Error::from_raw_os_error(end.code.saturating_neg()));
            }
            NetlinkPayload::Done(_) => return Ok(true),
            NetlinkPayload::Error(error) if error.code.is_none() => return Ok(true),
            NetlinkPayload::Error(error) => return Err(error.to_io()),
            _ => {}
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, os::unix::net::UnixStream, thread};

    use netlink_packet_route::RouteNetlinkMessage;
    use nix::{
        sys::{
            signal::{SigEvent, SigevNotify, Signal},
            time::TimeSpec,
            timer::{Expiration, Timer, TimerSetTimeFlags},
        },
        time::ClockId,
        unistd::gettid,
    };
    use tokio::signal::unix::{SignalKind, signal};

    use super::*;

    /// Interrupts the calling thread each millisecond, until the timer is dropped.
    fn interrupt_this_thread() -> Timer {
        let thread_id = gettid().as_raw();
        let notify = SigevNotify::SigevThreadId { signal: Signal::SIGUSR2, thread_id, si_value: 0 };
        let timer = Timer::new(ClockId::CLOCK_MONOTONIC, SigEvent::new(notify));
        let mut timer = timer.expect("a timer");
        let each_ms = Expiration::Interval(TimeSpec::from(Duration::from_millis(1)));
        timer.set(each_ms, TimerSetTimeFlags::empty()).expect("a time");
        timer
    }

    #[tokio::test]
    async fn a_signal_does_not_end_the_wait_for_a_response() {
        let mut signals = signal(SignalKind::user_defined2()).expect("a handler");
        let (ours, mut kernel) = UnixStream::pair().expect("sockets");
        let waiting = thread::spawn(move || {
            let _timer = interrupt_this_thread();
            wait_for_response(&ours, Duration::from_secs(50)).map_err(|error| error.kind())
        });
        for _ in 0..5 {
            signals.recv().await.expect("a signal");
        }
        kernel.write_all(b"response").expect("a peer");
        assert_eq!(waiting.join().expect("no panic"), Ok(()));
    }

    /// Returns the message at the end of a dump, as the kernel sends it.
    fn end_of_dump(code: i32) -> Vec<u8> {
        let (length, kind, flags) = (20_u32.to_ne_bytes(), 3_u16.to_ne_bytes(), [0; 2]);
        [&length[..], &kind, &flags, &[0; 8], &code.to_ne_bytes()].concat()
    }

    #[test]
    fn a_dump_that_ends_with_an_error_is_no_empty_list() {
        let handle = |code| handle_datagram(&end_of_dump(code), &mut |_: RouteNetlinkMessage| ());
        assert!(handle(0).expect("it ends"), "it was the last");
        let error = handle(-libc::ENOENT).expect_err("nothing was listed");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_response_that_does_not_come_is_an_error() {
        let (ours, _kernel) = UnixStream::pair().expect("sockets");
        let waited = wait_for_response(&ours, Duration::from_millis(1));
        assert_eq!(waited.map_err(|error| error.kind()), Err(io::ErrorKind::TimedOut));
    }
}
