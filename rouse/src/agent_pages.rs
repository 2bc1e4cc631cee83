//! Shell: pages of one node's agent, read on this machine or through the API server of a cluster.

mod choice;

use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;
use common::link::error_chain;
use controller::shell::api::client::connect;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, api::ListParams};
use local::{layout::NodeLayout, node::NodeManager};

use self::choice::{AgentPod, choose_agent, describe_pod};
pub(crate) use self::choice::{PodClient, check_node};
use crate::{admin_pages, args::DEFAULT_NODE, command_error::CommandError};

/// Port of the agents' admin pages.
const AGENT_ADMIN_PORT: u16 = 7104;
/// Longest wait for a page; the agent itself gives up after 10 s.
const PAGE_TIMEOUT: Duration = Duration::from_secs(15);

/// Options that name the agent to ask.
#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    /// Kubeconfig of the cluster whose agents are asked, through its API server; without it the agent of this machine
    /// is asked
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Namespace of the agents in the cluster
    #[arg(long, value_name = "NAMESPACE", default_value = "knative-serving")]
    pub(crate) system_namespace: String,
}

/// Choice of an agent in a cluster of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AgentChoice<'a> {
    /// The agent of this node.
    OfNode(&'a str),
    /// Any one, if possible a ready one: all have the same services.
    Any,
    /// The only one. With several, the node must be named.
    Only,
}

/// Way to the pages of one agent.
pub(crate) enum AgentPages {
    /// Agent that listens at an address of this machine.
    Local(SocketAddr),
    /// Agent behind the API server of a cluster.
    Cluster(Box<ClusterAgents>, String),
}

/// Agents of a cluster, behind its API server.
pub(crate) struct ClusterAgents {
    runtime: tokio::runtime::Runtime,
    client: Client,
    namespace: String,
}

impl AgentPages {
    /// Returns the agent of this machine: that of the local node `node` if it runs, or that of the Kubernetes node on
    /// whose network this process is.
    pub(crate) fn of_this_machine(node: Option<&str>) -> Result<Self, CommandError> {
        // A name that no local node can have is that of a Kubernetes node.
        if let Ok(layout) = NodeLayout::new(node.unwrap_or(DEFAULT_NODE))
            && local::net::is_published(&layout.node_namespace())
        {
            NodeManager::enter(&layout)
                .map_err(|error| CommandError::Agent(error_chain(&error)))?;
        }
        let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), AGENT_ADMIN_PORT);
        Ok(Self::Local(address))
    }

    /// Gets a page, which is JSON.
    pub(crate) fn get(&self, path: &str) -> Result<String, CommandError> {
        let page = match self {
            Self::Local(address) => admin_pages::get_page(*address, path, PAGE_TIMEOUT)
                .map_err(|error| local_error(*address, &error))?,
            Self::Cluster(agents, pod) => agents.get_page(pod, path)?,
        };
        choice::page_text(page).map_err(CommandError::Agent)
    }
}

fn local_error(address: SocketAddr, error: &std::io::Error) -> CommandError {
    CommandError::Agent(match error.kind() {
        ErrorKind::ConnectionRefused => format!(
            "no agent listens at {address}: start a local node with `rouse up`, \
             or name a cluster with --kubeconfig FILE"
        ),
        _ => format!("cannot read a page of the agent at {address}: {error}"),
    })
}

impl ClusterAgents {
    /// Connects to the API server of the cluster.
    pub(crate) fn connect(kubeconfig: &Path, namespace: &str) -> Result<Self, CommandError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let client = runtime
            .block_on(connect(Some(kubeconfig)))
            .map_err(|error| CommandError::Agent(error_chain(&error)))?;
        Ok(Self { runtime, client, namespace: namespace.to_owned() })
    }

    /// Returns the pages of one agent.
    pub(crate) fn choose(self, choice: AgentChoice<'_>) -> Result<AgentPages, CommandError> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let params = ListParams::default().labels("app=rouse-agent");
        let pods = self.runtime.block_on(pods.list(&params));
        let pods = pods.map_err(|error| request_error("list the agents' pods", &error))?;
        let pods: Vec<AgentPod> = pods.items.iter().map(AgentPod::new).collect();
        let chosen = choose_agent(&pods, choice, &self.namespace).map_err(CommandError::Agent)?;
        Ok(AgentPages::Cluster(Box::new(self), chosen))
    }

    /// Reads a pod from which a connect may come.
    pub(crate) fn pod_client(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<PodClient, CommandError> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let pod = self.runtime.block_on(pods.get_opt(name));
        let pod = pod.map_err(|error| request_error("read the pod", &error))?;
        let missing = || CommandError::NotFound { resource: "pods", name: name.to_owned() };
        describe_pod(&pod.ok_or_else(missing)?).map_err(CommandError::Agent)
    }

    /// Gets a page through the API server, which connects to the agent's port.
    fn get_page(&self, pod: &str, path: &str) -> Result<admin_pages::AdminPage, CommandError> {
        let namespace = &self.namespace;
        let path =
            format!("/api/v1/namespaces/{namespace}/pods/{pod}:{AGENT_ADMIN_PORT}/proxy{path}");
        let request = http::Request::get(path).body(Vec::new());
        let request = request.map_err(|error| CommandError::Agent(error_chain(&error)))?;
        match self.runtime.block_on(self.client.request_text(request)) {
            Ok(body) => Ok(admin_pages::AdminPage { status: 200, body }),
            // The API server's own errors have a reason of their own; others are pages of the agent.
            Err(kube::Error::Api(status)) if choice::is_of_agent(&status) => {
                Ok(admin_pages::AdminPage { status: status.code, body: status.message })
            }
            Err(error) => Err(request_error("read a page of the agent", &error)),
        }
    }
}

fn request_error(attempt: &str, error: &kube::Error) -> CommandError {
    let advice = match error {
        kube::Error::Api(status) if status.code == 403 => {
            ": your account needs the rights to list pods and to get pods/proxy there"
        }
        _ => "",
    };
    CommandError::Agent(format!("cannot {attempt}: {}{advice}", error_chain(error)))
}
