//! Pure: objects of a cluster → lines of `rouse check` about the cluster as a whole.

use agent::node_check::rules::CheckLine;
use ipnet::IpNet;
use serde_json::Value;

use crate::install::{
    kube_proxy_needs::KubeProxyNeed,
    readiness,
    workloads::{agent_variable, is_without_kube_proxy},
};

/// Number of objects that a line names.
const NAMED_MAX: usize = 5;

/// Judges the DaemonSet of the agents; `None`: it does not exist.
pub(super) fn check_agents(agents: Option<&Value>) -> CheckLine {
    let Some(agents) = agents else {
        return CheckLine::to_do(
            "agents",
            "not installed",
            "run `rouse check` as root on each node, and then `rouse install`",
        );
    };
    match readiness::unready_reason(agents) {
        None => CheckLine::fine("agents", "all are ready"),
        Some(reason) => CheckLine::to_do("agents", reason, "look at the lines of their nodes"),
    }
}

/// Judges the nodes without an agent. `pods` has the node and the name of each agent's pod; `agents` is their DaemonSet.
pub(super) fn check_nodes(
    nodes: &[Value],
    pods: &[(String, String)],
    agents: Option<&Value>,
) -> CheckLine {
    let subject = "nodes";
    let names = nodes.iter().map(|node| text(&node["metadata"]["name"]));
    let bare: Vec<&str> = names.filter(|name| !pods.iter().any(|(on, _)| on == name)).collect();
    if bare.is_empty() {
        return CheckLine::fine(subject, format!("all {} have an agent", nodes.len()));
    }
    let finding = format!("no agent on {}", list_first(&bare));
    match agents.is_some_and(is_without_kube_proxy) {
        true => CheckLine::to_do(
            subject,
            finding,
            "nothing serves ClusterIPs there: kubectl describe daemonset rouse-agent shows why",
        ),
        // With kube-proxy, such a node lacks only the direct path.
        false => CheckLine::fine(subject, finding),
    }
}

/// Joins the first items to a text, with the number of the others.
fn list_first(items: &[impl ToString]) -> String {
    let mut named: Vec<String> = items.iter().take(NAMED_MAX).map(ToString::to_string).collect();
    if items.len() > NAMED_MAX {
        named.push(format!("and {} more", items.len() - NAMED_MAX));
    }
    named.join("; ")
}

/// Judges the cluster's DNS by its Services and their EndpointSlices.
pub(super) fn check_dns(services: &[Value], slices: &[Value]) -> CheckLine {
    let subject = "cluster DNS";
    let Some(service) = services.first() else {
        return CheckLine::fine(subject, "no Service has the label k8s-app=kube-dns");
    };
    let name = text(&service["metadata"]["name"]);
    let ready = slices
        .iter()
        .filter(|slice| slice["metadata"]["labels"]["kubernetes.io/service-name"] == name)
        .filter_map(|slice| slice["endpoints"].as_array())
        .flatten()
        // An endpoint without the condition counts as ready, as for kube-proxy.
        .filter(|endpoint| endpoint["conditions"]["ready"] != false)
        .count();
    match ready {
        0 => CheckLine::to_do(
            subject,
            format!("the Service {name} has no ready endpoint"),
            "look at its pods: kubectl get pods -n kube-system -l k8s-app=kube-dns",
        ),
        ready => CheckLine::fine(subject, format!("{ready} ready endpoints of the Service {name}")),
    }
}

/// Judges the objects that need kube-proxy. `agents` is the DaemonSet, which knows if the cluster is to do without.
pub(super) fn check_kube_proxy_needs(needs: &[KubeProxyNeed], agents: Option<&Value>) -> CheckLine {
    let subject = "need of kube-proxy";
    if needs.is_empty() {
        return CheckLine::fine(subject, "no Service and no pod needs it");
    }
    let finding = list_first(needs);
    match agents.is_some_and(is_without_kube_proxy) {
        true => CheckLine::to_do(
            subject,
            finding,
            "change these objects, or install again without --without-kube-proxy, and start kube-proxy",
        ),
        false => CheckLine::fine(subject, finding),
    }
}

/// Judges ranges of ClusterIPs that are not known for this reason. Only a cluster without kube-proxy needs them.
pub(super) fn unknown_ranges(reason: &str, agents: Option<&Value>) -> CheckLine {
    let (subject, finding) = ("need of kube-proxy", format!("not checked: {reason}"));
    match agents.is_some_and(is_without_kube_proxy) {
        true => CheckLine::to_do(subject, finding, "install again with --service-cidr"),
        false => CheckLine::fine(subject, finding),
    }
}

