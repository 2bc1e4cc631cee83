//! Shell: one request from its arrival to its response.
//!
//! Interim responses of a pod are passed on over HTTP/1.1, below `hyper`, whose server cannot send them. `hyper` sends
//! 100 itself, once the pod's own 100 has released the body.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use common::{
    link::RouteBatch,
    wire::{AppProtocol, ConnectionPath, EdgeSettings, TagRouting},
};
use http::{
    HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version, header, request,
};
use hyper::{body::Incoming, upgrade::OnUpgrade};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, info};

use crate::{
    admin::ActivatorMetrics,
    balance::{ReconnectJitter, pick_by_percent},
    budget::ClientBound,
    client_connections::ClientConnection,
    client_headers::{ForwardedRequestSender, ProxiedClient, is_https},
    client_socket::ClientSocket,
    clock::random_u64,
    connection::{ExchangeError, PodConnection, PodResponseBody},
    edge_policy::EdgePolicy,
    h1, head_charge,
    headers::{self, PodRequestContext, TrafficOrigin},
    host,
    http1_connection::InterimResponseSink,
    peer_activators::Peers,
    platform_probe::{self, K_NETWORK_HASH, PlatformProbe, ProbeHealth},
    pod_endpoint::PodDialError,
    pod_request_body::{BodyIdleTimer, PodRequestBody},
    request_error::ProxyRequestError,
    request_log::{RequestLogEntry, RequestLogger},
    response_body::{ClientResponseBody, RequestTimer},
    revision::{ActivatorRevision, PodPermit, RevisionRouteSettings},
    routes::{RouteIndex, RoutedService, ServiceMatch},
    tunnel::run_tunnel,
};

/// Number of refused connections of one request after which its client gets an error. With the pauses between, they
/// take about 5 s.
const MAX_DIAL_ATTEMPTS: u32 = 10;
/// Number of times that a request is sent again because its connection closed before the pod processed it.
const MAX_STALE_RETRIES: u32 = 10;

/// Listener that a connection came in by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entrypoint {
    /// A service's own port: requests are for that service, whatever their Host is.
    Service(u16),
    /// The gateway for workloads of the cluster, which routes to every service by Host.
    Internal,
    /// The gateway for requests from outside, which routes to public hosts only.
    External,
}

impl Entrypoint {
    /// Side of the entrypoint: the cluster, or outside.
    pub fn traffic_origin(self) -> TrafficOrigin {
        match self {
            Self::Service(_) | Self::Internal => TrafficOrigin::Internal,
            Self::External => TrafficOrigin::External,
        }
    }
}

/// Client connection that a request came over.
#[derive(Clone, Copy, Debug)]
pub struct ClientInfo {
    /// IP address of the client, or of the proxy in front.
    pub address: IpAddr,
    /// TCP port of the client's end.
    pub port: u16,
    /// Information of the connection about the client behind it.
    pub proxied_client: ProxiedClient,
    /// Position of the connection among those that are asked to reconnect.
    pub reconnect_jitter: ReconnectJitter,
}

impl ClientInfo {
    /// Address and port of the client's end of the connection.
    pub fn socket_addr(&self) -> SocketAddr {
        SocketAddr::new(self.address, self.port)
    }

    /// Sender of the request, for the headers that the pod gets.
    fn request_sender(&self, door: Entrypoint) -> ForwardedRequestSender {
        ForwardedRequestSender {
            traffic_origin: door.traffic_origin(),
            address: self.address,
            proxied_client: self.proxied_client,
        }
    }
}

/// Forwarder of requests to pods, with all that requests share.
#[derive(Debug)]
pub struct ActivatorGateway {
    /// Services, revisions and pods of the RouteTable.
    pub routes: RouteIndex,
    /// View of the other activators.
    pub peers: Arc<Peers>,
    /// Policy for proxies and upgrades.
    pub edge_policy: EdgePolicy,
    /// Log of finished requests.
    pub request_log: Arc<RequestLogger>,
    /// Counters and gauges of the activator.
    pub metrics: ActivatorMetrics,
    /// Client connections and upgraded connections that are open.
    pub tasks: TaskTracker,
    /// Domain of the cluster, as in `<name>.<namespace>.svc.<domain>`.
    pub cluster_domain: String,
    /// Cancelled once the activator is being stopped: clients are asked to reconnect elsewhere, and served until they
    /// do.
    pub reconnect_clients: CancellationToken,
    /// Cancelled once connections have to end as soon as nothing is in flight on them.
    pub close_when_idle: CancellationToken,
    /// Cancelled once upgraded connections have to end.
    pub close_upgraded: CancellationToken,
}

