//! Pure: requests that a pod should have while it is frozen and after it, and the refusals of its resizes.

use super::ConditionReason;
use crate::model::object::{PodRequests, REQUESTS_NOT_REDUCED, REQUESTS_NOT_RESTORED, WriteError};

/// Bytes of a MiB.
const MIB: u64 = 1 << 20;
/// Least fall of a frozen pod's memory, in MiB, that is worth another resize.
const LEAST_FALL_MIB: u64 = 4;

/// Resize of one pod: the requests that it should have, and what was refused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodResize {
    /// Requests that the pod should have now.
    pub requests: PodRequests,
    /// Resources whose requests may be reduced; each refusal leaves fewer.
    pub reducible: ReducibleResources,
    /// Refusal that users should know; `None`: there was none, or a refused restoration has succeeded since.
    pub refusal: Option<ResizeRefusal>,
    /// Generation of the pod whose resize its node refused last. A status is observed more than once.
    pub refused_generation: Option<i64>,
    /// True once a restoration was refused. Such a pod is not frozen again.
    pub was_restoration_refused: bool,
}

/// Resources whose requests may be reduced while a pod is frozen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReducibleResources {
    /// CPU and memory.
    #[default]
    CpuAndMemory,
    /// CPU alone. Where pods may swap, the kubelet refuses a change of the memory.
    Cpu,
    /// No resource.
    Nothing,
}

/// Refusal of a resize, for users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResizeRefusal {
    /// Change that was refused, and by which side.
    pub refused: RefusedResize,
    /// Reason in one word, and the refusing side's own message.
    pub reason: ConditionReason,
}

/// Change of a pod's requests that was refused, by the side that refused it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusedResize {
    /// Reduction, by the API server or by the node. The pod keeps more than it needs, which does no other harm.
    Reduction,
    /// Restoration, by the API server, as for an exceeded quota.
    RestorationByApiServer,
    /// Restoration, by the node, which has promised its resources to other pods meanwhile.
    RestorationByNode,
}

/// Resize that the kubelet has not allocated, as the pod's condition `PodResizePending` reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingResize {
    /// Reason (`Deferred` or `Infeasible`) and message of the kubelet.
    pub reason: ConditionReason,
    /// Generation of the pod that the kubelet means; `None`: it states none, as before Kubernetes 1.34.
    pub generation: Option<i64>,
}

impl PodResize {
    /// Returns the requests of the pod while it is frozen and holds this memory; `None`: the node does not tell.
    ///
    /// Memory that falls a little does not change them, since each change costs several requests to the API server.
    pub fn reduced_requests(&self, held_bytes: Option<u64>) -> PodRequests {
        match self.reducible {
            ReducibleResources::Nothing => PodRequests::Original,
            ReducibleResources::Cpu => PodRequests::Reduced { memory_mib: None },
            ReducibleResources::CpuAndMemory => {
                let present = match self.requests {
                    PodRequests::Reduced { memory_mib } => memory_mib,
                    PodRequests::Original => None,
                };
                let held = held_bytes.map(|it| it.div_ceil(MIB));
                let is_near = |present: u64, held: u64| {
                    held <= present && present - held < LEAST_FALL_MIB.max(present / 8)
                };
                let memory_mib = match (present, held) {
                    (Some(present), Some(held)) if is_near(present, held) => Some(present),
                    (present, held) => held.or(present),
                };
                PodRequests::Reduced { memory_mib }
            }
        }
    }

    /// Returns the reason for which the pod does not get its original requests back; `None`: it gets them.
    pub fn restoration_refusal(&self) -> Option<&ConditionReason> {
        let refusal = self.refusal.as_ref()?;
        match refusal.refused {
            RefusedResize::Reduction => None,
            RefusedResize::RestorationByApiServer | RefusedResize::RestorationByNode => {
                Some(&refusal.reason)
            }
        }
    }

    /// Records the result of a write of the pod's requests; `None`: it succeeded. A write that began before the
    /// requests changed tells by its reason what it was for.
    pub fn record_write(&mut self, error: Option<&WriteError>) {
        match error {
            None => self.end_refusal(RefusedResize::RestorationByApiServer),
            Some(error) if error.reason == REQUESTS_NOT_RESTORED => {
                let message = error.message.clone();
                self.refuse_restoration(RefusedResize::RestorationByApiServer, message);
            }
            Some(error) => {
                if error.reason == REQUESTS_NOT_REDUCED {
                    self.reduce_less();
                } else {
                    // Whatever is asked for, this pod cannot be resized.
                    self.reducible = ReducibleResources::Nothing;
                }
                self.refuse_reduction(ConditionReason::new(error.reason, error.message.clone()));
            }
        }
    }

