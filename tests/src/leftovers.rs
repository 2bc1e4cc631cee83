//! Leftovers of killed test runs, identified by the process id that all names contain.

use std::path::{Path, PathBuf};
use std::{env, fs};

use local::layout::NodeLayout;
use local::node::NodeManager;

/// Removes the nodes of ended runs, and their temporary directories.
pub fn remove_leftovers() {
    let nodes = entry_names(&[PathBuf::from("/run/rouse"), PathBuf::from("/var/lib/rouse")]);
    for layout in of_ended_processes(nodes).iter().filter_map(|name| NodeLayout::new(name).ok()) {
        // The next run tries again to remove what cannot be removed now.
        let _stays = NodeManager::purge(&layout);
    }
    let temporary = env::temp_dir();
    let names = entry_names(std::slice::from_ref(&temporary));
    for name in of_ended_processes(names.into_iter().filter(|name| name.starts_with("rouse-"))) {
        let _stays = fs::remove_dir_all(temporary.join(name));
    }
}

/// Names of all entries of these directories.
pub fn entry_names(folders: &[PathBuf]) -> Vec<String> {
    let entries = folders.iter().flat_map(|folder| fs::read_dir(folder).into_iter().flatten());
    entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Names whose process has ended. A name without a process id belongs to no run.
pub fn of_ended_processes(names: impl IntoIterator<Item = String>) -> Vec<String> {
    let ended = |name: &String| {
        process_id(name).is_some_and(|number| !Path::new("/proc").join(number).exists())
    };
    names.into_iter().filter(ended).collect()
}

/// Process id in a name such as `hello-4711` or `rouse-test-images-4711-0`.
fn process_id(name: &str) -> Option<&str> {
    let is_number = |word: &&str| !word.is_empty() && word.bytes().all(|it| it.is_ascii_digit());
    name.split('-').skip(1).find(is_number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_with_the_number_of_an_ended_process_are_found() {
        // The highest possible process id is far below this number.
        let names =
            ["hello-4294967295", "rouse-test-images-4294967295-0", "hello", "rouse", "4294967295"];
        let own_name = format!("hello-{}", std::process::id());
        let all_names = names.map(str::to_owned).into_iter().chain([own_name]);
        assert_eq!(of_ended_processes(all_names), names[..2]);
    }
}
