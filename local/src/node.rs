//! Shell: the local node itself: created once, found again, and removed completely.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use thiserror::Error;
use tracing::{info, warn};

use crate::cgroups::{CgroupError, CgroupMounts, is_in_node};
use crate::dns;
use crate::layout::{self, NodeLayout};
use crate::net::{self, NetError};
use crate::process::{self, ProcessId};
use crate::sys;

/// Time that a process of the node has to end after SIGTERM before it is killed. Removing the files of ten thousand
/// services that have reached the disk takes 6 s.
const TERMINATION_TIMEOUT: Duration = Duration::from_secs(60);

/// Mode of a node's run folder. Other users can pass through it, but not open it: their lock would stop `rouse down`.
const RUN_FOLDER_MODE: u32 = 0o711;
/// Attempts to make a folder whose parents other processes remove.
const FOLDER_ATTEMPTS_MAX: usize = 1_000;

/// Reason that a node could not be created or removed.
#[derive(Debug, Error)]
pub enum NodeError {
    /// The node's cgroups could not be set up or removed.
    #[error("cannot {attempt} the cgroups of node {name}")]
    Cgroup {
        /// Operation that failed, as a verb phrase.
        attempt: &'static str,
        /// Name of the node.
        name: String,
        /// Error of the cgroups.
        #[source]
        source: CgroupError,
    },
    /// The node's network could not be set up or entered.
    #[error("cannot set up the network of node {name}")]
    Net {
        /// Name of the node.
        name: String,
        /// Error of the network.
        #[source]
        source: NetError,
    },
    /// A file, folder or mount of the node failed.
    #[error("cannot {attempt} {path}")]
    File {
        /// Operation that failed, as a verb phrase.
        attempt: &'static str,
        /// Path of the file, folder or mount.
        path: PathBuf,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// This process is a client in the node, so the node's removal would kill it half-way.
    #[error("this process runs in node {name} and would be killed with it: leave `rouse run`")]
    Inside {
        /// Name of the node.
        name: String,
    },
    /// The same component already runs in another process.
    #[error(
        "{component} of node {name} already runs as process {pid}: stop it, or run `rouse --node {name} down`"
    )]
    Running {
        /// Name of the node.
        name: String,
        /// Name of the component, or `node` for a process that runs all of them.
        component: String,
        /// Pid of the process that runs it.
        pid: i32,
    },
}

/// Returns a closure that wraps an I/O error with the operation and its path.
fn file_error(attempt: &'static str, path: &Path) -> impl FnOnce(io::Error) -> NodeError {
    let path = path.to_owned();
    move |source| NodeError::File { attempt, path, source }
}

/// Returns a closure that wraps a cgroup error with the operation and the node's name.
fn cgroup_error(
    attempt: &'static str,
    layout: &NodeLayout,
) -> impl Fn(CgroupError) -> NodeError + Copy {
    move |source| NodeError::Cgroup { attempt, name: layout.name().to_owned(), source }
}

/// Operations on a node as a whole; it holds no state.
#[derive(Debug)]
pub struct NodeManager;

