//! Network namespaces that cannot be made: what surrounds them stays as it is.

use std::fs;
use std::process::Command;

use local::net::create_node_namespaces;
use tests::images::scratch_directory;

/// Setting of a network namespace, which the node changes in the namespaces that it makes.
const PORT_START: &str = "/proc/sys/net/ipv4/ip_unprivileged_port_start";
/// Variable of the process that the test starts.
const ROLE: &str = "ROUSE_TEST_NAMESPACES";

#[test]
fn a_namespace_that_cannot_be_made_changes_no_other_one() {
    // In a namespace of its own, and without the right to make another one.
    let mut command = Command::new("unshare");
    command.args(["--net", "setpriv", "--bounding-set", "-sys_admin"]);
    command.arg(std::env::current_exe().expect("a path"));
    command.args(["--exact", "namespaces::fail_to_make", "--ignored", "--nocapture"]);
    let output = command.env(ROLE, "fail").output().expect("util-linux");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
}

/// Main function of the process that may make no namespace; not a test itself.
#[test]
#[ignore = "run by a_namespace_that_cannot_be_made_changes_no_other_one"]
fn fail_to_make() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let port_start = || fs::read_to_string(PORT_START).expect("a setting");
    let before = port_start();
    let folder = scratch_directory("namespaces");
    let made = create_node_namespaces(&folder.join("node"), &folder.join("client"));
    fs::remove_dir_all(&folder).expect("our own folder");
    assert!(made.is_err(), "it may make namespaces");
    assert_eq!(port_start(), before);
}
