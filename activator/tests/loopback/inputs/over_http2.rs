//! One exchange over HTTP/2 by prior knowledge, by a client that reads a response even while it sends.

use std::{convert::Infallible, error::Error, net::SocketAddr};

use futures::stream;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::{
    Request,
    body::{Bytes, Frame},
    client::conn::http2::handshake,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;

use super::{ComparedResponse, Http2RequestCase, RequestBodyCase, compared_fields};

const PART: &[u8] = &[b'x'; 64 << 10];

/// Returns the client's response, or the error for which it gets none.
pub(crate) async fn over_http2(
    at: SocketAddr,
    (method, target, fields, sent): &Http2RequestCase,
) -> Result<ComparedResponse, Box<dyn Error + Send + Sync>> {
    let uri = format!("http://hello.default.example.com{target}");
    let mut request = Request::builder().method(*method).uri(uri);
    for (name, value) in fields {
        request = request.header(name, value);
    }
    if let RequestBodyCase::Sized(size) = sent {
        request = request.header("content-length", *size);
    }
    let body = match *sent {
        RequestBodyCase::Nothing => http_body_util::Empty::new().boxed_unsync(),
        RequestBodyCase::Sized(size) | RequestBodyCase::Unsized(size) => {
            StreamBody::new(stream::iter(parts(size))).boxed_unsync()
        }
    };
    let stream = TcpStream::connect(at).await?;
    let (mut sender, driver) = handshake(TokioExecutor::new(), TokioIo::new(stream)).await?;
    tokio::spawn(driver);
    let (head, body) = sender.send_request(request.body(body)?).await?.into_parts();
    let body = body.collect().await?.to_bytes();
    let fields = head.headers.iter();
    let fields = fields.map(|(name, value)| (name.as_str(), value.to_str().unwrap_or_default()));
    Ok(ComparedResponse {
        status: head.status.as_str().to_owned(),
        fields: compared_fields(fields),
        body: String::from_utf8_lossy(&body).into_owned(),
    })
}

/// Body of this many bytes. Its end comes in two parts, as most bodies do not come at once.
fn parts(size: usize) -> Vec<Result<Frame<Bytes>, Infallible>> {
    let end = &PART[..size % PART.len()];
    let (first, last) = end.split_at(end.len() / 2);
    let whole = std::iter::repeat_n(PART, size / PART.len());
    let parts = whole.chain([first, last]).filter(|part| !part.is_empty());
    parts.map(|part| Ok(Frame::data(Bytes::from_static(part)))).collect()
}
