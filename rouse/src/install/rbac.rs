//! Pure: service accounts and their permissions, each with its reason.
//!
//! Activator and autoscaler never talk to the API server, and the agent only if it serves Services of the cluster. They
//! have accounts that identify them in the tokens that they present to the controller.

use agent::config::ClusterIpMode;
use controller::model::cluster_state::name_registry::PORT_RECORD_NAME;
use serde_json::{Value, json};

use super::{
    objects::{cluster_object, merge_fields, namespaced_object},
    settings::InstallSettings,
};

const RBAC_API_VERSION: &str = "rbac.authorization.k8s.io/v1";
const RBAC_API_GROUP: &str = "rbac.authorization.k8s.io";

/// Permission: verbs on resources, and the reason.
#[derive(Debug)]
pub(crate) struct RbacRule {
    /// API groups; the empty name is the core group.
    pub(crate) groups: &'static [&'static str],
    /// Resource names in the plural, with subresources as `NAME/SUB`.
    pub(crate) resources: &'static [&'static str],
    /// Names of the only objects it applies to; all objects if empty.
    pub(crate) names: &'static [&'static str],
    /// Verbs of the Kubernetes API.
    pub(crate) verbs: &'static [&'static str],
    /// Reason, as printed in `docs/rbac.md`.
    pub(crate) reason: &'static str,
}

const SERVING: &[&str] = &["serving.knative.dev"];
const WATCH_VERBS: &[&str] = &["get", "list", "watch"];
const MANAGE_VERBS: &[&str] = &["get", "list", "watch", "create", "patch", "delete"];

