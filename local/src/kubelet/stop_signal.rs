//! Shell: sends a container the signal that asks it to end.

use std::fs;
use std::os::fd::BorrowedFd;
use std::path::Path;

use oci_spec::runtime::Spec;

use crate::bundle::STOP_SIGNAL_ANNOTATION;
use crate::sys;

/// Asks a container to end, by the `STOPSIGNAL` of the image of its present run, else by SIGTERM.
///
/// The bundle has the signal of that run. The image itself is not known after a restart of the node's process, and by
/// then its tag may name another image.
pub(super) fn send_stop_signal(bundle: &Path, process: BorrowedFd<'_>) {
    let signal = read_stop_signal(bundle).unwrap_or(libc::SIGTERM);
    // An error means that the process has ended; its exit is reported by its own task.
    let _gone = sys::pidfd_signal(process, signal);
}

/// Reads the signal that the start of the container recorded.
fn read_stop_signal(bundle: &Path) -> Option<i32> {
    let spec: Spec = serde_json::from_slice(&fs::read(bundle.join("config.json")).ok()?).ok()?;
    sys::signal_number(spec.annotations().as_ref()?.get(STOP_SIGNAL_ANNOTATION)?)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;

    use nix::unistd::Pid;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_container_gets_the_signal_that_its_start_recorded() {
        let bundle = std::env::temp_dir().join(format!("rouse-stop-{}", std::process::id()));
        fs::create_dir_all(&bundle).unwrap();
        // Not SIGQUIT or SIGINT: a shell starts background commands, and so these tests, with both ignored.
        for (annotations, signal) in [
            (json!({ STOP_SIGNAL_ANNOTATION: "SIGUSR1" }), libc::SIGUSR1),
            (json!({ STOP_SIGNAL_ANNOTATION: "no signal" }), libc::SIGTERM),
            (json!(null), libc::SIGTERM),
        ] {
            let spec = json!({ "ociVersion": "1.0.2", "annotations": annotations });
            fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
            let mut process = Command::new("sleep").arg("60").spawn().unwrap();
            let pid = Pid::from_raw(i32::try_from(process.id()).unwrap());
            send_stop_signal(&bundle, sys::pidfd_open(pid).unwrap().as_fd());
            assert_eq!(process.wait().unwrap().signal(), Some(signal), "{annotations}");
        }
        fs::remove_dir_all(&bundle).unwrap();
    }
}
