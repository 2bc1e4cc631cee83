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
    fs, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
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

use super::namespace::{self, Namespace};
use crate::{
    cgroups::{is_monitor, pod_of},
    clock::monotonic_ns,
    cookies::Cookies,
    door::{Door, Doors, drain::Drains},
    kubepods::children,
    maps::conns::Conns,
    oddities::{self, Oddity},
    pods::{Event, Facts, Sockets},
    sys,
};

/// First wait for a process that has not entered its pod's namespace yet; doubled up to [`LONGEST_WAIT`].
const FIRST_WAIT: Duration = Duration::from_micros(500);
const LONGEST_WAIT: Duration = Duration::from_millis(50);
/// Number of searches, each after a wait, that find a pod's processes in the node's namespace only. A runtime moves
/// them to their own namespace within milliseconds; so many searches take about two seconds.
const STRANGE: u32 = 40;
/// Wait before another search where inotify should report the change anyway.
const PATIENT_WAIT: Duration = Duration::from_secs(1);
/// Depth of pod directories below the root: `kubepods.slice/kubepods-burstable.slice/…-pod<uid>.slice`.
const DEPTH: usize = 3;
/// Capacity of the channel of commands, while the thread is busy.
const COMMANDS: usize = 4_096;

/// Command to the finder.
#[derive(Debug)]
pub enum Command {
    /// Search for this pod, and again whenever its processes change.
    Watch(String),
    /// Stop the search for a pod that is gone.
    Forget(String),
    /// Inspect this pod's namespace for listeners, if it still has this cookie.
    Inspect(String, u64),
    /// Send this pod's namespace, if it exists and still has this cookie.
    Lend(String, u64, oneshot::Sender<Namespace>),
    /// Search again for the pods that were not found: a process has listened in an unknown namespace.
    Hurry,
}

/// Returns a pod's namespace, if the finder behind `finder` finds it and it still has this cookie.
pub async fn borrow(finder: &Sender<Command>, uid: &str, cookie: u64) -> Option<Namespace> {
    let (lend, lent) = oneshot::channel();
    finder.send(Command::Lend(uid.to_owned(), cookie, lend)).await.ok()?;
    lent.await.ok()
}

/// Paths and sources that the finder searches with.
#[derive(Clone, Debug)]
pub struct Places {
    /// Cgroup below which the pods' own cgroups are.
    pub cgroups: PathBuf,
    /// Folder of the pods' network namespaces by uid, if the platform keeps one.
    pub namespaces: Option<PathBuf>,
    /// Source of the cookies of namespaces.
    pub cookies: Cookies,
    /// State that the pod servers answer from; `None`: no pod servers.
    pub answers: Option<Answers>,
}

/// State that the pod servers answer from.
#[derive(Clone, Debug)]
pub struct Answers {
    /// PreStop requests, and the pods that may stop.
    pub drains: Drains,
    /// Storage of the pods' connections.
    pub conns: Conns,
}

/// Starts the thread. It ends when the sender of commands or the receiver of events is dropped.
pub fn start(places: Places, events: Sender<Event>) -> io::Result<Sender<Command>> {
    let (send, receive) = mpsc::channel(COMMANDS);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    thread::Builder::new().name("agent-find".into()).spawn(move || {
        if let Err(error) = runtime.block_on(run(places, events, receive)) {
            warn!(%error, "cannot look for pods");
        }
    })?;
    Ok(send)
}

async fn run(
    places: Places,
    events: Sender<Event>,
    mut commands: Receiver<Command>,
) -> io::Result<()> {
    let mut finder = Finder::new(places, events)?;
    // Inotify cannot watch a root that does not exist, so the root is looked up by a timer.
    let mut look = interval(PATIENT_WAIT);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let next = finder.next_retry();
        let retry = async {
            match next {
                Some(at) => sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            command = commands.recv() => match command {
                Some(command) => finder.obey(command).await,
                None => return Ok(()),
            },
            ready = finder.inotify.readable() => {
                ready?.clear_ready();
                finder.noticed().await?;
            }
            () = retry => finder.retry().await,
            _ = look.tick() => finder.look_at_root().await,
        }
    }
}

/// Adapter: the library's type implements only `AsFd`, and tokio needs `AsRawFd`.
struct Watches(Inotify);

