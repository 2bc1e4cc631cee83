//! Shell: pages about the routes in force, at the admin port. They only read, and take no lock for longer than a look-up.
//!
//! | page | content |
//! |---|---|
//! | `/debug/` | hosts, Revisions, pods, certificates and connections, for reading |
//! | `/debug/routes` | the same as JSON: [`RoutesFacts`] |
//! | `/debug/trace` | choice for one request as JSON: [`RequestTraceFacts`] |

mod html;
mod request_view;
mod routes_view;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{RawQuery, State},
    http::{
        HeaderName, StatusCode,
        header::{
            CACHE_CONTROL, CONTENT_LENGTH, CONTENT_SECURITY_POLICY, CONTENT_TYPE,
            X_CONTENT_TYPE_OPTIONS,
        },
        request,
    },
    response::{IntoResponse as _, Response},
    routing::get,
};
use common::{page_body::page_body, wire::NamespacedName};
use tokio::sync::Semaphore;

use self::{
    request_view::{
        RequestSnapshot, TargetSnapshot, explain, request_head, request_sender, takes_raw_tcp,
    },
    routes_view::{HostSnapshot, MAX_HOSTS, RoutesSnapshot, list_hosts},
};
use crate::{
    clock::random_u64,
    edge::host,
    entrypoint::Entrypoint,
    listeners::client_server::ClientConnectionServer,
    request_error::ProxyRequestError,
    requests::{
        forwarder::RequestForwarder,
        route_choice::{
            FoundService, HandshakeRule, RouteChoice, ServiceChoice, check_http_target,
            check_target, pick_target,
        },
    },
    revisions::{revision_snapshot::RevisionSnapshot, route_settings::PodTable},
    route_facts::{ActivatorFacts, CertificateChoiceFacts, RequestTraceFacts, RoutesFacts},
    routes::{
        match_rules::MatchRule,
        service::{PortProtocol, RoutedService, TrafficShare},
        service_match::ServiceMatch,
    },
    traced_request::{RequestQueryError, TracedRequest, parse_host_filter},
};

/// Longest wait for the turn of a page, and then for its client to read it.
const PAGE_TIMEOUT: Duration = Duration::from_secs(10);
/// Content type of the pages for programs.
const JSON: &str = "application/json";
/// Content type of the page for reading.
const HTML: &str = "text/html; charset=utf-8";
/// Headers of each page. Browsers neither run nor load anything, and keep nothing.
const PAGE_HEADERS: [(HeaderName, &str); 3] = [
    (
        CONTENT_SECURITY_POLICY,
        "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; \
         frame-ancestors 'none'; base-uri 'none'",
    ),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (CACHE_CONTROL, "no-store"),
];

/// Returns the pages about the routes of `forwarder` and the connections of `server`.
pub(crate) fn debug_pages(
    forwarder: Arc<RequestForwarder>,
    server: Arc<ClientConnectionServer>,
) -> Router {
    let source = Arc::new(RoutesSource { forwarder, server });
    Router::new()
        .route("/debug/", get(readable_page))
        .route("/debug/routes", get(routes_page))
        .route("/debug/trace", get(trace_page))
        .with_state(DebugPages { source, turn: Arc::new(Semaphore::new(1)) })
}

/// Pages with their source.
#[derive(Clone, Debug)]
struct DebugPages {
    source: Arc<RoutesSource>,
    /// One page at a time: clients must not take more time and memory than that, however many they are.
    turn: Arc<Semaphore>,
}

/// Parts of the activator that the pages read.
#[derive(Debug)]
struct RoutesSource {
    forwarder: Arc<RequestForwarder>,
    server: Arc<ClientConnectionServer>,
}

async fn readable_page(State(pages): State<DebugPages>, RawQuery(query): RawQuery) -> Response {
    match parse_host_filter(&query.unwrap_or_default()) {
        Ok(filter) => {
            let build =
                |source: &RoutesSource| Ok(html::routes_html(&source.routes(filter)).into_bytes());
            pages.respond(HTML, build).await
        }
        Err(error) => bad_query(&error),
    }
}

async fn routes_page(State(pages): State<DebugPages>, RawQuery(query): RawQuery) -> Response {
    match parse_host_filter(&query.unwrap_or_default()) {
        Ok(filter) => {
            let build = |source: &RoutesSource| serde_json::to_vec(&source.routes(filter));
            pages.respond(JSON, build).await
        }
        Err(error) => bad_query(&error),
    }
}