/// Pending request that was routed to a revision. It is kept in one heap allocation while it waits, because thousands
/// may wait at the same time.
struct PendingRequest {
    /// Request as it came, until a pod has room for it; `None` while a pod's connection has it.
    request: Option<Request<PodRequestBody>>,
    /// True if its head is already in the form for the pod.
    is_head_prepared: bool,
    entrypoint: Entrypoint,
    client: ClientInfo,
    service_match: ServiceMatch,
    /// Service whose revisions serve it.
    service: Arc<RoutedService>,
    /// Tag that a header chose.
    tag: Option<TagRouting>,
    revision: Arc<ActivatorRevision>,
    settings: RevisionRouteSettings,
    /// HTTP version of the client.
    client_version: Version,
    /// Client's side of the connection, for the time after it switches to another protocol.
    upgrade: Option<OnUpgrade>,
    /// Client socket, if the client can get interim responses.
    socket: Option<ClientSocket>,
    /// Client connection that the request came over.
    connection: Arc<ClientConnection>,
}

impl PendingRequest {
    /// Takes the request out, for a pod's connection that has it from here on.
    fn take_request(&mut self) -> Request<PodRequestBody> {
        let mut request = self.request.take().expect("it is put back whenever it was not sent");
        head_charge::release_head(&mut request);
        request
    }

    /// Changes the head to the form for the pod, once. It happens only now, because the head grows by it.
    fn prepare_head(&mut self, edge: &EdgeSettings) -> Result<(), ProxyRequestError> {
        if self.is_head_prepared {
            return Ok(());
        }
        let Some(request) = self.request.take() else { return Ok(()) };
        let (mut head, body) = request.into_parts();
        let passage = PodRequestContext {
            sender: self.client.request_sender(self.entrypoint),
            edge,
            host_rewrite: self
                .service_match
                .domain()
                .and_then(|domain| domain.host_rewrite.as_deref()),
            tags: self.tag.as_ref().or_else(|| self.service.tags()),
            protocol: self.settings.protocol,
            random: random_u64,
        };
        let own_host = || format!("{}.{}.svc", self.service.name.name, self.service.name.namespace);
        if headers::rewrite_request_head(&mut head, passage, own_host)?.is_some() {
            // The handle is kept apart from the head: it is needed once the pod has switched.
            self.upgrade = head.extensions.remove::<OnUpgrade>();
            // Only HTTP/1.1 switches that way.
            self.settings.protocol = AppProtocol::Http1;
        }
        self.is_head_prepared = true;
        self.request = Some(Request::from_parts(head, body));
        Ok(())
    }
}

/// Response of a pod, with the permit of its request.
struct PodResponse {
    response: Response<PodResponseBody>,
    permit: Arc<PodPermit>,
}

/// Guard that counts a request whose client is gone before the response.
struct CancelledRequestGuard<'a>(Option<&'a ActivatorMetrics>);

impl Drop for CancelledRequestGuard<'_> {
    fn drop(&mut self) {
        if let Some(metrics) = self.0 {
            metrics.cancelled.inc();
        }
    }
}

impl ActivatorGateway {
    /// Applies a batch of the RouteTable. Returns true if the set of service ports to open has changed.
    pub fn apply(&self, batch: RouteBatch) -> bool {
        self.edge_policy.apply_batch(&batch);
        self.request_log.apply_batch(&batch);
        self.routes.apply(batch)
    }

