//! Shell: closes of persistent connections under their locks: idle ones are closed, and used ones never.
#![allow(
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "no runtime here; clients wait for random moments, and the figures go beside the test's result"
)]

use std::{
    collections::{BTreeSet, HashSet},
    io::{self, ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
    time::Duration,
};

use crate::{
    fixture::{NetnsFixture, SharedKernelFixture, in_netns},
    sys,
};
use agent::{
    kernel::locked_close::{CloseCounts, IdlePosition, LockedCloser, PositionOutcome},
    net::sockdiag::{DiagConnection, SockDiag},
};
use aya::util::KernelVersion;
use datapath::abi;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Bytes of a request, and of a response.
const MESSAGE: [u8; 64] = [b'.'; 64];
/// Number of clients that write at random moments, and number of their connections to close meanwhile.
const CLIENTS: usize = 24;
const CONNECTIONS_TO_CLOSE: u64 = 2_000;
/// Longest pause of a client before it writes, and of the server before it responds, in µs.
const PAUSE_US: u64 = 10_000;

/// Makes a fixture with one namespace; `None` on kernels without a closer of connections.
fn closer_fixture() -> Option<(SharedKernelFixture, NetnsFixture)> {
    let mut fixture = SharedKernelFixture::new();
    let client_netns = fixture.add_client();
    if fixture.locked_closer.is_none() {
        let kernel = KernelVersion::current().expect("it has a version");
        assert!(kernel < KernelVersion::new(6, 5, 0), "{kernel:?} can close them");
        return None;
    }
    Some((fixture, client_netns))
}

/// Closer of a fixture that has one.
fn closer_of(fixture: &mut SharedKernelFixture) -> &mut LockedCloser {
    fixture.locked_closer.as_mut().expect("the fixture was chosen for it")
}

/// Closes connections, and returns the numbers of the outcomes.
fn close(closer: &mut LockedCloser, connections: &[&DiagConnection]) -> CloseCounts {
    let (mut counts, mut closed) = (CloseCounts::default(), BTreeSet::new());
    closer.close(connections, &mut counts, &mut closed).expect("as many walks as it takes");
    let listed: BTreeSet<u64> = connections.iter().map(|it| it.cookie()).collect();
    assert!(closed.is_subset(&listed), "{closed:?} of {listed:?}");
    assert_eq!(closed.len() as u64, counts.closed);
    counts
}

/// Creates the two ends of a connection.
fn connected_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let client = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
    let (server, _) = listener.accept().expect("it came");
    (client, server)
}

/// Entry of this connection in the kernel's socket list.
fn find_socket(stream: &TcpStream) -> DiagConnection {
    let local_address = stream.local_addr().expect("connected");
    let sockets = SockDiag::open().and_then(|diag| diag.connections()).expect("a dump");
    sockets.into_iter().find(|it| it.local == local_address).expect("it is listed")
}

