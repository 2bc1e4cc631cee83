//! Shell: Kubernetes Events, which users read under `kubectl describe` and `kubectl events`.
//!
//! kube's recorder counts a repeated event instead of writing another one. The inbox here is bounded, so that no
//! write of an object waits for an Event.

use std::sync::Arc;

use common::wire::NamespacedName;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::metrics::ApiServerMetrics;
use crate::model::{
    knative::key::ACTIVATOR_PORT_ANNOTATION,
    object::{ObjectPartKey, ResourceKind, WriteError},
};

/// Longest note and longest name of a reporting instance in bytes: the API server refuses longer ones
/// (kubernetes `pkg/apis/core/validation/events.go`).
const MAX_NOTE_BYTES: usize = 1_024;
const MAX_INSTANCE_BYTES: usize = 128;
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
    let reporter =
        Reporter { controller: "rouse-controller".into(), instance: Some(cut_instance(instance)) };
    let recorder = Recorder::new(client, reporter);
    let work = async move {
        loop {
            let next = tokio::select! {
                next = receiver.recv() => next,
                () = shutdown.cancelled() => None,
            };
            let Some(next) = next else { return };
            let (event, about) = to_kube_event(&next);
            // Events are for information only: a lost one is not worth another attempt.
            if let Err(error) = recorder.publish(&event, &about).await {
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

/// Returns a message as an Event may have it.
fn cut_note(message: &str) -> String {
    message[..message.floor_char_boundary(MAX_NOTE_BYTES)].to_owned()
}

/// Returns the name of this controller's pod as an Event may have it.
fn cut_instance(pod: &str) -> String {
    pod[..pod.floor_char_boundary(MAX_INSTANCE_BYTES)].to_owned()
}

fn to_kube_event(record: &ObjectEvent) -> (Event, ObjectReference) {
    let event = Event {
        type_: if record.is_warning { EventType::Warning } else { EventType::Normal },
        reason: record.reason.clone(),
        note: Some(cut_note(&record.message)),
        action: record.reason.clone(),
        secondary: None,
    };
    let about = ObjectReference {
        api_version: Some(record.resource.api_version()),
        kind: Some(record.resource.kind().into()),
        namespace: Some(record.name.namespace.to_string()).filter(|it| !it.is_empty()),
        name: Some(record.name.name.to_string()),
        uid: Some(record.uid.clone()),
        ..ObjectReference::default()
    };
    (event, about)
}

#[cfg(test)]
mod tests {
    use prometheus_client::{encoding::text::encode, registry::Registry};

    use super::*;

    #[test]
    fn notes_and_instances_have_the_lengths_in_bytes_that_the_api_server_takes() {
        let long = "é".repeat(1_000);
        assert_eq!((cut_note(&long), cut_note("short")), ("é".repeat(512), "short".to_owned()));
        assert_eq!(cut_note(&format!("a{long}")).len(), 1_023);
        assert_eq!(cut_instance(&"p".repeat(253)), "p".repeat(128));
    }

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
