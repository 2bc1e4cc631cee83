//! Pure: lifecycle of one pod: network, images, init containers, containers, restarts, removal.
//!
//! A [`PodStateMachine`] receives [`PodEvent`]s and returns the [`PodAction`]s that `kubelet/actions.rs` then carries out.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use common::local_node::{ContainerRunState, LocalContainerStatus, PodRunPhase};

mod backoff;
mod types;

use backoff::Backoff;
pub use types::{
    AdoptedRun, ContainerExit, ContainerPlan, ContainerRole, PodAction, PodEvent, ProbeResults,
    RestartPolicy,
};

/// Grace period of a pod that gives none: Kubernetes' default `terminationGracePeriodSeconds`.
const DEFAULT_GRACE_PERIOD: Duration = Duration::from_secs(30);
/// Pause of a pod whose network could not be made, before the next attempt.
const NETWORK_RETRY: Duration = Duration::from_secs(1);

/// State of a container's image on this node.
#[derive(Clone, Debug, PartialEq)]
enum ImageState {
    Wanted,
    Pulling,
    Failed { until: Instant, reason: String, message: String },
    Ready(String),
}

/// Stage of a container's process, between its runs too.
#[derive(Clone, Debug, PartialEq)]
enum ContainerStage {
    Idle,
    Starting,
    Running,
    Waiting { until: Instant, reason: String, message: String },
    Ended(ContainerExit),
}

/// One container of a pod, init containers included.
#[derive(Clone, Debug)]
struct PodContainer {
    plan: ContainerPlan,
    image: ImageState,
    stage: ContainerStage,
    restarts: u32,
    /// Probe results of the present run; all false while the container starts.
    probe_results: ProbeResults,
    /// Exit code of the last run, or 128 after a start that failed.
    last_exit: Option<i32>,
    /// Message about the last exit; shown while the container starts again.
    last_exit_message: String,
    crash_backoff: Backoff,
    pull_backoff: Backoff,
    /// True once the action to send SIGTERM was returned, which happens once.
    termination_sent: bool,
}

/// State of the pod's network namespace and addresses.
#[derive(Clone, Debug, PartialEq)]
enum PodNetworkState {
    Wanted,
    Creating,
    Failed { until: Instant, message: String },
    Ready(Vec<IpAddr>),
}

/// Lifecycle of the pod as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PodLifecycle {
    /// The node spec contains the pod.
    Desired,
    Stopping {
        deadline: Instant,
        killed: bool,
    },
    Removing,
    Gone,
}

/// State machine of one pod.
#[derive(Clone, Debug)]
pub struct PodStateMachine {
    restart: RestartPolicy,
    grace: Duration,
    lifecycle: PodLifecycle,
    network: PodNetworkState,
    containers: Vec<PodContainer>,
    /// True once all main containers run or have ended, or one was found running: the phase is then `Running`.
    has_started: bool,
}

impl PodStateMachine {
    /// Returns a pod of these containers, init containers first. Without `grace` it is Kubernetes' 30 s.
    pub fn new(restart: RestartPolicy, grace: Option<Duration>, plans: Vec<ContainerPlan>) -> Self {
        let container = |plan| PodContainer {
            plan,
            image: ImageState::Wanted,
            stage: ContainerStage::Idle,
            restarts: 0,
            probe_results: ProbeResults::default(),
            last_exit: None,
            last_exit_message: String::new(),
            crash_backoff: Backoff::default(),
            pull_backoff: Backoff::default(),
            termination_sent: false,
        };
        Self {
            restart,
            grace: grace.unwrap_or(DEFAULT_GRACE_PERIOD),
            lifecycle: PodLifecycle::Desired,
            network: PodNetworkState::Wanted,
            containers: plans.into_iter().map(container).collect(),
            has_started: false,
        }
    }

    /// Restores the network that the pod had before the node's restart.
    pub fn adopt_network(&mut self, addresses: Vec<IpAddr>) {
        self.network = PodNetworkState::Ready(addresses);
    }

