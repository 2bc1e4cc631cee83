//! Shell: writes Kubernetes Events on Services of the cluster, which users read under `kubectl describe service`.

use std::{fmt::Display, time::Instant};

use common::{link::error_chain, wire::NamespacedName};
use k8s_openapi::api::core::v1::{ObjectReference, Service};
use kube::{
    Api, Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, warn};

use super::service_events::{ServiceEvent, ServiceEventLimiter, ServiceEventReason};

/// Number of Events that wait while the API server is slow.
const INBOX_CAPACITY: usize = 64;
/// Name of the agents as the source of Events.
const REPORTER: &str = "rouse-agent";
/// Longest note in bytes: the API server refuses more (kubernetes `pkg/apis/core/validation/events.go`).
const NOTE_BYTES_MAX: usize = 1_024;
/// Longest name of a reporting instance in characters. The name of a node may be longer: it has up to 253.
const INSTANCE_CHARS_MAX: usize = 128;

/// Events on Services of the cluster: what the loop records, a task writes.
#[derive(Debug, Default)]
pub(crate) struct ServiceEvents {
    /// `None` if no Services of the cluster are served.
    inbox: Option<Sender<ServiceEvent>>,
    limiter: ServiceEventLimiter,
}

impl ServiceEvents {
    /// Starts the task that writes Events of this node until `shutdown`. Without a client, none are written.
    pub(crate) fn start(
        client: Option<Client>,
        node: &str,
        tasks: &TaskTracker,
        shutdown: &CancellationToken,
    ) -> Self {
        let Some(client) = client else { return Self::default() };
        let (inbox, events) = mpsc::channel(INBOX_CAPACITY);
        let (node, shutdown) = (node.to_owned(), shutdown.clone());
        tasks.spawn(async move {
            tokio::select! {
                () = write_events(client, node, events) => {}
                () = shutdown.cancelled() => {}
            }
        });
        Self { inbox: Some(inbox), limiter: ServiceEventLimiter::default() }
    }

    /// Records a change of a Service's state: at most one Event a minute for one Service and reason, and few together.
    pub(crate) fn record(
        &mut self,
        service: &NamespacedName,
        reason: ServiceEventReason,
        message: &dyn Display,
    ) {
        let Some(inbox) = &self.inbox else { return };
        if !self.limiter.admit(Instant::now(), service, reason) {
            return;
        }
        let event = ServiceEvent { service: service.clone(), reason, message: message.to_string() };
        // The loop does not wait for the API server.
        if inbox.try_send(event).is_err() {
            self.limiter.count_left_out();
        }
    }

    /// Logs the number of Events that were left out, at most once a minute. Call it from time to time.
    pub(crate) fn log_left_out(&mut self) {
        if let Some(services) = self.limiter.take_left_out(Instant::now()) {
            warn!(
                services,
                "more services of the cluster are not served, without an Event on each"
            );
        }
    }
}

async fn write_events(client: Client, node: String, mut events: Receiver<ServiceEvent>) {
    // It names an Event `<object>.<time>`, which is never too long: a Service's name has up to 63 bytes.
    let recorder = Recorder::new(client.clone(), reporter(&node));
    while let Some(event) = events.recv().await {
        // Events are for information only: a lost one is not worth another attempt.
        if let Err(error) = write_event(&client, &recorder, &event).await {
            let (service, error) = (&event.service, error_chain(&error));
            debug!(%service, reason = event.reason.name(), error, "event not written");
        }
    }
}

/// Returns the source of the Events of a node.
fn reporter(node: &str) -> Reporter {
    let instance = node.chars().take(INSTANCE_CHARS_MAX).collect();
    Reporter { controller: REPORTER.into(), instance: Some(instance) }
}

/// Writes one Event, if the Service still exists.
async fn write_event(
    client: &Client,
    recorder: &Recorder,
    event: &ServiceEvent,
) -> Result<(), kube::Error> {
    let name = &event.service;
    let services: Api<Service> = Api::namespaced(client.clone(), &name.namespace);
    // `kubectl describe` finds the Events of an object by its uid, which the watch does not keep.
    let Some(service) = services.get_opt(&name.name).await? else { return Ok(()) };
    let about = ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Service".into()),
        namespace: Some(name.namespace.to_string()),
        name: Some(name.name.to_string()),
        uid: service.metadata.uid,
        ..ObjectReference::default()
    };
    let event = Event {
        type_: EventType::Warning,
        reason: event.reason.name().into(),
        note: Some(cut_note(&event.message)),
        action: event.reason.name().into(),
        secondary: None,
    };
    recorder.publish(&event, &about).await
}

/// Returns a message as an Event may have it.
fn cut_note(message: &str) -> String {
    message[..message.floor_char_boundary(NOTE_BYTES_MAX)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_has_the_length_in_bytes_that_the_api_server_takes() {
        assert_eq!(cut_note("short"), "short");
        assert_eq!(cut_note(&"é".repeat(1_000)), "é".repeat(512));
    }

    /// The API server would refuse each Event of such a node.
    #[test]
    fn the_name_of_a_node_is_cut_to_what_an_event_may_name() {
        let instance = |node: &str| reporter(node).instance.expect("it has one");
        assert_eq!(instance("n1"), "n1");
        let longest = "n".repeat(253);
        assert_eq!(instance(&longest), longest[..INSTANCE_CHARS_MAX]);
    }
}
