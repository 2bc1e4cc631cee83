//! Pure: the pods of an installation: three Deployments and the agent's DaemonSet, and what keeps enough of them.

use serde_json::{Value, json};

use super::{
    objects::{object, with},
    settings::{Gateway, PART_OF, Settings},
};

/// Where the controller serves routes and takes reports.
pub(crate) const STREAMS: u16 = 7100;
/// Where the autoscaler takes usage.
pub(crate) const USAGE: u16 = 7110;
/// Where activators hand slots of services with a hard limit to each other.
pub(crate) const PEERS: u16 = 7120;
/// Where the controller answers the API server.
pub(crate) const WEBHOOK: u16 = 8443;
/// Where an activator takes requests from outside.
pub(crate) const GATEWAY: u16 = 8080;
/// Where it takes those of workloads that name a service by Host; Knative's number.
pub(crate) const INSIDE: u16 = controller::children::slices::INSIDE;
/// The projected token and the authorities that a part trusts.
const IDENTITY: &str = "/var/run/rouse";
/// What an activator may take to hand over its connections: Knative's 600 s, and a little to end.
const ACTIVATOR_GRACE_S: u32 = 620;

/// What clients can make an activator take, by the bounds that it has where nothing else is said.
const ACTIVATOR_MIB: usize = {
    use activator::budget::{ANSWER_BYTES, BYTES, CONNECTIONS, memory_mib};
    memory_mib(BYTES, ANSWER_BYTES, CONNECTIONS)
};

/// What an agent may take to see off the pods that the kubelet is about to stop: Knative's default of 300 s a request,
/// and a little to end. It ends at once where there are none.
const AGENT_GRACE_S: u32 = 320;

/// Where a part serves health and metrics.
pub(crate) fn admin(app: &str) -> u16 {
    match app {
        "controller" => 7101,
        "autoscaler" => 7102,
        "activator" => 7103,
        _ => 7104,
    }
}

/// All of them.
pub(crate) fn all(settings: &Settings) -> Vec<Value> {
    let mut all = vec![controller(settings), autoscaler(settings), activator(settings)];
    all.push(agent(settings));
    all.extend(["controller", "autoscaler", "activator"].map(|app| budget(app, settings)));
    all.push(more_activators(settings));
    all
}

fn env(name: &str, value: &str) -> Value {
    json!({"name": name, "value": value})
}

