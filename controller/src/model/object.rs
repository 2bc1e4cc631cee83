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
/// Field manager of replicas and their record on the workload of a scaled Service. It is not [`FIELD_MANAGER`]: an apply
/// removes each field that its manager applied before and leaves out now.
pub const SCALE_FIELD_MANAGER: &str = "rouse-scale";

/// Part of an object that is written on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ObjectPart {
    /// Replicas of a Deployment or StatefulSet, and the deletion cost of pods that should go. Never waits for another
    /// part.
    Scale,
    /// Everything of the object but its status.
    Object,
    /// The object's status subresource.
    Status,
    /// Requests of a pod's containers for CPU and memory, written by its subresource `resize`.
    Resize,
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
            ObjectPart::Resize => " resize",
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
    /// Number of pods of the workload of a scaled Service, with the record of who wrote it; for [`ObjectPart::Scale`]
    /// only. Exactly this is written, in one server-side apply by [`SCALE_FIELD_MANAGER`]: `spec.replicas` and both
    /// annotations of [`ReplicaRecord`].
    Replicas {
        /// Version of the workload that the number follows from: a later number of another client must stay.
        version: WorkloadVersion,
        /// Value of `spec.replicas`, and of the annotation that records it.
        replicas: u32,
        /// Number of the user, for the other annotation.
        recorded: u32,
        /// Pods to remove first, if the number is lower than the present one. Empty for a StatefulSet, which always
        /// ends the pods with the highest ordinals.
        pods_to_remove: Vec<NamespacedName>,
    },
    /// End of the management of a workload; for [`ObjectPart::Scale`] only. Both annotations of [`ReplicaRecord`] are
    /// removed, and with them what [`SCALE_FIELD_MANAGER`] owns of the object. An apply that leaves `spec.replicas` out
    /// must not do that: the API server would remove the number, and set one pod as the default.
    GivenBack {
        /// Version of the workload that this follows from.
        version: WorkloadVersion,
        /// Value to set for `spec.replicas`; `None`: the present number stays.
        replicas: Option<u32>,
    },
    /// Requests of a pod; for [`ObjectPart::Resize`] only.
    Requests {
        /// UID of the pod. Another pod of its name has requests of its own.
        uid: Box<str>,
        /// Requests that the pod should have.
        requests: PodRequests,
    },
}

/// Requests for CPU and memory that a pod should have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PodRequests {
    /// Requests with which the pod was created.
    #[default]
    Original,
    /// Requests of a frozen pod: 1m CPU for each container, and the memory that the pod holds.
    Reduced {
        /// Memory of all containers together, in MiB; `None`: the requests for memory stay.
        memory_mib: Option<u64>,
    },
}

/// Reason of the write error of a pod whose requests no resize can reduce, whatever they are.
pub const RESIZE_UNSUPPORTED: &str = "ResizeUnsupported";
/// Reason of the write error of a frozen pod whose requests cannot be reduced as far as asked for.
pub const REQUESTS_NOT_REDUCED: &str = "RequestsNotReduced";
/// Reason of the write error of a thawed pod that does not get its original requests back.
pub const REQUESTS_NOT_RESTORED: &str = "RequestsNotRestored";

/// Version of a workload, as the state machine has observed it. A write with it fails if the workload has changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkloadVersion {
    /// UID of the workload.
    pub uid: Box<str>,
    /// Value of `metadata.resourceVersion`.
    pub resource_version: Box<str>,
}

/// Record of the last write of the replicas of a workload, in two annotations of it. So a restart, another leader or a
/// lost response does not hide who wrote the present number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaRecord {
    /// Number that the controller wrote last (`rouse.dev/scaled-to`). The present number is the controller's if it is
    /// the same.
    pub scaled_to: u32,
    /// Number of the user at that time (`rouse.dev/replicas`), at least 1.
    pub user_replicas: u32,
}

/// Write error: the reason why an object cannot be written, for conditions and Events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteError {
    /// Reason in one CamelCase word, Knative's where Knative has one.
    pub reason: &'static str,
    /// Explanation in one line, for users.
    pub message: String,
}
