//! Shell: health and metrics pages of the agent, and those about its services and its pods on standby.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Router,
    extract::{RawQuery, State},
    http::{
        StatusCode,
        header::{CONTENT_LENGTH, CONTENT_TYPE},
    },
    response::{IntoResponse, Response},
    routing::get,
};
use common::{admin::AdminState, page_body::page_body};
use prometheus_client::registry::Registry;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use crate::{
    health::ProxyHealth,
    metrics::{AgentMetrics, NotReadyReasons},
    routes::plan::ServiceCursor,
    service_facts::{FrontendFacts, NodeFacts, NodeServices, TraceFacts, TraceTarget},
    standby_page::NodeStandby,
    usage::{
        revision_metrics::RevisionTotalsCollector, revision_totals_store::SharedRevisionTotals,
    },
};

/// Longest time for the answer to one page of facts, and then for its client to read it.
const PAGE_TIMEOUT: Duration = Duration::from_secs(10);

/// Question of a page to the loop, which has the facts.
#[derive(Debug)]
pub(crate) enum FactsQuery {
    /// Next services from this position on.
    Services(ServiceCursor, oneshot::Sender<ServicesChunk>),
    /// Choice for one connect.
    Trace(TraceTarget, oneshot::Sender<TraceFacts>),
    /// Pods of this node with a standby order.
    Standby(oneshot::Sender<NodeStandby>),
}

/// Part of the answer to [`FactsQuery::Services`].
#[derive(Debug)]
pub(crate) struct ServicesChunk {
    /// State and mode of the agent.
    pub(crate) node: NodeFacts,
    /// Frontends of the next services.
    pub(crate) services: Vec<FrontendFacts>,
    /// Position behind them; `None` at the end.
    pub(crate) next: Option<ServiceCursor>,
}

/// Makes the agent's metrics, and the registry that exports them and the totals of Revisions.
pub(crate) fn metrics_registry(revisions: SharedRevisionTotals) -> (AgentMetrics, Registry) {
    let (metrics, mut registry) = AgentMetrics::new();
    registry.register_collector(Box::new(RevisionTotalsCollector(revisions)));
    (metrics, registry)
}

/// Returns the content of the pages that all components have.
pub(crate) fn pages(
    registry: Registry,
    not_ready: NotReadyReasons,
    health: ProxyHealth,
) -> AdminState {
    AdminState {
        registry,
        not_ready_reasons: Box::new(move || not_ready.lines()),
        unhealthy_reasons: Box::new(move |check| health.unhealthy_reasons(check, Instant::now())),
    }
}

/// Returns the pages of facts, and the questions that they ask the loop.
///
/// `/debug/services` has the frontends of all services, and `/debug/trace?to=IP:PORT` the choice for one connect.
/// `/debug/standby` has the pods of this node with a standby order. The loop answers between its other work, a part of
/// a page at a time.
pub(crate) fn facts_pages() -> (Router, mpsc::Receiver<FactsQuery>) {
    let (queries, receiver) = mpsc::channel(1);
    let source = FactsSource { queries, turn: Arc::new(Semaphore::new(1)) };
    let pages = Router::new()
        .route("/debug/services", get(services_page))
        .route("/debug/trace", get(trace_page))
        .route("/debug/standby", get(standby_page))
        .with_state(source);
    (pages, receiver)
}

/// Way of the pages to the loop.
#[derive(Clone, Debug)]
struct FactsSource {
    queries: mpsc::Sender<FactsQuery>,
    /// One page at a time: clients must not take more of the loop and of the memory than that, however many they are.
    turn: Arc<Semaphore>,
}

async fn services_page(State(source): State<FactsSource>) -> Response {
    page_response(source.within_timeout(source.services()).await)
}

async fn trace_page(State(source): State<FactsSource>, RawQuery(query): RawQuery) -> Response {
    match TraceTarget::from_query(&query.unwrap_or_default()) {
        Ok(target) => {
            let trace = source.ask(|reply| FactsQuery::Trace(target, reply));
            page_response(source.within_timeout(trace).await)
        }
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
    }
}

async fn standby_page(State(source): State<FactsSource>) -> Response {
    page_response(source.within_timeout(source.ask(FactsQuery::Standby)).await)
}

