//! Shell: streams of routes that a bench follows with a decoder of its own.
//!
//! The streams share this machine with the controller, so each bench decodes of an item only what it needs.

use std::{marker::PhantomData, time::Duration};

use common::wire::{ComponentReplica, raw};
use prost::Message as _;
use tonic::{
    Request, Status, Streaming,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    transport::Endpoint,
};

/// Part of an item that a bench reads.
pub(crate) trait ItemPart: Sized + Send + Sync + 'static {
    /// Reads the whole item, and returns the part.
    fn decode_item(from: &mut DecodeBuf<'_>) -> Result<Self, Status>;
}

/// Opens a stream of routes; it tries until the controller answers.
pub(crate) async fn open_route_stream<T: ItemPart>(
    endpoint: &str,
    subscriber: &ComponentReplica,
) -> Streaming<T> {
    loop {
        match try_open(endpoint, subscriber).await {
            Ok(items) => return items,
            Err(_status) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

async fn try_open<T: ItemPart>(
    endpoint: &str,
    subscriber: &ComponentReplica,
) -> Result<Streaming<T>, Status> {
    let failed = |error: tonic::transport::Error| Status::unavailable(error.to_string());
    let endpoint = Endpoint::from_shared(endpoint.to_owned()).map_err(failed)?;
    let mut client = Grpc::new(endpoint.connect().await.map_err(failed)?);
    client.ready().await.map_err(failed)?;
    let path = "/rouse.v1.Routes/Watch".parse().expect("a path");
    let request = Request::new(raw::Subscriber::from(subscriber.clone()));
    Ok(client.server_streaming(request, path, ItemCodec(PhantomData)).await?.into_inner())
}

/// Codec that reads one part of each item.
#[derive(Debug)]
struct ItemCodec<T>(PhantomData<fn() -> T>);

impl<T: ItemPart> Codec for ItemCodec<T> {
    type Encode = raw::Subscriber;
    type Decode = T;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self(PhantomData)
    }

    fn decoder(&mut self) -> Self {
        Self(PhantomData)
    }
}

impl<T: ItemPart> Encoder for ItemCodec<T> {
    type Item = raw::Subscriber;
    type Error = Status;

    fn encode(&mut self, item: raw::Subscriber, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        item.encode(to).map_err(|error| Status::internal(error.to_string()))
    }
}

impl<T: ItemPart> Decoder for ItemCodec<T> {
    type Item = T;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<T>, Status> {
        T::decode_item(from).map(Some)
    }
}
