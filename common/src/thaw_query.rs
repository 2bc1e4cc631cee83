//! Shell: thaw query: the agent of a pod with a standby order answers if the pod runs.
//!
//! The agent serves the query in the pod's network namespace, so no sender needs to know the agent's address. The
//! connection thaws a frozen pod, as each connection does. So the answer `frozen` means that the thaw has failed. A
//! refused connection means that there is no agent. An accepted one without a response means that the agent hangs.
//! Packets that are dropped mean neither.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    pin::pin,
    time::Duration,
};

use http::{Request, StatusCode, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, time::timeout};

use crate::standby_watch::QueryEnd;

/// Port of the pod server. Knative reserves it, so that no container of a Revision has it. In a pod that Rouse did not
/// make, a process of the pod may have it, and then there is no pod server.
pub const POD_SERVER_PORT: u16 = 8022;
/// Path of the query on the pod server.
pub const PATH: &str = "/running";
/// Body of the response for a pod that runs.
pub const RUNNING: &str = "running\n";
/// Body of the response for a pod that is frozen.
pub const FROZEN: &str = "frozen\n";

/// Timeout of a query's connection, and again of its response.
const QUERY_TIMEOUT: Duration = Duration::from_secs(1);
/// Highest number of bytes of a response, as another program may listen at this port of the pod.
const BODY_BYTES_MAX: usize = 1024;

/// Asks the agent of the pod at this address if the pod runs. Calls `on_reached` once the connection is accepted.
/// Returns within two seconds.
pub async fn query_agent(pod: IpAddr, on_reached: impl FnOnce()) -> QueryEnd {
    query_agent_at(SocketAddr::new(pod, POD_SERVER_PORT), on_reached).await
}

async fn query_agent_at(at: SocketAddr, on_reached: impl FnOnce()) -> QueryEnd {
    let stream = match timeout(QUERY_TIMEOUT, TcpStream::connect(at)).await {
        Ok(Ok(stream)) => stream,
        // The pod's network is there, and no agent listens.
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
            return QueryEnd::NotRunning;
        }
        Ok(Err(_)) | Err(_) => return QueryEnd::Unreachable,
    };
    on_reached();
    match timeout(QUERY_TIMEOUT, ask_agent(stream, at)).await {
        Ok(Ok(true)) => QueryEnd::Running,
        Ok(Ok(false) | Err(_)) | Err(_) => QueryEnd::NotRunning,
    }
}

/// Sends the query over an open connection. Returns true if the agent answers that the pod runs.
async fn ask_agent(stream: TcpStream, at: SocketAddr) -> io::Result<bool> {
    // Zero linger resets the connection, so that it leaves no TIME_WAIT behind.
    stream.set_zero_linger()?;
    let (mut requests, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    let request = Request::get(PATH)
        .header(header::HOST, at.to_string())
        .body(Empty::<Bytes>::new())
        .map_err(io::Error::other)?;
    let mut exchange = pin!(async {
        let response = requests.send_request(request).await.map_err(io::Error::other)?;
        match response.status() {
            StatusCode::OK => {
                let body = Limited::new(response.into_body(), BODY_BYTES_MAX).collect().await;
                let bytes = body.map_err(io::Error::other)?.to_bytes();
                Ok(&bytes[..] == RUNNING.as_bytes())
            }
            // An agent of an earlier release thaws the pod as well, and does not know the query.
            StatusCode::NOT_FOUND => Ok(true),
            status => Err(io::Error::other(format!("status {status}"))),
        }
    });
    // The connection may end in the same poll in which the response is ready, and the exchange still has it then.
    tokio::select! {
        response = &mut exchange => response,
        _ended = connection => exchange.await,
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;

    /// Asks a server that answers the request with these bytes, and closes. Returns the result and the request.
    async fn ask(response: &'static str) -> (io::Result<bool>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let at = listener.local_addr().expect("bound");
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a client");
            let mut request = vec![0; 1024];
            let length = stream.read(&mut request).await.expect("a request");
            stream.write_all(response.as_bytes()).await.expect("an open connection");
            String::from_utf8_lossy(&request[..length]).into_owned()
        });
        let stream = TcpStream::connect(at).await.expect("a listener");
        let result = ask_agent(stream, at).await;
        (result, server.await.expect("no panic"))
    }

    #[tokio::test]
    async fn the_response_of_any_agent_but_that_for_a_frozen_pod_shows_that_the_pod_runs() {
        for (response, expected) in [
            ("HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nrunning\n", true),
            ("HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\nfrozen\n", false),
            ("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", true),
            ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", false),
        ] {
            let (result, request) = ask(response).await;
            assert_eq!(result.ok(), Some(expected), "{response}");
            assert!(request.starts_with("GET /running HTTP/1.1\r\n"), "{request}");
        }
    }

    #[tokio::test]
    async fn nothing_is_known_without_a_whole_response() {
        for response in
            ["", "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n", "hello\n"]
        {
            assert!(ask(response).await.0.is_err(), "{response}");
        }
    }

    #[tokio::test]
    async fn only_a_refused_or_an_accepted_connection_says_something_of_the_agent() {
        let query = async |at: SocketAddr| {
            let mut is_reached = false;
            let end = query_agent_at(at, || is_reached = true).await;
            (end, is_reached)
        };
        let refused = SocketAddr::from(([127, 99, 99, 99], 1));
        assert_eq!(query(refused).await, (QueryEnd::NotRunning, false));
        // A process accepts nothing there, as that of an agent that hangs.
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let silent = listener.local_addr().expect("bound");
        assert_eq!(query(silent).await, (QueryEnd::NotRunning, true));
        // The kernel connects to no address of this block.
        let unreachable = SocketAddr::from(([255, 255, 255, 255], 1));
        assert_eq!(query(unreachable).await, (QueryEnd::Unreachable, false));
    }
}
