//! Shell: one message to a collector of OpenTelemetry, by gRPC or by HTTP/1.1.

use std::{io, time::Duration};

use bytes::Bytes;
use common::wire::{OtlpCollector, OtlpProtocol};
use http::{Request, header};
use http_body::{Body, Frame, SizeHint};
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::collector::{
    metrics::v1::{ExportMetricsServiceRequest, metrics_service_client::MetricsServiceClient},
    trace::v1::{ExportTraceServiceRequest, trace_service_client::TraceServiceClient},
};
use prost::Message as _;
use tokio::net::TcpStream;
use tonic::transport::{Channel, Endpoint};

/// Time limit for one message, from the connect to the response: OTLP's default.
pub const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);

/// Message for a collector.
#[derive(Clone, Debug, PartialEq)]
pub enum OtlpMessage {
    /// Spans of finished requests.
    Traces(ExportTraceServiceRequest),
    /// Request metrics at one moment.
    Metrics(ExportMetricsServiceRequest),
}

impl OtlpMessage {
    /// Path of the signal for an endpoint without a path, by OTLP's specification.
    fn default_path(&self) -> &'static str {
        match self {
            Self::Traces(_) => "/v1/traces",
            Self::Metrics(_) => "/v1/metrics",
        }
    }

    fn encode(&self) -> Bytes {
        match self {
            Self::Traces(message) => message.encode_to_vec().into(),
            Self::Metrics(message) => message.encode_to_vec().into(),
        }
    }
}

/// Reason for which a collector did not take a message.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The address of the collector is no URI.
    #[error("bad address of the collector")]
    Address(#[source] tonic::transport::Error),
    /// The collector responded with an error, or gRPC could not reach it.
    #[error("gRPC: {}", .0.message())]
    Grpc(#[source] Box<tonic::Status>),
    /// No connection could be opened.
    #[error("cannot connect")]
    Connect(#[source] io::Error),
    /// The request could not be made.
    #[error("bad request")]
    Request(#[source] http::Error),
    /// The exchange broke off.
    #[error("exchange broke off")]
    Exchange(#[source] hyper::Error),
    /// The collector responded with another code than a success.
    #[error("collector responded with {0}")]
    Refused(http::StatusCode),
    /// The collector took too long.
    #[error("timeout")]
    Timeout,
}

/// Client of one collector.
#[derive(Debug)]
pub struct CollectorClient {
    collector: OtlpCollector,
    /// Connection of gRPC, opened with the first message and again after it broke. Unset for HTTP.
    channel: Option<Channel>,
}

impl CollectorClient {
    /// Creates a client, which connects with its first message.
    pub fn new(collector: OtlpCollector) -> Result<Self, ExportError> {
        let channel = match collector.protocol {
            OtlpProtocol::Grpc => {
                let uri = format!("http://{}", collector.authority());
                let endpoint = Endpoint::from_shared(uri).map_err(ExportError::Address)?;
                Some(endpoint.connect_timeout(EXPORT_TIMEOUT).connect_lazy())
            }
            OtlpProtocol::HttpProtobuf => None,
        };
        Ok(Self { collector, channel })
    }

    /// Collector that gets the messages.
    pub fn collector(&self) -> &OtlpCollector {
        &self.collector
    }

    /// Sends a message and waits until the collector has taken it, at most for [`EXPORT_TIMEOUT`].
    pub async fn send(&self, message: OtlpMessage) -> Result<(), ExportError> {
        let send = async {
            match &self.channel {
                Some(channel) => send_by_grpc(channel.clone(), message).await,
                None => send_by_http(&self.collector, &message).await,
            }
        };
        tokio::time::timeout(EXPORT_TIMEOUT, send).await.unwrap_or(Err(ExportError::Timeout))
    }
}

async fn send_by_grpc(channel: Channel, message: OtlpMessage) -> Result<(), ExportError> {
    let sent = match message {
        OtlpMessage::Traces(message) => {
            TraceServiceClient::new(channel).export(message).await.map(drop)
        }
        OtlpMessage::Metrics(message) => {
            MetricsServiceClient::new(channel).export(message).await.map(drop)
        }
    };
    sent.map_err(|status| ExportError::Grpc(Box::new(status)))
}

/// Sends a message over a connection of its own: there is at most one in a second.
async fn send_by_http(collector: &OtlpCollector, message: &OtlpMessage) -> Result<(), ExportError> {
    let authority = collector.authority();
    let stream = TcpStream::connect(authority.as_str()).await.map_err(ExportError::Connect)?;
    // hyper's plain connection has no pool and adds no `Host`, so both the field and the close are stated below.
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(ExportError::Exchange)?;
    // Without a path the signal has its own, by OTLP's specification. A path that the operator has set is complete.
    let path = match collector.path.as_str() {
        "" => message.default_path(),
        path => path,
    };
    let request = Request::post(path)
        .header(header::HOST, authority)
        .header(header::CONTENT_TYPE, "application/x-protobuf")
        .header(header::CONNECTION, "close")
        .body(WholeBody(Some(message.encode())))
        .map_err(ExportError::Request)?;
    let exchange = async {
        let response = sender.send_request(request).await.map_err(ExportError::Exchange)?;
        let status = response.status();
        if status.is_success() { Ok(()) } else { Err(ExportError::Refused(status)) }
    };
    tokio::pin!(exchange);
    // The connection is polled here, and dropped with its response: no task outlives the call.
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        biased;
        sent = exchange.as_mut() => sent,
        // A response may have come right before the end, so the exchange decides.
        _ended = connection.as_mut() => exchange.await,
    }
}

/// Body that is sent at once.
struct WholeBody(Option<Bytes>);

impl Body for WholeBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        _cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        std::task::Poll::Ready(self.get_mut().0.take().map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        let length = self.0.as_ref().map_or(0, Bytes::len);
        SizeHint::with_exact(u64::try_from(length).unwrap_or(u64::MAX))
    }
}
