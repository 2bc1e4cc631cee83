//! Shell: the route of plain requests, which a client connection keeps until the RouteTable changes.

use std::{num::NonZeroU16, sync::Arc};

use bytes::Bytes;
use common::wire::AppProtocol;
use http::HeaderMap;

use crate::{
    clients::{client_info::ClientInfo, connections::ClientConnection},
    clock::random_u64,
    edge::{client_headers::is_https, host::normalize_host, plain_request::render_client_fields},
    entrypoint::Entrypoint,
    requests::{forwarder::RequestForwarder, route_choice::check_http_target},
    revisions::{
        balance::pick_by_percent, revision::ActivatorRevision, route_settings::RequestTimeouts,
    },
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
    service: Arc<RoutedService>,
    targets: Box<[FastTarget]>,
    /// Fields that describe the client to the pod, for requests that have none of their own.
    pub(crate) client_fields: Bytes,
}

/// Revision with its share of the service's requests.
#[derive(Debug)]
struct FastTarget {
    revision: Arc<ActivatorRevision>,
    percent: u8,
    /// Timeouts of its requests; `None`: it takes no plain requests of the client.
    timeouts: Option<RequestTimeouts>,
}

/// Revision for one plain request.
#[derive(Clone, Debug)]
pub(crate) struct FastChoice {
    pub(crate) service: Arc<RoutedService>,
    pub(crate) revision: Arc<ActivatorRevision>,
    pub(crate) timeouts: RequestTimeouts,
}

impl FastChoice {
    /// Port of the scaled Service that the request is for; `None`: the Revision is one of Knative.
    pub(crate) fn service_port(&self) -> Option<NonZeroU16> {
        self.service.service_port
    }
}

impl FastRoute {
    /// Returns true if the route is the one for this value of `Host`, and nothing has changed since it was looked up.
    pub(crate) fn is_valid(&self, generation: u64, host: &[u8]) -> bool {
        self.generation == generation && *self.host == *host
    }

    /// Chooses the Revision of a request by the percents; `None`: the general path decides.
    pub(crate) fn choose(&self) -> Option<FastChoice> {
        let target = pick_by_percent(&self.targets, |it| it.percent, random_u64())?;
        Some(FastChoice {
            service: Arc::clone(&self.service),
            revision: Arc::clone(&target.revision),
            timeouts: target.timeouts?,
        })
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
        let target = |share: &TrafficShare| FastTarget {
            revision: Arc::clone(&share.revision),
            percent: share.percent,
            timeouts: plain_timeouts(&service, share, entrypoint, client),
        };
        let targets = service.targets.iter().map(target).collect();
        let client_fields = render_client_fields(host, std::iter::empty(), sender, &edge)?.freeze();
        Some(FastRoute { generation, host: host.into(), service, targets, client_fields })
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
