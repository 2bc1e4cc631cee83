//! Pure: resource requests that a pod should have while it is frozen and after that, and the refusals of its resizes.

use super::ConditionReason;
use crate::model::object::{PodRequests, REQUESTS_NOT_REDUCED, REQUESTS_NOT_RESTORED, WriteError};

/// Bytes of a MiB.
const MIB: u64 = 1 << 20;
/// Smallest decrease of a frozen pod's memory that is worth another resize, in MiB.
const MIN_DECREASE_MIB: u64 = 4;

/// Resize of one pod: the requests that it should have, and what was refused.
///
/// A frozen pod that keeps more than it needs does no other harm, so it may stay frozen. A pod that does not get its
/// requests back must not be frozen again: its node has promised them to other pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodResize {
    /// Requests that the pod should have now.
    pub requests: PodRequests,
    /// Resources whose requests may be reduced; each refusal leaves fewer.
    pub reducible: ReducibleResources,
    /// Last refusal of reduced requests, by the API server or the node.
    pub reduction_refusal: Option<ConditionReason>,
    /// Last refusal of the original requests, by the API server or the node. It stays after they were restored.
    pub restoration_refusal: Option<ConditionReason>,
    /// Generation of the pod whose resize its node refused last, as one status is observed more than once.
    pub refused_generation: Option<i64>,
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

/// Resize that the kubelet has not allocated, as the pod's condition `PodResizePending` reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingResize {
    /// Reason (`Deferred` or `Infeasible`) and message of the kubelet.
    pub reason: ConditionReason,
    /// Generation of the pod that the kubelet means; `None`: it states none, as before Kubernetes 1.34.
    pub generation: Option<i64>,
}