    /// Serves one request. It is routed at once, so that a request which waits takes little memory.
    pub fn handle(
        &self,
        request: Request<Incoming>,
        door: Entrypoint,
        client: ClientInfo,
        seat: &Arc<ClientConnection>,
    ) -> impl Future<Output = Response<ClientResponseBody>> + Send + use<'_> {
        // Routed before the future is made: the future then holds one pointer, and not the parts of the request.
        let (head, body) = request.into_parts();
        let mut entry = self.request_log.start_entry(&head, &body, door, client);
        let body = PodRequestBody::new(body, head.extensions.get::<ClientSocket>().cloned(), seat);
        let looked = self.route_request(head, body, door, client, seat);
        async move {
            let mut cancelled = CancelledRequestGuard(Some(&self.metrics));
            let answered = match looked {
                Ok(errand) => self.respond(errand, &mut entry).await,
                Err(told) => told.map(|response| *response),
            };
            let response = answered.unwrap_or_else(|failure| {
                // Failures are logged here once, wherever they arose.
                log_failure(door, client.address, &failure);
                failure.response(ClientResponseBody::from_text)
            });
            cancelled.0 = None;
            self.metrics.count_response(response.status());
            let Some(mut entry) = entry else { return response };
            entry.set_status(response.status());
            response.map(|body| body.with_log_entry(entry))
        }
    }

    /// Routes a request to a revision. The error is a response or a failure that the client gets at once.
    fn route_request(
        &self,
        head: request::Parts,
        body: PodRequestBody,
        door: Entrypoint,
        client: ClientInfo,
        seat: &Arc<ClientConnection>,
    ) -> Result<Box<PendingRequest>, Result<Box<Response<ClientResponseBody>>, ProxyRequestError>>
    {
        host::check_host(&head).map_err(Err)?;
        if head.method == Method::CONNECT {
            return Err(Err(ProxyRequestError::ConnectMethod));
        }
        // A probe of the platform is answered before a revision is chosen, so that it never wakes one.
        if let Some(asked) = platform_probe::parse_probe(&head)
            .filter(|_| door.traffic_origin() == TrafficOrigin::Internal)
        {
            return Err(Ok(self.respond_to_probe(asked, door, &head).into()));
        }
        let found = self.find_service(door, &head).map_err(Err)?;
        let is_secure =
            || is_https(&head.headers, client.request_sender(door), &self.edge_policy.current());
        if door == Entrypoint::External && found.redirects_to_https() && !is_secure() {
            return Err(redirect_to_https(&head).map(Box::new));
        }
        let (service, tag) = self.select_tag(&found, &head);
        let (revision, terms) = choose_revision(&service).map_err(Err)?;
        check_network_policy(door, client.address, &terms).map_err(Err)?;
        let version = head.version;
        // Interim responses are written below `hyper`, which only HTTP/1.1 allows.
        let socket =
            head.extensions.get::<ClientSocket>().filter(|_| version == Version::HTTP_11).cloned();
        let request = Some(Request::from_parts(head, body));
        let (is_ready, upgrade) = (false, None);
        Ok(Box::new(PendingRequest {
            request,
            is_head_prepared: is_ready,
            entrypoint: door,
            client,
            service_match: found,
            service,
            tag,
            revision,
            settings: terms,
            client_version: version,
            upgrade,
            socket,
            connection: Arc::clone(seat),
        }))
    }

    async fn respond(
        &self,
        mut errand: Box<PendingRequest>,
        entry: &mut Option<Box<RequestLogEntry>>,
    ) -> Result<Response<ClientResponseBody>, ProxyRequestError> {
        if let Some(entry) = entry {
            entry.set_revision(&errand.revision.name, &errand.settings.owner_names);
        }
        let mut timer = RequestTimer::start(errand.settings.timeouts);
        // A response that arrives together with the timeout counts as in time.
        let answered = tokio::select! {
            biased;
            answered = self.forward_to_pod(&mut errand) => answered?,
            () = timer.expired() => return Err(ProxyRequestError::Timeout),
        };
        if let Some(entry) = entry {
            entry.set_pod(&answered.permit.pod);
        }
        let mut response = self.relay_response(answered, &mut errand, timer, entry);
        self.request_reconnect(&mut response, &errand);
        Ok(response)
    }

    /// Asks the client to reconnect for its next request, if another path is better for it.
    fn request_reconnect(
        &self,
        response: &mut Response<ClientResponseBody>,
        errand: &PendingRequest,
    ) {
        // On a 101 the header `Connection` names the upgrade.
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return;
        }
        let goes_direct = matches!(errand.entrypoint, Entrypoint::Service(_))
            && self.should_use_direct_path(
                &errand.service,
                &errand.revision,
                errand.client.reconnect_jitter,
            );
        if goes_direct {
            self.metrics.direct_closed_connections.inc();
        }
        if goes_direct || self.reconnect_clients.is_cancelled() {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
    }

    fn find_service(
        &self,
        door: Entrypoint,
        head: &request::Parts,
    ) -> Result<ServiceMatch, ProxyRequestError> {
        let host = || host::request_host(head).unwrap_or_default();
        let found = match door {
            Entrypoint::Service(port) => self.routes.service_by_port(port).map(ServiceMatch::from),
            Entrypoint::External => self.routes.match_host(&host()),
            Entrypoint::Internal => {
                let host = host();
                let local = host::cluster_local_service(&host, &self.cluster_domain);
                let local = local.and_then(|name| {
                    // A revision's own Service is routed here too, while it has no pod.
                    self.routes
                        .service_by_name(&name)
                        .or_else(|| self.routes.service_for_revision(&name))
                });
                local.map(ServiceMatch::from).or_else(|| self.routes.match_host(&host))
            }
        };
        found.ok_or_else(|| match door {
            Entrypoint::Service(port) => ProxyRequestError::UnknownService(format!("port {port}")),
            Entrypoint::Internal | Entrypoint::External => {
                ProxyRequestError::UnknownService(host())
            }
        })
    }

    /// Service whose revisions serve the request: the one that was found, or the one of the tag that a header chooses.
    fn select_tag(
        &self,
        found: &ServiceMatch,
        head: &request::Parts,
    ) -> (Arc<RoutedService>, Option<TagRouting>) {
        let service = Arc::clone(&found.service);
        let Some(TagRouting::ChooseTag(tags)) = service.tags() else { return (service, None) };
        // A tag without a service in the table falls back to the service itself, as an unknown tag does.
        let asked = head.headers.get(headers::TAG_HEADER).map(HeaderValue::as_bytes);
        let tag = asked.and_then(|asked| tags.iter().find(|tag| tag.name.as_bytes() == asked));
        let chosen = tag.and_then(|tag| {
            Some((
                self.routes.service_by_name(&tag.service)?,
                Some(TagRouting::ServeTag(tag.name.clone())),
            ))
        });
        chosen.unwrap_or((service, None))
    }

    fn respond_to_probe(
        &self,
        asked: PlatformProbe,
        door: Entrypoint,
        head: &request::Parts,
    ) -> Response<ClientResponseBody> {
        let has_pod = || {
            let service = self.find_service(door, head).ok()?.service;
            Some(service.targets.iter().any(|it| it.revision.ready_since().is_some()))
        };
        let has_pod = asked == PlatformProbe::Queue && has_pod().unwrap_or(false);
        let told = asked.respond(ProbeHealth {
            is_shutting_down: self.reconnect_clients.is_cancelled(),
            has_ready_pod: has_pod,
        });
        let mut response = Response::new(ClientResponseBody::from_text(told.text));
        *response.status_mut() = told.status;
        told.hash.map(|hash| response.headers_mut().insert(K_NETWORK_HASH, hash));
        response
    }

    /// Returns true if a persistent connection should close now, because the next one uses the direct path.
    fn should_use_direct_path(
        &self,
        service: &RoutedService,
        revision: &ActivatorRevision,
        lot: ReconnectJitter,
    ) -> bool {
        let Some(ready) = revision.ready_since().filter(|_| service.path == ConnectionPath::Direct)
        else {
            return false;
        };
        // Many connections are spread over time, counted from the moment since which both conditions hold.
        let connections = u32::try_from(self.metrics.client_connections.get()).unwrap_or(0);
        lot.should_close(ready.max(service.path_since).elapsed(), connections)
    }

    async fn forward_to_pod(
        &self,
        errand: &mut PendingRequest,
    ) -> Result<PodResponse, ProxyRequestError> {
        let revision = Arc::clone(&errand.revision);
        let weight = errand.request.as_ref().map_or(0, head_charge::charged_bytes);
        let mut visit = revision.queue_entry(weight);
        let (mut refusals, mut stale) = (0, 0);
        loop {
            // A permit that comes together with a refusal is used.
            let place = tokio::select! {
                biased;
                place = visit.acquire_permit() => place?,
                () = errand.connection.wait_refused() => return Err(ProxyRequestError::TooManyRequestBytes),
            };
            let address = place.pod.key.address;
            // Only with a permit: waiting heads are charged by their size, and this adds headers.
            errand.prepare_head(&self.edge_policy.current())?;
            let connection = match connect_to_pod(&place, errand.settings.protocol).await {
                Ok(connection) => connection,
                Err(error) => {
                    refusals += 1;
                    // The pod is avoided for a pause. The queue entry keeps its turn, so the request does not fall
                    // behind others.
                    revision.on_dial_refused(place);
                    if refusals == MAX_DIAL_ATTEMPTS {
                        return Err(ProxyRequestError::DialFailed {
                            address,
                            reason: error.to_string(),
                        });
                    }
                    self.metrics.retries.inc();
                    continue;
                }
            };
            // From here on the eBPF programs count the request at the pod: it must not count as waiting as well.
            visit.finish_waiting();
            let mut request = errand.take_request();
            let place = Arc::new(place);
            // A response may end before the request's body does. The body keeps the permit, since it still occupies the
            // pod.
            request.body_mut().hold_permit(&place);
            let pace = request.body().idle_timer().map(|pace| (pace, is_grpc(&request)));
            // A client that stalls in its body occupies a pod's room. So the wait for the response is bounded by the
            // body's progress.
            let mut early = ClientInterimSink(errand.socket.as_ref());
            let sent = connection.send(request, &mut early);
            let sent = match pace {
                None => sent.await,
                Some((pace, is_stream)) => tokio::select! {
                    biased;
                    sent = sent => sent,
                    failure = wait_body_failure(&errand.connection, &pace, is_stream) => return Err(failure),
                },
            };
            let error = match sent {
                Ok(response) => {
                    // The pod accepts connections now: more may be dialled at once.
                    place.pod.on_response();
                    return Ok(PodResponse { response, permit: place });
                }
                Err(error) => error,
            };
            // A pod may have closed an idle connection at the same moment. The request is charged and queued again,
            // with its turn.
            match error.resendable {
                Some(mut unseen) if stale < MAX_STALE_RETRIES => {
                    unseen.body_mut().release_permit();
                    head_charge::recharge_head(&mut unseen, &errand.connection);
                    errand.request = Some(unseen);
                }
                _ => return Err(exchange_error(address, &error.cause)),
            }
            stale += 1;
            self.metrics.retries.inc();
        }
    }

    fn relay_response(
        &self,
        answered: PodResponse,
        errand: &mut PendingRequest,
        timer: RequestTimer,
        entry: &mut Option<Box<RequestLogEntry>>,
    ) -> Response<ClientResponseBody> {
        let PodResponse { mut response, permit: place } = answered;
        let switched = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        let status = response.status();
        headers::rewrite_response_head(response.headers_mut(), status, errand.client_version);
        if !switched {
            return response.map(|body| ClientResponseBody::from_pod(body, timer, place));
        }
        // Both ends leave HTTP at the same time. A 101 that the client has not asked for has no counterpart, and is an
        // error.
        let pod = std::mem::replace(response.body_mut(), PodResponseBody::Ended).into_upgraded();
        let Some((client, pod)) = errand.upgrade.take().zip(pod) else {
            let text = "pod switched protocols unasked".to_owned();
            let failure =
                ProxyRequestError::ExchangeFailed { address: place.pod.key.address, reason: text };
            return failure.response(ClientResponseBody::from_text);
        };
        // Such a request lasts for as long as its upgraded connection.
        let mut entry = entry.take();
        entry.iter_mut().for_each(|entry| entry.set_status(status));
        let tunnel = run_tunnel(client, pod, place, timer, self.close_upgraded.clone());
        let asked = errand.connection.start_request();
        self.tasks.spawn(async move {
            asked.connection().cut_off.run_until_cancelled(tunnel).await;
            drop((entry, asked));
        });
        response.map(|_empty| ClientResponseBody::from_text(""))
    }
}

