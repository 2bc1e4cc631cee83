//! Shell: the kubelet: drives every pod's state machine with pod specs and events, and reports statuses.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::local_node::{LocalNodeSpec, LocalPodSpec, PodRunPhase, PodRunStatus};
use k8s_openapi::api::core::v1::Container;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::addresses::PodAddress;
use crate::cgroups::CgroupMounts;
use crate::images::ImageStore;
use crate::layout::NodeLayout;
use crate::net::{self, PodNetworkPool};
use crate::pods::{AdoptedRun, PodEvent, ProbeResults};
use crate::process::ProcessId;
use crate::runtime::OciRuntime;

mod actions;
mod exits;
mod lifecycle;
mod logs;
mod managed_pod;
mod probe_spec;
mod prober;
mod saved_state;
mod stop_signal;
mod work_queue;

use managed_pod::ManagedPod;
use saved_state::SavedPod;
pub(crate) use saved_state::load_pods;
use work_queue::{CoalescingQueue, DueQueue};

/// Period of comparing log files with their size limit.
const LOG_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Resources that all pods of the node share.
#[derive(Debug)]
pub(crate) struct KubeletResources {
    pub(crate) layout: NodeLayout,
    pub(crate) cgroups: CgroupMounts,
    pub(crate) images: ImageStore,
    pub(crate) networks: PodNetworkPool,
    pub(crate) runtime: OciRuntime,
}

/// Pod spec and its containers, prepared once and shared by the pod's tasks.
#[derive(Debug)]
struct PreparedPod {
    pod_spec: LocalPodSpec,
    /// Init containers, then main containers; indexes of containers refer to this list.
    containers: Vec<Container>,
}

/// An event of a pod, with data that the state machine does not need.
struct PodEventReport {
    uid: String,
    event: PodEvent,
    resource: EventResource,
}

/// Resource that comes with an event: an address, image or process.
enum EventResource {
    None,
    Address(PodAddress),
    Image(crate::images::UnpackedImage),
    Process(Arc<OwnedFd>),
}

/// The kubelet: all pods of a node, the reports of their tasks, and the statuses to be sent.
pub(crate) struct LocalKubelet {
    shared: Arc<KubeletResources>,
    pods: BTreeMap<String, ManagedPod>,
    reports: mpsc::Sender<PodEventReport>,
    inbox: mpsc::Receiver<PodEventReport>,
    outbox: CoalescingQueue<String, PodRunStatus>,
    /// Times at which pods are due for a [`PodEvent::Tick`], by uid.
    due_ticks: DueQueue<String, Instant>,
    /// True if a pod is gone since old logs were last pruned.
    has_removed_pods: bool,
}

impl LocalKubelet {
    /// Takes over the pods that an earlier node process left.
    pub(crate) fn adopt_pods(resources: Arc<KubeletResources>, saved: Vec<SavedPod>) -> Self {
        let (reports, inbox) = mpsc::channel(1024);
        let mut kubelet = Self {
            shared: resources,
            pods: BTreeMap::new(),
            reports,
            inbox,
            outbox: CoalescingQueue::new(),
            due_ticks: DueQueue::new(),
            // Pods may be gone since the earlier node process pruned logs.
            has_removed_pods: true,
        };
        for saved in saved {
            kubelet.adopt_pod(saved);
        }
        kubelet
    }

