//! Shell: the kubelet: drives every pod's state machine with orders and events, carries out actions, reports statuses.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::node::{LocalNodeSpec, LocalPodPhase, LocalPodSpec, LocalPodStatus};
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

mod book;
mod exits;
mod health;
mod held;
mod logs;
mod probes;
mod start;
mod state;

use book::{CoalescingQueue, DueQueue};
use held::ManagedPod;
use state::SavedPod;
pub(crate) use state::load;

/// Period of comparing log files with their size limit.
const LOG_CHECK: Duration = Duration::from_secs(10);

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
    extra: EventResource,
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
    dues: DueQueue<String, Instant>,
    /// True if helper processes of the runtime may have to be reaped: a start was tried since the last round.
    has_helpers: bool,
    /// True if a pod is gone since old logs were last pruned.
    has_left: bool,
}

impl LocalKubelet {
    /// Takes over the pods that an earlier node process left.
    pub(crate) fn adopt(shared: Arc<KubeletResources>, saved: Vec<SavedPod>) -> Self {
        let (reports, inbox) = mpsc::channel(1024);
        let mut kubelet = Self {
            shared,
            pods: BTreeMap::new(),
            reports,
            inbox,
            outbox: CoalescingQueue::new(),
            dues: DueQueue::new(),
            has_helpers: true,
            has_left: true,
        };
        for saved in saved {
            kubelet.adopt_one(saved);
        }
        kubelet
    }

    /// Restores one pod: its network if published, and each container whose process still runs.
    fn adopt_one(&mut self, saved: SavedPod) {
        let uid = saved.order.uid.clone();
        let mut held = ManagedPod::new(saved.order);
        let network = self.shared.layout.pod_namespace(&uid);
        if let Some(address) = saved.address.filter(|_| net::is_published(&network)) {
            held.address = Some(address);
            held.pod.adopt_network(address.both().to_vec());
        }
        for (at, container) in held.work.containers.iter().enumerate() {
            let kept = saved.containers.get(at).cloned().unwrap_or_default();
            let process = exits::find(&self.shared, &uid, &container.name);
            let shown = ProbeResults { started: kept.started, ready: kept.ready };
            held.pod.adopt(at, kept.restarts, shown, None, process.is_some());
            match process {
                Some(fd) => {
                    let fd = Arc::new(fd);
                    held.processes[at] = Some(Arc::clone(&fd));
                    self.watch(&uid, &container.name, at, Arc::clone(&fd));
                    let (shared, work) = (Arc::clone(&self.shared), Arc::clone(&held.work));
                    let addresses = held.pod.addresses().to_vec();
                    let attempt = kept.restarts;
                    let run = health::ContainerRun { at, attempt, process: fd, addresses, shown };
                    tokio::spawn(health::follow(shared, work, self.reports.clone(), run));
                }
                // A start that was interrupted must not meet the next one in the same cgroup.
                None => {
                    self.shared.mounts.kill_container(&self.shared.layout, &uid, &container.name)
                }
            }
        }
        let running = held.processes.iter().flatten().count();
        info!(pod = held.work.order.name, uid, running, "pod adopted");
        self.pods.insert(uid.clone(), held);
        self.step(&uid, PodEvent::Begin, EventResource::None);
    }

