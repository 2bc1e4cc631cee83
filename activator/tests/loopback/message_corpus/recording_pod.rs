//! Pod that records the bytes of each connection, and responds to each request that the reference finds in them.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use streams::h1::reference::{ReferenceStop, ServerProfile, read_requests};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use super::judge::POD_MARK;
use crate::harness::{ActivatorFixture, revision, start_pod_with, wait_until};

/// Pod whose connections serve one request each, so that bytes behind it are noticed.
#[derive(Debug, Clone, Default)]
pub(super) struct RecordingPod(Arc<PodRecord>);

#[derive(Debug, Default)]
struct PodRecord {
    accepted: AtomicUsize,
    /// Connections that have got bytes and have not ended.
    active: AtomicUsize,
    /// Bytes of the connections that have ended.
    ended: Mutex<Vec<Vec<u8>>>,
}

impl RecordingPod {
    /// Starts the pod, and returns it with its address.
    pub(super) async fn start() -> (Self, SocketAddr) {
        let pod = Self::default();
        let serving = pod.clone();
        let address = start_pod_with(move |stream, _| {
            serving.0.accepted.fetch_add(1, SeqCst);
            serving.clone().serve(stream)
        });
        (pod, address.await)
    }

    async fn serve(self, mut stream: TcpStream) {
        let (mut bytes, mut has_responded, mut has_continued) = (Vec::new(), false, false);
        while let Ok(count @ 1..) = stream.read_buf(&mut bytes).await {
            if bytes.len() == count {
                self.0.active.fetch_add(1, SeqCst);
            }
            let read = read_requests(&bytes, ServerProfile::Lax);
            if read.stop == ReferenceStop::Refused {
                break;
            }
            if !read.whole.is_empty() && !has_responded {
                has_responded = true;
                let head = format!(
                    "HTTP/1.1 200 OK\r\n{POD_MARK}1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                );
                stream.write_all(head.as_bytes()).await.ok();
                // What else comes is recorded until the activator closes the connection.
                stream.shutdown().await.ok();
            } else if read.partial_head.is_some() && expects_continue(&bytes) && !has_continued {
                has_continued = true;
                stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await.ok();
            }
        }
        if !bytes.is_empty() {
            self.0.ended.lock().unwrap().push(bytes);
            self.0.active.fetch_sub(1, SeqCst);
        }
    }

    /// Waits until everything that the activator has sent is recorded, and takes the bytes of each connection.
    pub(super) async fn take_connections(&self, fixture: &ActivatorFixture) -> Vec<Vec<u8>> {
        let routed = fixture.activator.forwarder.routes.revision(&revision()).unwrap();
        // The second time shows what was in a socket's buffer the first time.
        for _ in 0..2 {
            wait_until(|| {
                let accepted = self.0.accepted.load(SeqCst) as f64;
                routed.queue_metrics().at_pods == 0
                    && fixture.metric("rouse_activator_dials_total") == accepted
                    && self.0.active.load(SeqCst) == 0
            })
            .await;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        std::mem::take(&mut *self.0.ended.lock().unwrap())
    }
}

fn expects_continue(bytes: &[u8]) -> bool {
    String::from_utf8_lossy(bytes).contains("\r\nexpect: 100-continue")
}