impl AsFd for Watches {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Watches {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

struct Finder {
    places: Places,
    /// Inodes of namespaces that are no pod's: the agent's own and that of process 1.
    foreign: Vec<u64>,
    inotify: AsyncFd<Watches>,
    /// Watched directories that may hold pods.
    trees: HashMap<WatchDescriptor, PathBuf>,
    /// Watched `cgroup.events` of wanted pods.
    pods: HashMap<WatchDescriptor, String>,
    /// Directory of every pod, wanted or not, by uid.
    known: HashMap<String, PathBuf>,
    wanted: HashMap<String, Wanted>,
    /// Inode of the watched root: a root that is created again has none of the watches.
    root: Option<u64>,
    doors: Option<Doors>,
    events: Sender<Event>,
}

struct Wanted {
    found: bool,
    /// Open pod server in the pod's namespace.
    door: Option<Door>,
    watch: Option<WatchDescriptor>,
    retry: Option<Instant>,
    wait: Duration,
    /// Number of successive searches, each after a wait, that found the processes in the node's namespace only.
    strange: u32,
}

impl Wanted {
    fn new() -> Self {
        Self { found: false, door: None, watch: None, retry: None, wait: FIRST_WAIT, strange: 0 }
    }

    /// Returns the wait before another search, after one with this result; `None` if the pod is found. `waited` is true
    /// if a planned wait came before that search.
    fn wait_after(&mut self, found: Result<&Facts, Missing>, waited: bool) -> Option<Duration> {
        self.strange = match found {
            Err(Missing::Strange) => self.strange + u32::from(waited),
            _ => 0,
        };
        match found {
            // A namespace without addresses is found again later: its network is still being set up.
            Ok(facts) if !facts.addresses.is_empty() => None,
            Err(Missing::Strange) if self.strange >= STRANGE => Some(PATIENT_WAIT),
            Ok(_) | Err(Missing::Early | Missing::Strange) => Some(self.wait),
            Err(Missing::Nobody) => Some(PATIENT_WAIT),
        }
    }

    /// Opens the pod server in the pod's namespace, if it is not open yet.
    fn answer_at(&mut self, doors: &Doors, uid: &str, cookie: u64, namespace: &Namespace) {
        if self.door.as_ref().is_some_and(|door| door.cookie == cookie) {
            return;
        }
        self.door = match doors.open(uid, cookie, namespace) {
            Ok(door) => Some(door),
            Err(error) => {
                let error = common::link::chain(&error);
                warn!(
                    uid,
                    error,
                    "nobody will answer in the pod's namespace, nor the kubelet before it stops the pod"
                );
                None
            }
        };
    }
}

/// Reason for which a pod's namespace is not known yet.
#[derive(Clone, Copy)]
enum Missing {
    /// The pod has no directory or no process; inotify reports a change.
    Nobody,
    /// The processes have not moved yet, or the namespace has no address: searched again soon.
    Early,
    /// All processes are in the node's namespace: they move soon, or never.
    Strange,
}

impl Finder {
    fn new(places: Places, events: Sender<Event>) -> io::Result<Self> {
        let own = namespace::inode(Path::new("/proc/thread-self/ns/net"));
        // In a container the agent's namespace may differ from that of process 1; a pod has neither.
        let first = namespace::inode(Path::new("/proc/1/ns/net"));
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        let mut finder = Self {
            places: places.clone(),
            foreign: [own, first].into_iter().flatten().collect(),
            inotify: sys::readable(Watches(inotify))?,
            trees: HashMap::new(),
            pods: HashMap::new(),
            known: HashMap::new(),
            wanted: HashMap::new(),
            root: namespace::inode(&places.cgroups).ok(),
            doors: places.answers.map(|Answers { drains, conns }| Doors {
                drains,
                conns,
                events: events.clone(),
            }),
            events,
        };
        finder.tree(&places.cgroups);
        if let Some(dir) = &places.namespaces {
            finder.watch(dir);
        }
        Ok(finder)
    }

    /// Watches a directory that may hold pods, then lists it: a child that is created in between is seen twice, not
    /// missed.
    fn tree(&mut self, dir: &Path) -> Vec<String> {
        self.watch(dir);
        let mut found = Vec::new();
        for child in children(dir) {
            found.extend(self.directory(child));
        }
        found
    }

    fn is_below(&self, dir: &Path) -> bool {
        dir != self.places.cgroups && dir.starts_with(&self.places.cgroups)
    }

    fn watch(&mut self, dir: &Path) {
        let mask = AddWatchFlags::IN_CREATE | AddWatchFlags::IN_DELETE | AddWatchFlags::IN_ONLYDIR;
        match self.inotify.get_ref().0.add_watch(dir, mask) {
            Ok(watch) => drop(self.trees.insert(watch, dir.to_owned())),
            // Removed before it was seen, as the canary's cgroup often is.
            Err(nix::Error::ENOENT) if self.is_below(dir) => {
                debug!(dir = %dir.display(), "directory of pods has gone")
            }
            Err(error) => warn!(dir = %dir.display(), %error, "cannot watch directory of pods"),
        }
    }

