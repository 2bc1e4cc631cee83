//! Shell: `rouse install` and `rouse uninstall`: the components on a Kubernetes cluster.

use std::{
    collections::BTreeSet,
    fs,
    num::NonZeroU16,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use agent::{api_servers::ApiServerUrl, config::ClusterIpMode, map_sizes::MapSizeOverrides};
use anyhow::{Context as _, Result, bail};
use controller::model::config_maps::port_ranges::parse_gateway_port;
use ipnet::IpNet;
use serde_json::{Value, json};

pub(crate) mod cluster;
mod configs;
mod flow_schemas;
mod generated_files;
mod given_back;
mod knative_conflict;
pub(crate) mod kube_proxy_check;
pub(crate) mod kube_proxy_needs;
mod objects;
mod obsolete;
mod policies;
mod rbac;
pub(crate) mod readiness;
mod services;
pub(crate) mod settings;
mod uninstall;
pub(crate) mod workloads;

use self::{
    cluster::ClusterClient,
    settings::{GatewayExposure, InstallProfile, InstallSettings},
    workloads::is_rouse_object,
};
use crate::stdout;

/// Command-line options of `rouse install`.
#[derive(Debug, clap::Args)]
pub(crate) struct InstallArgs {
    /// Apply the objects to the cluster of --kubeconfig; without this, print them as YAML
    #[arg(long, requires = "kubeconfig")]
    apply: bool,
    /// Wait until every component is ready
    #[arg(long, requires = "apply")]
    wait: bool,
    /// Time to wait at most, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    timeout: u64,
    /// Kubeconfig of the cluster; no other cluster is ever touched
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Namespace of the components and of config-*
    #[arg(short, long, default_value = settings::NAMESPACE)]
    namespace: String,
    /// Way of requests from outside to the gateway
    #[arg(long, value_enum, default_value_t)]
    gateway: GatewayExposure,
    /// Set of options for cold starts
    #[arg(long, value_enum, default_value_t)]
    profile: InstallProfile,
    /// Image with all components [default: that of this version]
    #[arg(long)]
    image: Option<String>,
    /// Domain of URLs from outside; written to config-domain when that is created
    #[arg(long, default_value = "example.com")]
    domain: String,
    /// Domain of the cluster itself
    #[arg(long, default_value = "cluster.local")]
    cluster_domain: String,
    /// Networks of the proxies or load balancers before the gateway, whose X-Forwarded-* and Forwarded are trusted;
    /// written to config-network when that is created
    #[arg(long, value_name = "CIDR", num_args = 1.., value_delimiter = ',', value_parser = network)]
    trusted_proxies: Vec<IpNet>,
    /// Expect a PROXY protocol header, version 1 or 2, on each connection from the trusted proxies
    #[arg(long, requires = "trusted_proxies")]
    proxy_protocol: bool,
    /// Ports of the gateway for services of raw TCP (rouse.dev/port), on the load balancer or on each node with an
    /// activator; written to config-network when that is created
    #[arg(long, value_name = "PORT", num_args = 1.., value_delimiter = ',', value_parser = parse_gateway_port)]
    gateway_ports: Vec<NonZeroU16>,
    /// Services that the agents serve in kube-proxy's place, besides Rouse's own; another value may be applied at any
    /// time
    #[arg(long, value_enum, default_value_t)]
    clusterip: ClusterIpMode,
    /// Sizes of the eBPF maps on each node that differ from those of --clusterip, in entries: frontends, backends,
    /// list-entries, connect-records (a power of two), affinity-clients; other values may be applied at any time
    #[arg(long, value_name = "NAME=SIZE,...", default_value_t, hide_default_value = true)]
    map_sizes: MapSizeOverrides,
    /// URLs of the API servers themselves, for --clusterip: https://ADDRESS:PORT, several joined by commas. The agents ask
    /// them in turn, without kube-proxy, and serve the Service default/kubernetes too
    #[arg(long = "apiserver", value_name = "URL", value_delimiter = ',')]
    apiservers: Vec<ApiServerUrl>,
    /// Path of the kubelet's kubeconfig on the nodes, for --clusterip, such as /etc/kubernetes/kubelet.conf: each agent
    /// also asks the API server that the file of its node names, as with --apiserver
    #[arg(long, value_name = "FILE")]
    kubelet_kubeconfig: Option<PathBuf>,
    /// Do without kube-proxy, with --clusterip all; refused with names while Services or pods need it
    #[arg(long, requires = "apply")]
    without_kube_proxy: bool,
    /// Ranges of ClusterIPs [default: those of the cluster's ServiceCIDR objects]
    #[arg(long, value_name = "CIDR", num_args = 1.., value_delimiter = ',', requires = "without_kube_proxy",
          value_parser = agent::config::parse_service_cidr)]
    service_cidr: Vec<IpNet>,
    /// Write the manifests of the source tree to DIR; used by `cargo xtask manifests`
    #[arg(long, value_name = "DIR", hide = true, conflicts_with = "apply")]
    write: Option<PathBuf>,
}

