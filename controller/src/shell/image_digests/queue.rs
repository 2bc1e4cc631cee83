//! Pure: the order of digest queries, the Revisions that wait for them, and the results.
//!
//! One query is one image with the credentials of one account; Revisions that wait for the same query share its result.
//! A Revision that comes later sends a new query, because a tag may have moved. Delays are those of Knative's queue:
//! one second after a first failure, then doubled up to 1000 s. They are shortened by up to a tenth, so that queries to
//! one registry spread.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use common::wire::NamespacedName;
use registry::ImageReference;

use crate::{
    decide::machine::{DigestRequest, PullAccount},
    model::cluster_state::{Uid, UnixMillis},
};

/// Delay after a first failure, in ms (knative/serving `pkg/reconciler/revision/controller.go`).
const FIRST_DELAY_MS: u64 = 1_000;
/// Longest delay after a failure, in ms.
const MAX_DELAY_MS: u64 = 1_000_000;

/// State of the digests of a Revision's images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DigestStatus {
    /// The Revision is not in the queue.
    Unknown,
    /// Some digests are not known yet (`ResolvingDigests`).
    Pending,
    /// All digests are known, as pairs of container name and image. Empty text: the image stays as written.
    Resolved(Vec<(String, String)>),
    /// One image could not be resolved (`ContainerMissing`). It will be queried again.
    Failed(String),
}

/// One query of a registry: an image, with an account.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DigestQuery {
    /// The image as written in the template.
    pub image: String,
    /// Account with the credentials for the image.
    pub account: PullAccount,
}

/// A query that is due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DueDigestQuery {
    /// Image and account of the query.
    pub query: DigestQuery,
    /// Timeout of the query.
    pub timeout: Duration,
}

/// All open queries, and the Revisions that wait for them.
#[derive(Debug)]
pub struct DigestQueue {
    max_parallel: usize,
    open_queries: BTreeMap<DigestQuery, OpenDigestQuery>,
    due: BTreeSet<(UnixMillis, DigestQuery)>,
    running: usize,
    revisions: BTreeMap<NamespacedName, WaitingRevision>,
}

/// State of an open query.
#[derive(Debug)]
struct OpenDigestQuery {
    timeout: Duration,
    failures: u32,
    /// Time at which it is due; `None`: it is in progress.
    due_at: Option<UnixMillis>,
    revisions: BTreeSet<NamespacedName>,
}

/// A Revision with its results so far, by image.
#[derive(Debug)]
struct WaitingRevision {
    request: DigestRequest,
    results: BTreeMap<String, Result<String, String>>,
}

impl DigestQueue {
    /// Creates a queue that runs at most `parallel` queries at once.
    pub fn new(parallel: usize) -> Self {
        Self {
            max_parallel: parallel.max(1),
            open_queries: BTreeMap::new(),
            due: BTreeSet::new(),
            running: 0,
            revisions: BTreeMap::new(),
        }
    }

    /// Starts to resolve a Revision's images. Repeated with the same images, it changes nothing.
    pub fn request_digests(
        &mut self,
        revision: &NamespacedName,
        request: DigestRequest,
        now: UnixMillis,
    ) -> DigestStatus {
        if self.revisions.get(revision).is_some_and(|it| it.request == request) {
            return self.status(revision);
        }
        // Images or account have changed, so earlier results do not apply.
        self.forget(revision);
        let mut results = BTreeMap::new();
        for (_, image) in &request.images {
            match resolve_without_registry(image, &request.skipped_registries) {
                Some(known) => {
                    results.insert(image.clone(), known);
                }
                None => self.add_query(revision, image, &request, now),
            }
        }
        self.revisions.insert(revision.clone(), WaitingRevision { request, results });
        self.status(revision)
    }

    /// Adds the Revision to the query for one image, and opens it if there is none.
    fn add_query(
        &mut self,
        revision: &NamespacedName,
        image: &str,
        request: &DigestRequest,
        now: UnixMillis,
    ) {
        let account = request.account.clone();
        let query = DigestQuery { image: image.to_owned(), account };
        let due = &mut self.due;
        let open = self.open_queries.entry(query).or_insert_with_key(|query| {
            due.insert((now, query.clone()));
            let revisions = BTreeSet::new();
            OpenDigestQuery { timeout: request.timeout, failures: 0, due_at: Some(now), revisions }
        });
        // The setting may have changed since the query was opened.
        open.timeout = request.timeout;
        open.revisions.insert(revision.clone());
    }

