//! Shell: the task that keeps asking registries for what Revisions need.

use std::{
    collections::BTreeMap,
    future::Future,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use common::wire::Name;
use tokio::{
    sync::{Notify, mpsc},
    task::JoinSet,
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    credentials::{Keyring, PullSecret},
    queue::{Account, Answer, Job, Question, Queue, Wanted},
    reference::Image,
    registry::Registries,
};
use crate::world::Stamp;

/// Questions asked at once (knative/serving `digestResolutionWorkers`).
pub const PARALLEL: usize = 100;
/// Longest sleep where nothing is due.
const IDLE: Duration = Duration::from_secs(3600);

/// Any error, with its causes.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Where pull secrets are found.
pub trait PullSecrets: Send + Sync + 'static {
    /// The Secrets that an account's pods pull with: those the pod names, then those of its service account. One that
    /// is missing is left out, as the kubelet does.
    fn pull_secrets(
        &self,
        account: &Account,
    ) -> impl Future<Output = Result<Vec<PullSecret>, BoxError>> + Send;
}

/// No secrets at all, for where there is no Kubernetes.
impl PullSecrets for () {
    async fn pull_secrets(&self, _account: &Account) -> Result<Vec<PullSecret>, BoxError> {
        Ok(Vec::new())
    }
}

/// Finds out digests in the background.
#[derive(Debug)]
pub struct Resolver<S> {
    queue: Mutex<Queue>,
    work: Notify,
    secrets: S,
    registries: Registries,
    changed: mpsc::Sender<Name>,
    began: Instant,
}

impl<S: PullSecrets> Resolver<S> {
    /// Tells `changed` of every Revision whose answer is another one.
    pub fn new(secrets: S, registries: Registries, changed: mpsc::Sender<Name>) -> Arc<Self> {
        Arc::new(Self {
            queue: Mutex::new(Queue::new(PARALLEL)),
            work: Notify::new(),
            secrets,
            registries,
            changed,
            began: Instant::now(),
        })
    }

    /// What is known of a Revision; what is not is found out. Cheap to call each time the Revision is planned.
    pub fn want(&self, revision: &Name, wanted: Wanted) -> Answer {
        let answer = self.queue().want(revision, wanted, self.now());
        self.work.notify_one();
        answer
    }

    /// Drops everything about a Revision: its status has its digests, or it is gone.
    pub fn forget(&self, revision: &Name) {
        self.queue().forget(revision);
    }

    /// Revisions that wait, and questions that are open.
    pub fn sizes(&self) -> (usize, usize) {
        self.queue().sizes()
    }

    /// Asks until `shutdown`. Questions under way then are dropped.
    pub async fn run(self: Arc<Self>, shutdown: CancellationToken) {
        let mut asking = JoinSet::new();
        loop {
            let (jobs, next) = {
                let mut queue = self.queue();
                let now = self.now();
                (queue.start(now), queue.next().map(|at| at.0.saturating_sub(now.0)))
            };
            for job in jobs {
                asking.spawn(Arc::clone(&self).ask(job));
            }
            // With all workers busy the next question is overdue, and an answer makes room for it.
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

    async fn ask(self: Arc<Self>, job: Job) {
        let Job { question, timeout } = job;
        let said = self.digest(&question, timeout).await;
        match &said {
            Ok(digest) => info!(image = question.image, digest, "tag resolved"),
            Err(why) => warn!(image = question.image, why, "tag not resolved"),
        }
        let changed = self.queue().done(&question, said, self.now());
        for revision in changed {
            // Nobody listens any more only where the controller stops.
            let _ = self.changed.send(revision).await;
        }
    }

    async fn digest(&self, question: &Question, timeout: Duration) -> Result<String, String> {
        let tag = match Image::parse(&question.image)? {
            Image::Digest => return Ok(question.image.clone()),
            Image::Tag(tag) => tag,
        };
        let secrets = self.secrets.pull_secrets(&question.account).await;
        let secrets =
            secrets.map_err(|why| format!("failed to initialize authentication: {why}"))?;
        let (keyring, unread) = Keyring::new(&secrets);
        for why in unread {
            warn!(namespace = question.account.namespace, why, "pull secret not used");
        }
        let asked = self.registries.digest(&tag, &keyring, timeout).await;
        asked.map_err(|why| why.line())
    }

    fn now(&self) -> Stamp {
        Stamp(u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    /// A panic elsewhere leaves the queue whole: each call is one step of it.
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Secrets by namespace, as tests and small platforms have them: every account may use all of its namespace.
impl PullSecrets for BTreeMap<String, Vec<PullSecret>> {
    async fn pull_secrets(&self, account: &Account) -> Result<Vec<PullSecret>, BoxError> {
        Ok(self.get(&account.namespace).cloned().unwrap_or_default())
    }
}

#[cfg(test)]
#[path = "resolver/tests.rs"]
mod tests;
