//! Shell: all objects that matter, trimmed on arrival, as one stream.
//!
//! The library resumes a watch where it broke, lists again when the API server has forgotten that place (410), and
//! waits longer, by chance, between attempts. A list comes in pages, so memory is bounded by the largest kind.

use std::{sync::Arc, time::Duration};

use common::wire::Name;
use futures::{Stream, StreamExt as _};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DynamicObject, PartialObjectMeta},
    core::DynamicResourceScope,
    runtime::{
        WatchStreamExt as _,
        utils::Backoff,
        watcher::{self, DefaultBackoff, Event, watcher},
    },
};
use serde_json::Value;
use tokio::{sync::mpsc, task::JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    client::api_resource,
    metrics::Metrics,
    scope::{self, Scope},
};
use crate::children::Resource;

/// Objects in one page of a list.
const PAGE: u32 = 500;
/// Observations that may wait; a watch that is full waits for us.
const ROOM: usize = 1024;
/// The longest pause before a broken watch is begun again. The library's, 30 s, is a time in which a replica does not know
/// of new services though the API server is back; we are few, so that asking more often is no burden on it.
const PAUSE: Duration = Duration::from_secs(5);

/// What a watch says.
#[derive(Clone, Debug, PartialEq)]
pub enum Observed {
    /// All objects that this watch covers will be named now.
    Begin(Arc<Scope>),
    /// An object as it is, trimmed.
    Object(Resource, Name, Box<Value>),
    /// An object is gone.
    Gone(Resource, Name),
    /// All of them have been named.
    Synced(Arc<Scope>),
}

/// Watches everything until `shutdown`.
pub fn watch(
    client: &Client,
    system_namespace: &str,
    metrics: &Arc<Metrics>,
    shutdown: &CancellationToken,
) -> mpsc::Receiver<Observed> {
    let (sender, receiver) = mpsc::channel(ROOM);
    let mut tasks = JoinSet::new();
    for scope in scope::scopes(system_namespace) {
        let (client, sender) = (client.clone(), sender.clone());
        let metrics = Arc::clone(metrics);
        tasks.spawn(follow(client, Arc::new(scope), sender, metrics));
    }
    let shutdown = shutdown.clone();
    tokio::spawn(async move {
        shutdown.cancelled().await;
        // Dropping it ends them.
        drop(tasks);
    });
    receiver
}

async fn follow(
    client: Client,
    scope: Arc<Scope>,
    sender: mpsc::Sender<Observed>,
    metrics: Arc<Metrics>,
) {
    let resource = scope.resource;
    let kind = api_resource(resource);
    let mut config = watcher::Config::default().page_size(PAGE);
    if let Some(labels) = scope.labels {
        config = config.labels(labels);
    }
    if scope.metadata_only {
        let api: Api<PartialObjectMeta<DynamicObject>> = api(client, &scope, &kind);
        forward(scope, watcher(api, config).backoff(Pauses::default()), sender, metrics).await;
    } else {
        let api: Api<DynamicObject> = api(client, &scope, &kind);
        forward(scope, watcher(api, config).backoff(Pauses::default()), sender, metrics).await;
    }
}

/// How long a broken watch waits before it is begun again: longer and longer, by chance, up to [`PAUSE`].
#[derive(Default)]
pub(super) struct Pauses(DefaultBackoff);

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.0.next().map(|pause| pause.min(PAUSE))
    }
}

impl Backoff for Pauses {
    fn reset(&mut self) {
        self.0.reset();
    }
}

fn api<K>(client: Client, scope: &Scope, kind: &ApiResource) -> Api<K>
where
    K: kube::Resource<DynamicType = ApiResource, Scope = DynamicResourceScope>,
{
    match &scope.namespace {
        Some(namespace) => Api::namespaced_with(client, namespace, kind),
        None => Api::all_with(client, kind),
    }
}

async fn forward<K: kube::Resource + serde::Serialize>(
    scope: Arc<Scope>,
    events: impl Stream<Item = watcher::Result<Event<K>>>,
    sender: mpsc::Sender<Observed>,
    metrics: Arc<Metrics>,
) {
    let resource = scope.resource;
    let mut events = std::pin::pin!(events);
    let mut broken = false;
    while let Some(event) = events.next().await {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                metrics.restarted(resource);
                if !broken {
                    warn!(resource = %resource, error = %chain(&error), "watch broke and is begun again");
                }
                broken = true;
                continue;
            }
        };
        if std::mem::take(&mut broken) {
            info!(resource = %resource, "watch works again");
        }
        metrics.watched(resource);
        let observed = match event {
            Event::Init => Observed::Begin(Arc::clone(&scope)),
            Event::InitDone => Observed::Synced(Arc::clone(&scope)),
            Event::Delete(object) => Observed::Gone(resource, name(&object)),
            Event::Apply(object) | Event::InitApply(object) => {
                let name = name(&object);
                let Ok(mut value) = serde_json::to_value(object) else { continue };
                scope::trim(resource, &mut value);
                Observed::Object(resource, name, Box::new(value))
            }
        };
        if sender.send(observed).await.is_err() {
            return;
        }
    }
}

fn name(object: &impl kube::Resource) -> Name {
    Name::new(object.namespace().unwrap_or_default(), object.name_any())
}

/// An error with all its causes, in one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_stay_below_the_longest() {
        let mut pauses = Pauses::default();
        let all: Vec<Duration> = pauses.by_ref().take(20).collect();
        assert!(all[0] < PAUSE && all.iter().all(|it| *it <= PAUSE), "{all:?}");
        assert_eq!(all[19], PAUSE, "it never ends, and reaches the longest");
    }
}
