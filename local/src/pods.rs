//! Pure: lifecycle of one pod: network, images, init containers, containers, restarts, removal.
//!
//! A [`Pod`] receives [`Event`]s and returns the [`Action`]s that `kubelet.rs` then carries out.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use common::node::{ContainerState, ContainerStatus, PodPhase};

mod backoff;
mod words;

use backoff::Backoff;
pub use words::{Action, Event, Exit, Plan, Probed, Restart, Role};

/// Grace period of a pod that gives none: Kubernetes' default `terminationGracePeriodSeconds`.
const GRACE: Duration = Duration::from_secs(30);
/// Pause of a pod whose network could not be made, before the next attempt.
const NETWORK_RETRY: Duration = Duration::from_secs(1);

/// State of a container's image on this node.
#[derive(Clone, Debug, PartialEq)]
enum Image {
    Wanted,
    Pulling,
    Failed { until: Instant, reason: String, message: String },
    Ready(String),
}

/// Stage of a container's process, between its runs too.
#[derive(Clone, Debug, PartialEq)]
enum Stage {
    Idle,
    Starting,
    Running,
    Waiting { until: Instant, reason: String, message: String },
    Ended(Exit),
}

/// One container of a pod, init containers included.
#[derive(Clone, Debug)]
struct Container {
    plan: Plan,
    image: Image,
    stage: Stage,
    restarts: u32,
    /// Probe results of the present run; all false while the container starts.
    probed: Probed,
    /// Exit code of the last run, or 128 after a start that failed.
    last_exit: Option<i32>,
    /// Message about the last exit; shown while the container starts again.
    last_words: String,
    crashes: Backoff,
    pulls: Backoff,
    /// True once SIGTERM was ordered, which happens once per pod.
    told_to_end: bool,
}

/// State of the pod's network namespace and addresses.
#[derive(Clone, Debug, PartialEq)]
enum Network {
    Wanted,
    Making,
    Failed { until: Instant, message: String },
    Ready(Vec<IpAddr>),
}

/// Lifecycle of the pod as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Ordered,
    Stopping { deadline: Instant, killed: bool },
    Removing,
    Gone,
}

/// State machine of one pod.
#[derive(Clone, Debug)]
pub struct Pod {
    restart: Restart,
    grace: Duration,
    life: Life,
    network: Network,
    containers: Vec<Container>,
    /// True once all main containers run or have ended, or one was found running: the phase is then `Running`.
    started_once: bool,
}

impl Pod {
    /// Returns a pod of these containers, init containers first. Without `grace` it is Kubernetes' 30 s.
    pub fn new(restart: Restart, grace: Option<Duration>, plans: Vec<Plan>) -> Self {
        let container = |plan| Container {
            plan,
            image: Image::Wanted,
            stage: Stage::Idle,
            restarts: 0,
            probed: Probed::default(),
            last_exit: None,
            last_words: String::new(),
            crashes: Backoff::default(),
            pulls: Backoff::default(),
            told_to_end: false,
        };
        Self {
            restart,
            grace: grace.unwrap_or(GRACE),
            life: Life::Ordered,
            network: Network::Wanted,
            containers: plans.into_iter().map(container).collect(),
            started_once: false,
        }
    }

    /// Restores the network that the pod had before the node's restart.
    pub fn adopt_network(&mut self, addresses: Vec<IpAddr>) {
        self.network = Network::Ready(addresses);
    }

    /// Restores a container from before the node's restart: its restarts, probe results and process.
    pub fn adopt(
        &mut self,
        at: usize,
        restarts: u32,
        probed: Probed,
        digest: Option<String>,
        running: bool,
    ) {
        let Some(container) = self.containers.get_mut(at) else { return };
        container.restarts = restarts;
        if let Some(digest) = digest {
            container.image = Image::Ready(digest);
        }
        if running {
            container.stage = Stage::Running;
            container.probed = probed;
        }
        self.started_once |= running;
    }