    /// Carries out orders until `shutdown`. Pods keep running: the next node process adopts them.
    pub(crate) async fn serve(
        mut self,
        mut orders: watch::Receiver<LocalNodeSpec>,
        statuses: mpsc::Sender<LocalPodStatus>,
        shutdown: CancellationToken,
    ) {
        let mut log_check = tokio::time::interval(LOG_CHECK);
        // Orders that were there before this receiver count as a change too.
        if !orders.borrow().pods.is_empty() {
            orders.mark_changed();
        }
        loop {
            // The timer is set again in each round, since every step may change the earliest due time.
            let due = self.dues.first();
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
                        let (gone, new) = self.changes(&orders.borrow_and_update());
                        self.order(gone, new);
                    }
                    // The controller in this process has ended; pods keep running for the next process.
                    Err(_) => return shutdown.cancelled().await,
                },
                Some(report) = self.inbox.recv() => self.step(&report.uid, report.event, report.extra),
                // A status is taken only when there is room for it: until then a newer one may replace it.
                slot = statuses.reserve(), if !self.outbox.is_empty() => match (slot, self.outbox.take()) {
                    (Ok(slot), Some(status)) => slot.send(status),
                    _ => return shutdown.cancelled().await,
                },
                () = wake => self.tick(),
                _ = log_check.tick() => self.tidy(),
            }
        }
    }

    /// Starts the regular work: bounded logs, pruned folders, reaped helpers.
    fn tidy(&mut self) {
        // Copying a log takes long, and pods must not wait for it.
        let shared = Arc::clone(&self.shared);
        let alive = std::mem::take(&mut self.has_left).then(|| self.log_folders());
        tokio::task::spawn_blocking(move || {
            logs::bound(&shared.layout);
            if let Some(alive) = alive {
                logs::prune(&shared.layout, &alive);
            }
        });
        exits::reap_helpers(&self.shared);
    }

    /// Returns the log folders of all pods there are.
    fn log_folders(&self) -> BTreeSet<PathBuf> {
        let orders = self.pods.values().map(|held| &held.work.order);
        let folder = |order: &LocalPodSpec| {
            self.shared.layout.pod_logs(&order.revision.namespace, &order.name)
        };
        orders.map(folder).collect()
    }

    /// Passes the time to every pod that is due.
    fn tick(&mut self) {
        let now = Instant::now();
        let due: Vec<String> = std::iter::from_fn(|| self.dues.take(now)).collect();
        for uid in due {
            self.step(&uid, PodEvent::Tick, EventResource::None);
        }
    }

    /// Compares orders with pods: returns pods to stop and pods to begin. Names in the orders are for the DNS server.
    fn changes(&self, wanted: &LocalNodeSpec) -> (Vec<String>, Vec<LocalPodSpec>) {
        let (gone, new) = book::difference(&self.pods, &wanted.pods);
        // A pod that stops already needs no second event at each change of the orders.
        let stands = |uid: &&String| {
            self.pods.get(*uid).is_some_and(|held| held.pod.phase() != LocalPodPhase::Terminating)
        };
        let gone = gone.into_iter().filter(stands).cloned();
        (gone.collect(), new.into_iter().cloned().collect())
    }

    /// Begins pods that are newly ordered, and stops those that are no longer ordered.
    fn order(&mut self, gone: Vec<String>, new: Vec<LocalPodSpec>) {
        for uid in gone {
            self.step(&uid, PodEvent::Stop, EventResource::None);
        }
        for order in new {
            let uid = order.uid.clone();
            info!(pod = order.name, uid, revision = %order.revision, "pod ordered");
            if let Err(error) = start::make_room(&self.shared, &order) {
                warn!(uid, error = &error as &dyn std::error::Error, "no room made for the pod");
            }
            let held = ManagedPod::new(order);
            // Written before anything is started: a crash afterwards leaves a pod that can be adopted.
            state::save(&self.shared.layout, &held.saved());
            self.pods.insert(uid.clone(), held);
            self.step(&uid, PodEvent::Begin, EventResource::None);
        }
    }

    /// Passes an event to a pod's state machine and carries out the actions it returns.
    fn step(&mut self, uid: &str, event: PodEvent, extra: EventResource) {
        let Some(held) = self.pods.get_mut(uid) else { return };
        held.keep(&event, extra);
        let restarts = held.restarts();
        let is_news = matches!(event, PodEvent::Network(_) | PodEvent::Probed { .. });
        self.has_helpers |= matches!(event, PodEvent::Started { .. } | PodEvent::NotStarted { .. });
        let now = Instant::now();
        let actions = held.pod.step(now, event);
        // Before the actions: after a crash, a start must not count under the number of the run before it.
        if is_news || restarts != held.restarts() {
            state::save(&self.shared.layout, &held.saved());
        }
        self.dues.set(&held.work.order.uid, now, held.pod.due());
        let status = held.status();
        if held.told.as_ref() != Some(&status) {
            held.told = Some(status.clone());
            log_change(&held.work.order, &status);
            self.outbox.put(status.uid.clone(), status);
        }
        let gone = held.pod.phase() == LocalPodPhase::Gone;
        // One round reaps the helpers of all containers that started since the round before.
        if gone && std::mem::take(&mut self.has_helpers) {
            exits::reap_helpers(&self.shared);
        }
        for action in actions {
            self.act(uid, action);
        }
        if gone {
            self.pods.remove(uid);
            self.has_left = true;
        }
    }

    /// Carries out one action of a pod, in a task of its own where it takes time.
    fn act(&self, uid: &str, action: PodAction) {
        let Some(held) = self.pods.get(uid) else { return };
        let (shared, work) = (Arc::clone(&self.shared), Arc::clone(&held.work));
        match action {
            PodAction::Connect => self.spawn(uid, start::connect(shared, uid.to_owned())),
            PodAction::Pull(at) => self.spawn(uid, pull(shared, work, at)),
            PodAction::Start(at) => {
                let Some(image) = held.images[at].clone() else {
                    // An adopted container may be known by its digest only; then the image is looked up first.
                    return self.spawn(uid, pull(shared, work, at));
                };
                let asked = start::ContainerStartRequest {
                    at,
                    attempt: held.pod.restarts(at),
                    addresses: held.pod.addresses().to_vec(),
                    image,
                    ordered: held.ordered,
                };
                let reports = self.reports.clone();
                let (addresses, attempt) = (asked.addresses.clone(), asked.attempt);
                let uid = uid.to_owned();
                tokio::spawn(async move {
                    let name = work.containers[at].name.clone();
                    let id = start::id(&uid, &name, asked.attempt);
                    let (event, extra) = start::start(&shared, &work, asked).await;
                    let process = match &extra {
                        EventResource::Process(fd) => Some(Arc::clone(fd)),
                        _ => None,
                    };
                    let _ = reports.send(PodEventReport { uid: uid.clone(), event, extra }).await;
                    // Probes begin after the start is reported; their results would otherwise come before `Started`.
                    let Some(fd) = process else { return };
                    let (process, shown) = (Arc::clone(&fd), ProbeResults::default());
                    let run = health::ContainerRun { at, attempt, process, addresses, shown };
                    tokio::spawn(health::follow(Arc::clone(&shared), work, reports.clone(), run));
                    exits::report(shared, reports, uid, name, at, fd, Some(id)).await;
                });
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
                self.spawn(uid, start::remove(shared, uid.to_owned(), held.address))
            }
        }
    }

    /// Runs work of a pod in a task and reports its event.
    fn spawn(
        &self,
        uid: &str,
        work: impl Future<Output = (PodEvent, EventResource)> + Send + 'static,
    ) {
        let (reports, uid) = (self.reports.clone(), uid.to_owned());
        tokio::spawn(async move {
            let (event, extra) = work.await;
            // The channel is closed once the kubelet has ended; the report is not needed then.
            let _ = reports.send(PodEventReport { uid, event, extra }).await;
        });
    }

    /// Waits in a task for the exit of an adopted container.
    fn watch(&self, uid: &str, name: &str, at: usize, fd: Arc<OwnedFd>) {
        let (shared, reports) = (Arc::clone(&self.shared), self.reports.clone());
        tokio::spawn(exits::report(shared, reports, uid.to_owned(), name.to_owned(), at, fd, None));
    }
}

/// Pulls or finds the image of a container.
async fn pull(
    shared: Arc<KubeletResources>,
    work: Arc<PreparedOrder>,
    at: usize,
) -> (PodEvent, EventResource) {
    let container = &work.containers[at];
    let name = container.image.clone().unwrap_or_default();
    let policy = ImagePullPolicy::of(container.image_pull_policy.as_deref(), &name);
    let image = name.clone();
    let got = tokio::task::spawn_blocking(move || shared.images.get(&image, policy)).await;
    let refused = |reason: &str, message: String| {
        (PodEvent::NoImage { at, reason: reason.to_owned(), message }, EventResource::None)
    };
    match got {
        Ok(Ok(image)) => {
            (PodEvent::Image { at, digest: image.digest.clone() }, EventResource::Image(image))
        }
        Ok(Err(error)) => {
            let message = start::chain(&error);
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
fn log_change(order: &LocalPodSpec, status: &LocalPodStatus) {
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
    ProcessId::of(pid)?.open()
}
