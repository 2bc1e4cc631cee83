//! Shell: the cluster's own cgroups in each hierarchy of the machine: v2 alone, v1, or both.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use crate::sh;

/// Processor weight of a cluster, in percent of that of a lane of tests outside of it, or of a session of processes where
/// the kernel makes a group of each (`sched_autogroup_enabled`). The programs of a cluster's nodes share it.
pub(crate) const CLUSTER_CPU_PERCENT: u32 = 200;
/// Processor weight of the clients of a cluster's tests, in percent of that of one of its nodes.
pub(crate) const CLIENTS_CPU_PERCENT: u32 = 50;
/// Files of the processor weight (v1 and v2), each with the kernel's default.
const CPU_WEIGHT_FILES: [(&str, u32); 2] = [("cpu.shares", 1024), ("cpu.weight", 100)];

/// One mounted cgroup hierarchy of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CgroupHierarchy {
    pub(crate) mount: PathBuf,
    /// Controllers of a v1 hierarchy, as `-o` of its mount takes them; `None` for v2.
    pub(crate) v1: Option<String>,
}

impl CgroupHierarchy {
    /// Returns true if it is the v1 hierarchy with the controller `cpuset`.
    fn has_cpuset(&self) -> bool {
        self.v1.as_deref().is_some_and(|v1| v1.split(',').any(|word| word == "cpuset"))
    }
}

/// Returns all hierarchies mounted below `/sys/fs/cgroup`.
pub(crate) fn hierarchies() -> Result<Vec<CgroupHierarchy>> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("cannot read the mounts")?;
    Ok(parse_mountinfo(&mounts))
}

fn parse_mountinfo(mountinfo: &str) -> Vec<CgroupHierarchy> {
    let mut hierarchies: Vec<CgroupHierarchy> = Vec::new();
    for line in mountinfo.lines() {
        let Some((fields, filesystem_fields)) = line.split_once(" - ") else { continue };
        // proc_pid_mountinfo(5): field 5 is the mount point; after ` - ` come type, source and options.
        let Some(mount) = fields.split(' ').nth(4).filter(|it| it.starts_with("/sys/fs/cgroup"))
        else {
            continue;
        };
        let mut filesystem_fields = filesystem_fields.split(' ');
        let (kind, options) =
            (filesystem_fields.next(), filesystem_fields.nth(1).unwrap_or_default());
        let v1 = match kind {
            Some("cgroup") => Some(controllers(options)),
            Some("cgroup2") => None,
            _ => continue,
        };
        hierarchies.push(CgroupHierarchy { mount: mount.into(), v1 });
    }
    hierarchies
}

/// Mount options that name a v1 hierarchy: `rw,cpu,cpuacct` → `cpu,cpuacct`, `rw,name=systemd` → `none,name=systemd`.
fn controllers(options: &str) -> String {
    let is_controller = |word: &&str| {
        !matches!(*word, "rw" | "ro" | "relatime" | "xattr" | "clone_children" | "seclabel")
            && !word.starts_with("release_agent=")
    };
    let words: Vec<&str> = options.split(',').filter(is_controller).collect();
    match words.iter().any(|word| word.starts_with("name=")) {
        true => format!("none,{}", words.join(",")),
        false => words.join(","),
    }
}

/// Creates `path` (below every mount) in each hierarchy, ready to hold processes.
pub(crate) fn create(path: &str) -> Result<()> {
    let hierarchies = hierarchies()?;
    // Beside v1 the kubelet uses v1 controllers only, so v2 needs no delegation.
    let has_only_v2 = hierarchies.iter().all(|hierarchy| hierarchy.v1.is_none());
    for hierarchy in hierarchies {
        let mut directory = hierarchy.mount.clone();
        for part in path.split('/') {
            let parent = directory.clone();
            directory.push(part);
            fs::create_dir_all(&directory)
                .with_context(|| format!("cannot make {}", directory.display()))?;
            if hierarchy.has_cpuset() {
                inherit_cpuset(&parent, &directory)?;
            }
            if has_only_v2 {
                delegate_controllers(&parent);
            }
        }
    }
    Ok(())
}

/// Creates `path/leaf` in each hierarchy while `path` still holds processes.
pub(crate) fn create_leaf(path: &str, leaf: &str) -> Result<()> {
    for hierarchy in hierarchies()? {
        let parent = hierarchy.mount.join(path);
        let path = parent.join(leaf);
        // Without a delegation: in v2, a cgroup with processes can give no controllers to those below it.
        fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        if hierarchy.has_cpuset() {
            inherit_cpuset(&parent, &path)?;
        }
    }
    Ok(())
}

/// Copies the parent's cpuset to a new one: a v1 cpuset starts empty, and an empty one refuses processes.
fn inherit_cpuset(parent: &Path, child: &Path) -> Result<()> {
    for file in ["cpuset.cpus", "cpuset.mems"] {
        let inherited = fs::read_to_string(child.join(file)).unwrap_or_default();
        if inherited.trim().is_empty() {
            let value = fs::read_to_string(parent.join(file))?;
            fs::write(child.join(file), value.trim())
                .with_context(|| format!("cannot set {file} of {}", child.display()))?;
        }
    }
    Ok(())
}

