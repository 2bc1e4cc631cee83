#![allow(clippy::unwrap_used, reason = "tests")]

use std::io::{Read as _, Write as _};

use prometheus_client::registry::Registry;
use tokio::{io::AsyncWriteExt as _, net::TcpListener};

use super::*;
use crate::{
    clients::connections::ClientConnections, config::ActivatorConfig, metrics::ActivatorMetrics,
};

/// Creates a client, which writes at once, and the socket that it is connected to.
async fn connect() -> (std::net::TcpStream, ClientSocket) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    client.set_nodelay(true).unwrap();
    let refusals = ActivatorMetrics::register(&mut Registry::default()).refusals;
    let connections = ClientConnections::new(ActivatorConfig::defaults().budget(1024), refusals);
    let connection = Arc::new(connections).register().unwrap();
    (client, ClientSocket::new(listener.accept().await.unwrap().0, connection))
}

/// Waits until tokio has seen that bytes or the end have come.
async fn wait_readable(socket: &ClientSocket) {
    poll_fn(|cx| socket.poll_read_ready(cx)).await.unwrap();
}

/// The preface comes in three pieces. The second one comes after the event of the first, and before the peek: its own
/// event then announces nothing that is new.
#[tokio::test]
async fn a_preface_in_pieces_is_http2_even_if_an_event_announces_nothing_new() {
    let (mut client, socket) = connect().await;
    let mut peek = Box::pin(socket.peek_http2_preface());
    client.write_all(&HTTP2_PREFACE[..4]).unwrap();
    wait_readable(&socket).await;
    client.write_all(&HTTP2_PREFACE[4..8]).unwrap();
    assert!(peek.as_mut().now_or_never().is_none(), "more has to come");
    wait_readable(&socket).await;
    assert!(peek.as_mut().now_or_never().is_none(), "more has to come");
    client.write_all(&HTTP2_PREFACE[8..]).unwrap();
    assert!(peek.await.unwrap());
}

/// Readiness that arrives between a peek and the wait after it is not lost. The pauses between the bytes differ, so that
/// some bytes come in that moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_preface_in_single_bytes_is_always_http2() {
    for round in 0..300 {
        let (mut client, socket) = connect().await;
        let peek = tokio::spawn(async move { socket.peek_http2_preface().await });
        let write = move || {
            for byte in HTTP2_PREFACE {
                client.write_all(&[*byte])?;
                (0..round * 20).for_each(|_| std::hint::spin_loop());
            }
            io::Result::Ok(client)
        };
        let _client = tokio::task::spawn_blocking(write).await.unwrap().unwrap();
        assert!(peek.await.unwrap().unwrap(), "{round}");
    }
}

#[tokio::test]
async fn other_first_bytes_and_an_end_within_the_preface_are_http1() {
    for bytes in [&b""[..], b"PRI * HTTP/2", b"POST /"] {
        let (mut client, socket) = connect().await;
        client.write_all(bytes).unwrap();
        drop(client);
        assert!(!socket.peek_http2_preface().await.unwrap(), "{bytes:?}");
    }
    let (mut client, socket) = connect().await;
    client.write_all(b"GET").unwrap();
    assert!(!socket.peek_http2_preface().await.unwrap());
}

#[tokio::test]
async fn a_byte_sent_ahead_comes_behind_interim_responses() {
    let (mut client, socket) = connect().await;
    let mut writer = socket.clone();
    writer.flush().await.unwrap();
    let piece = vec![b'i'; MAX_INTERIM_BYTES / 2];
    let mut sent = 0;
    // The client reads nothing, so that at last a part waits here.
    while socket.lock().interim.is_empty() {
        socket.send_interim(&piece);
        sent += piece.len();
    }
    client.set_nonblocking(true).unwrap();
    let mut received = Vec::new();
    let error = client.read_to_end(&mut received).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    poll_fn(|cx| socket.lock().stream.tcp().poll_write_ready(cx)).await.unwrap();
    poll_fn(|cx| socket.poll_send_first_byte(cx)).await.unwrap();
    writer.write_all(b"HTTP/1.1 200 OK").await.unwrap();
    writer.flush().await.unwrap();
    drop((writer, socket));
    client.set_nonblocking(false).unwrap();
    client.read_to_end(&mut received).unwrap();
    assert!(received[..sent].iter().all(|it| *it == b'i'), "nothing comes within one");
    assert_eq!(&received[sent..], b"HTTP/1.1 200 OK");
}
