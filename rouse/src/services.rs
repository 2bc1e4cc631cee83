//! Shell: `rouse services`: the services that an agent serves at their ClusterIPs.

mod services_table;

use agent::service_facts::NodeServices;
use clap::{Args, ValueEnum};

use crate::{
    args::NamespaceArgs,
    command_error::CommandError,
    component_pages::{ComponentArgs, ComponentPages, PageComponent, check_node},
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
    component: ComponentArgs,
}

/// Prints the services of an agent; `node` names it.
pub(crate) fn services(node: Option<&str>, args: &ServicesArgs) -> Result<(), CommandError> {
    let pages = ComponentPages::find(PageComponent::Agent, node, &args.component)?;
    let mut services: NodeServices = pages.get("/debug/services")?;
    check_node(PageComponent::Agent, node, &services.node.name).map_err(CommandError::Usage)?;
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