    /// Restores a container from before the node's restart.
    ///
    /// Its image is looked up again, because the digest is not saved.
    pub fn adopt_container(&mut self, index: usize, restarts: u32, run: AdoptedRun) {
        let Some(container) = self.containers.get_mut(index) else { return };
        container.restarts = restarts;
        match run {
            AdoptedRun::Waiting { last_exit } => container.last_exit = last_exit,
            AdoptedRun::Running(probe_results) => {
                container.stage = ContainerStage::Running;
                container.probe_results = probe_results;
                // One running main container proves that the pod had started.
                self.has_started |= container.plan.role == ContainerRole::Main;
            }
            AdoptedRun::Ended(exit) => {
                container.last_exit = Some(exit.code);
                container.stage = ContainerStage::Ended(exit);
            }
        }
    }

    /// Applies an event and returns the actions that follow from it.
    pub fn step(&mut self, now: Instant, event: PodEvent) -> Vec<PodAction> {
        match event {
            PodEvent::Begin | PodEvent::Tick => {}
            PodEvent::NetworkReady(addresses) => self.network = PodNetworkState::Ready(addresses),
            PodEvent::NetworkFailed(message) => {
                self.network = PodNetworkState::Failed { until: now + NETWORK_RETRY, message };
            }
            PodEvent::ImageReady { index, digest } => self.update_container(index, |container| {
                container.image = ImageState::Ready(digest);
                // The delays of a later pull begin again only after a success.
                container.pull_backoff = Backoff::default();
            }),
            PodEvent::ImageFailed { index, reason, message } => {
                self.update_container(index, |container| {
                    container.pull_backoff.delay_first_failure();
                    let until = now + container.pull_backoff.record_failure(now);
                    container.image = ImageState::Failed { until, reason, message };
                })
            }
            PodEvent::Started { index } => {
                self.update_container(index, |container| container.stage = ContainerStage::Running)
            }
            PodEvent::StartFailed { index, reason, message } => {
                self.handle_start_failure(now, index, reason, message)
            }
            // A probe may answer after its container was restarted: results of an earlier run do not count.
            PodEvent::ProbesChanged { index, restarts, results } => {
                self.update_container(index, |container| {
                    if container.restarts == restarts {
                        container.probe_results = results;
                    }
                })
            }
            PodEvent::Exited { index, exit } => self.handle_exit(now, index, exit),
            PodEvent::Stop => self.begin_stop(now),
            PodEvent::Removed => self.lifecycle = PodLifecycle::Gone,
        }
        // Results that arrive while the pod stops are recorded too: `continue_stop` waits for work under way.
        match self.lifecycle {
            PodLifecycle::Desired => self.start_due_work(now),
            PodLifecycle::Stopping { .. } => self.continue_stop(now),
            PodLifecycle::Removing | PodLifecycle::Gone => Vec::new(),
        }
    }

    /// Returns the first time after `now` at which [`PodEvent::Tick`] is due, or `None` if no timer runs.
    ///
    /// A time that has passed moves nothing on any more: its container waits for another one, whose time may follow.
    pub fn next_tick_at(&self, now: Instant) -> Option<Instant> {
        let mut due = Vec::new();
        match self.lifecycle {
            PodLifecycle::Desired => {}
            // After SIGKILL only exits move the pod on; another timer would change nothing.
            PodLifecycle::Stopping { deadline, killed } => return (!killed).then_some(deadline),
            PodLifecycle::Removing | PodLifecycle::Gone => return None,
        }
        if let PodNetworkState::Failed { until, .. } = self.network {
            due.push(until);
        }
        for container in &self.containers {
            match (&container.image, &container.stage) {
                // A failed image hides the container's own timer: without an image it cannot start anyway.
                (ImageState::Failed { until, .. }, _) => due.push(*until),
                (_, ContainerStage::Waiting { until, .. }) => due.push(*until),
                _ => {}
            }
        }
        due.into_iter().filter(|due| *due > now).min()
    }

    /// Returns the pod's phase, as the controller sees it.
    pub fn phase(&self) -> PodRunPhase {
        match self.lifecycle {
            PodLifecycle::Stopping { .. } | PodLifecycle::Removing => PodRunPhase::Terminating,
            PodLifecycle::Gone => PodRunPhase::Removed,
            PodLifecycle::Desired if self.has_started => PodRunPhase::Running,
            PodLifecycle::Desired => PodRunPhase::Pending,
        }
    }

