//! Shell: finder of pods by their cgroups, and of their network namespaces by the processes in them.
//!
//! A platform may name the namespaces of pods before anything runs in them. Then they are found there, and when a pod's
//! process listens, only the maps have to be read.
//!
//! All of it runs on one thread of its own. Reading cgroup files may wait for a lock that the container runtime holds,
//! and entering namespaces needs threads of their own anyway. The directories are watched by inotify, so that a pod is
//! found while its runtime still sets it up, before its process listens.

use std::{
    collections::HashMap,
    error::Error,
    fs, io, mem,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    path::{Path, PathBuf},
    thread,
    time::Instant,
};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use tokio::{
    io::unix::AsyncFd,
    sync::{
        mpsc::{self, Receiver, Sender},
        oneshot,
    },
    time::{MissedTickBehavior, interval, sleep_until},
};
use tracing::{debug, info, warn};

use self::searched_pod::{
    HOST_NAMESPACE_SEARCHES_MAX, MissingNamespace, PodServerRule, SEARCH_WAIT_MAX, SEARCH_WAIT_MIN,
    SLOW_SEARCH_WAIT, SearchedPod,
};
use super::namespace::{self, NetworkNamespace, is_process_ended};
use crate::{
    clock::monotonic_ns,
    incompatible::{self, Incompatibility},
    kernel::{
        cgroup_search::{POD_DIRECTORY_DEPTH, pod_directories, subdirectories},
        cgroups::pod_uid,
        freezer::{self, CgroupState},
        maps::{KernelMapError, KernelMaps, connection_storage::ConnectionStorage},
        netns_cookies::NetnsCookies,
        sys,
    },
    pods::{
        idle_connections::IdleConnections,
        pod_server::{
            PodServers,
            prestop::PreStopHooks,
            running::{self, ThawQuery},
        },
        processes::{namespace_path, processes},
        types::{NamespaceFacts, NamespaceSockets, PodTrackerEvent},
    },
};

mod searched_pod;

/// Capacity of the channel of commands, while the thread is busy.
const COMMANDS_MAX: usize = 4_096;

/// Command to the finder.
#[derive(Debug)]
pub enum FinderCommand {
    /// Search for this pod, and again whenever its processes change. Open its pod server.
    Find(String),
    /// Search for this pod as with [`Find`](Self::Find), and leave the port of the pod server to its own processes.
    FindWithoutServer(String),
    /// Open the pod server of this pod, if its port is free.
    OpenPodServer(String),
    /// Stop the search for a pod that is gone.
    Forget(String),
    /// Inspect this pod's namespace for listeners, if it still has this cookie.
    Inspect(String, u64),
    /// Send this pod's namespace, if it exists and still has this cookie.
    OpenNamespace(String, u64, oneshot::Sender<NetworkNamespace>),
    /// Send the directory of this pod's cgroup, if it exists.
    FindCgroup(String, oneshot::Sender<PathBuf>),
    /// Search again for the pods that were not found: a process has listened in an unknown namespace.
    RetryMissing,
}

/// Returns a pod's namespace, if the finder behind `finder` finds it and it still has this cookie.
pub async fn request_namespace(
    finder: &Sender<FinderCommand>,
    uid: &str,
    cookie: u64,
) -> Option<NetworkNamespace> {
    let (reply_tx, reply_rx) = oneshot::channel();
    finder.send(FinderCommand::OpenNamespace(uid.to_owned(), cookie, reply_tx)).await.ok()?;
    reply_rx.await.ok()
}

/// Returns the directory of a pod's cgroup, if the finder behind `finder` finds it.
pub(crate) async fn request_cgroup(finder: &Sender<FinderCommand>, uid: &str) -> Option<PathBuf> {
    let (reply_tx, reply_rx) = oneshot::channel();
    finder.send(FinderCommand::FindCgroup(uid.to_owned(), reply_tx)).await.ok()?;
    reply_rx.await.ok()
}

