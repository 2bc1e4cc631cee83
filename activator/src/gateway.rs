//! Shell: one request from its arrival to its answer.
//!
//! Of a pod's answers only the final one is passed on: `hyper`'s client can tell of a 103 (`ext::on_informational`),
//! its server cannot send one; 100 it sends itself, once a pod takes the body.

use std::{net::IpAddr, sync::Arc};

use common::wire::{Path, Protocol, TagRouting};
use http::{HeaderValue, Request, Response, StatusCode, Version, header, request};
use hyper::{body::Incoming, upgrade::OnUpgrade};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, info};

use crate::{
    admin::Metrics,
    balance::{Lot, split},
    clock::chance,
    connection::{Ask, Connection},
    failure::Failure,
    headers::{self, Passage, Side},
    host,
    probe::{self, Health, K_NETWORK_HASH, Probe},
    reply::{Reply, Timer},
    revision::{Place, Revision, Terms, Timeouts},
    routes::{ByHostFound, Routes, Service},
    tunnel::tunnel,
};

/// A request is tried this often at pods that refuse before the client is told: with the pauses between,
/// about 5 s.
const MAX_REFUSALS: u32 = 10;
/// A request is sent over this many connections that were closed before a byte was sent.
const MAX_STALE: u32 = 10;

/// Where a connection came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    /// A service's own port: it is that service's, whatever its Host says.
    Port(u16),
    /// The gateway for workloads of the cluster, which names every service by Host.
    Inside,
    /// The gateway for requests from outside: only public hosts.
    Outside,
}

impl Door {
    fn side(self) -> Side {
        match self {
            Self::Port(_) | Self::Inside => Side::Inside,
            Self::Outside => Side::Outside,
        }
    }
}

/// Whose connection a request came over.
#[derive(Clone, Copy, Debug)]
pub struct Client {
    /// Its address.
    pub address: IpAddr,
    /// When the connection is asked to go, among all that are.
    pub lot: Lot,
}

/// Carries requests to pods.
#[derive(Debug)]
pub struct Gateway {
    /// What the table says.
    pub routes: Routes,
    /// What happened.
    pub metrics: Metrics,
    /// Connections and tunnels that run.
    pub tasks: TaskTracker,
    /// The cluster's domain, as in `<name>.<namespace>.svc.<domain>`.
    pub cluster_domain: String,
    /// The activator is being stopped: clients are asked to go elsewhere, and served until they do.
    pub leaving: CancellationToken,
    /// Connections end as soon as nothing is in flight on them.
    pub stop: CancellationToken,
    /// Ends tunnels.
    pub cut: CancellationToken,
}

/// A request that has been looked at.
struct Errand {
    request: Request<Ask>,
    revision: Arc<Revision>,
    /// What the pod is asked in.
    protocol: Protocol,
    timeouts: Timeouts,
    /// The protocol the client wants to switch to, and its side of the connection then.
    upgrade: Option<OnUpgrade>,
    bytes: usize,
    /// What the client speaks.
    version: Version,
}

/// A pod's answer, with what it occupies.
struct Answered {
    response: Response<Incoming>,
    connection: Connection,
    place: Place,
}

/// Counts a request whose client goes before the answer.
struct Cancelled<'a>(Option<&'a Metrics>);

impl Drop for Cancelled<'_> {
    fn drop(&mut self) {
        if let Some(metrics) = self.0 {
            metrics.cancelled.inc();
        }
    }
}

impl Gateway {
    /// Answers one request.
    pub async fn handle(
        &self,
        request: Request<Incoming>,
        door: Door,
        client: Client,
    ) -> Response<Reply> {
        let mut cancelled = Cancelled(Some(&self.metrics));
        let response = match self.answer(request, door, client).await {
            Ok(response) => response,
            Err(failure) => {
                note(door, client.address, &failure);
                failure.response(Reply::own)
            }
        };
        cancelled.0 = None;
        self.metrics.answered(response.status());
        response
    }

