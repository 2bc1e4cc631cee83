//! Shell: writes of objects that differ from their desired state, while this replica is the leader.
//!
//! This writer and its [queue](super::write_queue) replace kube-runtime's `Controller`, which does not meet five
//! needs:
//!
//! - **Lanes.** `Controller` has one order and one limit for all reconciles. With statuses written 32 at a time beside
//!   it, scale reached 42 writes a second (commit 1b4d77d). With a lane of its own it reaches 645 to 792
//!   ([`WriteLimits`]).
//! - **Parts.** A key names a part of an object: scale, object or status. `Controller` reconciles an object as a whole,
//!   so a slow status would delay the scale of the same object.
//! - **Memory.** `Controller` keeps whole objects in a store. The [cache](super::object_cache) keeps about a hundred
//!   bytes of each. A restart with 10,000 services and 100,000 pods takes 612 MiB instead of 3.0 GB, which the watches'
//!   trimmed objects contribute to (commit 0339f87).
//! - **Checks without tasks.** After a start, every key is checked and nearly none differs. The loop checks 64 keys a
//!   turn, and only a difference starts a task. That restart is at rest after 10.4 s instead of 12.3 s (commit
//!   b6f4a2f); `Controller` makes a future for each key.
//! - **One leader.** A write begins only while the lease permits it, and writes under way end with the permission
//!   ([`Leadership`]). `Controller` knows no leader.
//!
//! `cargo xtask bench resync` measures a restart.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use common::wire::NamespacedName;
use kube::Client;
use tokio::{
    sync::Notify,
    task::JoinSet,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{
    DesiredStateSource,
    child_checks::ChildCheckSchedule,
    leader_election::Leadership,
    metrics::ApiServerMetrics,
    object_cache::{ObjectCache, ObservedObject},
    repeated_writes::RepeatedWrites,
    watch_scope::WatchScope,
    write_decision::{AppliedStatus, WriteAction, next_write},
    write_outcome::WriteOutcome,
    write_queue::{WriteLimits, WriteQueue},
};
use crate::model::{
    cluster_state::UnixMillis,
    object::{ObjectPart, ObjectPartKey, PodRequests, ResourceKind},
};

mod requests;
mod resizes;

/// Number of keys examined before other events get their turn.
const KEYS_PER_TURN: usize = 64;
/// Timeout of one request to the API server.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Writer of objects: the queue, the cache of observed objects, and the requests.
pub struct ObjectWriter {
    client: Client,
    state: Mutex<WriterState>,
    wake: Notify,
    started_at: Instant,
    /// Time of day at `started_at`, in seconds since 1970.
    started_at_s: u64,
    metrics: Arc<ApiServerMetrics>,
}

#[derive(Debug)]
struct WriterState {
    queue: WriteQueue,
    cache: ObjectCache,
    applied_statuses: HashMap<ObjectPartKey, AppliedStatus>,
    repeated_writes: RepeatedWrites,
    /// Scales that the API server refused, since the workload has changed. The next observation of it decides again.
    conflicting_scales: HashSet<ObjectPartKey>,
    /// Pods whose requests this leader has reduced, each with its UID and these requests.
    reduced_pods: HashMap<ObjectPartKey, (Box<str>, PodRequests)>,
    /// True if the API server can resize pods, with the time until which this is not asked again.
    resize_support: Option<(bool, UnixMillis)>,
    child_checks: ChildCheckSchedule,
}

impl std::fmt::Debug for ObjectWriter {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("ObjectWriter").field("state", &self.state).finish_non_exhaustive()
    }
}

impl ObjectWriter {
    /// Returns a writer with an empty queue.
    pub fn new(client: Client, limits: WriteLimits, metrics: Arc<ApiServerMetrics>) -> Self {
        let state = WriterState::new(limits);
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self {
            client,
            state: Mutex::new(state),
            wake: Notify::new(),
            started_at: Instant::now(),
            started_at_s: since.unwrap_or_default().as_secs(),
            metrics,
        }
    }

