//! Shell: the kubelet: drives every pod's state machine with orders and events, carries out actions, reports statuses.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::local_node::{LocalNodeSpec, LocalPodPhase, LocalPodSpec, LocalPodStatus};
use k8s_openapi::api::core::v1::Container;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::addresses::PodAddress;
use crate::cgroups::CgroupMounts;
use crate::images::{ImagePullPolicy, ImageStore};
use crate::layout::NodeLayout;
use crate::net::{self, PodNetworkPool};
use crate::pods::{PodAction, PodEvent, ProbeResults};
use crate::process::ProcessId;
use crate::runtime::OciRuntime;
use crate::sys;

mod exits;
mod lifecycle;
mod logs;
mod managed_pod;
mod probe_spec;
mod prober;
mod saved_state;
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
    pub(crate) mounts: CgroupMounts,
    pub(crate) images: ImageStore,
    pub(crate) networks: PodNetworkPool,
    pub(crate) runtime: OciRuntime,
}

/// An order and its containers, prepared once and shared by the pod's tasks.
#[derive(Debug)]
struct PreparedOrder {
    order: LocalPodSpec,
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
    outbox: CoalescingQueue<String, LocalPodStatus>,
    /// Times at which pods are due for a [`PodEvent::Tick`], by uid.
    due_ticks: DueQueue<String, Instant>,
    /// True if helper processes of the runtime may have to be reaped: a start was tried since the last round.
    may_have_helpers: bool,
    /// True if a pod is gone since old logs were last pruned.
    has_removed_pods: bool,
}

impl LocalKubelet {
    /// Takes over the pods that an earlier node process left.
    pub(crate) fn adopt_pods(shared: Arc<KubeletResources>, saved: Vec<SavedPod>) -> Self {
        let (reports, inbox) = mpsc::channel(1024);
        let mut kubelet = Self {
            shared,
            pods: BTreeMap::new(),
            reports,
            inbox,
            outbox: CoalescingQueue::new(),
            due_ticks: DueQueue::new(),
            may_have_helpers: true,
            has_removed_pods: true,
        };
        for saved in saved {
            kubelet.adopt_pod(saved);
        }
        kubelet
    }

    /// Restores one pod: its network if published, and each container whose process still runs.
    fn adopt_pod(&mut self, saved: SavedPod) {
        let uid = saved.order.uid.clone();
        let mut held = ManagedPod::new(saved.order);
        let network = self.shared.layout.pod_namespace(&uid);
        if let Some(address) = saved.address.filter(|_| net::is_published(&network)) {
            held.address = Some(address);
            held.pod.adopt_network(address.both().to_vec());
        }
        for (at, container) in held.prepared.containers.iter().enumerate() {
            let kept = saved.containers.get(at).cloned().unwrap_or_default();
            let process = exits::find_process(&self.shared, &uid, &container.name);
            let shown = ProbeResults { started: kept.started, ready: kept.ready };
            held.pod.adopt_container(at, kept.restarts, shown, None, process.is_some());
            match process {
                Some(fd) => {
                    let fd = Arc::new(fd);
                    held.processes[at] = Some(Arc::clone(&fd));
                    self.watch_exit(&uid, &container.name, at, Arc::clone(&fd));
                    let (shared, work) = (Arc::clone(&self.shared), Arc::clone(&held.prepared));
                    let addresses = held.pod.addresses().to_vec();
                    let attempt = kept.restarts;
                    let run =
                        prober::ContainerRun { at, attempt, pidfd: fd, addresses, results: shown };
                    tokio::spawn(prober::probe_container(shared, work, self.reports.clone(), run));
                }
                // A start that was interrupted must not meet the next one in the same cgroup.
                None => {
                    self.shared.mounts.kill_container(&self.shared.layout, &uid, &container.name)
                }
            }
        }
        let running = held.processes.iter().flatten().count();
        info!(pod = held.prepared.order.name, uid, running, "pod adopted");
        self.pods.insert(uid.clone(), held);
        self.step_pod(&uid, PodEvent::Begin, EventResource::None);
    }

