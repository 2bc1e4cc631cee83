//! Shell: `rouse uninstall`: removes the components; users' objects and their pods stay.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use controller::{
    model::cluster_state::name_registry::PORT_RECORD_NAME,
    write::children::slices::{MANAGED_BY_LABEL, MANAGED_BY_ROUSE},
};
use serde_json::Value;

use super::{
    cluster::{self, ClusterClient},
    configs,
    given_back::give_back_patch,
    kube_proxy_check, objects, readiness,
    settings::InstallSettings,
    webhook_object, workloads,
};
use crate::stdout;

/// Time limit of each wait, except that for users' objects.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

/// Time limit of the wait for users' objects. Kubernetes' garbage collector first deletes their dependents. It
/// discovers kinds only every 30 s, and pauses after a change until its caches are synchronised.
const DELETE_TIMEOUT: Duration = Duration::from_secs(300);

/// Objects that the controller creates for itself, beside those of the installation.
const CONTROLLER_OBJECTS: [(&str, &str, &str); 7] = [
    ("v1", "Secret", "rouse-authorities"),
    ("v1", "Secret", "rouse-local-authorities"),
    ("v1", "Secret", "webhook-certs"),
    ("v1", "ConfigMap", "rouse-authorities"),
    ("v1", "ConfigMap", "rouse-trust-bundle"),
    ("v1", "ConfigMap", PORT_RECORD_NAME),
    ("coordination.k8s.io/v1", "Lease", "rouse-controller"),
];

/// Removes an installation. CRDs, and with them every service, are removed only with `crds`.
pub(super) async fn run(
    cluster: &ClusterClient,
    settings: &InstallSettings,
    crds: bool,
) -> Result<()> {
    kube_proxy_check::check_agents(cluster, settings).await?;
    // The controller first: it would register its webhooks again, and webhooks without it would block every change.
    remove_object(cluster, &bare_object("apps/v1", "Deployment", "controller", settings)).await?;
    wait_for_pods_gone(cluster, "app=controller", settings).await?;
    for (kind, name) in super::WEBHOOKS {
        remove_object(cluster, &webhook_object(kind, name)).await?;
    }
    if crds {
        remove_user_objects(cluster).await?;
    }
    give_workloads_back(cluster).await?;
    // Only now: with the controller gone nothing writes the EndpointSlices again.
    remove_endpoint_slices(cluster).await?;
    remove_agent_pins(cluster, settings).await?;
    let mut objects = objects::all_possible(settings);
    // In reverse order of creation, so that no object loses another that it depends on.
    objects.reverse();
    for object in &objects {
        let is_kept = configs::is_operator_owned(object)
            || object["kind"] == "Namespace"
            || (object["kind"] == "CustomResourceDefinition" && !crds);
        if !is_kept {
            remove_object(cluster, object).await?;
        }
    }
    if crds {
        wait_for_crds_gone(cluster, &objects).await?;
    }
    // Last: the components' certificates depend on these secrets.
    for (api, kind, name) in CONTROLLER_OBJECTS {
        remove_object(cluster, &bare_object(api, kind, name, settings)).await?;
    }
    let namespace = &settings.namespace;
    stdout::print_line(&format!("left: namespace {namespace} with its config-* ConfigMaps"))?;
    if !crds {
        stdout::print_line(
            "left: the CRDs and all services with their pods; `--crds` removes them as well",
        )?;
    }
    Ok(())
}

fn bare_object(api: &str, kind: &str, name: &str, settings: &InstallSettings) -> Value {
    objects::namespaced_object(api, kind, name, "", settings)
}

async fn remove_object(cluster: &ClusterClient, object: &Value) -> Result<()> {
    if cluster.delete(object).await? {
        stdout::print_line(&format!("removed {}", objects::kind_and_name(object)))?;
    }
    Ok(())
}

/// Removes users' objects while their kinds still exist. Kubernetes cannot tell that an owner of a removed kind is
/// gone, and its pods would stay forever.
async fn remove_user_objects(cluster: &ClusterClient) -> Result<()> {
    let (v1, v1beta1) = ("serving.knative.dev/v1", "serving.knative.dev/v1beta1");
    let kinds = [
        (v1beta1, "DomainMapping"),
        (v1, "Service"),
        (v1, "Route"),
        (v1, "Configuration"),
        (v1, "Revision"),
    ];
    let started = Instant::now();
    for (api_version, kind) in kinds {
        loop {
            // Deleted again in each round: a controller may have made further objects since.
            let remaining = cluster.delete_everywhere(api_version, kind).await?;
            let Some(first) = remaining.first() else { break };
            if started.elapsed() > DELETE_TIMEOUT {
                bail!(
                    "{} objects of kind {kind} ({api_version}) still exist, {first} among them: check their finalizers, \
                     and if their pods end",
                    remaining.len()
                );
            }
            cluster::wait_poll_interval().await;
        }
    }
    stdout::print_line("removed all services with their pods")?;
    Ok(())
}

