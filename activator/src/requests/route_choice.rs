//! Shell: the choice of the service and the Revision for a request, and the refusals before it has both.
//!
//! The forwarder chooses for each request, and a trace explains the same choice for one that it makes up.

use std::{net::IpAddr, num::NonZeroU16, sync::Arc};

use common::wire::{AppProtocol, ClientAuth, EdgeSettings, NamespacedName, TagRouting};
use http::{HeaderValue, Method, StatusCode, request};
use hyper::ext::Protocol;

use crate::{
    clock::random_u64,
    edge::{
        client_certificate::check_client_auth,
        client_headers::{ForwardedRequestSender, is_https},
        headers, host,
        platform_probe::{self, PlatformProbe},
        policy::EdgePolicy,
        websocket,
    },
    entrypoint::{Entrypoint, TrafficOrigin},
    request_error::ProxyRequestError,
    revisions::{balance::pick_by_percent, route_settings::RevisionRouteSettings},
    routes::{
        gateway_rules::{GatewayHostRules, GatewayRule, PickedBackend, RoutedTarget},
        index::RouteIndex,
        match_rules::{MatchRule, match_rules},
        path_match::{HostPathError, UnclearPath, strip_segments},
        service::{RoutedService, TrafficShare},
        service_match::ServiceMatch,
    },
};

/// Start of the paths at which authorities ask for tokens (RFC 8555, section 8.3).
const CHALLENGE_PREFIX: &str = "/.well-known/acme-challenge/";

/// Chooser of the service for each request, by the RouteTable and the policy in force.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RouteChooser<'a> {
    pub(crate) routes: &'a RouteIndex,
    pub(crate) edge_policy: &'a EdgePolicy,
    /// Domain of the cluster, as in `<name>.<namespace>.svc.<domain>`.
    pub(crate) cluster_domain: &'a str,
}

/// Treatment of a request, as far as it does not depend on a Revision.
#[derive(Debug)]
pub(crate) enum RouteChoice {
    /// The activator itself responds: the request is a probe of the platform.
    Probe(PlatformProbe),
    /// The activator itself responds with this text: an authority checks a host before it issues a certificate.
    Challenge(String),
    /// The client is redirected to this URL.
    Redirect(FoundService, HeaderValue),
    /// The client is redirected by a rule of the Gateway API.
    RuleRedirect(RuleRedirect),
    /// A Revision of a service serves it.
    Service(ServiceChoice),
}

/// Redirect by a rule of the Gateway API.
#[derive(Debug)]
pub(crate) struct RuleRedirect {
    pub(crate) rule: Arc<GatewayRule>,
    pub(crate) status: StatusCode,
    /// URL that the client is redirected to.
    pub(crate) location: HeaderValue,
}

/// Service that a request has found, with the rule.
#[derive(Debug)]
pub(crate) struct FoundService {
    pub(crate) rule: MatchRule,
    pub(crate) service_match: ServiceMatch,
}

/// Rule for certificates of clients that a client has met in the handshake of its connection.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HandshakeRule<'a> {
    /// The rule of the host that the handshake named; `None`: the client was asked for no certificate.
    Met(Option<&'a ClientAuth>),
    /// The handshake named the host of the request, whose rule it met.
    OfRequestedHost,
}

/// Service whose Revisions serve a request.
#[derive(Debug)]
pub(crate) struct ServiceChoice {
    pub(crate) found: FoundService,
    /// True if the request came from outside by https, at least as far as a trusted proxy.
    pub(crate) is_https: bool,
    /// Service of the tag that a header chose, else the one that was found.
    pub(crate) service: Arc<RoutedService>,
    /// Tag that a header chose.
    pub(crate) tag: Option<TagRouting>,
}