/// Entry of this connection once the peer has acknowledged `bytes` bytes. The SYN counts as one more.
fn find_acknowledged_socket(stream: &TcpStream, bytes: u64) -> DiagConnection {
    loop {
        let socket = find_socket(stream);
        if socket.activity.bytes_acked > bytes {
            return socket;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn only_a_connection_that_is_as_it_was_listed_is_closed() {
    let Some((mut fixture, client_netns)) = closer_fixture() else { return };
    let closer = closer_of(&mut fixture);
    const SPARED: CloseCounts = CloseCounts { closed: 0, spared: 1 };
    const CLOSED: CloseCounts = CloseCounts { closed: 1, spared: 0 };
    in_netns(&client_netns.netns, || {
        let (mut client, mut server) = connected_pair();
        let before = find_socket(&client);
        client.write_all(b"request").expect("an open connection");
        assert_eq!(close(closer, &[&before]), SPARED, "written to");
        server.read_exact(&mut [0; 7]).expect("an open connection");
        let socket = find_acknowledged_socket(&client, 7);
        assert_eq!(close(closer, &[&socket]), SPARED, "not answered");
        server.write_all(b"response").expect("an open connection");
        assert_eq!(close(closer, &[&socket]), SPARED, "answered");
        let answered = find_socket(&client);
        assert_eq!(close(closer, &[&answered]), SPARED, "not read");
        client.read_exact(&mut [0; 8]).expect("an open connection");
        assert_eq!(close(closer, &[&answered]), CLOSED, "idle");
        let refused = client.write(b"next").expect_err("it has ended");
        assert_eq!(refused.kind(), ErrorKind::ConnectionAborted);
        let reset = server.read(&mut [0]).expect_err("not even a byte came");
        assert_eq!(reset.kind(), ErrorKind::ConnectionReset);
        assert_eq!(close(closer, &[&answered]), CloseCounts::default(), "gone");
    });
}

/// Closes the connection of one socket at a position; `None` if the walk has not reached it.
fn close_at(
    closer: &mut LockedCloser,
    socket: &DiagConnection,
    position: IdlePosition,
) -> Option<PositionOutcome> {
    let mut outcomes = Vec::new();
    let sockets = [(socket.cookie(), position)];
    closer.close_at_positions(&sockets, &mut outcomes).expect("as many walks as it takes");
    assert!(outcomes.iter().all(|(cookie, _)| *cookie == socket.cookie()));
    outcomes.pop().map(|(_, outcome)| outcome)
}

/// Position at which the connection of a client's socket stands now.
fn position_of(client: &TcpStream) -> IdlePosition {
    let [client_seq, pod_seq] = sys::next_sequence_numbers(client).expect("root may");
    IdlePosition { client_seq, pod_seq }
}

#[test]
fn a_connection_is_closed_only_where_it_stands_at_its_position() {
    let Some((mut fixture, client_netns)) = closer_fixture() else { return };
    let closer = closer_of(&mut fixture);
    in_netns(&client_netns.netns, || {
        let (mut client, mut server) = connected_pair();
        let socket = find_socket(&client);
        let unused = position_of(&client);
        client.write_all(b"request").expect("an open connection");
        let passed = Some(PositionOutcome::Passed);
        assert_eq!(close_at(closer, &socket, unused), passed, "the client has written since");
        server.read_exact(&mut [0; 7]).expect("an open connection");
        find_acknowledged_socket(&client, 7);
        let asked = position_of(&client);
        let answered = IdlePosition { pod_seq: asked.pod_seq.wrapping_add(8), ..asked };
        let not_reached = Some(PositionOutcome::NotReached);
        assert_eq!(close_at(closer, &socket, answered), not_reached, "the response is under way");
        server.write_all(b"response").expect("an open connection");
        client.peek(&mut [0]).expect("it came");
        assert_eq!(close_at(closer, &socket, answered), not_reached, "it is not read");
        assert_eq!(close_at(closer, &socket, asked), passed, "the server has written since");
        client.read_exact(&mut [0; 8]).expect("an open connection");
        assert_eq!(close_at(closer, &socket, unused), passed, "an old report");
        assert_eq!(close_at(closer, &socket, answered), Some(PositionOutcome::Closed));
        let refused = client.write(b"next").expect_err("it has ended");
        assert_eq!(refused.kind(), ErrorKind::ConnectionAborted);
        assert_eq!(close_at(closer, &socket, answered), None, "gone");
    });
}

/// Alternative for older kernels, without locks.
#[test]
fn without_a_lock_a_connection_is_read_again_and_closed_by_its_address() {
    let mut fixture = SharedKernelFixture::new();
    let client_netns = fixture.add_client();
    in_netns(&client_netns.netns, || {
        let (mut client, mut server) = connected_pair();
        server.write_all(b"x").expect("an open connection");
        client.read_exact(&mut [0]).expect("an open connection");
        let (socket, diag) = (find_socket(&client), SockDiag::open().expect("netlink"));
        assert_eq!(diag.refresh(&socket).expect("an open connection").activity.bytes_received, 1);
        diag.destroy(&socket).expect("root may");
        let refused = client.write(b"next").expect_err("it has ended");
        assert_eq!(refused.kind(), ErrorKind::ConnectionAborted);
        let error = diag.destroy(&socket).expect_err("it has ended");
        assert_eq!(error.kind(), ErrorKind::NotFound);
    });
}

#[test]
fn connections_of_both_families_are_closed_and_others_left_alone() {
    let Some((mut fixture, client_netns)) = closer_fixture() else { return };
    let closer = closer_of(&mut fixture);
    in_netns(&client_netns.netns, || {
        let listener = TcpListener::bind("[::]:0").expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let connect = |ip: &str| TcpStream::connect(format!("{ip}:{port}")).expect("it listens");
        let clients = ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "127.0.0.1"].map(connect);
        let sockets = [0, 1, 2].map(|client: usize| find_socket(&clients[client]));
        let stale: Vec<&DiagConnection> = sockets.iter().collect();
        assert_eq!(close(closer, &stale), CloseCounts { closed: 3, spared: 0 });
        let closed = clients.map(|mut client| client.write(b"x").is_err());
        assert_eq!(closed, [true, true, true, false]);
    });
}

/// The number of connections exceeds the capacity of one walk.
#[test]
fn more_connections_than_one_walk_takes_are_closed_by_further_walks() {
    const MORE: usize = 40;
    let Some((mut fixture, client_netns)) = closer_fixture() else { return };
    let closer = closer_of(&mut fixture);
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("its own limit");
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).expect("up to the hard limit");
    in_netns(&client_netns.netns, || {
        let count = abi::ENDING_MAX as usize + MORE;
        let pairs: Vec<_> = (0..count).map(|_| connected_pair()).collect();
        let client_ports: HashSet<_> =
            pairs.iter().map(|(client, _)| client.local_addr().expect("connected")).collect();
        let listed = SockDiag::open().and_then(|diag| diag.connections()).expect("a dump");
        let stale: Vec<&DiagConnection> =
            listed.iter().filter(|it| client_ports.contains(&it.local)).collect();
        assert_eq!(stale.len(), count);
        let closed = close(closer, &stale);
        assert_eq!(closed, CloseCounts { closed: count as u64, spared: 0 });
    });
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).expect("as before");
}

