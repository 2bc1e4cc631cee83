//! Shell: folders and files that `subPath` names in volumes: opened below their volumes, and created where missing.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Component, Path, PathBuf};

use k8s_openapi::api::core::v1::Container;
use nix::errno::Errno;
use nix::fcntl::{OFlag, ResolveFlag, open};
use nix::sys::stat::{Mode, mkdirat};

use super::{ContainerStartError, file_error};
use crate::bundle::{BundleError, sub_path_mount_point};
use crate::runtime::SubPathMount;
use crate::scoped_open::open_scoped;

/// Opens each `subPath` of a container's volumes, and creates the missing folders, as the kubelet does: a mount needs
/// its source. `mount_points` is the folder in which the runtime mounts them.
pub(super) fn open_sub_paths(
    volumes: &BTreeMap<String, PathBuf>,
    container: &Container,
    mount_points: &Path,
) -> Result<Vec<SubPathMount>, ContainerStartError> {
    let mut mounts = Vec::new();
    for (index, mount) in container.volume_mounts.iter().flatten().enumerate() {
        let sub_path = mount.sub_path.as_deref().filter(|it| !it.is_empty());
        if let (Some(volume), Some(sub_path)) = (volumes.get(&mount.name), sub_path) {
            let source = open_sub_path(volume, Path::new(sub_path))?;
            let mount_point = sub_path_mount_point(mount_points, index);
            mounts.push(SubPathMount { source, mount_point });
        }
    }
    Ok(mounts)
}

/// Opens one path below a volume, part by part.
///
/// A container of the pod can put a link in the place of any part at any moment, also after a check. So the kernel
/// itself refuses links out of the volume, and the mount is made by the descriptor.
fn open_sub_path(volume: &Path, sub_path: &Path) -> Result<OwnedFd, ContainerStartError> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let root = open(volume, flags, Mode::empty());
    let root = File::from(root.map_err(|errno| file_error(volume)(errno.into()))?);
    let mode = root.metadata().map_err(file_error(volume))?.permissions();
    let open_inner = |inner: &Path| {
        open_scoped(&root, inner, OFlag::O_PATH, ResolveFlag::RESOLVE_BENEATH).map_err(|errno| {
            if errno == Errno::EXDEV {
                let description = format!("subPath {} outside its volume", sub_path.display());
                return ContainerStartError::from(BundleError::Unsupported(description));
            }
            file_error(&volume.join(inner))(errno.into())
        })
    };
    let mut inner = PathBuf::new();
    let mut opened = open_inner(Path::new("."))?;
    for part in sub_path.components().filter(|part| *part != Component::CurDir) {
        inner.push(part);
        // Created with few rights at first: the rights of the volume come once the folder is known to lie in it.
        let created = mkdirat(&opened, part.as_os_str(), Mode::from_bits_truncate(0o700));
        opened = match created {
            Ok(()) => {
                let folder = open_inner(&inner)?;
                set_permissions(&folder, mode.clone()).map_err(file_error(&volume.join(&inner)))?;
                folder
            }
            Err(Errno::EEXIST) => open_inner(&inner)?,
            Err(errno) => return Err(file_error(&volume.join(&inner))(errno.into())),
        };
    }
    Ok(opened)
}

/// Sets the mode of an opened folder. It is that of the volume, as with the kubelet: every user of the pod may write.
fn set_permissions(folder: &OwnedFd, mode: Permissions) -> io::Result<()> {
    // fchmod(2) refuses descriptors of O_PATH.
    fs::set_permissions(format!("/proc/self/fd/{}", folder.as_raw_fd()), mode)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use serde_json::json;

    use super::*;

    /// Folder `v` of a volume, in a temporary folder that is removed at the end of the test.
    struct VolumeFixture {
        folder: PathBuf,
        volume: PathBuf,
    }

    impl VolumeFixture {
        fn new(test: &str) -> Self {
            let name = format!("rouse-sub-paths-{test}-{}", std::process::id());
            let folder = std::env::temp_dir().join(name);
            let volume = folder.join("v");
            fs::create_dir_all(&volume).unwrap();
            fs::set_permissions(&volume, Permissions::from_mode(0o777)).unwrap();
            Self { folder, volume }
        }

        fn open(&self, sub_path: &str) -> Result<Vec<SubPathMount>, ContainerStartError> {
            let mount = json!({ "name": "v", "mountPath": "/v", "subPath": sub_path });
            let whole = json!({ "name": "v", "mountPath": "/whole" });
            let container = json!({ "name": "web", "volumeMounts": [whole, mount] });
            let volumes = BTreeMap::from([("v".to_owned(), self.volume.clone())]);
            let container = serde_json::from_value(container).unwrap();
            open_sub_paths(&volumes, &container, Path::new("/points"))
        }
    }

    impl Drop for VolumeFixture {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.folder).unwrap();
        }
    }

    /// Path of what a descriptor names now.
    fn opened_path(mounts: &[SubPathMount]) -> PathBuf {
        fs::read_link(format!("/proc/self/fd/{}", mounts[0].source.as_raw_fd())).unwrap()
    }

    #[test]
    fn sub_paths_are_created_inside_their_volume_only() {
        let fixture = VolumeFixture::new("created");
        let (folder, volume) = (&fixture.folder, &fixture.volume);
        symlink(folder, volume.join("link")).unwrap();
        symlink("..", volume.join("climbing")).unwrap();
        let mounts = fixture.open("a/b").unwrap();
        assert_eq!(opened_path(&mounts), fs::canonicalize(volume).unwrap().join("a/b"));
        assert_eq!(mounts[0].mount_point, Path::new("/points/1"), "the second mount of the two");
        let mode = fs::metadata(volume.join("a/b")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o777, "every user of the pod may write");
        fixture.open("a/b").unwrap();
        for outside in ["link/x", "climbing/x", "climbing", "../x", "/x"] {
            let error = fixture.open(outside).unwrap_err();
            assert!(matches!(error, ContainerStartError::Bundle(_)), "{outside}: {error:?}");
        }
        assert!(!folder.join("x").exists());
    }

    #[test]
    fn links_inside_a_volume_and_files_are_opened() {
        let fixture = VolumeFixture::new("inside");
        fs::create_dir(fixture.volume.join("a")).unwrap();
        fs::write(fixture.volume.join("a/file"), "").unwrap();
        symlink("a/../a", fixture.volume.join("link")).unwrap();
        let volume = fs::canonicalize(&fixture.volume).unwrap();
        assert_eq!(opened_path(&fixture.open("link/b").unwrap()), volume.join("a/b"));
        assert_eq!(opened_path(&fixture.open("a/file").unwrap()), volume.join("a/file"));
        assert!(fixture.open("a/file/x").is_err());
    }

    #[test]
    fn a_link_that_replaces_a_part_after_its_check_leads_nowhere() {
        let fixture = VolumeFixture::new("swapped");
        let (folder, volume) = (&fixture.folder, &fixture.volume);
        let mounts = fixture.open("a").unwrap();
        fs::rename(volume.join("a"), volume.join("moved")).unwrap();
        symlink(folder, volume.join("a")).unwrap();
        let by_descriptor = format!("/proc/self/fd/{}/x", mounts[0].source.as_raw_fd());
        fs::write(by_descriptor, "").unwrap();
        assert!(volume.join("moved/x").exists() && !folder.join("x").exists());
    }
}
