//! Pure: the choice for a request → the facts of the page `/debug/trace`, with the reasons.

use std::{
    borrow::Cow,
    net::{IpAddr, Ipv4Addr},
    num::NonZeroU16,
};

use common::wire::{ClientAuth, ConnectionPath, NamespacedName, TagRouting};
use http::{HeaderValue, Request, Uri, header, request};

use crate::{
    edge::{
        client_headers::{ForwardedRequestSender, ProxiedClient},
        headers::{TAG_HEADER, request_target},
    },
    entrypoint::{Entrypoint, TrafficOrigin},
    request_error::ProxyRequestError,
    requests::route_choice::{FoundService, RouteChoice, ServiceChoice},
    revisions::{
        balance::{BalancePolicy, PodRank},
        revision_snapshot::{MAX_SHOWN_PODS, RevisionSnapshot},
        route_settings::{PodTable, RevisionRouteSettings},
        wait_queue::{PodQueueState, QueuedPod},
    },
    route_facts::{
        ActivatorFacts, CertificateChoiceFacts, RequestOutcome, RequestTraceFacts, RoutedPodFacts,
        RuleFacts, TracedTargetFacts,
    },
    routes::{
        gateway_rules::GatewayRule,
        match_rules::{MatchRule, match_rules},
    },
    traced_request::{RequestQueryError, TracedRequest, entrypoint_name},
};

/// Choice for a request, with the state on which it depends.
#[derive(Debug)]
pub(super) struct RequestSnapshot<'a> {
    pub(super) request: &'a TracedRequest,
    pub(super) head: &'a request::Parts,
    pub(super) activator: ActivatorFacts,
    /// Host of the request in lower case and without port.
    pub(super) host: &'a str,
    pub(super) cluster_domain: &'a str,
    pub(super) choice: Result<RouteChoice, ProxyRequestError>,
    /// Failure of a service that has no Revision.
    pub(super) no_target: Option<ProxyRequestError>,
    pub(super) targets: Vec<TargetSnapshot>,
    /// Certificate for the host, if the connection has TLS.
    pub(super) certificate: Option<CertificateChoiceFacts>,
    /// True if the connection has TLS, and the host's authorities of client certificates are not in force.
    pub(super) lacks_client_ca: bool,
}

/// Revision that may get the request.
#[derive(Debug)]
pub(super) struct TargetSnapshot {
    pub(super) name: NamespacedName,
    pub(super) percent: u8,
    /// Port of the scaled Service that the request is for.
    pub(super) service_port: Option<NonZeroU16>,
    pub(super) check: Result<RevisionRouteSettings, ProxyRequestError>,
    pub(super) revision: RevisionSnapshot,
    pub(super) table: PodTable,
}

/// Result of a request, as far as it does not depend on a Revision.
struct RequestResult {
    outcome: RequestOutcome,
    status: Option<u16>,
    reason: String,
}

/// Returns the head of a traced request.
pub(super) fn request_head(request: &TracedRequest) -> Result<request::Parts, RequestQueryError> {
    let error = |parameter: &str, value: &str, expected| RequestQueryError {
        parameter: parameter.to_owned(),
        value: value.to_owned(),
        expected,
    };
    let host = HeaderValue::try_from(request.host.as_str())
        .map_err(|_bad| error("host", &request.host, "a value of the header Host"))?;
    let path = Uri::try_from(request.path.as_str())
        .map_err(|_bad| error("path", &request.path, "the path of a URL"))?;
    let mut builder = Request::get(path).header(header::HOST, host);
    for (name, value) in &request.headers {
        builder = builder.header(name.as_str(), value.as_str());
    }
    let head = builder.body(()).map_err(|_bad| error("header", "", "NAME:VALUE"))?;
    Ok(head.into_parts().0)
}

/// Returns the sender of a traced request. A client that is not known is no trusted proxy.
pub(super) fn request_sender(request: &TracedRequest) -> ForwardedRequestSender {
    ForwardedRequestSender {
        traffic_origin: request.entrypoint.traffic_origin(),
        address: request.client.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
        proxied_client: ProxiedClient::Direct,
        is_tls: request.is_tls,
    }
}

