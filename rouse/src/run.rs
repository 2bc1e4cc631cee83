//! Shell: `rouse run -- CMD`: replaces this process by the command, as a client inside the node.
//!
//! The process enters the clients' network namespace and the clients' cgroup, where the eBPF programs handle its
//! connects. It also enters a mount namespace of its own, in which `/etc/resolv.conf` names the node's DNS. Files, user
//! and terminal stay those of the caller, and the exit code is the command's.

use std::{
    fs, io,
    os::{fd::AsFd as _, unix::process::CommandExt as _},
    path::Path,
    process::{Command, ExitCode},
};

use local::{cgroups::CgroupMounts, layout::NodeLayout, net};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};

use crate::{command_error::CommandError, stdout};

const RESOLV_CONF: &str = "/etc/resolv.conf";
/// Exit code of a shell for a command that is not found.
const NOT_FOUND: u8 = 127;
/// Exit code of a shell for a command that cannot be executed.
const NOT_EXECUTABLE: u8 = 126;

/// Replaces this process by the command. Returns only on failure.
pub(crate) fn exec_in_node(
    layout: &NodeLayout,
    command: &[String],
) -> Result<ExitCode, CommandError> {
    let [program, args @ ..] = command else {
        return Err(CommandError::Usage("a command is needed: rouse run -- CMD".to_owned()));
    };
    enter_node(layout)?;
    // As this process itself, so that signals and the exit code are the command's own.
    let error = Command::new(program).args(args).exec();
    stdout::print_error(&format!("rouse: cannot run {program}: {error}"));
    Ok(ExitCode::from(match error.kind() {
        io::ErrorKind::NotFound => NOT_FOUND,
        _ => NOT_EXECUTABLE,
    }))
}

/// Moves this process into the node. The process has one thread, so all of it moves.
fn enter_node(layout: &NodeLayout) -> Result<(), CommandError> {
    let path = layout.client_namespace();
    if !net::is_published(&path) {
        let hint = ", or name another with --node";
        return Err(CommandError::NodeDown { node: layout.name().to_owned(), hint });
    }
    let mounts = CgroupMounts::find().map_err(|error| CommandError::Usage(error.to_string()))?;
    let cgroup = layout.clients_cgroup(&mounts.v2).join("cgroup.procs");
    // PID 0 means the writing process; its children are created in the same cgroup.
    fs::write(&cgroup, "0").map_err(CommandError::file_error("join the node through", &cgroup))?;
    mount_resolv_conf(&layout.resolv_conf())
        .map_err(CommandError::file_error("put the node's names into", RESOLV_CONF))?;
    let entered = net::open_namespace(&path).and_then(|fd| net::enter_namespace(fd.as_fd()));
    entered.map_err(|error| {
        let source = io::Error::other(common::link::error_chain(&error));
        CommandError::File { attempt: "enter", path, source }
    })
}

/// Mounts `names` over `/etc/resolv.conf`, for this process and its children only.
fn mount_resolv_conf(names: &Path) -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    // Private first: a shared mount would propagate the bind mount to the host.
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
    mount(Some(names), RESOLV_CONF, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_is_down_is_named_with_what_to_do() {
        let layout = NodeLayout::new("cli-no-such-node").unwrap();
        let error = exec_in_node(&layout, &["true".to_owned()]).unwrap_err().to_string();
        assert_eq!(
            error,
            "error: node \"cli-no-such-node\" is not running: start it with `rouse up`, or name another with --node"
        );
    }
}