/// Lock of a node: while it lives, no other process creates, joins or removes the node.
#[derive(Debug)]
pub struct NodeLock(#[allow(dead_code, reason = "held, never read")] Flock<File>);

impl NodeManager {
    /// Waits until no other process creates, joins or removes the node: components may start at the same moment.
    pub fn lock(layout: &NodeLayout) -> Result<NodeLock, NodeError> {
        let path = layout.run_folder();
        loop {
            make_folder_with_mode(&path, RUN_FOLDER_MODE)
                .map_err(file_error("make folder", &path))?;
            // `None` means that another process removed the folder meanwhile, so it is made again.
            if let Some(lock) = lock_folder(&path)? {
                return Ok(lock);
            }
        }
    }

    /// Releases a lock under which no node was made, with the folder that [`NodeManager::lock`] may have made for it.
    pub fn discard_lock(layout: &NodeLayout, lock: NodeLock) {
        // Fails if there is a node. The lock keeps another process from making one meanwhile.
        let _ = fs::remove_dir(layout.run_folder());
        drop(lock);
    }

    /// Creates the missing things of a node: folders, bpffs, cgroups, namespaces. Repeating it changes nothing.
    ///
    /// Blocks; call it before a runtime starts, in the host's namespaces, and hold a [`NodeLock`] if others may do so
    /// too.
    pub fn create(layout: &NodeLayout) -> Result<(), NodeError> {
        for path in [
            layout.bpf(),
            layout.namespaces(),
            layout.processes(),
            layout.pods(),
            layout.runtime(),
            layout.pods_data(),
            layout.manifests(),
            layout.objects(),
            layout.images(),
            layout.logs(),
        ] {
            make_folder(&path).map_err(file_error("make folder", &path))?;
        }
        // Images have programs with the set-user-ID bit, volumes are open to each user of a pod, and bundles have
        // environments with passwords. Other users of the machine must not reach them.
        let private = [layout.images(), layout.pods_data(), layout.pods(), layout.runtime()];
        let private = private.into_iter().map(|path| (path, 0o700));
        for (path, mode) in private.chain([(layout.run_folder(), RUN_FOLDER_MODE)]) {
            let rights = fs::set_permissions(&path, Permissions::from_mode(mode));
            rights.map_err(file_error("restrict folder", &path))?;
        }
        mount_bpffs(&layout.bpf())?;
        let cgroup = cgroup_error("set up", layout);
        CgroupMounts::find().map_err(cgroup)?.create_node_cgroups(layout).map_err(cgroup)?;
        write_resolv_conf(&layout.resolv_conf())?;
        net::create_node_namespaces(&layout.node_namespace(), &layout.client_namespace())
            .map_err(|source| NodeError::Net { name: layout.name().to_owned(), source })?;
        info!(node = layout.name(), "node ready");
        Ok(())
    }

    /// Moves the calling thread, and those it starts later, into the node's network namespace.
    pub fn enter(layout: &NodeLayout) -> Result<(), NodeError> {
        let entered = net::open_namespace(&layout.node_namespace())
            .and_then(|fd| net::enter_namespace(fd.as_fd()));
        entered.map_err(|source| NodeError::Net { name: layout.name().to_owned(), source })
    }

    /// Records this process as `component` of the node, so that `destroy` ends it; fails while another runs it.
    pub fn register_component(layout: &NodeLayout, component: &str) -> Result<(), NodeError> {
        let path = layout.processes().join(component);
        let process = ProcessId::current();
        let other = process::recorded_process(&path)
            .filter(|other| Some(*other) != process && other.is_alive());
        if let Some(other) = other {
            let (name, component) = (layout.name().to_owned(), component.to_owned());
            return Err(NodeError::Running { name, component, pid: other.pid });
        }
        let process = process.ok_or_else(|| io::Error::other("/proc is not mounted"));
        process
            .and_then(|process| process::record_process(&path, process))
            .map_err(file_error("record the process in", &path))
    }

    /// Returns the components recorded by [`NodeManager::register_component`] that still run.
    pub fn running_components(layout: &NodeLayout) -> Vec<(String, ProcessId)> {
        let Ok(entries) = fs::read_dir(layout.processes()) else { return Vec::new() };
        let components = entries.flatten().filter_map(|entry| {
            let process = process::recorded_process(&entry.path())?;
            process.is_alive().then(|| (entry.file_name().to_string_lossy().into_owned(), process))
        });
        components.collect()
    }

    /// Returns an error if this process is in a cgroup of the node, all of whose processes the node's removal kills.
    fn check_outside(layout: &NodeLayout) -> Result<(), NodeError> {
        let path = Path::new("/proc/self/cgroup");
        let text = fs::read_to_string(path).map_err(file_error("read", path))?;
        if is_in_node(&text, layout) {
            return Err(NodeError::Inside { name: layout.name().to_owned() });
        }
        Ok(())
    }

    /// Ends the node's other processes, kills pods and clients, and removes everything but manifests, images and logs.
    ///
    /// It works as well after a crash, on an incomplete node, or twice. Blocks.
    pub fn destroy(layout: &NodeLayout) -> Result<(), NodeError> {
        Self::remove(layout, NodeRemoval::KeepsManifests)
    }

    /// Removes also what [`NodeManager::destroy`] keeps: manifests, images and logs.
    pub fn purge(layout: &NodeLayout) -> Result<(), NodeError> {
        Self::remove(layout, NodeRemoval::Complete)
    }

    /// Ends the components of a node and removes what the node has left, except what `removal` keeps.
    fn remove(layout: &NodeLayout, removal: NodeRemoval) -> Result<(), NodeError> {
        Self::check_outside(layout)?;
        end_components(layout);
        let _lock = Self::lock(layout)?;
        // Components that started during the wait.
        end_components(layout);
        let cgroup = cgroup_error("remove", layout);
        // Processes first: they hold namespaces and mounts.
        CgroupMounts::find().map_err(cgroup)?.remove_node_cgroups(layout).map_err(cgroup)?;
        if let Ok(entries) = fs::read_dir(layout.namespaces()) {
            entries.flatten().for_each(|entry| net::unpublish(&entry.path()));
        }
        remove_pins_below(&layout.bpf());
        unmount_below(&layout.run_folder());
        unmount_below(&layout.pods_data());
        removal.folders(layout).iter().try_for_each(|path| remove_folder(path))?;
        // These succeed only when this was the last node.
        for folder in [layout.run_folder(), layout.data_folder()] {
            let _ = folder.parent().map(fs::remove_dir);
        }
        info!(node = layout.name(), "node removed");
        Ok(())
    }
}

/// Extent of a node's removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NodeRemoval {
    /// Manifests, images and logs stay.
    KeepsManifests,
    /// Nothing stays.
    Complete,
}