    /// Restores one pod: its network if published, and each container whose process still runs.
    fn adopt_pod(&mut self, saved: SavedPod) {
        let uid = saved.pod_spec.uid.clone();
        let mut managed_pod = ManagedPod::new(saved.pod_spec);
        let network = self.shared.layout.pod_namespace(&uid);
        // A network that is not published was interrupted while it was made, and is made again.
        if let Some(address) = saved.address.filter(|_| net::is_published(&network)) {
            managed_pod.address = Some(address);
            managed_pod.pod.adopt_network(address.both().to_vec());
        }
        for (index, container) in managed_pod.prepared.containers.iter().enumerate() {
            let saved_container = saved.containers.get(index).cloned().unwrap_or_default();
            let process = exits::find_process(&self.shared, &uid, &container.name);
            let results =
                ProbeResults { started: saved_container.started, ready: saved_container.ready };
            let restarts = saved_container.restarts;
            let id = lifecycle::container_id(&uid, &container.name, restarts);
            let was_running = exits::has_pid_file(&self.shared, &uid, &container.name);
            // A PID file shows that the container ran. If its process is gone, its exit is reported below.
            let run = match saved_container.exit {
                Some(exit) => AdoptedRun::Ended(exit),
                None if was_running => AdoptedRun::Running(results),
                None => AdoptedRun::Waiting { last_exit: saved_container.last_exit },
            };
            managed_pod.pod.adopt_container(index, restarts, run);
            match process {
                Some(fd) => {
                    let pidfd = Arc::new(fd);
                    managed_pod.pidfds[index] = Some(Arc::clone(&pidfd));
                    self.watch_exit(&uid, &container.name, index, Arc::clone(&pidfd), id);
                    let (resources, prepared) =
                        (Arc::clone(&self.shared), Arc::clone(&managed_pod.prepared));
                    let addresses = managed_pod.pod.addresses().to_vec();
                    let run = prober::ContainerRun { index, restarts, pidfd, addresses, results };
                    tokio::spawn(prober::probe_container(
                        resources,
                        prepared,
                        self.reports.clone(),
                        run,
                    ));
                }
                // Processes of an interrupted start must not stay in the cgroup of the next start.
                None => {
                    self.shared.cgroups.kill_container(&self.shared.layout, &uid, &container.name);
                    if was_running {
                        self.report_missed_exit(&uid, &container.name, index, id);
                    }
                }
            }
        }
        let running = managed_pod.pidfds.iter().flatten().count();
        info!(pod = managed_pod.prepared.pod_spec.name, uid, running, "pod adopted");
        self.pods.insert(uid.clone(), managed_pod);
        self.step_pod(&uid, PodEvent::Begin, EventResource::None);
    }

