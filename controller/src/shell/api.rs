//! Pure: desired states of Kubernetes objects and the keys that name them; the shells around them are the files below.
//!
//! | module | what |
//! |---|---|
//! | [`client`] | clients of the API server |
//! | [`watches`] | watches of all kinds, trimmed, as one stream |
//! | [`watch_scope`] | the watches, and the fields that are kept of each kind |
//! | [`object_cache`] | the few facts that must be remembered of each object |
//! | [`write_decision`] | desired state and observed state → next write |
//! | [`write_outcome`] | the API server's response → if and when to try again |
//! | [`write_queue`], [`writer`] | order of the writes, and the writing |
//! | [`lease_state`], [`leader_election`] | leader election: the replica that writes |
//! | [`pull_secrets`] | credentials for registries |
//! | [`platform`] | all of them together |
//! | [`events`] | Events that users read under `kubectl describe` |

use std::fmt;

use common::wire::NamespacedName;
use serde_json::Value;

use crate::{children::ResourceKind, desired::RequiredChildren};

pub mod child_checks;
pub mod client;
mod client_pods;
pub mod events;
pub mod leader_election;
pub mod lease_state;
pub mod metrics;
pub mod object_cache;
pub mod platform;
pub mod pull_secrets;
pub mod repeated_writes;
pub mod watch_scope;
mod watched_object;
pub mod watches;
pub mod write_decision;
pub mod write_outcome;
pub mod write_queue;
pub mod writer;

/// Field manager of the controller's applies in `managedFields`.
pub const FIELD_MANAGER: &str = "rouse";

/// Part of an object that is written on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ObjectPart {
    /// Replicas of a Deployment, and the deletion cost of pods that should go. Never waits for another part.
    Scale,
    /// Everything of the object but its status.
    Object,
    /// The object's status subresource.
    Status,
}

/// Name of one part of one object, as the write queue holds it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectPartKey {
    /// Kind of the object, with its API group.
    pub resource: ResourceKind,
    /// Part of the object that is meant.
    pub part: ObjectPart,
    /// Namespace (empty for a cluster-wide kind) and name of the object.
    pub name: NamespacedName,
}

impl ObjectPartKey {
    /// Returns the key of a part of an object.
    pub fn new(resource: ResourceKind, part: ObjectPart, name: NamespacedName) -> Self {
        Self { resource, part, name }
    }
}

impl fmt::Display for ObjectPartKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = match self.part {
            ObjectPart::Scale => " scale",
            ObjectPart::Object => "",
            ObjectPart::Status => " status",
        };
        write!(out, "{}/{}{part}", self.resource, self.name)
    }
}

/// Desired state of one part of an object.
#[derive(Clone, Debug, PartialEq)]
pub enum DesiredState {
    /// No desired state: leave the part as it is.
    Unmanaged,
    /// The object should not exist, if the controller made it.
    Absent,
    /// Body to apply; for [`ObjectPart::Status`], the status alone.
    Body(Value),
    /// Number of pods; for [`ObjectPart::Scale`] only.
    Scale {
        /// Number of pods, at least.
        min_replicas: i64,
        /// Number of pods, at most: a Deployment between both bounds is left alone.
        max_replicas: i64,
        /// Pods to remove first if the Deployment is scaled down.
        pods_to_remove: Vec<NamespacedName>,
    },
}

/// Write error: the reason why an object cannot be written, for conditions and Events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteError {
    /// Reason in one CamelCase word, Knative's where Knative has one.
    pub reason: &'static str,
    /// Explanation in one line, for users.
    pub message: String,
}

/// Source of desired states, and receiver of the results of writes.
pub trait DesiredStateSource: Send + Sync + 'static {
    /// Reports that this replica becomes or is no longer the leader.
    ///
    /// The writer asks for desired states only after `lead(true)`, since only a leader plans all objects.
    fn leadership_changed(&self, leads: bool);

    /// Returns the desired state of the part named by `key` at this moment.
    fn desired_state(&self, key: &ObjectPartKey) -> DesiredState;

    /// Reports that the object was created, with this body.
    fn object_created(&self, key: &ObjectPartKey, body: &Value);

    /// Reports a write error of the object; `None`: its last write succeeded.
    fn write_result(&self, key: &ObjectPartKey, trouble: Option<WriteError>);

    /// Returns the child objects that must exist for an app, by the object they belong to.
    fn required_children(&self, app: &NamespacedName) -> Vec<RequiredChildren>;

    /// Reports which of an app's expected objects do not exist; empty: all exist.
    fn children_missing(
        &self,
        app: &NamespacedName,
        owed: &RequiredChildren,
        missing: &[ObjectPartKey],
    );

    /// Reports that `body` was written `writes` times and undone each time, so that further writes are delayed.
    fn written_repeatedly(&self, key: &ObjectPartKey, body: &Value, writes: u32);
}
