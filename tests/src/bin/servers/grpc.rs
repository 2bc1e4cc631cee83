//! Shell: a tonic server with the service Echo of tests/servers/echo.proto.

use anyhow::Result;
use futures::{Stream, StreamExt as _, stream, stream::BoxStream};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, Streaming, transport::Server};

use self::generated::{
    Text,
    echo_server::{Echo, EchoServer},
};
use crate::request_record::{self, RecordedRequest};

#[allow(
    clippy::all,
    clippy::pedantic,
    clippy::allow_attributes_without_reason,
    unreachable_pub,
    missing_debug_implementations,
    reason = "generated"
)]
mod generated {
    tonic::include_proto!("servers");
}

pub(crate) async fn serve(listener: TcpListener) -> Result<()> {
    let server = Server::builder().add_service(EchoServer::new(EchoService));
    Ok(server.serve_with_incoming(TcpListenerStream::new(listener)).await?)
}

struct EchoService;

/// Does as a message demands: it waits, fails, or returns the text.
async fn execute(text: Text) -> Result<Text, Status> {
    match text.text.as_str() {
        "wait" => request_record::wait_for_gate().await,
        "fail" => return Err(Status::failed_precondition("asked to fail")),
        _ => {}
    }
    Ok(text)
}

/// Stream that keeps the request open in the request record until the stream ends.
fn hold_open(
    request: RecordedRequest,
    stream: impl Stream<Item = Result<Text, Status>> + Send + 'static,
) -> BoxStream<'static, Result<Text, Status>> {
    stream
        .map(move |item| {
            let _until_here = &request;
            item
        })
        .boxed()
}

#[tonic::async_trait]
impl Echo for EchoService {
    async fn unary(&self, request: Request<Text>) -> Result<Response<Text>, Status> {
        let _begun = RecordedRequest::begin();
        Ok(Response::new(execute(request.into_inner()).await?))
    }

    type ServerStreamStream = BoxStream<'static, Result<Text, Status>>;

    async fn server_stream(
        &self,
        request: Request<Text>,
    ) -> Result<Response<Self::ServerStreamStream>, Status> {
        let recorded = RecordedRequest::begin();
        let text = request.into_inner();
        let three = stream::iter(0..3).then(move |_| execute(text.clone()));
        Ok(Response::new(hold_open(recorded, three)))
    }

    async fn client_stream(
        &self,
        request: Request<Streaming<Text>>,
    ) -> Result<Response<Text>, Status> {
        let _begun = RecordedRequest::begin();
        let (mut stream, mut last) = (request.into_inner(), Text::default());
        while let Some(text) = stream.message().await? {
            last = execute(text).await?;
        }
        Ok(Response::new(last))
    }

    type BidiStream = BoxStream<'static, Result<Text, Status>>;

    async fn bidi(
        &self,
        request: Request<Streaming<Text>>,
    ) -> Result<Response<Self::BidiStream>, Status> {
        let recorded = RecordedRequest::begin();
        let replies = request.into_inner().then(|text| async { execute(text?).await });
        Ok(Response::new(hold_open(recorded, replies)))
    }
}
