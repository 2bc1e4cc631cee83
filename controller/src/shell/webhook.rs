//! Shell: admission webhook, which the API server calls before it stores one of Rouse's objects.
//!
//! Every replica serves the webhook. The leader makes the certificate ([`certificates`]). It registers the webhook only
//! after it has called itself with this certificate ([`registration`], [`configurations`]). [`admission_review`]
//! computes the responses.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    body::Bytes,
    extract::{DefaultBodyLimit, State},
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use common::http_server::{self, HttpServerBounds};
use serde_json::Value;
use tokio::{
    net::{TcpListener, TcpStream},
    time::{Instant, sleep_until},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

pub mod admission_review;
pub mod certificates;
pub mod configurations;
pub mod registration;

use admission_review::{AdmissionHook, AdmissionSettings, BindingReview};
use certificates::WebhookCertResolver;
use configurations::{PLACEMENT_PATH, WebhookAddress};

use crate::{decide::pod_placement::PodPlacement, shell::api::leader_election::Leadership};

/// Size limit of a request, in bytes. A request holds an object twice, and etcd stores objects up to 1.5 MiB.
const MAX_REVIEW_BYTES: usize = 8 << 20;
/// Time limit for a client's TLS handshake. The API server itself waits 10 s.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait for the decision that ordered a pod. All replicas get it at the same time, but a busy one may be behind
/// the leader, whose order has created the pod meanwhile. Without the decision, the pod prefers no zone.
const ORDER_WAIT: Duration = Duration::from_millis(200);
/// Pause before the second check for it. Each pause is twice as long as the one before, up to the longest one: each
/// check takes the lock that the replica needs to catch up, and hundreds of reviews may wait.
const FIRST_ORDER_CHECK_PAUSE: Duration = Duration::from_millis(5);
/// Longest pause between two checks for it.
const LONGEST_ORDER_CHECK_PAUSE: Duration = Duration::from_millis(40);
/// Bounds for the clients of the webhook. An API server has a connection for each of its requests under way, of which
/// `--max-requests-inflight` and `--max-mutating-requests-inflight` allow 600 by default.
const BOUNDS: HttpServerBounds =
    HttpServerBounds { max_connections_per_client: 768, ..HttpServerBounds::DEFAULT };

/// Error that keeps the webhook from serving.
#[derive(Debug, thiserror::Error)]
pub enum WebhookError {
    /// The listening socket could not be opened.
    #[error("cannot listen for the API server on {address}")]
    Listen {
        /// Address of the listening socket.
        address: SocketAddr,
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// The TLS configuration could not be made.
    #[error("cannot set TLS up for the API server")]
    Tls(#[from] rustls::Error),
}

/// Source of the settings in force, called for each request.
pub type WebhookSettingsSource = Arc<dyn Fn() -> Arc<AdmissionSettings> + Send + Sync>;
/// Function that returns the placement of a new pod, if any; the number selects among equal nodes.
pub type PodPlacer = Arc<dyn Fn(&Value, u64) -> Option<PodPlacement> + Send + Sync>;
/// Function that returns true once this replica knows the decision that ordered a new pod.
pub type PodOrderCheck = Arc<dyn Fn(&Value) -> bool + Send + Sync>;

/// Inputs of admission, beside the request.
#[derive(Clone)]
pub struct AdmissionContext {
    /// Source of the settings in force.
    pub settings: WebhookSettingsSource,
    /// Selects the placement of a new pod.
    pub placer: PodPlacer,
    /// Tells whether the placement of a new pod can be selected already.
    pub order_check: PodOrderCheck,
}

impl std::fmt::Debug for AdmissionContext {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("AdmissionContext").finish_non_exhaustive()
    }
}

impl AdmissionContext {
    /// Returns a context with these settings that places no pods.
    pub fn without_placement(settings: WebhookSettingsSource) -> Self {
        Self { settings, placer: Arc::new(|_, _| None), order_check: Arc::new(|_| true) }
    }
}

/// Serves the API server until `shutdown`, then finishes the requests that were received before.
pub async fn serve(
    listener: TcpListener,
    certificates: Arc<WebhookCertResolver>,
    context: AdmissionContext,
    shutdown: CancellationToken,
) -> Result<(), WebhookError> {
    let acceptor = TlsAcceptor::from(Arc::new(certificates.server_config()?));
    let handshake = |stream: TcpStream| accept_tls(acceptor.clone(), stream);
    http_server::serve_prepared(listener, router(context), BOUNDS, shutdown, handshake).await;
    info!("webhook stopped");
    Ok(())
}

/// Serves the webhook on an address with `certificates`, and keeps the webhook registered, until `shutdown`.
///
/// `webhook_address` is the address of the webhook for the API server; its port equals that of `address`.
pub async fn run(
    client: kube::Client,
    (address, webhook_address): (SocketAddr, WebhookAddress),
    certificates: Arc<WebhookCertResolver>,
    leadership: Leadership,
    context: AdmissionContext,
    shutdown: CancellationToken,
) -> Result<(), WebhookError> {
    let listener = listen(address).await?;
    let stop = shutdown.child_token();
    let ended = stop.clone().drop_guard();
    let shared_certificates = Arc::clone(&certificates);
    let keeping = registration::keep_registered(
        client,
        webhook_address,
        shared_certificates,
        context.settings.clone(),
        leadership,
        stop.clone(),
    );
    let serving = serve(listener, certificates, context, stop);
    let ((), served) = tokio::join!(keeping, async {
        let served = serving.await;
        // Without a server the registration must not be renewed any more.
        ended.disarm().cancel();
        served
    });
    served
}

/// Opens the listening socket for the API server.
pub async fn listen(address: SocketAddr) -> Result<TcpListener, WebhookError> {
    let bound = TcpListener::bind(address).await;
    bound.map_err(|source| WebhookError::Listen { address, source })
}

/// Returns the stream of a client after its TLS handshake; `None`: it failed or took too long.
async fn accept_tls(acceptor: TlsAcceptor, stream: TcpStream) -> Option<TlsStream<TcpStream>> {
    match tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => Some(stream),
        Ok(Err(error)) => {
            debug!(%error, "TLS handshake failed");
            None
        }
        Err(_) => None,
    }
}

/// Returns the routes of the webhook: the three hooks of Knative, and that for the placement of pods.
fn router(context: AdmissionContext) -> Router {
    let hook = |hook: AdmissionHook| {
        post(move |State(context): State<AdmissionContext>, body: Bytes| async move {
            let settings = (context.settings)();
            to_http_response(admission_review::respond_to_review(hook, &body, &settings))
        })
    };
    let placement = |State(context): State<AdmissionContext>, body: Bytes| async move {
        let review = match BindingReview::decode(&body) {
            Ok(review) => review,
            Err(error) => return to_http_response(Err(error)),
        };
        if let Some(pod) = review.pod() {
            wait_for_order(&context.order_check, pod).await;
        }
        to_http_response(review.respond(&*context.placer))
    };
    Router::new()
        .route("/defaulting", hook(AdmissionHook::Defaulting))
        .route("/resource-validation", hook(AdmissionHook::Validation))
        .route("/config-validation", hook(AdmissionHook::Config))
        .route(PLACEMENT_PATH, post(placement))
        // A leader of an earlier release registers this path.
        .route("/binding", post(placement))
        .route("/healthz", get(|| async { "ok" }))
        .layer(DefaultBodyLimit::max(MAX_REVIEW_BYTES))
        .with_state(context)
}

/// Waits until this replica knows the decision that ordered a pod, for [`ORDER_WAIT`] at most.
async fn wait_for_order(is_known: &PodOrderCheck, pod: &Value) {
    let deadline = Instant::now() + ORDER_WAIT;
    let mut pause = FIRST_ORDER_CHECK_PAUSE;
    while !is_known(pod) && Instant::now() < deadline {
        sleep_until(deadline.min(Instant::now() + pause)).await;
        pause = LONGEST_ORDER_CHECK_PAUSE.min(pause * 2);
    }
}

fn to_http_response(result: Result<Vec<u8>, admission_review::ReviewDecodeError>) -> Response {
    match result {
        Ok(result) => {
            let json = HeaderValue::from_static("application/json");
            ([(header::CONTENT_TYPE, json)], result).into_response()
        }
        Err(error) => (StatusCode::BAD_REQUEST, error.to_string()).into_response(),
    }
}

#[cfg(test)]
mod tests;
