//! Shell: `rouse trace`: the choice that a node makes for a connect, or an activator for a request, with the reasons.

mod request_text;
mod subject;
mod trace_text;

use std::net::{IpAddr, SocketAddr};

use activator::{
    entrypoint::Entrypoint,
    route_facts::RequestTraceFacts,
    traced_request::{TracedRequest, parse_entrypoint, parse_header, parse_path},
};
use agent::service_facts::{TraceFacts, TraceTarget};
use clap::{Args, ValueEnum};

use self::subject::{TraceSubject, parse_subject};
use crate::{
    args::NamespaceArgs,
    command_error::CommandError,
    component_pages::{
        ClusterComponents, ComponentArgs, ComponentPages, PageComponent, PodClient, ReplicaChoice,
        check_node,
    },
    services::{FactsFormat, print_json},
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
    /// ClusterIP and port of a connect, such as 10.96.0.10:53 or [fd00::10]:53; or host of a request, without a port
    #[arg(value_name = "IP:PORT|HOST")]
    to: String,
    /// Path of the request, with its query [default: /]
    #[arg(value_name = "PATH", value_parser = check_path)]
    path: Option<String>,
    #[command(flatten)]
    connect: ConnectOptions,
    #[command(flatten)]
    request: RequestOptions,
    #[command(flatten)]
    scope: NamespaceArgs,
    /// Output format; text without it
    #[arg(short, long, value_enum)]
    output: Option<FactsFormat>,
    #[command(flatten)]
    component: ComponentArgs,
}

/// Options for a connect to an address.
#[derive(Debug, Args)]
struct ConnectOptions {
    /// Transport protocol of the connect [default: tcp]
    #[arg(long, value_enum)]
    protocol: Option<TraceProtocol>,
    /// Pod that connects, as pod/NAME; its node is asked
    #[arg(long, value_name = "pod/NAME", requires = "kubeconfig", value_parser = pod_name)]
    from: Option<String>,
}

/// Options for a request to a host.
#[derive(Debug, Args)]
struct RequestOptions {
    /// Listener of the request: outside, inside, the port of a service at the activators, or outside:PORT for a gateway
    /// port [default: outside]
    #[arg(long, value_name = "ENTRYPOINT", value_parser = check_entrypoint)]
    entrypoint: Option<Entrypoint>,
    /// The client's connection has TLS
    #[arg(long)]
    tls: bool,
    /// Header of the request; may be repeated
    #[arg(long = "header", value_name = "NAME:VALUE", value_parser = check_header)]
    headers: Vec<(String, String)>,
    /// Address of the client, for NetworkPolicies and trusted proxies
    #[arg(long, value_name = "IP")]
    client: Option<IpAddr>,
}

/// Parses the client of a connect, in the form pod/NAME.
fn pod_name(text: &str) -> Result<String, &'static str> {
    let name = text.strip_prefix("pod/").filter(|name| common::wire::is_dns_subdomain(name));
    name.map(str::to_owned).ok_or("must be pod/NAME")
}

/// Parses the path of a request.
fn check_path(text: &str) -> Result<String, &'static str> {
    parse_path(text).ok_or("must begin with / and have no spaces")
}

/// Parses a header of a request.
fn check_header(text: &str) -> Result<(String, String), &'static str> {
    parse_header(text).ok_or("must be NAME:VALUE")
}

/// Parses the listener that a request comes in by.
fn check_entrypoint(text: &str) -> Result<Entrypoint, &'static str> {
    parse_entrypoint(text).ok_or("must be outside, inside, a port, or outside:PORT")
}

/// Prints the choice for a connect or request; `node` names the node that is asked.
pub(crate) fn trace(node: Option<&str>, args: &TraceArgs) -> Result<(), CommandError> {
    match parse_subject(&args.to).map_err(CommandError::Usage)? {
        TraceSubject::Connect(to) => {
            args.check_connect()?;
            trace_connect(node, to, args)
        }
        TraceSubject::Request(host) => {
            args.check_request()?;
            trace_request(node, host, args)
        }
    }
}

