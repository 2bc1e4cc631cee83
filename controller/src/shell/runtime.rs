//! Shell: the state machine behind one lock, with a clock and the receivers of its effects.
//!
//! Every shell calls [`ControllerRuntime::step`] on its own task. When the call returns, the spec of the local node and
//! the routes are up to date: there is no queue in between.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use common::{
    local_node::LocalNodeSpec,
    outbox::Outbox,
    wire::{NamespacedName, RouteKey},
};
use serde_json::Value;
use tokio::sync::{
    Notify,
    mpsc::{self, error::TrySendError},
    watch,
};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::{
    decide::machine::{
        ConfigMapEventRecord, ControllerEffects, ControllerEvent, ControllerStateMachine,
        ObjectEventRecord, PodRead, RouteFingerprint,
    },
    model::{
        cluster_state::{ControllerSettings, Uid, UnixMillis},
        object::{
            DesiredState, LocalObjectKey, ObjectPart, ObjectPartKey, ResourceKind, WriteError,
        },
    },
    shell::{
        api::{
            DesiredStateSource,
            events::{EventInbox, ObjectEvent},
            pull_secrets::ClusterPullSecrets,
            writer::ObjectWriter,
        },
        image_digests::{queue::DigestStatus, resolver::DigestResolver},
        metrics::ControllerMetrics,
    },
    write::desired::{self, RequiredChildren},
};

mod batch_log;
pub mod route_broadcast;
pub mod route_subscription;

use route_subscription::RouteTableSnapshot;

/// Objects that lack required child objects, each with its app and its UID.
type IncompleteOwners = BTreeMap<(ResourceKind, NamespacedName), (NamespacedName, Uid)>;

/// State of the controller, shared by its shells.
#[derive(Debug)]
pub struct ControllerRuntime {
    machine: Mutex<ControllerStateMachine>,
    routes: Outbox<RouteKey, RouteFingerprint>,
    /// Snapshot that the last streams began with, for as long as one of them is still sending it.
    last_snapshot: Mutex<Weak<RouteTableSnapshot>>,
    node_spec: watch::Sender<LocalNodeSpec>,
    /// Spec held back until [`ControllerRuntime::release_node_spec`], since the node stops each pod that it lacks.
    held_node_spec: Mutex<Option<LocalNodeSpec>>,
    /// Objects to be written on the local node.
    changed_objects: Mutex<BTreeSet<LocalObjectKey>>,
    /// Writer of objects on Kubernetes.
    object_writer: OnceLock<Arc<ObjectWriter>>,
    /// Recorder of Events on Kubernetes.
    event_inbox: OnceLock<EventInbox>,
    /// Channel to the reader of single pods on Kubernetes.
    pods_to_read: OnceLock<mpsc::Sender<PodRead>>,
    /// Resolver of image digests on Kubernetes.
    digest_resolver: OnceLock<Arc<DigestResolver<ClusterPullSecrets>>>,
    /// Objects whose last write failed.
    failed_writes: Mutex<BTreeSet<ObjectPartKey>>,
    /// Objects that lack required child objects.
    incomplete_owners: Mutex<IncompleteOwners>,
    /// True once workloads and pods of users must be watched on Kubernetes.
    needs_workload_watch: watch::Sender<bool>,
    /// True once requested certificates must be watched on Kubernetes.
    needs_request_watch: watch::Sender<bool>,
    /// Secrets that mappings and settings name.
    named_secrets: watch::Sender<BTreeSet<NamespacedName>>,
    /// Secrets that mappings name for authorities of client certificates.
    named_client_cas: watch::Sender<BTreeSet<NamespacedName>>,
    /// Services whose names inside the cluster need a certificate, with the number of the request.
    local_certificates: watch::Sender<BTreeMap<NamespacedName, u64>>,
    objects_changed: Notify,
    timer_changed: Notify,
    /// Start of this process, by the monotonic clock and in ms since 1970.
    started_at: (Instant, u64),
    /// Counters and gauges of this controller.
    pub metrics: ControllerMetrics,
}

