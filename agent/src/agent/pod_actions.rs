//! Shell: the part of the loop that performs the actions of the pods' state machine.

use std::{collections::VecDeque, time::Duration};

use common::{
    link::{PodReportKey, error_chain},
    probe::run_probe,
    wire::{PodObservation, PodReportItem},
};
use datapath::abi;
use tracing::{debug, error, info, warn};

use super::Agent;
use crate::{
    clock::monotonic_ns,
    kernel::{listener_counts, map_op::KernelPodIds, pod_registration::PodRegistration},
    pods::{
        finder::FinderCommand,
        registry::RegisteredPod,
        types::{
            NamespaceFacts, PodKernelState, PodProbeAttempt, PodTrackerAction, PodTrackerEvent,
        },
        upgraded_connections,
    },
};

impl Agent {
    /// Performs one action. Events that follow at once are added to `queue`.
    pub(super) fn perform_action(
        &mut self,
        action: PodTrackerAction,
        queue: &mut VecDeque<PodTrackerEvent>,
    ) {
        match action {
            PodTrackerAction::FindNamespace(uid) => {
                self.handles.finder.push(FinderCommand::Find(uid))
            }
            PodTrackerAction::Register(uid, facts) => self.register_pod(uid, &facts, queue),
            PodTrackerAction::Unregister(uid) => {
                self.handles.finder.push(FinderCommand::Forget(uid.clone()));
                self.forget_pod(&uid);
            }
            PodTrackerAction::Inspect(uid) => {
                if let Some(local) = self.registry.get(&uid) {
                    self.handles.finder.push(FinderCommand::Inspect(uid, local.cookie));
                }
            }
            PodTrackerAction::CountUpgraded(uid) => self.count_upgraded(uid),
            PodTrackerAction::StartProbe(attempt) => self.start_probe(attempt),
            PodTrackerAction::AllowStop(uid) => {
                info!(uid, "the kubelet may stop the pod");
                self.handles.prestop_hooks.release(&uid);
            }
            PodTrackerAction::EndExclusion(uid) => {
                info!(uid, "the pod's container was started again: it does not stop");
                self.handles.prestop_hooks.forget(&uid);
                self.update_exclusion(&uid);
            }
            PodTrackerAction::Report(seen) => self.report_pod(seen),
            // Ends the pod's exclusion as well, whose entry would otherwise stay.
            PodTrackerAction::ReportGone(uid) => {
                self.update_exclusion(&uid);
                self.handles.activator_reports.remove_pod(&uid);
                self.handles.reports.remove(&PodReportKey::Pod(uid));
            }
        }
    }

    /// Writes a pod into the kernel's maps, and reads what they know of it.
    fn register_pod(
        &mut self,
        uid: String,
        facts: &NamespaceFacts,
        queue: &mut VecDeque<PodTrackerEvent>,
    ) {
        let Some(pod) = self.pods.get(&uid) else { return };
        let revision = pod.revision.clone();
        let port = pod.port.get();
        // A pod that was restarted in a new sandbox has a new namespace, and needs a new row.
        if self.registry.get(&uid).is_some_and(|local| local.cookie != facts.cookie) {
            self.forget_pod(&uid);
        }
        let Some((slot, is_new_slot)) = self.registry.allocate_slot(facts.cookie) else {
            queue.push_back(PodTrackerEvent::NoFreePodSlot(uid));
            return;
        };
        // The row's previous pod is counted first, or its last requests would be lost with the row's content.
        if is_new_slot {
            self.handles.revision_totals.read_slots(&self.handles.maps);
            self.handles.maps.clear_slot(slot);
        }
        // Before the registration: even if that fails half-way, programs may count the pod in the row.
        let terms = self.routes.table().request_terms(&revision);
        self.handles.revision_totals.assign_slot(slot, facts.cookie, &revision, terms);
        let (keeps_binds, is_opaque, ports) = (false, false, Vec::new());
        let registration = PodRegistration { slot, port, keeps_binds, is_opaque, ports };
        if let Err(error) = self.handles.maps.register_pod(facts.cookie, &registration) {
            let error = error_chain(&error);
            error!(uid, error, "cannot register pod");
            queue.push_back(PodTrackerEvent::RegistrationFailed(uid, error));
            return;
        }
        debug!(uid, slot, cookie = facts.cookie, port, "pod registered");
        self.handles.usage.assign_slot(slot, &revision, &uid, &self.handles.maps);
        // Level 0: the first request raises an event, and is reported at once.
        self.handles.maps.arm_growth_event(slot, 0);
        let entry = registration.entry();
        self.registry.insert(&uid, RegisteredPod { cookie: facts.cookie, entry });
        self.update_deadline(&uid);
        self.update_planned_pod(&uid);
        queue.push_back(PodTrackerEvent::Registered(uid.clone()));
        // A listener may have opened before the registration; its event found no pod then.
        queue.extend(
            self.read_kernel_state(&uid).map(|read| PodTrackerEvent::KernelStateRead(uid, read)),
        );
    }

