//! Shell: the task that queries registries for the digests of Revisions.

use std::{
    collections::BTreeMap,
    future::Future,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use common::wire::NamespacedName;
use registry::{ImageReference, Keyring, PullSecret, RegistryClient};
use tokio::{
    sync::{Notify, mpsc},
    task::JoinSet,
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::queue::{DigestQuery, DigestQueue, DigestStatus, DueDigestQuery};
use crate::{
    decide::machine::{DigestRequest, PullAccount},
    model::cluster_state::UnixMillis,
};

/// Greatest number of queries in progress (knative/serving `digestResolutionWorkers`).
pub const MAX_PARALLEL_QUERIES: usize = 100;
/// Longest sleep while no query is due.
const IDLE_SLEEP: Duration = Duration::from_secs(3600);

/// Any error, with its causes.
pub type PullSecretError = Box<dyn std::error::Error + Send + Sync>;

/// Source of pull secrets.
pub trait PullSecretSource: Send + Sync + 'static {
    /// Pull secrets of an account: those that the pod names, then those of its service account. A missing one is left
    /// out, as by the kubelet.
    fn pull_secrets(
        &self,
        account: &PullAccount,
    ) -> impl Future<Output = Result<Vec<PullSecret>, PullSecretError>> + Send;
}

/// Source without any secrets, for platforms without Kubernetes.
impl PullSecretSource for () {
    async fn pull_secrets(
        &self,
        _account: &PullAccount,
    ) -> Result<Vec<PullSecret>, PullSecretError> {
        Ok(Vec::new())
    }
}

/// Resolver of digests in the background.
#[derive(Debug)]
pub struct DigestResolver<S> {
    queue: Mutex<DigestQueue>,
    work_added: Notify,
    secrets: S,
    registries: RegistryClient,
    changed_tx: mpsc::Sender<NamespacedName>,
    started_at: Instant,
}

impl<S: PullSecretSource> DigestResolver<S> {
    /// Creates a resolver that sends to `changed` each Revision whose state has changed.
    pub fn new(
        secrets: S,
        registries: RegistryClient,
        changed: mpsc::Sender<NamespacedName>,
    ) -> Arc<Self> {
        Arc::new(Self {
            queue: Mutex::new(DigestQueue::new(MAX_PARALLEL_QUERIES)),
            work_added: Notify::new(),
            secrets,
            registries,
            changed_tx: changed,
            started_at: Instant::now(),
        })
    }

    /// State of a Revision's digests; unknown ones are resolved in the background. Cheap enough for every planning.
    pub fn request_digests(
        &self,
        revision: &NamespacedName,
        request: DigestRequest,
    ) -> DigestStatus {
        let status = self.lock_queue().request_digests(revision, request, self.now());
        self.work_added.notify_one();
        status
    }

    /// Removes a Revision, whose status has its digests or which is deleted.
    pub fn forget(&self, revision: &NamespacedName) {
        self.lock_queue().forget(revision);
    }

    /// Number of Revisions that wait, and of open queries.
    pub fn queue_lengths(&self) -> (usize, usize) {
        self.lock_queue().lengths()
    }

    /// Runs queries until `shutdown`, which drops those in progress.
    pub async fn run(self: Arc<Self>, shutdown: CancellationToken) {
        let mut running = JoinSet::new();
        loop {
            let (jobs, next) = {
                // The lock ends with this block: it must not be held while the task waits.
                let mut queue = self.lock_queue();
                let now = self.now();
                (queue.start_due(now), queue.next_due().map(|at| at.0.saturating_sub(now.0)))
            };
            for job in jobs {
                running.spawn(Arc::clone(&self).run_query(job));
            }
            // With all workers busy the next query starts when another one ends, not at a time.
            let wait = next.filter(|_| running.len() < MAX_PARALLEL_QUERIES);
            let wait = wait.map_or(IDLE_SLEEP, Duration::from_millis);
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = self.work_added.notified() => {}
                () = tokio::time::sleep(wait) => {}
                Some(_ended) = running.join_next() => {}
            }
        }
    }

    async fn run_query(self: Arc<Self>, job: DueDigestQuery) {
        let DueDigestQuery { query, timeout } = job;
        let result = self.resolve_digest(&query, timeout).await;
        match &result {
            Ok(digest) => info!(image = query.image, digest, "tag resolved"),
            Err(why) => warn!(image = query.image, why, "tag not resolved"),
        }
        let changed = self.lock_queue().finish(&query, result, self.now());
        for revision in changed {
            // The receiver is gone only when the controller stops.
            let _ = self.changed_tx.send(revision).await;
        }
    }

    /// Resolves one image to its digest, with the credentials of its account.
    async fn resolve_digest(
        &self,
        query: &DigestQuery,
        timeout: Duration,
    ) -> Result<String, String> {
        let tag = match ImageReference::parse(&query.image)? {
            ImageReference::Digest => return Ok(query.image.clone()),
            ImageReference::Tag(tag) => tag,
        };
        let secrets = self.secrets.pull_secrets(&query.account).await;
        let secrets =
            secrets.map_err(|why| format!("failed to initialize authentication: {why}"))?;
        let (keyring, unread) = Keyring::from_pull_secrets(&secrets);
        // As with the kubelet, a bad pull secret does not prevent a pull with the others.
        for why in unread {
            warn!(namespace = query.account.namespace, why, "pull secret not used");
        }
        let result = self.registries.query_digest(&tag, &keyring, timeout).await;
        result.map_err(|why| why.to_line())
    }

    fn now(&self) -> UnixMillis {
        UnixMillis(u64::try_from(self.started_at.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    /// Locks the queue. A panic elsewhere leaves it consistent, since each call is one step.
    fn lock_queue(&self) -> MutexGuard<'_, DigestQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Secrets by namespace, for tests and small platforms: every account may use all of its namespace's.
impl PullSecretSource for BTreeMap<String, Vec<PullSecret>> {
    async fn pull_secrets(
        &self,
        account: &PullAccount,
    ) -> Result<Vec<PullSecret>, PullSecretError> {
        Ok(self.get(&account.namespace).cloned().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests;
