//! Shell: a local node, driven by the `rouse` command as a user would.

use std::{
    cell::Cell,
    fs::{self, File},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use crate::sh;

/// The node's name; its namespaces, cgroups and folders carry it.
const NAME: &str = "demo";
/// A node that is not up by then will not come up.
const START_WITHIN: Duration = Duration::from_secs(60);

/// A running node. Stopped when dropped, unless it was left running.
#[derive(Debug)]
pub(super) struct Node {
    rouse: PathBuf,
    log: PathBuf,
    up: std::cell::RefCell<Child>,
    is_over: Cell<bool>,
}

impl Node {
    /// Starts the node and waits until all its parts say that they are ready.
    pub(super) fn start(
        rouse: &Path,
        images: &Path,
        gateway: SocketAddr,
        log: &Path,
    ) -> Result<Self> {
        // What a killed run before this one may have left.
        let _ = command(rouse, &["down"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
        let ready = log.with_extension("ready");
        let _ = fs::remove_file(&ready);
        let out = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut up = command(rouse, &["up"]);
        up.arg("--images").arg(images).arg("--gateway").arg(gateway.to_string());
        up.arg("--ready-file").arg(&ready);
        up.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let up = up.spawn().context("cannot start `rouse up`")?;
        let node = Self {
            rouse: rouse.to_owned(),
            log: log.to_owned(),
            up: up.into(),
            is_over: Cell::new(false),
        };
        node.wait_until_ready(&ready)?;
        Ok(node)
    }

    fn wait_until_ready(&self, ready: &Path) -> Result<()> {
        let started = Instant::now();
        while !ready.exists() {
            if let Some(status) = self.up.borrow_mut().try_wait()? {
                self.is_over.set(true);
                bail!("`rouse up` ended with {status}:\n{}", self.last_lines());
            }
            if started.elapsed() > START_WITHIN {
                bail!("`rouse up` was not ready within {START_WITHIN:?}:\n{}", self.last_lines());
            }
            super::screen::pause(Duration::from_millis(20));
        }
        Ok(())
    }

    /// `rouse ARGS --node …`, as root.
    pub(super) fn rouse(&self, args: &[&str]) -> Command {
        command(&self.rouse, args)
    }

    /// A program in the client's network namespace.
    pub(super) fn run(&self, program: &Path) -> Command {
        let mut command = command(&self.rouse, &["run"]);
        command.arg("--").arg(program);
        command
    }

    /// What the node logged until now.
    pub(super) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub(super) fn log_file(&self) -> &Path {
        &self.log
    }

    /// Stops the node and removes everything of it.
    pub(super) fn stop(&self) -> Result<()> {
        if self.is_over.replace(true) {
            return Ok(());
        }
        let down = sh::capture(&mut command(&self.rouse, &["down"]));
        let status = self.up.borrow_mut().wait().context("cannot wait for `rouse up`")?;
        down.context("cannot stop the node")?;
        if !status.success() {
            bail!("`rouse up` ended with {status}:\n{}", self.last_lines());
        }
        Ok(())
    }

    /// Prints what to type, and lets the node live on.
    pub(super) fn leave_running(&self, gateway: SocketAddr) {
        self.is_over.set(true);
        let rouse = self.rouse.display();
        let sudo = if sh::is_root() { "" } else { "sudo " };
        println!("\nThe node is still running. Try:");
        println!(
            "  {sudo}{rouse} run --node {NAME} -- curl -s http://hello.default.svc.cluster.local/"
        );
        println!("  curl -s -H 'Host: hello.default.localhost' http://{gateway}/");
        println!("  {sudo}{rouse} get pods --node {NAME}");
        println!("  {sudo}{rouse} top --node {NAME}");
        println!("  {sudo}{rouse} down --node {NAME}");
    }

    fn last_lines(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            eprintln!("demo: {error:#}");
        }
    }
}

fn command(rouse: &Path, args: &[&str]) -> Command {
    let mut command = sh::raised(rouse);
    command.args(args).args(["--node", NAME]);
    command
}
