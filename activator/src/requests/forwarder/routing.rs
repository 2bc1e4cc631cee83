//! Shell: the route of a request: the service that it is for, and the Revision that serves it.

use std::sync::Arc;

use http::{HeaderValue, Method, Request, Response, StatusCode, Version, header, request};

use super::RequestForwarder;
use crate::{
    clients::socket::ClientSocket,
    clock::random_u64,
    edge::platform_probe::{K_NETWORK_HASH, PlatformProbe, ProbeHealth},
    entrypoint::Entrypoint,
    request_error::ProxyRequestError,
    requests::{
        pending_request::{PendingRequest, ReceivedRequest, RequestStage, Routed},
        response_body::ClientResponseBody,
        route_choice::{
            FoundService, HandshakeRule, RouteChoice, RouteChooser, RuleRedirect, ServiceChoice,
            check_http_target, pick_target,
        },
    },
};

impl RequestForwarder {
    /// Chooser of the service for each request.
    pub(crate) fn route_chooser(&self) -> RouteChooser<'_> {
        RouteChooser {
            routes: &self.routes,
            edge_policy: &self.edge_policy,
            cluster_domain: &self.cluster_domain,
        }
    }

    /// Looks up the route of a request. The error is a failure that the client gets at once.
    pub(super) fn route_request(
        &self,
        received: ReceivedRequest<'_>,
    ) -> Result<Routed, ProxyRequestError> {
        let ReceivedRequest { head, body, grpc_protocol, entrypoint, client, connection } =
            received;
        let sender = client.request_sender(entrypoint);
        let met = connection.client_auth_result().map(|it| &it.client_auth);
        let handshake = HandshakeRule::Met(met);
        let choice = match self.route_chooser().choose(&head, entrypoint, sender, handshake)? {
            RouteChoice::Probe(probe) => {
                let response = self.respond_to_probe(probe, entrypoint, &head);
                return Ok(Routed::Respond(response.into()));
            }
            RouteChoice::Challenge(response) => {
                return Ok(Routed::Respond(challenge_response(response).into()));
            }
            RouteChoice::Redirect(_, location) => {
                let moved = StatusCode::MOVED_PERMANENTLY;
                return Ok(Routed::Respond(redirect_response(moved, location).into()));
            }
            RouteChoice::RuleRedirect(RuleRedirect { rule, status, location }) => {
                let mut response = redirect_response(status, location);
                rule.response_headers.apply(response.headers_mut());
                return Ok(Routed::Respond(response.into()));
            }
            RouteChoice::Service(choice) => choice,
        };
        let ServiceChoice { found, is_https, service, tag } = choice;
        let FoundService { service_match, .. } = found;
        let target = pick_target(&service, random_u64())?;
        let mut settings = check_http_target(&service, target, entrypoint, Some(client.address))?;
        // A rule may only shorten the time of the Revision, which operators bound.
        if let Some(limit) = service_match.rule_timeouts().request {
            settings.timeouts.total = settings.timeouts.total.min(limit);
        }
        let revision = Arc::clone(&target.revision);
        let client_version = head.version;
        // Interim responses are written below `hyper`, which only HTTP/1.1 allows.
        let socket = head
            .extensions
            .get::<ClientSocket>()
            .filter(|_| client_version == Version::HTTP_11)
            .cloned();
        // Only a WebSocket over HTTP/2 is left of CONNECT.
        let opens_websocket = head.method == Method::CONNECT;
        Ok(Routed::Forward(Box::new(PendingRequest {
            stage: RequestStage::Waiting(Request::from_parts(head, body)),
            entrypoint,
            client,
            is_https,
            service_match,
            service,
            tag,
            revision,
            settings,
            client_version,
            grpc_protocol,
            upgrade: None,
            websocket: None,
            websocket_body: opens_websocket.then(|| connection.start_body()),
            socket,
            connection: Arc::clone(connection),
        })))
    }

    fn respond_to_probe(
        &self,
        probe: PlatformProbe,
        entrypoint: Entrypoint,
        head: &request::Parts,
    ) -> Response<ClientResponseBody> {
        let has_ready_pod = || {
            let found = self.route_chooser().find_service(head, entrypoint).ok()?;
            let targets = &found.service_match.service.targets;
            Some(targets.iter().any(|it| it.revision.ready_since().is_some()))
        };
        let has_ready_pod = probe == PlatformProbe::Queue && has_ready_pod().unwrap_or(false);
        let probe_response = probe.respond(ProbeHealth {
            is_shutting_down: self.reconnect_clients.is_set(),
            has_ready_pod,
        });
        let mut response = Response::new(ClientResponseBody::from_text(probe_response.text));
        *response.status_mut() = probe_response.status;
        probe_response.hash.map(|hash| response.headers_mut().insert(K_NETWORK_HASH, hash));
        response
    }
}

/// Response to an authority that checks a host.
fn challenge_response(text: String) -> Response<ClientResponseBody> {
    let mut response = Response::new(ClientResponseBody::from_text(text));
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}

/// Response that redirects to another URL.
fn redirect_response(status: StatusCode, location: HeaderValue) -> Response<ClientResponseBody> {
    let mut response = Response::new(ClientResponseBody::from_text(""));
    *response.status_mut() = status;
    response.headers_mut().insert(header::LOCATION, location);
    response
}