impl RouteChooser<'_> {
    /// Chooses the service for a request. The error is a failure that the client gets at once.
    pub(crate) fn choose(
        &self,
        head: &request::Parts,
        entrypoint: Entrypoint,
        sender: ForwardedRequestSender,
        handshake: HandshakeRule<'_>,
    ) -> Result<RouteChoice, ProxyRequestError> {
        // Malformed requests are refused before any rule reads them: two parsers may differ in their host or length.
        host::check_host(head)?;
        headers::check_transfer_codings(&head.headers)?;
        let connect_protocol = head.extensions.get::<Protocol>().map(Protocol::as_str);
        websocket::check_connect(&head.method, connect_protocol)?;
        // Only a WebSocket over HTTP/2 is left of CONNECT. It is no probe, since a success would open it.
        let may_be_probe = entrypoint.traffic_origin() == TrafficOrigin::Internal
            && head.method != Method::CONNECT;
        // The response to a probe of the platform comes before a Revision is chosen, so that it never wakes one.
        if let Some(probe) = platform_probe::parse_probe(head).filter(|_| may_be_probe) {
            return Ok(RouteChoice::Probe(probe));
        }
        // Before the service and any redirect: the host may have no certificate yet, and its pods know no token.
        if let Some(response) = self.challenge_response(head, entrypoint) {
            return Ok(RouteChoice::Challenge(response));
        }
        if let Some(rules) = self.gateway_rules(head, entrypoint, sender) {
            return self.choose_by_rules(&rules, head, sender, handshake);
        }
        let found = match self.revision_of_ingress(head, entrypoint, sender) {
            Some(revision) => self.find_chosen_revision(revision)?,
            None => self.find_service(head, entrypoint)?,
        };
        let mut comes_by_https = false;
        if entrypoint == Entrypoint::External {
            // One policy for the whole decision: a change in between would mix the settings of two.
            let edge = self.edge_policy.current();
            comes_by_https = is_https(&head.headers, sender, &edge);
            if !comes_by_https && found.service_match.redirects_to_https() {
                return Ok(RouteChoice::Redirect(found, https_location(head, &edge)?));
            }
            // For each request: over HTTP/2 a client may name another host than in its handshake (RFC 9113 §9.1.1).
            let rule = found.service_match.client_auth();
            let met = match handshake {
                HandshakeRule::Met(met) => met,
                HandshakeRule::OfRequestedHost => rule.filter(|_| sender.is_tls),
            };
            check_client_auth(rule, met, sender.is_tls)?;
        }
        // Only now: a tag may choose another service, and must not lead around the rule of the host.
        let (service, tag) = self.select_tag(&found.service_match, head);
        Ok(RouteChoice::Service(ServiceChoice { found, is_https: comes_by_https, service, tag }))
    }

    /// Returns the rules of the Gateway API for the host of a request from outside, if it has any.
    fn gateway_rules(
        &self,
        head: &request::Parts,
        entrypoint: Entrypoint,
        sender: ForwardedRequestSender,
    ) -> Option<Arc<GatewayHostRules>> {
        if entrypoint != Entrypoint::External || !self.routes.has_gateway_hosts() {
            return None;
        }
        let host = host::request_host(head).unwrap_or_default();
        self.routes.gateway_host(sender.is_tls, &host)
    }

    /// Chooses the backend of a request, or its redirect, by the rules of the Gateway API for its host.
    fn choose_by_rules(
        &self,
        rules: &GatewayHostRules,
        head: &request::Parts,
        sender: ForwardedRequestSender,
        handshake: HandshakeRule<'_>,
    ) -> Result<RouteChoice, ProxyRequestError> {
        let host = host::request_host(head).unwrap_or_default();
        // These hosts ask for no certificates, but the connection may be for a host that does.
        let met = match handshake {
            HandshakeRule::Met(met) => met,
            HandshakeRule::OfRequestedHost => None,
        };
        check_client_auth(None, met, sender.is_tls)?;
        let rule = rules.find(head);
        let rule = rule.map_err(|error| path_failure(error, &host, head.uri.path()))?;
        let is_https = is_https(&head.headers, sender, &self.edge_policy.current());
        // A redirect needs no backend, so that weights must not refuse it.
        if rule.redirect.is_some() {
            return redirect_by_rule(rule, head, &host, is_https).map(RouteChoice::RuleRedirect);
        }
        // For each request, not for each connection: weights are shares of requests.
        let picked = PickedBackend::pick(rule, random_u64());
        let picked = picked.ok_or_else(|| rule.no_backend_error())?;
        let service = match picked.target() {
            RoutedTarget::Service(name) => {
                let missing = || ProxyRequestError::NoRevision(name.to_string());
                self.routes.service_by_name(name).ok_or_else(missing)?
            }
            RoutedTarget::Plain(service) => Arc::clone(service),
            RoutedTarget::Unresolved => return Err(rule.no_backend_error()),
        };
        // Checked before the request waits, and done once it has a pod.
        let path = head.uri.path();
        if rule.rewritten_target(path.as_bytes()).is_some_and(|it| it.is_err()) {
            return Err(path_failure(HostPathError::UnclearPath, &host, path));
        }
        let picked_backend = Some(picked);
        let service_match = ServiceMatch { service, domain_index: None, picked_backend };
        let (service, tag) = self.select_tag(&service_match, head);
        let found = FoundService { rule: MatchRule::Host(host), service_match };
        Ok(RouteChoice::Service(ServiceChoice { found, is_https, service, tag }))
    }

    /// Returns the response to a challenge of an authority. Any other path below the challenges' is the service's own.
    fn challenge_response(&self, head: &request::Parts, entrypoint: Entrypoint) -> Option<String> {
        let token = head.uri.path().strip_prefix(CHALLENGE_PREFIX)?;
        let is_read = head.method == Method::GET || head.method == Method::HEAD;
        if entrypoint != Entrypoint::External || !is_read {
            return None;
        }
        self.routes.challenge_response(&host::request_host(head)?, token)
    }

    /// Returns the Revision that a trusted ingress has chosen for a request. Headers of all other senders choose none.
    fn revision_of_ingress(
        &self,
        head: &request::Parts,
        entrypoint: Entrypoint,
        sender: ForwardedRequestSender,
    ) -> Option<NamespacedName> {
        if entrypoint != Entrypoint::Internal {
            return None;
        }
        let revision = headers::read_chosen_revision(&head.headers)?;
        self.edge_policy.current().is_trusted_ingress(sender.address).then_some(revision)
    }

    /// Finds a Revision that an ingress has chosen. The request's host is that of its Route, whose traffic the ingress
    /// has divided, so no other rule may take the request.
    fn find_chosen_revision(
        &self,
        revision: NamespacedName,
    ) -> Result<FoundService, ProxyRequestError> {
        let service = self.routes.service_for_revision(&revision);
        let unknown = || ProxyRequestError::UnknownRevision(revision.to_string());
        let service_match = ServiceMatch::from(service.ok_or_else(unknown)?);
        Ok(FoundService { rule: MatchRule::ChosenRevision(revision), service_match })
    }

    /// Finds the service by the first rule that has one.
    pub(crate) fn find_service(
        &self,
        head: &request::Parts,
        entrypoint: Entrypoint,
    ) -> Result<FoundService, ProxyRequestError> {
        let host = || host::request_host(head).unwrap_or_default();
        let path = head.uri.path();
        for rule in match_rules(entrypoint, host, self.cluster_domain) {
            let found = self.routes.find_service(&rule, path);
            let failure = |error| path_failure(error, &host(), path);
            let Some(service_match) = found.map_err(failure)? else { continue };
            // Checked before the request waits, and done once it has a pod.
            if let Some(prefix) = service_match.stripped_prefix()
                && strip_segments(path.as_bytes(), prefix.depth()).is_err()
            {
                return Err(failure(HostPathError::UnclearPath));
            }
            return Ok(FoundService { rule, service_match });
        }
        Err(ProxyRequestError::UnknownService(match entrypoint {
            Entrypoint::Service(port) => format!("port {port}"),
            Entrypoint::GatewayPort(port) => format!("gateway port {port}"),
            Entrypoint::Internal | Entrypoint::External => host(),
        }))
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
}