/// Paths and sources that the finder searches with.
#[derive(Clone, Debug)]
pub struct FinderConfig {
    /// Cgroup below which the pods' own cgroups are.
    pub cgroups: PathBuf,
    /// Folder of the pods' network namespaces by uid, if the platform keeps one.
    pub namespaces: Option<PathBuf>,
    /// Source of the cookies of namespaces.
    pub cookies: NetnsCookies,
    /// State that the pod servers respond from; `None`: no pod servers.
    pub pod_servers: Option<PodServerDeps>,
}

/// State that the pod servers respond from.
#[derive(Clone, Debug)]
pub struct PodServerDeps {
    /// PreStop requests, and the pods that may stop.
    pub prestop_hooks: PreStopHooks,
    /// Storage of the pods' connections.
    pub conns: ConnectionStorage,
    /// Connections that the eBPF programs report as idle.
    pub idle: IdleConnections,
    /// Channel of thaw queries to the agent's loop.
    pub thaw_queries: Sender<ThawQuery>,
}

impl PodServerDeps {
    /// Opens the state in these maps. Returns it with the receiver of thaw queries, for the agent's loop.
    pub(crate) fn open(
        prestop_hooks: &PreStopHooks,
        maps: &KernelMaps,
    ) -> Result<(Self, Receiver<ThawQuery>), KernelMapError> {
        let (thaw_queries, receiver) = mpsc::channel(running::QUERIES_MAX);
        let (prestop_hooks, conns) = (prestop_hooks.clone(), maps.conns());
        let idle = IdleConnections::open(maps)?;
        Ok((Self { prestop_hooks, conns, idle, thaw_queries }, receiver))
    }
}

/// Starts the thread. It ends when the sender of commands or the receiver of events is dropped.
pub fn start(
    config: FinderConfig,
    events: Sender<PodTrackerEvent>,
) -> io::Result<Sender<FinderCommand>> {
    let (send, receive) = mpsc::channel(COMMANDS_MAX);
    // Not on the thread: its end would leave an agent that looks healthy and finds no pod.
    let flags = InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC;
    let inotify = Inotify::init(flags).map_err(inotify_error)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    thread::Builder::new().name("agent-find".into()).spawn(move || {
        if let Err(error) = runtime.block_on(run(config, inotify, events, receive)) {
            warn!(%error, "cannot look for pods");
        }
    })?;
    Ok(send)
}

/// Converts the error of a new inotify instance, and names the setting that bounds their number.
fn inotify_error(error: nix::Error) -> io::Error {
    match error {
        nix::Error::EMFILE => io::Error::other(format!(
            "no inotify instance is free: raise fs.inotify.max_user_instances on the node ({error})"
        )),
        error => error.into(),
    }
}

/// Runs the search for pods until the commands end. An error ends it: without inotify, pods would be missed.
async fn run(
    config: FinderConfig,
    inotify: Inotify,
    events: Sender<PodTrackerEvent>,
    mut commands: Receiver<FinderCommand>,
) -> io::Result<()> {
    let mut finder = PodFinder::new(config, inotify, events)?;
    // Inotify cannot watch a root that does not exist, so the root is looked up by a timer.
    let mut root_timer = interval(SLOW_SEARCH_WAIT);
    root_timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let next = finder.next_search();
        let retry = async {
            match next {
                Some(at) => sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            command = commands.recv() => match command {
                Some(command) => finder.handle_command(command).await,
                None => return Ok(()),
            },
            ready = finder.inotify.readable() => {
                // Cleared before the events are read: one that comes during the read sets the readiness again.
                ready?.clear_ready();
                finder.handle_inotify().await?;
            }
            () = retry => finder.search_due().await,
            _ = root_timer.tick() => finder.check_root().await,
        }
    }
}

/// Adapter: `Inotify` of `nix` implements only `AsFd`, and tokio needs `AsRawFd`.
struct InotifyFd(Inotify);

impl AsFd for InotifyFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for InotifyFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

