//! Shell: the part of the loop that probes the pods of other nodes.

use std::{collections::HashSet, time::Instant};

use common::wire::PodEntry;
use datapath::abi::FrontendKey;

use super::Agent;
use crate::net::remote_prober::RemoteProbeResult;

impl Agent {
    /// Handles a pod of another node.
    pub(super) fn handle_remote_pod(&mut self, pod: &PodEntry) {
        self.remote_pods.update_pod(pod);
        self.standby_watcher.update_pod(pod);
        self.update_exclusion(&pod.uid);
    }

    /// Handles the end of a probe.
    pub(super) fn handle_remote_probe_result(&mut self, result: &RemoteProbeResult) {
        self.remote_pods.record_result(result);
        self.update_exclusion(&result.0.uid);
    }

    /// Starts the probes that are due, and the first ones of pods whose services have clients on this node.
    pub(super) fn probe_remote_pods(&mut self) {
        self.remote_pods.start_due_probes();
        let uids = self.remote_pods.pods_to_check();
        if uids.is_empty() {
            return;
        }
        let begun = Instant::now();
        let table = self.routes.table();
        let frontends: Vec<Vec<FrontendKey>> =
            uids.iter().map(|uid| table.frontends_of_pod(uid)).collect();
        let wanted = frontends.iter().flatten().copied().collect();
        // One pass over the connect records serves all these pods.
        let connected = self.connected_frontends(wanted);
        for (uid, frontends) in uids.iter().zip(frontends) {
            let has_clients = frontends.iter().any(|it| connected.contains(it));
            self.remote_pods.record_check(uid, has_clients);
            self.update_exclusion(uid);
        }
        self.remote_pods.finish_check(begun);
    }

    /// Returns those of the frontends `wanted` that may have clients on this node. A connect record names the frontend,
    /// or some connects could not be recorded.
    fn connected_frontends(&self, wanted: HashSet<FrontendKey>) -> HashSet<FrontendKey> {
        if wanted.is_empty() {
            return wanted;
        }
        let activators = self.routes.planner().activator_backends();
        if self.handles.maps.may_have_unlisted_clients(activators) {
            return wanted;
        }
        let mut connected = self.client_sockets.connected_frontends(&wanted);
        // Without a usable pod and an activator, a connect goes on unchanged and is not recorded.
        let table = self.routes.table();
        connected.extend(wanted.into_iter().filter(|it| !table.has_activator_for(it)));
        connected
    }
}