async fn trace_page(State(pages): State<DebugPages>, RawQuery(query): RawQuery) -> Response {
    let request = TracedRequest::from_query(&query.unwrap_or_default());
    let with_head = request.and_then(|request| {
        let head = request_head(&request)?;
        Ok((request, head))
    });
    match with_head {
        Ok((request, head)) => {
            let build =
                move |source: &RoutesSource| serde_json::to_vec(&source.trace(&request, &head));
            pages.respond(JSON, build).await
        }
        Err(error) => bad_query(&error),
    }
}

fn bad_query(error: &RequestQueryError) -> Response {
    // The text has what the query had.
    (StatusCode::BAD_REQUEST, PAGE_HEADERS, format!("{error}\n")).into_response()
}

impl DebugPages {
    /// Builds a page in its turn, on a thread on which no request waits.
    async fn respond(
        self,
        content_type: &str,
        build: impl FnOnce(&RoutesSource) -> Result<Vec<u8>, serde_json::Error> + Send + 'static,
    ) -> Response {
        let turn = tokio::time::timeout(PAGE_TIMEOUT, self.turn.acquire_owned()).await;
        let Ok(Ok(turn)) = turn else {
            let reason = "another page is being read: ask again\n";
            return (StatusCode::SERVICE_UNAVAILABLE, reason).into_response();
        };
        let source = self.source;
        // The thread has the turn: a client that leaves ends this future, and the page is built to its end nevertheless.
        let building = tokio::task::spawn_blocking(move || (build(&source), turn));
        // The outer error is a panic, which is in the log.
        let (text, turn) = match building.await.map_err(|error| error.to_string()) {
            Ok((Ok(text), turn)) => (text, turn),
            Ok((Err(error), _)) => {
                return (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response();
            }
            Err(error) => return (StatusCode::INTERNAL_SERVER_ERROR, error).into_response(),
        };
        let headers =
            [(CONTENT_TYPE, content_type.to_owned()), (CONTENT_LENGTH, text.len().to_string())];
        (PAGE_HEADERS, headers, page_body(text, turn, PAGE_TIMEOUT)).into_response()
    }
}

impl RoutesSource {
    /// Returns the routes of hosts that contain `filter`.
    fn routes(&self, filter: String) -> RoutesFacts {
        let services = self.forwarder.routes.services();
        let listed = list_hosts(&services, &filter);
        let all = listed.len();
        let hosts: Vec<HostSnapshot> = listed
            .into_iter()
            .take(MAX_HOSTS)
            .filter_map(|host| {
                let service_match = match host.private_service {
                    Some(service) => ServiceMatch::from(Arc::clone(service)),
                    None => self.forwarder.routes.match_listed_host(&host.name)?,
                };
                // A service without public hosts is listed by its name, which the index of hosts does not know.
                let is_public = host.private_service.is_none();
                Some(HostSnapshot { name: host.name.into_owned(), service_match, is_public })
            })
            .collect();
        // Hosts that have gone meanwhile are not missing in the list.
        let gone = all.min(MAX_HOSTS) - hosts.len();
        RoutesSnapshot {
            activator: self.activator(),
            filter,
            all_hosts: all - gone,
            revisions: self.revisions(&hosts),
            hosts,
            certificates: self.forwarder.certificates.snapshot(),
            connections: self.server.connections().count_by_kind(),
            edge: self.forwarder.edge_policy.current(),
        }
        .into_facts()
    }

    /// Returns the Revisions of these hosts, each with its pods in the table.
    fn revisions(
        &self,
        hosts: &[HostSnapshot],
    ) -> BTreeMap<NamespacedName, (RevisionSnapshot, PodTable)> {
        let mut revisions = BTreeMap::new();
        for target in hosts.iter().flat_map(|host| host.service_match.service.targets.iter()) {
            let (name, revision) = (&target.revision.name, &target.revision);
            revisions.entry(name.clone()).or_insert_with(|| {
                (revision.snapshot(None, random_u64()), self.forwarder.routes.pod_table(name))
            });
        }
        revisions
    }

    fn activator(&self) -> ActivatorFacts {
        let routes = &self.forwarder.routes;
        let (name, place) = (routes.peers().view().own_name.to_string(), routes.own_place());
        ActivatorFacts {
            name,
            node: place.name.to_string(),
            zone: place.zone.to_string(),
            routes_version: u64::try_from(self.forwarder.metrics.routes_version.get()).unwrap_or(0),
        }
    }

