#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    future::poll_fn,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Wake, Waker},
    time::Duration,
};

use common::{certificates, fixtures::certificates::TestAuthority};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, client};

use super::*;
use crate::{
    budget::TLS_BUFFER_BYTES,
    tls::server_config::{HandshakeProtocols, server_config},
};

/// Creates a client whose handshake is complete, and the stream at the activator's end.
async fn connect() -> (client::TlsStream<TcpStream>, AcceptedStream) {
    let authority = TestAuthority::new();
    let issued = authority.issue(&["a.example"]);
    let config = server_config(
        certificates::load(&issued.material()).unwrap().key,
        &HandshakeProtocols::default(),
    )
    .unwrap();
    let mut roots = RootCertStore::empty();
    let pem = authority.certificate_pem();
    roots.add(CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()).unwrap();
    let trusting = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let tcp = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (accepted, _) = listener.accept().await.unwrap();
    let name = ServerName::try_from("a.example").unwrap();
    let (client, server) = tokio::join!(
        TlsConnector::from(Arc::new(trusting)).connect(name, tcp),
        TlsAcceptor::from(config).accept_with(BoundedTcp::new(accepted), |it| it
            .set_buffer_limit(Some(TLS_BUFFER_BYTES))),
    );
    (client.unwrap(), server.unwrap().into())
}

#[tokio::test]
async fn an_end_without_close_notify_is_an_end() {
    let (mut client, mut stream) = connect().await;
    client.write_all(b"last").await.unwrap();
    client.flush().await.unwrap();
    // Only TCP ends. It is not closed: the unread tickets would turn that into a reset.
    let (mut tcp, _session) = client.into_inner();
    tcp.shutdown().await.unwrap();
    let mut received = Vec::new();
    stream.read_to_end(&mut received).await.unwrap();
    assert_eq!(received, b"last");
    assert_eq!(stream.read(&mut [0]).await.unwrap(), 0, "it stays at its end");
}

#[tokio::test]
async fn decrypted_bytes_are_read_without_a_further_byte_of_tcp() {
    let (mut client, mut stream) = connect().await;
    client.write_all(b"0123456789").await.unwrap();
    client.flush().await.unwrap();
    let mut part = [0; 4];
    stream.read_exact(&mut part).await.unwrap();
    assert_eq!(&part, b"0123");
    // The rest of the record is in the session, and no event of TCP announces it.
    let is_ready = poll_fn(|cx| Poll::Ready(stream.poll_read_ready(cx).is_ready())).await;
    assert!(is_ready);
    let mut rest = [0; 16];
    assert_eq!(stream.read(&mut rest).await.unwrap(), 6);
    let is_ready = poll_fn(|cx| Poll::Ready(stream.poll_read_ready(cx).is_ready())).await;
    assert!(!is_ready, "nothing more has come");
}

/// Waker that records that it was woken.
#[derive(Default)]
struct ReadableFlag(AtomicBool);

impl Wake for ReadableFlag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn a_write_at_once_keeps_the_waker_of_hyper() {
    let (mut client, mut stream) = connect().await;
    let flag = Arc::new(ReadableFlag::default());
    let waker = Waker::from(Arc::clone(&flag));
    let piece = vec![b'x'; 64 << 10];
    let mut written = 0;
    // The client reads nothing, so the buffers fill, and the last write waits with the waker.
    let fill = poll_fn(|_| {
        let mut cx = Context::from_waker(&waker);
        while let Poll::Ready(count) = Pin::new(&mut stream).poll_write(&mut cx, &piece) {
            written += count.unwrap();
        }
        Poll::Ready(())
    });
    // The budget of tokio for one poll would end the writes earlier.
    tokio::task::unconstrained(fill).await;
    match stream.try_write(b"H") {
        Ok(count) => written += count,
        Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
    }
    let reading = tokio::spawn(async move {
        let mut received = Vec::new();
        client.read_to_end(&mut received).await.unwrap();
        received.len()
    });
    let woken = async {
        while !flag.0.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), woken).await.expect("the waker is woken");
    stream.shutdown().await.unwrap();
    assert_eq!(reading.await.unwrap(), written, "no byte is lost or sent twice");
}
