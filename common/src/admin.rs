//! Shell: `/healthz`, `/livez`, `/readyz` and `/metrics` of a component.

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

use crate::http_server::{self, HttpServerBounds};

/// Content type of the text format that prometheus-client writes.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// State that a component shows on its admin port.
pub struct AdminState {
    /// Metrics that `/metrics` encodes, registered by the component.
    pub registry: Registry,
    /// Returns the not-ready reasons, one line each; an empty list means ready. Called for each `/readyz`.
    pub not_ready_reasons: Box<dyn Fn() -> Vec<String> + Send + Sync>,
    /// Returns the reasons for which a health check fails, one line each. Called for each request.
    pub unhealthy_reasons: UnhealthyReasons,
}

/// Function from a health check to the reasons for which it fails.
pub type UnhealthyReasons = Box<dyn Fn(HealthCheck) -> Vec<String> + Send + Sync>;

/// Page that tells if a component is healthy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthCheck {
    /// `/healthz`, for load balancers that choose nodes.
    Healthz,
    /// `/livez`, for a supervisor that restarts the process if it fails.
    Livez,
}

impl AdminState {
    /// Returns the state of a component that is healthy while its process runs.
    pub fn always_healthy(
        registry: Registry,
        not_ready_reasons: Box<dyn Fn() -> Vec<String> + Send + Sync>,
    ) -> Self {
        Self { registry, not_ready_reasons, unhealthy_reasons: Box::new(|_| Vec::new()) }
    }
}

impl std::fmt::Debug for AdminState {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let reasons = (self.not_ready_reasons)();
        out.debug_struct("AdminState").field("not_ready_reasons", &reasons).finish_non_exhaustive()
    }
}

/// Error of the admin port: its address cannot be bound.
#[derive(Debug, thiserror::Error)]
#[error("cannot serve admin endpoints on {address}")]
pub struct AdminError {
    address: SocketAddr,
    #[source]
    source: std::io::Error,
}

/// Serves `admin` at `address` until `shutdown`. `extra` adds the component's further pages.
///
/// `/healthz` and `/livez` answer 200 while the component is healthy, and `/readyz` when it is ready; else each of them
/// answers 503 with the reasons as text. `/metrics` answers OpenMetrics text.
pub async fn serve(
    address: SocketAddr,
    admin: AdminState,
    extra: Router,
    shutdown: CancellationToken,
) -> Result<(), AdminError> {
    let bound = TcpListener::bind(address).await;
    let listener = bound.map_err(|source| AdminError { address, source })?;
    let pages = Router::new()
        .route("/healthz", get(healthz))
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(Arc::new(admin));
    http_server::serve(listener, pages.merge(extra), HttpServerBounds::DEFAULT, shutdown).await;
    Ok(())
}

async fn healthz(State(admin): State<Arc<AdminState>>) -> impl IntoResponse {
    check_response(&(admin.unhealthy_reasons)(HealthCheck::Healthz))
}

async fn livez(State(admin): State<Arc<AdminState>>) -> impl IntoResponse {
    check_response(&(admin.unhealthy_reasons)(HealthCheck::Livez))
}

async fn readyz(State(admin): State<Arc<AdminState>>) -> impl IntoResponse {
    // Readiness is computed at each request: a cached one would outlive its reason.
    check_response(&(admin.not_ready_reasons)())
}

fn check_response(reasons: &[String]) -> (StatusCode, String) {
    match reasons {
        [] => (StatusCode::OK, "ok\n".to_owned()),
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