impl TraceArgs {
    /// Refuses options that have no effect on a connect.
    fn check_connect(&self) -> Result<(), CommandError> {
        let RequestOptions { entrypoint, tls, headers, client } = &self.request;
        let has_options = entrypoint.is_some() || *tls || !headers.is_empty() || client.is_some();
        if self.path.is_none() && !has_options {
            return Ok(());
        }
        let reason = "PATH, --entrypoint, --tls, --header and --client are for requests to a host, \
                      and not for connects to an address";
        Err(CommandError::Usage(reason.to_owned()))
    }

    /// Refuses options that have no effect on a request.
    fn check_request(&self) -> Result<(), CommandError> {
        let ConnectOptions { protocol, from } = &self.connect;
        if protocol.is_none() && from.is_none() {
            return Ok(());
        }
        let reason = "--protocol and --from are for connects to an address and port, and not for \
                      requests to a host";
        Err(CommandError::Usage(reason.to_owned()))
    }
}

fn trace_connect(node: Option<&str>, to: SocketAddr, args: &TraceArgs) -> Result<(), CommandError> {
    let protocol = match args.connect.protocol.unwrap_or(TraceProtocol::Tcp) {
        TraceProtocol::Tcp => 6,
        TraceProtocol::Udp => 17,
    };
    let (pages, client) = find_agent(node, args)?;
    let target = TraceTarget { to, protocol };
    let facts: TraceFacts = pages.get(&format!("/debug/trace?{target}"))?;
    // Without a kubeconfig, the agent of this machine responds, whatever node is named.
    check_node(PageComponent::Agent, node, &facts.node.name).map_err(CommandError::Usage)?;
    if args.output == Some(FactsFormat::Json) {
        return print_json(&facts);
    }
    let notes = client.map(|it| it.notes).unwrap_or_default();
    let is_wide = args.output == Some(FactsFormat::Wide);
    let text = trace_text::text(&facts, args.connect.from.as_deref(), &notes, is_wide);
    Ok(stdout::print_text(&text)?)
}

/// Returns the agent of the connect's node, and the pod that connects if one is named.
fn find_agent(
    node: Option<&str>,
    args: &TraceArgs,
) -> Result<(ComponentPages, Option<PodClient>), CommandError> {
    let component = PageComponent::Agent;
    let Some(file) = &args.component.kubeconfig else {
        return Ok((ComponentPages::of_this_machine(component, node)?, None));
    };
    let agents = ClusterComponents::connect(file, &args.component.system_namespace)?;
    let from = args.connect.from.as_deref();
    let pod = from.map(|name| agents.pod_client(&args.scope.namespace, name)).transpose()?;
    let choice = match (&pod, node) {
        // The pod connects from its own node only.
        (Some(pod), Some(node)) if pod.node != node => {
            let reason = format!("the pod is on node {}, not on {node}: omit --node", pod.node);
            return Err(CommandError::Usage(reason));
        }
        (Some(pod), _) => ReplicaChoice::OfNode(&pod.node),
        (None, Some(node)) => ReplicaChoice::OfNode(node),
        (None, None) => ReplicaChoice::Only,
    };
    Ok((agents.choose(component, choice)?, pod))
}

fn trace_request(node: Option<&str>, host: String, args: &TraceArgs) -> Result<(), CommandError> {
    let RequestOptions { entrypoint, tls, headers, client } = &args.request;
    let request = TracedRequest {
        headers: headers.clone(),
        entrypoint: entrypoint.unwrap_or(Entrypoint::External),
        is_tls: *tls,
        client: *client,
        ..TracedRequest::new(host, args.path.as_deref().unwrap_or("/"))
    };
    let component = PageComponent::Activator;
    let pages = ComponentPages::find(component, node, &args.component)?;
    let facts: RequestTraceFacts = pages.get(&format!("/debug/trace?{request}"))?;
    check_node(component, node, &facts.activator.node).map_err(CommandError::Usage)?;
    if args.output == Some(FactsFormat::Json) {
        return print_json(&facts);
    }
    let is_wide = args.output == Some(FactsFormat::Wide);
    Ok(stdout::print_text(&request_text::text(&facts, is_wide))?)
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