struct PodFinder {
    config: FinderConfig,
    /// Inodes of namespaces that are no pod's: the agent's own and that of process 1.
    foreign_inodes: Vec<u64>,
    inotify: AsyncFd<InotifyFd>,
    /// Watched directories that may hold pods.
    directory_watches: HashMap<WatchDescriptor, PathBuf>,
    /// Watched `cgroup.events` of wanted pods.
    pod_watches: HashMap<WatchDescriptor, String>,
    /// Directory of every pod, wanted or not, by uid.
    pod_directories: HashMap<String, PathBuf>,
    /// Pods of the RouteTable, by uid: found or still searched.
    wanted: HashMap<String, SearchedPod>,
    /// Inode of the watched root: a root that is created again has none of the watches.
    root_inode: Option<u64>,
    pod_servers: Option<PodServers>,
    events: Sender<PodTrackerEvent>,
}

impl PodFinder {
    fn new(
        config: FinderConfig,
        inotify: Inotify,
        events: Sender<PodTrackerEvent>,
    ) -> io::Result<Self> {
        let own_inode = namespace::inode(Path::new("/proc/thread-self/ns/net"));
        // In a container the agent's namespace may differ from that of process 1; a pod has neither.
        let init_inode = namespace::inode(Path::new("/proc/1/ns/net"));
        let mut finder = Self {
            config: config.clone(),
            foreign_inodes: [own_inode, init_inode].into_iter().flatten().collect(),
            inotify: sys::register_readable(InotifyFd(inotify))?,
            directory_watches: HashMap::new(),
            pod_watches: HashMap::new(),
            pod_directories: HashMap::new(),
            wanted: HashMap::new(),
            root_inode: namespace::inode(&config.cgroups).ok(),
            pod_servers: config.pod_servers.map(|deps| {
                let PodServerDeps { prestop_hooks, conns, idle, thaw_queries } = deps;
                PodServers { prestop_hooks, conns, idle, thaw_queries, events: events.clone() }
            }),
            events,
        };
        finder.watch_tree(&config.cgroups);
        if let Some(dir) = &config.namespaces {
            finder.watch_directory(dir);
        }
        Ok(finder)
    }

    /// Watches a directory that may hold pods, then lists it: a child that is created in between is seen twice, not
    /// missed.
    fn watch_tree(&mut self, dir: &Path) -> Vec<String> {
        self.watch_directory(dir);
        let mut directories = Vec::new();
        for child in subdirectories(dir) {
            directories.extend(self.add_directory(child));
        }
        directories
    }

    fn is_below_root(&self, dir: &Path) -> bool {
        dir != self.config.cgroups && dir.starts_with(&self.config.cgroups)
    }

    fn watch_directory(&mut self, dir: &Path) {
        let mask = AddWatchFlags::IN_CREATE | AddWatchFlags::IN_DELETE | AddWatchFlags::IN_ONLYDIR;
        match self.inotify.get_ref().0.add_watch(dir, mask) {
            Ok(watch) => drop(self.directory_watches.insert(watch, dir.to_owned())),
            // Removed before it was seen, as the self-test's cgroup often is.
            Err(nix::Error::ENOENT) if self.is_below_root(dir) => {
                debug!(dir = %dir.display(), "directory of pods has gone")
            }
            Err(error) => warn!(dir = %dir.display(), %error, "cannot watch directory of pods"),
        }
    }

    /// Adds a directory, and returns the pods that came with it.
    fn add_directory(&mut self, dir: PathBuf) -> Vec<String> {
        if let Some(uid) = dir.file_name().and_then(pod_uid) {
            self.pod_directories.insert(uid.clone(), dir);
            return vec![uid];
        }
        if self.may_hold_pods(&dir) { self.watch_tree(&dir) } else { Vec::new() }
    }

    /// Returns true if a directory that is no pod's own may hold those of pods.
    fn may_hold_pods(&self, dir: &Path) -> bool {
        let depth =
            dir.components().count().saturating_sub(self.config.cgroups.components().count());
        depth < POD_DIRECTORY_DEPTH
    }

    /// Adds the directory of a pod, if it exists and inotify has not reported it: no watch may have been free for the
    /// directory above.
    fn add_unreported_directory(&mut self, uid: &str) {
        if self.pod_directories.contains_key(uid) {
            return;
        }
        let is_its_own =
            |dir: &PathBuf| dir.file_name().and_then(pod_uid).is_some_and(|found| found == uid);
        if let Some(dir) = pod_directories(&self.config.cgroups).into_iter().find(is_its_own) {
            debug!(uid, dir = %dir.display(), "directory of a pod was not reported");
            self.pod_directories.insert(uid.to_owned(), dir);
        }
    }

