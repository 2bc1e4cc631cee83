//! Shell: Events at the API server: the first of a kind is an object, and each repetition is counted in it.
//!
//! kube's recorder does the same, but it names an Event by the whole name of its object. With one of more than 236 bytes
//! the API server would refuse the Event's name, and the Event would be lost.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use common::wire::NamespacedName;
use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;

use super::ObjectEvent;
use crate::model::object::{ResourceKind, names::event_name};

/// Longest note and longest name of a reporting instance in bytes: the API server refuses longer ones
/// (kubernetes `pkg/apis/core/validation/events.go`).
const MAX_NOTE_BYTES: usize = 1_024;
const MAX_INSTANCE_BYTES: usize = 128;
/// Time since the last repetition after which an Event begins a new series, as in kube's recorder and client-go.
const SERIES_TIME: Duration = Duration::from_secs(6 * 60);
/// Name of the controllers as the source of Events.
const REPORTER: &str = "rouse-controller";

/// Events of which a repetition is counted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct SeriesKey {
    resource: ResourceKind,
    name: NamespacedName,
    uid: String,
    is_warning: bool,
    reason: String,
}

/// Event that was written, and its repetitions.
#[derive(Debug)]
struct WrittenEvent {
    /// Name of the Event's object.
    name: String,
    /// Number of times, the first one included.
    count: i32,
    last_at: Instant,
}

/// Writer of Events.
pub(super) struct EventRecorder {
    client: Client,
    /// Name of this controller's pod, as an Event may have it.
    instance: String,
    written: HashMap<SeriesKey, WrittenEvent>,
}

impl EventRecorder {
    /// Makes a writer for the controller in the pod `instance`.
    pub(super) fn new(client: Client, instance: &str) -> Self {
        Self { client, instance: cut_instance(instance), written: HashMap::new() }
    }

    /// Writes an Event, or counts it in an earlier one with the same object, type and reason.
    pub(super) async fn publish(&mut self, record: &ObjectEvent) -> Result<(), kube::Error> {
        let (now, time) = (Instant::now(), Timestamp::now());
        self.written.retain(|_, it| now.saturating_duration_since(it.last_at) < SERIES_TIME);
        let namespace = event_namespace(record);
        let events: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        let key = SeriesKey::of(record);
        if let Some(earlier) = self.written.get_mut(&key) {
            let count = earlier.count.saturating_add(1);
            let patch = json!({"series": {"count": count, "lastObservedTime": MicroTime(time)}});
            let params = PatchParams::default();
            match events.patch(&earlier.name, &params, &Patch::Merge(&patch)).await {
                // A user has deleted the Event, or it has expired: this one is the first of another series.
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                patched => {
                    patched?;
                    (earlier.count, earlier.last_at) = (count, now);
                    return Ok(());
                }
            }
        }
        let event = kube_event(record, &self.instance, time);
        events.create(&PostParams::default(), &event).await?;
        let name = event.metadata.name.unwrap_or_default();
        self.written.insert(key, WrittenEvent { name, count: 1, last_at: now });
        Ok(())
    }
}

impl SeriesKey {
    fn of(record: &ObjectEvent) -> Self {
        Self {
            resource: record.resource,
            name: record.name.clone(),
            uid: record.uid.clone(),
            is_warning: record.is_warning,
            reason: record.reason.clone(),
        }
    }
}

/// Returns the namespace of an Event: that of its object, or `default` for an object of the whole cluster.
fn event_namespace(record: &ObjectEvent) -> &str {
    match record.name.namespace.as_str() {
        "" => "default",
        namespace => namespace,
    }
}

/// Returns the object of an Event that happens for the first time.
fn kube_event(record: &ObjectEvent, instance: &str, time: Timestamp) -> Event {
    let event_type = if record.is_warning { "Warning" } else { "Normal" };
    let metadata = ObjectMeta {
        name: Some(event_name(&record.name.name, time.as_nanosecond())),
        namespace: Some(event_namespace(record).to_owned()),
        ..ObjectMeta::default()
    };
    Event {
        action: Some(record.reason.clone()),
        event_time: Some(MicroTime(time)),
        metadata,
        note: Some(cut_note(&record.message)),
        reason: Some(record.reason.clone()),
        regarding: Some(object_reference(record)),
        reporting_controller: Some(REPORTER.to_owned()),
        reporting_instance: Some(instance.to_owned()),
        type_: Some(event_type.to_owned()),
        ..Event::default()
    }
}

/// Returns the object that an Event is about, with its whole name: users find the Event by it.
fn object_reference(record: &ObjectEvent) -> ObjectReference {
    ObjectReference {
        api_version: Some(record.resource.api_version()),
        kind: Some(record.resource.kind().into()),
        namespace: Some(record.name.namespace.to_string()).filter(|it| !it.is_empty()),
        name: Some(record.name.name.to_string()),
        uid: Some(record.uid.clone()),
        ..ObjectReference::default()
    }
}

/// Returns a message as an Event may have it.
fn cut_note(message: &str) -> String {
    message[..message.floor_char_boundary(MAX_NOTE_BYTES)].to_owned()
}