    /// Explains the choice for a request. It is made by the functions of the request path, and no pod gets a request.
    fn trace(&self, request: &TracedRequest, head: &request::Parts) -> RequestTraceFacts {
        let choice = self.choose(request, head);
        let service = match &choice {
            Ok(RouteChoice::Service(choice)) => Some(choice),
            Ok(
                RouteChoice::Probe(_)
                | RouteChoice::Challenge(_)
                | RouteChoice::Redirect(..)
                | RouteChoice::RuleRedirect(_),
            )
            | Err(_) => None,
        };
        let targets = service.map(|choice| self.targets(request, choice)).unwrap_or_default();
        // The random number does not matter: a service without targets has none for any number.
        let no_target = service.and_then(|choice| pick_target(&choice.service, 0).err());
        let host = host::request_host(head).unwrap_or_default();
        explain(RequestSnapshot {
            request,
            head,
            activator: self.activator(),
            certificate: self.certificate(request, &host),
            lacks_client_ca: self.lacks_client_ca(request, &host),
            host: &host,
            cluster_domain: &self.forwarder.cluster_domain,
            choice,
            no_target,
            targets,
        })
    }

    /// Chooses the service of a request, as the listener of its entrypoint and the forwarder do.
    fn choose(
        &self,
        request: &TracedRequest,
        head: &request::Parts,
    ) -> Result<RouteChoice, ProxyRequestError> {
        let entrypoint = request.entrypoint;
        let by_port = match entrypoint {
            Entrypoint::Service(port) => {
                Some((MatchRule::OwnPort(port), self.forwarder.port_protocol(port)))
            }
            Entrypoint::GatewayPort(port) => {
                Some((MatchRule::GatewayPort(port), self.forwarder.gateway_port_protocol(port)))
            }
            Entrypoint::Internal | Entrypoint::External => None,
        };
        if let Some((rule, PortProtocol::RawTcp(service))) = by_port {
            // Nothing that the client sends is read: it has no host and no tag, and is no probe.
            let service_match = ServiceMatch::from(Arc::clone(&service));
            let found = FoundService { rule, service_match };
            let choice = ServiceChoice { found, is_https: false, service, tag: None };
            return Ok(RouteChoice::Service(choice));
        }
        let (sender, handshake) = (request_sender(request), HandshakeRule::OfRequestedHost);
        self.forwarder.route_chooser().choose(head, entrypoint, sender, handshake)
    }

    /// Returns the Revisions that may get the request.
    fn targets(&self, request: &TracedRequest, choice: &ServiceChoice) -> Vec<TargetSnapshot> {
        let service: &RoutedService = &choice.service;
        let (entrypoint, client) = (request.entrypoint, request.client);
        let is_raw_tcp = takes_raw_tcp(entrypoint, choice);
        let snapshot = |target: &TrafficShare| TargetSnapshot {
            name: target.revision.name.clone(),
            percent: target.percent,
            service_port: service.service_port,
            // Checks of HTTP need a head, which raw TCP does not have.
            check: if is_raw_tcp {
                check_target(target, entrypoint, client)
            } else {
                check_http_target(service, target, entrypoint, client)
            },
            revision: target.revision.snapshot(service.service_port, random_u64()),
            table: self.forwarder.routes.pod_table(&target.revision.name),
        };
        service.targets.iter().map(snapshot).collect()
    }

    /// Returns the certificate that the client of a TLS gateway gets.
    fn certificate(&self, request: &TracedRequest, host: &str) -> Option<CertificateChoiceFacts> {
        if !meets_tls_gateway(request) {
            return None;
        }
        let own = self.forwarder.routes.handshake_rules(host).certificates;
        self.forwarder.certificates.snapshot().choice_facts(&own, host)
    }

    /// Returns true if handshakes for the host fail, because the authorities of its clients' certificates are not in
    /// force.
    fn lacks_client_ca(&self, request: &TracedRequest, host: &str) -> bool {
        if !meets_tls_gateway(request) {
            return false;
        }
        let rule = self.forwarder.routes.handshake_rules(host).client_auth;
        let is_missing = |name: NamespacedName| self.forwarder.client_cas.get(&name).is_none();
        rule.is_some_and(|it| it.ca.is_none_or(is_missing))
    }
}

/// Returns true if the connection begins with a handshake at the gateway.
fn meets_tls_gateway(request: &TracedRequest) -> bool {
    request.is_tls && request.entrypoint == Entrypoint::External
}

#[cfg(test)]
mod tests;
