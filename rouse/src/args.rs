//! Pure: arguments of the commands that work like kubectl.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Name of the local node if no option names one.
pub(crate) const DEFAULT_NODE: &str = "rouse";

/// Namespace in which objects are looked up.
#[derive(Clone, Debug, Args)]
pub(crate) struct NamespaceArgs {
    /// Namespace of the objects
    #[arg(short, long, default_value = "default")]
    pub(crate) namespace: String,
}

#[derive(Debug, Args)]
pub(crate) struct ApplyArgs {
    /// File or folder with manifests; `-` reads standard input. May be repeated
    #[arg(short, long = "filename", required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// Read manifests in all folders below a folder too
    #[arg(short = 'R', long)]
    pub(crate) recursive: bool,
    /// Namespace of objects that name none
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
}

/// Format in which objects are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputFormat {
    /// The whole object as YAML
    Yaml,
    /// The whole object as JSON
    Json,
    /// A table with more columns
    Wide,
    /// Resource and name only, one per line
    Name,
}

#[derive(Debug, Args)]
pub(crate) struct GetArgs {
    /// TYPE [NAME…] or TYPE/NAME…; TYPE is ksvc, configuration, revision, route, pods, podautoscaler (pa), sks or all
    #[arg(required = true, value_name = "TYPE")]
    pub(crate) selections: Vec<String>,
    /// Output format; a table without it
    #[arg(short, long, value_enum)]
    pub(crate) output: Option<OutputFormat>,
    #[command(flatten)]
    pub(crate) scope: NamespaceArgs,
    /// Look in all namespaces
    #[arg(short = 'A', long)]
    pub(crate) all_namespaces: bool,
    /// Select objects with these labels: `key=value,key!=value,key`
    #[arg(short = 'l', long, default_value = "")]
    pub(crate) selector: String,
    /// Print changes as they happen
    #[arg(short, long)]
    pub(crate) watch: bool,
    /// Omit the line of column names
    #[arg(long)]
    pub(crate) no_headers: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DescribeArgs {
    /// TYPE [NAME…] or TYPE/NAME… of the objects
    #[arg(required = true, value_name = "TYPE")]
    pub(crate) selections: Vec<String>,
    #[command(flatten)]
    pub(crate) scope: NamespaceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// Name of a pod, or `ksvc/NAME` or `revision/NAME` for all its pods, including ended ones
    #[arg(value_name = "POD")]
    pub(crate) target: String,
    #[command(flatten)]
    pub(crate) scope: NamespaceArgs,
    /// Continue as more is written
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Print only this container
    #[arg(short, long)]
    pub(crate) container: Option<String>,
    /// Print only this many last lines
    #[arg(long, value_name = "LINES")]
    pub(crate) tail: Option<usize>,
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Print once and exit
    #[arg(long)]
    pub(crate) once: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DeleteArgs {
    /// TYPE NAME… or TYPE/NAME… of the services
    #[arg(value_name = "TYPE", required_unless_present = "files")]
    pub(crate) selections: Vec<String>,
    /// Delete the services that these manifests name
    #[arg(short, long = "filename", value_name = "FILE", conflicts_with = "selections")]
    pub(crate) files: Vec<PathBuf>,
    /// Namespace of the services, and of manifests that name none [default: default]
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
    /// Delete every service of the namespace
    #[arg(long)]
    pub(crate) all: bool,
    /// Treat a missing object as success
    #[arg(long)]
    pub(crate) ignore_not_found: bool,
    /// Do not wait until the object is gone
    #[arg(long = "no-wait")]
    pub(crate) no_wait: bool,
}