    /// Records the kubelet's report of a resize that it has not allocated; `None`: there is none. `is_noted` is true
    /// while the pod has the note of its original requests, which the last patch of a restoration removes.
    pub fn record_node_report(&mut self, pending: Option<&PendingResize>, is_noted: bool) {
        let Some(pending) = pending else {
            return self.end_refusal(RefusedResize::RestorationByNode);
        };
        if self.is_counted(pending) {
            return;
        }
        let ConditionReason { reason, message } = &pending.reason;
        let message = format!("{reason}: {message}");
        match (self.requests, is_noted) {
            (PodRequests::Reduced { .. }, true) => {
                self.reduce_less();
                self.refuse_reduction(ConditionReason::new(REQUESTS_NOT_REDUCED, message));
            }
            (PodRequests::Original, false) => {
                self.refuse_restoration(RefusedResize::RestorationByNode, message);
            }
            // A patch is under way, and the report is of the requests before it. The next one tells.
            (PodRequests::Reduced { .. }, false) | (PodRequests::Original, true) => return,
        }
        self.refused_generation = pending.generation;
    }

    /// Returns true if this report of the kubelet was counted before.
    fn is_counted(&self, pending: &PendingResize) -> bool {
        match pending.generation {
            Some(generation) => self.refused_generation == Some(generation),
            None => self.refusal.as_ref().is_some_and(|it| {
                it.reason.message.ends_with(&*pending.reason.message)
                    && it.refused != RefusedResize::RestorationByApiServer
            }),
        }
    }

    fn reduce_less(&mut self) {
        self.reducible = match (self.reducible, self.requests) {
            // Memory was not asked for, so nothing is left to try.
            (_, PodRequests::Reduced { memory_mib: None })
            | (ReducibleResources::Cpu | ReducibleResources::Nothing, _) => {
                ReducibleResources::Nothing
            }
            (ReducibleResources::CpuAndMemory, _) => ReducibleResources::Cpu,
        };
    }

    fn refuse_reduction(&mut self, reason: ConditionReason) {
        self.refusal = Some(ResizeRefusal { refused: RefusedResize::Reduction, reason });
    }

    fn refuse_restoration(&mut self, refused: RefusedResize, message: String) {
        let reason = ConditionReason::new(REQUESTS_NOT_RESTORED, message);
        self.refusal = Some(ResizeRefusal { refused, reason });
        self.was_restoration_refused = true;
    }