impl ControllerRuntime {
    /// Shares `machine`, whose pods on the local node are sent through `node_spec`.
    pub fn new(machine: ControllerStateMachine, node_spec: watch::Sender<LocalNodeSpec>) -> Self {
        // Read once: the time of the machine is counted on from here, so a clock that is set does not move it.
        let unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let unix_ms = u64::try_from(unix_ms.as_millis()).unwrap_or(u64::MAX);
        Self {
            routes: machine.routes().clone(),
            last_snapshot: Mutex::default(),
            machine: Mutex::new(machine),
            node_spec,
            held_node_spec: Mutex::new(Some(LocalNodeSpec::default())),
            changed_objects: Mutex::default(),
            object_writer: OnceLock::new(),
            event_inbox: OnceLock::new(),
            pods_to_read: OnceLock::new(),
            digest_resolver: OnceLock::new(),
            failed_writes: Mutex::default(),
            incomplete_owners: Mutex::default(),
            needs_workload_watch: watch::Sender::new(false),
            needs_request_watch: watch::Sender::new(false),
            named_secrets: watch::Sender::new(BTreeSet::new()),
            named_client_cas: watch::Sender::new(BTreeSet::new()),
            local_certificates: watch::Sender::new(BTreeMap::new()),
            objects_changed: Notify::new(),
            timer_changed: Notify::new(),
            started_at: (Instant::now(), unix_ms),
            metrics: ControllerMetrics::default(),
        }
    }

    /// Returns the settings in force.
    pub fn settings(&self) -> std::sync::Arc<ControllerSettings> {
        self.lock_machine().cluster().settings.clone()
    }

    /// Steps the machine with one event and carries out the effects.
    pub fn step(&self, event: ControllerEvent) {
        let deleted_owner = match &event {
            ControllerEvent::ObjectObserved { resource, name, object: None } => {
                self.take_incomplete_owner(*resource, name)
            }
            _ => None,
        };
        self.step_machine(event);
        if let Some(children_exist) = deleted_owner {
            self.step_machine(children_exist);
        }
    }

    /// Steps the machine with an event, and carries out its effects.
    fn step_machine(&self, event: ControllerEvent) {
        let began = Instant::now();
        let mut machine = self.lock_machine();
        let (now, old_timer) = (self.now(), machine.next_timer());
        let mut effects = machine.step(now, event);
        let timer = machine.next_timer();
        // Still under the lock, so that all is sent in the order in which it was decided.
        self.send_node_spec(&effects);
        self.send_named_secrets(&mut effects);
        drop(machine);
        // From here on without the lock: what follows may call back into the machine.
        self.metrics.record_step(&effects, began.elapsed());
        if timer != old_timer {
            self.timer_changed.notify_one();
        }
        if effects.needs_workload_watch {
            self.needs_workload_watch
                .send_if_modified(|is_needed| !std::mem::replace(is_needed, true));
        }
        if effects.needs_request_watch {
            self.needs_request_watch
                .send_if_modified(|is_needed| !std::mem::replace(is_needed, true));
        }
        self.record_config_map_events(effects.config_map_events);
        self.record_object_events(effects.object_events);
        self.request_pod_reads(effects.pods_to_read);
        effects.revisions_to_resolve.iter().for_each(|revision| self.resolve_digests(revision));
        if let Some(writer) = self.object_writer.get() {
            writer.schedule_checks(effects.apps_to_check);
            writer.add(effects.changed_keys);
        } else if !effects.changed_objects.is_empty() {
            self.add_changed_objects(effects.changed_objects);
        }
    }

    /// Forgets that a deleted object lacks child objects. Returns the event that ends the condition about them.
    fn take_incomplete_owner(
        &self,
        resource: ResourceKind,
        name: &NamespacedName,
    ) -> Option<ControllerEvent> {
        let (app, _) = self.lock_incomplete_owners().remove(&(resource, name.clone()))?;
        Some(ControllerEvent::ChildrenMissing {
            app,
            owner_resource: resource,
            owner: name.clone(),
            error: None,
        })
    }

