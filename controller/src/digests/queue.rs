//! Pure: which image is asked for next, for whom, and what came out.
//!
//! One question is one image with the credentials of one account; Revisions that wait for the same question share its
//! answer. A Revision that comes later asks anew, because a tag may have moved. Delays are those of Knative's queue: 1 s
//! after a first failure, twice as long after each further one, at most 1000 s; here with up to a tenth less, so that
//! many questions to one registry spread.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use common::wire::Name;

use super::reference::Image;
use crate::world::{Stamp, Uid};

/// First delay after a failure (knative/serving `pkg/reconciler/revision/controller.go`).
const FIRST_DELAY_MS: u64 = 1_000;
/// Longest delay.
const LAST_DELAY_MS: u64 = 1_000_000;

/// Whose credentials are used.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Account {
    /// Namespace of all below.
    pub namespace: String,
    /// The service account; empty: `default`.
    pub service_account: String,
    /// Pull secrets that the pod itself names.
    pub pull_secrets: Vec<String>,
}

/// What a Revision needs to know.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Whose credentials to use.
    pub account: Account,
    /// Images by container, init containers first.
    pub images: Vec<(String, String)>,
    /// `registries-skipping-tag-resolving`.
    pub skipped: BTreeSet<String>,
    /// `digest-resolution-timeout`.
    pub timeout: Duration,
}

/// What is known of a Revision's images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It was never asked about.
    Unknown,
    /// Some are not known yet (`ResolvingDigests`).
    Pending,
    /// All of them, by container. Empty text: the image stays as written.
    Resolved(Vec<(String, String)>),
    /// One could not be found out (`ContainerMissing`). It is asked for again.
    Failed(String),
}

/// One question.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Question {
    /// The image as written.
    pub image: String,
    /// Whose credentials to use.
    pub account: Account,
}

/// A question to ask now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// The question.
    pub question: Question,
    /// How long its answer may take.
    pub timeout: Duration,
}

/// All questions that are open.
#[derive(Debug)]
pub struct Queue {
    parallel: usize,
    open: BTreeMap<Question, Open>,
    due: BTreeSet<(Stamp, Question)>,
    running: usize,
    revisions: BTreeMap<Name, Waiting>,
}

/// An open question.
#[derive(Debug)]
struct Open {
    timeout: Duration,
    failures: u32,
    /// When it is asked; `None`: it is being asked.
    at: Option<Stamp>,
    revisions: BTreeSet<Name>,
}

/// A Revision and its answers so far, by image.
#[derive(Debug)]
struct Waiting {
    wanted: Wanted,
    answers: BTreeMap<String, Result<String, String>>,
}

impl Queue {
    /// Asks at most `parallel` questions at once.
    pub fn new(parallel: usize) -> Self {
        Self {
            parallel: parallel.max(1),
            open: BTreeMap::new(),
            due: BTreeSet::new(),
            running: 0,
            revisions: BTreeMap::new(),
        }
    }

    /// Begins to find out what a Revision needs; asked again about the same it changes nothing.
    pub fn want(&mut self, revision: &Name, wanted: Wanted, now: Stamp) -> Answer {
        if self.revisions.get(revision).is_some_and(|it| it.wanted == wanted) {
            return self.answer(revision);
        }
        self.forget(revision);
        let mut answers = BTreeMap::new();
        for (_, image) in &wanted.images {
            match at_once(image, &wanted.skipped) {
                Some(known) => {
                    answers.insert(image.clone(), known);
                }
                None => self.ask(revision, image, &wanted, now),
            }
        }
        self.revisions.insert(revision.clone(), Waiting { wanted, answers });
        self.answer(revision)
    }

    fn ask(&mut self, revision: &Name, image: &str, wanted: &Wanted, now: Stamp) {
        let account = wanted.account.clone();
        let question = Question { image: image.to_owned(), account };
        let due = &mut self.due;
        let open = self.open.entry(question).or_insert_with_key(|question| {
            due.insert((now, question.clone()));
            let revisions = BTreeSet::new();
            Open { timeout: wanted.timeout, failures: 0, at: Some(now), revisions }
        });
        open.timeout = wanted.timeout;
        open.revisions.insert(revision.clone());
    }