/// Command-line options of `rouse uninstall`.
#[derive(Debug, clap::Args)]
pub(crate) struct UninstallArgs {
    /// Kubeconfig of the cluster; no other cluster is ever touched
    #[arg(long, value_name = "FILE", required = true)]
    kubeconfig: PathBuf,
    /// Namespace of the components and of config-*
    #[arg(short, long, default_value = settings::NAMESPACE)]
    namespace: String,
    /// Image that removes the agents' pins from the nodes [default: that of this version]
    #[arg(long)]
    image: Option<String>,
    /// Remove the CRDs too, and with them every service
    #[arg(long)]
    crds: bool,
}

impl InstallArgs {
    /// Returns the settings of the arguments. An error names the flag and the rule that it breaks.
    fn settings(&self) -> Result<InstallSettings> {
        if !common::wire::is_dns_label(&self.namespace) {
            bail!("--namespace is {:?}: must be a DNS label", self.namespace);
        }
        for (flag, domain) in [("domain", &self.domain), ("cluster-domain", &self.cluster_domain)] {
            if !common::wire::is_dns_subdomain(domain) {
                bail!("--{flag} is {domain:?}: must be a domain name");
            }
        }
        if !self.apiservers.is_empty() && self.clusterip == ClusterIpMode::Off {
            bail!(
                "--apiserver needs --clusterip labelled or all: otherwise no agent asks an API server"
            );
        }
        self.check_kubelet_kubeconfig()?;
        if self.without_kube_proxy && self.clusterip != ClusterIpMode::All {
            bail!("--without-kube-proxy needs --clusterip all: the agents must serve all Services");
        }
        let image = self.image.clone().unwrap_or_else(|| InstallSettings::default().image);
        // Kubernetes refuses a Service that has a port twice.
        let gateway_ports: BTreeSet<NonZeroU16> = self.gateway_ports.iter().copied().collect();
        Ok(InstallSettings {
            namespace: self.namespace.clone(),
            image,
            gateway: self.gateway,
            profile: self.profile,
            domain: self.domain.clone(),
            cluster_domain: self.cluster_domain.clone(),
            trusted_proxies: self.trusted_proxies.clone(),
            proxy_protocol: self.proxy_protocol,
            gateway_ports: gateway_ports.into_iter().collect(),
            clusterip: self.clusterip,
            map_sizes: self.map_sizes.clone(),
            apiservers: self.apiservers.clone(),
            kubelet_kubeconfig: self.kubelet_kubeconfig.clone(),
            without_kube_proxy: self.without_kube_proxy,
            service_cidr: self.service_cidr.clone(),
        })
    }

    /// Refuses a path of the kubelet's kubeconfig that no agent can use.
    fn check_kubelet_kubeconfig(&self) -> Result<()> {
        let Some(path) = &self.kubelet_kubeconfig else { return Ok(()) };
        if self.clusterip == ClusterIpMode::Off {
            bail!(
                "--kubelet-kubeconfig needs --clusterip labelled or all: otherwise no agent asks an API server"
            );
        }
        if !path.is_absolute() || path.to_str().is_none() {
            bail!("--kubelet-kubeconfig is {path:?}: must be an absolute path on the nodes");
        }
        Ok(())
    }
}

/// Parses a network of the command line, in the form ADDRESS/LENGTH.
pub(crate) fn network(text: &str) -> Result<IpNet, &'static str> {
    common::wire::parse_network(text).ok_or("must be ADDRESS/LENGTH")
}

/// Runs `rouse install`: applies the objects of an installation, or prints or writes them.
pub(crate) fn install(args: &InstallArgs) -> Result<()> {
    let settings = args.settings()?;
    if let Some(root) = &args.write {
        return write_files(root);
    }
    let objects = objects::all(&settings);
    match &args.kubeconfig {
        Some(file) if args.apply => build_runtime()?.block_on(async {
            let cluster = ClusterClient::connect(file).await?;
            if settings.without_kube_proxy {
                kube_proxy_check::check_no_need(&cluster, &settings, &objects).await?;
            } else if settings.clusterip != ClusterIpMode::All {
                kube_proxy_check::check_agents(&cluster, &settings).await?;
            }
            apply_objects(&cluster, &settings, &objects).await?;
            if args.wait {
                wait_until_ready(&cluster, &settings, Duration::from_secs(args.timeout)).await?;
            }
            // Last, because objects of the earlier version may be needed until the new ones serve.
            remove_obsolete(&cluster, &settings, &objects).await
        }),
        _ => Ok(stdout::print_text(&objects::to_yaml(&objects)?)?),
    }
}

