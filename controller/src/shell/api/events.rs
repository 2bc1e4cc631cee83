//! Shell: Kubernetes Events, which users read under `kubectl describe` and `kubectl events`.
//!
//! A repeated Event is counted instead of written again. The inbox here is bounded, so that no write of an object waits
//! for an Event.

mod recorder;

use std::sync::Arc;

use common::wire::NamespacedName;
use kube::Client;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use self::recorder::EventRecorder;
use super::metrics::ApiServerMetrics;
use crate::model::{
    knative::key::ACTIVATOR_PORT_ANNOTATION,
    object::{ObjectPartKey, ResourceKind, WriteError},
};

/// Maximum number of Events that wait to be written.
const INBOX_CAPACITY: usize = 1024;

/// An Event to write, and the object that it is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectEvent {
    /// Kind of the object.
    pub resource: ResourceKind,
    /// Namespace and name of the object.
    pub name: NamespacedName,
    /// UID of the object.
    pub uid: String,
    /// True for type `Warning`, false for `Normal`.
    pub is_warning: bool,
    /// Reason in one CamelCase word.
    pub reason: String,
    /// Explanation in one line.
    pub message: String,
}

/// Bounded inbox of Events; cheap to clone.
#[derive(Clone, Debug)]
pub struct EventInbox {
    sender: mpsc::Sender<ObjectEvent>,
    metrics: Arc<ApiServerMetrics>,
}

impl EventInbox {
    /// Records on its owner that an object was created; only for the kinds for which Knative does so.
    pub fn record_created(&self, key: &ObjectPartKey, body: &Value) {
        let is_recorded = match key.resource {
            ResourceKind::Configuration | ResourceKind::Route | ResourceKind::Revision => true,
            // Only a Route's placeholder Services bear this annotation; a Revision's own Services are details.
            ResourceKind::Service => {
                body["metadata"]["annotations"][ACTIVATOR_PORT_ANNOTATION].is_string()
            }
            _ => false,
        };
        let (kind, name) = (key.resource.kind(), &key.name.name);
        let message = format!("Created {kind} {name:?}");
        if let Some(owner) = owner_event(key, body).filter(|_| is_recorded) {
            self.record(ObjectEvent {
                is_warning: false,
                reason: "Created".into(),
                message,
                ..owner
            });
        }
    }

    /// Records a write error of an object, on its owner.
    pub fn record_write_error(&self, key: &ObjectPartKey, body: &Value, error: &WriteError) {
        if let Some(owner) = owner_event(key, body) {
            let message = format!("{key}: {}", error.message);
            self.record(ObjectEvent {
                is_warning: true,
                reason: error.reason.into(),
                message,
                ..owner
            });
        }
    }

    /// Records a write error on the object itself, which has this UID: the workload of a user, or a pod.
    pub fn record_workload_error(&self, key: &ObjectPartKey, uid: &str, error: &WriteError) {
        self.record(ObjectEvent {
            resource: key.resource,
            name: key.name.clone(),
            uid: uid.to_owned(),
            is_warning: true,
            reason: error.reason.into(),
            message: error.message.clone(),
        });
    }

    /// Queues an Event, or drops and counts it if the inbox is full.
    pub fn record(&self, event: ObjectEvent) {
        if self.sender.try_send(event).is_err() {
            self.metrics.count_lost_event();
        }
    }
}

/// Returns an empty Event about the object that controls the one of `body`.
fn owner_event(key: &ObjectPartKey, body: &Value) -> Option<ObjectEvent> {
    let owners = body["metadata"]["ownerReferences"].as_array()?;
    let owner = owners.iter().find(|it| it["controller"] == true)?;
    let text = |field: &str| owner[field].as_str().unwrap_or_default().to_owned();
    // The group is compared too: Knative and Kubernetes both have a kind `Service`.
    let is_owner_kind =
        |it: &ResourceKind| it.kind() == text("kind") && it.api_version() == text("apiVersion");
    Some(ObjectEvent {
        resource: ResourceKind::ALL.into_iter().find(is_owner_kind)?,
        name: NamespacedName::new(key.name.namespace.as_str(), text("name")),
        uid: text("uid"),
        is_warning: false,
        reason: String::new(),
        message: String::new(),
    })
}

/// Returns an inbox, and the task that writes its Events until `shutdown`.
pub fn event_recorder(
    client: Client,
    instance: &str,
    metrics: Arc<ApiServerMetrics>,
    shutdown: CancellationToken,
) -> (EventInbox, impl Future<Output = ()> + use<>) {
    let (events, mut receiver) = event_inbox(metrics);
    let mut recorder = EventRecorder::new(client, instance);
    let work = async move {
        loop {
            let next = tokio::select! {
                next = receiver.recv() => next,
                () = shutdown.cancelled() => None,
            };
            let Some(next) = next else { return };
            // Events are for information only: a lost one is not worth another attempt.
            if let Err(error) = recorder.publish(&next).await {
                debug!(object = %next.name, reason = next.reason, error = %error, "event not written");
            }
        }
    };
    (events, work)
}

fn event_inbox(metrics: Arc<ApiServerMetrics>) -> (EventInbox, mpsc::Receiver<ObjectEvent>) {
    let (inbox, receiver) = mpsc::channel(INBOX_CAPACITY);
    (EventInbox { sender: inbox, metrics }, receiver)
}

#[cfg(test)]
mod tests {
    use prometheus_client::{encoding::text::encode, registry::Registry};

    use super::*;

    /// docs/operations.md states the same number.
    #[test]
    fn of_more_events_than_may_wait_the_newest_are_left_out_and_counted() {
        let metrics = Arc::new(ApiServerMetrics::default());
        let (events, mut waiting) = event_inbox(metrics.clone());
        let numbered_event = |number: u32| ObjectEvent {
            resource: ResourceKind::Revision,
            name: NamespacedName::new("default", "hello-00001"),
            uid: String::new(),
            is_warning: false,
            reason: "Created".into(),
            message: number.to_string(),
        };
        (0..1_027).for_each(|number| events.record(numbered_event(number)));
        let (mut registry, mut page) = (Registry::default(), String::new());
        metrics.register(&mut registry);
        encode(&mut page, &registry).expect("text");
        assert!(page.contains("rouse_controller_kube_events_lost_total 3\n"), "{page}");
        let events = std::iter::from_fn(|| waiting.try_recv().ok());
        let events: Vec<ObjectEvent> = events.collect();
        assert_eq!((events.len(), events.last()), (1_024, Some(&numbered_event(1_023))));
    }
}