/// Permissions of the controller in all namespaces, because services may be in any of them, and on the namespaces and
/// nodes themselves.
pub(crate) const CLUSTER_RULES: [RbacRule; 32] = [
    RbacRule {
        groups: SERVING,
        resources: &["services", "domainmappings"],
        names: &[],
        verbs: WATCH_VERBS,
        reason: "objects that users write",
    },
    RbacRule {
        groups: SERVING,
        resources: &["configurations", "routes", "revisions"],
        names: &[],
        verbs: MANAGE_VERBS,
        reason: "child objects of a service; removal of old Revisions",
    },
    RbacRule {
        groups: SERVING,
        resources: &[
            "services/status",
            "configurations/status",
            "routes/status",
            "revisions/status",
            "domainmappings/status",
        ],
        names: &[],
        verbs: &["patch"],
        reason: "conditions, URLs, traffic",
    },
    RbacRule {
        groups: SERVING,
        resources: &[
            "services/finalizers",
            "configurations/finalizers",
            "routes/finalizers",
            "revisions/finalizers",
            "domainmappings/finalizers",
        ],
        names: &[],
        verbs: &["update"],
        reason: "as owners of child objects, where the cluster checks the right to set owner references",
    },
    RbacRule {
        groups: &["autoscaling.internal.knative.dev"],
        resources: &["podautoscalers", "metrics"],
        names: &[],
        verbs: MANAGE_VERBS,
        reason: "scale of a Revision, for tools to read",
    },
    RbacRule {
        groups: &["autoscaling.internal.knative.dev"],
        resources: &["podautoscalers/status", "metrics/status"],
        names: &[],
        verbs: &["patch"],
        reason: "scale of a Revision, for tools to read",
    },
    RbacRule {
        groups: &["autoscaling.internal.knative.dev"],
        resources: &["podautoscalers/finalizers"],
        names: &[],
        verbs: &["update"],
        reason: "as owners of HorizontalPodAutoscalers, where the cluster checks the right to set owner references",
    },
    RbacRule {
        groups: &["autoscaling"],
        resources: &["horizontalpodautoscalers"],
        names: &[],
        verbs: MANAGE_VERBS,
        reason: "scaling of Revisions of the class hpa.autoscaling.knative.dev; number of pods that one of a user keeps for a scaled Service",
    },
    RbacRule {
        groups: &["networking.internal.knative.dev"],
        resources: &["serverlessservices", "clusterdomainclaims", "certificates", "ingresses"],
        names: &[],
        verbs: MANAGE_VERBS,
        reason: "path of a Revision, for tools to read; namespaces that may use a domain; certificates that are requested; hosts for other ingresses",
    },
    RbacRule {
        groups: &["networking.internal.knative.dev"],
        resources: &["serverlessservices/status", "certificates/status"],
        names: &[],
        verbs: &["patch"],
        reason: "path of a Revision, for tools to read; state of requested certificates",
    },
    RbacRule {
        groups: &["networking.internal.knative.dev"],
        resources: &["certificates/finalizers"],
        names: &[],
        verbs: &["update"],
        reason: "as owners of certificates of cert-manager, where the cluster checks the right to set owner references",
    },
    RbacRule {
        groups: &["cert-manager.io"],
        resources: &["certificates"],
        names: &[],
        verbs: &["get", "list", "watch", "create", "patch"],
        reason: "certificates of public hosts, with `external-domain-tls`",
    },
    RbacRule {
        groups: &["acme.cert-manager.io"],
        resources: &["challenges"],
        names: &[],
        verbs: WATCH_VERBS,
        reason: "paths by which an authority checks a host, with `external-domain-tls`",
    },
    RbacRule {
        groups: &["gateway.networking.k8s.io"],
        resources: &["gatewayclasses", "gateways", "grpcroutes", "httproutes", "referencegrants"],
        names: &[],
        verbs: WATCH_VERBS,
        reason: "hosts and rules of the Gateway API, where its kinds are installed",
    },
    RbacRule {
        groups: &["gateway.networking.k8s.io"],
        resources: &[
            "gatewayclasses/status",
            "gateways/status",
            "grpcroutes/status",
            "httproutes/status",
        ],
        names: &[],
        verbs: &["patch"],
        reason: "conditions and addresses of the same objects",
    },
    RbacRule {
        groups: &[""],
        resources: &["namespaces/finalizers"],
        names: &[],
        verbs: &["update"],
        reason: "as owners of certificates for all their hosts, where the cluster checks the right to set owner references",
    },
    RbacRule {
        groups: &["caching.internal.knative.dev"],
        resources: &["images"],
        names: &[],
        verbs: MANAGE_VERBS,
        reason: "images that pods will need, for image caches",
    },
    RbacRule {
        groups: &["apps"],
        resources: &["deployments"],
        names: &[],
        verbs: MANAGE_VERBS,
        reason: "the pods of a Revision; number of pods of a scaled Service",
    },
    RbacRule {
        groups: &["apps"],
        resources: &["statefulsets"],
        names: &[],
        verbs: &["get", "list", "watch", "patch"],
        reason: "number of pods of a scaled Service",
    },
    RbacRule {
        groups: &["apps"],
        resources: &["deployments/scale"],
        names: &[],
        verbs: &["update"],
        reason: "number of pods of a Revision",
    },
    RbacRule {
        groups: &[""],
        resources: &["services"],
        names: &[],
        verbs: MANAGE_VERBS,
        reason: "addresses of Routes and Revisions; scaled Services, which users write",
    },
    RbacRule {
        groups: &[""],
        resources: &["services/finalizers"],
        names: &[],
        verbs: &["update"],
        reason: "as owners of PodAutoscalers and EndpointSlices, where the cluster checks the right to set owner references",
    },
    RbacRule {
        groups: &["discovery.k8s.io"],
        resources: &["endpointslices"],
        names: &[],
        verbs: MANAGE_VERBS,
        reason: "endpoints of the Service of a Route, or of a scaled Service that sleeps: activators, for clients without an agent",
    },
    RbacRule {
        groups: &["discovery.k8s.io"],
        resources: &["endpointslices/restricted"],
        names: &[],
        verbs: &["create"],
        reason: "the same endpoints, where the cluster (OpenShift) restricts addresses of other namespaces",
    },
    RbacRule {
        groups: &[""],
        resources: &["pods"],
        names: &[],
        verbs: &["get", "list", "watch", "patch"],
        reason: "addresses and states of pods; annotations for the order of deletion, drains and standby",
    },
    RbacRule {
        groups: &[""],
        resources: &["pods/resize"],
        names: &[],
        verbs: &["patch"],
        reason: "requests of frozen pods: given back, and restored once a pod runs",
    },
    RbacRule {
        groups: &[""],
        resources: &["nodes"],
        names: &[],
        verbs: WATCH_VERBS,
        reason: "zones, readiness and CPU",
    },
    RbacRule {
        groups: &[""],
        resources: &["namespaces"],
        names: &[],
        verbs: WATCH_VERBS,
        reason: "labels by which NetworkPolicies select namespaces",
    },
    RbacRule {
        groups: &["networking.k8s.io"],
        resources: &["networkpolicies"],
        names: &[],
        verbs: WATCH_VERBS,
        reason: "clients whose requests an activator may accept",
    },
    RbacRule {
        groups: &[""],
        resources: &["serviceaccounts"],
        names: &[],
        verbs: &["get"],
        reason: "pull secrets that a service account names, when a tag is resolved to a digest",
    },
    RbacRule {
        groups: &[""],
        resources: &["secrets"],
        names: &[],
        verbs: &["get"],
        reason: "pull secrets, certificates and client CAs that DomainMappings, Gateways and config-network name, and requested certificates, each by name; the controller cannot list or watch Secrets",
    },
    RbacRule {
        groups: &["", "events.k8s.io"],
        resources: &["events"],
        names: &[],
        verbs: &["create", "patch"],
        reason: "Events, shown by `kubectl describe`",
    },
];

