//! Shell: `cargo xtask cluster …`: a real Kubernetes cluster on this machine, in namespaces of its own.

mod addresses;
mod build_recipes;
pub(crate) mod cgroups;
mod config;
mod down;
mod fault;
pub(crate) mod go_toolchain;
mod images;
mod kubectl;
mod network;
mod pki;
mod plan;
mod port_forward;
mod process;
mod programs;
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
    config::KubeProxyMode, fault::FaultAction, plan::ClusterProcess, programs::ClusterPrograms,
    start::ClusterStarter, state::ClusterPaths, up::ClusterUpArgs, versions::KubernetesVersion,
};
use crate::sh;

/// Name of a cluster, and the task to do with it.
#[derive(Debug, clap::Args)]
pub(crate) struct ClusterArgs {
    /// Name of the cluster; several may run side by side
    #[arg(long, global = true, default_value = "rouse")]
    pub(crate) name: String,
    #[command(subcommand)]
    pub(crate) task: ClusterCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// Build what is missing, start what does not run, and wait until all nodes are Ready
    Up(ClusterUpArgs),
    /// Build the programs and images that `up` needs, and start nothing
    Build(ClusterUpArgs),
    /// Stop all processes and remove all files of the cluster
    Down,
    /// Remove clusters of test runs that were killed
    #[command(hide = true)]
    Sweep,
    /// Print the path of the kubeconfig file
    Kubeconfig,
    /// Print the cluster's addresses, files and nodes as JSON
    Status,
    /// Run a program in the control plane's network namespace, or on a node
    Run {
        /// Number of the node to run on, in all of its namespaces
        #[arg(long, value_name = "N")]
        node: Option<u8>,
        /// The program with its arguments; kubectl, ctr and kn are on its PATH, and KUBECONFIG is set
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// Forward connections from a port of this machine to an address in the cluster, until Ctrl-C
    Forward {
        /// Address and port of a pod, node or Service, for example 10.89.0.11:30080
        to: SocketAddr,
        /// Port on 127.0.0.1 [default: any that is free]
        #[arg(long, value_name = "PORT", default_value_t = 0)]
        listen: u16,
    },
    /// Build images again and load them on all nodes
    Load {
        /// Packages to build images of; all when none is named
        packages: Vec<String>,
        #[arg(long, hide = true)]
        prepared: Option<PathBuf>,
    },
    /// Make an image of a static program, and load it on all nodes under each of the names
    Import {
        /// Path of the program
        program: PathBuf,
        /// Names of the image, with their registries and tags
        #[arg(value_name = "NAME", required = true)]
        names: Vec<String>,
    },
    /// Inject a fault into a process or node: etcd, kube-apiserver, node1, node1/kubelet, …
    Fault { action: FaultAction, part: ClusterProcess },
    /// Forward connections from the listener on standard input into the cluster
    #[command(hide = true)]
    Carry { to: SocketAddr },
}

/// Runs the task of `cargo xtask cluster`.
pub(crate) fn run(args: &ClusterArgs) -> Result<()> {
    let paths = ClusterPaths::new(&args.name)?;
    // Builds run as the user, so that the files of Cargo and Go are not those of root.
    match &args.task {
        ClusterCommand::Up(up_args) => up::run(&paths, up_args),
        ClusterCommand::Build(up_args) => up::prepare(&paths, up_args).map(drop),
        ClusterCommand::Down => as_root(|| down::run(&paths)),
        ClusterCommand::Sweep => as_root(down::sweep),
        ClusterCommand::Kubeconfig => {
            paths.require_record()?;
            println!("{}", paths.kubeconfig().display());
            Ok(())
        }
        ClusterCommand::Status => as_root(|| print_status(&paths)),
        ClusterCommand::Run { node, command } => as_root(|| run_inside(&paths, *node, command)),
        ClusterCommand::Forward { to, listen } => as_root(|| forward_port(&paths, *to, *listen)),
        ClusterCommand::Load { packages, prepared } => {
            up::load_images(&paths, packages, prepared.as_deref())
        }
        ClusterCommand::Import { program, names } => {
            as_root(|| up::import_program(&paths, program, names))
        }
        ClusterCommand::Fault { action, part: process } => {
            as_root(|| fault::run(&paths, *action, *process))
        }
        ClusterCommand::Carry { to } => port_forward::run(*to),
    }
}

/// Returns Prometheus' `promtool`, found or built once like the cluster's programs.
pub(crate) fn promtool() -> Result<PathBuf> {
    programs::find_or_build(&build_recipes::BuildRecipe::promtool())
}

/// Returns kube-proxy of the version that clusters run by default, built once like the cluster's other programs.
pub(crate) fn kube_proxy() -> Result<PathBuf> {
    programs::find_or_build_kube_proxy(programs::default_version()?)
}

/// Returns Helm, found or built once like the cluster's programs.
pub(crate) fn helm() -> Result<PathBuf> {
    programs::find_or_build(&build_recipes::BuildRecipe::helm())
}

/// Returns true if [`helm`] need not build Helm first, which takes minutes.
pub(crate) fn has_helm() -> Result<bool> {
    programs::is_available(&build_recipes::BuildRecipe::helm())
}

/// Returns the directory of the conformance tests of the Gateway API, built once like the cluster's programs.
pub(crate) fn build_gateway_conformance() -> Result<PathBuf> {
    programs::find_or_build_folder(&build_recipes::BuildRecipe::gateway_conformance())
}

/// Returns the directory of these tests; `None` if they must be built first, which takes minutes.
pub(crate) fn find_gateway_conformance() -> Result<Option<PathBuf>> {
    programs::find_folder(&build_recipes::BuildRecipe::gateway_conformance())
}

/// Returns the file with the kinds of the Gateway API, fetched once from their Go module.
pub(crate) fn fetch_gateway_kinds() -> Result<PathBuf> {
    programs::find_or_build_manifests(&build_recipes::BuildRecipe::gateway_kinds())
}

/// Returns true if xtask has created a cluster `name`.
pub(crate) fn exists(name: &str) -> Result<bool> {
    Ok(ClusterPaths::new(name)?.read_record()?.is_some())
}

/// Returns true if Knative's client `kn` is on the `PATH` or has been built.
pub(crate) fn has_kn() -> Result<bool> {
    Ok(ClusterPrograms::find(programs::default_version()?, None)?.file("kn").is_ok())
}

/// Runs `work` as root: directly, or by running the whole command again through sudo.
fn as_root(work: impl FnOnce() -> Result<()>) -> Result<()> {
    if sh::is_root() {
        return work();
    }
    sh::run(sh::root_command(std::env::current_exe()?).args(std::env::args_os().skip(1)))
}

/// Calls `work` with the record and the programs of an existing cluster.
fn with_existing_cluster<T>(
    paths: &ClusterPaths,
    work: impl FnOnce(&ClusterStarter<'_>) -> Result<T>,
) -> Result<T> {
    // The programs of the version that the cluster runs, which may not be the default version.
    let record = paths.require_record()?;
    let version: KubernetesVersion = record.kubernetes.parse().map_err(anyhow::Error::msg)?;
    let programs = ClusterPrograms::find(version, record.assets.as_deref())?;
    work(&ClusterStarter { paths, record: &record, programs: &programs })
}

fn print_status(paths: &ClusterPaths) -> Result<()> {
    let described = with_existing_cluster(paths, kubectl::describe_cluster)?;
    println!("{}", serde_json::to_string_pretty(&described)?);
    Ok(())
}

/// Listens on the host, then replaces this process by `cluster carry` inside the cluster's network namespace.
fn forward_port(paths: &ClusterPaths, address: SocketAddr, port: u16) -> Result<()> {
    paths.require_record()?;
    let listener = std::net::TcpListener::bind(("127.0.0.1", port))
        .with_context(|| format!("cannot listen on port {port} of 127.0.0.1"))?;
    println!("http://{} leads to {address}", listener.local_addr()?);
    // The socket stays in the host's namespace although the process enters another: see `port_forward`.
    let netns = format!("--net={}", paths.netns(None).display());
    let carry = ["cluster".to_owned(), "carry".to_owned(), address.to_string()];
    let error = Command::new("nsenter")
        .arg(netns)
        .arg(std::env::current_exe()?)
        .args(carry)
        .stdin(std::os::fd::OwnedFd::from(listener))
        .exec();
    Err(error).context("cannot start nsenter")
}

/// Replaces this process by a command in the namespaces of a node, or in the network namespace of the cluster.
fn run_inside(paths: &ClusterPaths, node: Option<u8>, command: &[OsString]) -> Result<()> {
    let (enter, folders) = with_existing_cluster(paths, |starter| {
        let enter = match node {
            Some(node) => starter.nsenter_words(node)?,
            None => {
                let netns = paths.netns(None);
                vec!["nsenter".into(), format!("--net={}", netns.display()).into()]
            }
        };
        Ok((enter, starter.programs.folders()))
    })?;
    // A node has its own loopback, so it needs the kubeconfig with the API server's address.
    let config = node.map_or_else(|| paths.kubeconfig(), |_| paths.kubeconfig_inside());
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
