//! Shell: the task that queries registries for the digests of Revisions.

use std::{
    collections::BTreeMap,
    future::Future,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use common::wire::NamespacedName;
use tokio::{
    sync::{Notify, mpsc},
    task::JoinSet,
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    credentials::{Keyring, PullSecret},
    queue::{DigestQuery, DigestQueue, DigestRequest, DigestStatus, DueDigestQuery, PullAccount},
    reference::ImageReference,
    registry::RegistryClient,
};
use crate::world::UnixMillis;

/// Greatest number of queries in progress (knative/serving `digestResolutionWorkers`).
pub const PARALLEL: usize = 100;
/// Longest sleep while no query is due.
const IDLE: Duration = Duration::from_secs(3600);

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
    work: Notify,
    secrets: S,
    registries: RegistryClient,
    changed: mpsc::Sender<NamespacedName>,
    began: Instant,
}

impl<S: PullSecretSource> DigestResolver<S> {
    /// Creates a resolver that sends to `changed` each Revision whose state has changed.
    pub fn new(
        secrets: S,
        registries: RegistryClient,
        changed: mpsc::Sender<NamespacedName>,
    ) -> Arc<Self> {
        Arc::new(Self {
            queue: Mutex::new(DigestQueue::new(PARALLEL)),
            work: Notify::new(),
            secrets,
            registries,
            changed,
            began: Instant::now(),
        })
    }

    /// State of a Revision's digests; unknown ones are resolved in the background. Cheap enough for every planning.
    pub fn want(&self, revision: &NamespacedName, wanted: DigestRequest) -> DigestStatus {
        let answer = self.queue().want(revision, wanted, self.now());
        self.work.notify_one();
        answer
    }

    /// Removes a Revision, whose status has its digests or which is deleted.
    pub fn forget(&self, revision: &NamespacedName) {
        self.queue().forget(revision);
    }

    /// Number of Revisions that wait, and of open queries.
    pub fn sizes(&self) -> (usize, usize) {
        self.queue().sizes()
    }

    /// Runs queries until `shutdown`, which drops those in progress.
    pub async fn run(self: Arc<Self>, shutdown: CancellationToken) {
        let mut asking = JoinSet::new();
        loop {
            let (jobs, next) = {
                // The lock ends with this block: it must not be held while the task waits.
                let mut queue = self.queue();
                let now = self.now();
                (queue.start(now), queue.next().map(|at| at.0.saturating_sub(now.0)))
            };
            for job in jobs {
                asking.spawn(Arc::clone(&self).ask(job));
            }
            // With all workers busy the next query is overdue: the end of one makes room, not the time.
            let wait = next.filter(|_| asking.len() < PARALLEL);
            let wait = wait.map_or(IDLE, Duration::from_millis);
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = self.work.notified() => {}
                () = tokio::time::sleep(wait) => {}
                Some(_ended) = asking.join_next() => {}
            }
        }
    }

    async fn ask(self: Arc<Self>, job: DueDigestQuery) {
        let DueDigestQuery { question, timeout } = job;
        let said = self.digest(&question, timeout).await;
        match &said {
            Ok(digest) => info!(image = question.image, digest, "tag resolved"),
            Err(why) => warn!(image = question.image, why, "tag not resolved"),
        }
        let changed = self.queue().done(&question, said, self.now());
        for revision in changed {
            // The receiver is gone only when the controller stops.
            let _ = self.changed.send(revision).await;
        }
    }

    /// Resolves one image to its digest, with the credentials of its account.
    async fn digest(&self, question: &DigestQuery, timeout: Duration) -> Result<String, String> {
        let tag = match ImageReference::parse(&question.image)? {
            ImageReference::Digest => return Ok(question.image.clone()),
            ImageReference::Tag(tag) => tag,
        };
        let secrets = self.secrets.pull_secrets(&question.account).await;
        let secrets =
            secrets.map_err(|why| format!("failed to initialize authentication: {why}"))?;
        let (keyring, unread) = Keyring::new(&secrets);
        // As with the kubelet, a bad pull secret does not prevent a pull with the others.
        for why in unread {
            warn!(namespace = question.account.namespace, why, "pull secret not used");
        }
        let asked = self.registries.digest(&tag, &keyring, timeout).await;
        asked.map_err(|why| why.line())
    }

    fn now(&self) -> UnixMillis {
        UnixMillis(u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    /// Locks the queue. A panic elsewhere leaves it consistent, since each call is one step.
    fn queue(&self) -> MutexGuard<'_, DigestQueue> {
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
#[path = "resolver/tests.rs"]
mod tests;
