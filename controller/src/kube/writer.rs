//! Shell: writes of objects that differ from their desired state, while this replica is the leader.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use common::wire::NamespacedName;
use k8s_openapi::api::autoscaling::v1::{Scale, ScaleSpec};
use kube::{
    Client,
    api::{DeleteParams, DynamicObject, ObjectMeta, Patch, PatchParams, PostParams, Preconditions},
    core::Status,
};
use serde_json::{Value, json};
use tokio::{
    sync::Notify,
    task::JoinSet,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{
    DesiredStateSource, FIELD_MANAGER, ObjectPart, ObjectPartKey,
    cache::{ObjectCache, ObservedObject, applied},
    client::api_of,
    decide::{WriteAction, decide},
    lead::Leadership,
    metrics::ApiServerMetrics,
    outcome::{ApiResponse, WriteOutcome, outcome},
    promises::ChildCheckSchedule,
    queue::{WriteLimits, WriteQueue},
    repeats::RepeatedWrites,
    scope::{self, WatchScope},
    watch::chain,
};
use crate::{children::ResourceKind, world::UnixMillis};

/// Annotation of a pod: Kubernetes removes the pods with the lowest number first.
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// Field manager that owns restored fields until the apply.
const RESTORER: &str = "rouse-restorer";
/// Number of keys examined before other events get their turn.
const AT_ONCE: usize = 64;
/// Timeout of one request to the API server.
const PATIENCE: Duration = Duration::from_secs(10);

/// Writer of objects: the queue, the cache of observed objects, and the requests.
pub struct ObjectWriter {
    client: Client,
    state: Mutex<WriterState>,
    wake: Notify,
    start: Instant,
    /// Time of day at `start`, in seconds since 1970.
    start_s: u64,
    metrics: Arc<ApiServerMetrics>,
}

#[derive(Debug)]
struct WriterState {
    queue: WriteQueue,
    cache: ObjectCache,
    /// Hash of the status applied last, and hash of the status that the API server stored.
    wrote: HashMap<ObjectPartKey, (u64, u64)>,
    repeats: RepeatedWrites,
    promises: ChildCheckSchedule,
}

impl std::fmt::Debug for ObjectWriter {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Writer").field("state", &self.state).finish_non_exhaustive()
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
            start: Instant::now(),
            start_s: since.unwrap_or_default().as_secs(),
            metrics,
        }
    }

    fn with<T>(&self, act: impl FnOnce(&mut WriterState) -> T) -> T {
        // A panic cannot leave the state half changed, so a poisoned lock is safe to use.
        act(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn now(&self) -> UnixMillis {
        UnixMillis(u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    /// Adds keys, to be written as soon as the limits permit.
    pub fn add(&self, keys: impl IntoIterator<Item = ObjectPartKey>) {
        let any = self.with(|state| {
            let before = state.queue.depth().0;
            keys.into_iter().for_each(|key| state.queue.add(key));
            before != state.queue.depth().0
        });
        if any {
            self.wake.notify_one();
        }
    }

    /// Schedules a check that the planned objects of these apps exist.
    pub fn expect(&self, apps: impl IntoIterator<Item = NamespacedName>) {
        let (now, mut any) = (self.now(), false);
        self.with(|state| {
            apps.into_iter().for_each(|app| {
                any = true;
                state.promises.add(app, now);
            });
        });
        if any {
            self.wake.notify_one();
        }
    }

    /// Returns the numbers of keys that are ready, that wait for a time, and that are being written.
    pub fn depth(&self) -> (usize, usize, usize) {
        self.with(|state| state.queue.depth())
    }

    /// Returns the facts of an object, if it is known.
    pub fn seen(&self, resource: ResourceKind, name: &NamespacedName) -> Option<ObservedObject> {
        self.with(|state| state.cache.get(resource, name).cloned())
    }

    /// Begins a full list of a watch's objects.
    pub fn begin(&self, scope: &WatchScope) {
        self.with(|state| state.cache.begin(scope));
    }

    /// Ends a full list. Returns the objects that the list did not name: they are deleted.
    pub fn synced(&self, scope: &WatchScope) -> Vec<NamespacedName> {
        let gone = self.with(|state| {
            let gone = state.cache.end(scope);
            gone.iter().for_each(|name| state.gone(scope.resource, name));
            gone
        });
        self.wake.notify_one();
        gone
    }

    /// Stores an observed object. If the controller made it and it changed, its desired state is checked again.
    pub fn see(&self, resource: ResourceKind, name: &NamespacedName, seen: ObservedObject) {
        self.with(|state| state.see(resource, name, seen));
        self.wake.notify_one();
    }

    /// Handles the deletion of an object.
    pub fn lose(&self, resource: ResourceKind, name: &NamespacedName) {
        self.with(|state| {
            state.cache.remove(resource, name);
            state.gone(resource, name);
        });
        self.wake.notify_one();
    }

    /// Writes until `shutdown`, whenever `lead` permits it.
    pub async fn run(
        self: Arc<Self>,
        source: Arc<dyn DesiredStateSource>,
        mut lead: Leadership,
        shutdown: CancellationToken,
    ) {
        let mut tasks: JoinSet<()> = JoinSet::new();
        let mut led = false;
        loop {
            let leads = lead.may_write();
            if led && !leads {
                // Requests under way are dropped: they might arrive after a write of the next leader.
                tasks.shutdown().await;
                self.with(WriterState::forget);
            }
            if led != leads {
                source.lead(leads);
            }
            led = leads;
            self.metrics.leads(leads);
            // One time for all steps: a key that is due later than it sets the delay below.
            let now = self.now();
            let mut looks = 0;
            while leads
                && looks < AT_ONCE
                && let Some(key) = self.with(|state| state.queue.next(now))
            {
                looks += 1;
                // Most often nothing differs, which needs no task.
                let Some(action) = self.look(&key, &*source) else { continue };
                let (writer, source, lead) = (Arc::clone(&self), Arc::clone(&source), lead.clone());
                tasks.spawn(async move { writer.write(key, action, &*source, &lead).await });
            }
            self.metrics.queued(self.with(|state| state.queue.depth()));
            let is_more = looks == AT_ONCE || (leads && self.look_for_missing(&*source, now));
            let next = self.with(|state| state.next_at(now, leads));
            // A key may have become due meanwhile; then the delay is zero.
            let wait = next.map(|at| Duration::from_millis(at.0.saturating_sub(self.now().0)));
            tokio::select! {
                () = self.wake.notified() => {}
                Some(_) = tasks.join_next() => {}
                () = lead.changed() => {}
                () = pause(wait) => {}
                () = tokio::task::yield_now(), if is_more => {}
                () = shutdown.cancelled() => return,
            }
        }
    }

    /// Returns the next write of a key, if its observed state differs from the desired one.
    fn look(&self, key: &ObjectPartKey, source: &dyn DesiredStateSource) -> Option<WriteAction> {
        // The lock of the state is not held while the source takes its own.
        let want = source.want(key);
        let (seen, wrote) = self.with(|state| {
            let seen = state.cache.get(key.resource, &key.name).cloned();
            (seen, state.wrote.get(key).copied())
        });
        let action = decide(key, want, seen.as_ref(), wrote);
        if action == WriteAction::None {
            self.with(|state| state.queue.spare(key));
            self.settle(key, &WriteOutcome::Done, source);
            return None;
        }
        if action.body().is_some_and(|body| self.is_repeated(key, body, source)) {
            return None;
        }
        // Marked before the request begins, so that a deletion during the request is noticed.
        self.with(|state| state.cache.ask(key));
        Some(action)
    }

    /// Returns true if the object was written with this content so often that the write must wait.
    fn is_repeated(
        &self,
        key: &ObjectPartKey,
        body: &Value,
        source: &dyn DesiredStateSource,
    ) -> bool {
        let (now, content) = (self.now(), applied(body).unwrap_or_default());
        let Some(wait) = self.with(|state| state.repeats.wait(key, content, now)) else {
            return false;
        };
        if wait.is_new {
            warn!(object = %key, writes = wait.writes, "the same is written again and again");
            source.repeated(key, body, wait.writes);
        }
        let outcome = WriteOutcome::Repeated(wait.ms);
        self.metrics.wrote(key, &outcome, Duration::ZERO);
        self.settle(key, &outcome, source);
        true
    }

    /// Reports planned objects that still do not exist. Returns true if more apps are due.
    fn look_for_missing(&self, source: &dyn DesiredStateSource, now: UnixMillis) -> bool {
        for _ in 0..AT_ONCE {
            let Some(app) = self.with(|state| state.promises.next(now)) else { return false };
            for owed in source.owed(&app) {
                let is_there = |it: &ObjectPartKey, state: &WriterState| {
                    state.cache.get(it.resource, &it.name).is_some()
                };
                let missing: Vec<ObjectPartKey> = self.with(|state| {
                    owed.keys.iter().filter(|it| !is_there(it, state)).cloned().collect()
                });
                source.missing(&app, &owed, &missing);
                // Their write is tried once more, and the next check reports success or failure.
                if !missing.is_empty() {
                    self.add(missing);
                    self.expect([app.clone()]);
                }
            }
        }
        true
    }

    async fn write(
        &self,
        key: ObjectPartKey,
        action: WriteAction,
        source: &dyn DesiredStateSource,
        lead: &Leadership,
    ) {
        let began = Instant::now();
        let content = action.body().map(|body| applied(body).unwrap_or_default());
        // The permission may have ended since the task was spawned.
        let outcome = if lead.may_write() {
            let done = timeout(PATIENCE, self.act(&key, action, source)).await;
            done.unwrap_or(WriteOutcome::Retry(None))
        } else {
            WriteOutcome::Pointless
        };
        self.metrics.wrote(&key, &outcome, began.elapsed());
        // Only successful writes count: a failed one has a backoff of its own.
        if let Some(content) = content.filter(|_| outcome == WriteOutcome::Done) {
            self.with(|state| state.repeats.wrote(&key, content, self.now()));
        }
        self.settle(&key, &outcome, source);
    }

    fn settle(&self, key: &ObjectPartKey, outcome: &WriteOutcome, source: &dyn DesiredStateSource) {
        match outcome {
            WriteOutcome::Done => source.trouble(key, None),
            WriteOutcome::Retry(Some(trouble)) | WriteOutcome::Refused(trouble) => {
                warn!(object = %key, reason = trouble.reason, message = trouble.message, "not written");
                source.trouble(key, Some(trouble.clone()));
            }
            WriteOutcome::Conflict
            | WriteOutcome::Missing
            | WriteOutcome::Retry(None)
            | WriteOutcome::RetryAfter(_)
            | WriteOutcome::Repeated(_)
            | WriteOutcome::Pointless => {
                debug!(object = %key, outcome = outcome.label(), "not written")
            }
        }
        self.with(|state| {
            state.cache.close(key);
            state.queue.done(key, outcome, self.now());
        });
        self.wake.notify_one();
    }

    async fn act(
        &self,
        key: &ObjectPartKey,
        action: WriteAction,
        source: &dyn DesiredStateSource,
    ) -> WriteOutcome {
        match action {
            WriteAction::None => WriteOutcome::Done,
            WriteAction::NotOwned(trouble) => WriteOutcome::Refused(trouble),
            WriteAction::Create(body) => self.create(key, &body, source).await,
            WriteAction::Apply(body) => self.apply(key, &body).await,
            WriteAction::Restore(body) => self.restore(key, body).await,
            WriteAction::Status(body) => self.status(key, body).await,
            WriteAction::Scale { replicas, leaving } => self.scale(key, replicas, &leaving).await,
            WriteAction::Delete(uid) => self.delete(key, &uid).await,
        }
    }

    /// Creates an object after a read: an apply cannot require absence, and would take over another owner's object.
    async fn create(
        &self,
        key: &ObjectPartKey,
        body: &Value,
        source: &dyn DesiredStateSource,
    ) -> WriteOutcome {
        let api = api_of(&self.client, key.resource, &key.name);
        match api.get_opt(&key.name.name).await {
            Ok(None) => {
                let outcome = self.apply(key, body).await;
                if outcome == WriteOutcome::Done {
                    source.made(key, body);
                    self.add(after_creation(key));
                }
                outcome
            }
            Ok(Some(object)) => {
                self.learn(key, object, false);
                // The object is in the cache now, so the next decision differs.
                WriteOutcome::Conflict
            }
            Err(error) => self.failed(key, error).await,
        }
    }

    async fn apply(&self, key: &ObjectPartKey, body: &Value) -> WriteOutcome {
        let api = api_of(&self.client, key.resource, &key.name);
        match api.patch(&key.name.name, &apply(), &Patch::Apply(body)).await {
            Ok(object) => {
                info!(object = %key, "applied");
                self.learn(key, object, true);
                WriteOutcome::Done
            }
            Err(error) => self.failed(key, error).await,
        }
    }

    /// Restores an object that another client changed. An apply keeps items that others added to a list, and these may
    /// conflict with ours: two ports cannot have one name. So a merge patch replaces the lists first, under a manager
    /// of its own, whose ownership is then removed.
    async fn restore(&self, key: &ObjectPartKey, mut body: Value) -> WriteOutcome {
        let (api, name) = (api_of(&self.client, key.resource, &key.name), &key.name.name);
        let params = PatchParams { field_manager: Some(RESTORER.into()), ..PatchParams::default() };
        let restored = async {
            let mut meta = api.patch(name, &params, &Patch::Merge(&body)).await?.metadata;
            if let Some(owners) = &mut meta.managed_fields {
                owners.retain(|it| it.manager.as_deref() != Some(RESTORER));
            }
            let (owners, version) = (meta.managed_fields, meta.resource_version);
            let meta = json!({"managedFields": owners, "resourceVersion": version});
            api.patch(name, &params, &Patch::Merge(json!({"metadata": meta}))).await
        };
        match restored.await {
            Ok(object) => {
                info!(object = %key, "another client changed the object: restored");
                body["metadata"]["resourceVersion"] = json!(object.metadata.resource_version);
                self.apply(key, &body).await
            }
            Err(error) => self.failed(key, error).await,
        }
    }

    async fn status(&self, key: &ObjectPartKey, body: Value) -> WriteOutcome {
        let api = api_of(&self.client, key.resource, &key.name);
        let asked = super::cache::hash(&body["status"]);
        match api.patch_status(&key.name.name, &apply(), &Patch::Apply(&body)).await {
            Ok(object) => {
                if let Some(seen) = self.learn(key, object, false) {
                    self.with(|state| state.wrote.insert(key.clone(), (asked, seen.status)));
                }
                WriteOutcome::Done
            }
            Err(error) => self.failed(key, error).await,
        }
    }

    async fn scale(
        &self,
        key: &ObjectPartKey,
        replicas: i64,
        leaving: &[NamespacedName],
    ) -> WriteOutcome {
        let cost = json!({"metadata": {"annotations": {DELETION_COST: self.deletion_cost()}}});
        let marks = leaving.iter().map(|pod| self.annotate_pod(pod, &cost));
        for marked in futures::future::join_all(marks).await {
            match marked {
                // A pod that is already gone need not be chosen.
                Ok(_) | Err(kube::Error::Api(_)) => {}
                Err(error) => return self.failed(key, error).await,
            }
        }
        // The marks come first: the ReplicaSet controller chooses pods as soon as the number changes.
        match self.replace_scale(key, replicas).await {
            Ok(scale) => {
                info!(object = %key, replicas, "scaled");
                let version = scale.metadata.resource_version.unwrap_or_default();
                self.with(|state| state.cache.scaled(key.resource, &key.name, &version, replicas));
                WriteOutcome::Done
            }
            Err(error) => self.failed(key, error).await,
        }
    }

    /// Writes the scale subresource, which costs the API server little more than half of a patch of the whole object.
    async fn replace_scale(
        &self,
        key: &ObjectPartKey,
        replicas: i64,
    ) -> Result<Scale, kube::Error> {
        let name = &key.name.name;
        let metadata = ObjectMeta {
            name: Some(name.to_string()),
            namespace: Some(key.name.namespace.to_string()),
            // No version: the number is wanted whatever else changed.
            ..ObjectMeta::default()
        };
        let replicas = i32::try_from(replicas).unwrap_or(i32::MAX);
        let spec = Some(ScaleSpec { replicas: Some(replicas) });
        let params =
            PostParams { field_manager: Some(FIELD_MANAGER.into()), ..PostParams::default() };
        let scale = Scale { metadata, spec, status: None };
        api_of(&self.client, key.resource, &key.name).replace_scale(name, &params, &scale).await
    }

    /// Returns a deletion cost lower than all earlier ones, so that a pod that was chosen once and kept is not chosen
    /// again. It uses the monotonic clock, in case the time of day is set meanwhile.
    fn deletion_cost(&self) -> String {
        let now_s = self.start_s.saturating_add(self.start.elapsed().as_secs());
        format!("-{}", now_s.min(2_000_000_000))
    }

    async fn annotate_pod(
        &self,
        name: &NamespacedName,
        patch: &Value,
    ) -> Result<DynamicObject, kube::Error> {
        let params =
            PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
        let api = api_of(&self.client, ResourceKind::Pod, name);
        api.patch(&name.name, &params, &Patch::Merge(patch)).await
    }

    async fn delete(&self, key: &ObjectPartKey, uid: &str) -> WriteOutcome {
        let api = api_of(&self.client, key.resource, &key.name);
        // The object with this UID only: the name may have another object by now.
        let preconditions = Preconditions { uid: Some(uid.into()), resource_version: None };
        let params = DeleteParams::background().preconditions(preconditions);
        match api.delete(&key.name.name, &params).await {
            Ok(_) => {
                info!(object = %key, "deleted");
                WriteOutcome::Done
            }
            Err(kube::Error::Api(status)) if status.code == 404 => WriteOutcome::Done,
            Err(error) => self.failed(key, error).await,
        }
    }

    /// Stores an object from a response, which is newer than the watch's, unless the object was deleted meanwhile;
    /// `ours` if the object is the result of our own apply.
    fn learn(
        &self,
        key: &ObjectPartKey,
        object: DynamicObject,
        ours: bool,
    ) -> Option<ObservedObject> {
        let mut object = serde_json::to_value(object).ok()?;
        // Trimmed as the watch trims it, or the two would seem to differ.
        scope::keep(key.resource, &mut object);
        let seen = ObservedObject::of(&object);
        self.with(|state| state.cache.answered(key, seen.clone(), ours)).then_some(seen)
    }

    /// Returns the outcome of a failed request. After a conflict the object is read, so that the next attempt has its
    /// state.
    async fn failed(&self, key: &ObjectPartKey, error: kube::Error) -> WriteOutcome {
        let message = chain(&error);
        let none = Status::default();
        let status = match &error {
            kube::Error::Api(status) => status,
            _ => &none,
        };
        let details = status.details.as_ref();
        let cause = details.and_then(|it| it.causes.first()).map(|it| it.reason.as_str());
        let outcome = outcome(ApiResponse {
            code: status.code,
            reason: &status.reason,
            message: if status.message.is_empty() { &message } else { &status.message },
            cause: cause.unwrap_or_default(),
            retry_after: details.map_or(0, |it| it.retry_after_seconds),
        });
        debug!(object = %key, outcome = outcome.label(), error = message, "write failed");
        if matches!(outcome, WriteOutcome::Conflict | WriteOutcome::Missing) {
            self.read_again(key).await;
        }
        outcome
    }

    async fn read_again(&self, key: &ObjectPartKey) {
        let api = api_of(&self.client, key.resource, &key.name);
        match api.get_opt(&key.name.name).await {
            Ok(Some(object)) => {
                self.learn(key, object, false);
            }
            Ok(None) => self.with(|state| state.cache.remove(key.resource, &key.name)),
            Err(error) => debug!(object = %key, error = %chain(&error), "not read again"),
        }
    }
}

impl WriterState {
    fn new(limits: WriteLimits) -> Self {
        Self {
            queue: WriteQueue::new(limits),
            cache: ObjectCache::default(),
            wrote: HashMap::new(),
            repeats: RepeatedWrites::default(),
            promises: ChildCheckSchedule::default(),
        }
    }

    /// Returns the time at which there may be work by time alone.
    fn next_at(&mut self, now: UnixMillis, leads: bool) -> Option<UnixMillis> {
        self.repeats.forget(now);
        let due = self.promises.next_at().filter(|_| leads);
        self.queue.next_at(now).into_iter().chain(due).min()
    }

    fn see(&mut self, resource: ResourceKind, name: &NamespacedName, seen: ObservedObject) {
        let ours = seen.applied.is_some();
        if !self.cache.put(resource, name, seen) {
            return;
        }
        if ours {
            self.queue.add(ObjectPartKey::new(resource, ObjectPart::Object, name.clone()));
            scale_of(resource, name).into_iter().for_each(|key| self.queue.add(key));
        }
        // Only if this leader has written the status: others, such as a Pod's, belong to other controllers.
        let status = ObjectPartKey::new(resource, ObjectPart::Status, name.clone());
        if self.wrote.contains_key(&status) {
            self.queue.add(status);
        }
    }

    /// Handles a deleted object: it may have to be created again, or may have blocked another one.
    fn gone(&mut self, resource: ResourceKind, name: &NamespacedName) {
        self.wrote.remove(&ObjectPartKey::new(resource, ObjectPart::Status, name.clone()));
        // The queue asks for the desired state, so an object that is no longer wanted costs only a comparison.
        self.queue.add(ObjectPartKey::new(resource, ObjectPart::Object, name.clone()));
    }

    fn forget(&mut self) {
        // The observed objects stay in the cache, since the watches continue without a new list.
        self.queue.clear();
        self.cache.close_all();
        self.wrote.clear();
        self.promises.clear();
    }
}

/// Returns the parts whose writes had no effect before the object existed.
fn after_creation(key: &ObjectPartKey) -> impl Iterator<Item = ObjectPartKey> {
    let status = ObjectPartKey::new(key.resource, ObjectPart::Status, key.name.clone());
    [status].into_iter().chain(scale_of(key.resource, &key.name))
}

/// Returns the key of a Deployment's scale, which an apply of the object never writes.
fn scale_of(resource: ResourceKind, name: &NamespacedName) -> Option<ObjectPartKey> {
    let scales = resource == ResourceKind::Deployment;
    scales.then(|| ObjectPartKey::new(resource, ObjectPart::Scale, name.clone()))
}

fn apply() -> PatchParams {
    // Force takes over fields of other managers, as Kubernetes advises controllers to do.
    PatchParams::apply(FIELD_MANAGER).force()
}

async fn pause(wait: Option<Duration>) {
    match wait {
        Some(wait) => tokio::time::sleep(wait).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{DesiredState, WriteError},
        *,
    };
    use crate::{want::RequiredChildren, world::Uid};
    use hyper::{Method, Request, Response};
    use tokio::sync::{mpsc, oneshot};

    fn state() -> WriterState {
        WriterState::new(WriteLimits::default())
    }

    fn key(resource: ResourceKind, part: ObjectPart) -> ObjectPartKey {
        ObjectPartKey::new(resource, part, NamespacedName::new("default", "a"))
    }

    fn seen(annotations: &Value, version: &str) -> ObservedObject {
        let meta = json!({"name": "a", "namespace": "default", "resourceVersion": version, "annotations": annotations});
        ObservedObject::of(&json!({"metadata": meta, "spec": {"replicas": 0}}))
    }

    /// Source without desired state, which must not be asked before it is the leader.
    #[derive(Default)]
    struct FakeLeaderSource {
        leads: std::sync::atomic::AtomicBool,
        asked: Notify,
    }

    impl DesiredStateSource for FakeLeaderSource {
        fn lead(&self, leads: bool) {
            self.leads.store(leads, std::sync::atomic::Ordering::Relaxed);
        }

        fn want(&self, key: &ObjectPartKey) -> DesiredState {
            let leads = self.leads.load(std::sync::atomic::Ordering::Relaxed);
            assert!(leads, "{key} is not planned by who does not lead");
            self.asked.notify_one();
            DesiredState::Any
        }

        fn made(&self, _key: &ObjectPartKey, _body: &Value) {}

        fn trouble(&self, _key: &ObjectPartKey, _trouble: Option<WriteError>) {}

        fn owed(&self, _app: &NamespacedName) -> Vec<RequiredChildren> {
            Vec::new()
        }

        fn missing(
            &self,
            _app: &NamespacedName,
            _owed: &RequiredChildren,
            _missing: &[ObjectPartKey],
        ) {
        }

        fn repeated(&self, _key: &ObjectPartKey, _body: &Value, _writes: u32) {}
    }

    /// Objects observed at the start are examined once the Lease is acquired. Examined earlier, every scale would be 0.
    #[tokio::test(start_paused = true)]
    async fn nothing_is_looked_at_before_the_plan_is_a_leaders() {
        let nowhere = kube::Config::new("http://127.0.0.1:1".parse().expect("a URL"));
        let client = Client::try_from(nowhere).expect("a client");
        let writer = Arc::new(ObjectWriter::new(client, WriteLimits::default(), Arc::default()));
        let ours = json!({super::super::cache::APPLIED: "0000000000000001"});
        writer.see(
            ResourceKind::Deployment,
            &NamespacedName::new("default", "a"),
            seen(&ours, "7"),
        );
        let source = Arc::new(FakeLeaderSource::default());
        let run = Arc::clone(&writer).run(
            Arc::clone(&source) as Arc<dyn DesiredStateSource>,
            Leadership::always(),
            CancellationToken::new(),
        );
        let asked = async {
            tokio::select! {
                () = run => {}
                () = source.asked.notified() => {}
            }
        };
        timeout(Duration::from_secs(60), asked).await.expect("it is looked at");
    }

    /// Source that expects an object it does not want, and is told that the object is missing.
    #[derive(Default)]
    struct FakeMissingChildSource(Notify);

    impl DesiredStateSource for FakeMissingChildSource {
        fn lead(&self, _leads: bool) {}

        fn want(&self, _key: &ObjectPartKey) -> DesiredState {
            DesiredState::Gone
        }

        fn made(&self, _key: &ObjectPartKey, _body: &Value) {}

        fn trouble(&self, _key: &ObjectPartKey, _trouble: Option<WriteError>) {}

        fn owed(&self, app: &NamespacedName) -> Vec<RequiredChildren> {
            let of = (ResourceKind::Revision, app.clone(), Uid(1));
            vec![RequiredChildren {
                of,
                keys: vec![key(ResourceKind::Deployment, ObjectPart::Object)],
            }]
        }

        fn missing(
            &self,
            _app: &NamespacedName,
            owed: &RequiredChildren,
            missing: &[ObjectPartKey],
        ) {
            assert_eq!(missing, owed.keys);
            self.0.notify_one();
        }

        fn repeated(&self, _key: &ObjectPartKey, _body: &Value, _writes: u32) {}
    }

    #[tokio::test(start_paused = true)]
    async fn what_should_be_there_and_is_never_written_is_told_within_ten_seconds() {
        let nowhere = kube::Config::new("http://127.0.0.1:1".parse().expect("a URL"));
        let client = Client::try_from(nowhere).expect("a client");
        let writer = Arc::new(ObjectWriter::new(client, WriteLimits::default(), Arc::default()));
        let source = Arc::new(FakeMissingChildSource::default());
        writer.expect([NamespacedName::new("default", "a")]);
        let run = Arc::clone(&writer).run(
            Arc::clone(&source) as Arc<dyn DesiredStateSource>,
            Leadership::always(),
            CancellationToken::new(),
        );
        let told = async {
            tokio::select! {
                () = run => {}
                () = source.0.notified() => {}
            }
        };
        timeout(Duration::from_secs(10), told).await.expect("it is told");
        // The check is repeated while the object is missing.
        assert!(writer.with(|state| state.promises.next_at()).is_some());
    }

    /// Source that wants one Kubernetes Service.
    struct FakeServiceSource;

    impl DesiredStateSource for FakeServiceSource {
        fn lead(&self, _leads: bool) {}

        fn want(&self, key: &ObjectPartKey) -> DesiredState {
            match (key.resource, key.part) {
                (ResourceKind::Service, ObjectPart::Object) => {
                    DesiredState::Body(json!({"metadata": {"name": "a"}}))
                }
                _ => DesiredState::Any,
            }
        }

        fn made(&self, _key: &ObjectPartKey, _body: &Value) {}

        fn trouble(&self, _key: &ObjectPartKey, _trouble: Option<WriteError>) {}

        fn owed(&self, _app: &NamespacedName) -> Vec<RequiredChildren> {
            Vec::new()
        }

        fn missing(
            &self,
            _app: &NamespacedName,
            _owed: &RequiredChildren,
            _missing: &[ObjectPartKey],
        ) {
        }

        fn repeated(&self, _key: &ObjectPartKey, _body: &Value, _writes: u32) {}
    }

    type FakeApiCall = (Method, oneshot::Sender<(u16, Value)>);

    /// Returns an API server whose responses the test sends.
    fn api_server() -> (Client, mpsc::Receiver<FakeApiCall>) {
        let (sender, asked) = mpsc::channel::<FakeApiCall>(1);
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let (answer, answered) = oneshot::channel();
            let (sender, method) = (sender.clone(), request.method().clone());
            async move {
                sender.send((method, answer)).await.expect("the test goes on");
                let (code, body) = answered.await.expect("an answer");
                let body = kube::client::Body::from(body.to_string().into_bytes());
                Response::builder().status(code).body(body)
            }
        });
        (Client::new(service, "default"), asked)
    }

    /// Another client may delete an object before the response to its creation arrives.
    #[tokio::test(start_paused = true)]
    async fn what_is_lost_before_its_making_is_answered_is_made_again() {
        let (client, mut asked) = api_server();
        let writer = Arc::new(ObjectWriter::new(client, WriteLimits::default(), Arc::default()));
        let shutdown = CancellationToken::new();
        let run = Arc::clone(&writer).run(
            Arc::new(FakeServiceSource),
            Leadership::always(),
            shutdown.clone(),
        );
        let run = tokio::spawn(run);
        let mut next = async |method: Method| {
            let (has, answer) =
                timeout(Duration::from_secs(600), asked.recv()).await.unwrap().unwrap();
            assert_eq!(has, method);
            answer
        };
        let none =
            json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404});
        let key = key(ResourceKind::Service, ObjectPart::Object);
        writer.add([key.clone()]);
        next(Method::GET).await.send((404, none.clone())).unwrap();
        let answer = next(Method::PATCH).await;
        let made = json!({"metadata": {"name": "a", "uid": "u", "resourceVersion": "1"}});
        writer.see(ResourceKind::Service, &key.name, ObservedObject::of(&made));
        writer.lose(ResourceKind::Service, &key.name);
        answer.send((200, made)).unwrap();
        next(Method::GET).await.send((404, none)).unwrap();
        let again = json!({"metadata": {"name": "a", "uid": "v", "resourceVersion": "3"}});
        next(Method::PATCH).await.send((200, again)).unwrap();
        shutdown.cancel();
        run.await.unwrap();
    }

    fn looked_at(state: &mut WriterState) -> Vec<ObjectPartKey> {
        std::iter::from_fn(|| state.queue.next(UnixMillis(1))).collect()
    }

    /// A scale may be decided while the Deployment is being created. It has nothing to scale then, and is not decided a
    /// second time while the requests wait.
    #[test]
    fn what_was_just_made_is_scaled_as_was_wanted_meanwhile() {
        let of = |resource| after_creation(&key(resource, ObjectPart::Object)).collect::<Vec<_>>();
        let both =
            [ObjectPart::Status, ObjectPart::Scale].map(|part| key(ResourceKind::Deployment, part));
        assert_eq!(of(ResourceKind::Deployment), both);
        assert_eq!(of(ResourceKind::Service), [key(ResourceKind::Service, ObjectPart::Status)]);
    }

    #[test]
    fn a_deployment_that_changed_is_looked_at_with_its_scale() {
        let ours = json!({super::super::cache::APPLIED: "0000000000000001"});
        let (mut state, name) = (state(), NamespacedName::new("default", "a"));
        state.see(ResourceKind::Deployment, &name, seen(&ours, "7"));
        let both =
            [ObjectPart::Scale, ObjectPart::Object].map(|part| key(ResourceKind::Deployment, part));
        assert_eq!(looked_at(&mut state), both);
        both.iter().for_each(|key| state.queue.done(key, &WriteOutcome::Done, UnixMillis(1)));
        state.see(ResourceKind::Deployment, &name, seen(&ours, "7"));
        assert_eq!(looked_at(&mut state), [], "no news");
        state.see(ResourceKind::Deployment, &name, seen(&json!({}), "8"));
        assert_eq!(looked_at(&mut state), [], "not ours any more");
    }

    /// The response to a scale does not contain changes of other clients.
    #[test]
    fn what_the_watch_says_of_a_scaled_deployment_is_looked_at() {
        let ours = json!({super::super::cache::APPLIED: "0000000000000001"});
        let (mut state, name) = (state(), NamespacedName::new("default", "a"));
        let both =
            [ObjectPart::Scale, ObjectPart::Object].map(|part| key(ResourceKind::Deployment, part));
        state.see(ResourceKind::Deployment, &name, seen(&ours, "7"));
        assert_eq!(looked_at(&mut state), both);
        both.iter().for_each(|key| state.queue.done(key, &WriteOutcome::Done, UnixMillis(1)));
        state.cache.scaled(ResourceKind::Deployment, &name, "9", 3);
        let replicas = |state: &WriterState| {
            state.cache.get(ResourceKind::Deployment, &name).and_then(|it| it.replicas)
        };
        state.see(ResourceKind::Deployment, &name, seen(&ours, "8"));
        assert_eq!((looked_at(&mut state), replicas(&state)), (vec![], Some(3)), "it is older");
        state.see(ResourceKind::Deployment, &name, seen(&ours, "9"));
        assert_eq!(looked_at(&mut state), both);
    }
}
