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
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, info};

pub mod admission_review;
pub mod certificates;
pub mod configurations;
pub mod registration;

use admission_review::{AdmissionHook, AdmissionSettings};
use certificates::WebhookCertResolver;
use configurations::WebhookAddress;

use crate::shell::api::leader_election::Leadership;

/// Size limit of a request, in bytes. A request holds an object twice, and etcd stores objects up to 1.5 MiB.
const MAX_REVIEW_BYTES: usize = 8 << 20;
/// Time limit for a client's TLS handshake, and for the last responses at shutdown. The API server itself waits 10 s.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for the head of a request. It also counts while a connection is idle, and Go's HTTP client, the API
/// server's, keeps an idle connection for 90 s: a shorter limit could close a connection on which a request begins.
const HEAD_TIMEOUT: Duration = Duration::from_secs(120);
/// Limit of simultaneous connections; the API server needs a handful.
const MAX_CONNECTIONS: usize = 1024;

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
/// Function that returns the node to bind a new pod to, if any; the number selects among equal nodes.
pub type PodBinder = Arc<dyn Fn(&Value, u64) -> Option<String> + Send + Sync>;

/// Inputs of admission, beside the request.
#[derive(Clone)]
pub struct AdmissionContext {
    /// Source of the settings in force.
    pub settings: WebhookSettingsSource,
    /// Selects the node of a new pod.
    pub binder: PodBinder,
}

impl std::fmt::Debug for AdmissionContext {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("AdmissionContext").finish_non_exhaustive()
    }
}

impl AdmissionContext {
    /// Returns a context with these settings that binds no pods.
    pub fn without_binding(settings: WebhookSettingsSource) -> Self {
        Self { settings, binder: Arc::new(|_, _| None) }
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
    let (router, tasks) = (router(context), TaskTracker::new());
    let limit = Arc::new(tokio::sync::Semaphore::new(MAX_CONNECTIONS));
    loop {
        // The permit comes before the accept: beyond the limit clients wait in the kernel's backlog.
        let Ok(permit) = Arc::clone(&limit).acquire_owned().await else { break };
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Most likely out of file descriptors, which only a closed connection frees.
                    debug!(%error, "connection not accepted");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
            () = shutdown.cancelled() => break,
        };
        let (acceptor, router, stop) = (acceptor.clone(), router.clone(), shutdown.clone());
        tasks.spawn(async move {
            serve_connection(stream, acceptor, router, stop).await;
            drop(permit);
        });
    }
    // Requests received before the shutdown still get their responses.
    tasks.close();
    tasks.wait().await;
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

async fn serve_connection(
    stream: TcpStream,
    acceptor: TlsAcceptor,
    router: Router,
    stop: CancellationToken,
) {
    let accepted = tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await;
    let stream = match accepted {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            debug!(%error, "TLS handshake failed");
            return;
        }
        Err(_) => return,
    };
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    let serving = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    tokio::pin!(serving);
    tokio::select! {
        ended = serving.as_mut() => {
            if let Err(error) = ended {
                debug!(%error, "connection of the API server ended");
            }
        }
        () = stop.cancelled() => {
            serving.as_mut().graceful_shutdown();
            // An error here only ends the connection, and the API server reports it to its own client.
            let _ = tokio::time::timeout(HANDSHAKE_TIMEOUT, serving).await;
        }
    }
}

fn router(context: AdmissionContext) -> Router {
    let hook = |hook: AdmissionHook| {
        post(move |State(context): State<AdmissionContext>, body: Bytes| async move {
            let settings = (context.settings)();
            to_http_response(admission_review::respond_to_review(hook, &body, &settings))
        })
    };
    let binding = |State(context): State<AdmissionContext>, body: Bytes| async move {
        to_http_response(admission_review::respond_to_binding_review(&body, &*context.binder))
    };
    Router::new()
        .route("/defaulting", hook(AdmissionHook::Defaulting))
        .route("/resource-validation", hook(AdmissionHook::Validation))
        .route("/config-validation", hook(AdmissionHook::Config))
        .route("/binding", post(binding))
        .route("/healthz", get(|| async { "ok" }))
        .layer(DefaultBodyLimit::max(MAX_REVIEW_BYTES))
        .with_state(context)
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
