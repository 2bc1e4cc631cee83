//! Shell: watches of all kinds, trimmed on arrival, as one stream.
//!
//! At the start a kind is listed after the kinds that it depends on. So each object can be handled as it comes and none
//! is held: a hundred thousand pods are gigabytes.
//!
//! A list comes in pages, so the largest kind bounds the memory.

use std::{sync::Arc, time::Duration};

use common::wire::NamespacedName;
use futures::{Stream, StreamExt as _};
use kube::{
    Api, Client, ResourceExt as _,
    runtime::watcher::{self, Event},
};
use serde_json::Value;
use tokio::{sync::mpsc, task::JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use watches::{OutageChange, WatchOutage, watch_events};

use super::{
    client::api_resource,
    metrics::ApiServerMetrics,
    object_cache::ObservedObject,
    watch_scope::{self, WatchScope},
    watched_object::{
        DeploymentShape, FullShape, ObjectShape, PodShape, UserHpaShape, UserPodShape,
        UserWorkloadShape, WatchedObject, WriteOnlyShape,
    },
};
use crate::model::object::ResourceKind;

/// Maximum number of objects in one page of a list.
const LIST_PAGE_SIZE: u32 = 500;
/// Maximum number of observations that wait; when the channel is full, watches pause.
const CHANNEL_CAPACITY: usize = 1024;
/// Longest delay before a broken watch is begun again. With kube's 30 s, a replica would not know new services
/// for that time after the API server is back. Controllers are few, so more attempts are no burden on it.
pub(crate) const MAX_PAUSE: Duration = Duration::from_secs(5);

/// Observation from a watch.
#[derive(Clone, Debug, PartialEq)]
pub enum WatchUpdate {
    /// A full list of this scope begins.
    ListBegun(Arc<WatchScope>),
    /// An object exists, or has changed.
    Object {
        resource: ResourceKind,
        name: NamespacedName,
        /// Record that the writer keeps of the object.
        observed: ObservedObject,
        /// The object without the fields that are not read.
        object: Box<Value>,
    },
    /// An object was deleted, or has left this scope.
    Deleted { scope: Arc<WatchScope>, resource: ResourceKind, name: NamespacedName },
    /// The full list of this scope is complete.
    ListCompleted(Arc<WatchScope>),
}

/// Watches these scopes until `shutdown`.
pub fn start_watches(
    client: &Client,
    scopes: Vec<WatchScope>,
    metrics: &Arc<ApiServerMetrics>,
    shutdown: &CancellationToken,
) -> mpsc::Receiver<WatchUpdate> {
    let (sender, receiver) = mpsc::channel(CHANNEL_CAPACITY);
    let mut tasks = JoinSet::new();
    let pending_lists = PendingLists::new(&scopes);
    for scope in scopes {
        let watch = WatchTask {
            scope: Arc::new(scope),
            sender: sender.clone(),
            metrics: Arc::clone(metrics),
            pending_lists: pending_lists.clone(),
            has_listed: false,
        };
        tasks.spawn(watch.run(client.clone()));
    }
    let shutdown = shutdown.clone();
    tokio::spawn(async move {
        shutdown.cancelled().await;
        // Dropping the set aborts its tasks.
        drop(tasks);
    });
    receiver
}

/// Numbers of watches by [position](watch_scope::list_position) whose first list is not complete. Cheap to clone.
#[derive(Clone, Debug)]
struct PendingLists(Arc<tokio::sync::watch::Sender<Vec<usize>>>);

impl PendingLists {
    fn new(scopes: &[WatchScope]) -> Self {
        let mut left = Vec::new();
        for position in scopes.iter().filter_map(|it| watch_scope::list_position(it.resource)) {
            left.resize(left.len().max(position + 1), 0);
            left[position] += 1;
        }
        Self(Arc::new(tokio::sync::watch::Sender::new(left)))
    }

    /// Waits until all kinds before this one are listed.
    async fn wait_for_turn(&self, resource: ResourceKind) {
        let position = watch_scope::list_position(resource).unwrap_or(0);
        let mut left = self.0.subscribe();
        // It cannot fail: `self` holds the sender.
        let _ = left.wait_for(|left| left.iter().take(position).all(|it| *it == 0)).await;
    }

    /// Counts a watch of this kind whose first list is complete.
    fn complete_list(&self, resource: ResourceKind) {
        if let Some(position) = watch_scope::list_position(resource) {
            self.0.send_modify(|left| left[position] -= 1);
        }
    }
}

/// Task of one watch.
struct WatchTask {
    scope: Arc<WatchScope>,
    sender: mpsc::Sender<WatchUpdate>,
    metrics: Arc<ApiServerMetrics>,
    pending_lists: PendingLists,
    /// True once the first list is complete.
    has_listed: bool,
}

impl WatchTask {
    /// Waits for the turn of the kind, and watches its objects in the shape that the controller needs.
    async fn run(self, client: Client) {
        // The list waits, so that the objects to which the listed ones refer are known.
        self.pending_lists.wait_for_turn(self.scope.resource).await;
        let is_of_revisions = self.scope.has_revision_label == Some(true);
        match self.scope.resource {
            ResourceKind::Pod if is_of_revisions => self.watch_kind::<PodShape>(client).await,
            ResourceKind::Pod => self.watch_kind::<UserPodShape>(client).await,
            ResourceKind::Deployment if is_of_revisions => {
                self.watch_kind::<DeploymentShape>(client).await
            }
            ResourceKind::Deployment | ResourceKind::StatefulSet => {
                self.watch_kind::<UserWorkloadShape>(client).await
            }
            ResourceKind::HorizontalPodAutoscaler if !is_of_revisions => {
                self.watch_kind::<UserHpaShape>(client).await
            }
            ResourceKind::PodAutoscaler
            | ResourceKind::ServerlessService
            | ResourceKind::HorizontalPodAutoscaler
            | ResourceKind::Metric
            | ResourceKind::Image
            | ResourceKind::Ingress => self.watch_kind::<WriteOnlyShape>(client).await,
            _ => self.watch_kind::<FullShape>(client).await,
        }
    }

    async fn watch_kind<S: ObjectShape>(self, client: Client) {
        let kind = api_resource(self.scope.resource);
        let mut config = watcher::Config::default().page_size(LIST_PAGE_SIZE);
        if let Some(labels) = self.scope.label_selector {
            config = config.labels(labels);
        }
        let api: Api<WatchedObject<S>> = match &self.scope.namespace {
            Some(namespace) => Api::namespaced_with(client, namespace, &kind),
            None => Api::all_with(client, &kind),
        };
        self.forward(watch_events(api, config, MAX_PAUSE)).await;
    }

    /// Sends the events of a watch as updates until the receiver is gone.
    async fn forward<S: ObjectShape>(
        mut self,
        events: impl Stream<Item = watcher::Result<Event<WatchedObject<S>>>>,
    ) {
        let resource = self.scope.resource;
        let mut events = std::pin::pin!(events);
        let mut outage = WatchOutage::default();
        while let Some(event) = events.next().await {
            let change = outage.record(&event);
            let event = match event {
                Ok(event) => event,
                Err(error) => {
                    self.metrics.count_watch_restart(resource);
                    if change == Some(OutageChange::Began) {
                        warn!(resource = %resource, error = %error_chain(&error), "watch broke and is begun again");
                    }
                    // The stream of events begins the watch again by itself, after a pause.
                    continue;
                }
            };
            if change == Some(OutageChange::Ended) {
                info!(resource = %resource, "watch works again");
            }
            self.metrics.count_watch_event(resource);
            let is_listed = matches!(event, Event::InitDone);
            if self.sender.send(self.to_update(event)).await.is_err() {
                return;
            }
            // Later lists, after a lost watch, do not hold up other kinds.
            if is_listed && !std::mem::replace(&mut self.has_listed, true) {
                self.pending_lists.complete_list(resource);
            }
        }
    }

    fn to_update<S: ObjectShape>(&self, event: Event<WatchedObject<S>>) -> WatchUpdate {
        let resource = self.scope.resource;
        match event {
            Event::Init => WatchUpdate::ListBegun(Arc::clone(&self.scope)),
            Event::InitDone => WatchUpdate::ListCompleted(Arc::clone(&self.scope)),
            Event::Delete(object) => {
                let (scope, name) = (Arc::clone(&self.scope), object_name(&object));
                WatchUpdate::Deleted { scope, resource, name }
            }
            Event::Apply(object) | Event::InitApply(object) => {
                let (name, mut value) = (object_name(&object), object.value);
                watch_scope::trim_object(&self.scope, &mut value);
                WatchUpdate::Object {
                    resource,
                    name,
                    observed: ObservedObject::from_object(&value),
                    object: Box::new(value),
                }
            }
        }
    }
}

fn object_name(object: &impl kube::Resource) -> NamespacedName {
    NamespacedName::new(object.namespace().unwrap_or_default(), object.name_any())
}

/// Returns an error with all its causes, in one line.
pub(crate) fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        // Many errors repeat their cause in their own text.
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

    #[tokio::test]
    async fn a_kind_is_listed_when_all_watches_of_those_before_it_have_been() {
        let pending_lists = PendingLists::new(&watch_scope::watch_scopes("default-system"));
        let may_list = |resource| {
            let pending_lists = pending_lists.clone();
            async move {
                let turn = pending_lists.wait_for_turn(resource);
                tokio::time::timeout(Duration::ZERO, turn).await.is_ok()
            }
        };
        assert!(may_list(ResourceKind::ConfigMap).await && may_list(ResourceKind::Metric).await);
        assert!(!may_list(ResourceKind::Namespace).await);
        pending_lists.complete_list(ResourceKind::Metric);
        assert!(!may_list(ResourceKind::Namespace).await, "nothing depends on those");
        let earlier = [
            ResourceKind::ConfigMap,
            ResourceKind::Namespace,
            ResourceKind::NetworkPolicy,
            ResourceKind::Node,
            ResourceKind::Service,
            ResourceKind::Configuration,
            ResourceKind::Revision,
            ResourceKind::Deployment,
            ResourceKind::EndpointSlice,
        ];
        for resource in earlier {
            assert!(!may_list(ResourceKind::Pod).await, "{resource} is not there yet");
            pending_lists.complete_list(resource);
        }
        assert!(may_list(ResourceKind::Pod).await && !may_list(ResourceKind::Route).await);
        pending_lists.complete_list(ResourceKind::Pod);
        assert!(!may_list(ResourceKind::Route).await, "those of the system are another watch's");
        pending_lists.complete_list(ResourceKind::Pod);
        assert!(may_list(ResourceKind::Route).await);
    }
}
