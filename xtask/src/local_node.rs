//! Shell: a local node, operated by the `rouse` command as a user would.

use std::{
    cell::{Cell, RefCell},
    fs::{self, File},
    net::SocketAddr,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use crate::{frozen_pods::frozen_pods, machine, sh};

/// Timeout for the start of a node.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A running local node. It stops on drop, unless it was left running.
#[derive(Debug)]
pub(crate) struct LocalNode {
    /// Name of the node, which its namespaces, cgroups and directories carry.
    name: String,
    rouse: PathBuf,
    log: PathBuf,
    process: RefCell<Child>,
    /// True once dropping it stops nothing: the node was stopped or has ended, or was left running.
    is_released: Cell<bool>,
}

impl LocalNode {
    /// Starts the node and waits until all its components are ready. With `outlives_xtask`, it may outlive xtask.
    pub(crate) fn start(
        name: &str,
        rouse: &Path,
        images: &Path,
        gateway: SocketAddr,
        log: &Path,
        outlives_xtask: bool,
    ) -> Result<Self> {
        // Removes what a killed earlier run may have left; without one, the command fails.
        let _ = command(rouse, name, &["down", "--purge"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        let ready = log.with_extension("ready");
        let _ = fs::remove_file(&ready);
        let out = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut up_command = command(rouse, name, &["up"]);
        up_command.arg("--images").arg(images).arg("--gateway").arg(gateway.to_string());
        up_command.arg("--ready-file").arg(&ready);
        if outlives_xtask {
            // A process group of its own: neither Ctrl-C nor the end of the session reaches it.
            up_command.process_group(0);
        }
        up_command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let process = up_command.spawn().context("cannot start `rouse up`")?;
        let node = Self {
            name: name.to_owned(),
            rouse: rouse.to_owned(),
            log: log.to_owned(),
            process: process.into(),
            is_released: Cell::new(false),
        };
        node.wait_until_ready(&ready)?;
        Ok(node)
    }

    fn wait_until_ready(&self, ready: &Path) -> Result<()> {
        let started = Instant::now();
        while !ready.exists() {
            // A node that has ended never writes the file, so waiting on would only cost time.
            if let Some(status) = self.process.borrow_mut().try_wait()? {
                self.is_released.set(true);
                bail!("`rouse up` ended with {status}:\n{}", self.last_lines());
            }
            if started.elapsed() > START_TIMEOUT {
                bail!("`rouse up` was not ready within {START_TIMEOUT:?}:\n{}", self.last_lines());
            }
            sh::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Command `rouse --node … ARGS`, as root.
    pub(crate) fn rouse_command(&self, args: &[&str]) -> Command {
        command(&self.rouse, &self.name, args)
    }

    /// Command that runs a program in the client's network namespace and cgroup.
    pub(crate) fn client_command(&self, program: &Path) -> Command {
        let mut command = command(&self.rouse, &self.name, &["run"]);
        command.arg("--").arg(program);
        command
    }

    /// Path of the network namespace `role` of the node: `node` or `client`.
    pub(crate) fn netns_path(&self, role: &str) -> PathBuf {
        Path::new("/run/rouse").join(&self.name).join("netns").join(role)
    }

    /// Directories of the cgroups of all frozen pods, which any user may read.
    pub(crate) fn frozen_pods(&self) -> Result<Vec<PathBuf>> {
        let mount = machine::cgroup2().context("no cgroup2 file system is mounted")?;
        Ok(frozen_pods(&mount.join(format!("rouse-{}", self.name)).join("pods")))
    }

    /// Process id of `rouse up`, if xtask runs as root, as the benches do. Otherwise it is that of sudo.
    pub(crate) fn pid(&self) -> u32 {
        self.process.borrow().id()
    }

    /// Log of the node so far.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub(crate) fn log_file(&self) -> &Path {
        &self.log
    }

    /// Stops the node and removes its files, namespaces and cgroups.
    pub(crate) fn stop(&self) -> Result<()> {
        if self.is_released.replace(true) {
            return Ok(());
        }
        // After a failure `rouse up` may run on, so waiting for it could take forever.
        sh::capture(&mut command(&self.rouse, &self.name, &["down", "--purge"]))
            .context("cannot stop the node")?;
        let status = self.process.borrow_mut().wait().context("cannot wait for `rouse up`")?;
        if !status.success() {
            bail!("`rouse up` ended with {status}:\n{}", self.last_lines());
        }
        Ok(())
    }

    /// Prints commands to try, and keeps the node running.
    pub(crate) fn leave_running(&self, gateway: SocketAddr) {
        self.is_released.set(true);
        let (rouse, name) = (self.rouse.display(), &self.name);
        let sudo = if sh::is_root() { "" } else { "sudo " };
        println!("\nThe node is still running. Try:");
        println!(
            "  {sudo}{rouse} --node {name} run -- curl -s http://hello.default.svc.cluster.local/"
        );
        println!("  curl -s -H 'Host: hello.default.localhost' http://{gateway}/");
        println!("  {sudo}{rouse} get pods --node {name}");
        println!("  {sudo}{rouse} top --node {name}");
        println!("  {sudo}{rouse} down --purge --node {name}");
    }

    fn last_lines(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }
}

impl Drop for LocalNode {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            eprintln!("node {}: {error:#}", self.name);
        }
    }
}

fn command(rouse: &Path, name: &str, args: &[&str]) -> Command {
    // The log is read by programs, and colours would be in the way.
    let mut command = sh::root_command_with(rouse, &[("NO_COLOR", "1".as_ref())]);
    command.args(["--node", name]).args(args);
    command
}
