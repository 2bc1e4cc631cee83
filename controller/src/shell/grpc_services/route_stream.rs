//! Shell: the gRPC service of RouteTable streams, which sends batches that are encoded and framed already.
//!
//! The service that tonic generates encodes each item for each stream. A change for a thousand agents would be encoded
//! a thousand times, and polled item by item. Here all streams of a role share the bytes of each batch.

use std::{convert::Infallible, sync::Arc, task};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use common::wire::{
    ClientComponent, RouteChange, RouteItem, RouteKey,
    raw::{self, routes_server},
};
use futures::{Stream, StreamExt as _, stream};
use http_body_util::{BodyExt as _, Limited, StreamBody};
use hyper::body::Frame;
use prost::Message as _;
use tonic::{
    Request, Status,
    body::Body,
    codegen::{Body as HttpBody, BoxFuture, Service, StdError, http},
    metadata::{GRPC_CONTENT_TYPE, MetadataMap},
    server::NamedService,
};

use crate::{decide::machine::RouteMessageBatch, shell::runtime::route_broadcast::EncodedPieces};

/// Size at which a piece is closed, in bytes: it ends with the item that reaches it.
const PIECE_BYTES: usize = 64 * 1024;
/// Longest Subscriber message that is accepted, in bytes.
const MAX_SUBSCRIBER_BYTES: usize = 16 * 1024;
/// Bytes before each message: one for compression, which is always 0, and four for the length (gRPC over HTTP/2,
/// Length-Prefixed-Message).
const GRPC_PREFIX_BYTES: usize = 5;

/// Encodes a batch for all streams of `role`: of each change, what `limit_to_role` leaves of it for the role. No node
/// is in it: a subscriber gets that of its own node only, by [`encode_change`]. Certificates are for activators only:
/// other roles get not even the removal of one.
///
/// Where `limit_to_role` returns `None`, the subscriber receives `Removed` for the subject, which has no effect unless
/// it knew the subject before. A whole table has no removals: what it does not name is removed anyway.
pub fn encode_batch(
    batch: &RouteMessageBatch,
    is_whole_table: bool,
    role: ClientComponent,
    limit_to_role: impl Fn(RouteChange, ClientComponent) -> Option<RouteChange>,
) -> EncodedPieces {
    let (mut all, mut pieces) = (BytesMut::new(), Vec::new());
    let changes = batch.changes.iter().filter(|(key, _)| is_shared_with(role, key));
    let changes = changes.filter_map(|(key, change)| {
        let limited = change.clone().and_then(|change| limit_to_role(change, role));
        let removal = || (!is_whole_table).then(|| RouteChange::Removed(key.clone()));
        limited.or_else(removal)
    });
    for change in changes.chain([RouteChange::Synced]) {
        append_framed(
            &raw::RouteItem::from(RouteItem { version: batch.version, change }),
            &mut all,
        );
        // In pieces, since one buffer for a large table would have to grow by copies.
        if all.len() >= PIECE_BYTES {
            pieces.push(all.split().freeze());
        }
    }
    pieces.extend((!all.is_empty()).then(|| all.freeze()));
    pieces.into()
}

/// Returns true if all streams of `role` get the changes of a subject.
fn is_shared_with(role: ClientComponent, key: &RouteKey) -> bool {
    match key {
        // Otherwise each of thousands of agents would get thousands of nodes.
        RouteKey::Node(_) => false,
        // No other component serves hosts.
        RouteKey::GatewayHost(_) | RouteKey::ReservedHost(_) => role == ClientComponent::Activator,
        // They have private keys.
        RouteKey::Certificate(_) => role == ClientComponent::Activator,
        // No other component accepts clients.
        RouteKey::ClientCa(_) => role == ClientComponent::Activator,
        RouteKey::Service(_)
        | RouteKey::Revision(_)
        | RouteKey::Pod(_)
        | RouteKey::Activator(_)
        | RouteKey::Replicas(_)
        | RouteKey::Settings => true,
    }
}

/// Encodes one change of a batch of this version, without the end of the batch.
pub fn encode_change(version: u64, change: RouteChange) -> Bytes {
    let mut encoded = BytesMut::new();
    append_framed(&raw::RouteItem::from(RouteItem { version, change }), &mut encoded);
    encoded.freeze()
}

/// Appends one message to `out`, with its gRPC prefix.
fn append_framed(item: &raw::RouteItem, out: &mut BytesMut) {
    let length = u32::try_from(item.encoded_len()).expect("an item is far below 4 GiB");
    out.put_u8(0);
    out.put_u32(length);
    item.encode(out).expect("the buffer grows");
}

/// Opens the RouteTable streams of a [`RouteStreamServer`].
#[tonic::async_trait]
pub trait RouteStreamSource: Send + Sync + 'static {
    /// Stream of [encoded](encode_batch) pieces.
    type Items: Stream<Item = Bytes> + Send + 'static;

    /// Opens the stream for one request.
    async fn open_stream(&self, request: Request<raw::Subscriber>) -> Result<Self::Items, Status>;
}

/// gRPC server for `rouse.v1.Routes`, with the behaviour of the one generated from the protocol.
#[derive(Debug)]
pub struct RouteStreamServer<S>(Arc<S>);

impl<S> RouteStreamServer<S> {
    /// Creates a service whose streams `source` opens.
    pub fn new(source: S) -> Self {
        Self(Arc::new(source))
    }
}

impl<S> Clone for RouteStreamServer<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S> NamedService for RouteStreamServer<S> {
    const NAME: &'static str = routes_server::SERVICE_NAME;
}