    /// Adds a directory, and returns the pods that came with it.
    fn directory(&mut self, dir: PathBuf) -> Vec<String> {
        if let Some(uid) = dir.file_name().and_then(pod_of) {
            self.known.insert(uid.clone(), dir);
            return vec![uid];
        }
        let depth =
            dir.components().count().saturating_sub(self.places.cgroups.components().count());
        if depth < DEPTH { self.tree(&dir) } else { Vec::new() }
    }

    async fn obey(&mut self, command: Command) {
        match command {
            Command::Watch(uid) => {
                self.wanted.insert(uid.clone(), Wanted::new());
                self.look(&uid).await;
            }
            Command::Forget(uid) => {
                if let Some(doors) = &self.doors {
                    doors.drains.forget(&uid);
                }
                let watch = self.wanted.remove(&uid).and_then(|wanted| wanted.watch);
                if let Some(watch) = watch {
                    self.pods.remove(&watch);
                    // Fails if the directory is gone, and the watch with it.
                    let _ = self.inotify.get_ref().0.rm_watch(watch);
                }
            }
            Command::Inspect(uid, cookie) => self.inspect(uid, cookie).await,
            Command::Lend(uid, cookie, to) => {
                if let Some(namespace) = self.with_cookie(&uid, cookie) {
                    // A failed send means that the requester no longer waits.
                    let _ = to.send(namespace);
                }
            }
            Command::Hurry => {
                let missing: Vec<String> = self.missing(|_| true);
                for uid in missing {
                    self.look(&uid).await;
                }
            }
        }
    }

    /// Watches the root again if it is a new directory: a kubelet that was reset creates its folder again, without the
    /// watches.
    async fn look_at_root(&mut self) {
        let root = namespace::inode(&self.places.cgroups).ok();
        if root.is_none() || root == self.root {
            return;
        }
        info!(cgroup = %self.places.cgroups.display(), "the pods' cgroup was made anew");
        self.root = root;
        // All known paths were below the old root.
        self.known.clear();
        let dir = self.places.cgroups.clone();
        self.tree(&dir);
        let wanted: Vec<String> = self.wanted.keys().cloned().collect();
        for uid in wanted {
            self.look(&uid).await;
        }
    }

    fn missing(&self, which: impl Fn(&Wanted) -> bool) -> Vec<String> {
        let wanted = self.wanted.iter().filter(|(_, wanted)| !wanted.found && which(wanted));
        wanted.map(|(uid, _)| uid.clone()).collect()
    }

    fn next_retry(&self) -> Option<Instant> {
        self.wanted.values().filter_map(|wanted| wanted.retry).min()
    }

    async fn retry(&mut self) {
        let now = Instant::now();
        for uid in self.missing(|wanted| wanted.retry.is_some_and(|at| at <= now)) {
            self.look_after(&uid, true).await;
        }
    }

    /// Reads and handles the events of inotify.
    async fn noticed(&mut self) -> io::Result<()> {
        loop {
            let events = match self.inotify.get_ref().0.read_events() {
                Ok(events) => events,
                Err(nix::Error::EAGAIN) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            for event in events {
                self.notice(event).await;
            }
        }
    }

    async fn notice(&mut self, event: InotifyEvent) {
        // After an overflow events are lost: list everything, and search for all that is missing.
        if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
            let root = self.places.cgroups.clone();
            self.tree(&root);
            return self.obey(Command::Hurry).await;
        }
        if let Some(uid) = self.pods.get(&event.wd).cloned() {
            if event.mask.contains(AddWatchFlags::IN_IGNORED) {
                self.pods.remove(&event.wd);
            } else {
                self.look(&uid).await;
            }
            return;
        }
        let (Some(dir), Some(name)) = (self.trees.get(&event.wd).cloned(), event.name) else {
            if event.mask.contains(AddWatchFlags::IN_IGNORED) {
                self.trees.remove(&event.wd);
            }
            return;
        };
        // A file, and no directory: the folder of namespaces has such names, one for each pod's uid.
        if !event.mask.contains(AddWatchFlags::IN_ISDIR) {
            return self.named(&name.to_string_lossy()).await;
        }
        if event.mask.contains(AddWatchFlags::IN_DELETE) {
            if let Some(uid) = pod_of(&name) {
                self.emptied(uid).await;
            }
            return;
        }
        for uid in self.directory(dir.join(name)) {
            if self.wanted.contains_key(&uid) {
                self.look(&uid).await;
            }
        }
    }