/// Explains the choice for a request.
pub(super) fn explain(snapshot: RequestSnapshot<'_>) -> RequestTraceFacts {
    let RequestResult { outcome, status, reason } = snapshot.result();
    let is_served = outcome == RequestOutcome::Revision;
    // A request that is refused or redirected goes to no Revision, although its service has some.
    let targets = snapshot.targets.iter().filter(|_| is_served);
    let location = match &snapshot.choice {
        Ok(RouteChoice::Redirect(_, url)) => Some(String::from_utf8_lossy(url.as_bytes())),
        Ok(RouteChoice::RuleRedirect(it)) => Some(String::from_utf8_lossy(it.location.as_bytes())),
        Ok(RouteChoice::Probe(_) | RouteChoice::Challenge(_) | RouteChoice::Service(_))
        | Err(_) => None,
    };
    let request = snapshot.request;
    RequestTraceFacts {
        host: request.host.clone(),
        path: request.path.clone(),
        entrypoint: entrypoint_name(request.entrypoint),
        is_tls: request.is_tls,
        outcome,
        status,
        reason,
        rules: snapshot.rules(),
        service: snapshot.service().map(|it| it.service.name.to_string()),
        tag: snapshot.service().and_then(|it| tag_reason(it, snapshot.head)),
        location: location.map(Cow::into_owned),
        targets: targets.map(TargetSnapshot::facts).collect(),
        notes: snapshot.notes(),
        certificate: snapshot.certificate,
        activator: snapshot.activator,
    }
}

