//! Pure: location of a node's pods in the cgroup hierarchy, in each layout in use.
//!
//! | driver | a pod's directory below the kubelet's `cgroupRoot` |
//! |---|---|
//! | cgroupfs | `kubepods[/burstable\|/besteffort]/pod<uid>` |
//! | systemd | `kubepods.slice[/kubepods-burstable.slice]/kubepods[-burstable]-pod<uid, _ for ->.slice` |
//! | systemd, root `/a` | `a.slice/a-kubepods.slice/a-kubepods-burstable.slice/a-kubepods-burstable-pod<uid>.slice` |
//!
//! Guaranteed pods have no directory of their class. Names: kubernetes/kubernetes
//! `pkg/kubelet/cm/{cgroup_manager_linux,pod_container_manager_linux}.go`. Containers lie one below:
//! `<id>` or `crio-<id>` (cgroupfs), `cri-containerd-<id>.scope`, `crio-<id>.scope`, `docker-<id>.scope` (systemd).

use std::{
    cmp::Reverse,
    collections::BTreeSet,
    ffi::OsStr,
    path::{Component, Path, PathBuf},
};

/// The pods' directory of this node's kubelet cannot be determined.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PodsCgroupError {
    /// The kubelet has not made its directory yet.
    #[error("no cgroup kubepods or kubepods.slice exists yet: the kubelet makes it when it starts")]
    Absent,
    /// Several kubelets of the machine have a directory.
    #[error("several cgroups hold pods: {0}: name this node's by --clients-cgroup")]
    Several(String),
    /// No cgroup v2 file system is mounted.
    #[error("no cgroup2 file system is mounted: mount the host's /sys/fs/cgroup into the agent")]
    NoMount,
}

/// Returns the mounts of cgroup v2, with the mount that shows most of the hierarchy first. `mountinfo` is the text of
/// `/proc/self/mountinfo`.
///
/// In a container with a cgroup namespace, its own mount starts at its own cgroup (`/`). The host's mount, mounted into
/// the container, starts at `/../../..`.
pub fn v2_mounts(mountinfo: &str) -> Vec<PathBuf> {
    let mut mounts: Vec<(Reverse<usize>, usize, PathBuf)> = Vec::new();
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let mut fields = left.split(' ').skip(3);
        let (Some(root), Some(at)) = (fields.next(), fields.next()) else { continue };
        if right.split(' ').next() != Some("cgroup2") {
            continue;
        }
        // More steps up show more of the hierarchy; among equals, fewer steps down.
        let root = PathBuf::from(unescape(root));
        let up = root.components().filter(|it| *it == Component::ParentDir).count();
        let down = root.components().filter(|it| matches!(it, Component::Normal(_))).count();
        mounts.push((Reverse(up), down, PathBuf::from(unescape(at))));
    }
    // The sort is stable: among equals, the first one mounted.
    mounts.sort_by_key(|(up, down, _)| (*up, *down));
    mounts.into_iter().map(|(_, _, at)| at).collect()
}

/// Decodes `\040` and the like, by which the kernel writes spaces in mountinfo.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                out.push(char::from(byte));
                out.push_str(&part[3..]);
            }
            None => {
                // This is no escape: the backslash stands for itself.
                out.push('\\');
                out.push_str(part);
            }
        }
    }
    out
}

/// Returns the path in the v2 hierarchy from the text of `/proc/PID/cgroup`.
fn unified_path(cgroup: &str) -> Option<&str> {
    cgroup.lines().find_map(|line| line.strip_prefix("0::"))
}

/// Returns the cgroup of a process below the mount, by its `/proc/PID/cgroup`; `None` if a cgroup namespace hides it.
pub fn own_cgroup_path(cgroup: &str) -> Option<&Path> {
    let path = unified_path(cgroup)?;
    let hidden = path == "/" || path.starts_with("/..");
    (!hidden).then(|| Path::new(path.trim_start_matches('/')))
}

/// Returns the cgroup of any process, by its `/proc/PID/cgroup`. Paths there start at `root`: the mount, or the agent's
/// own cgroup if it has a cgroup namespace.
pub fn resolve_cgroup_path(root: &Path, cgroup: &str) -> Option<PathBuf> {
    let path = unified_path(cgroup)?;
    let mut at = root.to_owned();
    for part in Path::new(path).components() {
        match part {
            Component::ParentDir => drop(at.pop()),
            Component::Normal(name) => at.push(name),
            _ => {}
        }
    }
    Some(at)
}