    /// Carries out orders until `shutdown`. Pods keep running: the next node process adopts them.
    pub(crate) async fn serve(
        mut self,
        mut orders: watch::Receiver<LocalNodeSpec>,
        statuses: mpsc::Sender<LocalPodStatus>,
        shutdown: CancellationToken,
    ) {
        let mut log_check = tokio::time::interval(LOG_CHECK_INTERVAL);
        // Orders that were there before this receiver count as a change too.
        if !orders.borrow().pods.is_empty() {
            orders.mark_changed();
        }
        loop {
            // The timer is set again in each round, since every step may change the earliest due time.
            let due = self.due_ticks.first_due();
            let wake = async {
                match due {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = shutdown.cancelled() => return,
                changed = orders.changed() => match changed {
                    Ok(()) => {
                        let (gone, new) = self.diff_orders(&orders.borrow_and_update());
                        self.apply_orders(gone, new);
                    }
                    // The controller in this process has ended; pods keep running for the next process.
                    Err(_) => return shutdown.cancelled().await,
                },
                Some(report) = self.inbox.recv() => self.step_pod(&report.uid, report.event, report.resource),
                // A status is taken only when there is room for it: until then a newer one may replace it.
                slot = statuses.reserve(), if !self.outbox.is_empty() => match (slot, self.outbox.pop()) {
                    (Ok(slot), Some(status)) => slot.send(status),
                    _ => return shutdown.cancelled().await,
                },
                () = wake => self.tick_due_pods(),
                _ = log_check.tick() => self.run_maintenance(),
            }
        }
    }

    /// Starts the regular work: bounded logs, pruned folders, reaped helpers.
    fn run_maintenance(&mut self) {
        // Copying a log takes long, and pods must not wait for it.
        let shared = Arc::clone(&self.shared);
        let alive = std::mem::take(&mut self.has_removed_pods).then(|| self.log_folders());
        tokio::task::spawn_blocking(move || {
            logs::rotate_logs(&shared.layout);
            if let Some(alive) = alive {
                logs::prune_folders(&shared.layout, &alive);
            }
        });
        exits::reap_helpers(&self.shared);
    }

    /// Returns the log folders of all pods there are.
    fn log_folders(&self) -> BTreeSet<PathBuf> {
        let orders = self.pods.values().map(|held| &held.prepared.order);
        let folder = |order: &LocalPodSpec| {
            self.shared.layout.pod_logs(&order.revision.namespace, &order.name)
        };
        orders.map(folder).collect()
    }

    /// Passes the time to every pod that is due.
    fn tick_due_pods(&mut self) {
        let now = Instant::now();
        let due: Vec<String> = std::iter::from_fn(|| self.due_ticks.pop_due(now)).collect();
        for uid in due {
            self.step_pod(&uid, PodEvent::Tick, EventResource::None);
        }
    }

    /// Compares orders with pods: returns pods to stop and pods to begin. Names in the orders are for the DNS server.
    fn diff_orders(&self, wanted: &LocalNodeSpec) -> (Vec<String>, Vec<LocalPodSpec>) {
        let (gone, new) = work_queue::key_difference(&self.pods, &wanted.pods);
        // A pod that stops already needs no second event at each change of the orders.
        let stands = |uid: &&String| {
            self.pods.get(*uid).is_some_and(|held| held.pod.phase() != LocalPodPhase::Terminating)
        };
        let gone = gone.into_iter().filter(stands).cloned();
        (gone.collect(), new.into_iter().cloned().collect())
    }

    /// Begins pods that are newly ordered, and stops those that are no longer ordered.
    fn apply_orders(&mut self, gone: Vec<String>, new: Vec<LocalPodSpec>) {
        for uid in gone {
            self.step_pod(&uid, PodEvent::Stop, EventResource::None);
        }
        for order in new {
            let uid = order.uid.clone();
            info!(pod = order.name, uid, revision = %order.revision, "pod ordered");
            if let Err(error) = lifecycle::create_folders(&self.shared, &order) {
                warn!(uid, error = &error as &dyn std::error::Error, "no room made for the pod");
            }
            let held = ManagedPod::new(order);
            // Written before anything is started: a crash afterwards leaves a pod that can be adopted.
            saved_state::save_pod(&self.shared.layout, &held.to_saved());
            self.pods.insert(uid.clone(), held);
            self.step_pod(&uid, PodEvent::Begin, EventResource::None);
        }
    }

    /// Passes an event to a pod's state machine and carries out the actions it returns.
    fn step_pod(&mut self, uid: &str, event: PodEvent, extra: EventResource) {
        let Some(held) = self.pods.get_mut(uid) else { return };
        held.store_resource(&event, extra);
        let restarts = held.restart_counts();
        let is_news = matches!(event, PodEvent::NetworkReady(_) | PodEvent::ProbesChanged { .. });
        self.may_have_helpers |=
            matches!(event, PodEvent::Started { .. } | PodEvent::StartFailed { .. });
        let now = Instant::now();
        let actions = held.pod.step(now, event);
        // Before the actions: after a crash, a start must not count under the number of the run before it.
        if is_news || restarts != held.restart_counts() {
            saved_state::save_pod(&self.shared.layout, &held.to_saved());
        }
        self.due_ticks.set(&held.prepared.order.uid, now, held.pod.next_tick_at());
        let status = held.status();
        if held.reported_status.as_ref() != Some(&status) {
            held.reported_status = Some(status.clone());
            log_status(&held.prepared.order, &status);
            self.outbox.push(status.uid.clone(), status);
        }
        let gone = held.pod.phase() == LocalPodPhase::Removed;
        // One round reaps the helpers of all containers that started since the round before.
        if gone && std::mem::take(&mut self.may_have_helpers) {
            exits::reap_helpers(&self.shared);
        }
        for action in actions {
            self.carry_out(uid, action);
        }
        if gone {
            self.pods.remove(uid);
            self.has_removed_pods = true;
        }
    }

    /// Carries out one action of a pod, in a task of its own where it takes time.
    fn carry_out(&self, uid: &str, action: PodAction) {
        let Some(held) = self.pods.get(uid) else { return };
        let (shared, work) = (Arc::clone(&self.shared), Arc::clone(&held.prepared));
        match action {
            PodAction::CreateNetwork => {
                self.spawn_task(uid, lifecycle::create_network(shared, uid.to_owned()))
            }
            PodAction::Pull(at) => self.spawn_task(uid, pull_image(shared, work, at)),
            PodAction::Start(at) => {
                let Some(image) = held.images[at].clone() else {
                    // An adopted container may be known by its digest only; then the image is looked up first.
                    return self.spawn_task(uid, pull_image(shared, work, at));
                };
                let asked = lifecycle::ContainerStartRequest {
                    at,
                    attempt: held.pod.restarts(at),
                    addresses: held.pod.addresses().to_vec(),
                    image,
                    ordered_at: held.ordered_at,
                };
                self.spawn_container(uid.to_owned(), work, asked);
            }
            PodAction::Terminate(at) => {
                let signal = held.stop_signal(at);
                if let Some(fd) = &held.processes[at] {
                    // An error means that the process has ended; its exit is reported by its own task.
                    let _ = sys::pidfd_signal(fd.as_fd(), signal);
                }
            }
            PodAction::Kill(at) => {
                let name = &work.containers[at].name;
                warn!(
                    pod = work.order.name,
                    uid,
                    container = name,
                    "killed after its grace period"
                );
                shared.mounts.kill_container(&shared.layout, uid, name);
            }
            PodAction::Remove => {
                self.spawn_task(uid, lifecycle::remove_pod(shared, uid.to_owned(), held.address))
            }
        }
    }

    /// Starts a container in a task, which then runs its probes and reports its exit.
    fn spawn_container(
        &self,
        uid: String,
        work: Arc<PreparedOrder>,
        asked: lifecycle::ContainerStartRequest,
    ) {
        let (shared, reports) = (Arc::clone(&self.shared), self.reports.clone());
        let (at, addresses, attempt) = (asked.at, asked.addresses.clone(), asked.attempt);
        tokio::spawn(async move {
            let name = work.containers[at].name.clone();
            let id = lifecycle::container_id(&uid, &name, attempt);
            let (event, resource) = lifecycle::start_container(&shared, &work, asked).await;
            let process = match &resource {
                EventResource::Process(fd) => Some(Arc::clone(fd)),
                _ => None,
            };
            let _ = reports.send(PodEventReport { uid: uid.clone(), event, resource }).await;
            // Probes begin after the start is reported; their results would otherwise come before `Started`.
            let Some(fd) = process else { return };
            let results = ProbeResults::default();
            let pidfd = Arc::clone(&fd);
            let run = prober::ContainerRun { at, attempt, pidfd, addresses, results };
            tokio::spawn(prober::probe_container(Arc::clone(&shared), work, reports.clone(), run));
            exits::report_exit(shared, reports, uid, name, at, fd, Some(id)).await;
        });
    }

    /// Runs work of a pod in a task and reports its event.
    fn spawn_task(
        &self,
        uid: &str,
        work: impl Future<Output = (PodEvent, EventResource)> + Send + 'static,
    ) {
        let (reports, uid) = (self.reports.clone(), uid.to_owned());
        tokio::spawn(async move {
            let (event, extra) = work.await;
            // The channel is closed once the kubelet has ended; the report is not needed then.
            let _ = reports.send(PodEventReport { uid, event, resource: extra }).await;
        });
    }

    /// Waits in a task for the exit of an adopted container.
    fn watch_exit(&self, uid: &str, name: &str, at: usize, fd: Arc<OwnedFd>) {
        let (shared, reports) = (Arc::clone(&self.shared), self.reports.clone());
        tokio::spawn(exits::report_exit(
            shared,
            reports,
            uid.to_owned(),
            name.to_owned(),
            at,
            fd,
            None,
        ));
    }
}

/// Pulls or finds the image of a container.
async fn pull_image(
    shared: Arc<KubeletResources>,
    work: Arc<PreparedOrder>,
    at: usize,
) -> (PodEvent, EventResource) {
    let container = &work.containers[at];
    let name = container.image.clone().unwrap_or_default();
    let policy = ImagePullPolicy::from_spec(container.image_pull_policy.as_deref(), &name);
    let image = name.clone();
    let got = tokio::task::spawn_blocking(move || shared.images.get(&image, policy)).await;
    let refused = |reason: &str, message: String| {
        (PodEvent::ImageFailed { at, reason: reason.to_owned(), message }, EventResource::None)
    };
    match got {
        Ok(Ok(image)) => {
            (PodEvent::ImageReady { at, digest: image.digest.clone() }, EventResource::Image(image))
        }
        Ok(Err(error)) => {
            let message = lifecycle::error_chain(&error);
            // Kubernetes shows the back-off, not the failed attempt, while a container waits for its next pull.
            match error.reason() {
                "ErrImagePull" => {
                    refused("ImagePullBackOff", format!("Back-off pulling: {message}"))
                }
                reason => refused(reason, message),
            }
        }
        Err(_) => refused("ImagePullBackOff", format!("unpacking image {name} panicked")),
    }
}

/// Logs a pod's new status, one line per change.
fn log_status(order: &LocalPodSpec, status: &LocalPodStatus) {
    let states: Vec<String> =
        status.containers.iter().map(|one| format!("{}: {:?}", one.name, one.state)).collect();
    info!(
        pod = order.name,
        uid = order.uid,
        phase = ?status.phase,
        containers = states.join("; "),
        "pod changed"
    );
}

/// Opens the process that has this pid now; the caller checks that it belongs to the container.
pub(crate) fn open_process(pid: i32) -> Option<OwnedFd> {
    ProcessId::from_pid(pid)?.open()
}