/// Permissions of the controller for its webhooks, and for checks of the components' tokens.
pub(crate) const ADMISSION_RULES: [RbacRule; 3] = [
    RbacRule {
        groups: &["admissionregistration.k8s.io"],
        resources: &["mutatingwebhookconfigurations", "validatingwebhookconfigurations"],
        names: &[],
        verbs: &["create"],
        reason: "registration of the webhooks; `create` cannot be limited by name",
    },
    RbacRule {
        groups: &["admissionregistration.k8s.io"],
        resources: &["mutatingwebhookconfigurations", "validatingwebhookconfigurations"],
        names: &[
            "webhook.serving.knative.dev",
            "validation.webhook.serving.knative.dev",
            "config.webhook.serving.knative.dev",
        ],
        verbs: &["get", "patch"],
        reason: "certificate in the webhooks",
    },
    RbacRule {
        groups: &["authentication.k8s.io"],
        resources: &["tokenreviews"],
        names: &[],
        verbs: &["create"],
        reason: "validity of a component's token, and its pod and node",
    },
];

/// Permissions of the controller in its own namespace.
pub(crate) const NAMESPACE_RULES: [RbacRule; 6] = [
    RbacRule {
        groups: &[""],
        resources: &["configmaps"],
        names: &[],
        verbs: &["list", "watch", "create"],
        reason: "reads `config-*`; creates the three below (`create` cannot be limited by name)",
    },
    RbacRule {
        groups: &[""],
        resources: &["configmaps"],
        names: &["rouse-authorities", "rouse-trust-bundle", PORT_RECORD_NAME],
        verbs: &["get", "patch"],
        reason: "certificate authorities that the components trust, and those for clients inside the cluster; owners of gateway ports",
    },
    RbacRule {
        groups: &[""],
        resources: &["secrets"],
        names: &[],
        verbs: &["create"],
        reason: "creation of the three Secrets below (`create` cannot be limited by name)",
    },
    RbacRule {
        groups: &[""],
        resources: &["secrets"],
        names: &["rouse-authorities", "rouse-local-authorities", "webhook-certs"],
        verbs: &["get", "update"],
        reason: "keys of its authorities and of its webhook",
    },
    RbacRule {
        groups: &["coordination.k8s.io"],
        resources: &["leases"],
        names: &[],
        verbs: &["create"],
        reason: "creation of the Lease below",
    },
    RbacRule {
        groups: &["coordination.k8s.io"],
        resources: &["leases"],
        names: &["rouse-controller"],
        verbs: &["get", "list", "watch", "update", "patch"],
        reason: "election of the replica that writes",
    },
];

