//! Pure: observations of scaled Services, their workloads and pods.

use common::wire::NamespacedName;

use super::ControllerStateMachine;
use crate::model::cluster_state::UnixMillis;

/// Event to record on a Service of a user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceEventRecord {
    /// Namespace and name of the Service.
    pub name: NamespacedName,
    /// UID of the Service.
    pub uid: String,
    /// True for type `Warning`, false for `Normal`.
    pub is_warning: bool,
    /// Reason in one CamelCase word.
    pub reason: String,
    /// Explanation in one line.
    pub message: String,
}

impl ControllerStateMachine {
    /// Returns true if the workloads and pods of users must be watched: a scaled Service exists, or something of one.
    /// Once true, it stays true.
    pub fn needs_workload_watch(&self) -> bool {
        self.needs_workload_watch
    }

    /// Handles the end of the first lists of workloads and pods of users.
    pub(super) fn handle_workload_list(&mut self, _now: UnixMillis) {}
}