    /// Sends Events about ConfigMaps. The recorder counts equal Events instead of writing them again.
    fn record_config_map_events(&self, records: Vec<ConfigMapEventRecord>) {
        let Some(events) = self.event_inbox.get() else { return };
        for ConfigMapEventRecord { name, uid, event } in records {
            events.record(ObjectEvent {
                resource: ResourceKind::ConfigMap,
                name,
                uid,
                is_warning: event.is_warning,
                reason: event.reason.to_owned(),
                message: event.message,
            });
        }
    }

    /// Sends Events about Services of users and about Revisions.
    fn record_object_events(&self, records: Vec<ObjectEventRecord>) {
        let Some(events) = self.event_inbox.get() else { return };
        for ObjectEventRecord { resource, name, uid, is_warning, reason, message } in records {
            events.record(ObjectEvent { resource, name, uid, is_warning, reason, message });
        }
    }

    /// Sends reads of pods to the reader. What does not fit into its channel is lost: the machine repeats each read.
    fn request_pod_reads(&self, reads: Vec<PodRead>) {
        let Some(sender) = self.pods_to_read.get() else { return };
        // A closed channel belongs to a replica that stops.
        let is_lost = |read| matches!(sender.try_send(read), Err(TrySendError::Full(_)));
        let lost = reads.into_iter().map(is_lost).filter(|is_lost| *is_lost).count();
        if lost > 0 {
            warn!(lost, "too many pods to read: these are read later");
        }
    }

    /// Sets the channel to the reader of single pods.
    pub fn set_pod_reader(&self, sender: mpsc::Sender<PodRead>) {
        // A second call changes nothing: a process has one reader.
        let _ = self.pods_to_read.set(sender);
    }

    /// Returns a receiver of the need for watches of workloads and pods of users; once true, it stays true.
    pub fn workload_watch_need(&self) -> watch::Receiver<bool> {
        self.needs_workload_watch.subscribe()
    }

    /// Returns a receiver of the need for watches of requested certificates; once true, it stays true.
    pub fn request_watch_need(&self) -> watch::Receiver<bool> {
        self.needs_request_watch.subscribe()
    }

    /// Returns a receiver of the Secrets that mappings and settings name; empty before
    /// [`ControllerEvent::InitialListSynced`]. No event may be stepped while the received set is borrowed.
    pub fn named_secrets(&self) -> watch::Receiver<BTreeSet<NamespacedName>> {
        self.named_secrets.subscribe()
    }

    /// Returns a receiver of the Secrets that mappings name for authorities of client certificates, as
    /// [`named_secrets`](Self::named_secrets) does for certificates.
    pub fn named_client_cas(&self) -> watch::Receiver<BTreeSet<NamespacedName>> {
        self.named_client_cas.subscribe()
    }

    /// Returns a receiver of the services whose names inside the cluster need a certificate, each with the number of
    /// its request. A service that is made again has another number. No event may be stepped while the received set
    /// is borrowed.
    pub fn wanted_local_certificates(&self) -> watch::Receiver<BTreeMap<NamespacedName, u64>> {
        self.local_certificates.subscribe()
    }

    /// Sends the named Secrets to their reader, and their numbers to the metrics, if a step has changed them. The
    /// certificates that are to be signed go to their signer.
    fn send_named_secrets(&self, effects: &mut ControllerEffects) {
        self.metrics.set_certificates(effects);
        if let Some(names) = effects.named_secrets.take() {
            self.named_secrets.send_replace(names);
        }
        if let Some(names) = effects.named_client_cas.take() {
            self.named_client_cas.send_replace(names);
        }
        let changed = std::mem::take(&mut effects.local_certificates);
        if !changed.is_empty() {
            self.local_certificates.send_modify(|wanted| change_requests(wanted, changed));
        }
    }

    /// Sets the resolver of image digests.
    pub fn set_digest_resolver(&self, resolver: Arc<DigestResolver<ClusterPullSecrets>>) {
        let _ = self.digest_resolver.set(resolver);
    }