/// Returns true if a process of this name (`/proc/PID/comm`) is a kubelet, or contains one. Processes that also contain
/// an API server (`k3s-server`, `kubelite`) do not count: connections through its proxies are requests.
pub fn is_kubelet(comm: &str) -> bool {
    ["kubelet", "k3s-agent"].contains(&comm.trim_end())
}

/// Returns the kubelet's cgroup that is nearest to `pods`, from these candidates. `None` if two are equally near, or if
/// the cgroup also holds pods or a user's session.
pub fn nearest_kubelet(pods: &Path, candidates: &BTreeSet<PathBuf>) -> Option<PathBuf> {
    let shared_parts = |candidate: &Path| {
        let both = candidate.iter().zip(pods);
        both.take_while(|(one, other)| one == other).count()
    };
    // In a cgroup that contains the pods, or lies inside them, connections of pods would count as probes.
    let is_own = |candidate: &&PathBuf| {
        let mut apart = candidate.iter().skip(shared_parts(candidate));
        let is_foreign = |it: &OsStr| is_kubepods(it) || it == "user.slice";
        !pods.starts_with(candidate) && !candidate.starts_with(pods) && !apart.any(is_foreign)
    };
    let own_candidates: Vec<&PathBuf> = candidates.iter().filter(is_own).collect();
    let nearest = own_candidates.iter().map(|it| shared_parts(it)).max()?;
    let mut all = own_candidates.into_iter().filter(|it| shared_parts(it) == nearest);
    all.next().filter(|_| all.next().is_none()).cloned()
}

/// Returns true if a directory of this name is the one in which a kubelet keeps all its pods.
pub fn is_kubepods(name: &OsStr) -> bool {
    name.to_str().is_some_and(|name| {
        name == "kubepods" || name == "kubepods.slice" || name.ends_with("-kubepods.slice")
    })
}

/// Chooses this node's directory among those of all kubelets of the machine: the one that the agent runs in, at
/// `own_cgroup`, or the only one.
pub fn choose_pods_cgroup(
    candidates: &[PathBuf],
    own_cgroup: Option<&Path>,
) -> Result<PathBuf, PodsCgroupError> {
    if let Some(own_cgroup) = own_cgroup
        && let Some(own_candidate) =
            candidates.iter().find(|candidate| own_cgroup.starts_with(candidate))
    {
        // With nodes in containers, a machine has a directory of each, and the agent runs below that of its own node.
        return Ok(own_candidate.clone());
    }
    match candidates {
        [] => Err(PodsCgroupError::Absent),
        [only] => Ok(only.clone()),
        several => {
            let names: Vec<String> = several.iter().map(|it| it.display().to_string()).collect();
            Err(PodsCgroupError::Several(names.join(", ")))
        }
    }
}

/// Returns the uid of the pod that a directory of this name belongs to. The uid of a static pod is the hash of its
/// manifest.
pub fn pod_uid(name: &OsStr) -> Option<String> {
    let name = name.to_str()?;
    let uid = match name.strip_suffix(".slice") {
        // The systemd driver, in whose names a `-` separates parts, so that the uid has `_` instead.
        Some(slice) => {
            let (parent, uid) = slice.rsplit_once("-pod")?;
            let class =
                parent.strip_suffix("-burstable").or_else(|| parent.strip_suffix("-besteffort"));
            // Users' slices may have `-pod` in their names too; only a kubelet's tree has this root.
            let root = class.unwrap_or(parent);
            if root != "kubepods" && !root.ends_with("-kubepods") {
                return None;
            }
            uid.replace('_', "-")
        }
        // The cgroupfs driver.
        None => name.strip_prefix("pod")?.to_owned(),
    };
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    (!uid.is_empty() && uid.bytes().all(fits)).then_some(uid)
}

