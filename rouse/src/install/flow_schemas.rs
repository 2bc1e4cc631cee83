//! Pure: FlowSchemas: the priority of the components' requests while the API server is overloaded.
//!
//! Without them, requests of service accounts share the level `workload-low` with all other programs of the cluster.
//! Each API server has these levels (`suggested` configuration of Kubernetes).

use agent::config::ClusterIpMode;
use serde_json::{Value, json};

use super::{
    objects::{cluster_object, merge_fields},
    settings::InstallSettings,
};

/// A FlowSchema of one service account.
struct AccountFlow {
    /// Name of the object.
    name: &'static str,
    /// Service account whose requests it selects.
    account: &'static str,
    /// Order among FlowSchemas, of which the lowest number that selects a request counts.
    precedence: u32,
    /// Priority level of these requests.
    level: &'static str,
    /// API group and resource that it selects; all if `None`.
    resource: Option<(&'static str, &'static str)>,
    /// Verbs that it selects.
    verbs: &'static [&'static str],
}

/// Value that selects all.
const ALL: &str = "*";

/// The controller's Lease, at the level of the leader elections of Kubernetes' own controllers.
const LEADER_ELECTION: AccountFlow = AccountFlow {
    name: "rouse-leader-election",
    account: "controller",
    precedence: 210,
    level: "leader-election",
    resource: Some(("coordination.k8s.io", "leases")),
    verbs: &[ALL],
};
/// The agents' watches, at the level of the kubelets: what a node's connects follow must not wait for programs of users.
/// Events are not among them: when a map is full, all nodes write Events at once.
const AGENT: AccountFlow = AccountFlow {
    name: "rouse-agent",
    account: "rouse-agent",
    precedence: 510,
    level: "system",
    resource: None,
    verbs: &["list", "watch"],
};
/// The controller, at the level of the accounts of `kube-system`.
const CONTROLLER: AccountFlow = AccountFlow {
    name: "rouse-controller",
    account: "controller",
    precedence: 910,
    level: "workload-high",
    resource: None,
    verbs: &[ALL],
};

/// FlowSchemas of all accounts that talk to the API server.
pub(crate) fn all(settings: &InstallSettings) -> Vec<Value> {
    // Without Services of the cluster, the agents list and watch nothing.
    let agent = (settings.clusterip != ClusterIpMode::Off).then_some(AGENT);
    let flows = [LEADER_ELECTION, CONTROLLER].into_iter().chain(agent);
    flows.map(|flow| flow_schema(&flow, settings)).collect()
}

/// Returns the FlowSchema by which the API server treats one kind of requests of an account.
fn flow_schema(flow: &AccountFlow, settings: &InstallSettings) -> Value {
    let account = json!({"name": flow.account, "namespace": settings.namespace});
    let (group, resource) = flow.resource.unwrap_or((ALL, ALL));
    let mut rule = json!({
        "subjects": [{"kind": "ServiceAccount", "serviceAccount": account}],
        "resourceRules": [{
            "apiGroups": [group], "resources": [resource], "verbs": flow.verbs,
            "clusterScope": true, "namespaces": ["*"],
        }],
    });
    // A rule of all requests also has those for no object, such as discovery.
    if flow.resource.is_none() && flow.verbs == [ALL] {
        rule["nonResourceRules"] = json!([{"nonResourceURLs": [ALL], "verbs": [ALL]}]);
    }
    let spec = json!({
        "matchingPrecedence": flow.precedence,
        "priorityLevelConfiguration": {"name": flow.level},
        "distinguisherMethod": {"type": "ByUser"},
        "rules": [rule],
    });
    let object = cluster_object("flowcontrol.apiserver.k8s.io/v1", "FlowSchema", flow.name);
    merge_fields(object, json!({"spec": spec}))
}