/// Runs `rouse uninstall`, if Knative's own controllers are not in the namespace.
pub(crate) fn uninstall(args: &UninstallArgs) -> Result<()> {
    let default_settings = InstallSettings::default();
    let settings = InstallSettings {
        namespace: args.namespace.clone(),
        image: args.image.clone().unwrap_or_else(|| default_settings.image.clone()),
        // The mode with the most objects: those that were never applied are skipped.
        clusterip: ClusterIpMode::All,
        ..default_settings
    };
    build_runtime()?.block_on(async {
        let cluster = ClusterClient::connect(&args.kubeconfig).await?;
        let deployments =
            cluster.list("apps/v1", "Deployment", Some(&settings.namespace), "").await?;
        knative_conflict::check_no_knative(&settings.namespace, &deployments)?;
        uninstall::run(&cluster, &settings, args.crds).await
    })
}

fn write_files(root: &Path) -> Result<()> {
    for (path, text) in generated_files::all()? {
        let file = root.join(path);
        let folder = file.parent().unwrap_or(root);
        fs::create_dir_all(folder)
            .and_then(|()| fs::write(&file, text))
            .with_context(|| format!("cannot write {}", file.display()))?;
        stdout::print_line(path)?;
    }
    Ok(())
}

fn build_runtime() -> Result<tokio::runtime::Runtime> {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_all().build().context("cannot start a runtime")
}

/// Applies the objects in the order in which they need each other, and waits where one must be in force first.
async fn apply_objects(
    cluster: &ClusterClient,
    settings: &InstallSettings,
    objects: &[Value],
) -> Result<()> {
    let namespace = &settings.namespace;
    // Checked before the first write, so that a refused installation changes nothing.
    let deployments = cluster.list("apps/v1", "Deployment", Some(namespace), "").await?;
    knative_conflict::check_no_knative(namespace, &deployments)?;
    let mut kinds = BTreeSet::new();
    for object in objects {
        let mut object = object.clone();
        let kind = object["kind"].as_str().unwrap_or_default().to_owned();
        if kinds.insert(kind.clone()) {
            stdout::print_line(&format!("apply {kind}s"))?;
        }
        let is_workload = ["Deployment", "DaemonSet"].contains(&kind.as_str());
        // All other components mount the authorities' ConfigMap, which the controller writes once it runs.
        if is_workload && objects::kind_and_name(&object) != "Deployment/controller" {
            wait_for_authorities(cluster, settings).await?;
        }
        if objects::kind_and_name(&object) == "Deployment/activator" {
            // The manifest has no replicas, which would mean one: the HorizontalPodAutoscaler sets them later.
            object["spec"]["replicas"] = activator_replicas(cluster, &object).await?.into();
        }
        // Deleted first: server-side apply would merge the fields of both installations.
        if REPLACED_KINDS.contains(&kind.as_str())
            && cluster.get(&object).await?.is_some_and(|it| !is_rouse_object(&it))
        {
            cluster.delete(&object).await?;
        }
        cluster.apply(&object).await?;
    }
    Ok(())
}

/// Removes objects that an earlier version installed and this one does not have.
async fn remove_obsolete(
    cluster: &ClusterClient,
    settings: &InstallSettings,
    objects: &[Value],
) -> Result<()> {
    let namespace = settings.namespace.as_str();
    for (api_version, kind, is_cluster_scoped) in obsolete::checked_kinds(objects) {
        let namespace = (!is_cluster_scoped).then_some(namespace);
        let existing = cluster.list(api_version, kind, namespace, &installation_selector()).await?;
        // Only objects that this command has applied: a label alone may be a user's.
        for object in obsolete::obsolete_objects(&existing, objects, cluster::FIELD_MANAGER) {
            cluster.delete(object).await?;
            stdout::print_line(&format!(
                "removed {}, which this version does not have",
                objects::kind_and_name(object)
            ))?;
        }
    }
    Ok(())
}

/// Label selector of the objects of an installation.
fn installation_selector() -> String {
    let (key, value) = settings::PART_OF_LABEL;
    format!("{key}={value}")
}