/// Returns true if a directory below a pod's holds a monitor of the runtime instead of a container (cri-o's conmon).
pub fn is_runtime_monitor(name: &OsStr) -> bool {
    name.to_str().is_some_and(|name| name.starts_with("crio-conmon-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "1b9c5d1e-22aa-4bde-9c0f-0123456789ab";
    const FLAT: &str = "1b9c5d1e_22aa_4bde_9c0f_0123456789ab";
    const HASH: &str = "0a1b2c3d4e5f60718293a4b5c6d7e8f9";
    const ID: &str = "4f0c7b7e1f60b4a4f3d4b1f8f6a9d2c1e0b3a5978695a4b3c2d1e0f9a8b7c6d5";

    /// Returns the pods' directory and the pod in a path from the mount, and true if the path has a monitor.
    fn read_path(path: &str) -> (Option<PathBuf>, Option<String>, bool) {
        let path = Path::new(path);
        let at = |which: fn(&OsStr) -> bool| path.iter().position(which);
        let kubepods = at(is_kubepods).map(|at| path.iter().take(at + 1).collect());
        (kubepods, path.iter().find_map(pod_uid), at(is_runtime_monitor).is_some())
    }

    #[test]
    fn a_nodes_kubelet_is_the_nearest_to_its_pods() {
        let find = |pods: &str, all: &[&str]| {
            let all = all.iter().map(PathBuf::from).collect();
            nearest_kubelet(Path::new(pods), &all).map(|it| it.display().to_string())
        };
        let service = "/c/system.slice/kubelet.service";
        assert_eq!(find("/c/kubepods.slice", &[service]).as_deref(), Some(service));
        // Several nodes on one machine.
        let [one, two] = ["/c/docker/1/kubelet.slice/kubelet.service", "/c/docker/2/kubelet.slice"];
        let pods = "/c/docker/1/kubelet.slice/kubelet-kubepods.slice";
        assert_eq!(find(pods, &[one, two, service]).as_deref(), Some(one));
        assert_eq!(find("/c/docker/3/kubepods", &[one, two]), None, "neither is nearer");
        // A cgroup that also holds other processes would mark their connections as probes.
        for wrong in ["/c", "/c/kubepods.slice/podx/a", "/c/user.slice/u/session-1.scope"] {
            assert_eq!(find("/c/kubepods.slice", &[wrong]), None, "{wrong}");
        }
        assert_eq!(find("/c/a/kubepods", &["/c/a"]), None);
        // A node in a pod of another cluster.
        let node = "/c/kubepods/pod1/x/system.slice/kubelet.service";
        assert_eq!(find("/c/kubepods/pod1/x/kubepods", &[node]).as_deref(), Some(node));
        assert_eq!(find("/c/kubepods", &[node, service]).as_deref(), Some(service));
    }

    #[test]
    fn paths_of_processes_are_read_from_inside_a_cgroup_namespace_too() {
        let whole =
            resolve_cgroup_path(Path::new("/c"), "1:cpu:/x\n0::/system.slice/kubelet.service\n");
        assert_eq!(whole.as_deref(), Some(Path::new("/c/system.slice/kubelet.service")));
        let own = Path::new("/c/kubepods/pod1/x");
        let hidden = resolve_cgroup_path(own, "0::/../../../system.slice/kubelet.service\n");
        assert_eq!(hidden, whole);
        assert_eq!(resolve_cgroup_path(own, "0::/\n").as_deref(), Some(own));
        assert_eq!(resolve_cgroup_path(own, "1:cpu:/x\n"), None);
        assert!(["kubelet\n", "kubelet", "k3s-agent"].into_iter().all(is_kubelet));
        let others = ["kubectl", "kubelet-plugin", "k3s-server", "kubelite", ""];
        assert!(!others.into_iter().any(is_kubelet));
    }

    #[test]
    fn pods_are_found_in_every_layout() {
        let cases = [
            (format!("kubepods/pod{UID}/{ID}"), "kubepods", UID),
            (format!("kubepods/burstable/pod{UID}/{ID}"), "kubepods", UID),
            (format!("kubepods/besteffort/pod{UID}/crio-{ID}"), "kubepods", UID),
            (format!("kubepods/burstable/pod{HASH}/{ID}"), "kubepods", HASH),
            (format!("node-1/kubepods/burstable/pod{UID}/{ID}/app/nested"), "node-1/kubepods", UID),
            (
                format!("kubepods.slice/kubepods-pod{FLAT}.slice/cri-containerd-{ID}.scope"),
                "kubepods.slice",
                UID,
            ),
            (
                format!(
                    "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{FLAT}.slice/crio-{ID}.scope/container"
                ),
                "kubepods.slice",
                UID,
            ),
            (
                format!(
                    "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{FLAT}.slice/docker-{ID}.scope"
                ),
                "kubepods.slice",
                UID,
            ),
            (
                format!(
                    "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{HASH}.slice/cri-containerd-{ID}.scope"
                ),
                "kubepods.slice",
                HASH,
            ),
            (
                format!(
                    "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{FLAT}.slice/cri-containerd-{ID}.scope"
                ),
                "kubelet.slice/kubelet-kubepods.slice",
                UID,
            ),
        ];
        for (path, kubepods, uid) in cases {
            let want = (Some(kubepods.into()), Some(uid.into()), false);
            assert_eq!(read_path(&path), want, "{path}");
        }
    }

    #[test]
    fn what_is_no_pod_is_not_taken_for_one() {
        for path in [
            "system.slice/containerd.service",
            "kubepods/burstable",
            "kubepods.slice/kubepods-burstable.slice",
            "my-pod.slice",
            "libpod-1234.scope",
            "user.slice/my-podx.slice",
            "pod.slice",
            "init.scope",
            "rouse-self-test-7",
        ] {
            assert_eq!(read_path(path).1, None, "{path}");
        }
        let conmon = format!("kubepods/burstable/pod{UID}/crio-conmon-{ID}.scope");
        assert!(read_path(&conmon).2, "a monitor is in the pod's directory and no container of it");
    }

    #[test]
    fn the_mount_is_read_from_mountinfo() {
        let hybrid = "\
25 1 0:22 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
26 25 0:23 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate
27 25 0:24 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory";
        assert_eq!(v2_mounts(hybrid), [Path::new("/sys/fs/cgroup/unified")]);
        let unified = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw";
        assert_eq!(v2_mounts(unified), [Path::new("/sys/fs/cgroup")]);
        let container = "\
900 890 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate
901 880 0:26 /../../../.. /host/cg\\040roup rw shared:4 - cgroup2 cgroup2 rw
902 880 0:26 /../../../../system.slice /elsewhere rw - cgroup2 cgroup2 rw";
        assert_eq!(
            v2_mounts(container),
            ["/host/cg roup", "/elsewhere", "/sys/fs/cgroup"].map(Path::new),
            "the host's before the container's own"
        );
        assert!(v2_mounts("27 25 0:24 / /sys/fs/cgroup/memory rw - cgroup cgroup rw").is_empty());
    }

    #[test]
    fn the_agents_own_cgroup_selects_its_node() {
        let nodes = ["/m/a/kubepods", "/m/b/kubepods"].map(PathBuf::from);
        let own = Path::new("/m/b/kubepods/burstable/pod1/2");
        assert_eq!(choose_pods_cgroup(&nodes, Some(own)), Ok("/m/b/kubepods".into()));
        assert_eq!(choose_pods_cgroup(&nodes[..1], None), Ok("/m/a/kubepods".into()));
        assert_eq!(
            choose_pods_cgroup(&nodes[..1], Some(Path::new("/m/system.slice"))),
            Ok(nodes[0].clone())
        );
        assert_eq!(choose_pods_cgroup(&[], Some(own)), Err(PodsCgroupError::Absent));
        let several = PodsCgroupError::Several("/m/a/kubepods, /m/b/kubepods".into());
        assert_eq!(choose_pods_cgroup(&nodes, Some(Path::new("/m/system.slice"))), Err(several));
    }

    #[test]
    fn a_cgroup_namespace_hides_where_a_process_is() {
        let hybrid = "3:cpu:/x\n0::/node/kubepods/pod1/2\n";
        assert_eq!(own_cgroup_path(hybrid), Some(Path::new("node/kubepods/pod1/2")));
        for hidden in ["0::/\n", "0::/../../init.scope\n", "3:cpu:/x\n"] {
            assert_eq!(own_cgroup_path(hidden), None, "{hidden}");
        }
    }
}
