//! Shell: one request from its arrival to its answer.
//!
//! Of a pod's answers only the final one is passed on: `hyper`'s client can tell of a 103 (`ext::on_informational`),
//! its server cannot send one; 100 it sends itself, once a pod takes the body.

use std::{net::IpAddr, sync::Arc};

use common::wire::Path;
use http::{HeaderValue, Request, Response, StatusCode, header, request};
use hyper::{body::Incoming, upgrade::OnUpgrade};
use hyper_util::rt::TokioIo;
use tokio::time::Instant;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, info};

use crate::{
    admin::Metrics,
    balance::{Lot, split},
    clock::chance,
    failure::Failure,
    headers::{self, K_NETWORK_HASH, K_NETWORK_PROBE, Side},
    pods::Connection,
    reply::{Reply, Timer},
    revision::{Place, Revision, Timeouts},
    routes::{Routes, Service},
};

/// A request is tried this often at pods that refuse before the client is told: with the pauses between,
/// about 5 s.
const MAX_REFUSALS: u32 = 10;
/// A request is sent over this many connections that were closed before a byte was sent.
const MAX_STALE: u32 = 10;

/// Where a connection came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    /// A service's own port.
    Port(u16),
    /// The gateway for requests from outside.
    Outside,
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
    /// Ends tunnels.
    pub stop: CancellationToken,
}

/// A request that has been looked at.
struct Errand {
    request: Request<Incoming>,
    revision: Arc<Revision>,
    timeouts: Timeouts,
    /// The protocol the client wants to switch to, and its side of the connection then.
    upgrade: Option<OnUpgrade>,
    bytes: usize,
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
        headers::check_host(&head)?;
        if let (Door::Port(_), Some(probe)) = (door, head.headers.get(K_NETWORK_PROBE)) {
            return Ok(probed(probe, &head));
        }
        let service = self.service(door, &head)?;
        let (revision, timeouts) = revision(&service)?;
        let side = match door {
            Door::Port(_) => Side::Inside,
            Door::Outside => Side::Outside,
        };
        let own_host = || format!("{}.{}.svc", service.name.name, service.name.namespace);
        let wanted = headers::to_pod(&mut head, side, client.address, own_host)?;
        let upgrade = wanted.and_then(|_protocol| head.extensions.remove::<OnUpgrade>());
        let bytes = headers::weight(&head);
        let request = Request::from_parts(head, body);
        let errand = Errand { request, revision: Arc::clone(&revision), timeouts, upgrade, bytes };
        let mut response = self.timed(errand).await?;
        if side == Side::Inside
            && response.status() != StatusCode::SWITCHING_PROTOCOLS
            && self.may_go(&service, &revision, client.lot)
        {
            // The client's next connection goes straight to a pod.
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            self.metrics.direct_closed.inc();
        }
        Ok(response)
    }

    fn service(&self, door: Door, head: &request::Parts) -> Result<Arc<Service>, Failure> {
        match door {
            Door::Port(port) => {
                let found = self.routes.by_port(port);
                found.ok_or_else(|| Failure::UnknownService(format!("port {port}")))
            }
            Door::Outside => {
                let host = headers::host(head).unwrap_or_default();
                self.routes.by_host(&host).ok_or(Failure::UnknownService(host))
            }
        }
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
        let Errand { request, revision, timeouts, upgrade, bytes } = errand;
        let mut timer = Timer::start(timeouts);
        let answered = tokio::select! {
            biased;
            answered = self.forward(request, &revision, bytes) => answered?,
            () = timer.expired() => return Err(Failure::Timeout),
        };
        Ok(self.relay(answered, upgrade, timer))
    }

    async fn forward(
        &self,
        mut request: Request<Incoming>,
        revision: &Arc<Revision>,
        bytes: usize,
    ) -> Result<Answered, Failure> {
        let mut visit = revision.visit(bytes);
        let (mut refusals, mut stale) = (0, 0);
        loop {
            let place = visit.place().await?;
            let address = place.pod.key.address;
            let mut connection = match place.pod.connect().await {
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
            let mut error = match connection.sender.try_send_request(request).await {
                Ok(response) => {
                    place.pod.note_answer();
                    return Ok(Answered { response, connection, place });
                }
                Err(error) => error,
            };
            // The library gives the request back only when no byte of it was written.
            match error.take_message() {
                Some(unsent) if stale < MAX_STALE => request = unsent,
                _ => return Err(broken(address, &error.into_error())),
            }
            stale += 1;
            self.metrics.retries.inc();
        }
    }

    fn relay(
        &self,
        answered: Answered,
        upgrade: Option<OnUpgrade>,
        timer: Timer,
    ) -> Response<Reply> {
        let Answered { mut response, connection, place } = answered;
        let switched = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        headers::to_client(response.headers_mut(), switched);
        if !switched {
            return response.map(|body| Reply::pod(body, timer, (connection, place)));
        }
        let Some(client) = upgrade else {
            let text = "pod switched protocols unasked".to_owned();
            let failure = Failure::Broken { address: place.pod.key.address, reason: text };
            return failure.response(Reply::own);
        };
        let pod = hyper::upgrade::on(&mut response);
        self.tasks.spawn(tunnel(client, pod, place, timer.whole(), self.stop.clone()));
        response.map(|_empty| Reply::own(""))
    }
}