#[test]
fn a_walk_stays_in_the_namespace_it_began_in() {
    let Some((mut fixture, client_netns)) = closer_fixture() else { return };
    let other = fixture.add_client();
    let closer = closer_of(&mut fixture);
    let (mut client, _server, socket) = in_netns(&client_netns.netns, || {
        let (client, server) = connected_pair();
        let socket = find_socket(&client);
        (client, server, socket)
    });
    let closed = in_netns(&other.netns, || close(closer, &[&socket]));
    assert_eq!(closed, CloseCounts::default());
    client.write_all(b"x").expect("an open connection");
}

/// Results of clients whose connections are closed while they use them.
#[derive(Default)]
struct CloseRaceTotals {
    is_stopped: AtomicBool,
    answered: AtomicU64,
    /// Requests of which not even a part was written: they are sent again on another connection.
    refused: AtomicU64,
    /// Requests that were written as a whole and got no response.
    lost: AtomicU64,
}

impl CloseRaceTotals {
    fn is_running(&self) -> bool {
        !self.is_stopped.load(Relaxed)
    }

    /// Runs one client: it sends requests at random moments on a connection until that is closed, then on another.
    fn run_client(&self, server: SocketAddr, mut pauses: PauseRng) {
        while self.is_running() {
            let mut connection = match TcpStream::connect(server) {
                Ok(connection) => connection,
                // The test closes unused connections, too, even before the call returns. Nothing was written.
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {
                    self.refused.fetch_add(1, Relaxed);
                    continue;
                }
                Err(error) => panic!("it listens: {error}"),
            };
            while self.is_running() {
                pauses.sleep_random();
                let Ok(()) = connection.write_all(&MESSAGE) else {
                    self.refused.fetch_add(1, Relaxed);
                    break;
                };
                if connection.read_exact(&mut MESSAGE.clone()).is_err() {
                    self.lost.fetch_add(1, Relaxed);
                    break;
                }
                self.answered.fetch_add(1, Relaxed);
            }
        }
    }
}