impl NodeRemoval {
    /// Returns the folders to remove, in order. The folder with the lock is the last: once it is gone, another process
    /// can make the node again, and would lose what is removed after it.
    fn folders(self, layout: &NodeLayout) -> Vec<PathBuf> {
        let mut folders = match self {
            Self::KeepsManifests => vec![layout.pods_data(), layout.objects()],
            Self::Complete => vec![layout.data_folder()],
        };
        folders.push(layout.run_folder());
        folders
    }
}

/// Writes the clients' `resolv.conf` in place, and only if it differs.
///
/// Clients may have mounted the file: they would not see another file in its place, and a file that is being replaced
/// cannot be mounted.
fn write_resolv_conf(path: &Path) -> Result<(), NodeError> {
    let names = dns::resolv_conf(layout::DNS_ADDRESS.into(), "default");
    if fs::read_to_string(path).is_ok_and(|existing| existing == names) {
        return Ok(());
    }
    fs::write(path, names).map_err(file_error("write", path))
}

/// Makes a folder with its parents, even if the removal of the last other node takes a parent away meanwhile.
pub fn make_folder(path: &Path) -> io::Result<()> {
    make_folder_with_mode(path, 0o777)
}

/// Makes a folder as [`make_folder`] does. It and the parents that are made get this mode, less the umask.
fn make_folder_with_mode(path: &Path, mode: u32) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(mode);
    let mut made = builder.create(path);
    for _ in 1..FOLDER_ATTEMPTS_MAX {
        // A parent that goes between two steps is missing, or exists and is no folder any more.
        let is_retried = made.as_ref().is_err_and(|error| {
            matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists)
        });
        if !is_retried {
            break;
        }
        made = builder.create(path);
    }
    made
}

/// Removes a folder with all its content; a missing folder is no error.
fn remove_folder(path: &Path) -> Result<(), NodeError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(file_error("remove", path)(error))
        }
        _ => Ok(()),
    }
}

/// Locks a folder; `None` if there is none, for instance because the lock's last holder removed it.
fn lock_folder(path: &Path) -> Result<Option<NodeLock>, NodeError> {
    loop {
        let folder = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            folder => folder.map_err(file_error("open folder", path))?,
        };
        let lock = match Flock::lock(folder, FlockArg::LockExclusive) {
            Err((_, Errno::EINTR)) => continue,
            locked => locked.map_err(|(_, error)| file_error("lock folder", path)(error.into()))?,
        };
        let metadata = lock.metadata().map(|metadata| (metadata.dev(), metadata.ino())).ok();
        let now = fs::metadata(path).map(|now| (now.dev(), now.ino())).ok();
        // A folder that was removed and made again during the wait is another inode.
        if metadata == now {
            return Ok(Some(NodeLock(lock)));
        }
    }
}

/// Returns true if something is mounted exactly at `path`.
fn is_mounted(path: &Path) -> bool {
    mounts_below(path).iter().any(|mounted| mounted == path)
}

/// Mounts the node's bpffs, unless it is mounted already.
fn mount_bpffs(path: &Path) -> Result<(), NodeError> {
    // A second bpffs over the first would hide the pins of programs that are loaded.
    if is_mounted(path) {
        return Ok(());
    }
    let mounted = mount(Some("bpf"), path, Some("bpf"), MsFlags::empty(), Some("mode=0700"));
    mounted.map_err(io::Error::from).map_err(file_error("mount bpffs at", path))
}

/// Returns the mount points at and below a path, deepest last.
fn mounts_below(path: &Path) -> Vec<PathBuf> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = text.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    points.filter(|point| point.starts_with(path)).collect()
}

/// Removes the folders of pins in a bpffs; its files are the kernel's own.
///
/// Any other mount namespace may hold a copy of the mount, so an unmount alone would keep programs and maps loaded.
fn remove_pins_below(bpf: &Path) {
    for entry in fs::read_dir(bpf).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_folder = entry.file_type().is_ok_and(|it| it.is_dir());
        if is_folder && let Err(error) = fs::remove_dir_all(&path) {
            warn!(path = %path.display(), %error, "pins left behind");
        }
    }
}