    /// Passes the known digests of a Revision's images to the machine, and starts to resolve unknown ones.
    pub fn resolve_digests(&self, revision: &NamespacedName) {
        let Some(resolver) = self.digest_resolver.get() else { return };
        let Some(request) = self.with_machine(|machine| machine.digest_request(revision)) else {
            return resolver.forget(revision);
        };
        match resolver.request_digests(revision, request) {
            // The resolver calls again when it has a result.
            DigestStatus::Unknown | DigestStatus::Pending => {}
            DigestStatus::Failed(reason) => self.step(ControllerEvent::DigestsResolved {
                revision: revision.clone(),
                resolution: Err(reason),
            }),
            DigestStatus::Resolved(digests) => {
                resolver.forget(revision);
                self.step(ControllerEvent::DigestsResolved {
                    revision: revision.clone(),
                    resolution: Ok(digests),
                });
            }
        }
    }

    fn send_node_spec(&self, effects: &ControllerEffects) {
        if effects.pods_to_start.is_empty()
            && effects.pods_to_stop.is_empty()
            && effects.dns_names.is_empty()
        {
            return;
        }
        match &mut *self.lock_held_node_spec() {
            Some(spec) => apply_to_node_spec(spec, effects),
            None => self.node_spec.send_modify(|spec| apply_to_node_spec(spec, effects)),
        }
    }

    /// Sends the spec that was held back: all objects of an earlier run have been read.
    pub fn release_node_spec(&self) {
        if let Some(spec) = self.lock_held_node_spec().take() {
            self.node_spec.send_replace(spec);
        }
    }

    /// Sets `writer` as the writer of changed objects, in place of the local node, and `events` as the recorder of
    /// Events.
    pub fn set_writer(&self, writer: Arc<ObjectWriter>, events: EventInbox) {
        // A second call changes nothing: a process has one of each.
        let _ = self.object_writer.set(writer);
        let _ = self.event_inbox.set(events);
    }

    /// Calls `read` with the machine, under its lock.
    pub fn with_machine<T>(&self, read: impl FnOnce(&ControllerStateMachine) -> T) -> T {
        read(&self.lock_machine())
    }

    /// Waits until there are objects to be written.
    pub async fn wait_for_changed_objects(&self) {
        while self.lock_changed_objects().is_empty() {
            self.objects_changed.notified().await;
        }
    }

    /// Adds objects to be written.
    pub fn add_changed_objects(&self, keys: impl IntoIterator<Item = LocalObjectKey>) {
        self.lock_changed_objects().extend(keys);
        self.objects_changed.notify_one();
    }

    /// Takes up to `max_count` objects to be written, in their present state; `None`: to be removed.
    pub fn take_changed_objects(&self, max_count: usize) -> Vec<(LocalObjectKey, Option<Value>)> {
        let mut changed = self.lock_changed_objects();
        let taken: Vec<LocalObjectKey> =
            std::iter::from_fn(|| changed.pop_first()).take(max_count).collect();
        drop(changed);
        let machine = self.lock_machine();
        let with_object = |key: LocalObjectKey| {
            let object = desired::local_object(machine.cluster(), &key);
            (key, object)
        };
        taken.into_iter().map(with_object).collect()
    }

    /// Ticks the machine at its timers until `shutdown`.
    pub async fn run_timers(&self, shutdown: CancellationToken) {
        loop {
            let next = self.lock_machine().next_timer();
            let wait = next.map(|at| Duration::from_millis(at.0.saturating_sub(self.now().0)));
            // Without a timer the sleep is never polled; the value only must not overflow.
            let sleep = tokio::time::sleep(wait.unwrap_or(Duration::MAX / 4));
            tokio::select! {
                () = sleep, if wait.is_some() => self.step(ControllerEvent::Tick),
                () = self.timer_changed.notified() => {}
                () = shutdown.cancelled() => return,
            }
        }
    }

    /// Returns milliseconds since 1970 by a clock that never runs backwards.
    pub(crate) fn now(&self) -> UnixMillis {
        let passed = u64::try_from(self.started_at.0.elapsed().as_millis()).unwrap_or(u64::MAX);
        UnixMillis(self.started_at.1.saturating_add(passed))
    }

