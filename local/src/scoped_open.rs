//! Shell: opens paths below a folder whose links must not lead out of it, while other processes may change them.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};

/// Number of attempts. The kernel gives up at a `..` if any process of the machine mounts or renames meanwhile.
const ATTEMPTS_MAX: usize = 100;

/// Opens `path` below the folder `root`. `resolve` decides if links that lead out of the folder are refused
/// (`RESOLVE_BENEATH`, error `EXDEV`), or followed with the folder as their root (`RESOLVE_IN_ROOT`).
pub(crate) fn open_scoped(
    root: impl AsFd,
    path: &Path,
    flags: OFlag,
    resolve: ResolveFlag,
) -> nix::Result<OwnedFd> {
    let how = OpenHow::new().flags(flags | OFlag::O_CLOEXEC).resolve(resolve);
    let mut opened = Err(Errno::EAGAIN);
    // The kernel gives up with EAGAIN if a rename or mount anywhere happened meanwhile (openat2(2)).
    for _ in 0..ATTEMPTS_MAX {
        opened = openat2(root.as_fd(), path, how);
        if !matches!(opened, Err(Errno::EAGAIN | Errno::EINTR)) {
            break;
        }
    }
    opened
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn renames_of_other_processes_do_not_fail_a_path_with_parents() {
        let folder = std::env::temp_dir().join(format!("rouse-scoped-{}", std::process::id()));
        fs::create_dir_all(folder.join("root/a")).unwrap();
        fs::write(folder.join("root/file"), "").unwrap();
        let root = File::open(folder.join("root")).unwrap();
        let (one, other) = (folder.join("one"), folder.join("other"));
        fs::write(&one, "").unwrap();
        let is_done = AtomicBool::new(false);
        let path = Path::new("a/../a/../a/../a/../file");
        let open = || open_scoped(&root, path, OFlag::O_RDONLY, ResolveFlag::RESOLVE_BENEATH);
        let failures = thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    fs::rename(&one, &other).unwrap();
                    fs::rename(&other, &one).unwrap();
                }
            });
            let failures: Vec<Errno> = (0..50_000).filter_map(|_| open().err()).collect();
            is_done.store(true, Ordering::Relaxed);
            failures
        });
        assert!(failures.is_empty(), "{} of 50000: {:?}", failures.len(), failures[0]);
        fs::remove_dir_all(folder).unwrap();
    }
}