/// Permissions of the agents if they serve Services of the cluster.
pub(crate) const AGENT_RULES: [RbacRule; 5] = [
    RbacRule {
        groups: &[""],
        resources: &["services", "namespaces"],
        names: &[],
        verbs: WATCH_VERBS,
        reason: "addresses and ports of Services, and the labels that select them",
    },
    RbacRule {
        groups: &["discovery.k8s.io"],
        resources: &["endpointslices"],
        names: &[],
        verbs: WATCH_VERBS,
        reason: "endpoints of these Services",
    },
    RbacRule {
        groups: &[""],
        resources: &["nodes"],
        names: &[],
        verbs: WATCH_VERBS,
        reason: "zone of the agent's own node, and if it is about to be deleted",
    },
    RbacRule {
        groups: &["networking.k8s.io"],
        resources: &["servicecidrs"],
        names: &[],
        verbs: WATCH_VERBS,
        reason: "ranges of ClusterIPs, which are unreachable in a cluster without kube-proxy",
    },
    RbacRule {
        groups: &["events.k8s.io"],
        resources: &["events"],
        names: &[],
        verbs: &["create", "patch"],
        reason: "Events on Services that a node does not serve",
    },
];

/// Names of the components' service accounts.
pub(crate) const ACCOUNTS: [&str; 4] = ["controller", "autoscaler", "activator", "rouse-agent"];

/// Service accounts, roles and their bindings.
pub(crate) fn all(settings: &InstallSettings) -> Vec<Value> {
    let mut objects: Vec<Value> =
        ACCOUNTS.iter().map(|name| service_account(name, settings)).collect();
    let rules: Vec<Value> = CLUSTER_RULES.iter().chain(&ADMISSION_RULES).map(rule_json).collect();
    objects.push(merge_fields(
        cluster_object(RBAC_API_VERSION, "ClusterRole", "rouse-controller"),
        json!({"rules": rules}),
    ));
    let subject = account_subject("controller", settings);
    let role_ref =
        |kind: &str| json!({"apiGroup": RBAC_API_GROUP, "kind": kind, "name": "rouse-controller"});
    let binding = json!({"roleRef": role_ref("ClusterRole"), "subjects": [subject]});
    objects.push(merge_fields(
        cluster_object(RBAC_API_VERSION, "ClusterRoleBinding", "rouse-controller"),
        binding,
    ));
    // A Role apart from the ClusterRole: the controller needs secrets and leases in this namespace only.
    let rules: Vec<Value> = NAMESPACE_RULES.iter().map(rule_json).collect();
    let role =
        namespaced_object(RBAC_API_VERSION, "Role", "rouse-controller", "controller", settings);
    objects.push(merge_fields(role, json!({"rules": rules})));
    let role = namespaced_object(
        RBAC_API_VERSION,
        "RoleBinding",
        "rouse-controller",
        "controller",
        settings,
    );
    objects.push(merge_fields(role, json!({"roleRef": role_ref("Role"), "subjects": [subject]})));
    objects.extend(agent_role(settings));
    objects.extend(user_roles());
    objects
}

/// ClusterRole of the agents and its binding, if the agents talk to the API server.
fn agent_role(settings: &InstallSettings) -> Vec<Value> {
    // Without Services to serve, an agent never talks to the API server and gets no rights there.
    if settings.clusterip == ClusterIpMode::Off {
        return Vec::new();
    }
    let object = |kind| cluster_object(RBAC_API_VERSION, kind, "rouse-agent");
    let rules: Vec<Value> = AGENT_RULES.iter().map(rule_json).collect();
    let binding = json!({
        "roleRef": {"apiGroup": RBAC_API_GROUP, "kind": "ClusterRole", "name": "rouse-agent"},
        "subjects": [account_subject("rouse-agent", settings)],
    });
    vec![
        merge_fields(object("ClusterRole"), json!({"rules": rules})),
        merge_fields(object("ClusterRoleBinding"), binding),
    ]
}