/// Serves all connections, until one arrives after `is_closing` is set.
fn serve(listener: &TcpListener, is_closing: &AtomicBool) {
    for connection in listener.incoming().take_while(|_| !is_closing.load(Relaxed)) {
        thread::spawn(|| respond_until_closed(connection.expect("it came")));
    }
}

/// Answers every message after a random pause, until the connection ends.
fn respond_until_closed(mut connection: TcpStream) -> io::Result<()> {
    let mut pauses = PauseRng(u64::from(connection.peer_addr()?.port()));
    loop {
        connection.read_exact(&mut MESSAGE.clone())?;
        pauses.sleep_random();
        connection.write_all(&MESSAGE)?;
    }
}

/// Generator of random pauses.
struct PauseRng(u64);

impl PauseRng {
    fn sleep_random(&mut self) {
        // Marsaglia's xorshift.
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        // Every second pause has length zero.
        if self.0 & 1 == 0 {
            thread::sleep(Duration::from_micros((self.0 >> 1) % PAUSE_US));
        }
    }
}

/// Lets clients write at random moments while `close` closes their connections as fast as it can.
fn close_while_clients_write(
    mut close: impl FnMut(&SockDiag, &[&DiagConnection]) -> u64,
) -> CloseRaceTotals {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let server = listener.local_addr().expect("bound");
    let (totals, is_closing, mut closed) = (CloseRaceTotals::default(), AtomicBool::new(false), 0);
    // New threads are in the namespace of the one that starts them.
    thread::scope(|scope| {
        scope.spawn(|| serve(&listener, &is_closing));
        let totals = &totals;
        let spawn_client = |client: u64| {
            scope.spawn(move || totals.run_client(server, PauseRng(client << 32 | 1)))
        };
        let clients: Vec<_> = (1..=CLIENTS as u64).map(spawn_client).collect();
        let diag = SockDiag::open().expect("netlink");
        while closed < CONNECTIONS_TO_CLOSE {
            let sockets = diag.connections().expect("a dump");
            // All of them: only the eBPF program decides which may be closed.
            let server_sockets = sockets.iter().filter(|it| it.peer == server);
            closed += close(&diag, &server_sockets.collect::<Vec<_>>());
        }
        totals.is_stopped.store(true, Relaxed);
        let failed = clients.into_iter().filter_map(|client| client.join().err()).count();
        // Only now: connections in the accept queue are reset with their listener, a loss that the test itself would
        // cause.
        is_closing.store(true, Relaxed);
        // One more connection ends the wait of `serve`.
        let _last = TcpStream::connect(server);
        assert_eq!(failed, 0, "clients failed");
    });
    println!(
        "closed {closed}, answered {}, refused {}, lost {}",
        totals.answered.load(Relaxed),
        totals.refused.load(Relaxed),
        totals.lost.load(Relaxed)
    );
    totals
}

#[test]
fn no_request_that_was_written_is_lost_by_a_close() {
    let Some((mut fixture, client_netns)) = closer_fixture() else { return };
    let closer = closer_of(&mut fixture);
    let totals = in_netns(&client_netns.netns, || {
        close_while_clients_write(|_, sockets| close(closer, sockets).closed)
    });
    assert_eq!(totals.lost.load(Relaxed), 0, "requests were written and never answered");
    // A client noticed every close, as an error before a byte was sent.
    assert!(totals.refused.load(Relaxed) >= CONNECTIONS_TO_CLOSE - CLIENTS as u64);
}