/// Opens a connection to the permit's pod. While the pod leaves the dial unanswered, another pod is better, if there is
/// one.
async fn connect_to_pod(
    place: &PodPermit,
    protocol: AppProtocol,
) -> Result<PodConnection, PodDialError> {
    // Each round waits for one late dial. It ends when another pod is preferred, or when the dial ends.
    loop {
        match place.pod.connect(protocol).await {
            Err(PodDialError::Unanswered) if !place.report_unanswered_dial() => {}
            answer => return answer,
        }
    }
}

/// Revision of the service chosen at random by the shares, with its settings.
fn choose_revision(
    service: &RoutedService,
) -> Result<(Arc<ActivatorRevision>, RevisionRouteSettings), ProxyRequestError> {
    let chosen = pick_by_percent(&service.targets, |it| it.percent, random_u64());
    let share = chosen.ok_or_else(|| ProxyRequestError::NoRevision(service.name.to_string()))?;
    let terms = share.revision.route_settings();
    let unknown = || ProxyRequestError::UnknownRevision(share.revision.name.to_string());
    Ok((Arc::clone(&share.revision), terms.ok_or_else(unknown)?))
}

/// Checks that waiting gives no client access that the pods' NetworkPolicies deny. From outside the client's address is
/// not known; there the policies' rules for the activator apply, as for any gateway.
fn check_network_policy(
    door: Entrypoint,
    client: IpAddr,
    terms: &RevisionRouteSettings,
) -> Result<(), ProxyRequestError> {
    let sources = terms.allowed_sources.as_ref().filter(|_| door != Entrypoint::External);
    let is_kept_out = sources.is_some_and(|it| !it.contains(client));
    if is_kept_out { Err(ProxyRequestError::ForbiddenByNetworkPolicy(client)) } else { Ok(()) }
}

