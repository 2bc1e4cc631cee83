//! Pure: the workloads of an installation: three Deployments, the agent's DaemonSet, disruption budgets and
//! autoscaling.

use serde_json::{Value, json};

use super::{
    objects::{object, with},
    settings::{GatewayExposure, InstallSettings, PART_OF},
};

/// Port on which the controller serves routes and receives reports.
pub(crate) const STREAMS: u16 = 7100;
/// Port on which the autoscaler receives usage.
pub(crate) const USAGE: u16 = 7110;
/// Port on which activators exchange slots of services with a hard limit.
pub(crate) const PEERS: u16 = 7120;
/// Port on which the controller serves the API server's webhooks.
pub(crate) const WEBHOOK: u16 = 8443;
/// Port on which an activator receives requests from outside.
pub(crate) const GATEWAY: u16 = 8080;
/// Port on which an activator receives requests of workloads that select a service by Host; Knative's number.
pub(crate) const INSIDE: u16 = controller::children::slices::INSIDE;
/// Mount path of the projected token and of the certificate authorities that a component trusts.
const IDENTITY: &str = "/var/run/rouse";
/// Termination grace period of an activator, in seconds: Knative's 600 s for its connections, and a margin.
const ACTIVATOR_GRACE_S: u32 = 620;

/// Memory that clients can make an activator use, in MiB, by its default bounds.
const ACTIVATOR_MIB: usize = {
    use activator::budget::{BYTES, CONNECTIONS, DEFAULT_RESPONSE_BYTES, memory_mib};
    memory_mib(BYTES, DEFAULT_RESPONSE_BYTES, CONNECTIONS)
};

/// Termination grace period of an agent, in seconds: Knative's default of 300 s per request, and a margin. In it the
/// agent lets pods drain that the kubelet is about to stop; without such pods it ends at once.
const AGENT_GRACE_S: u32 = 320;

/// Port on which a component serves health and metrics.
pub(crate) fn admin(app: &str) -> u16 {
    match app {
        "controller" => 7101,
        "autoscaler" => 7102,
        "activator" => 7103,
        _ => 7104,
    }
}

