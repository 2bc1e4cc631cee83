//! Shell: `/healthz`, `/readyz` and `/metrics` of a part.

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

/// The text format that prometheus-client writes.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What a part shows of itself.
pub struct Admin {
    /// Its metrics.
    pub registry: Registry,
    /// What keeps it from doing its work, one line each; empty when it is ready.
    pub troubles: Box<dyn Fn() -> Vec<String> + Send + Sync>,
}

impl std::fmt::Debug for Admin {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Admin").field("troubles", &(self.troubles)()).finish()
    }
}

/// The admin port could not be served.
#[derive(Debug, thiserror::Error)]
#[error("cannot serve admin endpoints on {address}")]
pub struct AdminError {
    address: SocketAddr,
    #[source]
    source: std::io::Error,
}

/// Serves `admin` at `address` until `shutdown`. `extra` adds a part's own pages.
///
/// `/healthz` answers 200 while the process runs; `/readyz` 200 when there is no trouble, else 503 with the
/// troubles as text; `/metrics` OpenMetrics text.
pub async fn serve(
    address: SocketAddr,
    admin: Admin,
    extra: Router,
    shutdown: CancellationToken,
) -> Result<(), AdminError> {
    let failed = |source| AdminError { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let pages = Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(Arc::new(admin));
    let stop = shutdown.cancelled_owned();
    axum::serve(listener, pages.merge(extra)).with_graceful_shutdown(stop).await.map_err(failed)
}

async fn ready(State(admin): State<Arc<Admin>>) -> impl IntoResponse {
    match (admin.troubles)() {
        troubles if troubles.is_empty() => (StatusCode::OK, "ok\n".to_owned()),
        troubles => (StatusCode::SERVICE_UNAVAILABLE, troubles.join("\n") + "\n"),
    }
}

async fn metrics(State(admin): State<Arc<Admin>>) -> impl IntoResponse {
    let mut text = String::new();
    match encode(&mut text, &admin.registry) {
        Ok(()) => (StatusCode::OK, [(CONTENT_TYPE, OPENMETRICS)], text),
        Err(error) => {
            (StatusCode::INTERNAL_SERVER_ERROR, [(CONTENT_TYPE, "text/plain")], error.to_string())
        }
    }
}
