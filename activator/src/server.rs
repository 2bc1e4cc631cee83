//! Shell: clients and their connections.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::{
    balance::Lot,
    clock::chance,
    gateway::{Client, Door, Gateway},
    socket::{Gone, Socket, Watched},
};

/// Bounds of what a client may send.
#[derive(Clone, Copy, Debug)]
pub struct ClientBounds {
    /// Bytes of a head.
    pub head_bytes: usize,
    /// Time for a head, and for a kept connection to lie idle.
    pub head_timeout: Duration,
}

/// Serves connections as they come in, all of them apart from each other.
#[derive(Debug)]
pub struct Server {
    gateway: Arc<Gateway>,
    http: http1::Builder,
}

impl Server {
    /// A server in front of `gateway`.
    pub fn new(gateway: Arc<Gateway>, bounds: ClientBounds) -> Self {
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new())
            .header_read_timeout(bounds.head_timeout)
            .max_buf_size(bounds.head_bytes)
            .max_header_size(bounds.head_bytes)
            // Whether a client that has closed its sending half is gone is for the socket to say.
            .half_close(true)
            .auto_date_header(false);
        Self { gateway, http }
    }

    /// Accepts from `listener` until `closed`, by `door` or else by the port each client asked for; connections are served on until `stop`, then end politely.
    pub async fn accept(
        self: Arc<Self>,
        listener: TcpListener,
        door: Option<Door>,
        closed: CancellationToken,
    ) {
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = closed.cancelled() => return self.welcome_rest(listener, door),
            };
            match accepted {
                Ok((stream, client)) => self.welcome(stream, door, client),
                Err(error) => give_way(&error).await,
            }
        }
    }

    /// Takes in who has connected before the listener closes; the kernel would reset them.
    fn welcome_rest(self: &Arc<Self>, listener: TcpListener, door: Option<Door>) {
        let Ok(listener) = listener.into_std() else { return };
        while let Ok((stream, client)) = listener.accept() {
            let stream = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream));
            if let Ok(stream) = stream {
                self.welcome(stream, door, client);
            }
        }
    }

    fn welcome(self: &Arc<Self>, stream: TcpStream, door: Option<Door>, client: SocketAddr) {
        let own = || stream.local_addr().map(|address| Door::Port(address.port()));
        let door = match stream.set_nodelay(true).and_then(|()| door.map_or_else(own, Ok)) {
            Ok(door) => door,
            Err(error) => return debug!(%client, %error, "client gone at once"),
        };
        let server = Arc::clone(self);
        self.gateway.tasks.spawn(async move {
            server.gateway.metrics.connections.inc();
            if let Err(error) = server.serve(stream, door, client).await {
                debug!(?door, %client, %error, "connection ended");
            }
            server.gateway.metrics.connections.dec();
        });
    }

    async fn serve(
        &self,
        stream: TcpStream,
        door: Door,
        client: SocketAddr,
    ) -> Result<(), hyper::Error> {
        let client = Client { address: client.ip().to_canonical(), lot: Lot::draw(chance()) };
        let socket = Socket::new(stream);
        let service = service_fn(|request| {
            let socket = socket.clone();
            async move {
                tokio::select! {
                    biased;
                    answer = self.gateway.handle(request, door, client) => {
                        Ok(answer.map(|body| Watched::new(body, socket)))
                    }
                    () = socket.gone() => Err(Gone),
                }
            }
        });
        let io = TokioIo::new(socket.clone());
        let connection = self.http.serve_connection(io, service).with_upgrades();
        tokio::pin!(connection);
        tokio::select! {
            ended = connection.as_mut() => return ended,
            () = self.gateway.stop.cancelled() => {}
        }
        connection.as_mut().graceful_shutdown();
        connection.await
    }
}

/// A connection that broke before it was accepted costs nothing; a full file table needs a moment.
async fn give_way(error: &io::Error) {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    if matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset) {
        return;
    }
    warn!(%error, "cannot accept connections");
    tokio::time::sleep(Duration::from_millis(10)).await;
}