impl<S: RouteStreamSource, B> Service<http::Request<B>> for RouteStreamServer<S>
where
    B: HttpBody + Send + 'static,
    B::Data: Send,
    B::Error: Into<StdError> + Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut task::Context<'_>) -> task::Poll<Result<(), Infallible>> {
        task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let source = Arc::clone(&self.0);
        Box::pin(async move {
            if request.uri().path() != "/rouse.v1.Routes/Watch" {
                return Ok(Status::unimplemented("there is no such call").into_http());
            }
            // An error is a gRPC response too, so the service itself never fails.
            let items = async { source.open_stream(read_subscriber(request).await?).await };
            Ok(items.await.map_or_else(Status::into_http, route_response))
        })
    }
}

/// Reads the one message of a call.
async fn read_subscriber<B>(request: http::Request<B>) -> Result<Request<raw::Subscriber>, Status>
where
    B: HttpBody,
    B::Error: Into<StdError>,
{
    let refuse = |why: String| Status::invalid_argument(format!("not a subscriber: {why}"));
    let (head, body) = request.into_parts();
    let body = Limited::new(body, MAX_SUBSCRIBER_BYTES).collect().await;
    let mut bytes = body.map_err(|error| refuse(error.to_string()))?.to_bytes();
    // HTTP/2 may deliver the message in any number of frames, so it is read in full before it is decoded.
    if bytes.len() < GRPC_PREFIX_BYTES || bytes.get_u8() != 0 {
        return Err(refuse("no message, or a compressed one".into()));
    }
    if usize::try_from(bytes.get_u32()) != Ok(bytes.len()) {
        return Err(refuse("its length is not that of its prefix".into()));
    }
    let subscriber = raw::Subscriber::decode(bytes).map_err(|error| refuse(error.to_string()))?;
    Ok(Request::from_parts(MetadataMap::from_headers(head.headers), head.extensions, subscriber))
}

/// Response that sends the items, and the trailer `grpc-status: 0` after them.
fn route_response(items: impl Stream<Item = Bytes> + Send + 'static) -> http::Response<Body> {
    // gRPC reports the result in trailers; without them the stream would count as broken off.
    let mut trailers = http::HeaderMap::new();
    trailers.insert(Status::GRPC_STATUS, http::HeaderValue::from_static("0"));
    let trailers = stream::once(async { Frame::trailers(trailers) });
    let frames = items.map(Frame::data).chain(trailers).map(Ok::<_, Status>);
    let mut response = http::Response::new(Body::new(StreamBody::new(frames)));
    response.headers_mut().insert(http::header::CONTENT_TYPE, GRPC_CONTENT_TYPE);
    response
}

#[cfg(test)]
mod tests {
    use common::wire::{NamespacedName, NodeEntry};
    use http_body_util::Full;

    use super::*;
    use crate::decide::machine::RouteMessageBatch;

    #[test]
    fn pieces_are_whole_items_with_their_lengths() {
        let removed = |at: usize| {
            (RouteKey::Service(NamespacedName::new("default", format!("a-{at}"))), None)
        };
        let batch = RouteMessageBatch { version: 7, changes: (0..10_000).map(removed).collect() };
        let pieces = encode_batch(&batch, false, ClientComponent::Agent, |change, _| Some(change));
        assert!(pieces.len() > 1 && pieces.iter().all(|it| it.len() < 2 * PIECE_BYTES));
        let items = decode(pieces.iter().cloned());
        assert!(items.iter().all(|it| it.version == 7));
        assert_eq!(items.len(), 10_001, "and the one that ends the batch");
    }

    /// Returns the decoded items of encoded ones.
    fn decode(encoded: impl IntoIterator<Item = Bytes>) -> Vec<RouteItem> {
        let mut items = Vec::new();
        for mut rest in encoded {
            while !rest.is_empty() {
                assert_eq!(rest.get_u8(), 0);
                let length = rest.get_u32() as usize;
                let item = raw::RouteItem::decode(rest.split_to(length)).expect("a whole item");
                items.push(RouteItem::try_from(item).expect("a valid item"));
            }
        }
        items
    }

    #[test]
    fn no_node_is_in_the_bytes_that_all_agents_share() {
        let entry = |name: &str| NodeEntry { name: name.into(), zone: "a".into() };
        let node = |name: &str| (RouteKey::Node(name.into()), Some(RouteChange::Node(entry(name))));
        let changes = vec![node("n1"), node("n2"), (RouteKey::Node("n3".into()), None)];
        let batch = RouteMessageBatch { version: 7, changes };
        let pieces = encode_batch(&batch, false, ClientComponent::Agent, |change, _| Some(change));
        let item = |change| RouteItem { version: 7, change };
        assert_eq!(decode(pieces.iter().cloned()), [item(RouteChange::Synced)]);
        let own = RouteChange::Node(entry("n2"));
        assert_eq!(decode([encode_change(7, own.clone())]), [item(own)]);
    }

    #[tokio::test]
    async fn anything_but_one_message_is_refused() {
        let subscriber = raw::Subscriber { name: "n1".into(), ..raw::Subscriber::default() };
        let message = subscriber.encode_to_vec();
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        let valid = [&[0][..], &length, &message].concat();
        let asked =
            |body: Vec<u8>| read_subscriber(http::Request::new(Full::new(Bytes::from(body))));
        assert_eq!(asked(valid.clone()).await.expect("a subscriber").into_inner(), subscriber);
        let compressed = [&[1], &valid[1..]].concat();
        let twice = [&valid[..], &valid].concat();
        let other = [&[0, 0, 0, 0, 2, 0xff, 0xff][..]].concat();
        let large = vec![0; MAX_SUBSCRIBER_BYTES + 1];
        for invalid in
            [vec![], valid[..4].to_vec(), valid[..6].to_vec(), compressed, twice, other, large]
        {
            let refused = asked(invalid.clone()).await.expect_err("it is refused");
            assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{invalid:?}");
        }
    }
}
