//! Shell: mounts that the OCI runtime needs: cgroup2 and the containers' root file systems, in a mount namespace of
//! their own.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

use super::{ContainerLaunch, OciRuntimeError, SubPathMount, file_error};

/// Root file systems and parts of volumes that are still mounted here, although each container has copies of its own.
///
/// Unmounting waits for every processor, just when the new process begins to serve. So it is delayed a little.
#[derive(Clone, Debug)]
pub(super) struct PendingUnmounts {
    mount_points: Arc<Mutex<Vec<PathBuf>>>,
    wakeups: mpsc::Sender<()>,
}

impl PendingUnmounts {
    /// Delay of an unmount after the container's start.
    const UNMOUNT_DELAY: Duration = Duration::from_millis(100);

    /// Returns also the loop that unmounts, for a thread that sees the mounts; it ends when all clones are gone.
    pub(super) fn new() -> (Self, impl FnOnce() + Send + 'static) {
        let (wakeups, unmounts) = mpsc::channel();
        let remaining = Arc::<Mutex<Vec<PathBuf>>>::default();
        let pending = Self { mount_points: Arc::clone(&remaining), wakeups };
        #[allow(clippy::disallowed_methods, reason = "a thread of its own, without a runtime")]
        let unmounting = move || {
            while unmounts.recv().is_ok() {
                thread::sleep(Self::UNMOUNT_DELAY);
                // One pass serves all wake-ups that came during the delay.
                while unmounts.try_recv().is_ok() {}
                while Self::unmount_one(&remaining) {}
            }
        };
        (pending, unmounting)
    }

    /// Unmounts one mount point; returns false if there was none.
    ///
    /// The lock is held for one unmount only, so that a start waits for one at most.
    fn unmount_one(mount_points: &Mutex<Vec<PathBuf>>) -> bool {
        let mut mount_points = lock_queue(mount_points);
        let mount_point = mount_points.pop();
        mount_point.inspect(|it| unmount(it)).is_some()
    }

    /// Queues a mount point to be unmounted later.
    pub(super) fn defer_unmount(&self, mount_point: PathBuf) {
        lock_queue(&self.mount_points).push(mount_point);
        // Without the unmount thread the mounts disappear with the process.
        let _ = self.wakeups.send(());
    }

    /// Unmounts `mount_point` now if it is still queued: a container that starts again mounts at it again.
    pub(super) fn unmount_queued(&self, mount_point: &Path) {
        let mut mount_points = lock_queue(&self.mount_points);
        if let Some(index) = mount_points.iter().position(|it| it == mount_point) {
            unmount(&mount_points.swap_remove(index));
        }
    }
}

/// Locks the queue of mount points. The lock is held during an unmount: a start that mounts at the same one waits.
fn lock_queue(mount_points: &Mutex<Vec<PathBuf>>) -> MutexGuard<'_, Vec<PathBuf>> {
    mount_points.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unmount(mount_point: &Path) {
    // An error means that nothing is mounted there, and then nothing is to be done.
    let _ = umount2(mount_point, MntFlags::MNT_DETACH);
}

/// Gives the calling thread, and the threads it starts, a mount namespace of their own.
pub(super) fn enter_private_mounts() -> Result<(), OciRuntimeError> {
    let cgroup = Path::new("/sys/fs/cgroup");
    unshare(CloneFlags::CLONE_FS | CloneFlags::CLONE_NEWNS)
        .map_err(|error| file_error("separate the mounts below", Path::new("/"))(error.into()))?;
    // Slave: mounts made here do not reach the machine. The machine's later mounts are not needed here, and where
    // its mounts are private they do not arrive.
    let flags = MsFlags::MS_REC | MsFlags::MS_SLAVE;
    mount(None::<&str>, "/", None::<&str>, flags, None::<&str>)
        .map_err(|error| file_error("separate the mounts below", Path::new("/"))(error.into()))?;
    mount(Some("cgroup2"), cgroup, Some("cgroup2"), MsFlags::empty(), None::<&str>)
        .map_err(|error| file_error("mount cgroup2 at", cgroup)(error.into()))
}

/// Mounts the image at `root`, with an empty writable layer over it.
pub(super) fn mount_root(launch: &ContainerLaunch, root: &Path) -> Result<(), OciRuntimeError> {
    let (upper, scratch) =
        (launch.writable_layer.join("upper"), launch.writable_layer.join("work"));
    match fs::remove_dir_all(&launch.writable_layer) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(file_error("empty", &launch.writable_layer)(error));
        }
        _ => {}
    }
    for path in [root, &upper, &scratch] {
        fs::create_dir_all(path).map_err(file_error("make folder", path))?;
    }
    // The mode of the upper layer's top folder is the mode of the container's root directory.
    let top = fs::metadata(&launch.image).map_err(file_error("read", &launch.image))?;
    fs::set_permissions(&upper, top.permissions())
        .map_err(file_error("set the mode of", &upper))?;
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        launch.image.display(),
        upper.display(),
        scratch.display()
    );
    let mounted =
        mount(Some("overlay"), root, Some("overlay"), MsFlags::MS_NODEV, Some(options.as_str()));
    if mounted.is_ok() {
        return Ok(());
    }
    // Without overlayfs (or on a file system that it cannot use) the container gets a copy of the image.
    copy_tree(&launch.image, &upper).map_err(file_error("copy the image to", &upper))?;
    mount(Some(&upper), root, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .map_err(|error| file_error("mount", root)(error.into()))
}

/// Mounts a part of a volume at its mount point, by its descriptor: the names on its path may lead elsewhere by now.
pub(super) fn mount_sub_path(sub_path: &SubPathMount) -> Result<(), OciRuntimeError> {
    let point = &sub_path.mount_point;
    let source = PathBuf::from(format!("/proc/self/fd/{}", sub_path.source.as_raw_fd()));
    let is_folder = fs::metadata(&source).map_err(file_error("read", &source))?.is_dir();
    // A mount point that an earlier run left may be of the other kind. Any error returns from the creation.
    let made = if is_folder {
        let _ = fs::remove_file(point);
        fs::create_dir_all(point)
    } else {
        let _ = fs::remove_dir(point);
        create_file(point)
    };
    made.map_err(file_error("make mount point", point))?;
    let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
    mount(Some(&source), point, None::<&str>, flags, None::<&str>)
        .map_err(|error| file_error("mount", point)(error.into()))
}

/// Creates a file and its folder; an existing file keeps its content.
fn create_file(path: &Path) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    OpenOptions::new().append(true).create(true).open(path).map(drop)
}

/// Copies a folder with owners, modes and symbolic links; device files and sockets are skipped.
fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, lchown, symlink};
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        let meta = entry.metadata()?;
        if meta.is_dir() {
            copy_tree(&source, &target)?;
        } else if meta.is_symlink() {
            symlink(fs::read_link(&source)?, &target)?;
        } else if meta.is_file() {
            fs::copy(&source, &target)?;
        } else {
            continue;
        }
        lchown(&target, Some(meta.uid()), Some(meta.gid()))?;
        if !meta.is_symlink() {
            // Changing the owner clears set-user-id bits, so modes come last.
            fs::set_permissions(&target, meta.permissions())?;
        }
    }
    Ok(())
}
