//! Shell: the route of a request: the service that it is for, and the Revision that serves it.

use std::{net::IpAddr, num::NonZeroU16, sync::Arc};

use common::wire::{AppProtocol, EdgeSettings, TagRouting};
use http::{HeaderValue, Method, Request, Response, StatusCode, Version, header, request};
use hyper::ext::Protocol;

use super::RequestForwarder;
use crate::{
    clients::socket::ClientSocket,
    clock::random_u64,
    edge::{
        client_certificate::check_client_auth,
        client_headers::is_https,
        headers, host,
        platform_probe::{self, K_NETWORK_HASH, PlatformProbe, ProbeHealth},
        websocket,
    },
    entrypoint::{Entrypoint, TrafficOrigin},
    request_error::ProxyRequestError,
    requests::{
        pending_request::{PendingRequest, ReceivedRequest, RequestStage, Routed},
        response_body::ClientResponseBody,
    },
    revisions::{
        balance::pick_by_percent, revision::ActivatorRevision,
        route_settings::RevisionRouteSettings,
    },
    routes::service::{RoutedService, ServiceMatch},
};

impl RequestForwarder {
    /// Looks up the route of a request. The error is a failure that the client gets at once.
    pub(super) fn route_request(
        &self,
        received: ReceivedRequest<'_>,
    ) -> Result<Routed, ProxyRequestError> {
        let ReceivedRequest { head, body, entrypoint, client, connection } = received;
        host::check_host(&head)?;
        let connect_protocol = head.extensions.get::<Protocol>().map(Protocol::as_str);
        websocket::check_connect(&head.method, connect_protocol)?;
        // Only a WebSocket over HTTP/2 is left of CONNECT. It is no probe, since a success would open it.
        let opens_websocket = head.method == Method::CONNECT;
        let may_be_probe =
            entrypoint.traffic_origin() == TrafficOrigin::Internal && !opens_websocket;
        // The response to a probe of the platform comes before a Revision is chosen, so that it never wakes one.
        if let Some(probe) = platform_probe::parse_probe(&head).filter(|_| may_be_probe) {
            return Ok(Routed::Respond(self.respond_to_probe(probe, entrypoint, &head).into()));
        }
        let service_match = self.find_service(entrypoint, &head)?;
        let mut comes_by_https = false;
        if entrypoint == Entrypoint::External {
            let edge = self.edge_policy.current();
            comes_by_https = is_https(&head.headers, client.request_sender(entrypoint), &edge);
            if !comes_by_https && service_match.redirects_to_https() {
                return Ok(Routed::Respond(redirect_to_https(&head, &edge)?.into()));
            }
            let shown = connection.client_auth_result().map(|it| &it.client_auth);
            check_client_auth(service_match.client_auth(), shown, client.is_tls)?;
        }
        let (service, tag) = self.select_tag(&service_match, &head);
        let (revision, mut settings) = choose_revision(&service)?;
        check_network_policy(entrypoint, client.address, &settings)?;
        // The ports of a scaled Service have protocols of their own.
        settings.protocol = service.protocol.unwrap_or(settings.protocol);
        if settings.protocol == AppProtocol::Tcp {
            return Err(ProxyRequestError::RawTcpService(service.name.to_string()));
        }
        let client_version = head.version;
        // Interim responses are written below `hyper`, which only HTTP/1.1 allows.
        let socket = head
            .extensions
            .get::<ClientSocket>()
            .filter(|_| client_version == Version::HTTP_11)
            .cloned();
        Ok(Routed::Forward(Box::new(PendingRequest {
            stage: RequestStage::Waiting(Request::from_parts(head, body)),
            entrypoint,
            client,
            is_https: comes_by_https,
            service_match,
            service,
            tag,
            revision,
            settings,
            client_version,
            upgrade: None,
            websocket: None,
            websocket_body: opens_websocket.then(|| connection.start_body()),
            socket,
            connection: Arc::clone(connection),
        })))
    }