impl RequestSnapshot<'_> {
    fn service(&self) -> Option<&ServiceChoice> {
        match &self.choice {
            Ok(RouteChoice::Service(choice)) => Some(choice),
            Ok(
                RouteChoice::Probe(_)
                | RouteChoice::Challenge(_)
                | RouteChoice::Redirect(..)
                | RouteChoice::RuleRedirect(_),
            )
            | Err(_) => None,
        }
    }

    fn found(&self) -> Option<&FoundService> {
        match &self.choice {
            Ok(RouteChoice::Redirect(found, _)) => Some(found),
            Ok(RouteChoice::Service(choice)) => Some(&choice.found),
            Ok(
                RouteChoice::Probe(_) | RouteChoice::Challenge(_) | RouteChoice::RuleRedirect(_),
            )
            | Err(_) => None,
        }
    }

    /// Returns the outcome of the request as a client would see it, with the reason.
    fn result(&self) -> RequestResult {
        if let Some(reason) = self.handshake_failure() {
            // Nothing of the request arrives then.
            return RequestResult { outcome: RequestOutcome::Refused, status: None, reason };
        }
        match (&self.choice, &self.no_target) {
            (Err(failure), _) | (Ok(RouteChoice::Service(_)), Some(failure)) => RequestResult {
                outcome: RequestOutcome::Refused,
                status: Some(failure.status().as_u16()),
                reason: failure.to_string(),
            },
            (Ok(RouteChoice::Probe(_)), _) => RequestResult {
                outcome: RequestOutcome::Probe,
                status: None,
                reason: "its headers are those of a probe of the platform, which the activator \
                         responds to; it wakes no service"
                    .to_owned(),
            },
            (Ok(RouteChoice::Challenge(_)), _) => RequestResult {
                outcome: RequestOutcome::Probe,
                status: Some(200),
                reason: "its path is that of a challenge for the host's certificate, which the \
                         activator responds to; it wakes no service"
                    .to_owned(),
            },
            (Ok(RouteChoice::Redirect(found, _)), _) => RequestResult {
                outcome: RequestOutcome::Redirect,
                status: Some(301),
                reason: format!("{}, which redirects http to https", found_reason(found)),
            },
            (Ok(RouteChoice::RuleRedirect(it)), _) => RequestResult {
                outcome: RequestOutcome::Redirect,
                status: Some(it.status.as_u16()),
                reason: rule_reason(&it.rule, "redirects"),
            },
            (Ok(RouteChoice::Service(choice)), None) => RequestResult {
                outcome: RequestOutcome::Revision,
                status: None,
                reason: found_reason(&choice.found),
            },
        }
    }

    /// Returns the reason for which the handshake of TLS fails; `None`: it does not, or there is none.
    fn handshake_failure(&self) -> Option<String> {
        let host = self.host;
        if self.request.is_tls && self.certificate.is_none() {
            return Some(format!(
                "the handshake of TLS fails with the alert unrecognized_name: no certificate is \
                 for {host:?}, and no default is presented"
            ));
        }
        // Optional certificates of clients make no difference: without the authorities no client is accepted.
        self.lacks_client_ca.then(|| {
            format!(
                "the handshake of TLS fails with the alert internal_error: the client CA of \
                 {host:?} is not in force"
            )
        })
    }

    /// Returns the rules that were tried. If none has found a service, all of them were. If the request was refused or
    /// answered before the search, none was.
    fn rules(&self) -> Vec<RuleFacts> {
        let matched = self.found().map(|it| &it.rule);
        let is_unknown = matches!(self.choice, Err(ProxyRequestError::UnknownService(_)));
        if matched.is_none() && !is_unknown {
            return Vec::new();
        }
        // Headers of a trusted ingress choose before any rule is tried.
        if let Some(chosen) = matched.filter(|it| matches!(it, MatchRule::ChosenRevision(_))) {
            return vec![RuleFacts { rule: rule_text(chosen), is_match: true }];
        }
        let host = || self.host.to_owned();
        let mut tried = Vec::new();
        for rule in match_rules(self.request.entrypoint, host, self.cluster_domain) {
            let is_match = matched == Some(&rule);
            tried.push(RuleFacts { rule: rule_text(&rule), is_match });
            if is_match {
                break;
            }
        }
        tried
    }

    /// Returns what else happens to the request on its way to a pod: rewrites, checks, and other paths.
    fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        // All notes are about the way to a pod, which a refused request has not.
        let Some(choice) = self.service() else { return notes };
        let is_inside = self.request.entrypoint.traffic_origin() == TrafficOrigin::Internal;
        if let Some(host) =
            choice.found.service_match.domain().and_then(|it| it.host_rewrite.as_ref())
        {
            notes.push(format!(
                "the pods receive the host {host}, and {} in K-Original-Host",
                self.host
            ));
        }
        if let Some(prefix) = choice.found.service_match.stripped_prefix() {
            notes.push(format!("the pods receive the path without {prefix}"));
        }
        if let Some(picked) = &choice.found.service_match.picked_backend {
            notes.extend(rewrite_notes(&picked.rule, self.head));
        }
        if let Some(rule) = choice.found.service_match.client_auth().filter(|_| !is_inside) {
            notes.push(client_auth_note(rule));
        }
        // The trace checks no policy without the client's address, although the request would be checked.
        let is_restricted = |it: &TargetSnapshot| {
            it.check.as_ref().is_ok_and(|settings| settings.allowed_sources.is_some())
        };
        if is_inside && self.request.client.is_none() && self.targets.iter().any(is_restricted) {
            let note = "NetworkPolicies let only some clients send requests, and the client is not \
                        known";
            notes.push(note.to_owned());
        }
        if is_inside && choice.service.path == ConnectionPath::Direct {
            let note = "connects to the address of the service go directly to pods while one is \
                        ready, and not through activators";
            notes.push(note.to_owned());
        }
        if self.takes_raw_tcp() {
            let note = "the port takes raw TCP: each connection is one request, and is reset \
                        where HTTP gets a status code";
            notes.push(note.to_owned());
        }
        notes
    }

    /// Returns true if the request is a connection to a port of raw TCP.
    fn takes_raw_tcp(&self) -> bool {
        let Some(choice) = self.service() else { return false };
        takes_raw_tcp(self.request.entrypoint, choice)
    }
}

/// Returns true if a connection to the entrypoint is one request of raw TCP.
pub(super) fn takes_raw_tcp(entrypoint: Entrypoint, choice: &ServiceChoice) -> bool {
    // The connection is taken for the service of the port, before a header could choose a tag.
    let service = &choice.found.service_match.service;
    match entrypoint {
        Entrypoint::Service(_) => service.takes_raw_tcp() == Some(true),
        Entrypoint::GatewayPort(_) => true,
        Entrypoint::Internal | Entrypoint::External => false,
    }
}