    /// Handles a command of the agent's loop. Results come as events, or by the channel that a command has.
    async fn handle_command(&mut self, command: FinderCommand) {
        match command {
            FinderCommand::Find(uid) => self.find(uid, PodServerRule::Reserved).await,
            FinderCommand::FindWithoutServer(uid) => self.find(uid, PodServerRule::OnCommand).await,
            FinderCommand::OpenPodServer(uid) => self.open_pod_server(&uid),
            FinderCommand::Forget(uid) => {
                if let Some(servers) = &self.pod_servers {
                    servers.prestop_hooks.forget(&uid);
                }
                let watch = self.wanted.remove(&uid).and_then(|wanted| wanted.watch);
                if let Some(watch) = watch {
                    self.pod_watches.remove(&watch);
                    // Fails if the directory is gone, and the watch with it.
                    let _ = self.inotify.get_ref().0.rm_watch(watch);
                }
            }
            FinderCommand::Inspect(uid, cookie) => self.inspect(uid, cookie).await,
            FinderCommand::OpenNamespace(uid, cookie, to) => {
                if let Some(namespace) = self.open_namespace_with_cookie(&uid, cookie) {
                    // A failed send means that the requester no longer waits.
                    let _ = to.send(namespace);
                }
            }
            FinderCommand::FindCgroup(uid, to) => {
                self.add_unreported_directory(&uid);
                if let Some(dir) = self.pod_directories.get(&uid) {
                    // A failed send means that the requester no longer waits.
                    let _ = to.send(dir.clone());
                }
            }
            FinderCommand::RetryMissing => {
                for uid in self.pods_where(|wanted| !wanted.is_found) {
                    self.search(&uid).await;
                }
            }
        }
    }

    async fn find(&mut self, uid: String, server_rule: PodServerRule) {
        self.wanted.insert(uid.clone(), SearchedPod::new(server_rule));
        self.search(&uid).await;
    }

    /// Opens the pod server of a pod, if its port is free.
    fn open_pod_server(&mut self, uid: &str) {
        let Ok(namespace) = self.open_namespace(uid) else { return };
        let facts = match namespace.read_facts(&self.config.cookies) {
            Ok(facts) => facts,
            Err(error) => {
                debug!(uid, error = %common::link::error_chain(&error), "cannot inspect namespace");
                return;
            }
        };
        if let (Some(servers), Some(wanted)) = (&self.pod_servers, self.wanted.get_mut(uid)) {
            wanted.open_pod_server(servers, uid, facts.cookie, &namespace);
        }
    }

    /// Watches the root again if it is a new directory: a kubelet that was reset creates its folder again, without the
    /// watches.
    async fn check_root(&mut self) {
        let root = namespace::inode(&self.config.cgroups).ok();
        if root.is_none() || root == self.root_inode {
            return;
        }
        info!(cgroup = %self.config.cgroups.display(), "the pods' cgroup was created again");
        self.root_inode = root;
        // All known paths were below the old root.
        self.pod_directories.clear();
        let dir = self.config.cgroups.clone();
        self.watch_tree(&dir);
        let wanted: Vec<String> = self.wanted.keys().cloned().collect();
        for uid in wanted {
            self.search(&uid).await;
        }
    }

    fn pods_where(&self, filter: impl Fn(&SearchedPod) -> bool) -> Vec<String> {
        let wanted = self.wanted.iter().filter(|(_, wanted)| filter(wanted));
        wanted.map(|(uid, _)| uid.clone()).collect()
    }

    fn next_search(&self) -> Option<Instant> {
        self.wanted.values().filter_map(|wanted| wanted.next_search).min()
    }

    async fn search_due(&mut self) {
        let now = Instant::now();
        for uid in self.pods_where(|wanted| wanted.is_due(now)) {
            self.search_after(&uid, true).await;
        }
    }

