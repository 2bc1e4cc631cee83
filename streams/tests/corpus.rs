//! Shell: replays the fuzzer's corpus, with every input that ever failed.

use std::{fs, path::Path};

use streams::{bulk_runs, targets};

/// Corpus of a target: file names and bytes.
fn corpus_of(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let entries = fs::read_dir(&folder).expect("each target has a folder");
    let files = entries.map(|entry| entry.expect("a folder can be read").path());
    let name = |path: &Path| path.file_name().expect("a file").to_string_lossy().into_owned();
    files.map(|path| (name(&path), fs::read(&path).expect("a file can be read"))).collect()
}

#[test]
fn nothing_in_the_corpus_fails_however_it_is_cut() {
    let mut wrong = String::new();
    for (target, play) in targets::ALL {
        let inputs = corpus_of(target);
        assert!(!inputs.is_empty(), "{target} has no corpus");
        for (name, bytes) in inputs {
            if let Err(what) = bulk_runs::replay(&bytes, play) {
                wrong.push_str(&format!("{target}/{name}: {what}\n  {}\n", bytes.escape_ascii()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn each_folder_of_the_corpus_has_a_target_and_each_target_a_program() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz");
    let names = |folder: &str, end: &str| {
        let entries = fs::read_dir(fuzz.join(folder)).expect("it is there");
        let names = entries.map(|it| it.expect("readable").file_name().into_string());
        let names = names.map(|it| it.expect("plain").trim_end_matches(end).to_owned());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    };
    let target_names = targets::ALL.map(|(name, _)| name);
    let mut targets = [&target_names[..], &targets::TARGETS_OF_OTHER_CRATES].concat();
    targets.sort_unstable();
    assert_eq!(names("corpus", ""), targets);
    assert_eq!(names("targets", ".rs"), targets);
}
