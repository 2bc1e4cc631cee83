//! Pure: objects of the API for all layers: kinds, parts, keys, names, hashes, and the desired state of a part.

use std::fmt;

use common::wire::NamespacedName;
use serde_json::Value;

pub mod hash;
pub mod json;
pub mod knative_object;
pub mod names;
pub mod resource;

pub use knative_object::{LocalObjectKey, LocalObjectKind};
pub use resource::ResourceKind;

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
