//! Shell: one request from its arrival to its response.

use std::{net::IpAddr, sync::Arc};

use common::{
    link::RouteBatch,
    once_signal::OnceSignal,
    wire::{ConnectionPath, NamespacedName},
};
use http::{HeaderValue, Request, Response, StatusCode, Version, header, request};
use hyper::body::Incoming;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, info};

use crate::{
    clients::{
        client_info::ClientInfo, connections::ClientConnection, reconnect_jitter::ReconnectJitter,
        socket::ClientSocket,
    },
    edge::{host::request_host, policy::EdgePolicy},
    entrypoint::Entrypoint,
    grpc::GrpcProtocol,
    metrics::ActivatorMetrics,
    pods::request_body::PodRequestBody,
    request_error::ProxyRequestError,
    requests::{
        pending_request::{PendingRequest, ReceivedRequest, Routed},
        request_log::RequestLogger,
        request_observers::{RequestObservation, RequestObservers},
        request_timer::RequestTimer,
        response_body::ClientResponseBody,
    },
    revisions::revision::ActivatorRevision,
    routes::{index::RouteIndex, service::RoutedService},
    telemetry::recorder::TelemetryRecorder,
    tls::{client_cas::ClientCas, host_certificates::HostCertificates},
};

mod forwarding;
mod routing;
pub mod tcp;

use tcp::TcpForwarding;

/// Number of times that a request is sent again because its connection closed before the pod processed it.
pub(crate) const MAX_CLOSED_CONNECTION_RETRIES: u32 = 10;

/// Forwarder of requests to pods, with all that requests share.
#[derive(Debug)]
pub struct RequestForwarder {
    /// Services, Revisions and pods of the RouteTable.
    pub routes: Arc<RouteIndex>,
    /// Policy for proxies and upgrades.
    pub edge_policy: EdgePolicy,
    /// Certificates of hosts, for handshakes at the gateway.
    pub certificates: Arc<HostCertificates>,
    /// Authorities of client certificates, for handshakes at the gateway.
    pub client_cas: ClientCas,
    /// Log of finished requests.
    pub request_log: Arc<RequestLogger>,
    /// Recorder of spans and request metrics.
    pub telemetry: Arc<TelemetryRecorder>,
    /// Counters and gauges of the activator.
    pub metrics: ActivatorMetrics,
    /// State that raw TCP connections share.
    pub(crate) tcp: TcpForwarding,
    /// Client connections and upgraded connections that are open.
    pub tasks: TaskTracker,
    /// Domain of the cluster, as in `<name>.<namespace>.svc.<domain>`.
    pub cluster_domain: String,
    /// Set once the activator is being stopped: clients are asked to reconnect elsewhere, and served until they do.
    pub reconnect_clients: OnceSignal,
    /// Cancelled once connections have to end as soon as nothing is in flight on them.
    pub close_when_idle: CancellationToken,
    /// Cancelled once upgraded connections and raw TCP connections have to end.
    pub close_upgraded: CancellationToken,
    /// True if plain requests of HTTP/1.1 may take the fast path.
    pub has_fast_path: bool,
}

/// Guard that counts a request that ends before its response: its client is gone, or was cut off.
#[derive(Debug)]
pub(crate) struct CancelledRequestGuard<'a>(pub(crate) Option<&'a ActivatorMetrics>);

impl Drop for CancelledRequestGuard<'_> {
    fn drop(&mut self) {
        if let Some(metrics) = self.0 {
            metrics.cancelled.inc();
        }
    }
}

/// Names that a batch removes, and that hosts need until its routes are in force.
#[derive(Debug)]
struct RemovedSecrets {
    certificates: Vec<NamespacedName>,
    client_cas: Vec<NamespacedName>,
}

impl RequestForwarder {
    /// Applies a batch of the RouteTable at once. Returns true if the set of service ports to open has changed.
    pub fn apply(&self, batch: RouteBatch) -> bool {
        let removed = self.apply_settings(&batch);
        let ports_changed = self.routes.apply(batch);
        self.remove_secrets(&removed);
        ports_changed
    }

    /// Applies a batch as [`apply`](Self::apply) does, a large one in slices. Between two of them other tasks run, which
    /// serve requests.
    ///
    /// If the future is dropped, the rest of the batch is lost.
    pub async fn apply_in_slices(&self, batch: RouteBatch) -> bool {
        let removed = self.apply_settings(&batch);
        let mut ports_changed = false;
        for (number, slice) in self.routes.divide_batch(batch).into_iter().enumerate() {
            if number > 0 {
                tokio::task::yield_now().await;
            }
            ports_changed |= self.routes.apply_slice(slice);
        }
        self.remove_secrets(&removed);
        ports_changed
    }

