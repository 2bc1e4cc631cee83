//! Pure: what Kubernetes is asked to hold, and how that is named; the shells around it stand in the files below.
//!
//! | module | what |
//! |---|---|
//! | [`client`] | how the API server is reached |
//! | [`watch`] | its objects, trimmed, as one stream |
//! | [`scope`] | which objects, and what of each |
//! | [`cache`] | the little that must be remembered of each |
//! | [`decide`] | what is wanted, what is there → what to write |
//! | [`outcome`] | the API server's answer → whether and when to try again |
//! | [`queue`], [`writer`] | which object is written when, and the writing |
//! | [`lease`], [`lead`] | who writes |
//! | [`secrets`] | with what registries are asked |
//! | [`run`] | all of them together |
//! | [`events`] | what people read under `kubectl describe` |

use std::fmt;

use common::wire::Name;
use serde_json::Value;

use crate::{children::Resource, want::Owed};

pub mod cache;
pub mod client;
mod clients;
pub mod decide;
pub mod events;
pub mod lead;
pub mod lease;
pub mod metrics;
mod object;
pub mod outcome;
pub mod promises;
pub mod queue;
pub mod repeats;
pub mod run;
pub mod scope;
pub mod secrets;
pub mod watch;
pub mod writer;

/// Who we are in `managedFields`.
pub const FIELD_MANAGER: &str = "rouse";

/// Which part of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// The replicas of a Deployment; what a pod that is to go costs to delete. Never waits for another part.
    Scale,
    /// Everything but the status.
    Object,
    /// The status.
    Status,
}

/// Names one part of one object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Its kind.
    pub resource: Resource,
    /// Which part.
    pub part: Part,
    /// Its namespace (empty for one of the whole cluster) and name.
    pub name: Name,
}

impl Key {
    /// A part of an object.
    pub fn new(resource: Resource, part: Part, name: Name) -> Self {
        Self { resource, part, name }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = match self.part {
            Part::Scale => " scale",
            Part::Object => "",
            Part::Status => " status",
        };
        write!(out, "{}/{}{part}", self.resource, self.name)
    }
}

/// What one part of an object should be.
#[derive(Clone, Debug, PartialEq)]
pub enum Want {
    /// Whatever it is.
    Any,
    /// It should not be, if it is ours.
    Gone,
    /// This body, or for [`Part::Status`] this status.
    Body(Value),
    /// For [`Part::Scale`]: so many pods.
    Scale {
        /// So many.
        replicas: i64,
        /// Where there are more: so many at most.
        most: i64,
        /// Where that is fewer: the pods that should go.
        leaving: Vec<Name>,
    },
}

/// Why an object cannot be as wanted, for conditions and events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// One word, Knative's where it has one.
    pub reason: &'static str,
    /// One line for people.
    pub message: String,
}

/// Who says what should be.
pub trait Source: Send + Sync + 'static {
    /// Whether we may write, from now on. Before it is told so, nobody asks what should be: who does not lead does not
    /// plan all of that.
    fn lead(&self, leads: bool);

    /// What the object of this key should be now.
    fn want(&self, key: &Key) -> Want;

    /// It was made, with this body.
    fn made(&self, key: &Key, body: &Value);

    /// It could not be written, for this reason; or it could again.
    fn trouble(&self, key: &Key, trouble: Option<Trouble>);

    /// Objects that must be there for an app.
    fn owed(&self, app: &Name) -> Vec<Owed>;

    /// These of them are not there.
    fn missing(&self, app: &Name, owed: &Owed, missing: &[Key]);

    /// It was written so often with this body, and is no longer written as fast as it is undone.
    fn repeated(&self, key: &Key, body: &Value, writes: u32);
}