/// All workloads of an installation, with their disruption budgets and the activators' autoscaler.
pub(crate) fn all(settings: &InstallSettings) -> Vec<Value> {
    // The controller first: all other components wait for its authorities.
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

/// Address of the replicas of a component: the name of its headless Service. After the first contact they name each
/// other.
fn replicas(of: &str, port: u16, settings: &InstallSettings) -> String {
    let InstallSettings { namespace, cluster_domain, .. } = settings;
    format!("dns:rouse-{of}.{namespace}.svc.{cluster_domain}:{port}")
}

/// Environment variables of a component that authenticates to the controller.
fn identified(settings: &InstallSettings) -> Vec<Value> {
    vec![
        env("ROUSE_IDENTITY", IDENTITY),
        env("ROUSE_CONTROLLER", &replicas("controller", STREAMS, settings)),
    ]
}

fn identity_mount() -> Value {
    json!({"name": "identity", "mountPath": IDENTITY, "readOnly": true})
}

/// Volume with a token that only the controller accepts, and the certificate authorities. The controller creates the
/// ConfigMap. It is not optional: the kubelet retries a failed mount sooner than it refreshes an optional one.
fn identity_volume() -> Value {
    let token = json!({"audience": "rouse", "expirationSeconds": 3600, "path": "token"});
    let ca = json!({"name": "rouse-authorities", "items": [{"key": "ca.pem", "path": "ca.pem"}]});
    json!({
        "name": "identity",
        "projected": {"defaultMode": 0o440, "sources": [{"serviceAccountToken": token}, {"configMap": ca}]},
    })
}

/// Container that runs one component.
fn container(app: &str, env: Vec<Value>, more: Value, settings: &InstallSettings) -> Value {
    let mut probe = json!({"httpGet": {"path": "/readyz", "port": admin(app)}, "periodSeconds": 2});
    // Readiness changes within seconds; only a minute without an answer restarts a component.
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

/// Pod template with the fields common to all components.
fn template(app: &str, spec: Value) -> Value {
    let mut labels = super::objects::labels(app.trim_start_matches("rouse-"));
    labels["app"] = app.into();
    json!({"metadata": {"labels": labels}, "spec": with(json!({"serviceAccountName": app}), spec)})
}

/// Deployment with two replicas of a component that needs no access to its node.
fn deployment(app: &str, container: Value, spec: Value, settings: &InstallSettings) -> Value {
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
            // Group of the mounted token, so that the unprivileged user can read it.
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

fn controller(settings: &InstallSettings) -> Value {
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
    // The controller is the only component that talks to the API server.
    let spec = json!({"automountServiceAccountToken": true});
    deployment(app, container(app, env, more, settings), spec, settings)
}

fn autoscaler(settings: &InstallSettings) -> Value {
    let app = "autoscaler";
    let mut vars = identified(settings);
    vars.extend([
        // Its certificate is issued for the pod's name.
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

fn activator(settings: &InstallSettings) -> Value {
    let app = "activator";
    let mut vars = identified(settings);
    vars.extend([
        env("ROUSE_AUTOSCALER", &replicas("autoscaler", USAGE, settings)),
        // Its certificate is issued for the pod's name.
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
    if settings.gateway == GatewayExposure::Hostport {
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
    // The HorizontalPodAutoscaler sets the replicas; a number here would reset them at each upgrade.
    if let Some(Value::Object(spec)) = whole.get_mut("spec") {
        spec.remove("replicas");
    }
    if settings.gateway == GatewayExposure::Hostport {
        // A node has one port 80, so the old pod must end before the new one starts.
        whole["spec"]["strategy"]["rollingUpdate"] = json!({"maxUnavailable": 1, "maxSurge": 0});
    }
    whole
}

fn agent(settings: &InstallSettings) -> Value {
    let app = "rouse-agent";
    let mut vars = identified(settings);
    vars.extend([
        env("ROUSE_AUTOSCALER", &replicas("autoscaler", USAGE, settings)),
        field("ROUSE_NODE", "spec.nodeName"),
        env("ROUSE_ADMIN", &format!("[::]:{}", admin(app))),
    ]);
    let needs: Vec<&str> = agent::CAPABILITIES.iter().map(|(name, _)| *name).collect();
    let mount = |name: &str, path: &str| {
        // Mounts that the host adds later must be visible in the pod too.
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
            // The default profiles deny bpf(2) and setns(2).
            "seccompProfile": {"type": "Unconfined"},
            "appArmorProfile": {"type": "Unconfined"},
        },
        "volumeMounts": [identity_mount(), mount("bpf", "/sys/fs/bpf"), mount("cgroup", "/sys/fs/cgroup")],
    });
    let host = |name: &str, path: &str| json!({"name": name, "hostPath": {"path": path, "type": "Directory"}});
    let pod = json!({
        "hostNetwork": true,
        "hostPID": true,
        // A pod on the host's network still needs the names of Services.
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
        // Pinned programs and maps stay in force between two agents.
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
        "template": template(app, pod),
    });
    with(whole, json!({"spec": spec}))
}

/// DaemonSet that replaces the agents' to uninstall: it removes their pins once, and then idles to show that it is
/// done.
pub(crate) fn agent_remover(settings: &InstallSettings) -> Value {
    let mut whole = agent(settings);
    let pod = &mut whole["spec"]["template"]["spec"];
    let mut container = pod["containers"][0].take();
    container["args"] = json!(["agent-remove"]);
    if let Value::Object(fields) = &mut container {
        for field in ["readinessProbe", "livenessProbe", "ports"] {
            fields.remove(field);
        }
        // The controller is already removed, so there are no authorities to mount.
        fields.remove("volumeMounts");
    }
    container["volumeMounts"] =
        json!([{"name": "bpf", "mountPath": "/sys/fs/bpf", "mountPropagation": "HostToContainer"}]);
    let mut stays = container.clone();
    stays["args"] = json!(["agent-removed"]);
    container["name"] = "remove".into();
    pod["initContainers"] = json!([container]);
    pod["containers"] = json!([stays]);
    // No agent serves any more, so all nodes can be cleaned at once.
    whole["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"] = "100%".into();
    whole
}

/// Access to the host that the agent has, and the reason for each.
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

/// Disruption budget by which one replica goes at a time, however many nodes are drained at once.
fn budget(app: &str, settings: &InstallSettings) -> Value {
    let budget = object("policy/v1", "PodDisruptionBudget", app, app, settings);
    let spec = json!({
        "maxUnavailable": 1,
        "selector": {"matchLabels": {"app": app}},
        // A replica that is not ready serves nothing, so its eviction costs nothing.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    });
    with(budget, json!({"spec": spec}))
}

fn more_activators(settings: &InstallSettings) -> Value {
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

/// Kind and name of each workload, in the order in which they become ready.
pub(crate) const ALL: [(&str, &str); 4] = [
    ("Deployment", "controller"),
    ("Deployment", "autoscaler"),
    ("Deployment", "activator"),
    ("DaemonSet", "rouse-agent"),
];

/// Returns true if an object belongs to an installation of Rouse, by its label.
pub(crate) fn is_ours(object: &Value) -> bool {
    object["metadata"]["labels"][PART_OF.0] == PART_OF.1
}
