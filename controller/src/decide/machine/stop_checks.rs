//! Pure: stop checks: reads of single pods from the API server, which tell pods that end from pods whose container
//! restarts.
//!
//! The kubelet sends the same preStop request before both. That no watch has brought a deletion proves nothing, because
//! a watch may be silent. A read after the report of the request does: the kubelet learns of a deletion from the API
//! server. Each replica checks the pods for itself, since agents may follow any replica.

use std::collections::BTreeMap;

use common::wire::NamespacedName;
use serde_json::Value;
use smol_str::SmolStr;
use tracing::info;

use super::ControllerStateMachine;
use crate::model::{
    cluster_state::{PodStage, RevisionPod, UnixMillis},
    object::json,
};

/// Time after which a read without an answer is repeated.
const ANSWER_TIMEOUT_MS: u64 = 5000;
/// Pause between the failure of a read and the next one.
const FAILURE_PAUSE_MS: u64 = 1000;
/// Key of the timer for repeated reads: a name without a namespace, which no app has.
pub(super) const STOP_CHECK_TIMER_KEY: NamespacedName =
    NamespacedName { namespace: SmolStr::new_static(""), name: SmolStr::new_static("stop-checks") };

/// Read of one pod from the API server: its state as of now, from no cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodRead {
    /// Namespace and name of the pod.
    pub name: NamespacedName,
    /// UID of the pod. Another pod may have its name by now.
    pub uid: String,
    /// Number of the stop check, the same for each repetition of the read.
    pub check: u64,
}

/// Result of a [`PodRead`].
#[derive(Clone, Debug, PartialEq)]
pub enum PodReadResult {
    /// The object with the pod's name.
    Found(Box<Value>),
    /// No object has the pod's name.
    NotFound,
    /// The API server gave an error, or no answer in time.
    Failed,
}

/// Checks of all pods whose kubelets have asked to stop a container, by app and by the pod's UID.
#[derive(Debug, Default)]
pub(super) struct StopChecks {
    by_app: BTreeMap<NamespacedName, BTreeMap<String, StopCheck>>,
    /// Number of the newest check.
    newest_number: u64,
}

/// Check of one pod, for as long as its agent reports the kubelet's request.
#[derive(Debug, Default)]
struct StopCheck {
    progress: StopCheckProgress,
    /// Newest version of the pod that was observed since the report; `None`: none, or no number.
    newest_version: Option<u64>,
}

/// Progress of a [`StopCheck`].
#[derive(Debug, Default, PartialEq, Eq)]
enum StopCheckProgress {
    /// There is nothing to ask: the pod does not serve.
    #[default]
    Idle,
    /// The API server is asked, and again at this moment.
    Asking { read: PodRead, repeat_at: UnixMillis },
    /// The API server has answered that it does not delete the pod.
    Answered,
}

impl StopChecks {
    /// Adds a pod whose agent reports that the kubelet has asked to stop a container.
    pub(super) fn add(&mut self, app: &NamespacedName, uid: &str) {
        self.by_app.entry(app.clone()).or_default().entry(uid.to_owned()).or_default();
    }

    /// Forgets the checks of an app that is gone.
    pub(super) fn forget_app(&mut self, app: &NamespacedName) {
        self.by_app.remove(app);
    }

    fn get_mut(&mut self, app: &NamespacedName, uid: &str) -> Option<&mut StopCheck> {
        self.by_app.get_mut(app)?.get_mut(uid)
    }

    /// Returns the moment at which the next read is to be repeated.
    fn next_repetition(&self) -> Option<UnixMillis> {
        let all = self.by_app.values().flat_map(BTreeMap::values);
        let repetitions = all.filter_map(|check| match &check.progress {
            StopCheckProgress::Asking { repeat_at, .. } => Some(*repeat_at),
            StopCheckProgress::Idle | StopCheckProgress::Answered => None,
        });
        repetitions.min()
    }
}

impl StopCheck {
    /// Records the version of an observation. Returns false if it is older than another one.
    fn admit_version(&mut self, version: u64) -> bool {
        let is_newest = self.newest_version.is_none_or(|newest| version >= newest);
        if is_newest {
            self.newest_version = Some(version);
        }
        is_newest
    }
}

impl ControllerStateMachine {
    /// Begins and ends the stop checks of an app's pods, after its plan or a report.
    pub(super) fn follow_stop_checks(&mut self, app_name: &NamespacedName, now: UnixMillis) {
        let Some(mut checks) = self.stop_checks.by_app.remove(app_name) else { return };
        let Some(app) = self.cluster.apps.get_mut(app_name) else { return };
        let reports = &self.cluster.pods.reports;
        let newest_number = &mut self.stop_checks.newest_number;
        let mut reads = Vec::new();
        checks.retain(|uid, check| {
            let mut pods = app.revisions.iter_mut().flat_map(|it| &mut it.pods);
            let Some(pod) = pods.find(|pod| *pod.uid == **uid) else { return false };
            let is_reported = reports.get(uid).is_some_and(|report| report.awaits_stop);
            if !is_reported || !may_go_on(pod) {
                // Once it serves again, the answer may be older than its deletion.
                pod.restarts_container = false;
                check.progress = StopCheckProgress::Idle;
            } else if check.progress == StopCheckProgress::Idle {
                *newest_number += 1;
                let name = NamespacedName::new(app_name.namespace.clone(), &*pod.name);
                let read = PodRead { name, uid: uid.clone(), check: *newest_number };
                reads.push(read.clone());
                let repeat_at = now.plus_ms(ANSWER_TIMEOUT_MS);
                check.progress = StopCheckProgress::Asking { read, repeat_at };
            }
            is_reported
        });
        if !checks.is_empty() {
            self.stop_checks.by_app.insert(app_name.clone(), checks);
        }
        // A timer that is set is due no later: all repetitions are due after the same time at most.
        if !reads.is_empty() && !self.timers.is_set(&STOP_CHECK_TIMER_KEY) {
            self.timers.set(&STOP_CHECK_TIMER_KEY, self.stop_checks.next_repetition());
        }
        self.effects.pods_to_read.extend(reads);
    }