/// Unmounts everything at and below a path, deepest first.
fn unmount_below(path: &Path) {
    for point in mounts_below(path).iter().rev() {
        if let Err(error) = umount2(point, MntFlags::MNT_DETACH) {
            warn!(path = %point.display(), %error, "mount left behind");
        }
    }
}

/// Ends all other components of the node: SIGTERM to all, then SIGKILL to each that is late.
fn end_components(layout: &NodeLayout) {
    let own_process = ProcessId::current();
    let others = NodeManager::running_components(layout)
        .into_iter()
        .filter(|(_, process)| Some(*process) != own_process);
    let others: Vec<_> =
        others.filter_map(|(component, process)| Some((component, process.open()?))).collect();
    // All get the signal before any is waited for, so that they end at the same time.
    for (component, fd) in &others {
        info!(part = %component, "ending a process of the node");
        let _ = sys::pidfd_signal(fd.as_fd(), libc::SIGTERM);
    }
    for (component, fd) in &others {
        if !process::wait_until_ended(fd, TERMINATION_TIMEOUT) {
            warn!(part = %component, "killing a process of the node");
            let _ = sys::pidfd_signal(fd.as_fd(), libc::SIGKILL);
            process::wait_until_ended(fd, TERMINATION_TIMEOUT);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    fn folder(test: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("rouse-lock-{test}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        path
    }

    #[test]
    fn a_node_is_made_by_one_process_at_a_time() {
        let path = folder("one");
        let first = lock_folder(&path).unwrap().unwrap();
        let (event_tx, events) = mpsc::channel();
        thread::scope(|scope| {
            let (second_tx, path) = (event_tx.clone(), &path);
            scope.spawn(move || {
                let lock = lock_folder(path).unwrap();
                second_tx.send("second").unwrap();
                drop(lock);
            });
            event_tx.send("first").unwrap();
            drop(first);
        });
        assert_eq!(events.try_iter().collect::<Vec<_>>(), ["first", "second"]);
        fs::remove_dir(&path).unwrap();
    }

    #[test]
    fn a_folder_is_made_while_its_parent_is_removed_again_and_again() {
        let parent = folder("parent");
        let (middle, inner) = (parent.join("a"), parent.join("a/b"));
        let is_done = AtomicBool::new(false);
        let failures = thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    // It succeeds only while the folder is empty.
                    let _ = fs::remove_dir(&parent);
                }
            });
            let make_and_remove = |_| {
                let made = make_folder(&inner);
                let _ = fs::remove_dir(&inner).and_then(|()| fs::remove_dir(&middle));
                made.err()
            };
            let failures: Vec<io::Error> = (0..5_000).filter_map(make_and_remove).collect();
            is_done.store(true, Ordering::Relaxed);
            failures
        });
        assert!(failures.is_empty(), "{} of 5000: {:?}", failures.len(), failures[0]);
        let _ = fs::remove_dir(&parent);
        fs::write(&parent, "").unwrap();
        let in_the_way = make_folder(&parent).unwrap_err();
        assert_eq!(in_the_way.kind(), io::ErrorKind::AlreadyExists);
        fs::remove_file(&parent).unwrap();
    }

    #[test]
    fn other_users_cannot_open_the_folder_with_the_lock() {
        let parent = folder("mode");
        let path = parent.join("a");
        make_folder_with_mode(&path, RUN_FOLDER_MODE).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o066, 0, "{mode:o}");
        fs::remove_dir_all(parent).unwrap();
    }

    #[test]
    fn the_folder_with_the_lock_is_removed_last() {
        let layout = NodeLayout::new("last").unwrap();
        for removal in [NodeRemoval::KeepsManifests, NodeRemoval::Complete] {
            let folders = removal.folders(&layout);
            assert_eq!(folders.last(), Some(&layout.run_folder()), "{removal:?}");
            let keeps = !folders.iter().any(|folder| layout.manifests().starts_with(folder));
            assert_eq!(keeps, removal == NodeRemoval::KeepsManifests);
        }
    }

    #[test]
    fn a_removed_node_is_not_locked() {
        let path = folder("removed");
        let first = lock_folder(&path).unwrap().unwrap();
        thread::scope(|scope| {
            let second = scope.spawn(|| lock_folder(&path).unwrap().is_none());
            fs::remove_dir(&path).unwrap();
            drop(first);
            assert!(second.join().unwrap());
        });
    }
}
