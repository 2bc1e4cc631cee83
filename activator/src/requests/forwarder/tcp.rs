//! Shell: a raw TCP connection, from its accept to its end. It is one request for the service of its port.
//!
//! The port is the service's own one at the activators, or its gateway port. At the gateway's port of TLS, the host of
//! the handshake names the service.
//!
//! It waits for a pod as a request of HTTP does, with the same bounds and timeouts. Nothing is read meanwhile, so a
//! failed dial can be repeated, and the server may speak first. A failure has no response, so the client gets a reset.

use std::{
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use common::wire::{AppProtocol, NamespacedName};
use tokio::net::TcpStream;
use tracing::{debug, info};

use super::{RequestForwarder, forwarding::connect_to_pod};
use crate::{
    budget::REQUEST_OVERHEAD_BYTES,
    clients::{client_stream::AcceptedStream, connections::ClientConnection},
    clock::random_u64,
    entrypoint::Entrypoint,
    metrics::{TcpConnectionCounters, TcpConnectionEnd},
    pods::connection::PodConnection,
    request_error::ProxyRequestError,
    requests::{
        request_timer::RequestTimer,
        route_choice::{check_target, pick_target},
        splice_pipes::SplicePipes,
        tcp_failure_log::TcpFailureLog,
        tcp_relay::{RelayActivity, TcpRelayError, relay_tcp},
        tls_relay::relay_tls,
    },
    revisions::revision::{ActivatorRevision, PodPermit, QueueEntry},
    routes::service::{PortProtocol, RoutedService},
    tcp_socket::{self, ResettingStream},
};

/// Request of raw TCP, which is one connection.
#[derive(Clone, Copy, Debug)]
pub struct TcpRequest<'a> {
    /// Service whose pods take the connection.
    pub service: &'a RoutedService,
    /// Entrypoint that the connection came in by.
    pub entrypoint: Entrypoint,
    /// Address of the client.
    pub client: IpAddr,
    /// Idle deadline: the connection is reset once no byte has passed for so long; `None`: never.
    pub idle_timeout: Option<Duration>,
}

/// Connection of a client of raw TCP. It is reset when it is dropped before its end.
#[derive(Debug)]
pub struct TcpClientStream(TcpClientTransport);

#[derive(Debug)]
enum TcpClientTransport {
    Plain(ResettingStream),
    Tls(AcceptedStream),
}

impl From<TcpStream> for TcpClientStream {
    fn from(stream: TcpStream) -> Self {
        Self(TcpClientTransport::Plain(ResettingStream::new(stream)))
    }
}

impl TcpClientStream {
    /// Wraps a connection whose bytes pass within TLS. `None`: the client is gone.
    pub fn over_tls(stream: AcceptedStream) -> Option<Self> {
        tcp_socket::set_reset_on_close(stream.tcp(), true).ok()?;
        Some(Self(TcpClientTransport::Tls(stream)))
    }

    fn tcp(&self) -> &TcpStream {
        match &self.0 {
            TcpClientTransport::Plain(stream) => stream.stream(),
            TcpClientTransport::Tls(stream) => stream.tcp(),
        }
    }

    /// Passes bytes on between the client and a pod, until both have ended theirs or one has broken off.
    async fn relay(
        self,
        pod: &TcpStream,
        pipes: &SplicePipes,
        activity: &RelayActivity,
    ) -> Result<(), TcpRelayError> {
        match self.0 {
            TcpClientTransport::Plain(stream) => {
                relay_tcp(stream.stream(), pod, pipes, activity).await?;
                stream.close();
                Ok(())
            }
            // Boxed, so that a connection without TLS holds no memory for it.
            TcpClientTransport::Tls(stream) => Box::pin(relay_tls(stream, pod, activity)).await,
        }
    }
}

/// State that all raw TCP connections share.
#[derive(Debug, Default)]
pub(crate) struct TcpForwarding {
    pipes: SplicePipes,
    failure_log: Mutex<TcpFailureLog>,
}

/// End of the wait for a pod.
enum TcpWaitEnd {
    /// The pod has accepted a connection.
    Connected(PodPermit, ResettingStream),
    /// The connection has ended before.
    Ended(TcpConnectionEnd),
}

/// Guard that counts a connection at its end. One that is dropped before was cut off.
struct TcpConnectionGuard<'a> {
    counters: &'a TcpConnectionCounters,
    end: TcpConnectionEnd,
}

impl Drop for TcpConnectionGuard<'_> {
    fn drop(&mut self) {
        self.counters.count_end(self.end);
    }
}

impl RequestForwarder {
    /// Protocol of the connections to a port of the activator, as the RouteTable names it now.
    pub fn port_protocol(&self, port: u16) -> PortProtocol {
        let Some(service) = self.routes.service_by_port(port) else { return PortProtocol::Unknown };
        match service.takes_raw_tcp() {
            Some(true) => PortProtocol::RawTcp(service),
            Some(false) => PortProtocol::Http,
            None => PortProtocol::Unknown,
        }
    }

    /// Protocol of the connections to a gateway port. Each is raw TCP; `Unknown`: no service has the port any more.
    pub fn gateway_port_protocol(&self, port: u16) -> PortProtocol {
        let service = self.routes.service_by_gateway_port(port);
        service.map_or(PortProtocol::Unknown, PortProtocol::RawTcp)
    }

