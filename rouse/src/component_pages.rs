//! Shell: pages of one agent or activator, read on this machine or through the API server of a cluster.

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
use serde::de::DeserializeOwned;

pub(crate) use self::choice::{PageComponent, PodClient, check_node};
use self::choice::{ReplicaPod, choose_replica, describe_pod};
use crate::{admin_pages, args::DEFAULT_NODE, command_error::CommandError};

/// Longest wait for a page; the component itself gives up after 10 s.
const PAGE_TIMEOUT: Duration = Duration::from_secs(15);

/// Options that name the component to ask.
#[derive(Debug, Args)]
pub(crate) struct ComponentArgs {
    /// Kubeconfig of the cluster whose components are asked, through its API server; without it the component of this
    /// machine is asked
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Namespace of the components in the cluster
    #[arg(long, value_name = "NAMESPACE", default_value = "knative-serving")]
    pub(crate) system_namespace: String,
}

/// Choice of a replica in a cluster of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplicaChoice<'a> {
    /// The replica on this node.
    OfNode(&'a str),
    /// Any one, if possible a ready one: all have the same services.
    Any,
    /// The only one. With several, the node must be named.
    Only,
}

/// Way to the pages of one replica.
pub(crate) enum ComponentPages {
    /// Component that listens at an address of this machine.
    Local(PageComponent, SocketAddr),
    /// Replica behind the API server of a cluster, by the name of its pod.
    Cluster(PageComponent, Box<ClusterComponents>, String),
}

/// Components of a cluster, behind its API server.
pub(crate) struct ClusterComponents {
    runtime: tokio::runtime::Runtime,
    client: Client,
    namespace: String,
}

impl ComponentPages {
    /// Returns the replica on the node that is named, or any one. All have the same services.
    pub(crate) fn find(
        component: PageComponent,
        node: Option<&str>,
        args: &ComponentArgs,
    ) -> Result<Self, CommandError> {
        match &args.kubeconfig {
            None => Self::of_this_machine(component, node),
            Some(file) => ClusterComponents::connect(file, &args.system_namespace)?
                .choose(component, node.map_or(ReplicaChoice::Any, ReplicaChoice::OfNode)),
        }
    }

    /// Returns the component of this machine: that of the local node `node` if it runs, or the one on whose network this
    /// process is.
    pub(crate) fn of_this_machine(
        component: PageComponent,
        node: Option<&str>,
    ) -> Result<Self, CommandError> {
        // A name that no local node can have is that of a Kubernetes node.
        if let Ok(layout) = NodeLayout::new(node.unwrap_or(DEFAULT_NODE))
            && local::net::is_published(&layout.node_namespace())
        {
            NodeManager::enter(&layout)
                .map_err(|error| CommandError::Component(error_chain(&error)))?;
        }
        let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), component.admin_port());
        Ok(Self::Local(component, address))
    }

    /// Gets the facts of a page. A field that is missing shows that the component is of another version.
    pub(crate) fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, CommandError> {
        let (component, page) = match self {
            Self::Local(component, address) => {
                let page = admin_pages::get_page(*address, path, PAGE_TIMEOUT);
                (*component, page.map_err(|error| local_error(*component, *address, &error))?)
            }
            Self::Cluster(component, components, pod) => {
                (*component, components.get_page(*component, pod, path)?)
            }
        };
        let text = choice::page_text(component, page).map_err(CommandError::Component)?;
        serde_json::from_str(&text).map_err(|error| {
            CommandError::Component(format!(
                "the {} is of another version than this command, or another program has its port: \
                 {error}",
                component.name()
            ))
        })
    }
}

fn local_error(
    component: PageComponent,
    address: SocketAddr,
    error: &std::io::Error,
) -> CommandError {
    let name = component.name();
    CommandError::Component(match error.kind() {
        // The usual reason: no node runs here, or the user means a cluster.
        ErrorKind::ConnectionRefused => format!(
            "no {name} listens at {address}: start a local node with `rouse up`, \
             or name a cluster with --kubeconfig FILE{}",
            component.local_advice()
        ),
        _ => format!("cannot read a page of the {name} at {address}: {error}"),
    })
}

impl ClusterComponents {
    /// Connects to the API server of the cluster.
    pub(crate) fn connect(kubeconfig: &Path, namespace: &str) -> Result<Self, CommandError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let client = runtime
            .block_on(connect(Some(kubeconfig)))
            .map_err(|error| CommandError::Component(error_chain(&error)))?;
        Ok(Self { runtime, client, namespace: namespace.to_owned() })
    }

    /// Returns the pages of one replica.
    pub(crate) fn choose(
        self,
        component: PageComponent,
        choice: ReplicaChoice<'_>,
    ) -> Result<ComponentPages, CommandError> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let params = ListParams::default().labels(component.pod_label());
        let pods = self.runtime.block_on(pods.list(&params));
        let attempt = format!("list the {}s' pods", component.name());
        let pods = pods.map_err(|error| request_error(&attempt, &error))?;
        // Only these properties decide, so the choice is pure and tested without a cluster.
        let pods: Vec<ReplicaPod> = pods.items.iter().map(ReplicaPod::new).collect();
        let chosen = choose_replica(component, &pods, choice, &self.namespace)
            .map_err(CommandError::Component)?;
        Ok(ComponentPages::Cluster(component, Box::new(self), chosen))
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
        describe_pod(&pod.ok_or_else(missing)?).map_err(CommandError::Component)
    }

    /// Gets a page through the API server, which connects to the component's port.
    fn get_page(
        &self,
        component: PageComponent,
        pod: &str,
        path: &str,
    ) -> Result<admin_pages::AdminPage, CommandError> {
        let (namespace, port) = (&self.namespace, component.admin_port());
        let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy{path}");
        let request = http::Request::get(path).body(Vec::new());
        let request = request.map_err(|error| CommandError::Component(error_chain(&error)))?;
        match self.runtime.block_on(self.client.request_text(request)) {
            Ok(body) => Ok(admin_pages::AdminPage { status: 200, body }),
            // The API server's own errors have a reason of their own; others are pages of the component.
            Err(kube::Error::Api(status)) if choice::is_of_component(&status) => {
                Ok(admin_pages::AdminPage { status: status.code, body: status.message })
            }
            Err(kube::Error::Api(status)) if choice::is_unreachable(&status) => {
                let advice = component.unreachable_advice(namespace, pod);
                Err(CommandError::Component(format!(
                    "the API server does not reach the {} {pod}: {}{advice}",
                    component.name(),
                    status.message
                )))
            }
            Err(error) => {
                let attempt = format!("read a page of the {}", component.name());
                Err(request_error(&attempt, &error))
            }
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
    CommandError::Component(format!("cannot {attempt}: {}{advice}", error_chain(error)))
}