    /// What is known of a Revision.
    pub fn answer(&self, revision: &Name) -> Answer {
        let Some(waiting) = self.revisions.get(revision) else { return Answer::Unknown };
        let mut found = Vec::with_capacity(waiting.wanted.images.len());
        let mut all = true;
        for (container, image) in &waiting.wanted.images {
            match waiting.answers.get(image) {
                Some(Err(why)) => return Answer::Failed(why.clone()),
                Some(Ok(digest)) => found.push((container.clone(), digest.clone())),
                None => all = false,
            }
        }
        if all { Answer::Resolved(found) } else { Answer::Pending }
    }

    /// Drops everything about a Revision: it has its digests, or is gone.
    pub fn forget(&mut self, revision: &Name) {
        let Some(waiting) = self.revisions.remove(revision) else { return };
        for (_, image) in waiting.wanted.images {
            let question = Question { image, account: waiting.wanted.account.clone() };
            let Some(open) = self.open.get_mut(&question) else { continue };
            open.revisions.remove(revision);
            // One that is being asked stays: its answer comes, and nobody waits for it.
            if let Some(at) = open.at.filter(|_| open.revisions.is_empty()) {
                self.open.remove(&question);
                self.due.remove(&(at, question));
            }
        }
    }

    /// The questions to ask now. Each must be answered by [`done`](Self::done).
    pub fn start(&mut self, now: Stamp) -> Vec<Job> {
        let mut jobs = Vec::new();
        while self.running < self.parallel && self.next().is_some_and(|at| at <= now) {
            let Some((_, question)) = self.due.pop_first() else { break };
            let Some(open) = self.open.get_mut(&question) else { continue };
            open.at = None;
            self.running += 1;
            jobs.push(Job { question, timeout: open.timeout });
        }
        jobs
    }

    /// When the next question is to be asked, if none is answered before.
    pub fn next(&self) -> Option<Stamp> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Takes an answer; which Revisions it changes something for.
    pub fn done(
        &mut self,
        question: &Question,
        said: Result<String, String>,
        now: Stamp,
    ) -> Vec<Name> {
        self.running = self.running.saturating_sub(1);
        let Some(mut open) = self.open.remove(question) else { return Vec::new() };
        let image = &question.image;
        let said = said.map_err(|why| {
            format!("Unable to fetch image {image:?}: failed to resolve image to digest: {why}")
        });
        let changed = open.revisions.iter().filter(|name| {
            let waiting = self.revisions.get_mut(name);
            let before = waiting.and_then(|it| it.answers.insert(image.clone(), said.clone()));
            before.as_ref() != Some(&said)
        });
        let changed = changed.cloned().collect();
        if said.is_err() && !open.revisions.is_empty() {
            let at = now.plus_ms(delay_ms(question, open.failures));
            open.failures += 1;
            open.at = Some(at);
            self.due.insert((at, question.clone()));
            self.open.insert(question.clone(), open);
        }
        changed
    }

    /// Revisions that wait, and questions that are open: for metrics.
    pub fn sizes(&self) -> (usize, usize) {
        (self.revisions.len(), self.open.len())
    }
}

/// What needs no registry: an image with a digest, one whose registry is skipped, and a name that is none.
fn at_once(image: &str, skipped: &BTreeSet<String>) -> Option<Result<String, String>> {
    match Image::parse(image) {
        Ok(Image::Digest) => Some(Ok(image.to_owned())),
        Ok(Image::Tag(tag)) if skipped.contains(tag.registry()) => Some(Ok(String::new())),
        Ok(Image::Tag(_)) => None,
        Err(why) => Some(Err(format!(
            "Unable to fetch image {image:?}: failed to resolve image to digest: {why}"
        ))),
    }
}

fn delay_ms(question: &Question, failures: u32) -> u64 {
    let whole = FIRST_DELAY_MS.saturating_mul(1 << failures.min(20)).min(LAST_DELAY_MS);
    let parts = [question.image.as_str(), &question.account.namespace, &failures.to_string()];
    // Chance that is the same at every replica and in every test.
    let chance = u64::try_from(Uid::derive(0, &parts).0 % 1000).unwrap_or(0);
    whole - whole * chance / 10_000
}

#[cfg(test)]
#[path = "queue/tests.rs"]
mod tests;
