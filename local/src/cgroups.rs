//! Shell: cgroups, on hybrid (v1 and v2) and on unified (v2) machines.
//!
//! A container's identity is always its v2 cgroup (`rouse-NAME/pods/pod<uid>/<container>`). A limit is written where
//! its controller is: in the same directory, or on a hybrid machine in that controller's v1 hierarchy. The OCI runtime
//! gets no cgroup settings: crun would refuse hybrid machines, and runc would move the process, at the cost of an RCU
//! grace period.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use thiserror::Error;
use tracing::warn;

use crate::layout::NodeLayout;

/// Controllers that limits of containers need.
const CONTROLLERS: [&str; 2] = ["cpu", "memory"];

/// Time that killed processes of a node have to disappear.
const NODE_EMPTY_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that processes of a container have to disappear before its next start, which is tried in any case.
const CONTAINER_EMPTY_TIMEOUT: Duration = Duration::from_millis(200);

/// Failed operation on a cgroup, with its file.
#[derive(Debug, Error)]
pub enum CgroupError {
    /// No cgroup2 file system is mounted.
    #[error(
        "no cgroup2 file system is mounted: mount one at /sys/fs/cgroup (or /sys/fs/cgroup/unified)"
    )]
    Cgroup2NotMounted,
    /// A file or directory could not be written, made or read.
    #[error("cannot access cgroup file {path}")]
    File {
        /// Path of the file or directory.
        path: PathBuf,
        /// Error of the operation.
        #[source]
        source: io::Error,
    },
    /// Processes stay in a cgroup after SIGKILL, for instance in a system call that waits for a disk.
    #[error(
        "cgroup {path} still has the processes {pids:?}: run `rouse down` again once they have ended"
    )]
    Busy {
        /// Path of the cgroup.
        path: PathBuf,
        /// Pids of the processes.
        pids: Vec<i32>,
    },
    /// A limit is set, and no hierarchy has the controller to enforce it.
    #[error("no {0} controller is available for the container's limits")]
    NoController(&'static str),
}

/// Limits of one container; `None` means that there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContainerLimits {
    /// Most memory that it may use, in bytes.
    pub memory: Option<u64>,
    /// CPU time limit, in thousandths of a CPU.
    pub cpu_milli: Option<u64>,
    /// Weight under contention, as v1 `cpu.shares` (1024 is one CPU).
    pub cpu_shares: Option<u64>,
}

impl ContainerLimits {
    fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// Mount points of the cgroup hierarchies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupMounts {
    /// Mount point of the cgroup2 file system.
    pub v2: PathBuf,
    /// Mount points of v1 hierarchies, by controller.
    pub v1: BTreeMap<String, PathBuf>,
}

impl CgroupMounts {
    /// Finds the hierarchies among this process's mounts.
    pub fn find() -> Result<Self, CgroupError> {
        let path = PathBuf::from("/proc/self/mountinfo");
        let text =
            fs::read_to_string(&path).map_err(|source| CgroupError::File { path, source })?;
        Self::parse_mountinfo(&text).ok_or(CgroupError::Cgroup2NotMounted)
    }

    /// Parses the text of a `mountinfo` file (proc(5)); `None` without cgroup2.
    fn parse_mountinfo(text: &str) -> Option<Self> {
        let mut v2 = None;
        let mut v1 = BTreeMap::new();
        for line in text.lines() {
            // Fields before the separator: ID, parent, device, root, mount point. After it: type, source, options.
            let Some((fields, filesystem_fields)) = line.split_once(" - ") else { continue };
            let Some(path) = fields.split(' ').nth(4) else { continue };
            let mut filesystem_fields = filesystem_fields.split(' ');
            match (filesystem_fields.next(), filesystem_fields.nth(1)) {
                (Some("cgroup2"), _) => v2 = v2.or_else(|| Some(PathBuf::from(path))),
                (Some("cgroup"), Some(options)) => {
                    let controllers = options.split(',').filter(|name| CONTROLLERS.contains(name));
                    v1.extend(controllers.map(|name| (name.to_owned(), PathBuf::from(path))));
                }
                _ => {}
            }
        }
        Some(Self { v2: v2?, v1 })
    }

    /// Creates the node's cgroups and enables the controllers below. Repeating it changes nothing.
    pub fn create_node_cgroups(&self, layout: &NodeLayout) -> Result<(), CgroupError> {
        let (pods, clients) = (layout.pods_cgroup(&self.v2), layout.clients_cgroup(&self.v2));
        for path in [pods, clients, layout.runtime_cgroup(&self.v2)] {
            create_cgroup(&path)?;
        }
        self.enable_controllers(&self.v2)?;
        self.enable_controllers(&layout.cgroup(&self.v2))?;
        self.enable_controllers(&layout.pods_cgroup(&self.v2))
    }

