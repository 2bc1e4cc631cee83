//! Shell: `rouse routes`: the hosts that an activator routes.

mod routes_table;

use activator::route_facts::RoutesFacts;
use clap::Args;
use common::url_query::encode_percent;

use crate::{
    command_error::CommandError,
    component_pages::{ComponentArgs, ComponentPages, PageComponent, check_node},
    services::{FactsFormat, print_json},
    stdout,
};

#[derive(Debug, Args)]
pub(crate) struct RoutesArgs {
    /// Text that the listed hosts contain; all hosts without it
    #[arg(value_name = "HOST")]
    host: Option<String>,
    /// Output format; a table without it
    #[arg(short, long, value_enum)]
    output: Option<FactsFormat>,
    /// Omit the line of column names
    #[arg(long)]
    no_headers: bool,
    #[command(flatten)]
    component: ComponentArgs,
}

/// Prints the hosts of an activator; `node` names its node.
pub(crate) fn routes(node: Option<&str>, args: &RoutesArgs) -> Result<(), CommandError> {
    let component = PageComponent::Activator;
    let pages = ComponentPages::find(component, node, &args.component)?;
    let filter = encode_percent(args.host.as_deref().unwrap_or_default());
    let facts: RoutesFacts = pages.get(&format!("/debug/routes?host={filter}"))?;
    check_node(component, node, &facts.activator.node).map_err(CommandError::Usage)?;
    if args.output == Some(FactsFormat::Json) {
        return print_json(&facts);
    }
    // To standard error, so that scripts read only the table.
    routes_table::remarks(&facts).iter().for_each(|it| stdout::print_error(it));
    let mut table = routes_table::table(&facts, args.output == Some(FactsFormat::Wide));
    if args.no_headers || facts.hosts.is_empty() {
        table.header.clear();
    }
    Ok(stdout::print_text(&table.to_text())?)
}