/// Returns the changes that a rule of the Gateway API makes to the URL of a request.
fn rewrite_notes(rule: &GatewayRule, head: &request::Parts) -> Vec<String> {
    let host = rule.rewrite.as_ref().and_then(|it| it.host.as_ref());
    let host = host.map(|host| format!("the pods receive the host {host}"));
    let path = rule.rewritten_target(request_target(head).as_bytes()).and_then(Result::ok);
    let path = path.map(|it| String::from_utf8_lossy(&it).into_owned());
    let path = path.map(|path| format!("the pods receive the path {path}"));
    host.into_iter().chain(path).collect()
}

fn client_auth_note(rule: &ClientAuth) -> String {
    let Some(ca) = &rule.ca else {
        return "the host accepts no client, since the name of its client CA is not valid"
            .to_owned();
    };
    // An optional certificate is still checked if the client shows one.
    let verb = if rule.is_optional { "may" } else { "must" };
    format!("the client {verb} show a certificate of {ca} in its handshake")
}

fn rule_text(rule: &MatchRule) -> String {
    match rule {
        MatchRule::OwnPort(port) => format!("own port {port} of a service"),
        MatchRule::GatewayPort(port) => format!("gateway port {port} of a service"),
        MatchRule::ServiceName(name) => format!("name of service {name} within the cluster"),
        MatchRule::RevisionName(name) => format!("name of Revision {name} within the cluster"),
        MatchRule::ChosenRevision(name) => {
            format!("Revision {name}, by headers of a trusted ingress")
        }
        MatchRule::Host(host) => format!("host {host:?} of a Route, tag or DomainMapping"),
    }
}

/// Returns the rule by which the service of a request was found, as a sentence.
fn found_reason(found: &FoundService) -> String {
    let service = &found.service_match.service.name;
    if let Some(picked) = &found.service_match.picked_backend {
        return rule_reason(
            &picked.rule,
            &format!("leads to {service}, by the weights of its backends"),
        );
    }
    match (found.service_match.domain(), &found.rule) {
        // A DomainMapping and a Route match by the same rule, the host, but have different reasons.
        (Some(domain), _) => match &domain.path_rule {
            Some(rule) => format!(
                "{} is the longest path prefix of {} that the path has, and leads to {service}",
                rule.prefix, domain.host
            ),
            None => format!("DomainMapping {} leads to {service}", domain.host),
        },
        (None, MatchRule::OwnPort(port)) => format!("port {port} belongs to {service}"),
        (None, MatchRule::GatewayPort(port)) => {
            format!("gateway port {port} belongs to {service}")
        }
        (None, MatchRule::ServiceName(_)) => format!("the host is the name of {service}"),
        (None, MatchRule::RevisionName(_)) => format!("the host is the name of Revision {service}"),
        (None, MatchRule::ChosenRevision(_)) => {
            format!("a trusted ingress has chosen Revision {service}")
        }
        (None, MatchRule::Host(host)) => format!("{host} is a host of {service}"),
    }
}

/// Returns the rule of the Gateway API that counts for a request, with its effect.
fn rule_reason(rule: &GatewayRule, effect: &str) -> String {
    let (GatewayRule { host, route, .. }, kind) = (rule, rule.route_kind());
    format!("a rule of {kind} {route} for {host} is the first that fits, and {effect}")
}

/// Returns the choice of a tag as a sentence; `None`: tags have no meaning for the service.
fn tag_reason(choice: &ServiceChoice, head: &request::Parts) -> Option<String> {
    let tags = match choice.found.service_match.service.tags()? {
        TagRouting::ServeTag(tag) => return Some(format!("the host is that of tag {tag}")),
        TagRouting::ChooseTag(tags) => tags,
    };
    if let Some(TagRouting::ServeTag(tag)) = &choice.tag {
        return Some(format!("tag {tag}, by the header Knative-Serving-Tag"));
    }
    let names: Vec<&str> = tags.iter().map(|it| it.name.as_str()).collect();
    let names = names.join(", ");
    Some(match head.headers.get(TAG_HEADER) {
        Some(value) => format!("default traffic: {value:?} is no tag in force, these are {names}"),
        None => format!("default traffic: no header Knative-Serving-Tag chooses one of {names}"),
    })
}