    /// Repeats the reads that are due.
    pub(super) fn repeat_pod_reads(&mut self, now: UnixMillis) {
        for check in self.stop_checks.by_app.values_mut().flat_map(BTreeMap::values_mut) {
            if let StopCheckProgress::Asking { read, repeat_at } = &mut check.progress
                && *repeat_at <= now
            {
                *repeat_at = now.plus_ms(ANSWER_TIMEOUT_MS);
                self.effects.pods_to_read.push(read.clone());
            }
        }
        self.timers.set(&STOP_CHECK_TIMER_KEY, self.stop_checks.next_repetition());
    }

    /// Handles the result of a read. It has no effect if the question no longer stands: the kubelet's request is over,
    /// or the pod ends.
    pub(super) fn handle_pod_read(
        &mut self,
        read: &PodRead,
        result: PodReadResult,
        now: UnixMillis,
    ) {
        let Some(app) = self.asking_app(read) else { return };
        match result {
            PodReadResult::Found(object) => self.handle_found_pod(read, &object, now),
            PodReadResult::NotFound => self.remove_read_pod(read, now),
            // The answer decides if requests go to the pod, so a failed read is repeated soon.
            PodReadResult::Failed => {
                let check = self.stop_checks.get_mut(&app, &read.uid);
                if let Some(StopCheckProgress::Asking { repeat_at, .. }) =
                    check.map(|it| &mut it.progress)
                {
                    *repeat_at = (*repeat_at).min(now.plus_ms(FAILURE_PAUSE_MS));
                }
                self.timers.set(&STOP_CHECK_TIMER_KEY, self.stop_checks.next_repetition());
            }
        }
    }

    /// Returns the app of the pod if its check still waits for this read.
    fn asking_app(&self, read: &PodRead) -> Option<NamespacedName> {
        let app = self.pod_index.apps.get(&read.uid)?;
        let check = self.stop_checks.by_app.get(app)?.get(&read.uid)?;
        let is_asking = matches!(
            &check.progress,
            StopCheckProgress::Asking { read: asked, .. } if asked == read
        );
        is_asking.then(|| app.clone())
    }

    /// Handles an object that was read, as if the watch had brought it. If it is the pod and is not being deleted, a
    /// container restarts.
    fn handle_found_pod(&mut self, read: &PodRead, object: &Value, now: UnixMillis) {
        let is_pod = object["metadata"]["uid"].as_str() == Some(read.uid.as_str());
        if !is_pod {
            self.remove_read_pod(read, now);
        }
        self.observe_pod(&read.name, Some(object), now);
        if !is_pod || json::is_terminating(object) {
            return;
        }
        // A pod that has failed is gone by now, and one that newer observations let drain is asked about no more.
        let Some(app) = self.asking_app(read) else { return };
        if let Some(check) = self.stop_checks.get_mut(&app, &read.uid) {
            check.progress = StopCheckProgress::Answered;
        }
        info!(pod = read.uid, "pod whose kubelet asks to stop a container is not being deleted");
        self.change_app(app, now, |app, _| {
            let mut pods = app.revisions.iter_mut().flat_map(|it| &mut it.pods);
            if let Some(pod) = pods.find(|pod| *pod.uid == *read.uid) {
                pod.restarts_container = true;
            }
        });
    }

    /// Removes a pod that the API server does not have any more.
    fn remove_read_pod(&mut self, read: &PodRead, now: UnixMillis) {
        // The name may be that of a newer pod by now.
        if self.pod_index.uids.get(&read.name).is_none_or(|uid| **uid == *read.uid) {
            self.observe_pod(&read.name, None, now);
        }
    }

    /// Records the version of an observed pod with a stop check. Returns false if a newer one was observed before: reads
    /// and watches come in no common order.
    ///
    /// Versions of one object are numbers that grow (Kubernetes' KEP-5504). A version that is no number is not compared.
    pub(super) fn admit_pod_version(&mut self, object: &Value) -> bool {
        // Nearly always there is no check, and then no pod is searched.
        if self.stop_checks.by_app.is_empty() {
            return true;
        }
        let meta = &object["metadata"];
        let uid = meta["uid"].as_str().unwrap_or_default();
        let Some(app) = self.pod_index.apps.get(uid) else { return true };
        let Some(check) = self.stop_checks.get_mut(app, uid) else { return true };
        let version = meta["resourceVersion"].as_str();
        let version: Option<u64> = version.and_then(|it| it.parse().ok());
        version.is_none_or(|version| check.admit_version(version))
    }
}

/// Returns true if the pod is not known to end. The pods of the local node end only by the controller's own order.
fn may_go_on(pod: &RevisionPod) -> bool {
    let status = pod.kube_status.as_ref();
    pod.stage == PodStage::Serving && status.is_some_and(|it| !it.is_terminating)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_observation_that_is_older_than_another_one_is_not_admitted() {
        let mut check = StopCheck::default();
        let admitted = [7, 7, 6, 9, 8].map(|version| check.admit_version(version));
        assert_eq!(admitted, [true, true, false, true, false]);
    }
}