    /// Enables the controllers that `path` has for its children.
    fn enable_controllers(&self, path: &Path) -> Result<(), CgroupError> {
        let available = fs::read_to_string(path.join("cgroup.controllers")).unwrap_or_default();
        let controllers =
            CONTROLLERS.iter().filter(|name| available.split_whitespace().any(|one| one == **name));
        controllers.into_iter().try_for_each(|name| {
            write_file(&path.join("cgroup.subtree_control"), &format!("+{name}"))
        })
    }

    /// Creates a container's cgroup with its limits, again if an earlier start of the container left one.
    pub fn create_container(
        &self,
        layout: &NodeLayout,
        uid: &str,
        container: &str,
        limits: ContainerLimits,
    ) -> Result<ContainerCgroup, CgroupError> {
        let path = layout.container_cgroup(&self.v2, uid, container);
        create_cgroup(&layout.pod_cgroup(&self.v2, uid))?;
        // Only containers with limits need controllers.
        if !limits.is_none() {
            self.enable_controllers(&layout.pod_cgroup(&self.v2, uid))?;
        }
        remove_old_cgroup(&path);
        create_cgroup(&path)?;
        let mut tasks = Vec::new();
        for (controller, settings) in controller_settings(limits) {
            let Some(settings) = settings else { continue };
            // A controller is bound either to v1 or to v2, never to both.
            if let Some(mount) = self.v1.get(controller) {
                let path = layout.container_cgroup(mount, uid, container);
                create_cgroup(&path)?;
                write_files(&path, &settings.v1)?;
                tasks.push(open_tasks(&path.join("tasks"))?);
            } else if path.join(format!("{controller}.max")).exists() {
                write_files(&path, &settings.v2)?;
            } else {
                return Err(CgroupError::NoController(controller));
            }
        }
        let dir = File::open(&path).map_err(|source| CgroupError::File { path, source })?;
        Ok(ContainerCgroup { dir: dir.into(), tasks })
    }

    /// Opens the cgroup of a running container.
    pub fn open_container(
        &self,
        layout: &NodeLayout,
        uid: &str,
        container: &str,
    ) -> Result<ContainerCgroup, CgroupError> {
        let path = layout.container_cgroup(&self.v2, uid, container);
        let limited = self.v1.values().map(|mount| layout.container_cgroup(mount, uid, container));
        let limited = limited.filter(|path| path.exists());
        let tasks =
            limited.map(|path| open_tasks(&path.join("tasks"))).collect::<Result<_, _>>()?;
        let dir = File::open(&path).map_err(|source| CgroupError::File { path, source })?;
        Ok(ContainerCgroup { dir: dir.into(), tasks })
    }

    /// Returns every directory of this node's cgroup, v1 hierarchies included.
    fn node_cgroups(&self, layout: &NodeLayout) -> impl Iterator<Item = PathBuf> {
        let mounts = std::iter::once(&self.v2).chain(self.v1.values());
        mounts.map(|mount| layout.cgroup(mount)).collect::<Vec<_>>().into_iter()
    }

    /// Kills every process of a pod's container.
    pub fn kill_container(&self, layout: &NodeLayout, uid: &str, container: &str) {
        kill_tree(&layout.container_cgroup(&self.v2, uid, container));
    }

    /// Returns the number of processes that the kernel killed in this container for lack of memory.
    ///
    /// On a hybrid machine the number includes those of earlier runs: the v1 cgroup stays until the pod is removed.
    pub fn oom_kills(&self, layout: &NodeLayout, uid: &str, container: &str) -> u64 {
        let v2 = layout.container_cgroup(&self.v2, uid, container).join("memory.events");
        let v1 = self
            .v1
            .get("memory")
            .map(|mount| layout.container_cgroup(mount, uid, container).join("memory.oom_control"));
        let text = fs::read_to_string(v1.unwrap_or(v2)).unwrap_or_default();
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
    }

    /// Removes a pod's cgroups, whose containers must have ended. Other processes in them are killed.
    pub fn remove_pod(&self, layout: &NodeLayout, uid: &str) {
        let mounts = std::iter::once(&self.v2).chain(self.v1.values());
        for path in mounts.map(|mount| layout.pod_cgroup(mount, uid)) {
            if remove_tree(&path) {
                continue;
            }
            // The runtime's process of a command that was interrupted may end later than the container.
            kill_tree(&path);
            wait_until_empty(&path, CONTAINER_EMPTY_TIMEOUT);
            if !remove_tree(&path) {
                warn!(path = %path.display(), pids = ?process_ids(&path), "cgroup left behind");
            }
        }
    }