    fn end_refusal(&mut self, refused: RefusedResize) {
        if self.refusal.as_ref().is_some_and(|it| it.refused == refused) {
            self.refusal = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB_40: PodRequests = PodRequests::Reduced { memory_mib: Some(40) };

    fn frozen() -> PodResize {
        PodResize { requests: MIB_40, ..PodResize::default() }
    }

    fn error(reason: &'static str) -> WriteError {
        WriteError { reason, message: "no".to_owned() }
    }

    fn pending(reason: &'static str, generation: Option<i64>) -> PendingResize {
        PendingResize { reason: ConditionReason::new(reason, "Node is full"), generation }
    }

    #[test]
    fn requests_follow_the_memory_if_it_rises_or_falls_much() {
        let next = |memory_mib: Option<u64>, held_mib: Option<u64>| {
            let requests = PodRequests::Reduced { memory_mib };
            let resize = PodResize { requests, ..PodResize::default() };
            match resize.reduced_requests(held_mib.map(|it| it * MIB)) {
                PodRequests::Reduced { memory_mib } => memory_mib,
                PodRequests::Original => panic!("nothing was refused"),
            }
        };
        assert_eq!(next(Some(40), Some(41)), Some(41), "never less than the pod holds");
        assert_eq!(next(Some(40), Some(40)), Some(40));
        assert_eq!(next(Some(40), Some(36)), Some(40));
        assert_eq!(next(Some(40), Some(35)), Some(35));
        assert_eq!(next(Some(3), Some(1)), Some(3));
        assert_eq!(next(None, Some(7)), Some(7));
        assert_eq!([next(Some(40), None), next(None, None)], [Some(40), None], "not known");
        let part = PodResize::default().reduced_requests(Some(MIB + 1));
        assert_eq!(part, PodRequests::Reduced { memory_mib: Some(2) }, "rounded up");
    }

    #[test]
    fn each_refused_reduction_leaves_less_to_reduce() {
        let mut resize = frozen();
        let mut steps = Vec::new();
        for _ in 0..3 {
            resize.record_write(Some(&error(REQUESTS_NOT_REDUCED)));
            resize.requests = resize.reduced_requests(Some(40 * MIB));
            steps.push(resize.requests);
        }
        let cpu = PodRequests::Reduced { memory_mib: None };
        assert_eq!(steps, [cpu, PodRequests::Original, PodRequests::Original]);
        assert!(!resize.was_restoration_refused, "the pod may stay frozen");
        resize.record_write(None);
        resize.record_node_report(None, false);
        let refusal = resize.refusal.expect("users should know");
        assert_eq!(refusal.refused, RefusedResize::Reduction);
        assert_eq!(refusal.reason, ConditionReason::new(REQUESTS_NOT_REDUCED, "no"));
    }

    #[test]
    fn a_pod_that_cannot_be_resized_is_not_asked_for_less_step_by_step() {
        let mut resize = frozen();
        resize.record_write(Some(&error(crate::model::object::RESIZE_UNSUPPORTED)));
        assert_eq!(resize.reduced_requests(Some(MIB)), PodRequests::Original);
    }

    #[test]
    fn each_report_of_a_node_counts_once() {
        let mut resize = frozen();
        resize.record_node_report(Some(&pending("Infeasible", Some(4))), true);
        assert_eq!(resize.reducible, ReducibleResources::Cpu);
        for _ in 0..3 {
            resize.requests = resize.reduced_requests(Some(40 * MIB));
            resize.record_node_report(Some(&pending("Infeasible", Some(4))), true);
        }
        assert_eq!(resize.reducible, ReducibleResources::Cpu, "the same report");
        resize.record_node_report(Some(&pending("Infeasible", Some(5))), true);
        assert_eq!(resize.reducible, ReducibleResources::Nothing);
        // A kubelet that states no generation.
        let mut resize = frozen();
        resize.record_node_report(Some(&pending("Infeasible", None)), true);
        resize.requests = PodRequests::Original;
        resize.record_node_report(Some(&pending("Infeasible", None)), false);
        assert!(!resize.was_restoration_refused, "the old report is not of the restoration");
    }

    #[test]
    fn a_refused_restoration_is_known_until_it_succeeds_and_remembered_for_ever() {
        let mut resize = PodResize::default();
        let deferred = pending("Deferred", Some(6));
        resize.record_node_report(Some(&deferred), true);
        assert_eq!(resize, PodResize::default(), "its last patch is under way");
        resize.record_node_report(Some(&deferred), false);
        let refusal = resize.refusal.clone().expect("it is refused");
        assert_eq!(refusal.refused, RefusedResize::RestorationByNode);
        let reason = ConditionReason::new(REQUESTS_NOT_RESTORED, "Deferred: Node is full");
        assert_eq!(refusal.reason, reason);
        resize.record_write(None);
        resize.record_node_report(Some(&deferred), false);
        assert_eq!(resize.refusal, Some(refusal), "still");
        resize.record_node_report(None, false);
        assert_eq!((resize.refusal.is_none(), resize.was_restoration_refused), (true, true));
    }

    /// The status of the pod may be observed at any time, and tells nothing of a write that failed.
    #[test]
    fn each_side_ends_only_its_own_refusal() {
        let mut resize = PodResize::default();
        resize.record_write(Some(&error(REQUESTS_NOT_RESTORED)));
        resize.record_node_report(None, true);
        let refused = resize.refusal.as_ref().map(|it| it.refused);
        assert_eq!(refused, Some(RefusedResize::RestorationByApiServer));
        resize.record_write(None);
        assert_eq!((resize.refusal.is_none(), resize.was_restoration_refused), (true, true));
    }

    /// The pod thawed while the write of its reduced requests was under way.
    #[test]
    fn a_late_error_of_a_reduction_is_no_refused_restoration() {
        let mut resize = PodResize::default();
        resize.record_write(Some(&error(REQUESTS_NOT_REDUCED)));
        assert!(!resize.was_restoration_refused);
    }
}
