//! Pure: service accounts and their permissions, each with its reason.
//!
//! Agent, activator and autoscaler never talk to the API server. They have accounts without permissions, which identify
//! them in the tokens that they present to the controller.

use serde_json::{Value, json};

use super::{
    objects::{cluster_object, object, with},
    settings::InstallSettings,
};

const RBAC: &str = "rbac.authorization.k8s.io/v1";
const ROLES: &str = "rbac.authorization.k8s.io";

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
    pub(crate) why: &'static str,
}

const SERVING: &[&str] = &["serving.knative.dev"];
const FOLLOW: &[&str] = &["get", "list", "watch"];
const OWN: &[&str] = &["get", "list", "watch", "create", "patch", "delete"];

/// Permissions of the controller in every namespace, because services may be in any of them.
pub(crate) const CLUSTER: [RbacRule; 23] = [
    RbacRule {
        groups: SERVING,
        resources: &["services", "domainmappings"],
        names: &[],
        verbs: FOLLOW,
        why: "what users ask for",
    },
    RbacRule {
        groups: SERVING,
        resources: &["configurations", "routes", "revisions"],
        names: &[],
        verbs: OWN,
        why: "made for a service; old Revisions are removed",
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
        why: "conditions, URLs, traffic",
    },
    RbacRule {
        groups: SERVING,
        resources: &[
            "services/finalizers",
            "configurations/finalizers",
            "routes/finalizers",
            "revisions/finalizers",
        ],
        names: &[],
        verbs: &["update"],
        why: "owners of what is made for them, where the cluster checks whether we may name them so",
    },
    RbacRule {
        groups: &["autoscaling.internal.knative.dev"],
        resources: &["podautoscalers", "metrics"],
        names: &[],
        verbs: OWN,
        why: "what tools read of a Revision's scale",
    },
    RbacRule {
        groups: &["autoscaling.internal.knative.dev"],
        resources: &["podautoscalers/status", "metrics/status"],
        names: &[],
        verbs: &["patch"],
        why: "the same",
    },
    RbacRule {
        groups: &["autoscaling.internal.knative.dev"],
        resources: &["podautoscalers/finalizers"],
        names: &[],
        verbs: &["update"],
        why: "owners of HorizontalPodAutoscalers, where the cluster checks whether we may name them so",
    },
    RbacRule {
        groups: &["autoscaling"],
        resources: &["horizontalpodautoscalers"],
        names: &[],
        verbs: OWN,
        why: "scale Revisions of the class hpa.autoscaling.knative.dev",
    },
    RbacRule {
        groups: &["networking.internal.knative.dev"],
        resources: &["serverlessservices", "clusterdomainclaims"],
        names: &[],
        verbs: OWN,
        why: "what tools read of a Revision's path; who may use a domain",
    },
    RbacRule {
        groups: &["networking.internal.knative.dev"],
        resources: &["serverlessservices/status"],
        names: &[],
        verbs: &["patch"],
        why: "the same",
    },
    RbacRule {
        groups: &["caching.internal.knative.dev"],
        resources: &["images"],
        names: &[],
        verbs: OWN,
        why: "tells others which images pods will want",
    },
    RbacRule {
        groups: &["apps"],
        resources: &["deployments"],
        names: &[],
        verbs: OWN,
        why: "the pods of a Revision",
    },
    RbacRule {
        groups: &["apps"],
        resources: &["deployments/scale"],
        names: &[],
        verbs: &["update"],
        why: "how many of them",
    },
    RbacRule {
        groups: &[""],
        resources: &["services"],
        names: &[],
        verbs: OWN,
        why: "the addresses of routes and Revisions",
    },
    RbacRule {
        groups: &["discovery.k8s.io"],
        resources: &["endpointslices"],
        names: &[],
        verbs: OWN,
        why: "leads a route's address to activators where no agent does",
    },
    RbacRule {
        groups: &["discovery.k8s.io"],
        resources: &["endpointslices/restricted"],
        names: &[],
        verbs: &["create"],
        why: "the same, where the cluster (OpenShift) guards addresses of other namespaces",
    },
    RbacRule {
        groups: &[""],
        resources: &["pods"],
        names: &[],
        verbs: &["get", "list", "watch", "patch"],
        why: "where they are and how they fare; the annotation that says which goes first when fewer are wanted",
    },
    RbacRule { groups: &[""], resources: &["nodes"], names: &[], verbs: FOLLOW, why: "zones" },
    RbacRule {
        groups: &[""],
        resources: &["namespaces"],
        names: &[],
        verbs: FOLLOW,
        why: "labels by which NetworkPolicies select namespaces",
    },
    RbacRule {
        groups: &["networking.k8s.io"],
        resources: &["networkpolicies"],
        names: &[],
        verbs: FOLLOW,
        why: "whose requests may wait for a pod",
    },
    RbacRule {
        groups: &[""],
        resources: &["serviceaccounts"],
        names: &[],
        verbs: &["get"],
        why: "which pull secrets a service's account names, when a tag is resolved to a digest",
    },
    RbacRule {
        groups: &[""],
        resources: &["secrets"],
        names: &[],
        verbs: &["get"],
        why: "those pull secrets, one by one by name; none can be listed, and none is kept",
    },
    RbacRule {
        groups: &["", "events.k8s.io"],
        resources: &["events"],
        names: &[],
        verbs: &["create", "patch"],
        why: "what people read under `kubectl describe`",
    },
];

