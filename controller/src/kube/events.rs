//! Shell: what people read under `kubectl describe` and `kubectl events`.
//!
//! The library counts an event that comes again instead of writing another one; here is its bounded inbox, so that
//! nobody waits for an event.

use std::sync::Arc;

use common::wire::Name;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::{Key, Trouble, metrics::Metrics};
use crate::children::{Resource, services::ACTIVATOR_PORT};

/// So many events may wait.
const ROOM: usize = 1024;

/// What happened to which object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct News {
    /// Its kind.
    pub resource: Resource,
    /// Its namespace and name.
    pub name: Name,
    /// Its UID.
    pub uid: String,
    /// Whether somebody should look.
    pub warning: bool,
    /// One word.
    pub reason: String,
    /// One line.
    pub message: String,
}

/// Where news are dropped.
#[derive(Clone, Debug)]
pub struct Events {
    inbox: mpsc::Sender<News>,
    metrics: Arc<Metrics>,
}

impl Events {
    /// Tells of an object that was made, on its owner; Knative does so for the few that people look for.
    pub fn tell_made(&self, key: &Key, body: &Value) {
        let told = match key.resource {
            Resource::Configuration | Resource::Route | Resource::Revision => true,
            Resource::Service => body["metadata"]["annotations"][ACTIVATOR_PORT].is_string(),
            _ => false,
        };
        let (kind, name) = (key.resource.kind(), &key.name.name);
        let message = format!("Created {kind} {name:?}");
        if let Some(owner) = owner(key, body).filter(|_| told) {
            self.tell(News { warning: false, reason: "Created".into(), message, ..owner });
        }
    }

    /// Tells why an object could not be written, on its owner.
    pub fn tell_trouble(&self, key: &Key, body: &Value, trouble: &Trouble) {
        if let Some(owner) = owner(key, body) {
            let message = format!("{key}: {}", trouble.message);
            self.tell(News { warning: true, reason: trouble.reason.into(), message, ..owner });
        }
    }

    /// Tells people, unless there is too much to tell.
    pub fn tell(&self, news: News) {
        if self.inbox.try_send(news).is_err() {
            self.metrics.lost_event();
        }
    }
}

/// News on the object that controls the one of `body`.
fn owner(key: &Key, body: &Value) -> Option<News> {
    let owners = body["metadata"]["ownerReferences"].as_array()?;
    let owner = owners.iter().find(|it| it["controller"] == true)?;
    let text = |field: &str| owner[field].as_str().unwrap_or_default().to_owned();
    let of = |it: &Resource| it.kind() == text("kind") && it.api_version() == text("apiVersion");
    Some(News {
        resource: Resource::ALL.into_iter().find(of)?,
        name: Name::new(key.name.namespace.as_str(), text("name")),
        uid: text("uid"),
        warning: false,
        reason: String::new(),
        message: String::new(),
    })
}

/// An inbox, and what writes its news down until `shutdown`.
pub fn recorder(
    client: Client,
    instance: &str,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
) -> (Events, impl Future<Output = ()> + use<>) {
    let (events, mut news) = inbox(metrics);
    let reporter =
        Reporter { controller: "rouse-controller".into(), instance: Some(instance.into()) };
    let recorder = Recorder::new(client, reporter);
    let work = async move {
        loop {
            let next = tokio::select! {
                next = news.recv() => next,
                () = shutdown.cancelled() => None,
            };
            let Some(next) = next else { return };
            let (event, about) = event(&next);
            if let Err(error) = recorder.publish(&event, &about).await {
                debug!(object = %next.name, reason = next.reason, error = %error, "event not written");
            }
        }
    };
    (events, work)
}

fn inbox(metrics: Arc<Metrics>) -> (Events, mpsc::Receiver<News>) {
    let (inbox, news) = mpsc::channel(ROOM);
    (Events { inbox, metrics }, news)
}

fn event(news: &News) -> (Event, ObjectReference) {
    let event = Event {
        type_: if news.warning { EventType::Warning } else { EventType::Normal },
        reason: news.reason.clone(),
        // The API server refuses longer ones.
        note: Some(news.message.chars().take(1000).collect()),
        action: news.reason.clone(),
        secondary: None,
    };
    let about = ObjectReference {
        api_version: Some(news.resource.api_version()),
        kind: Some(news.resource.kind().into()),
        namespace: Some(news.name.namespace.to_string()).filter(|it| !it.is_empty()),
        name: Some(news.name.name.to_string()),
        uid: Some(news.uid.clone()),
        ..ObjectReference::default()
    };
    (event, about)
}

#[cfg(test)]
mod tests {
    use prometheus_client::{encoding::text::encode, registry::Registry};

    use super::*;

    /// The number stands in docs/operations.md.
    #[test]
    fn of_more_events_than_may_wait_the_newest_are_left_out_and_counted() {
        let metrics = Arc::new(Metrics::default());
        let (events, mut waiting) = inbox(metrics.clone());
        let news = |number: u32| News {
            resource: Resource::Revision,
            name: Name::new("default", "hello-00001"),
            uid: String::new(),
            warning: false,
            reason: "Created".into(),
            message: number.to_string(),
        };
        (0..1_027).for_each(|number| events.tell(news(number)));
        let (mut registry, mut page) = (Registry::default(), String::new());
        metrics.register(&mut registry);
        encode(&mut page, &registry).expect("text");
        assert!(page.contains("rouse_controller_kube_events_lost_total 3\n"), "{page}");
        let kept = std::iter::from_fn(|| waiting.try_recv().ok());
        let kept: Vec<News> = kept.collect();
        assert_eq!((kept.len(), kept.last()), (1_024, Some(&news(1_023))));
    }
}