    /// Reads and handles the events of inotify.
    async fn handle_inotify(&mut self) -> io::Result<()> {
        loop {
            let events = match self.inotify.get_ref().0.read_events() {
                Ok(events) => events,
                Err(nix::Error::EAGAIN) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            for event in events {
                self.handle_inotify_event(event).await;
            }
        }
    }

    /// Handles an event of a directory of cgroups, of the folder of namespaces, or of a pod's `cgroup.events`.
    async fn handle_inotify_event(&mut self, event: InotifyEvent) {
        // After an overflow events are lost: list everything, and search for all that is missing.
        if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
            let root = self.config.cgroups.clone();
            self.watch_tree(&root);
            return self.handle_command(FinderCommand::RetryMissing).await;
        }
        if let Some(uid) = self.pod_watches.get(&event.wd).cloned() {
            if event.mask.contains(AddWatchFlags::IN_IGNORED) {
                self.pod_watches.remove(&event.wd);
            } else {
                self.handle_cgroup_event(&uid).await;
            }
            return;
        }
        let (Some(dir), Some(name)) = (self.directory_watches.get(&event.wd).cloned(), event.name)
        else {
            if event.mask.contains(AddWatchFlags::IN_IGNORED) {
                self.directory_watches.remove(&event.wd);
            }
            return;
        };
        // A file, and no directory: the folder of namespaces has such names, one for each pod's uid.
        if !event.mask.contains(AddWatchFlags::IN_ISDIR) {
            return self.handle_namespace_name(&name.to_string_lossy()).await;
        }
        if event.mask.contains(AddWatchFlags::IN_DELETE) {
            if let Some(uid) = pod_uid(&name) {
                self.handle_removed_directory(uid).await;
            }
            return;
        }
        for uid in self.add_directory(dir.join(name)) {
            if self.wanted.contains_key(&uid) {
                self.search(&uid).await;
            }
        }
    }

    /// Handles a change of a pod's `cgroup.events`. A pod that only froze or thawed has the namespace that it had: no
    /// search for it, as its next request may wait.
    async fn handle_cgroup_event(&mut self, uid: &str) {
        let state = self.pod_directories.get(uid).map(|dir| freezer::read_state(dir));
        let state = state.and_then(Result::ok).flatten().unwrap_or_default();
        let Some(wanted) = self.wanted.get_mut(uid) else { return };
        let before = mem::replace(&mut wanted.cgroup_state, state);
        let has_frozen_or_thawed = state == CgroupState { is_frozen: !before.is_frozen, ..before };
        if !has_frozen_or_thawed || !wanted.is_found {
            self.search(uid).await;
        }
        // Also after a search: a process that entered a frozen cgroup may have changed nothing else.
        self.send_event(PodTrackerEvent::CgroupChanged(uid.to_owned())).await;
    }

    /// Handles the removal of a pod's directory, which implies the end of its last process.
    async fn handle_removed_directory(&mut self, uid: String) {
        self.pod_directories.remove(&uid);
        if let Some(wanted) = self.wanted.get_mut(&uid) {
            wanted.pod_server = None;
            self.send_event(PodTrackerEvent::ProcessesEnded(uid)).await;
        }
    }

    /// Handles a namespace's name that was created or removed.
    async fn handle_namespace_name(&mut self, uid: &str) {
        if self.wanted.get(uid).is_some_and(|wanted| !wanted.is_found) {
            self.search(uid).await;
        }
    }

    /// Searches for a wanted pod's namespace, and sends the result or plans another search.
    async fn search(&mut self, uid: &str) {
        self.search_after(uid, false).await;
    }