fn field(name: &str, path: &str) -> Value {
    json!({"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}})
}

/// Replicas are found by the name of their headless Service; after the first contact they name each other.
fn replicas(of: &str, port: u16, settings: &Settings) -> String {
    let Settings { namespace, cluster_domain, .. } = settings;
    format!("dns:rouse-{of}.{namespace}.svc.{cluster_domain}:{port}")
}

/// What each part that shows who it is must be told.
fn identified(settings: &Settings) -> Vec<Value> {
    vec![
        env("ROUSE_IDENTITY", IDENTITY),
        env("ROUSE_CONTROLLER", &replicas("controller", STREAMS, settings)),
    ]
}

fn identity_mount() -> Value {
    json!({"name": "identity", "mountPath": IDENTITY, "readOnly": true})
}

/// A token that only the controller takes, and whose certificates to trust. The ConfigMap is the controller's own:
/// until it is there the kubelet tries again, sooner than it would look for one that may be missing.
fn identity_volume() -> Value {
    let token = json!({"audience": "rouse", "expirationSeconds": 3600, "path": "token"});
    let ca = json!({"name": "rouse-authorities", "items": [{"key": "ca.pem", "path": "ca.pem"}]});
    json!({
        "name": "identity",
        "projected": {"defaultMode": 0o440, "sources": [{"serviceAccountToken": token}, {"configMap": ca}]},
    })
}

/// A container that runs one part.
fn container(app: &str, env: Vec<Value>, more: Value, settings: &Settings) -> Value {
    let mut probe = json!({"httpGet": {"path": "/readyz", "port": admin(app)}, "periodSeconds": 2});
    probe["failureThreshold"] = 3.into();
    let mut live =
        json!({"httpGet": {"path": "/healthz", "port": admin(app)}, "periodSeconds": 10});
    live["failureThreshold"] = 6.into();
    let container = json!({
        "name": app.trim_start_matches("rouse-"),
        "image": settings.image,
        "imagePullPolicy": "IfNotPresent",
        "args": [app.trim_start_matches("rouse-")],
        "env": env,
        "readinessProbe": probe,
        "livenessProbe": live,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": true,
        },
    });
    with(container, more)
}

fn port(name: &str, number: u16) -> Value {
    json!({"name": name, "containerPort": number, "protocol": "TCP"})
}

/// What a pod's template says whichever part it runs.
fn template(app: &str, spec: Value) -> Value {
    let mut labels = super::objects::labels(app.trim_start_matches("rouse-"));
    labels["app"] = app.into();
    json!({"metadata": {"labels": labels}, "spec": with(json!({"serviceAccountName": app}), spec)})
}

/// Two replicas of a part that needs nothing of the node.
fn deployment(app: &str, container: Value, spec: Value, settings: &Settings) -> Value {
    let selector = json!({"app": app});
    let apart = json!({
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector},
    });
    let pod = json!({
        "containers": [container],
        "priorityClassName": "system-cluster-critical",
        "securityContext": {
            "runAsNonRoot": true,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            // So that the token may be read.
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [apart],
    });
    let body = json!({
        "replicas": 2,
        "selector": {"matchLabels": selector},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": template(app, with(pod, spec)),
    });
    with(object("apps/v1", "Deployment", app, app, settings), json!({"spec": body}))
}

fn requests(cpu: &str, memory: &str) -> Value {
    json!({"requests": {"cpu": cpu, "memory": memory}})
}

fn controller(settings: &Settings) -> Value {
    let app = "controller";
    let env = vec![
        field("POD_NAME", "metadata.name"),
        env("SYSTEM_NAMESPACE", &settings.namespace),
        env("CLUSTER_DOMAIN", &settings.cluster_domain),
        env("ROUSE_CONTROLLER_LISTEN", &format!("https://[::]:{STREAMS}")),
        env("ROUSE_CONTROLLER_WEBHOOK", &format!("[::]:{WEBHOOK}")),
        env("ROUSE_CONTROLLER_ADMIN", &format!("[::]:{}", admin(app))),
    ];
    let more = json!({
        "ports": [port("grpc", STREAMS), port("https-webhook", WEBHOOK), port("metrics", admin(app))],
        "resources": requests("100m", "64Mi"),
    });
    // The only part that talks to the API server.
    let spec = json!({"automountServiceAccountToken": true});
    deployment(app, container(app, env, more, settings), spec, settings)
}

fn autoscaler(settings: &Settings) -> Value {
    let app = "autoscaler";
    let mut vars = identified(settings);
    vars.extend([
        // Its pod's name, under which its certificate is made out.
        field("ROUSE_NAME", "metadata.name"),
        env("ROUSE_USAGE", &format!("https://[::]:{USAGE}")),
        env("ROUSE_AUTOSCALER_ADMIN", &format!("[::]:{}", admin(app))),
    ]);
    let more = json!({
        "ports": [port("grpc", USAGE), port("metrics", admin(app))],
        "resources": requests("50m", "32Mi"),
        "volumeMounts": [identity_mount()],
    });
    let spec = json!({"volumes": [identity_volume()]});
    deployment(app, container(app, vars, more, settings), spec, settings)
}

fn activator(settings: &Settings) -> Value {
    let app = "activator";
    let mut vars = identified(settings);
    vars.extend([
        env("ROUSE_AUTOSCALER", &replicas("autoscaler", USAGE, settings)),
        // Its pod's name, under which its certificate is made out.
        field("ROUSE_ACTIVATOR_NAME", "metadata.name"),
        field("ROUSE_NODE", "spec.nodeName"),
        field("POD_IPS", "status.podIPs"),
        env("ROUSE_CLUSTER_DOMAIN", &settings.cluster_domain),
        env("ROUSE_ACTIVATOR_OUTSIDE_PORT", &GATEWAY.to_string()),
        env("ROUSE_ACTIVATOR_INSIDE_PORT", &INSIDE.to_string()),
        env("ROUSE_ACTIVATOR_PEER_PORT", &PEERS.to_string()),
        env("ROUSE_ACTIVATOR_ADMIN", &format!("[::]:{}", admin(app))),
    ]);
    let mut gateway = port("http", GATEWAY);
    if settings.gateway == Gateway::Hostport {
        gateway["hostPort"] = 80.into();
    }
    let mut resources = requests("200m", "64Mi");
    resources["limits"] = json!({"memory": format!("{ACTIVATOR_MIB}Mi")});
    let more = json!({
        "ports": [
            gateway,
            port("http-inside", INSIDE),
            port("grpc-peers", PEERS),
            port("metrics", admin(app)),
        ],
        "resources": resources,
        "volumeMounts": [identity_mount()],
    });
    let spec = json!({
        "terminationGracePeriodSeconds": ACTIVATOR_GRACE_S,
        "volumes": [identity_volume()],
    });
    let mut whole = deployment(app, container(app, vars, more, settings), spec, settings);
    // The autoscaler of pods decides on these; a number here would undo that at each upgrade.
    if let Some(Value::Object(spec)) = whole.get_mut("spec") {
        spec.remove("replicas");
    }
    if settings.gateway == Gateway::Hostport {
        // A node has one port 80: the one that leaves makes room first.
        whole["spec"]["strategy"]["rollingUpdate"] = json!({"maxUnavailable": 1, "maxSurge": 0});
    }
    whole
}

fn agent(settings: &Settings) -> Value {
    let app = "rouse-agent";
    let mut vars = identified(settings);
    vars.extend([
        env("ROUSE_AUTOSCALER", &replicas("autoscaler", USAGE, settings)),
        field("ROUSE_NODE", "spec.nodeName"),
        env("ROUSE_ADMIN", &format!("[::]:{}", admin(app))),
    ]);
    let needs: Vec<&str> = agent::CAPABILITIES.iter().map(|(name, _)| *name).collect();
    let mount = |name: &str, path: &str| {
        // What the host mounts later below is seen too.
        json!({"name": name, "mountPath": path, "mountPropagation": "HostToContainer"})
    };
    let more = json!({
        "ports": [port("metrics", admin(app))],
        "resources": requests("50m", "32Mi"),
        "securityContext": {
            "runAsUser": 0,
            "allowPrivilegeEscalation": false,
            "capabilities": {"drop": ["ALL"], "add": needs},
            "readOnlyRootFilesystem": true,
            // The usual profiles refuse bpf(2) and setns(2).
            "seccompProfile": {"type": "Unconfined"},
            "appArmorProfile": {"type": "Unconfined"},
        },
        "volumeMounts": [identity_mount(), mount("bpf", "/sys/fs/bpf"), mount("cgroup", "/sys/fs/cgroup")],
    });
    let host = |name: &str, path: &str| json!({"name": name, "hostPath": {"path": path, "type": "Directory"}});
    let pod = json!({
        "hostNetwork": true,
        "hostPID": true,
        // Names of Services from the host's network.
        "dnsPolicy": "ClusterFirstWithHostNet",
        "priorityClassName": "system-node-critical",
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": AGENT_GRACE_S,
        "containers": [container(app, vars, more, settings)],
        "volumes": [identity_volume(), host("bpf", "/sys/fs/bpf"), host("cgroup", "/sys/fs/cgroup")],
    });
    let mut whole = object("apps/v1", "DaemonSet", app, "agent", settings);
    let reasons = agent::CAPABILITIES.iter().map(|(name, why)| format!("{name}: {why}"));
    let mut reasons: Vec<String> = reasons.collect();
    reasons.extend(HOST.iter().map(|(name, why)| format!("{name}: {why}")));
    whole["metadata"]["annotations"] = json!({"rouse.dev/needs": reasons.join("\n")});
    let spec = json!({
        "selector": {"matchLabels": {"app": app}},
        // Programs and maps are pinned and go on between two agents.
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
        "template": template(app, pod),
    });
    with(whole, json!({"spec": spec}))
}

/// In the agents' place: removes what they pinned, once, and then stands there so that one can see that it is done.
pub(crate) fn agent_remover(settings: &Settings) -> Value {
    let mut whole = agent(settings);
    let pod = &mut whole["spec"]["template"]["spec"];
    let mut container = pod["containers"][0].take();
    container["args"] = json!(["agent-remove"]);
    if let Value::Object(fields) = &mut container {
        for field in ["readinessProbe", "livenessProbe", "ports"] {
            fields.remove(field);
        }
        // Nobody is left to say whom to trust.
        fields.remove("volumeMounts");
    }
    container["volumeMounts"] =
        json!([{"name": "bpf", "mountPath": "/sys/fs/bpf", "mountPropagation": "HostToContainer"}]);
    let mut stays = container.clone();
    stays["args"] = json!(["agent-removed"]);
    container["name"] = "remove".into();
    pod["initContainers"] = json!([container]);
    pod["containers"] = json!([stays]);
    whole["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"] = "100%".into();
    whole
}

/// What of the host the agent sees, and why.
const HOST: [(&str, &str); 5] = [
    (
        "hostNetwork",
        "looks at the node's own addresses and sockets, and tells the kubelet's probes by them",
    ),
    ("hostPID", "opens /proc/PID/ns/net of pods"),
    ("user 0", "owns the files below /sys/fs/bpf and /sys/fs/cgroup that it makes"),
    ("/sys/fs/bpf", "pins programs and maps, so that routes go on while no agent runs"),
    ("/sys/fs/cgroup", "attaches programs to the pods' cgroup"),
];

/// However many nodes are emptied at once, one replica goes at a time.
fn budget(app: &str, settings: &Settings) -> Value {
    let budget = object("policy/v1", "PodDisruptionBudget", app, app, settings);
    let spec = json!({
        "maxUnavailable": 1,
        "selector": {"matchLabels": {"app": app}},
        // One that is not ready protects nobody.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    });
    with(budget, json!({"spec": spec}))
}

fn more_activators(settings: &Settings) -> Value {
    let target = json!({"type": "Utilization", "averageUtilization": 100});
    let spec = json!({
        "minReplicas": 2,
        "maxReplicas": 20,
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "activator"},
    });
    let scaler =
        object("autoscaling/v2", "HorizontalPodAutoscaler", "activator", "activator", settings);
    with(scaler, json!({"spec": spec}))
}

/// Names of the pods' controllers, in the order in which they become ready: kind, name.
pub(crate) const ALL: [(&str, &str); 4] = [
    ("Deployment", "controller"),
    ("Deployment", "autoscaler"),
    ("Deployment", "activator"),
    ("DaemonSet", "rouse-agent"),
];

/// Whether an object is of an installation of Rouse.
pub(crate) fn is_ours(object: &Value) -> bool {
    object["metadata"]["labels"][PART_OF.0] == PART_OF.1
}