fn account_subject(name: &str, settings: &InstallSettings) -> Value {
    json!({"kind": "ServiceAccount", "name": name, "namespace": settings.namespace})
}

fn service_account(name: &str, settings: &InstallSettings) -> Value {
    let account = namespaced_object(
        "v1",
        "ServiceAccount",
        name,
        name.trim_start_matches("rouse-"),
        settings,
    );
    // Pods that need a token mount it explicitly.
    merge_fields(account, json!({"automountServiceAccountToken": false}))
}

fn rule_json(rule: &RbacRule) -> Value {
    let mut json =
        json!({"apiGroups": rule.groups, "resources": rule.resources, "verbs": rule.verbs});
    if !rule.names.is_empty() {
        json["resourceNames"] = json!(rule.names);
    }
    json
}

/// ClusterRoles that extend Kubernetes' default user roles to Rouse's kinds. The names are Knative's, because users may
/// have bound them.
fn user_roles() -> Vec<Value> {
    let change = ["create", "update", "patch", "delete", "deletecollection"];
    let read = ["get", "list", "watch"];
    let serving = |verbs: &[&str]| json!({"apiGroups": ["serving.knative.dev"], "resources": ["*"], "verbs": verbs});
    let internal = json!({
        "apiGroups": [
            "networking.internal.knative.dev",
            "autoscaling.internal.knative.dev",
            "caching.internal.knative.dev",
        ],
        "resources": ["*"],
        "verbs": read,
    });
    let role = |name: &str, to: &str, rules: Value| {
        let mut role = cluster_object(RBAC_API_VERSION, "ClusterRole", name);
        role["metadata"]["labels"][format!("rbac.authorization.k8s.io/aggregate-to-{to}")] =
            "true".into();
        merge_fields(role, json!({"rules": rules}))
    };
    // The aggregation labels add these rules to Kubernetes' own roles, so no binding of users changes.
    let verbs: Vec<&str> = read.iter().chain(&change).copied().collect();
    vec![
        role("knative-serving-namespaced-admin", "admin", json!([serving(&verbs), internal])),
        role("knative-serving-namespaced-edit", "edit", json!([serving(&verbs), internal])),
        role("knative-serving-namespaced-view", "view", json!([serving(&read), internal])),
    ]
}

/// Generates the contents of `docs/rbac.md`.
pub(crate) fn rbac_markdown() -> String {
    let mut text = String::from(
        "# Permissions of the components\n\n<!-- Written by `cargo xtask manifests` from rouse/src/install/rbac.rs. -->\n\n\
         The controller talks to the API server. With `rouse install --clusterip labelled` or `all`, the agents do so too; \
         by default their account has no rights. The accounts `autoscaler` and `activator` have no rights at all and no token \
         for the API server: they show the controller a token that only the controller accepts.\n",
    );
    // In the order of their reach, the widest first.
    for (title, rules) in [
        ("All namespaces", &CLUSTER_RULES[..]),
        ("Cluster-scoped objects", &ADMISSION_RULES[..]),
        ("Namespace of the installation", &NAMESPACE_RULES[..]),
        ("Agents, with `--clusterip labelled` or `all`", &AGENT_RULES[..]),
    ] {
        text.push_str(&format!(
            "\n## {title}\n\n| group | resources | names | verbs | why |\n|---|---|---|---|---|\n"
        ));
        for rule in rules {
            let code = |words: &[&str]| match words {
                [] => "all".to_owned(),
                words => words
                    .iter()
                    .map(|word| if word.is_empty() { "core".into() } else { format!("`{word}`") })
                    .collect::<Vec<_>>()
                    .join(", "),
            };
            text.push_str(&format!(
                "| {} | {} | {} | {} | {} |\n",
                code(rule.groups),
                code(rule.resources),
                code(rule.names),
                rule.verbs.join(", "),
                rule.reason
            ));
        }
    }
    text
}