    async fn answer(
        &self,
        request: Request<Incoming>,
        door: Door,
        client: Client,
    ) -> Result<Response<Reply>, Failure> {
        let (mut head, body) = request.into_parts();
        host::check_host(&head)?;
        if let Some(asked) = probe::probe(&head).filter(|_| door.side() == Side::Inside) {
            return Ok(self.probed(asked, door, &head));
        }
        let found = self.find(door, &head)?;
        if door == Door::Outside && found.redirects() {
            return redirected(&head);
        }
        let (service, tag) = self.tagged(&found, &head);
        let (revision, terms) = revision(&service)?;
        let passage = Passage {
            side: door.side(),
            client: client.address,
            rewrite: found.domain().and_then(|domain| domain.rewrite.as_deref()),
            tags: tag.as_ref().or_else(|| service.tags()),
            protocol: terms.protocol,
            chance,
        };
        let own_host = || format!("{}.{}.svc", service.name.name, service.name.namespace);
        let version = head.version;
        let wanted = headers::to_pod(&mut head, passage, own_host)?;
        let protocol = if wanted.is_some() { Protocol::Http1 } else { terms.protocol };
        let upgrade = wanted.and_then(|_protocol| head.extensions.remove::<OnUpgrade>());
        let bytes = headers::weight(&head);
        let request = Request::from_parts(head, Ask::from(body));
        let (served, timeouts) = (Arc::clone(&revision), terms.timeouts);
        let errand = Errand { request, revision, protocol, timeouts, upgrade, bytes, version };
        let mut response = self.timed(errand).await?;
        self.send_off(&mut response, door, &service, &served, client.lot);
        Ok(response)
    }

    /// Asks the client to open another connection for its next request, where that leads somewhere better.
    fn send_off(
        &self,
        response: &mut Response<Reply>,
        door: Door,
        service: &Service,
        revision: &Revision,
        lot: Lot,
    ) {
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return;
        }
        let goes_direct = matches!(door, Door::Port(_)) && self.may_go(service, revision, lot);
        if goes_direct {
            self.metrics.direct_closed.inc();
        }
        if goes_direct || self.leaving.is_cancelled() {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
    }

    fn find(&self, door: Door, head: &request::Parts) -> Result<ByHostFound, Failure> {
        let host = || host::host(head).unwrap_or_default();
        let found = match door {
            Door::Port(port) => self.routes.by_port(port).map(ByHostFound::from),
            Door::Outside => self.routes.by_host(&host()),
            Door::Inside => {
                let host = host();
                let local = host::local_name(&host, &self.cluster_domain);
                let local = local.and_then(|name| self.routes.by_name(&name));
                local.map(ByHostFound::from).or_else(|| self.routes.by_host(&host))
            }
        };
        found.ok_or_else(|| match door {
            Door::Port(port) => Failure::UnknownService(format!("port {port}")),
            Door::Inside | Door::Outside => Failure::UnknownService(host()),
        })
    }

    /// The service whose revisions serve the request: the one that was found, or the tag of it that a header chooses.
    fn tagged(
        &self,
        found: &ByHostFound,
        head: &request::Parts,
    ) -> (Arc<Service>, Option<TagRouting>) {
        let service = Arc::clone(&found.service);
        let Some(TagRouting::Choice(tags)) = service.tags() else { return (service, None) };
        let asked = head.headers.get(headers::TAG).map(HeaderValue::as_bytes);
        let tag = asked.and_then(|asked| tags.iter().find(|tag| tag.name.as_bytes() == asked));
        let chosen = tag.and_then(|tag| {
            Some((self.routes.by_name(&tag.service)?, Some(TagRouting::Tag(tag.name.clone()))))
        });
        chosen.unwrap_or((service, None))
    }

    fn probed(&self, asked: Probe, door: Door, head: &request::Parts) -> Response<Reply> {
        let has_pod = || {
            let service = self.find(door, head).ok()?.service;
            Some(service.targets.iter().any(|it| it.revision.ready_since().is_some()))
        };
        let has_pod = asked == Probe::Queue && has_pod().unwrap_or(false);
        let told = asked.answer(Health { is_leaving: self.leaving.is_cancelled(), has_pod });
        let mut response = Response::new(Reply::own(told.text));
        *response.status_mut() = told.status;
        told.hash.map(|hash| response.headers_mut().insert(K_NETWORK_HASH, hash));
        response
    }

    /// Whether a kept connection should end now, because the next one leads straight to a pod.
    fn may_go(&self, service: &Service, revision: &Revision, lot: Lot) -> bool {
        let Some(ready) = revision.ready_since().filter(|_| service.path == Path::Direct) else {
            return false;
        };
        let connections = u32::try_from(self.metrics.connections.get()).unwrap_or(0);
        lot.goes(ready.max(service.since).elapsed(), connections)
    }

