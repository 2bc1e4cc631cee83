//! Shell: asks pods which of their clients' connections are in use.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::SocketAddr,
    time::Duration,
};

use http::{Request, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, task::JoinSet, time::timeout};
use tracing::debug;

use crate::door::{self, busy};

/// How long a pod may take to answer. One that does not say is taken to know nothing.
const PATIENCE: Duration = Duration::from_millis(500);

/// A connection by both its ends, the client's first.
pub(super) type Ends = (SocketAddr, SocketAddr);

/// Those of the connections that are in use, as far as the pods at their other ends tell.
///
/// Where no agent answers in a pod's namespace, or a policy keeps us from it, none of its connections is among them.
pub(super) async fn busy(connections: impl IntoIterator<Item = Ends>) -> BTreeSet<Ends> {
    let mut questions = BTreeMap::<SocketAddr, Vec<SocketAddr>>::new();
    for (client, pod) in connections {
        questions.entry(pod).or_default().push(client);
    }
    let mut asked = JoinSet::new();
    for (pod, clients) in questions {
        for some in clients.chunks(busy::MOST) {
            let question = busy::write(some.iter().copied());
            asked.spawn(async move { (pod, answer(pod, question).await) });
        }
    }
    let mut busy = BTreeSet::new();
    while let Some(answered) = asked.join_next().await {
        match answered {
            Ok((pod, Ok(clients))) => busy.extend(clients.into_iter().map(|it| (it, pod))),
            Ok((pod, Err(error))) => debug!(%pod, %error, "a pod does not say what is in use"),
            Err(panic) => debug!(%panic, "asking a pod failed"),
        }
    }
    busy
}

async fn answer(pod: SocketAddr, question: String) -> io::Result<BTreeSet<SocketAddr>> {
    let at = SocketAddr::new(pod.ip(), door::PORT);
    timeout(PATIENCE, ask(at, question)).await.unwrap_or_else(|late| Err(late.into()))
}

async fn ask(at: SocketAddr, question: String) -> io::Result<BTreeSet<SocketAddr>> {
    let stream = TcpStream::connect(at).await?;
    // It leaves nothing behind, as a probe does not.
    stream.set_zero_linger()?;
    let (mut requests, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    let request = Request::post(busy::PATH)
        .header(header::HOST, at.to_string())
        .body(Full::new(Bytes::from(question)))
        .map_err(io::Error::other)?;
    let asked = async {
        let response = requests.send_request(request).await.map_err(io::Error::other)?;
        let status = response.status();
        if status != StatusCode::OK {
            return Err(io::Error::other(format!("answer {status}")));
        }
        let body = Limited::new(response.into_body(), busy::MOST_BYTES).collect().await;
        let bytes = body.map_err(io::Error::other)?.to_bytes();
        let text = str::from_utf8(&bytes).map_err(io::Error::other)?;
        busy::read(text).map_err(io::Error::other)
    };
    tokio::select! {
        answer = asked => answer,
        ended = connection => {
            ended.map_err(io::Error::other)?;
            Err(io::ErrorKind::UnexpectedEof.into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_pod_that_does_not_answer_keeps_nothing() {
        // Nobody listens there.
        let ends = [4_711, 4_712].map(|port| {
            let client = SocketAddr::from(([127, 0, 0, 1], port));
            (client, SocketAddr::from(([127, 99, 99, 99], 80)))
        });
        assert_eq!(busy(ends).await, BTreeSet::new());
    }
}
