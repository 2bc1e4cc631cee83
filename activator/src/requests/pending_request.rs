//! Shell: a request on its way to a pod, and the stages that it goes through.
//!
//! A [`ReceivedRequest`] is routed, and becomes a [`PendingRequest`] unless it gets its response at once. A pending
//! request waits as it has come ([`RequestStage::Waiting`]). Once a pod has capacity for it, its head gets the form for
//! the pod ([`RequestStage::Prepared`]), and the pod's connection takes it ([`RequestStage::Sent`]). A request that no
//! pod has seen comes back from there, and is prepared already when it waits again.

use std::sync::Arc;

use bytes::Bytes;
use common::wire::{AppProtocol, EdgeSettings, HstsPolicy, TagRouting};
use http::{Request, Response, Uri, Version, request, uri::PathAndQuery};
use hyper::upgrade::OnUpgrade;
use tokio::time::Instant;

use crate::{
    clients::{
        client_info::ClientInfo,
        connections::{ClientConnection, RequestBodyGuard},
        head_charge,
        socket::{ClientSocket, RawRequestTarget},
    },
    clock::random_u64,
    edge::{
        headers::{self, HostRewrite, PodRequestContext},
        websocket::WebSocketHandshake,
    },
    entrypoint::Entrypoint,
    grpc::GrpcProtocol,
    pods::request_body::PodRequestBody,
    request_error::ProxyRequestError,
    requests::response_body::ClientResponseBody,
    revisions::{revision::ActivatorRevision, route_settings::RevisionRouteSettings},
    routes::{path_match::UnclearPath, service::RoutedService, service_match::ServiceMatch},
};

/// Request as it has come, which has no route yet.
#[derive(Debug)]
pub(crate) struct ReceivedRequest<'a> {
    pub(crate) head: request::Parts,
    pub(crate) body: PodRequestBody,
    /// Protocol of the call of gRPC that it is; `None`: it is none.
    pub(crate) grpc_protocol: Option<GrpcProtocol>,
    pub(crate) entrypoint: Entrypoint,
    pub(crate) client: ClientInfo,
    /// Client connection that it came over.
    pub(crate) connection: &'a Arc<ClientConnection>,
}

/// Route of a request.
#[derive(Debug)]
pub(crate) enum Routed {
    /// The request is for a pod of a Revision, and waits for it.
    Forward(Box<PendingRequest>),
    /// The activator itself responds, at once.
    Respond(Box<Response<ClientResponseBody>>),
}

/// Pending request that was routed to a Revision. It is kept in one heap allocation while it waits, because thousands
/// may wait at the same time.
#[derive(Debug)]
pub(crate) struct PendingRequest {
    pub(crate) stage: RequestStage,
    pub(crate) entrypoint: Entrypoint,
    pub(crate) client: ClientInfo,
    /// True if it has come by https from outside, at least as far as a trusted proxy.
    pub(crate) is_https: bool,
    pub(crate) service_match: ServiceMatch,
    /// Service whose Revisions serve it.
    pub(crate) service: Arc<RoutedService>,
    /// Tag that a header chose.
    pub(crate) tag: Option<TagRouting>,
    pub(crate) revision: Arc<ActivatorRevision>,
    pub(crate) settings: RevisionRouteSettings,
    /// HTTP version of the client.
    pub(crate) client_version: Version,
    /// Protocol of the call of gRPC that it is; `None`: it is none.
    pub(crate) grpc_protocol: Option<GrpcProtocol>,
    /// Client's side of the connection or stream, for the time after it switches to another protocol.
    pub(crate) upgrade: Option<OnUpgrade>,
    /// Handshake of a client of HTTP/2 that opens a WebSocket, once its head is prepared.
    pub(crate) websocket: Option<WebSocketHandshake>,
    /// Guard of the bytes that such a client sends, which hyper does not treat as a body.
    pub(crate) websocket_body: Option<RequestBodyGuard>,
    /// Client socket, if the client can get interim responses.
    pub(crate) socket: Option<ClientSocket>,
    /// Client connection that the request came over.
    pub(crate) connection: Arc<ClientConnection>,
}

/// Form that a pending request has at its present stage. One that comes back from a pod waits as `Prepared`.
#[derive(Debug)]
pub(crate) enum RequestStage {
    /// The request waits for a pod, as it has come: waiting heads are charged by their size, and a prepared one is
    /// larger.
    Waiting(Request<PodRequestBody>),
    /// The head is in the form for the pod.
    Prepared(Request<PodRequestBody>),
    /// A pod's connection has the request, or its head could not be prepared.
    Sent,
}

impl PendingRequest {
    /// `Strict-Transport-Security` for the response: that of the host, or else that of all hosts. `None`: there is
    /// neither, or the request has not come by https from outside.
    pub(crate) fn hsts<'a>(&'a self, edge: &'a EdgeSettings) -> Option<&'a HstsPolicy> {
        let of_host = self.service_match.domain().and_then(|domain| domain.hsts.as_ref());
        of_host.or(edge.hsts.as_ref()).filter(|_| self.is_https)
    }

    /// Name of its service within the cluster.
    pub(crate) fn own_host(&self) -> String {
        service_host(&self.service)
    }

    /// Time at which an exchange with a pod that begins now has to be over; `None`: only the whole request has a limit.
    pub(crate) fn exchange_deadline(&self) -> Option<Instant> {
        let timeout = self.service_match.rule_timeouts().backend_request?;
        Some(Instant::now() + timeout)
    }