    /// Runs the pods of the node spec until `shutdown`. Then pods keep running: the next node process adopts them.
    pub(crate) async fn serve(
        mut self,
        mut node_spec: watch::Receiver<LocalNodeSpec>,
        statuses: mpsc::Sender<PodRunStatus>,
        shutdown: CancellationToken,
    ) {
        let mut log_check = tokio::time::interval(LOG_CHECK_INTERVAL);
        let mut ended_children = exits::ChildSignals::new();
        // Pod specs that were there before this receiver count as a change too.
        if !node_spec.borrow().pods.is_empty() {
            node_spec.mark_changed();
        }
        loop {
            // The timer is set again in each round, since every step may change the earliest due time.
            let due = self.due_ticks.first_due();
            let wake = async {
                match due {
                    Some(instant) => tokio::time::sleep_until(instant.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = shutdown.cancelled() => return,
                changed = node_spec.changed() => match changed {
                    Ok(()) => {
                        let (removed, new) = self.diff_pods(&node_spec.borrow_and_update());
                        self.apply_pod_changes(removed, new);
                    }
                    // The controller in this process has ended; pods keep running for the next process.
                    Err(_) => return shutdown.cancelled().await,
                },
                Some(report) = self.inbox.recv() => self.step_pod(&report.uid, report.event, report.resource),
                // A status is taken only when the channel has a free place: until then a newer one may replace it.
                permit = statuses.reserve(), if !self.outbox.is_empty() => match (permit, self.outbox.pop()) {
                    (Ok(permit), Some(status)) => permit.send(status),
                    _ => return shutdown.cancelled().await,
                },
                () = wake => self.tick_due_pods(),
                _ = log_check.tick() => self.run_maintenance(),
                // At once, since a container may not end before its helpers are reaped.
                () = ended_children.next() => exits::reap_helpers(&self.shared),
            }
        }
    }

    /// Starts the regular work: bounded logs, pruned folders, helpers whose signal was missed.
    fn run_maintenance(&mut self) {
        // Copying a log takes long, and pods must not wait for it.
        let resources = Arc::clone(&self.shared);
        let existing_logs = std::mem::take(&mut self.has_removed_pods).then(|| self.log_folders());
        tokio::task::spawn_blocking(move || {
            logs::rotate_logs(&resources.layout);
            if let Some(existing_logs) = existing_logs {
                logs::prune_folders(&resources.layout, &existing_logs);
            }
        });
        exits::reap_helpers(&self.shared);
    }

    /// Returns the log folders of all pods there are.
    fn log_folders(&self) -> BTreeSet<PathBuf> {
        let pod_specs = self.pods.values().map(|managed_pod| &managed_pod.prepared.pod_spec);
        let folder = |pod_spec: &LocalPodSpec| {
            self.shared.layout.pod_logs(&pod_spec.revision.namespace, &pod_spec.name)
        };
        pod_specs.map(folder).collect()
    }

    /// Passes the time to every pod that is due.
    fn tick_due_pods(&mut self) {
        let now = Instant::now();
        let due: Vec<String> = std::iter::from_fn(|| self.due_ticks.pop_due(now)).collect();
        for uid in due {
            self.step_pod(&uid, PodEvent::Tick, EventResource::None);
        }
    }

    /// Compares the node spec with the pods there are: returns uids of pods to stop, and specs of pods to start.
    fn diff_pods(&self, node_spec: &LocalNodeSpec) -> (Vec<String>, Vec<LocalPodSpec>) {
        let (removed, new) = work_queue::key_difference(&self.pods, &node_spec.pods);
        // A pod that stops already needs no second event at each change of the node spec.
        let is_active = |uid: &&String| {
            self.pods
                .get(*uid)
                .is_some_and(|managed_pod| managed_pod.pod.phase() != PodRunPhase::Terminating)
        };
        let removed = removed.into_iter().filter(is_active).cloned();
        (removed.collect(), new.into_iter().cloned().collect())
    }

    /// Stops the pods in `removed`, and starts those in `new`.
    fn apply_pod_changes(&mut self, removed: Vec<String>, new: Vec<LocalPodSpec>) {
        for uid in removed {
            self.step_pod(&uid, PodEvent::Stop, EventResource::None);
        }
        for pod_spec in new {
            let uid = pod_spec.uid.clone();
            info!(pod = pod_spec.name, uid, revision = %pod_spec.revision, "pod spec received");
            if let Err(error) = lifecycle::create_folders(&self.shared, &pod_spec) {
                warn!(
                    uid,
                    error = &error as &dyn std::error::Error,
                    "cannot create the folders of the pod"
                );
            }
            let managed_pod = ManagedPod::new(pod_spec);
            // Written before anything is started: a crash afterwards leaves a pod that can be adopted.
            saved_state::save_pod(&self.shared.layout, &managed_pod.to_saved());
            self.pods.insert(uid.clone(), managed_pod);
            self.step_pod(&uid, PodEvent::Begin, EventResource::None);
        }
    }

    /// Passes an event to a pod's state machine and carries out the actions it returns.
    fn step_pod(&mut self, uid: &str, event: PodEvent, resource: EventResource) {
        let Some(managed_pod) = self.pods.get_mut(uid) else { return };
        managed_pod.store_resource(&event, resource);
        let restarts = managed_pod.restart_counts();
        let must_be_saved = matches!(
            event,
            PodEvent::NetworkReady(_)
                | PodEvent::ProbesChanged { .. }
                | PodEvent::StartFailed { .. }
                | PodEvent::Exited { .. }
        );
        let now = Instant::now();
        let actions = managed_pod.pod.step(now, event);
        // Before the actions: after a crash, a start must not count under the number of the run before it.
        if must_be_saved || restarts != managed_pod.restart_counts() {
            saved_state::save_pod(&self.shared.layout, &managed_pod.to_saved());
        }
        self.due_ticks.set(
            &managed_pod.prepared.pod_spec.uid,
            now,
            managed_pod.pod.next_tick_at(now),
        );
        let status = managed_pod.status();
        // Most events leave the status as it was, and the controller plans at each report.
        if managed_pod.reported_status.as_ref() != Some(&status) {
            managed_pod.reported_status = Some(status.clone());
            log_status(&managed_pod.prepared.pod_spec, &status);
            self.outbox.push(status.uid.clone(), status);
        }
        let removed = managed_pod.pod.phase() == PodRunPhase::Removed;
        for action in actions {
            self.carry_out(uid, action);
        }
        if removed {
            self.pods.remove(uid);
            self.has_removed_pods = true;
        }
    }
}

/// Logs a pod's new status, one line per change.
fn log_status(pod_spec: &LocalPodSpec, status: &PodRunStatus) {
    let states: Vec<String> = status
        .containers
        .iter()
        .map(|container| format!("{}: {:?}", container.name, container.state))
        .collect();
    info!(
        pod = pod_spec.name,
        uid = pod_spec.uid,
        phase = ?status.phase,
        containers = states.join("; "),
        "pod changed"
    );
}

/// Opens the process that has this pid now; the caller checks that it belongs to the container.
pub(crate) fn open_process(pid: i32) -> Option<OwnedFd> {
    ProcessId::from_pid(pid)?.open()
}