/// Failure of a request to a host with path rules that none of them serves.
fn path_failure(error: HostPathError, host: &str, path: &str) -> ProxyRequestError {
    match error {
        HostPathError::NoRule => ProxyRequestError::UnknownService(format!("{host}{path}")),
        HostPathError::UnclearPath => ProxyRequestError::BadRequest(format!(
            "servers may read the path {path:?} in several ways, and {host} has services for some \
             paths only"
        )),
    }
}

/// Redirect of a request by a rule that has one.
fn redirect_by_rule(
    rule: &Arc<GatewayRule>,
    head: &request::Parts,
    own_host: &str,
    is_https: bool,
) -> Result<RuleRedirect, ProxyRequestError> {
    let redirect = rule.redirect.as_ref().ok_or_else(|| rule.no_backend_error())?;
    let is_https = redirect.is_https.unwrap_or(is_https);
    let target = headers::request_target(head);
    let unclear = |UnclearPath| path_failure(HostPathError::UnclearPath, own_host, head.uri.path());
    let replaced = redirect.path.as_ref().map(|it| rule.replace_path(target.as_bytes(), it));
    let replaced = replaced.transpose().map_err(unclear)?;
    // Only ASCII was put in place of ASCII, at a slash.
    let replaced = replaced.map(|it| String::from_utf8_lossy(&it).into_owned());
    let (host, path) = (redirect.host.as_deref(), replaced.as_deref().unwrap_or(target));
    let location = headers::redirect_location(head, is_https, host, redirect.port, path);
    Ok(RuleRedirect {
        rule: Arc::clone(rule),
        status: StatusCode::from_u16(redirect.status).map_err(|_bad| rule.no_backend_error())?,
        location: location.ok_or_else(|| ProxyRequestError::UnknownService(String::new()))?,
    })
}