    /// Searches for a pod's namespace; `waited` is true if a planned wait came before.
    async fn search_after(&mut self, uid: &str, waited: bool) {
        if waited {
            self.add_unreported_directory(uid);
        }
        // Watched before the search: a process that comes after the search is reported by inotify.
        self.watch_processes(uid);
        let namespace = self.open_namespace(uid);
        let result = match &namespace {
            Err(missing) => Err(*missing),
            Ok(namespace) => self.read_facts(uid, namespace),
        };
        let Some(wanted) = self.wanted.get_mut(uid) else { return };
        // Only the search for a pod that was not found, or a report of inotify, is worth a log entry.
        let is_server_retry = waited && wanted.is_found;
        let wait = wanted.next_wait(result.as_ref().map_err(|missing| *missing), waited);
        wanted.next_search = wait.map(|wait| Instant::now() + wait);
        wanted.is_found = wait.is_none();
        wanted.backoff = if wanted.is_found {
            SEARCH_WAIT_MIN
        } else {
            (wanted.backoff * 2).min(SEARCH_WAIT_MAX)
        };
        // Without processes the namespace may end; an open pod server would keep its interfaces alive.
        if let Err(MissingNamespace::NoProcess) = result {
            wanted.pod_server = None;
        }
        if waited && wanted.host_namespace_searches == HOST_NAMESPACE_SEARCHES_MAX {
            info!(uid, "all processes of the pod are in the node's network namespace");
            return self
                .send_event(PodTrackerEvent::NamespaceMissing(
                    uid.to_owned(),
                    Incompatibility::HostNetwork,
                ))
                .await;
        }
        if let (Ok(facts), Ok(namespace)) = (result, namespace) {
            if let Some(servers) = &self.pod_servers {
                wanted.update_pod_server(servers, uid, facts.cookie, &namespace);
                wanted.plan_server_retry(Instant::now());
            }
            if wanted.is_found && !is_server_retry {
                info!(uid, cookie = facts.cookie, addresses = ?facts.addresses, "pod found");
            }
            self.send_event(PodTrackerEvent::NamespaceFound(uid.to_owned(), facts)).await;
        }
    }

    /// Reads the facts of a pod's namespace, and of the sandbox that its processes may run in. What cannot be read is
    /// not ready, and searched again.
    fn read_facts(
        &self,
        uid: &str,
        namespace: &NetworkNamespace,
    ) -> Result<NamespaceFacts, MissingNamespace> {
        let not_ready = |error: &dyn Error| {
            debug!(uid, error = %common::link::error_chain(error), "cannot inspect namespace");
            MissingNamespace::NotReady
        };
        let facts = namespace.read_facts(&self.config.cookies).map_err(|it| not_ready(&it))?;
        // Taken for none, a pod in a sandbox would be served as one that is counted.
        let sandbox = self.detect_sandbox(uid).map_err(|it| not_ready(&it))?;
        Ok(NamespaceFacts { incompatibility: sandbox.or(facts.incompatibility), ..facts })
    }

    /// Returns the incompatible sandbox that a pod's processes run in.
    fn detect_sandbox(&self, uid: &str) -> io::Result<Option<Incompatibility>> {
        let Some(dir) = self.pod_directories.get(uid) else { return Ok(None) };
        for pid in processes(dir)? {
            let (name, command) =
                (read_process_file(pid, "comm")?, read_process_file(pid, "cmdline")?);
            let program = command.split('\0').next().unwrap_or_default();
            if let Some(sandbox) = incompatible::detect_sandbox(name.trim_end(), program) {
                return Ok(Some(sandbox));
            }
        }
        Ok(None)
    }

    /// Watches `cgroup.events`, by which inotify reports the pod's first process and the end of its last.
    fn watch_processes(&mut self, uid: &str) {
        let (Some(dir), Some(wanted)) = (self.pod_directories.get(uid), self.wanted.get_mut(uid))
        else {
            return;
        };
        let file = dir.join("cgroup.events");
        // The kernel returns the same descriptor for a file that is watched already.
        if let Ok(watch) = self.inotify.get_ref().0.add_watch(&file, AddWatchFlags::IN_MODIFY) {
            wanted.watch = Some(watch);
            self.pod_watches.insert(watch, uid.to_owned());
        }
    }