    /// Returns the pod's addresses; empty before the network exists.
    pub fn addresses(&self) -> &[IpAddr] {
        match &self.network {
            PodNetworkState::Ready(addresses) => addresses,
            PodNetworkState::Wanted
            | PodNetworkState::Creating
            | PodNetworkState::Failed { .. } => &[],
        }
    }

    /// Returns the number of times that a container was started again.
    pub fn restarts(&self, index: usize) -> u32 {
        self.containers.get(index).map_or(0, |container| container.restarts)
    }

    /// Returns the probe results of a container's present run.
    pub fn probe_results(&self, index: usize) -> ProbeResults {
        self.containers.get(index).map(|container| container.probe_results).unwrap_or_default()
    }

    /// Returns the exit of a container that has ended and does not start again.
    pub fn final_exit(&self, index: usize) -> Option<&ContainerExit> {
        match &self.containers.get(index)?.stage {
            ContainerStage::Ended(exit) => Some(exit),
            _ => None,
        }
    }

    /// Returns the exit code of the last run of a container that waits for its next start; `None` without one.
    pub fn waiting_exit(&self, index: usize) -> Option<i32> {
        let container = self.containers.get(index)?;
        match container.stage {
            // An adopted container that waits is idle.
            ContainerStage::Waiting { .. } | ContainerStage::Idle => container.last_exit,
            ContainerStage::Starting | ContainerStage::Running | ContainerStage::Ended(_) => None,
        }
    }

    /// Returns true if all containers but init containers run and have passed their probes.
    pub fn is_ready(&self) -> bool {
        let mut stay =
            self.containers.iter().filter(|container| container.plan.role != ContainerRole::Init);
        self.lifecycle == PodLifecycle::Desired
            && stay.all(|container| container.satisfies_probes(|probed| probed.ready))
    }

    /// Returns the states of the pod's main containers.
    ///
    /// Init containers are not listed. While one blocks the start, containers behind it show its reason for waiting.
    pub fn container_statuses(&self) -> Vec<LocalContainerStatus> {
        let stuck = self.containers.iter().find(|container| {
            container.plan.role == ContainerRole::Init && !container.has_passed()
        });
        let main_containers =
            self.containers.iter().filter(|container| container.plan.role == ContainerRole::Main);
        let status = |container: &PodContainer| LocalContainerStatus {
            name: container.plan.name.clone(),
            state: self.container_state(container, stuck),
            restarts: container.restarts,
            image_digest: match &container.image {
                ImageState::Ready(digest) => Some(digest.clone()),
                ImageState::Wanted | ImageState::Pulling | ImageState::Failed { .. } => None,
            },
        };
        main_containers.map(status).collect()
    }

    /// Returns the state of a container as kubectl shows it. `stuck` is the init container that blocks the start.
    fn container_state(
        &self,
        container: &PodContainer,
        stuck: Option<&PodContainer>,
    ) -> ContainerRunState {
        let waiting = |reason: &str, message: String, last_exit| ContainerRunState::Waiting {
            reason: reason.to_owned(),
            message,
            last_exit,
        };
        // Without a network no container can start, whatever the state of its image.
        if let (PodNetworkState::Failed { message, .. }, ContainerStage::Idle) =
            (&self.network, &container.stage)
        {
            return waiting("FailedCreatePodSandBox", message.clone(), None);
        }
        match (&container.stage, &container.image) {
            (ContainerStage::Running, _) => ContainerRunState::Running,
            (ContainerStage::Ended(exit), _) => ContainerRunState::Terminated {
                code: exit.code,
                reason: exit.reason.clone(),
                message: exit.message.clone(),
            },
            (ContainerStage::Waiting { reason, message, .. }, _) => {
                waiting(reason, message.clone(), container.last_exit)
            }
            (_, ImageState::Failed { reason, message, .. }) => {
                waiting(reason, message.clone(), container.last_exit)
            }
            // The init container that blocks this one is shown, with its name: it is the cause of the wait.
            (ContainerStage::Idle, _) if stuck.is_some() => {
                match stuck.map(|init| (init, self.container_state(init, None))) {
                    Some((init, ContainerRunState::Waiting { reason, message, last_exit })) => {
                        waiting(
                            &reason,
                            format!("init container {}: {message}", init.plan.name),
                            last_exit,
                        )
                    }
                    _ => waiting("PodInitializing", String::new(), None),
                }
            }
            (ContainerStage::Idle | ContainerStage::Starting, _) => waiting(
                "ContainerCreating",
                container.last_exit_message.clone(),
                container.last_exit,
            ),
        }
    }