fn page_response<T: serde::Serialize>(facts: Option<(T, OwnedSemaphorePermit)>) -> Response {
    let Some((facts, turn)) = facts else {
        let reason = "the agent does not answer now: it starts, or is busy; see /readyz\n";
        return (StatusCode::SERVICE_UNAVAILABLE, reason).into_response();
    };
    match serde_json::to_vec(&facts) {
        Ok(text) => {
            let headers = [
                (CONTENT_TYPE, "application/json".to_owned()),
                // The body comes in parts, so the HTTP server cannot know its length.
                (CONTENT_LENGTH, text.len().to_string()),
            ];
            (headers, page_body(text, turn, PAGE_TIMEOUT)).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

impl FactsSource {
    /// Waits for the facts of a page, but not too long. Returns them with the turn of the page.
    async fn within_timeout<T>(
        &self,
        facts: impl Future<Output = Option<T>>,
    ) -> Option<(T, OwnedSemaphorePermit)> {
        let in_turn = async {
            let turn = Arc::clone(&self.turn).acquire_owned().await.ok()?;
            Some((facts.await?, turn))
        };
        tokio::time::timeout(PAGE_TIMEOUT, in_turn).await.ok().flatten()
    }

    /// Asks the loop; `None` if it has ended.
    async fn ask<T>(&self, query: impl FnOnce(oneshot::Sender<T>) -> FactsQuery) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.queries.send(query(reply)).await.ok()?;
        answer.await.ok()
    }

    /// Collects the facts about all services. Each part is of one moment; the parts are of several.
    async fn services(&self) -> Option<NodeServices> {
        let mut all = NodeServices { node: NodeFacts::default(), services: Vec::new() };
        let mut cursor = Some(ServiceCursor::START);
        while let Some(position) = cursor {
            let chunk = self.ask(|reply| FactsQuery::Services(position, reply)).await?;
            all.node = chunk.node;
            all.services.extend(chunk.services);
            cursor = chunk.next;
        }
        Some(all)
    }
}

#[cfg(test)]
mod tests {
    use common::admin::HealthCheck;

    use super::*;
    use crate::service_facts::{FrontendMode, ServiceSource, TraceOutcome};

    #[test]
    fn a_not_ready_reason_shows_until_it_is_removed() {
        let not_ready = NotReadyReasons::default();
        let admin = pages(Registry::default(), not_ready.clone(), ProxyHealth::default());
        not_ready.set("kernel", Some("connect was not redirected".into()));
        assert_eq!((admin.not_ready_reasons)(), ["kernel: connect was not redirected"]);
        not_ready.set("kernel", None);
        assert!((admin.not_ready_reasons)().is_empty());
    }

    #[test]
    fn the_node_s_deletion_fails_healthz_and_not_livez() {
        let health = ProxyHealth::default();
        let admin = pages(Registry::default(), NotReadyReasons::default(), health.clone());
        health.set_deletion_reason(Some("gone"));
        assert_eq!((admin.unhealthy_reasons)(HealthCheck::Healthz), ["node: gone"]);
        assert_eq!((admin.unhealthy_reasons)(HealthCheck::Livez), [""; 0]);
    }

    fn frontend(name: &str, source: ServiceSource) -> FrontendFacts {
        FrontendFacts {
            namespace: "default".into(),
            name: name.into(),
            source,
            address: "10.96.0.1:80".parse().unwrap(),
            protocol: "TCP".into(),
            mode: FrontendMode::Pods,
            reason: None,
            listed: Some(1),
            known: Some(2),
            affinity_seconds: 0,
        }
    }

    /// Answers queries as the loop does: one service in each part.
    async fn answer(mut queries: mpsc::Receiver<FactsQuery>) {
        let mut answered = 0;
        while let Some(query) = queries.recv().await {
            answered += 1;
            match query {
                FactsQuery::Services(_, reply) => {
                    let services = vec![frontend(&format!("s{answered}"), ServiceSource::Service)];
                    let next = (answered < 3).then_some(ServiceCursor::START);
                    let node = NodeFacts { name: "n1".into(), ..NodeFacts::default() };
                    reply.send(ServicesChunk { node, services, next }).expect("a page waits");
                }
                FactsQuery::Trace(target, reply) => {
                    let facts = TraceFacts {
                        node: NodeFacts::default(),
                        to: target.to,
                        protocol: target.protocol_name().into(),
                        outcome: TraceOutcome::Unchanged,
                        reason: "no".into(),
                        frontend: None,
                        hints: None,
                        candidates: Vec::new(),
                        kube_proxy: None,
                        exceptions: Vec::new(),
                    };
                    reply.send(facts).expect("a page waits");
                }
                FactsQuery::Standby(reply) => {
                    let node = NodeFacts { name: "n1".into(), ..NodeFacts::default() };
                    reply.send(NodeStandby::new(node, [])).expect("a page waits");
                }
            }
        }
    }

    fn source() -> (FactsSource, mpsc::Receiver<FactsQuery>) {
        let (queries, receiver) = mpsc::channel(1);
        (FactsSource { queries, turn: Arc::new(Semaphore::new(1)) }, receiver)
    }

    #[tokio::test]
    async fn the_page_of_services_joins_all_parts() {
        let (source, receiver) = source();
        tokio::spawn(answer(receiver));
        let (page, _turn) = source.within_timeout(source.services()).await.expect("answered");
        let names: Vec<_> = page.services.iter().map(|it| it.name.as_str()).collect();
        assert_eq!((names, page.node.name.as_str()), (vec!["s1", "s2", "s3"], "n1"));
    }

    #[tokio::test]
    async fn the_page_of_standby_has_what_the_loop_answers() {
        let (source, receiver) = source();
        tokio::spawn(answer(receiver));
        let page = standby_page(State(source)).await;
        assert_eq!(page.status(), StatusCode::OK);
        let text = axum::body::to_bytes(page.into_body(), usize::MAX).await.expect("in time");
        let read: NodeStandby = serde_json::from_slice(&text).expect("it is the page");
        assert_eq!((read.node.name.as_str(), read.pods.len()), ("n1", 0));
    }

    #[tokio::test]
    async fn a_page_fails_with_503_when_the_loop_has_ended_and_400_without_an_address() {
        let (source, receiver) = source();
        drop(receiver);
        let services = services_page(State(source.clone())).await;
        assert_eq!(services.status(), StatusCode::SERVICE_UNAVAILABLE);
        let query = RawQuery(Some("to=web".to_owned()));
        let trace = trace_page(State(source.clone()), query).await;
        assert_eq!(trace.status(), StatusCode::BAD_REQUEST);
        let query = RawQuery(Some("to=10.96.0.1:80".to_owned()));
        let trace = trace_page(State(source.clone()), query).await;
        assert_eq!(trace.status(), StatusCode::SERVICE_UNAVAILABLE);
        let standby = standby_page(State(source)).await;
        assert_eq!(standby.status(), StatusCode::SERVICE_UNAVAILABLE);
    }
}
