//! Pure: the workloads of an installation: three Deployments, the agent's DaemonSet, disruption budgets and
//! autoscaling.

use std::path::Path;

use agent::config::ClusterIpMode;
use clap::ValueEnum as _;
use serde_json::{Value, json};

use super::{
    objects::{merge_fields, namespaced_object},
    settings::{GatewayExposure, InstallSettings, PART_OF_LABEL},
};

/// Port on which the controller serves routes and receives reports.
pub(crate) const CONTROLLER_PORT: u16 = 7100;
/// Port on which the autoscaler receives usage.
pub(crate) const USAGE_PORT: u16 = 7110;
/// Port on which activators exchange slots of services with a hard limit, and get reports of agents.
pub(crate) const PEER_PORT: u16 = 7120;
/// Port on which the controller serves the API server's webhooks.
pub(crate) const WEBHOOK_PORT: u16 = 8443;
/// Port on which an activator receives requests from outside.
pub(crate) const GATEWAY_PORT: u16 = 8080;
/// Port on which an activator receives requests from outside by TLS.
pub(crate) const GATEWAY_TLS_PORT: u16 = 8443;
/// Port on which an activator receives requests of workloads that select a service by Host; Knative's number.
pub(crate) const INTERNAL_PORT: u16 = controller::write::children::slices::INTERNAL_PORT;
/// Mount path of the projected token and of the certificate authorities that a component trusts.
const IDENTITY_MOUNT_PATH: &str = "/var/run/rouse";
/// Folder of the agents' bootstrap files on each node. Local nodes have their folders below `/var/lib/rouse`.
const AGENT_STATE_PATH: &str = "/var/lib/rouse-agent";
/// Path of the kubelet's kubeconfig in an agent's container.
const KUBELET_KUBECONFIG_PATH: &str = "/run/rouse/kubelet.kubeconfig";
/// Termination grace period of an activator, in seconds: Knative's 600 s for its connections, and a margin.
const ACTIVATOR_GRACE_S: u32 = 620;

/// Memory that clients can make an activator use, in MiB, by its default bounds.
const ACTIVATOR_MIB: usize = {
    use activator::budget::{
        DEFAULT_MAX_CONNECTIONS, DEFAULT_REQUEST_BYTES, DEFAULT_RESPONSE_BYTES, memory_mib,
    };
    memory_mib(DEFAULT_REQUEST_BYTES, DEFAULT_RESPONSE_BYTES, DEFAULT_MAX_CONNECTIONS)
};

/// Termination grace period of an agent, in seconds: Knative's default of 300 s per request, and a margin. In it the
/// agent lets pods drain that the kubelet is about to stop; without such pods it ends at once.
const AGENT_GRACE_S: u32 = 320;

/// Port on which a component serves health and metrics.
pub(crate) fn admin_port(app: &str) -> u16 {
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
    let mut objects = vec![
        controller_deployment(settings),
        autoscaler_deployment(settings),
        activator_deployment(settings),
    ];
    objects.push(agent_daemon_set(settings));
    objects.extend(
        ["controller", "autoscaler", "activator"].map(|app| disruption_budget(app, settings)),
    );
    objects.push(activator_autoscaler(settings));
    objects
}

fn env_var(name: &str, value: &str) -> Value {
    json!({"name": name, "value": value})
}