/// Permissions of the controller on cluster-scoped objects.
pub(crate) const ADMISSION: [RbacRule; 3] = [
    RbacRule {
        groups: &["admissionregistration.k8s.io"],
        resources: &["mutatingwebhookconfigurations", "validatingwebhookconfigurations"],
        names: &[],
        verbs: &["create"],
        why: "registers its webhooks; `create` cannot be limited by name",
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
        why: "keeps its certificate in them",
    },
    RbacRule {
        groups: &["authentication.k8s.io"],
        resources: &["tokenreviews"],
        names: &[],
        verbs: &["create"],
        why: "whether a part's token is real, and which pod and node it is bound to",
    },
];

/// Permissions of the controller in its own namespace.
pub(crate) const OWN_NAMESPACE: [RbacRule; 6] = [
    RbacRule {
        groups: &[""],
        resources: &["configmaps"],
        names: &[],
        verbs: &["list", "watch", "create"],
        why: "follows `config-*`; makes `rouse-authorities` (`create` cannot be limited by name)",
    },
    RbacRule {
        groups: &[""],
        resources: &["configmaps"],
        names: &["rouse-authorities"],
        verbs: &["get", "patch"],
        why: "publishes whom the parts trust",
    },
    RbacRule {
        groups: &[""],
        resources: &["secrets"],
        names: &[],
        verbs: &["create"],
        why: "makes the two below once (`create` cannot be limited by name)",
    },
    RbacRule {
        groups: &[""],
        resources: &["secrets"],
        names: &["rouse-authorities", "webhook-certs"],
        verbs: &["get", "update"],
        why: "keys of its authorities and of its webhook",
    },
    RbacRule {
        groups: &["coordination.k8s.io"],
        resources: &["leases"],
        names: &[],
        verbs: &["create"],
        why: "makes the one below once",
    },
    RbacRule {
        groups: &["coordination.k8s.io"],
        resources: &["leases"],
        names: &["rouse-controller"],
        verbs: &["get", "list", "watch", "update", "patch"],
        why: "who of the replicas writes",
    },
];

/// Names of the components' service accounts.
pub(crate) const ACCOUNTS: [&str; 4] = ["controller", "autoscaler", "activator", "rouse-agent"];

/// Service accounts, roles and their bindings.
pub(crate) fn all(settings: &InstallSettings) -> Vec<Value> {
    let mut all: Vec<Value> = ACCOUNTS.iter().map(|name| account(name, settings)).collect();
    let rules: Vec<Value> = CLUSTER.iter().chain(&ADMISSION).map(rule).collect();
    all.push(with(
        cluster_object(RBAC, "ClusterRole", "rouse-controller"),
        json!({"rules": rules}),
    ));
    let subject =
        json!({"kind": "ServiceAccount", "name": "controller", "namespace": settings.namespace});
    let of = |kind: &str| json!({"apiGroup": ROLES, "kind": kind, "name": "rouse-controller"});
    let binding = json!({"roleRef": of("ClusterRole"), "subjects": [subject]});
    all.push(with(cluster_object(RBAC, "ClusterRoleBinding", "rouse-controller"), binding));
    // A Role apart from the ClusterRole: the controller needs secrets and leases in this namespace only.
    let rules: Vec<Value> = OWN_NAMESPACE.iter().map(rule).collect();
    let role = object(RBAC, "Role", "rouse-controller", "controller", settings);
    all.push(with(role, json!({"rules": rules})));
    let role = object(RBAC, "RoleBinding", "rouse-controller", "controller", settings);
    all.push(with(role, json!({"roleRef": of("Role"), "subjects": [subject]})));
    all.extend(users());
    all
}

fn account(name: &str, settings: &InstallSettings) -> Value {
    let account = object("v1", "ServiceAccount", name, name.trim_start_matches("rouse-"), settings);
    // Pods that need a token mount it explicitly.
    with(account, json!({"automountServiceAccountToken": false}))
}

fn rule(rule: &RbacRule) -> Value {
    let mut it =
        json!({"apiGroups": rule.groups, "resources": rule.resources, "verbs": rule.verbs});
    if !rule.names.is_empty() {
        it["resourceNames"] = json!(rule.names);
    }
    it
}

/// ClusterRoles that extend Kubernetes' default user roles to Rouse's kinds. The names are Knative's, because users may
/// have bound them.
fn users() -> Vec<Value> {
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
        let mut role = cluster_object(RBAC, "ClusterRole", name);
        role["metadata"]["labels"][format!("rbac.authorization.k8s.io/aggregate-to-{to}")] =
            "true".into();
        with(role, json!({"rules": rules}))
    };
    // The aggregation labels add these rules to Kubernetes' own roles, so no binding of users changes.
    let all: Vec<&str> = read.iter().chain(&change).copied().collect();
    vec![
        role("knative-serving-namespaced-admin", "admin", json!([serving(&all), internal])),
        role("knative-serving-namespaced-edit", "edit", json!([serving(&all), internal])),
        role("knative-serving-namespaced-view", "view", json!([serving(&read), internal])),
    ]
}

/// Generates the contents of `docs/rbac.md`.
pub(crate) fn table() -> String {
    let mut text = String::from(
        "# What the parts may do\n\n<!-- Written by `cargo xtask manifests` from rouse/src/install/rbac.rs. -->\n\n\
         Only the controller talks to the API server. The accounts `autoscaler`, `activator` and `rouse-agent` have no rights \
         at all and no token for the API server: they show the controller a token that is good for nothing else.\n",
    );
    for (title, rules) in [
        ("In every namespace", &CLUSTER[..]),
        ("In the cluster itself", &ADMISSION[..]),
        ("In the namespace of the installation", &OWN_NAMESPACE[..]),
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
                rule.why
            ));
        }
    }
    text
}
