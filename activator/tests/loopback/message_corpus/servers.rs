//! The corpus with real servers as pods: the requests that each one logs are those that the activator has forwarded.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex},
};

use streams::h1::reference::{ServerProfile, read_requests};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
};

use super::{
    judge::{is_clear, seen_responses},
    request_cases::{LAST_REQUEST, RequestCase, request_cases},
    send_case,
};
use crate::{
    harness::{ActivatorFixture, start_pod_with, wait_until},
    reference_servers::{ReferenceServerProcess, go, nginx, pods},
};

/// Request behind all cases. Once the server has logged it, all earlier ones are in its log.
const END: &str = "GET /end HTTP/1.1\r\nhost: a\r\n\r\n";

/// Bytes between the activator and the server.
#[derive(Clone, Debug, Default)]
struct RelayedConnection {
    up: Arc<Mutex<Vec<u8>>>,
    down: Arc<Mutex<Vec<u8>>>,
}

/// Responses of a server, as the relay has seen them.
#[derive(Clone, Copy, Debug, Default)]
struct ResponseCounts {
    /// Requests that the activator has forwarded, at least in part.
    forwarded: usize,
    all: usize,
    /// Responses with a code of 400 and more.
    refusals: usize,
}

/// Relays a connection to the server, and records its bytes.
async fn relay(activator: TcpStream, server: SocketAddr, relayed: RelayedConnection) {
    let Ok(server) = TcpStream::connect(server).await else { return };
    let ((from_activator, to_activator), (from_server, to_server)) =
        (activator.into_split(), server.into_split());
    tokio::join!(
        copy_recorded(from_activator, to_server, relayed.up),
        copy_recorded(from_server, to_activator, relayed.down),
    );
}

async fn copy_recorded(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    record: Arc<Mutex<Vec<u8>>>,
) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        record.lock().unwrap().extend_from_slice(&buffer[..count]);
        if to.write_all(&buffer[..count]).await.is_err() {
            break;
        }
    }
    to.shutdown().await.ok();
}

/// Counts the responses of a connection, and checks that each belongs to a request that the activator has forwarded.
fn count_responses(connection: &RelayedConnection) -> ResponseCounts {
    let (up, down) = (connection.up.lock().unwrap(), connection.down.lock().unwrap());
    let read = read_requests(&up, ServerProfile::Lax);
    let forwarded = read.whole.len() + usize::from(read.partial_head.is_some());
    let responses = seen_responses(&String::from_utf8_lossy(&down));
    // A server may close a connection when the next request is on its way.
    assert!(
        responses.len() == forwarded || responses.len() + 1 == forwarded,
        "{} responses to {forwarded} requests: {}",
        responses.len(),
        up.escape_ascii()
    );
    let refusals = responses.iter().filter(|it| it.status >= 400).count();
    ResponseCounts { forwarded, all: responses.len(), refusals }
}

/// Returns true for a case whose requests reach a pod whole, or not at all. Go's server responds to `OPTIONS *` itself.
fn is_for_servers(case: &RequestCase) -> bool {
    let sent = [&case.bytes[..], LAST_REQUEST.as_bytes()].concat();
    is_clear(&sent) && !case.name.starts_with("target * ") && case.name != "target *"
}

/// Sends the corpus to a server, and compares its log with the relayed responses. Servers other than nginx log no
/// request that they refuse.
async fn compare_log(server: &ReferenceServerProcess, log: &Path, logs_refusals: bool) {
    let mut fixture = ActivatorFixture::new().await;
    let relayed = Arc::new(Mutex::new(Vec::<RelayedConnection>::new()));
    let (relays, address) = (Arc::clone(&relayed), server.address);
    let relay_address = start_pod_with(move |stream, _| {
        let connection = RelayedConnection::default();
        relays.lock().unwrap().push(connection.clone());
        relay(stream, address, connection)
    });
    fixture.add_ready_pod("p", relay_address.await);
    let cases: Vec<_> = request_cases().into_iter().filter(is_for_servers).collect();
    for case in &cases {
        send_case(&fixture, case).await;
    }
    let end = END.replace("\r\n\r\n", "\r\nconnection: close\r\n\r\n");
    assert!(fixture.exchange(&end).await.starts_with("HTTP/1.1 200 "));
    // Targets may have any bytes.
    let logged = || String::from_utf8_lossy(&std::fs::read(log).unwrap_or_default()).into_owned();
    wait_until(|| logged().contains("/end")).await;
    let counts = relayed.lock().unwrap().iter().map(count_responses).fold(
        ResponseCounts::default(),
        |sum, it| ResponseCounts {
            forwarded: sum.forwarded + it.forwarded,
            all: sum.all + it.all,
            refusals: sum.refusals + it.refusals,
        },
    );
    let unlogged = if logs_refusals { 0 } else { counts.refusals };
    let text = logged();
    // Node and Python log a request once its head is there: also one that ends before its response.
    let read = text.lines().count() + unlogged;
    assert!((counts.all..=counts.forwarded).contains(&read), "{read} of {counts:?}\n{text}");
    assert!(!text.contains("/hidden"), "{text}");
    assert!(counts.all - counts.refusals > cases.len() / 4, "{counts:?} of {} cases", cases.len());
}

/// Folder for the log of one server.
fn log_folder(name: &str) -> PathBuf {
    let folder =
        std::env::temp_dir().join(format!("activator-corpus-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Compares the log of a server that writes it to the file that a variable names.
async fn compare_log_of(name: &str, mut command: Command) {
    let folder = log_folder(name);
    let log = folder.join("requests");
    let server = ReferenceServerProcess::start(command.env("REQUEST_LOG", &log));
    compare_log(&server, &log, false).await;
    drop(server);
    std::fs::remove_dir_all(folder).unwrap();
}

fn run_by(program: &str, file: &str) -> Command {
    let mut command = Command::new(program);
    command.arg(pods().join(file));
    command
}

#[tokio::test]
async fn python_logs_the_requests_that_were_forwarded() {
    compare_log_of("python", run_by("python3", "app.py")).await;
}

#[tokio::test]
async fn node_logs_the_requests_that_were_forwarded() {
    compare_log_of("node", run_by("node", "app.mjs")).await;
}

#[tokio::test]
async fn go_logs_the_requests_that_were_forwarded() {
    let app = go("corpus");
    let program = PathBuf::from(app.get_program());
    compare_log_of("go", app).await;
    std::fs::remove_file(program).unwrap();
}

#[tokio::test]
async fn nginx_logs_the_requests_that_were_forwarded() {
    let folder = log_folder("nginx");
    let log = folder.join("requests");
    let mut command = nginx(&folder, &log.display().to_string());
    let server = ReferenceServerProcess::start(&mut command);
    compare_log(&server, &log, true).await;
    drop(server);
    std::fs::remove_dir_all(folder).unwrap();
}
