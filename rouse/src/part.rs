//! Shell: `rouse agent|activator|autoscaler|controller`: one part as a process of its own, as pods of Kubernetes run it.
//!
//! The name comes before everything else, and what follows is the part's own: its flags and variables need not get on
//! with those of the other commands.

use std::{ffi::OsString, future::Future, pin::Pin};

use anyhow::{Context as _, Result};
use clap::Parser as _;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::logging;

/// A part that a pod runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// One on each node.
    Agent,
    /// Waiting room and gateway.
    Activator,
    /// Usage → wanted pods.
    Autoscaler,
    /// Objects → children, statuses and routes.
    Controller,
    /// Removes what the agent of this node pinned, for good.
    AgentRemove,
    /// Stands there after that until it is told to end.
    AgentRemoved,
}

type Run = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

/// The controller's settings on Kubernetes.
#[derive(Debug, clap::Parser)]
#[command(name = "rouse controller", version)]
struct Controller {
    #[command(flatten)]
    config: controller::Config,
    #[command(flatten)]
    cluster: controller::config::Cluster,
}

/// The autoscaler's settings.
#[derive(Debug, clap::Parser)]
#[command(name = "rouse autoscaler", version)]
struct Autoscaler {
    #[command(flatten)]
    config: autoscaler::Config,
}

impl Part {
    /// The part that the first word names.
    pub(crate) fn named(word: &str) -> Option<Self> {
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

    /// Runs it until SIGTERM or Ctrl-C. `args` are the words after its name.
    pub(crate) fn run(self, args: impl Iterator<Item = OsString>) -> Result<()> {
        logging::init();
        let shutdown = CancellationToken::new();
        let run = self.prepare(args, shutdown.clone());
        let mut runtime = match self {
            // Its work is one machine behind one lock.
            Self::Controller => tokio::runtime::Builder::new_current_thread(),
            _ => tokio::runtime::Builder::new_multi_thread(),
        };
        let runtime = runtime.enable_all().build().context("cannot start a runtime")?;
        runtime.block_on(async {
            let mut term = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
            tokio::spawn(async move {
                tokio::select! {
                    _ = term.recv() => {}
                    _ = tokio::signal::ctrl_c() => {}
                }
                shutdown.cancel();
            });
            // Spawned, as this thread would otherwise be one more that tasks are handed to and fro with.
            tokio::spawn(run).await.context("the part panicked")?
        })
    }

    /// Reads its settings; a word that is wrong ends the process with a line that says so.
    fn prepare(self, args: impl Iterator<Item = OsString>, shutdown: CancellationToken) -> Run {
        let words = std::iter::once(OsString::from("rouse")).chain(args);
        match self {
            Self::Agent => {
                let config = agent::config::Config::parse_from(words);
                Box::pin(async { agent::run(config, shutdown).await.context("agent failed") })
            }
            Self::Activator => {
                let config = activator::Config::parse_from(words);
                use_all_files();
                Box::pin(async {
                    activator::run(config, shutdown).await.context("activator failed")
                })
            }
            Self::Autoscaler => {
                let config = Autoscaler::parse_from(words).config;
                Box::pin(async {
                    autoscaler::run(config, shutdown).await.context("autoscaler failed")
                })
            }
            Self::AgentRemove => {
                let pins = agent::config::Config::parse_from(words).pins();
                Box::pin(async move {
                    match std::fs::remove_dir_all(&pins) {
                        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                            Err(error).with_context(|| format!("cannot remove {}", pins.display()))
                        }
                        _ => Ok(()),
                    }
                })
            }
            Self::AgentRemoved => Box::pin(async move {
                shutdown.cancelled().await;
                Ok(())
            }),
            Self::Controller => {
                let Controller { config, cluster } = Controller::parse_from(words);
                Box::pin(async {
                    let run = controller::run_on_kubernetes(config, cluster, shutdown);
                    run.await.context("controller failed")
                })
            }
        }
    }
}

/// Connections are as many as files may be open: runtimes of containers start processes with few, and let them have more.
fn use_all_files() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, most)| setrlimit(Resource::RLIMIT_NOFILE, most, most));
    if let Err(error) = raised {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}
