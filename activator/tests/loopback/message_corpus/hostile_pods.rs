//! Responses of broken and hostile pods: no byte of one becomes a part of the next response.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{net::SocketAddr, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body_util::{BodyExt as _, Empty};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::{io::AsyncWriteExt as _, net::TcpStream, sync::watch, time::timeout};

use super::response_cases::{HIDDEN_RESPONSE, response_cases};
use crate::harness::{ActivatorFixture, LONG, read_head, start_pod_with};

/// Response to the request behind the case.
const SECOND: &str = "HTTP/1.1 200 OK\r\nx-second: 1\r\ncontent-length: 6\r\n\r\nsecond";
/// Smallest number of cases of responses that the corpus may have.
const MIN_RESPONSE_CASES: usize = 200;
/// Time after which a response counts as one that does not end by itself. The second request then goes to another
/// connection, so a wrong guess makes a case weaker and not false.
const ENDLESS: Duration = Duration::from_millis(20);

/// Starts a pod that sends the present case to a request for `/first`, and closes all connections when it changes.
async fn start_hostile_pod(case: watch::Receiver<String>) -> SocketAddr {
    start_pod_with(move |stream, _| serve(stream, case.clone())).await
}

async fn serve(mut stream: TcpStream, mut case: watch::Receiver<String>) {
    let response = case.borrow_and_update().clone();
    let exchanges = async {
        loop {
            let head = read_head(&mut stream).await;
            if !head.ends_with("\r\n\r\n") {
                return;
            }
            let bytes = if head.starts_with("GET /first ") { &*response } else { SECOND };
            stream.write_all(bytes.as_bytes()).await.ok();
        }
    };
    tokio::select! {
        () = exchanges => {}
        _ = case.changed() => {}
    }
}

type TestClient = SendRequest<Empty<Bytes>>;

async fn connect(fixture: &ActivatorFixture) -> TestClient {
    let (client, driver) = handshake(TokioIo::new(fixture.connect().await)).await.unwrap();
    tokio::spawn(driver);
    client
}

/// Sends a request, and reads the whole response as hyper's client does.
async fn get(client: &mut TestClient, target: &str) -> Result<(HeaderMap, Bytes), hyper::Error> {
    let request = Request::get(target).header("host", "a").body(Empty::new()).unwrap();
    let (head, body) = client.send_request(request).await?.into_parts();
    Ok((head.headers, body.collect().await?.to_bytes()))
}

/// Compares the response to a request behind the case with the one that the pod has for it.
fn check_second(response: Result<(HeaderMap, Bytes), hyper::Error>) -> Result<(), String> {
    let (headers, body) = response.map_err(|error| format!("no second response: {error}"))?;
    match headers.contains_key("x-second") && body == "second" {
        true => Ok(()),
        false => Err(format!("second response: {headers:?} {body:?}")),
    }
}

/// Sends a request that gets the case, and one behind it on each connection that may have been kept.
async fn check_case(
    fixture: &ActivatorFixture,
    case: &str,
    next_case: impl FnOnce(),
) -> Result<(), String> {
    let mut client = connect(fixture).await;
    let mut first = tokio::spawn(async move {
        let response = get(&mut client, "/first").await;
        (client, response)
    });
    let ended = timeout(ENDLESS, &mut first).await.ok();
    let mut other = connect(fixture).await;
    let second = timeout(LONG, get(&mut other, "/second")).await;
    check_second(second.expect("responds in time"))?;
    next_case();
    let (mut client, response) = match ended {
        Some(ended) => ended.unwrap(),
        None => timeout(LONG, first).await.expect("ends with its pod").unwrap(),
    };
    let is_hidden_first = case.trim_start_matches(['\r', '\n']).starts_with(HIDDEN_RESPONSE);
    if let Ok((headers, _)) = &response
        && headers.contains_key("x-hidden")
        && !is_hidden_first
    {
        return Err(format!("the hidden response is the first one: {headers:?}"));
    }
    // The client's connection may be closed, but it carries nothing that was left of the first response.
    if response.is_ok()
        && let Ok(third) = timeout(LONG, get(&mut client, "/second")).await.expect("ends in time")
    {
        check_second(Ok(third))?;
    }
    Ok(())
}

#[tokio::test]
async fn no_byte_of_a_broken_response_reaches_the_next_one() {
    let mut fixture = ActivatorFixture::new().await;
    let (case_sender, case_receiver) = watch::channel(String::new());
    fixture.add_ready_pod("p", start_hostile_pod(case_receiver).await);
    let cases = response_cases();
    assert!(cases.len() >= MIN_RESPONSE_CASES, "{} cases", cases.len());
    let mut wrong = String::new();
    for case in &cases {
        case_sender.send_replace(case.clone());
        let next_case = || drop(case_sender.send_replace(String::new()));
        if let Err(what) = check_case(&fixture, case, next_case).await {
            wrong += &format!("{:?}: {what}\n", case.get(..200).unwrap_or(case));
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}