    async fn timed(&self, errand: Errand) -> Result<Response<Reply>, Failure> {
        let Errand { request, revision, protocol, timeouts, upgrade, bytes, version } = errand;
        let mut timer = Timer::start(timeouts);
        let answered = tokio::select! {
            biased;
            answered = self.forward(request, &revision, protocol, bytes) => answered?,
            () = timer.expired() => return Err(Failure::Timeout),
        };
        Ok(self.relay(answered, upgrade, version, timer))
    }

    async fn forward(
        &self,
        mut request: Request<Ask>,
        revision: &Arc<Revision>,
        protocol: Protocol,
        bytes: usize,
    ) -> Result<Answered, Failure> {
        let mut visit = revision.visit(bytes);
        let (mut refusals, mut stale) = (0, 0);
        loop {
            let place = visit.place().await?;
            let address = place.pod.key.address;
            let mut connection = match place.pod.connect(protocol).await {
                Ok(connection) => connection,
                Err(error) => {
                    refusals += 1;
                    revision.refused(place);
                    if refusals == MAX_REFUSALS {
                        return Err(Failure::Dial { address, reason: error.to_string() });
                    }
                    self.metrics.retries.inc();
                    continue;
                }
            };
            visit.leave();
            place.note_counted();
            let error = match connection.send(request).await {
                Ok(response) => {
                    place.pod.note_answer();
                    return Ok(Answered { response, connection, place });
                }
                Err(error) => error,
            };
            match error.unseen {
                Some(unseen) if stale < MAX_STALE => request = unseen,
                _ => return Err(broken(address, &error.error)),
            }
            stale += 1;
            self.metrics.retries.inc();
        }
    }

    fn relay(
        &self,
        answered: Answered,
        upgrade: Option<OnUpgrade>,
        version: Version,
        timer: Timer,
    ) -> Response<Reply> {
        let Answered { mut response, connection, place } = answered;
        let switched = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        let status = response.status();
        headers::to_client(response.headers_mut(), status, version);
        if !switched {
            return response.map(|body| Reply::pod(body, timer, (connection, place)));
        }
        let Some(client) = upgrade else {
            let text = "pod switched protocols unasked".to_owned();
            let failure = Failure::Broken { address: place.pod.key.address, reason: text };
            return failure.response(Reply::own);
        };
        let pod = hyper::upgrade::on(&mut response);
        self.tasks.spawn(tunnel(client, pod, place, timer.whole(), self.cut.clone()));
        response.map(|_empty| Reply::own(""))
    }
}

/// One of the service's revisions by their shares, and what holds there.
fn revision(service: &Service) -> Result<(Arc<Revision>, Terms), Failure> {
    let chosen = split(&service.targets, |it| it.percent, chance());
    let share = chosen.ok_or_else(|| Failure::NoTarget(service.name.to_string()))?;
    let terms = share.revision.terms();
    let unknown = || Failure::UnknownRevision(share.revision.name.to_string());
    Ok((Arc::clone(&share.revision), terms.ok_or_else(unknown)?))
}

/// Leads to the same over https (`http-protocol: Redirected`).
fn redirected(head: &request::Parts) -> Result<Response<Reply>, Failure> {
    let unnamed = || Failure::UnknownService(String::new());
    let mut response = Response::new(Reply::own(""));
    *response.status_mut() = StatusCode::MOVED_PERMANENTLY;
    let location = headers::secure_location(head).ok_or_else(unnamed)?;
    response.headers_mut().insert(header::LOCATION, location);
    Ok(response)
}

/// Refusals that a flood of requests would repeat are only counted.
fn note(door: Door, client: IpAddr, failure: &Failure) {
    let code = failure.status().as_u16();
    match failure {
        Failure::Timeout | Failure::Dial { .. } | Failure::Broken { .. } => {
            info!(?door, %client, code, %failure, "request failed");
        }
        Failure::UnknownService(_)
        | Failure::NoTarget(_)
        | Failure::UnknownRevision(_)
        | Failure::QueueFull
        | Failure::BadRequest(_)
        | Failure::Connect
        | Failure::ShuttingDown => debug!(?door, %client, code, %failure, "request refused"),
    }
}

/// A failure that is the client's (its body broke off or made no sense) is not blamed on the pod.
fn broken(address: std::net::SocketAddr, error: &hyper::Error) -> Failure {
    let reason = common::link::chain(error);
    if error.is_user() { Failure::BadRequest(reason) } else { Failure::Broken { address, reason } }
}
