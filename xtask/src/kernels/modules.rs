//! Pure: which files of a kernel's modules a machine needs to start, in the order in which they go in.

/// Files of these modules and of all that they need, by what `depmod` wrote: each after those that it needs. Modules that are
/// built in, as `builtin` lists them, need no file.
pub(crate) fn resolve(dep: &str, builtin: &str, names: &[&str]) -> Result<Vec<String>, String> {
    let mut files = Vec::new();
    for name in names {
        if builtin.lines().any(|file| is_module(file, name)) {
            continue;
        }
        let lines = dep.lines().filter_map(|line| line.split_once(':'));
        let mut found = lines.filter(|(file, _)| is_module(file, name));
        let (file, needs) = found.next().ok_or_else(|| format!("no module {name}"))?;
        // Each line names all that is needed, whatever needs others behind it.
        for needed in needs.split_whitespace().rev().chain([file]) {
            if !files.iter().any(|it| it == needed) {
                files.push(needed.to_owned());
            }
        }
    }
    Ok(files)
}

/// `kernel/fs/9p/9p.ko.xz` is module `9p`. In names, `-` and `_` are the same.
fn is_module(file: &str, name: &str) -> bool {
    let base = file.rsplit('/').next().unwrap_or_default();
    let stem = base.split_once(".ko").map_or("", |(stem, _)| stem);
    stem.replace('-', "_") == name.replace('-', "_")
}

/// Where compressed modules are told by their names.
pub(crate) fn is_compressed(file: &str) -> bool {
    !file.ends_with(".ko")
}

/// Whether this file of the package is worth keeping: what networks, namespaces and our own start need, and not the drivers of
/// machines that nobody tests on.
pub(crate) fn is_wanted(path: &str) -> bool {
    const KEPT: [&str; 9] = [
        "net/",
        "lib/",
        "crypto/",
        "arch/",
        "fs/9p/",
        "fs/fscache/",
        "fs/netfs/",
        "fs/overlayfs/",
        "drivers/virtio/",
    ];
    let Some(file) = path.strip_prefix("kernel/") else { return path.starts_with("modules.") };
    let virtual_device = file.strip_prefix("drivers/net/").is_some_and(|it| !it.contains('/'));
    virtual_device || KEPT.iter().any(|folder| file.starts_with(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEP: &str = "kernel/fs/9p/9p.ko: kernel/net/9p/9pnet.ko kernel/fs/fscache/fscache.ko\n\
                       kernel/net/9p/9pnet.ko:\n\
                       kernel/fs/fscache/fscache.ko:\n\
                       kernel/net/9p/9pnet_virtio.ko: kernel/net/9p/9pnet.ko kernel/drivers/virtio/virtio.ko\n\
                       kernel/drivers/virtio/virtio.ko:\n";

    #[test]
    fn each_file_comes_once_and_after_those_it_needs() {
        let files = resolve(DEP, "", &["9p", "9pnet-virtio"]).unwrap();
        let names: Vec<_> = files.iter().map(|file| file.rsplit('/').next().unwrap()).collect();
        assert_eq!(names, ["fscache.ko", "9pnet.ko", "9p.ko", "virtio.ko", "9pnet_virtio.ko"]);
    }

    #[test]
    fn what_is_built_in_needs_no_file_and_what_is_nowhere_is_an_error() {
        let builtin = "kernel/drivers/virtio/virtio_pci.ko\n";
        assert_eq!(resolve(DEP, builtin, &["virtio_pci"]), Ok(vec![]));
        assert_eq!(resolve(DEP, builtin, &["overlay"]), Err("no module overlay".to_owned()));
    }

    #[test]
    fn a_compressed_module_is_found_by_its_name_too() {
        let dep = "kernel/fs/overlayfs/overlay.ko.xz:\n";
        assert_eq!(resolve(dep, "", &["overlay"]).unwrap(), ["kernel/fs/overlayfs/overlay.ko.xz"]);
        assert!(is_compressed("a/overlay.ko.xz") && !is_compressed("a/overlay.ko"));
    }

    #[test]
    fn drivers_of_real_machines_are_left_behind() {
        let wanted =
            ["modules.builtin", "kernel/net/sched/sch_netem.ko", "kernel/drivers/net/veth.ko"];
        assert!(wanted.into_iter().all(is_wanted));
        let unwanted =
            ["kernel/drivers/net/ethernet/e1000.ko", "kernel/drivers/gpu/x.ko", "vmlinuz"];
        assert!(!unwanted.into_iter().any(is_wanted));
    }
}