/// Returns true for gRPC, whose clients may pause for as long as they like: its calls have two directions at once.
fn is_grpc<B>(request: &Request<B>) -> bool {
    const GRPC: &[u8] = b"application/grpc";
    let kind = request.headers().get(header::CONTENT_TYPE).map(|it| it.as_bytes());
    kind.and_then(|it| it.get(..GRPC.len())).is_some_and(|it| it.eq_ignore_ascii_case(GRPC))
}

/// Waits until a body that a pod waits for has to be given up: its client sends nothing more, or too many bytes are
/// held.
async fn wait_body_failure(
    seat: &Arc<ClientConnection>,
    pace: &BodyIdleTimer,
    is_stream: bool,
) -> ProxyRequestError {
    let (seats, _tells) = (seat.connections(), seat.subscribe_refusal());
    tokio::select! {
        () = seat.wait_refused() => ProxyRequestError::TooManyRequestBytes,
        () = pace.wait_idle(seats.budget.body_idle_timeout), if !is_stream => {
            seats.count_refusal(ClientBound::BodyIdleTimeout);
            ProxyRequestError::BodyIdleTimeout
        }
    }
}

/// Response that redirects to the same URL over https (`http-protocol: Redirected`).
fn redirect_to_https(
    head: &request::Parts,
) -> Result<Response<ClientResponseBody>, ProxyRequestError> {
    let unnamed = || ProxyRequestError::UnknownService(String::new());
    let mut response = Response::new(ClientResponseBody::from_text(""));
    *response.status_mut() = StatusCode::MOVED_PERMANENTLY;
    let location = headers::https_location(head).ok_or_else(unnamed)?;
    response.headers_mut().insert(header::LOCATION, location);
    Ok(response)
}

