//! Shell: `rouse agent|activator|autoscaler|controller`: one component in a process of its own, as in Kubernetes pods.
//!
//! The component's name is the first word, and all later words are its own. So its flags and variables may clash with
//! those of the other commands.

use std::{ffi::OsString, future::Future, pin::Pin};

use anyhow::{Context as _, Result, bail};
use clap::Parser as _;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::logging;

/// First word of the command line in a pod: the component that the process runs, or a step of its removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ComponentCommand {
    /// Agent, which runs on each node.
    Agent,
    /// Activator: requests that wait for a pod, and the gateway.
    Activator,
    /// Autoscaler: usage → requested scale.
    Autoscaler,
    /// Controller: objects → child objects, statuses and routes.
    Controller,
    /// Removal of the pins, the bootstrap file and the routes of this node's agent, for good.
    AgentRemove,
    /// Idle process after the removal, until it is ended.
    AgentRemoved,
}

type ComponentFuture = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

/// Command-line settings of the controller on Kubernetes.
#[derive(Debug, clap::Parser)]
#[command(name = "rouse controller", version)]
struct ControllerCli {
    #[command(flatten)]
    config: controller::ControllerConfig,
    #[command(flatten)]
    cluster: controller::shell::config::KubernetesConfig,
}

/// Command-line settings of the autoscaler.
#[derive(Debug, clap::Parser)]
#[command(name = "rouse autoscaler", version)]
struct AutoscalerCli {
    #[command(flatten)]
    config: autoscaler::AutoscalerConfig,
}

impl ComponentCommand {
    /// Returns the component that the first word names.
    pub(crate) fn from_word(word: &str) -> Option<Self> {
        Some(match word {
            "agent" => Self::Agent,
            "activator" => Self::Activator,
            "autoscaler" => Self::Autoscaler,
            "controller" => Self::Controller,
            "agent-remove" => Self::AgentRemove,
            "agent-removed" => Self::AgentRemoved,
            _ => return None,
        })
    }

    /// Runs the component until SIGTERM or Ctrl-C. `args` are the words after its name.
    pub(crate) fn run(self, args: impl Iterator<Item = OsString>) -> Result<()> {
        logging::init();
        let shutdown = CancellationToken::new();
        let run = self.prepare_run(args, shutdown.clone());
        let mut runtime = match self {
            // One thread, because the controller is one state machine behind one lock.
            Self::Controller => tokio::runtime::Builder::new_current_thread(),
            _ => tokio::runtime::Builder::new_multi_thread(),
        };
        let runtime = runtime.enable_all().build().context("cannot start a runtime")?;
        runtime.block_on(async {
            // As PID 1 of its container a process ignores SIGTERM unless it handles it.
            let mut term = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
            tokio::spawn(async move {
                tokio::select! {
                    _ = term.recv() => {}
                    _ = tokio::signal::ctrl_c() => {}
                }
                shutdown.cancel();
            });
            // Spawned, because tasks would otherwise move between the runtime's workers and this thread.
            tokio::spawn(run).await.context("the component panicked")?
        })
    }

    /// Parses the component's settings; an invalid word ends the process with a message.
    fn prepare_run(
        self,
        args: impl Iterator<Item = OsString>,
        shutdown: CancellationToken,
    ) -> ComponentFuture {
        let args = std::iter::once(OsString::from("rouse")).chain(args);
        match self {
            Self::Agent => {
                let config = agent::config::AgentConfig::parse_from(args);
                Box::pin(async { agent::run(config, shutdown).await.context("agent failed") })
            }
            Self::Activator => {
                let config = activator::ActivatorConfig::parse_from(args);
                // An activator holds many connections of clients, and its bounds follow from the limit.
                raise_file_limit();
                Box::pin(async {
                    activator::run(config, shutdown).await.context("activator failed")
                })
            }
            Self::Autoscaler => {
                let config = AutoscalerCli::parse_from(args).config;
                Box::pin(async {
                    autoscaler::run(config, shutdown).await.context("autoscaler failed")
                })
            }
            Self::AgentRemove => {
                let config = agent::config::AgentConfig::parse_from(args);
                Box::pin(async move {
                    // Routes that stay would end connects that kube-proxy serves, so pins must not hold them up.
                    let routes = remove_routes();
                    remove_agent_files(&config).and(routes)
                })
            }
            Self::AgentRemoved => Box::pin(async move {
                shutdown.cancelled().await;
                Ok(())
            }),
            Self::Controller => {
                let ControllerCli { config, cluster } = ControllerCli::parse_from(args);
                Box::pin(async {
                    let run = controller::run_on_kubernetes(config, cluster, shutdown);
                    run.await.context("controller failed")
                })
            }
        }
    }
}

/// Removes the pins and the bootstrap file of this node's agent.
fn remove_agent_files(config: &agent::config::AgentConfig) -> Result<()> {
    let pins = config.pins();
    // Programs are detached before the links that keep them go: until the kernel frees those, connects would still be
    // redirected.
    agent::kernel::programs::remove_pins(&pins).context("cannot remove the eBPF programs")?;
    let removed = [(&pins, std::fs::remove_dir_all(&pins))];
    let files = config.bootstrap_files();
    let files = files.iter().map(|file| (file, std::fs::remove_file(file)));
    for (path, result) in removed.into_iter().chain(files) {
        match result {
            // The init container may run again after a restart of its pod.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            result => result.with_context(|| format!("cannot remove {}", path.display()))?,
        }
    }
    Ok(())
}

/// Removes the agent's routes for ranges of ClusterIPs from the node's main table.
fn remove_routes() -> Result<()> {
    let attempt = "cannot remove the routes of ranges of ClusterIPs";
    let changes = agent::net::unreachable_routes::set_unreachable(&[].into()).context(attempt)?;
    match changes.failure {
        None => Ok(()),
        Some(failure) => bail!("{attempt}: {failure}"),
    }
}

/// Raises the soft limit of open files to the hard limit. Container runtimes start processes with a low one, which
/// would bound the connections.
fn raise_file_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard_limit)| setrlimit(Resource::RLIMIT_NOFILE, hard_limit, hard_limit));
    if let Err(error) = raised {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}
