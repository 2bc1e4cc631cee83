//! Shell: opening of RouteTable streams whose items stay encoded, so that the receiver decodes only those that are new.

use http::uri::PathAndQuery;
use prost::bytes::{Buf as _, Bytes};
use tonic::{
    Request, Response, Status, Streaming,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder},
    transport::Channel,
};
use tonic_prost::ProstEncoder;

use super::error_chain;
use crate::wire::raw;

/// Path of the call `Watch` of the service `rouse.v1.Routes`.
const WATCH_PATH: &str = "/rouse.v1.Routes/Watch";
/// Most bytes of an item. The rules of all routes of a host are one item, and may exceed the usual 4 MiB. Each attempt
/// of the stream would then end at this item. The controller is trusted not to send more.
const MAX_ITEM_BYTES: usize = 1 << 30;

/// Opens the RouteTable stream of a subscriber. Each item is an encoded `RouteItem`.
pub(super) async fn open_route_stream(
    channel: Channel,
    subscriber: raw::Subscriber,
) -> Result<Streaming<Bytes>, Status> {
    let mut client = Grpc::new(channel).max_decoding_message_size(MAX_ITEM_BYTES);
    let not_ready = |error: tonic::transport::Error| Status::unknown(error_chain(&error));
    client.ready().await.map_err(not_ready)?;
    let path = PathAndQuery::from_static(WATCH_PATH);
    let opened = client.server_streaming(Request::new(subscriber), path, EncodedItemCodec).await;
    opened.map(Response::into_inner)
}

/// Codec that leaves items encoded.
#[derive(Clone, Copy, Debug)]
struct EncodedItemCodec;

impl Codec for EncodedItemCodec {
    type Encode = raw::Subscriber;
    type Decode = Bytes;
    type Encoder = ProstEncoder<raw::Subscriber>;
    type Decoder = Self;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Decoder for EncodedItemCodec {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        // The bytes are shared with the buffer in which they arrived, not copied.
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}
