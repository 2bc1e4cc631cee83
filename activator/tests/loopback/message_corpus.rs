//! Corpus of malformed, ambiguous and hostile messages: each has one meaning for the activator, for the pod and for a
//! reader of RFC 9112, or it is refused. The reference of `streams/` judges.
#![allow(clippy::unwrap_used, reason = "tests")]

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    time::timeout,
};

use crate::harness::{ActivatorFixture, LONG};

mod hostile_pods;
mod judge;
mod recording_pod;
mod request_cases;
mod response_cases;
mod servers;

use self::{
    judge::{Exchange, Verdict, judge, needs_end, seen_responses},
    recording_pod::RecordingPod,
    request_cases::{LAST_REQUEST, RequestCase, request_cases},
};

/// Smallest number of cases of requests that the corpus may have.
const MIN_REQUEST_CASES: usize = 300;

/// Sends the case and the last request on one connection, and returns what the client got.
async fn send_case(fixture: &ActivatorFixture, case: &RequestCase) -> (Vec<u8>, String) {
    let sent = [&case.bytes[..], LAST_REQUEST.as_bytes()].concat();
    let mut client = fixture.connect().await;
    // A refused client may find the connection closed before it has sent everything.
    client.write_all(&sent).await.ok();
    // Elsewhere the activator ends the connection, or the client would wait for it.
    if needs_end(&sent) {
        client.shutdown().await.ok();
    }
    let mut received = Vec::new();
    let read = timeout(LONG, client.read_to_end(&mut received)).await;
    read.unwrap_or_else(|_| panic!("{}: the connection does not end", case.name)).ok();
    (sent, String::from_utf8_lossy(&received).into_owned())
}

#[tokio::test]
async fn each_stream_of_requests_has_one_meaning_or_is_refused() {
    let mut fixture = ActivatorFixture::new().await;
    let (pod, address) = RecordingPod::start().await;
    fixture.add_ready_pod("p", address);
    let cases = request_cases();
    assert!(cases.len() >= MIN_REQUEST_CASES, "{} cases", cases.len());
    let (mut wrong, mut served, mut refused) = (String::new(), 0, 0);
    for case in &cases {
        let (sent, received) = send_case(&fixture, case).await;
        let pod_connections = pod.take_connections(&fixture).await;
        let responses = seen_responses(&received);
        let verdict = judge(&sent, &Exchange { pod_connections, responses });
        match verdict {
            Ok(Verdict::Served) => served += 1,
            Ok(Verdict::Refused) if !case.is_usual => refused += 1,
            Ok(Verdict::Refused) => wrong += &format!("{}: refused: {received}\n", case.name),
            Err(what) => wrong += &format!("{}: {what}\n  {received:?}\n", case.name),
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    // The corpus tests neither only what passes, nor only what is refused.
    assert!(served > cases.len() / 10 && refused > cases.len() / 4, "{served} {refused}");
}