    /// State of a Revision's digests.
    pub fn status(&self, revision: &NamespacedName) -> DigestStatus {
        let Some(waiting) = self.revisions.get(revision) else { return DigestStatus::Unknown };
        let mut found = Vec::with_capacity(waiting.request.images.len());
        let mut all = true;
        for (container, image) in &waiting.request.images {
            match waiting.results.get(image) {
                // One failure is enough to report; other images of the Revision are resolved all the same.
                Some(Err(why)) => return DigestStatus::Failed(why.clone()),
                Some(Ok(digest)) => found.push((container.clone(), digest.clone())),
                None => all = false,
            }
        }
        if all { DigestStatus::Resolved(found) } else { DigestStatus::Pending }
    }

    /// Removes a Revision, which has its digests or is deleted.
    pub fn forget(&mut self, revision: &NamespacedName) {
        let Some(waiting) = self.revisions.remove(revision) else { return };
        for (_, image) in waiting.request.images {
            let query = DigestQuery { image, account: waiting.request.account.clone() };
            let Some(open) = self.open_queries.get_mut(&query) else { continue };
            open.revisions.remove(revision);
            // A query in progress stays: its result arrives, and no Revision waits for it.
            if let Some(at) = open.due_at.filter(|_| open.revisions.is_empty()) {
                self.open_queries.remove(&query);
                self.due.remove(&(at, query));
            }
        }
    }

    /// Starts the queries that are due. Each must be ended by [`finish`](Self::finish).
    pub fn start_due(&mut self, now: UnixMillis) -> Vec<DueDigestQuery> {
        let mut jobs = Vec::new();
        while self.running < self.max_parallel && self.next_due().is_some_and(|at| at <= now) {
            let Some((_, query)) = self.due.pop_first() else { break };
            let Some(open) = self.open_queries.get_mut(&query) else { continue };
            open.due_at = None;
            self.running += 1;
            jobs.push(DueDigestQuery { query, timeout: open.timeout });
        }
        jobs
    }

    /// Time at which the next query is due, unless one ends before.
    pub fn next_due(&self) -> Option<UnixMillis> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Ends a query with its result. Returns the Revisions whose state it changes.
    pub fn finish(
        &mut self,
        query: &DigestQuery,
        result: Result<String, String>,
        now: UnixMillis,
    ) -> Vec<NamespacedName> {
        self.running = self.running.saturating_sub(1);
        let Some(mut open) = self.open_queries.remove(query) else { return Vec::new() };
        let image = &query.image;
        // Knative's message, which users know from the Revision's condition.
        let result = result.map_err(|why| {
            format!("Unable to fetch image {image:?}: failed to resolve image to digest: {why}")
        });
        // The same failure again is no news.
        let changed = open.revisions.iter().filter(|name| {
            let waiting = self.revisions.get_mut(name);
            let before = waiting.and_then(|it| it.results.insert(image.clone(), result.clone()));
            before.as_ref() != Some(&result)
        });
        let changed = changed.cloned().collect();
        // A success needs no second query; after a failure only waiting Revisions need one.
        if result.is_err() && !open.revisions.is_empty() {
            let at = now.plus_ms(delay_ms(query, open.failures));
            open.failures += 1;
            open.due_at = Some(at);
            self.due.insert((at, query.clone()));
            self.open_queries.insert(query.clone(), open);
        }
        changed
    }

    /// Number of Revisions that wait, and of open queries, for metrics.
    pub fn lengths(&self) -> (usize, usize) {
        (self.revisions.len(), self.open_queries.len())
    }
}

/// Result without a registry: for an image with a digest, a skipped registry, or an invalid name.
fn resolve_without_registry(
    image: &str,
    skipped: &BTreeSet<String>,
) -> Option<Result<String, String>> {
    match ImageReference::parse(image) {
        Ok(ImageReference::Digest) => Some(Ok(image.to_owned())),
        Ok(ImageReference::Tag(tag)) if skipped.contains(tag.registry()) => Some(Ok(String::new())),
        Ok(ImageReference::Tag(_)) => None,
        Err(why) => Some(Err(format!(
            "Unable to fetch image {image:?}: failed to resolve image to digest: {why}"
        ))),
    }
}

/// Delay after a failed query, in ms; `failures` counts the earlier ones.
fn delay_ms(query: &DigestQuery, failures: u32) -> u64 {
    let whole = FIRST_DELAY_MS.saturating_mul(1 << failures.min(20)).min(MAX_DELAY_MS);
    let parts = [query.image.as_str(), &query.account.namespace, &failures.to_string()];
    // The random part derives from the query, so it is the same at every replica and in every test.
    let chance = u64::try_from(Uid::derive(0, &parts).0 % 1000).unwrap_or(0);
    whole - whole * chance / 10_000
}

#[cfg(test)]
mod tests;
