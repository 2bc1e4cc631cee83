//! Shell: `rouse trace`: the choice that a node makes for a connect, and the reasons for it.

mod trace_text;

use agent::service_facts::{TraceFacts, TraceTarget, parse_target};
use clap::{Args, ValueEnum};

use crate::{
    agent_pages::{AgentArgs, AgentChoice, AgentPages, ClusterAgents, PodClient, check_node},
    args::NamespaceArgs,
    command_error::CommandError,
    services::{FactsFormat, parse_facts, print_json},
    stdout,
};

/// Transport protocol of the connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TraceProtocol {
    /// Connect of a TCP socket; the default
    Tcp,
    /// Connect or datagram of a UDP socket
    Udp,
}

#[derive(Debug, Args)]
pub(crate) struct TraceArgs {
    /// ClusterIP and port of the connect, such as 10.96.0.10:53 or [fd00::10]:53
    #[arg(value_name = "IP:PORT")]
    to: String,
    /// Transport protocol of the connect
    #[arg(long, value_enum, default_value = "tcp")]
    protocol: TraceProtocol,
    /// Pod that connects, as pod/NAME; its node is asked
    #[arg(long, value_name = "pod/NAME", requires = "kubeconfig", value_parser = pod_name)]
    from: Option<String>,
    #[command(flatten)]
    scope: NamespaceArgs,
    /// Output format; text without it
    #[arg(short, long, value_enum)]
    output: Option<FactsFormat>,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Parses the client of a connect, in the form pod/NAME.
fn pod_name(text: &str) -> Result<String, &'static str> {
    let name = text.strip_prefix("pod/").filter(|name| common::wire::is_dns_subdomain(name));
    name.map(str::to_owned).ok_or("must be pod/NAME")
}

/// Prints the choice for a connect; `node` names the node that it comes from.
pub(crate) fn trace(node: Option<&str>, args: &TraceArgs) -> Result<(), CommandError> {
    let to = parse_target(&args.to).map_err(|error| CommandError::Usage(error.to_string()))?;
    let protocol = match args.protocol {
        TraceProtocol::Tcp => 6,
        TraceProtocol::Udp => 17,
    };
    let (pages, client) = find_agent(node, args)?;
    let target = TraceTarget { to, protocol };
    let facts: TraceFacts = parse_facts(&pages.get(&format!("/debug/trace?{target}"))?)?;
    check_node(node, &facts.node.name).map_err(CommandError::Usage)?;
    if args.output == Some(FactsFormat::Json) {
        return print_json(&facts);
    }
    let notes = client.map(|it| it.notes).unwrap_or_default();
    let is_wide = args.output == Some(FactsFormat::Wide);
    let text = trace_text::text(&facts, args.from.as_deref(), &notes, is_wide);
    Ok(stdout::print_text(&text)?)
}

/// Returns the agent of the connect's node, and the pod that connects if one is named.
fn find_agent(
    node: Option<&str>,
    args: &TraceArgs,
) -> Result<(AgentPages, Option<PodClient>), CommandError> {
    let Some(file) = &args.agent.kubeconfig else {
        return Ok((AgentPages::of_this_machine(node)?, None));
    };
    let agents = ClusterAgents::connect(file, &args.agent.system_namespace)?;
    let pod = args.from.as_deref().map(|name| agents.pod_client(&args.scope.namespace, name));
    let pod = pod.transpose()?;
    let choice = match (&pod, node) {
        (Some(pod), Some(node)) if pod.node != node => {
            let reason = format!("the pod is on node {}, not on {node}: omit --node", pod.node);
            return Err(CommandError::Usage(reason));
        }
        (Some(pod), _) => AgentChoice::OfNode(&pod.node),
        (None, Some(node)) => AgentChoice::OfNode(node),
        (None, None) => AgentChoice::Only,
    };
    Ok((agents.choose(choice)?, pod))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_a_pod_by_its_name() {
        assert_eq!(pod_name("pod/web-1"), Ok("web-1".into()));
        for bad in ["web-1", "pod/", "pod/A", "deploy/web"] {
            assert_eq!(pod_name(bad), Err("must be pod/NAME"), "{bad}");
        }
    }
}
