//! Shell: the part of the loop that performs the actions of the pods' state machine.

use std::{
    collections::{BTreeSet, VecDeque},
    time::Duration,
};

use common::{
    link::{PodReportKey, error_chain},
    probe::run_probe,
    wire::{PodEntry, PodObservation, PodReportItem},
};
use datapath::abi;
use tracing::{debug, error, info, warn};

use super::Agent;
use crate::{
    clock::monotonic_ns,
    kernel::{listener_counts, map_op::KernelPodIds, maps::KernelMapError},
    pods::{
        finder::FinderCommand,
        pod_ports::PodPorts,
        registry::RegisteredPod,
        types::{
            NamespaceFacts, PodKernelState, PodProbeAttempt, PodTrackerAction, PodTrackerEvent,
        },
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
                let keeps_binds = self.pods.get(&uid).is_some_and(|pod| pod.keeps_binds);
                self.handles.finder.push(match keeps_binds {
                    true => FinderCommand::FindWithoutServer(uid),
                    false => FinderCommand::Find(uid),
                });
            }
            PodTrackerAction::Register(uid, facts) => self.register_pod(uid, &facts, queue),
            PodTrackerAction::Unregister(uid) => {
                // While the maps still hold the pod.
                self.update_standby(&uid);
                self.handles.finder.push(FinderCommand::Forget(uid.clone()));
                self.forget_pod(&uid);
            }
            PodTrackerAction::Inspect(uid) => {
                if let Some(local) = self.registry.get(&uid) {
                    self.handles.finder.push(FinderCommand::Inspect(uid, local.cookie));
                }
            }
            PodTrackerAction::OpenPodServer(uid) => {
                self.handles.finder.push(FinderCommand::OpenPodServer(uid));
            }
            PodTrackerAction::ReplanBackends(uid) => self.update_planned_pod(&uid),
            PodTrackerAction::CountUpgraded(uid) => self.count_upgraded(uid),
            // A frozen pod has the readiness with which it was frozen, and a probe would thaw it for nothing.
            PodTrackerAction::StartProbe(attempt) if self.standby.is_frozen(&attempt.uid) => {
                queue.push_back(PodTrackerEvent::ProbeEnded(attempt.uid, attempt.seq, Ok(())));
            }
            PodTrackerAction::StartProbe(attempt) => self.start_probe(attempt),
            PodTrackerAction::AllowStop(uid) => {
                // More than zero only if a container is restarted whose requests may never end, or if the rest are
                // upgraded connections.
                let in_flight = self.pods.in_flight(&uid);
                info!(uid, in_flight, "the kubelet may stop the pod");
                self.handles.prestop_hooks.release(&uid);
            }
            PodTrackerAction::EndExclusion(uid) => {
                info!(uid, "the pod's container was started again: it does not stop");
                self.handles.prestop_hooks.forget(&uid);
                self.update_exclusion(&uid);
                self.update_standby(&uid);
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
        let (revision, keeps_binds) = (pod.revision.clone(), pod.keeps_binds);
        let ports = self.pod_ports(pod);
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
        self.handle_standby_registration(&uid);
        let registration = ports.registration(slot, keeps_binds);
        if let Err(error) = self.handles.maps.register_pod(facts.cookie, &registration) {
            let error = error_chain(&error);
            error!(uid, error, "cannot register pod");
            queue.push_back(PodTrackerEvent::RegistrationFailed(uid, error));
            return;
        }
        debug!(uid, slot, cookie = facts.cookie, ?ports, "pod registered");
        self.handles.usage.assign_slot(slot, &revision, &uid, &self.handles.maps);
        // Level 0: the first request raises an event, and is reported at once.
        self.handles.maps.arm_growth_event(slot, 0);
        let (cookie, entry) = (facts.cookie, registration.entry());
        self.registry.insert(&uid, RegisteredPod { cookie, entry, ports: ports.into() });
        self.update_deadline(&uid);
        self.update_planned_pod(&uid);
        queue.push_back(PodTrackerEvent::Registered(uid.clone()));
        // A listener may have opened before the registration; its event found no pod then.
        queue.extend(self.read_maps(&uid).into_iter().flatten());
    }

    /// Returns the ports of a pod, as the maps should have them.
    fn pod_ports(&self, pod: &PodEntry) -> PodPorts {
        PodPorts::of_pod(pod, self.routes.table().is_tcp(&pod.revision))
    }

    /// Registers the pods again of which the maps have other ports than the RouteTable.
    pub(super) fn update_registrations(&mut self) {
        let is_outdated = |uid: &String| {
            let (registered, pod) = (self.registry.get(uid), self.pods.get(uid));
            registered.zip(pod).is_some_and(|(it, pod)| *it.ports != self.pod_ports(pod))
        };
        let outdated: Vec<String> = self.registry.uids().into_iter().filter(is_outdated).collect();
        let events = outdated.into_iter().map(PodTrackerEvent::RegistrationOutdated);
        events.for_each(|event| self.handle_event(event));
    }

    /// Deletes a pod from the kernel's maps.
    fn forget_pod(&mut self, uid: &str) {
        self.handle_standby_registration(uid);
        let Some(RegisteredPod { cookie, entry, .. }) = self.registry.remove(uid) else {
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
    /// Connects check the listeners of a local pod, but for those that the kernel did not see open.
    fn update_planned_pod(&mut self, uid: &str) {
        let unseen_ports = self.pods.unseen_ports(uid);
        let local = self.registry.get(uid).map(|RegisteredPod { cookie, entry, .. }| {
            KernelPodIds { cookie, slot: entry.slot, unseen_ports }
        });
        self.routes.set_local_pod(uid, local);
    }

    /// Reads the maps for one pod and handles the result.
    pub(super) fn read_pod(&mut self, uid: &str) {
        self.read_maps(uid).into_iter().flatten().for_each(|event| self.handle_event(event));
    }

    /// Reads the maps for one pod. Returns the events that they stand for; none if the pod is not registered, or a map
    /// cannot be read.
    fn read_maps(&self, uid: &str) -> [Option<PodTrackerEvent>; 2] {
        let Some(pod) = self.registry.get(uid) else { return [None, None] };
        let read = self.read_open_ports(&pod).and_then(|ports| {
            let state = self.read_kernel_state(&pod)?;
            Ok((ports, state))
        });
        let read =
            read.inspect_err(|error| warn!(uid, error = %error_chain(error), "cannot read map"));
        let Ok((ports, state)) = read else { return [None, None] };
        let ports = ports.map(|it| PodTrackerEvent::OpenPortsRead(uid.to_owned(), it));
        [ports, Some(PodTrackerEvent::KernelStateRead(uid.to_owned(), state))]
    }

    /// Returns the pod's ports with a reachable listener, besides the one that tells its readiness; `None`: it has no
    /// such port.
    fn read_open_ports(
        &self,
        pod: &RegisteredPod,
    ) -> Result<Option<BTreeSet<u16>>, KernelMapError> {
        let (mut has_ports, mut open) = (false, BTreeSet::new());
        for port in pod.ports.others() {
            has_ports = true;
            let listen = self.handles.maps.listener(pod.cookie, port)?;
            if listener_counts::count(listen.reachable) > 0 {
                open.insert(port);
            }
        }
        Ok(has_ports.then_some(open))
    }

    fn read_kernel_state(&self, pod: &RegisteredPod) -> Result<PodKernelState, KernelMapError> {
        let listen = self.handles.maps.listener(pod.cookie, pod.ports.readiness())?;
        let state = self.handles.maps.pod_state(pod.entry.slot);
        Ok(PodKernelState {
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
        self.upgraded_counts.start(uid, cookie);
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

    /// Reports a pod to the controller, and to activators if it is ready. Adds its standby, which the tracker does not
    /// know.
    fn report_pod(&mut self, mut observation: PodObservation) {
        observation.standby = self.standby.report(&observation.uid);
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
