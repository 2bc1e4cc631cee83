#![allow(clippy::unwrap_used, reason = "tests")]

use socket2::SockRef;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, Interest},
    net::TcpListener,
    task::JoinHandle,
};

use super::*;
use crate::tcp_socket::ResettingStream;

/// Opens a connection. Returns the end of the test and the end of the relay.
async fn connect() -> (TcpStream, ResettingStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let outer = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (inner, _) = listener.accept().await.unwrap();
    tcp_socket::keep_urgent_inline(&inner).unwrap();
    (outer, ResettingStream::new(inner))
}

/// Starts a relay between two connections, which are reset at its end unless it succeeds.
fn start_relay(
    client: ResettingStream,
    pod: ResettingStream,
) -> JoinHandle<Result<(), TcpRelayError>> {
    tokio::spawn(async move {
        let pipes = SplicePipes::default();
        relay_tcp(client.stream(), pod.stream(), &pipes, &RelayActivity::begin()).await?;
        client.close();
        pod.close();
        Ok(())
    })
}

async fn connect_relayed() -> (TcpStream, TcpStream, JoinHandle<Result<(), TcpRelayError>>) {
    let ((client, inner_client), (pod, inner_pod)) = (connect().await, connect().await);
    (client, pod, start_relay(inner_client, inner_pod))
}

async fn read_to_end(stream: &mut TcpStream) -> (String, Option<io::ErrorKind>) {
    let mut all = Vec::new();
    let end = stream.read_to_end(&mut all).await;
    (String::from_utf8(all).unwrap(), end.err().map(|error| error.kind()))
}

fn reset(stream: TcpStream) {
    stream.set_zero_linger().unwrap();
}

const RESET: Option<io::ErrorKind> = Some(io::ErrorKind::ConnectionReset);

#[tokio::test]
async fn each_side_closes_its_half_on_its_own() {
    for pod_is_first in [false, true] {
        let (client, pod, relay) = connect_relayed().await;
        let (mut first, mut second) = if pod_is_first { (pod, client) } else { (client, pod) };
        first.write_all(b"ask").await.unwrap();
        first.shutdown().await.unwrap();
        assert_eq!(read_to_end(&mut second).await, ("ask".to_owned(), None));
        assert!(!relay.is_finished());
        second.write_all(b"response").await.unwrap();
        second.shutdown().await.unwrap();
        assert_eq!(read_to_end(&mut first).await, ("response".to_owned(), None));
        relay.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn bytes_before_a_reset_are_passed_on_first() {
    let ((mut client, inner_client), (mut pod, inner_pod)) = (connect().await, connect().await);
    pod.write_all(b"last words").await.unwrap();
    inner_pod.stream().readable().await.unwrap();
    reset(pod);
    inner_pod.stream().ready(Interest::ERROR).await.unwrap();
    let relay = start_relay(inner_client, inner_pod);
    assert_eq!(read_to_end(&mut client).await, ("last words".to_owned(), RESET));
    assert_eq!(relay.await.unwrap().unwrap_err().peer, TcpRelayPeer::Pod);
}

#[tokio::test]
async fn a_reset_behind_a_closed_half_is_passed_on() {
    let (mut client, mut pod, relay) = connect_relayed().await;
    client.shutdown().await.unwrap();
    assert_eq!(read_to_end(&mut pod).await, (String::new(), None));
    assert!(!relay.is_finished(), "the pod may still respond");
    reset(client);
    assert_eq!(relay.await.unwrap().unwrap_err().peer, TcpRelayPeer::Client);
    // The kernel's error for a reset behind a FIN.
    assert_eq!(tcp_socket::wait_broken(&pod).await.kind(), io::ErrorKind::BrokenPipe);
}

/// The write of the client's byte may get the error before a read of the pod's end does.
#[tokio::test]
async fn a_reset_pod_never_looks_like_the_end_of_its_response() {
    for _ in 0..50 {
        let ((mut client, inner_client), (pod, inner_pod)) = (connect().await, connect().await);
        client.write_all(b"x").await.unwrap();
        inner_client.stream().readable().await.unwrap();
        reset(pod);
        inner_pod.stream().ready(Interest::ERROR).await.unwrap();
        let relay = start_relay(inner_client, inner_pod);
        assert_eq!(read_to_end(&mut client).await, (String::new(), RESET));
        assert_eq!(relay.await.unwrap().unwrap_err().peer, TcpRelayPeer::Pod);
    }
}

/// Writes until no buffer on the way takes more.
async fn fill(stream: &TcpStream) {
    let mut refusals = 0;
    while refusals < 1_000 {
        match stream.try_write(&[b'f'; 64 << 10]) {
            Ok(_) => refusals = 0,
            Err(_) => refusals += 1,
        }
        tokio::task::yield_now().await;
    }
}

/// Without a bound the relay would wait forever, and the test with it.
#[tokio::test(start_paused = true)]
async fn a_client_that_breaks_off_frees_a_pod_that_reads_nothing() {
    let (client, pod, relay) = connect_relayed().await;
    fill(&client).await;
    reset(client);
    assert_eq!(relay.await.unwrap().unwrap_err().peer, TcpRelayPeer::Client);
    drop(pod);
}

#[tokio::test]
async fn a_pod_that_has_closed_resets_a_client_that_goes_on() {
    let (mut client, mut pod, relay) = connect_relayed().await;
    pod.write_all(b"bye").await.unwrap();
    drop(pod);
    assert_eq!(read_to_end(&mut client).await, ("bye".to_owned(), None));
    assert!(!relay.is_finished(), "the client has not closed its half");
    client.write_all(b"more").await.unwrap();
    assert_eq!(relay.await.unwrap().unwrap_err().peer, TcpRelayPeer::Pod);
}

#[tokio::test]
async fn an_urgent_byte_stays_at_its_place() {
    let (mut client, mut pod, relay) = connect_relayed().await;
    let (before, behind) = ("b".repeat(100_000), "e".repeat(100_000));
    let whole = format!("{before}u{behind}");
    let send = async {
        client.write_all(before.as_bytes()).await.unwrap();
        while SockRef::from(&client).send_out_of_band(b"u").is_err() {
            tokio::task::yield_now().await;
        }
        client.write_all(behind.as_bytes()).await.unwrap();
    };
    let mut got = vec![0; whole.len()];
    let (read, ()) = tokio::join!(pod.read_exact(&mut got), send);
    read.unwrap();
    assert!(got == whole.as_bytes(), "each byte has its place");
    assert!(!relay.is_finished());
}