    /// Opens the namespace of a pod: by its name in the folder of namespaces, else by one of its processes.
    fn open_namespace(&self, uid: &str) -> Result<NetworkNamespace, MissingNamespace> {
        let mut missing = MissingNamespace::NoProcess;
        if let Some(path) = self.config.namespaces.as_ref().map(|dir| dir.join(uid)) {
            if namespace::is_mounted(&path) {
                return NetworkNamespace::open(path).map_err(|_gone| MissingNamespace::NotReady);
            }
            // The name exists a moment before the namespace is mounted there.
            if path.exists() {
                missing = MissingNamespace::NotReady;
            }
        }
        let Some(dir) = self.pod_directories.get(uid) else { return Err(missing) };
        let pids = processes(dir).map_err(|error| {
            debug!(uid, %error, "cannot read the pod's processes");
            MissingNamespace::NotReady
        })?;
        for pid in pids {
            let path = namespace_path(pid);
            match namespace::inode(&path) {
                Ok(inode) if !self.foreign_inodes.contains(&inode) => {
                    match NetworkNamespace::open(path) {
                        Ok(namespace) => return Ok(namespace),
                        // The process has just ended. Another one may still be there.
                        Err(_gone) => missing = MissingNamespace::NotReady,
                    }
                }
                Ok(_) if !matches!(missing, MissingNamespace::NotReady) => {
                    missing = MissingNamespace::HostNamespace
                }
                // The process has just ended, or may not be inspected.
                Ok(_) | Err(_) => missing = MissingNamespace::NotReady,
            }
        }
        Err(missing)
    }

    /// Returns the pod's namespace, if it still has this cookie.
    fn open_namespace_with_cookie(&self, uid: &str, cookie: u64) -> Option<NetworkNamespace> {
        let namespace = self.open_namespace(uid).ok()?;
        match namespace.has_cookie(cookie, &self.config.cookies) {
            Ok(is_it) => is_it.then_some(namespace),
            Err(error) => {
                debug!(uid, error = %common::link::error_chain(&error), "cannot inspect namespace");
                None
            }
        }
    }

    async fn inspect(&mut self, uid: String, cookie: u64) {
        let result = match self.open_namespace(&uid) {
            // A pod without a process in its namespace has no listener.
            Err(MissingNamespace::NoProcess | MissingNamespace::HostNamespace) => {
                Ok(Some(NamespaceSockets::default()))
            }
            // Nothing is known of its listeners now. The tracker asks for another inspection.
            Err(MissingNamespace::NotReady) => return,
            Ok(namespace) => namespace.inspect_sockets(cookie, &self.config.cookies),
        };
        match result {
            Ok(Some(sockets)) => {
                self.send_event(PodTrackerEvent::Inspected(uid, sockets, monotonic_ns())).await
            }
            Ok(None) => self.search(&uid).await,
            Err(error) => {
                warn!(uid, error = %common::link::error_chain(&error), "cannot look for listeners")
            }
        }
    }

    async fn send_event(&self, event: PodTrackerEvent) {
        // A failed send means that the agent is stopping.
        let _ = self.events.send(event).await;
    }
}