/// Gives the workloads of scaled Services back to their users. They are ordinary Deployments and StatefulSets, and those
/// that sleep get their pods back.
async fn give_workloads_back(cluster: &ClusterClient) -> Result<()> {
    let mut count = 0;
    for kind in ["Deployment", "StatefulSet"] {
        let workloads = cluster.list("apps/v1", kind, None, "").await?;
        for workload in workloads.iter().filter(|it| give_back_patch(it).is_some()) {
            count += u32::from(cluster.merge(workload, give_back_patch).await?);
        }
    }
    if count > 0 {
        stdout::print_line(&format!("gave back {count} workloads of scaled Services"))?;
    }
    Ok(())
}

/// Removes the EndpointSlices that the controller wrote, so that services' addresses refuse connections. Their
/// endpoints would be activators that can wake nothing any more, and later arbitrary pods that get the same addresses.
async fn remove_endpoint_slices(cluster: &ClusterClient) -> Result<()> {
    let labels = format!("{MANAGED_BY_LABEL}={MANAGED_BY_ROUSE}");
    let slices = cluster.list("discovery.k8s.io/v1", "EndpointSlice", None, &labels).await?;
    let namespaces = slices.iter().filter_map(|it| it["metadata"]["namespace"].as_str());
    for namespace in namespaces.collect::<BTreeSet<_>>() {
        cluster.delete_labelled("discovery.k8s.io/v1", "EndpointSlice", namespace, &labels).await?;
    }
    Ok(stdout::print_line("removed the EndpointSlices of services' names")?)
}

/// Removes pinned programs and maps from all nodes. Pins stay in force without an agent, so an uninstall must remove
/// them. Each node does it itself, in the agent's place and with the agent's rights.
async fn remove_agent_pins(cluster: &ClusterClient, settings: &InstallSettings) -> Result<()> {
    let agent = bare_object("apps/v1", "DaemonSet", "rouse-agent", settings);
    if cluster.get(&agent).await?.is_none() {
        return Ok(());
    }
    // The DaemonSet keeps its name: agents must end on a node before their pins are removed there.
    cluster.apply(&workloads::agent_removal_daemon_set(settings)).await?;
    let started = Instant::now();
    loop {
        let existing = cluster.get(&agent).await?.unwrap_or_default();
        let Some(reason) = readiness::unready_reason(&existing) else { break };
        if started.elapsed() > WAIT_TIMEOUT {
            // A node that is permanently away must not block the rest.
            stdout::print_line(&format!(
                "{reason}: programs, maps and routes stay on the nodes that are not ready"
            ))?;
            return Ok(());
        }
        cluster::wait_poll_interval().await;
    }
    stdout::print_line("removed programs, maps and routes from the nodes")?;
    Ok(())
}

/// Waits until the CRDs are gone. Deletion continues after the API server has accepted it, and would delete objects of
/// a new installation too.
async fn wait_for_crds_gone(cluster: &ClusterClient, objects: &[Value]) -> Result<()> {
    let started = Instant::now();
    for kind in objects.iter().filter(|it| it["kind"] == "CustomResourceDefinition") {
        while cluster.get(kind).await?.is_some() {
            if started.elapsed() > WAIT_TIMEOUT {
                bail!("{} still exists: check its finalizers", objects::kind_and_name(kind));
            }
            cluster::wait_poll_interval().await;
        }
    }
    Ok(())
}

async fn wait_for_pods_gone(
    cluster: &ClusterClient,
    labels: &str,
    settings: &InstallSettings,
) -> Result<()> {
    let started = Instant::now();
    while !cluster.list("v1", "Pod", Some(&settings.namespace), labels).await?.is_empty() {
        if started.elapsed() > WAIT_TIMEOUT {
            bail!(
                "the pods with {labels} do not end: see kubectl describe pods --namespace {}",
                settings.namespace
            );
        }
        cluster::wait_poll_interval().await;
    }
    Ok(())
}