/// Returns the ranges of ClusterIPs with which the agents are installed; none if they read them from objects.
pub(super) fn installed_ranges(agents: Option<&Value>) -> Vec<IpNet> {
    let value = agents.and_then(|agents| agent_variable(agents, "ROUSE_SERVICE_CIDR"));
    let texts = value.unwrap_or_default().split(',');
    texts.filter_map(|it| agent::config::parse_service_cidr(it).ok()).collect()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn agents(env: Value) -> Value {
        let container = json!({"name": "agent", "env": env});
        json!({
            "kind": "DaemonSet", "metadata": {"name": "rouse-agent", "generation": 1},
            "spec": {"template": {"spec": {"containers": [container]}}},
            "status": {
                "observedGeneration": 1, "desiredNumberScheduled": 2,
                "updatedNumberScheduled": 2, "numberReady": 2,
            },
        })
    }

    fn has_to_do(line: &CheckLine) -> bool {
        line.to_do.is_some()
    }

    #[test]
    fn agents_must_be_installed_and_ready() {
        assert!(has_to_do(&check_agents(None)));
        let mut agents = agents(json!([]));
        assert!(!has_to_do(&check_agents(Some(&agents))));
        agents["status"]["numberReady"] = 1.into();
        let line = check_agents(Some(&agents));
        assert!(has_to_do(&line) && line.finding.contains("1 of 2 ready"), "{line}");
    }

    #[test]
    fn a_node_without_an_agent_is_to_do_where_nothing_else_serves_cluster_ips() {
        let nodes = ["n1", "n2"].map(|name| json!({"metadata": {"name": name}}));
        let pods = ["n1", "n2"].map(|name| (name.to_owned(), format!("agent-{name}")));
        let (beside, without) = (
            agents(json!([])),
            agents(json!([{"name": "ROUSE_WITHOUT_KUBE_PROXY", "value": "true"}])),
        );
        assert!(!has_to_do(&check_nodes(&nodes, &pods, Some(&without))));
        let line = check_nodes(&nodes, &pods[..1], Some(&without));
        assert!(has_to_do(&line) && line.finding == "no agent on n2", "{line}");
        assert!(!has_to_do(&check_nodes(&nodes, &pods[..1], Some(&beside))));
    }

    #[test]
    fn ranges_are_those_of_the_installation_and_must_be_known_without_kube_proxy() {
        let without = agents(json!([
            {"name": "ROUSE_WITHOUT_KUBE_PROXY", "value": "true"},
            {"name": "ROUSE_SERVICE_CIDR", "value": "10.96.0.0/12,fd00:10:96::/112"},
        ]));
        assert_eq!(installed_ranges(Some(&without)).len(), 2);
        assert_eq!(installed_ranges(None), []);
        assert!(has_to_do(&unknown_ranges("no objects", Some(&without))));
        assert!(!has_to_do(&unknown_ranges("no objects", Some(&agents(json!([]))))));
    }

    #[test]
    fn dns_needs_a_ready_endpoint() {
        let service = json!({"metadata": {"name": "kube-dns"}});
        let slice = |service: &str, ready: Value| {
            let labels = json!({"kubernetes.io/service-name": service});
            let endpoints = json!([{"addresses": ["10.0.0.1"], "conditions": {"ready": ready}}]);
            json!({"metadata": {"labels": labels}, "endpoints": endpoints})
        };
        let check = |slices: &[Value]| check_dns(std::slice::from_ref(&service), slices);
        assert!(has_to_do(&check(&[])));
        assert!(has_to_do(&check(&[slice("kube-dns", false.into()), slice("x", true.into())])));
        assert!(!has_to_do(&check(&[slice("kube-dns", true.into())])));
        assert!(!has_to_do(&check(&[slice("kube-dns", Value::Null)])), "as for kube-proxy");
        assert!(!has_to_do(&check_dns(&[], &[])), "the cluster may have another DNS");
    }

    #[test]
    fn a_need_of_kube_proxy_is_to_do_only_where_it_is_missing() {
        let need = |number: usize| KubeProxyNeed {
            object: format!("Service n/{number}"),
            reason: "why".into(),
        };
        let needs: Vec<KubeProxyNeed> = (0..7).map(need).collect();
        let (beside, without) = (
            agents(json!([{"name": "ROUSE_CLUSTERIP", "value": "all"}])),
            agents(json!([{"name": "ROUSE_WITHOUT_KUBE_PROXY", "value": "true"}])),
        );
        let line = check_kube_proxy_needs(&needs, Some(&beside));
        assert!(!has_to_do(&line) && line.finding.ends_with("and 2 more"), "{line}");
        assert!(has_to_do(&check_kube_proxy_needs(&needs, Some(&without))));
        assert!(!has_to_do(&check_kube_proxy_needs(&[], Some(&without))));
    }
}