impl TargetSnapshot {
    fn facts(&self) -> TracedTargetFacts {
        let queue_full = ProxyRequestError::QueueFull;
        let (failure, pod) = match &self.check {
            Err(failure) => (Some(failure), None),
            // A full wait queue matters only to a request that would have to wait.
            Ok(_) if self.is_full() => (Some(&queue_full), None),
            Ok(_) => (None, self.revision.next_pod_facts(&self.table)),
        };
        let reason = match (failure, &pod) {
            (Some(failure), _) => format!("is refused: {failure}"),
            (None, Some(pod)) => self.pod_reason(pod),
            (None, None) => format!("waits: {}", self.wait_reason()),
        };
        TracedTargetFacts {
            percent: self.percent,
            status: failure.map(|it| it.status().as_u16()),
            reason,
            pod,
            revision: self.revision.facts(&self.name, &self.table, MAX_SHOWN_PODS),
        }
    }

    /// Returns true if the request could neither go to a pod nor wait.
    fn is_full(&self) -> bool {
        self.revision.next.is_none() && !self.revision.has_room
    }

    /// Returns the choice of the pod as a sentence: the pods among which it was made, and the rule.
    fn pod_reason(&self, pod: &RoutedPodFacts) -> String {
        let rank = self.next_rank();
        let count = self.count_candidates(rank);
        let (pods, why) = match rank {
            PodRank::Preferred => ("pods that hints prefer for this activator", ""),
            PodRank::Usual => ("pods that take requests", ""),
            PodRank::Standby => {
                ("pods on standby", "; no pod without a standby order has capacity")
            }
        };
        let choice = match BalancePolicy::of_limit(self.revision.limit()) {
            BalancePolicy::BetterOfTwo if count == 1 => format!("the only one of the {pods}"),
            BalancePolicy::BetterOfTwo => {
                format!("the less busy one of two random ones of {count} {pods}")
            }
            BalancePolicy::FirstFree => {
                format!("the first by address of {count} {pods} and have a free slot")
            }
            BalancePolicy::RoundRobin => {
                format!("the next in turn of {count} {pods} and have a free slot")
            }
        };
        let address = pod.address.map(|it| format!(" at {it}")).unwrap_or_default();
        format!("goes to pod {}{address}: {choice}{why}", pod.name)
    }

    /// Rank of the pod that would get the request.
    fn next_rank(&self) -> PodRank {
        let mut loads = self.revision.pods.iter().map(|it| it.queued.load);
        let next = loads.find(|it| Some(it.key) == self.revision.next);
        next.map(|it| it.rank).unwrap_or_default()
    }

    /// Number of the pods of a rank among which the choice was made.
    fn count_candidates(&self, rank: PodRank) -> usize {
        let limit = self.revision.limit();
        let is_candidate = |queued: &QueuedPod| {
            queued.state == PodQueueState::Open
                && queued.load.key.service_port == self.service_port
                && queued.load.rank == rank
                && (limit == 0 || queued.load.free_slots > 0)
        };
        self.revision.pods.iter().filter(|it| is_candidate(&it.queued)).count()
    }

    fn wait_reason(&self) -> String {
        let [open, paused] = [PodQueueState::Open, PodQueueState::Paused]
            .map(|state| self.revision.count_pods(self.service_port, state));
        let all = self.table.len();
        // The reasons go from the pod to this activator: no pod, none ready, none reached, no free slot.
        match (all, open, paused) {
            (0, ..) => "the Revision has no pod, and the request asks for one".to_owned(),
            (_, 0, 0) => match self.service_port {
                Some(port) => format!("none of {all} pods is ready and has port {port}"),
                None => format!("none of {all} pods is ready"),
            },
            (_, 0, paused) => {
                format!("dials of {paused} ready pods have failed, and are repeated in a moment")
            }
            (_, open, _) if self.revision.limit() == 0 => format!(
                "many requests wait, and are divided among {open} ready pods and those that start"
            ),
            (_, open, _) => format!(
                "this activator has no free slot at {open} ready pods: they have as many requests \
                 as containerConcurrency allows, or another activator has the slots"
            ),
        }
    }
}