    /// Handles the removal of a pod's directory, which implies the end of its last process.
    async fn emptied(&mut self, uid: String) {
        self.known.remove(&uid);
        if let Some(wanted) = self.wanted.get_mut(&uid) {
            wanted.door = None;
            self.tell(Event::Emptied(uid)).await;
        }
    }

    /// Handles a namespace's name that was created or removed.
    async fn named(&mut self, uid: &str) {
        if self.wanted.get(uid).is_some_and(|wanted| !wanted.found) {
            self.look(uid).await;
        }
    }

    /// Searches for a wanted pod's namespace, and sends the result or plans another search.
    async fn look(&mut self, uid: &str) {
        self.look_after(uid, false).await;
    }

    /// Searches for a pod's namespace; `waited` is true if a planned wait came before.
    async fn look_after(&mut self, uid: &str, waited: bool) {
        // Watched before the search: a process that comes after the search is reported by inotify.
        self.watch_processes(uid);
        let namespace = self.namespace(uid);
        let result = match &namespace {
            Err(missing) => Err(*missing),
            Ok(namespace) => match namespace.facts(&self.places.cookies) {
                Ok(facts) => Ok(Facts { oddity: self.sandbox(uid).or(facts.oddity), ..facts }),
                Err(error) => {
                    debug!(uid, error = %common::link::chain(&error), "namespace gave no answer");
                    Err(Missing::Early)
                }
            },
        };
        let Some(wanted) = self.wanted.get_mut(uid) else { return };
        let wait = wanted.wait_after(result.as_ref().map_err(|missing| *missing), waited);
        wanted.retry = wait.map(|wait| Instant::now() + wait);
        wanted.found = wait.is_none();
        wanted.wait = if wanted.found { FIRST_WAIT } else { (wanted.wait * 2).min(LONGEST_WAIT) };
        // Without processes the namespace may end; an open pod server would keep its interfaces alive.
        if let Err(Missing::Nobody) = result {
            wanted.door = None;
        }
        if waited && wanted.strange == STRANGE {
            info!(uid, "all processes of the pod are in the node's network namespace");
            return self.tell(Event::Unfindable(uid.to_owned(), Oddity::HostNetwork)).await;
        }
        if let (Ok(facts), Ok(namespace)) = (result, namespace) {
            if let Some(doors) = &self.doors {
                wanted.answer_at(doors, uid, facts.cookie, &namespace);
            }
            if wanted.found {
                info!(uid, cookie = facts.cookie, addresses = ?facts.addresses, "pod found");
            }
            self.tell(Event::Found(uid.to_owned(), facts)).await;
        }
    }

    /// Returns the incompatible sandbox that a pod's processes run in.
    fn sandbox(&self, uid: &str) -> Option<Oddity> {
        let read = |pid: u32, file: &str| {
            fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default()
        };
        processes(self.known.get(uid)?).into_iter().find_map(|pid| {
            let command = read(pid, "cmdline");
            oddities::sandbox(read(pid, "comm").trim_end(), command.split('\0').next()?)
        })
    }

    /// Watches `cgroup.events`, by which inotify reports the pod's first process and the end of its last.
    fn watch_processes(&mut self, uid: &str) {
        let (Some(dir), Some(wanted)) = (self.known.get(uid), self.wanted.get_mut(uid)) else {
            return;
        };
        let file = dir.join("cgroup.events");
        // The kernel returns the same descriptor for a file that is watched already.
        if let Ok(watch) = self.inotify.get_ref().0.add_watch(&file, AddWatchFlags::IN_MODIFY) {
            wanted.watch = Some(watch);
            self.pods.insert(watch, uid.to_owned());
        }
    }

    fn namespace(&self, uid: &str) -> Result<Namespace, Missing> {
        let mut missing = Missing::Nobody;
        if let Some(path) = self.places.namespaces.as_ref().map(|dir| dir.join(uid)) {
            if namespace::is_mounted(&path) {
                return Namespace::open(path).map_err(|_gone| Missing::Early);
            }
            // The name exists a moment before the namespace is mounted there.
            if path.exists() {
                missing = Missing::Early;
            }
        }
        let Some(dir) = self.known.get(uid) else { return Err(missing) };
        for pid in processes(dir) {
            let path = PathBuf::from(format!("/proc/{pid}/ns/net"));
            match namespace::inode(&path) {
                Ok(inode) if !self.foreign.contains(&inode) => {
                    return Namespace::open(path).map_err(|_gone| Missing::Early);
                }
                Ok(_) if !matches!(missing, Missing::Early) => missing = Missing::Strange,
                // The process has just ended, or may not be inspected.
                Ok(_) | Err(_) => missing = Missing::Early,
            }
        }
        Err(missing)
    }