    fn with_state<T>(&self, update: impl FnOnce(&mut WriterState) -> T) -> T {
        // A panic cannot leave the state half changed, so a poisoned lock is safe to use.
        update(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn now(&self) -> UnixMillis {
        UnixMillis(u64::try_from(self.started_at.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    /// Adds keys, to be written as soon as the limits permit.
    pub fn add(&self, keys: impl IntoIterator<Item = ObjectPartKey>) {
        let any = self.with_state(|state| {
            let old_length = state.queue.lengths().0;
            keys.into_iter().for_each(|key| state.queue.add(key));
            old_length != state.queue.lengths().0
        });
        if any {
            self.wake.notify_one();
        }
    }

    /// Schedules a check that the planned objects of these apps exist.
    pub fn schedule_checks(&self, apps: impl IntoIterator<Item = NamespacedName>) {
        let (now, mut any) = (self.now(), false);
        self.with_state(|state| {
            apps.into_iter().for_each(|app| {
                any = true;
                state.child_checks.schedule(app, now);
            });
        });
        if any {
            self.wake.notify_one();
        }
    }

    /// Returns the numbers of keys that are ready, that wait for a time, and that are being written.
    pub fn queue_lengths(&self) -> (usize, usize, usize) {
        self.with_state(|state| state.queue.lengths())
    }

    /// Returns the cache's entry of an object, if it is known.
    pub fn observed(
        &self,
        resource: ResourceKind,
        name: &NamespacedName,
    ) -> Option<ObservedObject> {
        self.with_state(|state| state.cache.get(resource, name).cloned())
    }

    /// Begins a full list of a watch's objects.
    pub fn begin_list(&self, scope: &WatchScope) {
        self.with_state(|state| state.cache.begin_list(scope));
    }

    /// Ends a full list. Returns the objects that the list did not name: they are deleted. Each must be passed to
    /// [`handle_deleted`](Self::handle_deleted), after its deletion has changed the desired state.
    #[must_use]
    pub fn end_list(&self, scope: &WatchScope) -> Vec<NamespacedName> {
        self.with_state(|state| state.cache.end_list(scope))
    }

    /// Returns true if an object is known and not in this scope any more: another watch of its kind has it now.
    pub fn has_left(&self, scope: &WatchScope, name: &NamespacedName) -> bool {
        self.with_state(|state| state.cache.has_left(scope, name))
    }

    /// Stores an observed object. If the controller made it and it changed, its desired state is checked again.
    pub fn handle_observed(
        &self,
        resource: ResourceKind,
        name: &NamespacedName,
        observed: ObservedObject,
    ) {
        self.with_state(|state| state.handle_observed(resource, name, observed));
        self.wake.notify_one();
    }

    /// Handles the deletion of an object. If the desired state still contains the object, it is created again.
    pub fn handle_deleted(&self, resource: ResourceKind, name: &NamespacedName) {
        self.with_state(|state| state.handle_deleted(resource, name));
        self.wake.notify_one();
    }

    /// Writes until `shutdown`, whenever `leadership` permits it.
    pub async fn run(
        self: Arc<Self>,
        source: Arc<dyn DesiredStateSource>,
        mut leadership: Leadership,
        shutdown: CancellationToken,
    ) {
        let mut tasks: JoinSet<()> = JoinSet::new();
        let mut was_leader = false;
        loop {
            let is_leader = leadership.may_write();
            if was_leader && !is_leader {
                // Requests under way are dropped: they might arrive after a write of the next leader.
                tasks.shutdown().await;
                self.with_state(WriterState::reset);
            }
            if was_leader != is_leader {
                source.leadership_changed(is_leader);
            }
            was_leader = is_leader;
            self.metrics.set_leader(is_leader);
            // One time for all steps: a key that is due later than it sets the delay below.
            let now = self.now();
            let mut examined = 0;
            while is_leader
                && examined < KEYS_PER_TURN
                && let Some(key) = self.with_state(|state| state.queue.next(now))
            {
                examined += 1;
                // Most often nothing differs, which needs no task.
                let Some(action) = self.prepare_action(&key, &*source) else { continue };
                let (writer, source, leadership) =
                    (Arc::clone(&self), Arc::clone(&source), leadership.clone());
                tasks.spawn(async move { writer.write(key, action, &*source, &leadership).await });
            }
            self.metrics.set_queue_lengths(self.with_state(|state| state.queue.lengths()));
            let is_more =
                examined == KEYS_PER_TURN || (is_leader && self.report_missing(&*source, now));
            let next = self.with_state(|state| state.next_at(now, is_leader));
            // A key may have become due meanwhile; then the delay is zero.
            let wait = next.map(|at| Duration::from_millis(at.0.saturating_sub(self.now().0)));
            tokio::select! {
                () = self.wake.notified() => {}
                Some(_) = tasks.join_next() => {}
                () = leadership.changed() => {}
                () = sleep_if_due(wait) => {}
                () = tokio::task::yield_now(), if is_more => {}
                () = shutdown.cancelled() => return,
            }
        }
    }

    /// Returns the next write of a key, if its observed state differs from the desired one.
    fn prepare_action(
        &self,
        key: &ObjectPartKey,
        source: &dyn DesiredStateSource,
    ) -> Option<WriteAction> {
        // The lock of the state is not held while the source takes its own.
        let desired = source.desired_state(key);
        let (observed, applied_status) = self.with_state(|state| {
            let observed = state.cache.get(key.resource, &key.name).cloned();
            (observed, state.applied_statuses.get(key).copied())
        });
        let action = next_write(key, desired, observed.as_ref(), applied_status);
        if action == WriteAction::None || self.is_resized(key, &action) {
            self.with_state(|state| state.queue.refund_slice(key));
            self.finish(key, &WriteOutcome::Done, source);
            return None;
        }
        if self.is_delayed_repeat(key, &action, source) {
            return None;
        }
        // Marked before the request begins, so that a deletion during the request is noticed.
        self.with_state(|state| state.cache.begin_request(key));
        Some(action)
    }

    /// Returns true if the object was written with this content so often that the write must wait.
    fn is_delayed_repeat(
        &self,
        key: &ObjectPartKey,
        action: &WriteAction,
        source: &dyn DesiredStateSource,
    ) -> bool {
        let Some((body, content_hash)) = action.content() else { return false };
        let now = self.now();
        let Some(wait) =
            self.with_state(|state| state.repeated_writes.delay(key, content_hash, now))
        else {
            return false;
        };
        if wait.is_unreported {
            warn!(object = %key, writes = wait.writes, "object written repeatedly with equal content");
            source.written_repeatedly(key, body, wait.writes);
        }
        let outcome = WriteOutcome::Repeated(wait.delay_ms);
        self.metrics.record_write(key, &outcome, Duration::ZERO);
        // As the end of an attempt, so that the queue gives the key out again after the delay.
        self.finish(key, &outcome, source);
        true
    }

    /// Reports planned objects that still do not exist. Returns true if more apps are due.
    fn report_missing(&self, source: &dyn DesiredStateSource, now: UnixMillis) -> bool {
        for _ in 0..KEYS_PER_TURN {
            let Some(app) = self.with_state(|state| state.child_checks.next_due(now)) else {
                return false;
            };
            for children in source.required_children(&app) {
                let is_there = |key: &ObjectPartKey, state: &WriterState| {
                    state.cache.get(key.resource, &key.name).is_some()
                };
                let missing: Vec<ObjectPartKey> = self.with_state(|state| {
                    children.keys.iter().filter(|it| !is_there(it, state)).cloned().collect()
                });
                source.children_missing(&app, &children, &missing);
                // Their write is tried once more, and the next check reports success or failure.
                if !missing.is_empty() {
                    self.add(missing);
                    self.schedule_checks([app.clone()]);
                }
            }
        }
        true
    }

    /// Performs one action within the time limit, and records its outcome.
    async fn write(
        &self,
        key: ObjectPartKey,
        action: WriteAction,
        source: &dyn DesiredStateSource,
        leadership: &Leadership,
    ) {
        let began = Instant::now();
        let content_hash = action.content().map(|(_, hash)| hash);
        // The permission may have ended since the task was spawned.
        let outcome = if leadership.may_write() {
            let done = timeout(REQUEST_TIMEOUT, self.perform(&key, action, source)).await;
            done.unwrap_or(WriteOutcome::Retry(None))
        } else {
            WriteOutcome::Abandoned
        };
        self.metrics.record_write(&key, &outcome, began.elapsed());
        // Only successful writes count: a failed one has a backoff of its own.
        if let Some(content_hash) = content_hash.filter(|_| outcome == WriteOutcome::Done) {
            self.with_state(|state| {
                state.repeated_writes.record_write(&key, content_hash, self.now())
            });
        }
        self.finish(&key, &outcome, source);
    }

    /// Reports the outcome of an attempt, and gives the key back to the queue.
    fn finish(&self, key: &ObjectPartKey, outcome: &WriteOutcome, source: &dyn DesiredStateSource) {
        match outcome {
            WriteOutcome::Done => source.write_result(key, None),
            WriteOutcome::Retry(Some(error)) | WriteOutcome::Refused(error) => {
                warn!(object = %key, reason = error.reason, message = error.message, "not written");
                source.write_result(key, Some(error.clone()));
            }
            WriteOutcome::Unsupported(error) => {
                // No warning: the cluster lacks the kind, and nothing is wrong with the object.
                info!(object = %key, reason = error.reason, message = error.message, "not written");
                source.write_result(key, Some(error.clone()));
            }
            WriteOutcome::Conflict
            | WriteOutcome::NotFound
            | WriteOutcome::Retry(None)
            | WriteOutcome::RetryAfter(_)
            | WriteOutcome::Repeated(_)
            | WriteOutcome::Abandoned => {
                debug!(object = %key, outcome = outcome.label(), "not written")
            }
        }
        self.with_state(|state| state.finish(key, outcome, self.now()));
        self.wake.notify_one();
    }
}

impl WriterState {
    fn new(limits: WriteLimits) -> Self {
        Self {
            queue: WriteQueue::new(limits),
            cache: ObjectCache::default(),
            applied_statuses: HashMap::new(),
            repeated_writes: RepeatedWrites::default(),
            conflicting_scales: HashSet::new(),
            reduced_pods: HashMap::new(),
            resize_support: None,
            child_checks: ChildCheckSchedule::default(),
        }
    }

    /// Returns the time at which there may be work by time alone.
    fn next_at(&mut self, now: UnixMillis, is_leader: bool) -> Option<UnixMillis> {
        self.repeated_writes.expire(now);
        let due = self.child_checks.next_at().filter(|_| is_leader);
        self.queue.next_at(now).into_iter().chain(due).min()
    }

    /// Ends the write of a key.
    fn finish(&mut self, key: &ObjectPartKey, outcome: &WriteOutcome, now: UnixMillis) {
        self.cache.end_request(key);
        if key.part == ObjectPart::Scale && *outcome == WriteOutcome::Conflict {
            self.conflicting_scales.insert(key.clone());
        } else {
            self.conflicting_scales.remove(key);
        }
        self.queue.finish(key, outcome, now);
    }

    /// Stores an observed object, and adds to the queue the parts of it that may have to be written.
    fn handle_observed(
        &mut self,
        resource: ResourceKind,
        name: &NamespacedName,
        observed: ObservedObject,
    ) {
        // The state machine knows this version now, also if a read after the conflict had stored it here before.
        let scale = scale_key(resource, name);
        if let Some(key) = scale.filter(|it| self.conflicting_scales.remove(it)) {
            self.queue.add(key);
        }
        let ours = observed.applied_hash.is_some();
        // The record of a scaled Service's workload, now or before.
        let has_record = |it: &ObservedObject| it.scaled_to.is_some();
        let is_recorded =
            has_record(&observed) || self.cache.get(resource, name).is_some_and(has_record);
        if !self.cache.apply_watched(resource, name, observed) {
            return;
        }
        if ours {
            self.queue.add(ObjectPartKey::new(resource, ObjectPart::Object, name.clone()));
        }
        // The state machine had this version first. A scale that it decided may have been compared with the version
        // before, which had the same number, and nothing would name the scale again.
        if ours || is_recorded {
            scale_key(resource, name).into_iter().for_each(|key| self.queue.add(key));
        }
        // Only if this leader has written the status: others, such as a Pod's, belong to other controllers.
        let status = ObjectPartKey::new(resource, ObjectPart::Status, name.clone());
        if self.applied_statuses.contains_key(&status) {
            self.queue.add(status);
        }
    }

    /// Handles a deleted object: it may have to be created again, or may have blocked another one.
    fn handle_deleted(&mut self, resource: ResourceKind, name: &NamespacedName) {
        self.cache.remove(resource, name);
        self.applied_statuses.remove(&ObjectPartKey::new(
            resource,
            ObjectPart::Status,
            name.clone(),
        ));
        if resource == ResourceKind::Pod {
            let resize = ObjectPartKey::new(resource, ObjectPart::Resize, name.clone());
            self.reduced_pods.remove(&resize);
        }
        // The writer compares with the desired state first, so an object that is no longer desired costs only that.
        self.queue.add(ObjectPartKey::new(resource, ObjectPart::Object, name.clone()));
    }

    fn reset(&mut self) {
        // The observed objects stay in the cache, since the watches continue without a new list.
        self.queue.clear();
        self.cache.end_all_requests();
        self.applied_statuses.clear();
        self.conflicting_scales.clear();
        // Another leader may resize the same pods from now on.
        self.reduced_pods.clear();
        self.resize_support = None;
        self.child_checks.clear();
    }
}

/// Returns the parts whose writes had no effect before the object existed.
fn keys_after_creation(key: &ObjectPartKey) -> impl Iterator<Item = ObjectPartKey> {
    let status = ObjectPartKey::new(key.resource, ObjectPart::Status, key.name.clone());
    [status].into_iter().chain(scale_key(key.resource, &key.name))
}

/// Returns the key of a workload's scale, which an apply of the object never writes.
fn scale_key(resource: ResourceKind, name: &NamespacedName) -> Option<ObjectPartKey> {
    let scales = matches!(resource, ResourceKind::Deployment | ResourceKind::StatefulSet);
    scales.then(|| ObjectPartKey::new(resource, ObjectPart::Scale, name.clone()))
}

async fn sleep_if_due(wait: Option<Duration>) {
    match wait {
        Some(wait) => tokio::time::sleep(wait).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::{
            cluster_state::Uid,
            object::{DesiredState, WriteError},
        },
        write::desired::RequiredChildren,
    };
    use hyper::{Method, Request, Response};
    use serde_json::{Value, json};
    use tokio::sync::{mpsc, oneshot};

    fn state() -> WriterState {
        WriterState::new(WriteLimits::default())
    }

    fn key(resource: ResourceKind, part: ObjectPart) -> ObjectPartKey {
        ObjectPartKey::new(resource, part, NamespacedName::new("default", "a"))
    }

    fn seen(annotations: &Value, version: &str) -> ObservedObject {
        let meta = json!({"name": "a", "namespace": "default", "resourceVersion": version, "annotations": annotations});
        ObservedObject::from_object(&json!({"metadata": meta, "spec": {"replicas": 0}}))
    }

    /// Source without desired state, which must not be asked before it is the leader.
    #[derive(Default)]
    struct FakeLeaderSource {
        is_leader: std::sync::atomic::AtomicBool,
        state_requested: Notify,
    }

    impl DesiredStateSource for FakeLeaderSource {
        fn leadership_changed(&self, is_leader: bool) {
            self.is_leader.store(is_leader, std::sync::atomic::Ordering::Relaxed);
        }

        fn desired_state(&self, key: &ObjectPartKey) -> DesiredState {
            let is_leader = self.is_leader.load(std::sync::atomic::Ordering::Relaxed);
            assert!(is_leader, "{key} is requested of a replica that is not the leader");
            self.state_requested.notify_one();
            DesiredState::Unmanaged
        }

        fn object_created(&self, _key: &ObjectPartKey, _body: &Value) {}

        fn write_result(&self, _key: &ObjectPartKey, _error: Option<WriteError>) {}

        fn required_children(&self, _app: &NamespacedName) -> Vec<RequiredChildren> {
            Vec::new()
        }

        fn children_missing(
            &self,
            _app: &NamespacedName,
            _required_children: &RequiredChildren,
            _missing: &[ObjectPartKey],
        ) {
        }

        fn written_repeatedly(&self, _key: &ObjectPartKey, _body: &Value, _writes: u32) {}
    }

    /// Objects observed at the start are examined once the Lease is acquired. Examined earlier, every scale would be 0.
    #[tokio::test(start_paused = true)]
    async fn nothing_is_checked_before_the_replica_leads() {
        let nowhere = kube::Config::new("http://127.0.0.1:1".parse().expect("a URL"));
        let client = Client::try_from(nowhere).expect("a client");
        let writer = Arc::new(ObjectWriter::new(client, WriteLimits::default(), Arc::default()));
        let annotations =
            json!({crate::model::object::hash::APPLIED_ANNOTATION: "0000000000000001"});
        writer.handle_observed(
            ResourceKind::Deployment,
            &NamespacedName::new("default", "a"),
            seen(&annotations, "7"),
        );
        let source = Arc::new(FakeLeaderSource::default());
        let run = Arc::clone(&writer).run(
            Arc::clone(&source) as Arc<dyn DesiredStateSource>,
            Leadership::permanent(),
            CancellationToken::new(),
        );
        let checked = async {
            tokio::select! {
                () = run => {}
                () = source.state_requested.notified() => {}
            }
        };
        timeout(Duration::from_secs(60), checked).await.expect("its desired state is requested");
    }

    /// Source that requires a Deployment and desires its absence, so that the writer reports it as missing.
    #[derive(Default)]
    struct FakeMissingChildSource(Notify);

    impl DesiredStateSource for FakeMissingChildSource {
        fn leadership_changed(&self, _is_leader: bool) {}

        fn desired_state(&self, _key: &ObjectPartKey) -> DesiredState {
            DesiredState::Absent
        }

        fn object_created(&self, _key: &ObjectPartKey, _body: &Value) {}

        fn write_result(&self, _key: &ObjectPartKey, _error: Option<WriteError>) {}

        fn required_children(&self, app: &NamespacedName) -> Vec<RequiredChildren> {
            let owner = (ResourceKind::Revision, app.clone(), Uid(1));
            vec![RequiredChildren {
                owner,
                keys: vec![key(ResourceKind::Deployment, ObjectPart::Object)],
            }]
        }

        fn children_missing(
            &self,
            _app: &NamespacedName,
            required_children: &RequiredChildren,
            missing: &[ObjectPartKey],
        ) {
            assert_eq!(missing, required_children.keys);
            self.0.notify_one();
        }

        fn written_repeatedly(&self, _key: &ObjectPartKey, _body: &Value, _writes: u32) {}
    }

    #[tokio::test(start_paused = true)]
    async fn a_required_object_that_is_never_written_is_reported_within_ten_seconds() {
        let nowhere = kube::Config::new("http://127.0.0.1:1".parse().expect("a URL"));
        let client = Client::try_from(nowhere).expect("a client");
        let writer = Arc::new(ObjectWriter::new(client, WriteLimits::default(), Arc::default()));
        let source = Arc::new(FakeMissingChildSource::default());
        writer.schedule_checks([NamespacedName::new("default", "a")]);
        let run = Arc::clone(&writer).run(
            Arc::clone(&source) as Arc<dyn DesiredStateSource>,
            Leadership::permanent(),
            CancellationToken::new(),
        );
        let reported = async {
            tokio::select! {
                () = run => {}
                () = source.0.notified() => {}
            }
        };
        timeout(Duration::from_secs(10), reported).await.expect("it is reported");
        // The check is repeated while the object is missing.
        assert!(writer.with_state(|state| state.child_checks.next_at()).is_some());
    }

    /// Source that wants one Kubernetes Service.
    struct FakeServiceSource;

    impl DesiredStateSource for FakeServiceSource {
        fn leadership_changed(&self, _is_leader: bool) {}

        fn desired_state(&self, key: &ObjectPartKey) -> DesiredState {
            match (key.resource, key.part) {
                (ResourceKind::Service, ObjectPart::Object) => {
                    DesiredState::Body(json!({"metadata": {"name": "a"}}))
                }
                _ => DesiredState::Unmanaged,
            }
        }

        fn object_created(&self, _key: &ObjectPartKey, _body: &Value) {}

        fn write_result(&self, _key: &ObjectPartKey, _error: Option<WriteError>) {}

        fn required_children(&self, _app: &NamespacedName) -> Vec<RequiredChildren> {
            Vec::new()
        }

        fn children_missing(
            &self,
            _app: &NamespacedName,
            _required_children: &RequiredChildren,
            _missing: &[ObjectPartKey],
        ) {
        }

        fn written_repeatedly(&self, _key: &ObjectPartKey, _body: &Value, _writes: u32) {}
    }

    type FakeApiCall = (Method, oneshot::Sender<(u16, Value)>);

    /// Returns an API server whose responses the test sends.
    fn api_server() -> (Client, mpsc::Receiver<FakeApiCall>) {
        let (sender, calls) = mpsc::channel::<FakeApiCall>(1);
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let (response, responded) = oneshot::channel();
            let (sender, method) = (sender.clone(), request.method().clone());
            async move {
                sender.send((method, response)).await.expect("the test goes on");
                let (code, body) = responded.await.expect("a response");
                let body = kube::client::Body::from(body.to_string().into_bytes());
                Response::builder().status(code).body(body)
            }
        });
        (Client::new(service, "default"), calls)
    }

    /// Another client may delete an object before the response to its creation arrives.
    #[tokio::test(start_paused = true)]
    async fn an_object_deleted_before_the_response_to_its_creation_is_created_again() {
        let (client, mut calls) = api_server();
        let writer = Arc::new(ObjectWriter::new(client, WriteLimits::default(), Arc::default()));
        let shutdown = CancellationToken::new();
        let run = Arc::clone(&writer).run(
            Arc::new(FakeServiceSource),
            Leadership::permanent(),
            shutdown.clone(),
        );
        let run = tokio::spawn(run);
        let mut next = async |method: Method| {
            let (has, response) =
                timeout(Duration::from_secs(600), calls.recv()).await.unwrap().unwrap();
            assert_eq!(has, method);
            response
        };
        let none =
            json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404});
        let key = key(ResourceKind::Service, ObjectPart::Object);
        writer.add([key.clone()]);
        next(Method::GET).await.send((404, none.clone())).unwrap();
        let response = next(Method::PATCH).await;
        let created = json!({"metadata": {"name": "a", "uid": "u", "resourceVersion": "1"}});
        writer.handle_observed(
            ResourceKind::Service,
            &key.name,
            ObservedObject::from_object(&created),
        );
        writer.handle_deleted(ResourceKind::Service, &key.name);
        response.send((200, created)).unwrap();
        next(Method::GET).await.send((404, none)).unwrap();
        let recreated = json!({"metadata": {"name": "a", "uid": "v", "resourceVersion": "3"}});
        next(Method::PATCH).await.send((200, recreated)).unwrap();
        shutdown.cancel();
        run.await.unwrap();
    }

    fn drain_queue(state: &mut WriterState) -> Vec<ObjectPartKey> {
        std::iter::from_fn(|| state.queue.next(UnixMillis(1))).collect()
    }

    /// A scale may be decided while the Deployment is being created. It has nothing to scale then, and is not decided a
    /// second time while the requests wait.
    #[test]
    fn a_created_object_gets_the_scale_decided_meanwhile() {
        let of =
            |resource| keys_after_creation(&key(resource, ObjectPart::Object)).collect::<Vec<_>>();
        let both =
            [ObjectPart::Status, ObjectPart::Scale].map(|part| key(ResourceKind::Deployment, part));
        assert_eq!(of(ResourceKind::Deployment), both);
        assert_eq!(of(ResourceKind::Service), [key(ResourceKind::Service, ObjectPart::Status)]);
    }

    #[test]
    fn a_changed_deployment_is_checked_with_its_scale() {
        let annotations =
            json!({crate::model::object::hash::APPLIED_ANNOTATION: "0000000000000001"});
        let (mut state, name) = (state(), NamespacedName::new("default", "a"));
        state.handle_observed(ResourceKind::Deployment, &name, seen(&annotations, "7"));
        let both =
            [ObjectPart::Scale, ObjectPart::Object].map(|part| key(ResourceKind::Deployment, part));
        assert_eq!(drain_queue(&mut state), both);
        both.iter().for_each(|key| state.queue.finish(key, &WriteOutcome::Done, UnixMillis(1)));
        state.handle_observed(ResourceKind::Deployment, &name, seen(&annotations, "7"));
        assert_eq!(drain_queue(&mut state), [], "nothing has changed");
        state.handle_observed(ResourceKind::Deployment, &name, seen(&json!({}), "8"));
        assert_eq!(drain_queue(&mut state), [], "without the annotation it is not ours any more");
    }

    /// The delay after a failure may be long, and the observed version is the one that the next decision follows from.
    #[test]
    fn a_scale_with_a_conflict_is_decided_again_once_its_workload_is_observed() {
        let (mut state, name) = (state(), NamespacedName::new("default", "a"));
        let resource = ResourceKind::StatefulSet;
        let scale = [key(resource, ObjectPart::Scale)];
        state.handle_observed(resource, &name, seen(&json!({}), "7"));
        assert_eq!(drain_queue(&mut state), [], "a user's own is not checked");
        state.queue.add(scale[0].clone());
        assert_eq!(drain_queue(&mut state), scale);
        state.finish(&scale[0], &WriteOutcome::Conflict, UnixMillis(1));
        assert_eq!(drain_queue(&mut state), [], "it waits");
        // A read after the conflict stores the version before the watch reports it.
        assert!(state.cache.apply_watched(resource, &name, seen(&json!({}), "8")));
        state.handle_observed(resource, &name, seen(&json!({}), "8"));
        assert_eq!(drain_queue(&mut state), scale);
        state.finish(&scale[0], &WriteOutcome::Done, UnixMillis(1));
        state.handle_observed(resource, &name, seen(&json!({}), "9"));
        assert_eq!(drain_queue(&mut state), [], "the conflict is over");
    }

    /// The state machine has a version before the cache: the writer may find nothing to write for what another client
    /// has just changed.
    #[test]
    fn a_watch_update_of_a_workload_with_a_record_is_checked() {
        use crate::model::knative::key::{SCALED_TO, USER_REPLICAS};
        let (mut state, name) = (state(), NamespacedName::new("default", "a"));
        let resource = ResourceKind::StatefulSet;
        let scale = [key(resource, ObjectPart::Scale)];
        let (record, none) = (json!({SCALED_TO: "3", USER_REPLICAS: "3"}), json!({}));
        for (annotations, version) in [(&record, "5"), (&record, "6"), (&none, "7")] {
            state.handle_observed(resource, &name, seen(annotations, version));
            assert_eq!(drain_queue(&mut state), scale, "{version}");
            state.finish(&scale[0], &WriteOutcome::Done, UnixMillis(1));
        }
        state.handle_observed(resource, &name, seen(&none, "8"));
        assert_eq!(drain_queue(&mut state), [], "it is a user's own");
    }

    /// An entry that was removed sooner would let the writer create an object again that is desired only until the
    /// state machine knows of its deletion.
    #[tokio::test]
    async fn the_end_of_a_list_keeps_missing_objects_until_their_deletion_is_handled() {
        let (client, _calls) = api_server();
        let writer = ObjectWriter::new(client, WriteLimits::default(), Arc::default());
        let (resource, name) = (ResourceKind::Revision, NamespacedName::new("default", "a"));
        let scopes = crate::shell::api::watch_scope::watch_scopes("default-system");
        let scope = scopes.iter().find(|it| it.resource == resource).expect("it is watched");
        writer.handle_observed(resource, &name, seen(&json!({}), "7"));
        writer.begin_list(scope);
        assert_eq!(writer.end_list(scope), std::slice::from_ref(&name));
        assert!(writer.observed(resource, &name).is_some());
        assert_eq!(writer.queue_lengths().0, 0, "nothing is checked before the machine's step");
        writer.handle_deleted(resource, &name);
        assert_eq!((writer.observed(resource, &name), writer.queue_lengths().0), (None, 1));
    }

    /// The response to a scale does not contain changes of other clients.
    #[test]
    fn a_watch_update_of_a_scaled_deployment_is_checked() {
        let annotations =
            json!({crate::model::object::hash::APPLIED_ANNOTATION: "0000000000000001"});
        let (mut state, name) = (state(), NamespacedName::new("default", "a"));
        let both =
            [ObjectPart::Scale, ObjectPart::Object].map(|part| key(ResourceKind::Deployment, part));
        state.handle_observed(ResourceKind::Deployment, &name, seen(&annotations, "7"));
        assert_eq!(drain_queue(&mut state), both);
        both.iter().for_each(|key| state.queue.finish(key, &WriteOutcome::Done, UnixMillis(1)));
        state.cache.apply_scale(ResourceKind::Deployment, &name, "9", 3);
        let replicas = |state: &WriterState| {
            state.cache.get(ResourceKind::Deployment, &name).and_then(|it| it.replicas)
        };
        state.handle_observed(ResourceKind::Deployment, &name, seen(&annotations, "8"));
        assert_eq!((drain_queue(&mut state), replicas(&state)), (vec![], Some(3)), "it is older");
        state.handle_observed(ResourceKind::Deployment, &name, seen(&annotations, "9"));
        assert_eq!(drain_queue(&mut state), both);
    }
}
