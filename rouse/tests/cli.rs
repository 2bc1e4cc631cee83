//! Shell: the program as users and scripts run it: its messages, their streams and its exit code.

use std::process::Command;

/// Runs the program; returns its exit code, standard output and standard error.
fn rouse(args: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_rouse")).args(args).output().expect("it starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn a_misspelt_command_is_named_and_nothing_is_done() {
    let (code, out, error) = rouse(&["instal"]);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    assert!(error.contains("'instal'") && error.contains("'install'"), "{error}");
}

#[test]
fn manifests_go_to_standard_output() {
    let (code, out, error) = rouse(&["install", "--profile", "fast"]);
    assert_eq!((code, error.as_str()), (Some(0), ""), "without --apply it only prints");
    assert!(out.contains("kind: DaemonSet"), "{out}");
}

#[test]
fn a_missing_file_is_an_error_of_one_line() {
    let (code, out, error) = rouse(&["apply", "-f", "no-such-file.yaml"]);
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert!(error.contains("no-such-file.yaml") && error.lines().count() == 1, "{error}");
}