impl PodResize {
    /// Returns the requests of the pod while it is frozen and holds this memory; `None`: the node does not count it.
    ///
    /// A small decrease of the memory does not change them, since each change costs several requests to the API server.
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
                    held <= present && present - held < MIN_DECREASE_MIB.max(present / 8)
                };
                let memory_mib = match (present, held) {
                    (Some(present), Some(held)) if is_near(present, held) => Some(present),
                    // Without a figure, the last one stays.
                    (present, held) => held.or(present),
                };
                PodRequests::Reduced { memory_mib }
            }
        }
    }

    /// Records an error of a write of the pod's requests. Its reason tells what the write was for, as the requests may
    /// have changed since it began.
    pub fn record_write_error(&mut self, error: &WriteError) {
        let reason = ConditionReason::new(error.reason, error.message.clone());
        match error.reason {
            REQUESTS_NOT_RESTORED => self.restoration_refusal = Some(reason),
            REQUESTS_NOT_REDUCED => self.refuse_reduction(reason),
            // Whatever is asked for, this pod cannot be resized.
            _ => {
                self.reducible = ReducibleResources::Nothing;
                self.reduction_refusal = Some(reason);
            }
        }
    }

    /// Records the kubelet's report of a resize that it has not allocated. `is_noted` is true while the pod has the
    /// note of its original requests, which the last patch of a restoration removes.
    pub fn record_node_report(&mut self, pending: &PendingResize, is_noted: bool) {
        if self.is_counted(pending) {
            return;
        }
        let message = format!("{}: {}", pending.reason.reason, pending.reason.message);
        match (self.requests, is_noted) {
            (PodRequests::Reduced { .. }, true) => {
                self.refuse_reduction(ConditionReason::new(REQUESTS_NOT_REDUCED, message));
            }
            (PodRequests::Original, false) => {
                let reason = ConditionReason::new(REQUESTS_NOT_RESTORED, message);
                self.restoration_refusal = Some(reason);
            }
            // A patch is under way, and the report is of the requests before it. The next one tells.
            (PodRequests::Reduced { .. }, false) | (PodRequests::Original, true) => return,
        }
        self.refused_generation = pending.generation;
    }

    /// Returns true if this report of the kubelet was counted before. One without a generation may still be that of the
    /// reduction while the restoration is under way.
    fn is_counted(&self, pending: &PendingResize) -> bool {
        match pending.generation {
            Some(generation) => self.refused_generation == Some(generation),
            None => self
                .reduction_refusal
                .as_ref()
                .is_some_and(|it| it.message.ends_with(&*pending.reason.message)),
        }
    }

    /// Records that a reduction was refused. The next one is of CPU alone, if this one was of memory too; after that
    /// nothing is reduced.
    fn refuse_reduction(&mut self, reason: ConditionReason) {
        self.reducible = match (self.reducible, self.requests) {
            (ReducibleResources::Cpu | ReducibleResources::Nothing, _)
            | (_, PodRequests::Reduced { memory_mib: None }) => ReducibleResources::Nothing,
            (ReducibleResources::CpuAndMemory, _) => ReducibleResources::Cpu,
        };
        self.reduction_refusal = Some(reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::object::RESIZE_UNSUPPORTED;

    fn frozen() -> PodResize {
        let requests = PodRequests::Reduced { memory_mib: Some(40) };
        PodResize { requests, ..PodResize::default() }
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
            resize.record_write_error(&error(REQUESTS_NOT_REDUCED));
            resize.requests = resize.reduced_requests(Some(40 * MIB));
            steps.push(resize.requests);
        }
        let cpu = PodRequests::Reduced { memory_mib: None };
        assert_eq!(steps, [cpu, PodRequests::Original, PodRequests::Original]);
        let reason = ConditionReason::new(REQUESTS_NOT_REDUCED, "no");
        assert_eq!((resize.reduction_refusal, resize.restoration_refusal), (Some(reason), None));
    }

    #[test]
    fn a_pod_that_cannot_be_resized_is_not_asked_for_less_step_by_step() {
        let mut resize = frozen();
        resize.record_write_error(&error(RESIZE_UNSUPPORTED));
        assert_eq!(resize.reduced_requests(Some(MIB)), PodRequests::Original);
        assert!(resize.reduction_refusal.is_some() && resize.restoration_refusal.is_none());
    }

    #[test]
    fn each_report_of_a_node_counts_once() {
        let mut resize = frozen();
        for _ in 0..3 {
            resize.record_node_report(&pending("Infeasible", Some(4)), true);
            resize.requests = resize.reduced_requests(Some(40 * MIB));
        }
        assert_eq!(resize.reducible, ReducibleResources::Cpu, "the same report");
        resize.record_node_report(&pending("Infeasible", Some(5)), true);
        assert_eq!(resize.reducible, ReducibleResources::Nothing);
    }

    /// Such a kubelet keeps its condition for a moment after the requests changed.
    #[test]
    fn a_report_without_a_generation_is_not_taken_for_one_of_the_restoration() {
        let mut resize = frozen();
        resize.record_node_report(&pending("Infeasible", None), true);
        resize.requests = PodRequests::Original;
        resize.record_node_report(&pending("Infeasible", None), false);
        assert_eq!(resize.restoration_refusal, None);
        let other = ConditionReason::new("Deferred", "Node has too little CPU");
        resize.record_node_report(&PendingResize { reason: other, generation: None }, false);
        assert!(resize.restoration_refusal.is_some());
    }

    #[test]
    fn a_refused_restoration_is_remembered_once_its_patches_are_sent() {
        let mut resize = PodResize::default();
        let deferred = pending("Deferred", Some(6));
        resize.record_node_report(&deferred, true);
        assert_eq!(resize, PodResize::default(), "its last patch is under way");
        resize.record_node_report(&deferred, false);
        let reason = ConditionReason::new(REQUESTS_NOT_RESTORED, "Deferred: Node is full");
        assert_eq!((resize.restoration_refusal, resize.reduction_refusal), (Some(reason), None));
    }

    /// The pod thawed while the write of its reduced requests was under way.
    #[test]
    fn a_late_error_of_a_reduction_is_no_refused_restoration() {
        let mut resize = PodResize::default();
        resize.record_write_error(&error(REQUESTS_NOT_REDUCED));
        assert_eq!(resize.restoration_refusal, None);
        resize.record_write_error(&error(REQUESTS_NOT_RESTORED));
        assert!(resize.restoration_refusal.is_some());
    }
}