/// Logs a failure. Refusals that a flood of requests would repeat are logged at debug level only.
fn log_failure(door: Entrypoint, client: IpAddr, failure: &ProxyRequestError) {
    let code = failure.status().as_u16();
    match failure {
        ProxyRequestError::Timeout
        | ProxyRequestError::DialFailed { .. }
        | ProxyRequestError::ExchangeFailed { .. } => {
            info!(?door, %client, code, %failure, "request failed");
        }
        ProxyRequestError::UnknownService(_)
        | ProxyRequestError::NoRevision(_)
        | ProxyRequestError::UnknownRevision(_)
        | ProxyRequestError::ForbiddenByNetworkPolicy(_)
        | ProxyRequestError::QueueFull
        | ProxyRequestError::TooManyRequestBytes
        | ProxyRequestError::BodyIdleTimeout
        | ProxyRequestError::BadRequest(_)
        | ProxyRequestError::ConnectMethod => {
            debug!(?door, %client, code, %failure, "request refused")
        }
    }
}

/// Failure for the client. An error of the client (its body broke off or was invalid) is not attributed to the pod.
fn exchange_error(address: SocketAddr, fault: &ExchangeError) -> ProxyRequestError {
    let reason = common::link::error_chain(fault);
    match fault {
        ExchangeError::Client(_) => ProxyRequestError::BadRequest(reason),
        ExchangeError::Pod(_) => ProxyRequestError::ExchangeFailed { address, reason },
    }
}

/// Sink that passes a pod's interim responses on to the client.
struct ClientInterimSink<'a>(Option<&'a ClientSocket>);

impl InterimResponseSink for ClientInterimSink<'_> {
    fn on_interim_response(&mut self, status: StatusCode, fields: &HeaderMap) {
        let Some(socket) = self.0 else { return };
        let mut fields = fields.clone();
        headers::rewrite_response_head(&mut fields, status, Version::HTTP_11);
        socket.send_interim(&h1::write_interim_head(status, &fields));
    }
}