fn field_env_var(name: &str, path: &str) -> Value {
    json!({"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}})
}

/// Address of the replicas of a component: the name of its headless Service. After the first contact they name each
/// other.
fn discovery_address(app: &str, port: u16, settings: &InstallSettings) -> String {
    let InstallSettings { namespace, cluster_domain, .. } = settings;
    format!("dns:rouse-{app}.{namespace}.svc.{cluster_domain}:{port}")
}

/// Environment variables of a component that authenticates to the controller.
fn identity_env(settings: &InstallSettings) -> Vec<Value> {
    vec![
        env_var("ROUSE_IDENTITY", IDENTITY_MOUNT_PATH),
        env_var("ROUSE_CONTROLLER", &discovery_address("controller", CONTROLLER_PORT, settings)),
    ]
}

fn identity_mount() -> Value {
    json!({"name": "identity", "mountPath": IDENTITY_MOUNT_PATH, "readOnly": true})
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
fn component_container(
    app: &str,
    env: Vec<Value>,
    extra: Value,
    settings: &InstallSettings,
) -> Value {
    let mut readiness_probe =
        json!({"httpGet": {"path": "/readyz", "port": admin_port(app)}, "periodSeconds": 2});
    // Readiness changes within seconds; only a minute without a response restarts a component.
    readiness_probe["failureThreshold"] = 3.into();
    // Not `/healthz`: on a node that is about to be deleted, that of the agent fails.
    let mut liveness_probe =
        json!({"httpGet": {"path": "/livez", "port": admin_port(app)}, "periodSeconds": 10});
    liveness_probe["failureThreshold"] = 6.into();
    let container = json!({
        "name": app.trim_start_matches("rouse-"),
        "image": settings.image,
        "imagePullPolicy": "IfNotPresent",
        "args": [app.trim_start_matches("rouse-")],
        "env": env,
        "readinessProbe": readiness_probe,
        "livenessProbe": liveness_probe,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": true,
        },
    });
    merge_fields(container, extra)
}

/// Name of a gateway port in Service and container.
pub(crate) fn gateway_port_name(number: u16) -> String {
    format!("tcp-{number}")
}

/// Container port of a gateway port. Activators listen on it once a service has it.
fn tcp_gateway_port(number: u16, settings: &InstallSettings) -> Value {
    let mut port = container_port(&gateway_port_name(number), number);
    if settings.gateway == GatewayExposure::Hostport {
        port["hostPort"] = number.into();
    }
    port
}

fn container_port(name: &str, number: u16) -> Value {
    json!({"name": name, "containerPort": number, "protocol": "TCP"})
}

/// Pod template with the fields common to all components.
fn pod_template(app: &str, spec: Value) -> Value {
    let mut labels = super::objects::labels(app.trim_start_matches("rouse-"));
    labels["app"] = app.into();
    json!({"metadata": {"labels": labels}, "spec": merge_fields(json!({"serviceAccountName": app}), spec)})
}

/// Deployment with two replicas of a component that needs no access to its node.
fn deployment_object(
    app: &str,
    container: Value,
    spec: Value,
    settings: &InstallSettings,
) -> Value {
    let selector = json!({"app": app});
    // Only pods of the same template count. Otherwise the old pods of a rollout count too: the new ones then may all
    // start on one node, and stay there.
    let spread = json!({
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector},
        "matchLabelKeys": ["pod-template-hash"],
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
        "topologySpreadConstraints": [spread],
    });
    let spec = json!({
        "replicas": 2,
        "selector": {"matchLabels": selector},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": pod_template(app, merge_fields(pod, spec)),
    });
    merge_fields(
        namespaced_object("apps/v1", "Deployment", app, app, settings),
        json!({"spec": spec}),
    )
}

fn resource_requests(cpu: &str, memory: &str) -> Value {
    json!({"requests": {"cpu": cpu, "memory": memory}})
}

fn controller_deployment(settings: &InstallSettings) -> Value {
    let app = "controller";
    let env = vec![
        field_env_var("POD_NAME", "metadata.name"),
        env_var("SYSTEM_NAMESPACE", &settings.namespace),
        env_var("CLUSTER_DOMAIN", &settings.cluster_domain),
        env_var("ROUSE_CONTROLLER_LISTEN", &format!("https://[::]:{CONTROLLER_PORT}")),
        env_var("ROUSE_CONTROLLER_WEBHOOK", &format!("[::]:{WEBHOOK_PORT}")),
        env_var("ROUSE_CONTROLLER_ADMIN", &format!("[::]:{}", admin_port(app))),
    ];
    let extra = json!({
        "ports": [container_port("grpc", CONTROLLER_PORT), container_port("https-webhook", WEBHOOK_PORT), container_port("metrics", admin_port(app))],
        "resources": resource_requests("100m", "64Mi"),
    });
    // The controller is the only component that talks to the API server.
    let spec = json!({"automountServiceAccountToken": true});
    deployment_object(app, component_container(app, env, extra, settings), spec, settings)
}

fn autoscaler_deployment(settings: &InstallSettings) -> Value {
    let app = "autoscaler";
    let mut vars = identity_env(settings);
    vars.extend([
        // Its certificate is issued for the pod's name.
        field_env_var("ROUSE_NAME", "metadata.name"),
        env_var("ROUSE_USAGE", &format!("https://[::]:{USAGE_PORT}")),
        env_var("ROUSE_AUTOSCALER_ADMIN", &format!("[::]:{}", admin_port(app))),
    ]);
    let extra = json!({
        "ports": [container_port("grpc", USAGE_PORT), container_port("metrics", admin_port(app))],
        "resources": resource_requests("50m", "32Mi"),
        "volumeMounts": [identity_mount()],
    });
    let spec = json!({"volumes": [identity_volume()]});
    deployment_object(app, component_container(app, vars, extra, settings), spec, settings)
}

/// Returns the Deployment of the activators.
fn activator_deployment(settings: &InstallSettings) -> Value {
    let app = "activator";
    let mut vars = identity_env(settings);
    vars.extend([
        env_var("ROUSE_AUTOSCALER", &discovery_address("autoscaler", USAGE_PORT, settings)),
        // Its certificate is issued for the pod's name.
        field_env_var("ROUSE_ACTIVATOR_NAME", "metadata.name"),
        field_env_var("ROUSE_NODE", "spec.nodeName"),
        field_env_var("POD_IPS", "status.podIPs"),
        env_var("ROUSE_CLUSTER_DOMAIN", &settings.cluster_domain),
        env_var("ROUSE_ACTIVATOR_OUTSIDE_PORT", &GATEWAY_PORT.to_string()),
        env_var("ROUSE_ACTIVATOR_OUTSIDE_TLS_PORT", &GATEWAY_TLS_PORT.to_string()),
        env_var("ROUSE_ACTIVATOR_INSIDE_PORT", &INTERNAL_PORT.to_string()),
        env_var("ROUSE_ACTIVATOR_PEER_PORT", &PEER_PORT.to_string()),
        env_var("ROUSE_ACTIVATOR_ADMIN", &format!("[::]:{}", admin_port(app))),
    ]);
    let mut gateway = container_port("http", GATEWAY_PORT);
    let mut tls_gateway = container_port("https", GATEWAY_TLS_PORT);
    if settings.gateway == GatewayExposure::Hostport {
        gateway["hostPort"] = 80.into();
        tls_gateway["hostPort"] = 443.into();
    }
    let mut resources = resource_requests("200m", "64Mi");
    resources["limits"] = json!({"memory": format!("{ACTIVATOR_MIB}Mi")});
    let mut ports = vec![
        gateway,
        tls_gateway,
        container_port("http-inside", INTERNAL_PORT),
        container_port("grpc-peers", PEER_PORT),
        container_port("metrics", admin_port(app)),
    ];
    ports.extend(settings.gateway_ports.iter().map(|it| tcp_gateway_port(it.get(), settings)));
    let extra = json!({
        "ports": ports,
        "resources": resources,
        "volumeMounts": [identity_mount()],
    });
    let spec = json!({
        "terminationGracePeriodSeconds": ACTIVATOR_GRACE_S,
        "volumes": [identity_volume()],
    });
    let mut object =
        deployment_object(app, component_container(app, vars, extra, settings), spec, settings);
    // The HorizontalPodAutoscaler sets the replicas; a number here would reset them at each upgrade.
    if let Some(Value::Object(spec)) = object.get_mut("spec") {
        spec.remove("replicas");
    }
    if let Some(lowest) = settings.gateway_ports.iter().min().filter(|it| it.get() < 1024) {
        // Otherwise some container runtimes let no process without privileges open it.
        let sysctl =
            json!({"name": "net.ipv4.ip_unprivileged_port_start", "value": lowest.to_string()});
        object["spec"]["template"]["spec"]["securityContext"]["sysctls"] = json!([sysctl]);
    }
    if settings.gateway == GatewayExposure::Hostport {
        // A node has one port 80 and one port 443, so the old pod must end before the new one starts.
        object["spec"]["strategy"]["rollingUpdate"] = json!({"maxUnavailable": 1, "maxSurge": 0});
    }
    object
}

/// Environment variables by which an agent serves Services of the cluster.
fn clusterip_env(settings: &InstallSettings) -> Vec<Value> {
    let mode = settings.clusterip.to_possible_value();
    let mut vars: Vec<Value> =
        mode.map(|it| env_var("ROUSE_CLUSTERIP", it.get_name())).into_iter().collect();
    vars.push(env_var("ROUSE_STATE", AGENT_STATE_PATH));
    if !settings.apiservers.is_empty() {
        let urls: Vec<String> = settings.apiservers.iter().map(ToString::to_string).collect();
        vars.push(env_var("ROUSE_APISERVERS", &urls.join(",")));
    }
    if settings.kubelet_kubeconfig.is_some() {
        vars.push(env_var("ROUSE_KUBELET_KUBECONFIG", KUBELET_KUBECONFIG_PATH));
    }
    vars.extend(kube_proxy_env(settings));
    vars
}

/// Adds to an agent's pod what it needs to serve Services of the cluster, if it does. Returns all accesses to the host,
/// each with its reason.
fn add_service_access(
    pod: &mut Value,
    settings: &InstallSettings,
) -> Vec<(&'static str, &'static str)> {
    let mut accesses = HOST_ACCESS.to_vec();
    if settings.clusterip != ClusterIpMode::Off {
        // By default no pod of Rouse has a token that it does not need.
        pod["automountServiceAccountToken"] = true.into();
        add_agent_state(pod);
        accesses.push(STATE_ACCESS);
    }
    if let Some(path) = &settings.kubelet_kubeconfig {
        add_kubelet_kubeconfig(pod, path);
        accesses.push(KUBELET_KUBECONFIG_ACCESS);
    }
    accesses
}

/// Adds the folder of bootstrap files to a pod with one container. The kubelet makes it on the node.
fn add_agent_state(pod: &mut Value) {
    let volume = json!({
        "name": "state", "hostPath": {"path": AGENT_STATE_PATH, "type": "DirectoryOrCreate"},
    });
    let mount = json!({"name": "state", "mountPath": AGENT_STATE_PATH});
    push_item(&mut pod["volumes"], volume);
    push_item(&mut pod["containers"][0]["volumeMounts"], mount);
}

/// Adds the kubelet's kubeconfig to a pod with one container. A node without the file cannot start the pod.
fn add_kubelet_kubeconfig(pod: &mut Value, path: &Path) {
    let volume = json!({"name": "kubelet-kubeconfig", "hostPath": {"path": path, "type": "File"}});
    let mount = json!({
        "name": "kubelet-kubeconfig", "mountPath": KUBELET_KUBECONFIG_PATH, "readOnly": true,
    });
    push_item(&mut pod["volumes"], volume);
    push_item(&mut pod["containers"][0]["volumeMounts"], mount);
}

/// Appends an item to a list that is not empty.
fn push_item(list: &mut Value, item: Value) {
    list.as_array_mut().expect("an agent has volumes, mounts and settings").push(item);
}

/// Environment variables of an agent in a cluster without kube-proxy.
fn kube_proxy_env(settings: &InstallSettings) -> Vec<Value> {
    if !settings.without_kube_proxy {
        return Vec::new();
    }
    let ranges: Vec<String> = settings.service_cidr.iter().map(ToString::to_string).collect();
    let ranges = Some(ranges.join(",")).filter(|it| !it.is_empty());
    let mut vars = vec![env_var("ROUSE_WITHOUT_KUBE_PROXY", "true")];
    vars.extend(ranges.map(|it| env_var("ROUSE_SERVICE_CIDR", &it)));
    vars
}

/// Returns the DaemonSet of the agents, with the accesses to the host that they need.
fn agent_daemon_set(settings: &InstallSettings) -> Value {
    let app = "rouse-agent";
    let mut vars = identity_env(settings);
    vars.extend([
        env_var("ROUSE_AUTOSCALER", &discovery_address("autoscaler", USAGE_PORT, settings)),
        field_env_var("ROUSE_NODE", "spec.nodeName"),
        env_var("ROUSE_ACTIVATOR_PEER_PORT", &PEER_PORT.to_string()),
        env_var("ROUSE_ADMIN", &format!("[::]:{}", admin_port(app))),
    ]);
    let watches_services = settings.clusterip != ClusterIpMode::Off;
    if watches_services {
        vars.extend(clusterip_env(settings));
    }
    if !settings.map_sizes.is_empty() {
        vars.push(env_var("ROUSE_MAP_SIZES", &settings.map_sizes.to_string()));
    }
    // The kernel's maps count to the agent's memory.
    let memory = if settings.clusterip == ClusterIpMode::All { "80Mi" } else { "32Mi" };
    let needs: Vec<&str> = agent::CAPABILITIES.iter().map(|(name, _)| *name).collect();
    let mount = |name: &str, path: &str| {
        // Mounts that the host adds later must be visible in the pod too.
        json!({"name": name, "mountPath": path, "mountPropagation": "HostToContainer"})
    };
    let extra = json!({
        "ports": [container_port("metrics", admin_port(app))],
        "resources": resource_requests("50m", memory),
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
    let mut pod = json!({
        "hostNetwork": true,
        "hostPID": true,
        // A pod on the host's network still needs the names of Services.
        "dnsPolicy": "ClusterFirstWithHostNet",
        "priorityClassName": "system-node-critical",
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": AGENT_GRACE_S,
        "containers": [component_container(app, vars, extra, settings)],
        "volumes": [identity_volume(), host("bpf", "/sys/fs/bpf"), host("cgroup", "/sys/fs/cgroup")],
    });
    let accesses = add_service_access(&mut pod, settings);
    let mut object = namespaced_object("apps/v1", "DaemonSet", app, "agent", settings);
    let reasons = agent::CAPABILITIES.iter().map(|(name, reason)| format!("{name}: {reason}"));
    let mut reasons: Vec<String> = reasons.collect();
    reasons.extend(accesses.iter().map(|(name, reason)| format!("{name}: {reason}")));
    object["metadata"]["annotations"] = json!({"rouse.dev/needs": reasons.join("\n")});
    let spec = json!({
        "selector": {"matchLabels": {"app": app}},
        // Pinned programs and maps stay in force between two agents.
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
        "template": pod_template(app, pod),
    });
    merge_fields(object, json!({"spec": spec}))
}

/// DaemonSet that replaces the agents' to uninstall: it removes their pins, bootstrap files and routes once, and then
/// idles to show that it is done.
pub(crate) fn agent_removal_daemon_set(settings: &InstallSettings) -> Value {
    // The mode of the installation is not known here, and each node may have a state folder. In mode off the object is
    // without it, so that it is added once below.
    let mode_off = InstallSettings { clusterip: ClusterIpMode::Off, ..settings.clone() };
    let mut object = agent_daemon_set(&mode_off);
    let pod = &mut object["spec"]["template"]["spec"];
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
    pod["containers"] = json!([container]);
    add_agent_state(pod);
    container = pod["containers"][0].take();
    let state = env_var("ROUSE_STATE", AGENT_STATE_PATH);
    push_item(&mut container["env"], state);
    let mut idle_container = container.clone();
    idle_container["args"] = json!(["agent-removed"]);
    container["name"] = "remove".into();
    pod["initContainers"] = json!([container]);
    pod["containers"] = json!([idle_container]);
    // No agent serves any more, so all nodes can be cleaned at once.
    object["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"] = "100%".into();
    object
}

/// Access to the host that the agent has, and the reason for each.
const HOST_ACCESS: [(&str, &str); 5] = [
    (
        "hostNetwork",
        "looks at the node's own addresses and sockets, and tells the kubelet's probes by them",
    ),
    ("hostPID", "opens /proc/PID/ns/net of pods"),
    ("user 0", "owns the files below /sys/fs/bpf and /sys/fs/cgroup that it makes"),
    ("/sys/fs/bpf", "pins programs and maps, so that routes go on while no agent runs"),
    ("/sys/fs/cgroup", "attaches programs to the pods' cgroup"),
];

/// Access to the host that agents have if they serve Services of the cluster, and the reason for it.
const STATE_ACCESS: (&str, &str) =
    (AGENT_STATE_PATH, "remembers what it needs after a reboot before an API server answers");

/// Access to the host that agents have with the kubelet's kubeconfig, and the reason for it.
const KUBELET_KUBECONFIG_ACCESS: (&str, &str) =
    ("the kubelet's kubeconfig", "asks the API server that this node's kubelet asks");

/// Disruption budget by which one replica goes at a time, however many nodes are drained at once.
fn disruption_budget(app: &str, settings: &InstallSettings) -> Value {
    let budget = namespaced_object("policy/v1", "PodDisruptionBudget", app, app, settings);
    let spec = json!({
        "maxUnavailable": 1,
        "selector": {"matchLabels": {"app": app}},
        // A replica that is not ready serves nothing, so its eviction costs nothing.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    });
    merge_fields(budget, json!({"spec": spec}))
}

fn activator_autoscaler(settings: &InstallSettings) -> Value {
    let target = json!({"type": "Utilization", "averageUtilization": 100});
    let spec = json!({
        // Two, so that requests can wait while one activator restarts.
        "minReplicas": 2,
        "maxReplicas": 20,
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "activator"},
    });
    let scaler = namespaced_object(
        "autoscaling/v2",
        "HorizontalPodAutoscaler",
        "activator",
        "activator",
        settings,
    );
    merge_fields(scaler, json!({"spec": spec}))
}

/// Kind and name of each workload, in the order in which they become ready.
pub(crate) const WORKLOADS: [(&str, &str); 4] = [
    ("Deployment", "controller"),
    ("Deployment", "autoscaler"),
    ("Deployment", "activator"),
    ("DaemonSet", "rouse-agent"),
];

/// Returns true if the agents of a DaemonSet serve a cluster without kube-proxy.
pub(crate) fn is_without_kube_proxy(agents: &Value) -> bool {
    agent_variable(agents, "ROUSE_WITHOUT_KUBE_PROXY") == Some("true")
}

/// Returns the value of an environment variable of the agents of a DaemonSet.
pub(crate) fn agent_variable<'a>(agents: &'a Value, name: &str) -> Option<&'a str> {
    let containers = agents["spec"]["template"]["spec"]["containers"].as_array();
    let variables = containers.into_iter().flatten().filter_map(|it| it["env"].as_array());
    variables.flatten().find(|it| it["name"] == name)?["value"].as_str()
}

/// Returns true if an object belongs to an installation of Rouse, by its label.
pub(crate) fn is_rouse_object(object: &Value) -> bool {
    object["metadata"]["labels"][PART_OF_LABEL.0] == PART_OF_LABEL.1
}