    /// Deletes a pod from the kernel's maps.
    fn forget_pod(&mut self, uid: &str) {
        let Some(RegisteredPod { cookie, entry }) = self.registry.remove(uid) else {
            return;
        };
        self.overdue_requests.forget(uid);
        // The last totals are reported before the row is released.
        self.handles.usage.release_slot(entry.slot, &self.handles.maps);
        self.release_slot(cookie);
        self.update_planned_pod(uid);
    }

    /// Deletes a namespace from the kernel's maps, and releases its row.
    pub(super) fn release_slot(&mut self, cookie: u64) {
        match self.handles.maps.unregister(cookie) {
            Ok(()) => {
                // Only when the kernel no longer knows the namespace may another pod have the row.
                if let Some(slot) = self.registry.release_slot(cookie) {
                    self.handles.revision_totals.release_slot(slot, cookie, &self.handles.maps);
                }
            }
            Err(error) => warn!(cookie, error = %error_chain(&error), "cannot forget namespace"),
        }
    }

    /// Updates the planner's entry of a pod of this node.
    ///
    /// Connects check the listener of a local pod, unless the kernel did not see it open.
    fn update_planned_pod(&mut self, uid: &str) {
        let unseen = self.pods.is_listener_unseen(uid);
        let local = self.registry.get(uid).map(|RegisteredPod { cookie, entry }| KernelPodIds {
            cookie: if unseen { 0 } else { cookie },
            slot: entry.slot,
        });
        self.routes.set_local_pod(uid, local);
    }

    /// Reads the maps for one pod and handles the result.
    pub(super) fn read_pod(&mut self, uid: &str) {
        if let Some(read) = self.read_kernel_state(uid) {
            self.handle_event(PodTrackerEvent::KernelStateRead(uid.to_owned(), read));
        }
    }

    /// Reads the maps for one pod; `None` if it is not registered or a map cannot be read.
    fn read_kernel_state(&self, uid: &str) -> Option<PodKernelState> {
        let RegisteredPod { cookie, entry } = self.registry.get(uid)?;
        let listen = self.handles.maps.listener(cookie, entry.port);
        let listen =
            listen.inspect_err(|error| warn!(uid, error = %error_chain(error), "cannot read map"));
        let listen = listen.ok()?;
        let state = self.handles.maps.pod_state(entry.slot);
        Some(PodKernelState {
            listeners: listener_counts::count(listen.reachable),
            loopback_listeners: listener_counts::count(listen.loopback),
            served_families: listen.families & (abi::SERVES_V4 | abi::SERVES_V6),
            listener_opened_ns: listen.listening_since_ns,
            in_flight: state.in_flight,
            connections: state.connections,
            unused_connections: state.awaiting_first_request,
            idle: Duration::from_nanos(monotonic_ns().saturating_sub(state.last_activity_ns)),
        })
    }

    /// Counts the upgraded connections of a pod. The result arrives as an event.
    fn count_upgraded(&self, uid: String) {
        let Some(RegisteredPod { cookie, .. }) = self.registry.get(&uid) else { return };
        let (finder, conns) = (self.handles.finder.channel(), self.handles.maps.conns());
        upgraded_connections::count_upgraded(
            uid,
            cookie,
            finder,
            conns,
            self.pod_events_tx.clone(),
        );
    }

    /// Makes one attempt of a readiness probe, in a task of its own.
    fn start_probe(&self, attempt: PodProbeAttempt) {
        let (events, marks) = (self.pod_events_tx.clone(), self.handles.probe_marks.clone());
        tokio::spawn(async move {
            let result =
                run_probe(&attempt.probe.handler, attempt.at, attempt.timeout, &marks).await;
            let event = PodTrackerEvent::ProbeEnded(attempt.uid, attempt.seq, result);
            // A failed send means that the loop has ended, and the agent with it.
            let _ = events.send(event).await;
        });
    }

    /// Reports a pod to the controller, and to activators if it is ready.
    fn report_pod(&mut self, observation: PodObservation) {
        // First, since requests may wait there.
        self.handles.activator_reports.report_pod(&observation);
        self.update_planned_pod(&observation.uid);
        let key = PodReportKey::Pod(observation.uid.clone());
        let before = match self.handles.reports.get(&key) {
            Some(PodReportItem::Observed(before)) => Some(before),
            _ => None,
        };
        let (uid, since_ns) = (observation.uid.clone(), observation.listening_since_ns);
        let (ready, drained, not_ready_reason) =
            (observation.ready, observation.drained, observation.not_ready_reason.clone());
        self.handles.reports.set(key, PodReportItem::Observed(observation));
        // Measured once, at the change to ready; without a listener there is no start to measure from.
        if ready && since_ns > 0 && !before.as_ref().is_some_and(|before| before.ready) {
            let took = Duration::from_nanos(monotonic_ns().saturating_sub(since_ns));
            self.handles.metrics.listen_to_report.observe(took.as_secs_f64());
        }
        let is_unchanged = |before: &PodObservation| {
            (before.ready, before.drained, &before.not_ready_reason)
                == (ready, drained, &not_ready_reason)
        };
        if !before.as_ref().is_some_and(is_unchanged) {
            info!(uid, ready, drained, not_ready_reason, "pod state changed");
        }
    }
}
