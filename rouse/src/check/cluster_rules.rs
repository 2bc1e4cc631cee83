//! Pure: objects of a cluster → lines of `rouse check` about the cluster as a whole.

use agent::node_check::rules::CheckLine;
use serde_json::Value;

use crate::install::{kube_proxy_needs::KubeProxyNeed, readiness};

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
    let mut finding: Vec<String> = needs.iter().take(NAMED_MAX).map(ToString::to_string).collect();
    if needs.len() > NAMED_MAX {
        finding.push(format!("and {} more", needs.len() - NAMED_MAX));
    }
    let finding = finding.join("; ");
    match agents.is_some_and(is_without_kube_proxy) {
        true => CheckLine::to_do(
            subject,
            finding,
            "change these objects, or install again without --without-kube-proxy, and start kube-proxy",
        ),
        false => CheckLine::fine(subject, finding),
    }
}

fn is_without_kube_proxy(agents: &Value) -> bool {
    let containers = agents["spec"]["template"]["spec"]["containers"].as_array();
    let variables = containers.into_iter().flatten().filter_map(|it| it["env"].as_array());
    variables.flatten().any(|it| it["name"] == "ROUSE_WITHOUT_KUBE_PROXY" && it["value"] == "true")
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