    fn update_container(&mut self, index: usize, change: impl FnOnce(&mut PodContainer)) {
        if let Some(container) = self.containers.get_mut(index) {
            change(container);
        }
    }

    /// Handles a failed start. It counts as an exit with code 128, as in Kubernetes.
    fn handle_start_failure(
        &mut self,
        now: Instant,
        index: usize,
        reason: String,
        message: String,
    ) {
        let stopping = self.lifecycle != PodLifecycle::Desired;
        let never = self.restart == RestartPolicy::Never;
        self.update_container(index, |container| {
            container.last_exit = Some(128);
            container.stage = if stopping || never {
                ContainerStage::Ended(ContainerExit { code: 128, reason, message })
            } else {
                // The first attempt after an exit is immediate; nothing exited here, so each one waits.
                container.crash_backoff.delay_first_failure();
                ContainerStage::Waiting {
                    until: now + container.crash_backoff.record_failure(now),
                    reason,
                    message,
                }
            };
        });
    }

    /// Handles the exit of a container, which is restarted by its role and the pod's policy.
    fn handle_exit(&mut self, now: Instant, index: usize, exit: ContainerExit) {
        let is_desired = self.lifecycle == PodLifecycle::Desired;
        let restart = self.restart;
        self.update_container(index, |container| {
            container.last_exit = Some(exit.code);
            // Kubernetes' rules: sidecars restart under every policy; init containers that succeed never do.
            let restarts = match (container.plan.role, restart) {
                (ContainerRole::Sidecar, _) | (ContainerRole::Main, RestartPolicy::Always) => true,
                (ContainerRole::Init, RestartPolicy::Never)
                | (ContainerRole::Main, RestartPolicy::Never) => false,
                (ContainerRole::Init, _) | (ContainerRole::Main, RestartPolicy::OnFailure) => {
                    exit.code != 0
                }
            };
            // A pod that stops starts nothing again.
            if !(is_desired && restarts) {
                container.stage = ContainerStage::Ended(exit);
                return;
            }
            let wait = container.crash_backoff.record_failure(now);
            let message = crash_message(&exit, wait);
            container.last_exit_message.clone_from(&message);
            let reason = "CrashLoopBackOff".to_owned();
            container.stage = ContainerStage::Waiting { until: now + wait, reason, message };
        });
    }

    fn begin_stop(&mut self, now: Instant) {
        if self.lifecycle == PodLifecycle::Desired {
            self.lifecycle = PodLifecycle::Stopping { deadline: now + self.grace, killed: false };
        }
    }

    /// Starts all work whose time has come: network, images, containers.
    fn start_due_work(&mut self, now: Instant) -> Vec<PodAction> {
        let mut actions = Vec::new();
        let due = matches!(self.network, PodNetworkState::Failed { until, .. } if until <= now);
        if due || self.network == PodNetworkState::Wanted {
            self.network = PodNetworkState::Creating;
            actions.push(PodAction::CreateNetwork);
        }
        // Images do not need the network of the pod, so pulls run while it is still being made.
        for (index, container) in self.containers.iter_mut().enumerate() {
            let due = matches!(container.image, ImageState::Failed { until, .. } if until <= now);
            if due || container.image == ImageState::Wanted {
                container.image = ImageState::Pulling;
                actions.push(PodAction::Pull(index));
            }
        }
        if !matches!(self.network, PodNetworkState::Ready(_)) {
            return actions;
        }
        // As in the kubelet: once a main container has been started, init containers are over, and each sidecar and
        // main container starts again without waiting for the others.
        let is_initialized = self.containers.iter().any(|container| {
            container.plan.role == ContainerRole::Main && container.stage != ContainerStage::Idle
        });
        // Before that, init containers start one after another, main containers together: a container may start once
        // each init container before it has ended with 0, and each sidecar before it has started.
        let mut may_start = true;
        for (index, container) in self.containers.iter_mut().enumerate() {
            let is_over = is_initialized && container.plan.role == ContainerRole::Init;
            if may_start && !is_over && container.can_start(now) {
                let is_restart = matches!(container.stage, ContainerStage::Waiting { .. })
                    || container.last_exit.is_some();
                container.restarts += u32::from(is_restart);
                container.stage = ContainerStage::Starting;
                container.probe_results = ProbeResults::default();
                actions.push(PodAction::Start(index));
            }
            may_start &= is_initialized
                || container.has_passed()
                || container.plan.role == ContainerRole::Main;
        }
        let mut mains =
            self.containers.iter().filter(|container| container.plan.role == ContainerRole::Main);
        self.has_started |= mains.all(|container| {
            matches!(container.stage, ContainerStage::Running | ContainerStage::Ended(_))
        });
        actions
    }