    /// Applies an event and returns the actions that follow from it.
    pub fn step(&mut self, now: Instant, event: Event) -> Vec<Action> {
        match event {
            Event::Begin | Event::Tick => {}
            Event::Network(addresses) => self.network = Network::Ready(addresses),
            Event::NoNetwork(message) => {
                self.network = Network::Failed { until: now + NETWORK_RETRY, message };
            }
            Event::Image { at, digest } => self.set(at, |container| {
                container.image = Image::Ready(digest);
                container.pulls = Backoff::default();
            }),
            Event::NoImage { at, reason, message } => self.set(at, |container| {
                container.pulls.skip_free();
                let until = now + container.pulls.failed(now);
                container.image = Image::Failed { until, reason, message };
            }),
            Event::Started { at } => self.set(at, |container| container.stage = Stage::Running),
            Event::NotStarted { at, reason, message } => self.not_started(now, at, reason, message),
            // A probe may answer after its container was restarted: results of an earlier run do not count.
            Event::Probed { at, attempt, shown } => self.set(at, |container| {
                if container.restarts == attempt {
                    container.probed = shown;
                }
            }),
            Event::Exited { at, exit } => self.exited(now, at, exit),
            Event::Stop => self.stop(now),
            Event::Removed => self.life = Life::Gone,
        }
        // Results that arrive while the pod stops are recorded too: `wind_down` waits for work under way.
        match self.life {
            Life::Ordered => self.advance(now),
            Life::Stopping { .. } => self.wind_down(now),
            Life::Removing | Life::Gone => Vec::new(),
        }
    }

    /// Returns the time at which [`Event::Tick`] is due, or `None` if no timer runs.
    pub fn due(&self) -> Option<Instant> {
        let mut due = Vec::new();
        match self.life {
            Life::Ordered => {}
            // After SIGKILL only exits move the pod on; another timer would change nothing.
            Life::Stopping { deadline, killed } => return (!killed).then_some(deadline),
            Life::Removing | Life::Gone => return None,
        }
        if let Network::Failed { until, .. } = self.network {
            due.push(until);
        }
        for container in &self.containers {
            match (&container.image, &container.stage) {
                // A failed image hides the container's own timer: without an image it cannot start anyway.
                (Image::Failed { until, .. }, _) => due.push(*until),
                (_, Stage::Waiting { until, .. }) => due.push(*until),
                _ => {}
            }
        }
        due.into_iter().min()
    }

    /// Returns the pod's phase, as the controller sees it.
    pub fn phase(&self) -> PodPhase {
        match self.life {
            Life::Stopping { .. } | Life::Removing => PodPhase::Terminating,
            Life::Gone => PodPhase::Gone,
            Life::Ordered if self.started_once => PodPhase::Running,
            Life::Ordered => PodPhase::Pending,
        }
    }

    /// Returns the pod's addresses; empty before the network exists.
    pub fn addresses(&self) -> &[IpAddr] {
        match &self.network {
            Network::Ready(addresses) => addresses,
            Network::Wanted | Network::Making | Network::Failed { .. } => &[],
        }
    }

    /// Returns the number of times that a container was started again.
    pub fn restarts(&self, at: usize) -> u32 {
        self.containers.get(at).map_or(0, |container| container.restarts)
    }

    /// Returns the probe results of a container's present run.
    pub fn probed(&self, at: usize) -> Probed {
        self.containers.get(at).map(|container| container.probed).unwrap_or_default()
    }

    /// Returns true if all containers but init containers run and have passed their probes.
    pub fn is_ready(&self) -> bool {
        let mut stay = self.containers.iter().filter(|one| one.plan.role != Role::Init);
        self.life == Life::Ordered && stay.all(|one| one.shows(|probed| probed.ready))
    }

    /// Returns the digest of a container's image, once the image is unpacked.
    pub fn digest(&self, at: usize) -> Option<&str> {
        match &self.containers.get(at)?.image {
            Image::Ready(digest) => Some(digest),
            Image::Wanted | Image::Pulling | Image::Failed { .. } => None,
        }
    }

    /// Returns the states of the pod's main containers.
    ///
    /// Init containers are not listed. While one blocks the start, containers behind it show its reason for waiting.
    pub fn containers(&self) -> Vec<ContainerStatus> {
        let stuck =
            self.containers.iter().find(|one| one.plan.role == Role::Init && !one.is_passed());
        let shown = self.containers.iter().filter(|one| one.plan.role == Role::Main);
        let status = |one: &Container| ContainerStatus {
            name: one.plan.name.clone(),
            state: self.state(one, stuck),
            restarts: one.restarts,
            image_digest: match &one.image {
                Image::Ready(digest) => Some(digest.clone()),
                Image::Wanted | Image::Pulling | Image::Failed { .. } => None,
            },
        };
        shown.map(status).collect()
    }

