//! Shell: what attackers can make an activator hold in memory, against the bound that docs/operations.md states.
//!
//! The activator runs in a process of its own, so that what is measured is its own and all of it.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(clippy::print_stdout, reason = "how much it grew is for who reads the test's output")]

mod h2c;
mod harness;

use std::{
    io::{BufRead as _, BufReader, Lines, Write as _},
    net::{Ipv4Addr, SocketAddr},
    process::{Child, ChildStdout, Command, Stdio},
    time::Duration,
};

use activator::budget::{BASE_MIB, MAX_STREAMS, PER_REQUEST, memory_mib};
use common::wire::Protocol;
use h2c::{WIDE, asking, endless, frame};
use harness::{GET, OK, World, revision, server};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
};

const MIB: usize = 1 << 20;
/// Bytes of requests, and of answers, that the activator may hold here.
const BYTES: usize = 32 * MIB;
const CONNECTIONS: usize = 420;
/// What the process itself may grow by: threads' stacks, pages of the program, arenas of the allocator.
const PROGRAM_MIB: usize = 24;
const ATTACKER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const PORT: &str = "port ";
const DONE: &str = "done";

/// Says its port, and serves until its standard input ends. A line of it is the address of a pod over HTTP/2.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a role, run by the other tests"]
async fn an_activator_of_its_own() {
    let mut world = World::with(|config| {
        (config.max_bytes, config.max_answer_bytes) = (BYTES, BYTES);
        (config.max_connections, config.max_client_connections) =
            (Some(CONNECTIONS), Some(CONNECTIONS));
        config.max_waiting = 100_000;
    })
    .await;
    println!("{PORT}{}", world.port);
    let (send, mut lines) = tokio::sync::mpsc::channel::<String>(1);
    std::thread::spawn(move || {
        for line in std::io::stdin().lines() {
            send.blocking_send(line.unwrap()).unwrap();
        }
    });
    while let Some(line) = lines.recv().await {
        let (protocol, address) = line.split_once(' ').unwrap();
        let protocol = if protocol == "h2c" { Protocol::H2c } else { Protocol::Http1 };
        world.change(|table| table.revisions.get_mut(&revision()).unwrap().protocol = protocol);
        world.ready("p", address.parse().unwrap());
        println!("{DONE}");
    }
}

/// An activator in another process.
struct Other {
    child: Child,
    says: Lines<BufReader<ChildStdout>>,
    port: u16,
    /// Resident before anyone asked, in MiB.
    empty: usize,
}

impl Other {
    fn start() -> Self {
        let test = std::env::current_exe().unwrap();
        let role = ["--exact", "an_activator_of_its_own", "--ignored", "--nocapture"];
        let mut child = Command::new(test)
            .args(role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut says = BufReader::new(child.stdout.take().unwrap()).lines();
        let port = says.find_map(|line| line.unwrap().split_once(PORT)?.1.parse().ok());
        let mut other = Self { child, says, port: port.expect("it says its port"), empty: 0 };
        other.empty = other.memory("VmRSS:");
        other
    }

    /// The kernel's word on the process, in MiB.
    fn memory(&self, name: &str) -> usize {
        let file = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(file).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse::<usize>().unwrap() >> 10
    }

    /// By how much it has ever grown, in MiB.
    fn grown(&self) -> usize {
        self.memory("VmHWM:") - self.empty
    }

    async fn connect(&self, source: Ipv4Addr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((source, 0).into()).unwrap();
        socket.connect((Ipv4Addr::LOCALHOST, self.port).into()).await.unwrap()
    }

    fn has_pod(&mut self, protocol: &str, address: SocketAddr) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{protocol} {address}").unwrap();
        assert!(self.says.any(|line| line.unwrap() == DONE), "it ended");
    }

    /// Waits until it grows no more.
    async fn at_rest(&self) {
        let mut before = usize::MAX;
        while before != self.grown() {
            before = self.grown();
            tokio::time::sleep(Duration::from_millis(700)).await;
        }
    }