    /// Stops the pod: SIGTERM to main containers, then to sidecars; SIGKILL at the deadline; then the removal.
    fn continue_stop(&mut self, now: Instant) -> Vec<PodAction> {
        let PodLifecycle::Stopping { deadline, .. } = self.lifecycle else { return Vec::new() };
        if matches!(self.network, PodNetworkState::Creating)
            || self.containers.iter().any(PodContainer::is_busy)
        {
            // Work under way ends first, so that nothing appears after the removal.
            if !self.containers.iter().any(|container| container.stage == ContainerStage::Running) {
                return Vec::new();
            }
        } else if self.containers.iter().all(|container| container.stage != ContainerStage::Running)
        {
            self.lifecycle = PodLifecycle::Removing;
            return vec![PodAction::Remove];
        }
        let running = |container: &PodContainer| container.stage == ContainerStage::Running;
        if deadline <= now {
            self.lifecycle = PodLifecycle::Stopping { deadline, killed: true };
            let running =
                self.containers.iter().enumerate().filter(|(_, container)| running(container));
            return running.map(|(index, _)| PodAction::Kill(index)).collect();
        }
        // Sidecars serve the main containers to their end, so they are asked last.
        let mains = self
            .containers
            .iter()
            .any(|container| container.plan.role != ContainerRole::Sidecar && running(container));
        let mut actions = Vec::new();
        for (index, container) in self.containers.iter_mut().enumerate() {
            let may_stop = container.plan.role != ContainerRole::Sidecar || !mains;
            if may_stop && container.stage == ContainerStage::Running && !container.termination_sent
            {
                container.termination_sent = true;
                actions.push(PodAction::Terminate(index));
            }
        }
        actions
    }
}

impl PodContainer {
    fn can_start(&self, now: Instant) -> bool {
        let may_start = match self.stage {
            ContainerStage::Idle => true,
            ContainerStage::Waiting { until, .. } => until <= now,
            ContainerStage::Starting | ContainerStage::Running | ContainerStage::Ended(_) => false,
        };
        may_start && matches!(self.image, ImageState::Ready(_))
    }

    /// Returns true if the containers after this init container may start.
    fn has_passed(&self) -> bool {
        match (&self.stage, self.plan.role) {
            (ContainerStage::Ended(exit), _) => exit.code == 0,
            (ContainerStage::Running, ContainerRole::Sidecar) => {
                self.satisfies_probes(|probed| probed.started)
            }
            _ => false,
        }
    }

    /// Returns true if the container runs and its probes, if it has any, satisfy `is_satisfied`.
    fn satisfies_probes(&self, is_satisfied: impl Fn(ProbeResults) -> bool) -> bool {
        self.stage == ContainerStage::Running
            && (!self.plan.is_probed || is_satisfied(self.probe_results))
    }

    /// Returns true if a start or pull of the container is still to report its result.
    fn is_busy(&self) -> bool {
        self.stage == ContainerStage::Starting || self.image == ImageState::Pulling
    }
}

/// Message of a container that waits for its restart: reason, code, last line of output, and pause.
fn crash_message(exit: &ContainerExit, wait: Duration) -> String {
    let last = exit.message.lines().rev().find(|line| !line.trim().is_empty());
    let last = last.map(|line| format!(": {}", line.trim())).unwrap_or_default();
    let restart_text = match wait.as_secs() {
        0 => "started again at once".to_owned(),
        seconds => format!("started again after {seconds} s"),
    };
    format!("{} with code {}{last}; {restart_text}", exit.reason, exit.code)
}

#[cfg(test)]
mod tests;
