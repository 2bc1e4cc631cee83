//! Shell: `cargo xtask cluster …`: a real Kubernetes on this machine, in namespaces of its own.

mod addresses;
mod carry;
mod cgroups;
mod config;
mod down;
mod fault;
pub(crate) mod golang;
mod images;
mod kubectl;
mod network;
mod pki;
mod plan;
mod process;
mod programs;
mod recipes;
mod start;
mod state;
mod up;
mod versions;

use std::{
    ffi::OsString, net::SocketAddr, os::unix::process::CommandExt as _, path::PathBuf,
    process::Command,
};

use anyhow::{Context as _, Result};
use clap::Subcommand;

use self::{
    config::ProxyMode, fault::Action, plan::Process, programs::Programs, start::Starter,
    state::State, up::UpArgs, versions::Version,
};
use crate::sh;

/// Which cluster, and what to do with it.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Which cluster; several may run side by side
    #[arg(long, global = true, default_value = "rouse")]
    pub(crate) name: String,
    #[command(subcommand)]
    pub(crate) task: Task,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Task {
    /// Build what is missing, start what does not run, and wait until all nodes are Ready
    Up(UpArgs),
    /// Build what `up` would, and no more
    Build(UpArgs),
    /// Stop everything and remove every trace
    Down,
    /// Print the path of the kubeconfig file
    Kubeconfig,
    /// Print what the cluster is as JSON
    Status,
    /// Run a program in the control plane's network namespace, or on a node
    Run {
        /// On this node, in all of its namespaces
        #[arg(long, value_name = "N")]
        node: Option<u8>,
        /// The program; kubectl, ctr and kn are found, and KUBECONFIG is set
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// Carry connections from a port of this machine to an address in the cluster, until Ctrl-C
    Forward {
        /// A pod's, node's or Service's address and port: 10.89.0.11:30080
        to: SocketAddr,
        /// Port on 127.0.0.1 [default: any that is free]
        #[arg(long, value_name = "PORT", default_value_t = 0)]
        listen: u16,
    },
    /// Build images anew and give them to all nodes
    Load {
        /// Packages to make images of; all when none is named
        packages: Vec<String>,
        #[arg(long, hide = true)]
        prepared: Option<PathBuf>,
    },
    /// Do harm to a part: etcd, kube-apiserver, node1, node1/kubelet, …
    Fault { action: Action, part: Process },
    /// Carry connections from the listener on standard input into the cluster
    #[command(hide = true)]
    Carry { to: SocketAddr },
}

/// `cargo xtask cluster`.
pub(crate) fn run(args: &Args) -> Result<()> {
    let state = State::new(&args.name)?;
    match &args.task {
        Task::Up(up) => up::run(&state, up),
        Task::Build(up) => up::prepare(&state, up).map(drop),
        Task::Down => as_root(|| down::run(&state)),
        Task::Kubeconfig => {
            state.existing()?;
            println!("{}", state.kubeconfig().display());
            Ok(())
        }
        Task::Status => as_root(|| status(&state)),
        Task::Run { node, command } => as_root(|| run_inside(&state, *node, command)),
        Task::Forward { to, listen } => as_root(|| forward(&state, *to, *listen)),
        Task::Load { packages, prepared } => up::load(&state, packages, prepared.as_deref()),
        Task::Fault { action, part } => as_root(|| fault::run(&state, *action, *part)),
        Task::Carry { to } => carry::run(*to),
    }
}

/// Prometheus' `promtool`, found or built once like the cluster's programs.
pub(crate) fn promtool() -> Result<PathBuf> {
    programs::one(&recipes::Recipe::promtool())
}

/// Helm, found or built once like the cluster's programs.
pub(crate) fn helm() -> Result<PathBuf> {
    programs::one(&recipes::Recipe::helm())
}

/// Whether [`helm`] would not have to be built, which takes minutes.
pub(crate) fn has_helm() -> Result<bool> {
    programs::is_at_hand(&recipes::Recipe::helm())
}

/// Whether there is a cluster `name` that xtask made.
pub(crate) fn exists(name: &str) -> Result<bool> {
    Ok(State::new(name)?.mark()?.is_some())
}

/// Whether Knative's client is on the `PATH` or could be built.
pub(crate) fn has_kn() -> Result<bool> {
    Ok(Programs::find(programs::default_version()?, None)?.file("kn").is_ok())
}

/// Does `work` when we are root; else starts this very command again through sudo.
fn as_root(work: impl FnOnce() -> Result<()>) -> Result<()> {
    if sh::is_root() {
        return work();
    }
    sh::run(sh::raised(std::env::current_exe()?).args(std::env::args_os().skip(1)))
}

/// Calls `work` with an existing cluster.
fn with<T>(state: &State, work: impl FnOnce(&Starter<'_>) -> Result<T>) -> Result<T> {
    let mark = state.existing()?;
    let version: Version = mark.kubernetes.parse().map_err(anyhow::Error::msg)?;
    let programs = Programs::find(version, mark.assets.as_deref())?;
    work(&Starter { state, mark: &mark, programs: &programs })
}

fn status(state: &State) -> Result<()> {
    let described = with(state, |starter| kubectl::describe(starter, state))?;
    println!("{}", serde_json::to_string_pretty(&described)?);
    Ok(())
}

/// Listens on the host and goes on as the process that carries from inside.
fn forward(state: &State, to: SocketAddr, port: u16) -> Result<()> {
    state.existing()?;
    let listener = std::net::TcpListener::bind(("127.0.0.1", port))
        .with_context(|| format!("cannot listen on port {port} of 127.0.0.1"))?;
    println!("http://{} leads to {to}", listener.local_addr()?);
    let netns = format!("--net={}", state.netns(None).display());
    let carry = ["cluster".to_owned(), "carry".to_owned(), to.to_string()];
    let error = Command::new("nsenter")
        .arg(netns)
        .arg(std::env::current_exe()?)
        .args(carry)
        .stdin(std::os::fd::OwnedFd::from(listener))
        .exec();
    Err(error).context("cannot start nsenter")
}

fn run_inside(state: &State, node: Option<u8>, command: &[OsString]) -> Result<()> {
    let (enter, folders) = with(state, |starter| {
        let enter = match node {
            Some(node) => starter.enter(node)?,
            None => {
                let netns = state.netns(None);
                vec!["nsenter".into(), format!("--net={}", netns.display()).into()]
            }
        };
        Ok((enter, starter.programs.folders()))
    })?;
    let config = node.map_or_else(|| state.kubeconfig(), |_| state.kubeconfig_inside());
    let mut path = folders;
    path.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    let error = Command::new(&enter[0])
        .args(&enter[1..])
        .args(command)
        .env("PATH", std::env::join_paths(path)?)
        .env("KUBECONFIG", config)
        .exec();
    Err(error).context("cannot start nsenter")
}