    /// Returns the pod's namespace, if it still has this cookie.
    fn with_cookie(&self, uid: &str, cookie: u64) -> Option<Namespace> {
        let namespace = self.namespace(uid).ok()?;
        match namespace.is(cookie, &self.places.cookies) {
            Ok(is_it) => is_it.then_some(namespace),
            Err(error) => {
                debug!(uid, error = %common::link::chain(&error), "namespace gave no answer");
                None
            }
        }
    }

    async fn inspect(&mut self, uid: String, cookie: u64) {
        let seen = match self.namespace(&uid) {
            // A pod without a process has no listener.
            Err(_) => Ok(Some(Sockets::default())),
            Ok(namespace) => namespace.sockets(cookie, &self.places.cookies),
        };
        match seen {
            Ok(Some(sockets)) => self.tell(Event::Inspected(uid, sockets, monotonic_ns())).await,
            Ok(None) => self.look(&uid).await,
            Err(error) => {
                warn!(uid, error = %common::link::chain(&error), "cannot look for listeners")
            }
        }
    }

    async fn tell(&self, event: Event) {
        // A failed send means that the agent is stopping.
        let _ = self.events.send(event).await;
    }
}

/// Returns every process in the cgroup `dir` and below.
pub(crate) fn processes(dir: &Path) -> Vec<u32> {
    let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    // Processes of another pid namespace are listed as 0.
    let own = text.lines().filter_map(|line| line.parse().ok()).filter(|&pid| pid != 0);
    let mut found: Vec<u32> = own.collect();
    for child in children(dir) {
        if !child.file_name().is_some_and(is_monitor) {
            found.extend(processes(&child));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plain files stand in for the cgroup of a pod, whose only process is this one.
    #[tokio::test]
    async fn a_pod_whose_processes_stay_in_the_nodes_namespace_is_said_to_and_still_looked_for() {
        let (root, commands, mut events) = finder("host");
        fs::create_dir_all(root.join("poda")).expect("a folder");
        fs::write(root.join("poda/cgroup.procs"), std::process::id().to_string()).expect("a file");
        commands.send(Command::Watch("a".into())).await.expect("it runs");
        let event = events.recv().await.expect("an answer");
        assert!(matches!(event, Event::Unfindable(uid, Oddity::HostNetwork) if uid == "a"));
        fs::remove_dir_all(root).expect("removed");
    }

    #[test]
    fn a_pod_in_the_nodes_namespace_is_looked_for_less_and_less_often() {
        let mut wanted = Wanted::new();
        let strange = Err(Missing::Strange);
        let early = (1..STRANGE).map(|_| wanted.wait_after(strange, true)).collect::<Vec<_>>();
        assert!(early.iter().all(|wait| *wait == Some(FIRST_WAIT)));
        assert_eq!(wanted.wait_after(strange, false), Some(FIRST_WAIT), "nobody has waited");
        assert_eq!(wanted.wait_after(strange, true), Some(PATIENT_WAIT));
        assert_eq!(wanted.wait_after(Err(Missing::Early), true), Some(FIRST_WAIT));
        assert_eq!(wanted.strange, 0);
    }

    fn finder(name: &str) -> (PathBuf, Sender<Command>, Receiver<Event>) {
        let root = std::env::temp_dir().join(format!("rouse-find-{name}-{}", std::process::id()));
        fs::create_dir_all(&root).expect("a folder");
        let (send, events) = mpsc::channel(8);
        let in_force = crate::programs::Places {
            bpffs: root.clone(),
            clients: root.clone(),
            pods: root.clone(),
            kubelet: None,
            version: 0,
        };
        let cookies = Cookies::new(&in_force);
        let places = Places { cgroups: root.clone(), namespaces: None, cookies, answers: None };
        (root, start(places, send).expect("a thread"), events)
    }

    /// A plain directory has no processes: more cannot be shown without root.
    #[tokio::test]
    async fn a_pod_whose_directory_comes_later_is_inspected_as_empty() {
        let (root, commands, mut events) = finder("empty");
        commands.send(Command::Watch("a".into())).await.expect("it runs");
        fs::create_dir(root.join("poda")).expect("a folder");
        commands.send(Command::Inspect("a".into(), 7)).await.expect("it runs");
        let event = events.recv().await.expect("an answer");
        assert!(
            matches!(event, Event::Inspected(uid, sockets, _) if uid == "a" && sockets.listeners.is_empty())
        );
        fs::remove_dir_all(root).expect("removed");
    }
}
