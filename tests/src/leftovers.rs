//! Leftovers of killed test runs. The records that tests put into their nodes' folders identify nodes. Temporary
//! folders have the tests' own prefix and the process id in their names.

use std::path::{Path, PathBuf};
use std::{env, fs};

use local::layout::NodeLayout;
use local::node::{NodeManager, make_folder};
use local::process::{ProcessId, record_process, recorded_process};

/// Prefix of the temporary folders of tests, which no other program has.
pub const FOLDER_PREFIX: &str = "rouse-test-";
/// File in a node's data folder with the process of the test that made the node.
const RECORD: &str = "test-process";

/// Records this process as the one that a node is made for. The purge of the node removes the record too.
pub fn record_test_node(layout: &NodeLayout) {
    let folder = layout.data_folder();
    make_folder(&folder).expect("a folder: are you root?");
    let process = ProcessId::current().expect("/proc is mounted");
    record_process(&folder.join(RECORD), process).expect("a file");
}

/// Removes the nodes of ended runs, and their temporary folders.
pub fn remove_leftovers() {
    let nodes = nodes_of_ended_tests(Path::new("/var/lib/rouse"));
    for layout in nodes.iter().filter_map(|name| NodeLayout::new(name).ok()) {
        // The next run tries again to remove what cannot be removed now.
        let _stays = NodeManager::purge(&layout);
    }
    let temporary = env::temp_dir();
    let mut names = entry_names(std::slice::from_ref(&temporary));
    names.retain(|name| name.starts_with(FOLDER_PREFIX));
    for name in of_ended_processes(names) {
        let _stays = fs::remove_dir_all(temporary.join(name));
    }
}

/// Names of the nodes below `folder` that tests have made whose processes have ended. A node of a user has no record,
/// whatever its name is.
fn nodes_of_ended_tests(folder: &Path) -> Vec<String> {
    let has_ended = |name: &String| {
        recorded_process(&folder.join(name).join(RECORD)).is_some_and(|it| !it.is_alive())
    };
    entry_names(&[folder.to_owned()]).into_iter().filter(has_ended).collect()
}

/// Names of all entries of these directories.
pub fn entry_names(folders: &[PathBuf]) -> Vec<String> {
    let entries = folders.iter().flat_map(|folder| fs::read_dir(folder).into_iter().flatten());
    entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Names whose process has ended, of names with a prefix of tests. A name without a process id belongs to no run.
pub fn of_ended_processes(names: impl IntoIterator<Item = String>) -> Vec<String> {
    let ended = |name: &String| {
        process_id(name).is_some_and(|number| !Path::new("/proc").join(number).exists())
    };
    names.into_iter().filter(ended).collect()
}

/// Process id in a name such as `rouse-test-hello-4711` or `rouse-test-images-4711-0`.
fn process_id(name: &str) -> Option<&str> {
    let is_number = |word: &&str| !word.is_empty() && word.bytes().all(|it| it.is_ascii_digit());
    name.split('-').skip(1).find(is_number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::scratch_directory;

    #[test]
    fn only_names_with_the_number_of_an_ended_process_are_found() {
        // The highest possible process id is far below this number.
        let names =
            ["hello-4294967295", "rouse-test-images-4294967295-0", "hello", "rouse", "4294967295"];
        let own_name = format!("hello-{}", std::process::id());
        let all_names = names.map(str::to_owned).into_iter().chain([own_name]);
        assert_eq!(of_ended_processes(all_names), names[..2]);
    }

    #[test]
    fn a_node_that_no_test_has_made_is_no_leftover_whatever_its_name_is() {
        let folder = scratch_directory("leftovers");
        let ended = ProcessId { pid: i32::MAX, start_ticks: 0 };
        let own = ProcessId::current().expect("/proc is mounted");
        for (name, process) in
            [("web-4294967295", None), ("hello-1", Some(ended)), ("hello-4294967295", Some(own))]
        {
            fs::create_dir(folder.join(name)).expect("our own folder");
            if let Some(process) = process {
                record_process(&folder.join(name).join(RECORD), process).expect("our own folder");
            }
        }
        assert_eq!(nodes_of_ended_tests(&folder), ["hello-1"]);
        fs::remove_dir_all(folder).expect("our own folder");
    }
}