    /// Kills every process of the node's pods and clients, waits for their end, and removes the node's cgroups.
    pub fn remove_node_cgroups(&self, layout: &NodeLayout) -> Result<(), CgroupError> {
        let mut is_repeated = false;
        loop {
            kill_tree(&layout.cgroup(&self.v2));
            wait_until_empty(&layout.cgroup(&self.v2), NODE_EMPTY_TIMEOUT);
            let busy = self.node_cgroups(layout).find(|path| !remove_tree(path));
            let Some(path) = busy else { return Ok(()) };
            if is_repeated {
                return Err(CgroupError::Busy { pids: process_ids(&path), path });
            }
            // A client may have joined the node after the others were killed.
            is_repeated = true;
        }
    }
}

/// A container's cgroup, open for a process to be created in it.
#[derive(Debug)]
pub struct ContainerCgroup {
    /// Directory in the v2 hierarchy.
    pub dir: OwnedFd,
    /// Open `tasks` files of the v1 groups that carry limits.
    pub tasks: Vec<OwnedFd>,
}

/// Files to write for one controller, with their content, in either version.
struct CgroupSettings {
    v1: Vec<(&'static str, String)>,
    v2: Vec<(&'static str, String)>,
}

/// Returns the files to write, by controller; `None` without a limit.
fn controller_settings(limits: ContainerLimits) -> [(&'static str, Option<CgroupSettings>); 2] {
    let memory = limits.memory.map(|bytes| CgroupSettings {
        v1: vec![("memory.limit_in_bytes", bytes.to_string())],
        v2: vec![("memory.max", bytes.to_string())],
    });
    // The period is 100 ms, the kubelet's default. The quota is at least 1 ms, the kernel's minimum.
    let quota = limits.cpu_milli.map(|milli| milli.saturating_mul(100).max(1000));
    let mut cpu = CgroupSettings { v1: Vec::new(), v2: Vec::new() };
    if let Some(quota) = quota {
        cpu.v1.push(("cpu.cfs_period_us", "100000".to_owned()));
        cpu.v1.push(("cpu.cfs_quota_us", quota.to_string()));
        cpu.v2.push(("cpu.max", format!("{quota} 100000")));
    }
    if let Some(shares) = limits.cpu_shares {
        let shares = shares.clamp(2, 262_144);
        cpu.v1.push(("cpu.shares", shares.to_string()));
        // The kubelet's conversion of [2, 262144] to [1, 10000].
        cpu.v2.push(("cpu.weight", (1 + (shares - 2) * 9999 / 262_142).to_string()));
    }
    let cpu = (!cpu.v1.is_empty()).then_some(cpu);
    [("memory", memory), ("cpu", cpu)]
}

fn create_cgroup(path: &Path) -> Result<(), CgroupError> {
    fs::create_dir_all(path).map_err(|source| CgroupError::File { path: path.to_owned(), source })
}

fn write_file(path: &Path, text: &str) -> Result<(), CgroupError> {
    fs::write(path, text).map_err(|source| CgroupError::File { path: path.to_owned(), source })
}

fn write_files(path: &Path, files: &[(&str, String)]) -> Result<(), CgroupError> {
    files.iter().try_for_each(|(file, text)| write_file(&path.join(file), text))
}

fn open_tasks(path: &Path) -> Result<OwnedFd, CgroupError> {
    let opened = OpenOptions::new().write(true).open(path);
    opened.map(OwnedFd::from).map_err(|source| CgroupError::File { path: path.to_owned(), source })
}

/// Sends SIGKILL to every process at and below a cgroup: at once with `cgroup.kill` (5.14), else one by one.
fn kill_tree(path: &Path) {
    if fs::write(path.join("cgroup.kill"), "1").is_ok() {
        return;
    }
    let procs = fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default();
    for pid in parse_procs(&procs) {
        let pid = nix::unistd::Pid::from_raw(pid);
        // An error means that the process has ended meanwhile.
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
    }
    for child in directories(path) {
        kill_tree(&child);
    }
}

/// Waits until no process is left at or below a v2 cgroup; poll(2) on `cgroup.events` reports each change.
fn wait_until_empty(path: &Path, limit: Duration) {
    let Ok(mut events) = File::open(path.join("cgroup.events")) else { return };
    let deadline = Instant::now() + limit;
    loop {
        let mut text = String::new();
        let read = events.rewind().and_then(|()| events.read_to_string(&mut text));
        let remaining = deadline.saturating_duration_since(Instant::now());
        if read.is_err() || text.contains("populated 0") || remaining.is_zero() {
            return;
        }
        let mut fds = [PollFd::new(events.as_fd(), PollFlags::POLLPRI)];
        // A signal only makes the loop check once more.
        let _ = poll(&mut fds, PollTimeout::try_from(remaining).unwrap_or(PollTimeout::MAX));
    }
}

/// Removes an earlier cgroup of a container, once its processes are gone.
///
/// A cgroup in which `cgroup.kill` was ever written kills each process born into it by `CLONE_INTO_CGROUP`, at once and
/// forever. Seen on Linux 6.18: the child's kill count is copied from its parent's group and compared with that of the
/// new group.
fn remove_old_cgroup(path: &Path) {
    if path.exists() && !remove_tree(path) {
        wait_until_empty(path, CONTAINER_EMPTY_TIMEOUT);
        remove_tree(path);
    }
}

/// Removes a cgroup and those below it; returns false if one is busy.
fn remove_tree(path: &Path) -> bool {
    let children = directories(path).into_iter().all(|child| remove_tree(&child));
    match fs::remove_dir(path) {
        Ok(()) => children,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

/// Returns the pids of all processes at and below a cgroup.
fn process_ids(path: &Path) -> Vec<i32> {
    let procs = fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default();
    let below = directories(path);
    parse_procs(&procs).chain(below.iter().flat_map(|child| process_ids(child))).collect()
}

/// Parses the text of a `cgroup.procs`. A process that this pid namespace does not see is listed as 0, which kill(2)
/// would take for the process group of the caller.
fn parse_procs(text: &str) -> impl Iterator<Item = i32> {
    text.lines().filter_map(|line| line.parse::<i32>().ok()).filter(|&pid| pid > 0)
}

/// Returns true if a process is in a cgroup of the node, by the text of its `/proc/PID/cgroup`.
pub fn is_in_node(text: &str, layout: &NodeLayout) -> bool {
    let path = text.lines().find_map(|line| line.strip_prefix("0::"));
    path.is_some_and(|path| Path::new(path).starts_with(layout.cgroup(Path::new("/"))))
}

/// Returns the child directories of a cgroup.
fn directories(path: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(path) else { return Vec::new() };
    let entries =
        entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    entries.map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_both_generations_on_a_hybrid_machine() {
        let text = "31 25 0:27 / /sys/fs/cgroup/cpu rw shared:4 - cgroup cgroup rw,cpu,cpuacct\n\
                    32 25 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                    33 25 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let mounts = CgroupMounts::parse_mountinfo(text).unwrap();
        assert_eq!(mounts.v2, Path::new("/sys/fs/cgroup/unified"));
        assert_eq!(mounts.v1.keys().collect::<Vec<_>>(), ["cpu", "memory"]);
    }

    #[test]
    fn without_cgroup2_there_is_no_node() {
        assert_eq!(CgroupMounts::parse_mountinfo("31 25 0:27 / /sys rw - sysfs sysfs rw\n"), None);
    }

    #[test]
    fn a_process_of_another_pid_namespace_has_no_pid_to_kill() {
        assert_eq!(parse_procs("12\n0\n7\n").collect::<Vec<_>>(), [12, 7]);
    }

    #[test]
    fn only_processes_below_the_cgroup_of_a_node_are_in_it() {
        let layout = NodeLayout::new("a").unwrap();
        for (text, expected) in [
            ("3:cpu:/x\n0::/rouse-a/clients\n", true),
            ("0::/rouse-a\n", true),
            ("0::/rouse-a-b/clients\n", false),
            ("3:cpu:/rouse-a/clients\n0::/\n", false),
            ("", false),
        ] {
            assert_eq!(is_in_node(text, &layout), expected, "{text:?}");
        }
    }

    #[test]
    fn limits_become_quota_and_weight() {
        let limits =
            ContainerLimits { memory: Some(1 << 20), cpu_milli: Some(500), cpu_shares: Some(1024) };
        let [(_, memory), (_, cpu)] = controller_settings(limits);
        assert_eq!(memory.unwrap().v2, [("memory.max", "1048576".to_owned())]);
        let cpu = cpu.unwrap().v2;
        assert_eq!(cpu, [("cpu.max", "50000 100000".to_owned()), ("cpu.weight", "39".to_owned())]);
    }
}