/// Returns the name of this controller's pod as an Event may have it.
fn cut_instance(pod: &str) -> String {
    pod[..pod.floor_char_boundary(MAX_INSTANCE_BYTES)].to_owned()
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use hyper::{Request, Response};
    use kube::client::Body;
    use serde_json::Value;

    use super::*;

    /// Method, path and body of each request.
    type RequestLog = Arc<Mutex<Vec<(String, String, Value)>>>;

    /// Starts an API server that accepts Events, and responds to changes of Events with this code. It records each request.
    fn api_server(patch_code: u16) -> (Client, RequestLog) {
        let requests = RequestLog::default();
        let log = Arc::clone(&requests);
        let service = tower::service_fn(move |request: Request<Body>| {
            let log = Arc::clone(&log);
            async move {
                let method = request.method().to_string();
                let path = request.uri().path().to_owned();
                let body = request.into_body().collect_bytes().await.expect("a body");
                let object = serde_json::from_slice(&body).expect("an Event or a part of one");
                let (code, body) = match method.as_str() {
                    "PATCH" if patch_code != 200 => {
                        let status =
                            json!({"kind": "Status", "status": "Failure", "code": patch_code});
                        (patch_code, status.to_string().into_bytes())
                    }
                    _ => (200, body.to_vec()),
                };
                log.lock().expect("no panic").push((method, path, object));
                Response::builder().status(code).body(Body::from(body))
            }
        });
        (Client::new(service, "default"), requests)
    }

    fn event_on(name: &str) -> ObjectEvent {
        ObjectEvent {
            resource: ResourceKind::DomainMapping,
            name: NamespacedName::new("shop", name),
            uid: "u1".into(),
            is_warning: true,
            reason: "GatewayPortTaken".into(),
            message: "Port 5432 is taken".into(),
        }
    }

    #[test]
    fn notes_and_instances_have_the_lengths_in_bytes_that_the_api_server_takes() {
        let long = "é".repeat(1_000);
        assert_eq!((cut_note(&long), cut_note("short")), ("é".repeat(512), "short".to_owned()));
        assert_eq!(cut_note(&format!("a{long}")).len(), 1_023);
        assert_eq!(cut_instance(&"p".repeat(253)), "p".repeat(128));
    }

    /// The API server refuses an Event with a longer name.
    #[test]
    fn an_event_on_an_object_of_any_name_has_a_name_of_its_own_and_the_whole_name_of_the_object() {
        for length in 1..=253 {
            let object = "n".repeat(length);
            let event = kube_event(&event_on(&object), "pod", Timestamp::now());
            let name = event.metadata.name.expect("it has one");
            assert!(name.len() <= 253, "{length}: {} bytes", name.len());
            assert_eq!(name.starts_with(&format!("{object}.")), length <= 236, "{length}");
            assert_eq!(event.regarding.and_then(|it| it.name), Some(object));
        }
    }

    #[test]
    fn an_event_on_an_object_of_the_cluster_is_in_the_default_namespace() {
        let mut record = event_on("shop.test");
        record.name = NamespacedName::new("", "shop.test");
        let event = kube_event(&record, "pod", Timestamp::now());
        assert_eq!(event.metadata.namespace.as_deref(), Some("default"));
        assert_eq!(event.regarding.and_then(|it| it.namespace), None);
    }

    #[tokio::test]
    async fn a_repetition_of_an_event_that_was_deleted_is_a_new_event() {
        let (client, requests) = api_server(404);
        let mut recorder = EventRecorder::new(client, "pod");
        for _ in 0..2 {
            recorder.publish(&event_on("a")).await.expect("accepted");
        }
        let requests = requests.lock().expect("no panic").clone();
        let methods: Vec<&str> = requests.iter().map(|(method, ..)| method.as_str()).collect();
        assert_eq!(methods, ["POST", "PATCH", "POST"]);
        let series = requests.iter().map(|(_, _, event)| event["series"].is_null());
        assert_eq!(series.collect::<Vec<_>>(), [true, false, true]);
        assert_eq!(recorder.written.values().map(|it| it.count).collect::<Vec<_>>(), [1]);
    }

    #[tokio::test]
    async fn repetitions_are_counted_in_the_first_event() {
        let (client, requests) = api_server(200);
        let mut recorder = EventRecorder::new(client, "pod");
        let long = event_on(&"n".repeat(253));
        for _ in 0..3 {
            recorder.publish(&long).await.expect("accepted");
        }
        recorder.publish(&event_on("other")).await.expect("accepted");
        let requests = requests.lock().expect("no panic").clone();
        let methods: Vec<&str> = requests.iter().map(|(method, ..)| method.as_str()).collect();
        assert_eq!(methods, ["POST", "PATCH", "PATCH", "POST"]);
        let events = "/apis/events.k8s.io/v1/namespaces/shop/events";
        let (_, path, first) = &requests[0];
        assert_eq!(path, events);
        let name = first["metadata"]["name"].as_str().expect("a name");
        for ((_, path, patch), count) in requests[1..3].iter().zip(2..) {
            assert_eq!(*path, format!("{events}/{name}"));
            assert_eq!(patch["series"]["count"], count);
        }
    }
}
