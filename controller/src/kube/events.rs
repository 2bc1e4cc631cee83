//! Shell: what people read under `kubectl describe` and `kubectl events`.
//!
//! The library counts an event that comes again instead of writing another one; here is its bounded inbox, so that
//! nobody waits for an event.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::metrics::Metrics;
use crate::children::Resource;

/// So many events may wait.
const ROOM: usize = 1024;

/// What happened to which object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct News {
    /// Its kind.
    pub resource: Resource,
    /// Its namespace and name.
    pub name: common::wire::Name,
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
    /// Tells people, unless there is too much to tell.
    pub fn tell(&self, news: News) {
        if self.inbox.try_send(news).is_err() {
            self.metrics.lost_event();
        }
    }
}

/// An inbox, and what writes its news down until `shutdown`.
pub fn recorder(
    client: Client,
    instance: &str,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
) -> (Events, impl Future<Output = ()> + use<>) {
    let (inbox, mut news) = mpsc::channel(ROOM);
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
    (Events { inbox, metrics }, work)
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
        namespace: Some(news.name.namespace.clone()).filter(|it| !it.is_empty()),
        name: Some(news.name.name.clone()),
        uid: Some(news.uid.clone()),
        ..ObjectReference::default()
    };
    (event, about)
}
