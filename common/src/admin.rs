//! Shell: `/healthz`, `/readyz` and `/metrics` of a component.

use std::{net::SocketAddr, sync::Arc};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::IntoResponse,
    routing::get,
};
use prometheus_client::{encoding::text::encode, registry::Registry};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Content type of the text format that prometheus-client writes.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// State that a component shows on its admin port.
pub struct AdminState {
    /// Metrics that `/metrics` encodes, registered by the component.
    pub registry: Registry,
    /// Returns the not-ready reasons, one line each; an empty list means ready. Called for each `/readyz`.
    pub not_ready_reasons: Box<dyn Fn() -> Vec<String> + Send + Sync>,
}

impl std::fmt::Debug for AdminState {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let reasons = (self.not_ready_reasons)();
        out.debug_struct("AdminState").field("not_ready_reasons", &reasons).finish_non_exhaustive()
    }
}

/// Error of the admin port: its address cannot be bound, or accepting failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot serve admin endpoints on {address}")]
pub struct AdminError {
    address: SocketAddr,
    #[source]
    source: std::io::Error,
}

/// Serves `admin` at `address` until `shutdown`. `extra` adds the component's further pages.
///
/// `/healthz` answers 200 while the process runs. `/readyz` answers 200 when there is no not-ready reason, else 503
/// with the reasons as text. `/metrics` answers OpenMetrics text.
pub async fn serve(
    address: SocketAddr,
    admin: AdminState,
    extra: Router,
    shutdown: CancellationToken,
) -> Result<(), AdminError> {
    let failed = |source| AdminError { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let pages = Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(Arc::new(admin));
    let stop = shutdown.cancelled_owned();
    axum::serve(listener, pages.merge(extra)).with_graceful_shutdown(stop).await.map_err(failed)
}

async fn readyz(State(admin): State<Arc<AdminState>>) -> impl IntoResponse {
    // Readiness is computed at each request: a cached one would outlive its reason.
    match (admin.not_ready_reasons)() {
        reasons if reasons.is_empty() => (StatusCode::OK, "ok\n".to_owned()),
        reasons => (StatusCode::SERVICE_UNAVAILABLE, reasons.join("\n") + "\n"),
    }
}

async fn metrics(State(admin): State<Arc<AdminState>>) -> impl IntoResponse {
    let mut text = String::new();
    match encode(&mut text, &admin.registry) {
        Ok(()) => (StatusCode::OK, [(CONTENT_TYPE, OPENMETRICS)], text),
        Err(error) => {
            (StatusCode::INTERNAL_SERVER_ERROR, [(CONTENT_TYPE, "text/plain")], error.to_string())
        }
    }
}
