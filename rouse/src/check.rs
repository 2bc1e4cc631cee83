//! Shell: `rouse check`: what must be done on a machine or in a cluster, before and after an installation.

use std::{path::PathBuf, process::ExitCode};

use agent::node_check::{
    facts::collect_host_facts,
    rules::{CheckLine, check_node},
};
use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::{
    install::{
        cluster::ClusterClient,
        kube_proxy_check::{listed_ranges, read_objects},
        kube_proxy_needs::kube_proxy_needs,
        settings::NAMESPACE,
        workloads,
    },
    stdout,
};

mod cluster_rules;

/// Command-line options of `rouse check`.
#[derive(Debug, clap::Args)]
pub(crate) struct CheckArgs {
    /// Kubeconfig of a cluster whose nodes are checked by their agents; without this, this machine is checked
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Namespace of the components
    #[arg(short, long, default_value = NAMESPACE)]
    namespace: String,
    /// Ranges of ClusterIPs [default: those of the installation, else of the cluster's ServiceCIDR objects]
    #[arg(long, value_name = "CIDR", num_args = 1.., value_delimiter = ',',
          value_parser = agent::config::parse_service_cidr)]
    service_cidr: Vec<ipnet::IpNet>,
}

/// Runs `rouse check`: prints a line for each subject. The exit code is 1 if something must be done. `node` is the only
/// node of the cluster to check.
pub(crate) fn check(args: &CheckArgs, node: Option<&str>) -> Result<ExitCode> {
    let is_fine = match &args.kubeconfig {
        None => print_lines("this machine", &check_node(&collect_host_facts()))?,
        Some(_) => {
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = runtime.enable_all().build().context("cannot start a runtime")?;
            runtime.block_on(check_cluster(args, node))?
        }
    };
    Ok(if is_fine { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints the lines of one subject. Returns true if nothing must be done.
fn print_lines(title: &str, lines: &[CheckLine]) -> Result<bool> {
    stdout::print_line(title)?;
    for line in lines {
        stdout::print_line(&format!("  {line}"))?;
    }
    Ok(lines.iter().all(|line| line.to_do.is_none()))
}

async fn check_cluster(args: &CheckArgs, node: Option<&str>) -> Result<bool> {
    let kubeconfig = args.kubeconfig.as_deref().context("no kubeconfig")?;
    let cluster = ClusterClient::connect(kubeconfig).await?;
    let pods = cluster.list("v1", "Pod", Some(&args.namespace), "app=rouse-agent").await?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut agents: Vec<(String, String)> = pods
        .iter()
        .map(|pod| (text(&pod["spec"]["nodeName"]), text(&pod["metadata"]["name"])))
        .collect();
    agents.sort();
    let mut is_fine = print_lines("cluster", &cluster_lines(args, &cluster, &agents).await?)?;
    // The lines of the cluster are about all agents, so only now the others are left out.
    agents.retain(|(on, _)| node.is_none_or(|node| on == node));
    if let (Some(node), []) = (node, agents.as_slice()) {
        bail!("no agent runs on node {node:?}: see kubectl get nodes");
    }
    for (on, pod) in agents {
        let lines = agent_lines(&cluster, &args.namespace, &pod).await;
        is_fine &= print_lines(&format!("node {on}"), &lines)?;
    }
    Ok(is_fine)
}

/// Returns the lines of the cluster as a whole. `pods` has the node and the name of each agent's pod.
async fn cluster_lines(
    args: &CheckArgs,
    cluster: &ClusterClient,
    pods: &[(String, String)],
) -> Result<Vec<CheckLine>> {
    let daemon_sets = cluster.list("apps/v1", "DaemonSet", Some(&args.namespace), "").await?;
    let agents = daemon_sets
        .iter()
        .find(|it| it["metadata"]["name"] == "rouse-agent" && workloads::is_rouse_object(it));
    let dns = "k8s-app=kube-dns";
    let services = cluster.list("v1", "Service", Some("kube-system"), dns).await?;
    let slices =
        cluster.list("discovery.k8s.io/v1", "EndpointSlice", Some("kube-system"), "").await?;
    let nodes = cluster.list("v1", "Node", None, "").await?;
    let mut given = args.service_cidr.clone();
    // The installation has been given the ranges before, if the cluster does not list them.
    if given.is_empty() {
        given = cluster_rules::installed_ranges(agents);
    }
    let ranges = if given.is_empty() { listed_ranges(cluster).await } else { Ok(given) };
    let needs_line = match ranges {
        Ok(ranges) => {
            let needs = kube_proxy_needs(&read_objects(cluster).await?, &[], &ranges);
            cluster_rules::check_kube_proxy_needs(&needs, agents)
        }
        Err(error) => cluster_rules::unknown_ranges(&format!("{error:#}"), agents),
    };
    Ok(vec![
        cluster_rules::check_agents(agents),
        cluster_rules::check_nodes(&nodes, pods, agents),
        cluster_rules::check_dns(&services, &slices),
        needs_line,
    ])
}

/// Returns the lines of an agent about its node, which come through the API server.
async fn agent_lines(cluster: &ClusterClient, namespace: &str, pod: &str) -> Vec<CheckLine> {
    let port = workloads::admin_port("rouse-agent");
    let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy/check");
    match cluster.get_text(&path).await {
        Ok(text) if !text.trim().is_empty() => text.lines().map(parse_line).collect(),
        Ok(_) => vec![silent_agent(pod, "its page is empty")],
        Err(error) => vec![silent_agent(pod, &format!("{error:#}"))],
    }
}

/// Returns the line about an agent that gives none.
fn silent_agent(pod: &str, reason: &str) -> CheckLine {
    CheckLine::to_do(
        "agent",
        format!("{pod} does not tell: {reason}"),
        "see its state (kubectl describe pod), and install this version if it is an older one",
    )
}

fn parse_line(line: &str) -> CheckLine {
    let unknown =
        || CheckLine::to_do("agent", line, "use the version of `rouse` that is installed");
    CheckLine::parse(line).unwrap_or_else(unknown)
}