    fn state(&self, one: &Container, stuck: Option<&Container>) -> ContainerState {
        let waiting = |reason: &str, message: String, last_exit| ContainerState::Waiting {
            reason: reason.to_owned(),
            message,
            last_exit,
        };
        // Without a network no container can start, whatever the state of its image.
        if let (Network::Failed { message, .. }, Stage::Idle) = (&self.network, &one.stage) {
            return waiting("FailedCreatePodSandBox", message.clone(), None);
        }
        match (&one.stage, &one.image) {
            (Stage::Running, _) => ContainerState::Running,
            (Stage::Ended(exit), _) => ContainerState::Terminated {
                code: exit.code,
                reason: exit.reason.clone(),
                message: exit.message.clone(),
            },
            (Stage::Waiting { reason, message, .. }, _) => {
                waiting(reason, message.clone(), one.last_exit)
            }
            (_, Image::Failed { reason, message, .. }) => {
                waiting(reason, message.clone(), one.last_exit)
            }
            // The init container that blocks this one is shown, with its name: it is the cause of the wait.
            (Stage::Idle, _) if stuck.is_some() => match stuck
                .map(|init| (init, self.state(init, None)))
            {
                Some((init, ContainerState::Waiting { reason, message, last_exit })) => waiting(
                    &reason,
                    format!("init container {}: {message}", init.plan.name),
                    last_exit,
                ),
                _ => waiting("PodInitializing", String::new(), None),
            },
            (Stage::Idle | Stage::Starting, _) => {
                waiting("ContainerCreating", one.last_words.clone(), one.last_exit)
            }
        }
    }

    fn set(&mut self, at: usize, change: impl FnOnce(&mut Container)) {
        if let Some(container) = self.containers.get_mut(at) {
            change(container);
        }
    }

    fn not_started(&mut self, now: Instant, at: usize, reason: String, message: String) {
        let stopping = self.life != Life::Ordered;
        let never = self.restart == Restart::Never;
        self.set(at, |container| {
            container.last_exit = Some(128);
            container.stage = if stopping || never {
                Stage::Ended(Exit { code: 128, reason, message })
            } else {
                // The first attempt after an exit is immediate; nothing exited here, so each one waits.
                container.crashes.skip_free();
                Stage::Waiting { until: now + container.crashes.failed(now), reason, message }
            };
        });
    }

    fn exited(&mut self, now: Instant, at: usize, exit: Exit) {
        let ordered = self.life == Life::Ordered;
        let restart = self.restart;
        self.set(at, |container| {
            container.last_exit = Some(exit.code);
            // Kubernetes' rules: sidecars restart under every policy; init containers that succeed never do.
            let again = match (container.plan.role, restart) {
                (Role::Sidecar, _) | (Role::Main, Restart::Always) => true,
                (Role::Init, Restart::Never) | (Role::Main, Restart::Never) => false,
                (Role::Init, _) | (Role::Main, Restart::OnFailure) => exit.code != 0,
            };
            // A pod that stops starts nothing again.
            if !(ordered && again) {
                container.stage = Stage::Ended(exit);
                return;
            }
            let wait = container.crashes.failed(now);
            let message = crash_message(&exit, wait);
            container.last_words.clone_from(&message);
            let reason = "CrashLoopBackOff".to_owned();
            container.stage = Stage::Waiting { until: now + wait, reason, message };
        });
    }

    fn stop(&mut self, now: Instant) {
        if self.life == Life::Ordered {
            self.life = Life::Stopping { deadline: now + self.grace, killed: false };
        }
    }