    /// A client that does as it should is answered.
    async fn serves_others(&self) {
        let mut other = self.connect(Ipv4Addr::new(127, 0, 0, 3)).await;
        other.write_all(GET.as_bytes()).await.unwrap();
        let head = harness::read_head(&mut other).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Clients who all send `words` and read what they are told, until the activator grows no more.
async fn attack(other: &Other, clients: usize, words: [Vec<u8>; 2]) {
    let words = std::sync::Arc::new(words);
    let mut all = tokio::task::JoinSet::new();
    for _ in 0..clients {
        let (stream, words) = (other.connect(ATTACKER).await, std::sync::Arc::clone(&words));
        all.spawn(async move {
            let (mut from, mut to) = stream.into_split();
            let mut sink = vec![0; 64 << 10];
            let hears = async { while let Ok(1..) = from.read(&mut sink).await {} };
            let sends = async {
                to.write_all(&words[0]).await?;
                // Over HTTP/2 the windows are told first.
                tokio::time::sleep(Duration::from_millis(300)).await;
                to.write_all(&words[1]).await
            };
            let (_sent, ()) = tokio::join!(sends, hears);
        });
    }
    other.at_rest().await;
}

/// What an HTTP/2 client begins with.
fn preface() -> Vec<u8> {
    let mut all = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    all.extend(frame(4, 0, 0, &[]));
    all.extend(frame(4, 1, 0, &[]));
    all
}

/// :method POST, :scheme http, :path /, :authority a.
const POST: [u8; 6] = [0x83, 0x86, 0x84, 0x01, 1, b'a'];

/// Posts over HTTP/2 whose bodies come in `pieces` of so many bytes, one of each stream at a time.
fn posts(streams: u32, piece: usize, pieces: usize) -> [Vec<u8>; 2] {
    let mut all = Vec::new();
    (0..streams).for_each(|it| all.extend(frame(1, 4, 2 * it + 1, &POST)));
    let body = vec![b'x'; piece];
    for _ in 0..pieces {
        (0..streams).for_each(|it| all.extend(frame(0, 0, 2 * it + 1, &body)));
    }
    [preface(), all]
}

/// Requests over HTTP/2 with as many fields as fit, of four bytes each: a literal without a value.
fn fields(streams: u32) -> [Vec<u8>; 2] {
    let mut head = POST.to_vec();
    (0..1900).for_each(|_| head.extend([0, 1, b'a', 0]));
    let all = (0..streams).flat_map(|it| frame(1, 5, 2 * it + 1, &head)).collect();
    [preface(), all]
}

/// A head of as many lines as fit.
fn lines(line: impl Fn(usize) -> String) -> [Vec<u8>; 2] {
    let mut head = String::from("GET / HTTP/1.1\r\nhost: a\r\n");
    for at in 0..4000 {
        let next = line(at);
        if head.len() + next.len() > 60_000 {
            break;
        }
        head += &next;
    }
    [head.into_bytes(), b"\r\n".to_vec()]
}

/// It has grown by no more than these bounds allow, beside so many requests `at_pods`.
fn assert_within(other: &Other, [requests, answers]: [usize; 2], at_pods: usize, what: &str) {
    let at_pods = (at_pods * 2 * PER_REQUEST) >> 20;
    let bound = memory_mib(requests, answers, CONNECTIONS) - BASE_MIB + PROGRAM_MIB + at_pods;
    let grown = other.grown();
    println!("{what}: {grown} MiB of {bound}");
    assert!(grown <= bound, "{what}: it grew by {grown} MiB, the bound is {bound}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_wait_take_no_more_memory_than_is_stated() {
    type Words = fn() -> [Vec<u8>; 2];
    let attacks: [(&str, Words); 10] = [
        ("small heads", || [GET.as_bytes().to_vec(), vec![]]),
        ("heads of many short lines", || lines(|_| "a:\r\n".into())),
        ("heads of many names", || lines(|at| format!("{at:x}:\r\n"))),
        ("heads of long values", || lines(|at| format!("x{at}: {}\r\n", "y".repeat(900)))),
        ("bodies in large frames", || posts(16, 15 << 10, 4)),
        ("bodies in small frames", || posts(16, 1, 4000)),
        ("empty frames", || posts(16, 0, 4000)),
        ("small heads over HTTP/2", || [asking(MAX_STREAMS, 0), vec![]]),
        ("heads of many fields over HTTP/2", || fields(4)),
        ("heads without an end", || {
            let [head, _] = lines(|at| format!("x{at}: {}\r\n", "y".repeat(900)));
            [head, vec![]]
        }),
    ];
    for (what, words) in attacks {
        let mut other = Other::start();
        attack(&other, 400, words()).await;
        // Refusals are answers, and may not be read either.
        assert_within(&other, [BYTES, BYTES], 0, what);
        other.has_pod("http1", server(OK, Duration::ZERO).await.address);
        other.serves_others().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_that_are_not_read_take_no_more_memory_than_is_stated() {
    // A client whose window is nothing reads no byte of an answer, and the pod sends ahead all the same.
    for (what, window) in [("answers that are not read", WIDE), ("answers without a window", 0)] {
        let mut other = Other::start();
        let (pod, _taken) = endless().await;
        other.has_pod("h2c", pod);
        other.serves_others().await;
        let mut clients = Vec::new();
        for _ in 0..40 {
            let mut client = other.connect(ATTACKER).await;
            client.write_all(&asking(MAX_STREAMS, window)).await.unwrap();
            clients.push(client);
        }
        other.at_rest().await;
        // Until connections that are cut off have gone, pods go on sending.
        let passing = BYTES;
        assert_within(&other, [0, BYTES + passing], 40 * MAX_STREAMS as usize, what);
        other.serves_others().await;
    }
}