/// Reads a file of a process; an empty text if the process has ended, or may not be inspected.
fn read_process_file(pid: u32, file: &str) -> io::Result<String> {
    match fs::read(format!("/proc/{pid}/{file}")) {
        // A command line may be any bytes.
        Ok(text) => Ok(String::from_utf8_lossy(&text).into_owned()),
        Err(error) if is_process_ended(&error) => Ok(String::new()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(String::new()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_a_process_that_cannot_be_read_is_not_taken_for_an_empty_one() {
        let own = std::process::id();
        assert_ne!(read_process_file(own, "comm").expect("readable"), "");
        assert_eq!(read_process_file(u32::MAX, "comm").expect("no such process"), "");
        // No text can be read from a folder.
        assert!(read_process_file(own, "task").is_err());
    }

    #[test]
    fn the_error_of_a_node_without_a_free_inotify_instance_names_the_setting() {
        let error = inotify_error(nix::Error::EMFILE).to_string();
        assert!(error.contains("raise fs.inotify.max_user_instances"), "{error}");
        let other = inotify_error(nix::Error::ENOMEM);
        assert_eq!(other.raw_os_error(), Some(libc::ENOMEM));
    }

    /// Plain files stand in for the cgroup of a pod, whose only process is this one.
    #[tokio::test]
    async fn a_pod_whose_processes_stay_in_the_nodes_namespace_is_reported_and_still_searched() {
        let (root, commands, mut events) = finder("host");
        fs::create_dir_all(root.join("poda")).expect("a folder");
        fs::write(root.join("poda/cgroup.procs"), std::process::id().to_string()).expect("a file");
        commands.send(FinderCommand::Find("a".into())).await.expect("it runs");
        let event = events.recv().await.expect("an event");
        assert!(
            matches!(event, PodTrackerEvent::NamespaceMissing(uid, Incompatibility::HostNetwork) if uid == "a")
        );
        fs::remove_dir_all(root).expect("removed");
    }

    fn root(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("rouse-find-{name}-{}", std::process::id()))
    }

    fn finder(name: &str) -> (PathBuf, Sender<FinderCommand>, Receiver<PodTrackerEvent>) {
        let root = root(name);
        fs::create_dir_all(&root).expect("a folder");
        let (send, events) = mpsc::channel(8);
        let in_force = crate::paths::AgentPaths {
            bpffs: root.clone(),
            clients: root.clone(),
            pods: root.clone(),
            kubelet: None,
            version: 0,
            map_sizes: crate::map_sizes::MapSizes::default(),
        };
        let cookies = NetnsCookies::new(&in_force);
        let config =
            FinderConfig { cgroups: root.clone(), namespaces: None, cookies, pod_servers: None };
        (root, start(config, send).expect("a thread"), events)
    }

    /// A plain directory has no processes: more cannot be shown without root.
    #[tokio::test]
    async fn a_pod_whose_directory_comes_later_is_inspected_as_empty() {
        let (root, commands, mut events) = finder("empty");
        commands.send(FinderCommand::Find("a".into())).await.expect("it runs");
        fs::create_dir(root.join("poda")).expect("a folder");
        commands.send(FinderCommand::Inspect("a".into(), 7)).await.expect("it runs");
        let event = events.recv().await.expect("an event");
        assert!(
            matches!(event, PodTrackerEvent::Inspected(uid, sockets, _) if uid == "a" && sockets.listeners.is_empty())
        );
        fs::remove_dir_all(root).expect("removed");
    }

    #[tokio::test]
    async fn a_pod_whose_processes_cannot_be_inspected_is_not_reported_as_without_listeners() {
        let root = root("unknown");
        for pod in ["poda", "podb", "podc"] {
            fs::create_dir_all(root.join(pod)).expect("a folder");
        }
        // A process that has just ended, and a file that cannot be read.
        fs::write(root.join("poda/cgroup.procs"), u32::MAX.to_string()).expect("a file");
        fs::create_dir(root.join("podb/cgroup.procs")).expect("a folder");
        let (root, commands, mut events) = finder("unknown");
        for uid in ["a", "b", "c"] {
            commands.send(FinderCommand::Inspect(uid.into(), 7)).await.expect("it runs");
        }
        let event = events.recv().await.expect("an event");
        assert!(
            matches!(&event, PodTrackerEvent::Inspected(uid, ..) if uid == "c"),
            "only this one is known to have no process: {event:?}"
        );
        fs::remove_dir_all(root).expect("removed");
    }

    #[tokio::test]
    async fn a_pod_whose_directory_inotify_does_not_report_is_found_all_the_same() {
        let (root, commands, mut events) = finder("unreported");
        let aside = root.with_extension("aside");
        fs::create_dir_all(&aside).expect("a folder");
        fs::write(aside.join("cgroup.procs"), std::process::id().to_string()).expect("a file");
        // After its result, the finder has listed the root.
        commands.send(FinderCommand::Inspect("a".into(), 7)).await.expect("it runs");
        events.recv().await.expect("an event");
        // A move is no creation, and the finder watches creations only.
        fs::rename(aside, root.join("poda")).expect("moved");
        commands.send(FinderCommand::Find("a".into())).await.expect("it runs");
        let event = events.recv().await.expect("an event");
        assert!(matches!(event, PodTrackerEvent::NamespaceMissing(uid, _) if uid == "a"));
        fs::remove_dir_all(root).expect("removed");
    }
}