    /// Serves a raw TCP connection until it has ended. The caller counts it as a request of `connection` meanwhile: one
    /// with a request is never closed in favour of a new one.
    pub async fn serve_tcp(
        &self,
        stream: TcpClientStream,
        request: TcpRequest<'_>,
        connection: &Arc<ClientConnection>,
    ) {
        let counters = &self.metrics.tcp_connections;
        let mut guard = TcpConnectionGuard { counters, end: TcpConnectionEnd::CutOff };
        guard.end = match self.forward_tcp(stream, request, connection).await {
            Ok(end) => end,
            Err(failure) => {
                self.tcp.log_failure(&request.service.name, request.client, &failure);
                TcpConnectionEnd::Failed
            }
        };
    }

    async fn forward_tcp(
        &self,
        stream: TcpClientStream,
        request: TcpRequest<'_>,
        connection: &Arc<ClientConnection>,
    ) -> Result<TcpConnectionEnd, ProxyRequestError> {
        let (permit, pod) = match self.wait_for_pod(stream.tcp(), request, connection).await? {
            TcpWaitEnd::Connected(permit, pod) => (permit, pod),
            TcpWaitEnd::Ended(end) => return Ok(end),
        };
        // The wait for a pod is no idle time, since its own bound ends it.
        let activity = RelayActivity::begin();
        let relayed = tokio::select! {
            relayed = stream.relay(pod.stream(), &self.tcp.pipes, &activity) => relayed,
            () = self.close_upgraded.cancelled() => return Ok(TcpConnectionEnd::CutOff),
            () = activity.wait_idle(request.idle_timeout) => return Ok(TcpConnectionEnd::Idle),
        };
        if let Err(error) = relayed {
            let error = common::link::error_chain(&error);
            debug!(pod = %permit.pod.uid, %error, "TCP connection broke");
            return Ok(TcpConnectionEnd::Reset);
        }
        pod.close();
        // Its process has closed the connection, so it runs.
        permit.pod.standby_watch.record_answer();
        Ok(TcpConnectionEnd::Complete)
    }

    /// Waits until a pod has accepted a connection for this one, for at most the time that a request of HTTP may wait.
    async fn wait_for_pod(
        &self,
        stream: &TcpStream,
        request: TcpRequest<'_>,
        connection: &Arc<ClientConnection>,
    ) -> Result<TcpWaitEnd, ProxyRequestError> {
        let TcpRequest { service, entrypoint, client, .. } = request;
        let target = pick_target(service, random_u64())?;
        let settings = check_target(target, entrypoint, Some(client))?;
        let revision = &target.revision;
        if let Err(error) = tcp_socket::keep_urgent_inline(stream) {
            debug!(%client, %error, "client gone at once");
            return Ok(TcpWaitEnd::Ended(TcpConnectionEnd::Cancelled));
        }
        let charge = connection.try_charge_head(REQUEST_OVERHEAD_BYTES);
        let charge = charge.ok_or(ProxyRequestError::TooManyRequestBytes)?;
        let mut timer = RequestTimer::start(settings.timeouts);
        let queue_entry = revision.queue_entry(service.service_port, charge.bytes());
        let mut queue_entry = queue_entry.with_client(client);
        let (permit, pod) = tokio::select! {
            // Biased to the reasons for which it must not take the capacity of a pod.
            biased;
            () = connection.wait_refused() => return Err(ProxyRequestError::TooManyRequestBytes),
            () = self.close_upgraded.cancelled() => return Ok(TcpWaitEnd::Ended(TcpConnectionEnd::CutOff)),
            _ = tcp_socket::wait_broken(stream) => return Ok(TcpWaitEnd::Ended(TcpConnectionEnd::Cancelled)),
            connected = self.connect_tcp(revision, &mut queue_entry) => connected?,
            () = timer.expired() => return Err(ProxyRequestError::Timeout),
        };
        // From here on the eBPF programs count the connection at the pod: it must not count as waiting as well.
        queue_entry.finish_waiting();
        Ok(TcpWaitEnd::Connected(permit, ResettingStream::new(pod)))
    }

    /// Waits for capacity at a pod and for a connection to it. Dials that fail are repeated for as long as the caller
    /// waits: the client has lost nothing by them.
    async fn connect_tcp(
        &self,
        revision: &Arc<ActivatorRevision>,
        queue_entry: &mut QueueEntry,
    ) -> Result<(PodPermit, TcpStream), ProxyRequestError> {
        loop {
            let permit = queue_entry.acquire_permit().await?;
            let connected = connect_to_pod(&permit, AppProtocol::Tcp, queue_entry).await;
            if let Ok(Some(stream)) = connected.map(PodConnection::into_raw_tcp) {
                return Ok((permit, stream));
            }
            // The pod is avoided for a pause, and the connection keeps its place in the queue.
            revision.on_dial_failed(permit);
            self.metrics.retries.inc();
        }
    }
}

impl TcpForwarding {
    fn log_failure(&self, service: &NamespacedName, client: IpAddr, failure: &ProxyRequestError) {
        let mut log = self.failure_log.lock().unwrap_or_else(PoisonError::into_inner);
        let due = log.record(Instant::now(), service);
        drop(log);
        match due {
            Some(failures) => {
                info!(%service, %client, %failure, failures, "TCP connection reset: no pod took it");
            }
            None => debug!(%service, %client, %failure, "TCP connection reset: no pod took it"),
        }
    }
}
