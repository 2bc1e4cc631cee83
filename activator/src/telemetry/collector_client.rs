//! Shell: one message to a collector of OpenTelemetry, by gRPC or by HTTP/1.1.

use std::{future::poll_fn, io, pin::Pin, time::Duration};

use bytes::Bytes;
use common::wire::{OtlpCollector, OtlpProtocol};
use http::{Request, Response, header};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::collector::{
    metrics::v1::{
        ExportMetricsServiceRequest, ExportMetricsServiceResponse,
        metrics_service_client::MetricsServiceClient,
    },
    trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_client::TraceServiceClient,
    },
};
use prost::Message as _;
use tokio::net::TcpStream;
use tonic::transport::{Channel, Endpoint};

/// Time limit for one message, from the connect to the response: OTLP's default.
pub const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Type of messages and responses over HTTP.
const PROTOBUF: &str = "application/x-protobuf";
/// Longest body of a response over HTTP, in bytes. It has a number and a short text.
const MAX_RESPONSE_BYTES: usize = 64 * 1024;

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

    /// Decodes the response to this message.
    fn decode_response(&self, body: &[u8]) -> Result<ExportResponse, prost::DecodeError> {
        match self {
            Self::Traces(_) => ExportTraceServiceResponse::decode(body).map(Into::into),
            Self::Metrics(_) => ExportMetricsServiceResponse::decode(body).map(Into::into),
        }
    }
}

/// Response of a collector that has taken a message, or a part of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportResponse {
    /// Number of spans or data points that the collector has rejected.
    pub rejected: u64,
    /// Reason for it, or a warning, in the collector's words. Usually empty.
    pub reason: String,
}

impl ExportResponse {
    fn new(rejected: i64, reason: String) -> Self {
        // A negative number has no meaning in OTLP.
        Self { rejected: u64::try_from(rejected).unwrap_or_default(), reason }
    }
}

impl From<ExportTraceServiceResponse> for ExportResponse {
    fn from(response: ExportTraceServiceResponse) -> Self {
        let partial = response.partial_success;
        partial.map(|it| Self::new(it.rejected_spans, it.error_message)).unwrap_or_default()
    }
}

impl From<ExportMetricsServiceResponse> for ExportResponse {
    fn from(response: ExportMetricsServiceResponse) -> Self {
        let partial = response.partial_success;
        partial.map(|it| Self::new(it.rejected_data_points, it.error_message)).unwrap_or_default()
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
    /// The body of a response is none of OTLP, so what the collector has taken is not known.
    #[error("response cannot be decoded")]
    Response(#[source] prost::DecodeError),
    /// The body of a response is longer than any of OTLP.
    #[error("response is longer than {} bytes", MAX_RESPONSE_BYTES)]
    LongResponse,
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

    /// Sends a message and waits until the collector has taken it, at most for [`EXPORT_TIMEOUT`]. It may reject a part.
    pub async fn send(&self, message: OtlpMessage) -> Result<ExportResponse, ExportError> {
        let send = async {
            match &self.channel {
                Some(channel) => send_by_grpc(channel.clone(), message).await,
                None => send_by_http(&self.collector, &message).await,
            }
        };
        tokio::time::timeout(EXPORT_TIMEOUT, send).await.unwrap_or(Err(ExportError::Timeout))
    }
}

async fn send_by_grpc(
    channel: Channel,
    message: OtlpMessage,
) -> Result<ExportResponse, ExportError> {
    let sent = match message {
        OtlpMessage::Traces(message) => {
            let sent = TraceServiceClient::new(channel).export(message).await;
            sent.map(|response| response.into_inner().into())
        }
        OtlpMessage::Metrics(message) => {
            let sent = MetricsServiceClient::new(channel).export(message).await;
            sent.map(|response| response.into_inner().into())
        }
    };
    sent.map_err(|status| ExportError::Grpc(Box::new(status)))
}

/// Sends a message over a connection of its own: there is at most one in a second.
async fn send_by_http(
    collector: &OtlpCollector,
    message: &OtlpMessage,
) -> Result<ExportResponse, ExportError> {
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
        .header(header::CONTENT_TYPE, PROTOBUF)
        .header(header::CONNECTION, "close")
        .body(WholeBody(Some(message.encode())))
        .map_err(ExportError::Request)?;
    let exchange = async {
        let response = sender.send_request(request).await.map_err(ExportError::Exchange)?;
        read_response(message, response).await
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

/// Reads the response of a collector to a message.
async fn read_response(
    message: &OtlpMessage,
    response: Response<Incoming>,
) -> Result<ExportResponse, ExportError> {
    let status = response.status();
    if !status.is_success() {
        return Err(ExportError::Refused(status));
    }
    let content_type = response.headers().get(header::CONTENT_TYPE);
    // Some servers respond with a text of their own. It rejects nothing, and the code says that the message was taken.
    if content_type.is_none_or(|it| !it.as_bytes().starts_with(PROTOBUF.as_bytes())) {
        return Ok(ExportResponse::default());
    }
    let body = read_body(response.into_body()).await?;
    message.decode_response(&body).map_err(ExportError::Response)
}

/// Reads a body up to its end.
async fn read_body(mut body: Incoming) -> Result<Vec<u8>, ExportError> {
    let mut all = Vec::new();
    while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        let frame = frame.map_err(ExportError::Exchange)?;
        all.extend(frame.into_data().unwrap_or_default());
        if all.len() > MAX_RESPONSE_BYTES {
            return Err(ExportError::LongResponse);
        }
    }
    Ok(all)
}

/// Body that is sent at once.
struct WholeBody(Option<Bytes>);

impl Body for WholeBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
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