/// URL of a request over https (`http-protocol: Redirected`).
fn https_location(
    head: &request::Parts,
    edge: &EdgeSettings,
) -> Result<HeaderValue, ProxyRequestError> {
    let https_port = edge.https_port.map_or(headers::HTTPS_PORT, NonZeroU16::get);
    let unnamed = || ProxyRequestError::UnknownService(String::new());
    headers::https_location(head, https_port).ok_or_else(unnamed)
}

/// Chooses the Revision of a service by the percents. `random` is uniform over u64.
pub(crate) fn pick_target(
    service: &RoutedService,
    random: u64,
) -> Result<&TrafficShare, ProxyRequestError> {
    let chosen = pick_by_percent(&service.targets, |it| it.percent, random);
    chosen.ok_or_else(|| ProxyRequestError::NoRevision(service.name.to_string()))
}

/// Returns the settings of a Revision, if it may get requests of this client. Without a known client no policy refuses
/// them.
pub(crate) fn check_target(
    target: &TrafficShare,
    entrypoint: Entrypoint,
    client: Option<IpAddr>,
) -> Result<RevisionRouteSettings, ProxyRequestError> {
    let unknown = || ProxyRequestError::UnknownRevision(target.revision.name.to_string());
    let settings = target.revision.route_settings().ok_or_else(unknown)?;
    if let Some(client) = client {
        check_network_policy(entrypoint, client, &settings)?;
    }
    Ok(settings)
}

/// Returns the settings of a Revision for requests of HTTP to a service, if it may get them, as [`check_target`] does.
pub(crate) fn check_http_target(
    service: &RoutedService,
    target: &TrafficShare,
    entrypoint: Entrypoint,
    client: Option<IpAddr>,
) -> Result<RevisionRouteSettings, ProxyRequestError> {
    let mut settings = check_target(target, entrypoint, client)?;
    // The ports of a scaled Service have protocols of their own.
    settings.protocol = service.protocol.unwrap_or(settings.protocol);
    if settings.protocol == AppProtocol::Tcp {
        return Err(ProxyRequestError::RawTcpService(service.name.to_string()));
    }
    Ok(settings)
}

/// Checks that waiting gives no client access that the pods' NetworkPolicies deny. From outside the client's address is
/// not known; there the policies' rules for the activator apply, as for any gateway.
fn check_network_policy(
    entrypoint: Entrypoint,
    client: IpAddr,
    settings: &RevisionRouteSettings,
) -> Result<(), ProxyRequestError> {
    let is_inside = entrypoint.traffic_origin() == TrafficOrigin::Internal;
    let sources = settings.allowed_sources.as_ref().filter(|_| is_inside);
    let is_denied = sources.is_some_and(|it| !it.contains(client));
    if is_denied { Err(ProxyRequestError::ForbiddenByNetworkPolicy(client)) } else { Ok(()) }
}
