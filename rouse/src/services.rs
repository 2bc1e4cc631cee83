//! Shell: `rouse services`: the services that an agent serves at their ClusterIPs.

mod services_table;

use agent::service_facts::NodeServices;
use clap::{Args, ValueEnum};

use crate::{
    agent_pages::{AgentArgs, AgentChoice, AgentPages, ClusterAgents, check_node},
    args::NamespaceArgs,
    command_error::CommandError,
    stdout,
};

/// Format in which services are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FactsFormat {
    /// A table with more columns
    Wide,
    /// All facts as JSON
    Json,
}

#[derive(Debug, Args)]
pub(crate) struct ServicesArgs {
    #[command(flatten)]
    scope: NamespaceArgs,
    /// List the services of all namespaces
    #[arg(short = 'A', long)]
    all_namespaces: bool,
    /// Output format; a table without it
    #[arg(short, long, value_enum)]
    output: Option<FactsFormat>,
    /// Omit the line of column names
    #[arg(long)]
    no_headers: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Prints the services of an agent; `node` names it.
pub(crate) fn services(node: Option<&str>, args: &ServicesArgs) -> Result<(), CommandError> {
    let pages = match &args.agent.kubeconfig {
        None => AgentPages::of_this_machine(node)?,
        Some(file) => ClusterAgents::connect(file, &args.agent.system_namespace)?
            .choose(node.map_or(AgentChoice::Any, AgentChoice::OfNode))?,
    };
    let mut services: NodeServices = parse_facts(&pages.get("/debug/services")?)?;
    check_node(node, &services.node.name).map_err(CommandError::Usage)?;
    let namespace = (!args.all_namespaces).then_some(args.scope.namespace.as_str());
    services_table::select(&mut services, namespace);
    if args.output == Some(FactsFormat::Json) {
        return print_json(&services);
    }
    // To standard error, so that scripts read only the table.
    services_table::remarks(&services, namespace).iter().for_each(|it| stdout::print_error(it));
    let is_wide = args.output == Some(FactsFormat::Wide);
    let mut table = services_table::table(&services, args.all_namespaces, is_wide);
    if args.no_headers || services.services.is_empty() {
        table.header.clear();
    }
    Ok(stdout::print_text(&table.to_text())?)
}

/// Prints facts as JSON.
pub(crate) fn print_json(facts: &impl serde::Serialize) -> Result<(), CommandError> {
    let text = serde_json::to_string_pretty(facts).map_err(std::io::Error::other)?;
    Ok(stdout::print_line(&text)?)
}

/// Parses facts. A field that is missing shows that the agent is of another version.
pub(crate) fn parse_facts<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, CommandError> {
    serde_json::from_str(text).map_err(|error| {
        CommandError::Agent(format!(
            "the agent is of another version than this command, or another program has its port: \
             {error}"
        ))
    })
}