    fn find_service(
        &self,
        entrypoint: Entrypoint,
        head: &request::Parts,
    ) -> Result<ServiceMatch, ProxyRequestError> {
        let host = || host::request_host(head).unwrap_or_default();
        let service_match = match entrypoint {
            Entrypoint::Service(port) => self.routes.service_by_port(port).map(ServiceMatch::from),
            Entrypoint::External => self.routes.match_host(&host()),
            Entrypoint::Internal => {
                let host = host();
                let local = host::cluster_local_service(&host, &self.cluster_domain);
                let local = local.and_then(|name| {
                    // A Revision's own Service is routed here too, while it has no pod.
                    self.routes
                        .service_by_name(&name)
                        .or_else(|| self.routes.service_for_revision(&name))
                });
                local.map(ServiceMatch::from).or_else(|| self.routes.match_host(&host))
            }
        };
        service_match.ok_or_else(|| match entrypoint {
            Entrypoint::Service(port) => ProxyRequestError::UnknownService(format!("port {port}")),
            Entrypoint::Internal | Entrypoint::External => {
                ProxyRequestError::UnknownService(host())
            }
        })
    }

    /// Service whose Revisions serve the request: the one that was found, or the one of the tag that a header chooses.
    fn select_tag(
        &self,
        service_match: &ServiceMatch,
        head: &request::Parts,
    ) -> (Arc<RoutedService>, Option<TagRouting>) {
        let service = Arc::clone(&service_match.service);
        let Some(TagRouting::ChooseTag(tags)) = service.tags() else { return (service, None) };
        // A tag without a service in the table falls back to the service itself, as an unknown tag does.
        let requested_tag = head.headers.get(headers::TAG_HEADER).map(HeaderValue::as_bytes);
        let tag = requested_tag
            .and_then(|requested_tag| tags.iter().find(|tag| tag.name.as_bytes() == requested_tag));
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
        probe: PlatformProbe,
        entrypoint: Entrypoint,
        head: &request::Parts,
    ) -> Response<ClientResponseBody> {
        let has_ready_pod = || {
            let service = self.find_service(entrypoint, head).ok()?.service;
            Some(service.targets.iter().any(|it| it.revision.ready_since().is_some()))
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

/// Revision of the service chosen at random by the percents, with its settings.
pub(super) fn choose_revision(
    service: &RoutedService,
) -> Result<(Arc<ActivatorRevision>, RevisionRouteSettings), ProxyRequestError> {
    let chosen = pick_by_percent(&service.targets, |it| it.percent, random_u64());
    let target = chosen.ok_or_else(|| ProxyRequestError::NoRevision(service.name.to_string()))?;
    let settings = target.revision.route_settings();
    let unknown = || ProxyRequestError::UnknownRevision(target.revision.name.to_string());
    Ok((Arc::clone(&target.revision), settings.ok_or_else(unknown)?))
}

/// Checks that waiting gives no client access that the pods' NetworkPolicies deny. From outside the client's address is
/// not known; there the policies' rules for the activator apply, as for any gateway.
pub(super) fn check_network_policy(
    entrypoint: Entrypoint,
    client: IpAddr,
    settings: &RevisionRouteSettings,
) -> Result<(), ProxyRequestError> {
    let sources = settings.allowed_sources.as_ref().filter(|_| entrypoint != Entrypoint::External);
    let is_denied = sources.is_some_and(|it| !it.contains(client));
    if is_denied { Err(ProxyRequestError::ForbiddenByNetworkPolicy(client)) } else { Ok(()) }
}

/// Response that redirects to the same URL over https (`http-protocol: Redirected`).
fn redirect_to_https(
    head: &request::Parts,
    edge: &EdgeSettings,
) -> Result<Response<ClientResponseBody>, ProxyRequestError> {
    let unnamed = || ProxyRequestError::UnknownService(String::new());
    let mut response = Response::new(ClientResponseBody::from_text(""));
    *response.status_mut() = StatusCode::MOVED_PERMANENTLY;
    let https_port = edge.https_port.map_or(headers::HTTPS_PORT, NonZeroU16::get);
    let location = headers::https_location(head, https_port).ok_or_else(unnamed)?;
    response.headers_mut().insert(header::LOCATION, location);
    Ok(response)
}
