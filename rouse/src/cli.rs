//! Shell: the command line and its dispatch. Names and flags are those of kubectl.

use std::{io::IsTerminal as _, process::ExitCode};

use clap::{Args, Parser, Subcommand};
use local::{layout::NodeLayout, node::NodeManager};
use tracing_subscriber::EnvFilter;

use crate::{
    apply,
    args::{ApplyArgs, DEFAULT_NODE, DeleteArgs, DescribeArgs, GetArgs, LogsArgs, TopArgs},
    check, delete, describe, get, install, logs, routes, run, services, stdout,
    store::NodeStore,
    top, trace, up,
};

/// Services that sleep at zero pods and wake on the next request.
///
/// `rouse up` runs a node on this machine; the other commands use it as kubectl uses a cluster.
#[derive(Debug, Parser)]
#[command(name = "rouse", version, propagate_version = true)]
pub(crate) struct RouseCli {
    /// Name of the node, where several run side by side [default: rouse]; with --kubeconfig, of the Kubernetes node
    #[arg(long, global = true, env = "ROUSE_NODE", value_name = "NAME")]
    node: Option<String>,
    #[command(subcommand)]
    command: RouseCommand,
}

#[derive(Debug, Subcommand)]
enum RouseCommand {
    /// Run a node on this machine until it is interrupted
    Up(up::NodeUpArgs),
    /// End the node and remove its processes, namespaces, cgroups, mounts and pins
    Down(DownArgs),
    /// Run a command inside the node, where services have their names and addresses
    Run(RunArgs),
    /// Create or change services from YAML or JSON
    Apply(ApplyArgs),
    /// List objects, or show one
    Get(GetArgs),
    /// Show an object with all its fields and its status
    Describe(DescribeArgs),
    /// Print the output of the containers of a pod or service
    Logs(LogsArgs),
    /// Watch services, pods, requests and paths live
    Top(TopArgs),
    /// List the services that a node's agent serves at their ClusterIPs
    Services(services::ServicesArgs),
    /// List the hosts that an activator routes, with their Revisions and pods
    Routes(routes::RoutesArgs),
    /// Show where a connect to an address or a request to a host goes, and why
    Trace(trace::TraceArgs),
    /// Delete services by name or manifest
    Delete(DeleteArgs),
    /// Check a machine or the nodes of a cluster, and print what must be done
    Check(check::CheckArgs),
    /// Print the manifests of Rouse on Kubernetes, or apply them
    Install(install::InstallArgs),
    /// Remove Rouse from a cluster and leave users' objects and pods
    Uninstall(install::UninstallArgs),
}

#[derive(Debug, Args)]
struct DownArgs {
    /// Remove applied manifests, images and logs too
    #[arg(long)]
    purge: bool,
}

#[derive(Debug, Args)]
struct RunArgs {
    /// Command to run, with its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "CMD"
    )]
    command: Vec<String>,
}

impl RouseCli {
    /// Runs the command and returns its exit code.
    pub(crate) fn dispatch(self) -> anyhow::Result<ExitCode> {
        let node = self.node.as_deref();
        let local_node = match &self.command {
            // A Kubernetes node may have a name that no local node can have.
            RouseCommand::Services(_)
            | RouseCommand::Routes(_)
            | RouseCommand::Trace(_)
            | RouseCommand::Check(_) => None,
            _ => node,
        };
        let layout = NodeLayout::new(local_node.unwrap_or(DEFAULT_NODE))?;
        let store = NodeStore::new(&layout);
        // Only `up` and `down` log: the output of the other commands is for the terminal and for scripts.
        match self.command {
            RouseCommand::Up(args) => {
                init_logging();
                up::run(&layout, &args)?;
            }
            RouseCommand::Down(down_args) => {
                up::require_root()?;
                init_logging();
                if down_args.purge {
                    NodeManager::purge(&layout)?
                } else {
                    NodeManager::destroy(&layout)?
                }
                stdout::print_line(&format!("node {} is down", layout.name()))?;
            }
            RouseCommand::Run(args) => return Ok(run::exec_in_node(&layout, &args.command)?),
            RouseCommand::Apply(args) => return Ok(apply::apply(&store, &args)?),
            RouseCommand::Get(args) => get::get(&store, &args)?,
            RouseCommand::Describe(args) => describe::describe(&store, &args)?,
            RouseCommand::Logs(args) => logs::logs(&layout, &store, &args)?,
            RouseCommand::Top(args) => top::top(&layout, &store, &args)?,
            RouseCommand::Services(args) => services::services(node, &args)?,
            RouseCommand::Routes(args) => routes::routes(node, &args)?,
            RouseCommand::Trace(args) => trace::trace(node, &args)?,
            RouseCommand::Delete(args) => return Ok(delete::delete(&layout, &store, &args)?),
            RouseCommand::Check(args) => return check::check(&args, node),
            RouseCommand::Install(args) => install::install(&args)?,
            RouseCommand::Uninstall(args) => install::uninstall(&args)?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Sets up logging of the components to standard error; `RUST_LOG` selects the levels.
fn init_logging() {
    // hickory logs each DNS query at level info, and clients of the gateway cause warnings of rustls at will.
    let default_filter = |_| EnvFilter::new("info,hickory_server=warn,rustls=error");
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(default_filter);
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // Colours suit only a terminal: a file or a pipe gets plain lines.
    let has_no_color = std::env::var_os("NO_COLOR").is_some_and(|it| !it.is_empty());
    log.with_ansi(!has_no_color && std::io::stderr().is_terminal()).init();
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        RouseCli::command().debug_assert();
    }

    #[test]
    fn every_command_has_a_description_of_one_line() {
        for command in RouseCli::command().get_subcommands() {
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            assert!((10..90).contains(&about.len()), "{}: {about:?}", command.get_name());
            assert!(!about.ends_with('.'), "{}", command.get_name());
        }
    }

    #[test]
    fn a_command_to_run_keeps_its_own_flags() {
        let cli =
            RouseCli::try_parse_from(["rouse", "run", "--", "curl", "-s", "http://hello"]).unwrap();
        let RouseCommand::Run(run) = cli.command else { panic!("run") };
        assert_eq!(run.command, ["curl", "-s", "http://hello"]);
    }

    #[test]
    fn flags_are_kubectls() {
        for line in [
            "rouse get ksvc hello -o yaml -n demo",
            "rouse get pods -A -w -o wide",
            "rouse get all --no-headers",
            "rouse apply -f - -f dir -R",
            "rouse logs ksvc/hello -f -c user-container --tail 5",
            "rouse delete -f hello.yaml --ignore-not-found",
            "rouse delete ksvc hello --node other",
            "rouse describe revision/hello-00001",
            "rouse services -A -o wide --kubeconfig c --node ip-10-0-0-1.ec2.internal",
            "rouse trace 10.96.0.1:80 --kubeconfig c --from pod/web-1 -n demo -o json",
            "rouse trace [fd00::a]:53 --protocol udp",
            "rouse trace shop.example /cart?id=1 --tls --entrypoint inside --client 10.0.0.1",
            "rouse trace shop.example --header a:b --header c:d --kubeconfig c -o wide",
            "rouse routes --kubeconfig c --node n1 --no-headers",
            "rouse routes shop -o json",
            "rouse check --kubeconfig c --node ip-10-0-0-1.ec2.internal",
        ] {
            RouseCli::try_parse_from(line.split(' '))
                .unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }
}
