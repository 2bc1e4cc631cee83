//! Shell: the route of plain requests, which a client connection keeps until the RouteTable changes.

use std::sync::Arc;

use bytes::Bytes;
use common::wire::AppProtocol;
use http::HeaderMap;

use crate::{
    clients::{client_info::ClientInfo, connections::ClientConnection},
    edge::{client_headers::is_https, host::normalize_host, plain_request::render_client_fields},
    entrypoint::Entrypoint,
    requests::{forwarder::RequestForwarder, route_choice::check_http_target},
    revisions::{revision::ActivatorRevision, route_settings::RequestTimeouts},
    routes::{
        match_rules::{MatchRule, match_rules},
        service::{RoutedService, TrafficShare},
        service_match::ServiceMatch,
    },
};

/// Route of the plain requests with one value of `Host` that come over one client connection.
#[derive(Debug)]
pub(crate) struct FastRoute {
    /// Number of changes of routes that were in force when the route was looked up.
    generation: u64,
    host: Box<[u8]>,
    /// Service that the host means.
    pub(crate) service: Arc<RoutedService>,
    /// Revision that gets all requests of the service.
    pub(crate) revision: Arc<ActivatorRevision>,
    /// Timeouts of these requests.
    pub(crate) timeouts: RequestTimeouts,
    /// Fields that describe the client to the pod, for requests that have none of their own.
    pub(crate) client_fields: Bytes,
}

impl FastRoute {
    /// Returns true if the route is the one for this value of `Host`, and nothing has changed since it was looked up.
    pub(crate) fn is_valid(&self, generation: u64, host: &[u8]) -> bool {
        self.generation == generation && *self.host == *host
    }
}

impl RequestForwarder {
    /// Returns true if nothing is recorded of requests, so that the fast path may take them.
    pub(crate) fn is_fast_path_open(&self) -> bool {
        self.has_fast_path && !self.request_log.is_on() && !self.telemetry.is_on()
    }

    /// Looks up the route of plain requests with this value of `Host`. `None`: the requests need more than the fast path
    /// does, or get no response from a pod.
    pub(crate) fn find_fast_route(
        &self,
        host: &[u8],
        entrypoint: Entrypoint,
        client: ClientInfo,
        connection: &ClientConnection,
    ) -> Option<FastRoute> {
        // Before anything is read: a change that comes meanwhile makes the route invalid.
        let generation = self.routes.generation();
        let edge = self.edge_policy.current();
        let sender = client.request_sender(entrypoint);
        let is_outside = entrypoint == Entrypoint::External;
        // Headers of a trusted proxy decide about redirects and HSTS. A certificate that the client has shown may
        // concern other hosts.
        if (is_outside && edge.is_trusted_proxy(client.address))
            || connection.client_auth_result().is_some()
        {
            return None;
        }
        let name = normalize_host(str::from_utf8(host).ok()?).unwrap_or_default();
        let found = self.match_plain_service(&name, entrypoint, client.is_tls)?;
        if is_outside {
            let comes_by_https = is_https(&HeaderMap::new(), sender, &edge);
            let has_hsts =
                edge.hsts.is_some() || found.domain().is_some_and(|it| it.hsts.is_some());
            let is_redirected = !comes_by_https && found.redirects_to_https();
            if is_redirected || (comes_by_https && has_hsts) || found.client_auth().is_some() {
                return None;
            }
        }
        let rewrites_host = found.domain().is_some_and(|it| it.host_rewrite.is_some());
        let service = found.service;
        if rewrites_host || service.tags().is_some() {
            return None;
        }
        let target = only_target(&service)?;
        let timeouts = plain_timeouts(&service, target, entrypoint, client)?;
        let revision = Arc::clone(&target.revision);
        let client_fields = render_client_fields(host, std::iter::empty(), sender, &edge)?.freeze();
        let host = host.into();
        Some(FastRoute { generation, host, service, revision, timeouts, client_fields })
    }

    /// Finds the service of a host by the same rules as for all requests. `None`: the path counts, too, or the host has
    /// rules of the Gateway API, or there is no service.
    fn match_plain_service(
        &self,
        host: &str,
        entrypoint: Entrypoint,
        is_tls: bool,
    ) -> Option<ServiceMatch> {
        let has_rules = entrypoint == Entrypoint::External
            && self.routes.has_gateway_hosts()
            && self.routes.gateway_host(is_tls, host).is_some();
        if has_rules || matches!(entrypoint, Entrypoint::GatewayPort(_)) {
            return None;
        }
        let mut rules = match_rules(entrypoint, || host.to_owned(), &self.cluster_domain);
        rules.find_map(|rule| match &rule {
            MatchRule::Host(host) => self.routes.match_host(host),
            MatchRule::OwnPort(_)
            | MatchRule::GatewayPort(_)
            | MatchRule::ServiceName(_)
            | MatchRule::RevisionName(_)
            | MatchRule::ChosenRevision(_) => self.routes.find_service(&rule, "/").ok().flatten(),
        })
    }
}

/// Returns the Revision that gets all requests of a service; `None`: there is none, or several have shares. The general
/// path would choose again for each request that it takes over, so a Revision whose requests wait would lose its share.
fn only_target(service: &RoutedService) -> Option<&TrafficShare> {
    let mut sharing = service.targets.iter().filter(|it| it.percent > 0);
    let (only, None) = (sharing.next()?, sharing.next()) else { return None };
    Some(only)
}

/// Timeouts of a Revision whose pods speak HTTP/1.1, if it may get requests of this client.
fn plain_timeouts(
    service: &RoutedService,
    share: &TrafficShare,
    entrypoint: Entrypoint,
    client: ClientInfo,
) -> Option<RequestTimeouts> {
    let settings = check_http_target(service, share, entrypoint, Some(client.address)).ok()?;
    (settings.protocol == AppProtocol::Http1).then_some(settings.timeouts)
}