/// One of the service's revisions by their shares, and the bounds of a request there.
fn revision(service: &Service) -> Result<(Arc<Revision>, Timeouts), Failure> {
    let chosen = split(&service.targets, |it| it.percent, chance());
    let share = chosen.ok_or_else(|| Failure::NoTarget(service.name.to_string()))?;
    let terms = share.revision.terms();
    let unknown = || Failure::UnknownRevision(share.revision.name.to_string());
    Ok((Arc::clone(&share.revision), terms.ok_or_else(unknown)?.timeouts))
}

/// Carries bytes both ways until both ends have closed, the request's time is up or the activator stops.
///
/// Knative ends upgraded connections by `timeoutSeconds` too.
async fn tunnel(
    client: OnUpgrade,
    pod: OnUpgrade,
    place: Place,
    until: Instant,
    stop: CancellationToken,
) {
    let carry = async {
        let (client, pod) = futures::future::try_join(client, pod).await?;
        let (mut client, mut pod) = (TokioIo::new(client), TokioIo::new(pod));
        let carried = tokio::io::copy_bidirectional(&mut client, &mut pod).await;
        debug!(pod = %place.pod.uid, ?carried, "upgraded connection ended");
        Ok::<_, hyper::Error>(())
    };
    tokio::select! {
        ended = carry => if let Err(error) = ended {
            debug!(pod = %place.pod.uid, %error, "upgrade failed");
        },
        () = tokio::time::sleep_until(until) => {
            info!(pod = %place.pod.uid, "upgraded connection ended: request timeout");
        }
        () = stop.cancelled() => {}
    }
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

/// Answers Knative's own probes (`pkg/activator/handler`, `networking/pkg/probe`).
fn probed(probe: &HeaderValue, head: &request::Parts) -> Response<Reply> {
    let answer = |status, text: String| {
        let mut response = Response::new(Reply::own(text));
        *response.status_mut() = status;
        response
    };
    match (probe.to_str().unwrap_or_default(), head.headers.get(K_NETWORK_HASH)) {
        ("activator", _) => answer(StatusCode::OK, "activator".to_owned()),
        ("probe", Some(hash)) => {
            let mut response = answer(StatusCode::OK, String::new());
            response.headers_mut().insert(K_NETWORK_HASH, hash.clone());
            response
        }
        ("probe", None) => {
            let text =
                format!("a probe request must contain a non-empty {K_NETWORK_HASH:?} header");
            answer(StatusCode::BAD_REQUEST, text)
        }
        (other, _) => {
            let text = format!("unexpected probe header value: {other:?}");
            answer(StatusCode::BAD_REQUEST, text)
        }
    }
}

/// A failure that is the client's (its body broke off or made no sense) is not blamed on the pod.
fn broken(address: std::net::SocketAddr, error: &hyper::Error) -> Failure {
    let reason = common::link::chain(error);
    if error.is_user() { Failure::BadRequest(reason) } else { Failure::Broken { address, reason } }
}
