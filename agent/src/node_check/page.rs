//! Shell: the page `/check` of the agent's admin port, which `rouse check` reads.

use std::{
    fmt::Write as _,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{Router, extract::State, http::StatusCode, response::IntoResponse, routing::get};
use tokio::{sync::Mutex, task::spawn_blocking};

use super::{
    canary::add_network_facts,
    facts::collect_host_facts,
    rules::{AgentFacts, check_node},
};
use crate::{
    config::AgentConfig, kernel::programs::count_foreign_programs, metrics::NotReadyReasons,
    paths::AgentPaths,
};

/// Time for which a check is served again: each client that reaches the node can ask for the page.
const REUSE_PERIOD: Duration = Duration::from_secs(5);

/// Source of the page.
struct CheckPage {
    config: AgentConfig,
    not_ready: NotReadyReasons,
    /// Last check and its time. The lock lets one check run at a time.
    last: Arc<Mutex<Option<(Instant, String)>>>,
}

/// Returns the page as a router of the admin port.
pub(crate) fn router(config: &AgentConfig, not_ready: &NotReadyReasons) -> Router {
    let page =
        CheckPage { config: config.clone(), not_ready: not_ready.clone(), last: Arc::default() };
    Router::new().route("/check", get(serve_check)).with_state(Arc::new(page))
}

async fn serve_check(State(page): State<Arc<CheckPage>>) -> impl IntoResponse {
    let mut last = Arc::clone(&page.last).lock_owned().await;
    if let Some((_, text)) = last.as_ref().filter(|(at, _)| at.elapsed() < REUSE_PERIOD) {
        return (StatusCode::OK, text.clone());
    }
    // The lock goes with the check: a client that leaves ends this function, but not the check.
    let check = move || {
        let text = page.run();
        *last = Some((Instant::now(), text.clone()));
        text
    };
    match spawn_blocking(check).await {
        Ok(text) => (StatusCode::OK, text),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}

impl CheckPage {
    /// Checks the node, and returns a line of fields for each result.
    fn run(&self) -> String {
        let mut facts = collect_host_facts();
        // Settings name the cgroups where a search finds several, as with nodes in containers.
        let paths = self.config.paths(facts.pods_cgroup.as_ref().ok().cloned());
        if let Some(AgentPaths { clients, pods, .. }) = &paths {
            facts.pods_cgroup = Ok(pods.clone());
            facts.foreign_programs = count_foreign_programs(clients, &[clients, pods]);
        }
        let mut agent = AgentFacts {
            clusterip: self.config.clusterip,
            without_kube_proxy: self.config.without_kube_proxy,
            not_ready: self.not_ready.lines(),
            ..AgentFacts::default()
        };
        add_network_facts(&mut agent, paths.as_ref().map(|paths| paths.pods.as_path()));
        facts.agent = Some(agent);
        let mut text = String::new();
        for line in check_node(&facts) {
            let _ = writeln!(text, "{}", line.to_fields());
        }
        text
    }
}
