//! Pure: detection of Knative's own controllers in the namespace.

use serde_json::Value;

use super::workloads::is_rouse_object;

/// Deployments of Knative Serving, which do the same work as Rouse and partly have the same names.
const KNATIVE_DEPLOYMENTS: [&str; 8] = [
    "activator",
    "autoscaler",
    "autoscaler-hpa",
    "controller",
    "domain-mapping",
    "domainmapping-webhook",
    "net-kourier-controller",
    "webhook",
];

/// Error: Knative's controllers run in the namespace, and two sets of controllers would undo each other's work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "Knative's own controllers are in namespace {namespace}: Deployments {}. Remove them first: `kubectl delete deployment \
     --namespace {namespace} {}`; services, their pods and the config-* ConfigMaps stay",
    names.join(", "), names.join(" ")
)]
pub(crate) struct KnativeConflictError {
    namespace: String,
    names: Vec<String>,
}

/// Returns an error if Deployments of Knative are in the namespace.
pub(crate) fn check_no_knative(
    namespace: &str,
    deployments: &[Value],
) -> Result<(), KnativeConflictError> {
    let name = |object: &Value| object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let others = deployments.iter().filter(|it| !is_rouse_object(it)).map(name);
    let names: Vec<String> =
        others.filter(|name| KNATIVE_DEPLOYMENTS.contains(&name.as_str())).collect();
    if names.is_empty() {
        Ok(())
    } else {
        Err(KnativeConflictError { namespace: namespace.to_owned(), names })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn knatives_controllers_are_named_with_what_to_do() {
        let deployment =
            |name: &str, labels: Value| json!({"metadata": {"name": name, "labels": labels}});
        let knative = json!({"app.kubernetes.io/name": "knative-serving"});
        let labels = json!({"app.kubernetes.io/part-of": "rouse"});
        let objects = [
            deployment("controller", knative.clone()),
            deployment("webhook", knative),
            deployment("activator", labels),
        ];
        let error =
            check_no_knative("knative-serving", &objects).expect_err("Knative's").to_string();
        assert!(error.contains("Deployments controller, webhook."), "{error}");
        assert!(error.contains("--namespace knative-serving controller webhook`"), "{error}");
        assert_eq!(check_no_knative("knative-serving", &objects[2..]), Ok(()));
        assert_eq!(
            check_no_knative("x", &[deployment("shop", json!({}))]),
            Ok(()),
            "not one of Knative's"
        );
    }
}