/// Waits until the controller has published its certificate authorities, which all other components mount. A pod
/// created earlier fails to mount them, and the kubelet retries after ever longer waits.
async fn wait_for_authorities(cluster: &ClusterClient, settings: &InstallSettings) -> Result<()> {
    let object = objects::namespaced_object("v1", "ConfigMap", "rouse-authorities", "", settings);
    let started = Instant::now();
    while cluster.get(&object).await?.is_none() && started.elapsed() < AUTHORITIES_TIMEOUT {
        cluster::wait_poll_interval().await;
    }
    Ok(())
}

/// Longest wait for the authorities; a controller that takes longer has an error that waiting does not fix.
const AUTHORITIES_TIMEOUT: Duration = Duration::from_secs(20);

/// Kinds of which Knative left objects with the same names. Applying would merge the fields of both, and a merged
/// selector matches no pod.
const REPLACED_KINDS: [&str; 2] = ["Service", "HorizontalPodAutoscaler"];

/// Number of activators to apply: the present one, at least two. Later the HorizontalPodAutoscaler decides on it.
async fn activator_replicas(cluster: &ClusterClient, activator: &Value) -> Result<u64> {
    let existing = cluster.get(activator).await?.unwrap_or_default();
    Ok(existing["spec"]["replicas"].as_u64().unwrap_or(0).max(2))
}

/// Waits until every component is ready and admission is in force.
async fn wait_until_ready(
    cluster: &ClusterClient,
    settings: &InstallSettings,
    limit: Duration,
) -> Result<()> {
    let started = Instant::now();
    let mut last_printed = String::new();
    loop {
        let missing = missing_conditions(cluster, settings).await?;
        if missing.is_empty() {
            break;
        }
        // Printed only when it changes: a wait of minutes should not fill the terminal.
        let text = missing.join("; ");
        if text != last_printed {
            stdout::print_line(&format!("{:>3} s  {text}", started.elapsed().as_secs()))?;
            last_printed = text;
        }
        if started.elapsed() > limit {
            let reason = unready_reasons(cluster, settings).await?.join("\n  ");
            bail!("not ready after {} s: {last_printed}\n  {reason}", limit.as_secs());
        }
        cluster::wait_poll_interval().await;
    }
    stdout::print_line(&format!("ready after {} s", started.elapsed().as_secs()))?;
    Ok(())
}

/// Returns the conditions that the installation still lacks, for its user to see.
async fn missing_conditions(
    cluster: &ClusterClient,
    settings: &InstallSettings,
) -> Result<Vec<String>> {
    let mut missing = Vec::new();
    for (kind, name) in workloads::WORKLOADS {
        let object = objects::namespaced_object("apps/v1", kind, name, "", settings);
        let existing = cluster.get(&object).await?;
        let reason = existing
            .as_ref()
            .map_or_else(|| Some(format!("{kind}/{name}: not there")), readiness::unready_reason);
        missing.extend(reason);
    }
    for (kind, name) in WEBHOOKS {
        if cluster.get(&webhook_object(kind, name)).await?.is_none() {
            missing.push(format!("admission {name}: not registered"));
        }
    }
    if missing.is_empty() {
        // The API server does not know new kinds, nor call new webhooks, at once; a dry run tests both.
        let error = cluster.dry_run_error(&sample_service(settings)).await?;
        missing.extend(error.map(|reason| format!("services are not accepted yet: {reason}")));
    }
    Ok(missing)
}

/// A Service for dry runs, which is never stored.
fn sample_service(settings: &InstallSettings) -> Value {
    let meta = json!({"name": "dry-run", "namespace": settings.namespace});
    let pod = json!({"containers": [{"image": settings.image}]});
    json!({
        "apiVersion": "serving.knative.dev/v1", "kind": "Service", "metadata": meta,
        "spec": {"template": {"spec": pod}},
    })
}

async fn unready_reasons(
    cluster: &ClusterClient,
    settings: &InstallSettings,
) -> Result<Vec<String>> {
    let pods =
        cluster.list("v1", "Pod", Some(&settings.namespace), &installation_selector()).await?;
    Ok(pods.iter().filter_map(readiness::pod_unready_reason).collect())
}

/// Kind and name of each webhook configuration that the controller registers.
const WEBHOOKS: [(&str, &str); 3] = [
    ("MutatingWebhookConfiguration", "webhook.serving.knative.dev"),
    ("ValidatingWebhookConfiguration", "validation.webhook.serving.knative.dev"),
    ("ValidatingWebhookConfiguration", "config.webhook.serving.knative.dev"),
];

fn webhook_object(kind: &str, name: &str) -> Value {
    let api = "admissionregistration.k8s.io/v1";
    json!({"apiVersion": api, "kind": kind, "metadata": {"name": name}})
}

#[cfg(test)]
mod tests;
