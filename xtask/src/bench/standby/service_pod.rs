//! Pure: pods of services as the API server lists them.

use serde_json::Value;

/// Label with the name of a pod's service.
pub(super) const SERVICE_LABEL: &str = "serving.knative.dev/service";

/// A running pod of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServicePod {
    pub(super) name: String,
    /// Name of its service.
    pub(super) service: String,
    /// Name of its node.
    pub(super) node: String,
    /// First address of the pod.
    pub(super) ip: String,
}

impl ServicePod {
    /// Reads a pod object; `None` if it has no node or address yet.
    pub(super) fn read(pod: &Value) -> Option<Self> {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        Some(Self {
            name: text(&pod["metadata"]["name"])?,
            service: text(&pod["metadata"]["labels"][SERVICE_LABEL])?,
            node: text(&pod["spec"]["nodeName"])?,
            ip: text(&pod["status"]["podIP"])?,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pod_without_a_node_is_none_yet() {
        let labels = json!({"serving.knative.dev/service": "kept0"});
        let mut pod = json!({
            "metadata": {"name": "kept0-x", "labels": labels}, "spec": {},
            "status": {"podIP": "10.244.1.7"},
        });
        assert_eq!(ServicePod::read(&pod), None);
        pod["spec"]["nodeName"] = json!("node1");
        let [name, service, node, ip] =
            ["kept0-x", "kept0", "node1", "10.244.1.7"].map(str::to_owned);
        assert_eq!(ServicePod::read(&pod), Some(ServicePod { name, service, node, ip }));
    }
}
