//! Shell: the check before an installation without kube-proxy: reads the cluster, and refuses while something needs it.

use std::net::IpAddr;

use agent::api_servers::ApiServerUrl;
use anyhow::{Result, bail};
use ipnet::IpNet;
use serde_json::Value;

use super::{
    cluster::ClusterClient,
    kube_proxy_needs::{ClusterObjects, KubeProxyNeededError, kube_proxy_needs},
    objects::namespaced_object,
    settings::InstallSettings,
    workloads::is_without_kube_proxy,
};

/// Returns an error if the cluster needs kube-proxy, with the names of the objects because of which it does.
pub(super) async fn check_no_need(
    cluster: &ClusterClient,
    settings: &InstallSettings,
    objects: &[Value],
) -> Result<()> {
    let ranges = match settings.service_cidr.as_slice() {
        [] => listed_ranges(cluster).await?,
        given => given.to_vec(),
    };
    check_api_servers(&settings.apiservers, &ranges)?;
    let needs = kube_proxy_needs(&read_objects(cluster).await?, objects, &ranges);
    if needs.is_empty() { Ok(()) } else { Err(KubeProxyNeededError { needs }.into()) }
}

/// Returns an error unless the agents are given an API server that they reach without a Service.
///
/// The ClusterIP of the API server is served by what the agents read from it, and names are resolved by the cluster's DNS,
/// which is a Service too. On a new node, nothing would lead to either.
fn check_api_servers(servers: &[ApiServerUrl], ranges: &[IpNet]) -> Result<()> {
    let addresses: Vec<IpAddr> = servers.iter().filter_map(ApiServerUrl::address).collect();
    if addresses.is_empty() {
        bail!(
            "--without-kube-proxy needs --apiserver https://ADDRESS:PORT with an IP address: agents could not reach the \
             API server by its ClusterIP or by a name after a restart of the nodes"
        );
    }
    let is_cluster_ip = |address: &&IpAddr| ranges.iter().any(|range| range.contains(*address));
    if let Some(address) = addresses.iter().find(is_cluster_ip) {
        bail!(
            "--apiserver names {address}, which is a ClusterIP: with --without-kube-proxy, name the addresses of the API \
             servers themselves"
        );
    }
    Ok(())
}

/// Returns an error if only the agents serve the ClusterIPs of the cluster. Without them, or in another mode, no pod
/// would reach DNS or the API server.
pub(super) async fn check_agents(
    cluster: &ClusterClient,
    settings: &InstallSettings,
) -> Result<()> {
    let agents = namespaced_object("apps/v1", "DaemonSet", "rouse-agent", "", settings);
    check_daemon_set(&cluster.get(&agents).await?.unwrap_or_default())
}

/// Returns an error if the agents of this DaemonSet serve the cluster without kube-proxy. `agents` may be null:
/// then there are none.
pub(super) fn check_daemon_set(agents: &Value) -> Result<()> {
    if is_without_kube_proxy(agents) {
        bail!(
            "the agents serve this cluster without kube-proxy, and nothing is changed: start kube-proxy, wait until it has \
             written its rules, and install with --clusterip all and without --without-kube-proxy before"
        );
    }
    Ok(())
}

/// Reads the objects that decide whether a cluster needs kube-proxy.
pub(crate) async fn read_objects(cluster: &ClusterClient) -> Result<ClusterObjects> {
    Ok(ClusterObjects {
        services: cluster.list("v1", "Service", None, "").await?,
        namespaces: cluster.list("v1", "Namespace", None, "").await?,
        pods: cluster.list("v1", "Pod", None, "").await?,
        runtime_classes: cluster.list("node.k8s.io/v1", "RuntimeClass", None, "").await?,
    })
}

/// Returns the ranges of the cluster's ServiceCIDR objects.
pub(crate) async fn listed_ranges(cluster: &ClusterClient) -> Result<Vec<IpNet>> {
    let listed = cluster.list("networking.k8s.io/v1", "ServiceCIDR", None, "").await;
    let reason = match &listed {
        Ok(objects) => {
            let ranges = ranges_of(objects);
            if !ranges.is_empty() {
                return Ok(ranges);
            }
            "it has no ServiceCIDR objects".to_owned()
        }
        Err(error) => format!("{error:#}"),
    };
    bail!(
        "the cluster's ranges of ClusterIPs are not known ({reason}): name them by --service-cidr, as the API server's \
         --service-cluster-ip-range does"
    )
}

fn ranges_of(objects: &[Value]) -> Vec<IpNet> {
    let texts = objects.iter().filter_map(|it| it["spec"]["cidrs"].as_array()).flatten();
    let ranges = texts.filter_map(|it| agent::config::parse_service_cidr(it.as_str()?).ok());
    ranges.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ranges_come_from_all_objects() {
        let object = |cidrs: Value| json!({"spec": {"cidrs": cidrs}});
        let objects =
            [object(json!(["10.96.0.0/12", "fd00:10:96::/112"])), object(json!(["10.200.0.0/16"]))];
        let texts: Vec<String> = ranges_of(&objects).iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["10.96.0.0/12", "fd00:10:96::/112", "10.200.0.0/16"]);
        assert_eq!(ranges_of(&[json!({})]), []);
    }

    #[test]
    fn an_api_server_must_be_reached_without_a_service() {
        let ranges = ["10.96.0.0/12".parse().expect("a range")];
        let check = |urls: &[&str]| {
            let servers = urls.iter().map(|url| url.parse().expect("a URL"));
            let servers: Vec<ApiServerUrl> = servers.collect();
            check_api_servers(&servers, &ranges).map_err(|error| error.to_string())
        };
        let (named, own) = ("https://api.example.com:6443", "https://10.96.0.1:443");
        let good = "https://10.0.0.1:6443";
        assert_eq!(check(&[good]), Ok(()));
        assert_eq!(check(&[named, good]), Ok(()));
        let none: &[&str] = &[];
        for bad in [none, &[named]] {
            let error = check(bad).expect_err("no address");
            assert!(error.contains("with an IP address"), "{error}");
        }
        let error = check(&[good, own]).expect_err("the Service itself");
        assert!(error.contains("10.96.0.1, which is a ClusterIP"), "{error}");
    }
}