/// Sets the processor weight of a cgroup in percent of the default, in each hierarchy with that controller.
pub(crate) fn set_cpu_weight(path: &str, percent: u32) -> Result<()> {
    for hierarchy in hierarchies()? {
        for (file, default) in CPU_WEIGHT_FILES {
            let file = hierarchy.mount.join(path).join(file);
            if file.exists() {
                fs::write(&file, (percent * default / 100).to_string())
                    .with_context(|| format!("cannot set {}", file.display()))?;
            }
        }
    }
    Ok(())
}

/// Directory of `path` in the v1 hierarchy of the controller `cpu`; `None` on a machine without one.
pub(crate) fn v1_cpu_directory(path: &str) -> Result<Option<PathBuf>> {
    let has_cpu = |hierarchy: &CgroupHierarchy| {
        hierarchy.v1.as_deref().is_some_and(|v1| v1.split(',').any(|word| word == "cpu"))
    };
    let v1 = hierarchies()?.into_iter().find(has_cpu);
    Ok(v1.map(|hierarchy| hierarchy.mount.join(path)))
}

fn delegate_controllers(parent: &Path) {
    let controllers = fs::read_to_string(parent.join("cgroup.controllers")).unwrap_or_default();
    for controller in controllers.split_whitespace() {
        // The kernel refuses controllers one by one, for example `cpu` with realtime threads: the others still help.
        let _refused = fs::write(parent.join("cgroup.subtree_control"), format!("+{controller}"));
    }
}

/// Files to which a process writes its id to enter `path` in each hierarchy.
pub(crate) fn procs_files(path: &str) -> Result<Vec<PathBuf>> {
    let hierarchies = hierarchies()?;
    Ok(hierarchies
        .iter()
        .map(|hierarchy| hierarchy.mount.join(path).join("cgroup.procs"))
        .collect())
}

/// Directory of `path` in the v2 hierarchy.
pub(crate) fn v2_directory(path: &str) -> Result<PathBuf> {
    let hierarchies = hierarchies()?;
    let v2 = hierarchies.into_iter().find(|hierarchy| hierarchy.v1.is_none());
    Ok(v2.context("cgroup v2 is not mounted below /sys/fs/cgroup")?.mount.join(path))
}

/// Kills every process below `path` and waits until none is left.
pub(crate) fn kill_processes(path: &str) -> Result<()> {
    let started = Instant::now();
    let v2 = v2_directory(path)?;
    // Undoes the fault `stop` of a node. The file is missing if the cgroup has gone.
    let _not_frozen = fs::write(v2.join("cgroup.freeze"), "0");
    loop {
        let _gone = fs::write(v2.join("cgroup.kill"), "1");
        let remaining = processes(path)?;
        if remaining.is_empty() {
            return Ok(());
        }
        // New children may appear while the others are killed, so the list is read again each time.
        if started.elapsed() > Duration::from_secs(20) {
            bail!("processes of the cgroup {path} do not end: {remaining:?}");
        }
        for pid in remaining {
            // `cgroup.kill` does not reach processes that only a v1 hierarchy has.
            let pid = nix::unistd::Pid::from_raw(pid);
            let _gone = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
        }
        sh::sleep(Duration::from_millis(50));
    }
}

/// Ids of processes below `path` in any hierarchy.
fn processes(path: &str) -> Result<Vec<i32>> {
    let mut pids = Vec::new();
    for hierarchy in hierarchies()? {
        for folder in directories_deepest_first(&hierarchy.mount.join(path)) {
            let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
            pids.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()));
        }
    }
    // A process of another pid namespace shows as 0, which `kill` would take for the caller's process group.
    pids.retain(|&pid| pid > 0);
    pids.sort_unstable();
    pids.dedup();
    Ok(pids)
}

/// Removes `path` and its descendants from each hierarchy. Its processes must have ended.
pub(crate) fn remove(path: &str) -> Result<()> {
    for hierarchy in hierarchies()? {
        for folder in directories_deepest_first(&hierarchy.mount.join(path)) {
            remove_one(&folder)?;
        }
    }
    Ok(())
}

fn remove_one(folder: &Path) -> Result<()> {
    let started = Instant::now();
    // The kernel releases the last process of a cgroup a moment after it has ended.
    loop {
        match fs::remove_dir(folder) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(_) if started.elapsed() < Duration::from_secs(10) => {
                sh::sleep(Duration::from_millis(20));
            }
            Err(error) => {
                return Err(error).with_context(|| format!("cannot remove {}", folder.display()));
            }
        }
    }
}

/// `root` and all directories below it, the deepest first.
fn directories_deepest_first(root: &Path) -> Vec<PathBuf> {
    let mut directories = Vec::new();
    // Parents are pushed before their children, so the reverse order has children first.
    let mut pending: Vec<PathBuf> = root.is_dir().then(|| root.to_owned()).into_iter().collect();
    while let Some(folder) = pending.pop() {
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        pending.extend(entries.map(|entry| entry.path()).filter(|path| path.is_dir()));
        directories.push(folder);
    }
    directories.reverse();
    directories
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_are_read_from_the_mounts() {
        let text = "30 25 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                    31 30 0:27 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n\
                    32 30 0:28 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n\
                    33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let hierarchy = |mount: &str, v1: Option<&str>| CgroupHierarchy {
            mount: mount.into(),
            v1: v1.map(str::to_owned),
        };
        assert_eq!(
            parse_mountinfo(text),
            [
                hierarchy("/sys/fs/cgroup/cpu", Some("cpu,cpuacct")),
                hierarchy("/sys/fs/cgroup/systemd", Some("none,name=systemd")),
                hierarchy("/sys/fs/cgroup/unified", None),
            ]
        );
    }
}