    fn lock_machine(&self) -> MutexGuard<'_, ControllerStateMachine> {
        // A panicked step may have left half a change; to continue with it is better than to stop all traffic.
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_held_node_spec(&self) -> MutexGuard<'_, Option<LocalNodeSpec>> {
        self.held_node_spec.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_failed_writes(&self) -> MutexGuard<'_, BTreeSet<ObjectPartKey>> {
        self.failed_writes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_incomplete_owners(&self) -> MutexGuard<'_, IncompleteOwners> {
        self.incomplete_owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_changed_objects(&self) -> MutexGuard<'_, BTreeSet<LocalObjectKey>> {
        self.changed_objects.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DesiredStateSource for ControllerRuntime {
    fn leadership_changed(&self, is_leader: bool) {
        self.step(ControllerEvent::LeadershipChanged(is_leader));
    }

    fn desired_state(&self, key: &ObjectPartKey) -> DesiredState {
        desired::desired_state(self.lock_machine().cluster(), key)
    }

    fn object_created(&self, key: &ObjectPartKey, body: &Value) {
        if let Some(events) = self.event_inbox.get() {
            events.record_created(key, body);
        }
    }

    fn write_result(&self, key: &ObjectPartKey, error: Option<WriteError>) {
        if let (Some(events), Some(error)) = (self.event_inbox.get(), &error) {
            match self.desired_state(key) {
                DesiredState::Body(body) => events.record_write_error(key, &body, error),
                DesiredState::Replicas { version, .. }
                | DesiredState::GivenBack { version, .. } => {
                    events.record_workload_error(key, &version.uid, error);
                }
                DesiredState::Requests { uid, .. } => {
                    events.record_workload_error(key, &uid, error);
                }
                DesiredState::Unmanaged | DesiredState::Absent | DesiredState::Scale { .. } => {}
            }
        }
        // A success is news only after an error, and nearly all writes succeed.
        let is_new = match error {
            Some(_) => {
                self.lock_failed_writes().insert(key.clone());
                true
            }
            None => self.lock_failed_writes().remove(key),
        };
        if is_new {
            self.step(ControllerEvent::WriteErrorChanged { key: key.clone(), error });
        }
    }

    fn required_children(&self, app: &NamespacedName) -> Vec<RequiredChildren> {
        desired::required_children(self.lock_machine().cluster(), app)
    }

    fn children_missing(
        &self,
        app: &NamespacedName,
        required_children: &RequiredChildren,
        missing: &[ObjectPartKey],
    ) {
        let (resource, name, uid) = &required_children.owner;
        let owner = (*resource, name.clone());
        let mut incomplete_owners = self.lock_incomplete_owners();
        let is_new = if missing.is_empty() {
            incomplete_owners.remove(&owner).is_some()
        } else {
            let latest = (app.clone(), *uid);
            incomplete_owners.insert(owner.clone(), latest.clone()) != Some(latest)
        };
        drop(incomplete_owners);
        // Checks repeat; only a change is reported. An owner of the same name with another UID is another owner.
        if !is_new {
            return;
        }
        let error = (!missing.is_empty()).then(|| children_missing_error(missing));
        if let Some(error) = &error {
            warn!(object = %name, kind = resource.kind(), message = error.message, "child objects do not exist");
        }
        if let (Some(events), Some(error)) = (self.event_inbox.get(), &error) {
            let (reason, message) = (error.reason.into(), error.message.clone());
            let (name, uid) = (name.clone(), uid.to_string());
            events.record(ObjectEvent {
                resource: *resource,
                name,
                uid,
                is_warning: true,
                reason,
                message,
            });
        }
        self.step(ControllerEvent::ChildrenMissing {
            app: app.clone(),
            owner_resource: owner.0,
            owner: owner.1,
            error,
        });
    }

    fn written_repeatedly(&self, key: &ObjectPartKey, body: &Value, writes: u32) {
        let Some(events) = self.event_inbox.get() else { return };
        let message = format!(
            "written {writes} times with the same content, since something undoes it each time; it is written less and less often"
        );
        let error = WriteError { reason: "WrittenRepeatedly", message };
        match key.part {
            // Its user owns the workload of a scaled Service. A resize is never delayed as a repetition.
            ObjectPart::Scale | ObjectPart::Resize => {
                let uid = body["metadata"]["uid"].as_str().unwrap_or_default();
                events.record_workload_error(key, uid, &error);
            }
            ObjectPart::Object | ObjectPart::Status => {
                events.record_write_error(key, body, &error);
            }
        }
    }
}

/// Makes the write error of required objects that do not exist.
fn children_missing_error(missing: &[ObjectPartKey]) -> WriteError {
    let names: Vec<String> = missing
        .iter()
        .map(|it| format!("{} {:?}", it.resource.kind(), it.name.name.as_str()))
        .collect();
    let message = format!(
        "Not created yet: {}. The controller keeps trying; its log has the API server's response.",
        names.join(", ")
    );
    WriteError { reason: "ChildrenMissing", message }
}

/// Applies changes to the requests of certificates: the number of each request, or `None` where one has ended.
fn change_requests(
    wanted: &mut BTreeMap<NamespacedName, u64>,
    changed: BTreeMap<NamespacedName, Option<u64>>,
) {
    for (service, request) in changed {
        if let Some(request) = request {
            wanted.insert(service, request);
        } else {
            wanted.remove(&service);
        }
    }
}

fn apply_to_node_spec(spec: &mut LocalNodeSpec, effects: &ControllerEffects) {
    for pod in &effects.pods_to_start {
        spec.pods.insert(pod.uid.clone(), pod.clone());
    }
    for uid in &effects.pods_to_stop {
        spec.pods.remove(uid);
    }
    for (name, addresses) in &effects.dns_names {
        if addresses.is_empty() {
            spec.dns_names.remove(name);
        } else {
            spec.dns_names.insert(name.clone(), addresses.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use hyper::{Request, Response};
    use kube::{Client, client::Body};
    use serde_json::json;
    use tokio::time::timeout;

    use super::*;
    use crate::{
        model::cluster_state::{ClusterState, PlatformKind},
        shell::api::{events, leader_election::Leadership, write_queue::WriteLimits},
    };

    /// Starts an API server that accepts Events and fails any other request.
    fn api_server() -> (Client, mpsc::Receiver<Value>) {
        let (sender, events) = mpsc::channel(64);
        let service = tower::service_fn(move |request: Request<Body>| {
            let (sender, is_event) = (sender.clone(), request.uri().path().contains("/events"));
            async move {
                let body = request.into_body().collect_bytes().await.expect("a body");
                if is_event {
                    let event = serde_json::from_slice(&body).expect("an event");
                    sender.send(event).await.expect("the test goes on");
                    return Response::builder().status(201).body(Body::from(body.to_vec()));
                }
                let failed = json!({"kind": "Status", "status": "Failure", "code": 500});
                Response::builder().status(500).body(Body::from(failed.to_string().into_bytes()))
            }
        });
        (Client::new(service, "default"), events)
    }

    /// Returns the next Event with this reason: type, kind and name of its object, and message.
    async fn next_event(events: &mut mpsc::Receiver<Value>, reason: &str) -> [String; 4] {
        loop {
            let event = events.recv().await.expect("a recorder");
            if event["reason"] == reason {
                let fields = ["/type", "/regarding/kind", "/regarding/name", "/note"];
                let text = |at| event.pointer(at).and_then(Value::as_str).unwrap_or_default();
                return fields.map(|at| text(at).to_owned());
            }
        }
    }

    #[test]
    fn requests_of_certificates_begin_change_and_end() {
        let name = |name: &str| NamespacedName::new("default", name);
        let mut wanted = BTreeMap::from([(name("a"), 1), (name("b"), 2)]);
        let changed = [(name("a"), None), (name("b"), Some(3)), (name("c"), Some(4))];
        change_requests(&mut wanted, changed.into());
        assert_eq!(wanted, BTreeMap::from([(name("b"), 3), (name("c"), 4)]));
    }

    /// Starts a runtime with a writer, which does not run, and a recorder of Events.
    fn recording_runtime(
        client: Client,
        shutdown: &CancellationToken,
    ) -> (Arc<ControllerRuntime>, Arc<ObjectWriter>) {
        let settings = ControllerSettings {
            platform: PlatformKind::Kubernetes,
            ..ControllerSettings::default()
        };
        let cluster = ClusterState {
            settings: Arc::new(settings),
            is_leader: false,
            ..ClusterState::default()
        };
        let machine = ControllerStateMachine::new(cluster, Outbox::new());
        let shared =
            Arc::new(ControllerRuntime::new(machine, watch::channel(LocalNodeSpec::default()).0));
        let metrics = Arc::default();
        let writer = Arc::new(ObjectWriter::new(
            client.clone(),
            WriteLimits::default(),
            Arc::clone(&metrics),
        ));
        let (inbox, record) = events::event_recorder(client, "one", metrics, shutdown.clone());
        shared.set_writer(Arc::clone(&writer), inbox);
        tokio::spawn(record);
        (shared, writer)
    }

    #[tokio::test(start_paused = true)]
    async fn missing_children_and_repeated_writes_are_recorded_as_events() {
        let (client, mut events) = api_server();
        let shutdown = CancellationToken::new();
        let (shared, writer) = recording_runtime(client, &shutdown);
        let source = Arc::clone(&shared) as Arc<dyn DesiredStateSource>;
        tokio::spawn(writer.run(source, Leadership::permanent(), shutdown.clone()));
        let service_name = NamespacedName::new("default", "hello");
        let configuration = json!({
            "metadata": {
                "name": "hello", "namespace": "default", "generation": 1,
                "uid": "00000000-0000-4000-8000-000000000001",
            },
            "spec": {"template": {"spec": {"containers": [{"name": "main", "image": "a"}]}}},
        });
        shared.step(ControllerEvent::ObjectObserved {
            resource: ResourceKind::Configuration,
            name: service_name.clone(),
            object: Some(Box::new(configuration)),
        });
        let missing_children =
            timeout(Duration::from_secs(10), next_event(&mut events, "ChildrenMissing"));
        let [event_type, kind, name, message] = missing_children.await.expect("within ten seconds");
        assert_eq!([&*event_type, &*kind, &*name], ["Warning", "Configuration", "hello"]);
        assert!(message.starts_with("Not created yet: Revision \"hello-00001\"."), "{message}");

        let owner = json!({
            "apiVersion": "serving.knative.dev/v1", "kind": "Route", "name": "hello", "uid": "u",
            "controller": true,
        });
        let body = json!({"metadata": {"ownerReferences": [owner]}});
        shared.written_repeatedly(
            &ObjectPartKey::new(ResourceKind::Service, ObjectPart::Object, service_name),
            &body,
            7,
        );
        let repeated =
            timeout(Duration::from_secs(10), next_event(&mut events, "WrittenRepeatedly"));
        let [event_type, kind, name, message] = repeated.await.expect("it is told");
        assert_eq!([&*event_type, &*kind, &*name], ["Warning", "Route", "hello"]);
        assert!(message.contains("written 7 times with the same content"), "{message}");
        shutdown.cancel();
    }

    /// A workload and a Service of a user have no owner that an Event could be about.
    #[tokio::test(start_paused = true)]
    async fn events_about_a_scaled_service_are_recorded_on_its_own_objects() {
        let (client, mut events) = api_server();
        let shutdown = CancellationToken::new();
        let (shared, _writer) = recording_runtime(client, &shutdown);
        let name = NamespacedName::new("default", "db");
        let mut next = async |reason: &str| {
            let event = timeout(Duration::from_secs(60), next_event(&mut events, reason)).await;
            event.expect("an Event")
        };
        let key = ObjectPartKey::new(ResourceKind::StatefulSet, ObjectPart::Scale, name.clone());
        shared.written_repeatedly(&key, &json!({"metadata": {"uid": "u"}}), 31);
        let [event_type, kind, object, message] = next("WrittenRepeatedly").await;
        assert_eq!([&*event_type, &*kind, &*object], ["Warning", "StatefulSet", "db"]);
        assert!(message.contains("written 31 times"), "{message}");
        shared.record_object_events(vec![ObjectEventRecord {
            resource: ResourceKind::Service,
            name,
            uid: "s".into(),
            is_warning: false,
            reason: "ReplicasManaged".into(),
            message: "remove spec.replicas".into(),
        }]);
        let expected = ["Normal", "Service", "db", "remove spec.replicas"];
        assert_eq!(next("ReplicasManaged").await, expected);
        shutdown.cancel();
    }

    #[tokio::test(start_paused = true)]
    async fn an_error_of_a_resize_is_recorded_on_its_pod() {
        let (client, mut events) = api_server();
        let shutdown = CancellationToken::new();
        let (shared, _writer) = recording_runtime(client, &shutdown);
        let observe = |resource, name: &str, mut object: Value| {
            let name = NamespacedName::new("default", name);
            object["metadata"]["name"] = json!(name.name.as_str());
            object["metadata"]["namespace"] = json!("default");
            let object = Some(Box::new(object));
            shared.step(ControllerEvent::ObjectObserved { resource, name, object });
        };
        let spec = json!({"containers": [{"name": "main", "image": "a"}]});
        let labels = json!({
            "serving.knative.dev/configuration": "hello",
            "serving.knative.dev/configurationGeneration": "1",
            "serving.knative.dev/revision": "hello-00001",
        });
        let uid = |last: u32| format!("00000000-0000-4000-8000-{last:012}");
        let metadata = json!({"uid": uid(1), "generation": 1});
        let template = json!({"spec": spec});
        let configuration = json!({"metadata": metadata, "spec": {"template": template}});
        observe(ResourceKind::Configuration, "hello", configuration);
        let metadata = json!({"uid": uid(2), "labels": labels});
        let revision = json!({"metadata": metadata, "spec": spec});
        observe(ResourceKind::Revision, "hello-00001", revision);
        let annotations = json!({"rouse.dev/original-requests": "{}"});
        let metadata = json!({"uid": uid(3), "labels": labels, "annotations": annotations});
        observe(ResourceKind::Pod, "hello-00001-deployment-a", json!({"metadata": metadata}));
        shared.step(ControllerEvent::LeadershipChanged(true));
        let pod = NamespacedName::new("default", "hello-00001-deployment-a");
        let key = ObjectPartKey::new(ResourceKind::Pod, ObjectPart::Resize, pod);
        let message = "exceeded quota".to_owned();
        shared.write_result(&key, Some(WriteError { reason: "RequestsNotRestored", message }));
        let event = next_event(&mut events, "RequestsNotRestored");
        let event = timeout(Duration::from_secs(60), event).await.expect("an Event");
        assert_eq!(event, ["Warning", "Pod", "hello-00001-deployment-a", "exceeded quota"]);
        shutdown.cancel();
    }

    /// An owner that was deleted and created again under the same name is another one.
    #[tokio::test(start_paused = true)]
    async fn children_missing_again_after_their_owner_was_replaced_are_reported_again() {
        let (client, mut events) = api_server();
        let shutdown = CancellationToken::new();
        let (shared, _writer) = recording_runtime(client, &shutdown);
        let name = NamespacedName::new("default", "hello");
        let missing = [ObjectPartKey::new(ResourceKind::Service, ObjectPart::Object, name.clone())];
        let report = |uid| {
            let owner = (ResourceKind::Route, name.clone(), Uid(uid));
            let required = RequiredChildren { owner, keys: missing.to_vec() };
            shared.children_missing(&name, &required, &missing);
        };
        for uid in [1, 2] {
            report(uid);
            let event =
                timeout(Duration::from_secs(60), next_event(&mut events, "ChildrenMissing"));
            assert_eq!(event.await.expect("an Event")[1], "Route", "UID {uid}");
        }
        shared.step(ControllerEvent::ObjectObserved {
            resource: ResourceKind::Route,
            name: name.clone(),
            object: None,
        });
        let incomplete_owners = shared.incomplete_owners.lock().expect("no panic");
        assert!(incomplete_owners.is_empty(), "{incomplete_owners:?}");
        drop(incomplete_owners);
        shutdown.cancel();
    }
}