    /// Returns true if the time of the whole request is that of a rule of the Gateway API.
    pub(crate) fn has_rule_deadline(&self) -> bool {
        self.service_match.rule_timeouts().request == Some(self.settings.timeouts.total)
    }

    /// Number of bytes that it is charged with while it waits.
    pub(crate) fn charged_bytes(&self) -> usize {
        match &self.stage {
            RequestStage::Waiting(request) | RequestStage::Prepared(request) => {
                head_charge::charged_bytes(request)
            }
            RequestStage::Sent => 0,
        }
    }

    /// Changes the head to the form for the pod, once. It happens only with a permit, because the head grows by it.
    pub(crate) fn prepare(&mut self, edge: &EdgeSettings) -> Result<(), ProxyRequestError> {
        self.stage = match std::mem::replace(&mut self.stage, RequestStage::Sent) {
            RequestStage::Waiting(request) => RequestStage::Prepared(self.rewrite(request, edge)?),
            later @ (RequestStage::Prepared(_) | RequestStage::Sent) => later,
        };
        Ok(())
    }

    fn rewrite(
        &mut self,
        request: Request<PodRequestBody>,
        edge: &EdgeSettings,
    ) -> Result<Request<PodRequestBody>, ProxyRequestError> {
        let (mut head, body) = request.into_parts();
        // From here on the request is the one that a client of HTTP/1.1 would have sent.
        self.websocket = WebSocketHandshake::from_connect(&mut head, random_u64);
        change_target(&mut head, &self.service_match)?;
        let context = PodRequestContext {
            sender: self.client.request_sender(self.entrypoint),
            edge,
            host_rewrite: host_rewrite(&self.service_match),
            // A tag that a header chose wins: the pod must see the tag that serves the request.
            tags: self.tag.as_ref().or_else(|| self.service.tags()),
            protocol: self.settings.protocol,
            client_certificate: self
                .connection
                .client_auth_result()
                .and_then(|result| result.certificate.as_ref()),
            random: random_u64,
        };
        let service = &self.service;
        let own_host = || service_host(service);
        if headers::rewrite_request_head(&mut head, context, own_host)?.is_some() {
            // The handle is kept apart from the head: it is needed once the pod has switched.
            self.upgrade = head.extensions.remove::<OnUpgrade>();
            // Only HTTP/1.1 switches that way.
            self.settings.protocol = AppProtocol::Http1;
        }
        if let Some(picked) = &self.service_match.picked_backend {
            picked.change_request(&mut head.headers);
        }
        Ok(Request::from_parts(head, body))
    }

    /// Takes the prepared request out, for a pod's connection that has it from here on.
    pub(crate) fn take_prepared(&mut self) -> Request<PodRequestBody> {
        let stage = std::mem::replace(&mut self.stage, RequestStage::Sent);
        let RequestStage::Prepared(mut request) = stage else {
            unreachable!("it is prepared before it is sent, and put back whenever it was not sent")
        };
        head_charge::release_head(&mut request);
        request
    }

    /// Puts a request back that no pod has seen. It is charged again, because it waits again.
    pub(crate) fn put_back(&mut self, mut request: Request<PodRequestBody>) {
        request.body_mut().release_permit();
        head_charge::recharge_head(&mut request, &self.connection);
        self.stage = RequestStage::Prepared(request);
    }
}

/// Returns the host that pods receive in place of the client's; `None`: they receive that of the client.
fn host_rewrite(service_match: &ServiceMatch) -> Option<HostRewrite<'_>> {
    if let Some(picked) = &service_match.picked_backend {
        return picked.rule.rewrite.as_ref()?.host.as_deref().map(HostRewrite::OfRule);
    }
    service_match.domain()?.host_rewrite.as_deref().map(HostRewrite::OfMapping)
}

/// Changes the path to the one that pods receive, in the head and in the raw bytes that the client sent for it.
fn change_target(
    head: &mut request::Parts,
    service_match: &ServiceMatch,
) -> Result<(), ProxyRequestError> {
    let refused =
        |UnclearPath| ProxyRequestError::BadRequest("the path cannot do without its prefix".into());
    // `OPTIONS *` has no path that a rule could change.
    let Some(target) = head.uri.path_and_query().filter(|it| it.path().starts_with('/')) else {
        return Ok(());
    };
    let Some(changed) = service_match.changed_target(target.as_str().as_bytes()) else {
        return Ok(());
    };
    let changed = changed.map_err(refused)?;
    let malformed =
        |error: http::Error| ProxyRequestError::BadRequest(format!("bad path: {error}"));
    let target = PathAndQuery::try_from(&changed[..]).map_err(|error| malformed(error.into()))?;
    let mut parts = std::mem::take(&mut head.uri).into_parts();
    parts.path_and_query = Some(target);
    head.uri = Uri::from_parts(parts).map_err(|error| malformed(error.into()))?;
    // Over HTTP/1.1 the raw bytes are what the pod receives, so both forms have to change.
    if let Some(RawRequestTarget(raw)) = head.extensions.get_mut::<RawRequestTarget>()
        && let Some(changed) = service_match.changed_target(raw)
    {
        *raw = Bytes::from(changed.map_err(refused)?);
    }
    Ok(())
}

/// Name of a service within the cluster, `<name>.<namespace>.svc`.
fn service_host(service: &RoutedService) -> String {
    format!("{}.{}.svc", service.kubernetes_name(), service.name.namespace)
}
