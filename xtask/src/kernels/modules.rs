//! Pure: module files that a machine needs to start, in load order.

/// Files of the modules in `names` and their dependencies, from the files of `depmod`: each after those that it
/// needs. Modules that `builtin` lists need no file.
pub(crate) fn resolve(dep: &str, builtin: &str, names: &[&str]) -> Result<Vec<String>, String> {
    let mut files = Vec::new();
    for name in names {
        if builtin.lines().any(|file| is_module(file, name)) {
            continue;
        }
        let lines = dep.lines().filter_map(|line| line.split_once(':'));
        let mut matching = lines.filter(|(file, _)| is_module(file, name));
        let (file, needs) = matching.next().ok_or_else(|| format!("no module {name}"))?;
        // A line lists all dependencies, transitive ones last, so in reverse each comes after those that it needs.
        for needed in needs.split_whitespace().rev().chain([file]) {
            if !files.iter().any(|it| it == needed) {
                files.push(needed.to_owned());
            }
        }
    }
    Ok(files)
}

/// Returns true if `file` is the module `name`: `kernel/fs/9p/9p.ko.xz` is `9p`. In names, `-` equals `_`.
fn is_module(file: &str, name: &str) -> bool {
    let base = file.rsplit('/').next().unwrap_or_default();
    let stem = base.split_once(".ko").map_or("", |(stem, _)| stem);
    stem.replace('-', "_") == name.replace('-', "_")
}

/// Returns true if the module file is compressed, by its name.
pub(crate) fn is_compressed(file: &str) -> bool {
    !file.ends_with(".ko")
}

/// Returns true for the package's files that tests need: those for networks, namespaces and the machine's start,
/// without drivers of physical devices.
pub(crate) fn is_wanted(path: &str) -> bool {
    const WANTED_PREFIXES: [&str; 9] = [
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
    // Drivers directly in drivers/net are virtual devices, such as veth; physical ones are in subdirectories.
    let virtual_device = file.strip_prefix("drivers/net/").is_some_and(|it| !it.contains('/'));
    virtual_device || WANTED_PREFIXES.iter().any(|folder| file.starts_with(folder))
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
        let paths =
            ["modules.builtin", "kernel/net/sched/sch_netem.ko", "kernel/drivers/net/veth.ko"];
        assert!(paths.into_iter().all(is_wanted));
        let unwanted =
            ["kernel/drivers/net/ethernet/e1000.ko", "kernel/drivers/gpu/x.ko", "vmlinuz"];
        assert!(!unwanted.into_iter().any(is_wanted));
    }
}