    /// Starts all work whose time has come: network, images, containers.
    fn advance(&mut self, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        let due = matches!(self.network, Network::Failed { until, .. } if until <= now);
        if due || self.network == Network::Wanted {
            self.network = Network::Making;
            actions.push(Action::Connect);
        }
        // Images do not need the network of the pod, so pulls run while it is still being made.
        for (at, container) in self.containers.iter_mut().enumerate() {
            let due = matches!(container.image, Image::Failed { until, .. } if until <= now);
            if due || container.image == Image::Wanted {
                container.image = Image::Pulling;
                actions.push(Action::Pull(at));
            }
        }
        if !matches!(self.network, Network::Ready(_)) {
            return actions;
        }
        // Init containers start one after another, main containers together: a container may start once
        // each init container before it has ended with 0, and each sidecar before it has started.
        let mut turn = true;
        for (at, container) in self.containers.iter_mut().enumerate() {
            if turn && container.may_start(now) {
                let again = matches!(container.stage, Stage::Waiting { .. })
                    || container.last_exit.is_some();
                container.restarts += u32::from(again);
                container.stage = Stage::Starting;
                container.probed = Probed::default();
                actions.push(Action::Start(at));
            }
            turn &= container.is_passed() || container.plan.role == Role::Main;
        }
        let mut mains = self.containers.iter().filter(|one| one.plan.role == Role::Main);
        self.started_once |= mains.all(|one| matches!(one.stage, Stage::Running | Stage::Ended(_)));
        actions
    }

    /// Stops the pod: SIGTERM to main containers, then to sidecars; SIGKILL at the deadline; then the removal.
    fn wind_down(&mut self, now: Instant) -> Vec<Action> {
        let Life::Stopping { deadline, .. } = self.life else { return Vec::new() };
        if matches!(self.network, Network::Making) || self.containers.iter().any(Container::is_busy)
        {
            // Work under way ends first, so that nothing appears after the removal.
            if !self.containers.iter().any(|one| one.stage == Stage::Running) {
                return Vec::new();
            }
        } else if self.containers.iter().all(|one| one.stage != Stage::Running) {
            self.life = Life::Removing;
            return vec![Action::Remove];
        }
        let running = |one: &Container| one.stage == Stage::Running;
        if deadline <= now {
            self.life = Life::Stopping { deadline, killed: true };
            let all = self.containers.iter().enumerate().filter(|(_, one)| running(one));
            return all.map(|(at, _)| Action::Kill(at)).collect();
        }
        // Sidecars serve the main containers to their end, so they are asked last.
        let mains =
            self.containers.iter().any(|one| one.plan.role != Role::Sidecar && running(one));
        let mut actions = Vec::new();
        for (at, one) in self.containers.iter_mut().enumerate() {
            let turn = one.plan.role != Role::Sidecar || !mains;
            if turn && one.stage == Stage::Running && !one.told_to_end {
                one.told_to_end = true;
                actions.push(Action::Terminate(at));
            }
        }
        actions
    }
}

impl Container {
    fn may_start(&self, now: Instant) -> bool {
        let free = match self.stage {
            Stage::Idle => true,
            Stage::Waiting { until, .. } => until <= now,
            Stage::Starting | Stage::Running | Stage::Ended(_) => false,
        };
        free && matches!(self.image, Image::Ready(_))
    }

    /// Returns true if the containers after this init container may start.
    fn is_passed(&self) -> bool {
        match (&self.stage, self.plan.role) {
            (Stage::Ended(exit), _) => exit.code == 0,
            (Stage::Running, Role::Sidecar) => self.shows(|probed| probed.started),
            _ => false,
        }
    }

    /// Returns true if the container runs and its probes, if it has any, satisfy `what`.
    fn shows(&self, what: impl Fn(Probed) -> bool) -> bool {
        self.stage == Stage::Running && (!self.plan.is_probed || what(self.probed))
    }

    /// Returns true if a start or pull of the container is still to report its result.
    fn is_busy(&self) -> bool {
        self.stage == Stage::Starting || self.image == Image::Pulling
    }
}

/// Message of a container that waits for its restart: reason, code, last line of output, and pause.
fn crash_message(exit: &Exit, wait: Duration) -> String {
    let last = exit.message.lines().rev().find(|line| !line.trim().is_empty());
    let last = last.map(|line| format!(": {}", line.trim())).unwrap_or_default();
    let again = match wait.as_secs() {
        0 => "started again at once".to_owned(),
        seconds => format!("started again after {seconds} s"),
    };
    format!("{} with code {}{last}; {again}", exit.reason, exit.code)
}

#[cfg(test)]
mod tests;