    /// Applies what must precede the routes of a batch. Returns what to remove after the routes.
    fn apply_settings(&self, batch: &RouteBatch) -> RemovedSecrets {
        self.edge_policy.apply_batch(batch);
        self.request_log.apply_batch(batch);
        self.telemetry.apply_batch(batch);
        // Before the routes: a host that is routed over TLS has its certificate.
        self.certificates.set_tls(&self.edge_policy.current());
        let certificates = self.certificates.apply_batch(batch);
        RemovedSecrets { certificates, client_cas: self.client_cas.apply_batch(batch) }
    }

    /// Removes secrets after the routes: a host that has just got another certificate, or other authorities, is never
    /// without any.
    fn remove_secrets(&self, removed: &RemovedSecrets) {
        self.certificates.remove(&removed.certificates);
        self.client_cas.remove(&removed.client_cas);
    }

    /// Serves one request. It is routed at once, so that a request which waits takes little memory.
    pub fn handle(
        &self,
        request: Request<Incoming>,
        entrypoint: Entrypoint,
        client: ClientInfo,
        connection: &Arc<ClientConnection>,
    ) -> impl Future<Output = Response<ClientResponseBody>> + Send + use<'_> {
        // Routed before the future is made: the future then holds one pointer, and not the parts of the request.
        let (head, body) = request.into_parts();
        let grpc_protocol = GrpcProtocol::of_request(&head.method, head.version, &head.headers);
        let mut observers = RequestObservers::new(
            self.request_log.start_entry(&head, &body, entrypoint, client),
            RequestObservation::start(&self.telemetry, &head, entrypoint, client),
        );
        let socket = head.extensions.get::<ClientSocket>().cloned();
        let body = PodRequestBody::new(body, socket, connection);
        let may_reconnect =
            head.version != Version::HTTP_2 || is_for_guarded_host(&head, connection);
        let received =
            ReceivedRequest { head, body, grpc_protocol, entrypoint, client, connection };
        let routed = self.route_request(received);
        if matches!(&routed, Ok(Routed::Respond(_))) && entrypoint != Entrypoint::External {
            // From inside, the activator itself responds to probes of the platform only.
            observers.discard_telemetry();
        }
        // Many clients send to one host until the connection ends, and would get 421 each time. A connection of HTTP/2
        // that was opened for another host stays: it serves that one, and to close it would help no request.
        let must_reconnect =
            may_reconnect && matches!(&routed, Err(ProxyRequestError::MisdirectedRequest));
        async move {
            // The future is dropped if the client goes, which the guard then counts.
            let mut cancelled = CancelledRequestGuard(Some(&self.metrics));
            let response = match routed {
                Ok(Routed::Forward(pending)) => self.forward(pending, &mut observers).await,
                Ok(Routed::Respond(response)) => Ok(*response),
                Err(failure) => Err(failure),
            };
            // Metrics and logs have the code of a failure also if a call of gRPC gets it as a status.
            let (status, mut response) = match response {
                Ok(response) => (response.status(), response),
                Err(failure) => {
                    // Failures are logged here once, wherever they arose.
                    log_failure(entrypoint, client.address, &failure);
                    let response = failure.response(grpc_protocol, ClientResponseBody::from_text);
                    (failure.status(), response)
                }
            };
            if must_reconnect {
                let close = HeaderValue::from_static("close");
                response.headers_mut().insert(header::CONNECTION, close);
            }
            cancelled.0 = None;
            self.metrics.count_response(status);
            if observers.is_empty() {
                return response;
            }
            observers.set_status(status);
            response.map(|body| body.with_observers(observers))
        }
    }

    /// Forwards a request to a pod of its Revision. Returns the response for the client.
    async fn forward(
        &self,
        mut pending: Box<PendingRequest>,
        observers: &mut RequestObservers,
    ) -> Result<Response<ClientResponseBody>, ProxyRequestError> {
        let owners = &pending.settings.owner_names;
        let listed_host = pending.service_match.listed_host();
        let own_host = || pending.own_host();
        observers.set_revision(&pending.revision.name, owners, listed_host, own_host);
        let mut timer = RequestTimer::start(pending.settings.timeouts);
        if pending.has_rule_deadline() {
            timer.mark_rule_deadline();
        }
        // A response that arrives together with the timeout counts as in time.
        let pod_response = tokio::select! {
            biased;
            pod_response = self.forward_to_pod(&mut pending, observers) => pod_response?,
            () = timer.expired() => return Err(ProxyRequestError::Timeout),
        };
        observers.set_pod(&pod_response.permit.pod);
        // Only now: a wait for a pod is no part of the exchange that the rule limits.
        if let Some(deadline) = pod_response.deadline {
            timer.limit_deadline(deadline);
        }
        let mut response = self.relay_response(pod_response, &mut pending, timer, observers)?;
        self.request_reconnect(&mut response, &pending);
        Ok(response)
    }

    /// Asks the client to reconnect for its next request, if another path is better for it.
    fn request_reconnect(
        &self,
        response: &mut Response<ClientResponseBody>,
        pending: &PendingRequest,
    ) {
        // On a 101 the header `Connection` names the upgrade.
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return;
        }
        let PendingRequest { entrypoint, client, service, revision, .. } = pending;
        if self.must_reconnect(*entrypoint, *client, service, revision) {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
    }

    /// Returns true if the client has to reconnect for its next request: another path is better for it, or the activator
    /// is being stopped.
    pub(crate) fn must_reconnect(
        &self,
        entrypoint: Entrypoint,
        client: ClientInfo,
        service: &RoutedService,
        revision: &ActivatorRevision,
    ) -> bool {
        // Connects to the port of https always go to activators: another connection would come here as well.
        let may_go_direct = matches!(entrypoint, Entrypoint::Service(_)) && !client.is_tls;
        let goes_direct = may_go_direct
            && self.should_use_direct_path(service, revision, client.reconnect_jitter);
        if goes_direct {
            self.metrics.direct_closed_connections.inc();
        }
        goes_direct || self.reconnect_clients.is_set()
    }

    /// Returns true if a persistent connection should close now, because the next one uses the direct path.
    fn should_use_direct_path(
        &self,
        service: &RoutedService,
        revision: &ActivatorRevision,
        jitter: ReconnectJitter,
    ) -> bool {
        // Before the look at the Revision, which takes its lock.
        if service.path != ConnectionPath::Direct {
            return false;
        }
        let Some(ready) = revision.ready_since() else { return false };
        // Many connections are spread over time, counted from the moment since which both conditions hold.
        let connections = u32::try_from(self.metrics.client_connections.get()).unwrap_or(0);
        jitter.should_close(ready.max(service.path_since).elapsed(), connections)
    }
}

