//! Pure: interface between the state machine and the API server: the trait through which the writer gets desired states
//! and reports results.
//!
//! The shells that use it, with the pure cores that only they use, are the files below.
//!
//! | module | content |
//! |---|---|
//! | [`client`] | clients of the API server |
//! | [`watches`] | watches of all kinds, trimmed, as one stream |
//! | [`watch_scope`] | the watches, and the fields that are kept of each kind |
//! | [`object_cache`] | a small entry for each object that the API server holds |
//! | [`write_decision`] | desired state and observed state → next write |
//! | [`pod_resize`] | requests of a pod → patches that resize it |
//! | [`write_outcome`] | the API server's response → if and when to try again |
//! | [`write_queue`], [`writer`] | order of the writes, and the writing |
//! | [`repeated_writes`] | delay of writes that another client undoes each time |
//! | [`child_checks`] | times at which an app's child objects are looked for |
//! | [`lease_state`], [`leader_election`] | leader election: the replica that writes |
//! | [`pull_secrets`] | credentials for registries |
//! | [`secret_schedule`] | times at which named Secrets are read |
//! | [`events`] | Events that users read under `kubectl describe` |

use common::wire::NamespacedName;
use serde_json::Value;

use crate::{
    model::object::{DesiredState, ObjectPartKey, WriteError},
    write::desired::RequiredChildren,
};

pub mod child_checks;
pub mod client;
pub mod events;
pub mod leader_election;
pub mod lease_state;
pub mod metrics;
pub mod object_cache;
pub mod pod_resize;
pub mod pull_secrets;
pub mod repeated_writes;
pub mod secret_schedule;
pub mod watch_scope;
mod watched_object;
pub mod watches;
pub mod write_decision;
pub mod write_outcome;
pub mod write_queue;
pub mod writer;

/// Source of desired states, and receiver of the results of writes.
pub trait DesiredStateSource: Send + Sync + 'static {
    /// Reports that this replica becomes or is no longer the leader.
    ///
    /// The writer gets desired states only after `leadership_changed(true)`, since only a leader plans all objects.
    fn leadership_changed(&self, is_leader: bool);

    /// Returns the desired state of the part named by `key` at this moment.
    fn desired_state(&self, key: &ObjectPartKey) -> DesiredState;

    /// Reports that the object was created, with this body.
    fn object_created(&self, key: &ObjectPartKey, body: &Value);

    /// Reports a write error of the object; `None`: its last write succeeded.
    fn write_result(&self, key: &ObjectPartKey, error: Option<WriteError>);

    /// Returns the child objects that must exist for an app, by the object they belong to.
    fn required_children(&self, app: &NamespacedName) -> Vec<RequiredChildren>;

    /// Reports which of the `required_children` of an object of this app do not exist; empty: all exist.
    fn children_missing(
        &self,
        app: &NamespacedName,
        required_children: &RequiredChildren,
        missing: &[ObjectPartKey],
    );

    /// Reports that `body` was written `writes` times and undone each time, so that further writes are delayed.
    fn written_repeatedly(&self, key: &ObjectPartKey, body: &Value, writes: u32);
}
