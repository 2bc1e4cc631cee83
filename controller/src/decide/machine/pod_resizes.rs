//! Pure: errors of the resizes of pods.

use common::wire::NamespacedName;

use super::ControllerStateMachine;
use crate::model::{cluster_state::UnixMillis, object::WriteError};

impl ControllerStateMachine {
    /// Handles an error of a write of a pod's requests.
    pub(super) fn handle_resize_error(
        &mut self,
        name: &NamespacedName,
        error: &WriteError,
        now: UnixMillis,
    ) {
        let Some(uid) = self.pod_index.uids.get(name).cloned() else { return };
        let Some(app) = self.pod_index.apps.get(&*uid).cloned() else { return };
        self.change_app(app, now, |app, _| {
            let pods = app.revisions.iter_mut().flat_map(|it| &mut it.pods);
            for pod in pods.filter(|it| it.uid == uid) {
                pod.resize.get_or_insert_default().record_write_error(error);
            }
        });
    }
}