/// Returns true if the handshake of the connection named the host of the request, and met a rule for certificates.
fn is_for_guarded_host(head: &request::Parts, connection: &ClientConnection) -> bool {
    let result = connection.client_auth_result();
    result.is_some_and(|it| request_host(head).as_deref() == Some(&*it.host))
}

/// Logs a failure. Refusals that a flood of requests would repeat are logged at debug level only.
pub(crate) fn log_failure(entrypoint: Entrypoint, client: IpAddr, failure: &ProxyRequestError) {
    let code = failure.status().as_u16();
    match failure {
        // These involve a pod, or the time that its Revision takes: operators look for them.
        ProxyRequestError::Timeout
        | ProxyRequestError::DialFailed { .. }
        | ProxyRequestError::ExchangeFailed { .. } => {
            info!(?entrypoint, %client, code, %failure, "request failed");
        }
        ProxyRequestError::UnknownService(_)
        | ProxyRequestError::NoRevision(_)
        | ProxyRequestError::NoBackend(_)
        | ProxyRequestError::NoGrpcBackend(_)
        | ProxyRequestError::UnknownRevision(_)
        | ProxyRequestError::RawTcpService(_)
        | ProxyRequestError::ForbiddenByNetworkPolicy(_)
        | ProxyRequestError::MisdirectedRequest
        | ProxyRequestError::ClientCertificateRequired
        | ProxyRequestError::QueueFull
        | ProxyRequestError::TooManyRequestBytes
        | ProxyRequestError::BodyIdleTimeout
        | ProxyRequestError::BadRequest(_)
        | ProxyRequestError::RepeatedChunking
        | ProxyRequestError::ConnectMethod
        | ProxyRequestError::ConnectProtocol => {
            debug!(?entrypoint, %client, code, %failure, "request refused")
        }
    }
}
